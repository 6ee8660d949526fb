"""`onepass.tune` without a GPU: its logic on contenders of known speed, which a fake machine compiles and runs."""

import dataclasses
import gc
import random

import pytest
import torch
import tuning_fakes
from tuning_fakes import GPU, PROBLEM, TASK, USUAL, FakeRuns, machine, samples_of_a_race

from onepass.api import fast_path
from onepass.dispatch import attention as dispatch
from onepass.kernels.config import HOPPER, BackwardConfigSm90, ForwardConfigSm90
from onepass.kernels.heuristics import chooser, tuned
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.problem import AttentionProblem, Mask
from onepass.tuning import launches, race, tuner
from onepass.tuning.result import Progress, changes, summary
from onepass.tuning.space import MAX_CANDIDATES, candidates
from onepass.tuning.timing import Samples


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(gc, "collect", lambda: 0)  # it precedes each measurement, and there are many imagined ones here
    yield from tuning_fakes.own_cache(monkeypatch, tmp_path)


def tune(runs, tasks=(TASK,), failed=(), **options):
    return tuner.tune_all(tasks, machine(runs, failed), **options)


def used(monkeypatch, problem=PROBLEM, backend="sm90", direction="fwd"):
    """The configuration that a call on the imagined GPU runs with."""
    monkeypatch.setattr(tuned, "gpu_name", lambda device=None: GPU)
    return tuned.choose(direction, backend, problem, HOPPER)


def test_the_fastest_is_kept_and_used(monkeypatch):
    best = candidates(*TASK, HOPPER)[7]
    (result,) = tune(FakeRuns(lambda config: 0.9 if config == best else 1.0 if config == USUAL else 1.2, 0.002))
    assert (result.config, result.heuristic) == (best, USUAL)
    assert result.kept
    assert result.is_gain
    assert result.speedup == pytest.approx(1 / 0.9, rel=0.005)
    assert used(monkeypatch) == best
    assert result.candidates[0].config == USUAL
    assert result.candidates[1].config == best
    assert result.candidates[1].changes == changes(USUAL, best) != ""


def test_calls_that_are_prepared_already_use_it(monkeypatch):
    best = candidates(*TASK, HOPPER)[7]
    assert used(monkeypatch) == USUAL
    forgotten = []
    monkeypatch.setattr(dispatch, "forget_prepared", lambda: forgotten.append("prepared"))
    monkeypatch.setattr(fast_path, "forget", lambda: forgotten.append("repeated"))
    tune(FakeRuns(lambda config: 1.0 - 0.1 * (config == best)))
    assert used(monkeypatch) == best
    assert forgotten == ["prepared", "repeated"]


@pytest.mark.parametrize("seed", range(10))
def test_noise_alone_wins_nothing(monkeypatch, seed):
    """All are as fast as the heuristics' choice, and every sample is off by 3 %."""
    runs = FakeRuns(lambda config: 1.0, 0.03)
    runs.random.seed(seed)
    (result,) = tune(runs)
    assert result.config == USUAL
    assert (result.speedup, result.kept) == (1.0, True)
    assert used(monkeypatch) == USUAL


@pytest.mark.parametrize("seed", range(10))
def test_what_is_slower_never_wins(seed):
    """The winner is at least as fast as the heuristics' choice, whatever the noise."""
    speeds = random.Random(seed)
    ms = {config.text: speeds.uniform(0.97, 1.3) for config in candidates(*TASK, HOPPER)}
    runs = FakeRuns(lambda config: ms[config.text], noise=speeds.choice((0.0, 0.01, 0.05)))
    (result,) = tune(runs)
    assert ms[result.config.text] <= ms[USUAL.text]


def test_a_drifting_machine_wins_nothing():
    """The machine may be twice as slow from one round to the next: ratios are taken within a round."""
    clock = iter(range(10**6))
    (result,) = tune(FakeRuns(lambda config: 1.0 + next(clock) // 40 % 2))
    assert not result.is_gain


def test_a_margin_is_asked_for():
    usual, rounds = [1.0] * 9, 9
    for ms, wins in ((0.985, True), (0.995, False)):
        final = Samples({"usual": usual, race.AGAIN: usual, "other": [ms] * rounds})
        assert (race.decide(final, "usual")[0] == "other") == wins
    # 2 % faster in the median, and slower in three rounds of nine
    wild = [0.98] * 6 + [1.1] * 3
    assert race.decide(Samples({"usual": usual, race.AGAIN: usual, "other": wild}), "usual")[0] == "usual"
    # 4 % faster, where the same configuration twice differs by 3 %
    for again in (0.97, 1.03):
        samples = Samples({"usual": usual, race.AGAIN: [again] * 9, "other": [0.96] * 9})
        winner, _, noise = race.decide(samples, "usual")
        assert winner == "usual"
        assert noise == pytest.approx(2 * 0.03, rel=0.05)


def test_what_is_wrong_or_does_not_compile_is_not_timed(monkeypatch):
    fast, broken = candidates(*TASK, HOPPER)[3:5]
    runs = FakeRuns(lambda config: 0.5 if config in (fast, broken) else 1.0, wrong=lambda config: config == fast)
    (result,) = tune(runs, failed=(broken,))
    assert result.config == USUAL
    refused = {c.config: c for c in result.candidates if c.refusal}
    assert set(refused) == {fast, broken}
    assert "out: differs from the heuristics'" in refused[fast].refusal
    assert refused[broken].refusal == "does not compile: out of registers"
    assert (refused[fast].is_wrong, refused[broken].is_wrong) == (True, False)
    assert refused[fast].ms is None


def test_a_candidate_that_does_not_run():
    fast = candidates(*TASK, HOPPER)[2]
    runs = FakeRuns(lambda config: 0.5 if config == fast else 1.0)
    results = runs.results

    def failing(config):
        if config == fast:
            raise RuntimeError("launch failed")
        return results(config)

    runs.results = failing
    (result,) = tune(runs)
    assert result.config == USUAL
    assert [c.refusal for c in result.candidates if c.refusal] == ["does not run: RuntimeError: launch failed"]


def test_the_heuristics_choice_must_compile_and_run():
    with pytest.raises(RuntimeError, match="the heuristics' choice does not compile: out of registers"):
        tune(FakeRuns(lambda config: 1.0), failed=(USUAL,))
    runs = FakeRuns(lambda config: 1.0)
    runs.results = None
    with pytest.raises(TypeError):
        tune(runs)
    assert not tuned.own_path().exists()


# ---------------------------------------------------------------- Ctrl-C


class Listener(Progress):
    def __init__(self):
        self.results = []

    def found(self, result):
        self.results.append(result)


@pytest.mark.parametrize(("final_rounds", "is_kept"), [(3, False), (12, True)])
def test_ctrl_c_keeps_what_is_decided(monkeypatch, final_rounds, is_kept):
    configs = candidates(*TASK, HOPPER)
    best = configs[5]
    heats, final = samples_of_a_race(len(configs), final_rounds)
    ms = {config: 0.9 + 0.001 * (config != best) for config in configs} | {USUAL: 1.0}
    listener = Listener()
    with pytest.raises(KeyboardInterrupt):
        tune(FakeRuns(ms.get, interrupt_after=heats + final), progress=listener)
    (result,) = listener.results
    assert (result.interrupted, result.kept, result.rounds) == (True, is_kept, final_rounds)
    assert used(monkeypatch) == (best if is_kept else USUAL)


def test_ctrl_c_keeps_the_tasks_before():
    other = TASK._replace(problem=dataclasses.replace(PROBLEM, mask=Mask()))
    configs = candidates(*TASK, HOPPER)
    listener = Listener()
    heats, final = samples_of_a_race(len(configs), 25)
    runs = FakeRuns(lambda config: 1.0 if config in (USUAL, configs[1]) else 0.8, interrupt_after=heats + final + 30)
    with pytest.raises(KeyboardInterrupt):
        tune(runs, (TASK, other), progress=listener)
    assert [result.kept for result in listener.results] == [True, False]
    assert set(tuned.load(tuned.own_path())[GPU]) == {tuned.key_of(*TASK)}


# ---------------------------------------------------------------- the space


@pytest.mark.parametrize(
    ("direction", "backend", "arch"),
    [(d, b, a) for d in ("fwd", "bwd") for b, a in (("sm90", HOPPER), ("sm80", "sm_80"), ("sm80", "sm_86"))],
)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_candidates_fit_and_differ(direction, backend, arch, head_dim):
    float32 = {"dtype": torch.float32} if (direction, backend) != ("bwd", "sm90") else {}
    for changed in (
        {},
        {"mask": Mask()},
        {"is_packed": True},
        {"num_heads_kv": 4},
        {"seqlen_q": 1, "batch": 1},
        float32,
    ):
        problem = dataclasses.replace(PROBLEM, head_dim=head_dim, head_dim_v=head_dim, **changed)
        found = candidates(direction, backend, problem, arch)
        assert found[0] == chooser.chooser(direction, backend).choose(problem, arch)
        assert 2 <= len(found) == len(set(found)) <= MAX_CANDIDATES
        for config in found:
            config.check(problem, arch)
    assert len(candidates(direction, backend, problem, arch, limit=2)) == 2


def test_candidates_are_the_neighbours_that_were_measured():
    found = candidates(*TASK, HOPPER)
    rows = [row.config for row in heuristics.FORWARD_SM90[128, 128]]
    assert set(rows) <= set(found)
    assert dataclasses.replace(USUAL, tile_n=112) in found
    assert dataclasses.replace(USUAL, pingpong=False) in found
    assert all(config.rescale_threshold == USUAL.rescale_threshold for config in found)


def test_turns_keep_their_order():
    """Where tiles of keys take turns, another order of tiles could let a thread block wait forever."""
    for backend in ("sm90", "sm80"):
        ordered = dataclasses.replace(PROBLEM, deterministic=True, seqlen_q=8192, seqlen_k=8192, batch=8)
        found = candidates("bwd", backend, ordered, HOPPER)
        assert len(found) > 4
        assert found[0].descending_turns
        for name in ("dynamic_tiles", "longest_first", "descending_turns"):
            assert len({getattr(config, name, None) for config in found}) == 1
    assert len({config.dynamic_tiles for config in candidates("bwd", "sm90", PROBLEM, HOPPER)}) == 2


def test_the_same_launch_is_not_timed_twice():
    full = candidates("fwd", "sm90", dataclasses.replace(PROBLEM, mask=Mask()), HOPPER)
    assert all(config.longest_first == full[0].longest_first for config in full)
    assert any(config.longest_first != USUAL.longest_first for config in candidates(*TASK, HOPPER))
    assert not any(config.pack_gqa for config in full)  # no groups
    groups = dataclasses.replace(PROBLEM, num_heads_kv=4)
    assert any(config.pack_gqa for config in candidates("fwd", "sm90", groups, HOPPER))
    assert not any(config.v_stages == config.num_stages for config in full)
    few = dataclasses.replace(PROBLEM, batch=1, num_heads_q=2, num_heads_kv=2)
    halves = [{c.num_warpgroups for c in candidates("fwd", "sm90", p, HOPPER)} for p in (PROBLEM, few)]
    assert [1 in of for of in halves] == [False, True]
    one = dataclasses.replace(PROBLEM, seqlen_q=64)
    one_warpgroup = [c.pingpong for c in candidates("fwd", "sm90", one, HOPPER) if c.num_warpgroups == 1]
    assert len(set(one_warpgroup)) == 1 < len(one_warpgroup)  # one warpgroup takes no turns


def test_rows_are_in_the_background_where_there_is_a_choice():
    short = dataclasses.replace(PROBLEM, batch=33, seqlen_q=512, seqlen_k=512, head_dim=64, head_dim_v=64)
    packed = dataclasses.replace(PROBLEM, is_packed=True)
    found = [candidates("bwd", "sm90", problem, HOPPER) for problem in (PROBLEM, short, packed)]
    assert [len({config.background_rows for config in of}) for of in found] == [2, 2, 1]
    assert found[1][0].private_dq


def test_what_depends_on_exact_head_counts_is_left_alone():
    short = dataclasses.replace(PROBLEM, batch=33, seqlen_q=512, seqlen_k=512, head_dim=64, head_dim_v=64)
    found = candidates("bwd", "sm90", short, HOPPER)
    assert found[0].private_dq
    assert not any(c.private_dq for c in candidates("bwd", "sm90", dataclasses.replace(short, batch=1), HOPPER))
    assert isinstance(found[0], BackwardConfigSm90)


# ---------------------------------------------------------------- results and data


def test_difference_allows_for_rounding_only():
    out = torch.randn(3, 5, 64).to(torch.bfloat16)
    lse = torch.tensor([1.0, -torch.inf, 3.0])
    same = {"out": out, "lse": lse}
    assert launches.difference(same, same) is None
    assert launches.difference({"out": out * 1.01}, same) is None
    off = out.clone()
    off[1, 2, 3] += 0.2
    assert "out: differs from the heuristics'" in launches.difference({"out": off}, same)
    assert "lse" in launches.difference({"lse": lse + 1e-3}, same)
    assert "lse" in launches.difference({"lse": torch.tensor([1.0, 0.0, 3.0])}, same)
    nan = out.clone()
    nan[0, 0, 0] = torch.nan
    assert launches.difference({"out": nan}, same) is not None
    assert launches.difference(same, same | {"out": nan}) is not None
    assert launches.difference({"out": out.float()}, same).startswith("out: (3, 5, 64) torch.float32, not")
    assert launches.difference({"out": out[:2]}, same).startswith("out: (2, 5, 64)")
    exact = torch.randn(4, 64)
    assert launches.difference({"dq": exact * (1 + 1e-6)}, {"dq": exact}) is None
    assert launches.difference({"dq": exact * (1 + 1e-4)}, {"dq": exact}) is not None


@pytest.mark.parametrize("is_packed", [False, True])
def test_random_inputs_pose_the_problem(is_packed):
    problem = dataclasses.replace(
        PROBLEM,
        device_type="cpu",
        batch=7,
        seqlen_q=100,
        seqlen_k=200,
        num_heads_kv=4,
        head_dim_v=64,
        is_packed=is_packed,
        has_sinks=True,
        has_seqused_k=True,
    )
    inputs = launches.random_inputs(problem, "cpu")
    asked = AttentionProblem.of(inputs, softmax_scale=0.1, mask=problem.mask, softcap=None, deterministic=False)
    assert asked == problem
    assert inputs.q.shape == ((100, 16, 128) if is_packed else (7, 100, 16, 128))
    support = dispatch.choose(asked)
    out, _ = dispatch.prepare("tiled", asked, torch.device("cpu"))(inputs)
    assert support.ok
    assert out.isfinite().all()


def test_parts():
    for total, count in ((1000, 7), (5, 5), (3, 10), (0, 2)):
        lengths = launches.uneven_lengths(total, count)
        assert len(lengths) == count
        assert sum(lengths) == total
        assert min(lengths) >= 0
    assert len(set(launches.uneven_lengths(1000, 7))) > 3


def test_a_result_is_plain_data():
    import json

    (result,) = tune(FakeRuns(lambda config: 1.0))
    data = json.loads(json.dumps(result.to_dict()))
    assert ForwardConfigSm90.from_text(data["config"]) == USUAL
    assert data["problem"]["dtype"] == "bfloat16"
    assert len(data["candidates"]) == len(result.candidates) == len({one["config"] for one in data["candidates"]})
    for one, candidate in zip(data["candidates"], result.candidates, strict=True):
        assert ForwardConfigSm90.from_text(one["config"]) == candidate.config
        assert (one["ms"], one["changes"]) == (candidate.ms, candidate.changes)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, "bfloat16 head_dim 128 causal, batch 4, seqlen 4096, heads 16"),
        ({"mask": Mask()}, "bfloat16 head_dim 128, batch 4, seqlen 4096, heads 16"),
        (
            {"mask": Mask(64, 0), "seqlen_k": 8192},
            "bfloat16 head_dim 128 window 64, 0, batch 4, seqlen 4096 x 8192, heads 16",
        ),
        (
            {"mask": Mask(None, -2), "head_dim_v": 64},
            "bfloat16 head_dim 128/64 window None, -2, batch 4, seqlen 4096, heads 16",
        ),
        ({"dtype": torch.float16, "num_heads_kv": 2}, "float16 head_dim 128 causal, batch 4, seqlen 4096, heads 16/2"),
    ],
)
def test_problems_in_words(other, words):
    assert summary(dataclasses.replace(PROBLEM, **other)) == words


def test_differences_of_configurations_in_words():
    other = dataclasses.replace(USUAL, tile_n=USUAL.tile_n - 16, longest_first=not USUAL.longest_first)
    assert changes(USUAL, other) == f"tile_n={other.tile_n} longest_first={other.longest_first}"
    assert changes(USUAL, USUAL) == ""

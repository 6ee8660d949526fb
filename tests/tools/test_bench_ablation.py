"""Ablations on a CPU: the rows of a configuration, and whole runs of a kernel that stands in for a GPU's."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

import pytest

from onepass import tiled
from onepass.bench import ablation
from onepass.bench.ablation import (
    FORWARD_SM90,
    FULL,
    PAPER_CASE,
    ROAD_SM80,
    Kernel,
    PaperRow,
    Switch,
    problem_of,
    road,
    rows,
)
from onepass.bench.cases import Case
from onepass.bench.plot import plot_ablation
from onepass.bench.rows import Options
from onepass.errors import UnsupportedError
from onepass.kernels.config import ForwardConfigSm90
from onepass.kernels.heuristics import sm80 as heuristics_sm80
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.problem import Mask

CASE = Case.square(40, 2, 16, dtype="float32", causal=True)
QUICK = Options(rounds=3, gemm_size=64, peers=())


@dataclass(frozen=True)
class Config:
    """A configuration with a choice that others need, one that is off, a size, and one that no switch names."""

    tile_n: int
    overlap: bool = True
    needs_overlap: bool = True
    stages: int = 3
    lazy: float = 0.0
    cluster: int = 1
    wrong: bool = True
    slow: bool = True

    def check(self, problem, arch) -> None:
        if self.stages < 3:
            raise UnsupportedError(f"stages: expected 3, got {self.stages}")


SWITCHES = (
    Switch(
        "overlap", False, "no overlap", {"needs_overlap": False, "not_yet": False}, paper=PaperRow("No Overlap", 1.0)
    ),
    Switch("needs_overlap", False, "no second overlap"),
    Switch("not_yet", False, "no future"),
    Switch("stages", 2, "two stages"),
    Switch("lazy", 0.0, "not lazy"),
    Switch("slow", False, "not slow", matters=lambda problem, config: problem.mask.is_full),
    Switch("wrong", False, "no wrong"),
)


def forward(problem, inputs, config):
    out, lse = tiled.forward(problem, inputs)
    return (out if config.wrong else out + 0.01), lse


def backward(problem, inputs, out, lse, dout, dlse, config):
    dq, dk, dv, dsinks = tiled.backward(problem, inputs, out, lse, dout, dlse)
    return dq, (dk if config.wrong else dk + 0.01), dv, dsinks


KERNEL = Kernel("tiled", "cpu", lambda problem, arch: Config(64), forward, SWITCHES)
BACKWARD_CASE = replace(CASE, direction="bwd")
# its forward takes no configuration: the configuration is for the backward
BACKWARD = KERNEL._replace(forward=lambda problem, inputs, config: tiled.forward(problem, inputs), backward=backward)


pytestmark = pytest.mark.usefixtures("one_thread")


# ---------------------------------------------------------------- the rows


def test_rows_of_a_configuration():
    found = rows(problem_of(CASE, "cpu"), Config(64, cluster=2), SWITCHES)
    assert {row.label: row.changes for row in found.rows} == {
        FULL: {},
        "no overlap": {"overlap": False, "needs_overlap": False},
        "no second overlap": {"needs_overlap": False},
        "two stages": {"stages": 2},
        "no wrong": {"wrong": False},
        "cluster 1": {"cluster": 1},  # no switch names it, so it goes back to its default
    }
    for row in found.rows:
        assert row.config == replace(Config(64, cluster=2), **row.changes)
    assert found.absent == {
        "no future": "the kernel has no switch not_yet yet",
        "not lazy": "off in the full configuration already",
        "not slow": "changes nothing here",
    }
    refusals = {row.label: row.refusal for row in found.rows if row.refusal}
    assert refusals == {"two stages": "stages: expected 3, got 2"}


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_road_of_the_ampere_kernels(head_dim, dtype):
    problem = problem_of(Case.square(2048, 2, head_dim, dtype=dtype, causal=True), "cuda")
    full = heuristics_sm80.forward_config_sm80(problem, "sm_80")
    found = road(problem, full, ROAD_SM80, "sm_80")
    labels = [row.label for row in found.rows]
    assert labels[0] == FULL
    assert [label[0] for label in labels[1:]] == sorted(label[0] for label in labels[1:])
    assert labels[1].startswith("1 ")
    assert {step.label for step in ROAD_SM80} == set(labels[1:]) | set(found.absent)
    configs = [row.config for row in found.rows]
    assert len(set(configs)) == len(configs), "two rows would measure the same"
    # each step changes the fields that it names and nothing else; after the last one only small things are missing
    for before, row in zip(configs[1:], found.rows[2:], strict=False):
        assert replace(before, **row.changes) == row.config
    last = {name: value for name, value in asdict(configs[-1]).items() if value != getattr(full, name)}
    assert set(last) <= {"rescale_threshold", "longest_first"}
    refusals = [row.refusal for row in found.rows if row.refusal]
    if dtype == "float32" and head_dim > 128:  # its 64 x 64 tiles do not fit
        assert all(refusal.startswith("shared memory: ") for refusal in refusals)
    else:
        assert refusals == []


SHIPPED = [
    (dims, row.config, causal)
    for dims, table in heuristics.FORWARD_SM90.items()
    for row in table
    for causal in ((False, True) if row.causal is None else (row.causal,))
]


@pytest.mark.parametrize(("dims", "config", "causal"), SHIPPED)
def test_rows_of_the_shipped_configurations(dims, config, causal):
    problem = problem_of(Case(1, 512, 512, 2, 2, *dims, "bfloat16", causal), "cuda")
    found = rows(problem, config, FORWARD_SM90)
    labels = [row.label for row in found.rows]
    assert labels[0] == FULL
    assert labels[1] == "no GEMM/softmax overlap in a warpgroup"
    assert len(set(labels)) == len(labels)
    assert len({row.config for row in found.rows}) == len(labels), "two rows would measure the same"
    # turning a choice off also turns off what needs it
    assert [row.refusal for row in found.rows] == [None] * len(labels)
    assert {switch.label for switch in FORWARD_SM90} <= set(labels) | set(found.absent)


def test_every_switch_of_the_hopper_kernel_is_named():
    """A field without a row of its own still gets one, but under the field's name."""
    every = {
        "num_stages": 3,
        "rescale_threshold": 8.0,
        "score_buffers": 2,
        "dynamic_tiles": True,
        "q_stages": 2,
        "v_stages": 2,
        "cluster_size": 2,
        "pack_gqa": True,
    }
    problem = problem_of(replace(PAPER_CASE, causal=True), "cuda")
    found = rows(problem, ForwardConfigSm90(tile_n=64, num_warpgroups=2, **every), FORWARD_SM90)
    named = {switch.label for switch in FORWARD_SM90 if switch.field in asdict(found.rows[0].config)}
    assert named == {row.label for row in found.rows} - {FULL}


def test_without_warp_specialization_goes_what_depends_on_it():
    problem = problem_of(PAPER_CASE, "cuda")
    found = rows(problem, ForwardConfigSm90(tile_n=128, dynamic_tiles=True), FORWARD_SM90)
    (row,) = (row for row in found.rows if row.label == "no warp specialization")
    assert row.changes == {"warp_specialized": False, "dynamic_tiles": False, "overlap_tiles": False}
    assert row.refusal is None
    assert row.paper == ("GEMM-Softmax Pipelining, No Warp-Specialization", 570.0)


# ---------------------------------------------------------------- whole runs


def test_report(tmp_path):
    path = tmp_path / "sub" / "ablation.json"
    checked, done = [], []
    report = ablation.ablate(CASE, KERNEL, QUICK, path, checked.append, done.append)
    data = json.loads(path.read_text())
    assert data == json.loads(json.dumps(report.to_dict()))
    assert data["status"] == "complete"
    assert {"date_utc", "device_name", "gpu", "versions", "commit"} <= set(data["header"])
    (row,) = data["rows"]
    assert [entry["label"] for entry in row["configurations"]] == [
        FULL,
        "no overlap",
        "no second overlap",
        "two stages",
        "no wrong",
    ]
    assert row["configurations"][1]["config"] == asdict(Config(64, overlap=False, needs_overlap=False))
    assert row["configurations"][1]["paper"] == "No Overlap"
    assert row["configurations"][1]["paper_tflops"] is None  # this is not the paper's case
    assert set(row["contenders"]) == {FULL, "no overlap", "no second overlap"}
    assert row["skipped"] == {"two stages": "stages: expected 3, got 2"}
    assert list(row["failed"]) == ["no wrong"]
    assert "max error" in row["failed"]["no wrong"]
    assert report.wrong == [report.row]
    assert checked == [FULL, "no overlap", "no second overlap", "no wrong"]
    assert done == [1, 2, 3]
    assert row["rounds"] == 3
    for entry in row["contenders"].values():
        assert entry["tflops"] == pytest.approx(row["flops"] / entry["median_ms"] / 1e9)
    assert row["contenders"][FULL]["relative_speed"] == {"median": 1.0, "p20": 1.0, "p80": 1.0}


def test_a_backward_is_timed_alone_with_its_configuration():
    forwards, backwards = [], []

    def forward(problem, inputs, config):
        forwards.append(config)
        return tiled.forward(problem, inputs)

    def backward(problem, inputs, out, lse, dout, dlse, config):
        assert dlse is None
        backwards.append(config)
        return tiled.backward(problem, inputs, out, lse, dout, dlse)

    kernel = BACKWARD._replace(forward=forward, backward=backward, switches=())
    report = ablation.ablate(BACKWARD_CASE, kernel, QUICK)
    labels = [
        FULL,
        "no overlap",
        "no needs_overlap",
        "no wrong",
        "no slow",
    ]  # no switch names them: these are all booleans
    assert list(report.row["contenders"]) == [entry["label"] for entry in report.row["configurations"]] == labels
    assert forwards == [None] * len(labels)
    assert {config: backwards.count(config) > QUICK.rounds for config in backwards} == {
        Config(64): True,
        Config(64, overlap=False): True,
        Config(64, needs_overlap=False): True,
        Config(64, slow=False): True,
        Config(64, wrong=False): True,
    }


def test_ctrl_c_inside_a_round_keeps_those_before_it():
    calls = []

    def stops(problem, inputs, config):
        calls.append(config)
        if len(calls) > 100:
            raise KeyboardInterrupt
        return forward(problem, inputs, config)

    report = ablation.ablate(CASE, KERNEL._replace(forward=stops), replace(QUICK, rounds=10**6))
    assert report.status == "interrupted"
    row = report.row
    assert 10 < row["rounds"] < 100
    assert all("relative_speed" in entry for entry in row["contenders"].values())


def test_a_kernel_that_does_not_run_is_a_failure():
    class CompilerError(Exception):
        """An error that is none of Python's own."""

    def fails(problem, inputs, config):
        if not config.needs_overlap:
            raise CompilerError("registers")
        return forward(problem, inputs, config)

    report = ablation.ablate(CASE, KERNEL._replace(forward=fails), QUICK)
    assert report.row["failed"]["no overlap"] == "CompilerError: registers"
    assert list(report.row["contenders"]) == [FULL]


def test_the_full_configuration_may_fail(tmp_path):
    def only_parts(problem, inputs, config):
        out, lse = forward(problem, inputs, config)
        return (out if not config.needs_overlap else out * 2), lse

    report = ablation.ablate(CASE, KERNEL._replace(forward=only_parts), QUICK)
    assert FULL in report.row["failed"]
    assert "median_ms" in report.row["contenders"]["no overlap"]
    assert "relative_speed" not in report.row["contenders"]["no overlap"]
    (picture,) = plot_ablation(report.to_dict(), tmp_path / "a.png")
    assert picture.stat().st_size > 1000


def test_other_machines_are_told_why_not():
    assert "expected a Hopper GPU (compute capability 9.0), got cpu; torch sees" in ablation.refusal(
        ablation.KERNELS["sm90"], PAPER_CASE, "cpu"
    )
    assert ablation.refusal(KERNEL, CASE, "cpu") is None


def test_the_hopper_backward():
    kernel, case = ablation.kernels("bwd")["sm90"], replace(PAPER_CASE, direction="bwd")
    assert "expected a Hopper GPU" in ablation.refusal(kernel, case, "cpu")
    problem = ablation.problem_of(case, "cuda")
    full = heuristics.backward_config_sm90(problem)
    table = ablation.rows(problem, full, kernel.switches)
    assert [row.label for row in table.rows if row.refusal is None] == [
        FULL,
        "no turns between warpgroups",
        "static order of tiles, rows in kernels before and after",
        "two buffers for Q",
        "one buffer for dO",
    ]
    causal = replace(problem, mask=Mask(None, 0))
    table = ablation.rows(causal, heuristics.backward_config_sm90(causal), kernel.switches)
    assert "rows in kernels before and after" in [row.label for row in table.rows if row.refusal is None]
    short = replace(
        problem, seqlen_q=512, seqlen_k=512, batch=33, num_heads_q=4, num_heads_kv=4, head_dim=64, head_dim_v=64
    )
    table = ablation.rows(short, heuristics.backward_config_sm90(short), kernel.switches)
    labels = [row.label for row in table.rows if row.refusal is None]
    assert "sums of dQ shared by all thread blocks" in labels
    assert "rows in kernels before and after" in labels

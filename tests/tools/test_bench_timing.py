"""Interleaved timing on callables of known speed."""

from __future__ import annotations

import gc
import time

import pytest
import torch

from benchmarks.harness.timing import host_us
from onepass.tuning.timing import CudaSampler, Samples, Spread, cpu_sampler, measure_interleaved, percentile


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless a test moves it, in seconds."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_ratio_of_known_speeds(clock):
    def taking(seconds):
        def call():
            clock[0] += seconds

        return cpu_sampler(call)

    samples = measure_interleaved({"slow": taking(0.03), "fast": taking(0.01)}, rounds=5)
    assert samples.rounds == 5
    assert samples.spread("slow") == pytest.approx((30, 30, 30))
    assert samples.speed_ratio("fast", "slow") == pytest.approx((3, 3, 3))
    assert samples.speed_ratio("slow", "fast").median == pytest.approx(1 / 3)


def test_ratios_are_taken_within_a_round():
    # the machine is three times slower in rounds 2 to 4: medians mislead, ratios do not
    samples = Samples({"a": [1.0, 3.0, 3.0, 3.0, 1.0], "b": [2.0, 6.0, 6.0, 6.0, 2.0]})
    assert samples.speed_ratio("a", "b") == Spread(2.0, 2.0, 2.0)


def test_order_rotates_and_everyone_runs_once_a_round():
    order: list[str] = []

    def sampler(name):
        def sample():
            order.append(name)
            return 1000.0  # long enough to need no second warm-up call

        return sample

    measure_interleaved({name: sampler(name) for name in "abc"}, rounds=4)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab" + "abc"  # warm-up, then four rounds


def test_what_a_round_has_told_stays_as_it_was():
    """If the next round is interrupted, its samples belong to no round."""
    so_far: list[Samples] = []
    number = iter(range(1000))

    def sample():
        at = next(number)
        if at == 13:  # two calls of warm-up, then five rounds and one sample
            raise KeyboardInterrupt
        return 1000.0 + at

    with pytest.raises(KeyboardInterrupt):
        measure_interleaved({"a": sample, "b": sample}, rounds=100, on_round=so_far.append)
    assert [samples.rounds for samples in so_far] == [1, 2, 3, 4, 5]
    assert so_far[0].ms == {"a": [1002.0], "b": [1003.0]}
    assert {len(values) for values in so_far[-1].ms.values()} == {5}


@pytest.mark.parametrize(
    ("sample_ms", "budget_s", "rounds"),
    [
        (10.0, 0.0, 3),  # a budget that is spent at once gives the fewest rounds
        (10.0, 0.08, 5),  # min_rounds fit into three times the budget
        (1.0, 10.0, 20),  # max_rounds come first
    ],
)
def test_rounds_follow_the_budget(sample_ms, budget_s, rounds, clock):
    def sample():
        clock[0] += 2 * sample_ms / 1e3
        return sample_ms

    samples = measure_interleaved({"a": sample}, time_budget_s=budget_s, max_rounds=20)
    assert samples.rounds == rounds


def test_garbage_collection_is_off_while_timing_and_restored_after_an_error():
    seen = []

    def sample():
        seen.append(gc.isenabled())
        if len(seen) == 3:
            raise KeyboardInterrupt
        return 1000.0

    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt):
        measure_interleaved({"a": sample}, rounds=5)
    assert seen == [False] * 3
    assert gc.isenabled()


def test_percentiles_interpolate():
    assert percentile([4.0, 1.0, 3.0, 2.0, 5.0], 0.2) == pytest.approx(1.8)
    assert percentile([7.0], 0.8) == 7.0
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((3.0, 1.8, 4.2))


def test_time_of_the_host_is_that_of_a_call():
    now, taken = [0.0], iter([1e-3] * 5 + [9e-3] * 5 + [2e-3] * 5 + [1e-3] * 5)

    def call():
        now[0] += next(taken)

    assert host_us(call, 5, 3, clock=lambda: now[0]) == pytest.approx(2000.0)  # after five calls of warm-up


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_sampler_replays_a_graph_and_runs_eagerly_what_waits_for_the_gpu():
    with torch.cuda.stream(torch.cuda.Stream()):
        small, large = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for n in (4096, 8192))
        samplers = {
            "small": CudaSampler([lambda: small @ small]),
            "large": CudaSampler([lambda: large @ large]),
            "waiting": CudaSampler([lambda: (small @ small).sum().item()]),
        }
        samples = measure_interleaved(samplers, rounds=7)
    assert samplers["small"].launch == samplers["large"].launch == "graph"
    assert samplers["waiting"].launch.startswith("eager: ")
    assert 5 < samples.speed_ratio("small", "large").median < 13  # eight times the work

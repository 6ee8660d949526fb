"""Interleaved timing: contenders take turns, so that changes of the machine's speed meet all of them.

The speed of a shared CPU may change by a factor of two for seconds at a time, and a GPU's clock follows its
temperature and power. Contenders timed one after another would meet different machines. Here each round runs every
contender once, in rotating order; speeds are compared within a round, and the median over rounds is reported.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

Call = Callable[[], object]
# A sampler runs the work and returns the milliseconds that one call took.
Sampler = Callable[[], float]

MIN_ROUNDS = 5
# A case so long that even this many rounds take several times its budget stops here.
FEWEST_ROUNDS = 3
MAX_ROUNDS = 200


class Spread(NamedTuple):
    """Median and the 20th and 80th percentiles."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), percentile(values, 0.2), percentile(values, 0.8))


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the sorted values."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


class Samples(NamedTuple):
    """Milliseconds per call: `ms[name][r]` belongs to round r."""

    ms: dict[str, list[float]]

    @property
    def rounds(self) -> int:
        return min((len(values) for values in self.ms.values()), default=0)

    def spread(self, name: str) -> Spread:
        return Spread.of(self.ms[name])

    def speed_ratio(self, name: str, over: str) -> Spread:
        """How many times faster `name` is than `over`: time of `over` / time of `name`, round by round."""
        return Spread.of([theirs / mine for mine, theirs in zip(self.ms[name], self.ms[over], strict=True)])


def measure_interleaved(
    samplers: Mapping[str, Sampler],
    *,
    rounds: int | None = None,
    time_budget_s: float = 10.0,
    min_rounds: int = MIN_ROUNDS,
    max_rounds: int = MAX_ROUNDS,
    seed: int | None = None,
    warms_up: bool = True,
    on_round: Callable[[Samples], object] | None = None,
) -> Samples:
    """Run every sampler once a round, in changing order.

    Args:
        rounds: the number of rounds; None means as many as fit into the budget, between min_rounds and max_rounds.
        time_budget_s: seconds of all rounds together. Where fewer than min_rounds take three times as long,
            FEWEST_ROUNDS are enough.
        seed: draws an order for four rounds at a time: forwards, backwards, and both again from the second name on. So
            neighbors change, too: under a power limit, a contender finds a higher clock after a frugal one. None means
            that the order rotates.
        warms_up: whether samplers are called before the first round; False for samplers that warm up by themselves.
        on_round: called after each round, outside of any sample, with all samples so far, which are what is left if
            there is no next round.
    """
    ms: dict[str, list[float]] = {name: [] for name in samplers}
    names = list(samplers)
    shuffled = None if seed is None else random.Random(seed)
    with _no_garbage_collection():
        for sampler in samplers.values() if warms_up else ():
            _warm_up(sampler)
        start = time.perf_counter()
        for done in itertools.count(1):
            turn = done - 1
            first = turn % max(1, len(names))
            if shuffled is not None:
                if turn % 4 == 0:
                    shuffled.shuffle(names)
                first = turn % 4 // 2
            order = names[first:] + names[:first]
            if shuffled is not None and turn % 2:
                order.reverse()
            for name in order:
                ms[name].append(samplers[name]())
            if on_round is not None:
                on_round(Samples({name: list(values) for name, values in ms.items()}))
            elapsed_s = time.perf_counter() - start
            if rounds is not None:
                finished = done >= rounds
            else:
                finished = (
                    done >= max_rounds
                    or (done >= min_rounds and elapsed_s >= time_budget_s)
                    or (done >= FEWEST_ROUNDS and elapsed_s >= 3 * time_budget_s)
                )
            if finished:
                return Samples(ms)
    raise AssertionError("unreachable")


def _warm_up(sampler: Sampler, at_least_ms: float = 20.0, at_most_calls: int = 10) -> None:
    """Make the first calls, which fill caches, start threads and choose kernels."""
    spent_ms = 0.0
    for _ in range(at_most_calls):
        spent_ms += sampler()
        if spent_ms >= at_least_ms:
            return


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def cpu_sampler(call: Call) -> Sampler:
    """A sampler of one call by the wall clock."""

    def sample() -> float:
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    return sample


def input_copies(bytes_per_call: int) -> int:
    """How many copies of the inputs a CUDA sampler should rotate through, so that none is still in the L2 cache."""
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, min(32, math.ceil(2 * l2_bytes / max(1, bytes_per_call))))


@functools.cache
def _flush_buffer(device_index: int) -> torch.Tensor:
    """A buffer to write before each sample, which empties L2, and keeps the GPU busy while the host enqueues."""
    l2_bytes = torch.cuda.get_device_properties(device_index).L2_cache_size
    return torch.empty(max(2 * l2_bytes, 2**28), dtype=torch.uint8, device=f"cuda:{device_index}")


def _host_sync(call: Call) -> str | None:
    """Why a call cannot be captured: torch's own message about its wait for the GPU; None if the call does not wait."""
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode(previous)
    return None


class CudaSampler:
    """A sampler of calls between two CUDA events, replayed from a CUDA graph.

    Args:
        calls: the same work on different copies of the inputs, run in turn. They must have been prepared on the
            current stream, which must not be the default one: a backward pass runs on the stream of its forward.
        sample_ms: calls are repeated until a sample is about this long, so that the events weigh nothing.
        pool: a torch.cuda.graph_pool_handle() that samplers share whose results nobody reads, since they write over one
            another's memory.

    Attributes:
        launch: "graph", or "eager: <reason>" if the calls could not be captured.
    """

    def __init__(self, calls: Sequence[Call], sample_ms: float = 2.0, pool: Any = None):
        for call in itertools.chain(calls, calls[:1]):
            call()
        one_pass_ms = max(1e-3, self._between_events(lambda: [call() for call in calls]))
        self._calls = list(calls) * max(1, min(64, round(sample_ms / one_pass_ms)))
        self._flush = _flush_buffer(torch.cuda.current_device())
        self._run: Call = self._run_eagerly
        self.launch = "graph"
        # checked first, because a capture that fails half-way leaves the allocator in its capture pool
        if reason := _host_sync(calls[0]):
            self.launch = f"eager: {reason}"
            return
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
                self._run_eagerly()
            self._run = graph.replay
        except RuntimeError as error:
            torch.cuda.synchronize()
            self.launch = f"eager: {str(error).splitlines()[0]}"

    def _run_eagerly(self) -> None:
        for call in self._calls:
            call()

    @staticmethod
    def _between_events(work: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def __call__(self) -> float:
        self._flush.zero_()
        return self._between_events(self._run) / len(self._calls)

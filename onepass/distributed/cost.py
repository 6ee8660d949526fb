"""What a schedule costs: an estimate of time, from the bytes and the work of each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..geometry.integers import ceil_div
from ..validation.scalars import check_int, check_real
from .schedule import AHEAD, Schedule, Step
from .traffic import SharedRows, Traffic, Work

TILE_ROWS = 128  # queries, and in a backward keys, that one multiprocessor computes at a time


@dataclass(frozen=True)
class Hardware:
    """What the estimate assumes of each rank; the defaults are near an H200 with NVLink, in 16 bits.

    Attributes:
        flops, backward_flops: FLOP/s of attention, in a forward and in a backward.
        bandwidth: bytes/s that a rank receives. latency: seconds before messages of a step arrive.
        copying: bytes/s of rows that a rank copies in its memory: into messages, and out of them.
        itemsize: bytes of an element of q, k, v and out.
        multiprocessors: the number of multiprocessors of a GPU, each of which computes one tile at a time.
        step, backward_step: seconds of the host's time that a step takes, in a forward and in a backward. The defaults
            were measured where a call of `onepass.attention` takes 60 us of the host's time.
        queries: the factor by which a step takes more of the host's time where rows of q travel: 1.38 and 1.36 on two
            H200 (forward, backward), 1.6 in a forward on two H100.
        gap: seconds that each further step loses on the GPU, where kernels start and end. With two steps instead of
            one, forwards on two H200 took 0.1 to 0.9 ms more, although more of the messages were hidden.
    """

    flops: float = 650e12
    backward_flops: float = 550e12
    bandwidth: float = 250e9
    latency: float = 30e-6
    copying: float = 1.4e12
    itemsize: int = 2
    multiprocessors: int = 132
    step: float = 1.0e-3
    backward_step: float = 2.5e-3
    queries: float = 1.4
    gap: float = 0.3e-3

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in ("itemsize", "multiprocessors"):
                check_int(name, value, "an int of at least 1", least=1)
                continue
            is_divisor = name in ("flops", "backward_flops", "bandwidth", "copying")
            if check_real(name, value) < 0 or (is_divisor and value == 0):
                raise ValueError(f"{name}: expected {'a number above' if is_divisor else 'at least'} 0, got {value}")


@dataclass(frozen=True)
class Estimate:
    """Costs of a forward and a backward.

    Attributes:
        pairs: for each rank, visible pairs of a query and a key, summed over its heads.
        forward_bytes, backward_bytes: the bytes that each rank receives.
        forward_seconds, backward_seconds: the time of the steps, where messages overlap with computing and each step
            takes as long as its slowest rank.
        computing_seconds: the time of the calls of forward and backward alone, without messages and the host's time.
    """

    pairs: tuple[int, ...]
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    forward_seconds: float
    backward_seconds: float
    computing_seconds: float

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


class StepCost(NamedTuple):
    """A step in one direction.

    Attributes:
        received: the bytes that each rank receives.
        messages: seconds of the messages before the computation, and after it.
        computing, busy: seconds of the calls of the slowest rank, and with them those of copies.
        least: seconds of the host's time.
    """

    received: list[int]
    messages: tuple[float, float]
    computing: float
    busy: float
    least: float


def estimate(
    schedule: Schedule,
    head_dim: int,
    hardware: Hardware,
    batch: int = 1,
    keep_gathered: bool = False,
    shared: SharedRows | None = None,
) -> Estimate:
    """Pairs, bytes and seconds of a schedule. Args: shared: as in `Traffic`."""
    ranks = range(schedule.layout.num_ranks)
    traffic = Traffic(schedule, head_dim, hardware.itemsize, keep_gathered, shared)
    steps = [traffic.alike(step) for step in schedule.steps]
    counts = Counter(steps)
    results = []
    computing = 0.0
    for is_backward in (False, True):
        costs = {step: _step_cost(traffic, step, head_dim, hardware, batch, is_backward) for step in counts}
        busy = [costs[step].busy + (hardware.gap if i else 0.0) for i, step in enumerate(steps)]
        if len(ranks) > 1:
            busy = [max(own, costs[step].least) for own, step in zip(busy, steps, strict=True)]
        received = tuple(sum(costs[step].received[rank] * n for step, n in counts.items()) for rank in ranks)
        results.append((received, _pipelined(busy, [costs[step].messages for step in steps])))
        computing += sum(costs[step].computing for step in steps)
    (forward_bytes, forward), (backward_bytes, backward) = results
    pairs = [0] * len(ranks)
    for step, n in counts.items():
        for rank, (heads, _) in enumerate(traffic.heads(step)):
            pairs[rank] += sum(call.pairs for call in traffic.rows(step).calls[rank]) * heads * batch * n
    return Estimate(tuple(pairs), forward_bytes, backward_bytes, forward, backward, computing)


def _step_cost(
    traffic: Traffic, step: Step, head_dim: int, hardware: Hardware, batch: int, is_backward: bool
) -> StepCost:
    sizes = traffic.backward(step) if is_backward else traffic.forward(step)
    computing = max(
        sum(_call_seconds(call, heads * batch, kv_heads * batch, head_dim, hardware, is_backward) for call in calls)
        for calls, (heads, kv_heads) in zip(traffic.rows(step).calls, traffic.heads(step), strict=True)
    )
    copying = max(size.copied for size in sizes) * batch / hardware.copying if len(sizes) > 1 else 0.0
    received = [(size.before + size.after) * batch for size in sizes]
    before = _message_seconds(max(size.before for size in sizes) * batch, hardware)
    after = _message_seconds(max(size.after for size in sizes) * batch, hardware)
    host = hardware.backward_step if is_backward else hardware.step
    least = host * (hardware.queries if step.width > 1 else 1.0)
    return StepCost(received, (before, after), computing, computing + copying, least)


def _call_seconds(call: Work, heads: int, kv_heads: int, head_dim: int, hardware: Hardware, is_backward: bool) -> float:
    """The time of a call for several heads: at least that of its longest tile on one multiprocessor.

    A tile of a forward has queries of one head. A tile of a backward has keys of one kv head, and all query heads of
    this kv head visit it, so few kv heads leave multiprocessors idle: one with 16384 keys under a causal mask takes the
    time of two (two H100, 64/8 heads: 18.0 ms in four steps of one kv head a rank, 10.8 in two of four).
    """
    if not heads:
        return 0.0
    flops_per_pair = (10 if is_backward else 4) * head_dim
    rate = hardware.backward_flops if is_backward else hardware.flops
    rows = call.most_queries * ceil_div(heads, kv_heads) if is_backward else call.most_keys
    tile = TILE_ROWS * rows * flops_per_pair / (rate / hardware.multiprocessors)
    # In a model of a backward's tiles on 132 multiprocessors, these idle at the end for 0.02 to 0.15 of the longest
    # tile in the mean under a causal mask (0.03 in most cases), and for up to 0.27 of it with packed sequences.
    idle = tile / (32 if is_backward and not call.is_packed else 4)
    return max(tile, call.pairs * heads * flops_per_pair / rate + idle)


def _message_seconds(size: int, hardware: Hardware) -> float:
    return size / hardware.bandwidth + hardware.latency if size else 0.0


def _pipelined(computing: Sequence[float], times: Sequence[tuple[float, ...]]) -> float:
    """Seconds of steps whose messages travel while other steps are computed.

    Messages follow each other: the inputs of step i + AHEAD start with step i, and its results when it is computed.
    """
    count = len(computing)
    link = ready = 0.0
    arrived: list[float] = []
    returned: list[float] = []
    for before, _ in times[:AHEAD]:
        link += before
        arrived.append(link)
    for i in range(count):
        ready = max(ready, arrived[i], returned[i - 2] if i > 1 else 0.0)  # results are written a step later
        if i + AHEAD < count:
            link = max(link, ready) + times[i + AHEAD][0]
            arrived.append(link)
        ready += computing[i]
        link = max(link, ready) + times[i][1] if times[i][1] else link
        returned.append(link if times[i][1] else 0.0)
    return max(link, ready)

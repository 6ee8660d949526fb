"""What a schedule costs: pairs, bytes and an estimate of time for each rank. No process group is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .layout import Layout, Run, visible_pairs
from .schedule import Schedule, Step, rows_sent

if TYPE_CHECKING:
    from .plan import ContextPlan

PICTURE_WIDTH = 64
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Hardware:
    """What the estimate assumes of each rank; the defaults are near an H200 with NVLink, in 16 bits.

    Attributes:
        flops: FLOP/s of a forward of attention. backward_flops: of a backward.
        bandwidth: bytes/s that a rank receives. latency: seconds before messages of a step arrive.
        itemsize: bytes of an element of q, k, v and out.
    """

    flops: float = 650e12
    backward_flops: float = 550e12
    bandwidth: float = 250e9
    latency: float = 30e-6
    itemsize: int = 2


@dataclass(frozen=True)
class Estimate:
    """Costs of a forward and a backward.

    Attributes:
        pairs: for each rank, visible pairs of a query head.row and a key, summed over its heads.
        forward_bytes, backward_bytes: received by each rank.
        forward_seconds, backward_seconds: of the slowest rank in each step, where messages overlap with computing.
        computing_seconds: what forward and backward would take if messages took no time.
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


class _Traffic:
    """Bytes that a rank receives in one step: before the computation, and after it."""

    def __init__(self, schedule: Schedule, head_dim: int, itemsize: int):
        self.schedule, self.head_dim, self.itemsize = schedule, head_dim, itemsize
        self.sums_keys = schedule.sums_keys()
        self._rows: dict[tuple[int, int], tuple[int, int, int]] = {}

    def rows(self, step: Step, rank: int) -> tuple[int, int, int]:
        """Rows of q and of k that a rank receives, and pairs that it computes a head."""
        key = step.width, rank
        if key not in self._rows:
            schedule = self.schedule
            pairs = sum(
                visible_pairs(Run(run.start, run.stop), schedule.cu_seqlens, schedule.mask)
                for run in schedule.queries(step, rank)
            )
            queries = rows_sent(schedule.query_pieces(step, rank), rank)
            self._rows[key] = queries, rows_sent(schedule.key_pieces(step, rank), rank), pairs
        return self._rows[key]

    def kv_heads(self, step: Step, rank: int) -> int:
        heads = self.schedule.heads_kv(step, rank)
        return heads.stop - heads.start

    def forward(self, step: Step, rank: int) -> tuple[int, int]:
        queries, keys, _ = self.rows(step, rank)
        element = self.head_dim * self.itemsize
        before = queries * step.heads * element + 2 * keys * self.kv_heads(step, rank) * element
        return before, queries * step.heads * (element + 4)  # a rank gets back as many rows as it sends, on average

    def backward(self, step: Step, rank: int) -> tuple[int, int]:
        queries, keys, _ = self.rows(step, rank)
        element = self.head_dim * self.itemsize
        kv_heads = self.kv_heads(step, rank)
        before = queries * step.heads * (2 * element + 8) + 2 * keys * kv_heads * element
        key_element = self.head_dim * (4 if self.sums_keys else self.itemsize)
        return before, queries * step.heads * element + 2 * keys * kv_heads * key_element


def estimate(schedule: Schedule, head_dim: int, hardware: Hardware, batch: int = 1) -> Estimate:
    """Pairs, bytes and seconds of a schedule."""
    ranks = range(schedule.layout.num_ranks)
    traffic = _Traffic(schedule, head_dim, hardware.itemsize)
    pairs = [sum(traffic.rows(s, r)[2] * s.heads for s in schedule.steps) * batch for r in ranks]
    results = []
    computing_seconds = 0.0
    for received, flops_per_pair, rate in (
        (traffic.forward, 4 * head_dim, hardware.flops),
        (traffic.backward, 10 * head_dim, hardware.backward_flops),
    ):
        sizes = [[tuple(n * batch for n in received(step, rank)) for rank in ranks] for step in schedule.steps]
        computing = [
            max(traffic.rows(step, rank)[2] for rank in ranks) * step.heads * batch * flops_per_pair / rate
            for step in schedule.steps
        ]
        times = [
            tuple(_seconds(max(size[i] for size in step_sizes), hardware) for i in range(2)) for step_sizes in sizes
        ]
        results.append((tuple(sum(sum(s[r]) for s in sizes) for r in ranks), _pipelined(computing, times)))
        computing_seconds += sum(computing)
    (forward_bytes, forward), (backward_bytes, backward) = results
    return Estimate(tuple(pairs), forward_bytes, backward_bytes, forward, backward, computing_seconds)


def _seconds(size: int, hardware: Hardware) -> float:
    return size / hardware.bandwidth + hardware.latency if size else 0.0


def _pipelined(computing: Sequence[float], times: Sequence[tuple[float, ...]]) -> float:
    """Seconds of steps whose messages travel while the step before or after is computed.

    Messages follow each other: those for step i + 1, then those after step i, and so on.
    """
    link = ready = 0.0
    finished: list[float] = []
    arrived = [0.0] * len(computing)
    for i, (before, _) in enumerate(times):
        if i >= 2:  # what step i - 2 returns goes first
            link = max(link, finished[i - 2]) + times[i - 2][1]
        link += before
        arrived[i] = link
        ready = max(ready, arrived[i]) + computing[i]
        finished.append(ready)
    for i in range(max(0, len(computing) - 2), len(computing)):
        link = max(link, finished[i]) + times[i][1]
    return max(link, ready)


# ---------------------------------------------------------------- words


def report(plan: ContextPlan, hardware: Hardware) -> str:
    """`ContextPlan.describe`."""
    schedule, found = plan.schedule, estimate(plan.schedule, plan.head_dim, hardware)
    mean = sum(found.pairs) / len(found.pairs) or 1.0
    sequences = len(schedule.cu_seqlens) - 1
    packed = f" in {sequences} packed sequences" if plan.is_packed else ""
    engine = f"{plan.engine} ranks share heads" if isinstance(plan.engine, int) else f'engine "{plan.engine}"'
    lines = [
        f"{plan.num_tokens} tokens{packed} on {plan.num_ranks} ranks, {schedule.num_heads_q} query and "
        f"{schedule.num_heads_kv} kv heads, {_mask_in_words(schedule)}",
        f'{engine}, layout "{plan.layout_name}", {len(schedule.steps)} steps',
        f"estimate: forward {found.forward_seconds * 1e3:.3g} ms, backward {found.backward_seconds * 1e3:.3g} ms, "
        f"{found.computing_seconds / found.seconds:.0%} of it computing",
        "",
        "rank   tokens   work   received forward   backward",
    ]
    for rank in range(plan.num_ranks):
        lines.append(
            f"{rank:4d} {schedule.layout.count(rank):8d} {found.pairs[rank] / mean:6.3f} "
            f"{found.forward_bytes[rank] / 2**20:14.1f} MiB {found.backward_bytes[rank] / 2**20:6.1f} MiB"
        )
    return "\n".join([*lines, "", "tokens by rank:", picture(schedule.layout)])


def _mask_in_words(schedule: Schedule) -> str:
    mask = schedule.mask
    if mask.is_full:
        return "no mask"
    return (
        "causal"
        if (mask.window_left, mask.window_right) == (None, 0)
        else (f"window ({mask.window_left}, {mask.window_right})")
    )


def picture(layout: Layout) -> str:
    """A character for each of equal shares of the tokens: the rank that owns its first token."""
    total = layout.owners[-1].stop
    width = min(PICTURE_WIDTH, total)
    ranks = (layout.owned(total * i // width, total * i // width + 1)[0].rank for i in range(width))
    return "".join(DIGITS[rank % len(DIGITS)] for rank in ranks)

"""What a schedule costs: pairs, bytes and an estimate of time for each rank. No process group is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..geometry.integers import ceil_div
from ..validation.scalars import check_int, check_real
from .layout import Layout, most_keys, most_queries, visible_pairs
from .schedule import AHEAD, Piece, Schedule, Step

TILE_ROWS = 128  # queries, and in a backward keys, that one multiprocessor computes at a time
LSE_BYTES = 4


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


class _Traffic:
    """Bytes that a rank receives in one step: before the computation, and after it."""

    def __init__(
        self,
        schedule: Schedule,
        head_dim: int,
        itemsize: int,
        keep_gathered: bool = False,
        rows: dict[tuple[Layout, int], Rows] | None = None,
    ):
        self.schedule, self.head_dim, self.itemsize, self.keep_gathered = schedule, head_dim, itemsize, keep_gathered
        self.key_element = head_dim * (4 if schedule.sums_keys() else itemsize)
        self._shared = {} if rows is None else rows
        self._rows: dict[int, Rows] = {}
        self._sums: dict[Step, list[tuple[int, int, int, int]]] = {}

    def rows(self, step: Step) -> Rows:
        """Rows that travel in a step, which depend on its width alone."""
        if step.width not in self._rows:
            key = self.schedule.layout, step.width
            if key not in self._shared:
                self._shared[key] = Rows.of(self.schedule, step)
            self._rows[step.width] = self._shared[key]
        return self._rows[step.width]

    def heads(self, step: Step, rank: int, batch: int = 1) -> tuple[int, int]:
        """Query heads and kv heads that a rank computes, of all batch entries."""
        sizes = (self.schedule.heads_q(step, rank), self.schedule.heads_kv(step, rank))
        heads, kv_heads = ((heads.stop - heads.start) * batch for heads in sizes)
        return heads, kv_heads if heads else 0

    def alike(self, step: Step) -> Step:
        """The step that stands for all steps with the same numbers of heads on all ranks, which cost the same."""
        is_whole = step.first_head + step.width * step.heads <= self.schedule.num_heads_q
        return step._replace(first_head=0) if is_whole else step

    def sums(self, step: Step, rank: int) -> tuple[int, int, int, int]:
        """Head rows of q and of k that a rank receives before a step, and those that it gets back after it."""
        key = self.alike(step)
        if key not in self._sums:
            self._sums[key] = self._sums_of_ranks(step)
        return self._sums[key][rank]

    def _sums_of_ranks(self, step: Step) -> list[tuple[int, int, int, int]]:
        rows = self.rows(step)
        heads = [self.heads(step, rank) for rank in range(self.schedule.layout.num_ranks)]
        if len(set(heads)) == 1:
            q, kv = heads[0]
            return [(a * q, b * kv, c * q, d * kv) for a, b, c, d in rows.of_a_head]
        return _sums(rows.queries, rows.keys, heads)

    def own_sums(self, step: Step, rank: int) -> tuple[int, int]:
        """Head rows of q and of k that a rank both owns and computes with."""
        rows, heads = self.rows(step), self.heads(step, rank)
        return rows.queries[rank].get(rank, 0) * heads[0], rows.keys[rank].get(rank, 0) * heads[1]

    def copied_forward(self, step: Step, rank: int) -> int:
        """Bytes of rows that are copied: q, k and v into messages and buffers, out into messages and its place."""
        rows = self._copied_queries(step, rank) + self._copied_keys(step, rank) + self._copied_results(step, rank)
        return rows * self.head_dim * self.itemsize

    def copied_backward(self, step: Step, rank: int) -> int:
        """Bytes of rows that a backward copies: q, k and v unless they are kept; gradients of out, q, k and v.

        Where queries travel, it also reads out and its gradient, in the time of a copy of one of them.
        """
        _, keys, sent_queries, sent_keys = self.sums(step, rank)
        own_queries, own_keys = self.own_sums(step, rank)
        queries = self._copied_queries(step, rank)  # of the gradient of out, and of q
        rows = queries + self._copied_results(step, rank)
        if step.width > 1:
            rows += own_queries + sent_queries
        if not self.keep_gathered:
            rows += queries + self._copied_keys(step, rank)
        sums = keys + own_keys + sent_keys
        if self.schedule.sums_keys():  # they are added up, and then rounded
            sums += own_keys + sent_keys
        return rows * self.head_dim * self.itemsize + 2 * sums * self.key_element

    def _copied_queries(self, step: Step, rank: int) -> int:
        """Head rows of q: none where each rank computes its own rows, which are used where they are."""
        queries, _, sent_queries, _ = self.sums(step, rank)
        return sent_queries + queries + self.own_sums(step, rank)[0] if step.width > 1 else 0

    def _copied_keys(self, step: Step, rank: int) -> int:
        """Head rows of k and v. Own rows are used where they are if they are all that the rank needs."""
        _, keys, _, sent_keys = self.sums(step, rank)
        return 2 * (sent_keys + keys + (self.own_sums(step, rank)[1] if keys else 0))

    def _copied_results(self, step: Step, rank: int) -> int:
        """Head rows of out: none where the results of the only step are those of the call."""
        queries, _, sent_queries, _ = self.sums(step, rank)
        is_whole = step.width == 1 and len(self.schedule.steps) == 1
        return 0 if is_whole else queries + sent_queries + self.own_sums(step, rank)[0]

    def forward(self, step: Step, rank: int) -> tuple[int, int]:
        queries, keys, own_queries, _ = self.sums(step, rank)
        element = self.head_dim * self.itemsize
        return (queries + 2 * keys) * element, own_queries * (element + LSE_BYTES)

    def backward(self, step: Step, rank: int) -> tuple[int, int]:
        queries, keys, own_queries, own_keys = self.sums(step, rank)
        element = self.head_dim * self.itemsize
        before = queries * (element + 2 * LSE_BYTES)  # the gradient of out, and two numbers a row
        if not self.keep_gathered:
            before += (queries + 2 * keys) * element
        return before, own_queries * element + 2 * own_keys * self.key_element


class Work(NamedTuple):
    """A call of one head, which takes at least the time of its longest tile on one multiprocessor.

    Attributes:
        most_keys: the most keys that one of its queries sees. most_queries: the most queries that see one key.
        is_packed: whether it has packed sequences, whose tiles follow each other as they come. Other backwards begin
            with their longest tiles, so that the multiprocessors end together.
    """

    pairs: int
    most_keys: int
    most_queries: int
    is_packed: bool

    def seconds(
        self, heads: tuple[int, int], is_backward: bool, flops_per_pair: int, rate: float, multiprocessors: int
    ) -> float:
        """The time of this call for several heads.

        A tile of a forward has queries of one head. A tile of a backward has keys of one kv head, and all query heads
        of this kv head visit it, so few kv heads leave multiprocessors idle: one with 16384 keys under a causal mask
        takes the time of two (two H100, 64/8 heads: 18.0 ms in four steps of one kv head a rank, 10.8 in two of four).

        Args: heads: query heads and kv heads.
        """
        queries, keys = heads
        if not queries:
            return 0.0
        rows = self.most_queries * ceil_div(queries, keys) if is_backward else self.most_keys
        tile = TILE_ROWS * rows * flops_per_pair / (rate / multiprocessors)
        # In a model of a backward's tiles on 132 multiprocessors, these idle at the end for 0.02 to 0.15 of the longest
        # tile in the mean under a causal mask (0.03 in most cases), and for up to 0.27 of it with packed sequences.
        idle = tile / (32 if is_backward and not self.is_packed else 4)
        return max(tile, self.pairs * queries * flops_per_pair / rate + idle)


class Rows(NamedTuple):
    """For each rank: the rows that it computes with, by the rank that owns them, and its calls.

    Attributes:
        of_a_head: the result of `_sums` where each rank computes one head.
    """

    queries: list[dict[int, int]]
    keys: list[dict[int, int]]
    calls: list[list[Work]]
    of_a_head: list[tuple[int, int, int, int]]

    @classmethod
    def of(cls, schedule: Schedule, step: Step) -> Rows:
        ranks = range(schedule.layout.num_ranks)
        rows_of_ranks = [schedule.row_of_ranks(step, rank) for rank in ranks]
        keys: dict[range, dict[int, int]] = {}
        calls: dict[range, list[Work]] = {}
        for rank, row in zip(ranks, rows_of_ranks, strict=True):
            if row not in keys:
                keys[row] = _by_source(schedule.key_pieces(step, rank))
                calls[row] = _calls(schedule, step, rank)
        queries = [{other: schedule.layout.count(other) for other in row} for row in rows_of_ranks]
        keys_of_ranks = [keys[row] for row in rows_of_ranks]
        of_a_head = _sums(queries, keys_of_ranks, [(1, 1)] * len(rows_of_ranks))
        return cls(queries, keys_of_ranks, [calls[row] for row in rows_of_ranks], of_a_head)

    def pairs(self, rank: int) -> int:
        """Visible pairs of a head."""
        return sum(call.pairs for call in self.calls[rank])


def _sums(
    queries: Sequence[dict[int, int]], keys: Sequence[dict[int, int]], heads: Sequence[tuple[int, int]]
) -> list[tuple[int, int, int, int]]:
    """For each rank, head rows of q and of k that it receives before a step, and those that it gets back after it.

    Args: queries, keys: as `Rows` has them. heads: query heads and kv heads that each rank computes.
    """
    found = [[0, 0, 0, 0] for _ in heads]
    for rank, of_rank in enumerate(heads):
        for i, by_source in enumerate((queries[rank], keys[rank])):
            for source, count in by_source.items():
                if source != rank:
                    found[rank][i] += count * of_rank[i]
                    found[source][2 + i] += count * of_rank[i]
    return [(of_rank[0], of_rank[1], of_rank[2], of_rank[3]) for of_rank in found]


def _calls(schedule: Schedule, step: Step, rank: int) -> list[Work]:
    """A dense call for each segment; packed sequences are one call."""
    segments = [segment.runs for segment in schedule.segments(step, rank)]
    is_packed = len(schedule.cu_seqlens) > 2
    if is_packed:
        segments = [tuple(run for runs in segments for run in runs)] if segments else []
    return [
        Work(
            sum(visible_pairs(run, schedule.cu_seqlens, schedule.mask) for run in runs),
            max(most_keys(run, schedule.cu_seqlens, schedule.mask) for run in runs),
            most_queries(runs, schedule.cu_seqlens, schedule.mask),
            is_packed,
        )
        for runs in segments
    ]


def _by_source(pieces: Sequence[Piece]) -> dict[int, int]:
    rows: dict[int, int] = {}
    for piece in pieces:
        rows[piece.source] = rows.get(piece.source, 0) + piece.rows
    return rows


def estimate(
    schedule: Schedule,
    head_dim: int,
    hardware: Hardware,
    batch: int = 1,
    keep_gathered: bool = False,
    rows: dict[tuple[Layout, int], Rows] | None = None,
) -> Estimate:
    """Pairs, bytes and seconds of a schedule.

    Args: rows: the rows that estimates of other steps for the same sequences have found; this one adds its own.
    """
    ranks = range(schedule.layout.num_ranks)
    traffic = _Traffic(schedule, head_dim, hardware.itemsize, keep_gathered, rows)
    steps = [traffic.alike(step) for step in schedule.steps]
    counts = Counter(steps)
    heads = {step: [traffic.heads(step, rank, batch) for rank in ranks] for step in counts}
    results = []
    computing_seconds = 0.0
    for is_backward, received, copied, rate, step_seconds in (
        (False, traffic.forward, traffic.copied_forward, hardware.flops, hardware.step),
        (True, traffic.backward, traffic.copied_backward, hardware.backward_flops, hardware.backward_step),
    ):
        flops_per_pair = (10 if is_backward else 4) * head_dim
        least = {step: step_seconds * (hardware.queries if step.width > 1 else 1.0) for step in counts}
        sizes = {step: [tuple(n * batch for n in received(step, rank)) for rank in ranks] for step in counts}
        computing = {
            step: max(
                sum(
                    call.seconds(of_ranks[rank], is_backward, flops_per_pair, rate, hardware.multiprocessors)
                    for call in traffic.rows(step).calls[rank]
                )
                for rank in ranks
            )
            for step, of_ranks in heads.items()
        }
        times = {
            step: tuple(_seconds(max(size[i] for size in sizes[step]), hardware) for i in range(2)) for step in counts
        }
        copying = {
            step: max(copied(step, rank) for rank in ranks) * batch / hardware.copying if len(ranks) > 1 else 0.0
            for step in counts
        }
        busy = [computing[step] + copying[step] + (hardware.gap if i else 0.0) for i, step in enumerate(steps)]
        if len(ranks) > 1:
            busy = [max(seconds, least[step]) for seconds, step in zip(busy, steps, strict=True)]
        seconds = _pipelined(busy, [times[step] for step in steps])
        results.append((tuple(sum(sum(sizes[s][r]) * n for s, n in counts.items()) for r in ranks), seconds))
        computing_seconds += sum(computing[step] for step in steps)
    (forward_bytes, forward), (backward_bytes, backward) = results
    by_rank = tuple(
        sum(traffic.rows(s).pairs(rank) * heads[s][rank][0] * n for s, n in counts.items()) for rank in ranks
    )
    return Estimate(by_rank, forward_bytes, backward_bytes, forward, backward, computing_seconds)


def _seconds(size: int, hardware: Hardware) -> float:
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


def buffer_bytes(schedule: Schedule, head_dim: int, itemsize: int, keep_gathered: bool = False) -> int:
    """The most bytes of received q, k and v that a rank has at one time in a forward.

    A rank has the rows of the step that is computed and of the `AHEAD` steps whose messages are under way; with
    keep_gathered it has the rows of all steps.
    """
    traffic = _Traffic(schedule, head_dim, itemsize)
    most = 0
    for rank in range(schedule.layout.num_ranks):
        sizes = []
        for step in schedule.steps:
            rows, (heads, kv_heads) = traffic.rows(step), traffic.heads(step, rank)
            queries = sum(rows.queries[rank].values()) * heads if step.width > 1 else 0
            sizes.append((queries + 2 * sum(rows.keys[rank].values()) * kv_heads) * head_dim * itemsize)
        sums = [sum(sizes)] if keep_gathered else [sum(sizes[i : i + AHEAD + 1]) for i in range(len(sizes))]
        most = max(most, *sums, 0)
    return most

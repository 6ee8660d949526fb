"""Which tokens of a sequence each rank owns: runs of neighboring tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from ..problem import Mask

LayoutName = Literal["contiguous", "head_tail", "balanced", "cyclic"]
LAYOUTS: tuple[LayoutName, ...] = ("contiguous", "head_tail", "balanced", "cyclic")
CYCLIC_BLOCK = 256  # tokens; a cache grows by such blocks on one rank after another
PIECES_PER_RANK = 16  # in the balanced layout; more pieces balance better, and travel as more messages


class Run(NamedTuple):
    """The tokens start <= t < stop."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class OwnedRun(NamedTuple):
    """A run of tokens, the rank that owns it, and the row of that rank's tensors at which it begins."""

    start: int
    stop: int
    rank: int
    row: int


@dataclass(frozen=True)
class Layout:
    """The tokens that each rank owns.

    Attributes:
        runs: the runs of each rank, which ascend and do not touch each other. A rank's tensors have its tokens in this
            order.
    """

    runs: tuple[tuple[Run, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.runs)

    def count(self, rank: int) -> int:
        """The number of tokens of a rank."""
        return sum(run.size for run in self.runs[rank])

    @cached_property
    def owners(self) -> tuple[OwnedRun, ...]:
        """All runs, by their first token."""
        found = []
        for rank, runs in enumerate(self.runs):
            row = 0
            for run in runs:
                found.append(OwnedRun(run.start, run.stop, rank, row))
                row += run.size
        return tuple(sorted(found))

    @cached_property
    def _starts(self) -> list[int]:
        return [run.start for run in self.owners]

    def owned(self, start: int, stop: int) -> list[OwnedRun]:
        """The tokens start <= t < stop, as runs that one rank owns each."""
        found = []
        for run in self.owners[max(0, bisect_right(self._starts, start) - 1) :]:
            if run.start >= stop:
                break
            first, end = max(start, run.start), min(stop, run.stop)
            if first < end:
                found.append(OwnedRun(first, end, run.rank, run.row + first - run.start))
        return found


def make_layout(name: LayoutName, num_ranks: int, cu_seqlens: Sequence[int], mask: Mask) -> Layout:
    """The layout of this name for sequences that begin at all offsets but the last."""
    total = cu_seqlens[-1]
    if name == "contiguous":
        size = -(-total // num_ranks)  # as torch.chunk and DTensor cut it
        cuts = [min(total, size * r) for r in range(num_ranks + 1)]
        return Layout(tuple(_runs([(cuts[r], cuts[r + 1])]) for r in range(num_ranks)))
    if name == "head_tail":
        cuts = [_cut(total, 2 * num_ranks, i) for i in range(2 * num_ranks + 1)]
        pairs = ((r, 2 * num_ranks - 1 - r) for r in range(num_ranks))
        return Layout(tuple(_runs([(cuts[i], cuts[i + 1]) for i in pair]) for pair in pairs))
    if name == "cyclic":
        starts = range(0, total, CYCLIC_BLOCK)
        blocks = [(start, min(start + CYCLIC_BLOCK, total)) for start in starts]
        return Layout(tuple(_runs(blocks[r::num_ranks]) for r in range(num_ranks)))
    return _balanced(num_ranks, cu_seqlens, mask)


def _cut(total: int, count: int, index: int) -> int:
    """Where piece `index` of `count` pieces of `total` tokens begins. Pieces differ in size by one token at most."""
    return total * index // count


def _runs(pieces: list[tuple[int, int]]) -> tuple[Run, ...]:
    """Ascending runs, of which none is empty and no two touch."""
    runs: list[Run] = []
    for start, stop in sorted(pieces):
        if start == stop:
            continue
        if runs and runs[-1].stop == start:
            runs[-1] = Run(runs[-1].start, stop)
        else:
            runs.append(Run(start, stop))
    return tuple(runs)


def _balanced(num_ranks: int, cu_seqlens: Sequence[int], mask: Mask) -> Layout:
    """Equal pieces, the heaviest first: each goes to the rank with the least work that still lacks pieces."""
    total, count = cu_seqlens[-1], num_ranks * PIECES_PER_RANK
    pieces = [(_cut(total, count, i), _cut(total, count, i + 1)) for i in range(count)]
    work = [visible_pairs(Run(*piece), cu_seqlens, mask) for piece in pieces]
    owned: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for i in sorted(range(count), key=lambda i: (-work[i], i)):
        rank = min((r for r in range(num_ranks) if len(owned[r]) < PIECES_PER_RANK), key=lambda r: (load[r], r))
        owned[rank].append(pieces[i])
        load[rank] += work[i]
    return Layout(tuple(_runs(pieces) for pieces in owned))


# ---------------------------------------------------------------- what queries see


def documents(run: Run, cu_seqlens: Sequence[int]) -> list[tuple[int, Run]]:
    """A run, cut where a sequence begins: the number of the sequence and its tokens."""
    found, start = [], run.start
    number = bisect_right(cu_seqlens, start) - 1
    while start < run.stop:
        stop = min(run.stop, cu_seqlens[number + 1])
        if start < stop:
            found.append((number, Run(start, stop)))
        start, number = stop, number + 1
    return found


def visible_keys(run: Run, document: Run, mask: Mask) -> Run:
    """The shortest run of keys that has all keys that the queries of a run see, and the queries' own positions."""
    left, right = mask.window_left, mask.window_right
    start = document.start if left is None else max(document.start, run.start - left)
    stop = document.stop if right is None else min(document.stop, run.stop + right)
    return Run(min(start, run.start), max(stop, run.stop))


def visible_pairs(run: Run, cu_seqlens: Sequence[int], mask: Mask) -> int:
    """The number of visible pairs of a query of the run and a key."""
    total = 0
    for number, piece in documents(run, cu_seqlens):
        first, end = cu_seqlens[number], cu_seqlens[number + 1]
        left = end if mask.window_left is None else mask.window_left
        right = end if mask.window_right is None else mask.window_right
        stops = _sum_clamped(piece, right + 1, first, end)
        starts = _sum_clamped(piece, -left, first, end)
        total += max(0, stops - starts)
    return total


def most_keys(run: Run, cu_seqlens: Sequence[int], mask: Mask) -> int:
    """The most keys that one query of the run sees."""
    found = 0
    for number, piece in documents(run, cu_seqlens):
        document = Run(cu_seqlens[number], cu_seqlens[number + 1])
        # the ends of the run, and where the window leaves the ends of the sequence
        before, behind = mask.window_left or 0, mask.window_right or 0
        ends = piece.start, piece.stop - 1, document.start + before, document.stop - 1 - behind
        queries = [min(max(query, piece.start), piece.stop - 1) for query in ends]
        found = max(found, *(visible_keys(Run(q, q + 1), document, mask).size for q in queries))
    return found


def _sum_clamped(run: Run, shift: int, least: int, greatest: int) -> int:
    """The sum of min(greatest, max(least, t + shift)) over the tokens t of a run."""
    low = min(max(least - shift, run.start), run.stop)  # before this token, t + shift is below least
    high = min(max(greatest - shift, low), run.stop)  # from this token on, t + shift is at least greatest
    middle = (low + high - 1) * (high - low) // 2 + shift * (high - low)
    return least * (low - run.start) + middle + greatest * (run.stop - high)

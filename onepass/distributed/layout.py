"""Which tokens of a sequence each rank owns: runs of neighboring tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ..problem import Mask


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


def most_queries(runs: Sequence[Run], cu_seqlens: Sequence[int], mask: Mask) -> int:
    """The most queries of some runs, which ascend and do not touch each other, that see one key."""
    pieces: dict[int, list[Run]] = {}
    for run in runs:
        for number, piece in documents(run, cu_seqlens):
            pieces.setdefault(number, []).append(piece)
    found = 0
    for number, of_document in pieces.items():
        first, last = cu_seqlens[number], cu_seqlens[number + 1] - 1
        left = last if mask.window_left is None else mask.window_left
        right = last if mask.window_right is None else mask.window_right
        # queries from key - right to key + left see a key; they are most where one of the ends meets a run's
        ends = {piece.start + right for piece in of_document} | {piece.stop - 1 - left for piece in of_document}
        before = _Counter(of_document)
        for key in {min(max(end, first), last) for end in ends}:
            found = max(found, before(key + left + 1) - before(key - right))
    return found


class _Counter:
    """Counts the tokens of some runs, which ascend, below a token."""

    def __init__(self, runs: Sequence[Run]):
        self.runs, self.starts = runs, [run.start for run in runs]
        self.sums = list(accumulate((run.size for run in runs), initial=0))

    def __call__(self, token: int) -> int:
        i = bisect_right(self.starts, token) - 1
        return self.sums[i] + min(token - self.starts[i], self.runs[i].size) if i >= 0 else 0


def _sum_clamped(run: Run, shift: int, least: int, greatest: int) -> int:
    """The sum of min(greatest, max(least, t + shift)) over the tokens t of a run."""
    low = min(max(least - shift, run.start), run.stop)  # before this token, t + shift is below least
    high = min(max(greatest - shift, low), run.stop)  # from this token on, t + shift is at least greatest
    middle = (low + high - 1) * (high - low) // 2 + shift * (high - low)
    return least * (low - run.start) + middle + greatest * (run.stop - high)

"""The layouts that a plan may have: contiguous, head and tail, cyclic, and balanced by the work of each token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from ..problem import Mask
from .layout import Layout, Run, visible_pairs
from .schedule import Schedule, Step

LayoutName = Literal["contiguous", "head_tail", "balanced", "cyclic"]
LAYOUTS: tuple[LayoutName, ...] = ("contiguous", "head_tail", "balanced", "cyclic")
CYCLIC_BLOCK = 256  # tokens; a cache grows by such blocks on one rank after another
EXCHANGES = 4  # for each rank, at most, to even out the work
SLACK = 0.02  # how much a rank's work may differ from the mean, as a share of it
# The visible pairs of a kv head that take as long to compute as a row of k and v takes to travel. At 250 GB/s, 512
# bytes take 2 ns. A Hopper GPU computes 300 pairs of a group of 8 query heads in this time, and 2600 pairs of one head.
PAIRS_OF_A_ROW = 1000


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
    return _balanced(num_ranks, tuple(cu_seqlens), mask)


def _cut(total: int, count: int, index: int) -> int:
    """Where piece `index` of `count` pieces of `total` tokens begins. Pieces differ in size by one token at most."""
    return total * index // count


def _runs(pieces: Sequence[tuple[int, int]]) -> tuple[Run, ...]:
    """Ascending runs; none is empty, and no two touch."""
    runs: list[Run] = []
    for start, stop in sorted(pieces):
        if start == stop:
            continue
        if runs and runs[-1].stop == start:
            runs[-1] = Run(runs[-1].start, stop)
        else:
            runs.append(Run(start, stop))
    return tuple(runs)


# ---------------------------------------------------------------- balanced


@lru_cache(maxsize=8)  # a plan tries several engines and numbers of steps with the same layout
def _balanced(num_ranks: int, cu_seqlens: tuple[int, ...], mask: Mask) -> Layout:
    """The layout whose slowest rank needs the least time, by its work and the keys that it receives, of several."""
    found = {_Division(num_ranks, cu_seqlens, mask).make(num_divided): None for num_divided in (0, 1, num_ranks)}
    return min(found, key=lambda layout: slowest(layout, cu_seqlens, mask))


def slowest(layout: Layout, cu_seqlens: Sequence[int], mask: Mask) -> int:
    """What the slowest rank does with `engine="keys"`, in visible pairs."""
    step = Step(1, 0, 1)
    schedule = Schedule(layout, tuple(cu_seqlens), mask, 1, 1, (step,))
    found = 0
    for rank, runs in enumerate(layout.runs):
        pairs = sum(visible_pairs(run, cu_seqlens, mask) for run in runs)
        rows = sum(piece.rows for piece in schedule.key_pieces(step, rank) if piece.source != rank)
        found = max(found, pairs + PAIRS_OF_A_ROW * rows)
    return found


class _Division:
    """Sequences that are dealt to ranks whole, where their tokens and their work allow, and divided where they do not.

    Every rank gets its equal number of tokens. The sequences with the most work come first. Sequences that do not fit
    are divided last, the longest of them at the very end: it has tokens with any number of keys, from few to all of its
    own, and so fills the tokens and the work that ranks still lack.
    """

    def __init__(self, num_ranks: int, cu_seqlens: Sequence[int], mask: Mask):
        total = cu_seqlens[-1]
        self.cu_seqlens, self.mask = cu_seqlens, mask
        self.sequences = [Run(start, stop) for start, stop in pairwise(cu_seqlens) if start < stop]
        self.work = [self.pairs(run) for run in self.sequences]
        self.tokens = [_cut(total, num_ranks, r + 1) - _cut(total, num_ranks, r) for r in range(num_ranks)]
        self.mean_tokens, self.mean_work = max(total / num_ranks, 1.0), max(sum(self.work) / num_ranks, 1.0)
        self.missing = [self.mean_work] * num_ranks  # the work that each rank still lacks, as self.tokens its tokens
        self.owned: list[list[Run]] = [[] for _ in range(num_ranks)]

    def pairs(self, run: Run) -> int:
        return visible_pairs(run, self.cu_seqlens, self.mask)

    def make(self, num_divided: int) -> Layout:
        """The layout. Args: num_divided: how many of the heaviest sequences are divided even if they fit."""
        divided = []
        for place, i in enumerate(sorted(range(len(self.sequences)), key=lambda i: (-self.work[i], i))):
            rank = self._fitting(i) if place >= num_divided else None
            if rank is None:
                divided.append(i)
            else:
                self._give(rank, self.sequences[i])
        for i in reversed(divided):
            self._divide(self.sequences[i], self.work[i] / self.sequences[i].size)
        self._even_out()
        return Layout(tuple(_runs(runs) for runs in self.owned))

    def _give(self, rank: int, run: Run) -> None:
        if not run.size:
            return
        self.owned[rank].append(run)
        self.tokens[rank] -= run.size
        self.missing[rank] -= self.pairs(run)

    def _fitting(self, i: int) -> int | None:
        """The rank that a whole sequence goes to: long ones where work is missing, and short ones where tokens are."""
        size, work = self.sequences[i].size, self.work[i]
        least = work - SLACK * self.mean_work
        fits = [r for r, tokens in enumerate(self.tokens) if tokens >= size and self.missing[r] >= least]
        by_work, by_tokens = work / self.mean_work**2, size / self.mean_tokens**2
        return max(fits, key=lambda r: (self.missing[r] * by_work + self.tokens[r] * by_tokens, -r), default=None)

    def _divide(self, run: Run, mean: float) -> None:
        """Divide a sequence among the ranks that lack tokens with about as much work as its own.

        Each takes tokens from both ends, in the proportion that gives it the work that it lacks, and the last one takes
        the middle. Args: mean: the sequence's work, per token.
        """
        takers, room = [], 0
        for rank in sorted(self._lacking(), key=lambda r: (abs(self._need(r) - mean), r)):
            if room < run.size:
                takers.append(rank)
                room += self.tokens[rank]
        takers.sort(key=lambda r: (-abs(self._need(r) - mean), r))  # extreme needs first: the middle is left
        for rank in takers[:-1]:
            size = min(self.tokens[rank], run.size)
            front = self._front(run, size, self.missing[rank])
            head, tail = Run(run.start, run.start + front), Run(run.stop - (size - front), run.stop)
            self._give(rank, head)
            self._give(rank, tail)
            run = Run(head.stop, tail.start)
        self._give(takers[-1], run)

    def _lacking(self) -> list[int]:
        return [rank for rank, tokens in enumerate(self.tokens) if tokens]

    def _need(self, rank: int) -> float:
        """The work of each token that a rank lacks."""
        return self.missing[rank] / self.tokens[rank]

    def _even_out(self) -> None:
        """Exchange tokens between the rank with the most work and the one with the least, while that helps."""
        for _ in range(EXCHANGES * len(self.owned)):
            ranks = range(len(self.owned))
            most, least = min(ranks, key=lambda r: self.missing[r]), max(ranks, key=lambda r: self.missing[r])
            is_even = max(-self.missing[most], self.missing[least]) <= SLACK * self.mean_work
            if is_even or not self._exchange(most, least):
                return

    def _exchange(self, most: int, least: int) -> bool:
        """Exchange tokens of one rank's densest run for as many of the other's sparsest. Returns: whether it helps."""
        if not self.owned[most] or not self.owned[least]:
            return False
        dense = max(self.owned[most], key=lambda run: (self.pairs(run) / run.size, run))
        sparse = min(self.owned[least], key=lambda run: (self.pairs(run) / run.size, run))
        wanted = (self.missing[least] - self.missing[most]) / 2
        # the end of the first run that has the most work, and the end of the second one that has the least
        dense_start, sparse_start = self._is_heavier_at_start(dense), not self._is_heavier_at_start(sparse)

        def gain(count: int) -> int:
            given, _ = _cut_off(dense, count, dense_start)
            taken, _ = _cut_off(sparse, count, sparse_start)
            return self.pairs(given) - self.pairs(taken)

        low, high = 0, min(dense.size, sparse.size)
        while low < high:
            middle = (low + high + 1) // 2
            if gain(middle) <= wanted:
                low = middle
            else:
                high = middle - 1
        if gain(low) <= 0:
            return False
        self._take(most, dense)
        self._take(least, sparse)
        for run, at_start, giver, taker in ((dense, dense_start, most, least), (sparse, sparse_start, least, most)):
            given, kept = _cut_off(run, low, at_start)
            self._give(taker, given)
            self._give(giver, kept)
        return True

    def _is_heavier_at_start(self, run: Run) -> bool:
        return self.pairs(Run(run.start, run.start + 1)) > self.pairs(Run(run.stop - 1, run.stop))

    def _take(self, rank: int, run: Run) -> None:
        self.owned[rank].remove(run)
        self.tokens[rank] += run.size
        self.missing[rank] += self.pairs(run)

    def _front(self, run: Run, size: int, wanted: float) -> int:
        """How many of `size` tokens from both ends of a run are at its start, for about this much work."""

        def work(front: int) -> int:
            back = size - front
            return self.pairs(Run(run.start, run.start + front)) + self.pairs(Run(run.stop - back, run.stop))

        rises = work(size) > work(0)
        low, high = 0, size
        while low < high:
            middle = (low + high) // 2
            if (work(middle) < wanted) == rises:
                low = middle + 1
            else:
                high = middle
        return low


def _cut_off(run: Run, count: int, at_start: bool) -> tuple[Run, Run]:
    """Tokens at one end of a run, and the rest."""
    if at_start:
        return Run(run.start, run.start + count), Run(run.start + count, run.stop)
    return Run(run.stop - count, run.stop), Run(run.start, run.stop - count)

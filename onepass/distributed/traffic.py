"""What each rank computes, receives and copies in a step, in pairs, rows and bytes. No process group is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .layout import Layout, most_keys, most_queries, visible_pairs
from .schedule import AHEAD, Piece, Schedule, Step

LSE_BYTES = 4


class Work(NamedTuple):
    """A call of one head.

    Attributes:
        most_keys: the most keys that one of its queries sees. most_queries: the most queries that see one key.
        is_packed: whether it has packed sequences, whose tiles follow each other as they come. Other backwards begin
            with their longest tiles, so that the multiprocessors end together.
    """

    pairs: int
    most_keys: int
    most_queries: int
    is_packed: bool


class HeadRows(NamedTuple):
    """Rows of q and of k that concern a rank in a step, counted once for each head that is computed with them.

    Attributes:
        queries, keys: rows of other ranks, which come before the computation.
        sent_queries, sent_keys: rows that go to other ranks, from which results and gradients come back after it.
        own_queries, own_keys: rows that the rank both owns and computes with.
    """

    queries: int
    keys: int
    sent_queries: int
    sent_keys: int
    own_queries: int
    own_keys: int


class Bytes(NamedTuple):
    """Bytes of a rank in a step.

    Attributes:
        before, after: bytes that it receives before the computation, and after it.
        copied: bytes of rows that it copies in its memory: into messages and buffers, and to their place.
    """

    before: int
    after: int
    copied: int


class StepRows(NamedTuple):
    """For each rank: the rows that it computes with, by the rank that owns them, and its calls."""

    queries: list[dict[int, int]]
    keys: list[dict[int, int]]
    calls: list[list[Work]]

    @classmethod
    def of(cls, schedule: Schedule, step: Step) -> StepRows:
        ranks = range(schedule.layout.num_ranks)
        rows_of_ranks = [schedule.row_of_ranks(step, rank) for rank in ranks]
        keys: dict[range, dict[int, int]] = {}
        calls: dict[range, list[Work]] = {}
        for rank, row in zip(ranks, rows_of_ranks, strict=True):
            if row not in keys:
                keys[row] = _by_source(schedule.key_pieces(step, rank))
                calls[row] = _calls(schedule, step, rank)
        queries = [{other: schedule.layout.count(other) for other in row} for row in rows_of_ranks]
        return cls(queries, [keys[row] for row in rows_of_ranks], [calls[row] for row in rows_of_ranks])


SharedRows = dict[tuple[Layout, int], StepRows]  # rows depend on the layout and the width of a step alone


class Traffic:
    """The rows and bytes of the steps of a schedule.

    Args:
        shared: the rows that other steps for the same sequences have found; this object adds its own.
    """

    def __init__(
        self,
        schedule: Schedule,
        head_dim: int,
        itemsize: int,
        keep_gathered: bool = False,
        shared: SharedRows | None = None,
    ):
        self.schedule, self.keep_gathered = schedule, keep_gathered
        self.row = head_dim * itemsize
        self.sums_keys = schedule.sums_keys()
        self.sum_row = head_dim * 4 if self.sums_keys else self.row  # of dk or dv
        self._shared = {} if shared is None else shared
        self._rows: dict[int, StepRows] = {}
        self._head_rows: dict[Step, list[HeadRows]] = {}

    def rows(self, step: Step) -> StepRows:
        """Rows that travel in a step, which depend on its width alone."""
        if step.width not in self._rows:
            key = self.schedule.layout, step.width
            if key not in self._shared:
                self._shared[key] = StepRows.of(self.schedule, step)
            self._rows[step.width] = self._shared[key]
        return self._rows[step.width]

    def alike(self, step: Step) -> Step:
        """The step that stands for all steps with the same numbers of heads on all ranks, which cost the same."""
        is_whole = step.first_head + step.width * step.heads <= self.schedule.num_heads_q
        return step._replace(first_head=0) if is_whole else step

    def heads(self, step: Step) -> list[tuple[int, int]]:
        """Query heads and kv heads that each rank computes."""
        found = []
        for rank in range(self.schedule.layout.num_ranks):
            queries, keys = self.schedule.heads_q(step, rank), self.schedule.heads_kv(step, rank)
            heads = queries.stop - queries.start
            found.append((heads, keys.stop - keys.start if heads else 0))
        return found

    def head_rows(self, step: Step) -> list[HeadRows]:
        """The rows of each rank."""
        if step in self._head_rows:
            return self._head_rows[step]
        rows, heads = self.rows(step), self.heads(step)
        counts = [[0] * len(HeadRows._fields) for _ in heads]
        for rank, of_rank in enumerate(heads):
            for i, by_source in enumerate((rows.queries[rank], rows.keys[rank])):
                for source, count in by_source.items():
                    if source == rank:
                        counts[rank][4 + i] += count * of_rank[i]
                    else:
                        counts[rank][i] += count * of_rank[i]
                        counts[source][2 + i] += count * of_rank[i]
        found = self._head_rows[step] = [HeadRows(*of_rank) for of_rank in counts]
        return found

    def forward(self, step: Step) -> list[Bytes]:
        """The bytes of each rank. q, k and v come before the computation; out and lse after it."""
        found = []
        for rows in self.head_rows(step):
            before = (rows.queries + 2 * rows.keys) * self.row
            after = rows.sent_queries * (self.row + LSE_BYTES)
            found.append(Bytes(before, after, sum(self._copied(step, rows)) * self.row))
        return found

    def backward(self, step: Step) -> list[Bytes]:
        """The bytes of each rank.

        Before the computation come the gradient of out, with two numbers for each of its rows, and q, k and v, unless
        they are kept. After it come gradients of q, k and v.

        Where queries travel, a backward also reads out and its gradient, in the time of a copy of one of them.
        """
        found = []
        for rows in self.head_rows(step):
            queries, keys, results = self._copied(step, rows)  # queries: of the gradient of out, too
            before = rows.queries * (self.row + 2 * LSE_BYTES)
            copied = queries + results
            if step.width > 1:
                copied += rows.own_queries + rows.sent_queries
            if not self.keep_gathered:
                before += (rows.queries + 2 * rows.keys) * self.row
                copied += queries + keys
            after = rows.sent_queries * self.row + 2 * rows.sent_keys * self.sum_row
            sums = rows.keys + rows.own_keys + rows.sent_keys
            if self.sums_keys:  # they are added up, and then rounded
                sums += rows.own_keys + rows.sent_keys
            found.append(Bytes(before, after, copied * self.row + 2 * sums * self.sum_row))
        return found

    def _copied(self, step: Step, rows: HeadRows) -> tuple[int, int, int]:
        """Head rows of q, of k and v, and of out that are copied."""
        all_queries = rows.queries + rows.sent_queries + rows.own_queries
        queries = all_queries if step.width > 1 else 0  # a rank alone uses its own rows where they are
        # own keys are used where they are if they are all that the rank needs
        keys = 2 * (rows.sent_keys + rows.keys + (rows.own_keys if rows.keys else 0))
        is_whole = step.width == 1 and len(self.schedule.steps) == 1  # the results of the step are those of the call
        results = 0 if is_whole else all_queries
        return queries, keys, results


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


def buffer_bytes(schedule: Schedule, head_dim: int, itemsize: int, keep_gathered: bool = False) -> int:
    """The most bytes of received q, k and v that a rank has at one time in a forward.

    A rank has the rows of the step that is computed and of the `AHEAD` steps whose messages are under way; with
    keep_gathered it has the rows of all steps.
    """
    traffic = Traffic(schedule, head_dim, itemsize)
    found = []
    for step in schedule.steps:
        width = step.width
        rows = [(r.queries + r.own_queries if width > 1 else 0, r.keys + r.own_keys) for r in traffic.head_rows(step)]
        found.append([(queries + 2 * keys) * traffic.row for queries, keys in rows])
    at_a_time = len(found) if keep_gathered else AHEAD + 1
    return max(sum(sizes[i : i + at_a_time]) for sizes in zip(*found, strict=True) for i in range(len(sizes)))

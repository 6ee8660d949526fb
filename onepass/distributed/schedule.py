"""The schedule of a plan: each rank's heads and queries in each step, and the rows that travel for them.

A rank computes a step's heads for a step's queries. The ranks are dealt into rows of `width` ranks; the ranks of a row
share their queries, and deal the heads of the step among themselves. With width = P every rank has all queries and its
own heads (all-to-all over heads, DeepSpeed-Ulysses, arXiv:2309.14509). With width = 1 every rank has its own queries
and all heads of the step, whose keys and values are gathered. A width in between does both. A softmax row is computed
by one rank over all of its keys, in every case, so there are no partial outputs to merge and to round.

Rows of q travel within a row of ranks; rows of k and v come from every rank that owns a key which a query of the row
sees. Results and gradients travel back the same ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..problem import Mask
from .layout import Layout, OwnedRun, Run, documents, visible_keys

# The number of steps whose messages are under way while one is computed. On a GPU a kernel of attention takes all
# multiprocessors, and messages that become ready together with it would wait for its end. With two steps, the messages
# of the next step are ready before the kernel starts.
AHEAD = 2


class Step(NamedTuple):
    """Some of the heads: an exchange of rows, and the computation with them.

    Attributes:
        width: ranks that share queries; a divisor of the number of ranks.
        first_head: the first query head.
        heads: query heads of each rank of a row.
    """

    width: int
    first_head: int
    heads: int


class Piece(NamedTuple):
    """Rows that go from one rank's tensors to another's buffer.

    Attributes:
        source: the rank that owns the rows. source_row: where they begin in its tensors.
        row: where they begin in the buffer. rows: how many there are.
    """

    source: int
    source_row: int
    row: int
    rows: int


class Segment(NamedTuple):
    """Queries of one sequence (document), and the keys that they see, among which the queries' own tokens are.

    Attributes:
        document: the number of the sequence.
        keys: the tokens of the keys.
        runs: the tokens of the queries.
        query_row, key_row: the rows of the buffers at which they begin.
    """

    document: int
    keys: Run
    runs: tuple[Run, ...]
    query_row: int
    key_row: int

    @property
    def num_queries(self) -> int:
        return sum(run.size for run in self.runs)


def make_steps(num_ranks: int, num_heads_q: int, num_heads_kv: int, width: int, chunks: int) -> tuple[Step, ...]:
    """Steps over all heads.

    Heads that do not divide among the ranks of a row go into last steps with narrower rows, so that every rank has
    equal shares of the heads.

    Args:
        width: a divisor of num_ranks. chunks: about how many steps to make, whose exchanges and computing overlap.
    """
    group = num_heads_q // max(num_heads_kv, 1)
    steps: list[Step] = []
    first = 0
    while first < num_heads_q:
        left = num_heads_q - first
        heads = _heads_of_a_rank(first, left, width, group, max(1, num_heads_q // (width * chunks)))
        if heads == 0:
            width = max(w for w in range(1, width) if num_ranks % w == 0)
            continue
        while first + width * heads <= num_heads_q:
            steps.append(Step(width, first, heads))
            first += width * heads
    return tuple(steps)


def with_short_ends(steps: tuple[Step, ...], group: int, middle: int, has_short_end: bool) -> tuple[Step, ...]:
    """Equal steps of which all but the first, and if wanted the last, are joined into `middle` larger ones.

    The messages of the first step, and the results of the last, have no computing to hide behind, so these are best
    short. The computing itself is faster in few calls.

    Args: group: query heads of a kv head.
    Returns: the steps as they are if they are no equal steps of whole kv heads, or too few.
    """
    inner = steps[1 : len(steps) - has_short_end]
    are_equal = all(step[::2] == steps[0][::2] for step in steps)
    if len(inner) <= middle or not are_equal or steps[0].heads % group:
        return steps
    found = [steps[0]]
    for i in range(middle):
        joined = inner[len(inner) * i // middle : len(inner) * (i + 1) // middle]
        found.append(joined[0]._replace(heads=sum(step.heads for step in joined)))
    return (*found, *steps[len(steps) - has_short_end :])


def steps_over_heads(num_ranks: int, num_heads_q: int, num_heads_kv: int, chunks: int) -> tuple[Step, ...]:
    """Steps in which every rank has all queries, also where some ranks then have fewer heads than others."""
    group = num_heads_q // num_heads_kv
    wanted = max(1, -(-num_heads_q // (num_ranks * chunks)))
    heads = _heads_of_a_rank(0, max(wanted * num_ranks, num_ranks), num_ranks, group, wanted)
    return tuple(Step(num_ranks, first, heads) for first in range(0, num_heads_q, num_ranks * heads))


def _heads_of_a_rank(first: int, left: int, width: int, group: int, wanted: int) -> int:
    """How many query heads a rank computes in a step, about `wanted`; 0 if there are too few for a row of ranks.

    They belong to whole kv heads, or to a part of one. A kv head is divided only where there are fewer kv heads than
    ranks, since each part gathers its keys again.
    """
    most = min(max(wanted, group), left // width)
    if most >= group and first % group == 0:
        return most // group * group
    return max((n for n in range(1, most + 1) if group % n == 0 and first % n == 0), default=0)


@dataclass(frozen=True)
class Schedule:
    """The steps of a plan, and what they mean for each rank.

    Attributes:
        cu_seqlens: where sequences begin, and the number of tokens.
    """

    layout: Layout
    cu_seqlens: tuple[int, ...]
    mask: Mask
    num_heads_q: int
    num_heads_kv: int
    steps: tuple[Step, ...]
    from_start: bool = False  # whether keys are gathered from the first one of a sequence on, whatever the mask hides

    @property
    def qhead_per_kvhead(self) -> int:
        return self.num_heads_q // max(self.num_heads_kv, 1)

    def heads_q(self, step: Step, rank: int) -> slice:
        first = min(step.first_head + rank % step.width * step.heads, self.num_heads_q)
        return slice(first, min(first + step.heads, self.num_heads_q))

    def heads_kv(self, step: Step, rank: int) -> slice:
        heads = self.heads_q(step, rank)
        return slice(heads.start // self.qhead_per_kvhead, -(-heads.stop // self.qhead_per_kvhead))

    def heads_kv_of_row(self, step: Step) -> slice:
        """The kv heads of all ranks of a row."""
        return slice(self.heads_kv(step, 0).start, self.heads_kv(step, step.width - 1).stop)

    def row_of_ranks(self, step: Step, rank: int) -> range:
        """The ranks that share queries with this one."""
        first = rank // step.width * step.width
        return range(first, first + step.width)

    def sums_keys(self) -> bool:
        """Whether the gradient of one key is a sum over several ranks or steps."""
        return any(s.width < self.layout.num_ranks or s.heads % self.qhead_per_kvhead for s in self.steps)

    def queries(self, step: Step, rank: int) -> list[OwnedRun]:
        """The runs that a rank computes, ascending."""
        ranks = self.row_of_ranks(step, rank)
        return [run for run in self.layout.owners if run.rank in ranks]

    def segments(self, step: Step, rank: int) -> tuple[Segment, ...]:
        """The queries that a rank computes, by sequence, with the keys that they see.

        Runs of a sequence whose keys overlap or touch are in one segment.
        """
        found: list[Segment] = []
        query_row = key_row = 0
        for owned in self.queries(step, rank):
            for document, run in documents(Run(owned.start, owned.stop), self.cu_seqlens):
                whole = Run(self.cu_seqlens[document], self.cu_seqlens[document + 1])
                keys = visible_keys(run, whole, self.mask)
                keys = Run(whole.start, keys.stop) if self.from_start else keys
                last = found[-1] if found and found[-1].document == document else None
                if last is not None and keys.start <= last.keys.stop:
                    runs = _extended(last.runs, run)
                    merged = Run(min(last.keys.start, keys.start), max(last.keys.stop, keys.stop))
                    key_row += merged.size - last.keys.size
                    found[-1] = last._replace(keys=merged, runs=runs)
                else:
                    found.append(Segment(document, keys, (run,), query_row, key_row))
                    key_row += keys.size
                query_row += run.size
        return tuple(found)

    def query_pieces(self, step: Step, rank: int) -> list[Piece]:
        """The pieces of the queries that a rank computes, and where they come from."""
        pieces: list[Piece] = []
        row = 0
        for run in self.queries(step, rank):
            _append(pieces, Piece(run.rank, run.row, row, run.stop - run.start))
            row += run.stop - run.start
        return pieces

    def key_pieces(self, step: Step, rank: int) -> list[Piece]:
        """The pieces of the keys that a rank's queries see, and where they come from."""
        pieces: list[Piece] = []
        for segment in self.segments(step, rank):
            for run in self.layout.owned(*segment.keys):
                row = segment.key_row + run.start - segment.keys.start
                _append(pieces, Piece(run.rank, run.row, row, run.stop - run.start))
        return pieces


def _extended(runs: tuple[Run, ...], run: Run) -> tuple[Run, ...]:
    if runs[-1].stop == run.start:
        return (*runs[:-1], Run(runs[-1].start, run.stop))
    return (*runs, run)


def _append(pieces: list[Piece], piece: Piece) -> None:
    """Add a piece, or extend the last one if the new rows follow its rows both in the source and in the buffer."""
    last = pieces[-1] if pieces else None
    if (
        last is not None
        and last.source == piece.source
        and last.source_row + last.rows == piece.source_row
        and last.row + last.rows == piece.row
    ):
        pieces[-1] = last._replace(rows=last.rows + piece.rows)
    elif piece.rows:
        pieces.append(piece)

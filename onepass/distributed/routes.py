"""Which rows of a step's tensors go from one rank to another, and how they are copied.

A few runs of rows are copied one by one. Many runs, as balanced documents have them, are gathered by one kernel by the
numbers of their rows, because each copy takes 10 us of the host's time, and less of the GPU's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .exchange import alike, copy, to_device
from .schedule import Piece

FEW_PIECES = 8  # so many pieces between two ranks are copied one by one

Selection = slice | Tensor  # a run of rows, or the numbers of rows, int64, without repetition


class Rows(NamedTuple):
    """Rows that go from one rank's tensors to another's buffer, in this order.

    Attributes:
        source: the rank that owns the rows. source_rows: their places in its tensors.
        rows: their places in the buffer. size: how many there are.
    """

    source: int
    source_rows: Selection
    rows: Selection
    size: int


class Route(NamedTuple):
    """The rows of one step that concern one rank.

    Attributes:
        pieces: the pieces of this rank's buffer.
        incoming: the rows of this rank's buffer, put together by their source.
        outgoing: for each rank that computes with rows of this one, the rows of its buffer that come from here.
        travels: whether rows go from any rank to another one; it is the same on all ranks of the group.
    """

    pieces: list[Piece]
    incoming: list[Rows]
    outgoing: list[tuple[int, list[Rows]]]
    travels: bool

    def is_own(self, rank: int, count: int) -> bool:
        """Whether the buffer would be a copy of this rank's own rows. Args: count: the number of these."""
        return self.pieces == [Piece(rank, 0, 0, count)]

    @classmethod
    def of(cls, pieces_of_ranks: Sequence[list[Piece]], rank: int, device: torch.device) -> Route:
        """The route of a rank. Args: pieces_of_ranks: the pieces of each rank's buffer."""
        outgoing = []
        for other, pieces in enumerate(pieces_of_ranks):
            if from_here := [piece for piece in pieces if piece.source == rank]:
                outgoing.append((other, put_together(from_here, device)))
        travels = any(piece.source != other for other, pieces in enumerate(pieces_of_ranks) for piece in pieces)
        return cls(pieces_of_ranks[rank], put_together(pieces_of_ranks[rank], device), outgoing, travels)


def put_together(pieces: Sequence[Piece], device: torch.device) -> list[Rows]:
    """The rows of each source, in the order of its pieces."""
    by_source: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_source.setdefault(piece.source, []).append(piece)
    found: list[Rows] = []
    for source, of_source in by_source.items():
        if len(of_source) <= FEW_PIECES:
            found += [Rows(source, _run(p.source_row, p.rows), _run(p.row, p.rows), p.rows) for p in of_source]
            continue
        counts = [piece.rows for piece in of_source]
        source_rows = torch.cat([torch.arange(p.source_row, p.source_row + p.rows) for p in of_source])
        rows = torch.cat([torch.arange(p.row, p.row + p.rows) for p in of_source])
        found.append(Rows(source, to_device(source_rows, device), to_device(rows, device), sum(counts)))
    return found


def _run(first: int, count: int) -> slice:
    return slice(first, first + count)


def take(t: Tensor, rows: Selection) -> Tensor:
    """Rows of a tensor: a view of a run, a copy otherwise."""
    return t[rows] if isinstance(rows, slice) else t.index_select(0, rows)


def put(t: Tensor, rows: Selection, values: Tensor) -> None:
    """Write rows of a tensor. The dtypes may be words of different sizes."""
    if isinstance(rows, slice):
        copy(t[rows], values)
    else:
        target, source = alike(t, values)
        target.index_copy_(0, rows, source)


def add(t: Tensor, rows: Selection, values: Tensor) -> None:
    """Add to rows of a tensor."""
    if isinstance(rows, slice):
        t[rows] += values
    else:
        t.index_add_(0, rows, values)

"""Rows are copied one run at a time, or gathered by their numbers."""

from types import SimpleNamespace

import pytest
import torch

from onepass.distributed.exchange import Message, words
from onepass.distributed.routes import FEW_PIECES, Route, Rows, add, put, put_together, take
from onepass.distributed.schedule import Piece
from onepass.distributed.shipments import KeyReturn

CPU = torch.device("cpu")


def pieces_of(count: int, source: int = 0) -> list[Piece]:
    """Every second run of 2 rows of the source, which the buffer has in the opposite order."""
    return [Piece(source, 4 * i, 2 * (count - 1 - i), 2) for i in range(count)]


@pytest.mark.parametrize("count", [1, FEW_PIECES, FEW_PIECES + 1, 20])
def test_rows_are_those_of_the_pieces(count):
    """Rows of all heads are taken, written into other rows, and added to them, whatever words they are copied in."""
    pieces = pieces_of(count)
    together = put_together(pieces, CPU)
    assert len(together) == (count if count <= FEW_PIECES else 1)
    assert sum(rows.size for rows in together) == 2 * count
    source = torch.randn(4 * count, 3, 8, dtype=torch.bfloat16)
    right = torch.zeros(2 * count, 3, 8, dtype=torch.bfloat16)
    for piece in pieces:
        right[piece.row : piece.row + 2] = source[piece.source_row : piece.source_row + 2]
    target, sums = torch.zeros_like(right), torch.ones(2 * count, 3, 8)
    for rows in together:
        put(words(target), rows.rows, take(source, rows.source_rows))
        add(sums, rows.rows, take(source, rows.source_rows).float())
        message = Message(0, *((source[rows.source_rows],) if count <= FEW_PIECES else (source, rows.source_rows)))
        sent = torch.empty(message.shape, dtype=source.dtype)
        message.write(sent)
        assert message.size == sent.numel() * 2
        assert torch.equal(sent, take(right, rows.rows))
    assert torch.equal(target, right)
    assert torch.equal(sums, 1 + right.float())


def test_ranks_give_rows_in_one_order():
    """A rank sends rows to another rank in the order in which the other rank takes them."""
    mixed = [piece for pair in zip(pieces_of(9, 0), pieces_of(9, 1), strict=True) for piece in pair]
    mixed = [piece._replace(row=2 * i) for i, piece in enumerate(mixed)]
    pieces_of_ranks = [mixed, mixed[::-1]]
    routes = [Route.of(pieces_of_ranks, rank, CPU) for rank in range(2)]
    for rank, route in enumerate(routes):
        assert route.travels
        assert route.pieces == pieces_of_ranks[rank]
        for other, outgoing in route.outgoing:
            theirs = [rows for rows in routes[other].incoming if rows.source == rank]
            for ours, right in zip(outgoing, theirs, strict=True):
                assert torch.equal(ours.source_rows, right.source_rows)
                assert torch.equal(ours.rows, right.rows)
    assert not Route.of([pieces_of(3, 0), pieces_of(9, 1)], 0, CPU).travels


def test_own_sums_of_rows_in_another_order():
    """A rank's own rows that are no run go where they belong, even if they are all of its rows."""
    order, heads = torch.tensor([2, 0, 3, 1]), slice(0, 2)
    values = torch.randn(4, 1, 2, 8)
    returned = SimpleNamespace(
        plan=SimpleNamespace(rank=0),
        heads_of=lambda rank: heads,
        own_rows=[Rows(0, order, torch.arange(4), 4)],
        own=[[values]],
    )
    (sums,) = KeyReturn.own_sums(returned, 4, heads)
    assert torch.equal(sums[order], values)

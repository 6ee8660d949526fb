"""Masks of one tile of scores: which pairs are hidden, and sums that hidden pairs must not reach."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..problem import AttentionProblem

Range = tuple[int, int]


def hidden_pairs(
    queries: Range, keys: Range, shift: int, window_left: int | None, window_right: int | None, device: torch.device
) -> Tensor:
    """Boolean (num_queries, num_keys): True where the query must not see the key.

    Args:
        queries, keys: half-open ranges of positions in one sequence.
        shift: seqlen_k - seqlen_q; query i stands at key position i + shift.
        window_left, window_right: how many keys before and after its position a query sees; None = all.
    """
    position = torch.arange(*queries, device=device)[:, None] + shift
    distance = torch.arange(*keys, device=device)[None, :] - position
    hidden = torch.zeros(distance.shape, dtype=torch.bool, device=device)
    if window_left is not None:
        hidden |= distance < -window_left
    if window_right is not None:
        hidden |= distance > window_right
    return hidden


class TilePairs(NamedTuple):
    """The mask of one tile, in the forms in which it is used.

    It is (queries, keys), or for modifiers (entries, kv heads, qhead_per_kvhead, queries, keys) with a size of 1
    wherever pairs do not differ.
    """

    hidden: Tensor  # bool, True where masked
    keep: Tensor  # 0.0 where masked, 1.0 elsewhere
    tile: tuple[int, ...] = ()  # for modifiers: the five sizes of the whole tile

    @property
    def matrix(self) -> Tensor:
        """Hidden pairs as (1 or heads, rows, keys) of a tile; fewer rows if query heads share them."""
        return self.hidden.expand(self.tile).flatten(0, 1).flatten(1, 2) if self.tile else self.hidden[None]


class TileMask:
    """The mask of one group of heads.

    Args:
        shift: seqlen_k - seqlen_q.
        operands: the tensors that probabilities or their gradients are multiplied with. A hidden pair has p = 0,
            and 0 * NaN = NaN: if any of them is not finite, hidden pairs have to be kept out of the products.
    """

    def __init__(self, problem: AttentionProblem, shift: int, *operands: Tensor):
        self.window = problem.mask.window_left, problem.mask.window_right
        self.shift = shift
        self.like = operands[0]
        self.dtype = problem.accum_dtype
        # a sum is finite only if every term is; it may overflow, which costs time and nothing else
        sees_all = problem.mask.is_full and not problem.has_row_ranges and not problem.has_bias
        self.operands_are_finite = sees_all or all(math.isfinite(float(x.sum())) for x in operands)
        self._recent: dict[tuple[int, int, int], TilePairs] = {}

    def pairs(self, queries: Range, keys: Range) -> TilePairs:
        """The mask of a tile. Tiles along a diagonal share one mask, which is made once."""
        where = keys[0] - queries[0], queries[1] - queries[0], keys[1] - keys[0]
        if where not in self._recent:
            if len(self._recent) >= 8:
                self._recent.clear()
            hidden = hidden_pairs(queries, keys, self.shift, *self.window, self.like.device)
            self._recent[where] = TilePairs(hidden, (~hidden).to(self.dtype))
        return self._recent[where]


def fill_hidden(tile: Tensor, pairs: TilePairs | None, value: float) -> None:
    """Set the hidden pairs of a tile to value, in place, whatever they hold."""
    if pairs is not None:
        _by_query_head(tile, pairs).masked_fill_(pairs.hidden, value)


def zero_hidden(tile: Tensor, pairs: TilePairs | None) -> None:
    """Set the hidden pairs of a tile to 0, in place, by a product: a sixth of the time, but NaN and inf become NaN."""
    if pairs is not None:
        _by_query_head(tile, pairs).mul_(pairs.keep)


def _by_query_head(tile: Tensor, pairs: TilePairs) -> Tensor:
    """Unstack the query heads of a tile (heads, qhead_per_kvhead * queries, keys)."""
    return tile.view(pairs.tile or (tile.shape[0], -1, *pairs.hidden.shape))


def add_visible(acc: Tensor, p: Tensor, operand: Tensor, hidden: Tensor) -> None:
    """acc += p @ operand, where a hidden pair adds nothing even if the operand is NaN or inf there.

    Args:
        acc: (heads, rows, head_dim). p: (heads, rows, columns). operand: (heads, columns, head_dim).
        hidden: (1 or heads, rows, columns), or fewer rows or columns if p repeats them (one block for each query head).
    """
    rows, columns = p.shape[1:]
    hidden = hidden.repeat(1, rows // hidden.shape[1], columns // hidden.shape[2])
    finite = operand.isfinite()
    acc.baddbmm_(p, operand.where(finite, 0.0))
    wild = operand.where(~finite, 0.0)
    for j in (~finite).any(-1).any(0).nonzero().flatten().tolist():
        seen = ~hidden[:, :, j, None] & (wild[:, None, j] != 0)
        acc += torch.where(seen, p[:, :, j, None] * wild[:, None, j], 0.0)

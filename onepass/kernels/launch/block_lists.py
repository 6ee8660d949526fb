"""Which blocks a tile visits under a mask that is no interval for each query: lists, made on the device.

A forward's tile of queries has a list of blocks of keys, a backward's tile of keys one of blocks of queries. A list has
the full blocks first, in ascending order, and then the partial ones, so that a kernel which goes through it from its
end masks the partial ones and then runs without a mask. The host reads no value.

A block is partial unless all of its pairs are seen; it may be partial and hold no seen pair, because intervals are
known by their extremes alone. The last block of a sequence is partial if the sequence ends inside it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...geometry.integers import ceil_div
from ...problem import AttentionInputs, AttentionProblem
from ...problem.attention import EMPTY, NO_MODIFIERS

FAR = 2**30  # beyond any query or key


class BlockLists(NamedTuple):
    """The lists of a call's tiles.

    Attributes:
        numbers: (blocks, tiles, heads, entries) int32; numbers[:counts[1], ..] are the blocks of a tile.
        counts: (2, tiles, heads, entries) int32: how many of them are full, and how many there are.
    """

    numbers: Tensor
    counts: Tensor


class _Intervals(NamedTuple):
    """What rows see of the columns: (batch or 1, heads or 1, rows) each, [low, high)."""

    low: Tensor
    high: Tensor


def of_queries(problem: AttentionProblem, inputs: AttentionInputs, tile: tuple[int, int]) -> BlockLists:
    """The blocks of keys of each tile of queries; at least one, so that a tile that sees nothing gets out = 0.

    Args: tile: queries and keys of a tile.
    """
    some, every = _seen(problem, inputs, tile)
    is_first = torch.arange(some.shape[-1], device=some.device) == 0
    some = some | (is_first & ~some.any(-1, keepdim=True))
    return _lists(problem, some, every)


def of_keys(problem: AttentionProblem, inputs: AttentionInputs, tile: tuple[int, int]) -> BlockLists:
    """The blocks of queries of each tile of keys, for all query heads of a kv head together."""
    some, every = _seen(problem, inputs, tile)
    ends = (torch.arange(some.shape[-2], device=some.device) + 1) * tile[0]
    every = every & (ends <= problem.seqlen_q)[:, None]  # queries that do not exist are masked
    if some.shape[1] > 1:
        some, every = (t.unflatten(1, (problem.num_heads_kv, -1)) for t in (some, every))
        some, every = some.any(2), every.all(2)
    return _lists(problem, some.mT, every.mT)


def _lists(problem: AttentionProblem, some: Tensor, every: Tensor) -> BlockLists:
    """Args: some, every: (batch or 1, heads or 1, tiles, blocks) bool: which blocks are visited, and which are full."""
    full, partial = some & every, some & ~every
    num_full = full.sum(-1, dtype=torch.int32, keepdim=True)
    places = torch.where(full, full.cumsum(-1), num_full + partial.cumsum(-1)) - 1
    blocks = some.shape[-1]
    places = torch.where(some, places, blocks)  # the others go to a column that is dropped
    numbers = torch.zeros(*some.shape[:-1], blocks + 1, dtype=torch.int32, device=some.device)
    own = torch.arange(blocks, dtype=torch.int32, device=some.device).expand(some.shape)
    numbers.scatter_(-1, places, own)
    counts = torch.cat((num_full, some.sum(-1, dtype=torch.int32, keepdim=True)), -1)
    views = [t.expand(problem.batch, -1, -1, -1) for t in (numbers, counts)]
    return BlockLists(*(t.permute(3, 2, 1, 0) for t in views))


def _seen(problem: AttentionProblem, inputs: AttentionInputs, tile: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(batch or 1, heads or 1, tiles of queries, tiles of keys) bool: where some pairs are seen, and where all are."""
    given, (tile_m, tile_n) = inputs.modifiers or NO_MODIFIERS, tile
    m, n = problem.seqlen_q, problem.seqlen_k
    found = [_of_intervals(_keys_of_queries(problem, inputs), tile_m, tile_n, n)]
    if given.query_ranges is not None:
        low, high = given.query_ranges.unbind(-1)
        some, every = _of_intervals(_Intervals(low, high), tile_n, tile_m, m)
        found.append((some.mT, every.mT))
    if inputs.blocks is not None:
        kinds = inputs.blocks.kinds != EMPTY
        found.append(_of_blocks(kinds, inputs.blocks.size, (m, n), tile))
    some, every = (torch.stack(torch.broadcast_tensors(*masks)).all(0) for masks in zip(*found, strict=True))
    return some, every


def _keys_of_queries(problem: AttentionProblem, inputs: AttentionInputs) -> _Intervals:
    """The keys that each query sees by window, lengths, positions and key_ranges."""
    given, mask = inputs.modifiers or NO_MODIFIERS, problem.mask
    device, m = inputs.q.device, problem.seqlen_q
    end = torch.full((1, 1, 1), problem.seqlen_k, device=device)
    if inputs.seqused_k is not None:
        end = inputs.seqused_k.view(-1, 1, 1)
    if given.q_positions is not None:
        positions = given.q_positions.view(-1, 1, m)
    else:
        positions = torch.arange(m, device=device) + end - m
    low, high = torch.zeros_like(positions), end.expand_as(positions)
    if mask.window_left is not None:
        low = (positions - mask.window_left).clamp(min=0)
    if mask.window_right is not None:
        high = torch.minimum(high, positions + mask.window_right + 1)
    if given.seqstart_k is not None:
        start = given.seqstart_k.view(-1, 1, 1)
        low, high = torch.maximum(low, start), torch.where(positions >= start, high, 0)
    if given.key_ranges is not None:
        own_low, own_high = given.key_ranges.unbind(-1)
        low, high = torch.maximum(low, own_low), torch.minimum(high, own_high)
    return _Intervals(*torch.broadcast_tensors(low, high))


def _of_intervals(intervals: _Intervals, tile_rows: int, tile_columns: int, columns: int) -> tuple[Tensor, Tensor]:
    """(batch or 1, heads or 1, tiles of rows, tiles of columns) bool: where some row sees a column, and all see all."""
    low, high = intervals
    is_empty = low >= high
    rows = low.shape[-1]
    padding = 0, -rows % tile_rows

    def extreme(values: Tensor, hidden: int, absent: int, kind: str) -> Tensor:
        """Of each tile. Args: hidden: of a row that sees nothing; absent: of one past the end."""
        values = pad(values.masked_fill(is_empty, hidden), padding, value=absent)
        return getattr(values.unflatten(-1, (-1, tile_rows)), kind)(-1)[..., None]

    starts = torch.arange(ceil_div(columns, tile_columns), device=low.device) * tile_columns
    ends = starts + tile_columns
    some = (extreme(low, FAR, FAR, "amin") < ends) & (extreme(high, 0, 0, "amax") > starts)
    every = (extreme(low, FAR, 0, "amax") <= starts) & (extreme(high, 0, FAR, "amin") >= ends)
    return some, every


def _of_blocks(
    seen: Tensor, size: tuple[int, int], lengths: tuple[int, int], tile: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The same of blocks of another size. Args: seen: (batch or 1, heads or 1, blocks, blocks) bool."""
    sums = pad(seen.int(), (1, 0, 1, 0)).cumsum(-1, dtype=torch.int32).cumsum(-2, dtype=torch.int32)
    bounds = []
    for length, block, tile_size in zip(lengths, size, tile, strict=True):
        starts = torch.arange(ceil_div(length, tile_size), device=seen.device) * tile_size
        ends = (starts + tile_size).clamp(max=length)
        bounds.append((starts // block, (ends + block - 1) // block))
    (top, bottom), (left, right) = bounds
    corners = {
        (i, j): sums[..., a[:, None], b] for i, a in enumerate((top, bottom)) for j, b in enumerate((left, right))
    }
    count = corners[1, 1] - corners[0, 1] - corners[1, 0] + corners[0, 0]
    return count > 0, count == (bottom - top)[:, None] * (right - left)

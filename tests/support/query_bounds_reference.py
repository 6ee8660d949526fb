"""The query blocks that a backward's tiles of keys visit, by operators of torch: the reference for their kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onepass.geometry.integers import ceil_div
from onepass.kernels.config import BackwardConfigSm80, BackwardConfigSm90
from onepass.kernels.launch.arguments import window_bounds
from onepass.kernels.launch.modifiers import entries_of
from onepass.problem import AttentionInputs, AttentionProblem

BackwardConfig = BackwardConfigSm80 | BackwardConfigSm90
FAR = 2**30  # above all bounds of intervals


def intervals(problem: AttentionProblem, inputs: AttentionInputs) -> Tensor:
    """(entries or 1, heads or 1, rows, 2) int32: the keys that each query sees, with everything that hides keys but a
    bias and the end of the keys."""
    assert inputs.modifiers is not None
    ranges = inputs.modifiers.key_ranges
    if ranges is not None and problem.is_packed:
        ranges = ranges[None]
    if ranges is None or not problem.mask.is_full or problem.has_seqstart_k:
        ranges = _combined(problem, inputs, ranges)
    return ranges


def _combined(problem: AttentionProblem, inputs: AttentionInputs, ranges: Tensor | None) -> Tensor:
    """Intervals (entries or 1, heads or 1, rows, 2) from ranges, positions, window and the first keys."""
    given, (left, right) = inputs.modifiers, window_bounds(problem)
    assert given is not None
    positions = query_positions(problem, inputs)[:, None]
    low = torch.zeros_like(positions) if left is None else positions - left
    high = torch.full_like(positions, FAR) if right is None else positions + (right + 1)
    if ranges is not None:
        low, high = torch.maximum(low, ranges[..., 0]), torch.minimum(high, ranges[..., 1])
    if given.seqstart_k is not None:
        start = given.seqstart_k[:, None]
        if problem.is_packed:
            start = given.seqstart_k[sequence_of_rows(problem, inputs)][None]
        start = start.view(-1, 1, start.shape[-1])
        low = torch.maximum(low, start)
        high = torch.where(positions >= start, high, low)
    return torch.stack(torch.broadcast_tensors(low, high), -1)


def query_positions(problem: AttentionProblem, inputs: AttentionInputs) -> Tensor:
    """(entries or 1, rows) int32: where queries stand among their keys."""
    given = inputs.modifiers
    if given is not None and given.q_positions is not None:
        return given.q_positions if given.q_positions.dim() == 2 else given.q_positions[None]
    rows = torch.arange(problem.seqlen_q, device=inputs.q.device, dtype=torch.int32)
    if problem.is_packed:
        assert inputs.cu_seqlens_q is not None
        sequence, keys = sequence_of_rows(problem, inputs), inputs.seqused_k
        if keys is None:
            assert inputs.cu_seqlens_k is not None
            keys = inputs.cu_seqlens_k.diff()
        ends_q = inputs.cu_seqlens_q[1:]
        return (rows - ends_q[sequence] + keys[sequence])[None].int()
    if inputs.seqused_k is None:
        return rows[None] + (problem.seqlen_k - problem.seqlen_q)
    return rows[None] + (inputs.seqused_k[:, None] - problem.seqlen_q)


def sequence_of_rows(problem: AttentionProblem, inputs: AttentionInputs) -> Tensor:
    """(rows,): the number of each row's packed sequence; of a row of none, that of the last one."""
    assert inputs.cu_seqlens_q is not None
    rows = torch.arange(problem.seqlen_q, device=inputs.q.device, dtype=torch.int32)
    found = torch.searchsorted(inputs.cu_seqlens_q[1:].contiguous(), rows, right=True)
    return found.clamp_(max=problem.batch - 1)


def query_bounds(problem: AttentionProblem, config: BackwardConfig, inputs: AttentionInputs) -> Tensor:
    """The query blocks that tiles of keys visit, `QueryBlocks`, as (tiles, 4, kv heads, entries) int32.

    Tile n of a packed sequence has the number cu_seqlens_k[i] // tile_n + i + n. If tiles add to dQ in turns, every
    tile visits every block, so that turns can be counted.
    """
    tiles = _packed_tiles(problem, config, inputs) if problem.is_packed else _dense_tiles(problem, config, inputs)
    ends = [_extremes(problem, tiles, value, kind) for value in range(2) for kind in ("amin", "amax")]
    first, clear_from, clear_to, last = ends[0], ends[1], ends[2], ends[3]
    start, index = tiles.first_keys[..., None], tiles.blocks
    end = start + config.tile_n
    visits = tiles.belongs & (first[..., None, :] < end) & (last[..., None, :] > start)
    if problem.deterministic:
        visits = (tiles.belongs & (start < tiles.num_keys[..., None])).expand_as(visits)
    is_clear = visits & (clear_from[..., None, :] <= start) & (clear_to[..., None, :] >= end)
    none = index.new_full((), FAR)
    stop = torch.where(visits, index + 1, 0).amax(-1)
    begin = torch.minimum(torch.where(visits, index, none).amin(-1), stop)
    clear_begin = torch.where(is_clear, index, none).amin(-1)
    # a block in between that sees none of the keys ends the clear ones, too: it is visited, and needs a mask
    clear_stop = torch.where(~is_clear & (index >= clear_begin[..., None]) & tiles.belongs, index, none).amin(-1)
    bounds = torch.stack([begin, *(torch.minimum(x, stop) for x in (clear_begin, clear_stop)), stop], -1).int()
    entries = entries_of(problem)
    return bounds.expand(entries, problem.num_heads_kv, *bounds.shape[2:]).permute(2, 3, 1, 0)


class Tiles(NamedTuple):
    """The tiles of keys and the blocks of queries of all sequences of an entry.

    Attributes:
        rows: (entries or 1, heads or 1, rows, 2), intervals within the keys that exist; (FAR, 0) of a row without keys.
        row_blocks: (rows,) the number of each row's block among num_blocks.
        is_full: (num_blocks,) whether all rows of a block exist.
        first_keys, num_keys: (.., tiles) the first key of a tile, and how many keys its sequence has.
        blocks: (num_blocks,) or (tiles, num_blocks) the number of a block in its sequence.
        belongs: whether a block is one of the tile's sequence.
    """

    rows: Tensor
    row_blocks: Tensor
    is_full: Tensor
    first_keys: Tensor
    num_keys: Tensor
    blocks: Tensor
    belongs: Tensor


def _within(intervals: Tensor, num_keys: Tensor, exists: Tensor | None = None) -> Tensor:
    """Intervals cut off at the keys that exist; (FAR, 0) where nothing is left."""
    low, high = intervals[..., 0].clamp_min(0), torch.minimum(intervals[..., 1], num_keys)
    is_empty = low >= high if exists is None else (low >= high) | ~exists
    return torch.stack([torch.where(is_empty, FAR, low), torch.where(is_empty, 0, high)], -1)


def _dense_tiles(problem: AttentionProblem, config: BackwardConfig, inputs: AttentionInputs) -> Tiles:
    device, seqlen_q = inputs.q.device, problem.seqlen_q
    num_keys = torch.full((1,), problem.seqlen_k, device=device) if inputs.seqused_k is None else inputs.seqused_k
    num_keys = num_keys.view(-1, 1, 1)
    num_blocks, num_tiles = ceil_div(seqlen_q, config.tile_m), ceil_div(problem.seqlen_k, config.tile_n)
    blocks = torch.arange(num_blocks, device=device)
    return Tiles(
        rows=_within(intervals(problem, inputs), num_keys),
        row_blocks=torch.arange(seqlen_q, device=device) // config.tile_m,
        is_full=(blocks + 1) * config.tile_m <= seqlen_q,
        first_keys=torch.arange(num_tiles, device=device) * config.tile_n,
        num_keys=num_keys,
        blocks=blocks,
        belongs=torch.ones(1, device=device, dtype=torch.bool),
    )


def _packed_tiles(problem: AttentionProblem, config: BackwardConfig, inputs: AttentionInputs) -> Tiles:
    offsets_q, offsets_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    assert offsets_q is not None
    assert offsets_k is not None
    device, batch = inputs.q.device, problem.batch
    num_keys = offsets_k.diff() if inputs.seqused_k is None else inputs.seqused_k
    entries = torch.arange(batch, device=device)
    first_block, first_tile = offsets_q[:-1] // config.tile_m + entries, offsets_k[:-1] // config.tile_n + entries
    rows, sequence = torch.arange(problem.seqlen_q, device=device), sequence_of_rows(problem, inputs)
    exists = rows < offsets_q[-1]
    # the last tiles may hold rows of no sequence, which come after the last one's
    num_blocks, num_tiles = problem.seqlen_q // config.tile_m + batch, problem.seqlen_k // config.tile_n + batch + 1
    row_blocks = first_block[sequence] + (rows - offsets_q[sequence]) // config.tile_m
    counts = torch.zeros(num_blocks, device=device, dtype=torch.long).index_add_(0, row_blocks, exists.long())
    blocks, tiles = torch.arange(num_blocks, device=device), torch.arange(num_tiles, device=device)
    of_block, of_tile = (
        torch.searchsorted(starts, numbers, right=True).sub_(1).clamp_(min=0)
        for starts, numbers in ((first_block.contiguous(), blocks), (first_tile.contiguous(), tiles))
    )
    return Tiles(
        rows=_within(intervals(problem, inputs), num_keys[sequence], exists),
        row_blocks=row_blocks,
        is_full=counts == config.tile_m,
        first_keys=(tiles - first_tile[of_tile]) * config.tile_n,
        num_keys=num_keys[of_tile],
        blocks=(blocks - first_block[of_block])[None],
        belongs=(of_tile[:, None] == of_block) & (counts > 0),
    )


def _extremes(problem: AttentionProblem, tiles: Tiles, value: int, kind: str) -> Tensor:
    """(entries or 1, kv heads or 1, blocks): an extreme of the first keys (0) or the ends (1) of a block's rows.

    A block whose rows do not all exist has the extremes of one with a row that sees nothing.
    """
    rows = tiles.rows[..., value]
    nothing = (FAR, 0)[value]
    start = {"amin": FAR, "amax": 0}[kind]
    shape = (*rows.shape[:-1], tiles.is_full.shape[0])
    found = rows.new_full(shape, start).scatter_reduce_(-1, tiles.row_blocks.expand_as(rows), rows, kind)
    if (value, kind) in ((0, "amax"), (1, "amin")):
        found = torch.where(tiles.is_full, found, nothing)
    if rows.shape[1] == 1:
        return found
    by_group = found.unflatten(1, (problem.num_heads_kv, problem.qhead_per_kvhead))
    return by_group.amin(2) if kind == "amin" else by_group.amax(2)

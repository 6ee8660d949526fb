"""Modifiers of a call as kernels get them: views and small tensors, made without reading a value on the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...geometry import philox
from ...geometry.integers import ceil_div
from ...problem import AttentionProblem, Inputs, Modifiers
from ..config import BackwardConfigSm80, BackwardConfigSm90
from .arguments import LOG2_E, element_type, score_scales, strided_tensor, window_bounds

BackwardConfig = BackwardConfigSm80 | BackwardConfigSm90
# bounds of intervals stay below it, so that kernels can subtract key numbers from them
FAR = 2**30


def entries_of(problem: AttentionProblem) -> int:
    """Batch entries of tensors with rows: packed sequences have one."""
    return 1 if problem.is_packed else problem.batch


def arguments_of(problem: AttentionProblem, given: Modifiers | None) -> tuple | None:
    """The fields of the device's `ModifierTensors` that the problem has, in their order; None without modifiers."""
    if given is None:
        return None
    found: list[Any] = []
    entries = entries_of(problem)
    if given.key_ranges is not None:
        ranges = given.key_ranges[None] if problem.is_packed else given.key_ranges
        found.append(ranges.expand(entries, problem.num_heads_q, -1, -1).permute(2, 3, 1, 0))
    if given.q_positions is not None:
        positions = given.q_positions if given.q_positions.dim() == 2 else given.q_positions[None]
        found.append(positions.expand(entries, -1).t())
    if given.seqstart_k is not None:
        found.append(given.seqstart_k)
    if given.alibi_slopes is not None:
        found.append(given.alibi_slopes.expand(problem.batch, -1).t())
    if given.bias is not None:
        found.append(expanded_bias(problem, given.bias.to(kernel_dtype(given.bias.dtype))))
    if problem.dropout_p > 0:
        assert given.dropout_state is not None
        found.append(given.dropout_state.view(torch.int32))
        found += [philox.keep_bytes(problem.dropout_p), philox.keep_scale(problem.dropout_p)]
        found += [problem.first_head, problem.all_heads or problem.num_heads_q]
    if problem.adds_terms:
        found.append(term_scale(problem))
    return tuple(found)


def kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels read a bias."""
    return torch.float32 if dtype == torch.float64 else dtype


def term_scale(problem: AttentionProblem) -> float:
    """What brings a term to the unit of a kernel's scores."""
    return LOG2_E / score_scales(problem)[0]


def expanded_bias(problem: AttentionProblem, bias: Tensor) -> Tensor:
    """A bias, or its gradient, as (rows, keys, heads, entries)."""
    bias = bias[None] if problem.is_packed else bias
    rows = bias.shape[2] if problem.has_q_positions and bias.shape[2] > 1 else max(problem.seqlen_q, bias.shape[2])
    if problem.has_q_positions and bias.shape[2] == 1:
        rows = FAR  # any position has this row
    keys = bias.shape[3] if bias.shape[3] > 1 else problem.seqlen_k
    return bias.expand(entries_of(problem), problem.num_heads_q, rows, keys).permute(2, 3, 1, 0)


def intervals(problem: AttentionProblem, inputs: Inputs) -> Tensor:
    """(entries or 1, heads or 1, rows, 2) int32: the keys that each query sees, with everything that hides keys but a
    bias and the end of the keys."""
    assert inputs.modifiers is not None
    ranges = inputs.modifiers.key_ranges
    if ranges is not None and problem.is_packed:
        ranges = ranges[None]
    if ranges is None or not problem.mask.is_full or problem.has_seqstart_k:
        ranges = _combined(problem, inputs, ranges)
    return ranges


def _combined(problem: AttentionProblem, inputs: Inputs, ranges: Tensor | None) -> Tensor:
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


def query_positions(problem: AttentionProblem, inputs: Inputs) -> Tensor:
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


def sequence_of_rows(problem: AttentionProblem, inputs: Inputs) -> Tensor:
    """(rows,): the number of each row's packed sequence; of a row of none, that of the last one."""
    assert inputs.cu_seqlens_q is not None
    rows = torch.arange(problem.seqlen_q, device=inputs.q.device, dtype=torch.int32)
    found = torch.searchsorted(inputs.cu_seqlens_q[1:].contiguous(), rows, right=True)
    return found.clamp_(max=problem.batch - 1)


# ---------------------------------------------------------------- the backward


class TermGradients(NamedTuple):
    """What a backward adds the gradients of slopes and of a bias to; None where there are none."""

    slopes: Tensor | None  # (batch, heads, places)
    bias: Tensor | None


def gradients_of_terms(problem: AttentionProblem, config: BackwardConfig, inputs: Inputs) -> TermGradients:
    """Zeros to which the main kernel adds."""
    given = inputs.modifiers
    assert given is not None
    slopes = bias = None
    if given.alibi_slopes is not None and not problem.constant_slopes:
        places = ceil_div(problem.seqlen_k, config.tile_n) * config.consumer_warps
        slopes = torch.zeros(problem.batch, problem.num_heads_q, places, device=inputs.q.device)
    if given.bias is not None and not problem.constant_bias:
        shape = given.bias.shape
        if problem.deterministic:
            # sums over what the bias is broadcast over would come in any order: a place for each pair
            keys = shape[-1] if shape[-1] > 1 else problem.seqlen_k
            shape = torch.Size((problem.num_heads_q, problem.seqlen_q, keys))
            shape = shape if problem.is_packed else torch.Size((problem.batch, *shape))
        bias = torch.zeros(shape, device=inputs.q.device)
    return TermGradients(slopes, bias)


def backward_arguments(
    problem: AttentionProblem, config: BackwardConfig, inputs: Inputs, terms: TermGradients
) -> tuple | None:
    """The fields of `ModifierTensors` that a backward of the problem has, in their order."""
    found = arguments_of(problem, inputs.modifiers)
    assert found is not None
    if problem.has_intervals:
        found += (query_bounds(problem, config, inputs),)
    if terms.slopes is not None:
        found += (terms.slopes.permute(2, 1, 0),)
    if terms.bias is not None:
        by_entry = terms.bias[None] if problem.is_packed else terms.bias
        found += (by_entry.permute(2, 3, 1, 0) if problem.deterministic else expanded_bias(problem, terms.bias),)
    return found


def finished(problem: AttentionProblem, inputs: Inputs, terms: TermGradients) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of alibi_slopes and of bias."""
    given = inputs.modifiers
    assert given is not None
    dslopes = dbias = None
    if given.alibi_slopes is not None and terms.slopes is not None:
        dslopes = terms.slopes.sum(-1)
        dslopes = dslopes.sum(0) if given.alibi_slopes.dim() == 1 else dslopes
    if given.bias is not None and terms.bias is not None:
        found = terms.bias
        if problem.deterministic and given.q_positions is not None and given.bias.shape[-2] > 1:
            found = _by_position(problem, given.bias, found, given.q_positions)
        dbias = found.sum_to_size(given.bias.shape).to(given.bias.dtype)
    return dslopes, dbias


def _by_position(problem: AttentionProblem, bias: Tensor, found: Tensor, q_positions: Tensor) -> Tensor:
    """Gradients of pairs, (.., heads, queries, keys), added up by the queries' positions, in a fixed order."""
    rows = bias.shape[-2]
    found = found[None] if problem.is_packed else found
    entries, heads, _, keys = found.shape
    positions = q_positions.view(-1, 1, q_positions.shape[-1]).expand(entries, heads, -1).long()
    first = torch.arange(entries * heads, device=found.device).view(entries, heads, 1) * rows
    target = found.new_zeros(entries * heads * rows, keys)
    # on a GPU, too, this sums in the order of the indices, unlike index_add_
    target.index_put_(((first + positions).flatten(),), found.flatten(0, 2), accumulate=True)
    target = target.view(entries, heads, rows, keys)
    return target[0] if problem.is_packed else target


def query_bounds(problem: AttentionProblem, config: BackwardConfig, inputs: Inputs) -> Tensor:
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
    clear_stop = torch.where(~is_clear & (index >= clear_begin[..., None]) & visits, index, none).amin(-1)
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


def _dense_tiles(problem: AttentionProblem, config: BackwardConfig, inputs: Inputs) -> Tiles:
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


def _packed_tiles(problem: AttentionProblem, config: BackwardConfig, inputs: Inputs) -> Tiles:
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


# ---------------------------------------------------------------- tracing


def fake_arguments(problem: AttentionProblem) -> tuple | None:
    """Stand-ins for `arguments_of`."""
    from cutlass import Float32, Int32

    if not problem.has_modifiers:
        return None
    found: list[Any] = []
    if problem.has_key_ranges:
        found.append(strided_tensor(Int32, 4))
    if problem.has_q_positions:
        found.append(strided_tensor(Int32, 2))
    if problem.has_seqstart_k:
        found.append(strided_tensor(Int32, 1))
    if problem.has_alibi:
        found.append(strided_tensor(Float32, 2))
    if problem.bias_dtype is not None:
        found.append(strided_tensor(element_type(kernel_dtype(problem.bias_dtype)), 4))
    if problem.dropout_p > 0:
        found += [strided_tensor(Int32, 1), Int32(1), Float32(1.0), Int32(1), Int32(1)]
    if problem.adds_terms:
        found.append(Float32(1.0))
    return tuple(found)


def fake_backward_arguments(problem: AttentionProblem) -> tuple | None:
    """Stand-ins for `backward_arguments`."""
    from cutlass import Float32, Int32

    found = fake_arguments(problem)
    if found is None:
        return None
    if problem.has_intervals:
        found += (strided_tensor(Int32, 4),)
    if problem.has_alibi and not problem.constant_slopes:
        found += (strided_tensor(Float32, 3),)
    if problem.has_bias and not problem.constant_bias:
        found += (strided_tensor(Float32, 4),)
    return found

"""The forward pass on a CPU: out and lse by torch's C++ operator."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import tiled
from ..geometry.block_range import tiles
from ..problem import AttentionInputs, AttentionProblem
from ..problem.outputs import empty_outputs, in_order_of, without_keys
from ..tiled.merge import merge_in_torch
from ..tiled.scratch import Scratch
from ..tiled.sequences import merged, sequences
from . import operators
from .blocks import KeptBlocks, gathered, gathers
from .masks import RowMasks, groups, masks_of_whole, needs_masks
from .regions import Region, regions


def forward(problem: AttentionProblem, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """out and lse of a call, as `onepass.tiled.forward` gives them."""
    results = by_operators(problem, inputs)
    return tiled.forward(problem, inputs) if results is None else results


def by_operators(problem: AttentionProblem, inputs: AttentionInputs) -> tuple[Tensor, Tensor] | None:
    """out and lse, or None where `tiled` computes them.

    This is where torch's settings round float32 operands, where a result is not finite, and where rounding partial
    results to 16 bits, or results without their sinks, or few columns, would add to their error.
    """
    q, k, v, sinks = inputs[:4]
    if not operators.are_exact(problem) or (sinks is not None and problem.dtype.itemsize == 2):
        return None
    if sinks is not None and not operators.is_finite(sinks):
        return None
    if needs_masks(problem):
        bias = None if inputs.modifiers is None else inputs.modifiers.bias
        # a bias of one column has no effect, and its gradient is nothing but the errors of out
        is_exact = problem.head_dim >= operators.MIN_HEAD_DIM_16BIT and (bias is None or bias.shape[-1] > 1)
        compute = _by_blocks if gathers(problem) else _by_masks
        return compute(problem, inputs) if is_exact or problem.dtype.itemsize > 2 else None
    if not (problem.is_packed or problem.has_seqused_k or problem.has_seqstart_k):
        found = regions(problem.mask, problem.seqlen_q, problem.seqlen_k)
        if len(found) == 1 and found[0].covers(problem.seqlen_q, problem.seqlen_k) and not problem.is_empty:
            whole = _attention(problem, q, k, v, found[0].is_causal)
            if whole is None:
                return None
            whole_out, whole_lse = _with_sinks(*whole, sinks)
            return in_order_of(whole_out, q), whole_lse
    out, lse = without_keys(*empty_outputs(problem, inputs), sinks, inputs.cu_seqlens_q)
    for piece in merged(sequences(problem, inputs)):
        q_rows, k_rows, v_rows = piece.rows(q), piece.cols(k), piece.cols(v)
        if 0 in q_rows.shape:
            continue
        found = regions(problem.mask, q_rows.shape[1], k_rows.shape[1])
        if len(found) > 1 and problem.dtype.itemsize == 2:
            return None
        partials = [
            _attention(problem, q_rows[:, r.queries], k_rows[:, r.keys], v_rows[:, r.keys], r.is_causal) for r in found
        ]
        if None in partials:
            return None
        if partials:
            _write(piece.rows(out), piece.stats(lse), found, partials, sinks)
    return out, lse


def _by_masks(problem: AttentionProblem, inputs: AttentionInputs) -> tuple[Tensor, Tensor] | None:
    """`by_operators` where regions do not do: blocks of rows, with a mask each."""
    q, k, v, sinks = inputs[:4]
    scratch = Scratch(q, problem.accum_dtype)
    whole_masks = masks_of_whole(problem, inputs, scratch)
    if whole_masks is not None:
        mask = whole_masks.mask((0, problem.seqlen_q), (0, problem.seqlen_k))
        results = _attention(problem, q, k, v, whole_masks.is_causal, mask)
        if results is None:
            return None
        whole_out, whole_lse = _with_sinks(*results, sinks)
        return in_order_of(whole_out, q), whole_lse
    out, lse = without_keys(*empty_outputs(problem, inputs), sinks, inputs.cu_seqlens_q)
    for piece in sequences(problem, inputs):
        rows, cols = [piece.rows(t) for t in (q, out)], [piece.cols(t) for t in (k, v)]
        if 0 in rows[0].shape or 0 in cols[0].shape:
            continue
        for group in groups(problem, inputs, rows[0].shape[0], cols[0].shape[1]):
            q_rows, out_rows = (group.q_rows(t).permute(0, 3, 1, 2, 4) for t in rows)
            k_rows, v_rows = (group.kv_rows(t).transpose(1, 2) for t in cols)
            lse_rows = group.stats(piece.stats(lse))
            group_sinks = None if sinks is None else group.per_head(sinks).flatten()
            masks = RowMasks(problem, inputs, piece, group, scratch)
            for queries in tiles(0, masks.seqlen_q, masks.num_rows):
                keys = masks.keys_of(queries)
                if keys is None:
                    continue
                block, seen = slice(*queries), slice(*keys)
                operands = q_rows[:, block].flatten(2, 3), k_rows[:, seen], v_rows[:, seen]
                results = _attention(problem, *operands, masks.is_causal, masks.mask(queries, keys))
                if results is None:
                    return None
                block_out, block_lse = _with_sinks(*results, group_sinks)
                out_rows[:, block].copy_(block_out.view_as(out_rows[:, block]))
                lse_rows[..., block].copy_(block_lse.view_as(lse_rows[..., block]))
    return out, lse


def _by_blocks(problem: AttentionProblem, inputs: AttentionInputs) -> tuple[Tensor, Tensor] | None:
    """`by_operators` for a call whose block_mask alone, with bounds on the rows, says which pairs are visible."""
    out, lse = without_keys(*empty_outputs(problem, inputs), inputs.sinks, inputs.cu_seqlens_q)
    for piece in sequences(problem, inputs):
        rows, cols = [piece.rows(t) for t in (inputs.q, out)], [piece.cols(t) for t in (inputs.k, inputs.v)]
        if 0 in rows[0].shape or 0 in cols[0].shape:
            continue
        blocks = KeptBlocks(problem, inputs, piece)
        q, (k, v) = blocks.items(rows[0]), (blocks.blocks_of_keys(t) for t in cols)
        all_out, all_lse = torch.zeros_like(q), lse.new_full((*q.shape[:3], 1), -torch.inf)
        for items, keys, mask in blocks.batches():
            results = _attention(problem, q[items], gathered(k, keys), gathered(v, keys), False, mask)
            if results is None:
                return None
            all_out[items], all_lse[items] = results[0], results[1].transpose(1, 2)[..., None]
        stats = blocks.rows(all_lse)[..., 0].transpose(1, 2)
        piece_out, piece_lse = _with_sinks(blocks.rows(all_out), stats, inputs.sinks)
        rows[1].copy_(piece_out)
        piece.stats(lse).copy_(piece_lse)
    return out, lse


def _attention(
    problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """out and lse of some queries and keys; None if a hidden key may have reached them, or a NaN was lost."""
    out, lse = operators.forward(q, k, v, problem.softmax_scale, is_causal, mask)
    is_right = operators.are_regular(lse)
    if not is_right and mask is not None:
        # the operator gives 0 to the lse of a row that sees no key
        hidden = mask == -torch.inf
        if is_causal:
            hidden = hidden | torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1)
        is_empty = hidden.all(-1).expand_as(lse)
        is_right = operators.are_regular(lse.masked_fill(is_empty, 1.0))
        lse.masked_fill_(is_empty, -torch.inf)
    hides_keys = is_causal or mask is not None
    return (out, lse) if is_right and (not hides_keys or operators.is_finite(out)) else None


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Results over keys alone with the sinks (num_heads_q,), which are finite, in the denominator."""
    if sinks is None:
        return out, lse
    logits = sinks.to(lse.dtype)[:, None]
    return out * torch.sigmoid(lse - logits).transpose(1, 2)[..., None], torch.logaddexp(lse, logits)


def _write(out: Tensor, lse: Tensor, found: tuple[Region, ...], partials: list, sinks: Tensor | None) -> None:
    """Write the results of a sequence, merged where a row has two."""
    rows = found[0].queries
    (first, first_lse), *second = partials
    if second:
        first, first_lse = merge_in_torch([p[0] for p in partials], [p[1] for p in partials], sinks)
    else:
        first, first_lse = _with_sinks(first, first_lse, sinks)
    out[:, rows].copy_(first)
    lse[:, :, rows].copy_(first_lse)

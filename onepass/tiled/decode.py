"""Attention over a key/value cache in plain PyTorch tiles: append, then each sequence, split by split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..geometry.splits import split_ranges
from ..problem import AttentionInputs, AttentionProblem, Mask, Modifiers
from ..problem.decode import DecodeInputs, DecodeProblem
from ..problem.lengths import read_cache_lengths, read_query_offsets
from ..problem.outputs import empty_outputs, without_keys
from .cache import append, keys_and_values, rotated_queries
from .forward import forward
from .merge import merge_in_torch


def decode(
    problem: DecodeProblem,
    inputs: DecodeInputs,
    whole_forward: Callable[..., tuple[Tensor, Tensor]] = forward,
    batch_forward: Callable[..., tuple[Tensor, Tensor] | None] = lambda problem, inputs: None,
) -> tuple[Tensor, Tensor]:
    """out and lse of a call of `onepass.attention_decode`; the cache is untouched if it raises.

    Nothing about a sequence depends on the rest of the batch, but the rounding of `batch_forward`.

    Args:
        whole_forward: the forward of a sequence whose keys are not split.
        batch_forward: the forward of a dense batch of such sequences, where no number of splits is given; None where it
            cannot be had.
    """
    attention = problem.attention
    lengths, offsets = read_cache_lengths(inputs, problem), read_query_offsets(inputs)
    if attention.has_seqstart_k and inputs.page_table is not None:
        # pages that hold no key of a sequence may be any number, and all others have been checked
        inputs = inputs._replace(page_table=inputs.page_table.clamp(0, inputs.k_cache.shape[0] - 1))
    if inputs.seqlen_new:
        append(problem, inputs)
    q = rotated_queries(problem, inputs)
    # a given number of splits promises the same bits in any batch
    may_batch = problem.num_splits is None and problem.split_size is None
    if offsets is None and inputs.page_table is None and may_batch:
        used, modifiers = inputs.cache_seqlens + inputs.seqlen_new, inputs.modifiers
        whole = AttentionInputs(q, inputs.k_cache, inputs.v_cache, inputs.sinks, seqused_k=used, modifiers=modifiers)
        results_of_batch = batch_forward(attention, whole)
        if results_of_batch is not None:
            return results_of_batch
    out, lse = empty_outputs(attention, AttentionInputs(inputs.q, inputs.k_cache, inputs.v_cache))
    if offsets is not None and offsets[-1] < inputs.q.shape[0]:
        out[offsets[-1] :].zero_()
        lse[:, offsets[-1] :].fill_(-torch.inf)
    for b, length in enumerate(lengths):
        seqlen_k = length + inputs.seqlen_new
        k, v = (rows[None] for rows in keys_and_values(problem, inputs, b, seqlen_k))
        if offsets is None:
            queries = None
            operands = q[b : b + 1], k, v
            results = out[b], lse[b]
        else:
            queries = slice(*offsets[b : b + 2])
            operands = q[None, queries], k, v
            results = out[queries], lse[:, queries]
        entry = AttentionInputs(*operands, inputs.sinks)
        if inputs.modifiers is not None:
            entry = entry._replace(modifiers=modifiers_of_entry(inputs.modifiers, b, queries, seqlen_k))
        for result, computed in zip(results, _decode_entry(problem, entry, whole_forward), strict=True):
            result.copy_(computed[0])
    return out, lse


def _decode_entry(
    problem: DecodeProblem, inputs: AttentionInputs, whole_forward: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """out and lse of one sequence, as a batch of one."""
    q, k, v, sinks = inputs[:4]
    attention = replace(
        problem.attention, batch=1, seqlen_q=q.shape[1], seqlen_k=k.shape[1], has_seqused_k=False, is_packed=False
    )
    splits = split_ranges(k.shape[1], problem.num_splits or 1, problem.split_size)
    if not splits or q.shape[1] == 0:
        out, lse = empty_outputs(attention, inputs)
        return without_keys(out, lse, sinks, None)
    if len(splits) == 1 and not (attention.has_e4m3_cache or attention.float32_out):
        return whole_forward(attention, inputs)
    if inputs.modifiers is not None:
        partials = _forward_modified_splits(attention, inputs, inputs.modifiers, splits)
    else:
        partials = [_forward_split(attention, q, k, v, *split) for split in splits]
    outs, lses = zip(*partials, strict=True)
    return merge_in_torch(outs, lses, sinks)


def _forward_modified_splits(
    attention: AttentionProblem, inputs: AttentionInputs, modifiers: Modifiers, splits: list[tuple[int, int]]
) -> list[tuple[Tensor, Tensor]]:
    """`_forward_split` of each split [start, end), with modifiers: key ranges leave only its keys."""
    dtype = attention.accum_dtype
    problem = replace(attention, dtype=dtype, has_sinks=False, has_key_ranges=True)
    q, k, v = (t.to(dtype) for t in inputs[:3])
    everything = torch.tensor([0, k.shape[1]], dtype=torch.int32, device=q.device).expand(1, 1, q.shape[1], 2)
    ranges = everything if modifiers.key_ranges is None else modifiers.key_ranges
    partials = []
    for start, end in splits:
        own = torch.stack((ranges[..., 0].clamp(min=start), ranges[..., 1].clamp(max=end)), -1)
        partials.append(forward(problem, AttentionInputs(q, k, v, modifiers=modifiers._replace(key_ranges=own))))
    return partials


def modifiers_of_entry(modifiers: Modifiers, entry: int, queries: slice | None, num_keys: int) -> Modifiers:
    """The modifiers of one batch entry, as a batch of one. Args: queries: its rows of packed queries; None: dense."""

    def own(t: Tensor | None) -> Tensor | None:
        return None if t is None else t[entry : entry + 1] if t.shape[0] > 1 else t

    start, ranges, positions, slopes, bias, query_ranges = modifiers[:-1]
    query_ranges = own(query_ranges)
    if query_ranges is not None:
        query_ranges = query_ranges[:, :, :num_keys]
    if queries is None:
        ranges, positions, bias = own(ranges), own(positions), own(bias)
    else:
        if bias is not None:
            # with positions a row belongs to a position
            bias = bias[None] if bias.shape[1] == 1 or positions is not None else bias[None, :, queries]
        ranges = None if ranges is None else ranges[None, :, queries]
        positions = None if positions is None else positions[None, queries]
    if bias is not None and bias.shape[-1] > 1:
        bias = bias[..., :num_keys]
    slopes = own(slopes) if slopes is not None and slopes.dim() == 2 else slopes
    return Modifiers(own(start), ranges, positions, slopes, bias, query_ranges)


def _forward_split(
    attention: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, start: int, end: int
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence over its keys [start, end) alone, without sinks.

    out and lse have the dtype in which sums are accumulated, float32 (float64 for float64).

    The mask remains the mask of all keys: counted from the end of the split, positions move by the keys after it.
    """
    keys_after = k.shape[1] - end
    left, right = attention.mask.window_left, attention.mask.window_right
    mask = Mask(None if left is None else left - keys_after, None if right is None else right + keys_after)
    dtype = attention.accum_dtype
    problem = replace(attention, dtype=dtype, seqlen_k=end - start, mask=mask, has_sinks=False)
    return forward(problem, AttentionInputs(q.to(dtype), k[:, start:end].to(dtype), v[:, start:end].to(dtype)))

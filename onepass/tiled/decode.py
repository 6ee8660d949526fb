"""Attention over a key/value cache in plain torch tiles: append, then each sequence, split by split."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..decode_problem import DecodeInputs, DecodeProblem
from ..decode_validation import read_cache_lengths
from ..kernels.blocks.splits import split_ranges
from ..merge import merge_in_torch
from ..outputs import empty_outputs
from ..problem import AttentionInputs, AttentionProblem, Mask
from .cache import append, keys_and_values, rotated_queries
from .forward import forward


def decode(problem: DecodeProblem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
    """out and lse of a call of `onepass.attention_decode`; the cache is untouched if it raises.

    Every sequence is computed by itself, so nothing about it depends on the rest of the batch.
    """
    attention = problem.attention
    lengths = read_cache_lengths(inputs)
    if inputs.seqlen_new:
        append(problem, inputs)
    q = rotated_queries(problem, inputs)
    out, lse = empty_outputs(attention, AttentionInputs(inputs.q, inputs.k_cache, inputs.v_cache))
    for b, length in enumerate(lengths):
        seqlen_k = length + inputs.seqlen_new
        k, v = (rows[None] for rows in keys_and_values(problem, inputs, b, seqlen_k))
        parts = split_ranges(seqlen_k, problem.num_splits or 1, problem.split_size)
        if not parts:
            out[b].zero_()
            lse[b].fill_(-torch.inf)
        elif len(parts) == 1 and not problem.attention.has_e4m3_cache:
            of_entry = replace(attention, batch=1, seqlen_k=seqlen_k, has_seqused_k=False)
            out_b, lse_b = forward(of_entry, AttentionInputs(q[b : b + 1], k, v, inputs.sinks))
            out[b], lse[b] = out_b[0], lse_b[0]
        else:
            partials = [forward_of_split(attention, q[b : b + 1], k, v, *part) for part in parts]
            outs, lses = zip(*partials, strict=True)
            out_b, lse_b = merge_in_torch(outs, lses, inputs.sinks)
            out[b], lse[b] = out_b[0], lse_b[0]
    return out, lse


def forward_of_split(
    attention: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, start: int, end: int
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence over its keys [start, end) alone, without sinks: out and lse as they are summed,
    float32 (float64 for float64).

    The mask is that of all keys: counted from the end of the part, positions move by the keys behind it.
    """
    behind = k.shape[1] - end
    left, right = attention.mask.window_left, attention.mask.window_right
    mask = Mask(None if left is None else left - behind, None if right is None else right + behind)
    dtype = attention.accum_dtype
    part = replace(
        attention, dtype=dtype, batch=1, seqlen_k=end - start, mask=mask, has_seqused_k=False, has_sinks=False
    )
    tensors = (t.to(dtype) for t in (q, k[:, start:end], v[:, start:end]))
    return forward(part, AttentionInputs(*tensors))

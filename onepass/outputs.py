"""Where results are written: the one place that decides their layout, for backends and for tracing alike."""

from __future__ import annotations

import torch
from torch import Tensor

from .problem import AttentionInputs, AttentionProblem


def empty_as(t: Tensor, head_dim: int) -> Tensor:
    """Uninitialised (..., seqlen, num_heads, head_dim), dense, with heads outside seqlen in memory if t has them so.

    A caller with (batch, num_heads, seqlen, head_dim) tensors passes transposes, and the transpose of what comes
    back is contiguous again.
    """
    if t.dim() == 3:
        total, num_heads, _ = t.shape
        return t.new_empty((total, num_heads, head_dim))
    batch, seqlen, num_heads, _ = t.shape
    _, row, head, _ = t.stride()
    row, head = (head_dim, seqlen * head_dim) if row < head else (num_heads * head_dim, head_dim)
    # with strides it costs half of new_empty, and no transpose
    return t.new_empty_strided((batch, seqlen, num_heads, head_dim), (seqlen * num_heads * head_dim, row, head, 1))


def empty_outputs(problem: AttentionProblem, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """out, laid out as q, and lse (batch, num_heads_q, seqlen_q) or (num_heads_q, total_q)."""
    q = inputs.q
    *batch, seqlen, num_heads, _ = q.shape
    lse = q.new_empty((*batch, num_heads, seqlen), dtype=problem.accum_dtype)
    return empty_as(q, problem.head_dim_v), lse


def empty_gradients(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, laid out as q, k, v, and dsinks (empty without sinks)."""
    q, k, v, sinks = inputs[:4]
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks, memory_format=torch.contiguous_format)
    return empty_as(q, q.shape[-1]), empty_as(k, k.shape[-1]), empty_as(v, v.shape[-1]), dsinks

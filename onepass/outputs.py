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
    if t.dim() == 4 and t.stride(1) < t.stride(2):
        batch, seqlen, num_heads = t.shape[:3]
        return t.new_empty((batch, num_heads, seqlen, head_dim)).transpose(1, 2)
    return t.new_empty((*t.shape[:-1], head_dim))


def empty_outputs(problem: AttentionProblem, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """out, laid out as q, and lse (batch, num_heads_q, seqlen_q) or (num_heads_q, total_q)."""
    q = inputs.q
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return empty_as(q, problem.head_dim_v), q.new_empty(lse_shape, dtype=problem.accum_dtype)


def empty_gradients(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, laid out as q, k, v, and dsinks (empty without sinks)."""
    q, k, v, sinks = inputs[:4]
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks, memory_format=torch.contiguous_format)
    return empty_as(q, q.shape[-1]), empty_as(k, k.shape[-1]), empty_as(v, v.shape[-1]), dsinks

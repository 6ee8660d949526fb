"""The tensors that results are written to: the one place that decides their layout, for backends and for tracing.

Every call allocates its results here, with explicit strides: `new_empty_strided` takes half the time of `new_empty`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import AttentionInputs, AttentionProblem


def empty_as(t: Tensor, head_dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialized (..., seqlen, num_heads, head_dim), dense, with heads outside seqlen in memory if t has them so.

    A caller with (batch, num_heads, seqlen, head_dim) tensors passes transposes, and the transpose of the result is
    contiguous again.
    """
    if t.dim() == 3:
        total, num_heads, _ = t.shape
        return t.new_empty_strided((total, num_heads, head_dim), (num_heads * head_dim, head_dim, 1), dtype=dtype)
    batch, seqlen, num_heads, _ = t.shape
    _, row, head, _ = t.stride()
    row, head = (head_dim, seqlen * head_dim) if row < head else (num_heads * head_dim, head_dim)
    strides = seqlen * num_heads * head_dim, row, head, 1
    return t.new_empty_strided((batch, seqlen, num_heads, head_dim), strides, dtype=dtype)


def in_order_of(t: Tensor, like: Tensor) -> Tensor:
    """t, or a copy, (batch, seqlen, num_heads, head_dim), with the strides of `empty_as(like, ...)`."""
    _, seqlen, num_heads, head_dim = t.shape
    row, head = (head_dim, seqlen * head_dim) if like.stride(1) < like.stride(2) else (num_heads * head_dim, head_dim)
    if t.stride() == (seqlen * num_heads * head_dim, row, head, 1):
        return t
    return empty_as(like, head_dim, t.dtype).copy_(t)


def empty_outputs(problem: AttentionProblem, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Uninitialized out, in q's memory order, and lse (batch, num_heads_q, seqlen_q) or (num_heads_q, total_q)."""
    q, dtype = inputs.q, problem.accum_dtype
    if q.dim() == 3:
        total, num_heads, _ = q.shape
        lse = q.new_empty_strided((num_heads, total), (total, 1), dtype=dtype)
    else:
        batch, seqlen, num_heads, _ = q.shape
        lse = q.new_empty_strided((batch, num_heads, seqlen), (num_heads * seqlen, seqlen, 1), dtype=dtype)
    return empty_as(q, problem.head_dim_v, problem.out_dtype), lse


def without_keys(out: Tensor, lse: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor | None) -> tuple[Tensor, Tensor]:
    """Write the results of rows that see no key: out = 0 and lse = the row's sink, or -inf without sinks.

    Rows past the last offset belong to no sequence and have no sink: their lse is -inf.
    """
    if sinks is None:
        return out.zero_(), lse.fill_(-torch.inf)
    lse.copy_(sinks[:, None])
    if cu_seqlens_q is not None:
        lse.masked_fill_(torch.arange(lse.shape[-1], device=lse.device) >= cu_seqlens_q[-1], -torch.inf)
    return out.zero_(), lse


def outputs_without_keys(problem: AttentionProblem, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """out and lse of a call in which no row sees a key."""
    return without_keys(*empty_outputs(problem, inputs), inputs.sinks, inputs.cu_seqlens_q)


def empty_gradients(
    inputs: AttentionInputs, dkv_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialized dq, dk, dv, with the memory order of q, k, v, and dsinks (of size 0 without sinks).

    Args: dkv_dtype: of dk and dv; None: that of k and v.
    """
    q, k, v, sinks = inputs[:4]
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks, memory_format=torch.contiguous_format)
    dk, dv = (empty_as(t, t.shape[-1], dkv_dtype) for t in (k, v))
    return empty_as(q, q.shape[-1]), dk, dv, dsinks

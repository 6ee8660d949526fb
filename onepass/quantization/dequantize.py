"""Quantized tensors converted back to float32."""

from __future__ import annotations

from torch import Tensor

from ..problem import AttentionInputs, AttentionProblem, Descales, Quantization
from .layout import keys_first
from .segments import segments_of


def dequantized(problem: AttentionProblem, inputs: AttentionInputs) -> AttentionInputs:
    """The inputs of a quantized call in float32."""
    assert problem.quantization is not None
    assert inputs.descales is not None
    offsets = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    q, k, v = dequantized_tensors(problem.quantization, *inputs[:3], inputs.descales, *offsets)
    return inputs._replace(q=q, k=k, v=v, descales=None)


def dequantized_tensors(
    quantization: Quantization,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    descales: Descales,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in float32, v with its keys in their usual dimension."""
    q_block, kv_block = quantization.q_block, quantization.kv_block
    if quantization.v_keys_last:
        v = keys_first(v, k.shape[-3], cu_seqlens_k)
    return (
        q.float() * row_scales(q, descales.q, q_block, cu_seqlens_q),
        k.float() * row_scales(k, descales.k, kv_block, cu_seqlens_k),
        v.float() * row_scales(v, descales.v, kv_block, cu_seqlens_k),
    )


def row_scales(t: Tensor, descale: Tensor, block: int | None, cu_seqlens: Tensor | None) -> Tensor:
    """The descale of each row of t (.., rows, heads, head_dim): (.., rows, heads, 1), or () if all rows share one."""
    if descale.dim() == 0:
        return descale
    if t.dim() == 4:
        if descale.dim() == 2:
            return descale[:, None, :, None]
        index, _ = segments_of(t.shape[1], block, None, t.device)
        return descale.transpose(1, 2)[:, index, :, None]
    index, count = segments_of(t.shape[0], block, cu_seqlens, t.device)
    if count == 0:
        return descale.new_ones(t.shape[0], t.shape[1], 1)
    return (descale if block is None else descale.T)[index, :, None]

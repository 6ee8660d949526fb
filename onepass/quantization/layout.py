"""V with its keys last, as tensor cores read it, and the way back to rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import V_KEYS
from .segments import sequence_of


def keys_last_in_torch(v: Tensor, cu_seqlens_k: Tensor | None) -> Tensor:
    """`keys_last` in plain PyTorch."""
    if cu_seqlens_k is None:
        batch, seqlen_k, heads, head_dim_v = v.shape
        padded = v.new_zeros(batch, heads, head_dim_v, -(-seqlen_k // V_KEYS) * V_KEYS, dtype=torch.uint8)
        padded[..., :seqlen_k] = v.view(torch.uint8).permute(0, 2, 3, 1)
    else:
        position, exists, length = _key_positions(v.shape[0], cu_seqlens_k)
        padded = v.new_zeros(*v.shape[1:], length + 1, dtype=torch.uint8)
        # rows that belong to no sequence go to one extra column, which is dropped
        padded[..., torch.where(exists, position, length)] = v.view(torch.uint8).permute(1, 2, 0)
        padded = padded[..., :length]
    runs = padded.unflatten(-1, (-1, 2, 4, 2))  # (.., run, h, q, e)
    return runs.transpose(-3, -2).flatten(-4).view(v.dtype)


def keys_first(v: Tensor, rows: int, cu_seqlens_k: Tensor | None = None) -> Tensor:
    """The inverse of `keys_last`: V with its keys in rows; rows that belong to no sequence are 0.

    Args:
        v: the result of `keys_last`. rows: seqlen_k, or total_k for packed sequences.
        cu_seqlens_k: (batch + 1,) int32, the offsets of packed sequences.
    """
    runs = v.view(torch.uint8).unflatten(-1, (-1, 4, 2, 2))  # (.., run, q, h, e)
    ordered = runs.transpose(-3, -2).flatten(-4)
    if cu_seqlens_k is None:
        return ordered[..., :rows].permute(0, 3, 1, 2).view(v.dtype)
    position, exists, length = _key_positions(rows, cu_seqlens_k)
    found = ordered[..., torch.where(exists, position, 0).clamp(max=max(0, length - 1))].permute(2, 0, 1)
    return torch.where(exists[:, None, None], found, 0).view(v.dtype)


def _key_positions(total: int, cu_seqlens_k: Tensor) -> tuple[Tensor, Tensor, int]:
    """Where packed keys lie in `keys_last`.

    Returns: (total,) int64 position of each key, (total,) bool whether a sequence has it, and the number of positions.
    """
    batch = cu_seqlens_k.shape[0] - 1
    length = (total // V_KEYS + batch) * V_KEYS
    row = torch.arange(total, device=cu_seqlens_k.device)
    if batch == 0:
        return torch.zeros_like(row), row < 0, length
    sequence = sequence_of(cu_seqlens_k, total)
    start = cu_seqlens_k.long()[sequence]
    return (start // V_KEYS + sequence) * V_KEYS + row - start, row < cu_seqlens_k[-1], length

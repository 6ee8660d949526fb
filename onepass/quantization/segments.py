"""Rows that share a descale or a mean: blocks, batch entries, packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_of(cu_seqlens: Tensor, total: int) -> Tensor:
    """(total,) int64: the sequence of each row; rows past the last offset count as rows of the last sequence."""
    row = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens, row, right=True) - 1
    return sequence.clamp(0, max(0, cu_seqlens.shape[0] - 2))


def rows_of(per_sequence: Tensor, cu_seqlens: Tensor | None, total: int) -> Tensor:
    """per_sequence (batch, heads, n) as (batch, 1, heads, n), or (1, total, heads, n) for packed rows."""
    if cu_seqlens is None:
        return per_sequence[:, None]
    if per_sequence.shape[0] == 0:
        return per_sequence.new_zeros(1, total, *per_sequence.shape[1:])
    return per_sequence[sequence_of(cu_seqlens, total)][None]


def segments_of(total: int, block: int | None, cu_seqlens: Tensor | None, device: torch.device) -> tuple[Tensor, int]:
    """The descale that each row has, if blocks of rows share one, or (with block = None) the rows of a sequence.

    `QuantizedQKV` says which descales the blocks of packed sequences have.

    Returns: (total,) int64 index of each row's descale, and the number of descales.
    """
    if cu_seqlens is None:
        row = torch.arange(total, device=device)
        return (torch.zeros_like(row), 1) if block is None else (row // block, -(-total // block))
    sequence, batch = sequence_of(cu_seqlens, total), cu_seqlens.shape[0] - 1
    if block is None:
        return sequence, batch
    start = cu_seqlens.long()[sequence]
    row = torch.arange(total, device=device) - start
    count = total // block + batch
    # rows past the last offset have no block of their own
    return (start // block + sequence + row // block).clamp(max=max(0, count - 1)), count

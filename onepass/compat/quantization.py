"""Descales of e4m3 tensors in the form of flash-attn 3: float32, one for each kv head of each batch entry."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..validation import tensors

NAMES = ("q_descale", "k_descale", "v_descale")


def check_descales(descales: tuple[Any, Any, Any], batch: int, k: Tensor) -> None:
    """Check the shapes, dtypes and devices of q_descale, k_descale and v_descale. Any may be None."""
    for name, descale in zip(NAMES, descales, strict=True):
        if descale is None:
            continue
        tensors.check_float32(name, descale, k.device)
        if tuple(descale.shape) != (batch, k.shape[-2]):
            expected = f"({batch}, {k.shape[-2]}), one for each kv head of each batch entry"
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(descale.shape)}")


def filled_descales(descales: tuple[Any, ...], device: torch.device) -> tuple[Tensor, ...]:
    """The descales, with a scalar 1 for None."""
    return tuple(torch.ones((), device=device) if d is None else d for d in descales)


def score_descale(descales: tuple[Any, ...]) -> Tensor | None:
    """The factor of scores, (batch, num_heads_kv): the product of the descales of q and k; None: 1."""
    q_descale, k_descale, _ = descales
    if q_descale is None or k_descale is None:
        return q_descale if k_descale is None else k_descale
    return q_descale * k_descale


def dequantized_queries(q: Tensor, descales: tuple[Any, ...], group: int, cu_seqlens_q: Tensor | None) -> Tensor:
    """q in bfloat16, times the descales of q and k."""
    return times_descale(q.bfloat16(), score_descale(descales), group, cu_seqlens_q)


def times_descale(rows: Tensor, descale: Tensor | None, group: int, cu_seqlens: Tensor | None) -> Tensor:
    """Rows of query heads, times a descale of kv heads, in the dtype of the rows.

    Args:
        rows: (batch, seqlen, num_heads_q, dim), or packed (total, num_heads_q, dim) with cu_seqlens.
        descale: (batch, num_heads_kv); None: 1. group: the number of query heads of a kv head.
    """
    if descale is None:
        return rows
    per_head = descale.repeat_interleave(group, -1)
    if cu_seqlens is None:
        factor = per_head[:, None, :, None]
    else:
        row = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
        owner = torch.searchsorted(cu_seqlens[1:], row, right=True)
        factor = torch.nn.functional.pad(per_head, (0, 0, 0, 1))[owner][..., None]
    return (rows * factor).to(rows.dtype)

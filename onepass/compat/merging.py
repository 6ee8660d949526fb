"""Merging of partials whose lse has heads in the last dimension, as flash-attn's `flash_attn_combine` takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..api.partials import merge_partials
from ..errors import REFUSALS, renamed
from ..validation import tensors


def merged(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """The merged out and lse; see `flash_attn_3.flash_attn_combine`."""
    for name, tensor, ranks in (("out_partial", out_partial, (4, 5)), ("lse_partial", lse_partial, (3, 4))):
        if tensors.check_tensor(name, tensor).dim() not in ranks:
            expected = " or ".join(map(str, ranks))
            raise ValueError(f"{name}: expected {expected} dimensions, got shape {tuple(tensor.shape)}")
    if out is not None and tensors.check_tensor("out", out).shape != out_partial.shape[1:]:
        raise ValueError(f"out: expected shape {tuple(out_partial.shape[1:])}, got {tuple(out.shape)}")
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype: expected a torch.dtype or None, got {out_dtype!r}")
    for name, dtype in (("out_dtype", out_dtype), ("out", None if out is None else out.dtype)):
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"{name}: expected a floating point dtype, got {dtype}")
    try:
        result = merge_partials(out_partial, lse_partial.transpose(-1, -2))
    except REFUSALS as error:
        raise renamed(error, {"outs": "out_partial", "lses": "lse_partial"}) from None
    found = result.out if out_dtype is None else result.out.to(out_dtype)
    return found if out is None else out.copy_(found), result.lse.transpose(-1, -2)

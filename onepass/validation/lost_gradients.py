"""Refusals of tensors whose gradients would be lost."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from ..errors import UnsupportedError


def refuse_lost_gradients(named: dict[str, torch.Tensor | None]) -> None:
    """Raise UnsupportedError for an FP8 tensor that requires a gradient, where gradients are recorded."""
    if not torch.is_grad_enabled():
        return
    for name, t in named.items():
        if t is not None and t.requires_grad:
            raise UnsupportedError(
                f"{name}: expected no requires_grad in FP8, because no gradient flows through rounding; "
                "attention(q, k, v, precision='fp8') with q, k, v in 16 or 32 bits has gradients, "
                "and under torch.no_grad() none are recorded"
            )


def refuse_forward_mode(*tensors: torch.Tensor | None) -> None:
    """Raise UnsupportedError for a tensor with a tangent, which torch would drop silently."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return
    for t in tensors:
        if t is not None and forward_ad.unpack_dual(t).tangent is not None:
            raise UnsupportedError(
                "onepass attention has no forward-mode derivative (torch.func.jvp, jacfwd): expected tensors without "
                "tangents; reverse mode (backward, torch.func.vjp) works"
            )

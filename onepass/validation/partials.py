"""Checks of the arguments of `merge_partials`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .tensors import DENSE_DIMS, PACKED_DIMS, SUPPORTED_DTYPES, check_tensor, shape_of, short_name


def check_partials(outs: Any, lses: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The arguments of `onepass.merge_partials` as two lists of equal length; raises like `check_attention`."""
    pair = []
    for name, group in (("outs", outs), ("lses", lses)):
        if isinstance(group, torch.Tensor):
            check_tensor(name, group)
            if group.dim() == 0:
                raise ValueError(f"{name}: expected tensors stacked in dimension 0, got shape ()")
            group = list(group.unbind(0))
        if not isinstance(group, Sequence) or not group or not all(isinstance(t, torch.Tensor) for t in group):
            given = f"an empty {type(group).__name__}" if isinstance(group, Sequence) and not group else repr(group)
            raise TypeError(f"{name}: expected a non-empty sequence of tensors or one stacked tensor, got {given}")
        for i, t in enumerate(group):
            check_tensor(f"{name}[{i}]", t)
        pair.append(list(group))
    outs, lses = pair
    if len(outs) != len(lses):
        raise ValueError(f"lses: expected {len(outs)} tensors like outs, got {len(lses)}")
    out0 = outs[0]
    if out0.dim() not in (3, 4):
        raise ValueError(f"outs[0]: expected {DENSE_DIMS} or {PACKED_DIMS}, got {shape_of(out0)}")
    expected_lse = (*out0.shape[:-3], out0.shape[-2], out0.shape[-3])
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.dtype not in SUPPORTED_DTYPES or out.dtype != out0.dtype:
            raise TypeError(
                f"outs[{i}]: expected dtype {short_name(out0.dtype)} like outs[0], got {short_name(out.dtype)}"
            )
        if lse.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"lses[{i}]: expected dtype float32 or float64, got {short_name(lse.dtype)}")
        for name, t in (("outs", out), ("lses", lse)):
            if t.device != out0.device:
                raise ValueError(f"{name}[{i}]: expected device {out0.device} like outs[0], got {t.device}")
        if out.shape != out0.shape:
            raise ValueError(f"outs[{i}]: expected shape {shape_of(out0)} like outs[0], got {shape_of(out)}")
        if tuple(lse.shape) != expected_lse:
            raise ValueError(f"lses[{i}]: expected shape {expected_lse}, got {shape_of(lse)}")
    return outs, lses

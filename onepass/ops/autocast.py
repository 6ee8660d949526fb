"""Operators run under the caller's autocast; those of onepass compute in the dtypes that they state."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, under torch.autocast cast as by torch's own attention, so that mixed inputs meet in one dtype."""
    if not all(isinstance(t, Tensor) for t in tensors):
        return tensors  # validation refuses them
    device = tensors[0].device.type
    # not torch.amp.is_autocast_available: torch.compile cannot trace it before torch 2.13
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """A context in which operations on a device keep the dtypes of their tensors, whatever autocast is on."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return _NOTHING  # entering torch.autocast takes 3 us
    return torch.autocast(device_type, enabled=False)


_NOTHING = contextlib.nullcontext()

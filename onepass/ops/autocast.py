"""Operators run under the caller's autocast; those of onepass compute in the dtypes that they state."""

from __future__ import annotations

import contextlib

import torch


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """A context in which operations on a device keep the dtypes of their tensors, whatever autocast is on."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return _NOTHING  # entering torch.autocast takes 3 us
    return torch.autocast(device_type, enabled=False)


_NOTHING = contextlib.nullcontext()

"""The kernel that merges partials."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from . import backends, choice


def has_merge_kernel(device: torch.device) -> bool:
    """Whether `merge_partials` has a kernel on this GPU."""
    if choice.current() in choice.WITHOUT_KERNELS:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and backends.compiler_refusal() is None


def load_merge(device: torch.device) -> Callable:
    """The function merge_partials(outs, lses) -> (out, lse) that launches the kernel."""
    backends.warn_if_unproven(device)
    return importlib.import_module(f"{backends.PACKAGE}.kernels.launch.merge").merge_partials

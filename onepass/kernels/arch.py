"""Which architecture the kernels of a GPU are compiled for."""

from __future__ import annotations

import torch

from ..errors import UnsupportedError
from .config import SMEM_BYTES_BY_ARCH


def arch_of(device: torch.device) -> str:
    """The name that kernels for this GPU are compiled for. Raises: UnsupportedError for one that is not known."""
    return arch_of_capability(*torch.cuda.get_device_capability(device))


def arch_of_capability(major: int, minor: int) -> str:
    name = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    if name in SMEM_BYTES_BY_ARCH:
        return name
    if major == 8:  # what was compiled for the first of this generation runs on all of it
        return "sm_80"
    known = ", ".join(SMEM_BYTES_BY_ARCH)
    raise UnsupportedError(f"compute capability: expected that of one of {known}, got {(major, minor)}")

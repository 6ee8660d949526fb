"""This module says which architecture the kernels of a GPU are compiled for, and which GPUs have ever run them."""

from __future__ import annotations

import sys
import warnings

import torch

from ...errors import UnsupportedError
from ...namespace import PACKAGE
from . import SMEM_BYTES_BY_ARCH


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


# Compute capabilities of the GPUs that have run the tests of the kernels (benchmarks/results/h200-tests.json). For all
# others since 8.0 kernels are compiled, and used, and no more than their machine code has been checked.
PROVEN = frozenset({(9, 0)})
_checked: set[int | None] = set()  # indices of GPUs
_said: set[str] = set()


def unproven(device: torch.device) -> str | None:
    """The warning for kernels on this GPU; None where such a GPU has run their tests, or has no kernels."""
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0) or capability in PROVEN:
        return None
    name = ".".join(map(str, capability))
    return (
        f"the kernels have not run on any GPU of compute capability {name} yet: they are compiled for it and their "
        "machine code was checked, no more. `onepass verify` compares results with float64 here; "
        "onepass.use_backend('tiled') or ONEPASS_BACKEND=tiled does without kernels"
    )


def warn_if_unproven(device: torch.device) -> None:
    """Say it once a process for each kind of GPU, on the first call that runs a kernel there."""
    if device.index in _checked:
        return
    _checked.add(device.index)
    if (words := unproven(device)) is not None and words not in _said:
        _said.add(words)
        warnings.warn(f"onepass: {words}. (This is said once.)", RuntimeWarning, stacklevel=frames_to_caller())


def frames_to_caller() -> int:
    """How far the line that called onepass is above the caller of this function."""
    frame, count = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (PACKAGE, "torch"):
        frame, count = frame.f_back, count + 1
    return count

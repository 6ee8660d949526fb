"""Which backend computes a problem, and why."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import NamedTuple

import torch

from .errors import UnsupportedError
from .problem import AttentionProblem


class Backend(NamedTuple):
    """Modules of a backend, imported when first used.

    Attributes:
        forward: has forward(problem, inputs) -> (out, lse).
        backward: has backward(problem, inputs, out, lse, dout, dlse) -> (dq, dk, dv, dsinks). It may be another
            backend's: out and lse mean the same everywhere.
    """

    forward: str
    backward: str


_BACKENDS = {
    "tiled": Backend("onepass.tiled", "onepass.tiled"),
    "sm90": Backend("onepass.kernels.sm90.launch", "onepass.tiled"),
}


class Support(NamedTuple):
    """Answer of `onepass.supports`: whether the call would run, on which backend, and why (or why not)."""

    ok: bool
    backend: str
    reason: str


def backends() -> tuple[str, ...]:
    """The names that `backend=` takes. Whether one runs here and what it computes, `onepass.supports` says."""
    return tuple(_BACKENDS)


def choose(problem: AttentionProblem, requested: str | None = None) -> Support:
    """The backend for this problem. A backend that the caller names is the one that runs, or is refused."""
    if requested is not None and requested not in _BACKENDS:
        expected = ", ".join(sorted(backends()))
        return Support(False, str(requested), f"backend: expected one of {expected} or None, got {requested!r}")
    reason = None if requested == "tiled" else _sm90_refusal(problem)
    if requested == "sm90" and reason is not None:
        return Support(False, "sm90", f"backend sm90: {reason}")
    if requested != "tiled" and reason is None:
        return Support(True, "sm90", "Hopper kernel (CuTe DSL); gradients by the tiled backend")
    because = f" (sm90: {reason})" if problem.device_type == "cuda" and requested is None else ""
    return Support(True, "tiled", f"plain torch tiles run on any torch device, here {problem.device_type}{because}")


def _sm90_refusal(problem: AttentionProblem) -> str | None:
    """Why the Hopper kernel does not run this problem; None if it does."""
    if problem.device_type != "cuda":
        return f"expected tensors on cuda, got {problem.device_type}"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"expected a Hopper GPU (compute capability 9.0), got {torch.cuda.get_device_capability()}"
    if not _has_kernel_compiler():
        return "the kernel compiler is not installed: pip install 'onepass[cuda]'"
    from .kernels.sm90.launch import unsupported

    return unsupported(problem)


@functools.lru_cache(maxsize=1)
def _has_kernel_compiler() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("cutlass", "tvm_ffi"))


def require(problem: AttentionProblem, requested: str | None = None) -> str:
    """The name of the backend that will run. Raises: UnsupportedError with the reason if none can."""
    support = choose(problem, requested)
    if not support.ok:
        raise UnsupportedError(support.reason) if requested in _BACKENDS else ValueError(support.reason)
    return support.backend


def load_forward(name: str) -> ModuleType:
    """The module with the backend's forward."""
    return importlib.import_module(_BACKENDS[name].forward)


def load_backward(name: str) -> ModuleType:
    """The module with the backend's backward."""
    return importlib.import_module(_BACKENDS[name].backward)

"""Which backend computes a problem, and why."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple

from .errors import UnsupportedError
from .problem import AttentionProblem

# name -> module with forward(problem, tensors) and backward(problem, tensors, ...); imported when first used
_BACKENDS = {"tiled": "onepass.tiled"}


class Support(NamedTuple):
    """Answer of `onepass.supports`: whether the call would run, on which backend, and why (or why not)."""

    ok: bool
    backend: str
    reason: str


def choose(problem: AttentionProblem, requested: str | None = None) -> Support:
    """The backend for this problem. A backend that the caller names is the one that runs, or is refused."""
    if requested is not None and requested not in _BACKENDS:
        expected = ", ".join(sorted(_BACKENDS))
        return Support(False, str(requested), f"backend: expected one of {expected} or None, got {requested!r}")
    return Support(True, "tiled", f"plain torch tiles run on any torch device, here {problem.device_type}")


def require(problem: AttentionProblem, requested: str | None = None) -> str:
    """The name of the backend that will run. Raises: UnsupportedError with the reason if none can."""
    support = choose(problem, requested)
    if not support.ok:
        raise UnsupportedError(support.reason) if requested in _BACKENDS else ValueError(support.reason)
    return support.backend


def load(name: str) -> ModuleType:
    """The backend's module."""
    return importlib.import_module(_BACKENDS[name])

"""Which backend computes a problem, and why."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import UnsupportedError
from .kernels.config import BackwardConfig, ForwardConfig
from .problem import AttentionInputs, AttentionProblem

Forward = Callable[[AttentionInputs], tuple[Tensor, Tensor]]


class Backend(NamedTuple):
    """Modules of a backend, imported when first used.

    Attributes:
        forward: has forward(problem, inputs) -> (out, lse); one with kernels has prepare(problem, device, config) ->
            (inputs -> (out, lse)) beside it, which does once what does not depend on the tensors.
        backward: has backward(problem, inputs, out, lse, dout, dlse) -> (dq, dk, dv, dsinks). It may be another
            backend's: out and lse mean the same everywhere.
        has_kernels: both are compiled; forward takes a ForwardConfig, backward a BackwardConfig.
    """

    forward: str
    backward: str
    has_kernels: bool = False


_BACKENDS = {
    "tiled": Backend("onepass.tiled", "onepass.tiled"),
    "sm90": Backend("onepass.kernels.sm90.launch", "onepass.kernels.sm90.backward_launch", has_kernels=True),
}

# looked up at import: torch.compile traces the choice of a backend, and cannot trace a look at the disk
_HAS_KERNEL_COMPILER = all(importlib.util.find_spec(name) is not None for name in ("cutlass", "tvm_ffi"))


class Support(NamedTuple):
    """Answer of `onepass.supports`: whether the call would run, on which backend, and why (or why not)."""

    ok: bool
    backend: str
    reason: str


def backends() -> tuple[str, ...]:
    """The names that `backend=` takes. Whether one runs here and what it computes, `onepass.supports` says."""
    return tuple(_BACKENDS)


def choose(problem: AttentionProblem, requested: str | None = None, tuning: ForwardConfig | None = None) -> Support:
    """The backend for this problem. A backend that the caller names is the one that runs, or is refused.

    A configuration picks none: it is refused where it does not fit the backend that would run without it.
    """
    support = _choose(problem, requested)
    if tuning is None or not support.ok:
        return support
    if not _BACKENDS[support.backend].has_kernels:
        reason = f"tuning: backend {support.backend} takes none, expected None, got {tuning} ({support.reason})"
        return Support(False, support.backend, reason)
    misfit = _misfit(problem, tuning)
    return support if misfit is None else Support(False, support.backend, misfit)


def _misfit(problem: AttentionProblem, tuning: ForwardConfig | None) -> str | None:
    """Why the problem cannot be computed with this configuration; None if it can."""
    try:
        if tuning is not None:
            tuning.check(problem)
    except UnsupportedError as error:
        return f"tuning: {error}"
    return None


def _choose(problem: AttentionProblem, requested: str | None) -> Support:
    if requested is not None and requested not in _BACKENDS:
        expected = ", ".join(sorted(backends()))
        return Support(False, str(requested), f"backend: expected one of {expected} or None, got {requested!r}")
    reason = None if requested == "tiled" else _sm90_refusal(problem)
    if requested == "sm90" and reason is not None:
        return Support(False, "sm90", f"backend sm90: {reason}")
    if requested != "tiled" and reason is None:
        refusal = _sm90_backward_refusal(problem)
        gradients = "" if refusal is None else f"; gradients by the tiled backend ({refusal})"
        return Support(True, "sm90", f"Hopper kernels (CuTe DSL){gradients}")
    because = f" (sm90: {reason})" if problem.device_type == "cuda" and requested is None else ""
    return Support(True, "tiled", f"plain torch tiles run on any torch device, here {problem.device_type}{because}")


def _sm90_refusal(problem: AttentionProblem) -> str | None:
    """Why the Hopper kernel does not run this problem; None if it does."""
    return _hopper_refusal(problem) or _compiler_refusal() or _sm90_unsupported(problem)


def _hopper_refusal(problem: AttentionProblem) -> str | None:
    if problem.device_type != "cuda":
        return f"expected tensors on cuda, got {problem.device_type}"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"expected a Hopper GPU (compute capability 9.0), got {torch.cuda.get_device_capability()}"
    return None


def _compiler_refusal() -> str | None:
    return None if _HAS_KERNEL_COMPILER else "the kernel compiler is not installed: pip install 'onepass[cuda]'"


def _sm90_unsupported(problem: AttentionProblem) -> str | None:
    from .kernels.sm90.launch import unsupported

    return unsupported(problem)


def _sm90_backward_refusal(problem: AttentionProblem) -> str | None:
    """Why the Hopper backward does not run for this problem; None if it does."""
    from .kernels.sm90.backward_launch import unsupported

    return unsupported(problem)


def require(problem: AttentionProblem, requested: str | None = None, tuning: ForwardConfig | None = None) -> str:
    """The name of the backend that will run. Raises: UnsupportedError with the reason if none can."""
    support = choose(problem, requested, tuning)
    if not support.ok:
        is_name = requested is None or requested in _BACKENDS
        raise UnsupportedError(support.reason) if is_name else ValueError(support.reason)
    return support.backend


def require_to_compile(
    problem: AttentionProblem, requested: str | None = None, tuning: ForwardConfig | None = None
) -> str | None:
    """The name of the backend whose kernel calls of this problem need; None if they run without one.

    A backend that is named needs no GPU here. Raises: as `require`, and UnsupportedError without the compiler.
    """
    if requested is None and problem.device_type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            "backend: expected a name, such as 'sm90', where there is no GPU to choose for, got None"
        )
    could_run_here = requested is None and _hopper_refusal(problem) is None and _sm90_unsupported(problem) is None
    if requested != "sm90" and not could_run_here:
        require(problem, requested, tuning)
        return None
    reason = _compiler_refusal() or _sm90_unsupported(problem) or _misfit(problem, tuning)
    if reason is not None:
        raise UnsupportedError(f"backend sm90: {reason}")
    return "sm90"


def compile_request(name: str, problem: AttentionProblem, config: ForwardConfig) -> tuple:
    """The kernel of the backend's forward of this problem, as the arguments of `kernels.compile.get`."""
    return importlib.import_module(_BACKENDS[name].forward).compile_request(problem, config)


def backward_compile_requests(
    name: str, problem: AttentionProblem, has_dlse: bool, config: BackwardConfig
) -> list[tuple]:
    """The same for each kernel of its backward; none where the backward is that of a backend without kernels."""
    backend = _backend_of_backward(name, problem)
    if not backend.has_kernels:
        return []
    return importlib.import_module(backend.backward).compile_requests(problem, has_dlse, config)


def prepare(name: str, problem: AttentionProblem, device: torch.device, tuning: ForwardConfig | None = None) -> Forward:
    """The backend's forward for calls of this problem: everything that does not depend on the tensors is done."""
    backend = _BACKENDS[name]
    module = importlib.import_module(backend.forward)
    if backend.has_kernels:
        return module.prepare(problem, device, tuning)
    return functools.partial(module.forward, problem)


def load_backward(name: str, problem: AttentionProblem) -> ModuleType:
    """The module with the backward of this backend, or that of `tiled` where its kernels do not compute it."""
    return importlib.import_module(_backend_of_backward(name, problem).backward)


def _backend_of_backward(name: str, problem: AttentionProblem) -> Backend:
    has_own = not _BACKENDS[name].has_kernels or _sm90_backward_refusal(problem) is None
    return _BACKENDS[name if has_own else "tiled"]

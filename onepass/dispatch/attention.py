"""Which backend computes a problem, and why."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..kernels.config import LaunchConfig
from ..kernels.heuristics import sm90 as heuristics
from ..problem import AttentionInputs, AttentionProblem
from ..problem.decode import DecodeInputs, DecodeProblem
from . import choice

Forward = Callable[[Any], tuple[Tensor, Tensor]]  # of AttentionInputs, in FP8 of QuantizedInputs


class Backend(NamedTuple):
    """Modules of a backend, imported when first used.

    Attributes:
        forward: has forward(problem, inputs) -> (out, lse); one with kernels has prepare(problem, device, config) ->
            (inputs -> (out, lse)) beside it, which does once what does not depend on the tensors.
        backward: has backward(problem, inputs, out, lse, dout, dlse) -> (dq, dk, dv, dsinks). It may be another
            backend's: out and lse mean the same everywhere.
        kernels: what its kernels are, in words; None: it has none, and takes no configuration.
    """

    forward: str
    backward: str
    kernels: str | None = None


# in the order in which they are asked, but for `tiled`, which computes everything
_BACKENDS = {
    "sm90": Backend(
        "onepass.kernels.launch.forward_sm90", "onepass.kernels.launch.backward_sm90", "Hopper kernels (CuTe DSL)"
    ),
    "sm80": Backend(
        "onepass.kernels.launch.forward_sm80", "onepass.kernels.launch.backward_sm80", "Ampere kernels (CuTe DSL)"
    ),
    "tiled": Backend("onepass.tiled", "onepass.tiled"),
}
_WITH_KERNELS = ("sm90", "sm80")

# looked up at import: torch.compile traces the choice of a backend, and cannot trace a look at the disk
_HAS_KERNEL_COMPILER = all(importlib.util.find_spec(name) is not None for name in ("cutlass", "tvm_ffi"))


class Support(NamedTuple):
    """Answer of `onepass.supports`: whether the call would run, on which backend, and why (or why not).

    True where the call would run: `if onepass.supports(...)` asks for `ok`.
    """

    ok: bool
    backend: str
    reason: str

    def __bool__(self) -> bool:
        return self.ok


def backends() -> tuple[str, ...]:
    """The names that `backend=` takes. Whether one runs here and what it computes, `onepass.supports` says."""
    return choice.NAMES


# In what follows, device is that of the tensors, where it is a GPU: GPUs of one machine may be of different
# architectures. None stands for the current GPU, for calls that have no tensors yet.


def choose(
    problem: AttentionProblem,
    requested: str | None = None,
    tuning: LaunchConfig | None = None,
    device: torch.device | None = None,
) -> Support:
    """The backend for this problem. One that the caller names, or has chosen (choice.py), runs, or is refused.

    A configuration picks none: it is refused where it does not fit the backend that would run without it.
    """
    support = _choose(problem, requested, device)
    if tuning is None or not support.ok:
        return support
    if support.backend not in _WITH_KERNELS:
        reason = f"tuning: backend {support.backend} takes none, expected None, got {tuning} ({support.reason})"
        return Support(False, support.backend, reason)
    misfit = _misfit(support.backend, problem, tuning, device)
    return support if misfit is None else Support(False, support.backend, misfit)


def _misfit(
    name: str, problem: AttentionProblem, tuning: LaunchConfig | None, device: torch.device | None = None
) -> str | None:
    """Why the problem cannot be computed with this configuration; None if it can."""
    if tuning is None:
        return None
    expected = config_type(name)
    if not isinstance(tuning, expected):
        return f"tuning: backend {name} expects a {expected.__name__}, got {tuning}"
    try:
        tuning.check(problem, arch_of(name, device))
    except UnsupportedError as error:
        return f"tuning: {error}"
    return None


def _choose(problem: AttentionProblem, requested: str | None, device: torch.device | None) -> Support:
    requested, words = _named(requested)
    if requested is not None and (reason := choice.refusal(requested)) is not None:
        return Support(False, str(requested), f"backend: {reason}")
    refusals = ""
    if requested != "tiled":
        for name in _WITH_KERNELS if requested is None else (requested,):
            reason = _refusal(name, problem, device)
            if reason is None:
                return Support(True, name, f"{_BACKENDS[name].kernels}{refusals}{_whose_gradients(name, problem)}")
            if requested is not None:
                return Support(False, name, f"backend {name}{words}: {reason}")
            refusals += f"; {name}: {reason}"
    because = f" ({refusals[2:]})" if problem.device_type == "cuda" and requested is None else ""
    return Support(True, "tiled", f"plain torch tiles run on any torch device, here {problem.device_type}{because}")


def _named(requested: str | None) -> tuple[str | None, str]:
    """`choice.named`, and in words whose choice that is."""
    name = choice.named(requested)
    return name, "" if name is None or requested is not None else f" (by use_backend or {choice.VARIABLE})"


def _whose_gradients(name: str, problem: AttentionProblem) -> str:
    if problem.quantization is not None:
        return ""  # none, or those of another problem
    refusal, other = _backward_unsupported(name, problem), backend_of_backward(name, problem)
    return "" if refusal is None else f"; gradients by the {other} backend ({refusal})"


def _refusal(name: str, problem: AttentionProblem, device: torch.device | None) -> str | None:
    """Why the kernels of a backend do not run this problem; None if they do."""
    return _device_refusal(name, problem, device) or _compiler_refusal() or _unsupported(name, problem)


def _device_refusal(name: str, problem: AttentionProblem, device: torch.device | None = None) -> str | None:
    if problem.device_type != "cuda":
        return f"expected tensors on cuda, got {problem.device_type}"
    capability = torch.cuda.get_device_capability(device)
    if name == "sm90" and capability != (9, 0):
        return f"expected a Hopper GPU (compute capability 9.0), got {capability}"
    if name == "sm80":
        if capability < (8, 0):
            return f"expected a GPU of compute capability 8.0 or more, got {capability}"
        from ..kernels.config.arch import arch_of_capability

        try:
            arch_of_capability(*capability)
        except UnsupportedError as error:
            return str(error)
    return None


def _compiler_refusal() -> str | None:
    return None if _HAS_KERNEL_COMPILER else "the kernel compiler is not installed: pip install 'onepass[cuda]'"


# Imports in functions, not importlib: torch.compile traces these.


def _unsupported(name: str, problem: AttentionProblem) -> str | None:
    """Why the forward kernel does not compute the problem on any GPU; None if it does."""
    if name == "sm90":
        from ..kernels.launch.forward_sm90 import unsupported
    else:
        from ..kernels.launch.forward_sm80 import unsupported
    return unsupported(problem)


def _backward_unsupported(name: str, problem: AttentionProblem) -> str | None:
    if name == "sm90":
        from ..kernels.launch.backward_sm90 import unsupported
    else:
        from ..kernels.launch.backward_sm80 import unsupported
    return unsupported(problem)


def arch_of(name: str, device: torch.device | None = None) -> str:
    """What the kernels of a backend are compiled for."""
    if name == "sm90":
        from ..kernels.launch.forward_sm90 import ARCH

        return ARCH
    from ..kernels.config.arch import arch_of

    return arch_of(device or torch.device("cuda"))


def config_type(name: str) -> type[LaunchConfig]:
    """What the forward of a backend with kernels takes as `tuning`."""
    return heuristics.FORWARD[name].config_type


def require(
    problem: AttentionProblem,
    requested: str | None = None,
    tuning: LaunchConfig | None = None,
    device: torch.device | None = None,
) -> str:
    """The name of the backend that will run.

    Raises: UnsupportedError with the reason if none can; ValueError or TypeError if `requested` is no name.
    """
    return _accepted(choose(problem, requested, tuning, device), requested)


def _accepted(support: Support, requested: object) -> str:
    if support.ok:
        return support.backend
    if requested is None or choice.refusal(requested) is None:
        raise UnsupportedError(support.reason)
    raise (ValueError if isinstance(requested, str) else TypeError)(support.reason)


def at_run(told: str, problem: AttentionProblem, tuning: LaunchConfig | None, device: torch.device) -> str:
    """The backend of an operator that was told `choice.of_operator`. Raises: as `require`."""
    return require(problem, None, tuning, device) if choice.is_left_to_block(told) else choice.found(told)


def require_to_compile(
    problem: AttentionProblem, requested: str | None = None, tuning: LaunchConfig | None = None
) -> str | None:
    """The name of the backend whose kernel calls of this problem need; None if they run without one.

    sm90 that is named needs no GPU here: there is one architecture. Raises: as `require`, and UnsupportedError without
    the compiler.
    """
    requested, _ = _named(requested)
    if requested is None and problem.device_type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            "backend: expected a name, such as 'sm90', where there is no GPU to choose for, got None"
        )
    if requested is None:
        refusals = _device_refusal, _unsupported
        could_run = (n for n in _WITH_KERNELS if not any(refuses(n, problem) for refuses in refusals))
        name = next(could_run, None)
    else:
        name = requested if choice.refusal(requested) is None and requested in _WITH_KERNELS else None
    if name is None:
        require(problem, requested, tuning)
        return None
    if name != "sm90" and not torch.cuda.is_available():
        raise UnsupportedError(f"backend {name}: expected a GPU, whose architecture to compile for, got none")
    reason = _compiler_refusal() or _unsupported(name, problem) or _misfit(name, problem, tuning)
    if reason is not None:
        raise UnsupportedError(f"backend {name}: {reason}")
    return name


def has_kernels(name: str) -> bool:
    return name in _WITH_KERNELS


def forward_config(name: str, problem: AttentionProblem) -> LaunchConfig:
    """The configuration that the forward of a backend with kernels runs this problem with on the current GPU."""
    from ..kernels.heuristics import tuned  # not at the top: it needs files and locks that not every system has

    return tuned.choose("fwd", name, problem, arch_of(name))


def compile_request(name: str, problem: AttentionProblem, config: LaunchConfig) -> tuple:
    """The kernel of the backend's forward of this problem, as the arguments of `kernels.compile.get`."""
    return importlib.import_module(_BACKENDS[name].forward).compile_request(problem, config, arch_of(name))


def forward_requests(name: str, problem: AttentionProblem, config: LaunchConfig) -> list[tuple]:
    """All kernels of the backend's forward: that of `compile_request`, then those that run before it."""
    requests = [compile_request(name, problem, config)]
    if name == "sm90":
        from ..kernels.launch.forward_sm90 import helper_requests

        requests += helper_requests(problem)
    return requests


def backward_requests(
    name: str, problem: AttentionProblem, has_dlse: bool, config: LaunchConfig | None = None
) -> list[tuple[LaunchConfig, tuple]]:
    """The same for each kernel of its backward, each with its configuration (None = what a call runs with); none where
    the backward is that of a backend without kernels."""
    forward, name = name, backend_of_backward(name, problem)
    if name not in _WITH_KERNELS:
        return []
    from ..kernels.heuristics import tuned

    arch = arch_of(forward)  # of one GPU: that of sm80 asks which one
    config = config or tuned.choose("bwd", name, problem, arch)
    requests = importlib.import_module(_BACKENDS[name].backward).compile_requests(problem, has_dlse, config, arch)
    return [(config, request) for request in requests]


def prepare(name: str, problem: AttentionProblem, device: torch.device, tuning: LaunchConfig | None = None) -> Forward:
    """The backend's forward for calls of this problem: everything that does not depend on the tensors is done."""
    backend = _BACKENDS[name]
    module = importlib.import_module(backend.forward)
    if backend.kernels is not None:
        _warn_if_unproven(device)
        return module.prepare(problem, device, tuning)
    return functools.partial(module.forward, problem)


def _warn_if_unproven(device: torch.device) -> None:
    if device.type == "cuda":
        from ..kernels.config.arch import warn_if_unproven

        warn_if_unproven(device)


def forget_prepared() -> None:
    """Prepare all calls anew: configurations may have changed."""
    for backend in _BACKENDS.values():
        for name in (backend.forward, backend.backward):
            prepare = getattr(sys.modules.get(name), "prepare", None)
            if prepare is not None:
                prepare.cache_clear()


def load_backward(name: str, problem: AttentionProblem) -> ModuleType:
    """The module with the backward of this backend, or of the one that computes it instead."""
    return importlib.import_module(_BACKENDS[backend_of_backward(name, problem)].backward)


def backend_of_backward(name: str, problem: AttentionProblem) -> str:
    """Whose kernels compute the gradients of a forward on this backend: its own, sm80's (of float32 on Hopper), or
    those of `tiled`."""
    if name not in _WITH_KERNELS:
        return name
    later = _WITH_KERNELS[_WITH_KERNELS.index(name) :]
    return next((n for n in later if _backward_unsupported(n, problem) is None), "tiled")


# ---------------------------------------------------------------- attention over a cache

# in the order in which they are asked
_DECODE = {
    "sm90": "onepass.kernels.launch.decode_sm90",
    "sm80": "onepass.kernels.launch.decode_sm80",
    "tiled": "onepass.tiled.decode",
}


def choose_decode(problem: DecodeProblem, requested: str | None = None, device: torch.device | None = None) -> Support:
    """The backend that will run `attention_decode`, and why."""
    requested, words = _named(requested)
    if requested is not None and (reason := choice.refusal(requested)) is not None:
        return Support(False, str(requested), f"backend: {reason}")
    device_type, refusals = problem.attention.device_type, ""
    if requested != "tiled":
        for name in _WITH_KERNELS if requested is None else (requested,):
            refusal = _refusal(name, problem.attention, device)
            refusal = refusal or _unsupported_decode(name, problem, requested is not None, device)
            if refusal is None:
                return Support(True, name, f"{_BACKENDS[name].kernels}{refusals}")
            if requested is not None:
                return Support(False, name, f"backend {name}{words}: {refusal}")
            refusals += f"; {name}: {refusal}"
    because = f" ({refusals[2:]})" if device_type == "cuda" and requested is None else ""
    return Support(True, "tiled", f"plain torch tiles run on any torch device, here {device_type}{because}")


def require_decode(problem: DecodeProblem, requested: str | None = None, device: torch.device | None = None) -> str:
    """The name of the backend that will run `attention_decode`. Raises: as `require`."""
    return _accepted(choose_decode(problem, requested, device), requested)


def at_run_decode(told: str, problem: DecodeProblem, device: torch.device) -> str:
    """The backend that an operator of `attention_decode` runs on when it runs, see `at_run`."""
    return require_decode(problem, None, device) if choice.is_left_to_block(told) else choice.found(told)


def _unsupported_decode(name: str, problem: DecodeProblem, is_named: bool, device: torch.device | None) -> str | None:
    """Why the kernels of `attention_decode` do not compute the problem, whose attention they do; None if they do.

    Args: is_named: by the caller; else those that another backend has faster ones for refuse, too.
    """
    if name == "sm90":
        from ..kernels.launch import decode_sm90 as decode_launch

        return decode_launch.unsupported(problem) or (None if is_named else decode_launch.slower(problem))
    if problem.attention.has_e4m3_cache:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            return f"an e4m3 cache needs a GPU of compute capability 8.9 or more, got {capability}"
    from ..kernels.launch.decode_sm80 import unsupported

    return unsupported(problem)


def decode_requests(name: str, problem: DecodeProblem, inputs: DecodeInputs) -> list[tuple[LaunchConfig | None, tuple]]:
    """The kernels of such a call on the current GPU, in the order in which they run, each with its configuration, as
    the arguments of `kernels.compile.get`; none for a backend without kernels."""
    if name == "tiled":
        return []
    return importlib.import_module(_DECODE[name]).compile_requests(problem, inputs, torch.device("cuda"))


def has_merge_kernel(device: torch.device) -> bool:
    """Whether `merge_partials` has a kernel on this GPU."""
    if choice.current() == "tiled":
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and _compiler_refusal() is None


def load_merge(device: torch.device) -> Callable:
    """merge_partials(outs, lses) -> (out, lse) of the kernels."""
    _warn_if_unproven(device)
    return importlib.import_module("onepass.kernels.launch.merge").merge_partials


def load_decode(name: str, device: torch.device) -> Callable:
    """decode(problem, inputs) -> (out, lse) of a backend."""
    if name in _WITH_KERNELS:
        _warn_if_unproven(device)
    return importlib.import_module(_DECODE[name]).decode


def prepare_decode(name: str, problem: DecodeProblem, device: torch.device) -> Callable:
    """That of a backend for calls of this problem, whose values are not to be checked: inputs -> (out, lse)."""
    module = importlib.import_module(_DECODE[name])
    return functools.partial(module.decode, problem) if name == "tiled" else module.prepare(problem, device)


# ---------------------------------------------------------------- rounding to e4m3


class QuantizationKernels(NamedTuple):
    """Attributes:
    prepare: (problem, device, seed of the rotation or None, keys_last, whether k and v have means) -> (inputs, k_mean,
        v_mean) -> tensors and descales; see kernels/launch/quantize.py.
    keys_last: whether V should lie as the FP8 attention kernel of this GPU reads it.
    """

    prepare: Callable
    keys_last: bool


def quantization_kernels(inputs: AttentionInputs, granularity: str) -> QuantizationKernels | None:
    """Those that quantise these tensors on their GPU; None: plain torch does."""
    if not _has_e4m3_kernels(inputs.q):
        return None
    from ..kernels.launch import quantize as launch

    if launch.unsupported(inputs, granularity) is not None:
        return None
    _warn_if_unproven(inputs.q.device)
    return QuantizationKernels(launch.prepare, torch.cuda.get_device_capability(inputs.q.device) == (9, 0))


def keys_last_kernel(v: Tensor, cu_seqlens: Tensor | None) -> Callable | None:
    """(v, cu_seqlens) -> `fp8.keys_last` of v in e4m3, on its GPU; None: plain torch does it."""
    if not _has_e4m3_kernels(v):
        return None
    from ..kernels.launch import quantize as launch

    return None if launch.unsupported_layout(v, cu_seqlens) is not None else launch.keys_last


def _has_e4m3_kernels(t: Tensor) -> bool:
    # torch.compile cannot trace a launch
    if t.device.type != "cuda" or torch.compiler.is_compiling() or choice.current() == "tiled":
        return False
    # before 8.9 there is no e4m3
    return torch.cuda.get_device_capability(t.device) >= (8, 9) and _compiler_refusal() is None

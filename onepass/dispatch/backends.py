"""The backends: their modules, and whether one runs on this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import variables
from ..errors import UnsupportedError
from ..kernels.config import LaunchConfig
from ..kernels.heuristics import chooser
from ..problem import AttentionProblem
from . import choice

Forward = Callable[[Any], tuple[Tensor, Tensor]]  # AttentionInputs or DecodeInputs -> (out, lse)


class Backend(NamedTuple):
    """The modules of a backend, imported when first used.

    Attributes:
        forward: module with forward(problem, inputs) -> (out, lse). With kernels it also has
            prepare(problem, device, config) -> (inputs -> (out, lse)), which does all work that does not depend on the
            tensors.
        backward: module with backward(problem, inputs, out, lse, dout, dlse) -> (dq, dk, dv, dsinks), and with
            gradients of the same arguments -> (dq, dk, dv, dsinks, dslopes, dbias). Another backend may compute the
            gradients of a forward: out and lse have the same meaning in all backends.
        description: human-readable text.
        has_kernels: whether the backend compiles kernels, and takes a configuration.
    """

    forward: str
    backward: str
    description: str
    has_kernels: bool = False


# The package may have been loaded under another name than onepass.
PACKAGE = __package__.rpartition(".")[0]
_LAUNCH = f"{PACKAGE}.kernels.launch"
# in the order in which they are asked; `tiled` comes last and computes everything
BACKENDS = {
    "sm90": Backend(f"{_LAUNCH}.forward_sm90", f"{_LAUNCH}.backward_sm90", "Hopper kernels (CuTe DSL)", True),
    "sm80": Backend(f"{_LAUNCH}.forward_sm80", f"{_LAUNCH}.backward_sm80", "Ampere kernels (CuTe DSL)", True),
    "cpu": Backend(f"{PACKAGE}.cpu", f"{PACKAGE}.cpu", "torch's C++ attention"),
    "tiled": Backend(f"{PACKAGE}.tiled", f"{PACKAGE}.tiled", "plain PyTorch tiles"),
}
WITH_KERNELS = ("sm90", "sm80")

# looked up at import: torch.compile traces the choice of a backend, and cannot trace access to the disk
_HAS_KERNEL_COMPILER = all(importlib.util.find_spec(name) is not None for name in ("cutlass", "tvm_ffi"))


class Support(NamedTuple):
    """The answer of `onepass.supports`: whether the call would run, on which backend, and why (or why not).

    It is true if the call would run: `if onepass.supports(...)` tests `ok`.
    """

    ok: bool
    backend: str
    reason: str

    def __bool__(self) -> bool:
        return self.ok


def backends() -> tuple[str, ...]:
    """The names that `backend=` takes. `onepass.supports` says whether one of them runs a call here."""
    return choice.NAMES


def named_backend(requested: str | None) -> tuple[str | None, str]:
    """The backend that `choice.named` gives, and words for a message about where the choice came from."""
    name = choice.named(requested)
    return name, "" if name is None or requested is not None else f" (by use_backend or {variables.BACKEND.name})"


def first_that_runs(requested: str | None, device_type: str, refusal_of: Callable[[str], str | None]) -> Support:
    """The first backend that does not refuse a call. A requested backend runs or is refused.

    Args:
        refusal_of: (name of a backend but `tiled`) -> why it does not run the call, or None if it does.
    """
    requested, words = named_backend(requested)
    if requested is not None and (reason := choice.refusal(requested)) is not None:
        return Support(False, str(requested), f"backend: {reason}")
    refusals = ""
    for name in choice.NAMES if requested is None else (requested,):
        if name == "tiled":
            break
        reason = refusal_of(name)
        if reason is None:
            return Support(True, name, f"{BACKENDS[name].description}{refusals}")
        if requested is not None:
            return Support(False, name, f"backend {name}{words}: {reason}")
        if (name == "cpu") == (device_type == "cpu"):
            refusals += f"; {name}: {reason}"
    because = f" ({refusals[2:]})" if refusals else ""
    return Support(
        True, "tiled", f"{BACKENDS['tiled'].description} run on any torch device, here {device_type}{because}"
    )


def refusal(name: str, problem: AttentionProblem, device: torch.device | None) -> str | None:
    """Why a backend but `tiled` does not run this problem; None if it does."""
    reason = device_refusal(name, problem, device)
    if reason is None and name in WITH_KERNELS:
        reason = compiler_refusal()
    return reason or unsupported_by(name, problem)


def device_refusal(name: str, problem: AttentionProblem, device: torch.device | None = None) -> str | None:
    """Why a backend but `tiled` does not run on the device; None if it does."""
    if name == "cpu":
        return None if problem.device_type == "cpu" else f"expected tensors on cpu, got {problem.device_type}"
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


def compiler_refusal() -> str | None:
    """Why no kernel can be compiled here; None if kernels can be."""
    return (
        None
        if _HAS_KERNEL_COMPILER
        else "the kernel compiler is not installed: pip install '.[cuda]' in a checkout of onepass"
    )


# The functions below import in their bodies and not with importlib, because torch.compile traces them.


def unsupported_by(name: str, problem: AttentionProblem) -> str | None:
    """Why a backend but `tiled` does not compute the problem's forward on any device of its own; None if it does."""
    if name == "cpu":
        from ..cpu.operators import unsupported
    elif name == "sm90":
        from ..kernels.launch.forward_sm90 import unsupported
    else:
        from ..kernels.launch.forward_sm80 import unsupported
    return unsupported(problem)


def arch_of(name: str, device: torch.device | None = None) -> str:
    """The architecture that the kernels of a backend are compiled for."""
    if name == "sm90":
        from ..kernels.launch.forward_sm90 import ARCH

        return ARCH
    from ..kernels.config import arch

    return arch.arch_of(device or torch.device("cuda"))


def config_type(name: str) -> type[LaunchConfig]:
    """The type of `tuning` that the forward of a backend with kernels takes."""
    return chooser.FORWARD[name].config_type


def accepted(support: Support, requested: object) -> str:
    """The backend that runs a call.

    Raises: UnsupportedError with the reason if none does; ValueError or TypeError if `requested` is not a name.
    """
    if support.ok:
        return support.backend
    if requested is None or choice.refusal(requested) is None:
        raise UnsupportedError(support.reason)
    raise (ValueError if isinstance(requested, str) else TypeError)(support.reason)


def has_kernels(name: str) -> bool:
    return name in WITH_KERNELS


def warn_if_unproven(device: torch.device) -> None:
    if device.type == "cuda":
        from ..kernels.config import arch

        arch.warn_if_unproven(device)

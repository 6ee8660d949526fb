"""The backend that computes a problem of attention, and its configurations and kernels."""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import ModuleType

import torch

from .. import log
from ..errors import UnsupportedError
from ..kernels.compiler.compile import CompileRequest
from ..kernels.config import LaunchConfig
from ..problem import AttentionProblem
from . import backends, choice
from .backends import Forward, Support

# Below, `device` is the device of the tensors: the GPUs of one machine may differ in architecture. None stands for the
# current GPU, for calls without tensors.


def choose(
    problem: AttentionProblem,
    requested: str | None = None,
    tuning: LaunchConfig | None = None,
    device: torch.device | None = None,
) -> Support:
    """The backend for this problem. A backend that the caller names, or has chosen (choice.py), runs or is refused.

    A configuration does not choose a backend: it is refused if it does not fit the backend that runs without it.
    """
    support = _choose(problem, requested, tuning, device)
    if not support.ok or support.backend not in backends.WITH_KERNELS:
        return support
    return support._replace(reason=support.reason + _gradient_backend_note(support.backend, problem))


def _choose(
    problem: AttentionProblem, requested: str | None, tuning: LaunchConfig | None, device: torch.device | None
) -> Support:
    """`choose` without words about gradients."""
    support = backends.first_that_runs(
        requested, problem.device_type, lambda name: backends.refusal(name, problem, device)
    )
    if tuning is None or not support.ok:
        return support
    if support.backend not in backends.WITH_KERNELS:
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
    expected = backends.config_type(name)
    if not isinstance(tuning, expected):
        return f"tuning: backend {name} expects a {expected.__name__}, got {tuning}"
    try:
        tuning.check(problem, backends.arch_of(name, device))
    except UnsupportedError as error:
        return f"tuning: {error}"
    return None


def _gradient_backend_note(name: str, problem: AttentionProblem) -> str:
    """Words for a reason: the backend that computes the gradients, if it is not the backend of the forward."""
    if problem.quantization is not None:
        return ""  # there are no gradients, or the unquantized problem has them
    refusal, other = _backward_unsupported(name, problem), backend_of_backward(name, problem)
    return "" if refusal is None else f"; gradients by the {other} backend ({refusal})"


def _backward_unsupported(name: str, problem: AttentionProblem) -> str | None:
    # imported here, but not through importlib: torch.compile traces this
    if name == "sm90":
        from ..kernels.launch.backward_sm90 import unsupported
    else:
        from ..kernels.launch.backward_sm80 import unsupported
    return unsupported(problem)


def require(
    problem: AttentionProblem,
    requested: str | None = None,
    tuning: LaunchConfig | None = None,
    device: torch.device | None = None,
) -> str:
    """The name of the backend that will run the problem.

    Raises: UnsupportedError with the reason if none can; ValueError or TypeError if `requested` is not a name.
    """
    return backends.accepted(_choose(problem, requested, tuning, device), requested)


def backend_at_run(argument: str, problem: AttentionProblem, tuning: LaunchConfig | None, device: torch.device) -> str:
    """The backend that an operator with this `choice.backend_argument` runs on. Raises: what `require` raises."""
    return (
        require(problem, None, tuning, device) if choice.is_left_to_block(argument) else choice.backend_name(argument)
    )


def require_to_compile(
    problem: AttentionProblem, requested: str | None = None, tuning: LaunchConfig | None = None
) -> str | None:
    """The name of the backend whose kernel calls of this problem need; None if they run without a kernel.

    A call that names "sm90" needs no GPU on this machine, because that backend has one architecture. Raises: what
    `require` raises, and UnsupportedError if the kernel compiler is missing.
    """
    requested, _ = backends.named_backend(requested)
    if requested is None and problem.device_type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            "backend: expected a name, such as 'sm90', where there is no GPU to choose for, got None"
        )
    if requested is None:
        refusals = backends.device_refusal, backends.unsupported_by
        could_run = (n for n in backends.WITH_KERNELS if not any(refuses(n, problem) for refuses in refusals))
        name = next(could_run, None)
    else:
        name = requested if choice.refusal(requested) is None and requested in backends.WITH_KERNELS else None
    if name is None:
        require(problem, requested, tuning)
        return None
    if name != "sm90" and not torch.cuda.is_available():
        raise UnsupportedError(f"backend {name}: expected a GPU, whose architecture to compile for, got none")
    reason = backends.compiler_refusal() or backends.unsupported_by(name, problem) or _misfit(name, problem, tuning)
    if reason is not None:
        raise UnsupportedError(f"backend {name}: {reason}")
    return name


def forward_config(name: str, problem: AttentionProblem) -> LaunchConfig:
    """The configuration with which the forward of a backend with kernels runs this problem on the current GPU."""
    from ..kernels.heuristics import tuned  # not at the top: it needs files and locks that not every system has

    return tuned.choose("fwd", name, problem, backends.arch_of(name))


def compile_request(name: str, problem: AttentionProblem, config: LaunchConfig) -> CompileRequest:
    """The kernel of the backend's forward, as a request to compile it."""
    return importlib.import_module(backends.BACKENDS[name].forward).compile_request(
        problem, config, backends.arch_of(name)
    )


def forward_requests(name: str, problem: AttentionProblem, config: LaunchConfig) -> list[CompileRequest]:
    """The kernels of the backend's forward: the one of `compile_request`, then its helpers, which run before it."""
    requests = [compile_request(name, problem, config)]
    if name == "sm90":
        from ..kernels.launch.forward_sm90 import helper_requests

        requests += helper_requests(problem, config)
    return requests


def backward_requests(
    name: str, problem: AttentionProblem, has_dlse: bool, config: LaunchConfig | None = None
) -> list[tuple[LaunchConfig, CompileRequest]]:
    """The kernels of the backward after this backend's forward, each with its configuration.

    The list is empty if a backend without kernels computes the backward.

    Args:
        config: None = the configuration that a call runs with.
    """
    forward, name = name, backend_of_backward(name, problem)
    if name not in backends.WITH_KERNELS:
        return []
    from ..kernels.heuristics import tuned

    # the architecture of the forward: arch_of("sm80") would ask for the current GPU, and sm90 needs none here
    arch = backends.arch_of(forward)
    config = config or tuned.choose("bwd", name, problem, arch)
    requests = importlib.import_module(backends.BACKENDS[name].backward).compile_requests(
        problem, has_dlse, config, arch
    )
    return [(config, request) for request in requests]


def prepare(name: str, problem: AttentionProblem, device: torch.device, tuning: LaunchConfig | None = None) -> Forward:
    """The backend's forward for calls of this problem, with all work done that does not depend on the tensors."""
    if log.is_on():
        log.say_once(f"forward by {name}: {problem.text}")
    backend = backends.BACKENDS[name]
    module = importlib.import_module(backend.forward)
    if backend.has_kernels:
        backends.warn_if_unproven(device)
        return module.prepare(problem, device, tuning)
    return functools.partial(module.forward, problem)


def forget_prepared() -> None:
    """Forget all prepared calls, because configurations may have changed."""
    for backend in backends.BACKENDS.values():
        for name in (backend.forward, backend.backward):
            prepare = getattr(sys.modules.get(name), "prepare", None)
            if prepare is not None:
                prepare.cache_clear()


def load_backward(name: str, problem: AttentionProblem) -> ModuleType:
    """The module with the backward of this backend, or of the backend that computes the gradients instead."""
    computing = backend_of_backward(name, problem)
    if log.is_on():
        log.say_once(f"backward by {computing}: {problem.text}")
    return importlib.import_module(backends.BACKENDS[computing].backward)


def backend_of_backward(name: str, problem: AttentionProblem) -> str:
    """The backend that computes the gradients of a forward: the forward's own, sm80 (float32 on Hopper), or `tiled`."""
    if name not in backends.WITH_KERNELS:
        return name
    later = backends.WITH_KERNELS[backends.WITH_KERNELS.index(name) :]
    return next((n for n in later if _backward_unsupported(n, problem) is None), "tiled")

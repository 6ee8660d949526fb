"""The backend that runs a call of `attention_decode`, and its kernels."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .. import log
from ..kernels.compiler.compile import CompileRequest
from ..kernels.config import LaunchConfig
from ..problem.decode import DecodeInputs, DecodeProblem
from . import backends, choice
from .backends import Support

# the modules of the backends, in the order in which they are asked
MODULES = {
    "sm90": f"{backends.PACKAGE}.kernels.launch.decode_sm90",
    "sm80": f"{backends.PACKAGE}.kernels.launch.decode_sm80",
    "cpu": f"{backends.PACKAGE}.cpu.decode",
    "tiled": f"{backends.PACKAGE}.tiled.decode",
}


def choose_decode(problem: DecodeProblem, requested: str | None = None, device: torch.device | None = None) -> Support:
    """The backend that will run `attention_decode`, and why."""
    is_named = choice.named(requested) is not None

    def refusal_of(name: str) -> str | None:
        return backends.refusal(name, problem.attention, device) or _unsupported(name, problem, is_named, device)

    return backends.first_that_runs(requested, problem.attention.device_type, refusal_of)


def require_decode(problem: DecodeProblem, requested: str | None = None, device: torch.device | None = None) -> str:
    """The name of the backend that will run `attention_decode`. Raises: what `attention.require` raises."""
    return backends.accepted(choose_decode(problem, requested, device), requested)


def decode_backend_at_run(argument: str, problem: DecodeProblem, device: torch.device) -> str:
    """The backend that an operator of `attention_decode` with this `choice.backend_argument` runs on."""
    return require_decode(problem, None, device) if choice.is_left_to_block(argument) else choice.backend_name(argument)


def _unsupported(name: str, problem: DecodeProblem, is_named: bool, device: torch.device | None) -> str | None:
    """Why a backend's kernels of `attention_decode` do not compute the problem; None if they do.

    The backend is known to support the problem's attention.

    Args:
        is_named: whether the caller named the backend. If not, it also refuses problems that another backend computes
            faster.
    """
    if name == "cpu":
        # with split_size, bits do not depend on the size of the cache, so the choice must not either: this backend
        # takes a left side that is longer than the cache, and a negative right side that is shorter
        left, right = problem.attention.mask.window_left, problem.attention.mask.window_right
        hides_by_size = left is not None or (right is not None and right < 0)
        return "expected no window with split_size" if problem.split_size is not None and hides_by_size else None
    if name == "sm90":
        from ..kernels.launch import decode_sm90

        return decode_sm90.unsupported(problem) or (None if is_named else decode_sm90.slower(problem))
    if problem.attention.has_e4m3_cache:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            return f"an e4m3 cache needs a GPU of compute capability 8.9 or more, got {capability}"
    from ..kernels.launch.decode_sm80 import unsupported

    return unsupported(problem)


def decode_requests(
    name: str, problem: DecodeProblem, inputs: DecodeInputs
) -> list[tuple[LaunchConfig | None, CompileRequest]]:
    """The configuration and the request of each kernel of a call on the current GPU, in the order in which they run.

    A backend without kernels has none.
    """
    if name not in backends.WITH_KERNELS:
        return []
    return importlib.import_module(MODULES[name]).compile_requests(problem, inputs, torch.device("cuda"))


def load_decode(name: str, device: torch.device) -> Callable:
    """The function decode(problem, inputs) -> (out, lse) of a backend."""
    if name in backends.WITH_KERNELS:
        backends.warn_if_unproven(device)
    return importlib.import_module(MODULES[name]).decode


def _say(name: str, problem: DecodeProblem) -> None:
    if log.is_on():
        pages = "" if problem.page_size is None else f", pages of {problem.page_size}"
        log.say_once(f"attention over a cache by {name}: {problem.attention.text}{pages}")


def prepare_decode(name: str, problem: DecodeProblem, device: torch.device) -> Callable:
    """inputs -> (out, lse) of a backend, for calls of this problem without `check_values`.

    The caches of a call may have another length, if `DecodeProblem.of_rounded_length` is the same.
    """
    _say(name, problem)
    module = importlib.import_module(MODULES[name])
    if name not in backends.WITH_KERNELS:
        return functools.partial(_decode_on_host, module.decode, problem)
    return module.prepare(problem, device)


def _decode_on_host(decode: Callable, problem: DecodeProblem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
    attention = problem.attention
    if attention.seqlen_k != inputs.capacity:
        problem = replace(problem, attention=replace(attention, seqlen_k=inputs.capacity))
    return decode(problem, inputs)

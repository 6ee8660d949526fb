"""Which backend runs a call of `attention_decode`, and why."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import torch

from ..kernels.config import LaunchConfig
from ..problem.decode import DecodeInputs, DecodeProblem
from . import backends, choice
from .backends import Support

# ---------------------------------------------------------------- attention over a cache

# in the order in which they are asked
_DECODE = {
    "sm90": f"{backends.PACKAGE}.kernels.launch.decode_sm90",
    "sm80": f"{backends.PACKAGE}.kernels.launch.decode_sm80",
    "tiled": f"{backends.PACKAGE}.tiled.decode",
}


def choose_decode(problem: DecodeProblem, requested: str | None = None, device: torch.device | None = None) -> Support:
    """The backend that will run `attention_decode`, and why."""
    is_named = choice.named(requested) is not None

    def refusal_of(name: str) -> str | None:
        return backends.refusal(name, problem.attention, device) or _unsupported_decode(name, problem, is_named, device)

    return backends.first_that_runs(requested, problem.attention.device_type, refusal_of)


def require_decode(problem: DecodeProblem, requested: str | None = None, device: torch.device | None = None) -> str:
    """The name of the backend that will run `attention_decode`. Raises: as `require`."""
    return backends.accepted(choose_decode(problem, requested, device), requested)


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


def load_decode(name: str, device: torch.device) -> Callable:
    """decode(problem, inputs) -> (out, lse) of a backend."""
    if name in backends.WITH_KERNELS:
        backends.warn_if_unproven(device)
    return importlib.import_module(_DECODE[name]).decode


def prepare_decode(name: str, problem: DecodeProblem, device: torch.device) -> Callable:
    """That of a backend for calls of this problem, whose values are not to be checked: inputs -> (out, lse)."""
    module = importlib.import_module(_DECODE[name])
    return functools.partial(module.decode, problem) if name == "tiled" else module.prepare(problem, device)

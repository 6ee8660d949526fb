"""Kernels that are compiled before they are needed: a backward's kernels together with those of its forward."""

from __future__ import annotations

import contextlib
import functools
import importlib

import torch

from ..kernels.config import LaunchConfig
from ..problem import AttentionProblem
from . import attention as dispatch
from . import backends

EARLY_WORKERS = 2  # a training step waits for two large kernels, the forward's and the backward's


@functools.lru_cache(maxsize=4096)
def compile_with_backward(
    name: str, problem: AttentionProblem, device: torch.device, tuning: LaunchConfig | None = None
) -> None:
    """Let other processes compile the kernels that the forward and the backward of a problem lack, all at once.

    The first call of a problem whose kernels are in no cache starts the processes. The forward then waits for its own
    kernel, and when the backward runs, its kernels are there. Every other call does nothing.

    Args: name: the backend. device: the device of the tensors. tuning: a configuration of the forward.
    """
    has_none = not backends.BACKENDS[name].has_kernels or device.type != "cuda"
    if has_none or problem.is_empty or problem.quantization is not None:
        return
    if backends.arch_of(name, device) != backends.arch_of(name):
        return  # requests are for the current GPU
    from ..kernels.compiler import pool  # not at the top: it needs files and locks that not every system has

    config = tuning or dispatch.forward_config(name, problem)
    requests = dispatch.forward_requests(name, problem, config)
    requests += [request for _, request in dispatch.backward_requests(name, problem, False)]
    if pool.compile_behind(requests):
        importlib.import_module("cutlass.cute")  # this process needs it to load a kernel, and would wait otherwise


def start_early() -> None:
    """Start the processes that will compile the first kernels, if there is a GPU for them and no kernel is cached."""
    if not torch.cuda.is_available() or backends.compiler_refusal() is not None:
        return
    from ..kernels.compiler import disk_cache, pool

    with contextlib.suppress(OSError):  # the directory of another user
        if pool.others_can_help() and not any(disk_cache.cache_directory().glob("*.o")):
            pool.start_early(EARLY_WORKERS)

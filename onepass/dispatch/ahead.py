"""Kernels that are compiled before they are needed: a backward's kernels together with those of its forward."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .. import variables
from ..kernels.config import LaunchConfig
from ..problem import AttentionProblem
from . import attention as dispatch
from . import backends

if TYPE_CHECKING:
    from ..kernels.compiler.compile import CompileRequest

MAIN_OF_BACKWARD = "backward", "backward_sm80"
EARLY_WORKERS = 2  # a training step waits for two large kernels, the forward's and the backward's

# Kernels for other lengths are compiled where there are as many CPUs, on half of them, with a lower priority.
CPUS_FOR_OTHER_LENGTHS = 8
NICENESS = 10
OTHER_LENGTHS = tuple(2**n for n in range(6, 16))


@functools.lru_cache(maxsize=4096)
def compile_with_backward(
    name: str, problem: AttentionProblem, device: torch.device, tuning: LaunchConfig | None = None
) -> None:
    """Compile the kernels that the forward and the backward of a problem lack, all at once.

    The first call of a problem whose kernels are in no cache compiles the main kernel of the backward in this process,
    while other processes compile the rest. That kernel takes longest, and another process would need two seconds to
    start before it. On a machine with many CPUs further processes then compile what the same problem needs at other
    lengths, so that they do not delay a later step. Every other call does nothing.

    Args: name: the backend. device: the device of the tensors. tuning: a configuration of the forward.
    """
    has_none = not backends.BACKENDS[name].has_kernels or device.type != "cuda"
    if has_none or problem.is_empty or problem.quantization is not None:
        return
    if backends.arch_of(name, device) != backends.arch_of(name):
        return  # requests are for the current GPU
    from ..kernels.compiler import compile, pool  # not at the top: files and locks that not every system has

    requests = _requests(name, problem, tuning)
    missing = [request for request in requests if not compile.is_cached(*request.kernel)]
    here = None
    if pool.num_early() < len(missing):
        here = next((request for request in missing if request.name in MAIN_OF_BACKWARD), None)
    are_behind = pool.compile_behind(request for request in missing if request is not here)
    is_first_rank = variables.LOCAL_RANK.read() == "0"  # the ranks of a machine share a cache
    if tuning is None and is_first_rank and pool.num_cpus() >= CPUS_FOR_OTHER_LENGTHS:
        at_others = (r for other in at_other_lengths(problem) for r in _requests(name, other, None))
        own = {request.kernel for request in requests}
        worker = functools.partial(pool.WorkerProcess, niceness=NICENESS)
        pool.compile_behind((r for r in at_others if r.kernel not in own), pool.num_cpus() // 2, worker)
    if here is not None:
        with contextlib.suppress(Exception):  # whoever needs the kernel compiles it again, and sees why it fails
            compile.get(*here)
    elif are_behind:
        importlib.import_module("cutlass.cute")  # this process needs it to load a kernel, and would wait otherwise


def _requests(name: str, problem: AttentionProblem, tuning: LaunchConfig | None) -> list[CompileRequest]:
    """The kernels of a forward and of the backward after it."""
    config = tuning or dispatch.forward_config(name, problem)
    requests = dispatch.forward_requests(name, problem, config)
    return requests + [request for _, request in dispatch.backward_requests(name, problem, False)]


def at_other_lengths(problem: AttentionProblem) -> Iterator[AttentionProblem]:
    """Self-attention as it may come next: at other lengths, with the same batch or the same number of tokens."""
    if problem.seqlen_q != problem.seqlen_k:
        return
    tokens = problem.seqlen_q * (1 if problem.is_packed else problem.batch)
    for length in OTHER_LENGTHS:
        batch = max(1, tokens // length)
        if problem.is_packed:  # their lengths are those of all sequences together
            yield replace(problem, batch=batch)
        else:
            yield replace(problem, seqlen_q=length, seqlen_k=length)
            yield replace(problem, seqlen_q=length, seqlen_k=length, batch=batch)


def start_early() -> None:
    """Start the processes that will compile the first kernels, if there is a GPU for them and no kernel is cached."""
    if not torch.cuda.is_available() or backends.compiler_refusal() is not None:
        return
    from ..kernels.compiler import disk_cache, pool

    if pool.others_can_help() and not any(disk_cache.cache_directory().glob("*.o")):
        with contextlib.suppress(OSError):  # without processes or files for them, kernels are compiled at their calls
            pool.start_early(EARLY_WORKERS)

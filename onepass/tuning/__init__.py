"""Finding the fastest configuration of a kernel for a problem, on the GPU of this machine.

space.py     the configurations that are worth timing   race.py    timing in turns, and which differences count
launches.py  random data, launches, their results       result.py  what is tuned, and the result
tuner.py     all of it together, into the table of kernels/heuristics/tuned.py, where launches look
timing.py    times of calls, in turns, on CPU and CUDA
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..api.calls import calls_of, given_calls, problem_of_call
from ..dispatch import attention as dispatch
from ..dispatch import backends
from ..errors import UnsupportedError
from ..problem import AttentionProblem
from ..validation.scalars import check_flag, check_int
from .result import Candidate, Task, TuningResult

__all__ = ["Candidate", "TuningResult", "tasks_of", "tune"]


def tune(
    calls: Mapping[str, Any] | AttentionProblem | Iterable[Mapping[str, Any] | AttentionProblem] | None = None,
    *,
    backend: str | None = None,
    gradients: bool = False,
    workers: int | None = None,
    **call: Any,
) -> list[TuningResult]:
    """Time other configurations of the kernels of calls to come, and let such calls use the fastest from now on.

        (found,) = onepass.tune(q=(4, 4096, 16, 128), k=(4, 4096, 16, 128), v=(4, 4096, 16, 128),
                                dtype=torch.bfloat16, causal=True)
        print(found.config, found.speedup)

    For each pass there are at most 24 candidates: the heuristics' choice, the other rows of the heuristics' tables, and
    the choice's neighbors. They are compiled in parallel, run on random data, compared with the results of the
    heuristics' choice, and timed in turns. A candidate replaces the heuristics' choice only where it is faster by more
    than 1 %, by more than the noise of the same run, and in four rounds of five. It is kept in `tuned.json` in the
    cache directory, for this GPU, the same kernel, and lengths and numbers of rows up to the next power of two. With
    `ONEPASS_TUNED=0` in the environment no call uses it.

    Args:
        calls: several calls, or one; without it the keyword arguments are one call. Each is as `onepass.warmup` takes
            it: the arguments of `attention` or `attention_varlen` by name, with shapes or tensors, whose values do not
            matter; or an `AttentionProblem`.
        backend: the backend of calls that name none; None means the one that they would run on (see `use_backend`).
        gradients: whether to tune the kernels of their backward passes, too, where there are any.
        workers: processes that compile at the same time; None means one per CPU.

    Returns: a TuningResult for each pass of each call.

    Raises: as the calls would; UnsupportedError where there is no GPU, and for calls without a kernel; OSError if the
    cache directory belongs to another user or cannot be written. All of these come before anything is measured.
    KeyboardInterrupt after Ctrl-C: what was found is kept.
    """
    if workers is not None:
        workers = check_int("workers", workers, "an int of at least 1 or None", least=1)
    tasks = tasks_of(given_calls("tune", calls, call), backend, gradients)

    from .tuner import Machine, tune_all

    device = torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.stream(torch.cuda.Stream(device)):  # the default stream cannot be captured
        return tune_all(tasks, Machine.here(device), workers=workers)


def tasks_of(
    calls: Mapping[str, Any] | AttentionProblem | Iterable[Mapping[str, Any] | AttentionProblem],
    backend: str | None = None,
    gradients: bool = False,
) -> list[Task]:
    """The passes of calls, on this machine's GPU. Raises: as `tune`."""
    several, gradients = calls_of(calls), check_flag("gradients", gradients)
    if not torch.cuda.is_available():
        raise UnsupportedError("tune: expected a GPU to measure on, torch sees none here")
    tasks = []
    for call in several:
        problem, requested, tuning, _ = problem_of_call("tune", call, backend)
        if tuning is not None:
            raise TypeError(f"tuning: expected None, for that is what is looked for, got {tuning}")
        if problem.quantization is not None:
            raise UnsupportedError("precision: expected None, got a call in FP8, which is not tuned yet")
        if problem.is_empty:
            raise ValueError(f"tune: expected a batch, lengths and heads above 0, got {problem}")
        support = dispatch.choose(problem, requested)
        name = dispatch.require(problem, requested)
        if not backends.has_kernels(name):
            raise UnsupportedError(f"tune: backend {name} has no kernels to tune ({support.reason})")
        tasks.append(Task("fwd", name, problem))
        backward = dispatch.backend_of_backward(name, problem)
        if gradients and backends.has_kernels(backward):
            tasks.append(Task("bwd", backward, problem))
    return tasks

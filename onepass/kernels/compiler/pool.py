"""Compiling many kernels before they are needed, several at a time.

The compiler is not made for threads, so every worker but this process is a Python of its own, which reads its jobs from
standard input, leaves the kernels in the disk cache and writes the seconds of each to standard output (`work`). It
starts afresh, without the caller's __main__: scripts need no `if __name__ == "__main__"`. Starting takes 2 s of CPU
time, a kernel 2 to 4, one of those around the main kernel of a backward less than 1.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from ...problem import AttentionProblem
from ...problem.decode import DecodeProblem
from ..config import LaunchConfig
from .compile import CompileRequest


class Job(NamedTuple):
    """A kernel to compile: that of a backend, for a problem, with a configuration.

    Attributes:
        request: what `compile.get` takes.
    """

    backend: str
    problem: AttentionProblem | DecodeProblem
    config: LaunchConfig | None
    request: CompileRequest


class CompiledKernel(NamedTuple):
    """A kernel that `onepass.warmup` made ready.

    Attributes:
        name: which of its call's kernels it is: "forward", of float32 on Hopper "split_rows" (one for q and k, mostly,
            and one for v), and in the order in which a backward runs them
            "backward_preprocess" (two, where lse may have a gradient), "backward" and, in some configurations,
            "backward_postprocess"; of `attention_decode` "append_to_cache", "decode_sm80" and "merge_splits", as far as
            a call needs them.
        backend: whose it is.
        problem: the first of the calls that need it.
        config: what it was compiled with; None: there is nothing to choose.
        seconds: that compiling it took or, with was_cached, loading it.
        was_cached: it lay in the disk cache or in this process already.
    """

    name: str
    backend: str
    problem: AttentionProblem | DecodeProblem
    config: LaunchConfig | None
    seconds: float
    was_cached: bool


def compile_all(jobs: Sequence[Job], workers: int | None = None) -> list[CompiledKernel]:
    """Compile each kernel once and load all of them here. Raises: RuntimeError if a worker fails, with its words."""
    from . import compile

    distinct: dict[tuple, Job] = {}
    for job in jobs:
        distinct.setdefault(job.request.kernel, job)
    missing = {kernel: job.request for kernel, job in distinct.items() if not compile.is_cached(*kernel)}
    workers = min(len(missing), workers or _num_cpus())
    if workers > 1 and not compile.has_disk_cache():
        workers = 1  # what another process compiles would be lost
    seconds: dict[tuple, float] = {}
    if workers > 1:
        # kernels of one name take about the same time, so every worker gets as many of them
        by_name = sorted(missing, key=lambda kernel: kernel[0])
        shares = [by_name[i::workers] for i in range(workers)]
        requests = [[missing[kernel] for kernel in share] for share in shares]
        with ThreadPoolExecutor(workers - 1) as pool:
            elsewhere = pool.map(_compile_elsewhere, requests[1:])
            results = [_compile(requests[0]), *elsewhere]
        for share, times in zip(shares, results, strict=True):
            seconds.update(zip(share, times, strict=True))
    made = []
    for kernel, job in distinct.items():
        (here,) = _compile([job.request])  # or load
        took, was_cached = seconds.get(kernel, here), kernel not in missing
        made.append(CompiledKernel(kernel[0], job.backend, job.problem, job.config, took, was_cached))
    return made


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compile(requests: Sequence[tuple]) -> list[float]:
    """Get the kernel of each request, compiled or loaded, and the seconds that it took."""
    from . import compile

    seconds = []
    for request in requests:
        started = time.perf_counter()
        compile.get(*request)
        seconds.append(round(time.perf_counter() - started, 3))
    return seconds


def _compile_elsewhere(requests: Sequence[tuple]) -> list[float]:
    """`_compile` in a new process that imports from where this one does."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, "-c", f"from {__name__} import work; work()"]
    worker = subprocess.run(command, input=pickle.dumps(requests), env=environment, capture_output=True)
    if worker.returncode != 0:
        words = worker.stderr.decode(errors="replace")[-4000:]
        raise RuntimeError(f"onepass: compiling kernels ahead failed (exit status {worker.returncode}):\n{words}")
    return json.loads(worker.stdout.splitlines()[-1])  # the compiler may print before it


def work() -> None:
    """The whole life of a worker process."""
    print(json.dumps(_compile(pickle.load(sys.stdin.buffer))))

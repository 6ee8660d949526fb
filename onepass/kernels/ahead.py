"""Compiling many kernels before they are needed, several at a time.

The compiler is not made for threads, so every worker but this process is a Python of its own, which reads its jobs from
standard input, leaves the kernels in the disk cache and writes the seconds of each to standard output (`work`). It
starts afresh, without the caller's __main__: scripts need no `if __name__ == "__main__"`. Starting takes 2 s of CPU
time, a kernel 2 to 4.
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

from .. import dispatch
from ..problem import AttentionProblem
from .config import ForwardConfig


class Job(NamedTuple):
    """A kernel to compile: that of a backend, for a problem, with a configuration or the backend's own choice."""

    backend: str
    problem: AttentionProblem
    config: ForwardConfig | None


class CompiledKernel(NamedTuple):
    """A kernel that `onepass.warmup` made ready.

    Attributes:
        backend: whose it is.
        problem: the first of the calls that need it.
        config: what it was compiled with.
        seconds: that compiling it took or, with was_cached, loading it.
        was_cached: it lay in the disk cache or in this process already.
    """

    backend: str
    problem: AttentionProblem
    config: ForwardConfig
    seconds: float
    was_cached: bool


def compile_all(jobs: Sequence[Job], workers: int | None = None) -> list[CompiledKernel]:
    """Compile each kernel once and load all of them here. Raises: RuntimeError if a worker fails, with its words."""
    from . import compile

    distinct: dict[tuple, Job] = {}
    for job in jobs:
        name, (static, config), arch, _ = dispatch.compile_request(*job)
        distinct.setdefault((name, static, config, arch), job._replace(config=config))
    jobs = list(distinct.values())
    missing = [job for job in jobs if not compile.is_cached(*dispatch.compile_request(*job)[:3])]
    workers = min(len(missing), workers or _num_cpus())
    if workers > 1 and not compile.has_disk_cache():
        workers = 1  # what another process compiles would be lost
    seconds: dict[Job, float] = {}
    if workers > 1:
        shares = [missing[i::workers] for i in range(workers)]
        with ThreadPoolExecutor(workers - 1) as pool:
            elsewhere = pool.map(_compile_elsewhere, shares[1:])
            results = [_compile(shares[0]), *elsewhere]
        for share, times in zip(shares, results, strict=True):
            seconds.update(zip(share, times, strict=True))
    made = []
    for job in jobs:
        assert job.config is not None
        (here,) = _compile([job])  # or load
        made.append(CompiledKernel(job.backend, job.problem, job.config, seconds.get(job, here), job not in missing))
    return made


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compile(jobs: Sequence[Job]) -> list[float]:
    """Get the kernel of each, compiled or loaded, and the seconds that it took."""
    from . import compile

    seconds = []
    for job in jobs:
        started = time.perf_counter()
        compile.get(*dispatch.compile_request(*job))
        seconds.append(round(time.perf_counter() - started, 3))
    return seconds


def _compile_elsewhere(jobs: Sequence[Job]) -> list[float]:
    """`_compile` in a new process that imports from where this one does."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, "-c", f"from {__name__} import work; work()"]
    sent = pickle.dumps([tuple(job) for job in jobs])
    worker = subprocess.run(command, input=sent, env=environment, capture_output=True)
    if worker.returncode != 0:
        words = worker.stderr.decode(errors="replace")[-4000:]
        raise RuntimeError(f"onepass: compiling kernels ahead failed (exit status {worker.returncode}):\n{words}")
    return json.loads(worker.stdout.splitlines()[-1])  # the compiler may print before it


def work() -> None:
    """The whole life of a worker process."""
    print(json.dumps(_compile([Job(*job) for job in pickle.load(sys.stdin.buffer)])))

"""Compiling many kernels at a time: for `onepass.warmup`, for the tuner and for everything that times or tests kernels.

The compiler is not made for threads, so each worker is a Python process of its own. It reads pickled requests from its
standard input, one after the other, leaves the kernels in the disk cache and answers each request with a line. It
starts afresh, without the caller's __main__: scripts need no `if __name__ == "__main__"`. It does not see the caller's
Ctrl-C: the pool ends it. A kernel that does not compile, or a worker that dies of one, is reported, and the others go
on. Starting a process takes 2 s of CPU time, compiling a kernel 2 to 4, and one of the small kernels around the main
kernel of a backward less than 1.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any, NamedTuple, Protocol

from ...namespace import PACKAGE
from ...problem import AttentionProblem
from ...problem.decode import DecodeProblem
from ...processes import has_python, python_command
from ..config import LaunchConfig
from .compile import CompileRequest

# The compiler may print, too: this stands before an answer.
MARK = "onepass compiled "

Request = CompileRequest
Kernel = tuple  # what tells a kernel from others: name, key and arch, from which trace follows


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
            and one for v), and in the order in which a backward runs them "backward_preprocess" (two, where lse may
            have a gradient), "backward_bounds" (where tensors say which keys a query sees), "backward" and, in some
            configurations, "backward_postprocess"; of `attention_decode` "append_to_cache", "decode_sm80" and
            "merge_splits", as far as a call needs them.
        backend: the name of the backend that runs it.
        problem: the problem of the first call that needs it.
        config: the configuration that it was compiled with; None where there is nothing to choose.
        seconds: how long compiling it took or, with was_cached, loading it.
        was_cached: whether it lay in the disk cache or in this process already.
    """

    name: str
    backend: str
    problem: AttentionProblem | DecodeProblem
    config: LaunchConfig | None
    seconds: float
    was_cached: bool


class Outcome(NamedTuple):
    """How compiling a kernel ended: after how many seconds, and why it failed (None if it did not)."""

    seconds: float
    failure: str | None


class Worker(Protocol):
    """Compiles one request at a time."""

    def compile(self, request: Request) -> Outcome: ...

    def kill(self) -> None:
        """End the work at once, from any thread: a `compile` that is under way returns."""

    def close(self) -> None:
        """End the worker, from the thread that uses it."""


# ---------------------------------------------------------------- three ways to use the pool


def compile_all(jobs: Sequence[Job], workers: int | None = None) -> list[CompiledKernel]:
    """Compile each kernel once and load all of them here.

    Args:
        workers: processes that compile at the same time, this one among them; None means one per CPU.
    Raises: RuntimeError with the reasons if kernels do not compile in other processes; the compiler's own error if this
        process compiles alone.
    """
    distinct: dict[Kernel, Job] = {}
    for job in jobs:
        distinct.setdefault(job.request.kernel, job)
    missing = _missing(job.request for job in distinct.values())
    outcomes: dict[Kernel, Outcome] = {}
    if min(len(missing), workers or num_cpus()) > 1 and others_can_help():
        outcomes = _compile_beside_others(missing, workers)
        reasons = {kernel: failure for kernel, (_, failure) in outcomes.items() if failure is not None}
        if reasons:
            text = "\n".join(f"{kernel[0]}: {reason}" for kernel, reason in reasons.items())
            raise RuntimeError(f"onepass: {len(reasons)} of {len(missing)} kernels do not compile:\n{text}")
    made = []
    for kernel, job in distinct.items():
        seconds = _get(job.request)  # compiles the kernel if no other process did
        if kernel in outcomes:
            seconds = outcomes[kernel].seconds
        made.append(CompiledKernel(kernel[0], job.backend, job.problem, job.config, seconds, kernel not in missing))
    return made


def compile_each(
    requests: Iterable[Request],
    workers: int | None = None,
    on_done: Callable[[int, int], object] | None = None,
    make_worker: Callable[[], Worker] | None = None,
) -> dict[Kernel, str]:
    """Compile what the disk cache lacks, in other processes.

    Without a disk cache their work would be lost: nothing is compiled then, and each kernel is when it is first run.

    Args:
        workers: processes that compile at the same time; None means one per CPU.
        on_done: called after each kernel with the number of kernels that are done and the number of all.
        make_worker: makes a worker; None means a process.
    Returns: for each kernel that could not be compiled, why.
    """
    failures: dict[Kernel, str] = {}
    missing = _missing(requests)
    if not missing or not others_can_help():
        return failures
    with _Crew(missing, workers, make_worker) as crew:
        for done in range(1, len(missing) + 1):
            kernel, outcome = crew.finished.get()
            if outcome.failure is not None:
                failures[kernel] = outcome.failure
            if on_done is not None:
                on_done(done, len(missing))
    return failures


def compile_behind(
    requests: Iterable[Request], workers: int | None = None, make_worker: Callable[[], Worker] | None = None
) -> bool:
    """Begin to compile what the disk cache lacks in other processes, and return.

    Whoever needs such a kernel meanwhile waits for it. A kernel that does not compile is left to whoever needs it, and
    what is not done when the main thread ends is dropped.

    Args: as `compile_each`. Returns: whether the cache lacks anything.
    """
    missing = _missing(requests)
    if not missing or not others_can_help():
        return False
    crew = _Crew(missing, workers, make_worker)
    threading.Thread(target=_attend, args=(crew, len(missing)), daemon=True).start()
    return True


def _attend(crew: _Crew, count: int) -> None:
    """Keep a crew until it has finished this many requests, or the main thread has ended."""
    with crew:
        while count and threading.main_thread().is_alive():
            with contextlib.suppress(queue.Empty):
                crew.finished.get(timeout=0.2)
                count -= 1


# ---------------------------------------------------------------- the pool

_early: list[WorkerProcess] = []  # that have loaded the compiler, or are about to, and have no work yet


def start_early(count: int) -> None:
    """Start processes that load the compiler now, so that they compile at once when they are needed.

    They take the first requests of this process that other processes compile, and end with it.
    """
    for _ in range(count - len(_early)):
        worker = WorkerProcess()
        worker.start()
        _early.append(worker)


def num_early() -> int:
    """The number of processes that `start_early` has started and that have no work yet."""
    return len(_early)


def _new_worker() -> WorkerProcess:
    return _early.pop() if _early else WorkerProcess()


def num_cpus() -> int:
    """The number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _missing(requests: Iterable[Request]) -> dict[Kernel, Request]:
    """Each kernel that is not cached, once."""
    from . import compile

    distinct = {request[:3]: request for request in requests}
    return {kernel: request for kernel, request in distinct.items() if not compile.is_cached(*kernel)}


def others_can_help() -> bool:
    """Whether kernels that other processes compile reach this one: through the disk cache.

    They have to import this package, which they cannot if it has been loaded from a folder under another name.
    """
    from . import compile

    return PACKAGE == "onepass" and has_python() and compile.has_disk_cache()


def _get(request: Request) -> float:
    """Compile or load a kernel in this process. Returns: the seconds that it took."""
    from . import compile

    started = time.perf_counter()
    compile.get(*request)
    return round(time.perf_counter() - started, 3)


def _compile_beside_others(missing: dict[Kernel, Request], workers: int | None) -> dict[Kernel, Outcome]:
    """Compile with other processes and, in the calling thread, with this one."""
    count = min(len(missing), workers or num_cpus())
    with _Crew(missing, count - 1) as crew:
        crew.work(_ThisProcess())
        return dict(crew.finished.get() for _ in missing)


class _Crew:
    """Threads with a worker each, which take requests from one queue until it is empty or the crew is ended."""

    def __init__(
        self,
        missing: dict[Kernel, Request],
        workers: int | None,
        make_worker: Callable[[], Worker] | None = None,
    ) -> None:
        self.finished: queue.SimpleQueue[tuple[Kernel, Outcome]] = queue.SimpleQueue()
        self._waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        for request in missing.values():
            self._waiting.put(request)
        self._is_ended = threading.Event()
        count = min(len(missing), workers or num_cpus())
        self._workers = [(make_worker or _new_worker)() for _ in range(count)]
        self._threads = [threading.Thread(target=self.work, args=(worker,)) for worker in self._workers]

    def __enter__(self) -> _Crew:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_ended.set()
        for worker in self._workers:
            worker.kill()
        for thread in self._threads:
            thread.join()

    def work(self, worker: Worker) -> None:
        """Compile what waits, in the calling thread."""
        try:
            while not self._is_ended.is_set():
                try:
                    request = self._waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    outcome = worker.compile(request)
                except Exception as error:  # no process, no memory, ...: someone waits for each outcome
                    outcome = Outcome(0.0, _reason(error))
                self.finished.put((request[:3], outcome))
        finally:
            worker.close()


class _ThisProcess:
    """A worker that compiles in the calling thread."""

    def compile(self, request: Request) -> Outcome:
        return _outcome(request)

    def kill(self) -> None:
        pass

    def close(self) -> None:
        pass


class WorkerProcess:
    """A worker that compiles in another process, and in a new one if a request ends that.

    Args: niceness: what `os.nice` adds in the process, which then leaves the CPUs to others.
    """

    def __init__(self, niceness: int = 0) -> None:
        self._niceness = niceness
        self._process: subprocess.Popen | None = None
        self._errors: IO[bytes] | None = None

    def start(self) -> None:
        """Start the process, if there is none."""
        if self._process is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
            self._process = _start(self._errors, self._niceness)

    def compile(self, request: Request) -> Outcome:
        started = time.perf_counter()
        self.start()
        process, errors = self._process, self._errors
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        assert errors is not None
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            for line in process.stdout:
                text = line.decode(errors="replace")
                if text.startswith(MARK):
                    return Outcome(*json.loads(text.removeprefix(MARK)))
        status = process.wait()
        errors.seek(0)
        last_words = errors.read()[-4000:].decode(errors="replace").strip()
        self.close()
        failure = f"the compiler ended with exit status {status}"
        return Outcome(round(time.perf_counter() - started, 3), f"{failure}:\n{last_words}" if last_words else failure)

    def kill(self) -> None:
        if (process := self._process) is not None:
            process.kill()  # it holds nothing but what is in the cache already

    def close(self) -> None:
        if self._process is None:
            return
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process = self._errors = None


def _start(errors: IO[bytes], niceness: int) -> subprocess.Popen:
    command = python_command(f"from {__name__} import serve; serve({niceness})")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
    return subprocess.Popen(command, start_new_session=True, **pipes)


def serve(niceness: int) -> None:
    """Run the whole life of a worker process."""
    if niceness:
        os.nice(niceness)
    gc.disable()  # tracing makes no cycles worth collecting, and takes 5 % longer with the collector
    with contextlib.suppress(ImportError):  # then each request has its own error
        importlib.import_module("cutlass.cute")  # takes seconds, in which there may be no request yet
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        print(f"\n{MARK}{json.dumps(_outcome(request))}", flush=True)
        gc.collect()


def _outcome(request: Request) -> Outcome:
    started = time.perf_counter()
    try:
        return Outcome(_get(request), None)
    except Exception as error:
        return Outcome(round(time.perf_counter() - started, 3), _reason(error))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:2000]

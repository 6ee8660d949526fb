"""Compiling many kernels at a time, each by itself: one that does not compile is told of, and the others go on.

A worker is a Python of its own that takes pickled requests from its standard input, one after the other, leaves the
kernels in the disk cache and answers each with a line. It does not see the caller's Ctrl-C: the pool ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from ..kernels.compiler.pool import _num_cpus

# before an answer: the compiler may print, too
MARK = "onepass compiled "

Request = tuple  # the arguments of `compile.get`: name, key, arch, trace


def compile_each(
    requests: Iterable[Request],
    workers: int | None = None,
    on_done: Callable[[int, int], object] | None = None,
    worker: Callable[[], Any] | None = None,
) -> dict[tuple, str]:
    """Compile what the disk cache lacks.

    Args:
        workers: processes at a time; None = one a CPU.
        on_done: told how many are done, and how many there are in all.
        worker: makes a worker, which has compile(request), kill() and close(); None = a process.
    Returns: for each kernel (name, key, arch) that could not be compiled, why.
    """
    from ..kernels.compiler import compile

    missing = {request[:3]: request for request in requests if not compile.is_cached(*request[:3])}
    # what other processes compile without a disk cache would be lost: each is compiled here, when it is first run
    if not missing or not compile.has_disk_cache():
        return {}
    waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
    for request in missing.values():
        waiting.put(request)
    finished: queue.SimpleQueue[tuple[tuple, str | None]] = queue.SimpleQueue()
    stopped = threading.Event()

    def work(one: Any) -> None:
        with contextlib.suppress(queue.Empty):
            while not stopped.is_set():
                request = waiting.get_nowait()
                try:
                    reason = one.compile(request)
                except Exception as error:  # no process, no memory, ...: who waits for an answer gets one
                    reason = f"{type(error).__name__}: {error}"
                finished.put((request[:3], reason))
        one.close()

    crew = [(worker or Worker)() for _ in range(min(len(missing), workers or _num_cpus()))]
    threads = [threading.Thread(target=work, args=(one,)) for one in crew]
    failed: dict[tuple, str] = {}
    for thread in threads:
        thread.start()
    try:
        for done in range(1, len(missing) + 1):
            kernel, reason = finished.get()
            if reason is not None:
                failed[kernel] = reason
            if on_done is not None:
                on_done(done, len(missing))
    finally:
        stopped.set()
        for one in crew:
            one.kill()
        for thread in threads:
            thread.join()
    return failed


class Worker:
    """A process that compiles; a new one if it dies of a request."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None

    def compile(self, request: Request) -> str | None:
        """Returns: None, or why it could not be compiled."""
        if self._process is None:
            self._process = _start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            for line in process.stdout:
                text = line.decode(errors="replace")
                if text.startswith(MARK):
                    return json.loads(text.removeprefix(MARK))
        status = process.wait()
        self.close()
        return f"the compiler ended with exit status {status}"

    def kill(self) -> None:
        """End the process, from any thread: who waits for its answer gets one."""
        if (process := self._process) is not None:
            process.kill()  # it holds nothing but what is in the cache already

    def close(self) -> None:
        """End the process, from the thread that uses it."""
        if self._process is None:
            return
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process = None


def _start() -> subprocess.Popen:
    """A Python that imports from where this one does."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def serve() -> None:
    """The whole life of a worker process."""
    from ..kernels.compiler import compile

    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            compile.get(*request)
            reason = None
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:2000]
        print(f"\n{MARK}{json.dumps(reason)}", flush=True)

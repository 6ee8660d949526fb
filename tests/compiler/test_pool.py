"""The pool of compilers: each kernel compiles by itself, in processes that no caller has to wait for."""

import threading
import time

import pytest

from onepass.kernels.compiler import compile
from onepass.kernels.compiler.pool import Outcome, WorkerProcess, compile_each, compiling_in_background

REQUESTS = [("forward", (i,), "sm_90a", None) for i in range(7)]


@pytest.fixture(autouse=True)
def _cache(monkeypatch):
    monkeypatch.setattr(compile, "is_cached", lambda name, key, arch: key == (0,))
    monkeypatch.setattr(compile, "has_disk_cache", lambda: True)


class Crew:
    """Make workers that refuse odd keys, die of key 5 and are slow with key 6."""

    def __init__(self):
        self.compiled, self.closed = [], 0
        self.has_begun_6, self.killed = threading.Event(), threading.Event()

    def __call__(self):
        return self

    def compile(self, request):
        ((number,), crew) = request[1], self
        crew.compiled.append(number)
        if number == 5:
            raise OSError("no more processes")
        if number == 6:
            crew.has_begun_6.set()
            crew.killed.wait(10)
        return Outcome(0.5, "odd" if number % 2 else None)

    def kill(self):
        self.killed.set()

    def close(self):
        self.closed += 1


def test_every_kernel_that_is_missing_once():
    crew, reports = Crew(), []
    crew.killed.set()
    failed = compile_each([*REQUESTS, *REQUESTS], 3, lambda done, total: reports.append((done, total)), crew)
    assert sorted(crew.compiled) == [1, 2, 3, 4, 5, 6]
    assert reports == [(i, 6) for i in range(1, 7)]
    assert failed == {
        ("forward", (1,), "sm_90a"): "odd",
        ("forward", (3,), "sm_90a"): "odd",
        ("forward", (5,), "sm_90a"): "OSError: no more processes",
    }
    assert crew.closed == 3


def test_nothing_to_do():
    assert compile_each([], None, None, Crew()) == {}
    assert compile_each(REQUESTS[:1], None, None, Crew()) == {}


def test_without_a_disk_cache_nothing_is_compiled_ahead(monkeypatch):
    monkeypatch.setattr(compile, "has_disk_cache", lambda: False)
    crew = Crew()
    assert compile_each(REQUESTS, 2, None, crew) == {}
    assert crew.compiled == []


def test_ctrl_c_waits_for_nobody():
    crew, before = Crew(), threading.active_count()

    def interrupt(done, total):
        raise KeyboardInterrupt

    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        compile_each([REQUESTS[6], REQUESTS[2], *REQUESTS[1:]], 2, interrupt, crew)
    assert time.perf_counter() - started < 5
    assert crew.closed == 2
    assert threading.active_count() == before


def test_in_the_background():
    """Failures are available after the body, and requests that are not done by then are dropped."""
    crew = Crew()
    with compiling_in_background(REQUESTS, 1, crew) as failed:
        assert crew.has_begun_6.wait(10)
        assert failed == {}
        started = time.perf_counter()
    assert time.perf_counter() - started < 5
    assert {key: reason for (_, (key,), _), reason in failed.items()} == {
        1: "odd",
        3: "odd",
        5: "OSError: no more processes",
    }
    assert crew.closed == 1


def test_nothing_to_do_in_the_background():
    crew = Crew()
    with compiling_in_background(REQUESTS[:1], 1, crew) as failed:
        pass
    assert (failed, crew.compiled) == ({}, [])


class Deadly:
    """An object that ends the process that unpickles it."""

    def __init__(self, *words):
        self.words = words

    def __reduce__(self):
        code = f"import os, sys; print(*{self.words!r}, end='', file=sys.stderr, flush=True); os._exit(3)"
        return exec, (code,)


def test_a_process():
    """A worker gets an impossible request, a fatal one, another after it, and one that is fatal with a message."""
    worker = WorkerProcess()
    try:
        impossible = ("forward", ("key",), "sm_90a", None)
        for _ in range(2):
            assert worker.compile(impossible).failure.startswith(("TypeError", "PackageNotFoundError"))
        process = worker._process
        assert worker.compile(deadly()).failure == "the compiler ended with exit status 3"
        assert worker.compile(impossible).failure.startswith(("TypeError", "PackageNotFoundError"))
        assert worker._process.pid != process.pid
        failure = worker.compile(deadly("out of registers")).failure
        assert failure == "the compiler ended with exit status 3:\nout of registers"
    finally:
        worker.close()
    assert worker._process is None
    worker.close()
    worker.kill()


def deadly(*words):
    return ("forward", Deadly(*words), "sm_90a", None)

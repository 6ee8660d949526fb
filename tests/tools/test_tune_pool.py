"""Compiling candidates: each by itself, in processes that nobody has to wait for."""

import os
import threading
import time

import pytest

from onepass.kernels.compiler import compile
from onepass.tuning.pool import Worker, compile_each

REQUESTS = [("forward", (i,), "sm_90a", None) for i in range(7)]


@pytest.fixture(autouse=True)
def _cache(monkeypatch):
    monkeypatch.setattr(compile, "is_cached", lambda name, key, arch: key == (0,))
    monkeypatch.setattr(compile, "has_disk_cache", lambda: True)


class Crew:
    """Makes workers that refuse odd keys, die of key 5 and take their time for key 6."""

    def __init__(self):
        self.compiled, self.closed, self.killed = [], 0, threading.Event()

    def __call__(self):
        return self

    def compile(self, request):
        ((number,), crew) = request[1], self
        crew.compiled.append(number)
        if number == 5:
            raise OSError("no more processes")
        if number == 6:
            crew.killed.wait(10)
        return "odd" if number % 2 else None

    def kill(self):
        self.killed.set()

    def close(self):
        self.closed += 1


def test_every_kernel_that_is_missing_once():
    crew, told = Crew(), []
    crew.killed.set()
    failed = compile_each([*REQUESTS, *REQUESTS], 3, lambda done, total: told.append((done, total)), crew)
    assert sorted(crew.compiled) == [1, 2, 3, 4, 5, 6]
    assert told == [(i, 6) for i in range(1, 7)]
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


class Deadly:
    """Ends the process that unpickles it."""

    def __reduce__(self):
        return os._exit, (3,)


def test_a_process():
    """A request that it cannot do, one that it dies of, and one after that."""
    worker = Worker()
    try:
        impossible = ("forward", ("key",), "sm_90a", None)
        for _ in range(2):
            assert worker.compile(impossible).startswith(("TypeError", "PackageNotFoundError"))
        process = worker._process
        assert worker.compile(("forward", Deadly(), "sm_90a", None)) == "the compiler ended with exit status 3"
        assert worker.compile(impossible).startswith(("TypeError", "PackageNotFoundError"))
        assert worker._process.pid != process.pid
    finally:
        worker.close()
    assert worker._process is None
    worker.close()
    worker.kill()

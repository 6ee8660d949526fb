"""The pool of compilers: each kernel compiles by itself, in processes that no caller has to wait for."""

import io
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import onepass
from onepass import processes
from onepass.kernels.compiler import compile, pool
from onepass.kernels.compiler.pool import (
    Outcome,
    WorkerProcess,
    compile_behind,
    compile_each,
    start_early,
)

REQUESTS = [("forward", (i,), "sm_90a", None) for i in range(7)]


@pytest.fixture(autouse=True)
def _cache(monkeypatch):
    monkeypatch.setattr(compile, "is_cached", lambda name, key, arch: key == (0,))
    monkeypatch.setattr(compile, "has_disk_cache", lambda: True)


class Crew:
    """Make workers that refuse odd keys, die of key 5 and are slow with key 6."""

    def __init__(self, error=OSError):
        self.compiled, self.closed, self.error = [], 0, error
        self.has_begun_6, self.killed = threading.Event(), threading.Event()

    def __call__(self):
        return self

    def compile(self, request):
        ((number,), crew) = request[1], self
        crew.compiled.append(number)
        if number == 5:
            raise self.error("no more processes")
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


def test_behind_the_caller():
    """The caller goes on at once; the worker is closed when all requests are done."""
    crew, started = Crew(), time.perf_counter()
    assert compile_behind(REQUESTS, make_worker=lambda: crew)
    assert time.perf_counter() - started < 5  # kernel 6 takes 10 seconds, or until it is killed
    assert crew.has_begun_6.wait(10)
    crew.killed.set()
    deadline = time.perf_counter() + 10
    while not (crew.closed and len(crew.compiled) == 6) and time.perf_counter() < deadline:
        time.sleep(0.01)  # the first of two workers is closed while the other one compiles
    assert crew.closed
    assert sorted(crew.compiled) == [1, 2, 3, 4, 5, 6]
    assert not compile_behind(REQUESTS[:1], make_worker=lambda: crew)


@pytest.mark.slow
def test_what_is_behind_the_caller_ends_with_it(tmp_path):
    """A program that ends while a worker compiles does not wait for it."""
    script = f"""
import sys, threading, time
sys.path[:0] = {sys.path!r}
from onepass import processes
from onepass.kernels.compiler import compile, pool

class Worker:
    killed = threading.Event()
    def compile(self, request):
        print("begun", flush=True)
        Worker.killed.wait(60)
        return pool.Outcome(0.0, None)
    def kill(self):
        Worker.killed.set()
    def close(self):
        pass

compile.is_cached = lambda *kernel: False
compile.has_disk_cache = lambda: True
pool.compile_behind([("forward", (0,), "sm_90a", None)], make_worker=Worker)
time.sleep(0.5)
"""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "begun\n"), done.stderr
    assert time.perf_counter() - started < 40


@pytest.mark.slow
def test_workers_that_start_early_compile_first():
    start_early(2)
    start_early(2)
    early = list(pool._early)
    try:
        assert len(early) == 2
        processes = [worker._process.pid for worker in early]
        worker = pool._new_worker()
        assert worker in early
        assert worker.compile(("forward", ("key",), "sm_90a", None)).failure.startswith("TypeError")
        assert worker._process.pid in processes
        assert len(pool._early) == 1
    finally:
        pool._early.clear()
        for worker in early:
            worker.close()


class Deadly:
    """An object that ends the process that unpickles it."""

    def __init__(self, *words):
        self.words = words

    def __reduce__(self):
        code = f"import os, sys; print(*{self.words!r}, end='', file=sys.stderr, flush=True); os._exit(3)"
        return exec, (code,)


@pytest.mark.slow
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


def test_a_worker_whose_process_has_died_starts_another_one(monkeypatch):
    def start(answer):
        return SimpleNamespace(stdin=io.BytesIO(), stdout=io.BytesIO(answer), wait=lambda: 3, kill=lambda: None)

    started = iter(start(answer) for answer in (b"", f"{pool.MARK}[0.5, null]\n".encode()))
    monkeypatch.setattr(pool, "_start", lambda errors, niceness: next(started))
    worker = WorkerProcess()
    assert worker.compile(REQUESTS[1]).failure == "the compiler ended with exit status 3"
    assert worker.compile(REQUESTS[1]) == Outcome(0.5, None)


def deadly(*words):
    return ("forward", Deadly(*words), "sm_90a", None)


def test_processes_import_nothing_from_the_current_directory(tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    for name in ("cutlass", "queue", "json", "sitecustomize", "onepass"):
        (tmp_path / f"{name}.py").write_text(f"open({str(marker)!r}, 'a').write({name!r})")
    monkeypatch.chdir(tmp_path)
    for path in (str(tmp_path), ":", "."):
        monkeypatch.setenv("PYTHONPATH", path)
        # as `python -c` and interactive sessions have it
        monkeypatch.setattr(sys, "path", ["", *filter(None, sys.path)])
        code = "import json, queue; from importlib.util import find_spec; print(find_spec('onepass').origin)"
        done = subprocess.run(processes.python_command(code), capture_output=True, text=True, check=True)
        assert done.stdout.strip() == onepass.__file__
        assert not marker.exists(), marker.read_text()


def test_processes_have_the_path_of_their_parent(tmp_path, monkeypatch):
    """Folders keep their order, a name that has to be quoted arrives whole, and the package's own folder is added."""
    odd = str(tmp_path / "of 'a\u00e9\udce9\n\"")
    monkeypatch.setattr(sys, "path", ["", odd, *(folder for folder in sys.path if folder != processes._ROOT)])
    command = processes.python_command("import json; print(json.dumps([sys.path, sys.argv[1:]]))", "a b", "-c")
    path, arguments = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert path == [*sys.path[1:], processes._ROOT]
    assert arguments == ["a b", "-c"]


@pytest.mark.parametrize(("name", "value"), [("executable", ""), ("executable", None), ("frozen", True)])
def test_a_program_that_embeds_python_compiles_by_itself(name, value, monkeypatch, tmp_path):
    """It would start itself, again and again, or nothing."""
    started = []
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(compile, "environment", lambda: "these versions")
    monkeypatch.setattr(subprocess, "Popen", lambda *command, **options: started.append(command))
    monkeypatch.setattr(sys, name, value, raising=False)
    requests = [pool.CompileRequest("forward", (number,), "sm_90a", tuple) for number in range(2)]
    assert compile_each(requests) == {}
    assert not compile_behind(requests)
    assert started == []


def test_every_process_is_started_so():
    for path in Path(onepass.__file__).parent.rglob("*.py"):
        assert path.name == "processes.py" or "sys.executable" not in path.read_text(encoding="utf-8"), path

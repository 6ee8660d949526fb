"""The disk cache of compiled kernels: concurrent processes, killed processes, broken and foreign files.

Compiling and loading are replaced, so that these tests run without the kernel compiler. Only the last test uses it.
"""

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import stat
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import packages
import pytest

from onepass.kernels.compiler import compile, disk_cache
from onepass.kernels.config import ForwardConfigSm90
from onepass.kernels.heuristics import tuned

KEY = ((("head_dim", 64), ("has_sinks", False), ("causal", True)),)
# forked children see the replacements of the test, and start at once
processes = multiprocessing.get_context("fork")


class Compiled:
    """A stand-in for the compiler's object, whose code is the key's repr."""

    def __init__(self, code: bytes):
        self.code = code

    def export_to_c(self, path: str, function_name: str) -> None:
        Path(path).write_bytes(self.code)

    def __tvm_ffi_object__(self):
        return lambda: b"in process: " + self.code


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """An empty cache directory, with the stand-ins in place and every compile noted in `log`."""
    path = tmp_path / "cache"
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(path))
    monkeypatch.setattr(compile, "environment", lambda: "these versions")
    monkeypatch.setattr(compile, "_kernels", {})
    monkeypatch.setattr(compile, "compile_now", lambda arch, trace, options="": note_and_compile(tmp_path, trace))
    runtime = types.ModuleType("cutlass.cute.runtime")
    runtime.load_module = load_module
    for name, module in (("cutlass", types.ModuleType("cutlass")), ("cutlass.cute", types.ModuleType("cute"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "cutlass.cute.runtime", runtime)
    return path


def note_and_compile(tmp_path: Path, trace) -> Compiled:
    with open(tmp_path / "log", "a") as log:
        log.write(f"{os.getpid()}\n")
    return Compiled(trace())


def load_module(path: str, enable_tvm_ffi: bool):
    code = Path(path).read_bytes()
    return types.SimpleNamespace(**{compile.SYMBOL: lambda: code})


def compiles(directory: Path) -> int:
    log = directory.with_name("log")
    return len(log.read_text().splitlines()) if log.exists() else 0


def get(key=KEY, trace=lambda: b"code", name="forward", arch="sm_90a", afresh=True):
    """Return the result of the kernel of this key, got as in a process that has just started."""
    if afresh:
        compile._kernels.clear()
    return compile.get(name, key, arch, trace)()


def files(directory: Path, kind: str = "") -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.name.endswith(kind))


def start(function, *arguments):
    process = processes.Process(target=function, args=arguments)
    process.start()
    return process


def wait_until(condition, seconds=20.0):
    ended = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ended, "timed out"
        time.sleep(0.005)


def test_compiled_once_then_from_disk_then_from_the_process(directory):
    assert get() == b"code"
    assert compiles(directory) == 1
    assert get(trace=None) == b"code"
    for file in files(directory):
        file.unlink()
    assert get(trace=None, afresh=False) == b"code"
    assert compiles(directory) == 1


def test_every_part_of_the_key_makes_another_entry(directory, monkeypatch):
    get()
    get(name="backward")
    get(arch="sm_80")
    get(key=((("head_dim", 128), ("has_sinks", False), ("causal", True)),))
    monkeypatch.setattr(compile, "environment", lambda: "other versions")
    get()
    assert compiles(directory) == 5
    assert len(files(directory, ".o")) == 5


def test_the_entry_says_what_it_is(directory):
    get()
    (about,) = (json.loads(path.read_text()) for path in files(directory, ".json"))
    assert about["name"] == "forward"
    assert about["arch"] == "sm_90a"
    assert about["key"] == repr(KEY)
    assert about["summary"] == "head_dim=64 causal"
    assert about["compile_s"] >= 0


def test_the_limit_holds_after_each_compile(directory, monkeypatch):
    get(key=((("head_dim", 64),),))
    size = disk_cache.entries(directory)[0].size_bytes
    monkeypatch.setenv("ONEPASS_CACHE_LIMIT", str(2 * size + size // 2))
    for head_dim in (72, 80, 88):
        get(key=((("head_dim", head_dim),),))
    assert len(disk_cache.entries(directory)) == 2
    assert "88" in disk_cache.entries(directory)[-1].about["key"]


def test_a_bad_limit_is_refused_before_the_compile(directory, monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_LIMIT", "much")
    with pytest.raises(ValueError, match="ONEPASS_CACHE_LIMIT"):
        get()
    assert compiles(directory) == 0


def test_summaries():
    config = ForwardConfigSm90(tile_n=96, num_warpgroups=3, pingpong=False)
    assert compile.summary((KEY[0], config)) == "head_dim=64 causal; tile_n=96 num_warpgroups=3 pingpong=False"
    assert compile.summary(("split", (1, 2), None)) == "split; (1, 2); None"  # an arbitrary key


# ---------------------------------------------------------------- concurrent and killed processes


def test_two_processes_compile_a_key_once(directory, tmp_path):
    both = processes.Barrier(2)

    def slow():
        time.sleep(0.5)  # the other process starts long before this ends
        return b"code"

    def run(number):
        both.wait()
        (tmp_path / f"out{number}").write_bytes(get(trace=slow))

    for process in [start(run, number) for number in range(2)]:
        process.join(30)
        assert process.exitcode == 0
    assert compiles(directory) == 1
    assert [(tmp_path / f"out{number}").read_bytes() for number in range(2)] == [b"code", b"code"]


def half_an_object(reached):
    def export(self, path, function_name):
        Path(path).write_bytes(b"co")
        reached.set()
        time.sleep(60)

    return Compiled, "export_to_c", export


def hang_at_rename(which):
    def make(reached):
        rename, seen = os.replace, []

        def replace(source, target):
            seen.append(target)
            if len(seen) == which:
                reached.set()
                time.sleep(60)
            rename(source, target)

        return os, "replace", replace

    return make


def hang_in_compile(reached):
    def compile_now(arch, trace, options=""):
        reached.set()
        time.sleep(60)

    return compile, "compile_now", compile_now


@pytest.mark.parametrize(
    "hang",
    [hang_in_compile, half_an_object, hang_at_rename(1), hang_at_rename(2)],
    ids=["compiling", "exporting", "before the .o", "between .o and .json"],
)
def test_a_killed_build_leaves_nothing_that_is_loaded(directory, monkeypatch, hang):
    reached = processes.Event()

    def run():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*hang(reached))
            get()

    process = start(run)
    assert reached.wait(20)
    entry = disk_cache.entries(directory)[0]
    assert entry.problem == "being built"
    assert disk_cache.clear(directory)[0] == []
    os.kill(process.pid, signal.SIGKILL)
    process.join()

    (entry,) = disk_cache.entries(directory)
    assert entry.problem in ("unfinished build", "no .json")
    assert get() == b"code"
    assert compiles(directory) - (hang is not hang_in_compile) == 1
    (entry,) = disk_cache.entries(directory)
    assert entry.problem == ""
    assert not [path for path in files(directory) if ".part." in path.name], "leftovers of the killed build"
    assert get(trace=None) == b"code"


def test_a_lock_that_was_cleared_away_locks_nobody_out_and_nobody_in(tmp_path):
    """Two builders wait for a lock whose file is removed: they still take turns."""
    lock = tmp_path / "lock"
    inside, most, entered = [0], [0], threading.Semaphore(0)

    def build():
        with disk_cache.exclusive(lock):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            entered.release()
            time.sleep(0.1)
            inside[0] -= 1

    with disk_cache.exclusive(lock):
        first = threading.Thread(target=build)
        first.start()
        time.sleep(0.1)  # by now, the thread has opened the file and waits
        lock.unlink()
        second = threading.Thread(target=build)
        second.start()  # it locks a new file, which it gets at once
        assert entered.acquire(timeout=20)
    for thread in (first, second):
        thread.join(20)
        assert not thread.is_alive()
    assert most == [1]


class Building:
    """A thread of this process that holds all locks and compiles, which here means to wait for `finish`."""

    def __init__(self, name: str):
        self.reached, self.finish = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=get, args=(KEY, self.compile, name, "sm_90a", False))

    def compile(self) -> bytes:
        self.reached.set()
        assert self.finish.wait(60)
        return b"by the thread"

    def __enter__(self):
        self.thread.start()
        assert self.reached.wait(20)
        return self

    def __exit__(self, *_):
        self.finish.set()
        self.thread.join(20)


def in_forked_child(function) -> int | None:
    """The exit status of a child process: 0 if function() is true there, and None if the child does not end."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if function() else 2
        finally:
            os._exit(status)
    ended = time.monotonic() + 10
    while time.monotonic() < ended:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def test_a_finished_kernel_is_found_while_another_is_compiled(directory):
    get(name="finished")
    found = []
    with Building("slow"):
        other = threading.Thread(
            target=lambda: found.append(get(trace=None, name="finished", afresh=False)), daemon=True
        )
        other.start()
        other.join(5)
        assert found == [b"code"]


@pytest.mark.parametrize("name", ["finished", "on disk", "new"])
def test_a_child_forked_while_a_thread_compiles(directory, name):
    """The child's first call does not wait for a thread that exists only in its parent."""
    get(name="on disk")
    get(name="finished", afresh=False)
    with Building("slow"):
        if name == "on disk":
            compile._kernels.clear()
        trace = (lambda: b"code") if name == "new" else None
        assert in_forked_child(lambda: get(trace=trace, name=name, afresh=False) == b"code") == 0
    assert get(trace=None, name="slow") == b"by the thread"


def test_a_child_waits_for_what_its_parent_compiles(directory):
    """The child waits for its parent and loads the kernel, which is compiled once."""
    with Building("slow") as building:
        threading.Timer(0.5, building.finish.set).start()
        assert in_forked_child(lambda: get(trace=None, name="slow", afresh=False) == b"by the thread") == 0
    assert compiles(directory) == 1


def test_a_child_builds_what_its_dead_parent_compiled(directory):
    """The lock of the build ends with the parent, although the child has inherited the open file."""

    def parent():
        with Building("slow"):
            pid = os.fork()
            if pid:
                os._exit(0)  # this ends the thread too
            signal.alarm(30)  # ends this child if it hangs, since no process waits for it
            (directory / "child").write_bytes(get(trace=lambda: b"by the child", name="slow", afresh=False))
            os._exit(0)

    process = start(parent)
    process.join(20)
    wait_until(lambda: (directory / "child").exists() and (directory / "child").read_bytes() == b"by the child")


# ---------------------------------------------------------------- broken entries


def cut(o: Path, about: Path):
    o.write_bytes(o.read_bytes()[:-1])


def flip_a_bit(o: Path, about: Path):
    code = bytearray(o.read_bytes())
    code[0] ^= 1
    o.write_bytes(code)


def remove_o(o: Path, about: Path):
    o.unlink()


def remove_json(o: Path, about: Path):
    about.unlink()


def half_json(o: Path, about: Path):
    about.write_text(about.read_text()[:40])


def list_json(o: Path, about: Path):
    about.write_text("[1, 2]")


def binary_json(o: Path, about: Path):
    about.write_bytes(b"\xff\xfe\x00")


def another_entry(o: Path, about: Path):
    """Put both files of another key under this name; they agree with each other."""
    get(trace=lambda: b"other code", name="other")
    (other,) = (path for path in files(o.parent, ".o") if path != o)
    other.rename(o)
    other.with_suffix(".json").rename(about)


def writable_by_others(o: Path, about: Path):
    o.chmod(0o666)


def a_link(o: Path, about: Path):
    elsewhere = o.parent.parent / "elsewhere.o"
    o.rename(elsewhere)
    o.symlink_to(elsewhere)


BREAKS = {
    cut: "the .o is not what the .json says",
    flip_a_bit: "the .o is not what the .json says",
    remove_o: "no .o",
    remove_json: "no .json",
    half_json: "its .json cannot be read",
    list_json: "its .json cannot be read",
    binary_json: "its .json cannot be read",
    another_entry: "its .json is another entry's",
    writable_by_others: "others may have written the .o",
    a_link: "the .o cannot be read",
}


@pytest.mark.parametrize("damage", BREAKS, ids=lambda damage: damage.__name__)
def test_a_broken_entry_is_built_again(directory, damage):
    get()
    (o,) = files(directory, ".o")
    damage(o, o.with_suffix(".json"))
    before = compiles(directory)
    listed = {entry.key: entry.problem for entry in disk_cache.entries(directory)}
    assert listed[o.stem].startswith(BREAKS[damage])
    assert get(trace=lambda: b"built again") == b"built again"
    assert compiles(directory) == before + 1
    assert get(trace=None) == b"built again"
    assert not o.is_symlink()


def test_an_entry_that_vanishes_before_it_is_loaded_is_built_again(directory, monkeypatch):
    get()
    runtime = sys.modules["cutlass.cute.runtime"]

    def cleared_meanwhile(path, enable_tvm_ffi):
        runtime.load_module = load_module
        disk_cache.clear(directory)
        return load_module(path, enable_tvm_ffi)

    runtime.load_module = cleared_meanwhile
    assert get(trace=lambda: b"again") == b"again"


def test_nothing_is_unpickled(directory, tmp_path):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "exploded",)

    get()
    bomb = pickle.dumps(Bomb())
    for kind in (".json", ".o"):
        (file,) = files(directory, kind)
        file.write_bytes(bomb)
    with contextlib.suppress(Exception):
        get()
    assert not (tmp_path / "exploded").exists()
    assert get(trace=None) == b"code"
    pickle.loads(bomb)  # proves that loading the bomb is noticed
    assert (tmp_path / "exploded").exists()


# ---------------------------------------------------------------- owner and mode of the directory


def test_the_directory_is_made_private(directory):
    previous = os.umask(0)
    try:
        get()
    finally:
        os.umask(previous)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in [*files(directory, ".o"), *files(directory, ".json")]} == {
        0o600
    }


@pytest.mark.parametrize("mode", [0o700, 0o711, 0o755, 0o500])
def test_a_directory_that_was_there_keeps_its_mode(directory, mode):
    """A directory that exists may serve other purposes too, and other users may read it."""
    directory.mkdir()
    directory.chmod(mode)
    if mode & 0o200 or os.getuid() == 0:  # root may write anywhere
        assert get() == b"code"
        assert get(trace=None) == b"code"
    else:
        refused(directory, "not writable")
    assert stat.S_IMODE(directory.stat().st_mode) == mode


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722, 0o1777, 0o2775], ids=oct)
def test_a_directory_that_others_may_write_to_is_refused_and_keeps_its_mode(directory, mode):
    """A directory such as root's /tmp is refused."""
    directory.mkdir()
    directory.chmod(mode)
    refused(directory, f"only this user may write to, got mode {mode:04o}")
    assert stat.S_IMODE(directory.stat().st_mode) == mode
    with pytest.raises(PermissionError, match="only this user may write to"):
        tuned.save("GPU", {})
    assert stat.S_IMODE(directory.stat().st_mode) == mode


def refused(directory, match):
    """Assert that a call warns, has its kernel all the same, and writes no file."""
    before = files(directory) if directory.is_dir() else None
    with pytest.warns(RuntimeWarning, match=match):
        assert get() == b"in process: code"
    assert before == (files(directory) if directory.is_dir() else None)


def test_another_users_directory_is_refused(directory, monkeypatch):
    get()
    monkeypatch.setattr(os, "getuid", lambda: directory.stat().st_uid + 1)
    refused(directory, "not a directory of this user")
    with pytest.raises(PermissionError):
        disk_cache.entries(directory)
    with pytest.raises(PermissionError):
        disk_cache.clear(directory)
    assert len(files(directory, ".o")) == 1


def test_a_link_to_a_directory_is_refused(directory, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    directory.symlink_to(tmp_path / "elsewhere")
    refused(directory, "not a directory of this user")


def test_a_file_in_the_place_of_the_directory_is_refused(directory):
    directory.write_text("a file")
    refused(directory, "exists")


def test_another_users_entry_is_built_again(directory, monkeypatch):
    get()
    (o,) = files(directory, ".o")
    fstat = os.fstat

    def others(descriptor):
        status = fstat(descriptor)
        if o.exists() and os.path.samestat(status, planted):
            return os.stat_result((*status[:4], status.st_uid + 1, *status[5:]))
        return status

    planted = o.stat()
    monkeypatch.setattr(os, "fstat", others)
    assert get(trace=lambda: b"own code") == b"own code"
    assert compiles(directory) == 2


def test_no_space_left(directory, monkeypatch):
    def export(self, path, function_name):
        Path(path).write_bytes(b"co")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Compiled, "export_to_c", export)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert get() == b"in process: code"
    assert not [path for path in files(directory) if not path.name.endswith(".lock")]


# ---------------------------------------------------------------- listing and clearing


def test_no_directory_is_an_empty_cache(tmp_path):
    assert disk_cache.entries(tmp_path / "none") == []
    assert disk_cache.clear(tmp_path / "none") == ([], [])
    assert not (tmp_path / "none").exists()


def test_clear_removes_entries_and_their_remains_and_nothing_else(directory):
    get()
    get(name="backward")
    (directory / f"{'0' * 32}.123.part.o").write_bytes(b"half")
    (directory / f"{'1' * 32}.lock").touch()
    (directory / f"{'2' * 32}.o").write_bytes(b"without .json")
    (directory / "notes.txt").write_text("not ours")
    (directory / "tuning.json").write_text("{}")
    found = {entry.key: entry for entry in disk_cache.entries(directory)}
    assert len(found) == 5
    assert [found[digit * 32].problem for digit in "012"] == ["unfinished build", "unfinished build", "no .json"]
    assert sum(entry.size_bytes for entry in found.values()) > 2 * len(b"code")

    removed, kept = disk_cache.clear(directory)
    assert {entry.key for entry in removed} == set(found)
    assert kept == []
    assert [path.name for path in files(directory)] == ["notes.txt", "tuning.json"]
    assert get() == b"code"
    assert compiles(directory) == 3


# ---------------------------------------------------------------- with the compiler

_REAL = """
import functools, os, sys, time
import torch
from pathlib import Path
from onepass.kernels.compiler import compile
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.kernels.launch import forward_sm90 as launch
from onepass.problem import AttentionProblem, Mask

def noted(function, name):
    def call(*arguments, **options):
        with open(sys.argv[1], "a") as log:
            log.write(name + "\\n")
        return function(*arguments, **options)
    return call

compile.compile_now = noted(compile.compile_now, "compile")
problem = AttentionProblem(torch.bfloat16, "cuda", 1, 512, 512, 1, 1, 64, 64, 0.125, Mask())
config = heuristics.forward_config_sm90(problem)
trace = functools.partial(launch.trace, problem, config)
Path(sys.argv[2]).touch()
while not Path(sys.argv[3]).exists():
    time.sleep(0.005)
print(type(compile.get("forward", (problem.static(), config), launch.ARCH, trace)))
"""


@pytest.mark.slow
@packages.needs_compiler
def test_with_the_compiler(tmp_path):
    """The cache works with the compiler: a process killed while it compiles, two at once, and a broken object."""
    directory, log, go = tmp_path / "cache", tmp_path / "log", tmp_path / "go"
    root = str(Path(disk_cache.__file__).parents[3])
    environment = {**os.environ, "ONEPASS_CACHE_DIR": str(directory), "PYTHONPATH": root, "CUTE_DSL_ARCH": "sm_90a"}

    def begin(number):
        arguments = [str(log), str(tmp_path / f"ready{number}"), str(go)]
        command = [sys.executable, "-c", _REAL, *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(process):
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        assert "Function" in out

    # the first one is a process of its own, so that only it is killed; the other two are ready before
    go.touch()
    killed = begin(0)
    wait_until(log.exists, 60)
    time.sleep(0.3)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    (entry,) = disk_cache.entries(directory)
    assert entry.problem == "unfinished build"
    go.unlink()

    pair = [begin(1), begin(2)]
    wait_until(lambda: all((tmp_path / f"ready{number}").exists() for number in (1, 2)), 60)
    go.touch()
    for process in pair:
        finish(process)
    assert log.read_text().splitlines() == ["compile"] * 2  # the compile of the killed process, and one by the pair
    (entry,) = disk_cache.entries(directory)
    assert entry.problem == ""
    assert entry.about["compile_s"] > 0

    (o,) = files(directory, ".o")
    with open(o, "r+b") as file:
        file.seek(100)
        file.write(b"\0\1\2\3")
    finish(begin(3))
    assert log.read_text().splitlines() == ["compile"] * 3
    (entry,) = disk_cache.entries(directory)
    assert entry.problem == ""

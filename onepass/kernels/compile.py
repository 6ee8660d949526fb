"""Compiling a kernel once: in this process, and on this machine through a disk cache.

An entry of the disk cache is a native object file, <key>.o, and <key>.json beside it, which names what it is and holds
the object's SHA-256. The key covers everything that the code depends on: the static problem, the configuration, the
architecture, the compiler's and this package's sources and versions, and the CPU (the object holds host code, too).

* The directory belongs to the user alone (mode 0700, owner checked): entries are loaded as native code.
* One process compiles a key while the others wait for its lock; the lock dies with its process.
* Files appear by atomic rename, the .json last: a compile that is killed leaves no entry. An entry whose digest does
  not match is built again. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SYMBOL = "onepass_kernel"
PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
# of every compile: the calling convention that takes torch tensors directly, about 1 us a call
OPTIONS = "--enable-tvm-ffi"

_kernels: dict[str, Callable] = {}
_keep_alive: list[Any] = []
_lock = threading.Lock()


def cache_directory() -> Path:
    """$ONEPASS_CACHE_DIR, or onepass/ in the user's cache directory."""
    explicit = os.environ.get("ONEPASS_CACHE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onepass"


def get(name: str, key: tuple, arch: str, trace: Callable[[], tuple]) -> Callable:
    """The compiled kernel for `key`, from this process, the disk or the compiler, in that order.

    Args:
        name: what the kernel is, for people.
        key: everything that its code depends on beside `arch` and the sources; its repr must say it all.
        arch: "sm_90a", ...
        trace: () -> (function, arguments) for `cute.compile`; called only if nothing is cached.
    Returns: a function of torch tensors and numbers, positional, in the order of the traced function's arguments.
    """
    fingerprint = _fingerprint(name, key, arch)
    with _lock:
        if fingerprint not in _kernels:
            _kernels[fingerprint] = _get_from_disk(fingerprint, name, key, arch, trace)
        return _kernels[fingerprint]


def is_cached(name: str, key: tuple, arch: str) -> bool:
    """Whether `get` would find this kernel without its compiler."""
    fingerprint = _fingerprint(name, key, arch)
    return fingerprint in _kernels or _is_intact(cache_directory() / f"{fingerprint}.o")


def has_disk_cache() -> bool:
    """Whether what this process compiles is there for others; warns if not."""
    return _usable_directory() is not None


def compile_now(arch: str, trace: Callable[[], tuple], options: str = OPTIONS) -> Any:
    """Compile in this process, without any cache: the compiler's own object."""
    import cutlass.cute as cute

    function, arguments = trace()
    return cute.compile(function, *arguments, options=f"--gpu-arch={arch} {options}")


def _get_from_disk(fingerprint: str, name: str, key: tuple, arch: str, trace: Callable[[], tuple]) -> Callable:
    directory = _usable_directory()
    if directory is None:
        compiled = compile_now(arch, trace)
        _keep_alive.append(compiled)
        return compiled.__tvm_ffi_object__()
    entry = directory / f"{fingerprint}.o"
    kernel = _load(entry)
    if kernel is None:
        with _exclusive(directory / f"{fingerprint}.lock"):
            kernel = _load(entry)  # another process may have built it meanwhile
            if kernel is None:
                _build(entry, name, key, arch, trace)
                kernel = _load(entry)
    if kernel is None:
        raise RuntimeError(f"the kernel cache entry {entry} cannot be loaded right after it was built")
    return kernel


def _build(entry: Path, name: str, key: tuple, arch: str, trace: Callable[[], tuple]) -> None:
    started = time.perf_counter()
    compiled = compile_now(arch, trace)
    part = entry.with_name(f"{entry.stem}.{os.getpid()}.part.o")  # the suffix picks the format
    try:
        compiled.export_to_c(str(part), function_name=SYMBOL)
        about = {
            "name": name,
            "key": repr(key),
            "arch": arch,
            "sha256": hashlib.sha256(part.read_bytes()).hexdigest(),
            "compile_s": round(time.perf_counter() - started, 3),
        }
        os.replace(part, entry)
        part = part.with_suffix(".json")
        part.write_text(json.dumps(about, indent=1))
        os.replace(part, entry.with_suffix(".json"))
    finally:
        part.unlink(missing_ok=True)


def _load(entry: Path) -> Callable | None:
    """The entry's kernel; None if there is none or it is not what its .json says."""
    if not _is_intact(entry):
        return None
    from cutlass.cute.runtime import load_module

    module = load_module(str(entry), enable_tvm_ffi=True)
    _keep_alive.append(module)
    return getattr(module, SYMBOL)


def _is_intact(entry: Path) -> bool:
    try:
        about = json.loads(entry.with_suffix(".json").read_text())
        return about["sha256"] == hashlib.sha256(entry.read_bytes()).hexdigest()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _usable_directory() -> Path | None:
    """The cache directory, made if needed; None (with a warning) if others could have written to it."""
    directory = cache_directory()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(directory)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(f"{directory} is not a directory of this user")
        if status.st_mode & 0o077:
            os.chmod(directory, 0o700)
        if not os.access(directory, os.W_OK):
            raise PermissionError(f"{directory} is not writable")
    except OSError as error:
        warnings.warn(f"onepass: kernels are compiled for this process only: {error}", RuntimeWarning, stacklevel=2)
        return None
    return directory


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file; the kernel gives it back if this process dies."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fingerprint(name: str, key: tuple, arch: str) -> str:
    parts = (name, key, arch, OPTIONS, _environment())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@functools.lru_cache(maxsize=1)
def _environment() -> str:
    """Versions, CPU and sources, as one digest."""
    digest = hashlib.sha256()
    for name in PACKAGES:
        digest.update(f"{name} {importlib.metadata.version(name)}\n".encode())
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        digest.update(next((line for line in lines if line.startswith(("flags", "Features"))), "").encode())
    package = Path(__file__).resolve().parent
    for source in sorted([*package.rglob("*.py"), package.parent / "problem.py"]):
        digest.update(source.read_bytes())
    return digest.hexdigest()

"""Compiling a kernel once: in this process, and on this machine through a disk cache (disk_cache.py).

The key covers everything that the code depends on: the static problem, the configuration, the architecture, the
compiler's and this package's sources and versions, and except on x86-64 the CPU (the object holds host code, too).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ... import log, variables
from . import cpu, disk_cache, sources

SYMBOL = "onepass_kernel"
PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
# every compile uses the calling convention that takes torch tensors directly, about 1 us a call
OPTIONS = "--enable-tvm-ffi"

_kernels: dict[str, Callable] = {}
_keep_alive: list[Any] = []
_lock = threading.Lock()  # the compiler is not made for threads; looking up a finished kernel does not take it


def _after_fork_in_child() -> None:
    """The thread that may have held the lock is not in this process."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # a POSIX system
    os.register_at_fork(after_in_child=_after_fork_in_child)


class CompileRequest(NamedTuple):
    """The arguments of `get` for a kernel.

    Attributes:
        name: what the kernel is, human-readable.
        key: everything that its code depends on besides `arch` and the sources; its repr must say it all.
        arch: "sm_90a", ...
        trace: () -> (function, arguments) for `cute.compile`.
    """

    name: str
    key: tuple
    arch: str
    trace: Callable[[], tuple]

    @property
    def kernel(self) -> tuple[str, tuple, str]:
        """The identity of the kernel: everything but `trace`, which follows from it."""
        return self.name, self.key, self.arch


def get(name: str, key: tuple, arch: str, trace: Callable[[], tuple]) -> Callable:
    """The compiled kernel for `key`, from this process, the disk or the compiler, in that order.

    Args: as `CompileRequest` has them. trace is called only if nothing is cached.
    Returns: a function of torch tensors and numbers, positional, in the order of the traced function's arguments.
    """
    fingerprint = _fingerprint(name, key, arch)
    kernel = _kernels.get(fingerprint)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(fingerprint)  # another thread may have got it meanwhile
            if kernel is None:
                started = time.perf_counter()
                kernel = _kernels[fingerprint] = _get_from_disk(fingerprint, name, key, arch, trace)
                if log.is_on():
                    seconds = time.perf_counter() - started
                    log.say_once(f"kernel {name} for {arch} ready after {seconds:.2f} s: {summary(key)}")
    return kernel


def is_cached(name: str, key: tuple, arch: str) -> bool:
    """Whether `get` would find this kernel without its compiler."""
    fingerprint = _fingerprint(name, key, arch)
    if fingerprint in _kernels:
        return True
    try:
        disk_cache.verify(disk_cache.cache_directory() / f"{fingerprint}.o")
    except (disk_cache.BrokenEntry, OSError):
        return False
    return True


def has_disk_cache() -> bool:
    """Whether kernels that this process compiles are kept for other processes; warns if not."""
    try:
        disk_cache.make_usable(disk_cache.cache_directory())
    except OSError as error:
        _warn_of_no_cache(error)
        return False
    return True


def _warn_of_no_cache(error: OSError) -> None:
    warnings.warn(f"onepass: kernels are compiled for this process only: {error}", RuntimeWarning, stacklevel=4)


def compile_now(arch: str, trace: Callable[[], tuple], options: str = OPTIONS) -> Any:
    """Compile in this process, without any cache: the compiler's own object."""
    import cutlass.cute as cute

    function, arguments = trace()
    compiled = cute.compile(function, *arguments, options=f"--gpu-arch={arch} {options}")
    cpu.for_every_cpu(compiled.ir_module)
    return compiled


def _get_from_disk(fingerprint: str, name: str, key: tuple, arch: str, trace: Callable[[], tuple]) -> Callable:
    try:
        directory = disk_cache.cache_directory()
        disk_cache.make_usable(directory)
        kernel = _shared(directory / f"{fingerprint}.o", name, key, arch, trace)
    except OSError as error:  # another user's directory, no space left, no locks on this file system, ...
        _warn_of_no_cache(error)
        compiled = compile_now(arch, trace)
        _keep_alive.append(compiled)
        return compiled.__tvm_ffi_object__()
    if kernel is None:
        raise RuntimeError(f"the kernel cache entry {fingerprint} cannot be loaded right after it was built")
    return kernel


def _shared(entry: Path, name: str, key: tuple, arch: str, trace: Callable[[], tuple]) -> Callable | None:
    """The entry's kernel, built first if need be, by one process at a time."""
    kernel = _load(entry)
    if kernel is None:
        with disk_cache.exclusive(entry.with_suffix(".lock")):
            kernel = _load(entry)  # another process may have built it meanwhile
            if kernel is None:
                _build(entry, name, key, arch, trace)
                kernel = _load(entry)
    return kernel


def _build(entry: Path, name: str, key: tuple, arch: str, trace: Callable[[], tuple]) -> None:
    limit = variables.CACHE_LIMIT.read()  # raises before seconds of work
    started = time.perf_counter()
    compiled = compile_now(arch, trace)

    def export(path: Path) -> None:
        compiled.export_to_c(str(path), function_name=SYMBOL)

    def about() -> dict[str, Any]:
        return {
            "name": name,
            "summary": summary(key),
            "key": repr(key),
            "arch": arch,
            "environment": environment(),
            "cpu": cpu.features(),
            "compile_s": round(time.perf_counter() - started, 3),
        }

    disk_cache.write(entry, export, about)
    if limit is not None:
        disk_cache.prune(entry.parent, limit, keep=entry.stem)


def _load(entry: Path) -> Callable | None:
    """The entry's kernel; None if there is none or it is not what its .json says."""
    try:
        disk_cache.verify(entry)
    except disk_cache.BrokenEntry:
        return None
    from cutlass.cute.runtime import load_module

    try:
        module = load_module(str(entry), enable_tvm_ffi=True)
    except Exception:
        if entry.exists():
            raise
        return None  # the cache was cleared in between
    _keep_alive.append(module)
    disk_cache.mark_used(entry)
    return getattr(module, SYMBOL)


def summary(key: tuple) -> str:
    """A human-readable key: pairs and fields that say something, those of a configuration only where they were set."""
    parts = []
    for item in key:
        if dataclasses.is_dataclass(item):
            pairs = [(f.name, getattr(item, f.name)) for f in dataclasses.fields(item)]
            defaults = {f.name: f.default for f in dataclasses.fields(item)}
            pairs = [(name, value) for name, value in pairs if value != defaults[name]]
        elif isinstance(item, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in item):
            pairs = [(name, value) for name, value in item if value is not None and value is not False]
        else:
            pairs = [(str(item), True)]
        parts.append(" ".join(name if value is True else f"{name}={value}" for name, value in pairs))
    return "; ".join(parts)


def _fingerprint(name: str, key: tuple, arch: str) -> str:
    return entry_key(name, repr(key), arch, environment())


def entry_key(name: str, key_text: str, arch: str, environment: str) -> str:
    """The name on this machine's disk of a kernel that runs on this CPU.

    Args: the content of an entry's .json.
    """
    parts = (name, key_text, arch, environment, cpu.features())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@functools.lru_cache(maxsize=1)
def environment() -> str:
    """Versions, options and sources, as one digest: an entry of another one is not used any more."""
    digest = hashlib.sha256(OPTIONS.encode())
    for name in PACKAGES:
        digest.update(f"{name} {importlib.metadata.version(name)}\n".encode())
    for source in sources.of_kernels(sources.PACKAGE):
        digest.update(f"{source.relative_to(sources.PACKAGE).as_posix()}\n".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()

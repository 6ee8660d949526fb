"""What tests read from kernels that they compiled, kept on disk: the machine code's figures and the PTX.

Compiling a kernel takes 2 to 10 seconds, and most runs of the tests change no kernel. The key of an entry holds all
that an entry depends on: versions, compiler options and sources (`compile.environment`), the architecture, the function
that is traced with its arguments, the kernels of tests, and the disassembler. No verdict is kept: a test checks what
it reads in every run. One entry in twenty, drawn at random, is compiled again and has to give the same.

ONEPASS_TEST_CACHE_DIR names the directory; an empty one makes a run that compiles everything. Where nothing can be
written, nothing is kept.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import importlib.metadata
import json
import os
import random
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMPILED_AGAIN = 0.05  # the share of entries that a run compiles again and compares
GENERATIONS = 3  # the states of the sources whose entries are kept
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_READERS = "machine_code", "divergence", "ptx_interpreter"
_HAS_KERNELS = re.compile(rb"^\s*(?:import|from) cutlass\b", re.MULTILINE)
_drawn = random.Random()  # seeded by the system: tests set the seeds of other generators


def get(arch: str, trace: Callable[[], tuple], compiled: Callable[[], Any]) -> Any:
    """The kept value of `compiled()` for this kernel; one that JSON can say, with tuples as lists."""
    entry = directory() / f"{key(arch, trace)}.json.gz"
    try:
        kept = json.loads(gzip.decompress(entry.read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error):  # there is none, or it is damaged
        kept = None
    if kept is not None and _drawn.random() >= COMPILED_AGAIN:
        return kept
    now = json.loads(json.dumps(compiled()))
    assert kept in (None, now), f"{entry}: the kernel that {description(trace)} compiles to now is not the kept one"
    if kept is None:
        part = entry.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            entry.parent.mkdir(parents=True, exist_ok=True)  # another run may have removed it, as old
            part.write_bytes(gzip.compress(json.dumps(now).encode(), 1))
            part.replace(entry)
    return now


def description(trace: Callable[[], tuple]) -> str:
    """A text that is the same in each process, for the same kernel only."""
    is_partial = isinstance(trace, functools.partial)
    function = trace.func if is_partial else trace
    arguments = (trace.args, sorted(trace.keywords.items())) if is_partial else ()
    text = repr((function.__module__, function.__qualname__, getattr(function, "__self__", None), arguments))
    if "<locals>" in text or "<lambda>" in text or _ADDRESS.search(text):
        raise ValueError(f"trace: expected a function of a module and arguments whose repr says all, got {text}")
    return text


def key(arch: str, trace: Callable[[], tuple]) -> str:
    return hashlib.sha256(f"{arch} {description(trace)}".encode()).hexdigest()[:32]


def sources(root: Path = ROOT) -> list[Path]:
    """The files that an entry depends on and `compile.environment` does not cover: how kernels are read, and kernels
    outside of the package's folder of kernels."""
    files = sorted(path for folder in ("onepass", "benchmarks", "tests") for path in (root / folder).rglob("*.py"))
    return [path for path in files if path.stem in _READERS or _HAS_KERNELS.search(path.read_bytes())]


@functools.lru_cache(maxsize=1)
def directory() -> Path:
    """Where the entries of these sources lie; those of older sources are removed."""
    from onepass.kernels.compiler import compile

    digest = hashlib.sha256(compile.environment().encode())
    for source in sources():
        digest.update(source.read_bytes())
    digest.update(importlib.metadata.version("nvidia-cuda-nvdisasm").encode())
    own = _root() / digest.hexdigest()[:16]
    with contextlib.suppress(OSError):  # nothing can be written there, or other processes remove the same directories
        own.mkdir(parents=True, exist_ok=True)
        os.utime(own)
        for old in sorted(own.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)[GENERATIONS:]:
            shutil.rmtree(old, ignore_errors=True)
    return own


def _root() -> Path:
    if chosen := os.environ.get("ONEPASS_TEST_CACHE_DIR"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onepass-tests"
    except RuntimeError:  # nobody knows the home directory of this user
        return Path(tempfile.gettempdir()) / f"onepass-tests-{os.getuid()}"

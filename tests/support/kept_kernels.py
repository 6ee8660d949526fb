"""What tests read from kernels that they compiled, kept on disk: the machine code's figures and the PTX.

Compiling a kernel takes 2 to 10 seconds, and most runs of the tests change no kernel. The key of an entry holds all
that an entry depends on: versions, compiler options and sources (`compile.environment`), the architecture, the function
that is traced with its arguments, the test's own kernels, and the disassembler. No verdict is kept: a test checks what
it reads in every run. One entry in twenty, drawn at random, is compiled again and has to give the same.

ONEPASS_TEST_CACHE_DIR names the directory; an empty one makes a run that compiles everything.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.metadata
import inspect
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMPILED_AGAIN = 0.05  # the share of entries that a run compiles again and compares
GENERATIONS = 3  # the states of the sources whose entries are kept
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_HERE = Path(__file__).parent
_drawn = random.Random()  # seeded by the system: tests set the seeds of other generators


def get(arch: str, trace: Callable[[], tuple], compiled: Callable[[], Any]) -> Any:
    """The kept value of `compiled()` for this kernel; one that JSON can say, with tuples as lists."""
    entry = directory() / f"{key(arch, trace)}.json.gz"
    try:
        kept = json.loads(gzip.decompress(entry.read_bytes()))
    except (OSError, EOFError, ValueError):  # there is none, or a process was stopped while it wrote
        kept = None
    if kept is not None and _drawn.random() >= COMPILED_AGAIN:
        return kept
    now = json.loads(json.dumps(compiled()))
    assert kept in (None, now), f"{entry}: the kernel that {description(trace)} compiles to now is not the kept one"
    if kept is None:
        part = entry.with_suffix(f".{os.getpid()}")
        part.write_bytes(gzip.compress(json.dumps(now).encode(), 1))
        part.replace(entry)
    return now


def description(trace: Callable[[], tuple]) -> str:
    """A text that is the same in each process, for the same kernel only."""
    function = _function(trace)
    arguments = (trace.args, sorted(trace.keywords.items())) if isinstance(trace, functools.partial) else ()
    text = repr((function.__module__, function.__qualname__, getattr(trace, "__self__", None), arguments))
    if "<locals>" in text or "<lambda>" in text or _ADDRESS.search(text):
        raise ValueError(f"trace: expected a function of a module and arguments whose repr says all, got {text}")
    return text


def _function(trace: Callable[[], tuple]) -> Callable:
    return trace.func if isinstance(trace, functools.partial) else trace


def key(arch: str, trace: Callable[[], tuple]) -> str:
    return hashlib.sha256(f"{arch} {description(trace)} {_kernel_of_a_test(trace)}".encode()).hexdigest()[:32]


def _kernel_of_a_test(trace: Callable[[], tuple]) -> str:
    """The source of the module that is traced, if it is none of the package's, whose sources have a digest already."""
    function = _function(trace)
    return "" if function.__module__.startswith("onepass.") else inspect.getsource(inspect.getmodule(function))


@functools.lru_cache(maxsize=1)
def directory() -> Path:
    """The entries of these sources, made if need be; those of older sources go."""
    from onepass.kernels.compiler import compile

    digest = hashlib.sha256(compile.environment().encode())
    digest.update((_HERE / "machine_code.py").read_bytes())
    digest.update(importlib.metadata.version("nvidia-cuda-nvdisasm").encode())
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(os.environ.get("ONEPASS_TEST_CACHE_DIR") or Path(home) / "onepass-tests")
    made = root / digest.hexdigest()[:16]
    made.mkdir(parents=True, exist_ok=True)
    os.utime(made)
    for old in sorted(root.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)[GENERATIONS:]:
        shutil.rmtree(old, ignore_errors=True)
    return made

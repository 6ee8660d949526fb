"""Compiling a suite's kernels in parallel before they are timed."""

from __future__ import annotations

import time
from collections.abc import Iterable

from onepass.kernels.compiler import pool
from onepass.kernels.compiler.compile import CompileRequest


def compile_ahead(requests: Iterable[CompileRequest]) -> None:
    """Compile what the disk cache lacks, and print how long it took and what does not compile.

    Args: requests: arguments of `compile.get`.
    """
    started, count = time.perf_counter(), 0

    def on_done(done: int, total: int) -> None:
        nonlocal count
        count = total

    failures = pool.compile_each(requests, on_done=on_done)
    if count:
        workers = min(count, pool.num_cpus())
        seconds = time.perf_counter() - started
        print(f"compiled {count} kernels in {seconds:.1f} s with {workers} processes", flush=True)
    for (name, *_), reason in failures.items():
        print(f"{name} does not compile: {reason}", flush=True)

"""How calls of suites are timed besides CUDA graphs: by do_bench, on the GPU or the host alone, under a steady load."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable

import torch

from onepass.tuning.timing import Call, Sampler


def do_bench_sampler(call: Call, warmup_ms: int, rep_ms: int) -> Sampler:
    """A sampler of triton's do_bench: the median of single calls, with the L2 cache flushed before each."""

    def sample() -> float:
        from triton.testing import do_bench

        return do_bench(call, warmup=warmup_ms, rep=rep_ms, return_mode="median")

    return sample


def device_sampler(call: Call, calls: int) -> Sampler:
    """A sampler of the time on the GPU alone: the median of single calls, with the L2 cache flushed before each.

    The GPU sleeps before each call for about a millisecond, in which the host enqueues it.
    """

    def sample() -> float:
        flushed = torch.empty(2**28, dtype=torch.int8, device="cuda")
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        for begin, end in events:
            flushed.zero_()
            torch.cuda._sleep(2_000_000)
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events)

    return sample


def host_us(call: Call, calls: int, samples: int = 1, clock: Callable[[], float] = time.thread_time) -> float:
    """Microseconds that the host spends on a call: the median of the samples.

    Args:
        calls: calls of a sample. The GPU is waited for after each sample and never within one.
        clock: time.thread_time counts the CPU time of this thread, time.perf_counter also the time that it waits.
    """

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    for _ in range(min(calls, 50)):
        call()
    spent = []
    for _ in range(samples):
        wait()
        started = clock()
        for _ in range(calls):
            call()
        spent.append(clock() - started)
    wait()
    return 1e6 * statistics.median(spent) / calls


def under_load(call: Call, seconds: float = 0.7) -> dict[str, str]:
    """Clock, power and what holds the clock down, after the GPU has run nothing but this call for so many seconds."""
    names = "clocks.sm,power.draw.instant,clocks_event_reasons.active"
    ended = time.perf_counter() + seconds
    while time.perf_counter() < ended:
        for _ in range(20):
            call()
        torch.cuda.synchronize()
    for _ in range(400):  # these calls still run when the clock is read
        call()
    command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]
    values = subprocess.run(command, capture_output=True, text=True).stdout.strip().split(", ")
    torch.cuda.synchronize()
    return dict(zip(names.split(","), values, strict=False))

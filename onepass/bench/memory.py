"""The peak extra memory of one pass, measured in a process of its own.

    extra = peak - baseline - outputs

The baseline is taken with the inputs (and for a backward pass the forward's results) in memory, after a smaller call
has started threads and loaded code. On Linux the peak is the kernel's own high-water mark of resident memory, reset
at the baseline; on CUDA it is the peak of torch's allocator.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from ..processes import python_command
from .cases import Case, make_inputs
from .check import Oracle
from .flops import output_bytes
from .peers import Contender, find_peers, onepass_contender, prepare

Result = TypeVar("Result")

_WARM_UP_SEQLEN = 1024


def measure_in_subprocess(name: str, case: Case, device: str) -> dict[str, Any]:
    """Run `_measure` in a new Python process. Returns: its result. Raises: RuntimeError with its last line of error."""
    request = json.dumps({"contender": name, "case": case.to_dict(), "device": device})
    command = python_command("from onepass.bench.memory import main; main()")
    done = subprocess.run(command, input=request, capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(said[-1])
    return json.loads(done.stdout)


def _measure(contender: Contender, case: Case, device: str) -> dict[str, Any]:
    inputs = make_inputs(case, device)
    small = replace(case, seqlen_q=min(case.seqlen_q, _WARM_UP_SEQLEN), seqlen_k=min(case.seqlen_k, _WARM_UP_SEQLEN))
    prepare(contender, small, make_inputs(small, device)).run()
    prepared = prepare(contender, case, inputs)
    peak = peak_of(prepared.run, device)[1]
    rows = Oracle(case, inputs).compare(prepared.results(), is_peer=contender.name != "onepass")
    worst = max(rows, key=lambda row: row.share)
    return {
        "extra_bytes": max(0, peak.extra_bytes - output_bytes(case)),
        "peak_bytes": peak.peak_bytes,
        "baseline_bytes": peak.baseline_bytes,
        "output_bytes": output_bytes(case),
        "method": peak.method,
        "max_error": worst.error,
        "error_budget": worst.budget,
        "wrong": "; ".join(str(row) for row in rows if not row.ok),
    }


class Peak(NamedTuple):
    """The memory before a piece of work, the most while it ran, and the method that measured it."""

    baseline_bytes: int
    peak_bytes: int
    method: str

    @property
    def extra_bytes(self) -> int:
        return self.peak_bytes - self.baseline_bytes


def peak_of(work: Callable[[], Result], device: str) -> tuple[Result, Peak]:
    """Run `work` in this process. Returns: its result and its peak, by torch's allocator (CUDA) or resident memory."""
    results = []  # the result stays alive until the end, as it would for a caller

    def keep() -> None:
        results.append(work())

    gc.collect()
    peak = _peak_of_cuda(keep, device) if device.startswith("cuda") else _peak_of_process(keep)
    return results[0], peak


def _peak_of_cuda(work: Callable[[], object], device: str) -> Peak:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    baseline_bytes = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return Peak(baseline_bytes, torch.cuda.max_memory_allocated(device), "torch.cuda.max_memory_allocated")


def _peak_of_process(work: Callable[[], object]) -> Peak:
    """The peak by the operating system's own high-water mark.

    `getrusage` would be shorter, but its maximum survives exec: a child would start with its parent's peak.
    """
    _give_back_freed_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark, VmHWM
        baseline_bytes = _process_status_bytes("VmRSS")
    except (OSError, KeyError):
        return _sampled_peak_of_process(work)
    work()
    return Peak(baseline_bytes, _process_status_bytes("VmHWM"), "VmHWM")


def _process_status_bytes(field: str) -> int:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0]: int(line[1]) * 1024 for line in lines if line[-1] == "kB"}[f"{field}:"]


def _sampled_peak_of_process(work: Callable[[], object]) -> Peak:
    """The peak by looking every millisecond, where the system keeps no mark that can be reset."""
    import psutil

    process = psutil.Process()
    baseline_bytes = peak_bytes = process.memory_info().rss
    is_done = threading.Event()

    def watch() -> None:
        nonlocal peak_bytes
        while not is_done.is_set():
            peak_bytes = max(peak_bytes, process.memory_info().rss)
            time.sleep(1e-3)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        is_done.set()
        watcher.join()
    return Peak(baseline_bytes, max(peak_bytes, process.memory_info().rss), "resident memory sampled every ms")


def _give_back_freed_memory() -> None:
    """Return to the system what glibc's malloc keeps after the warm-up: it would hide as much of the measured call."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return  # another C library: small blocks may stay


def contender_named(name: str, device: str) -> Contender:
    """The contender of that name: onepass or a peer. Raises: RuntimeError with the reason if that peer is absent."""
    if name == "onepass":
        return onepass_contender(device)
    found = find_peers(device.partition(":")[0], [name])
    if name in found.absent:
        raise RuntimeError(f"{name}: {found.absent[name]}")
    return found.present[name]


def main() -> None:
    """Run the child process: it reads a request from stdin and writes the result to stdout."""
    request = json.load(sys.stdin)
    contender = contender_named(request["contender"], request["device"])
    print(json.dumps(_measure(contender, Case.from_dict(request["case"]), request["device"])))


if __name__ == "__main__":
    main()

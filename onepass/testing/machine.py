"""The machine that a measurement was made on: device, clocks, versions, commit, date."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import onepass

# Packages whose versions explain a result, where they are installed.
PEER_PACKAGES = (
    "flash-attn",
    "flash-attn-4",
    "fa3-fwd",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "triton",
    "ring-flash-attn",
    "yunchang",
    "vllm",
)


def describe(device: str) -> dict[str, Any]:
    """The header of a results file. It holds nothing that identifies the machine or its user."""
    is_cuda = device.startswith("cuda")
    return {
        "date_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "device_name": torch.cuda.get_device_name(device) if is_cuda else cpu_model(),
        "cpu": {
            "model": cpu_model(),
            "logical_cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            # the load of the machine at the start, by which figures from a busy machine are recognized
            "load_average_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        },
        "gpu": _gpu(device) if is_cuda else None,
        "versions": {
            "onepass": onepass.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if is_cuda else None,
            **package_versions(),
        },
        "platform": platform.platform(),
        **_git(),
    }


def package_versions() -> dict[str, str]:
    """Versions of the optional packages that are installed."""
    versions = {}
    for name in PEER_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _gpu(device: str) -> dict[str, Any]:
    index = torch.device(device).index or 0
    properties = torch.cuda.get_device_properties(index)
    facts: dict[str, Any] = {
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
    }
    fields = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")
    # nvidia-smi has its own numbers of GPUs: ask for the one that torch sees by its uuid
    query = f"--query-gpu={','.join(fields)}"
    answer = _run("nvidia-smi", f"--id=GPU-{properties.uuid}", query, "--format=csv,noheader")
    if answer:
        facts |= dict(zip(fields, (value.strip() for value in answer.splitlines()[0].split(",")), strict=False))
    return facts


def _git() -> dict[str, Any]:
    """The commit of the checkout that onepass was imported from; None for an installed package."""
    package = Path(onepass.__file__).resolve().parent
    top = _run("git", "-C", str(package), "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != package.parent:
        return {"commit": None, "has_local_changes": None}
    measured = "onepass", "benchmarks", ":!benchmarks/results"
    changes = _run("git", "-C", top, "status", "--porcelain", "--", *measured)
    has_changes = None if changes is None else bool(changes)  # None: git did not answer
    return {"commit": _run("git", "-C", str(package), "rev-parse", "HEAD"), "has_local_changes": has_changes}


def counted(number: int, noun: str) -> str:
    """A number and a noun: "1 thread", "2 threads"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"

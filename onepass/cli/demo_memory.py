"""How much memory a piece of work takes beyond what was there before it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from pathlib import Path

import torch

GIB = 2**30
SAMPLE_EVERY_S = 0.001


class PeakMemory:
    """Measures a `with` block: `extra_bytes` is the most memory held inside it, less what was held at its start.

    On CUDA it is exact, from PyTorch's allocator. On the CPU no allocator keeps such a count for all libraries
    involved, so a thread reads the resident size of the process every millisecond: a peak shorter than that can be
    missed, and memory that the C library keeps after a free would count as nothing new. Hence the trim first.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.extra_bytes = 0

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before_bytes = torch.cuda.memory_allocated(self.device)
            return self
        import psutil

        _trim()
        process = psutil.Process()
        self._before_bytes = self._peak_bytes = process.memory_info().rss
        self._done = threading.Event()

        def sample() -> None:
            while True:
                self._peak_bytes = max(self._peak_bytes, process.memory_info().rss)
                if self._done.wait(SAMPLE_EVERY_S):
                    return

        self._thread = threading.Thread(target=sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._peak_bytes = torch.cuda.max_memory_allocated(self.device)
        else:
            self._done.set()
            self._thread.join()
        self.extra_bytes = self._peak_bytes - self._before_bytes


def available_bytes(device: torch.device) -> int:
    """Memory that can be taken now: of the GPU, or of this machine or the container in it, whichever is less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    available = psutil.virtual_memory().available
    try:  # a container's limit (cgroup v2); "max" or no such file: no limit
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):
        return available
    return min(available, limit - used)


def _trim() -> None:
    """Ask glibc to give freed memory back to the system; other C libraries have no such call."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)

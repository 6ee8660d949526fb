"""Rows of the GPUs of one host, read through symmetric memory by copy engines.

Every rank publishes the rows that others need in memory that all GPUs of the group can address, and reads the rows of
the others into the buffers of its steps. A copy engine moves rows with a pitch between them, so nothing is packed or
unpacked, and it needs no multiprocessor: during an attention kernel it costs 0.01 ms where messages of NCCL cost 0.18
(docs/lab/2026-11-25-messages.md). What is published is a second copy of the rank's own rows.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes
BARRIER_MS = 600_000  # as long as NCCL waits by default

_OF_GROUPS: weakref.WeakKeyDictionary[Any, Copies]


class Copies:
    """The rows that the ranks of a process group publish, each on a GPU of the same host."""

    def __init__(self, group: Any, rank: int, device: torch.device):
        self._group, self._rank, self._device = weakref.ref(group), rank, device
        self._stream = torch.cuda.Stream(device)
        self._memory: Tensor | None = None
        self._handle: Any = None
        self._used: torch.cuda.Event | None = None  # recorded when the rows that were read last have arrived
        self._of_graphs: list[Any] = []  # memory that CUDA graphs go on using after a larger call has replaced it

    def publish(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
        """Let all ranks read these rows. Every rank of the group calls this.

        Rows that were published earlier are gone: a call reads all that it needs before it ends.

        Args:
            tensors: (rows, ...) each, with other sizes equal on all ranks. counts: the rows of each rank.
        Returns: for each tensor, a list of the published tensors of all ranks.
        """
        sizes = [max(counts) * math.prod(t.shape[1:]) * t.itemsize for t in tensors]
        starts = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        is_captured = torch.cuda.is_current_stream_capturing()
        if self._used is not None and not is_captured:
            torch.cuda.current_stream(self._device).wait_event(self._used)
        if self._handle is None or self._handle.buffer_size < starts[-1]:
            if is_captured:
                raise RuntimeError(
                    "onepass.distributed: expected a call of this plan before one is captured in a CUDA graph, got none"
                )
            self._reserve(starts[-1])
        if is_captured:
            self._of_graphs.append((self._memory, self._handle))
        self._handle.barrier(channel=0, timeout_ms=BARRIER_MS)  # all ranks have read what was there
        found = []
        for t, start in zip(tensors, starts, strict=False):
            place = start // t.itemsize
            shapes = [(count, *t.shape[1:]) for count in counts]
            found.append([self._handle.get_buffer(r, shape, t.dtype, place) for r, shape in enumerate(shapes)])
            found[-1][self._rank].copy_(t)
        self._handle.barrier(channel=0, timeout_ms=BARRIER_MS)  # all ranks have written
        return found

    def read(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Start to copy rows into contiguous targets (rows, batch, ...), each from a published tensor.

        Returns: a function that makes the current stream wait for the copies.
        """
        from cuda.bindings import runtime

        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        for target, source in pairs:
            width = math.prod(target.shape[2:]) * target.itemsize
            height = target.shape[0] * target.shape[1]
            if not width * height:
                continue
            pitch = source.stride(1) * source.itemsize
            (error,) = runtime.cudaMemcpy2DAsync(
                target.data_ptr(), width, source.data_ptr(), pitch, width, height, kind, self._stream.cuda_stream
            )
            if error != runtime.cudaError_t.cudaSuccess:
                raise RuntimeError(f"onepass.distributed: expected to copy rows of another GPU, got {error.name}")
        done = self._stream.record_event()

        def wait() -> None:
            if not torch.cuda.is_current_stream_capturing():
                self._used = done
            torch.cuda.current_stream(self._device).wait_event(done)

        return wait

    def _reserve(self, size: int) -> None:
        """Replace the memory by one of this size. No rank may be reading from the old memory, which is given back."""
        from torch.distributed import _symmetric_memory as symmetric

        group = self._group()
        assert group is not None
        torch.cuda.synchronize(self._device)
        memory = symmetric.empty(size, dtype=torch.uint8, device=self._device)
        self._handle = symmetric.rendezvous(memory, group)  # waits until all ranks are here, and so read nothing
        self._memory = memory


def of(group: Any, rank: int, device: torch.device) -> Copies:
    """The published rows of a process group's ranks on their GPUs. Raises: ValueError on a CPU."""
    if device.type != "cuda":
        raise ValueError(f"plan: with transport 'copies', expected q, k and v on GPUs, got {device}")
    if group not in _OF_GROUPS:
        _OF_GROUPS[group] = Copies(group, rank, device)
    return _OF_GROUPS[group]


_OF_GROUPS = weakref.WeakKeyDictionary()

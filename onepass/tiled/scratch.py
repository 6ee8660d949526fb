"""The workspace of the tiles, which has the role of shared memory and registers in a GPU kernel."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

# Buffers up to this size outlive the call on a CPU, one of each name and dtype per thread (some 20 MiB at most): memory
# that is new to a process costs a page fault for every 4 KiB, up to a fifth of the backward pass at seqlen 512.
KEPT_BYTES = 2 * 2**20
_kept = threading.local()


class Scratch:
    """Buffers of one call, by name, reused by all of its tiles.

    Args:
        like: a tensor on the device to work on.
        dtype: dtype of every buffer.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype):
        self.like = like
        self.dtype = dtype
        self._buffers: dict[str, Tensor] = {}
        if like.device.type == "cpu":
            if not hasattr(_kept, "buffers"):
                _kept.buffers = {}
            self._buffers.update(_kept.buffers.get(dtype, {}))

    def empty(self, name: str, *shape: int) -> Tensor:
        """A contiguous, uninitialized tensor; it is valid until the next request for its name."""
        count = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < count:
            # not an inference tensor, even under inference mode: later calls may write to it outside of that mode
            with torch.inference_mode(False):
                buffer = torch.empty(count, dtype=self.dtype, device=self.like.device)
            self._buffers[name] = buffer
            if self.like.device.type == "cpu" and count * buffer.element_size() <= KEPT_BYTES:
                _kept.buffers.setdefault(self.dtype, {})[name] = buffer
        return self._buffers[name][:count].view(shape)

    def load_scaled(self, name: str, source: Tensor, scale: float) -> Tensor:
        """scale * source, (..., rows, head_dim), contiguous, in the buffers' dtype: converted first, then scaled."""
        target = self.empty(name, *source.shape)
        return torch.mul(source if source.dtype == self.dtype else target.copy_(source), scale, out=target)

    def load(self, name: str, source: Tensor) -> Tensor:
        """(entries, kv heads, rows, head_dim) -> (entries * kv heads, rows, head_dim), contiguous, in self.dtype.

        It is copied only where needed. GEMMs on rows that lie apart in memory are slower by more than a copy.
        """
        if source.dtype == self.dtype and source.is_contiguous():
            return source.flatten(0, 1)
        target = self.empty(name, *source.shape)
        return target.copy_(source).flatten(0, 1)

    def largest_norm(self, x: Tensor) -> float:
        """The largest Euclidean norm over the last dimension; NaN or inf if x is not finite.

        Squares are computed in a buffer, piece by piece along dimension -2, so that they never leave the cache.
        """
        largest = []
        for piece in x.split(512, -2):
            squares = self.empty("squares", *piece.shape)
            if piece.dtype != self.dtype:
                piece = squares.copy_(piece)
            largest.append(torch.mul(piece, piece, out=squares).sum(-1).amax())
        return float(torch.stack(largest).amax().sqrt())

"""Work memory: what shared memory and registers are to a GPU kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Scratch:
    """Buffers of one call, by name, reused by all of its tiles: their pages are touched for the first time only once.

    Args:
        like: a tensor on the device to work on.
        dtype: of every buffer.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype):
        self.like = like
        self.dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def empty(self, name: str, *shape: int) -> Tensor:
        """A contiguous, uninitialised tensor; valid until the same name is asked for again."""
        count = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < count:
            self._buffers[name] = self.like.new_empty(count, dtype=self.dtype)
        return self._buffers[name][:count].view(shape)

    def load_scaled(self, name: str, source: Tensor, scale: float) -> Tensor:
        """scale * source, (..., rows, head_dim), contiguous, of our dtype: converted first, then scaled."""
        target = self.empty(name, *source.shape)
        return torch.mul(source if source.dtype == self.dtype else target.copy_(source), scale, out=target)

    def load(self, name: str, source: Tensor) -> Tensor:
        """(entries, kv heads, rows, head_dim) -> (entries * kv heads, rows, head_dim), contiguous, of our dtype.

        Copied only where it is not that already: GEMMs on rows that lie apart in memory are slower by more than a copy.
        """
        if source.dtype == self.dtype and source.is_contiguous():
            return source.flatten(0, 1)
        target = self.empty(name, *source.shape)
        return target.copy_(source).flatten(0, 1)

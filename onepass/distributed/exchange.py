"""Messages between ranks: one collective operation of torch.distributed for each direction of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import in_words

WIDE = torch.complex128, torch.int64, torch.int32  # 16, 8 and 4 bytes


class Message(NamedTuple):
    """A tensor of any strides that goes to a rank of the group. Attributes: rows: the rows that go; None: all rows."""

    rank: int
    tensor: Tensor
    rows: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape) if self.rows is None else (self.rows.numel(), *self.tensor.shape[1:])

    @property
    def size(self) -> int:
        """The number of bytes."""
        return math.prod(self.shape) * self.tensor.itemsize

    def write(self, place: Tensor) -> None:
        """Write the message's rows to a contiguous tensor."""
        if self.rows is None:
            place.copy_(self.tensor)
        else:
            torch.index_select(self.tensor, 0, self.rows, out=place)


class Expected(NamedTuple):
    """A tensor that comes from a rank of the group."""

    rank: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Pending:
    """Messages that are under way. The object keeps their memory alive.

    Args:
        flat: the bytes that arrive. packed: the bytes that leave.
        work: the handle of torch.distributed that is waited on. words: what is waited for, for error messages.
    """

    def __init__(
        self,
        receives: Sequence[Expected] = (),
        flat: Tensor | None = None,
        packed: Tensor | None = None,
        work: Any = None,
        words: str = "",
    ):
        self._receives, self._flat, self._packed, self._work, self._words = receives, flat, packed, work, words

    def wait(self) -> list[Tensor]:
        """The tensors that have arrived; on a GPU the current stream waits, not the host.

        Raises: RuntimeError if they do not arrive, where the process group notices it here.
        """
        if self._flat is None:
            return []
        flat = self._flat
        with in_words(self._words):
            self._work.wait()
        self._flat = self._packed = self._work = None
        spans = _spans([(r.rank, math.prod(r.shape) * r.dtype.itemsize) for r in self._receives])
        found = []
        for (start, size), (_, shape, dtype) in zip(spans, self._receives, strict=True):
            piece = flat[start : start + size]
            if start % dtype.itemsize:
                piece = piece.clone()
            found.append(piece.view(dtype).view(shape))
        return found


def exchange(group: Any, sends: Sequence[Message], receives: Sequence[Expected], device: torch.device) -> Pending:
    """Start messages. Every rank of the group calls this, even a rank without messages.

    The messages from one rank to another stand in the same order in both ranks' lists. Raises: what `Pending.wait`
    raises.
    """
    num_ranks = dist.get_world_size(group)
    outgoing, incoming = [0] * num_ranks, [0] * num_ranks
    for message in sends:
        outgoing[message.rank] += message.size
    for rank, shape, dtype in receives:
        incoming[rank] += math.prod(shape) * dtype.itemsize
    packed, flat = (torch.empty(sum(of_ranks), dtype=torch.uint8, device=device) for of_ranks in (outgoing, incoming))
    spans = _spans([(message.rank, message.size) for message in sends])
    for (start, size), message in zip(spans, sends, strict=True):
        piece, dtype = packed[start : start + size], message.tensor.dtype
        if start % dtype.itemsize:
            aligned = torch.empty(message.shape, dtype=dtype, device=device)
            message.write(aligned)
            piece.copy_(aligned.view(-1).view(torch.uint8))
        else:
            message.write(piece.view(dtype).view(message.shape))
    ranks = sorted({message.rank for message in sends} | {expected.rank for expected in receives})
    words = f"messages between this rank and ranks {ranks} of its group to arrive"
    with in_words(words):
        work = dist.all_to_all_single(flat, packed, incoming, outgoing, group=group, async_op=True)
    return Pending(receives, flat, packed, work, words)


def _spans(messages: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Where each message begins, and its bytes. Messages are sorted by rank, and keep their order within a rank.

    Args: messages: the rank and the bytes of each.
    """
    starts, start = [0] * len(messages), 0
    for i in sorted(range(len(messages)), key=lambda i: messages[i][0]):
        starts[i] = start
        start += messages[i][1]
    return [(start, size) for start, (_, size) in zip(starts, messages, strict=True)]


def words(t: Tensor) -> Tensor:
    """A tensor's memory in elements of up to 16 bytes, because torch copies strided rows element by element."""
    return next((t.view(wide) for wide in WIDE if _fits(t, wide)), t)


def to_device(t: Tensor, device: torch.device) -> Tensor:
    """A tensor that was made on the CPU, on a device, without waiting for the device."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)


def copy(target: Tensor, source: Tensor) -> None:
    """Copy the bytes of a tensor. The dtypes may be words of different sizes."""
    target, source = alike(target, source)
    target.copy_(source)


def alike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of words, as views with words of equal size."""
    if a.dtype == b.dtype:
        return a, b
    narrow = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    return a.view(narrow), b.view(narrow)


def _fits(t: Tensor, wide: torch.dtype) -> bool:
    """Whether a tensor is also one of wider elements."""
    count = wide.itemsize // t.itemsize
    if t.is_meta or not t.dim() or count < 2 or t.stride(-1) != 1 or t.data_ptr() % wide.itemsize:
        return False
    return not any(number % count for number in (t.shape[-1], t.storage_offset(), *t.stride()[:-1]))


def gather(own: Tensor, group: Any, num_ranks: int) -> Tensor:
    """(num_ranks, *own.shape): a tensor of equal shape from every rank. Raises: what `Pending.wait` raises."""
    flat = own.new_empty((num_ranks * own.numel(),))
    # torch 2.13 renames all_gather_into_tensor, and warns about the old name
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with in_words(f"all {num_ranks} ranks of the group to give their part of a tensor"):
        all_gather(flat, own.contiguous().view(-1), group=group)
    return flat.view(num_ranks, *own.shape)


def add_up(total: Tensor, group: Any) -> None:
    """Replace a tensor's values by their sums over all ranks. Raises: what `Pending.wait` raises."""
    with in_words("all ranks of the group to give their part of a sum"):
        dist.all_reduce(total, group=group)


def take_from_first(t: Tensor, group: Any) -> None:
    """Replace a tensor's values by those of rank 0 of the group. Raises: what `Pending.wait` raises."""
    with in_words("all ranks of the group to take what the first one has"):
        dist.broadcast(t, dist.get_global_rank(group, 0), group)

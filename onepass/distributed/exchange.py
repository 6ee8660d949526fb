"""Tensors on their way between ranks: point-to-point messages of torch.distributed, and its collective operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from .agreement import in_words


class Message(NamedTuple):
    """A contiguous tensor that goes to a rank of the group, or comes from it."""

    rank: int
    tensor: Tensor


class Pending:
    """Messages that are under way. It keeps their tensors alive."""

    def __init__(self, works: Sequence[Any] = (), messages: Sequence[Message] = ()):
        self._works, self._messages = works, messages

    def wait(self) -> None:
        """Wait until the messages have arrived; on a GPU the current stream waits, not the host.

        Raises: RuntimeError if they do not arrive, where the process group notices it here.
        """
        with in_words(messages_of(self._messages)):
            for work in self._works:
                work.wait()
        self._works, self._messages = (), ()


def messages_of(messages: Sequence[Message]) -> str:
    ranks = sorted({message.rank for message in messages})
    return f"messages between this rank and ranks {ranks} of its group to arrive"


def exchange(group: Any, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
    """Start messages. Two ranks give those between them in the same order. Raises: what `Pending.wait` raises."""
    operations = [
        dist.P2POp(operation, message.tensor, dist.get_global_rank(group, message.rank), group)
        for operation, messages in ((dist.isend, sends), (dist.irecv, receives))
        for message in messages
        if message.tensor.numel()
    ]
    if not operations:
        return Pending()
    messages = [*sends, *receives]
    with in_words(messages_of(messages)):
        return Pending(dist.batch_isend_irecv(operations), messages)


def gather(own: Tensor, group: Any, num_ranks: int) -> Tensor:
    """(num_ranks, *own.shape): a tensor of equal shape from every rank. Raises: what `Pending.wait` raises."""
    flat = own.new_empty((num_ranks * own.numel(),))
    # torch 2.13 renames it, and warns of the old name
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with in_words(f"all {num_ranks} ranks of the group to give their part of a tensor"):
        all_gather(flat, own.contiguous().view(-1), group=group)
    return flat.view(num_ranks, *own.shape)


def add_up(total: Tensor, group: Any) -> None:
    """Put the sum over all ranks in a tensor's place. Raises: what `Pending.wait` raises."""
    with in_words("all ranks of the group to give their part of a sum"):
        dist.all_reduce(total, group=group)


def take_from_first(t: Tensor, group: Any) -> None:
    """Put what rank 0 of the group has in a tensor's place. Raises: what `Pending.wait` raises."""
    with in_words("all ranks of the group to take what the first one has"):
        dist.broadcast(t, dist.get_global_rank(group, 0), group)

"""Rows on their way between ranks: point-to-point messages of torch.distributed, grouped into one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor


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

        Raises: RuntimeError if a rank is gone, where the process group notices it here.
        """
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise gone(self._messages, error) from error
        self._works, self._messages = (), ()


def gone(messages: Sequence[Message], error: RuntimeError) -> RuntimeError:
    """What is raised when messages cannot be sent or do not arrive."""
    ranks = sorted({message.rank for message in messages})
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    return RuntimeError(
        f"onepass.distributed: expected messages between this rank and ranks {ranks} of its group to arrive, but one "
        f"of them is gone or has not come within the group's timeout ({first_line})"
    )


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
    try:
        return Pending(dist.batch_isend_irecv(operations), messages)
    except RuntimeError as error:
        raise gone(messages, error) from error


# torch 2.13 renames it, and warns of the old name
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather(own: Tensor, group: Any, num_ranks: int) -> Tensor:
    """(num_ranks, *own.shape): a tensor of equal shape from every rank."""
    flat = own.new_empty((num_ranks * own.numel(),))
    _ALL_GATHER(flat, own.contiguous().view(-1), group=group)
    return flat.view(num_ranks, *own.shape)

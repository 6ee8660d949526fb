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

    def __init__(self, works: Sequence[Any], sends: Sequence[Message]):
        self._works, self._sends = works, sends

    def wait(self) -> None:
        """Wait until the messages have arrived; on a GPU the current stream waits, not the host."""
        for work in self._works:
            work.wait()
        self._works, self._sends = (), ()


def exchange(group: Any, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
    """Start messages. Two ranks give those between them in the same order."""
    operations = [
        dist.P2POp(operation, message.tensor, dist.get_global_rank(group, message.rank), group)
        for operation, messages in ((dist.isend, sends), (dist.irecv, receives))
        for message in messages
        if message.tensor.numel()
    ]
    return Pending(dist.batch_isend_irecv(operations) if operations else (), sends)


# torch 2.13 renames it, and warns of the old name
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather(own: Tensor, group: Any, num_ranks: int) -> Tensor:
    """(num_ranks, *own.shape): a tensor of equal shape from every rank."""
    flat = own.new_empty((num_ranks * own.numel(),))
    _ALL_GATHER(flat, own.contiguous().view(-1), group=group)
    return flat.view(num_ranks, *own.shape)

"""This rank's shard of a tensor, and all tokens of a tensor from the shards of all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .agreement import alive
from .exchange import add_up, gather
from .layout import Layout, Run


def shard(x: Tensor, dim: int, runs: Sequence[Run]) -> Tensor:
    """The tokens of some runs, from a tensor that has all tokens in dimension `dim`. Differentiable."""
    return torch.cat([x.narrow(dim, run.start, run.size) for run in runs] or [x.narrow(dim, 0, 0)], dim)


class Gather(torch.autograd.Function):
    """`ContextPlan.unshard` as an operation of autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, layout: Layout, rank: int, group: weakref.ref[Any] | None) -> Tensor:
        ctx.dim, ctx.layout, ctx.rank, ctx.group = dim, layout, rank, group
        return unshard(x, dim, layout, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        whole = gradients[0].contiguous()
        if ctx.layout.num_ranks > 1:
            whole = whole.clone()
            add_up(whole, alive(ctx.group))
        return shard(whole, ctx.dim, ctx.layout.runs[ctx.rank]), None, None, None, None


def unshard(x: Tensor, dim: int, layout: Layout, group: weakref.ref[Any] | None) -> Tensor:
    rows = x.movedim(dim, 0).contiguous()
    shape = rows.shape[1:]
    shards = [rows]
    if layout.num_ranks > 1:
        most = max(layout.count(rank) for rank in range(layout.num_ranks))
        own = rows.new_zeros((most, *shape))
        own[: rows.shape[0]] = rows
        shards = list(gather(own, alive(group), layout.num_ranks))
    whole = rows.new_empty((layout.owners[-1].stop, *shape))
    for run in layout.owners:
        whole[run.start : run.stop] = shards[run.rank][run.row : run.row + run.stop - run.start]
    return whole.movedim(0, dim)

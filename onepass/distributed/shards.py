"""All tokens of a tensor from the shards of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .exchange import add_up, gather

if TYPE_CHECKING:
    from .plan import ContextPlan


class Gather(torch.autograd.Function):
    """`ContextPlan.unshard` as an operation of autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, plan: ContextPlan) -> Tensor:
        ctx.dim, ctx.plan = dim, plan
        return unshard(x, dim, plan)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        whole = gradients[0].contiguous()
        if ctx.plan.num_ranks > 1:
            whole = whole.clone()
            add_up(whole, ctx.plan.group)
        return ctx.plan.shard(whole, ctx.dim), None, None


def unshard(x: Tensor, dim: int, plan: ContextPlan) -> Tensor:
    layout = plan.schedule.layout
    rows = x.movedim(dim, 0).contiguous()
    shape = rows.shape[1:]
    shards = [rows]
    if plan.num_ranks > 1:
        most = max(layout.count(rank) for rank in range(plan.num_ranks))
        own = rows.new_zeros((most, *shape))
        own[: rows.shape[0]] = rows
        shards = list(gather(own, plan.group, plan.num_ranks))
    whole = rows.new_empty((plan.num_tokens, *shape))
    for run in layout.owners:
        whole[run.start : run.stop] = shards[run.rank][run.row : run.row + run.stop - run.start]
    return whole.movedim(0, dim)

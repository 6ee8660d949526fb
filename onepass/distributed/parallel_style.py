"""`ContextParallel`: a module that takes q, k and v computes attention over the shards of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from .attention import attention
from .plan import ContextPlan


class ContextParallel(ParallelStyle):
    """A style for `parallelize_module` of torch.distributed.tensor.parallel: a module's forward becomes `attention`.

        plan = onepass.distributed.plan(65536, mesh["cp"], num_heads_q=32, num_heads_kv=8, causal=True)
        parallelize_module(model, mesh["cp"], {"layers.*.attention.core": ContextParallel(plan)})

    The module's first three arguments are q, k and v: this rank's tokens, or DTensors that are sharded over the mesh in
    the dimension of the tokens, with the plan's numbers of tokens (with a head-tail or balanced layout the DTensor's
    tokens are in the order of the shards). The result is of the same kind. Keyword arguments are those of
    `onepass.distributed.attention`. The module's own forward does not run, whatever else it does.

    Args:
        plan: a plan for the group of the mesh, or a function that returns the plan of the current batch.
        seq_dim: the dimension of the tokens in q, k, v and out: 1 for (batch, seqlen, heads, head_dim), 2 for (batch,
            heads, seqlen, head_dim).
        options: further arguments of `onepass.distributed.attention`.
    """

    def __init__(self, plan: ContextPlan | Callable[[], ContextPlan], *, seq_dim: int = 1, **options: Any):
        super().__init__()
        if not isinstance(plan, ContextPlan) and not callable(plan):
            raise TypeError(f"plan: expected a ContextPlan or a function that returns one, got {plan!r}")
        if seq_dim not in (1, 2):
            raise ValueError(f"seq_dim: expected 1 or 2, got {seq_dim!r}")
        self.plan, self.seq_dim, self.options = plan, seq_dim, options

    def current_plan(self) -> ContextPlan:
        return self.plan if isinstance(self.plan, ContextPlan) else self.plan()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.forward = functools.partial(self._forward, device_mesh)
        return module

    def _forward(self, mesh: DeviceMesh, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        plan, sequence = self.current_plan(), Shard(self.seq_dim)
        if mesh.size() != plan.num_ranks:
            raise ValueError(f"plan: expected one for the {mesh.size()} ranks of the mesh, got {plan.num_ranks}")
        given = q, k, v
        for name, t in zip("qkv", given, strict=True):
            if isinstance(t, DTensor) and tuple(t.placements) != (sequence,):
                raise ValueError(f"{name}: expected a DTensor with placements ({sequence},), got {t.placements}")
        local = [t.to_local() if isinstance(t, DTensor) else t for t in given]
        if self.seq_dim == 2:
            local = [t.transpose(1, 2) for t in local]
        out = attention(*local, plan, **(self.options | options))
        if not isinstance(out, Tensor):
            raise ValueError("return_lse: expected False in a module, got True")
        out = out.transpose(1, 2) if self.seq_dim == 2 else out
        if not isinstance(q, DTensor):
            return out
        shape = torch.Size((*q.shape[:-1], out.shape[-1]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(out.contiguous(), mesh, (sequence,), run_check=False, shape=shape, stride=stride)

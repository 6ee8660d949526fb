"""Attention over a cache has no backward: what its result is for tensors that require a gradient.

The result is computed, and belongs to the graph: a backward pass that reaches it raises, so no gradient is lost.

onepass::without_backward   makes a result a node of the graph
onepass::refuse_backward    raises; the node's backward calls it, so that a compiled graph raises when it runs
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..namespace import OPERATORS, qualified
from .attention import TAGS, refuse_vmap
from .gradient_rule import register_gradient

torch.library.define(
    qualified("without_backward"),
    "(Tensor out, Tensor lse, Tensor sources) -> (Tensor out, Tensor lse)",
    tags=TAGS,
)
torch.library.define(qualified("refuse_backward"), "(Tensor gradient) -> Tensor", tags=TAGS)


def in_graph_of(sources: list[Tensor], out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse, which depend on `sources` without a graph, as results of a graph whose backward raises."""
    # one number that depends on an element of each, so that no compiler takes the backward for one without effect
    numbers = [t[(slice(0, 1),) * t.dim()].to(torch.float32).sum() for t in sources]
    return OPERATORS.without_backward(out, lse, torch.stack(numbers).sum())


def _forward(out: Tensor, lse: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
    return out.clone(), lse.clone()


@torch.library.register_fake(qualified("without_backward"))
def _forward_fake(out: Tensor, lse: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out), torch.empty_like(lse)


def _refuse(gradient: Tensor) -> Tensor:
    raise UnsupportedError(
        "attention over a cache (attention_decode, or a block_table) has no backward: expected a call under "
        "torch.no_grad(), or a result that no loss depends on"
    )


@torch.library.register_fake(qualified("refuse_backward"))
def _refuse_fake(gradient: Tensor) -> Tensor:
    return gradient.new_empty((), dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    gradient = dlse if dout is None else dout
    return None, None, None if gradient is None else OPERATORS.refuse_backward(gradient)


def _refuse_again(ctx: Any, gradient: Tensor | None) -> None:
    raise UnsupportedError("onepass: expected one backward pass, got backward twice")


for _name, _implementation in (("without_backward", _forward), ("refuse_backward", _refuse)):
    torch.library.impl(qualified(_name), "default")(_implementation)
    torch.library.register_vmap(qualified(_name), refuse_vmap)
register_gradient("without_backward", _forward, _backward, _setup_context)
register_gradient("refuse_backward", _refuse, _refuse_again)

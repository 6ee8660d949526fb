"""A forward or a backward on behalf of an operator of aten, below autograd: checked, dispatched and run."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...api.steps import with_dropout_state
from ...dispatch import attention as dispatch
from ...errors import UnsupportedError
from ...geometry import philox
from ...problem import AttentionInputs, AttentionProblem
from ...validation.attention import check_attention

# The memory of a random state of onepass has this many elements, one more than it needs: a backward knows it by that.
MARK = 3


class NotOurs(NotImplementedError):
    """A backward whose forward another implementation has computed."""


class Call(NamedTuple):
    """The arguments of an operator that are neither q, k nor v, as `onepass.attention` has them."""

    window: tuple[int | None, int | None] = (None, None)
    scale: float | None = None
    dropout_p: float = 0.0
    cu_seqlens: tuple[Tensor | None, Tensor | None] = (None, None)
    seqused_k: Tensor | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse, and with dropout the random state, (2,) int64. Raises: what `onepass.attention` raises."""
    inputs, problem = _checked(call, q, k, v)
    name = _backend(problem, q.device)
    state = philox.random_state(q.device) if problem.dropout_p else None
    out, lse = dispatch.prepare(name, problem, q.device)(inputs if state is None else with_dropout_state(inputs, state))
    return out, lse, state


def backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv."""
    inputs, problem = _checked(call, q, k, v)
    problem = replace(problem, constant_slopes=problem.has_alibi, constant_bias=problem.has_bias)
    module = dispatch.load_backward(_backend(problem, q.device), problem)
    inputs = inputs if state is None else with_dropout_state(inputs, state)
    dq, dk, dv, *_ = module.gradients(problem, inputs, out, lse, dout, None)
    return dq, dk, dv


def _backend(problem: AttentionProblem, device: torch.device) -> str:
    name = dispatch.require(problem, None, None, device)
    if name == "tiled" and device.type == "cuda":
        raise UnsupportedError(f"no kernel: {dispatch.choose(problem, None, None, device).reason}")
    return name


def _checked(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[AttentionInputs, AttentionProblem]:
    arguments = call._asdict()
    offsets, arguments["softmax_scale"] = arguments.pop("cu_seqlens"), arguments.pop("scale")
    if offsets[0] is not None:
        arguments |= zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=True)
    return check_attention(q, k, v, **arguments)


# ---------------------------------------------------------------- random states


def _memory(state: Tensor | None, device: torch.device) -> Tensor:
    memory = torch.zeros(MARK, dtype=torch.int64, device=device)
    if state is not None:
        memory[:2] = state
        memory[2] = state[1]
    return memory


def marked(state: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """A random state as flash attention's operators return it, (2,) uint64, and a tensor () uint64 without meaning."""
    unused = torch.zeros((), dtype=torch.int64, device=device).view(torch.uint64)
    return _memory(state, device).view(torch.uint64)[:2], unused


def marked_numbers(state: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """A random state as cuDNN's operators return it: seed and offset, () int64, of one piece of memory.

    They are 16 bytes apart: torch.compile's generated code asserts that each output is aligned to 16 bytes.
    """
    memory = _memory(state, device)
    return memory[0], memory[2]


def state_of(rng: Tensor, dropout_p: float, must_be_marked: bool = False) -> Tensor | None:
    """The random state of a forward, from the tensor that holds its first element; None without dropout.

    Without dropout, out and lse say everything that a backward has to know, whichever implementation computed them.

    Args: must_be_marked: whether to refuse another implementation's forward even without dropout, because its lse may
        mean something else.
    Raises: NotOurs if another implementation has computed the forward.
    """
    is_ours = isinstance(rng, Tensor) and rng.untyped_storage().nbytes() == MARK * 8
    if not is_ours and (dropout_p or must_be_marked):
        raise NotOurs("expected a forward by onepass, got one by another implementation")
    return rng.view(torch.int64).as_strided((2,), (1,), 0) if dropout_p else None

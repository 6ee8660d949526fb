"""The torch operators of calls with modifiers: onepass::attention_modified_forward and _backward.

They have tensors and options that few calls need, so that ordinary calls have short lists of arguments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..dispatch import attention as dispatch
from ..dispatch import choice
from ..namespace import OPERATORS, qualified
from ..problem import AttentionInputs, AttentionProblem, ModifiedInputs, Modifiers
from ..problem.outputs import empty_gradients, empty_outputs
from . import attention
from .autocast import without_autocast
from .gradient_rule import register_gradient

MODIFIERS = ", ".join(f"Tensor? {name}" for name in Modifiers._fields)
NUM_TENSORS = attention.NUM_INPUTS + len(Modifiers._fields)
SLOPES, BIAS = (attention.NUM_INPUTS + Modifiers._fields.index(name) for name in ("alibi_slopes", "bias"))
ARGUMENTS = f"{attention.INPUTS}, {MODIFIERS}, float dropout_p, {attention.OPTIONS}"

torch.library.define(
    qualified("attention_modified_forward"), f"({ARGUMENTS}) -> (Tensor out, Tensor lse)", tags=attention.TAGS
)
torch.library.define(
    qualified("attention_modified_backward"),
    f"(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, bool constant_slopes, bool constant_bias, {ARGUMENTS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dslopes, Tensor dbias)",
    tags=attention.TAGS,
)


def _split(args: tuple) -> tuple[ModifiedInputs, AttentionProblem, tuple]:
    """The tensors, the problem, and the options of `attention.OPTIONS`."""
    tensors, dropout_p, options = args[:NUM_TENSORS], args[NUM_TENSORS], args[NUM_TENSORS + 1 :]
    modifiers = Modifiers(*tensors[attention.NUM_INPUTS :])
    q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k = tensors[: attention.NUM_INPUTS]
    inputs = ModifiedInputs(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, modifiers)
    return inputs, attention.problem_of(inputs, options, dropout_p=dropout_p), options


def arguments_of(inputs: ModifiedInputs, dropout_p: float, options: tuple) -> tuple:
    """The arguments of the forward."""
    *tensors, modifiers = inputs
    return (*tensors, *modifiers, dropout_p, *options)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, problem, options = _split(args)
    return attention.forward_on(options[-2], options[-1], problem, inputs)


@torch.library.register_fake(qualified("attention_modified_forward"))
def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, problem, _ = _split(args)
    return empty_outputs(problem, inputs)


def _backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    constant_slopes: bool,
    constant_bias: bool,
    *args: Any,
) -> tuple[Tensor, ...]:
    """Args: constant_slopes, constant_bias: their gradient is not computed, and has a size of 0."""
    inputs, problem, options = _split(args)
    constant_slopes, constant_bias = problem.has_alibi and constant_slopes, problem.has_bias and constant_bias
    problem = replace(problem, constant_slopes=constant_slopes, constant_bias=constant_bias)
    dout = torch.zeros_like(out) if dout is None else dout
    with without_autocast(problem.device_type):
        module = dispatch.load_backward(choice.backend_name(options[-2]), problem)
        *found, dslopes, dbias = module.gradients(problem, inputs, out, lse, dout, dlse)
    terms = (None if constant_slopes else dslopes), (None if constant_bias else dbias)
    return (*found, *(out.new_empty(0) if gradient is None else gradient for gradient in terms))


@torch.library.register_fake(qualified("attention_modified_backward"))
def _backward_fake(
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    constant_slopes: bool,
    constant_bias: bool,
    *args: Any,
) -> tuple[Tensor, ...]:
    terms = None if constant_slopes else args[SLOPES], None if constant_bias else args[BIAS]
    dense = torch.contiguous_format
    like = (out.new_empty(0) if t is None else torch.empty_like(t, memory_format=dense) for t in terms)
    return (*empty_gradients(AttentionInputs(*args[: attention.NUM_INPUTS])), *like)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs[:NUM_TENSORS])
    ctx.options = inputs[NUM_TENSORS:]
    ctx.constant = tuple(t is not None and not t.requires_grad for t in (inputs[SLOPES], inputs[BIAS]))


def _autograd_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    gradients: list[Tensor | None] = [None] * (NUM_TENSORS + len(ctx.options))
    if dout is None and dlse is None:
        return tuple(gradients)
    out, lse, *tensors = ctx.saved_tensors
    found = OPERATORS.attention_modified_backward(dout, dlse, out, lse, *ctx.constant, *tensors, *ctx.options)
    constant = (False,) * 4 + ctx.constant
    for place, gradient, is_constant in zip((0, 1, 2, 3, SLOPES, BIAS), found, constant, strict=True):
        if tensors[place] is not None and not is_constant:
            gradients[place] = gradient
    return tuple(gradients)


for _name, _implementation in (("forward", _forward), ("backward", _backward)):
    torch.library.impl(qualified(f"attention_modified_{_name}"), "default")(_implementation)
    torch.library.register_vmap(qualified(f"attention_modified_{_name}"), attention.refuse_vmap)
register_gradient("attention_modified_forward", _forward, _autograd_backward, _setup_context)
register_gradient("attention_modified_backward", _backward, attention.refuse_double_backward)


@register_flop_formula(OPERATORS.attention_modified_forward, get_raw=True)
def forward_flops(*args: Any, out_val: Any = None) -> int:
    """Of the pairs that the window leaves: what else hides pairs is not looked at."""
    tensors, options = args[: attention.NUM_INPUTS], args[NUM_TENSORS + 1 :]
    return attention.forward_flops(*tensors, *options)


@register_flop_formula(OPERATORS.attention_modified_backward, get_raw=True)
def backward_flops(*args: Any, out_val: Any = None) -> int:
    tensors, options = args[6 : 6 + attention.NUM_INPUTS], args[6 + NUM_TENSORS + 1 :]
    return attention.backward_flops(*args[:4], *tensors, *options)

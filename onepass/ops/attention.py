"""The torch operators behind `attention`: onepass::attention_forward and onepass::attention_backward.

Each has an implementation for any device (dispatch loads the backend that was chosen before the call) and a fake for
tracing; the forward has an autograd rule. They are defined with `torch.library.define`, which costs less per call than
`custom_op`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..dispatch import ahead, backends, choice
from ..dispatch import attention as dispatch
from ..errors import UnsupportedError
from ..geometry.visible_pairs import visible_pairs
from ..kernels.config import LaunchConfig
from ..namespace import OPERATORS, qualified
from ..problem import AttentionInputs, AttentionProblem, Inputs, Mask, Quantization, QuantizedInputs
from ..problem.outputs import empty_gradients, empty_outputs
from .autocast import without_autocast
from .gradient_rule import is_recording, register_gradient

INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k"
OPTIONS = (
    "float softmax_scale, SymInt? window_left, SymInt? window_right, float? softcap, bool deterministic, str backend, "
    "str? tuning"
)
NUM_INPUTS = len(AttentionInputs._fields)
TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)

torch.library.define(qualified("attention_forward"), f"({INPUTS}, {OPTIONS}) -> (Tensor out, Tensor lse)", tags=TAGS)
torch.library.define(
    qualified("attention_backward"),
    f"(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, {INPUTS}, {OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    tags=TAGS,
)


def problem_of(
    inputs: Inputs | QuantizedInputs,
    options: tuple,
    quantization: Quantization | None = None,
    dropout_p: float = 0.0,
) -> AttentionProblem:
    """The problem of a call of the operators.

    Args:
        options: the option arguments, in the order of the schema.
    """
    softmax_scale, window_left, window_right, softcap, deterministic = options[:5]
    return AttentionProblem.of(
        inputs,
        softmax_scale=softmax_scale,
        mask=Mask(window_left, window_right),
        softcap=softcap,
        deterministic=deterministic,
        quantization=quantization,
        dropout_p=dropout_p,
    )


def options_of(problem: AttentionProblem, backend: str, tuning: LaunchConfig | None = None) -> tuple:
    """The option arguments of the operators, in the order of their schema."""
    mask = problem.mask
    return (
        problem.softmax_scale,
        mask.window_left,
        mask.window_right,
        problem.softcap,
        problem.deterministic,
        backend,
        None if tuning is None else tuning.text,
    )


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, options = AttentionInputs(*args[:NUM_INPUTS]), args[NUM_INPUTS:]
    return forward_on(options[-2], options[-1], problem_of(inputs, options), inputs)


def forward_on(
    backend_argument: str, tuning: str | None, problem: AttentionProblem, inputs: Inputs | QuantizedInputs
) -> tuple[Tensor, Tensor]:
    """out and lse of an operator.

    Args:
        backend_argument: see `choice.backend_argument`. tuning: a configuration as text, or None.
    """
    backend = choice.backend_name(backend_argument)
    config = None if tuning is None else backends.config_type(backend).from_text(tuning)
    backend = dispatch.backend_at_run(backend_argument, problem, config, inputs.q.device)
    if is_recording():
        ahead.compile_with_backward(backend, problem, inputs.q.device, config)
    with without_autocast(problem.device_type):
        return dispatch.prepare(backend, problem, inputs.q.device, config)(inputs)


@torch.library.register_fake(qualified("attention_forward"))
def forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, options = AttentionInputs(*args[:NUM_INPUTS]), args[NUM_INPUTS:]
    return empty_outputs(problem_of(inputs, options), inputs)


def _backward(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs, options = AttentionInputs(*args[:NUM_INPUTS]), args[NUM_INPUTS:]
    problem = problem_of(inputs, options)
    dout = torch.zeros_like(out) if dout is None else dout
    with without_autocast(problem.device_type):
        module = dispatch.load_backward(choice.backend_name(options[-2]), problem)
        return module.backward(problem, inputs, out, lse, dout, dlse)


@torch.library.register_fake(qualified("attention_backward"))
def _backward_fake(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_gradients(AttentionInputs(*args[:NUM_INPUTS]))


def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs[:NUM_INPUTS])
    ctx.options = inputs[NUM_INPUTS:]


def autograd_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    no_grads = (None,) * (NUM_INPUTS - 4 + len(ctx.options))
    if dout is None and dlse is None:
        return (None, None, None, None, *no_grads)
    out, lse, *inputs = ctx.saved_tensors
    dq, dk, dv, dsinks = OPERATORS.attention_backward(dout, dlse, out, lse, *inputs, *ctx.options)
    return (dq, dk, dv, None if inputs[3] is None else dsinks, *no_grads)


torch.library.impl(qualified("attention_forward"), "default")(_forward)
register_gradient("attention_forward", _forward, autograd_backward, setup_context)


def refuse_double_backward(ctx: Any, *grads: Any) -> None:
    raise UnsupportedError("onepass attention has no second derivative: expected one backward pass, got backward twice")


torch.library.impl(qualified("attention_backward"), "default")(_backward)
register_gradient("attention_backward", _backward, refuse_double_backward)


def refuse_vmap(info: Any, in_dims: Any, *args: Any) -> None:
    raise UnsupportedError(
        "onepass attention cannot run under torch.vmap: it already takes a batch; "
        "pass the mapped dimension as the batch dimension instead (torch.func.jacrev needs no vmap with chunk_size=1)"
    )


for _name in ("attention_forward", "attention_backward"):
    torch.library.register_vmap(qualified(_name), refuse_vmap)


@register_flop_formula(OPERATORS.attention_forward, get_raw=True)
def forward_flops(*args: Any, out_val: Any = None) -> int:
    inputs, options = AttentionInputs(*args[:NUM_INPUTS]), args[NUM_INPUTS:]
    return flops_of(inputs, options, inputs.v.shape[-1])


def flops_of(inputs: Inputs | QuantizedInputs, options: tuple, head_dim_v: int) -> int:
    """The FLOPs of a forward, two GEMMs over the visible pairs: Q K^T over head_dim and P V over head_dim_v."""
    pairs = visible_pairs(inputs, options[1], options[2]) * inputs.q.shape[-2]
    return 2 * pairs * (inputs.q.shape[-1] + head_dim_v)


@register_flop_formula(OPERATORS.attention_backward, get_raw=True)
def backward_flops(*args: Any, out_val: Any = None) -> int:
    """The FLOPs of a backward, five GEMMs over visible pairs: S, dQ, dK over head_dim and dP, dV over head_dim_v."""
    inputs, options = AttentionInputs(*args[4 : 4 + NUM_INPUTS]), args[4 + NUM_INPUTS :]
    pairs = visible_pairs(inputs, options[1], options[2]) * inputs.q.shape[-2]
    return 2 * pairs * (3 * inputs.q.shape[-1] + 2 * inputs.v.shape[-1])

"""The torch operators behind `attention`: onepass::attention_forward and onepass::attention_backward.

Each has an implementation for any device (dispatch loads the backend that was chosen before the call) and a fake for
tracing; the forward has an autograd rule. They are defined with `torch.library.define`, which costs less per call than
`custom_op`. Calls with modifiers have operators of their own, onepass::attention_modified_forward and _backward, so
that ordinary calls have short lists of arguments.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..dispatch import ahead, backends, choice
from ..dispatch import attention as dispatch
from ..errors import UnsupportedError
from ..geometry.visible_pairs import visible_pairs
from ..kernels.config import LaunchConfig
from ..namespace import OPERATORS, qualified
from ..problem import AttentionInputs, AttentionProblem, Blocks, Mask, Modifiers, Quantization
from ..problem.arguments import TENSORS
from ..problem.outputs import empty_gradients, empty_outputs
from . import schema
from .autocast import without_autocast
from .gradient_rule import is_direct, is_recording, register_gradient


class Options(NamedTuple):
    """The arguments of the operators after the tensors.

    Attributes:
        backend: see `choice.backend_argument`. tuning: a configuration as text, or None.
    """

    softmax_scale: float
    window_left: int | None
    window_right: int | None
    softcap: float | None
    deterministic: bool
    backend: str
    tuning: str | None


NUM_INPUTS = AttentionInputs._fields.index("modifiers")
NUM_OPTIONS = len(Options._fields)
INPUTS, OPTIONS = schema.arguments(AttentionInputs, NUM_INPUTS), schema.arguments(Options)
_FIRST_MODIFIERS = tuple(name for name in Modifiers._fields if name not in schema.LATER)
_NUM_TENSORS = NUM_INPUTS + len(_FIRST_MODIFIERS)
_NUM_ARGUMENTS = _NUM_TENSORS + 1 + NUM_OPTIONS
_BLOCKS = (
    "Tensor? block_kinds=None, SymInt q_block=0, SymInt kv_block=0, Tensor? block_bits=None, SymInt[]? most_blocks=None"
)
_LATER = f"{schema.tensors(schema.LATER)}, {_BLOCKS}"
_MODIFIED = f"{INPUTS}, {schema.tensors(_FIRST_MODIFIERS)}, float dropout_p, {OPTIONS}, {_LATER}"
TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
_RESULTS = "Tensor? dout, Tensor? dlse, Tensor out, Tensor lse"
_GRADIENTS = "Tensor dq, Tensor dk, Tensor dv, Tensor dsinks"
# the places of the tensors that have a gradient, among those of `_MODIFIED`
_TERMS = tuple(
    NUM_INPUTS + i for i, name in enumerate(_FIRST_MODIFIERS) if name in TENSORS and TENSORS[name].has_gradient
)
_PLACES = 0, 1, 2, 3, *_TERMS

for _name, _signature in (
    ("attention_forward", f"({INPUTS}, {OPTIONS}) -> (Tensor out, Tensor lse)"),
    ("attention_backward", f"({_RESULTS}, {INPUTS}, {OPTIONS}) -> ({_GRADIENTS})"),
    ("attention_modified_forward", f"({_MODIFIED}) -> (Tensor out, Tensor lse)"),
    (
        "attention_modified_backward",
        f"({_RESULTS}, bool constant_slopes, bool constant_bias, {_MODIFIED})"
        f" -> ({_GRADIENTS}, Tensor dslopes, Tensor dbias)",
    ),
):
    torch.library.define(qualified(_name), _signature, tags=TAGS)


def problem_of(
    inputs: AttentionInputs,
    options: Options,
    quantization: Quantization | None = None,
    dropout_p: float = 0.0,
) -> AttentionProblem:
    """The problem of a call of the operators."""
    return AttentionProblem.of(
        inputs,
        softmax_scale=options.softmax_scale,
        mask=Mask(options.window_left, options.window_right),
        softcap=options.softcap,
        deterministic=options.deterministic,
        quantization=quantization,
        dropout_p=dropout_p,
    )


def options_of(problem: AttentionProblem, backend: str, tuning: LaunchConfig | None = None) -> Options:
    """The arguments of the operators after the tensors."""
    mask = problem.mask
    return Options(
        problem.softmax_scale,
        mask.window_left,
        mask.window_right,
        problem.softcap,
        problem.deterministic,
        backend,
        None if tuning is None else tuning.text,
    )


def arguments_of(inputs: AttentionInputs, problem: AttentionProblem, options: Options) -> tuple:
    """The arguments of the forward, of the operator with modifiers if there are any."""
    if inputs.modifiers is None:
        return (*inputs[:NUM_INPUTS], *options)
    first, later = schema.split(inputs.modifiers._asdict())
    if inputs.blocks is not None:
        kinds, size, bits, most = inputs.blocks
        later = [inputs.modifiers.query_ranges, kinds, *size, bits, most]
    return (*inputs[:NUM_INPUTS], *first, problem.dropout_p, *options, *later)


def _unpacked(args: tuple) -> tuple[AttentionInputs, AttentionProblem, Options]:
    """The tensors, the problem and the options of a forward, with or without modifiers."""
    if len(args) <= NUM_INPUTS + NUM_OPTIONS:
        inputs, options = AttentionInputs(*args[:NUM_INPUTS]), Options(*args[NUM_INPUTS:])
        return inputs, problem_of(inputs, options), options
    dropout_p, *given = args[_NUM_TENSORS:_NUM_ARGUMENTS]
    later, of_blocks = args[_NUM_ARGUMENTS:][:1], args[_NUM_ARGUMENTS + 1 :]
    modifiers = schema.joined(_FIRST_MODIFIERS, args[NUM_INPUTS:_NUM_TENSORS], later)
    has_blocks = bool(of_blocks) and of_blocks[0] is not None
    blocks = Blocks(of_blocks[0], of_blocks[1:3], *of_blocks[3:]) if has_blocks else None
    inputs = AttentionInputs._make((*args[:NUM_INPUTS], Modifiers(**modifiers), None, blocks))
    options = Options(*given)
    return inputs, problem_of(inputs, options, dropout_p=dropout_p), options


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, problem, options = _unpacked(args)
    return forward_on(options.backend, options.tuning, problem, inputs)


def forward_on(
    backend_argument: str, tuning: str | None, problem: AttentionProblem, inputs: AttentionInputs
) -> tuple[Tensor, Tensor]:
    """out and lse of an operator. Args: as in `Options`."""
    backend = choice.backend_name(backend_argument)
    config = None if tuning is None else backends.config_type(backend).from_text(tuning)
    backend = dispatch.backend_at_run(backend_argument, problem, config, inputs.q.device)
    if is_recording():
        ahead.compile_with_backward(backend, problem, inputs.q.device, config)
    with without_autocast(problem.device_type):
        return dispatch.prepare(backend, problem, inputs.q.device, config)(inputs)


def forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, problem, _ = _unpacked(args)
    return empty_outputs(problem, inputs)


def _backward(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs, problem, options = _unpacked(args)
    dout = torch.zeros_like(out) if dout is None else dout
    with without_autocast(problem.device_type):
        module = dispatch.load_backward(choice.backend_name(options.backend), problem)
        return module.backward(problem, inputs, out, lse, dout, dlse)


def _backward_fake(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_gradients(AttentionInputs(*args[:NUM_INPUTS]))


def _modified_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    constant_slopes: bool,
    constant_bias: bool,
    *args: Any,
) -> tuple[Tensor, ...]:
    """Args: constant_slopes, constant_bias: their gradient is not computed, and has a size of 0."""
    inputs, problem, options = _unpacked(args)
    constant_slopes, constant_bias = problem.has_alibi and constant_slopes, problem.has_bias and constant_bias
    problem = replace(problem, constant_slopes=constant_slopes, constant_bias=constant_bias)
    dout = torch.zeros_like(out) if dout is None else dout
    with without_autocast(problem.device_type):
        module = dispatch.load_backward(choice.backend_name(options.backend), problem)
        *found, dslopes, dbias = module.gradients(problem, inputs, out, lse, dout, dlse)
    terms = (None if constant_slopes else dslopes), (None if constant_bias else dbias)
    return (*found, *(out.new_empty(0) if gradient is None else gradient for gradient in terms))


def _modified_backward_fake(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    constant, tensors = args[: len(_TERMS)], args[len(_TERMS) :]
    terms = (None if is_constant else tensors[place] for is_constant, place in zip(constant, _TERMS, strict=True))
    dense = torch.contiguous_format
    like = (out.new_empty(0) if t is None else torch.empty_like(t, memory_format=dense) for t in terms)
    return (*empty_gradients(AttentionInputs(*tensors[:NUM_INPUTS])), *like)


def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    has_modifiers = len(inputs) > NUM_INPUTS + NUM_OPTIONS
    count = _NUM_TENSORS if has_modifiers else NUM_INPUTS
    ctx.options = inputs[count:_NUM_ARGUMENTS]
    later = inputs[_NUM_ARGUMENTS:]
    ctx.are_tensors = [isinstance(given, Tensor) for given in later]
    ctx.others = [None if is_tensor else given for is_tensor, given in zip(ctx.are_tensors, later, strict=True)]
    ctx.save_for_backward(*output, *inputs[:count], *itertools.compress(later, ctx.are_tensors))
    if has_modifiers:
        ctx.constant = tuple(t is not None and not t.requires_grad for t in (inputs[place] for place in _TERMS))


def autograd_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    out, lse, *tensors = ctx.saved_tensors
    first = len(tensors) - sum(ctx.are_tensors)
    tensors, saved = tensors[:first], iter(tensors[first:])
    gradients: list[Tensor | None] = [None] * (len(tensors) + len(ctx.options) + len(ctx.others))
    if dout is None and dlse is None:
        return tuple(gradients)
    goes_directly = is_direct(dout, dlse, out, *tensors[:3])
    if len(tensors) == NUM_INPUTS:
        run = _backward if goes_directly else OPERATORS.attention_backward
        found = run(dout, dlse, out, lse, *tensors, *ctx.options)
        gradients[:4] = found if tensors[3] is not None else (*found[:3], None)
        return tuple(gradients)
    run = _modified_backward if goes_directly else OPERATORS.attention_modified_backward
    later = (next(saved) if is_tensor else other for is_tensor, other in zip(ctx.are_tensors, ctx.others, strict=True))
    found = run(dout, dlse, out, lse, *ctx.constant, *tensors, *ctx.options, *later)
    for place, gradient, is_constant in zip(_PLACES, found, (False,) * 4 + ctx.constant, strict=True):
        if tensors[place] is not None and not is_constant:
            gradients[place] = gradient
    return tuple(gradients)


def refuse_double_backward(ctx: Any, *grads: Any) -> None:
    raise UnsupportedError("onepass attention has no second derivative: expected one backward pass, got backward twice")


def refuse_vmap(info: Any, in_dims: Any, *args: Any) -> None:
    raise UnsupportedError(
        "onepass attention cannot run under torch.vmap: it already takes a batch; "
        "pass the mapped dimension as the batch dimension instead (torch.func.jacrev needs no vmap with chunk_size=1)"
    )


def forward_flops(*args: Any, out_val: Any = None) -> int:
    """The FLOPs of a forward; what other than the window hides pairs is not looked at."""
    inputs, problem, _ = _unpacked(args)
    return flops_of(inputs, problem)


def flops_of(
    inputs: AttentionInputs, problem: AttentionProblem, over_head_dim: int = 1, over_head_dim_v: int = 1
) -> int:
    """The FLOPs of GEMMs over the visible pairs.

    Args:
        over_head_dim, over_head_dim_v: the number of GEMMs, in a forward Q K^T over head_dim and P V over head_dim_v.
    """
    mask = problem.mask
    pairs = visible_pairs(inputs, mask.window_left, mask.window_right) * problem.num_heads_q
    return 2 * pairs * (over_head_dim * problem.head_dim + over_head_dim_v * problem.head_dim_v)


def _backward_flops(*args: Any, out_val: Any = None) -> int:
    """The FLOPs of a backward, five GEMMs over visible pairs: S, dQ, dK over head_dim and dP, dV over head_dim_v."""
    inputs, problem, _ = _unpacked(args[4:])
    return flops_of(inputs, problem, 3, 2)


def _modified_backward_flops(*args: Any, out_val: Any = None) -> int:
    return _backward_flops(*args[len(_TERMS) :])


def register(name: str, implementation: Any, fake: Any, flops: Any = None) -> None:
    """Give the operator onepass::name its implementation, its fake, its refusal of vmap, and its FLOPs."""
    torch.library.impl(qualified(name), "default")(implementation)
    torch.library.register_fake(qualified(name))(fake)
    torch.library.register_vmap(qualified(name), refuse_vmap)
    if flops is not None:
        register_flop_formula(getattr(OPERATORS, name), get_raw=True)(flops)


for _prefix, _derivative, _fake, _flops in (
    ("attention", _backward, _backward_fake, _backward_flops),
    ("attention_modified", _modified_backward, _modified_backward_fake, _modified_backward_flops),
):
    register(f"{_prefix}_forward", _forward, forward_fake, forward_flops)
    register_gradient(f"{_prefix}_forward", _forward, autograd_backward, setup_context)
    register(f"{_prefix}_backward", _derivative, _fake, _flops)
    register_gradient(f"{_prefix}_backward", _derivative, refuse_double_backward)

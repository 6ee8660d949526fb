"""The torch operators of FP8: onepass::attention_fp8 quantizes its inputs, onepass::attention_quantized takes e4m3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..namespace import OPERATORS, qualified
from ..problem import AttentionInputs, Descales, Quantization, QuantizedInputs
from ..problem.outputs import empty_outputs
from . import attention, quantize
from .gradient_rule import register_gradient

# All of attention(..., precision="fp8"). The options are those of the same call without precision, and their backend
# is the one that computes the gradients. Where gradients are recorded, the operator below autograd has exact_lse.
torch.library.define(
    qualified("attention_fp8"),
    f"({attention.INPUTS}, {attention.OPTIONS}, str forward_backend, bool exact_lse) -> (Tensor out, Tensor lse)",
    tags=attention.TAGS,
)
_DESCALES = "Tensor q_descale, Tensor k_descale, Tensor v_descale"
_QUANTIZATION = "ScalarType out_dtype, SymInt? q_block, SymInt? kv_block, bool v_keys_last, bool exact_lse"
_NUM_OPTIONS = attention.OPTIONS.count(",") + 1
_NUM_DESCALES = len(Descales._fields)
torch.library.define(
    qualified("attention_quantized"),
    f"({attention.INPUTS}, {attention.OPTIONS}, {_DESCALES}, {_QUANTIZATION}) -> (Tensor out, Tensor lse)",
    tags=attention.TAGS,
)


def _fp8(*args: Any) -> tuple[Tensor, Tensor]:
    inputs = AttentionInputs(*args[: attention.NUM_INPUTS])
    *options, forward_backend, exact_lse = args[attention.NUM_INPUTS :]
    problem = attention.problem_of(inputs, tuple(options))
    problem, quantized_inputs = quantize.quantized_call(problem, inputs, exact_lse)
    return attention.forward_on(forward_backend, options[-1], problem, quantized_inputs)


@torch.library.register_fake(qualified("attention_fp8"))
def _fp8_fake(*args: Any) -> tuple[Tensor, Tensor]:
    return attention.forward_fake(*args[:-2])


def _setup_context_fp8(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    attention.setup_context(ctx, inputs[:-2], output)


def _autograd_backward_fp8(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    """The gradients of exact attention at the unquantized inputs, from out and lse of the FP8 forward."""
    return (*attention.autograd_backward(ctx, dout, dlse), None, None)


torch.library.impl(qualified("attention_fp8"), "default")(_fp8)
register_gradient(
    "attention_fp8", _fp8, _autograd_backward_fp8, _setup_context_fp8, recorded=lambda *args: (*args[:-1], True)
)


def _split_quantized(args: tuple) -> tuple[QuantizedInputs, tuple, Quantization]:
    q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k = args[: attention.NUM_INPUTS]
    options, after_options = _split_at(args[attention.NUM_INPUTS :], _NUM_OPTIONS)
    descales, quantization = _split_at(after_options, _NUM_DESCALES)
    inputs = QuantizedInputs(q, k, v, Descales(*descales), sinks, cu_seqlens_q, cu_seqlens_k, seqused_k)
    return inputs, options, Quantization(*quantization)


def _split_at(args: tuple, count: int) -> tuple[tuple, tuple]:
    return args[:count], args[count:]


@torch.library.impl(qualified("attention_quantized"), "default")
def _quantized(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, options, quantization = _split_quantized(args)
    return attention.forward_on(options[-2], options[-1], attention.problem_of(inputs, options, quantization), inputs)


@torch.library.register_fake(qualified("attention_quantized"))
def _quantized_fake(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, options, quantization = _split_quantized(args)
    return empty_outputs(attention.problem_of(inputs, options, quantization), inputs)


for _name in ("attention_fp8", "attention_quantized"):
    torch.library.register_vmap(qualified(_name), attention.refuse_vmap)

register_flop_formula(OPERATORS.attention_fp8, get_raw=True)(attention.forward_flops)


@register_flop_formula(OPERATORS.attention_quantized, get_raw=True)
def _quantized_flops(*args: Any, out_val: Any = None) -> int:
    inputs, options, quantization = _split_quantized(args)
    return attention.flops_of(inputs, options, attention.problem_of(inputs, options, quantization).head_dim_v)

"""The torch operators of FP8: onepass::attention_fp8 rounds its inputs, onepass::attention_quantized takes e4m3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..problem import AttentionInputs, Descales, Quantization, QuantizedInputs
from ..problem.outputs import empty_outputs
from . import attention, quantize
from .gradient_rule import register_gradient

# the whole of precision="fp8": options are those of the call in 16 bits, backend that of its gradients
torch.library.define(
    "onepass::attention_fp8",
    f"({attention.INPUTS}, {attention.OPTIONS}, str forward_backend) -> (Tensor out, Tensor lse)",
    tags=attention.TAGS,
)
_QUANTIZATION = (
    "Tensor q_descale, Tensor k_descale, Tensor v_descale, ScalarType out_dtype, SymInt? q_block, SymInt? kv_block, "
    "bool v_keys_last"
)
torch.library.define(
    "onepass::attention_quantized",
    f"({attention.INPUTS}, {attention.OPTIONS}, {_QUANTIZATION}) -> (Tensor out, Tensor lse)",
    tags=attention.TAGS,
)


@torch.library.impl("onepass::attention_fp8", "default")
def _fp8(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, options, backend = AttentionInputs(*args[: attention.NUM_INPUTS]), args[attention.NUM_INPUTS : -1], args[-1]
    return attention.forward_on(
        backend, options[-1], *quantize.quantized_call(attention.problem_of(inputs, options), inputs)
    )


@torch.library.register_fake("onepass::attention_fp8")
def _fp8_fake(*args: Any) -> tuple[Tensor, Tensor]:
    return attention.forward_fake(*args[:-1])


def _setup_context_fp8(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    attention.setup_context(ctx, inputs[:-1], output)


def _autograd_backward_fp8(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    """The gradients of exact attention at the 16-bit inputs, with out and lse of the FP8 forward."""
    return (*attention.autograd_backward(ctx, dout, dlse), None)


register_gradient("attention_fp8", _autograd_backward_fp8, _setup_context_fp8)


def _split_quantized(args: tuple) -> tuple[QuantizedInputs, tuple, Quantization]:
    options, descales, quantization = args[attention.NUM_INPUTS : -7], Descales(*args[-7:-4]), Quantization(*args[-4:])
    q, k, v, *others = args[: attention.NUM_INPUTS]
    return QuantizedInputs(q, k, v, descales, *others), options, quantization


@torch.library.impl("onepass::attention_quantized", "default")
def _quantized(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, options, quantization = _split_quantized(args)
    return attention.forward_on(options[-2], options[-1], attention.problem_of(inputs, options, quantization), inputs)


@torch.library.register_fake("onepass::attention_quantized")
def _quantized_fake(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, options, quantization = _split_quantized(args)
    return empty_outputs(attention.problem_of(inputs, options, quantization), inputs)


for _name in ("attention_fp8", "attention_quantized"):
    torch.library.register_vmap(f"onepass::{_name}", attention.refuse_vmap)

register_flop_formula(torch.ops.onepass.attention_fp8, get_raw=True)(attention.forward_flops)


@register_flop_formula(torch.ops.onepass.attention_quantized, get_raw=True)
def _quantized_flops(*args: Any, out_val: Any = None) -> int:
    inputs, options, quantization = _split_quantized(args)
    return attention.flops_of(inputs, options, attention.problem_of(inputs, options, quantization).head_dim_v)

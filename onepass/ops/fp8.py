"""The torch operators of FP8: onepass::attention_fp8 quantizes its inputs, onepass::attention_quantized takes e4m3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..namespace import qualified
from ..problem import AttentionInputs, AttentionProblem, Descales, Quantization
from ..problem.outputs import empty_outputs
from . import attention, quantize, schema
from .attention import NUM_INPUTS, NUM_OPTIONS
from .gradient_rule import register_gradient

# All of attention(..., precision="fp8"). The options are those of the same call without precision, and their backend
# is the one that computes the gradients. Where gradients are recorded, the operator below autograd has exact_lse.
torch.library.define(
    qualified("attention_fp8"),
    f"({attention.INPUTS}, {attention.OPTIONS}, str forward_backend, bool exact_lse) -> (Tensor out, Tensor lse)",
    tags=attention.TAGS,
)
_QUANTIZATION = f"Tensor q_descale, Tensor k_descale, Tensor v_descale, {schema.arguments(Quantization)}"
torch.library.define(
    qualified("attention_quantized"),
    f"({attention.INPUTS}, {attention.OPTIONS}, {_QUANTIZATION}) -> (Tensor out, Tensor lse)",
    tags=attention.TAGS,
)


def _fp8(*args: Any) -> tuple[Tensor, Tensor]:
    inputs = AttentionInputs(*args[:NUM_INPUTS])
    *given, forward_backend, exact_lse = args[NUM_INPUTS:]
    options = attention.Options(*given)
    problem, inputs = quantize.quantized_call(attention.problem_of(inputs, options), inputs, exact_lse)
    return attention.forward_on(forward_backend, options.tuning, problem, inputs)


def _fp8_fake(*args: Any) -> tuple[Tensor, Tensor]:
    return attention.forward_fake(*args[:-2])


def _fp8_flops(*args: Any, out_val: Any = None) -> int:
    return attention.forward_flops(*args[:-2])


def _setup_context_fp8(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    attention.setup_context(ctx, inputs[:-2], output)


def _autograd_backward_fp8(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    """The gradients of exact attention at the unquantized inputs, from out and lse of the FP8 forward."""
    return (*attention.autograd_backward(ctx, dout, dlse), None, None)


def arguments_of(inputs: AttentionInputs, quantization: Quantization, options: attention.Options) -> tuple:
    """The arguments of onepass::attention_quantized."""
    assert inputs.descales is not None
    q = quantization
    layout = q.out_dtype, q.q_block, q.kv_block, q.v_keys_last, q.exact_lse
    return (*inputs[:NUM_INPUTS], *options, *inputs.descales, *layout)


def _unpacked(args: tuple) -> tuple[AttentionInputs, AttentionProblem, attention.Options]:
    options, rest = attention.Options(*args[NUM_INPUTS:][:NUM_OPTIONS]), args[NUM_INPUTS + NUM_OPTIONS :]
    count = len(Descales._fields)
    inputs = AttentionInputs._make((*args[:NUM_INPUTS], None, Descales(*rest[:count]), None))
    return inputs, attention.problem_of(inputs, options, Quantization(*rest[count:])), options


def _quantized(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, problem, options = _unpacked(args)
    return attention.forward_on(options.backend, options.tuning, problem, inputs)


def _quantized_fake(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, problem, _ = _unpacked(args)
    return empty_outputs(problem, inputs)


def _quantized_flops(*args: Any, out_val: Any = None) -> int:
    inputs, problem, _ = _unpacked(args)
    return attention.flops_of(inputs, problem)


attention.register("attention_fp8", _fp8, _fp8_fake, _fp8_flops)
register_gradient(
    "attention_fp8", _fp8, _autograd_backward_fp8, _setup_context_fp8, recorded=lambda *args: (*args[:-1], True)
)
attention.register("attention_quantized", _quantized, _quantized_fake, _quantized_flops)

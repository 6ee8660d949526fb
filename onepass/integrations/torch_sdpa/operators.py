"""Functions with the arguments and results of aten's attention operators.

In `_scaled_dot_product_*` tensors are (batch, heads, seqlen, head_dim) and a causal mask is aligned at the top left; in
`_flash_attention_*` and `_cudnn_attention_*` they are (batch, seqlen, heads, head_dim), or packed sequences, and the
mask is aligned at the bottom right. Results have the shapes, dtypes and strides of torch's meta functions
(torch/_meta_registrations.py), which compiled code relies on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api import attention as api
from ...errors import UnsupportedError
from ...ops.quantize import QuantizedQKV
from . import calls
from .calls import Call, NotOurs

__all__ = ["NotOurs", "functions"]


class Arguments(NamedTuple):
    """The arguments of an operator by their names in aten. Those that it does not have keep their defaults."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Any = None
    out: Any = None
    logsumexp: Any = None
    rng_state: Any = None
    philox_seed: Any = None
    attn_bias: Tensor | None = None
    attn_mask: Tensor | None = None
    cum_seq_q: Tensor | None = None
    cum_seq_k: Tensor | None = None
    max_q: Any = None
    max_k: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    window_size_left: int | None = None
    window_size_right: int | None = None
    seqused_k: Tensor | None = None
    alibi_slopes: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None


_FIELDS = frozenset(Arguments._fields)
_WITHOUT_EFFECT = frozenset({"compute_log_sumexp", "num_splits", "philox_offset", "unused"})
_OPERATORS: dict[str, Callable] = {}


def functions(device: str) -> dict[str, Callable]:
    """The functions for a type of device, by the name of the operator, without its namespace."""
    others = "cudnn" if device == "cpu" else "for_cpu"
    return {name: function for name, function in _OPERATORS.items() if others not in name}


def _operator(name: str) -> Callable[[Callable[[Arguments], Any]], Callable]:
    """Let a function be called as an operator is, and register it."""

    def decorate(function: Callable[[Arguments], Any]) -> Callable:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            given = dict(zip(_names(name), args, strict=False)) | options
            for other in given.keys() - _FIELDS:  # a newer torch may have more
                value = given.pop(other)
                if value is not None and value is not False and other not in _WITHOUT_EFFECT:
                    # without the value, which differs from call to call: there is one warning for each reason
                    expected, got = ("False", "True") if value is True else ("None", type(value).__name__)
                    raise UnsupportedError(f"{other}: expected {expected}, got {got}")
            return function(Arguments(**given))

        _OPERATORS[name] = run
        return run

    return decorate


@functools.cache
def _names(operator: str) -> list[str]:
    name, _, overload = operator.partition(".")
    return [argument.name for argument in torch._C._get_schema(f"aten::{name}", overload).arguments]


# ---------------------------------------------------------------- (batch, heads, seqlen, head_dim)


def _heads_second(*tensors: Tensor) -> list[Tensor]:
    """(batch, heads, seqlen, head_dim) <-> (batch, seqlen, heads, head_dim): views."""
    return [t.transpose(1, 2) for t in tensors]


def _sdpa_call(a: Arguments) -> Call:
    """The call of `_scaled_dot_product_*`, whose causal mask is aligned at the top left."""
    window = (None, a.query.shape[2] - a.key.shape[2]) if a.is_causal else (None, None)
    bias = a.attn_mask if a.attn_bias is None else a.attn_bias
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]
    return Call(window=window, scale=a.scale, dropout_p=a.dropout_p, bias=bias)


def _sdpa_forward(a: Arguments) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse, and with dropout the random state."""
    out, lse, state = calls.forward(_sdpa_call(a), *_heads_second(a.query, a.key, a.value))
    return out.transpose(1, 2), lse, state


def _sdpa_backward(a: Arguments, lse: Tensor, state: Tensor | None) -> tuple:
    q, k, v, out, dout = _heads_second(a.query, a.key, a.value, a.out, a.grad_out)
    return tuple(_heads_second(*calls.backward(_sdpa_call(a), q, k, v, out, dout, lse, state)))


@_operator("_scaled_dot_product_flash_attention")
def sdpa_flash(a: Arguments) -> tuple:
    _refuse_other_head_dim_v(a)
    out, lse, state = _sdpa_forward(a)
    rng, offset = calls.marked(state, out.device)
    return out, lse, None, None, a.query.shape[2], a.key.shape[2], rng, offset, a.query.new_empty(0)


@_operator("_scaled_dot_product_flash_attention_backward")
def sdpa_flash_backward(a: Arguments) -> tuple:
    return _sdpa_backward(a, a.logsumexp, calls.state_of(a.philox_seed, a.dropout_p))


@_operator("_scaled_dot_product_cudnn_attention")
def sdpa_cudnn(a: Arguments) -> tuple:
    out, lse, state = _sdpa_forward(a)
    seed, offset = calls.marked_numbers(state, out.device)
    return out, lse[..., None], None, None, a.query.shape[2], a.key.shape[2], seed, offset, None


@_operator("_scaled_dot_product_cudnn_attention_backward")
def sdpa_cudnn_backward(a: Arguments) -> tuple:
    return _sdpa_backward(a, a.logsumexp[..., 0], calls.state_of(a.philox_seed, a.dropout_p, must_be_marked=True))


@_operator("_scaled_dot_product_flash_attention_for_cpu")
def sdpa_cpu(a: Arguments) -> tuple[Tensor, Tensor]:
    _refuse_dropout(a)
    _refuse_other_head_dim_v(a)
    out, lse, _ = _sdpa_forward(a)
    # heads are innermost in memory, as in the lse of torch's own kernel
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


@_operator("_scaled_dot_product_flash_attention_for_cpu_backward")
def sdpa_cpu_backward(a: Arguments) -> tuple:
    _refuse_dropout(a)
    # heads stand behind the sequence in memory, as in the gradients of torch's own kernel
    return tuple(_heads_second(*(t.contiguous() for t in _heads_second(*_sdpa_backward(a, a.logsumexp, None)))))


def _refuse_dropout(a: Arguments) -> None:
    if a.dropout_p:
        raise UnsupportedError(f"dropout_p: expected 0, since the operator returns no random state, got {a.dropout_p}")


def _refuse_other_head_dim_v(a: Arguments) -> None:
    if a.query.shape[-1] != a.value.shape[-1]:
        raise UnsupportedError(f"value: expected query's head_dim {a.query.shape[-1]}, got {a.value.shape[-1]}")


# ---------------------------------------------------------------- (batch, seqlen, heads, head_dim), packed sequences


def _window(a: Arguments) -> tuple[int | None, int | None]:
    """The window of flash-attn's arguments, in which a negative side is unbounded."""
    sides = a.window_size_left, a.window_size_right
    left, right = (None if side is None or side < 0 else side for side in sides)
    return left, 0 if a.is_causal else right


def _call(a: Arguments) -> Call:
    """The call of `_flash_attention_*` and `_cudnn_attention_*`."""
    return Call(
        window=_window(a),
        scale=a.scale,
        dropout_p=a.dropout_p,
        cu_seqlens=(a.cum_seq_q, a.cum_seq_k),
        seqused_k=a.seqused_k,
        alibi_slopes=a.alibi_slopes,
    )


@_operator("_flash_attention_forward")
def flash_forward(a: Arguments) -> tuple:
    _refuse_other_head_dim_v(a)
    out, lse, state = calls.forward(_call(a), a.query, a.key, a.value)
    rng, offset = calls.marked(state, out.device)
    return out, lse, rng, offset, a.query.new_empty(0)


@_operator("_flash_attention_forward_no_dropout_inplace")
def flash_forward_inplace(a: Arguments) -> Tensor:
    _refuse_other_head_dim_v(a)
    out, lse, _ = calls.forward(_call(a), a.query, a.key, a.value)
    a.out.copy_(out)
    return lse


@_operator("_flash_attention_backward")
def flash_backward(a: Arguments) -> tuple:
    state = calls.state_of(a.rng_state, a.dropout_p)
    return calls.backward(_call(a), a.query, a.key, a.value, a.out, a.grad_out, a.logsumexp, state)


@_operator("_cudnn_attention_forward")
def cudnn_forward(a: Arguments) -> tuple:
    """The forward of packed sequences, whose lse is (total, heads, 1)."""
    if a.attn_bias is not None or a.cum_seq_q is None:
        raise UnsupportedError("attn_bias, cum_seq_q: expected packed sequences without a bias")
    out, lse, state = calls.forward(_call(a), a.query, a.key, a.value)
    seed, offset = calls.marked_numbers(state, out.device)
    return out, lse.t().contiguous()[..., None], a.cum_seq_q, a.cum_seq_k, a.max_q, a.max_k, seed, offset, None


@_operator("_cudnn_attention_backward")
def cudnn_backward(a: Arguments) -> tuple:
    state = calls.state_of(a.philox_seed, a.dropout_p, must_be_marked=True)
    lse = a.logsumexp[..., 0].t().contiguous()
    return calls.backward(_call(a), a.query, a.key, a.value, a.out, a.grad_out, lse, state)


# ---------------------------------------------------------------- FP8


@_operator("_scaled_dot_product_flash_attention.quantized")
def sdpa_flash_quantized(a: Arguments) -> tuple:
    max_q, max_k = a.query.shape[2], a.key.shape[2]
    if a.is_causal and max_q != max_k:
        raise UnsupportedError("is_causal: expected False with different lengths in FP8, got True")
    q, k, v = _heads_second(a.query, a.key, a.value)
    out, lse = _attend_quantized(a._replace(query=q, key=k, value=v))
    rng, offset = calls.marked(None, out.device)
    return out.transpose(1, 2), lse, None, None, max_q, max_k, rng, offset, out.new_empty(0)


@_operator("_flash_attention_forward.quantized")
def flash_forward_quantized(a: Arguments) -> tuple:
    out, lse = _attend_quantized(a)
    return out, lse, *calls.marked(None, out.device), out.new_empty(0)


def _attend_quantized(a: Arguments) -> tuple[Tensor, Tensor]:
    for name, value in (("alibi_slopes", a.alibi_slopes), ("dropout_p", a.dropout_p or None)):
        if value is not None:
            raise UnsupportedError(f"{name}: expected None, got {type(value).__name__}")
    one, group = torch.ones((), device=a.query.device), a.query.shape[-2] // max(1, a.key.shape[-2])
    quantized = QuantizedQKV(
        a.query.detach(),
        a.key.detach(),
        a.value.detach(),
        # given for each kv head
        q_descale=one if a.q_descale is None else a.q_descale.repeat_interleave(group, -1),
        k_descale=one if a.k_descale is None else a.k_descale,
        v_descale=one if a.v_descale is None else a.v_descale,
    )
    options: dict[str, Any] = {"softmax_scale": a.scale, "window": _window(a), "return_lse": True}
    if a.cum_seq_q is None:
        if a.seqused_k is not None:
            raise UnsupportedError("seqused_k: expected None in FP8 without cum_seq_q, got a tensor")
        return api.attention(quantized, **options)
    options |= {"cu_seqlens_q": a.cum_seq_q, "cu_seqlens_k": a.cum_seq_k, "seqused_k": a.seqused_k}
    return api.attention_varlen(quantized, max_seqlen_q=a.max_q, max_seqlen_k=a.max_k, **options)

"""Functions with the arguments and results of aten's attention operators.

In `_scaled_dot_product_*` tensors are (batch, heads, seqlen, head_dim) and a causal mask is aligned at the top left; in
`_flash_attention_*` and `_cudnn_attention_*` they are (batch, seqlen, heads, head_dim), or packed sequences, and the
mask is aligned at the bottom right. Results have the shapes, dtypes and strides of torch's meta functions
(torch/_meta_registrations.py), which compiled code relies on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...api import attention as api
from ...errors import UnsupportedError
from ...ops.quantize import QuantizedQKV
from . import calls
from .calls import Call, NotOurs

__all__ = ["NotOurs", "functions"]


def functions(device: str) -> dict[str, Callable]:
    """The functions for a type of device, by the name of the operator, without its namespace."""
    found: dict[str, Callable] = {
        "_flash_attention_forward": flash_forward,
        "_flash_attention_backward": flash_backward,
        "_flash_attention_forward_no_dropout_inplace": flash_forward_inplace,
        "_flash_attention_forward.quantized": flash_forward_quantized,
        "_scaled_dot_product_flash_attention": sdpa_flash,
        "_scaled_dot_product_flash_attention_backward": sdpa_flash_backward,
        "_scaled_dot_product_flash_attention.quantized": sdpa_flash_quantized,
    }
    if device == "cpu":
        return found | {
            "_scaled_dot_product_flash_attention_for_cpu": sdpa_cpu,
            "_scaled_dot_product_flash_attention_for_cpu_backward": sdpa_cpu_backward,
        }
    return found | {
        "_scaled_dot_product_cudnn_attention": sdpa_cudnn,
        "_scaled_dot_product_cudnn_attention_backward": sdpa_cudnn_backward,
        "_cudnn_attention_forward": cudnn_forward,
        "_cudnn_attention_backward": cudnn_backward,
    }


def _refuse_others(options: dict[str, Any]) -> None:
    """Refuse arguments that are given although this function does not know them: a newer torch may have more."""
    for name, value in options.items():
        if value is not None and value is not False:
            # without the value, which differs from call to call: there is one warning for each reason
            raise UnsupportedError(f"{name}: expected None, got {type(value).__name__}")


def _heads_second(*tensors: Tensor) -> list[Tensor]:
    """(batch, heads, seqlen, head_dim) <-> (batch, seqlen, heads, head_dim): views."""
    return [t.transpose(1, 2) for t in tensors]


def _sdpa_call(query: Tensor, key: Tensor, is_causal: bool, bias: Tensor | None = None, **options: Any) -> Call:
    """A call of `_scaled_dot_product_*`, whose causal mask is aligned at the top left."""
    window = (None, query.shape[2] - key.shape[2]) if is_causal else (None, None)
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]
    return Call(window=window, bias=bias, **options)


def _refuse_debug_mask(return_debug_mask: bool) -> None:
    if return_debug_mask:
        raise UnsupportedError("return_debug_mask: expected False, got True")


# ---------------------------------------------------------------- flash attention


def sdpa_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    **others: Any,
) -> tuple:
    _refuse_others(others)
    _refuse_debug_mask(return_debug_mask)
    _refuse_other_head_dim_v(query, value)
    call = _sdpa_call(query, key, is_causal, scale=scale, dropout_p=dropout_p)
    q, k, v = _heads_second(query, key, value)
    out, lse, state = calls.forward(call, q, k, v)
    rng, offset = calls.marked(state, query.device)
    return out.transpose(1, 2), lse, None, None, query.shape[2], key.shape[2], rng, offset, query.new_empty(0)


def sdpa_flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple:
    state = calls.state_of(philox_seed, dropout_p)
    call = _sdpa_call(query, key, is_causal, scale=scale, dropout_p=dropout_p)
    q, k, v, o, dout = _heads_second(query, key, value, out, grad_out)
    return tuple(_heads_second(*calls.backward(call, q, k, v, o, dout, logsumexp, state)))


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    num_splits: int | None = None,
    **others: Any,
) -> tuple:
    _refuse_others(others)
    _refuse_debug_mask(return_debug_mask)
    _refuse_other_head_dim_v(query, value)
    call = Call(
        window=_flash_window(is_causal, window_size_left, window_size_right),
        scale=scale,
        dropout_p=dropout_p,
        cu_seqlens=(cum_seq_q, cum_seq_k),
        seqused_k=seqused_k,
        alibi_slopes=alibi_slopes,
    )
    out, lse, state = calls.forward(call, query, key, value)
    rng, offset = calls.marked(state, query.device)
    return out, lse, rng, offset, query.new_empty(0)


def flash_forward_inplace(out: Tensor, *args: Any, **options: Any) -> Tensor:
    found, lse, *_ = flash_forward(*args, **options)
    out.copy_(found)
    return lse


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple:
    state = calls.state_of(rng_state, dropout_p)
    call = Call(
        window=_flash_window(is_causal, window_size_left, window_size_right),
        scale=scale,
        dropout_p=dropout_p,
        cu_seqlens=(cum_seq_q, cum_seq_k),
    )
    return calls.backward(call, query, key, value, out, grad_out, logsumexp, state)


def _flash_window(is_causal: bool, left: int | None, right: int | None) -> tuple[int | None, int | None]:
    """The window of flash-attn's arguments, in which a negative side is unbounded."""
    left, right = (None if side is None or side < 0 else side for side in (left, right))
    return left, 0 if is_causal else right


def _refuse_other_head_dim_v(query: Tensor, value: Tensor) -> None:
    if query.shape[-1] != value.shape[-1]:
        raise UnsupportedError(f"value: expected query's head_dim {query.shape[-1]}, got {value.shape[-1]}")


# ---------------------------------------------------------------- FP8


def sdpa_flash_quantized(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple:
    if is_causal and query.shape[2] != key.shape[2]:
        raise UnsupportedError("is_causal: expected False with different lengths in FP8, got True")
    q, k, v = _heads_second(query, key, value)
    max_q, max_k = query.shape[2], key.shape[2]
    options = dropout_p, is_causal, return_debug_mask
    descales = q_descale, k_descale, v_descale
    found = flash_forward_quantized(q, k, v, None, None, max_q, max_k, *options, *descales, scale=scale)
    out, lse, rng, offset, mask = found
    return out.transpose(1, 2), lse, None, None, max_q, max_k, rng, offset, mask


def flash_forward_quantized(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    **others: Any,
) -> tuple:
    _refuse_others({**others, "alibi_slopes": alibi_slopes, "dropout_p": dropout_p or None})
    _refuse_debug_mask(return_debug_mask)
    one, group = torch.ones((), device=query.device), query.shape[-2] // max(1, key.shape[-2])
    quantized = QuantizedQKV(
        query.detach(),
        key.detach(),
        value.detach(),
        q_descale=one if q_descale is None else q_descale.repeat_interleave(group, -1),  # given for each kv head
        k_descale=one if k_descale is None else k_descale,
        v_descale=one if v_descale is None else v_descale,
    )
    window = _flash_window(is_causal, window_size_left, window_size_right)
    options: dict[str, Any] = {"softmax_scale": scale, "window": window, "return_lse": True}
    if cum_seq_q is None:
        if seqused_k is not None:
            raise UnsupportedError("seqused_k: expected None in FP8 without cum_seq_q, got a tensor")
        out, lse = api.attention(quantized, **options)
    else:
        options |= {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, "seqused_k": seqused_k}
        out, lse = api.attention_varlen(quantized, max_seqlen_q=max_q, max_seqlen_k=max_k, **options)
    rng, offset = calls.marked(None, query.device)
    return out, lse, rng, offset, out.new_empty(0)


# ---------------------------------------------------------------- cuDNN


def sdpa_cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple:
    _refuse_debug_mask(return_debug_mask)
    call = _sdpa_call(query, key, is_causal, scale=scale, dropout_p=dropout_p, bias=attn_bias)
    q, k, v = _heads_second(query, key, value)
    out, lse, state = calls.forward(call, q, k, v)
    seed, offset = calls.marked_numbers(state, query.device)
    return out.transpose(1, 2), lse[..., None], None, None, query.shape[2], key.shape[2], seed, offset, None


def sdpa_cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple:
    state = calls.state_of(philox_seed, dropout_p, must_be_marked=True)
    call = _sdpa_call(query, key, is_causal, scale=scale, dropout_p=dropout_p, bias=attn_bias)
    q, k, v, o, dout = _heads_second(query, key, value, out, grad_out)
    return tuple(_heads_second(*calls.backward(call, q, k, v, o, dout, logsumexp[..., 0], state)))


def cudnn_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple:
    """The forward of packed sequences, whose lse is (total, heads, 1)."""
    _refuse_debug_mask(return_debug_mask)
    if attn_bias is not None or cum_seq_q is None:
        raise UnsupportedError("attn_bias, cum_seq_q: expected packed sequences without a bias")
    call = Call(
        window=(None, 0 if is_causal else None),
        scale=scale,
        dropout_p=dropout_p,
        cu_seqlens=(cum_seq_q, cum_seq_k),
    )
    out, lse, state = calls.forward(call, query, key, value)
    seed, offset = calls.marked_numbers(state, query.device)
    lse = lse.t().contiguous()[..., None]
    return out, lse, cum_seq_q, cum_seq_k, max_q, max_k, seed, offset, None


def cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple:
    state = calls.state_of(philox_seed, dropout_p, must_be_marked=True)
    call = Call(
        window=(None, 0 if is_causal else None),
        scale=scale,
        dropout_p=dropout_p,
        cu_seqlens=(cum_seq_q, cum_seq_k),
    )
    lse = logsumexp[..., 0].t().contiguous()
    return calls.backward(call, query, key, value, out, grad_out, lse, state)


# ---------------------------------------------------------------- CPU


def sdpa_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    if dropout_p:
        raise UnsupportedError(f"dropout_p: expected 0, since the operator returns no random state, got {dropout_p}")
    _refuse_other_head_dim_v(query, value)
    call = _sdpa_call(query, key, is_causal, scale=scale, bias=attn_mask)
    q, k, v = _heads_second(query, key, value)
    out, lse, _ = calls.forward(call, q, k, v)
    # heads are innermost in memory, as in the lse of torch's own kernel
    heads_last = lse.transpose(1, 2).contiguous().transpose(1, 2)
    return out.transpose(1, 2), heads_last


def sdpa_cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple:
    call = _sdpa_call(query, key, is_causal, scale=scale, bias=attn_mask)
    q, k, v, o, dout = _heads_second(query, key, value, out, grad_out)
    # heads stand behind the sequence in memory, as in the gradients of torch's own kernel
    return tuple(_heads_second(*(t.contiguous() for t in calls.backward(call, q, k, v, o, dout, logsumexp, None))))

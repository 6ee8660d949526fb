"""The private functions of flash-attn 2.8 that rings, pipelines and other libraries call by hand.

They have the arguments of `flash_attn.flash_attn_interface`, and return its tuples:

    _flash_attn_forward, _flash_attn_varlen_forward      out, softmax_lse, S_dmask, rng_state
    _flash_attn_backward, _flash_attn_varlen_backward    softmax_d; dq, dk and dv are written into the given tensors

rng_state is seed and offset of dropout, (2,) int64, and 0 without dropout. None of the functions records a gradient: a
backward through their results raises. The out and softmax_lse that a backward gets may belong to attention over more
keys than its call has, as in rings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...api import attention as api
from ...api import steps
from ...errors import REFUSALS, UnsupportedError, renamed
from ...validation.scalars import check_flag, check_int, check_real
from ...validation.tensors import PACKED_DIMS, check_int32, check_ranks, check_tensor, check_tensors
from .. import conventions, probabilities
from ..flash_attn.functions import NAMES
from ..paged import over_pages
from ..sequences import row_ranges
from .gradients import Buffers, check_buffers, check_results, gradients, into_buffers, padded_rows, row_sums

USE_TRITON_ROCM = False

ForwardResult = tuple[Tensor, Tensor, Tensor, Tensor]


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """The number of keys that share a maximum in S_dmask: all keys of a row."""
    return probabilities.ONE_BLOCK


def _options(
    softmax_scale: Any, causal: Any, left: Any, right: Any, softcap: Any, deterministic: Any = None
) -> dict[str, Any]:
    """The options of `onepass.attention`."""
    options = conventions.options_of(softmax_scale, causal, conventions.pair_of_sides(left, right), softcap)
    options["deterministic"] = check_flag("deterministic", deterministic, allow_none=True) or None
    return options


def _checked_dropout(dropout_p: Any, return_softmax: Any) -> tuple[float, bool]:
    dropout_p, return_softmax = check_real("dropout_p", dropout_p), check_flag("return_softmax", return_softmax)
    if return_softmax and not dropout_p:
        raise ValueError("return_softmax: expected False without dropout, got True")
    return dropout_p, return_softmax


def _forward(
    function: str,
    inputs: tuple[Tensor, Tensor, Tensor],
    lengths: dict[str, Any],
    dropout_p: Any,
    options: dict[str, Any],
    modifiers: dict[str, Any],
    return_softmax: Any,
    starts: Tensor | None = None,
) -> ForwardResult:
    """The forward of a call.

    Args:
        lengths: the lengths of `onepass.attention_varlen`, or {}.
        starts: (batch,) int32, the first key of each sequence; the modifiers hold it, too.
    """
    check_tensors(dict(zip("qkv", inputs, strict=True)))
    q, k, v = conventions.detached(*inputs)
    dropout_p, return_softmax = _checked_dropout(dropout_p, return_softmax)
    probs, state = q.new_empty(0), torch.zeros(2, dtype=torch.int64, device=q.device)
    try:
        if dropout_p:
            call = steps.prepare(q, k, v, **lengths, **options, **modifiers, dropout_p=dropout_p)
            with torch.no_grad():
                out, lse = call.forward()
            state = call.dropout_state if call.dropout_state is not None else state
            if return_softmax and call.dropout_state is not None:
                probs = probabilities.of_call(call, modifiers.get("alibi_slopes"), lengths, starts)
        else:
            function_of_lengths = api.attention_varlen if lengths else api.attention
            with torch.no_grad():
                out, lse = function_of_lengths(q, k, v, **lengths, **options, **modifiers, return_lse=True)
    except REFUSALS as error:
        raise renamed(error, NAMES) from None
    return conventions.without_backward(function, out, *inputs), lse, probs, state


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> ForwardResult:
    """The forward of `flash_attn_func`; shapes are those of `flash_attn_func`."""
    options = _options(softmax_scale, causal, window_size_left, window_size_right, softcap)
    modifiers = {"alibi_slopes": alibi_slopes}
    return _forward("_flash_attn_forward", (q, k, v), {}, dropout_p, options, modifiers, return_softmax)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> ForwardResult:
    """The forward of `flash_attn_varlen_func`; shapes are those of `flash_attn_varlen_func`.

    Args:
        leftpad_k: (batch,) int32: the keys of a sequence before it do not exist.
        seqused_k: (batch,) int32: only the first keys of a sequence exist; with a block_table instead of cu_seqlens_k.
        zero_tensors: has no effect: rows without a sequence are 0 in any case.
    """
    check_flag("zero_tensors", zero_tensors, allow_none=True)
    if check_int("num_splits", num_splits) > 1:
        raise UnsupportedError(f"num_splits: num_splits > 1 is not supported here, expected 0 or 1, got {num_splits}")
    options = _options(softmax_scale, causal, window_size_left, window_size_right, softcap)
    function, inputs = "_flash_attn_varlen_forward", (q, k, v)
    check_tensors({"q": q, "k": k, "v": v})
    check_ranks({"q": q}, PACKED_DIMS, 3)
    lengths = conventions.lengths_between("cu_seqlens_k", cu_seqlens_k)
    conventions.check_per_entry("leftpad_k", leftpad_k, lengths.shape[0], q.device)
    conventions.check_per_entry("seqused_k", seqused_k, lengths.shape[0], q.device)
    lengths = lengths if seqused_k is None else seqused_k
    if block_table is not None:
        del options["deterministic"]
        dropout_p, return_softmax = _checked_dropout(dropout_p, return_softmax)
        with torch.no_grad():
            out, lse, probs, state = over_pages(
                *inputs,
                cu_seqlens_q=cu_seqlens_q,
                lengths=lengths,
                lengths_name="cu_seqlens_k" if seqused_k is None else "seqused_k",
                block_table=block_table,
                max_seqlen_q=max_seqlen_q,
                max_seqlen_k=max_seqlen_k,
                dropout_p=dropout_p,
                alibi_slopes=alibi_slopes,
                starts=leftpad_k,
                returns_probabilities=return_softmax,
                **options,
            )
        return conventions.without_backward(function, out, *inputs), lse, probs, state
    packed = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "seqused_k": seqused_k,
    }
    modifiers = {"alibi_slopes": alibi_slopes}
    if leftpad_k is not None:
        check_int32("cu_seqlens_q", cu_seqlens_q, (lengths.shape[0] + 1,), "batch + 1 like cu_seqlens_k", q.device)
        modifiers["key_ranges"] = row_ranges(q.shape[0], cu_seqlens_q, lengths, starts=leftpad_k)
    return _forward(function, inputs, packed, dropout_p, options, modifiers, return_softmax, leftpad_k)


def _backward(
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor, Tensor],
    buffers: Buffers,
    lengths: dict[str, Any],
    dropout_p: Any,
    options: dict[str, Any],
    alibi_slopes: Tensor | None,
    rng_state: Tensor | None,
) -> None:
    """Write dq, dk and dv of a call into the buffers. Args: results: dout, out and softmax_lse."""
    if check_real("dropout_p", dropout_p):
        check_tensor("rng_state", rng_state, "the state that the forward with dropout returned")
        if rng_state is None or tuple(rng_state.shape) != (2,) or rng_state.dtype != torch.int64:
            given = None if rng_state is None else f"{rng_state.dtype} of shape {tuple(rng_state.shape)}"
            raise ValueError(f"rng_state: expected int64 of shape (2,), got {given}")
    q, k, v, alibi_slopes = conventions.detached(*inputs, alibi_slopes)
    try:
        call = steps.prepare(
            q,
            k,
            v,
            **lengths,
            **options,
            dropout_p=dropout_p,
            dropout_state=rng_state,
            alibi_slopes=alibi_slopes,
        )
    except REFUSALS as error:
        raise renamed(error, NAMES) from None
    dout, out, lse = conventions.detached(*results)
    check_results(q, v, dout, out, {"softmax_lse": lse})
    check_buffers((q, k, v), buffers)
    *found, _ = gradients(call, dout, out, lse)
    into_buffers(tuple(found), (q, k, v), buffers)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write dq, dk and dv of a dense call into the given tensors.

    Args: rng_state: what the forward returned; needed with dropout.
    Returns: softmax_d (batch, num_heads_q, seqlen_q rounded up to 128) float32, the sums of dout * out.
    """
    options = _options(softmax_scale, causal, window_size_left, window_size_right, softcap, deterministic)
    results = dout, out, softmax_lse
    _backward((q, k, v), results, (dq, dk, dv), {}, dropout_p, options, alibi_slopes, rng_state)
    return padded_rows(row_sums(dout, out), probabilities.round_up(q.shape[1]))


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Write dq, dk and dv of a call of packed sequences into the given tensors.

    Returns: softmax_d (num_heads_q, total_q + 128 * batch) float32: the sums of dout * out, then zeros.
    """
    check_flag("zero_tensors", zero_tensors, allow_none=True)
    options = _options(softmax_scale, causal, window_size_left, window_size_right, softcap, deterministic)
    packed = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    results = dout, out, softmax_lse
    _backward((q, k, v), results, (dq, dk, dv), packed, dropout_p, options, alibi_slopes, rng_state)
    return padded_rows(row_sums(dout, out), q.shape[0] + 128 * (cu_seqlens_q.shape[0] - 1))


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward

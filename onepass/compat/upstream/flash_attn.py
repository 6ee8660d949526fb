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
from .gradients import check_buffers, check_results, gradients, into_buffers, padded_rows, row_sums

USE_TRITON_ROCM = False

ForwardResult = tuple[Tensor, Tensor, Tensor, Tensor]

_MASK = "bool causal, SymInt window_size_left, SymInt window_size_right"
_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_RESULTS = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(a6!)? dq, Tensor(a7!)? dk, Tensor(a8!)? dv"
)


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """The number of keys that share a maximum in S_dmask: all keys of a row."""
    return probabilities.ONE_BLOCK


def _options(a: Any) -> dict[str, Any]:
    """The options of `onepass.attention`."""
    window = conventions.pair_of_sides(a.window_size_left, a.window_size_right)
    options = conventions.options_of(a.softmax_scale, a.causal, window, a.softcap)
    options["deterministic"] = check_flag("deterministic", getattr(a, "deterministic", None), allow_none=True) or None
    return options


def _lengths(a: Any) -> dict[str, Any]:
    """The lengths of `onepass.attention_varlen`."""
    return {n: getattr(a, n) for n in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")}


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


@conventions.takes_schema(
    f"(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, {_MASK}, float softcap, "
    "Tensor? alibi_slopes, bool return_softmax) -> (Tensor, Tensor, Tensor, Tensor)"
)
def _flash_attn_forward(a: Any) -> ForwardResult:
    """The forward of `flash_attn_func`; shapes are those of `flash_attn_func`."""
    modifiers = {"alibi_slopes": a.alibi_slopes}
    return _forward("_flash_attn_forward", (a.q, a.k, a.v), {}, a.dropout_p, _options(a), modifiers, a.return_softmax)


@conventions.takes_schema(
    f"(Tensor q, Tensor k, Tensor v, {_LENGTHS}, float dropout_p, float softmax_scale, bool causal, "
    "SymInt window_size_left=-1, SymInt window_size_right=-1, float softcap=0., Tensor? alibi_slopes=None, "
    "bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, "
    "bool zero_tensors=False, SymInt num_splits=0) -> (Tensor, Tensor, Tensor, Tensor)"
)
def _flash_attn_varlen_forward(a: Any) -> ForwardResult:
    """The forward of `flash_attn_varlen_func`; shapes are those of `flash_attn_varlen_func`.

    Args:
        leftpad_k: (batch,) int32: the keys of a sequence before it do not exist.
        seqused_k: (batch,) int32: only the first keys of a sequence exist; with a block_table instead of cu_seqlens_k.
        zero_tensors: has no effect: rows without a sequence are 0 in any case.
    """
    check_flag("zero_tensors", a.zero_tensors, allow_none=True)
    if check_int("num_splits", a.num_splits) > 1:
        raise UnsupportedError(f"num_splits: num_splits > 1 is not supported here, expected 0 or 1, got {a.num_splits}")
    options = _options(a)
    function, inputs, starts = "_flash_attn_varlen_forward", (a.q, a.k, a.v), a.leftpad_k
    check_tensors(dict(zip("qkv", inputs, strict=True)))
    check_ranks({"q": a.q}, PACKED_DIMS, 3)
    lengths = conventions.lengths_between("cu_seqlens_k", a.cu_seqlens_k)
    batch = lengths.shape[0]
    conventions.check_per_entry("leftpad_k", starts, batch, a.q.device)
    conventions.check_per_entry("seqused_k", a.seqused_k, batch, a.q.device)
    lengths = lengths if a.seqused_k is None else a.seqused_k
    if a.block_table is not None:
        del options["deterministic"]
        dropout_p, return_softmax = _checked_dropout(a.dropout_p, a.return_softmax)
        with torch.no_grad():
            out, lse, probs, state = over_pages(
                *inputs,
                cu_seqlens_q=a.cu_seqlens_q,
                lengths=lengths,
                lengths_name="cu_seqlens_k" if a.seqused_k is None else "seqused_k",
                block_table=a.block_table,
                max_seqlen_q=a.max_seqlen_q,
                max_seqlen_k=a.max_seqlen_k,
                dropout_p=dropout_p,
                alibi_slopes=a.alibi_slopes,
                starts=starts,
                returns_probabilities=return_softmax,
                **options,
            )
        return conventions.without_backward(function, out, *inputs), lse, probs, state
    packed = _lengths(a) | {"seqused_k": a.seqused_k}
    modifiers = {"alibi_slopes": a.alibi_slopes}
    if starts is not None:
        check_int32("cu_seqlens_q", a.cu_seqlens_q, (batch + 1,), "batch + 1 like cu_seqlens_k", a.q.device)
        modifiers["key_ranges"] = row_ranges(a.q.shape[0], a.cu_seqlens_q, lengths, starts=starts)
    return _forward(function, inputs, packed, a.dropout_p, options, modifiers, a.return_softmax, starts)


def _backward(a: Any, lengths: dict[str, Any]) -> None:
    """Write dq, dk and dv of a call into the given tensors."""
    options, state = _options(a), a.rng_state
    if check_real("dropout_p", a.dropout_p):
        check_tensor("rng_state", state, "the state that the forward with dropout returned")
        if state is None or tuple(state.shape) != (2,) or state.dtype != torch.int64:
            given = None if state is None else f"{state.dtype} of shape {tuple(state.shape)}"
            raise ValueError(f"rng_state: expected int64 of shape (2,), got {given}")
    q, k, v, alibi_slopes = conventions.detached(a.q, a.k, a.v, a.alibi_slopes)
    try:
        call = steps.prepare(
            q,
            k,
            v,
            **lengths,
            **options,
            dropout_p=a.dropout_p,
            dropout_state=state,
            alibi_slopes=alibi_slopes,
        )
    except REFUSALS as error:
        raise renamed(error, NAMES) from None
    dout, out, lse = conventions.detached(a.dout, a.out, a.softmax_lse)
    buffers = a.dq, a.dk, a.dv
    check_results(q, v, dout, out, {"softmax_lse": lse})
    check_buffers((q, k, v), buffers)
    *found, _ = gradients(call, dout, out, lse)
    into_buffers(tuple(found), (q, k, v), buffers)


@conventions.takes_schema(
    f"({_RESULTS}, float dropout_p, float softmax_scale, {_MASK}, float softcap, Tensor? alibi_slopes, "
    "bool deterministic, Tensor? rng_state=None) -> Tensor"
)
def _flash_attn_backward(a: Any) -> Tensor:
    """Write dq, dk and dv of a dense call into the given tensors.

    Args: rng_state: what the forward returned; needed with dropout.
    Returns: softmax_d (batch, num_heads_q, seqlen_q rounded up to 128) float32, the sums of dout * out.
    """
    _backward(a, {})
    return padded_rows(row_sums(a.dout, a.out), probabilities.round_up(a.q.shape[1]))


@conventions.takes_schema(
    f"({_RESULTS}, {_LENGTHS}, float dropout_p, float softmax_scale, {_MASK}, float softcap, Tensor? alibi_slopes, "
    "bool deterministic, Tensor? rng_state=None, bool zero_tensors=False) -> Tensor"
)
def _flash_attn_varlen_backward(a: Any) -> Tensor:
    """Write dq, dk and dv of a call of packed sequences into the given tensors.

    Returns: softmax_d (num_heads_q, total_q + 128 * batch) float32: the sums of dout * out, then zeros.
    """
    check_flag("zero_tensors", a.zero_tensors, allow_none=True)
    _backward(a, _lengths(a))
    return padded_rows(row_sums(a.dout, a.out), a.q.shape[0] + 128 * (a.cu_seqlens_q.shape[0] - 1))


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward

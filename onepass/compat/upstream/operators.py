"""The operators `torch.ops.flash_attn` of flash-attn 2.8 and, for torch's FA3 backend, `torch.ops.flash_attn_3`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..flash_attn_3.functions import flash_attn_combine
from . import flash_attn
from .flash_attn_3 import _flash_attn_backward, _flash_attn_forward

_OF_FLASH_ATTN = (
    "_flash_attn_forward",
    "_flash_attn_backward",
    "_flash_attn_varlen_forward",
    "_flash_attn_varlen_backward",
)
_LENGTHS = "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
_LIMITS = "int? max_seqlen_q=None, int? max_seqlen_k=None, "
_MASK = "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
_SCHEMAS = {
    "fwd": "(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    f"Tensor(out!)? out=None, {_LENGTHS}Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    f"{_LIMITS}Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    f"Tensor? v_descale=None, float? softmax_scale=None, {_MASK}int attention_chunk=0, float softcap=0., "
    "bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, "
    "int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)",
    "bwd": "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    f"Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, {_LENGTHS}Tensor? seqused_q=None, Tensor? seqused_k=None, {_LIMITS}"
    f"float? softmax_scale=None, {_MASK}float softcap=0., bool deterministic=False, int sm_margin=0) "
    "-> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)",
    "fwd_combine": "(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, ScalarType? out_dtype=None) "
    "-> (Tensor(out!), Tensor)",
    "get_scheduler_metadata": "(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    f"int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, {_LENGTHS}Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? leftpad_k=None, int? page_size=None, int max_seqlen_k_new=0, "
    f"{_MASK}int attention_chunk=0, bool has_softcap=False, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> Tensor",
}


def _bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    *lengths_and_options: Any,
) -> tuple[Tensor, ...]:
    """dq, dk, dv, softmax_d, and four empty tensors. Args: lengths_and_options: all arguments that follow dv."""
    dq, dk, dv = (torch.empty_like(t) if b is None else b for t, b in ((q, dq), (k, dk), (v, dv)))
    following: tuple[Any, ...] = (*lengths_and_options[:6], dq, dk, dv, *lengths_and_options[6:])
    softmax_d = _flash_attn_backward(dout, q, k, v, out, softmax_lse, *following)
    return dq, dk, dv, softmax_d, *(softmax_d.new_empty(0) for _ in range(4))


def _get_scheduler_metadata(*arguments: Any) -> Tensor:
    """An empty int32 tensor on the device of seqused_k, the ninth argument."""
    return arguments[8].new_empty(0, dtype=torch.int32)


_FUNCTIONS: dict[str, Callable] = {
    "fwd": _flash_attn_forward,
    "bwd": _bwd,
    "fwd_combine": flash_attn_combine,
    "get_scheduler_metadata": _get_scheduler_metadata,
}


def define_flash_attn() -> torch.library.Library | None:
    """Define `torch.ops.flash_attn`; None if another library has defined its operators."""
    if any(hasattr(torch.ops.flash_attn, name) for name in _OF_FLASH_ATTN):
        return None
    library = torch.library.Library("flash_attn", "FRAGMENT")
    for name in _OF_FLASH_ATTN:
        function = getattr(flash_attn, name)
        library.define(name + function.schema)
        library.impl(name, function, "CompositeExplicitAutograd")
    return library


def define_flash_attn_3() -> torch.library.Library | None:
    """Define `torch.ops.flash_attn_3`; None if another library has defined its operators."""
    if any(hasattr(torch.ops.flash_attn_3, name) for name in _SCHEMAS):
        return None
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
        arguments = getattr(torch.ops.flash_attn_3, name).default._schema.arguments
        defaults = [argument.default_value for argument in arguments]
        library.impl(name, _with_defaults(_FUNCTIONS[name], defaults), "CompositeExplicitAutograd")
    return library


def _with_defaults(function: Callable, defaults: list[Any]) -> Callable:
    """A function that fills in the defaults that torch leaves out at the end of the arguments."""

    def call(*given: Any) -> Any:
        return function(*given, *defaults[len(given) :])

    return call

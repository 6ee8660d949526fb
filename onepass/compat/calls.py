"""Calls of flash-attn 3 and 4 without a cache: sequences may be cut in any way."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..api import attention as api
from ..errors import REFUSALS, renamed
from ..quantization.codec import E4M3
from ..validation import tensors
from ..validation.fp8 import QuantizedQKV
from ..validation.scalars import check_flag
from . import conventions
from .quantization import NAMES as DESCALES
from .quantization import check_descales, dequantized_queries, filled_descales, times_descale
from .sequences import Arranged, Lengths

# name of an argument in messages of onepass -> its name in flash-attn
NAMES = {"window": "window_size", "sinks": "learnable_sink"}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    options: dict[str, Any],
    descales: tuple[Any, Any, Any] = (None, None, None),
    *,
    attention_chunk: Any = 0,
    deterministic: Any = False,
    e4m3_lse: bool = True,
) -> tuple[Tensor, Any]:
    """out and lse of a call without a cache, in the shapes of the call.

    Args:
        descales: q_descale, k_descale and v_descale (batch, num_heads_kv) float32 of e4m3 tensors, or None each.
        options: causal, window, softcap, softmax_scale and sinks of `onepass.attention`.
        attention_chunk: c > 0: a query sees the keys of the chunk of c keys in which it stands.
        e4m3_lse: False: lse of e4m3 tensors is None, and the call may run in a kernel without an exact lse.
    """
    chunk = conventions.check_chunk(attention_chunk)
    deterministic = check_flag("deterministic", deterministic, allow_none=True) or None
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        tensors.check_tensor(name, tensor)
    try:
        call = Arranged(q, k, v, lengths)
        modifiers = {"key_ranges": call.chunks(chunk)} if chunk else {}
        function: Any = api.attention if call.is_dense else api.attention_varlen
        settings = options | call.options | {"deterministic": deterministic, "return_lse": True}
        if q.dtype != E4M3:
            conventions.refuse("only e4m3 tensors have descales", **dict(zip(DESCALES, descales, strict=True)))
            result = function(*call.tensors, **settings, **modifiers)
            return call.as_given(result.out), call.stats_as_given(result.lse)
        batch = q.shape[0] if call.is_dense else (call.options["cu_seqlens_q"].shape[0] - 1) // call.entries
        tensors.check_groups({"q": q}, {"k": k, "v": v}, "k and v")
        check_descales(descales, batch, k)
        settings["return_lse"] = e4m3_lse
        out, lse = _attend_e4m3(call, function, descales, settings, modifiers)
    except REFUSALS as error:
        raise renamed(error, NAMES) from None
    out = conventions.without_backward("attention of e4m3 tensors", call.as_given(out), q, k, v)
    return out, None if lse is None else call.stats_as_given(lse)


def _attend_e4m3(
    call: Arranged, function: Any, descales: tuple, settings: dict[str, Any], modifiers: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """out (bfloat16) and, where settings["return_lse"], lse of a call with e4m3 tensors."""
    q, k, v = conventions.detached(*call.tensors)
    group = q.shape[-2] // max(1, k.shape[-2])
    given = tuple(None if d is None else call.per_entry(d) for d in descales)
    if not modifiers:
        q_descale, k_descale, v_descale = filled_descales(given, q.device)
        per_head = q_descale.repeat_interleave(group, -1) if q_descale.dim() else q_descale
        quantized = QuantizedQKV(q, k, v, per_head, k_descale, v_descale)
        result = function(quantized, **settings)
        return result if settings["return_lse"] else (result, None)
    # FP8 kernels take no ranges of keys, so this runs in bfloat16: q is multiplied by q's and k's descales, out by v's
    cu_seqlens_q = call.options.get("cu_seqlens_q")
    q = dequantized_queries(q, given, group, cu_seqlens_q)
    out, lse = function(q, k.to(q.dtype), v.to(q.dtype), **settings | {"return_lse": True}, **modifiers)
    return times_descale(out, given[2], group, cu_seqlens_q), lse if settings["return_lse"] else None

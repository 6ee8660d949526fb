"""flash-attn 3's `_flash_attn_forward` and `_flash_attn_backward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import REFUSALS, renamed
from ...validation.scalars import check_flag
from .. import conventions
from ..calls import attend
from ..over_cache import over_cache
from ..probabilities import round_up
from ..sequences import Lengths
from .gradients import backward, padded_rows, row_sums

# name of an argument in messages of calls over caches -> its name in `_flash_attn_forward`
_NAMES = {
    "k": "k_new",
    "v": "v_new",
    "k_cache": "k",
    "v_cache": "v",
    "cache_seqlens": "seqused_k",
    "cache_batch_idx": "kv_batch_idx",
    "cache_leftpad": "leftpad_k",
    "rotary_seqlens": "seqlens_rotary",
}


@conventions.takes(
    "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, "
    "cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, "
    "page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, "
    "q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, "
    "window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, "
    "num_splits=1, pack_gqa=None, sm_margin=0"
)
def _flash_attn_forward(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward of all functions of flash-attn 3.

    Calls with a page_table, new keys, left padding or kv_batch_idx are calls over a cache, which have no backward; all
    others are differentiable.

    Returns: out, softmax_lse, and two empty tensors in the place of partial results of splits.
    """
    conventions.refuse(conventions.QV, qv=a.qv)
    conventions.check_hints(num_splits=a.num_splits, pack_gqa=a.pack_gqa, sm_margin=a.sm_margin)
    window = conventions.pair_of_sides(a.window_size_left, a.window_size_right)
    options = conventions.options_of(a.softmax_scale, a.causal, window, a.softcap)
    conventions.check_into("out_", a.out_, a.q, a.v)
    descales = a.q_descale, a.k_descale, a.v_descale
    of_cache = a.page_table, a.k_new, a.v_new, a.kv_batch_idx, a.leftpad_k, a.rotary_cos, a.rotary_sin
    if all(t is None for t in of_cache):
        out, lse = attend(a.q, a.k, a.v, Lengths.of(a), options, descales, attention_chunk=a.attention_chunk)
    else:
        conventions.refuse("keys in a cache are not cut by offsets", cu_seqlens_k=a.cu_seqlens_k)
        try:
            out, lse = over_cache(
                *(a.q, a.k, a.v, a.k_new, a.v_new),
                cache_seqlens=a.seqused_k,
                cache_batch_idx=a.kv_batch_idx,
                cache_leftpad=a.leftpad_k,
                page_table=a.page_table,
                cu_seqlens_q=a.cu_seqlens_q,
                cu_seqlens_k_new=a.cu_seqlens_k_new,
                seqused_q=a.seqused_q,
                max_seqlen_q=a.max_seqlen_q,
                rotary=(a.rotary_cos, a.rotary_sin, a.seqlens_rotary, a.rotary_interleaved),
                descales=descales,
                attention_chunk=a.attention_chunk,
                num_splits=a.num_splits,
                options=options,
            )
        except REFUSALS as error:
            raise renamed(error, _NAMES) from None
    out = out if a.out_ is None else a.out_.copy_(out)
    return out, lse, out.new_empty(0, dtype=torch.float32), out.new_empty(0, dtype=torch.float32)


@conventions.takes(
    "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, "
    "max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, "
    "window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0"
)
def _flash_attn_backward(a: Any) -> Tensor:
    """Write dq, dk and dv into the given tensors. out and softmax_lse may belong to attention over more keys.

    Returns: softmax_d, the float32 sums of dout * out: (batch, num_heads_q, seqlen_q rounded up to 128), or
    (num_heads_q, total_q + 128 * batch) for packed sequences; zeros follow the sums.
    """
    conventions.check_hints(sm_margin=a.sm_margin)
    window = conventions.pair_of_sides(a.window_size_left, a.window_size_right)
    options = conventions.options_of(a.softmax_scale, a.is_causal, window, a.softcap, "is_causal")
    offsets = a.cu_seqlens_q, a.cu_seqlens_k
    lengths = Lengths(*offsets, a.sequed_q, a.sequed_k, a.max_seqlen_q, a.max_seqlen_k)
    options["deterministic"] = check_flag("deterministic", a.deterministic, allow_none=True) or None
    try:
        backward(a.dout, (a.q, a.k, a.v), a.out, a.softmax_lse, (a.dq, a.dk, a.dv), lengths, options)
    except REFUSALS as error:
        raise renamed(error, {"seqused_q": "sequed_q", "seqused_k": "sequed_k"}) from None
    sums = row_sums(a.dout, a.out)
    if a.cu_seqlens_q is None:
        return padded_rows(sums, round_up(a.q.shape[1]))
    return padded_rows(sums, a.q.shape[0] + 128 * (a.cu_seqlens_q.shape[0] - 1))

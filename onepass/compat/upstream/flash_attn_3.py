"""flash-attn 3's `_flash_attn_forward` and `_flash_attn_backward`."""

from __future__ import annotations

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


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward of all functions of flash-attn 3.

    Calls with a page_table, new keys, left padding or kv_batch_idx are calls over a cache, which have no backward; all
    others are differentiable.

    Returns: out, softmax_lse, and two empty tensors in the place of partial results of splits.
    """
    conventions.refuse(conventions.QV, qv=qv)
    conventions.check_hints(num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin)
    options = conventions.options_of(
        softmax_scale, causal, conventions.pair_of_sides(window_size_left, window_size_right), softcap
    )
    conventions.check_into("out_", out_, q, v)
    descales = q_descale, k_descale, v_descale
    of_cache = page_table, k_new, v_new, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin
    if all(t is None for t in of_cache):
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
        out, lse = attend(q, k, v, lengths, options, descales, attention_chunk=attention_chunk)
    else:
        conventions.refuse("keys in a cache are not cut by offsets", cu_seqlens_k=cu_seqlens_k)
        try:
            out, lse = over_cache(
                q,
                k,
                v,
                k_new,
                v_new,
                cache_seqlens=seqused_k,
                cache_batch_idx=kv_batch_idx,
                cache_leftpad=leftpad_k,
                page_table=page_table,
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k_new=cu_seqlens_k_new,
                seqused_q=seqused_q,
                max_seqlen_q=max_seqlen_q,
                rotary=(rotary_cos, rotary_sin, seqlens_rotary, rotary_interleaved),
                descales=descales,
                attention_chunk=attention_chunk,
                num_splits=num_splits,
                options=options,
            )
        except REFUSALS as error:
            raise renamed(error, _NAMES) from None
    out = out if out_ is None else out_.copy_(out)
    return out, lse, out.new_empty(0, dtype=torch.float32), out.new_empty(0, dtype=torch.float32)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Write dq, dk and dv into the given tensors. out and softmax_lse may belong to attention over more keys.

    Returns: softmax_d, the float32 sums of dout * out: (batch, num_heads_q, seqlen_q rounded up to 128), or
    (num_heads_q, total_q + 128 * batch) for packed sequences; zeros follow the sums.
    """
    conventions.check_hints(sm_margin=sm_margin)
    window = conventions.pair_of_sides(window_size_left, window_size_right)
    options = conventions.options_of(softmax_scale, is_causal, window, softcap, "is_causal")
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k)
    options["deterministic"] = check_flag("deterministic", deterministic, allow_none=True) or None
    try:
        backward(dout, (q, k, v), out, softmax_lse, (dq, dk, dv), lengths, options)
    except REFUSALS as error:
        raise renamed(error, {"seqused_q": "sequed_q", "seqused_k": "sequed_k"}) from None
    sums = row_sums(dout, out)
    if cu_seqlens_q is None:
        return padded_rows(sums, round_up(q.shape[1]))
    return padded_rows(sums, q.shape[0] + 128 * (cu_seqlens_q.shape[0] - 1))

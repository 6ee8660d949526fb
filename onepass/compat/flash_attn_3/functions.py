"""flash-attn 3's functions, with their names, arguments, order and defaults."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...validation import tensors
from ...validation.scalars import check_flag, check_int
from .. import conventions
from ..calls import attend
from ..merging import merged
from ..over_cache import over_cache
from ..sequences import Lengths


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of a dense batch.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim). k, v: (batch, seqlen_k, num_heads_kv, head_dim and head_dim_v);
            dtypes are those of `onepass.attention`, or float8_e4m3fn, which has no backward and gives bfloat16.
        softmax_scale: None = head_dim ** -0.5.
        causal, window_size: aligned at the bottom right; window_size is (left, right), inclusive, a negative side is
            unbounded.
        q_descale, k_descale, v_descale: (batch, num_heads_kv) float32 of e4m3 tensors, real value = stored value *
            descale; None = 1.
        attention_chunk: c > 0: a query sees the keys of the chunk of c keys in which it stands.
        softcap: 0.0 = no cap.
        num_splits, pack_gqa, sm_margin: say how to compute, and have no effect.
        deterministic: ask for bitwise reproducible gradients.
        return_attn_probs: return (out, softmax_lse) instead of out.
        qv: must be None.

    Returns: out (batch, seqlen_q, num_heads_q, head_dim_v); softmax_lse (batch, num_heads_q, seqlen_q) float32.
    Raises: NotImplementedError for qv, and what `onepass.attention` raises.
    """
    conventions.refuse(conventions.QV, qv=qv)
    conventions.check_hints(num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin)
    options = conventions.options_of(softmax_scale, causal, conventions.pair_of(window_size), softcap)
    descales = q_descale, k_descale, v_descale
    with_lse = check_flag("return_attn_probs", return_attn_probs)
    more: dict[str, Any] = {"attention_chunk": attention_chunk, "deterministic": deterministic}
    out, lse = attend(q, k, v, Lengths(), options, descales, **more, e4m3_lse=with_lse)
    return (out, lse) if with_lse else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with q, k and v in one tensor.

    Args:
        qkv: (batch, seqlen, 3, num_heads, head_dim), or (batch, seqlen, num_heads_q + 2 * num_heads_kv, head_dim) with
            num_heads_q.
    """
    if isinstance(qkv, Tensor) and qkv.dim() == 4:
        q, k, v = _split_heads(qkv, num_heads_q)
    else:
        q, k, v = conventions.unpack("qkv", qkv, 3, 5)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


def _split_heads(qkv: Tensor, num_heads_q: Any) -> tuple[Tensor, ...]:
    """Views of q, k and v, whose heads lie next to each other in one dimension of a tensor."""
    if num_heads_q is None:
        raise ValueError(f"num_heads_q: expected an int with a qkv of shape {tuple(qkv.shape)}, got None")
    heads = qkv.shape[2] - check_int("num_heads_q", num_heads_q, least=1)
    if heads < 2 or heads % 2:
        raise ValueError(
            f"qkv: expected {num_heads_q} heads of q and as many of k as of v, got {qkv.shape[2]} in {tuple(qkv.shape)}"
        )
    return qkv.split([num_heads_q, heads // 2, heads // 2], -2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of packed sequences.

    Args:
        q: (total_q, num_heads_q, head_dim). k, v: (total_k, num_heads_kv, head_dim and head_dim_v).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, the start of each sequence and the end of the last one. None:
            q, or k and v, are dense, (batch, seqlen, ..).
        max_seqlen_q, max_seqlen_k: hints; an int, a tensor or None.
        seqused_q, seqused_k: (batch,) int32: only the first rows of a sequence exist. Masks are aligned to the rows
            that exist; out of the others is 0.
        All others: as for `flash_attn_func`.

    Returns: out (total_q, num_heads_q, head_dim_v); softmax_lse (num_heads_q, total_q) float32.
    """
    conventions.refuse(conventions.QV, qv=qv)
    conventions.check_hints(num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin)
    options = conventions.options_of(softmax_scale, causal, conventions.pair_of(window_size), softcap)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    descales = q_descale, k_descale, v_descale
    with_lse = check_flag("return_attn_probs", return_attn_probs)
    more: dict[str, Any] = {"attention_chunk": attention_chunk, "deterministic": deterministic}
    out, lse = attend(q, k, v, lengths, options, descales, **more, e4m3_lse=with_lse)
    return (out, lse) if with_lse else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a key/value cache, after writing k and v into it if they are given, in place.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), or packed (total_q, ..) with cu_seqlens_q.
        k_cache, v_cache: (batch_cache, seqlen_cache, num_heads_kv, head_dim), or with a page_table
            (num_pages, page_size, num_heads_kv, head_dim); in q's dtype.
        k, v: (batch, seqlen_new, num_heads_kv, head_dim), or packed (total_new, ..) with cu_seqlens_k_new; like q.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), with k and v. New key i and query i are rotated by row
            rotary_seqlens[b] + i (None: cache_seqlens[b] + i); without causal, a window and a chunk, all queries are
            rotated by row rotary_seqlens[b].
        cache_seqlens: the filled length of the cache: an int, (batch,) int32, or None = all of it.
        cache_batch_idx: (batch,) int32 or int64, the entry of the cache, or row of the page_table, of each batch entry.
            If k is given, entries must be distinct, which is checked on a CPU; the result is undefined if they are not.
        cache_leftpad: (batch,) int32: keys before it do not exist.
        q_descale, k_descale, v_descale: (batch, num_heads_kv) float32, with e4m3 tensors. New keys are stored as they
            are given.
        num_splits: number of splits of the keys, which a GPU computes in parallel; 0 = chosen.
        scheduler_metadata, pack_gqa, sm_margin: have no effect.
        return_softmax_lse: return (out, softmax_lse, and two empty tensors).
        All others: as for `flash_attn_func`.

    Returns: out in q's shape, with head_dim_v; softmax_lse (batch, num_heads_q, seqlen_q) or (num_heads_q, total_q). If
    an input requires a gradient, the backward of out raises.
    Raises: what `onepass.attention_decode` raises; the caches are unchanged then.
    """
    conventions.refuse(conventions.QV, qv=qv)
    conventions.check_hints(num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin)
    out, lse = over_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        rotary=(rotary_cos, rotary_sin, rotary_seqlens, rotary_interleaved),
        descales=(q_descale, k_descale, v_descale),
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        options=conventions.options_of(softmax_scale, causal, conventions.pair_of(window_size), softcap),
    )
    if not check_flag("return_softmax_lse", return_softmax_lse):
        return out
    return out, lse, out.new_empty(0, dtype=torch.float32), out.new_empty(0, dtype=torch.float32)


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint sets of keys.

    Args:
        out_partial: (num_splits, batch, seqlen, num_heads, head_dim), or packed (num_splits, total_q, ..).
        lse_partial: (num_splits, batch, seqlen, num_heads), or packed, float32; heads are in the last dimension.
        out: a tensor to write into; None: a new one of out_dtype, by default that of out_partial.

    Returns: out (batch, seqlen, num_heads, head_dim), and lse (batch, seqlen, num_heads).
    """
    return merged(out_partial, lse_partial, out, out_dtype)


@conventions.takes(
    "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
    "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, "
    "page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, "
    "has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0"
)
def get_scheduler_metadata(a: Any) -> Tensor:
    """An empty int32 tensor, which `flash_attn_with_kvcache` takes: onepass needs no schedule before a call."""
    tensors.check_tensor("cache_seqlens", a.cache_seqlens, "an int32 torch.Tensor")
    return a.cache_seqlens.new_empty(0, dtype=torch.int32)

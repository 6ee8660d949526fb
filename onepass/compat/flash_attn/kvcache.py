"""flash-attn 2.8's `flash_attn_with_kvcache`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import REFUSALS, renamed
from ...validation.scalars import check_flag, check_int
from .. import conventions
from ..over_cache import over_cache


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Any:
    """Attention over a key/value cache, after writing k and v into it if they are given.

    Batch entry b first stores k[b] and v[b] in the cache at positions cache_seqlens[b], cache_seqlens[b] + 1, ...,
    in place, then q[b] attends to the first cache_seqlens[b] + seqlen_new positions. Masks are aligned at the bottom
    right of that length. Positions of the cache beyond it are never read.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim).
        k_cache, v_cache: (batch_cache, seqlen_cache, num_heads_kv, head_dim); batch_cache = batch unless
            cache_batch_idx is given. With a block_table (num_blocks, page_block_size, num_heads_kv, head_dim).
        k, v: (batch, seqlen_new, num_heads_kv, head_dim), both or neither, in q's dtype.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), with k and v. New key i and query i are rotated by row
            cache_seqlens[b] + i, or, with neither causal nor a window, all queries by row cache_seqlens[b].
        cache_seqlens: the filled length of the cache: an int, (batch,) int32, or None = all of it.
        cache_batch_idx: (batch,) int32 or int64, the cache entry of each batch entry. With a block_table it picks rows
            of the table. If k is given, entries must be distinct, which is checked on a CPU; the result is undefined if
            they are not.
        cache_leftpad: (batch,) int32: the keys before it do not exist.
        block_table: (batch, max_blocks) int32, any page_block_size. The longest length is read, which waits for a GPU,
            except while a CUDA graph is captured.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as for `flash_attn_func`.
        rotary_interleaved: rotated pairs are columns (0, 1), (2, 3), ..; else the two halves of the rotated columns.
        num_splits: number of splits of the keys, which a GPU computes in parallel; 0 = chosen.
        return_softmax_lse: return (out, softmax_lse).
        k_descale, v_descale: (batch, num_heads_kv) float32, with float8_e4m3fn caches only, as in flash-attn 3 (whose q
            is e4m3, too, while this q is not). The shapes that `onepass.attention_decode` takes without a kv_block are
            accepted, too.

    Returns: out (batch, seqlen_q, num_heads_q, head_dim_v); softmax_lse (batch, num_heads_q, seqlen_q) float32. If an
    input requires a gradient, a backward through them raises.
    Raises: TypeError or ValueError for bad shapes, dtypes or lengths; an error that is both ValueError and RuntimeError
    for lengths beyond the rows that a block_table addresses. The caches are unchanged after an error. Without a
    block_table the host does not read lengths from a GPU, so the values of such lengths are not checked.
    """
    options = conventions.options_of(softmax_scale, causal, conventions.pair_of(window_size), softcap)
    return_lse = check_flag("return_softmax_lse", return_softmax_lse, allow_none=True)
    num_splits = 0 if num_splits is None else check_int("num_splits", num_splits, least=0)
    try:
        out, lse = over_cache(
            q,
            k_cache,
            v_cache,
            k,
            v,
            cache_seqlens=cache_seqlens,
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            page_table=block_table,
            rotary=(rotary_cos, rotary_sin, None, rotary_interleaved),
            descales=(None, k_descale, v_descale),
            num_splits=num_splits,
            options=options,
            alibi_slopes=alibi_slopes,
            is_version_2=True,
        )
    except REFUSALS as error:
        raise renamed(error, {"page_table": "block_table"}) from None
    return (out, lse) if return_lse else out

"""flash-attn 2.8's `flash_attn_with_kvcache`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...api.decode import autocast_rows
from ...errors import REFUSALS, renamed
from ...validation import tensors
from ...validation.scalars import check_flag, check_int
from .. import conventions
from ..cache_update import check_rotary
from ..cached import NO_EXTRAS, Cache, Extras, append_and_attend, lengths_of, refuse_beyond_pages, table_of_entries

# name of an argument in messages of onepass -> its name in flash-attn
_NAMES = {
    "window": "window_size",
    "page_table": "block_table",
    "k_new": "k",
    "v_new": "v",
    "seqstart_k": "cache_leftpad",
}


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
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        tensors.check_tensor(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions, got {tensor.dim()} in shape {tuple(tensor.shape)}")
    q, k, v = autocast_rows(k_cache, q, k, v)
    if block_table is not None and tensors.check_tensor("block_table", block_table).dim() != 2:
        raise ValueError(f"block_table: expected shape (batch, max_blocks), got {tuple(block_table.shape)}")
    page_table = table_of_entries(q.shape[0], q.device, k_cache, block_table, cache_batch_idx, k)
    cache = Cache(k_cache, v_cache, page_table, k_descale, v_descale)
    conventions.check_per_entry("cache_leftpad", cache_leftpad, q.shape[0], q.device)
    _check_new(q, k_cache, v_cache, k, v, cache_seqlens)
    seqlen_new, table = 0 if k is None else k.shape[1], None if block_table is None else "block_table"
    lengths = lengths_of(cache_seqlens, q.shape[0], q.device, cache.capacity, seqlen_new, table=table)
    if table is not None:
        refuse_beyond_pages("cache_seqlens", table, lengths, cache.capacity, seqlen_new, waits=True)
    try:
        rotary = check_rotary(rotary_cos, rotary_sin, lengths, rotary_interleaved, q, k is not None)
        out, lse = append_and_attend(
            q,
            cache,
            lengths,
            None if k is None or v is None else (k, v),
            rotary=rotary,
            num_splits=num_splits,
            extras=NO_EXTRAS if cache_leftpad is alibi_slopes is None else Extras(cache_leftpad, None, alibi_slopes),
            **options,
        )
    except REFUSALS as error:
        raise renamed(error, _NAMES) from None
    return (out, lse) if return_lse else out


def _check_new(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any, v: Any, cache_seqlens: Any) -> None:
    """Check k and v: both or neither, and rows that fit the caches."""
    if k is None and v is None:
        return
    for name, new in sorted((("k", k), ("v", v)), key=tensors.is_missing):
        tensors.check_tensor(name, new, "a torch.Tensor where the other of k and v is given")
    if cache_seqlens is None:
        raise ValueError("cache_seqlens: expected an int or a (batch,) int32 tensor where k and v are given, got None")
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if new.dtype != q.dtype or new.device != q.device:
            raise TypeError(f"{name}: expected {q.dtype} on {q.device} like q, got {new.dtype} on {new.device}")
        expected = (q.shape[0], k.shape[1] if k.dim() == 4 else "seqlen_new", *cache.shape[2:])
        if tuple(new.shape) != expected:
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(new.shape)}")

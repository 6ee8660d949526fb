"""flash-attn's calls over a key/value cache, those of versions 2 and 3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api.decode import autocast_rows
from ..errors import REFUSALS, renamed
from ..validation import tensors
from . import conventions
from .cache_update import check_rotary, is_on_host
from .cached import NO_EXTRAS, Cache, Extras, append_and_attend, lengths_of, refuse_beyond_pages, table_of_entries
from .quantization import check_descales, score_descale

E4M3 = torch.float8_e4m3fn
# name of an argument in messages of onepass -> its name in flash-attn
_NAMES = {"window": "window_size", "k_new": "k", "v_new": "v", "seqstart_k": "cache_leftpad"}


def over_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    options: dict[str, Any],
    cache_seqlens: Any = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: Any = None,
    rotary: tuple[Any, Any, Any, Any] = (None, None, None, False),
    descales: tuple[Any, Any, Any] = (None, None, None),
    attention_chunk: Any = 0,
    num_splits: Any = 0,
    seqused_q: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    is_version_2: bool = False,
) -> tuple[Tensor, Tensor]:
    """out and lse of a call over a cache. If an input requires a gradient, a backward through them raises.

    Args:
        seqused_q: (batch,) int32: only the first queries of each batch entry exist; out of all others is 0.
        rotary: rotary_cos, rotary_sin, rotary_seqlens and rotary_interleaved.
        descales: q_descale, k_descale and v_descale. options: of `onepass.attention`.
        is_version_2: whether the conventions are those of flash-attn 2: the table is block_table, its lengths are read
            from a GPU, too, and k_descale and v_descale are what `onepass.attention_decode` takes.
        All others: as for `flash_attn_with_kvcache`.
    """
    chunk = conventions.check_chunk(attention_chunk) or None
    tensors.check_tensor("q", q)
    if cu_seqlens_q is not None:
        tensors.check_int32("cu_seqlens_q", cu_seqlens_q, ("batch + 1",), "one more offset than sequences", q.device)
        if cu_seqlens_q.shape[0] < 1:
            raise ValueError(f"cu_seqlens_q: expected shape (batch + 1,), got {tuple(cu_seqlens_q.shape)}")
    for name, tensor, rank in (
        ("q", q, 4 if cu_seqlens_q is None else 3),
        ("k_cache", k_cache, 4),
        ("v_cache", v_cache, 4),
    ):
        tensors.check_tensor(name, tensor)
        if tensor.dim() != rank:
            raise ValueError(f"{name}: expected {rank} dimensions, got {tensor.dim()} in shape {tuple(tensor.shape)}")
    q, k, v = autocast_rows(k_cache, q, k, v)
    if page_table is not None and tensors.check_tensor("page_table", page_table).dim() != 2:
        raise ValueError(f"page_table: expected shape (batch, max_pages), got {tuple(page_table.shape)}")
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    conventions.check_per_entry("cache_leftpad", cache_leftpad, batch, q.device)
    conventions.check_per_entry("seqused_q", seqused_q, batch, q.device)
    _check_rotary_seqlens(rotary, batch, q.device)
    _check_new(q, k_cache, v_cache, k, v, batch, cache_seqlens, cu_seqlens_k_new)
    table = table_of_entries(batch, q.device, k_cache, page_table, cache_batch_idx, k)
    k_descale, v_descale = descales[1:] if is_version_2 else _cache_descales(q, k_cache, descales, batch)
    cache = Cache(k_cache, v_cache, table, k_descale, v_descale)
    seqlen_new = 0 if k is None or cu_seqlens_k_new is not None else k.shape[1]
    table_name = None if page_table is None else "block_table" if is_version_2 else "page_table"
    lengths = lengths_of(cache_seqlens, batch, q.device, cache.capacity, seqlen_new, table=table_name)
    if table_name is not None and (is_version_2 or cu_seqlens_k_new is not None):
        new = seqlen_new if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
        refuse_beyond_pages("cache_seqlens", table_name, lengths, cache.capacity, new, waits=is_version_2)
    cos, sin, rotary_seqlens, interleaved = rotary
    if cos is sin is None:
        rotary_seqlens = None
    starts = lengths if rotary_seqlens is None or rotary_seqlens is cache_seqlens else rotary_seqlens
    has_extras = not (chunk is cache_leftpad is alibi_slopes is None)
    try:
        turned = check_rotary(cos, sin, starts, interleaved, q, k is not None)
        return append_and_attend(
            q.bfloat16() if q.dtype == E4M3 and not is_version_2 else q,
            cache,
            lengths,
            None if k is None or v is None else (k, v),
            rotary=turned,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_new=cu_seqlens_k_new,
            seqused_q=seqused_q,
            max_seqlen_q=max_seqlen_q,
            num_splits=num_splits,
            extras=Extras(cache_leftpad, chunk, alibi_slopes) if has_extras else NO_EXTRAS,
            **options,
        )
    except REFUSALS as error:
        raise renamed(error, _NAMES) from None


def _check_rotary_seqlens(rotary: tuple[Any, Any, Any, Any], batch: int, device: torch.device) -> None:
    cos, sin, seqlens, _ = rotary
    conventions.check_per_entry("rotary_seqlens", seqlens, batch, device)
    if seqlens is None or cos is sin is None:  # flash-attn 3 takes positions where nothing is rotated
        return
    if is_on_host(seqlens) and int(seqlens.min()) < 0:
        raise ValueError(f"rotary_seqlens: expected positions from 0 on, got {seqlens.tolist()}")


def _cache_descales(
    q: Tensor, k_cache: Tensor, descales: tuple[Any, Any, Any], batch: int
) -> tuple[Tensor | None, Tensor | None]:
    """The descales of a cache's keys, multiplied by those of q, and the descales of its values."""
    if k_cache.dtype != E4M3:
        conventions.refuse("only e4m3 tensors have descales", q_descale=descales[0])
        conventions.refuse("only e4m3 tensors have descales", k_descale=descales[1], v_descale=descales[2])
        return None, None
    check_descales(descales, batch, k_cache)
    k_descale, v_descale = score_descale(descales), descales[2]
    if k_descale is None and v_descale is None:
        return None, None
    ones = torch.ones(batch, k_cache.shape[2], device=q.device)
    return ones if k_descale is None else k_descale, ones if v_descale is None else v_descale


def _check_new(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Any,
    v: Any,
    batch: int,
    cache_seqlens: Any,
    cu_seqlens_k_new: Any,
) -> None:
    """Check k and v: both or neither, and rows that fit the caches."""
    if k is None and v is None:
        return
    for name, new in sorted((("k", k), ("v", v)), key=tensors.is_missing):
        tensors.check_tensor(name, new, "a torch.Tensor where the other of k and v is given")
    if cache_seqlens is None:
        raise ValueError("cache_seqlens: expected an int or a (batch,) int32 tensor where k and v are given, got None")
    if cu_seqlens_k_new is not None:
        meaning = "one more offset than sequences"
        tensors.check_int32("cu_seqlens_k_new", cu_seqlens_k_new, (batch + 1,), meaning, q.device)
    rank = 4 if cu_seqlens_k_new is None else 3
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if new.dtype != q.dtype or new.device != q.device:
            raise TypeError(f"{name}: expected {q.dtype} on {q.device} like q, got {new.dtype} on {new.device}")
        count = k.shape[-3] if k.dim() == rank else "seqlen_new"
        expected = (batch, count, *cache.shape[2:]) if rank == 4 else (count, *cache.shape[2:])
        if tuple(new.shape) != expected:
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(new.shape)}")

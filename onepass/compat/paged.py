"""Attention of packed queries over keys in pages, for the functions of flash-attn that take a table with offsets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import steps
from ..api.decode import autocast_rows
from ..errors import REFUSALS, renamed
from ..validation import tensors
from ..validation.scalars import check_real
from . import probabilities
from .cached import NO_EXTRAS, Cache, Extras, attend, check_over_pages, refuse_beyond_pages

# name of an argument in messages of onepass -> its name in flash-attn
_NAMES = {
    "window": "window_size",
    "k_cache": "k",
    "v_cache": "v",
    "cache_seqlens": "cu_seqlens_k",
    "page_table": "block_table",
}


def over_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    lengths: Tensor,
    lengths_name: str = "cu_seqlens_k",
    block_table: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: Any,
    alibi_slopes: Tensor | None,
    starts: Tensor | None = None,
    returns_probabilities: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse, S_dmask and the state of dropout of packed queries over pages.

    Without dropout a backward through out and lse raises, and the state is 0. S_dmask is empty without dropout, and
    where it is not asked for.

    Args:
        lengths: (batch,) int32, the keys of each sequence. lengths_name: the name of their argument, for messages.
        options: causal, window, softcap and softmax_scale of `onepass.attention`.
    """
    tensors.check_tensor("block_table", block_table, "an int32 torch.Tensor")
    tensors.check_tensor("cu_seqlens_q", cu_seqlens_q, "an int32 torch.Tensor")
    for name, pages in (("k", k), ("v", v)):
        if tensors.check_tensor(name, pages).dim() != 4:
            expected = "4 dimensions (num_blocks, page_block_size, num_heads_kv, head_dim)"
            raise ValueError(f"{name}: expected {expected}, got shape {tuple(pages.shape)}")
    tensors.check_max_seqlens(max_seqlen_q, max_seqlen_k)
    (q,) = autocast_rows(k, q)
    cut = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
    extras = NO_EXTRAS if starts is alibi_slopes is None else Extras(starts, None, alibi_slopes)
    cache = Cache(k, v, block_table)
    try:
        dropout_p = check_real("dropout_p", dropout_p)
        if block_table.dim() == 2:
            refuse_beyond_pages(lengths_name, "block_table", lengths, cache.capacity)
        if not dropout_p:
            out, lse = attend(q, cache, lengths, **cut, extras=extras, **options)
            return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64, device=q.device)
        check_over_pages(q, cache, lengths, cu_seqlens_q, extras, options | {"max_seqlen_q": max_seqlen_q})
        longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k} if returns_probabilities else None
        return _with_dropout(q, cache, lengths, cu_seqlens_q, longest, dropout_p=dropout_p, extras=extras, **options)
    except REFUSALS as error:
        raise renamed(error, _NAMES | {"cache_seqlens": lengths_name}) from None


def _with_dropout(
    q: Tensor,
    cache: Cache,
    lengths: Tensor,
    cu_seqlens_q: Tensor,
    longest: dict[str, Any] | None,
    *,
    dropout_p: float,
    extras: Extras,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of `over_pages`, from pages gathered into one tensor. Lengths and pages are clamped, as in kernels.

    Args: longest: the sizes of S_dmask; None: it is not asked for.
    """
    batch, capacity = lengths.shape[0], cache.capacity
    assert cache.page_table is not None
    pages = cache.page_table.long().clamp(0, max(cache.k.shape[0] - 1, 0))
    filled = lengths.clamp(0, capacity)
    cut: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": torch.arange(batch + 1, dtype=torch.int32, device=q.device) * capacity,
        "seqused_k": filled,
    }
    call = steps.prepare(
        q,
        cache.k[pages].flatten(0, 2),
        cache.v[pages].flatten(0, 2),
        **cut,
        dropout_p=dropout_p,
        **extras.modifiers(q.shape[0], cu_seqlens_q, filled, None),
        **options,
    )
    out, lse = call.forward()
    assert call.dropout_state is not None
    probs = q.new_empty(0)
    if longest is not None:
        probs = probabilities.of_call(call, extras.alibi_slopes, cut | longest, extras.starts)
    return out, lse, probs, call.dropout_state

"""Attention of packed queries over keys in pages, for the functions of flash-attn that take a table beside offsets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import attention as api
from ..errors import REFUSALS, renamed
from ..validation import tensors
from ..validation.scalars import check_real
from .cached import NO_EXTRAS, Cache, Extras, attend

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
    block_table: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: Any,
    alibi_slopes: Tensor | None,
    starts: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """out and lse of packed queries over pages. Without dropout, a backward through them raises.

    Args:
        options: causal, window, softcap and softmax_scale of `onepass.attention`.
    """
    tensors.check_tensor("block_table", block_table, "an int32 torch.Tensor")
    for name, pages in (("k", k), ("v", v)):
        if tensors.check_tensor(name, pages).dim() != 4:
            expected = "4 dimensions (num_blocks, page_block_size, num_heads_kv, head_dim)"
            raise ValueError(f"{name}: expected {expected}, got shape {tuple(pages.shape)}")
    tensors.check_max_seqlens(max_seqlen_q, max_seqlen_k)
    extras = NO_EXTRAS if starts is alibi_slopes is None else Extras(starts, None, alibi_slopes)
    try:
        if check_real("dropout_p", dropout_p):
            tables = k, v, block_table, lengths, cu_seqlens_q
            return _with_dropout(q, *tables, dropout_p=dropout_p, extras=extras, **options)
        cut = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
        return attend(q, Cache(k, v, block_table), lengths, **cut, extras=extras, **options)
    except REFUSALS as error:
        raise renamed(error, _NAMES) from None


def _with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    cu_seqlens_q: Tensor,
    *,
    dropout_p: float,
    extras: Extras,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """out and lse by `onepass.attention_varlen`, over pages that are gathered into one tensor."""
    batch = lengths.shape[0]
    tensors.check_int32("page_table", block_table, (batch, "max_pages"), "(batch, max_pages)", q.device)
    pages = block_table.long().clamp(0, max(k.shape[0] - 1, 0))
    capacity = block_table.shape[1] * k.shape[1]
    filled = lengths.clamp(0, capacity)
    given = extras.modifiers(q.shape[0], cu_seqlens_q, filled, None)
    result = api.attention_varlen(
        q,
        k[pages].flatten(0, 2),
        v[pages].flatten(0, 2),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=torch.arange(batch + 1, dtype=torch.int32, device=q.device) * capacity,
        seqused_k=filled,
        dropout_p=dropout_p,
        return_lse=True,
        **given,
        **options,
    )
    return result.out, result.lse

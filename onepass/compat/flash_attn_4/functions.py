"""flash-attn 4's functions, with their names, arguments, order and defaults."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...validation import tensors
from ...validation.scalars import check_flag, check_int
from .. import conventions
from ..merging import merged
from ..sequences import Lengths
from .calls import GATHER, forward, options_of, refuse_foreign, returns_lse


class SchedulerMetadataTensorsTorch(NamedTuple):
    """What `get_scheduler_metadata` returns: its tensors are empty or missing, because onepass needs no schedule."""

    num_m_blocks_ptr: Tensor | None = None
    num_splits_dynamic_ptr: Tensor | None = None
    virtual_batch_idx_ptr: Tensor | None = None
    num_nheads_in_l2_ptr: Tensor | None = None
    tile_count_semaphore: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_total_splits_m_blocks: Tensor | None = None
    blocks_to_batch_idx: Tensor | None = None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: list | None = None,
    aux_scalars: tuple | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a dense batch.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim). k, v: (batch, seqlen_k, num_heads_kv, head_dim and head_dim_v);
            dtypes are those of `onepass.attention`, or float8_e4m3fn, which has no backward and gives bfloat16.
        softmax_scale: None = head_dim ** -0.5.
        causal, window_size: aligned at the bottom right; window_size is (left, right), inclusive, None = unbounded. One
            negative side shifts the band; two negative sides are unbounded.
        learnable_sink: (num_heads_q,) floating point: adds exp(learnable_sink[h]) to the denominators of head h.
        softcap: 0.0 = no cap.
        deterministic: ask for bitwise reproducible gradients.
        return_lse: return lse, which has a gradient.
        qv, gather_kv_indices, score_mod, score_mod_bwd, mask_mod, block_sparse_tensors, block_sparse_tensors_bwd: must
            be None.
        All others: have no effect.

    Returns: out (batch, seqlen_q, num_heads_q, head_dim_v); lse (batch, num_heads_q, seqlen_q) float32, or None where
    it is not asked for and no input requires a gradient.
    Raises: NotImplementedError for what must be None, and what `onepass.attention` raises.
    """
    conventions.refuse(conventions.QV, qv=qv)
    conventions.refuse(GATHER, gather_kv_indices=gather_kv_indices)
    refuse_foreign(
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    )
    conventions.check_hints(num_splits=num_splits, pack_gqa=pack_gqa)
    options = options_of(softmax_scale, causal, conventions.pair_of(window_size), softcap, learnable_sink)
    with_lse = returns_lse(return_lse, q, k, v, learnable_sink)
    out, lse = forward(q, k, v, Lengths(), options, deterministic=deterministic, e4m3_lse=with_lse)
    return out, lse if with_lse else None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list | None = None,
    aux_scalars: tuple | None = None,
    return_lse: bool = False,
    scheduler_metadata: SchedulerMetadataTensorsTorch | None = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of sequences of different lengths, where queries and keys are cut independently.

    Args:
        q: packed (total_q, num_heads_q, head_dim) with cu_seqlens_q, else (batch, seqlen_q, num_heads_q, head_dim).
        k, v: packed (total_k, num_heads_kv, ..) with cu_seqlens_k; in pages (num_pages, page_size, num_heads_kv, ..)
            with a page_table; else (batch, seqlen_k, num_heads_kv, ..).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, the start of each sequence and the end of the last one.
        seqused_q, seqused_k: (batch,) int32: only the first rows of a sequence exist. Masks are aligned to the rows
            that exist; out of the others is 0. With a page_table seqused_k=None means that all pages are full.
        page_table: (batch, max_pages) int32. If an input requires a gradient, the backward of out raises.
        max_seqlen_q, max_seqlen_k, min_seqlen_k: hints.
        num_splits: with a page_table the number of splits of the keys, which a GPU computes in parallel; 0 = chosen.
        All others: as for `flash_attn_func`.

    Returns: out in q's shape, with head_dim_v; lse (num_heads_q, total_q) or (batch, num_heads_q, seqlen_q) float32, or
    None where it is not asked for and no input requires a gradient.
    """
    conventions.refuse(conventions.QV, qv=qv)
    conventions.refuse(GATHER, gather_kv_indices=gather_kv_indices)
    foreign = {"score_mod": score_mod, "score_mod_bwd": score_mod_bwd, "mask_mod": mask_mod}
    refuse_foreign(**foreign, block_sparse_tensors=block_sparse_tensors)
    conventions.check_hints(num_splits=num_splits, pack_gqa=pack_gqa)
    options = options_of(softmax_scale, causal, conventions.pair_of(window_size), softcap, learnable_sink)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    with_lse = returns_lse(return_lse, q, k, v, learnable_sink)
    more: dict[str, Any] = {"num_splits": num_splits, "deterministic": deterministic, "e4m3_lse": with_lse}
    out, lse = forward(q, k, v, lengths, options, page_table=page_table, **more)
    return out, lse if with_lse else None


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Merge attention over disjoint sets of keys.

    Args:
        out_partial: (num_splits, batch, seqlen, num_heads, head_dim), or packed (num_splits, total_q, ..).
        lse_partial: (num_splits, batch, seqlen, num_heads), or packed, float32; heads are in the last dimension.
        out: a tensor to write into; None: a new one of out_dtype, by default that of out_partial.
        cu_seqlens, seqused, virtual_batch_idx: have no effect. They say in which order flash-attn computes, and which
            rows it may leave out; onepass merges all rows.

    Returns: out (batch, seqlen, num_heads, head_dim), and lse (batch, seqlen, num_heads), or None without return_lse.
    """
    return_lse = check_flag("return_lse", return_lse)
    found, lse = merged(out_partial, lse_partial, out, out_dtype)
    return found, lse if return_lse else None


@conventions.takes(
    "max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None, pack_gqa=None, "
    "causal=False, window_size_left=None, window_size_right=None, seqlen_k_new=0, cu_seqlens_q=None, "
    "cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, leftpad_k=None, "
    "seqlen_k_per_split=None, _arch=None"
)
def get_scheduler_metadata(a: Any) -> SchedulerMetadataTensorsTorch:
    """Metadata without a schedule, which `flash_attn_varlen_func` takes: onepass needs no schedule before a call."""
    lengths = a.cu_seqlens_q, a.cu_seqlens_k, a.seqused_q, a.seqused_k
    given = [tensors.check_tensor("cu_seqlens_q", t) for t in lengths if t is not None]
    if not given:
        raise ValueError("cu_seqlens_q: expected one of cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k, got None")
    empty = given[0].new_empty(0, dtype=torch.int32)
    is_split = check_int("num_splits", a.num_splits) > 1
    return SchedulerMetadataTensorsTorch(num_m_blocks_ptr=empty if is_split else None, cu_total_m_blocks=empty)

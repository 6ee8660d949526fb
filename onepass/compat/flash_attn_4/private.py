"""flash-attn 4's `_flash_attn_fwd` and `_flash_attn_bwd`, which its functions and other libraries call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api.decode import autocast_rows
from ...errors import REFUSALS, UnsupportedError, renamed
from ...quantization.codec import E4M3
from ...validation import tensors
from ...validation.scalars import check_flag, check_int
from .. import calls, conventions
from ..cached import Cache, attend, lengths_of
from ..gradients import check_stats
from ..merging import merged
from ..quantization import check_descales, score_descale
from ..sequences import Lengths

QV = "onepass does not add the scores of qv and v"
GATHER = "onepass does not gather keys by indices"
KERNEL_LANGUAGE = "it is code or data of another library's kernels"
# name of an argument in messages of onepass -> its name in flash-attn
_NAMES = {
    "window": "window_size",
    "sinks": "learnable_sink",
    "k_cache": "k",
    "v_cache": "v",
    "cache_seqlens": "seqused_k",
}


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


def opened(window: conventions.Window) -> conventions.Window:
    """The window for `onepass.attention`: None is unbounded, and so are two negative sides."""
    left, right = window
    if left is not None and right is not None and left < 0 and right < 0:
        return None, None
    return left, right


def options_of(
    softmax_scale: Any, causal: Any, window: conventions.Window, softcap: Any, learnable_sink: Tensor | None
) -> dict[str, Any]:
    """The scale, the mask and the sinks as arguments of `onepass.attention`."""
    return {
        "softmax_scale": softmax_scale,
        "causal": check_flag("causal", causal),
        "window": opened(window),
        "softcap": conventions.softcap_of(softcap),
        "sinks": learnable_sink,
    }


def refuse_foreign(**arguments: Any) -> None:
    """Refuse score_mod, mask_mod and block-sparse tensors. Arguments that only serve them are not refused."""
    conventions.refuse(KERNEL_LANGUAGE, **arguments)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    options: dict[str, Any],
    *,
    page_table: Tensor | None = None,
    descales: tuple[Any, Any, Any] = (None, None, None),
    num_splits: Any = 1,
    deterministic: Any = False,
    e4m3_lse: bool = True,
) -> tuple[Tensor, Any]:
    """out and lse in the shapes of the call. With a page_table, out and lse have no backward.

    Args: e4m3_lse: as for `calls.attend`.
    """
    if page_table is None:
        return calls.attend(q, k, v, lengths, options, descales, deterministic=deterministic, e4m3_lse=e4m3_lse)
    tensors.check_tensor("page_table", page_table, "an int32 torch.Tensor")
    conventions.refuse("keys in pages are not cut by offsets", cu_seqlens_k=lengths.cu_seqlens_k)
    if page_table.dim() != 2:
        raise ValueError(f"page_table: expected shape (batch, max_pages), got {tuple(page_table.shape)}")
    if lengths.cu_seqlens_q is not None:
        tensors.check_tensor("cu_seqlens_q", lengths.cu_seqlens_q, "an int32 torch.Tensor")
    rank = 4 if lengths.cu_seqlens_q is None else 3
    for name, t, count in (("q", q, rank), ("k", k, 4), ("v", v, 4)):
        if tensors.check_tensor(name, t).dim() != count:
            raise ValueError(f"{name}: expected {count} dimensions, got shape {tuple(t.shape)}")
    batch = page_table.shape[0]
    cache = Cache(k, v, page_table)
    if k.dtype == E4M3:
        check_descales(descales, batch, k)
        ones = torch.ones(batch, k.shape[-2], device=q.device)
        score, value = score_descale(descales), descales[2]
        cache = cache._replace(k_descale=ones if score is None else score, v_descale=ones if value is None else value)
    conventions.check_per_entry("seqused_k", lengths.seqused_k, batch, q.device)
    filled = lengths_of(lengths.seqused_k, batch, q.device, cache.capacity, 0, "seqused_k", "page_table")
    rows = q.bfloat16() if q.dtype == E4M3 else autocast_rows(k, q)[0]
    cut: dict[str, Any] = {"cu_seqlens_q": lengths.cu_seqlens_q, "seqused_q": lengths.seqused_q}
    try:
        if lengths.cu_seqlens_q is not None:
            meaning = "one more offset than rows of the page_table"
            tensors.check_int32("cu_seqlens_q", lengths.cu_seqlens_q, (batch + 1,), meaning, q.device)
            cut["max_seqlen_q"] = lengths.max_seqlen_q
        return attend(rows, cache, filled, num_splits=num_splits, **cut, **options)
    except REFUSALS as error:
        raise renamed(error, _NAMES) from None


def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: Tensor | None = None,
    tile_mn: tuple[int, int] | None = None,
    mma_pv_is_rs: bool | None = None,
    intra_wg_overlap: bool | None = None,
    num_threads: int = 384,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    _arch: int | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
) -> tuple[Tensor, Tensor | None, None, None, None]:
    """The forward of all functions of flash-attn 4.

    Args:
        out, lse: tensors that the results are copied into.
        All others: as for `flash_attn_varlen_func`; the ones that it does not have say how to compute, and have no
            effect.

    Returns: out; lse, or None where it is not asked for and no gradient is recorded; None three times.
    """
    conventions.refuse(QV, qv=qv)
    conventions.refuse(GATHER, gather_kv_indices=gather_kv_indices)
    refuse_foreign(score_mod=score_mod, mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors)
    conventions.check_hints(num_splits=num_splits, pack_gqa=pack_gqa)
    window = conventions.pair_of_sides(window_size_left, window_size_right)
    options = options_of(softmax_scale, causal, window, softcap, learnable_sink)
    conventions.check_into("out", out, q, v)
    if lse is not None:
        check_stats(q, {"lse": lse})
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    found, found_lse = forward(
        q,
        k,
        v,
        lengths,
        options,
        page_table=page_table,
        descales=(q_descale, k_descale, v_descale),
        num_splits=num_splits,
    )
    found = found if out is None else out.copy_(found)
    found_lse = found_lse if lse is None else lse.copy_(found_lse)
    wants_lse = lse is not None or returns_lse(return_lse, q, k, v, learnable_sink)
    return found, found_lse if wants_lse else None, None, None, None


def returns_lse(return_lse: Any, *inputs: Any) -> bool:
    """Whether flash-attn 4 returns lse: where it is asked for, or an input requires a gradient."""
    return check_flag("return_lse", return_lse) or any(isinstance(t, Tensor) and t.requires_grad for t in inputs)


def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    m_block_size: int = 64,
    n_block_size: int = 128,
    num_threads: int = 256,
    pack_gqa: bool = False,
    num_stages_Q: int = 2,
    num_stages_dO: int = 2,
    SdP_swapAB: bool = False,
    dKV_swapAB: bool = False,
    dQ_swapAB: bool = False,
    AtomLayoutMSdP: int = 2,
    AtomLayoutNdKV: int = 2,
    AtomLayoutMdQ: int = 2,
    V_in_regs: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple | None = None,
    block_sparse_tensors: Any = None,
    dlse: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """dq, dk and dv, in the given tensors if there are any, and with a learnable_sink its gradient.

    Args:
        out, lse: may belong to attention over more keys than the call has. dlse: the gradient of lse, or None.
        Arguments between window_size_right and cu_seqlens_q say how to compute, and have no effect.
    """
    foreign = {"score_mod": score_mod, "score_mod_bwd": score_mod_bwd, "mask_mod": mask_mod}
    refuse_foreign(**foreign, block_sparse_tensors=block_sparse_tensors)
    window = conventions.pair_of_sides(window_size_left, window_size_right)
    options = options_of(softmax_scale, causal, window, softcap, learnable_sink)
    options["deterministic"] = check_flag("deterministic", deterministic, allow_none=True) or None
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    gradients, dsink = calls.backward(dout, (q, k, v), out, lse, (dq, dk, dv), lengths, options, dlse, "lse")
    return gradients if learnable_sink is None else (*gradients, dsink)


def _flash_attn_bwd_sparse_mla(*args: Any, **kwargs: Any) -> None:
    """The backward of calls with qv or gather_kv_indices, which are refused."""
    raise UnsupportedError(f"qv, gather_kv_indices: expected a call without them: {QV}, and {GATHER}")


def _flash_attn_fwd_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    num_splits_dynamic_ptr: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    semaphore_to_reset: Tensor | None = None,
    *,
    _arch: int | None = None,
) -> None:
    """Merge attention over disjoint sets of keys into out and, if it is given, lse.

    Args:
        lse: (batch, seqlen, num_heads) or packed, float32. num_splits_dynamic_ptr: must be None.
        semaphore_to_reset: is set to 0.
        All others: as for `flash_attn_combine`.
    """
    conventions.refuse("all splits are merged", num_splits_dynamic_ptr=num_splits_dynamic_ptr)
    tensors.check_tensor("out", out)
    expected = tuple(tensors.check_tensor("lse_partial", lse_partial).shape[1:])
    if lse is not None and tuple(tensors.check_tensor("lse", lse).shape) != expected:
        raise ValueError(f"lse: expected shape {expected}, got {tuple(lse.shape)}")
    _, found = merged(out_partial, lse_partial, out, None)
    if lse is not None:
        lse.copy_(found)
    if semaphore_to_reset is not None:
        semaphore_to_reset.zero_()


def scheduler_metadata(lengths: tuple[Tensor | None, ...], num_splits: Any) -> SchedulerMetadataTensorsTorch:
    """Metadata of sequences with these offsets or lengths; at least one of them is a tensor."""
    given = [tensors.check_tensor("cu_seqlens_q", t) for t in lengths if t is not None]
    if not given:
        raise ValueError("cu_seqlens_q: expected one of cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k, got None")
    empty = given[0].new_empty(0, dtype=torch.int32)
    is_split = check_int("num_splits", num_splits) > 1
    return SchedulerMetadataTensorsTorch(num_m_blocks_ptr=empty if is_split else None, cu_total_m_blocks=empty)

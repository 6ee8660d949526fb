"""flash-attn 4's `_flash_attn_fwd` and `_flash_attn_bwd`, which its functions and other libraries call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import UnsupportedError
from ...validation import tensors
from ...validation.scalars import check_flag
from .. import conventions
from ..flash_attn_4.calls import GATHER, forward, options_of, refuse_foreign, returns_lse
from ..merging import merged
from ..sequences import Lengths
from .gradients import backward, check_stats


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
    conventions.refuse(conventions.QV, qv=qv)
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
    gradients, dsink = backward(dout, (q, k, v), out, lse, (dq, dk, dv), lengths, options, dlse, "lse")
    return gradients if learnable_sink is None else (*gradients, dsink)


def _flash_attn_bwd_sparse_mla(*args: Any, **kwargs: Any) -> None:
    """The backward of calls with qv or gather_kv_indices, which are refused."""
    raise UnsupportedError(f"qv, gather_kv_indices: expected a call without them: {conventions.QV}, and {GATHER}")


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

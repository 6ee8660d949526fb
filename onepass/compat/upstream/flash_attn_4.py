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


@conventions.takes(
    "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, "
    "window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, "
    "intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None, "
    "mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None, "
    "aux_scalars=None, q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None, "
    "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, "
    "gather_bwd_recompute_p=False"
)
def _flash_attn_fwd(a: Any) -> tuple[Tensor, Tensor | None, None, None, None]:
    """The forward of all functions of flash-attn 4.

    Args:
        out, lse: tensors that the results are copied into.
        All others: as for `flash_attn_varlen_func`; the ones that it does not have say how to compute, and have no
            effect.

    Returns: out; lse, or None where it is not asked for and no gradient is recorded; None three times.
    """
    conventions.refuse(conventions.QV, qv=a.qv)
    conventions.refuse(GATHER, gather_kv_indices=a.gather_kv_indices)
    refuse_foreign(score_mod=a.score_mod, mask_mod=a.mask_mod, block_sparse_tensors=a.block_sparse_tensors)
    conventions.check_hints(num_splits=a.num_splits, pack_gqa=a.pack_gqa)
    window = conventions.pair_of_sides(a.window_size_left, a.window_size_right)
    options = options_of(a.softmax_scale, a.causal, window, a.softcap, a.learnable_sink)
    conventions.check_into("out", a.out, a.q, a.v)
    if a.lse is not None:
        check_stats(a.q, {"lse": a.lse})
    descales = a.q_descale, a.k_descale, a.v_descale
    more: dict[str, Any] = {"page_table": a.page_table, "descales": descales, "num_splits": a.num_splits}
    found, found_lse = forward(a.q, a.k, a.v, Lengths.of(a), options, **more)
    found = found if a.out is None else a.out.copy_(found)
    found_lse = found_lse if a.lse is None else a.lse.copy_(found_lse)
    wants_lse = a.lse is not None or returns_lse(a.return_lse, a.q, a.k, a.v, a.learnable_sink)
    return found, found_lse if wants_lse else None, None, None, None


@conventions.takes(
    "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, "
    "window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2, "
    "num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, "
    "AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
    "max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None, "
    "score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None, "
    "learnable_sink=None"
)
def _flash_attn_bwd(a: Any) -> tuple[Tensor, ...]:
    """dq, dk and dv, in the given tensors if there are any, and with a learnable_sink its gradient.

    Args:
        out, lse: may belong to attention over more keys than the call has. dlse: the gradient of lse, or None.
        Arguments between window_size_right and cu_seqlens_q say how to compute, and have no effect.
    """
    foreign = {"score_mod": a.score_mod, "score_mod_bwd": a.score_mod_bwd, "mask_mod": a.mask_mod}
    refuse_foreign(**foreign, block_sparse_tensors=a.block_sparse_tensors)
    window = conventions.pair_of_sides(a.window_size_left, a.window_size_right)
    options = options_of(a.softmax_scale, a.causal, window, a.softcap, a.learnable_sink)
    options["deterministic"] = check_flag("deterministic", a.deterministic, allow_none=True) or None
    buffers = a.dq, a.dk, a.dv
    found = backward(a.dout, (a.q, a.k, a.v), a.out, a.lse, buffers, Lengths.of(a), options, a.dlse, "lse")
    gradients, dsink = found
    return gradients if a.learnable_sink is None else (*gradients, dsink)


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

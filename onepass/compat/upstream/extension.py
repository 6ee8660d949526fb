"""The functions of flash-attn's extension module `flash_attn_2_cuda`, which some libraries call by position."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..flash_attn.kvcache import flash_attn_with_kvcache
from .flash_attn import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)


def _refuse_generator(generator: Any) -> None:
    if generator is not None:
        given = type(generator).__name__
        raise RuntimeError(f"gen_: expected None, got {given}: the `generator` argument is no longer supported")


def _into(out_: Tensor | None, out: Tensor) -> Tensor:
    return out if out_ is None else out_.copy_(out)


def _fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_: Tensor | None,
    alibi_slopes: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen_: Any = None,
) -> list[Tensor]:
    _refuse_generator(gen_)
    out, *rest = _flash_attn_forward(
        q,
        k,
        v,
        p_dropout,
        softmax_scale,
        is_causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        return_softmax,
    )
    return [_into(out_, out), *rest]


def _varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen_: Any = None,
    num_splits: int = 0,
) -> list[Tensor]:
    _refuse_generator(gen_)
    out, *rest = _flash_attn_varlen_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        p_dropout,
        softmax_scale,
        is_causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        return_softmax,
        block_table,
        leftpad_k,
        seqused_k,
        zero_tensors,
        num_splits,
    )
    return [_into(out_, out), *rest]


def _bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq_: Tensor | None,
    dk_: Tensor | None,
    dv_: Tensor | None,
    alibi_slopes: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen_: Any = None,
    rng_state: Tensor | None = None,
) -> list[Tensor]:
    _refuse_generator(gen_)
    dq, dk, dv = (torch.empty_like(t) if b is None else b for t, b in ((q, dq_), (k, dk_), (v, dv_)))
    softmax_d = _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        p_dropout,
        softmax_scale,
        is_causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state,
    )
    return [dq, dk, dv, softmax_d]


def _varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq_: Tensor | None,
    dk_: Tensor | None,
    dv_: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen_: Any = None,
    rng_state: Tensor | None = None,
) -> list[Tensor]:
    _refuse_generator(gen_)
    dq, dk, dv = (torch.empty_like(t) if b is None else b for t, b in ((q, dq_), (k, dk_), (v, dv_)))
    softmax_d = _flash_attn_varlen_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        p_dropout,
        softmax_scale,
        is_causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state,
        zero_tensors,
    )
    return [dq, dk, dv, softmax_d]


def _fwd_kvcache(
    q: Tensor,
    kcache: Tensor,
    vcache: Tensor,
    k_: Tensor | None,
    v_: Tensor | None,
    seqlens_k_: Tensor | None,
    rotary_cos_: Tensor | None,
    rotary_sin_: Tensor | None,
    cache_batch_idx_: Tensor | None,
    leftpad_k_: Tensor | None,
    block_table_: Tensor | None,
    alibi_slopes_: Tensor | None,
    out_: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    is_rotary_interleaved: bool,
    num_splits: int,
) -> list[Tensor]:
    out, lse = flash_attn_with_kvcache(
        q,
        kcache,
        vcache,
        k_,
        v_,
        rotary_cos_,
        rotary_sin_,
        seqlens_k_,
        cache_batch_idx_,
        leftpad_k_,
        block_table_,
        softmax_scale,
        is_causal,
        (window_size_left, window_size_right),
        softcap,
        is_rotary_interleaved,
        alibi_slopes_,
        num_splits,
        return_softmax_lse=True,
    )
    return [_into(out_, out), lse]


flash_attn_gpu = SimpleNamespace(
    fwd=_fwd, varlen_fwd=_varlen_fwd, bwd=_bwd, varlen_bwd=_varlen_bwd, fwd_kvcache=_fwd_kvcache
)

"""From tensors to a launch of the merge, see combine.py: of a forward's splits, and of `onepass.merge_partials`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...problem import AttentionProblem
from .. import compile
from ..arguments import element_type, fake_tensor
from ..blocks.integers import ceil_div
from ..config import VECTOR_BYTES, ForwardConfigSm80
from ..config_decode import DecodeConfigSm80
from .launch import arch_of, vector_bytes, with_rows

MERGE_WARPS = 2


def merge_blocks(out: Tensor) -> int:
    """Thread blocks of a merge to out (batch, seqlen_q, num_heads, head_dim_v)."""
    return ceil_div(out.shape[0] * out.shape[1] * out.shape[2], MERGE_WARPS)


def merge_partials(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """`onepass.merge_partials` of stacked tensors, packed ones too: as a batch of one."""
    if outs.dim() == 4:
        out, lse = merge_partials(outs.unsqueeze(1), lses.unsqueeze(1))
        return out[0], lse[0]
    out, lse = outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])
    if merge_blocks(out):
        outs = with_rows(outs)
        aligned_to, arch = vector_bytes(outs), arch_of(outs.device)
        kernel = merge_kernel_of(outs.dtype, out.dtype, out.shape[-1], False, aligned_to, False, arch)
        kernel(outs, lses.contiguous(), out, lse, None, merge_blocks(out))
    return out, lse


def merge_request(attention: AttentionProblem, config: ForwardConfigSm80, arch: str) -> tuple:
    """The arguments of `compile.get` for the merge kernel of a forward by splits."""
    is_early = isinstance(config, DecodeConfigSm80) and config.early_merge
    dv, float32 = attention.head_dim_v, torch.float32
    # of a workspace: aligned as its rows are
    aligned_to = next(n for n in VECTOR_BYTES if dv * float32.itemsize % n == 0)
    return _merge_request(float32, attention.dtype, dv, attention.has_sinks, aligned_to, is_early, arch)


def _merge_request(
    partial: torch.dtype,
    dtype: torch.dtype,
    head_dim_v: int,
    has_sinks: bool,
    vector_bytes: int,
    is_early: bool,
    arch: str,
) -> tuple:
    key = (
        ("partial", partial),
        ("dtype", dtype),
        ("head_dim_v", head_dim_v),
        ("has_sinks", has_sinks),
        ("vector_bytes", vector_bytes),
        ("is_early", is_early),
    )
    trace = functools.partial(trace_merge, partial, dtype, head_dim_v, has_sinks, vector_bytes, is_early)
    return "merge_splits", (key,), arch, trace


@functools.lru_cache(maxsize=256)
def merge_kernel_of(*arguments: Any) -> Callable:
    return compile.get(*_merge_request(*arguments))


def trace_merge(
    partial: torch.dtype,
    dtype: torch.dtype,
    head_dim_v: int,
    has_sinks: bool,
    vector_bytes: int,
    is_early: bool = False,
) -> tuple:
    from cutlass import Float32, Int32
    from cutlass.cute.runtime import make_fake_stream

    from ..combine import WARPS, Merge

    assert WARPS == MERGE_WARPS
    # out is new, so its rows are aligned as those of the partials are
    out_bytes = vector_bytes // partial.itemsize * dtype.itemsize
    arguments = (
        fake_tensor(element_type(partial), None, None, None, None, head_dim_v, align_bytes=vector_bytes),
        fake_tensor(Float32, None, None, None, None, align_bytes=4),
        fake_tensor(element_type(dtype), None, None, None, head_dim_v, align_bytes=out_bytes),
        fake_tensor(Float32, None, None, None, align_bytes=4),
        fake_tensor(Float32, None, align_bytes=4) if has_sinks else None,
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return Merge(head_dim_v, vector_bytes, is_early), arguments

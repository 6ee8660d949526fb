"""From tensors to a launch of the merge kernel, for the splits of a forward and for `onepass.merge_partials`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...geometry.integers import ceil_div
from ...geometry.splits import FEW_PARTIALS
from ...problem import AttentionProblem
from ..arguments import MergeArguments
from ..compiler import compile
from ..compiler.compile import CompileRequest
from ..config import VECTOR_BYTES, LaunchConfig
from ..config.arch import arch_of
from ..config.decode import DecodeConfigSm80
from .arguments import element_type, fake_integers, fake_tensor, traced, vector_bytes, with_rows

ROWS = 2  # rows of a thread block in which each warp has one row
ROW_WARPS = 8  # warps that share a row of more than FEW_PARTIALS splits


@dataclass(frozen=True)
class MergeKey:
    """The key of a merge kernel: everything that its code depends on.

    Attributes:
        partial, dtype: the dtypes of partial_out and of out.
        has_offsets: queries are packed and have sinks.
        others: as `Merge` in device/memory_bound/merge.py has them.
    """

    partial: torch.dtype
    dtype: torch.dtype
    head_dim_v: int
    has_sinks: bool
    vector_bytes: int
    row_warps: int
    is_early: bool = False
    has_offsets: bool = False


def row_warps(num_partials: int) -> int:
    """The warps that share a row when so many partials are merged: a guess, used for all published figures."""
    return 1 if num_partials <= FEW_PARTIALS else ROW_WARPS


def merge_blocks(out: Tensor, num_partials: int) -> int:
    """Thread blocks of a merge to out (batch, seqlen_q, num_heads, head_dim_v)."""
    rows = out.shape[0] * out.shape[1] * out.shape[2]
    return ceil_div(rows, ROWS) if row_warps(num_partials) == 1 else rows


def merge_partials(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """`onepass.merge_partials` of stacked tensors, packed ones too: as a batch of one."""
    if outs.dim() == 4:
        out, lse = merge_partials(outs.unsqueeze(1), lses.unsqueeze(1))
        return out[0], lse[0]
    out, lse = outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])
    num_partials = outs.shape[0]
    if blocks := merge_blocks(out, num_partials):
        outs = with_rows(outs)
        key = MergeKey(outs.dtype, out.dtype, out.shape[-1], False, vector_bytes(outs), row_warps(num_partials))
        merge_kernel_of(key, arch_of(outs.device))(
            *MergeArguments(outs, lses.contiguous(), out, lse, num_blocks=blocks)
        )
    return out, lse


def merge_request(attention: AttentionProblem, config: LaunchConfig, num_splits: int, arch: str) -> CompileRequest:
    """The request for the merge kernel of a forward by splits."""
    is_early = isinstance(config, DecodeConfigSm80) and config.early_merge
    dv, float32 = attention.head_dim_v, torch.float32
    # rows of a workspace are aligned as far as their length allows
    aligned_to = next(n for n in VECTOR_BYTES if dv * float32.itemsize % n == 0)
    has_offsets = attention.has_sinks and attention.is_packed
    alignment_and_warps = aligned_to, row_warps(num_splits), is_early
    key = MergeKey(float32, attention.out_dtype, dv, attention.has_sinks, *alignment_and_warps, has_offsets)
    return _request(key, arch)


def _request(key: MergeKey, arch: str) -> CompileRequest:
    pairs = tuple((name, getattr(key, name)) for name in key.__dataclass_fields__)
    return CompileRequest("merge_splits", (pairs,), arch, functools.partial(trace_merge, key))


@functools.lru_cache(maxsize=256)
def merge_kernel_of(key: MergeKey, arch: str) -> Callable:
    return compile.get(*_request(key, arch))


def trace_merge(key: MergeKey) -> tuple:
    from cutlass import Float32, Int32

    from ..device.memory_bound.merge import WARPS, Merge

    assert WARPS == ROWS
    # out is new, so its rows are aligned as those of the partials are
    out_bytes = key.vector_bytes // key.partial.itemsize * key.dtype.itemsize
    partial, dtype = element_type(key.partial), element_type(key.dtype)
    arguments = MergeArguments(
        partial_out=fake_tensor(partial, None, None, None, None, key.head_dim_v, align_bytes=key.vector_bytes),
        partial_lse=fake_tensor(Float32, None, None, None, None, align_bytes=4),
        out=fake_tensor(dtype, None, None, None, key.head_dim_v, align_bytes=out_bytes),
        lse=fake_tensor(Float32, None, None, None, align_bytes=4),
        sinks=fake_tensor(Float32, None, align_bytes=4) if key.has_sinks else None,
        cu_seqlens_q=fake_integers(key.has_offsets),
        num_blocks=Int32(1),
    )
    return traced(Merge(key.head_dim_v, key.vector_bytes, key.row_warps, key.is_early), arguments)

"""From tensors to a launch of the merge, see combine.py: of a forward's splits, and of `onepass.merge_partials`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...geometry.integers import ceil_div
from ...geometry.splits import FEW_PARTS
from ...problem import AttentionProblem
from ..compiler import compile
from ..config import VECTOR_BYTES, LaunchConfig
from ..config.arch import arch_of
from ..config.decode import DecodeConfigSm80
from .arguments import element_type, fake_tensor, vector_bytes, with_rows

ROWS = 2  # of a thread block, if a warp has one
ROW_WARPS = 8  # that more than FEW_PARTS parts are shared out to


@dataclass(frozen=True)
class MergeKey:
    """What the code of a merge depends on.

    Attributes: those of `combine.Merge`, the dtypes of partial_out and of out, and has_offsets: of packed queries with
    sinks.
    """

    partial: torch.dtype
    dtype: torch.dtype
    head_dim_v: int
    has_sinks: bool
    vector_bytes: int
    row_warps: int
    is_early: bool = False
    has_offsets: bool = False


def row_warps(num_parts: int) -> int:
    """Warps of a row in the merge of so many parts. A guess; docs/decoding.md's figures were measured with it."""
    return 1 if num_parts <= FEW_PARTS else ROW_WARPS


def merge_blocks(out: Tensor, num_parts: int) -> int:
    """Thread blocks of a merge to out (batch, seqlen_q, num_heads, head_dim_v)."""
    rows = out.shape[0] * out.shape[1] * out.shape[2]
    return ceil_div(rows, ROWS) if row_warps(num_parts) == 1 else rows


def merge_partials(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """`onepass.merge_partials` of stacked tensors, packed ones too: as a batch of one."""
    if outs.dim() == 4:
        out, lse = merge_partials(outs.unsqueeze(1), lses.unsqueeze(1))
        return out[0], lse[0]
    out, lse = outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])
    num_parts = outs.shape[0]
    if blocks := merge_blocks(out, num_parts):
        outs = with_rows(outs)
        key = MergeKey(outs.dtype, out.dtype, out.shape[-1], False, vector_bytes(outs), row_warps(num_parts))
        merge_kernel_of(key, arch_of(outs.device))(outs, lses.contiguous(), out, lse, None, None, blocks)
    return out, lse


def merge_request(attention: AttentionProblem, config: LaunchConfig, num_splits: int, arch: str) -> tuple:
    """The arguments of `compile.get` for the merge kernel of a forward by splits."""
    is_early = isinstance(config, DecodeConfigSm80) and config.early_merge
    dv, float32 = attention.head_dim_v, torch.float32
    # of a workspace: aligned as its rows are
    aligned_to = next(n for n in VECTOR_BYTES if dv * float32.itemsize % n == 0)
    has_offsets = attention.has_sinks and attention.is_packed
    of_parts = aligned_to, row_warps(num_splits), is_early
    key = MergeKey(float32, attention.dtype, dv, attention.has_sinks, *of_parts, has_offsets)
    return _request(key, arch)


def _request(key: MergeKey, arch: str) -> tuple:
    pairs = tuple((name, getattr(key, name)) for name in key.__dataclass_fields__)
    return "merge_splits", (pairs,), arch, functools.partial(trace_merge, key)


@functools.lru_cache(maxsize=256)
def merge_kernel_of(key: MergeKey, arch: str) -> Callable:
    return compile.get(*_request(key, arch))


def trace_merge(key: MergeKey) -> tuple:
    from cutlass import Float32, Int32
    from cutlass.cute.runtime import make_fake_stream

    from ..device.memory_bound.merge import WARPS, Merge

    assert WARPS == ROWS
    # out is new, so its rows are aligned as those of the partials are
    out_bytes = key.vector_bytes // key.partial.itemsize * key.dtype.itemsize
    arguments = (
        fake_tensor(element_type(key.partial), None, None, None, None, key.head_dim_v, align_bytes=key.vector_bytes),
        fake_tensor(Float32, None, None, None, None, align_bytes=4),
        fake_tensor(element_type(key.dtype), None, None, None, key.head_dim_v, align_bytes=out_bytes),
        fake_tensor(Float32, None, None, None, align_bytes=4),
        fake_tensor(Float32, None, align_bytes=4) if key.has_sinks else None,
        fake_tensor(Int32, None, align_bytes=4) if key.has_offsets else None,
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return Merge(key.head_dim_v, key.vector_bytes, key.row_warps, key.is_early), arguments

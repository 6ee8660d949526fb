"""`attention_decode` on the Ampere kernels: append and rotate, forward by splits, merge. The host reads no value.

append.py     only with new keys or rotary positions
forward.py    of one split writes out and lse, of more float32 partials of both to a workspace
combine.py    merges them
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...decode_problem import DecodeInputs, DecodeProblem
from ...decode_validation import read_cache_lengths
from ...outputs import empty_outputs
from ...problem import AttentionInputs, AttentionProblem
from .. import compile
from ..arguments import element_type, fake_tensor, score_scales, strided_tensor, window_bounds
from ..blocks.integers import ceil_div
from ..config import ForwardConfigSm80
from ..config_decode import DecodeConfigSm80
from ..heuristics_decode import decode_config_sm80, num_splits_sm80
from .launch import arch_of, grid, vector_bytes, with_rows

MERGE_WARPS = 4
KEYS_OF_A_DESCALE = 16  # of an e4m3 cache: what its blocks and pages are multiples of, see blocks/cache_descales.py


def decode(problem: DecodeProblem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
    """out and lse of a call, as `onepass.tiled.decode` gives them."""
    if problem.check_values:
        read_cache_lengths(inputs)
    attention = problem.attention
    q = inputs.q
    if inputs.seqlen_new or inputs.rotary_cos is not None:
        q = append(problem, inputs)
    if 0 in (attention.batch, attention.seqlen_q, attention.seqlen_k):
        out, lse = empty_outputs(attention, AttentionInputs(inputs.q, inputs.k_cache, inputs.v_cache))
        return out.zero_(), lse.fill_(-math.inf)
    return prepare(problem, inputs.q.device)(inputs._replace(q=q))


def unsupported(problem: DecodeProblem) -> str | None:
    """Why these kernels do not compute a problem whose attention they do; None if they do."""
    attention = problem.attention
    if not attention.has_e4m3_cache:
        return None
    if attention.dtype.itemsize != 2:
        return f"expected q in bfloat16 or float16 with an e4m3 cache, got {attention.dtype}"
    if attention.head_dim % 2 or attention.head_dim_v % 2:
        return f"expected even head dims of an e4m3 cache, got {attention.head_dim} and {attention.head_dim_v}"
    if problem.kv_block is not None and problem.kv_block % KEYS_OF_A_DESCALE:
        return f"expected a kv_block that is a multiple of {KEYS_OF_A_DESCALE} keys, got {problem.kv_block}"
    return None


# ---------------------------------------------------------------- forward


@functools.lru_cache(maxsize=4096)
def prepare(problem: DecodeProblem, device: torch.device) -> Launch:
    """What every call of a problem on one device shares; holds no tensor."""
    attention, arch = problem.attention, arch_of(device)
    config = decode_config_sm80(attention, arch)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return Launch(problem, config, arch, *splits_of(problem, config, arch, num_sms))


def splits_of(problem: DecodeProblem, config: ForwardConfigSm80, arch: str, num_sms: int) -> tuple[int, int, bool]:
    """num_splits, split_blocks (see blocks/splits.py), and whether there are partials to be merged."""
    if problem.split_size is not None:
        # always merged: how many there are must not matter
        return ceil_div(problem.attention.seqlen_k, problem.split_size), problem.split_size // config.block_keys, True
    num_splits = problem.num_splits or num_splits_sm80(problem.attention, config, arch, num_sms)
    return num_splits, 0, num_splits > 1


@dataclass(frozen=True)
class Launch:
    """What every call of one problem passes to its kernels beside the tensors."""

    problem: DecodeProblem
    config: ForwardConfigSm80
    arch: str
    num_splits: int
    split_blocks: int
    is_split: bool

    def __call__(self, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
        attention = self.problem.attention
        out, lse = empty_outputs(attention, AttentionInputs(inputs.q, inputs.k_cache, inputs.v_cache))
        qkv = tuple(with_rows(t) for t in (inputs.q, as_pairs(inputs.k_cache), as_pairs(inputs.v_cache)))
        target = out, lse
        if self.is_split:
            target = self.workspace(inputs.q)
        aligned_to = vector_bytes(*qkv) if self.is_split else vector_bytes(*qkv, out)
        sinks = None if inputs.sinks is None else inputs.sinks.float().contiguous()
        kernel_of(self.problem, replace(self.config, vector_bytes=aligned_to), self.arch, self.is_split)(
            *qkv, *target, *self.other_arguments(inputs, None if self.is_split else sinks)
        )
        if self.is_split:
            merge(*target, out, lse, sinks, self.arch)
        return out, lse

    def workspace(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """float32 out (splits, batch, seqlen_q, num_heads_q, head_dim_v) and lse (splits, batch, num_heads_q, seqlen_q)
        of every split."""
        p = self.problem.attention
        out = q.new_empty((self.num_splits, p.batch, p.seqlen_q, p.num_heads_q, p.head_dim_v), dtype=torch.float32)
        return out, q.new_empty((self.num_splits, p.batch, p.num_heads_q, p.seqlen_q), dtype=torch.float32)

    def other_arguments(self, inputs: DecodeInputs, sinks: Tensor | None) -> tuple:
        """Those of `ForwardSm80.__call__` after lse."""
        attention = self.problem.attention
        return (
            sinks,
            None,
            None,
            inputs.cache_seqlens.contiguous(),
            *score_scales(attention),
            *window_bounds(attention),
            *grid(attention, self.config),
            None if inputs.page_table is None else with_rows(inputs.page_table),
            inputs.seqlen_new,
            *((self.num_splits, self.split_blocks) if self.is_split else (None, None)),
            *descale_arguments(self.problem, inputs),
        )


def as_pairs(cache: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """An e4m3 cache as what copies take it for, pairs in 16 bits, half as many columns; others as they are."""
    return cache.view(dtype) if cache.dtype == torch.float8_e4m3fn else cache


def descale_arguments(problem: DecodeProblem, inputs: DecodeInputs) -> tuple[Tensor | None, Tensor | None, int | None]:
    """k_descale, v_descale (batch or num_pages, num_heads_kv, blocks), by strides of 0 where some are one; kv_block."""
    if inputs.k_descale is None or inputs.v_descale is None:
        return None, None, None
    by_block, (outer, size, heads) = problem.kv_block is not None, inputs.k_cache.shape[:3]
    blocks = 1
    if not (by_block and problem.is_paged):
        outer, blocks = inputs.q.shape[0], ceil_div(size, problem.kv_block) if by_block else 1
    descales = (t if t.dim() == 3 else t.unsqueeze(-1) for t in (inputs.k_descale, inputs.v_descale))
    k_descale, v_descale = (t.expand(outer, heads, blocks) for t in descales)
    return k_descale, v_descale, None if problem.is_paged else problem.kv_block


@functools.lru_cache(maxsize=4096)
def kernel_of(problem: DecodeProblem, config: ForwardConfigSm80, arch: str, is_split: bool) -> Callable:
    return compile.get(*compile_request(problem, config, arch, is_split))


def compile_request(problem: DecodeProblem, config: ForwardConfigSm80, arch: str, is_split: bool) -> tuple:
    """The arguments of `compile.get` for the forward kernel of this problem."""
    by_block = problem.kv_block is not None
    kind = (
        ("is_split", is_split),
        ("is_paged", problem.is_paged),
        ("has_descales", problem.has_descales),
        ("descales_by_block", by_block),
    )
    key = _of_a_split(problem.attention, is_split).static(), config, kind
    return "decode_sm80", key, arch, functools.partial(trace, problem, config, arch, is_split)


def _of_a_split(attention: AttentionProblem, is_split: bool) -> AttentionProblem:
    """Sinks join when splits are merged."""
    return replace(attention, has_sinks=False) if is_split else attention


def trace(problem: DecodeProblem, config: ForwardConfigSm80, arch: str, is_split: bool) -> tuple:
    """The forward kernel of a static problem and stand-ins for its arguments, for `compile`."""
    from cutlass import Float16, Float32, Int32
    from cutlass.cute.runtime import make_fake_stream

    from .decode import DecodeSm80
    from .forward import ForwardSm80

    attention = _of_a_split(problem.attention, is_split)
    dtype, mask, by_block = element_type(attention.dtype), attention.mask, problem.kv_block is not None
    d, dv = attention.head_dim, attention.head_dim_v

    def rows(size: int, dtype: type = dtype) -> Any:
        return fake_tensor(dtype, None, None, None, size, align_bytes=config.vector_bytes)

    out, caches = rows(dv), (rows(d), rows(dv))
    if attention.has_e4m3_cache:
        caches = tuple(rows(size // 2, Float16) for size in (d, dv))
    if is_split:
        # of 16-bit types a thread stores two columns, over an e4m3 cache four, of float32 those of its copies
        align_bytes = config.vector_bytes if attention.dtype == torch.float32 else 4 if dv % 2 else 8
        if attention.has_e4m3_cache:
            align_bytes = 16 if dv % 4 == 0 else 8
        out = fake_tensor(Float32, None, None, None, None, dv, align_bytes=align_bytes)
    splits = (None,) if is_split else ()
    arguments = (
        rows(d),
        *caches,
        out,
        fake_tensor(Float32, *splits, None, None, None, align_bytes=4),
        fake_tensor(Float32, None, align_bytes=4) if attention.has_sinks else None,
        None,
        None,
        fake_tensor(Int32, None, align_bytes=4),
        Float32(1.0),
        None if attention.softcap is None else Float32(1.0),
        None if mask.window_left is None else Int32(0),
        None if mask.window_right is None else Int32(0),
        Int32(1),
        Int32(1),
        fake_tensor(Int32, None, None, align_bytes=4) if problem.is_paged else None,
        Int32(0),
        *((Int32(1), Int32(0)) if is_split else (None, None)),
        *((strided_tensor(Float32, 3), strided_tensor(Float32, 3)) if problem.has_descales else (None, None)),
        Int32(1) if by_block and not problem.is_paged else None,
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    kernel = DecodeSm80 if isinstance(config, DecodeConfigSm80) else ForwardSm80
    return kernel(attention, config, dtype, arch, is_split, problem.is_paged, by_block), arguments


# ---------------------------------------------------------------- merge


def merge(partial_out: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, arch: str) -> None:
    """Fill out and lse from partials (splits, ..), lse in float32: see combine.py."""
    num_blocks = ceil_div(out.shape[0] * out.shape[1] * out.shape[2], MERGE_WARPS)
    if num_blocks:
        kernel = merge_kernel_of(partial_out.dtype, out.dtype, out.shape[-1], sinks is not None, arch)
        kernel(partial_out, partial_lse, out, lse, sinks, num_blocks)


def merge_partials(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """`onepass.merge_partials` of stacked tensors, packed ones too: as a batch of one."""
    if outs.dim() == 4:
        out, lse = merge_partials(outs.unsqueeze(1), lses.unsqueeze(1))
        return out[0], lse[0]
    out, lse = outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])
    merge(with_rows(outs), lses.contiguous(), out, lse, None, arch_of(outs.device))
    return out, lse


@functools.lru_cache(maxsize=256)
def merge_kernel_of(partial: torch.dtype, dtype: torch.dtype, head_dim_v: int, has_sinks: bool, arch: str) -> Callable:
    key = (("partial", partial), ("dtype", dtype), ("head_dim_v", head_dim_v), ("has_sinks", has_sinks))
    of_kernel = functools.partial(trace_merge, partial, dtype, head_dim_v, has_sinks)
    return compile.get("merge_splits", (key,), arch, of_kernel)


def trace_merge(partial: torch.dtype, dtype: torch.dtype, head_dim_v: int, has_sinks: bool) -> tuple:
    from cutlass import Float32, Int32
    from cutlass.cute.runtime import make_fake_stream

    from ..combine import WARPS, Merge

    assert WARPS == MERGE_WARPS
    arguments = (
        fake_tensor(element_type(partial), None, None, None, None, head_dim_v, align_bytes=partial.itemsize),
        fake_tensor(Float32, None, None, None, None, align_bytes=4),
        fake_tensor(element_type(dtype), None, None, None, head_dim_v, align_bytes=dtype.itemsize),
        fake_tensor(Float32, None, None, None, align_bytes=4),
        fake_tensor(Float32, None, align_bytes=4) if has_sinks else None,
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return Merge(head_dim_v), arguments


# ---------------------------------------------------------------- append


def append(problem: DecodeProblem, inputs: DecodeInputs) -> Tensor:
    """New keys and values into the cache. Returns: the rotated queries, or q itself without rotary positions."""
    is_rotary = inputs.rotary_cos is not None
    q_out = torch.empty_like(inputs.q, memory_format=torch.contiguous_format) if is_rotary else inputs.q
    arguments = append_arguments(problem, inputs, q_out)
    if arguments[-1]:
        arch = arch_of(inputs.q.device)
        append_kernel_of(AppendKey.of(problem, inputs), arch)(*arguments)
    return q_out


def append_arguments(problem: DecodeProblem, inputs: DecodeInputs, q_out: Tensor) -> tuple:
    """Those of `Append.__call__` but the stream; the last is the number of rows to be written."""
    is_rotary, has_new = inputs.rotary_cos is not None, inputs.seqlen_new > 0
    rows = max(inputs.seqlen_new, inputs.q.shape[1] if is_rotary else 0)
    new = (with_rows(t) for t in (inputs.k_new, inputs.v_new) if t is not None) if has_new else (None, None)
    return (
        with_rows(inputs.q) if is_rotary else None,
        q_out if is_rotary else None,
        *new,
        *((as_pairs(t, torch.int16) for t in (inputs.k_cache, inputs.v_cache)) if has_new else (None, None)),
        inputs.cache_seqlens.contiguous(),
        with_rows(inputs.page_table) if has_new and inputs.page_table is not None else None,
        *(None if t is None else with_rows(t) for t in (inputs.rotary_cos, inputs.rotary_sin)),
        *(descale_arguments(problem, inputs) if has_new else (None, None, None)),
        inputs.seqlen_new,
        rows,
        rows * inputs.q.shape[0],
    )


@dataclass(frozen=True)
class AppendKey:
    """What the code of an append depends on."""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    has_new: bool
    is_paged: bool
    rotary: tuple[torch.dtype, int, bool] | None  # of cos and sin: dtype, columns; interleaved
    is_e4m3: bool = False  # the cache
    has_descales: bool = False
    descales_by_block: bool = False  # or page

    @classmethod
    def of(cls, problem: DecodeProblem, inputs: DecodeInputs) -> AppendKey:
        cos, has_new = inputs.rotary_cos, inputs.seqlen_new > 0
        rotary = None if cos is None else (cos.dtype, cos.shape[1], problem.rotary_interleaved)
        sizes = problem.attention.head_dim, problem.attention.head_dim_v
        is_e4m3 = has_new and problem.attention.has_e4m3_cache
        scales = (is_e4m3, is_e4m3 and problem.has_descales, is_e4m3 and problem.kv_block is not None)
        return cls(problem.attention.dtype, *sizes, has_new, has_new and problem.is_paged, rotary, *scales)


@functools.lru_cache(maxsize=256)
def append_kernel_of(key: AppendKey, arch: str) -> Callable:
    pairs = tuple((name, getattr(key, name)) for name in key.__dataclass_fields__)
    return compile.get("append_to_cache", (pairs,), arch, functools.partial(trace_append, key))


def trace_append(key: AppendKey) -> tuple:
    from cutlass import Float32, Int16, Int32
    from cutlass.cute.runtime import make_fake_stream

    from ..append import Append

    def rows(size: int, is_given: bool) -> Any:
        if not is_given:
            return None
        return fake_tensor(element_type(key.dtype), None, None, None, size, align_bytes=key.dtype.itemsize)

    def pairs(size: int) -> Any:
        return fake_tensor(Int16, None, None, None, size // 2, align_bytes=2)

    def table() -> Any:
        if key.rotary is None:
            return None
        dtype, half, _ = key.rotary
        return fake_tensor(element_type(dtype), None, half, align_bytes=dtype.itemsize)

    is_rotary, sizes = key.rotary is not None, (key.head_dim, key.head_dim_v)
    arguments = (
        *(rows(key.head_dim, is_rotary) for _ in range(2)),
        *(rows(size, key.has_new) for size in sizes),
        *((pairs(size) for size in sizes) if key.is_e4m3 else (rows(size, key.has_new) for size in sizes)),
        fake_tensor(Int32, None, align_bytes=4),
        fake_tensor(Int32, None, None, align_bytes=4) if key.is_paged else None,
        table(),
        table(),
        *((strided_tensor(Float32, 3), strided_tensor(Float32, 3)) if key.has_descales else (None, None)),
        Int32(1) if key.descales_by_block and not key.is_paged else None,
        Int32(0),
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    by_page = key.descales_by_block and key.is_paged
    return Append(key.rotary is not None and key.rotary[2], key.is_e4m3, by_page), arguments

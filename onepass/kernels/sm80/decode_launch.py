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
from ...errors import UnsupportedError
from ...outputs import empty_outputs
from ...problem import AttentionInputs, AttentionProblem
from .. import compile
from ..arguments import element_type, fake_tensor, score_scales, strided_tensor, window_bounds
from ..blocks.integers import ceil_div
from ..config import VECTOR_BYTES, ForwardConfigSm80
from ..config_decode import DecodeConfigSm80
from ..heuristics_decode import decode_config_sm80, num_splits_sm80
from .launch import arch_of, grid, vector_bytes, with_rows

MERGE_WARPS = 2
KEYS_OF_A_DESCALE = 16  # of an e4m3 cache: what its blocks and pages are multiples of, see blocks/cache_descales.py


def decode(problem: DecodeProblem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
    """out and lse of a call, as `onepass.tiled.decode` gives them."""
    if problem.check_values:
        read_cache_lengths(inputs)
    return prepare(problem, inputs.q.device)(inputs)


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


@functools.lru_cache(maxsize=4096)
def prepare(problem: DecodeProblem, device: torch.device) -> Callable[[DecodeInputs], tuple[Tensor, Tensor]]:
    """`decode` for calls of one problem on one device, but for values that are to be checked; holds no tensor."""
    attention = problem.attention
    if 0 in (attention.batch, attention.seqlen_q, attention.seqlen_k):
        return functools.partial(_without_keys, problem)
    arch = arch_of(device)
    config = decode_config_sm80(attention, arch)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return Launch(problem, config, arch, *splits_of(problem, config, arch, num_sms))


def compile_requests(
    problem: DecodeProblem, inputs: DecodeInputs, device: torch.device
) -> list[tuple[ForwardConfigSm80 | None, tuple]]:
    """The kernels of a call whose tensors are aligned, in the order in which they run, each with its configuration, as
    the arguments of `compile.get`."""
    arch = arch_of(device)
    requests: list[tuple[ForwardConfigSm80 | None, tuple]] = []
    if inputs.seqlen_new or inputs.rotary_cos is not None:
        requests.append((None, append_request(AppendKey.of(problem, inputs), arch)))
    launch = prepare(problem, device)
    if isinstance(launch, Launch):
        requests.append((launch.config, compile_request(problem, launch.config, arch, launch.is_split)))
        if launch.is_split:
            requests.append((None, merge_request(problem.attention, arch)))
    return requests


def _without_keys(problem: DecodeProblem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
    append(problem, inputs)
    out, lse = empty_outputs(problem.attention, AttentionInputs(*inputs[:3]))
    return out.zero_(), lse.fill_(-math.inf)


# ---------------------------------------------------------------- forward


def splits_of(problem: DecodeProblem, config: ForwardConfigSm80, arch: str, num_sms: int) -> tuple[int, int, bool]:
    """num_splits, split_blocks (see blocks/splits.py), and whether there are partials to be merged."""
    if problem.split_size is not None:
        # always merged: how many there are must not matter
        return ceil_div(problem.attention.seqlen_k, problem.split_size), problem.split_size // config.block_keys, True
    num_splits = problem.num_splits or num_splits_sm80(problem.attention, config, arch, num_sms)
    return num_splits, 0, num_splits > 1


class Launch:
    """What every call of one problem passes to its kernels beside the tensors, and the kernels, once they are there.

    Args: num_splits, split_blocks, is_split: see `splits_of`.
    """

    def __init__(
        self,
        problem: DecodeProblem,
        config: ForwardConfigSm80,
        arch: str,
        num_splits: int,
        split_blocks: int,
        is_split: bool,
    ):
        self.problem, self.config, self.arch = problem, config, arch
        self.num_splits, self.is_split = num_splits, is_split
        attention = problem.attention
        self.scalars = *score_scales(attention), *window_bounds(attention), *grid(attention, config)
        self.splits = (num_splits, split_blocks) if is_split else (None, None)
        self._forwards: dict[int, Callable] = {}  # by the bytes of a copy
        self._merge: Callable | None = None

    def __call__(self, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
        q, k_cache, v_cache = inputs.q, as_pairs(inputs.k_cache), as_pairs(inputs.v_cache)
        out, lse = empty_outputs(self.problem.attention, AttentionInputs(*inputs[:3]))
        if inputs.k_new is not None or inputs.rotary_cos is not None:
            q = append(self.problem, inputs)
        q = with_rows(q)
        sinks = None if inputs.sinks is None else inputs.sinks.float().contiguous()
        if not self.is_split:
            kernel = self.kernel(vector_bytes(q, k_cache, v_cache, out))
            kernel(q, k_cache, v_cache, out, lse, *self.other_arguments(inputs, sinks))
            return out, lse
        partials = self.workspace(q)
        kernel = self.kernel(vector_bytes(q, k_cache, v_cache))
        kernel(q, k_cache, v_cache, *partials, *self.other_arguments(inputs, None))
        if self._merge is None:
            self._merge = compile.get(*merge_request(self.problem.attention, self.config, self.arch))
        self._merge(*partials, out, lse, sinks, merge_blocks(out))
        return out, lse

    def kernel(self, aligned_to: int) -> Callable:
        """The forward for tensors that copies of so many bytes can read."""
        found = self._forwards.get(aligned_to)
        if found is None:
            config = replace(self.config, vector_bytes=aligned_to)
            found = compile.get(*compile_request(self.problem, config, self.arch, self.is_split))
            self._forwards[aligned_to] = found
        return found

    def workspace(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """float32 out (splits, batch, seqlen_q, num_heads_q, head_dim_v) and lse (splits, batch, num_heads_q, seqlen_q)
        of every split."""
        p, n = self.problem.attention, self.num_splits
        b, m, h, dv, dtype = p.batch, p.seqlen_q, p.num_heads_q, p.head_dim_v, torch.float32
        out = q.new_empty_strided((n, b, m, h, dv), (b * m * h * dv, m * h * dv, h * dv, dv, 1), dtype=dtype)
        return out, q.new_empty_strided((n, b, h, m), (b * h * m, h * m, m, 1), dtype=dtype)

    def other_arguments(self, inputs: DecodeInputs, sinks: Tensor | None) -> tuple:
        """Those of `ForwardSm80.__call__` after lse."""
        return (
            sinks,
            None,
            None,
            inputs.cache_seqlens.contiguous(),
            *self.scalars,
            None if inputs.page_table is None else with_rows(inputs.page_table),
            inputs.seqlen_new,
            *self.splits,
            *descale_arguments(self.problem, inputs),
        )


def as_pairs(cache: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """An e4m3 cache as what copies take it for, pairs in 16 bits, half as many columns; others as they are.

    Raises: UnsupportedError where not every row begins with a pair.
    """
    if cache.dtype != torch.float8_e4m3fn:
        return cache
    if any(n % 2 for n in (cache.storage_offset(), *cache.stride()[:-1])):
        raise UnsupportedError(f"e4m3 cache: expected rows at even addresses, got strides {cache.stride()}")
    return cache.view(dtype)


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
    return compile.get(*append_request(key, arch))


def append_request(key: AppendKey, arch: str) -> tuple:
    """The arguments of `compile.get` for an append kernel."""
    pairs = tuple((name, getattr(key, name)) for name in key.__dataclass_fields__)
    return "append_to_cache", (pairs,), arch, functools.partial(trace_append, key)


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

"""From tensors to a launch of the kernel that writes new keys and values to a cache and rotates, see append.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...problem.decode import DecodeInputs, DecodeProblem
from ..compiler import compile
from ..config import VECTOR_BYTES
from .arguments import element_type, fake_tensor, strided_tensor, vector_bytes, with_rows
from .cache import as_pairs, descale_arguments


def needs_append(inputs: DecodeInputs) -> bool:
    if inputs.k_new is None and inputs.rotary_cos is None:
        return False
    return inputs.q.numel() > 0 or (inputs.k_new is not None and inputs.k_new.numel() > 0)


def append(problem: DecodeProblem, inputs: DecodeInputs, arch: str) -> Tensor:
    """New keys and values into the cache. Returns: the rotated queries, or q itself without rotary positions."""
    if inputs.q.numel() == 0:
        append(problem, _with_rows_to_rotate(inputs), arch)
        return inputs.q
    is_rotary = inputs.rotary_cos is not None
    q_out = torch.empty_like(inputs.q, memory_format=torch.contiguous_format) if is_rotary else inputs.q
    arguments = append_arguments(problem, inputs, q_out)
    if arguments[-1]:
        key = AppendKey.of(problem, inputs, arguments[:6])
        if inputs.seqlen_new:
            # autograd sees no write of a kernel: a graph that saved a cache would go back through the new keys
            torch.autograd.graph.increment_version((inputs.k_cache, inputs.v_cache))
        append_kernel_of(key, arch)(*arguments)
    return q_out


def _with_rows_to_rotate(inputs: DecodeInputs) -> DecodeInputs:
    """The inputs, with the new keys in the place of q where that is empty: a kernel that rotates is given queries."""
    return inputs if inputs.q.numel() or inputs.k_new is None else inputs._replace(q=inputs.k_new)


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
    vector_bytes: int
    is_e4m3: bool = False  # the cache
    has_descales: bool = False
    descales_by_block: bool = False  # or page

    @classmethod
    def of(cls, problem: DecodeProblem, inputs: DecodeInputs, rows: Sequence[Tensor | None]) -> AppendKey:
        """Args: rows: the tensors that are read and written by rows."""
        cos, has_new = inputs.rotary_cos, inputs.seqlen_new > 0
        rotary = None if cos is None else (cos.dtype, cos.shape[1], problem.rotary_interleaved)
        attention = problem.attention
        aligned_to = vector_bytes(*(t for t in rows if t is not None))
        if cos is not None:
            # halves are exchanged by whole vectors
            half_bytes = 0 if problem.rotary_interleaved else cos.shape[1] * attention.dtype.itemsize
            aligned_to = next(n for n in VECTOR_BYTES if (aligned_to | half_bytes) % n == 0)
        is_e4m3 = has_new and attention.has_e4m3_cache
        scales = (is_e4m3, is_e4m3 and problem.has_descales, is_e4m3 and problem.kv_block is not None)
        sizes = attention.head_dim, attention.head_dim_v
        return cls(attention.dtype, *sizes, has_new, has_new and problem.is_paged, rotary, aligned_to, *scales)


@functools.lru_cache(maxsize=256)
def append_kernel_of(key: AppendKey, arch: str) -> Callable:
    return compile.get(*append_request(key, arch))


def request_of_call(problem: DecodeProblem, inputs: DecodeInputs, arch: str) -> tuple:
    """`append_request` of a call that needs one."""
    inputs = _with_rows_to_rotate(inputs)
    q_out = inputs.q if inputs.rotary_cos is None else torch.empty_like(inputs.q)
    rows = append_arguments(problem, inputs, q_out)[:6]
    return append_request(AppendKey.of(problem, inputs, rows), arch)


def append_request(key: AppendKey, arch: str) -> tuple:
    """The arguments of `compile.get` for an append kernel."""
    pairs = tuple((name, getattr(key, name)) for name in key.__dataclass_fields__)
    return "append_to_cache", (pairs,), arch, functools.partial(trace_append, key)


def trace_append(key: AppendKey) -> tuple:
    from cutlass import Float32, Int16, Int32
    from cutlass.cute.runtime import make_fake_stream

    from ..device.memory_bound.append import Append

    def rows(size: int, is_given: bool) -> Any:
        if not is_given:
            return None
        return fake_tensor(element_type(key.dtype), None, None, None, size, align_bytes=key.vector_bytes)

    def pairs(size: int) -> Any:
        return fake_tensor(Int16, None, None, None, size // 2, align_bytes=max(2, key.vector_bytes // 2))

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
    by_page, interleaved = key.descales_by_block and key.is_paged, is_rotary and key.rotary[2]
    return Append(interleaved, key.vector_bytes, key.is_e4m3, by_page), arguments

"""From tensors to a launch of the kernel that writes new keys to a cache and rotates (device/memory_bound)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...problem.decode import DecodeInputs, DecodeProblem
from ..arguments import AppendArguments
from ..compiler import compile
from ..compiler.compile import CompileRequest
from ..config import VECTOR_BYTES
from .arguments import (
    as_pairs,
    descale_arguments,
    element_type,
    fake_integers,
    fake_tensor,
    strided_tensor,
    traced,
    vector_bytes,
    with_rows,
)


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
    if arguments.num_blocks:
        if inputs.seqlen_new:
            # autograd sees no write of a kernel: a graph that saved a cache would go back through the new keys
            torch.autograd.graph.increment_version((inputs.k_cache, inputs.v_cache))
        append_kernel_of(AppendKey.of(problem, inputs, arguments), arch)(*arguments)
    return q_out


def _with_rows_to_rotate(inputs: DecodeInputs) -> DecodeInputs:
    """The inputs, with the new keys in the place of q where that is empty: a kernel that rotates is given queries."""
    return inputs if inputs.q.numel() or inputs.k_new is None else inputs._replace(q=inputs.k_new)


def append_arguments(problem: DecodeProblem, inputs: DecodeInputs, q_out: Tensor) -> AppendArguments:
    """The arguments of the kernel for these tensors."""
    rotary: dict[str, Any] = {}
    if inputs.rotary_cos is not None and inputs.rotary_sin is not None:
        cos, sin = with_rows(inputs.rotary_cos), with_rows(inputs.rotary_sin)
        rotary = {"q": with_rows(inputs.q), "q_out": q_out, "cos": cos, "sin": sin}
    new: dict[str, Any] = {}
    if inputs.seqlen_new > 0:
        assert inputs.k_new is not None
        assert inputs.v_new is not None
        new = {"k_new": with_rows(inputs.k_new), "v_new": with_rows(inputs.v_new)}
        new |= {"k_cache": as_pairs(inputs.k_cache, torch.int16), "v_cache": as_pairs(inputs.v_cache, torch.int16)}
        new["page_table"] = None if inputs.page_table is None else with_rows(inputs.page_table)
        new["k_descale"], new["v_descale"], new["kv_block"] = descale_arguments(problem, inputs)
    rows = max(inputs.seqlen_new, inputs.q.shape[1] if rotary else 0)
    return AppendArguments(
        cache_seqlens=inputs.cache_seqlens.contiguous(),
        seqlen_new=inputs.seqlen_new,
        rows=rows,
        num_blocks=rows * inputs.q.shape[0],
        **rotary,
        **new,
    )


@dataclass(frozen=True)
class AppendKey:
    """The key of an append kernel: everything that its code depends on."""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    has_new: bool
    is_paged: bool
    rotary: tuple[torch.dtype, int, bool] | None  # (dtype and columns of cos and sin, interleaved)
    vector_bytes: int
    is_e4m3: bool = False  # the cache
    has_descales: bool = False
    descales_by_block: bool = False  # or page

    @classmethod
    def of(cls, problem: DecodeProblem, inputs: DecodeInputs, arguments: AppendArguments) -> AppendKey:
        """The key of the kernel that these arguments need."""
        cos, has_new = inputs.rotary_cos, inputs.seqlen_new > 0
        rotary = None if cos is None else (cos.dtype, cos.shape[1], problem.rotary_interleaved)
        attention = problem.attention
        by_rows = (arguments.q, arguments.q_out, arguments.k_new, arguments.v_new, arguments.k_cache, arguments.v_cache)
        aligned_to = vector_bytes(*(t for t in by_rows if t is not None))
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


def request_of_call(problem: DecodeProblem, inputs: DecodeInputs, arch: str) -> CompileRequest:
    """`append_request` of a call that needs one."""
    inputs = _with_rows_to_rotate(inputs)
    q_out = inputs.q if inputs.rotary_cos is None else torch.empty_like(inputs.q)
    return append_request(AppendKey.of(problem, inputs, append_arguments(problem, inputs, q_out)), arch)


def append_request(key: AppendKey, arch: str) -> CompileRequest:
    """The request for an append kernel."""
    pairs = tuple((name, getattr(key, name)) for name in key.__dataclass_fields__)
    return CompileRequest("append_to_cache", (pairs,), arch, functools.partial(trace_append, key))


def trace_append(key: AppendKey) -> tuple:
    from cutlass import Float32, Int16, Int32

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
    k_cache, v_cache = (pairs(size) if key.is_e4m3 else rows(size, key.has_new) for size in sizes)
    descale = strided_tensor if key.has_descales else lambda kind, rank: None
    arguments = AppendArguments(
        q=rows(key.head_dim, is_rotary),
        q_out=rows(key.head_dim, is_rotary),
        k_new=rows(key.head_dim, key.has_new),
        v_new=rows(key.head_dim_v, key.has_new),
        k_cache=k_cache,
        v_cache=v_cache,
        cache_seqlens=fake_integers(),
        page_table=fake_tensor(Int32, None, None, align_bytes=4) if key.is_paged else None,
        cos=table(),
        sin=table(),
        k_descale=descale(Float32, 3),
        v_descale=descale(Float32, 3),
        kv_block=Int32(1) if key.descales_by_block and not key.is_paged else None,
        seqlen_new=Int32(0),
        rows=Int32(1),
        num_blocks=Int32(1),
    )
    by_page, interleaved = key.descales_by_block and key.is_paged, key.rotary is not None and key.rotary[2]
    return traced(Append(interleaved, key.vector_bytes, key.is_e4m3, by_page), arguments)

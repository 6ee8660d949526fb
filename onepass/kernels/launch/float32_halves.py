"""From float32 tensors to their float16 parts, see parts.py: a kernel each for q, k and v."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...geometry.integers import ceil_div
from ...problem import AttentionProblem
from ..compiler import compile
from ..config import HOPPER, head_dim_tile, value_columns
from .arguments import fake_tensor

BLOCK = 64  # rows of a scale


class Kernel(NamedTuple):
    """What the code of a kernel depends on."""

    head_dim: int
    is_v: bool = False  # V
    is_packed: bool = False
    has_seqused: bool = False


class Parts(NamedTuple):
    """What the forward kernel takes in place of q, k and v.

    Attributes:
        q, k: float16, as the tensors, but of a row first the high parts of all columns that the kernel is compiled for,
            then the low ones; and their scales, as `blocks.fp8.DescaleTensors`.
        v: the same of each block of columns that a launch takes.
    """

    q: tuple[Tensor, Tensor]
    k: tuple[Tensor, Tensor]
    v: list[tuple[Tensor, Tensor]]


def split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    value_blocks: int,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Parts:
    """The parts of float32 q, k and v (batch, seqlen, heads, head_dim) or packed, aligned to 16 bytes.

    Args: value_blocks: of the columns of v, see `config.value_blocks`.
    """
    columns = v.chunk(value_blocks, dim=-1)
    return Parts(
        _split(q, cu_seqlens_q, None, False),
        _split(k, cu_seqlens_k, seqused_k, False),
        [_split(block, cu_seqlens_k, seqused_k, True) for block in columns],
    )


def _split(x: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None, is_v: bool) -> tuple[Tensor, Tensor]:
    seqlen, num_heads, head_dim = x.shape[-3:]
    is_packed = cu_seqlens is not None
    columns = 2 * head_dim_tile(head_dim)
    # the rows of a head side by side: a tile is one piece of memory
    target = x.new_empty(*x.shape[:-3], num_heads, seqlen, columns, dtype=torch.float16).transpose(-2, -3)
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    blocks = seqlen // BLOCK + batch if is_packed else ceil_div(seqlen, BLOCK)
    scale = x.new_empty(*x.shape[:-3], num_heads, blocks, dtype=torch.float32)
    kernel_of(Kernel(head_dim, is_v, is_packed, seqused is not None))(
        x,
        target,
        scale,
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        None if seqused is None else seqused.contiguous(),
        blocks + is_packed,  # one more for rows of no sequence
    )
    if is_packed:  # each sequence sees the blocks of all
        scale = scale.as_strided((batch, num_heads, blocks), (0, blocks, 1))
    return target, scale


@functools.lru_cache(maxsize=256)
def kernel_of(kernel: Kernel) -> Callable:
    return compile.get(*compile_request(kernel))


def compile_requests(problem: AttentionProblem) -> list[tuple]:
    """The arguments of `compile.get` for the kernels of a call: those of q, k (if it is another) and v."""
    head_dim, is_packed, has_seqused = problem.head_dim, problem.is_packed, problem.has_seqused_k
    of_q, of_k = (Kernel(head_dim, False, is_packed, is_used) for is_used in (False, has_seqused))
    of_v = Kernel(value_columns(problem), True, is_packed, has_seqused)
    return [compile_request(kernel) for kernel in dict.fromkeys((of_q, of_k, of_v))]


def compile_request(kernel: Kernel) -> tuple:
    pairs = tuple(zip(kernel._fields, kernel, strict=True))
    return "split_rows", (pairs,), HOPPER, functools.partial(trace, kernel)


def trace(kernel: Kernel) -> tuple:
    """The kernel and stand-ins for its arguments, for `compile`."""
    from cutlass import Float16, Float32, Int32
    from cutlass.cute.runtime import make_fake_stream

    from ..device.memory_bound.float32_halves import Float32Halves

    batch = () if kernel.is_packed else (None,)
    return Float32Halves(kernel.head_dim, kernel.is_v), (
        fake_tensor(Float32, *batch, None, None, kernel.head_dim, align_bytes=16),
        fake_tensor(Float16, *batch, None, None, 2 * head_dim_tile(kernel.head_dim), align_bytes=16),
        fake_tensor(Float32, *batch, None, None, align_bytes=4),
        fake_tensor(Int32, None, align_bytes=4) if kernel.is_packed else None,
        fake_tensor(Int32, None, align_bytes=4) if kernel.has_seqused else None,
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )

"""From float32 tensors to their float16 halves: a launch each for q, k and v of a kernel in device/memory_bound."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...geometry.integers import ceil_div
from ...problem import AttentionProblem
from ...quantization.codec import SCALE_BLOCK
from ..arguments import Float32HalvesArguments
from ..compiler import compile
from ..compiler.compile import CompileRequest
from ..config import HOPPER, head_dim_tile, value_columns
from .arguments import fake_integers, fake_tensor, traced


class Kernel(NamedTuple):
    """The key of a kernel: everything that its code depends on."""

    head_dim: int
    is_v: bool = False
    is_packed: bool = False
    has_seqused: bool = False


class Halves(NamedTuple):
    """The tensors that the forward kernel takes instead of q, k and v.

    Attributes:
        q, k: float16, shaped as the tensors, but with twice the columns that the kernel is compiled for: a row holds
            its high halves and then its low ones; and their scales (batch, heads, blocks).
        v: the halves and scales of each block of columns that a launch takes.
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
) -> Halves:
    """The halves of float32 q, k and v (batch, seqlen, heads, head_dim) or packed, aligned to 16 bytes.

    Args: value_blocks: the number of blocks of columns of v, see `config.value_blocks`.
    """
    columns = v.chunk(value_blocks, dim=-1)
    return Halves(
        _split(q, cu_seqlens_q, None, False),
        _split(k, cu_seqlens_k, seqused_k, False),
        [_split(block, cu_seqlens_k, seqused_k, True) for block in columns],
    )


def _split(x: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None, is_v: bool) -> tuple[Tensor, Tensor]:
    seqlen, num_heads, head_dim = x.shape[-3:]
    is_packed = cu_seqlens is not None
    columns = 2 * head_dim_tile(head_dim)
    # the rows of a head are contiguous: a tile is one piece of memory
    target = x.new_empty(*x.shape[:-3], num_heads, seqlen, columns, dtype=torch.float16).transpose(-2, -3)
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    blocks = seqlen // SCALE_BLOCK + batch if is_packed else ceil_div(seqlen, SCALE_BLOCK)
    scale = x.new_empty(*x.shape[:-3], num_heads, blocks, dtype=torch.float32)
    kernel_of(Kernel(head_dim, is_v, is_packed, seqused is not None))(
        *Float32HalvesArguments(
            x,
            target,
            scale,
            cu_seqlens=None if cu_seqlens is None else cu_seqlens.contiguous(),
            seqused=None if seqused is None else seqused.contiguous(),
            num_blocks=blocks + is_packed,  # one more for rows of no sequence
        )
    )
    if is_packed:  # each sequence sees the blocks of all
        scale = scale.as_strided((batch, num_heads, blocks), (0, blocks, 1))
    return target, scale


@functools.lru_cache(maxsize=256)
def kernel_of(kernel: Kernel) -> Callable:
    return compile.get(*compile_request(kernel))


def compile_requests(problem: AttentionProblem) -> list[CompileRequest]:
    """The request for the kernels of a call: those of q, k (if it is another) and v."""
    head_dim, is_packed, has_seqused = problem.head_dim, problem.is_packed, problem.has_seqused_k
    q_kernel, k_kernel = (Kernel(head_dim, False, is_packed, is_used) for is_used in (False, has_seqused))
    v_kernel = Kernel(value_columns(problem), True, is_packed, has_seqused)
    return [compile_request(kernel) for kernel in dict.fromkeys((q_kernel, k_kernel, v_kernel))]


def compile_request(kernel: Kernel) -> CompileRequest:
    pairs = tuple(zip(kernel._fields, kernel, strict=True))
    return CompileRequest("split_rows", (pairs,), HOPPER, functools.partial(trace, kernel))


def trace(kernel: Kernel) -> tuple:
    """The kernel and stand-ins for its arguments, for `compile`."""
    from cutlass import Float16, Float32, Int32

    from ..device.memory_bound.float32_halves import Float32Halves

    batch = () if kernel.is_packed else (None,)
    arguments = Float32HalvesArguments(
        x=fake_tensor(Float32, *batch, None, None, kernel.head_dim, align_bytes=16),
        target=fake_tensor(Float16, *batch, None, None, 2 * head_dim_tile(kernel.head_dim), align_bytes=16),
        scale=fake_tensor(Float32, *batch, None, None, align_bytes=4),
        cu_seqlens=fake_integers(kernel.is_packed),
        seqused=fake_integers(kernel.has_seqused),
        num_blocks=Int32(1),
    )
    return traced(Float32Halves(kernel.head_dim, kernel.is_v), arguments)

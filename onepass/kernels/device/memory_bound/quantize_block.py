"""What the kernels that round to e4m3 share: the rows of a thread block, and the scale of a block of them."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....geometry.integers import minimum, select
from ....geometry.tile_scheduler import LANES
from ....quantization.codec import E4M3_MAX, SCALE_BLOCK, SCALE_OF_ZEROS, TINY
from ..blocks.memory.ptx import emit, pack_four


class Tile(NamedTuple):
    """What a thread block works on: SCALE_BLOCK rows of a head of a batch entry (packed sequences have one entry)."""

    head: Int32
    block: Int32
    entry: Int32


class RowBlock(NamedTuple):
    """The rows of a thread block.

    Attributes:
        start: the first row in the tensors.
        num_rows: the rows that the tensors have, up to SCALE_BLOCK; 0 or less: none.
        num_used: the rows whose values count; the others become 0.
        sequence: the sequence of the rows: the batch entry, unless packed. For rows that belong to none, it is the
            number of sequences.
    """

    start: Int32
    num_rows: Int32
    num_used: Int32
    sequence: Int32


@cute.jit
def row_block(
    seqlen: Int32, block: Int32, entry: Int32, cu_seqlens: cute.Tensor | None, seqused: cute.Tensor | None
) -> RowBlock:
    """The rows of a block of a batch entry.

    The blocks of packed sequence s begin with number cu_seqlens[s] // SCALE_BLOCK + s. After those of the last sequence
    come blocks of rows that belong to none.
    """
    start, num_rows, sequence = block * SCALE_BLOCK, seqlen - block * SCALE_BLOCK, entry
    num_used = num_rows
    if cutlass.const_expr(cu_seqlens is not None):
        batch = cute.size(cu_seqlens) - 1
        low, high = Int32(0), batch
        while low < high:
            middle = (low + high + 1) // 2
            is_before = cu_seqlens[middle] // SCALE_BLOCK + middle <= block
            low = select(is_before, middle, low)
            high = select(is_before, high, middle - 1)
        sequence, first = low, cu_seqlens[low]
        position = (block - first // SCALE_BLOCK - sequence) * SCALE_BLOCK
        is_sequence = sequence < batch
        end = select(is_sequence, cu_seqlens[minimum(sequence + 1, batch)], seqlen)
        start, num_rows = first + position, minimum(end, seqlen) - first - position
        num_used = num_rows if is_sequence else Int32(0)
        if cutlass.const_expr(seqused is not None):
            if is_sequence:
                num_used = minimum(num_used, seqused[sequence] - position)
    elif cutlass.const_expr(seqused is not None):
        num_used = minimum(num_used, seqused[entry] - start)
    return RowBlock(start, minimum(num_rows, SCALE_BLOCK), minimum(num_used, SCALE_BLOCK), sequence)


def mean_of(mean: cute.Tensor, rows: RowBlock, head: Int32) -> cute.Tensor:
    """The mean (head_dim,) for a block, from (sequences, heads, head_dim); without a sequence, that of the last one."""
    return mean[minimum(rows.sequence, mean.shape[0] - 1), head, None]


def larger_magnitude(largest: Float32, x: Float32) -> Float32:
    """max(largest, |x|); NaN counts for nothing."""
    return emit("{ .reg .f32 a; abs.f32 a, {$r1}; max.f32 {$w0}, {$r0}, a; }", [largest, x], [Float32])


def nan_if_infinite(x: Float32) -> Float32:
    """x, or NaN for an infinity, which e4m3 does not have: 0 * inf is NaN, and 0 * x + x is x."""
    return emit("fma.rn.f32 {$w0}, {$r0}, 0f00000000, {$r0};", [x], [Float32])


@cute.jit
def block_max(x: Float32, shared: cute.Tensor, num_warps: cutlass.Constexpr[int]) -> Float32:
    """The largest x (>= 0) of all threads, in each of them. Args: shared: (num_warps,) float32, for one use."""
    x = cute.arch.warp_reduction_max(x)
    if cute.arch.lane_idx() == 0:
        shared[cute.arch.thread_idx()[0] // LANES] = x
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(num_warps):
        x = cute.arch.fmax(x, shared[i])
    return x


@cute.jit
def largest_of_block(values: cute.Tensor, shared: cute.Tensor, num_warps: cutlass.Constexpr[int]) -> tuple:
    """The largest finite magnitude of the values of all threads, and whether one of the values is infinite.

    The values stay as they are, so that infinities, which are rare, cost no registers.

    Args: shared: (2, num_warps) float32.
    """
    largest = block_max(_largest(values, False), shared[0, None], num_warps)
    has_inf = largest == Float32.inf
    if has_inf:  # the same in all threads
        largest = block_max(_largest(values, True), shared[1, None], num_warps)
    return largest, has_inf


def _largest(values: cute.Tensor, has_inf: bool) -> Float32:
    several = [Float32(0.0)] * 4  # independent of one another
    for i in range(cute.size(values)):
        x = nan_if_infinite(values[i]) if has_inf else values[i]
        several[i % 4] = larger_magnitude(several[i % 4], x)
    return cute.arch.fmax(cute.arch.fmax(*several[:2]), cute.arch.fmax(*several[2:]))


def round_four(values: list, inverse: Float32, has_inf: bool) -> Int32:
    """Four values times inverse in e4m3, the first one in the lowest byte."""
    if has_inf:
        values = [nan_if_infinite(x) for x in values]
    return pack_four(*(x * inverse for x in values))


@cute.jit
def scale_and_inverse(largest: Float32) -> tuple:
    """The scale that maps `largest` to 448, and its inverse, the factor of values; see quantization/codec.py."""
    scale = select(largest > 0.0, largest * Float32(1.0 / E4M3_MAX), Float32(SCALE_OF_ZEROS))
    scale = cute.arch.fmax(scale, Float32(TINY))
    inverse = emit("rcp.rn.f32 {$w0}, {$r0};", [scale], [Float32])
    return scale, inverse

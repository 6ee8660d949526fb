"""float32 as two float16 tensors that add up to it, with a scale for every block of 64 rows of a head.

    x = scale * (high + low),  high = x / scale rounded to float16, low = the rest, rounded to float16

The scale is the power of two that puts the block's largest magnitude between 2^14 and 2^15, so that nothing is lost in
dividing by it. Both halves together have 22 bits of every x down to 2^-17 of that largest magnitude; below, the error
is up to 2^-39 of it. Where only small values count, out should be equally exact. So a row of Q or K whose elements are
all below 2^-16 of its block's largest element becomes NaN. A block of V becomes NaN if one of its rows or columns is
that small, or if its scale would not be in V_SCALES_LOG2: the softmax divides its sums by V's scales, and keys of two
blocks count in one sum only if their scales are not too far apart. The forward computes rows that meet a NaN from the
tensors themselves (blocks/repair/rows.py).

Three products of halves are the product of the numbers up to about 2^-22 of it (see blocks/memory/wgmma.py), at twice
the speed of tf32, which has the 11 bits of float16 and would need V transposed.

Source: the split is that of Ootomo and Yokota, arXiv:2203.03341, with block scales instead of a shifted low half.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32
from cutlass.memory import SmemAllocator

from ....geometry.integers import ceil_div, maximum, minimum
from ....geometry.tile_scheduler import LANES
from ....quantization.codec import SCALE_BLOCK
from ...arguments import Float32HalvesArguments
from ...config import head_dim_tile
from ..blocks.memory.layouts import as_batch_of_one
from ..blocks.memory.ptx import bits, emit, pack_pair, unpack_pair
from ..entry import takes
from .quantize_block import larger_magnitude, largest_of_block, row_block

VECTOR = 4  # float32 values of a load
LARGEST_LOG2 = 14  # exponent of the power of two below a block's largest magnitude after scaling
EXPONENT_BIAS, MANTISSA_BITS = 127, 23
SCALES_LOG2 = -112, EXPONENT_BIAS - LARGEST_LOG2  # least and greatest; softmax_scale times a scale is not subnormal
# A row's sum adds up P / scale, up to 2^(15 + 64) each. P of the least scale with the greatest is 2^(7 - 96) times
# its share of the largest probability, which float32 can hold until the share is 2^-37.
V_SCALES_LOG2 = -64, 32
MAX_RANGE_LOG2 = 16  # between the magnitudes of a block and of one of its rows (of V: or columns)


def num_threads(columns: int) -> int:
    """Threads of a thread block. Each has four columns of 16 rows, or of 8 rows where there are 64 columns."""
    return 128 if columns == 64 else columns


class Float32Halves:
    """One compiled kernel: (head_dim, whether it is V) -> device code. A thread block has 64 rows of a head."""

    def __init__(self, head_dim: int, is_v: bool):
        self.head_dim, self.is_v = head_dim, is_v
        self.scales_log2 = V_SCALES_LOG2 if is_v else SCALES_LOG2
        self.columns = head_dim_tile(head_dim)
        self.num_threads = num_threads(self.columns)
        self.lanes = self.columns // VECTOR  # lanes of a row
        self.rows_at_once = self.num_threads // self.lanes
        self.passes = ceil_div(SCALE_BLOCK, self.rows_at_once)

    @takes(Float32HalvesArguments)
    def __call__(self, a: Float32HalvesArguments, stream: cuda.CUstream):
        if cutlass.const_expr(a.cu_seqlens is not None):
            x, target, scale = (as_batch_of_one(t) for t in (a.x, a.target, a.scale))
            a = a._replace(x=x, target=target, scale=scale)
        batch, _, num_heads, _ = a.x.shape
        self.kernel(*a).launch(
            # in one dimension, because the others end at 65535
            grid=[num_heads * a.num_blocks * batch, 1, 1],
            block=[self.num_threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        target: cute.Tensor,
        scale: cute.Tensor,
        cu_seqlens: cute.Tensor | None,
        seqused: cute.Tensor | None,
        num_blocks: Int32,
    ):
        thread, number = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        head, number = number % x.shape[2], number // x.shape[2]
        block, entry = number % num_blocks, number // num_blocks
        rows = row_block(x.shape[1], block, entry, cu_seqlens, seqused)
        lane, first_row = thread % self.lanes, thread // self.lanes
        num_warps = self.num_threads // LANES
        smem = SmemAllocator()
        maxima = smem.allocate_tensor(Float32, cute.make_ordered_layout((2, num_warps), order=(1, 0)), 16)

        values = cute.make_rmem_tensor(cute.make_ordered_layout((VECTOR, self.passes), order=(0, 1)), Float32)
        values.fill(0.0)
        for i in cutlass.range_constexpr(self.passes):
            row = first_row + i * self.rows_at_once
            if row < rows.num_used and lane * VECTOR < self.head_dim:
                source = cute.flat_divide(x[entry, rows.start + row, head, None], (VECTOR,))
                cute.autovec_copy(source[None, lane], values[None, i])
        largest, _ = largest_of_block(values, maxima, num_warps)
        block_scale, inverse = power_of_two(largest, *self.scales_log2)
        if thread == 0 and block < scale.shape[2]:
            scale[entry, head, block] = block_scale
        self.refuse(smem, values, largest)

        words = cute.make_rmem_tensor((2,), Int32)
        for i in cutlass.range_constexpr(self.passes):
            row = first_row + i * self.rows_at_once
            if row < rows.num_rows:
                row_words = cute.recast_tensor(target[entry, rows.start + row, head, None], Int32)
                vectors = cute.flat_divide(row_words, (2,))
                lows = []
                for j in cutlass.range_constexpr(2):
                    a, b = (values[2 * j + n, i] * inverse for n in range(2))
                    words[j] = pack_pair(a, b, Float16)
                    high_a, high_b = unpack_pair(words[j], Float16)
                    lows.append(pack_pair(a - high_a, b - high_b, Float16))
                cute.autovec_copy(words, vectors[None, lane])
                for j in cutlass.range_constexpr(2):
                    words[j] = lows[j]
                cute.autovec_copy(words, vectors[None, self.lanes + lane])

    @cute.jit
    def refuse(self, smem: SmemAllocator, values: cute.Tensor, largest: Float32):
        """Replace what two halves cannot hold by NaN.

        In Q and K these are rows that are not zero and are 2^MAX_RANGE_LOG2 below the block's largest magnitude, or
        below that of the least scale. In V it is the whole block, if one of its rows or columns is that small, or if
        its largest magnitude is above that of the greatest scale.
        """
        thread = cute.arch.thread_idx()[0]
        lane, first_row = thread % self.lanes, thread // self.lanes
        row_maxima = smem.allocate_tensor(
            Float32, cute.make_layout((SCALE_BLOCK, self.lanes), stride=(self.lanes + 1, 1)), 16
        )
        for i in cutlass.range_constexpr(self.passes):
            row_maxima[first_row + i * self.rows_at_once, lane] = largest_magnitude(
                [values[c, i] for c in range(VECTOR)]
            )
        if cutlass.const_expr(self.is_v):
            column_maxima = smem.allocate_tensor(
                Float32, cute.make_ordered_layout((self.rows_at_once, self.columns), order=(1, 0)), 16
            )
            for c in cutlass.range_constexpr(VECTOR):
                column_maxima[first_row, lane * VECTOR + c] = largest_magnitude(
                    [values[c, i] for i in range(self.passes)]
                )
        cute.arch.sync_threads()
        least, above = (2.0 ** (scale_log2 + LARGEST_LOG2) for scale_log2 in self.scales_log2)
        limit = cute.arch.fmax(largest, Float32(least)) * 2.0**-MAX_RANGE_LOG2
        # there are at least as many threads as rows, and as columns
        row_maximum = Float32(0.0)
        if thread < SCALE_BLOCK:
            for i in cutlass.range(self.lanes, unroll=8):  # not all at once: registers
                row_maximum = larger_magnitude(row_maximum, row_maxima[thread, i])
            row_maxima[thread, 0] = row_maximum
        if cutlass.const_expr(self.is_v):
            is_wide = largest >= 2.0 * above or is_lost(row_maximum, limit)
            if thread < self.columns:
                column_maximum = largest_magnitude([column_maxima[i, thread] for i in range(self.rows_at_once)])
                is_wide = is_wide or is_lost(column_maximum, limit)
            if any_of_block(is_wide):
                values.fill(Float32.nan)
        else:
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(self.passes):
                if is_lost(row_maxima[first_row + i * self.rows_at_once, 0], limit):
                    values[None, i].fill(Float32.nan)


def largest_magnitude(values: list) -> Float32:
    """The largest magnitude of several values; NaN counts for nothing."""
    largest = Float32(0.0)
    for x in values:
        largest = larger_magnitude(largest, x)
    return largest


@cute.jit
def is_lost(magnitude: Float32, limit: Float32) -> Boolean:
    """Whether the largest magnitude of a row or column is too small for the limit; zeros are not."""
    return magnitude > 0.0 and magnitude < limit


@cute.jit
def any_of_block(condition: Boolean) -> Boolean:
    """Whether the condition holds in any thread of the thread block; all threads wait for each other."""
    found = emit(
        "{ .reg .pred p, q; setp.ne.s32 p, {$r0}, 0; barrier.cta.red.or.pred q, 0, p; selp.s32 {$w0}, 1, 0, q; }",
        [Int32(condition)],
        [Int32],
    )
    return found != 0


@cute.jit
def power_of_two(largest: Float32, least_log2: cutlass.Constexpr[int], greatest_log2: cutlass.Constexpr[int]) -> tuple:
    """The scale of a block with this largest magnitude, and its inverse."""
    exponent = maximum((bits(largest) >> MANTISSA_BITS) - LARGEST_LOG2, EXPONENT_BIAS + least_log2)
    exponent = minimum(exponent, EXPONENT_BIAS + greatest_log2)
    scale, inverse = (n << MANTISSA_BITS for n in (exponent, 2 * EXPONENT_BIAS - exponent))
    return scale.bitcast(Float32), inverse.bitcast(Float32)

"""The two GEMMs of a step in float32: three mma.m16n8k8 of tf32 parts, which keep the accuracy of float32.

    a = a_hi + a_lo,  a_hi = a rounded to the 11 bits of tf32,  a_lo = the rest, of which mma reads the first 11 bits
    a b = a_lo b_hi + a_hi b_lo + a_hi b_hi          without a_lo b_lo, about 2^-23 of a b and of any sign

a_hi is rounded, not cut off: the rest would have a bit more, and its sign would be that of a, so that what is neglected
would add up. Tensor cores cut off their sums, too: an accumulator that stays in them through a long sum shrinks with
every step. With `fresh_sums`, 16 terms at a time are summed from zero, the small products first, and float32 additions,
which round to nearest, collect these sums.

Fragments are 16-byte loads without a bank conflict. Which of the 8 terms of an mma stands where is free as long as A
and B agree, and so is the order of the columns of O. With lane = 4 g + t (A has rows g and g + 8, B column g, both the
terms t and t + 4; C has columns 2 t and 2 t + 1), of each 32 columns or keys:

    Q K^T    lane (g, t) loads columns 8 t .. 8 t + 7 of row g: the terms t and t + 4 of four mma
    P V      terms t and t + 4 are the keys 2 t and 2 t + 1, so that P, as S has left it, is operand A without an
             exchange; lane (g, t) loads columns 4 g .. 4 g + 3 of these keys, one for each of four mma, so that O has
             columns 8 t .. 8 t + 7 in one lane, and stores them at once

Source: the split is that of Ootomo and Yokota, arXiv:2203.03341.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, TFloat32
from cutlass.cute.nvgpu import warp

from ..blocks import epilogue
from ..blocks.bundle import Bundle
from ..config import ROWS_PER_MMA, ForwardConfigSm80

COLUMNS = 32  # of a row of shared memory: 128 bytes, see layouts.smem_tiles
VECTOR = 4  # elements of a 16-byte load
STEPS = 2  # mma steps of 8 terms that are split and summed together


def make_tiled_mma(config: ForwardConfigSm80, dtype: type[cutlass.Numeric]) -> cute.TiledMma:
    """All warps side by side along M."""
    rows = ROWS_PER_MMA * config.num_warps
    return cute.make_tiled_mma(warp.MmaTF32Op((16, 8, 8)), (config.num_warps, 1, 1), permutation_mnk=(rows, 8, 8))


def split(x: Float32) -> tuple[Float32, Float32]:
    """x as high and low part, both for mma, which does not look at the last 13 bits of an operand.

    Two integer operations round: cvt.rna.tf32 is three, because it spares infinities. The high part of a NaN may be a
    number; the low one is NaN. That of an infinity is, too.
    """
    word = cute.make_rmem_tensor((1,), Float32)
    word[0] = x
    bits = cute.recast_tensor(word, Int32)
    bits[0] = (bits[0] + 0x1000) & ~0x1FFF
    return word[0], x - word[0]


class Parts:
    """A fragment as two operands of mma: high and low parts, one register tensor for each of STEPS steps."""

    def __init__(self, shape: tuple):
        self.high, self.low = ([cute.make_rmem_tensor(shape, TFloat32) for _ in range(STEPS)] for _ in range(2))

    def set(self, step: int, i: int, x: Float32):
        """Value i of a step's fragment."""
        for fragments, part in zip((self.high, self.low), split(x), strict=True):
            cute.recast_tensor(fragments[step], Float32)[i] = part


class GemmsFloat32(Bundle):
    """S = Q K^T and O += P V of a warp's query rows, with S, P (in the same registers) and O in registers.

    Attributes:
        acc_s, acc_o: ((2, 2), m_tiles, columns / 8); the columns of acc_o are in the order that the module tells.
    """

    def __init__(self, kernel, sQ, sK, sV, tiled_mma: cute.TiledMma, thread: Int32):
        config = self.config = kernel.config
        self.tiled_mma, self.m_tiles = tiled_mma, config.m_tiles
        g, t = thread % 32 // 4, thread % 4
        row = thread // 32 * ROWS_PER_MMA + g
        # (vector, rows g and g + 8, m_tiles, column blocks, buffers) and (vector, groups of 8 rows, ...), each for
        # both 16-byte pieces of the lane's 8 columns
        rows = (2, self.m_tiles), (8, ROWS_PER_MMA * config.num_warps)
        self.q = [self._rows(sQ, row, 2 * t + i, *rows) for i in range(2)]
        rows = (config.tile_n // 8,), (8,)
        self.k = [self._rows(sK, g, 2 * t + i, *rows) for i in range(2)]
        # for the keys 2 t and 2 t + 1
        self.v = [self._rows(sV, 2 * t + i, g, *rows) for i in range(2)]
        thr = tiled_mma.get_slice(thread)
        self.acc_s = cute.make_rmem_tensor(thr.partition_shape_C((config.tile_m, config.tile_n)), Float32)
        self.acc_o = cute.make_rmem_tensor(thr.partition_shape_C((config.tile_m, kernel.head_dim_v)), Float32)
        self.column_blocks = kernel.head_dim // COLUMNS, kernel.head_dim_v // COLUMNS

    def _rows(self, buffers: cute.Tensor, row: Int32, piece: Int32, counts: tuple, spacings: tuple) -> cute.Tensor:
        """What a lane loads: (vector, *counts, column blocks, buffers), from a row and a 16-byte piece of it on.

        The swizzle is in the lane's own address, where it costs nothing: all else is a multiple of eight rows away.
        """
        num_rows, num_columns, num_buffers = (cute.size(buffers, mode=[i]) for i in range(3))
        if self.config.swizzle:
            piece = piece ^ row % 8
        start = cute.assume(row * COLUMNS + piece * VECTOR, divby=VECTOR)
        layout = cute.make_layout(
            (VECTOR, *counts, num_columns // COLUMNS, num_buffers),
            stride=(1, *(COLUMNS * n for n in spacings), COLUMNS * num_rows, num_columns * num_rows),
        )
        # the cast forgets the swizzle
        pointer = cute.recast_ptr(buffers.iterator, dtype=Float32)
        return cute.make_tensor(pointer + start, layout)

    # ---------------------------------------------------------------- Q K^T

    @cute.jit
    def load_q(self):
        """Q stays in shared memory."""

    @cute.jit
    def qk(self, buffer: Int32):
        """S = Q K^T, in a loop: unrolled, the assembler would begin more loads than there are registers for."""
        self.acc_s.fill(0.0)
        for b in cutlass.range(self.column_blocks[0], unroll=1):
            for i in cutlass.range_constexpr(2):
                q = self._q_parts(i, b)
                for first, count in self._groups(self.config.tile_n // 8):
                    k = self._k_parts(i, b, first, count, buffer)
                    self._add_products(q, k, self.acc_s, first, count)

    def _q_parts(self, i: int, b: Int32) -> Parts:
        rQ = cute.make_rmem_tensor((VECTOR, 2, self.m_tiles), Float32)
        for m in range(self.m_tiles):
            for r in range(2):
                cute.autovec_copy(self.q[i][None, r, m, b, 0], rQ[None, r, m])
        parts = Parts(((2, 2), self.m_tiles))
        for step in range(STEPS):
            for m in range(self.m_tiles):
                for v in range(4):
                    parts.set(step, 4 * m + v, rQ[2 * step + v // 2, v % 2, m])
        return parts

    def _k_parts(self, i: int, b: Int32, first: int, count: int, buffer: Int32) -> Parts:
        rK = cute.make_rmem_tensor((VECTOR, count), Float32)
        for j in range(count):
            cute.autovec_copy(self.k[i][None, first + j, b, buffer], rK[None, j])
        parts = Parts((2, count))
        for step in range(STEPS):
            for j in range(count):
                for v in range(2):
                    parts.set(step, 2 * j + v, rK[2 * step + v, j])
        return parts

    # ---------------------------------------------------------------- P V

    @cute.jit
    def take_p(self):
        """P stays in acc_s."""

    @cute.jit
    def pv(self, buffer: Int32):
        """O += P V."""
        num_blocks = self.config.tile_n // 8
        for k in cutlass.range(num_blocks // STEPS, unroll=1):
            p = self._p_parts()
            # registers have no run-time index: what comes next moves to the front
            for j in cutlass.range_constexpr(num_blocks - STEPS):
                for m in cutlass.range_constexpr(self.m_tiles):
                    for v in cutlass.range_constexpr(4):
                        self.acc_s[(v % 2, v // 2), m, j] = self.acc_s[(v % 2, v // 2), m, j + STEPS]
            for b in cutlass.range_constexpr(self.column_blocks[1]):
                v = self._v_parts(k, b, buffer)
                self._add_products(p, v, self.acc_o, VECTOR * b, VECTOR)

    def _p_parts(self) -> Parts:
        parts = Parts(((2, 2), self.m_tiles))
        for step in range(STEPS):
            for m in range(self.m_tiles):
                for v in range(4):
                    # rows g, g + 8 and, as terms t and t + 4, the keys 2 t, 2 t + 1
                    parts.set(step, 4 * m + v, self.acc_s[(v // 2, v % 2), m, step])
        return parts

    def _v_parts(self, k: int, b: int, buffer: Int32) -> Parts:
        rV = cute.make_rmem_tensor((VECTOR, 2, STEPS), Float32)
        for step in range(STEPS):
            for i in range(2):
                cute.autovec_copy(self.v[i][None, STEPS * k + step, b, buffer], rV[None, i, step])
        parts = Parts((2, VECTOR))
        for step in range(STEPS):
            for j in range(VECTOR):
                for i in range(2):
                    parts.set(step, 2 * j + i, rV[j, i, step])
        return parts

    # ---------------------------------------------------------------- sums

    def _groups(self, count: int) -> list[tuple[int, int]]:
        """Blocks of 8 columns that are summed together: 4 sums are under way at a time."""
        return [(first, min(VECTOR, count - first)) for first in range(0, count, VECTOR)]

    def _add_products(self, a: Parts, b: Parts, acc: cute.Tensor, first: int, count: int):
        """acc += a b, for `count` blocks of 8 columns from block `first` on."""
        stride = acc.layout.stride
        layout = cute.make_layout(((2, 2), self.m_tiles, count), stride=stride)
        acc = cute.make_tensor(acc.iterator + first * stride[2], layout)
        sums = acc
        if self.config.fresh_sums:
            sums = cute.make_rmem_tensor(((2, 2), self.m_tiles, count), Float32)
            sums.fill(0.0)
        for step in range(STEPS):
            cute.gemm(self.tiled_mma, sums, a.low[step], b.high[step], sums)
            cute.gemm(self.tiled_mma, sums, a.high[step], b.low[step], sums)
        for step in range(STEPS):
            cute.gemm(self.tiled_mma, sums, a.high[step], b.high[step], sums)
        if self.config.fresh_sums:
            for j in range(count):
                for m in range(self.m_tiles):
                    for v in range(4):
                        at = (v % 2, v // 2), m, j
                        acc[at] = acc[at] + sums[at]

    # ---------------------------------------------------------------- end of a tile

    @cute.jit
    def store_rows(self, acc_o: cute.Tensor, weights: cute.Tensor, out_rows: list, is_row: list, lane_in_quad: Int32):
        """out_rows[r] = weights[r] * acc_o[r] for a thread's two rows of an m_tile, acc_o (2, columns)."""
        vector = self.config.vector_bytes // 4
        epilogue.store_eights(acc_o, weights, out_rows, is_row, lane_in_quad, vector)

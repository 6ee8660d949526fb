"""Sums of float32 products by tensor cores: three mma.m16n8k8 of tf32 limbs, which keep the accuracy of float32.

    a = a_hi + a_lo,  a_hi = a rounded to the 11 bits of tf32,  a_lo = the rest; mma reads its first 11 bits
    a b = a_lo b_hi + a_hi b_lo + a_hi b_hi          without a_lo b_lo, about 2^-23 of a b and of any sign

a_hi is rounded, not cut: the rest would have a bit more, and its sign would be that of a, so that what is neglected
would add up. Tensor cores truncate their sums, too: an accumulator that stays in them through a long sum shrinks with
every step. With fresh sums, 16 terms at a time are summed from zero, the small products first, and float32 additions,
which round to nearest, collect these sums.

Fragments are 16-byte loads without a bank conflict. The order of the 8 terms of an mma is free as long as A and B
agree, and so is the order of the columns of the result. Let lane = 4 g + t (A has rows g and g + 8, B has column g, and
both have the terms t and t + 4; C has columns 2 t and 2 t + 1). Then, of each 32 columns or rows of a tile in shared
memory:

    sum over columns (Q K^T)    lane (g, t) loads columns 8 t .. 8 t + 7 of row g: the terms t and t + 4 of four mma
    sum over rows (P V)         terms t and t + 4 are the rows 2 t and 2 t + 1, so that P, as S has left it, is operand
                                A without an exchange; lane (g, t) loads columns 4 g .. 4 g + 3 of these rows, one for
                                each of four mma, so that C has columns 8 t .. 8 t + 7 in one lane, which stores them
                                at once

Source: the split is that of Ootomo and Yokota, arXiv:2203.03341.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, TFloat32
from cutlass.cute.nvgpu import warp

from ...config import ROWS_PER_MMA

COLUMNS = 32  # columns of a row of shared memory: 128 bytes, see layouts.smem_tiles
VECTOR = 4  # elements of a 16-byte load
STEPS = 2  # mma steps of 8 terms that are split and summed together
TERMS = 8 * STEPS


def make_tiled_mma(num_warps: int) -> cute.TiledMma:
    """All warps in a row along M."""
    rows = ROWS_PER_MMA * num_warps
    return cute.make_tiled_mma(warp.MmaTF32Op((16, 8, 8)), (num_warps, 1, 1), permutation_mnk=(rows, 8, 8))


def limbs_of(x: Float32) -> tuple[Float32, Float32]:
    """x as a high and a low limb, both for mma, which does not read the last 13 bits of an operand.

    Two integer operations round: cvt.rna.tf32 takes three, because it preserves infinities. The high limb of a NaN may
    be a number. The low limb of a NaN is NaN, and so is that of an infinity.
    """
    word = cute.make_rmem_tensor((1,), Float32)
    word[0] = x
    bits = cute.recast_tensor(word, Int32)
    bits[0] = (bits[0] + 0x1000) & ~0x1FFF
    return word[0], x - word[0]


class Limbs:
    """A fragment as two operands of mma: high and low limbs, one register tensor for each of STEPS steps."""

    def __init__(self, shape: tuple):
        self.high, self.low = ([cute.make_rmem_tensor(shape, TFloat32) for _ in range(STEPS)] for _ in range(2))

    def set(self, step: int, i: int, x: Float32):
        """Set value i of a step's fragment to x."""
        for fragments, limb in zip((self.high, self.low), limbs_of(x), strict=True):
            cute.recast_tensor(fragments[step], Float32)[i] = limb


def lane_vectors(
    buffers: cute.Tensor,
    row: Int32,
    piece: Int32,
    counts: tuple,
    spacings: tuple,
    swizzle: bool = True,
    first_block: Int32 | int = 0,
    block_spacing: int = 1,
) -> cute.Tensor:
    """What a lane loads of tiles: (vector, *counts, column blocks, buffers), from a row and a 16-byte piece of it on.

    The swizzle is in the lane's own address, where it costs nothing: everything else is a multiple of eight rows away.

    Args:
        counts, spacings: the numbers of rows in each mode, and their distances.
        first_block, block_spacing: the first block of COLUMNS columns, and the distance from one block to the next.
    """
    num_rows, num_columns, num_buffers = (cute.size(buffers, mode=[i]) for i in range(3))
    if swizzle:
        piece = piece ^ row % 8
    start = cute.assume(row * COLUMNS + piece * VECTOR + first_block * (COLUMNS * num_rows), divby=VECTOR)
    layout = cute.make_layout(
        (VECTOR, *counts, num_columns // (COLUMNS * block_spacing), num_buffers),
        stride=(1, *(COLUMNS * n for n in spacings), COLUMNS * num_rows * block_spacing, num_columns * num_rows),
    )
    # the cast forgets the swizzle
    pointer = cute.recast_ptr(buffers.iterator, dtype=Float32)
    return cute.make_tensor(pointer + start, layout)


def a_of_rows(rows: cute.Tensor, block: Int32, buffer: Int32) -> Limbs:
    """Operand A of a sum over columns, from (vector, rows g and g + 8, m_tiles, column blocks, buffers)."""
    m_tiles = cute.size(rows, mode=[2])
    values = cute.make_rmem_tensor((VECTOR, 2, m_tiles), Float32)
    for m in range(m_tiles):
        for r in range(2):
            cute.autovec_copy(rows[None, r, m, block, buffer], values[None, r, m])
    limbs = Limbs(((2, 2), m_tiles))
    for step in range(STEPS):
        for m in range(m_tiles):
            for v in range(4):
                limbs.set(step, 4 * m + v, values[2 * step + v // 2, v % 2, m])
    return limbs


def b_of_rows(rows: cute.Tensor, block: Int32, first: int, count: int, buffer: Int32) -> Limbs:
    """Operand B of a sum over columns, from (vector, groups of 8 rows, column blocks, buffers)."""
    values = cute.make_rmem_tensor((VECTOR, count), Float32)
    for j in range(count):
        cute.autovec_copy(rows[None, first + j, block, buffer], values[None, j])
    limbs = Limbs((2, count))
    for step in range(STEPS):
        for j in range(count):
            for v in range(2):
                limbs.set(step, 2 * j + v, values[2 * step + v, j])
    return limbs


def b_of_columns(columns: list, k: Int32, block: int, buffer: Int32) -> Limbs:
    """Operand B of step k of a sum over rows, from (vector, groups of 8 rows, column blocks, buffers) for the rows 2 t
    and 2 t + 1."""
    values = cute.make_rmem_tensor((VECTOR, 2, STEPS), Float32)
    for step in range(STEPS):
        for i in range(2):
            cute.autovec_copy(columns[i][None, STEPS * k + step, block, buffer], values[None, i, step])
    limbs = Limbs((2, VECTOR))
    for step in range(STEPS):
        for j in range(VECTOR):
            for i in range(2):
                limbs.set(step, 2 * j + i, values[j, i, step])
    return limbs


def groups(count: int) -> list[tuple[int, int]]:
    """Ranges (first, count) of blocks of 8 columns that are summed together: 4 sums are under way at a time."""
    return [(first, min(VECTOR, count - first)) for first in range(0, count, VECTOR)]


def add_products(tiled_mma: cute.TiledMma, a: Limbs, b: Limbs, acc: cute.Tensor, first: int, count: int):
    """acc += a b, for `count` blocks of 8 columns from block `first` on.

    The sums of 16 terms leave the tensor cores, which truncate what they add, and are added up by the FMA pipe.
    """
    m_tiles, stride = cute.size(acc, mode=[1]), acc.layout.stride
    layout = cute.make_layout(((2, 2), m_tiles, count), stride=stride)
    acc = cute.make_tensor(acc.iterator + first * stride[2], layout)
    sums = cute.make_rmem_tensor(((2, 2), m_tiles, count), Float32)
    sums.fill(0.0)
    for step in range(STEPS):
        cute.gemm(tiled_mma, sums, a.low[step], b.high[step], sums)
        cute.gemm(tiled_mma, sums, a.high[step], b.low[step], sums)
    for step in range(STEPS):
        cute.gemm(tiled_mma, sums, a.high[step], b.high[step], sums)
    for j in range(count):
        for m in range(m_tiles):
            for v in range(4):
                at = (v % 2, v // 2), m, j
                acc[at] = acc[at] + sums[at]

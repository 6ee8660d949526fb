"""The five GEMMs of a backward's step in float32: fragments in tf32 limbs, see sm80/tf32.py.

P and dS go through shared memory in float32, as rows of keys, because all five GEMMs read their operands there in
rolled loops: unrolled, the assembler would begin more loads than there are registers for. The 32-byte pieces of a row
are exchanged (`swizzle`), so that neither writing nor reading them, by rows or by columns, meets a bank conflict.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....config import ROWS_PER_MMA, BackwardConfigSm80
from ...blocks.memory import epilogue
from ...blocks.memory.untraced import Untraced
from ...blocks.softmax.gradients import Region
from .. import tf32
from ..tf32 import COLUMNS, STEPS, TERMS, VECTOR, Limbs, lane_vectors
from .warps import Buffers, Mmas

PIECE = 8  # queries of a row of P or dS that stay together under the swizzle


def make_tiled_mmas(config: BackwardConfigSm80, dtype: type[cutlass.Numeric]) -> Mmas:
    """One tiled mma for all GEMMs: only its instruction is used."""
    return Mmas(*[tf32.make_tiled_mma(config.num_warps)] * 3)


def swizzle(row: Int32 | int):
    """What is combined (exclusive or) with the number of a piece in a row of P or dS.

    The results are pairwise different for rows 0 to 3 and 4 to 7, which a half warp writes together, and for even and
    odd rows of eight, which it reads together.
    """
    return ((row ^ (row >> 2)) & 1) << 1 | (row >> 1 & 1)


class BackwardGemmsFloat32(Untraced):
    """GEMMs of all warps, each of which has a region of the result in registers.

    Attributes:
        acc_dk, acc_dv: ((2, 2), rows / 16, columns / 8); their columns, and those of dQ, are in the order that tf32.py
            describes.
        dq_together: columns of dQ that lie together.
    """

    dq_together = COLUMNS

    def __init__(self, kernel, buffers: Buffers, mmas: Mmas, region: Region):
        config = self.config = kernel.config
        self.buffers, self.tiled_mma, self.region = buffers, mmas.s, region
        self.tile_m, self.tile_n = kernel.tile_m, kernel.tile_n
        g, self.t = region.lane // 4, region.lane_in_quad
        pieces = range(2)  # 16-byte pieces of a lane's 8 columns

        # sums over columns: rows g and g + 8 of m_tiles, and groups of 8 rows
        rows = (2, region.m_tiles), (8, region.rows_between)
        self.k_rows, self.v_rows = (
            [lane_vectors(t, region.row_in_tile, 2 * self.t + i, *rows) for i in pieces] for t in (buffers.k, buffers.v)
        )
        self.group_counts = region.num_queries // 8
        rows = (self.group_counts,), (8,)
        self.q_rows, self.do_rows = (
            [lane_vectors(t, region.first_query + g, 2 * self.t + i, *rows) for i in pieces]
            for t in (buffers.q, buffers.do)
        )
        self.column_blocks = kernel.head_dim // COLUMNS, kernel.head_dim_v // COLUMNS

        # sums over rows: the rows 2 t and 2 t + 1 of each 8, and a warp's column blocks
        dkv_column_warps = config.num_warps // config.dkv_key_warps
        columns = (self.tile_m // 8,), (8,), True, region.warp // config.dkv_key_warps, dkv_column_warps
        self.q_columns, self.do_columns = (
            [lane_vectors(t, 2 * self.t + i, g, *columns) for i in pieces] for t in (buffers.q, buffers.do)
        )
        self.dq_column_warps = config.num_warps // config.dq_query_warps
        columns = (self.tile_n // 8,), (8,), True, region.warp // config.dq_query_warps, self.dq_column_warps
        self.k_columns = [lane_vectors(buffers.k, 2 * self.t + i, g, *columns) for i in pieces]

        self.dkv_row = region.warp % config.dkv_key_warps * ROWS_PER_MMA + g
        self.dkv_m_tiles = self.tile_n // (ROWS_PER_MMA * config.dkv_key_warps)
        self.dq_row = region.warp % config.dq_query_warps * ROWS_PER_MMA + g
        self.dq_m_tiles = self.tile_m // (ROWS_PER_MMA * config.dq_query_warps)
        self.acc_dk, self.acc_dv = (
            cute.make_rmem_tensor(((2, 2), self.dkv_m_tiles, columns // (8 * dkv_column_warps)), Float32)
            for columns in (kernel.head_dim, kernel.head_dim_v)
        )
        self.dq_blocks = kernel.head_dim // (
            COLUMNS * self.dq_column_warps * config.dq_pieces
        )  # blocks of a warp and a piece
        # rows of P and dS in shared memory
        self.width = min(COLUMNS, self.tile_m)
        self.pieces = self.width // PIECE

    # ---------------------------------------------------------------- the GEMMs

    def make_acc_s(self) -> cute.Tensor:
        """An accumulator for S or dP."""
        return cute.make_rmem_tensor(((2, 2), self.region.m_tiles, self.group_counts), Float32)

    def make_acc_dq(self) -> cute.Tensor:
        return cute.make_rmem_tensor(((2, 2), self.dq_m_tiles, VECTOR * self.dq_blocks), Float32)

    @cute.jit
    def s(self, acc_s: cute.Tensor, buffer: Int32):
        """S^T += K Q^T."""
        self._sum_over_columns(acc_s, self.k_rows, self.q_rows, buffer, self.column_blocks[0])

    @cute.jit
    def dp(self, acc_dp: cute.Tensor, buffer: Int32):
        """dP^T += V dO^T."""
        self._sum_over_columns(acc_dp, self.v_rows, self.do_rows, buffer, self.column_blocks[1])

    @cute.jit
    def _sum_over_columns(
        self, acc: cute.Tensor, a_rows: list, b_rows: list, buffer: Int32, column_blocks: cutlass.Constexpr[int]
    ):
        for block in cutlass.range(column_blocks, unroll=1):
            for i in cutlass.range_constexpr(2):
                a = tf32.a_of_rows(a_rows[i], block, 0)
                for first, count in tf32.groups(self.group_counts):
                    b = tf32.b_of_rows(b_rows[i], block, first, count, buffer)
                    tf32.add_products(self.tiled_mma, a, b, acc, first, count)

    @cute.jit
    def take_p(self, acc_s: cute.Tensor):
        """Take P from acc_s for `dv`, which needs a barrier before it."""
        self._write(acc_s, self.buffers.p)

    @cute.jit
    def take_ds(self, acc_dp: cute.Tensor):
        """Take dS from acc_dp for `dk` and `dq`, which need a barrier before them."""
        self._write(acc_dp, self.buffers.ds)

    @cute.jit
    def dv(self, buffer: Int32):
        """dV += P^T dO."""
        self._sum_over_queries(self.acc_dv, self.buffers.p, self.do_columns, buffer)

    @cute.jit
    def dk(self, buffer: Int32):
        """dK += dS^T Q."""
        self._sum_over_queries(self.acc_dk, self.buffers.ds, self.q_columns, buffer)

    @cute.jit
    def _sum_over_queries(self, acc: cute.Tensor, scores: cute.Tensor, columns: list, buffer: Int32):
        for k in cutlass.range(self.tile_m // TERMS, unroll=1):
            a = self._keys_of_scores(scores, k)
            for block in cutlass.range_constexpr(cute.size(acc, mode=[2]) // VECTOR):
                b = tf32.b_of_columns(columns, k, block, buffer)
                tf32.add_products(self.tiled_mma, a, b, acc, VECTOR * block, VECTOR)

    @cute.jit
    def dq(self, acc_dq: cute.Tensor, piece: cutlass.Constexpr[int]):
        """A piece of the columns of dQ = dS K."""
        acc_dq.fill(0.0)
        for k in cutlass.range(self.tile_n // TERMS, unroll=1):
            a = self._queries_of_ds(k)
            for block in cutlass.range_constexpr(self.dq_blocks):
                b = tf32.b_of_columns(self.k_columns, k, piece * self.dq_blocks + block, 0)
                tf32.add_products(self.tiled_mma, a, b, acc_dq, VECTOR * block, VECTOR)

    # ---------------------------------------------------------------- P and dS in shared memory

    def _scores(self, scores: cute.Tensor, offset, divisor: int, layout: cute.Layout) -> cute.Tensor:
        pointer = cute.recast_ptr(scores.iterator, dtype=Float32)
        return cute.make_tensor(pointer + cute.assume(offset, divby=divisor), layout)

    @cute.jit
    def _write(self, acc: cute.Tensor, scores: cute.Tensor):
        """Write P or dS to shared memory, where all warps read it after the next barrier."""
        region, width = self.region, self.width
        first_piece = region.first_query // PIECE
        start = region.row_in_tile * width + 2 * self.t + first_piece // self.pieces * (self.tile_n * width)
        exchanged = swizzle(region.lane // 4)
        shape = 2, 2, region.m_tiles, max(1, region.num_queries // width)
        layout = cute.make_layout(shape, stride=(1, 8 * width, region.rows_between * width, self.tile_n * width))
        for piece in cutlass.range_constexpr(min(self.pieces, self.group_counts)):
            number = ((first_piece + piece) ^ exchanged) % self.pieces
            target = self._scores(scores, start + number * PIECE, 2, layout)
            for block in cutlass.range_constexpr(shape[3]):
                for i in cutlass.range_constexpr(region.m_tiles):
                    for r in cutlass.range_constexpr(2):
                        cute.autovec_copy(acc[(None, r), i, block * self.pieces + piece], target[None, r, i, block])

    def _keys_of_scores(self, scores: cute.Tensor, k: Int32) -> Limbs:
        """Operand A of a sum over the queries 16 k, 16 k + 1, .., with a key in each row."""
        width, m_tiles = self.width, self.dkv_m_tiles
        row_spacing = ROWS_PER_MMA * self.config.dkv_key_warps * width
        layout = cute.make_layout((2, 2, m_tiles), stride=(1, 8 * width, row_spacing))
        steps_of_row = self.pieces // STEPS
        start = self.dkv_row * width + 2 * self.t + k // steps_of_row * (self.tile_n * width)
        exchanged = swizzle(self.region.lane // 4)
        values = cute.make_rmem_tensor((2, 2, m_tiles, STEPS), Float32)
        for step in range(STEPS):
            number = ((k * STEPS + step) ^ exchanged) % self.pieces
            source = self._scores(scores, start + number * PIECE, 2, layout)
            for m in range(m_tiles):
                for r in range(2):
                    cute.autovec_copy(source[None, r, m], values[None, r, m, step])
        return self._limbs(values, m_tiles)

    def _queries_of_ds(self, k: Int32) -> Limbs:
        """Operand A of a sum over the keys 16 k, 16 k + 1, .., with a query in each row."""
        width, m_tiles = self.width, self.dq_m_tiles
        layout = cute.make_layout((STEPS,), stride=(8 * width,))
        values = cute.make_rmem_tensor((2, 2, m_tiles, STEPS), Float32)
        for m in range(m_tiles):
            for r in range(2):
                query = self.dq_row + m * ROWS_PER_MMA * self.config.dq_query_warps + 8 * r
                for c in range(2):
                    key = 2 * self.t + c
                    number = (query // PIECE ^ swizzle(key)) % self.pieces
                    row = query // width * self.tile_n + k * TERMS + key
                    source = self._scores(self.buffers.ds, row * width + number * PIECE + query % PIECE, 1, layout)
                    for step in range(STEPS):
                        values[c, r, m, step] = source[step]
        return self._limbs(values, m_tiles)

    def _limbs(self, values: cute.Tensor, m_tiles: int) -> Limbs:
        limbs = Limbs(((2, 2), m_tiles))
        for step in range(STEPS):
            for m in range(m_tiles):
                for v in range(4):
                    limbs.set(step, 4 * m + v, values[v // 2, v % 2, m, step])
        return limbs

    @cute.jit
    def store_rows(
        self, acc: cute.Tensor, weights: cute.Tensor, rows: list, is_row: list, lane_in_quad: Int32, first_block: Int32
    ):
        """rows[r] = weights[r] * acc[r] for a thread's two rows of COLUMNS columns."""
        vector = self.config.vector_bytes // 4
        epilogue.store_runs(acc, weights, rows, is_row, lane_in_quad, 8, vector, first_block)

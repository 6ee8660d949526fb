"""The two GEMMs of a step in float32: fragments in tf32 limbs, see sm80/tf32.py."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....config import ROWS_PER_MMA, ForwardConfigSm80
from ...blocks.memory import epilogue
from ...blocks.memory.untraced import Untraced
from .. import tf32
from ..tf32 import STEPS, VECTOR, Limbs, lane_vectors


def make_tiled_mma(config: ForwardConfigSm80, dtype: type[cutlass.Numeric]) -> cute.TiledMma:
    """All warps in a row along M."""
    return tf32.make_tiled_mma(config.num_warps)


class GemmsFloat32(Untraced):
    """S = Q K^T and O += P V of a warp's query rows, with S, P (in the same registers) and O in registers.

    Attributes:
        acc_s, acc_o: ((2, 2), m_tiles, columns / 8); the columns of acc_o are in the order that tf32.py describes.
    """

    def __init__(self, kernel, sQ, sK, sV, tiled_mma: cute.TiledMma, thread: Int32):
        config = self.config = kernel.config
        self.tiled_mma, self.m_tiles = tiled_mma, config.m_tiles
        g, t = thread % 32 // 4, thread % 4
        row = thread // 32 * ROWS_PER_MMA + g
        # rows g and g + 8 of m_tiles (Q), groups of 8 rows (K); each for both 16-byte pieces of the lane's 8 columns
        rows = (2, self.m_tiles), (8, ROWS_PER_MMA * config.num_warps), config.swizzle
        self.q = [lane_vectors(sQ, row, 2 * t + i, *rows) for i in range(2)]
        rows = (config.tile_n // 8,), (8,), config.swizzle
        self.k = [lane_vectors(sK, g, 2 * t + i, *rows) for i in range(2)]
        # for the keys 2 t and 2 t + 1
        self.v = [lane_vectors(sV, 2 * t + i, g, *rows) for i in range(2)]
        thr = tiled_mma.get_slice(thread)
        self.acc_s = cute.make_rmem_tensor(thr.partition_shape_C((config.tile_m, config.tile_n)), Float32)
        self.acc_o = cute.make_rmem_tensor(thr.partition_shape_C((config.tile_m, kernel.head_dim_v)), Float32)
        self.column_blocks = kernel.head_dim // tf32.COLUMNS, kernel.head_dim_v // tf32.COLUMNS

    @cute.jit
    def load_q(self):
        """Q stays in shared memory."""

    @cute.jit
    def qk(self, buffer: Int32):
        """S = Q K^T, in a loop: unrolled, the assembler would begin more loads than there are registers for."""
        self.acc_s.fill(0.0)
        for b in cutlass.range(self.column_blocks[0], unroll=1):
            for i in cutlass.range_constexpr(2):
                q = tf32.a_of_rows(self.q[i], b, 0)
                for first, count in tf32.groups(self.config.tile_n // 8):
                    k = tf32.b_of_rows(self.k[i], b, first, count, buffer)
                    self._add_products(q, k, self.acc_s, first, count)

    @cute.jit
    def take_p(self):
        """P stays in acc_s."""

    @cute.jit
    def pv(self, buffer: Int32):
        """O += P V."""
        num_blocks = self.config.tile_n // 8
        for k in cutlass.range(num_blocks // STEPS, unroll=1):
            p = self._p_limbs()
            # registers have no run-time index: what comes next moves to the front
            for j in cutlass.range_constexpr(num_blocks - STEPS):
                for m in cutlass.range_constexpr(self.m_tiles):
                    for v in cutlass.range_constexpr(4):
                        self.acc_s[(v % 2, v // 2), m, j] = self.acc_s[(v % 2, v // 2), m, j + STEPS]
            for b in cutlass.range_constexpr(self.column_blocks[1]):
                v = tf32.b_of_columns(self.v, k, b, buffer)
                self._add_products(p, v, self.acc_o, VECTOR * b, VECTOR)

    def _p_limbs(self) -> Limbs:
        limbs = Limbs(((2, 2), self.m_tiles))
        for step in range(STEPS):
            for m in range(self.m_tiles):
                for v in range(4):
                    # rows g, g + 8 and, as terms t and t + 4, the keys 2 t, 2 t + 1
                    limbs.set(step, 4 * m + v, self.acc_s[(v // 2, v % 2), m, step])
        return limbs

    def _add_products(self, a: Limbs, b: Limbs, acc: cute.Tensor, first: int, count: int):
        tf32.add_products(self.tiled_mma, a, b, acc, first, count)

    @cute.jit
    def store_rows(
        self,
        acc_o: cute.Tensor,
        weights: cute.Tensor,
        out_rows: list,
        is_row: list,
        lane_in_quad: Int32,
        first_block=0,
    ):
        """out_rows[r] = weights[r] * acc_o[r] for a thread's two rows of an m_tile, acc_o (2, columns).

        Args: first_block: the number of the first 8-column block of out that acc_o holds.
        """
        vector = self.config.vector_bytes // 4
        epilogue.store_runs(acc_o, weights, out_rows, is_row, lane_in_quad, 8, vector, first_block)

"""P and dS of a backward on accumulators of wgmma or mma with keys in rows and queries in columns.

They are kept in 16 bits, or of float32 inputs in float32, in place of S and dP.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..memory.layouts import rows_and_columns
from ..memory.ptx import pack_pair, unpack_pair
from ..repair.rows import soft_cap
from . import mask

# A score whose softcap has no slope any more; finite, for softmax_scale may be 0 there.
FAR_BELOW = -3e38


def stat_of_column(stats: cute.Tensor, i: int, m_tiles: int = 1) -> Float32:
    """What `read_stats` gives for the column of an accumulator's i-th value."""
    block = i // (4 * m_tiles)
    return stats[block % 2 * 2 + i % 2, block // 2]


class GradientScores:
    """S -> P and dP -> dS in registers.

    A subclass has kernel, scores, is_capped, p_words, ds_words and capped_words (P, dS, and with a softcap P times its
    slope, in 16 bits; of float32 p, which is S's accumulator, and capped), minus_lse and minus_delta (of the thread's
    columns), tile_m, tile_n, lane_in_quad, and:

    Attributes:
        row_in_tile: the first of this thread's rows; the second one lies 8 below.
        m_tiles, rows_between: more such pairs of rows, so far apart.
        first_query: of the block, that column 0 is.
    """

    m_tiles, rows_between, first_query = 1, 0, 0

    @cute.jit
    def exponentials(self, acc_s: cute.Tensor, tile, m_block: Int32):
        """P in place of S; with a softcap, P times its slope beside it."""
        scale_log2 = self.scores.scale_log2
        self.mask_if_needed(acc_s, tile, m_block, FAR_BELOW if self.is_capped else -math.inf)
        if cutlass.const_expr(self.is_capped):
            # two at a time, so that no more slopes of the cap than that are in registers
            for i in cutlass.range_constexpr(cute.size(acc_s) // 2):
                capped = []
                for j in (2 * i, 2 * i + 1):
                    score = soft_cap(acc_s[j], self.scores.tanh_scale, self.kernel.dtype)
                    acc_s[j] = cute.math.exp2(
                        score * scale_log2 + stat_of_column(self.minus_lse, j, self.m_tiles), fastmath=True
                    )
                    capped.append(acc_s[j] * (1.0 - score * score))
                if cutlass.const_expr(self.kernel.dtype is Float32):
                    self.capped[2 * i], self.capped[2 * i + 1] = capped[0], capped[1]
                else:
                    self.capped_words[i] = pack_pair(*capped, self.kernel.dtype)
            # a hidden score was capped, too: its slope is 0, its P is not yet
            self.mask_if_needed(acc_s, tile, m_block, 0.0)
        else:
            for i in cutlass.range_constexpr(cute.size(acc_s)):
                acc_s[i] = cute.math.exp2(acc_s[i] * scale_log2, fastmath=True)

    @cute.jit
    def mask_if_needed(self, acc_s: cute.Tensor, tile, m_block: Int32, hidden: cutlass.Constexpr[float]):
        if m_block >= tile.clear_last or m_block < tile.clear_first:
            m_start = m_block * self.tile_m + self.first_query
            parts = self.by_m_tile(acc_s)
            for i in cutlass.range_constexpr(self.m_tiles):
                keys = [self.key(tile, i, r) for r in range(2)]
                mask.apply_to_keys(rows_and_columns(parts[i]), keys, m_start, self.lane_in_quad, tile.geometry, hidden)

    def by_m_tile(self, acc: cute.Tensor) -> list:
        """An accumulator ((2, 2), m_tiles, N) as m_tiles of them ((2, 2), 1, N)."""
        if self.m_tiles == 1:
            return [acc]
        shape, stride = acc.layout.shape, acc.layout.stride
        layout = cute.make_layout((shape[0], 1, shape[2]), stride=(stride[0], 0, stride[2]))
        return [cute.make_tensor(acc.iterator + i * stride[1], layout) for i in range(self.m_tiles)]

    def key(self, tile, i: int, r: int) -> Int32:
        """In the sequence, of row r (0 or 1) of this thread in its i-th m_tile."""
        return tile.n_block * self.tile_n + self.row_in_tile + i * self.rows_between + 8 * r

    @cute.jit
    def make_ds(self, acc_dp: cute.Tensor, minus_delta: cutlass.Constexpr[bool] = False):
        """dS = P (dP - delta), rounded to 16 bits; of float32 in place of dP.

        Args: minus_delta: whether acc_dp holds dP - delta already.
        """
        is_float32 = cutlass.const_expr(self.kernel.dtype is Float32)
        if cutlass.const_expr(is_float32):
            source = self.capped if cutlass.const_expr(self.is_capped) else self.p
        else:
            source = self.capped_words if cutlass.const_expr(self.is_capped) else self.p_words
        for i in cutlass.range_constexpr(cute.size(acc_dp) // 2):
            if cutlass.const_expr(is_float32):
                p = [source[2 * i + c] for c in range(2)]
            else:
                p = unpack_pair(source[i], self.kernel.dtype)
            dp = [acc_dp[2 * i + c] for c in range(2)]
            if cutlass.const_expr(not minus_delta):
                dp = [dp[c] + stat_of_column(self.minus_delta, 2 * i + c, self.m_tiles) for c in range(2)]
            if cutlass.const_expr(is_float32):
                for c in cutlass.range_constexpr(2):
                    acc_dp[2 * i + c] = p[c] * dp[c]
            else:
                self.ds_words[i] = pack_pair(p[0] * dp[0], p[1] * dp[1], self.kernel.dtype)

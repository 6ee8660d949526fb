"""P and dS of a backward on accumulators of wgmma or mma with keys in rows and queries in columns.

P and dS are kept in 16 bits, or for float32 inputs in float32, in place of S and dP.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..memory.layouts import by_m_tile, rows_and_columns
from ..memory.ptx import pack_pair, unpack_pair
from ..repair.rows import soft_cap
from . import mask
from .online import Scores

# A score whose softcap has no slope any more; finite, because softmax_scale may be 0.
FAR_BELOW = -3e38


def stat_of_column(stats: cute.Tensor, i: int, m_tiles: int = 1) -> Float32:
    """The value that `read_stats` has read for the column of an accumulator's i-th value."""
    block = i // (4 * m_tiles)
    return stats[block % 2 * 2 + i % 2, block // 2]


class GradientScores:
    """S -> P and dP -> dS in registers. A subclass sets the attributes below."""

    kernel: Any  # its dtype is that of the inputs
    scores: Scores
    is_capped: bool  # whether there is a softcap
    tile_m: int
    tile_n: int
    lane_in_quad: Int32
    row_in_tile: Int32  # the first of this thread's rows; the second one lies 8 below
    minus_lse: cute.Tensor  # -lse * log2(e) of the queries in this thread's columns
    minus_delta: cute.Tensor  # -delta of these queries
    # with 16-bit inputs, two values a word
    p_words: cute.Tensor  # P
    ds_words: cute.Tensor  # dS
    capped_words: cute.Tensor  # with a softcap: P times its slope
    # with float32 inputs
    p: cute.Tensor  # the accumulator of S
    capped: cute.Tensor | None  # with a softcap: P times its slope

    m_tiles: int = 1  # pairs of rows of this thread
    rows_between: int = 0  # rows from one pair to the next
    first_query: Int32 | int = 0  # the query of the block that column 0 stands for

    @cute.jit
    def exponentials(self, acc_s: cute.Tensor, tile, m_block: Int32):
        """P in place of S; with a softcap, P times its slope beside it."""
        scale_log2 = self.scores.scale_log2
        self.mask_if_needed(acc_s, tile, m_block, FAR_BELOW if self.is_capped else -math.inf)
        if cutlass.const_expr(self.is_capped):
            # two at a time, so that no more than two slopes of the cap are in registers
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
            # A hidden score was capped as well: its slope is 0, but its P is not yet.
            self.mask_if_needed(acc_s, tile, m_block, 0.0)
        else:
            for i in cutlass.range_constexpr(cute.size(acc_s)):
                acc_s[i] = cute.math.exp2(
                    acc_s[i] * scale_log2 + stat_of_column(self.minus_lse, i, self.m_tiles), fastmath=True
                )

    @cute.jit
    def mask_if_needed(self, acc_s: cute.Tensor, tile, m_block: Int32, hidden: cutlass.Constexpr[float]):
        if m_block >= tile.clear_last or m_block < tile.clear_first:
            m_start = m_block * self.tile_m + self.first_query
            pieces = by_m_tile(acc_s)
            for i in cutlass.range_constexpr(self.m_tiles):
                keys = [self.key(tile, i, r) for r in range(2)]
                mask.apply_to_keys(rows_and_columns(pieces[i]), keys, m_start, self.lane_in_quad, tile.geometry, hidden)

    def key(self, tile, i: int, r: int) -> Int32:
        """The position of the key in row r (0 or 1) of this thread in its i-th m_tile."""
        return tile.n_block * self.tile_n + self.row_in_tile + i * self.rows_between + 8 * r

    @cute.jit
    def make_ds(self, acc_dp: cute.Tensor, minus_delta: cutlass.Constexpr[bool] = False):
        """dS = P (dP - delta), rounded to 16 bits, or for float32 inputs in place of dP.

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

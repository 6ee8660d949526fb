"""P and dS of a backward on accumulators of wgmma or mma with keys in rows and queries in columns.

P and dS are kept in 16 bits, or for float32 inputs in float32, in place of S and dP.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..memory.layouts import by_m_tile, rows_and_columns
from ..memory.ptx import pack_pair, unpack_pair
from ..repair.rows import soft_cap
from . import mask
from .dropout import StagedFlags, bit, flag_of
from .modifiers import Block, Modifiers, element, place_of
from .online import Scores

# A score whose softcap has no slope any more; finite, because softmax_scale may be 0.
FAR_BELOW = -3e38
FLAGS_PER_WORD = 8  # words of flags, whose every eighth bit is one, in a word of kept_words


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

    # with dropout: a bit for each value of an accumulator, and one of its shape
    slope: cute.Tensor | None = None  # of ALiBi, where a kernel reads it ahead
    kept_words: cute.Tensor
    kept_values: cute.Tensor

    # with dropout through shared memory: where its flags lie, and what it keeps of p_words
    flags: StagedFlags | None = None
    dropped_words: cute.Tensor

    modifiers: Modifiers | None = None
    m_tiles: int = 1  # pairs of rows of this thread
    rows_between: int = 0  # rows from one pair to the next
    first_query: Int32 | int = 0  # the query of the block that column 0 stands for

    @cute.jit
    def exponentials(self, acc_s: cute.Tensor, tile, head: Int32, m_block: Int32):
        """P in place of S; with a softcap, P times its slope beside it."""
        scale_log2 = self.scores.scale_log2
        self.mask_if_needed(acc_s, tile, head, m_block, FAR_BELOW if self.is_capped else -math.inf)
        terms = None
        if cutlass.const_expr(self.adds_terms):
            terms = [self.modifiers.terms(block) for block in self.blocks_of(tile, head, m_block)]
        if cutlass.const_expr(self.is_capped):
            # two at a time, so that no more than two slopes of the cap are in registers
            for i in cutlass.range_constexpr(cute.size(acc_s) // 2):
                capped = []
                for j in (2 * i, 2 * i + 1):
                    score = soft_cap(acc_s[j], self.scores.tanh_scale, self.kernel.dtype)
                    full_score, is_hidden = score, None
                    if cutlass.const_expr(terms is not None):
                        m, r, c = element(j, self.m_tiles)
                        full_score, is_hidden = terms[m].added(score, r, c)
                    acc_s[j] = cute.math.exp2(
                        full_score * scale_log2 + stat_of_column(self.minus_lse, j, self.m_tiles), fastmath=True
                    )
                    slope = acc_s[j] * (1.0 - score * score)
                    if cutlass.const_expr(is_hidden is not None):
                        slope = Float32(0.0) if is_hidden else slope
                    capped.append(slope)
                if cutlass.const_expr(self.kernel.dtype is Float32):
                    self.capped[2 * i], self.capped[2 * i + 1] = capped[0], capped[1]
                else:
                    self.capped_words[i] = pack_pair(*capped, self.kernel.dtype)
            # A hidden score was capped as well: its slope is 0, but its P is not yet.
            self.mask_if_needed(acc_s, tile, head, m_block, 0.0)
        else:
            if cutlass.const_expr(terms is not None):
                for i in cutlass.range_constexpr(cute.size(acc_s)):
                    m, r, c = element(i, self.m_tiles)
                    acc_s[i], _ = terms[m].added(acc_s[i], r, c)
            for i in cutlass.range_constexpr(cute.size(acc_s)):
                acc_s[i] = cute.math.exp2(
                    acc_s[i] * scale_log2 + stat_of_column(self.minus_lse, i, self.m_tiles), fastmath=True
                )

    @cute.jit
    def mask_if_needed(self, acc_s: cute.Tensor, tile, head: Int32, m_block: Int32, hidden: cutlass.Constexpr[float]):
        if m_block >= tile.clear_last or m_block < tile.clear_first:
            m_start = m_block * self.tile_m + self.first_query
            pieces = by_m_tile(acc_s)
            for i in cutlass.range_constexpr(self.m_tiles):
                scores, keys = rows_and_columns(pieces[i]), [self.key(tile, i, r) for r in range(2)]
                if cutlass.const_expr(self.has_intervals):
                    self.modifiers.hide(scores, self.blocks_of(tile, head, m_block)[i], hidden)
                else:
                    mask.apply_to_keys(scores, keys, m_start, self.lane_in_quad, tile.geometry, hidden)

    @property
    def has_intervals(self) -> bool:
        return self.modifiers is not None and self.modifiers.has_intervals

    @property
    def adds_terms(self) -> bool:
        return self.modifiers is not None and self.modifiers.adds_terms

    @property
    def drops(self) -> bool:
        return self.modifiers is not None and self.modifiers.drops

    def blocks_of(self, tile, head: Int32, m_block: Int32) -> list[Block]:
        """The `Block` of each m_tile of this thread."""
        places = 2 * [place_of(head, tile.origin_q, tile.sequence, tile.geometry, self.kernel.is_packed)]
        first_column = m_block * self.tile_m + self.first_query + 2 * self.lane_in_quad
        slope = None if self.slope is None else self.slope[0]
        return [
            Block([self.key(tile, i, r) for r in range(2)], first_column, places, has_keys_in_rows=True, slope=slope)
            for i in range(self.m_tiles)
        ]

    @cute.jit
    def load_slope(self, tile, head: Int32):
        """With ALiBi: read the slope of the query head whose scores come next."""
        if cutlass.const_expr(self.slope is not None):
            place = place_of(head, tile.origin_q, tile.sequence, tile.geometry, self.kernel.is_packed)
            self.slope[0] = self.modifiers.slope(place)

    @cute.jit
    def draw_kept(self, tile, head: Int32, m_block: Int32):
        """Set a bit of kept_words for each value of an accumulator that dropout keeps."""
        columns = cute.size(self.kept_values) // (2 * self.m_tiles)
        kept = [self.modifiers.kept(block, columns) for block in self.blocks_of(tile, head, m_block)]
        flags = [word for pairs in kept for word in pairs.words]
        for w in cutlass.range_constexpr(cute.size(self.kept_words)):
            word = Int32(0)
            for i in cutlass.range_constexpr(min(FLAGS_PER_WORD, len(flags) - FLAGS_PER_WORD * w)):
                # the shift brings copies of the sign, which the mask leaves out
                mask = 0x80808080 >> i
                mask = mask - (1 << 32) if mask >= 1 << 31 else mask
                word = word | (flags[FLAGS_PER_WORD * w + i] >> i & mask)
            self.kept_words[w] = word

    def is_kept(self, i: int) -> Boolean:
        """Whether dropout keeps an accumulator's i-th value, after `draw_kept`."""
        m, r, c = element(i, self.m_tiles)
        columns = cute.size(self.kept_values) // (2 * self.m_tiles)
        word, byte = flag_of(r, c, has_keys_in_rows=True)
        word += m * max(2, columns // 2)
        return bit(self.kept_words[word // FLAGS_PER_WORD], 8 * byte + 7 - word % FLAGS_PER_WORD)

    @cute.jit
    def drop_p(self, acc_s: cute.Tensor):
        """Set the values of P to 0 that dropout does not keep, after `draw_kept`."""
        for i in cutlass.range_constexpr(cute.size(acc_s)):
            acc_s[i] = acc_s[i] if self.is_kept(i) else Float32(0.0)

    def key(self, tile, i: int, r: int) -> Int32:
        """The position of the key in row r (0 or 1) of this thread in its i-th m_tile."""
        return tile.n_block * self.tile_n + self.row_in_tile + i * self.rows_between + 8 * r

    @cute.jit
    def make_ds(self, acc_dp: cute.Tensor, tile, head, m_block, minus_delta: cutlass.Constexpr[bool] = False):
        """dS = P (dP - delta), rounded to 16 bits, or for float32 inputs in place of dP.

        Args: minus_delta: whether acc_dp holds dP - delta already; with dropout it must not.
        """
        if cutlass.const_expr(self.drops and self.flags is None):
            for i in cutlass.range_constexpr(cute.size(acc_dp)):
                scaled = acc_dp[i] * self.modifiers.tensors.keep_scale
                acc_dp[i] = scaled if self.is_kept(i) else Float32(0.0)
        found = []
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
                deltas = [stat_of_column(self.minus_delta, 2 * i + c, self.m_tiles) for c in range(2)]
            if cutlass.const_expr(self.flags is not None):
                # P dP of the pairs that dropout keeps, less P delta of all
                dropped = kept = unpack_pair(self.dropped_words[i], self.kernel.dtype)
                if cutlass.const_expr(self.is_capped):
                    kept = [Float32(0.0) if dropped[c] == 0.0 else p[c] for c in range(2)]
                dp = [dp[c] * self.modifiers.tensors.keep_scale for c in range(2)]
                ds = [kept[c] * dp[c] + p[c] * deltas[c] for c in range(2)]
            else:
                if cutlass.const_expr(not minus_delta):
                    dp = [dp[c] + deltas[c] for c in range(2)]
                ds = [p[c] * dp[c] for c in range(2)]
            if cutlass.const_expr(is_float32):
                acc_dp[2 * i], acc_dp[2 * i + 1] = ds[0], ds[1]
            else:
                self.ds_words[i] = pack_pair(*ds, self.kernel.dtype)
            if cutlass.const_expr(self.adds_terms):
                if cutlass.const_expr(self.is_capped):  # terms are added after the softcap: its slope is none of theirs
                    if cutlass.const_expr(is_float32):
                        p = [self.p[2 * i + c] for c in range(2)]
                    else:
                        p = unpack_pair(self.p_words[i], self.kernel.dtype)
                if cutlass.const_expr(self.flags is not None):
                    ds = [dropped[c] * dp[c] + p[c] * deltas[c] for c in range(2)]
                else:
                    ds = [p[c] * dp[c] for c in range(2)]
                # of a hidden pair, whose P is 0, dP may be NaN
                found += [Float32(0.0) if p[c] == 0.0 else ds[c] for c in range(2)]
        if cutlass.const_expr(self.adds_terms):
            blocks = self.blocks_of(tile, head, m_block)
            self.modifiers.add_gradients(found, blocks, self.slot_of(tile), self.m_tiles)

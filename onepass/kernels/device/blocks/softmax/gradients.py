"""P and dS of a backward on accumulators of wgmma or mma with keys in rows and queries in columns.

P and dS are kept in 16 bits, or for float32 inputs in float32; they overwrite S and dP.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from .....geometry.integers import ceil_div
from ..memory.layouts import by_m_tile, rows_and_columns
from ..memory.ptx import pack_pair, unpack_pair
from ..memory.untraced import Untraced
from ..repair.rows import soft_cap
from . import mask
from .dropout import StagedFlags, bit, flag_of
from .modifiers import Block, Modifiers, element, place_of
from .online import ScoreFactors

# A score whose softcap has no slope any more; finite, because softmax_scale may be 0.
FAR_BELOW = -3e38
FLAGS_PER_WORD = 8  # words of flags, whose every eighth bit is one, in a word of KeptBits


def stat_of_column(stats: cute.Tensor, i: int, m_tiles: int = 1) -> Float32:
    """The statistic (minus_lse or minus_delta) of the query in the column of an accumulator's i-th value."""
    block = i // (4 * m_tiles)
    return stats[block % 2 * 2 + i % 2, block // 2]


class Region(NamedTuple):
    """The region of S and dP, with keys in rows, that a thread and its warp have.

    Attributes:
        thread, lane, lane_in_quad: the number of the thread, in its warp, and among four neighbors.
        warp: the number of the warp among those of the thread block that compute scores.
        row_in_tile: the first of the thread's rows; the second one lies 8 below.
        num_queries: columns of the warp.
        first_query: the query of the block that the first of them stands for.
        m_tiles, rows_between: the number of pairs of rows, and the rows from one pair to the next.
    """

    thread: Int32
    lane: Int32
    lane_in_quad: Int32
    warp: Int32
    row_in_tile: Int32
    num_queries: int
    first_query: Int32 | int = 0
    m_tiles: int = 1
    rows_between: int = 0


class KeptBits(Untraced):
    """A bit for each value of an accumulator, in registers: whether dropout keeps it.

    Args: size: the number of values.
    """

    def __init__(self, modifiers: Modifiers, size: int, m_tiles: int):
        self.modifiers, self.m_tiles, self.columns = modifiers, m_tiles, size // (2 * m_tiles)
        self.words = cute.make_rmem_tensor((ceil_div(size, 32),), Int32)

    @cute.jit
    def draw(self, blocks: list):
        """Set the bits of the blocks of all m_tiles."""
        kept = [self.modifiers.kept(block, self.columns) for block in blocks]
        flags = [word for pairs in kept for word in pairs.words]
        for w in cutlass.range_constexpr(cute.size(self.words)):
            word = Int32(0)
            for i in cutlass.range_constexpr(min(FLAGS_PER_WORD, len(flags) - FLAGS_PER_WORD * w)):
                # the shift brings copies of the sign, which the mask leaves out
                mask = 0x80808080 >> i
                mask = mask - (1 << 32) if mask >= 1 << 31 else mask
                word = word | (flags[FLAGS_PER_WORD * w + i] >> i & mask)
            self.words[w] = word

    def is_kept(self, i: int) -> Boolean:
        """Whether dropout keeps an accumulator's i-th value."""
        m, r, c = element(i, self.m_tiles)
        word, byte = flag_of(r, c, has_keys_in_rows=True)
        word += m * max(2, self.columns // 2)
        return bit(self.words[word // FLAGS_PER_WORD], 8 * byte + 7 - word % FLAGS_PER_WORD)

    @cute.jit
    def drop(self, acc: cute.Tensor):
        """Set the values of an accumulator to 0 that dropout does not keep."""
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = acc[i] if self.is_kept(i) else Float32(0.0)


class GradientScores(Untraced):
    """S -> P and dP -> dS in the registers of a thread.

    With 16-bit inputs p, ds and capped have two values a word.

    Args:
        kernel: a KeyTiles; its dtype is that of the inputs.
        factors: those of the scores.
        p, ds: the registers of P and dS. With float32 inputs p is the accumulator of S, and dS takes the place of dP.
        kept: with dropout through registers.
        flags, dropped: with dropout through shared memory: its flags, and the registers of what it keeps of p.
        keeps_slope: whether the kernel calls `load_slope`.
    """

    def __init__(
        self,
        kernel: Any,
        region: Region,
        factors: ScoreFactors,
        modifiers: Modifiers | None,
        p: cute.Tensor,
        ds: cute.Tensor | None,
        kept: KeptBits | None = None,
        flags: StagedFlags | None = None,
        dropped: cute.Tensor | None = None,
        keeps_slope: bool = False,
    ):
        self.kernel, self.region, self.factors, self.modifiers = kernel, region, factors, modifiers
        self.p, self.ds, self.kept, self.flags, self.dropped = p, ds, kept, flags, dropped
        # -lse * log2(e) and -delta of the queries in this thread's columns, four of each sixteen
        self.minus_lse, self.minus_delta = (
            cute.make_rmem_tensor((4, ceil_div(region.num_queries, 16)), Float32) for _ in range(2)
        )
        # with a softcap: P times its slope 1 - tanh^2
        self.capped = None if factors.tanh_scale is None else cute.make_rmem_tensor((cute.size(p),), p.element_type)
        self.slope = cute.make_rmem_tensor((1,), Float32) if keeps_slope else None  # of ALiBi
        self.masks = None  # those of `Modifiers.hide`, of each m_tile; None: `read_masks` reads nothing
        if self.has_intervals:
            count = modifiers.num_masks(self.columns, has_keys_in_rows=True)
            self.masks = cute.make_rmem_tensor((count, region.m_tiles), Uint32)

    @cute.jit
    def exponentials(self, acc_s: cute.Tensor, tile, head: Int32, m_block: Int32):
        """P overwrites S; with a softcap, P times its slope is kept, too."""
        scale_log2 = self.factors.scale_log2
        self.mask_if_needed(acc_s, tile, head, m_block, FAR_BELOW if self.capped is not None else -math.inf)
        terms = None
        if cutlass.const_expr(self.adds_terms):
            terms = [self.modifiers.terms(block) for block in self.blocks_of(tile, head, m_block)]
        if cutlass.const_expr(self.capped is not None):
            # two at a time, so that no more than two slopes of the cap are in registers
            for i in cutlass.range_constexpr(cute.size(acc_s) // 2):
                capped = []
                for j in (2 * i, 2 * i + 1):
                    score = soft_cap(acc_s[j], self.factors.tanh_scale, self.kernel.dtype)
                    full_score, is_hidden = score, None
                    if cutlass.const_expr(terms is not None):
                        m, r, c = element(j, self.region.m_tiles)
                        full_score, is_hidden = terms[m].added(score, r, c)
                    acc_s[j] = cute.math.exp2(
                        full_score * scale_log2 + stat_of_column(self.minus_lse, j, self.region.m_tiles), fastmath=True
                    )
                    slope = acc_s[j] * (1.0 - score * score)
                    if cutlass.const_expr(is_hidden is not None):
                        slope = Float32(0.0) if is_hidden else slope
                    capped.append(slope)
                self.set_pair(self.capped, i, capped)
            # A hidden score was capped as well: its slope is 0, but its P is not yet.
            self.mask_if_needed(acc_s, tile, head, m_block, 0.0)
        else:
            if cutlass.const_expr(terms is not None):
                for i in cutlass.range_constexpr(cute.size(acc_s)):
                    m, r, c = element(i, self.region.m_tiles)
                    acc_s[i], _ = terms[m].added(acc_s[i], r, c)
            for i in cutlass.range_constexpr(cute.size(acc_s)):
                acc_s[i] = cute.math.exp2(
                    acc_s[i] * scale_log2 + stat_of_column(self.minus_lse, i, self.region.m_tiles), fastmath=True
                )

    @cute.jit
    def mask_if_needed(self, acc_s: cute.Tensor, tile, head: Int32, m_block: Int32, hidden: cutlass.Constexpr[float]):
        if m_block >= tile.clear_last or m_block < tile.clear_first:
            m_start = m_block * self.kernel.tile_m + self.region.first_query
            pieces = by_m_tile(acc_s)
            for i in cutlass.range_constexpr(self.region.m_tiles):
                scores, keys = rows_and_columns(pieces[i]), [self.key(tile, i, r) for r in range(2)]
                if cutlass.const_expr(self.has_intervals):
                    masks = None
                    if cutlass.const_expr(self.masks is not None):
                        masks = [self.masks[w, i] for w in range(self.masks.shape[0])]
                    self.modifiers.hide(scores, self.blocks_of(tile, head, m_block)[i], hidden, masks)
                else:
                    mask.apply_to_keys(scores, keys, m_start, self.region.lane_in_quad, tile.geometry, hidden)

    @cute.jit
    def read_masks(self, tile, head: Int32, m_block: Int32):
        """Read the intervals of a block's queries and keys, before `exponentials` needs them. For a whole warp."""
        if cutlass.const_expr(self.masks is not None):
            if m_block >= tile.clear_last or m_block < tile.clear_first:
                blocks = self.blocks_of(tile, head, m_block)
                for i in cutlass.range_constexpr(self.region.m_tiles):
                    masks = self.modifiers.masks(blocks[i], self.columns)
                    for w in cutlass.range_constexpr(len(masks)):
                        self.masks[w, i] = masks[w]

    @property
    def columns(self) -> int:
        """Columns of a thread."""
        return self.region.num_queries // 4

    @property
    def has_intervals(self) -> bool:
        return self.modifiers is not None and self.modifiers.has_intervals

    @property
    def adds_terms(self) -> bool:
        return self.modifiers is not None and self.modifiers.adds_terms

    @property
    def drops(self) -> bool:
        return self.kept is not None or self.flags is not None

    def blocks_of(self, tile, head: Int32, m_block: Int32) -> list[Block]:
        """The `Block` of each m_tile of this thread."""
        places = 2 * [place_of(head, tile.origin_q, tile.origin_k, tile.sequence, tile.geometry, self.kernel.is_packed)]
        m_block = self.kernel.query_block(tile, m_block)
        first_column = m_block * self.kernel.tile_m + self.region.first_query + 2 * self.region.lane_in_quad
        slope = None if self.slope is None else self.slope[0]
        return [
            Block([self.key(tile, i, r) for r in range(2)], first_column, places, has_keys_in_rows=True, slope=slope)
            for i in range(self.region.m_tiles)
        ]

    @cute.jit
    def load_slope(self, tile, head: Int32):
        """With ALiBi: read the slope of the query head whose scores come next."""
        if cutlass.const_expr(self.slope is not None):
            place = place_of(head, tile.origin_q, tile.origin_k, tile.sequence, tile.geometry, self.kernel.is_packed)
            self.slope[0] = self.modifiers.slope(place)

    @cute.jit
    def draw_kept(self, tile, head: Int32, m_block: Int32):
        """With dropout through registers: set the bits of a block."""
        if cutlass.const_expr(self.kept is not None):
            self.kept.draw(self.blocks_of(tile, head, m_block))

    def key(self, tile, i: int, r: int) -> Int32:
        """The position of the key in row r (0 or 1) of this thread in its i-th m_tile."""
        return tile.n_block * self.kernel.tile_n + self.region.row_in_tile + i * self.region.rows_between + 8 * r

    @cute.jit
    def make_ds(self, acc_dp: cute.Tensor, tile, head, m_block, minus_delta: cutlass.Constexpr[bool] = False):
        """dS = P (dP - delta), rounded to 16 bits, or for float32 inputs where dP was.

        Args: minus_delta: whether acc_dp holds dP - delta already; with dropout it must not.
        """
        if cutlass.const_expr(self.kept is not None):
            for i in cutlass.range_constexpr(cute.size(acc_dp)):
                scaled = acc_dp[i] * self.modifiers.tensors.keep_scale
                acc_dp[i] = scaled if self.kept.is_kept(i) else Float32(0.0)
        found = []
        source = self.p if cutlass.const_expr(self.capped is None) else self.capped
        target = acc_dp if cutlass.const_expr(self.ds is None) else self.ds
        for i in cutlass.range_constexpr(cute.size(acc_dp) // 2):
            p = self.pair(source, i)
            dp = [acc_dp[2 * i + c] for c in range(2)]
            if cutlass.const_expr(not minus_delta):
                deltas = [stat_of_column(self.minus_delta, 2 * i + c, self.region.m_tiles) for c in range(2)]
            if cutlass.const_expr(self.flags is not None):
                # P dP of the pairs that dropout keeps, less P delta of all
                dropped = kept = self.pair(self.dropped, i)
                if cutlass.const_expr(self.capped is not None):
                    kept = [Float32(0.0) if dropped[c] == 0.0 else p[c] for c in range(2)]
                dp = [dp[c] * self.modifiers.tensors.keep_scale for c in range(2)]
                ds = [kept[c] * dp[c] + p[c] * deltas[c] for c in range(2)]
            else:
                if cutlass.const_expr(not minus_delta):
                    dp = [dp[c] + deltas[c] for c in range(2)]
                ds = [p[c] * dp[c] for c in range(2)]
            self.set_pair(target, i, ds)
            if cutlass.const_expr(self.adds_terms):
                if cutlass.const_expr(self.capped is not None):
                    p = self.pair(self.p, i)  # terms are added after the softcap, whose slope does not apply to them
                if cutlass.const_expr(self.flags is not None):
                    ds = [dropped[c] * dp[c] + p[c] * deltas[c] for c in range(2)]
                else:
                    ds = [p[c] * dp[c] for c in range(2)]
                # of a hidden pair, whose P is 0, dP may be NaN
                found += [Float32(0.0) if p[c] == 0.0 else ds[c] for c in range(2)]
        if cutlass.const_expr(self.adds_terms):
            blocks = self.blocks_of(tile, head, m_block)
            self.modifiers.add_gradients(found, blocks, self.slot(tile), self.region.m_tiles)

    def slot(self, tile) -> Int32:
        """This warp's place in a tensor with one for each warp of a tile."""
        return tile.n_block * self.kernel.config.tile_warps + self.region.warp

    def pair(self, values: cute.Tensor, i: int) -> list | tuple:
        """Two neighboring values of P or dS: the i-th pair."""
        if self.kernel.dtype is Float32:
            return [values[2 * i + c] for c in range(2)]
        return unpack_pair(values[i], self.kernel.dtype)

    def set_pair(self, values: cute.Tensor, i: int, pair: list):
        if self.kernel.dtype is Float32:
            values[2 * i], values[2 * i + 1] = pair[0], pair[1]
        else:
            values[i] = pack_pair(*pair, self.kernel.dtype)

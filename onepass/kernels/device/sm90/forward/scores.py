"""The scores of a consumer warpgroup of the Hopper forward: their scales, softcap and mask, and how they become P."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .....geometry.integers import minimum, select
from .....geometry.pack_gqa import unpack_row
from .....quantization.codec import SCALE_BLOCK
from ....config import ROWS_PER_WARPGROUP
from ...blocks.memory.ptx import pack, pack_halves
from ...blocks.repair.rows import soft_cap
from ...blocks.softmax import mask, scaled
from ...blocks.softmax.dropout import drop_packed
from ...blocks.softmax.modifiers import Block, Place, place_of
from ...blocks.softmax.online import Scores
from .gemms import WarpgroupGemms
from .tile import Tile


class WarpgroupScores(WarpgroupGemms):
    """A warpgroup's scores between the GEMM that computes them and the GEMM that reads P."""

    @cute.jit
    def load_row_scales(self, tile: Tile):
        """The factors of this thread's two rows, for `ScaledSoftmax.take_scales`."""
        scales = scaled.scales_of_entry(self.descales.q, tile.origin_q, tile.sequence)
        first = scaled.first_block(tile.origin_q, tile.sequence, self.descales.q_block)
        for r in cutlass.range_constexpr(2):
            position, head, is_row = self.row_of(tile, self.row_in_tile + 8 * r)
            scale = Float32(0.0)
            if is_row:
                block = first + divmod(position, self.descales.q_block)[0]
                scale = scales[head, minimum(block, cute.size(scales, mode=[1]) - 1)]
            self.row_scale[r] = self.softmax.scale_of_row(scale)

    def head_scales(self, tile: Tile) -> tuple:
        """The descales of K and V of a tile's head, (blocks,) each, and the number of its sequence's first block."""
        head_kv = tile.head // self.kernel.tile_heads_per_kvhead
        entries = (scaled.scales_of_entry(t, tile.origin_k, tile.sequence) for t in (self.descales.k, self.descales.v))
        return *(t[head_kv, None] for t in entries), scaled.first_block(tile.origin_k, tile.sequence, SCALE_BLOCK)

    @cute.jit
    def load_scales(self, tile: Tile):
        """With FP8 or halves: the scales of the rows of a tile and of its first keys. With ALiBi: the head's slope.

        With intervals: those of this thread's rows, because the compiler would move no load of theirs out of a step.
        """
        if cutlass.const_expr(self.descales is not None):
            self.load_row_scales(tile)
            self.key_scales.load(*self.head_scales(tile), tile.last - 1)
        if cutlass.const_expr(self.cache_descales is not None):
            scales = self.scales_with(self.head_descales(tile)[0])
            self.head_scale[0] = scales.scale_log2 if scales.tanh_scale is None else scales.tanh_scale
        if cutlass.const_expr(self.slope is not None):
            self.slope[0] = self.modifiers.slope(self.place(tile))
        if cutlass.const_expr(self.intervals is not None):
            for r in cutlass.range_constexpr(2):
                row, _, _ = self.row_of(tile, self.row_in_tile + 8 * r)
                self.intervals[r, 0], self.intervals[r, 1] = self.modifiers.interval(self.place(tile), row)

    def head_descales(self, tile: Tile) -> tuple:
        """The magnitude of K's descale of a tile's head of an e4m3 cache, and V's descale.

        K's is part of the scale of the scores. Its sign, if it is negative, comes with the converted K.
        """
        head_kv = tile.head // self.kernel.tile_heads_per_kvhead
        k, v = (t[tile.origin_k, head_kv, 0] for t in (self.cache_descales.k, self.cache_descales.v))
        return cute.arch.fmax(k, -k), v

    def scales_with(self, k_descale: Float32 | None) -> Scores:
        """The scales of scores, with K's descale if there is one."""
        scale_log2, tanh_scale = self.scores
        if k_descale is None:
            return self.scores
        if tanh_scale is None:
            return Scores(scale_log2 * k_descale, None)
        return Scores(scale_log2, tanh_scale * k_descale)

    @cute.jit
    def pack_p(self, buffer: cutlass.Constexpr[int]):
        """The exponentials in S[buffer] become P of the next PV."""
        if cutlass.const_expr(self.config.p_codes):
            scaled.copy_p(self.softmax.p, self.rP[0])
        elif cutlass.const_expr(self.kernel.is_fp8):
            scaled.pack_p(self.s[buffer], self.rP[0])
        elif cutlass.const_expr(self.kernel.num_halves == 2):
            pack_halves(self.acc_s[buffer], *self.rP)
        else:
            pack(self.acc_s[buffer], self.rP[0])
            if cutlass.const_expr(self.kept_words is not None):
                drop_packed(cute.recast_tensor(self.rP[0], Int32), self.kept_words)

    @cute.jit
    def modify_scores(
        self, tile: Tile, n_block: Int32, buffer: cutlass.Constexpr[int], is_first: cutlass.Constexpr[bool] = False
    ):
        """Apply the softcap, s -> tanh(softmax_scale * s / softcap); the cap itself is in scale_log2.

        With FP8 or halves, the softmax is given the scales of these scores.

        Args: is_first: whether the block is the tile's first one.
        """
        if cutlass.const_expr(self.descales is not None):
            self.key_scales.take(*self.head_scales(tile), n_block, is_first)
            self.softmax.take_scales(self.row_scale, self.key_scales, n_block)
            if cutlass.const_expr(self.scores.tanh_scale is not None):
                self.softmax.soft_cap(self.s[buffer])
        elif cutlass.const_expr(self.scores.tanh_scale is not None):
            acc_s, tanh_scale = self.acc_s[buffer], self.scores.tanh_scale
            if cutlass.const_expr(self.cache_descales is not None):
                tanh_scale = self.head_scale[0]
            for i in cutlass.range_constexpr(cute.size(acc_s)):
                acc_s[i] = soft_cap(acc_s[i], tanh_scale)
        if cutlass.const_expr(self.modifiers is not None and self.modifiers.adds_terms):
            self.modifiers.add_terms(self.s[buffer], self.block_of(tile, n_block, buffer))

    def place(self, tile: Tile) -> Place:
        return place_of(tile.head, tile.origin_q, tile.sequence, tile.geometry, self.kernel.is_packed)

    def block_of(self, tile: Tile, n_block: Int32, buffer: int) -> Block:
        rows = [self.row_of(tile, self.row_in_tile + 8 * r)[0] for r in range(2)]
        first_column = n_block * self.tile_n + buffer * self.buffer_n + 2 * self.lane_in_quad
        slope = None if self.slope is None else self.slope[0]
        intervals = self.intervals
        if intervals is not None:
            intervals = [(intervals[r, 0], intervals[r, 1]) for r in range(2)]
        return Block(rows, first_column, 2 * [self.place(tile)], slope=slope, intervals=intervals)

    @cute.jit
    def drop(self, tile: Tile, n_block: Int32, buffer: cutlass.Constexpr[int]):
        """Leave out exponentials that dropout does not keep; they are in the sums already."""
        if cutlass.const_expr(self.modifiers is not None and self.modifiers.drops):
            block = self.block_of(tile, n_block, buffer)
            if cutlass.const_expr(self.kept_words is None):
                self.modifiers.drop(self.s[buffer], block)
            else:  # when they are packed, two at a time
                words = self.modifiers.kept(block, cute.size(self.s[buffer], mode=[1])).words
                for i in cutlass.range_constexpr(len(words)):
                    self.kept_words[i] = words[i]

    @cute.jit
    def mask_if_needed(self, tile: Tile, n_block: Int32, buffer: cutlass.Constexpr[int]):
        if n_block >= tile.clear_last or n_block < tile.clear_first:
            self.apply_mask(tile, n_block, buffer)

    @cute.jit
    def apply_mask(self, tile: Tile, n_block: Int32, buffer: cutlass.Constexpr[int]):
        if cutlass.const_expr(self.kernel.has_intervals):
            self.modifiers.hide(self.s[buffer], self.block_of(tile, n_block, buffer), -math.inf)
        else:
            rows = [self.row_of(tile, self.row_in_tile + 8 * r)[0] for r in range(2)]
            n_start = n_block * self.tile_n + buffer * self.buffer_n
            mask.apply(self.s[buffer], rows, n_start, self.lane_in_quad, tile.geometry)

    def row_of(self, tile: Tile, row_in_tile) -> tuple:
        """A row's position in the sequence, its head, and whether there is such a row."""
        group = self.kernel.group
        if group == 1:
            position = tile.m_block * self.tile_m + row_in_tile
            return position, tile.head, position < tile.geometry.seqlen_q
        position, head, is_used = unpack_row(row_in_tile, group, ROWS_PER_WARPGROUP)
        position = tile.m_block * self.tile_m + position
        limit = select(is_used, tile.geometry.seqlen_q, Int32(0))
        return position, tile.head * group + head, position < limit

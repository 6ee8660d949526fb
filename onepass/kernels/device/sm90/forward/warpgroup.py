"""The end of a tile in a consumer warpgroup of the Hopper forward: rows are stored, and repaired after a NaN.

gemms.py has the warpgroup's registers and GEMMs, scores.py what happens to its scores; consumer.py puts all of these
acts in order.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .....geometry.block_range import key_range
from .....geometry.integers import maximum, minimum
from ...blocks.memory import epilogue
from ...blocks.memory.warp import broadcast
from ...blocks.repair import e4m3_rows
from ...blocks.repair import rows as repair_rows
from ...blocks.repair.rows import VECTOR_BYTES
from ...blocks.softmax import scaled
from ...blocks.softmax.cache_scales import SignOfKeys
from ...blocks.softmax.online import finish
from ...blocks.tiles.paged import PagedRows
from .scores import WarpgroupScores
from .tile import Tile


class Warpgroup(WarpgroupScores):
    """A warpgroup's 64 rows of a tile once all their keys have been added."""

    @cute.jit
    def keep_done(self):
        for r in cutlass.range_constexpr(2):
            self.done_max[r], self.done_sum[r] = self.softmax.row_max[r], self.softmax.row_sum[r]

    @cute.jit
    def store(self, tile: Tile):
        """Write out = O / row_sum and lse of a finished tile; O is free afterwards."""
        weights = cute.make_rmem_tensor((2,), Float32)
        k_descale = v_descale = None
        if cutlass.const_expr(self.cache_descales is not None):
            k_descale, v_descale = self.head_descales(tile)
        at_head = self.kernel.at_head
        rows = [self.row_of(tile, self.row_in_tile + 8 * r) for r in range(2)]
        is_row = [exists for _, _, exists in rows]
        for r in cutlass.range_constexpr(2):
            position, head, _ = rows[r]
            sink = None
            if cutlass.const_expr(self.sinks is not None):
                sink = self.sinks.at_row(head, tile.origin_q)
            weight, lse = self.finish(self.done_max[r], self.done_sum[r], sink, k_descale)
            if cutlass.const_expr(self.modifiers is not None and self.modifiers.drops):
                weight = weight * self.modifiers.tensors.keep_scale
            if cutlass.const_expr(v_descale is not None):
                weight = weight * v_descale
            weights[r] = weight
            mLSE = at_head(self.mLSE, self.mLSE, head, tile.origin_out)[None, 0]
            epilogue.store_lse(lse, mLSE, position, is_row[r], self.lane_in_quad)
            if cutlass.const_expr(self.all_splits is not None):
                if tile.origin_out == tile.origin_q:  # the first split
                    self.store_absent_splits(tile, mLSE, position, is_row[r])
        out_rows = [at_head(self.mO, self.mO, head, tile.origin_out)[position, None] for position, head, _ in rows]
        if cutlass.const_expr(self.kernel.num_halves == 2 or self.kernel.is_split):
            epilogue.store_pairs(self.o, weights, out_rows, is_row, self.lane_in_quad, VECTOR_BYTES)
        else:
            epilogue.store_rows(self.o, weights, out_rows, is_row, self.lane_in_quad)
        if cutlass.const_expr(self.sources is not None and self.kernel.num_halves == 2):
            if repair_rows.has_nan_in_a_row(self.o, is_row):
                cute.arch.sync_warp()  # other lanes write the same rows again
                self.repair_tile(tile)
        elif cutlass.const_expr(self.sources is not None):
            if repair_rows.has_nan(self.o, is_row[0]):
                cute.arch.sync_warp()
                self.recompute(tile, weights, k_descale)

    @cute.jit
    def store_absent_splits(self, tile: Tile, mLSE: cute.Tensor, position: Int32, is_row: Boolean):
        """Write lse = -inf for the splits that this packed sequence does not have, while others do."""
        num_splits, total_q = self.all_splits
        for split in cutlass.range(tile.num_splits, num_splits, unroll=1):
            epilogue.store_lse(-Float32.inf, mLSE, position + split * total_q, is_row, self.lane_in_quad)

    def finish(self, row_max, row_sum, sink, k_descale) -> tuple:
        if self.descales is None:
            return finish(row_max, row_sum, self.scales_with(k_descale).scale_log2, sink)
        finish_scaled = scaled.finish if self.kernel.is_fp8 else scaled.finish_exactly
        return finish_scaled(row_max, row_sum, self.softmax.exponent, sink)

    def keys_of_row(self, tile: Tile, position: Int32) -> tuple:
        """The keys [low, high) that a row may see."""
        if self.kernel.has_intervals:
            return self.modifiers.interval(self.place(tile), position)
        return key_range(position, position + 1, *tile.geometry)

    @cute.jit
    def recompute(self, tile: Tile, weights: cute.Tensor, k_descale: Float32 | None):
        """Compute every row of this warp again from its visible keys alone.

        V of a hidden key may have brought a NaN (0 * NaN).
        """
        at_head, sources = self.kernel.at_head, self.sources
        head_kv = tile.head // self.kernel.tile_heads_per_kvhead
        if cutlass.const_expr(self.kernel.is_paged):
            mK, mV = (
                PagedRows(t[None, None, head_kv, None], self.pages, tile.origin_k) for t in (sources.k, sources.v)
            )
        else:
            mK, mV = (self.kernel.keys_at_head(t, t, head_kv, tile.origin_k) for t in (sources.k, sources.v))
        # made uniform: if a branch could split the warp, ptxas would give up uniform registers in the main loop
        first_row = cute.arch.make_warp_uniform(broadcast(self.row_in_tile, 0))
        for i in cutlass.range(16, unroll=1):
            position, head, is_row = self.row_of(tile, first_row + i)
            is_upper, lane = i < 8, i % 8 * 4
            row_max = broadcast(self.done_max[0] if is_upper else self.done_max[1], lane)
            weight = broadcast(weights[0] if is_upper else weights[1], lane)
            if is_row:
                mQ = at_head(sources.q, sources.q, head, tile.origin_q)
                mO = at_head(self.mO, self.mO, head, tile.origin_out)
                low, high = self.keys_of_row(tile, position)
                if cutlass.const_expr(self.kernel.is_split):
                    low, high = maximum(low, tile.first * self.tile_n), minimum(high, tile.last * self.tile_n)
                scales = self.scales_with(k_descale)
                pairs = None
                if cutlass.const_expr(self.modifiers is not None):
                    pairs = self.modifiers.pairs_of_query(self.place(tile), position)
                row = (mQ[position, None], mK, mV, mO[position, None], low, high, scales, row_max, weight)
                if cutlass.const_expr(self.kernel.converts):
                    signs = None
                    if cutlass.const_expr(self.cache_descales is not None):
                        signs = SignOfKeys(self.cache_descales.k[tile.origin_k, head_kv, 0])
                    e4m3_rows.recompute_row(*row, signs, pairs)
                else:
                    repair_rows.recompute_row(*row, pairs=pairs)

    @cute.jit
    def repair_tile(self, tile: Tile):
        """Compute every row of this warp, and its lse, from q, k and v in float32.

        Float16 halves that cannot hold their values are NaN.
        """
        at_head, sources = self.kernel.at_head, self.sources
        head_kv = tile.head // self.kernel.tile_heads_per_kvhead
        mK, mV = (self.kernel.keys_at_head(t, t, head_kv, tile.origin_k) for t in (sources.k, sources.v))
        first_row = cute.arch.make_warp_uniform(broadcast(self.row_in_tile, 0))  # see `recompute`
        for i in cutlass.range(16, unroll=1):
            position, head, is_row = self.row_of(tile, first_row + i)
            if is_row:
                mQ = at_head(sources.q, sources.q, head, tile.origin_q)
                mO, mLSE = (at_head(t, t, head, tile.origin_out) for t in (self.mO, self.mLSE))
                sink = None
                if cutlass.const_expr(self.sinks is not None):
                    sink = self.sinks.at_row(head, tile.origin_q)
                keys = key_range(position, position + 1, *tile.geometry)
                lse = repair_rows.attend_row(mQ[position, None], mK, mV, mO[position, None], *keys, *self.scores, sink)
                epilogue.store_lse(lse, mLSE[None, 0], position, is_row, cute.arch.lane_idx())

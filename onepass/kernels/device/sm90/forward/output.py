"""How finished rows of the Hopper forward reach global memory, and their repair after a NaN."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .....geometry.block_range import key_range
from .....geometry.integers import maximum, minimum
from ...blocks.memory import epilogue
from ...blocks.memory.untraced import Untraced
from ...blocks.memory.warp import broadcast
from ...blocks.repair import e4m3_rows
from ...blocks.repair import rows as repair_rows
from ...blocks.repair.rows import VECTOR_BYTES
from ...blocks.softmax.cache_scales import SignOfKeys
from ...blocks.tiles.paged import PagedRows
from .gemms import ForwardGemms
from .inputs import Inputs
from .rows import Rows
from .scales import Scales
from .tile import Tile


class Output(Untraced):
    """A warpgroup's 64 rows of a tile once all their keys have been added.

    Attributes:
        done_max, done_sum: row max and row sum of the tile whose last PV is still to come, while the softmax is at the
            next tile already.
    """

    def __init__(self, kernel, rows: Rows, gemms: ForwardGemms, scales: Scales, inputs: Inputs):
        self.kernel, self.rows, self.thread = kernel, rows, rows.thread
        self.gemms, self.scales, self.inputs = gemms, scales, inputs
        self.done_max, self.done_sum = (cute.make_rmem_tensor((2,), Float32) for _ in range(2))

    @cute.jit
    def keep_done(self):
        softmax = self.scales.softmax
        for r in cutlass.range_constexpr(2):
            self.done_max[r], self.done_sum[r] = softmax.row_max[r], softmax.row_sum[r]

    @cute.jit
    def store(self, tile: Tile):
        """Write out = O / row_sum and lse of a finished tile; O is free afterwards."""
        at_head, inputs = self.kernel.at_head, self.inputs
        weights = cute.make_rmem_tensor((2,), Float32)
        k_descale, v_descale = self.scales.of_head(tile)
        rows = [self.rows.own(tile, r) for r in range(2)]
        is_row = [exists for _, _, exists in rows]
        for r in cutlass.range_constexpr(2):
            position, head, _ = rows[r]
            sink = self._sink(tile, head)
            weight, lse = self.scales.finish(self.done_max[r], self.done_sum[r], sink, k_descale)
            if cutlass.const_expr(inputs.modifiers is not None and inputs.modifiers.drops):
                weight = weight * inputs.modifiers.tensors.keep_scale
            if cutlass.const_expr(v_descale is not None):
                weight = weight * v_descale
            weights[r] = weight
            mLSE = at_head(inputs.mLSE, inputs.mLSE, head, tile.origin_out)[None, 0]
            epilogue.store_lse(lse, mLSE, position, is_row[r], self.thread.lane_in_quad)
            if cutlass.const_expr(inputs.all_splits is not None):
                if tile.origin_out == tile.origin_q:  # the first split
                    self._store_absent_splits(tile, mLSE, position, is_row[r])
        o, mO = self.gemms.o, inputs.mO
        out_rows = [at_head(mO, mO, head, tile.origin_out)[position, None] for position, head, _ in rows]
        if cutlass.const_expr(self.kernel.num_halves == 2 or self.kernel.is_split):
            epilogue.store_pairs(o, weights, out_rows, is_row, self.thread.lane_in_quad, VECTOR_BYTES)
        else:
            epilogue.store_rows(o, weights, out_rows, is_row, self.thread.lane_in_quad)
        if cutlass.const_expr(inputs.sources is not None and self.kernel.num_halves == 2):
            if repair_rows.has_nan_in_a_row(self.gemms.o, is_row):
                cute.arch.sync_warp()  # other lanes write the same rows again
                self._repair(tile)
        elif cutlass.const_expr(inputs.sources is not None):
            if repair_rows.has_nan(self.gemms.o, is_row[0]):
                cute.arch.sync_warp()
                self._recompute(tile, weights, k_descale)

    def _sink(self, tile: Tile, head: Int32) -> Float32 | None:
        return None if self.inputs.sinks is None else self.inputs.sinks.at_row(head, tile.origin_q)

    @cute.jit
    def _store_absent_splits(self, tile: Tile, mLSE: cute.Tensor, position: Int32, is_row: Boolean):
        """Write lse = -inf for the splits that this packed sequence does not have, while others do."""
        num_splits, total_q = self.inputs.all_splits
        for split in cutlass.range(tile.num_splits, num_splits, unroll=1):
            epilogue.store_lse(-Float32.inf, mLSE, position + split * total_q, is_row, self.thread.lane_in_quad)

    def _keys_of_row(self, tile: Tile, position: Int32) -> tuple:
        """The keys [low, high) that a row may see."""
        if self.kernel.has_intervals:
            return self.inputs.modifiers.interval(self.rows.place(tile), position)
        return key_range(position, position + 1, *tile.geometry)

    @cute.jit
    def _recompute(self, tile: Tile, weights: cute.Tensor, k_descale: Float32 | None):
        """Compute every row of this warp again from its visible keys alone.

        V of a hidden key may have brought a NaN (0 * NaN).
        """
        at_head, inputs, sources = self.kernel.at_head, self.inputs, self.inputs.sources
        head_kv = self.rows.head_kv(tile)
        if cutlass.const_expr(self.kernel.is_paged):
            mK, mV = (
                PagedRows(t[None, None, head_kv, None], inputs.pages, tile.origin_k) for t in (sources.k, sources.v)
            )
        else:
            mK, mV = (self.kernel.keys_at_head(t, t, head_kv, tile.origin_k) for t in (sources.k, sources.v))
        # made uniform: if a branch could split the warp, ptxas would give up uniform registers in the main loop
        first_row = cute.arch.make_warp_uniform(broadcast(self.thread.row, 0))
        for i in cutlass.range(16, unroll=1):
            position, head, is_row = self.rows.find(tile, first_row + i)
            is_upper, lane = i < 8, i % 8 * 4
            row_max = broadcast(self.done_max[0] if is_upper else self.done_max[1], lane)
            weight = broadcast(weights[0] if is_upper else weights[1], lane)
            if is_row:
                mQ = at_head(sources.q, sources.q, head, tile.origin_q)
                mO = at_head(self.inputs.mO, self.inputs.mO, head, tile.origin_out)
                low, high = self._keys_of_row(tile, position)
                if cutlass.const_expr(self.kernel.is_split):
                    tile_n = self.kernel.tile_n
                    low, high = maximum(low, tile.first * tile_n), minimum(high, tile.last * tile_n)
                factors = self.scales.with_descale(k_descale)
                pairs = None
                if cutlass.const_expr(self.inputs.modifiers is not None):
                    pairs = self.inputs.modifiers.pairs_of_query(self.rows.place(tile), position)
                row = (mQ[position, None], mK, mV, mO[position, None], low, high, factors, row_max, weight)
                if cutlass.const_expr(self.kernel.converts):
                    signs = None
                    if cutlass.const_expr(k_descale is not None):
                        signs = SignOfKeys(self.inputs.descales.k[tile.origin_k, head_kv, 0])
                    e4m3_rows.recompute_row(*row, signs, pairs)
                else:
                    repair_rows.recompute_row(*row, pairs=pairs)

    @cute.jit
    def _repair(self, tile: Tile):
        """Compute every row of this warp, and its lse, from q, k and v in float32.

        Float16 halves that cannot hold their values are NaN.
        """
        at_head, sources = self.kernel.at_head, self.inputs.sources
        head_kv = self.rows.head_kv(tile)
        mK, mV = (self.kernel.keys_at_head(t, t, head_kv, tile.origin_k) for t in (sources.k, sources.v))
        first_row = cute.arch.make_warp_uniform(broadcast(self.thread.row, 0))  # see `_recompute`
        for i in cutlass.range(16, unroll=1):
            position, head, is_row = self.rows.find(tile, first_row + i)
            if is_row:
                mQ = at_head(sources.q, sources.q, head, tile.origin_q)
                mO, mLSE = (at_head(t, t, head, tile.origin_out) for t in (self.inputs.mO, self.inputs.mLSE))
                keys = key_range(position, position + 1, *tile.geometry)
                row = mQ[position, None], mK, mV, mO[position, None], *keys, *self.scales.factors
                lse = repair_rows.attend_row(*row, self._sink(tile, head))
                epilogue.store_lse(lse, mLSE[None, 0], position, is_row, cute.arch.lane_idx())

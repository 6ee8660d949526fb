"""The warps of the Ampere forward: their registers, and single acts with them.

A warp has m_tiles times 16 query rows: rows 16 w, 16 w + 1, .. of each 16 * num_warps rows of the tile for warp w. All
warps of the thread block read the same K and V from shared memory. kernel.py puts the acts in order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .....geometry.block_range import KeyBlocks, key_range
from .....geometry.integers import maximum, minimum, select
from .....geometry.pack_gqa import unpack_row
from ....config import ROWS_PER_MMA
from ...blocks.memory import epilogue
from ...blocks.memory.layouts import by_m_tile, rows_and_columns
from ...blocks.memory.untraced import Untraced
from ...blocks.memory.warp import broadcast
from ...blocks.repair import e4m3_rows
from ...blocks.repair import rows as repair_rows
from ...blocks.repair.rows import SourceTensors, soft_cap
from ...blocks.softmax import mask
from ...blocks.softmax.cache_scales import CacheDescales
from ...blocks.softmax.mask import Geometry
from ...blocks.softmax.modifiers import Block, Modifiers, Place, place_of
from ...blocks.softmax.online import LN2, OnlineSoftmax, ScoreFactors, finish
from ...blocks.softmax.sinks import Sinks
from ...blocks.tiles.paged import PagedRows, Pages


class Tile(NamedTuple):
    """A tile of query rows and the key blocks it visits."""

    m_block: Int32
    head: Int32
    origin_q: Int32  # batch entry; for packed sequences the first row
    origin_k: Int32  # batch entry; for packed keys the first row (a cache has batch entries)
    geometry: Geometry
    blocks: KeyBlocks
    sequence: Int32  # batch entry, or number of the packed sequence


class Warps(Untraced):
    """S, P and O of a warp's query rows in registers; Q in registers or, like K and V, in shared memory."""

    def __init__(
        self,
        kernel,
        buffers: tuple,
        tiled_mma,
        factors: ScoreFactors,
        tensors: SourceTensors,
        outputs: tuple,
        sinks: Sinks | None,
        pages: Pages | None = None,
        descales: CacheDescales | None = None,
        modifiers: Modifiers | None = None,
    ):
        """Args: buffers: of Q, K and V. outputs: out and lse, rows first."""
        config = self.config = kernel.config
        self.pages, self.descales, self.modifiers = pages, descales, modifiers
        self.kernel, self.factors = kernel, factors
        self.tensors, (self.mO, self.mLSE), self.sinks = tensors, outputs, sinks
        self.tile_m, self.tile_n, self.m_tiles = config.tile_m, config.tile_n, config.m_tiles
        self.thread = kernel.loading_thread()
        self.lane_in_quad = self.thread % 4
        # the first of this thread's two rows, 8 apart, in the first of its 16-row tiles
        self.row_in_tile = self.thread // 32 * ROWS_PER_MMA + self.thread % 32 // 4

        self.gemms = kernel.gemms(kernel, *buffers, tiled_mma, self.thread)
        self.acc_s, self.acc_o = self.gemms.acc_s, self.gemms.acc_o
        # (2 rows, columns) of each m_tile
        self.s, self.o = (
            [rows_and_columns(cute.make_tensor(tile.iterator, tile.layout)) for tile in by_m_tile(acc)]
            for acc in (self.acc_s, self.acc_o)
        )
        self.is_lazy = config.rescale_threshold > 0
        # the factor of scores in the exponent; unless it is folded, scores are scaled before
        self.natural_scale = factors.scale_log2 * LN2
        scale_log2 = factors.scale_log2 if config.fold_scale else Float32(1.0 / LN2)
        self.softmax = [OnlineSoftmax(scale_log2, config.rescale_threshold) for _ in range(self.m_tiles)]

    # ---------------------------------------------------------------- scores

    @cute.jit
    def begin(self, tile: Tile):
        """The state before the first keys of a tile."""
        self.acc_o.fill(0.0)
        if cutlass.const_expr(self.descales is not None):
            self.descales.begin(self.kernel.first_key(tile.blocks.last - 1), tile.geometry.seqlen_k)
        for i in cutlass.range_constexpr(self.m_tiles):
            self.softmax[i].reset()

    @cute.jit
    def scores_to_p(self, tile: Tile, n_start: Int32, is_masked: cutlass.Constexpr[bool]):
        """Turn S of the keys n_start, n_start + 1, .. into P, and bring O to P's reference."""
        if cutlass.const_expr(self.kernel.has_e4m3_cache):
            self._scale_scores()
        if cutlass.const_expr(self.factors.tanh_scale is not None):
            for i in cutlass.range_constexpr(cute.size(self.acc_s)):
                self.acc_s[i] = soft_cap(self.acc_s[i], self.factors.tanh_scale, self.kernel.dtype)
        blocks = [self.block_of(tile, i, n_start) for i in range(self.m_tiles)]
        if cutlass.const_expr(self.modifiers is not None and self.modifiers.adds_terms):
            for i in cutlass.range_constexpr(self.m_tiles):
                self.modifiers.add_terms(self.s[i], blocks[i])
        if cutlass.const_expr(not self.config.fold_scale):
            for i in cutlass.range_constexpr(cute.size(self.acc_s)):
                self.acc_s[i] = self.acc_s[i] * self.natural_scale
        for i in cutlass.range_constexpr(self.m_tiles):
            if cutlass.const_expr(is_masked):
                if cutlass.const_expr(self.kernel.has_intervals):
                    self.modifiers.hide(self.s[i], blocks[i], -math.inf)
                else:
                    rows = [self.row_of(tile, i, r)[0] for r in range(2)]
                    mask.apply(self.s[i], rows, n_start, self.lane_in_quad, tile.geometry)
            if cutlass.const_expr(self.is_lazy):
                # the search by integers would gain nothing: only Hopper has a maximum of three
                self.softmax[i].update_lazily(self.s[i], True, self.o[i])
            else:
                self.softmax[i].update(self.s[i])
                self.softmax[i].rescale(self.o[i])
            if cutlass.const_expr(self.modifiers is not None and self.modifiers.drops):
                self.modifiers.drop(self.s[i], blocks[i])
        if cutlass.const_expr(self.descales is not None):
            self.descales.scale_p(self.acc_s, self.acc_o)
            if cutlass.const_expr(self.descales.by_block):
                self.descales.look_up(n_start - self.config.block_keys, tile.geometry.seqlen_k)
        self.gemms.take_p()

    def place(self, tile: Tile, head: Int32) -> Place:
        return place_of(head, tile.origin_q, tile.origin_k, tile.sequence, tile.geometry, self.kernel.is_packed)

    def block_of(self, tile: Tile, i: int, n_start: Int32) -> Block:
        positions, heads, _ = zip(*(self.row_of(tile, i, r) for r in range(2)), strict=True)
        places = 2 * [self.place(tile, tile.head)]
        if self.kernel.group > 1:
            places = [self.place(tile, head) for head in heads]
        return Block(list(positions), n_start + 2 * self.lane_in_quad, places)

    @cute.jit
    def _scale_scores(self):
        """Turn S of an e4m3 cache into Q K^T of real values."""
        for i in cutlass.range_constexpr(self.m_tiles):
            for r in cutlass.range_constexpr(2):
                factor = self.gemms.score_factors[r, i]
                if cutlass.const_expr(self.descales is not None):
                    self.descales.scale_scores(self.s[i], r, factor)
                else:
                    for c in cutlass.range_constexpr(cute.size(self.s[i], mode=[1])):
                        self.s[i][r, c] = self.s[i][r, c] * factor

    def keys_and_values(self, tile: Tile) -> tuple:
        """K and V of the tile's head and sequence, (seqlen, dim) each."""
        k, v, head = self.tensors.k, self.tensors.v, self.kernel.head_kv(tile)
        if self.pages is None:
            return tuple(self.kernel.keys_at_head(t, head, tile.origin_k) for t in (k, v))
        return tuple(PagedRows(t[None, None, head, None], self.pages, tile.origin_k) for t in (k, v))

    def row_of(self, tile: Tile, i: int, r: int) -> tuple:
        """Row r (0 or 1) of this thread in its i-th 16-row tile.

        Returns: the row's position in the sequence, its head, and whether there is such a row.
        """
        return self.unpack(tile, i * ROWS_PER_MMA * self.config.num_warps + self.row_in_tile + 8 * r)

    def unpack(self, tile: Tile, row_in_tile) -> tuple:
        """The result of `row_of` for a row given by its number in the tile."""
        group, m_start = self.kernel.group, tile.m_block * self.kernel.positions
        if group == 1:
            position = m_start + row_in_tile
            return position, tile.head, position < tile.geometry.seqlen_q
        position, head, is_used = unpack_row(row_in_tile, group, self.tile_m)
        limit = select(is_used, tile.geometry.seqlen_q, Int32(0))
        return m_start + position, tile.head * group + head, m_start + position < limit

    # ---------------------------------------------------------------- end of a tile

    @cute.jit
    def store_no_keys(self, tile: Tile):
        """Write lse of a split without keys; the merge does not read its out."""
        for row in cutlass.range(cute.arch.thread_idx()[0], self.tile_m, self.config.num_threads, unroll=1):
            position, head, is_row = self.unpack(tile, row)
            if is_row:
                self.kernel.at_head(self.mLSE, self.mLSE, head, tile.origin_q)[position, 0] = -Float32.inf

    @cute.jit
    def store(self, tile: Tile):
        """Write out = O / row_sum and lse."""
        at_head = self.kernel.at_head
        self.finish_o()
        for i in cutlass.range_constexpr(self.m_tiles):
            rows = [self.row_of(tile, i, r) for r in range(2)]
            is_row = [exists for _, _, exists in rows]
            weights = cute.make_rmem_tensor((2,), Float32)
            self.finish_rows(tile, i, rows, is_row, weights)
            out_rows = [at_head(self.mO, self.mO, head, tile.origin_q)[position, None] for position, head, _ in rows]
            self.gemms.store_rows(self.o[i], weights, out_rows, is_row, self.lane_in_quad)
            # the low limb of a float32 infinity in V is NaN
            if cutlass.const_expr(self.kernel.hides_pairs or self.kernel.dtype is Float32):
                if repair_rows.has_nan(self.o[i], is_row[0]):
                    cute.arch.sync_warp()  # other lanes write the same rows again
                    self.recompute(tile, i, weights)

    @cute.jit
    def finish_o(self):
        """Bring O to the unit of V's real values."""
        if cutlass.const_expr(self.descales is not None):
            self.descales.finish(self.acc_o)

    @cute.jit
    def finish_rows(self, tile: Tile, i: cutlass.Constexpr[int], rows: list, writes_lse: list, weights: cute.Tensor):
        """Finish this thread's two rows of an m_tile: set weights to the factors of O, and write lse."""
        softmax = self.softmax[i]
        for r in cutlass.range_constexpr(2):
            position, head, _ = rows[r]
            if cutlass.const_expr(not self.config.fold_scale):
                softmax.row_max[r] = softmax.row_max[r] / self.natural_scale
            sink = None
            if cutlass.const_expr(self.sinks is not None):
                sink = self.sinks.at_row(head, tile.origin_q)
            weight, lse = finish(softmax.row_max[r], softmax.row_sum[r], self.factors.scale_log2, sink)
            if cutlass.const_expr(self.modifiers is not None and self.modifiers.drops):
                weight = weight * self.modifiers.tensors.keep_scale
            weights[r] = weight
            mLSE = self.kernel.at_head(self.mLSE, self.mLSE, head, tile.origin_q)[None, 0]
            epilogue.store_lse(lse, mLSE, position, writes_lse[r], self.lane_in_quad)

    @cute.jit
    def recompute(
        self,
        tile: Tile,
        i: cutlass.Constexpr[int],
        weights: cute.Tensor,
        first_row=0,
        step: cutlass.Constexpr[int] = 1,
    ):
        """Compute every step-th row of an m_tile, from first_row on, again from its visible keys alone.

        V of a hidden key may have brought a NaN (0 * NaN).
        """
        at_head = self.kernel.at_head
        mK, mV = self.keys_and_values(tile)
        first = i * ROWS_PER_MMA * self.config.num_warps + self.row_in_tile
        first = cute.arch.make_warp_uniform(broadcast(first, 0))
        row_max = self.softmax[i].row_max
        for row in cutlass.range(first_row, ROWS_PER_MMA, step, unroll=1):
            position, head, is_row = self.unpack(tile, first + row)
            is_upper, lane = row < 8, row % 8 * 4
            reference = broadcast(row_max[0] if is_upper else row_max[1], lane)
            weight = broadcast(weights[0] if is_upper else weights[1], lane)
            if is_row:
                mQ, mO = (at_head(t, t, head, tile.origin_q) for t in (self.tensors.q, self.mO))
                pairs = None
                if cutlass.const_expr(self.modifiers is not None):
                    pairs = self.modifiers.pairs_of_query(self.place(tile, head), position)
                if cutlass.const_expr(self.kernel.has_intervals):
                    low, high = self.modifiers.interval(self.place(tile, head), position)
                else:
                    low, high = key_range(position, position + 1, *tile.geometry)
                if cutlass.const_expr(self.kernel.is_split):
                    low = maximum(low, tile.blocks.first * self.config.block_keys)
                    high = minimum(high, tile.blocks.last * self.config.block_keys)
                q, out = mQ[position, None], mO[position, None]
                row_arguments = (q, mK, mV, out, low, high, self.factors, reference, weight)
                if cutlass.const_expr(self.kernel.has_e4m3_cache):
                    e4m3_rows.recompute_row(*row_arguments, self.descales, pairs)
                else:
                    repair_rows.recompute_row(*row_arguments, self.config.vector_bytes, pairs)

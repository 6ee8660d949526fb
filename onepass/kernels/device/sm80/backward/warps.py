"""The warps of the Ampere backward: their registers, and single acts with them.

All fragments are those of a warp's 16 x 8 x 16 mma: in each 16 x 8 block of a result a thread has two rows, 8 apart,
and two of the 8 columns. kernel.py puts the loads in order, `BackwardWarps.step` the GEMMs.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .....geometry.tile_scheduler import LANES
from ....config import ROWS_PER_MMA
from ...blocks.memory.layouts import rows_and_columns
from ...blocks.memory.ptx import add_one_to_global, add_to_global, pack
from ...blocks.memory.untraced import Untraced
from ...blocks.memory.warp import broadcast
from ...blocks.repair import gradients as repair_gradients
from ...blocks.repair.rows import SourceTensors
from ...blocks.softmax.gradients import GradientScores, KeptBits, Region, stat_of_column
from ...blocks.softmax.modifiers import Modifiers
from ...blocks.softmax.online import ScoreFactors
from ...blocks.tiles.dq_sums import Accumulator, AdditionTurns
from ...blocks.tiles.key_tiles import KeyTile

COLUMNS_OF_STORE = 32  # columns of a quad, each lane of which has, or gets by exchange, 8 neighboring ones


class Mmas(NamedTuple):
    """The GEMMs of all warps."""

    s: cute.TiledMma  # S^T = K Q^T and dP^T = V dO^T: (keys, queries)
    dkv: cute.TiledMma  # dV += P^T dO and dK += dS^T Q: (keys, head_dim)
    dq: cute.TiledMma  # dQ = dS K: (queries, head_dim)


class Buffers(NamedTuple):
    """Shared memory: (rows, columns, count) each, except for the stats."""

    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    ds: cute.Tensor  # transposed: (keys, queries)
    p: cute.Tensor | None
    stats: cute.Tensor  # (2 * tile_m, count)


class BackwardWarps(Untraced):
    """dK and dV of a tile in registers, and S, P, dP, dS and dQ of a step."""

    def __init__(
        self,
        kernel,
        buffers: Buffers,
        mmas: Mmas,
        softmax_scale: Float32,
        factors: ScoreFactors,
        accumulator: Accumulator,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        sources: SourceTensors | None,
        modifiers: Modifiers | None = None,
    ):
        config = self.config = kernel.config
        self.kernel, self.buffers = kernel, buffers
        self.softmax_scale, self.factors, self.accumulator = softmax_scale, factors, accumulator
        self.mdK, self.mdV, self.sources, self.modifiers = mdK, mdV, sources, modifiers
        self.drops = modifiers is not None and modifiers.drops
        self.dv_scale = modifiers.tensors.keep_scale if self.drops else Float32(1.0)
        self.tile_m, self.tile_n = kernel.tile_m, kernel.tile_n
        thread = cute.arch.thread_idx()[0]
        self.lane, self.lane_in_quad = thread % LANES, thread % 4
        self.warp_id = cute.arch.make_warp_uniform(thread // LANES)

        s_warps = config.s_key_warps
        num_queries = self.tile_m * s_warps // config.num_warps
        self.region = Region(
            thread,
            self.lane,
            self.lane_in_quad,
            self.warp_id,
            row_in_tile=self.warp_id % s_warps * ROWS_PER_MMA + self.lane // 4,
            num_queries=num_queries,
            first_query=self.warp_id // s_warps * num_queries,
            m_tiles=self.tile_n // (ROWS_PER_MMA * s_warps),
            rows_between=ROWS_PER_MMA * s_warps,
        )
        self.gemms = kernel.gemms(kernel, buffers, mmas, self.region)
        self.acc_dk, self.acc_dv = self.gemms.acc_dk, self.gemms.acc_dv
        self.scores = self.make_scores()
        self.turns = AdditionTurns(kernel, accumulator, self.lane, self.dq_share)

    def make_scores(self) -> GradientScores:
        """The scores, and the registers in which P and dS are kept for `make_ds`."""
        acc, gemms, kept = self.gemms.make_acc_s(), self.gemms, None
        if self.drops:
            kept = KeptBits(self.modifiers, cute.size(acc), self.region.m_tiles)
        if self.kernel.dtype is Float32:
            p, ds = acc, None
        else:
            p, ds = gemms.p_words, gemms.ds_words
            if self.drops:
                # P as it was before dropout, in addition to the operand of dV
                self.whole_p = cute.make_rmem_tensor(gemms.shape_s, self.kernel.dtype)
                p = cute.recast_tensor(self.whole_p, Int32)
        return GradientScores(self.kernel, self.region, self.factors, self.modifiers, p, ds, kept)

    # ---------------------------------------------------------------- a step

    @cute.jit
    def begin(self):
        self.acc_dk.fill(0.0)
        self.acc_dv.fill(0.0)

    @cute.jit
    def step(self, tile: KeyTile, head: Int32, m_block: Int32, buffer: Int32):
        """One query block, whose Q, dO, lse and delta are in the buffer."""
        gemms, p_in_registers = self.gemms, self.kernel.p_in_registers and not self.config.one_score_buffer
        seen = self.turns.look(tile, head, m_block)
        acc_s = self.scores.p if cutlass.const_expr(self.kernel.dtype is Float32) else gemms.make_acc_s()
        acc_s.fill(0.0)
        gemms.s(acc_s, buffer)
        self.scores.read_masks(tile, head, m_block)
        self.read_stats(self.scores.minus_lse, buffer, 0)
        self.scores.exponentials(acc_s, tile, head, m_block)
        self.take_p(acc_s, tile, head, m_block)
        if cutlass.const_expr(self.config.one_score_buffer):
            cute.arch.sync_threads()
            gemms.dv(buffer)
        self.read_stats(self.scores.minus_delta, buffer, 1)
        acc_dp = gemms.make_acc_s()
        # dP - delta, or with dropout, which scales dP alone, dP
        for i in cutlass.range_constexpr(cute.size(acc_dp)):
            acc_dp[i] = Float32(0.0) if self.drops else stat_of_column(self.scores.minus_delta, i, self.region.m_tiles)
        gemms.dp(acc_dp, buffer)
        self.scores.make_ds(acc_dp, tile, head, m_block, not self.drops)
        if cutlass.const_expr(self.config.one_score_buffer):
            cute.arch.sync_threads()  # all warps are done with P
        gemms.take_ds(acc_dp)
        if cutlass.const_expr(p_in_registers):
            gemms.dv(buffer)
        cute.arch.sync_threads()
        if cutlass.const_expr(not p_in_registers and not self.config.one_score_buffer):
            gemms.dv(buffer)
        for piece in cutlass.range_constexpr(self.config.dq_pieces):
            acc_dq = gemms.make_acc_dq()
            gemms.dq(acc_dq, piece)
            if cutlass.const_expr(piece == 0):
                self.turns.take(tile, head, m_block, seen)
            cute.arch.sync_warp()  # ptxas would begin dK before this, and keep too much in registers
            self.add_dq(acc_dq, tile, head, m_block, piece)
        gemms.dk(buffer)

    @cute.jit
    def take_p(self, acc_s: cute.Tensor, tile: KeyTile, head: Int32, m_block: Int32):
        """Give P to dV, or what dropout keeps of it; `make_ds` needs all of it."""
        if cutlass.const_expr(self.drops):
            self.scores.draw_kept(tile, head, m_block)
            kept = acc_s
            if cutlass.const_expr(self.kernel.dtype is Float32):
                kept = self.gemms.make_acc_s()
                for i in cutlass.range_constexpr(cute.size(acc_s)):
                    kept[i] = acc_s[i]
            else:
                pack(acc_s, self.whole_p)
            self.scores.kept.drop(kept)
            self.gemms.take_p(kept)
        else:
            self.gemms.take_p(acc_s)

    @cute.jit
    def read_stats(self, target: cute.Tensor, buffer: Int32, which: cutlass.Constexpr[int]):
        """-lse log2(e) (0) or -delta (1) of this thread's queries, four of each sixteen: `stats_position`."""
        if cutlass.const_expr(self.region.num_queries == 8):
            # an upper or lower half of sixteen
            first = self.region.first_query // 16 * 16 + 4 * self.lane_in_quad + self.region.first_query % 16 // 4
            source, align, shape = which * self.tile_m + first, 8, (2, 1)
        else:
            first = self.region.first_query + 4 * self.lane_in_quad
            source, align, shape = which * self.tile_m + first, 16, (4, self.region.num_queries // 16)
        source = cute.domain_offset((source,), self.buffers.stats[None, buffer])
        source = cute.make_tensor(source.iterator.align(align), cute.make_layout(shape, stride=(1, 16)))
        target = cute.make_tensor(target.iterator, cute.make_layout(shape))
        for j in cutlass.range_constexpr(shape[1]):
            cute.autovec_copy(source[None, j], target[None, j])

    # ---------------------------------------------------------------- dQ

    def dq_share(self, tile: KeyTile, head: Int32, m_block: Int32) -> Int32:
        """The number of this warp's share of a block of dQ among the turns."""
        number = self.kernel.m_block_number(self.accumulator, tile, head, self.kernel.query_block(tile, m_block))
        return number * self.config.num_warps + self.warp_id

    @cute.jit
    def add_dq(self, acc_dq: cute.Tensor, tile: KeyTile, head: Int32, m_block: Int32, piece: cutlass.Constexpr[int]):
        """Add a piece of dQ to the accumulator.

        The accumulator is laid out as [16 rows][8 columns][lane], with four values a lane, or, where they are added one
        by one, as [16 rows][8 columns][value][lane]: a warp's additions lie together.
        """
        row_warps, column_blocks = self.config.dq_query_warps, self.kernel.head_dim // 8
        column_warps, together = self.config.num_warps // row_warps, self.gemms.dq_together // 8
        number = self.kernel.m_block_number(self.accumulator, tile, head, self.kernel.query_block(tile, m_block))
        first_block = self.warp_id % row_warps * column_blocks + self.warp_id // row_warps * together
        lane_offset = self.lane * 4 if cutlass.const_expr(self.config.vector_adds) else self.lane
        start = self.accumulator.dq.iterator + (
            Int64(number) * (self.tile_m * self.kernel.head_dim) + first_block * 4 * LANES + lane_offset
        )
        blocks_of_piece = column_blocks // self.config.dq_pieces
        for j in cutlass.range_constexpr(blocks_of_piece // column_warps):
            column = piece * blocks_of_piece + j // together * together * column_warps + j % together
            for i in cutlass.range_constexpr(self.tile_m // (ROWS_PER_MMA * row_warps)):
                target = start + (i * row_warps * column_blocks + column) * 4 * LANES
                values = [acc_dq[(c, i, j)] for c in range(4)]
                if cutlass.const_expr(self.config.vector_adds):
                    add_to_global(target, values)
                else:
                    for c in cutlass.range_constexpr(4):
                        add_one_to_global(target + c * LANES, values[c])

    # ---------------------------------------------------------------- end of a tile

    @cute.jit
    def store(self, tile: KeyTile):
        """Write dK and dV of a finished tile."""
        dv = self.store_gradient(tile, self.acc_dv, self.mdV, self.dv_scale)
        dk = self.store_gradient(tile, self.acc_dk, self.mdK, self.softmax_scale)
        if cutlass.const_expr(self.sources is not None):
            # other warps may have written columns of the rows that are written again
            cute.arch.sync_threads()
            self.recompute(tile, dv, self.mdV, self.dv_scale, True)
            self.recompute(tile, dk, self.mdK, self.softmax_scale, False)

    def first_key(self, tile: KeyTile, i: int) -> Int32:
        """The position in the sequence of the first of a warp's i-th 16 keys in dK and dV."""
        key_warps = self.config.dkv_key_warps
        row = self.warp_id % key_warps * ROWS_PER_MMA + i * ROWS_PER_MMA * key_warps
        return tile.n_block * self.tile_n + row

    @cute.jit
    def store_gradient(self, tile: KeyTile, acc: cute.Tensor, m: cute.Tensor, scale: Float32) -> list:
        """Write rows of dk or dv.

        Returns: `repair_gradients.nan_rows` for each 16 keys of the warp; an empty list without sources.
        """
        key_warps = self.config.dkv_key_warps
        column_warps, together = self.config.num_warps // key_warps, COLUMNS_OF_STORE // 8
        gradient = self.kernel.at_head(m, m, tile.head_kv, tile.origin_k)
        weights = cute.make_rmem_tensor((2,), Float32)
        weights.fill(scale)
        found = []
        for i in cutlass.range_constexpr(self.tile_n // (ROWS_PER_MMA * key_warps)):
            keys = [self.first_key(tile, i) + self.lane // 4 + 8 * r for r in range(2)]
            is_row = [key < tile.rows_k for key in keys]
            rows = [gradient[key, None] for key in keys]
            for j in cutlass.range_constexpr(cute.size(acc, mode=[2]) // together):
                first_block = (j * column_warps + self.warp_id // key_warps) * together
                columns = self._columns(acc, i, j * together, together)
                self.gemms.store_rows(columns, weights, rows, is_row, self.lane_in_quad, first_block)
            if cutlass.const_expr(self.sources is not None):
                columns = self._columns(acc, i, 0, cute.size(acc, mode=[2]))
                found.append(repair_gradients.nan_rows(columns, is_row))
        return found

    def _columns(self, acc: cute.Tensor, i: int, first: int, count: int) -> cute.Tensor:
        """(2 rows, columns) of an accumulator: its i-th 16 rows, and `count` of its 8-column blocks from `first` on."""
        shape, stride = acc.layout.shape, acc.layout.stride
        layout = cute.make_layout((shape[0], 1, count), stride=(stride[0], 0, stride[2]))
        return rows_and_columns(cute.make_tensor(acc.iterator + i * stride[1] + first * stride[2], layout))

    @cute.jit
    def recompute(self, tile: KeyTile, found: list, m: cute.Tensor, scale: Float32, is_v: cutlass.Constexpr[bool]):
        """Compute again the rows in which `store_gradient` has found a NaN."""
        gradient = self.kernel.at_head(m, m, tile.head_kv, tile.origin_k)
        for i in cutlass.range_constexpr(len(found)):
            if found[i][0] | found[i][1] != 0:
                first_key = cute.arch.make_warp_uniform(broadcast(self.first_key(tile, i), 0))
                inputs = (self.sources, self.accumulator, self.factors, is_v, self.modifiers)
                self.kernel.recompute_keys(tile, gradient, scale, first_key, found[i], *inputs)

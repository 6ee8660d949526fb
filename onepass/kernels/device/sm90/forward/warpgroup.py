"""A consumer warpgroup of the Hopper forward: its registers, and single acts with them.

GEMMs and their turns, scores and masks, finished rows. In which order they are done is consumer.py's.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, pipeline
from cutlass.cute.nvgpu import warp, warpgroup

from .....geometry.block_range import KeyBlocks, key_range
from .....geometry.integers import maximum, minimum, select
from .....geometry.pack_gqa import unpack_row
from ....config import ROWS_PER_WARPGROUP
from ...blocks.memory import epilogue, wgmma
from ...blocks.memory.clear import clear_keys, clear_rows
from ...blocks.memory.layouts import as_operand_a, rows_and_columns, transposed
from ...blocks.memory.ptx import add_here, pack, pack_parts
from ...blocks.memory.warp import broadcast
from ...blocks.repair import rows as repair_rows
from ...blocks.repair.rows import VECTOR_BYTES, soft_cap
from ...blocks.softmax import mask
from ...blocks.softmax import scaled as fp8
from ...blocks.softmax.mask import Geometry
from ...blocks.softmax.online import OnlineSoftmax, Scores, finish
from ...blocks.softmax.sinks import Sinks
from ...blocks.tiles.named_barrier import NamedBarrier
from ...blocks.tiles.paged import PagedRows
from ...blocks.tiles.pingpong import Turns

WARPGROUP = 128  # threads
WARPS = 4  # of a warpgroup


class Tile(NamedTuple):
    """A tile of query rows and the key blocks it visits."""

    m_block: Int32
    head: Int32
    origin_q: Int32  # batch entry; of packed sequences the first row
    origin_k: Int32  # likewise; of a cache the batch entry
    geometry: Geometry
    first: Int32
    clear_first: Int32
    clear_last: Int32
    last: Int32
    sequence: Int32 | None  # of packed sequences in FP8
    origin_out: Int32  # as origin_q, of out and lse: of splits their own entry or row
    parts: Int32 | None  # of packed sequences in splits, those of this one

    @property
    def blocks(self) -> KeyBlocks:
        return KeyBlocks(self.first, self.clear_first, self.clear_last, self.last)

    def with_blocks(self, blocks: KeyBlocks) -> Tile:
        return self._replace(**blocks._asdict())


class Pipes(NamedTuple):
    """The circular buffers of shared memory."""

    q: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync


class Warpgroup(Turns):
    """64 query rows of each tile: S, P and O in registers, Q, K and V in shared memory."""

    def __init__(
        self,
        kernel,
        sQ,
        sK,
        sV,
        pipes: Pipes,
        tiled_mmas,
        scores: Scores,
        mO,
        mLSE,
        sinks: Sinks | None,
        plain,
        descales,
        pages,
        all_parts,
        producer,
    ):
        """Args: all_parts: of packed queries in splits, how many there are, and the rows from one to the next."""
        config = self.config = kernel.config
        self.kernel = kernel
        self.num_warpgroups, self.parts = config.num_warpgroups, config.score_buffers
        self.takes_turns = config.pingpong and self.num_warpgroups > 1
        self.tile_m, self.tile_n, self.part_n = kernel.tile_m, kernel.tile_n, kernel.part_n
        self.has_window = kernel.has_window
        self.thread = cute.arch.thread_idx()[0] % WARPGROUP
        # without a producer warp, the first consumer warp loads what the next step needs in each step
        self.producer = producer
        first = 1 if producer is None else 0
        self.wg = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP - first)
        self.lane_in_quad = self.thread % 4
        # the first of this thread's two rows, 8 apart
        self.row_in_tile = self.wg * ROWS_PER_WARPGROUP + self.thread // 32 * 16 + self.thread % 32 // 4
        self.pipes, self.scores = pipes, scores
        self.mO, self.mLSE, self.sinks, self.plain = mO, mLSE, sinks, plain
        self.descales, self.pages, self.all_parts = descales, pages, all_parts

        self.tiled_mma_qk, self.tiled_mma_pv = tiled_mmas
        thr_qk, thr_pv = (tiled_mma.get_slice(self.thread) for tiled_mma in tiled_mmas)
        self.sQ, self.sV = sQ, sV
        self.rQ = self.tiled_mma_qk.make_fragment_A(thr_qk.partition_A(sQ))
        if config.q_in_registers:
            self.rQ = cute.make_rmem_tensor(cute.select(self.rQ.layout, [0, 1, 2]).shape, kernel.dtype)
        self.rK = self.tiled_mma_qk.make_fragment_B(thr_qk.partition_B(sK))
        self.rV = self.tiled_mma_pv.make_fragment_B(thr_pv.partition_B(sV if kernel.is_fp8 else transposed(sV)))
        shape_s = self.tiled_mma_qk.partition_shape_C((ROWS_PER_WARPGROUP, self.part_n))
        shape_o = self.tiled_mma_pv.partition_shape_C((ROWS_PER_WARPGROUP, kernel.head_dim_v))
        self.acc_s = [cute.make_rmem_tensor(shape_s, Float32) for _ in range(self.parts)]
        self.acc_o = cute.make_rmem_tensor(shape_o, Float32)
        # what the tensor cores add P V to: O itself, or the sum of one step
        self.acc_pv = self.acc_o
        self.pv_blocks = kernel.head_dim_v // kernel.pv_columns
        if config.two_level_sums:
            shape_pv = self.tiled_mma_pv.partition_shape_C((ROWS_PER_WARPGROUP, kernel.pv_columns))
            if config.overlap_gemm_softmax:
                self.acc_pv = cute.make_rmem_tensor(shape_pv, Float32)
            else:
                # P V comes when S is gone, into the same registers: ptxas does not find that out by itself
                shared = cute.make_rmem_tensor((max(cute.size(shape_s), cute.size(shape_pv)),), Float32)
                self.acc_s = [cute.make_tensor(shared.iterator, cute.make_layout(shape_s))]
                self.acc_pv = cute.make_tensor(shared.iterator, cute.make_layout(shape_pv))
        self.s, self.o = [rows_and_columns(acc) for acc in self.acc_s], rows_and_columns(self.acc_o)
        if kernel.is_fp8:
            shape_p = self.tiled_mma_pv.partition_shape_A((ROWS_PER_WARPGROUP, self.part_n))
            self.rP = [cute.make_rmem_tensor(shape_p, kernel.dtype)]
            self.p = self.rP
        else:
            self.rP = [cute.make_rmem_tensor(self.acc_s[0].layout, kernel.dtype) for _ in range(kernel.num_parts)]
            self.p = [as_operand_a(rP) for rP in self.rP]
        if kernel.is_scaled:
            self.row_scale = cute.make_rmem_tensor((2,), Float32)
            self.key_scales = fp8.KeyScales(self.tile_n)
        self.is_lazy = config.rescale_threshold > 0
        of_exponentials = config.rescale_threshold, config.exp2_fma_period
        if kernel.is_scaled:
            p_dtype = torch.float8_e4m3fn if kernel.is_fp8 else torch.float16
            self.softmax = fp8.ScaledSoftmax(scores, *of_exponentials, self.tile_n, p_dtype)
        else:
            self.softmax = OnlineSoftmax(scores.scale_log2, *of_exponentials)
        # of the tile whose last PV is still to come, while `softmax` is on the next one already
        self.done_max, self.done_sum = (cute.make_rmem_tensor((2,), Float32) for _ in range(2))

    # ---------------------------------------------------------------- GEMMs

    def q_state(self, tile_count) -> pipeline.PipelineState:
        return self.kernel.q_state(self.wg, tile_count)

    @cute.jit
    def load_q(self, q_state):
        """Wait for this warpgroup's Q; with q_in_registers, copy it there and give its buffer back at once."""
        self.pipes.q.consumer_wait(q_state)
        if cutlass.const_expr(self.config.q_in_registers):
            ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.kernel.dtype)
            copy = cute.make_tiled_copy_A(ldmatrix, self.tiled_mma_qk).get_slice(self.thread)
            source = copy.partition_S(self.sQ[None, None, q_state.index])
            cute.copy(copy, source, copy.retile(self.rQ))
            self.pipes.q.consumer_release(q_state)

    @cute.jit
    def release_q(self, q_state, is_last: Boolean):
        if cutlass.const_expr(not self.config.q_in_registers):
            if is_last:
                self.pipes.q.consumer_release(q_state)

    @cute.jit
    def issue_gemms(self, part: cutlass.Constexpr[int], k_state, v_state, q_state, ready=(None, None)):
        """S[part] = Q K^T and O += P V, in this order, in this warpgroup's turn."""
        self.pipes.k.consumer_wait(k_state, ready[0])
        self.wait_for_turn()
        self._gemm_qk(part, k_state, q_state)
        self.issue_pv(v_state, ready[1])
        self.pass_turn()

    @cute.jit
    def issue_qk(self, part: cutlass.Constexpr[int], k_state, q_state):
        self.pipes.k.consumer_wait(k_state)
        self._gemm_qk(part, k_state, q_state)

    @cute.jit
    def _gemm_qk(self, part: cutlass.Constexpr[int], k_state, q_state):
        q = [self.rQ] if self.config.q_in_registers else self._parts(self.rQ, q_state)
        products = wgmma.products(q, self._parts(self.rK, k_state))
        wgmma.issue_sum(self.tiled_mma_qk, self.acc_s[part], products, False)

    def _parts(self, buffers: cute.Tensor, state: pipeline.PipelineState) -> list:
        """The operands that lie in a buffer: one, or of float32 its high and its low part."""
        num_parts = self.kernel.num_parts
        return [buffers[None, None, None, num_parts * state.index + part] for part in range(num_parts)]

    @cute.jit
    def issue_pv(self, v_state, is_ready=None):
        if cutlass.const_expr(not self.is_lazy and self.config.rescale_beside_qk):
            self.softmax.rescale(self.o)
        self.pipes.v.consumer_wait(v_state, is_ready)
        accumulate = not self.config.two_level_sums
        products = wgmma.products(self.p, self._parts(self.rV, v_state))
        wgmma.issue_sum(self.tiled_mma_pv, self.acc_pv, products, accumulate)

    @cute.jit
    def finish_pv(self, v_state):
        """Once P V is there: V is free, and with two_level_sums O gets it."""
        self.pipes.v.consumer_release(v_state)
        if cutlass.const_expr(self.config.two_level_sums):
            self._add_pv(0)

    @cute.jit
    def _add_pv(self, block: cutlass.Constexpr[int]):
        """Args: block: of columns, which acc_pv holds."""
        acc_o = self.acc_o[None, None, block] if cutlass.const_expr(self.pv_blocks > 1) else self.acc_o
        for i in cutlass.range_constexpr(cute.size(self.acc_pv)):
            if cutlass.const_expr(self.config.overlap_gemm_softmax):
                acc_o[i] = acc_o[i] + self.acc_pv[i]
            else:
                acc_o[i] = add_here(acc_o[i], self.acc_pv[i])

    @cute.jit
    def pv_by_blocks(self, v_state):
        """O += P V, `pv_columns` columns at a time, each added to O before the next is computed."""
        self.pipes.v.consumer_wait(v_state)
        for block in cutlass.range_constexpr(self.pv_blocks):
            parts = [wgmma.block_of_columns(t, block) for t in self._parts(self.rV, v_state)]
            wgmma.issue_sum(self.tiled_mma_pv, self.acc_pv, wgmma.products(self.p, parts), False)
            warpgroup.wait_group(0)
            if cutlass.const_expr(block == self.pv_blocks - 1):
                self.pipes.v.consumer_release(v_state)
            self._add_pv(block)

    @cute.jit
    def clear_rubbish(self, tile: Tile, v_state):
        """Zeros in place of what a tile's first block of V holds past the sequence's last key.

        P is 0 there, and 0 * NaN = NaN. V of a dense problem ends there, too: TMA fills in zeros itself. All
        warpgroups write the same zeros, so they need not wait for each other.
        """
        if cutlass.const_expr(self.kernel.has_rubbish):
            if tile.last * self.tile_n > tile.geometry.seqlen_k:
                state = v_state.clone()
                for part in cutlass.range_constexpr(self.parts - 1, -1, -1):
                    self.pipes.v.consumer_wait(state)
                    first = tile.geometry.seqlen_k - (tile.last - 1) * self.tile_n - part * self.part_n
                    clear = clear_keys if self.kernel.is_fp8 else clear_rows
                    for i in cutlass.range_constexpr(self.kernel.num_parts):
                        buffer = self.kernel.num_parts * state.index + i
                        clear(self.sV[None, None, buffer], first, self.thread, WARPGROUP)
                    state.advance()
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + self.wg, number_of_threads=WARPGROUP)

    # ---------------------------------------------------------------- scores

    @cute.jit
    def load_row_scales(self, tile: Tile):
        scales = fp8.scales_of_entry(self.descales.q, tile.origin_q, tile.sequence)
        first = fp8.first_block(tile.origin_q, tile.sequence, self.descales.q_block)
        for r in cutlass.range_constexpr(2):
            position, head, is_row = self.row_of(tile, self.row_in_tile + 8 * r)
            scale = Float32(0.0)
            if is_row:
                block = first + divmod(position, self.descales.q_block)[0]
                scale = scales[head, minimum(block, cute.size(scales, mode=[1]) - 1)]
            self.row_scale[r] = self.softmax.scale_of_row(scale)

    def head_scales(self, tile: Tile) -> tuple:
        """FP8: of all keys of a tile's head, and which one is the first of its sequence."""
        head_kv = tile.head // self.kernel.tile_heads_per_kvhead
        entries = (fp8.scales_of_entry(t, tile.origin_k, tile.sequence) for t in (self.descales.k, self.descales.v))
        return *(t[head_kv, None] for t in entries), fp8.first_block(tile.origin_k, tile.sequence, fp8.SCALE_BLOCK)

    @cute.jit
    def load_scales(self, tile: Tile):
        """FP8: the scales of the rows of a tile and of its first keys."""
        if cutlass.const_expr(self.descales is not None):
            self.load_row_scales(tile)
            self.key_scales.load(*self.head_scales(tile), tile.last - 1)

    @cute.jit
    def pack_p(self, part: cutlass.Constexpr[int]):
        """The exponentials of S[part] become P of the next PV."""
        if cutlass.const_expr(self.kernel.is_fp8):
            fp8.pack_p(self.s[part], self.rP[0])
        elif cutlass.const_expr(self.kernel.num_parts == 2):
            pack_parts(self.acc_s[part], *self.rP)
        else:
            pack(self.acc_s[part], self.rP[0])

    @cute.jit
    def modify_scores(
        self, tile: Tile, n_block: Int32, part: cutlass.Constexpr[int], is_first: cutlass.Constexpr[bool] = False
    ):
        """Softcap: s -> tanh(softmax_scale * s / softcap); the cap itself is in scale_log2. Of FP8 and parts the
        softmax gets the scales of these scores. Args: is_first: of the tile."""
        if cutlass.const_expr(self.descales is not None):
            self.key_scales.take(*self.head_scales(tile), n_block, is_first)
            self.softmax.take_scales(self.row_scale, self.key_scales, n_block)
            if cutlass.const_expr(self.scores.tanh_scale is not None):
                self.softmax.soft_cap(self.s[part])
        elif cutlass.const_expr(self.scores.tanh_scale is not None):
            acc_s = self.acc_s[part]
            for i in cutlass.range_constexpr(cute.size(acc_s)):
                acc_s[i] = soft_cap(acc_s[i], self.scores.tanh_scale)

    @cute.jit
    def mask_if_needed(self, tile: Tile, n_block: Int32, part: cutlass.Constexpr[int]):
        if n_block >= tile.clear_last or n_block < tile.clear_first:
            self.apply_mask(tile, n_block, part)

    @cute.jit
    def apply_mask(self, tile: Tile, n_block: Int32, part: cutlass.Constexpr[int]):
        rows = [self.row_of(tile, self.row_in_tile + 8 * r)[0] for r in range(2)]
        n_start = n_block * self.tile_n + part * self.part_n
        mask.apply(self.s[part], rows, n_start, self.lane_in_quad, tile.geometry)

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

    # ---------------------------------------------------------------- end of a tile

    @cute.jit
    def keep_done(self):
        for r in cutlass.range_constexpr(2):
            self.done_max[r], self.done_sum[r] = self.softmax.row_max[r], self.softmax.row_sum[r]

    @cute.jit
    def store(self, tile: Tile):
        """out = O / row_sum and lse of a finished tile; O is free afterwards."""
        weights = cute.make_rmem_tensor((2,), Float32)
        at_head = self.kernel.at_head
        rows = [self.row_of(tile, self.row_in_tile + 8 * r) for r in range(2)]
        is_row = [exists for _, _, exists in rows]
        for r in cutlass.range_constexpr(2):
            position, head, _ = rows[r]
            sink = None
            if cutlass.const_expr(self.sinks is not None):
                sink = self.sinks.of_row(head, tile.origin_q)
            weight, lse = self.finish(self.done_max[r], self.done_sum[r], sink)
            weights[r] = weight
            mLSE = at_head(self.mLSE, self.mLSE, head, tile.origin_out)[None, 0]
            epilogue.store_lse(lse, mLSE, position, is_row[r], self.lane_in_quad)
            if cutlass.const_expr(self.all_parts is not None):
                if tile.origin_out == tile.origin_q:  # the first part
                    self.store_no_parts(tile, mLSE, position, is_row[r])
        out_rows = [at_head(self.mO, self.mO, head, tile.origin_out)[position, None] for position, head, _ in rows]
        if cutlass.const_expr(self.kernel.num_parts == 2 or self.kernel.is_split):
            epilogue.store_pairs(self.o, weights, out_rows, is_row, self.lane_in_quad, VECTOR_BYTES)
        else:
            epilogue.store_rows(self.o, weights, out_rows, is_row, self.lane_in_quad)
        if cutlass.const_expr(self.plain is not None and self.kernel.num_parts == 2):
            if repair_rows.has_nan_in_a_row(self.o, is_row):
                cute.arch.sync_warp()  # other lanes write the same rows again
                self.repair_tile(tile)
        elif cutlass.const_expr(self.plain is not None):
            if repair_rows.has_nan(self.o, is_row[0]):
                cute.arch.sync_warp()
                self.recompute(tile, weights)

    @cute.jit
    def store_no_parts(self, tile: Tile, mLSE: cute.Tensor, position: Int32, is_row: Boolean):
        """lse of the parts that a packed sequence does not have, while others do."""
        num_splits, total_q = self.all_parts
        for split in cutlass.range(tile.parts, num_splits, unroll=1):
            epilogue.store_lse(-Float32.inf, mLSE, position + split * total_q, is_row, self.lane_in_quad)

    def finish(self, row_max, row_sum, sink) -> tuple:
        if self.descales is None:
            return finish(row_max, row_sum, self.scores.scale_log2, sink)
        finish_scaled = fp8.finish if self.kernel.is_fp8 else fp8.finish_exactly
        return finish_scaled(row_max, row_sum, self.softmax.exponent, sink)

    @cute.jit
    def recompute(self, tile: Tile, weights: cute.Tensor):
        """Every row of this warp from its visible keys alone: V of a hidden key may have brought NaN (0 * NaN)."""
        at_head, plain, geometry = self.kernel.at_head, self.plain, tile.geometry
        head_kv = tile.head // self.kernel.tile_heads_per_kvhead
        if cutlass.const_expr(self.kernel.is_paged):
            mK, mV = (PagedRows(t[None, None, head_kv, None], self.pages, tile.origin_k) for t in (plain.k, plain.v))
        else:
            mK, mV = (self.kernel.keys_at_head(t, t, head_kv, tile.origin_k) for t in (plain.k, plain.v))
        # known to be uniform: if a branch could split the warp, ptxas would give up uniform registers in the main loop
        first_row = cute.arch.make_warp_uniform(broadcast(self.row_in_tile, 0))
        for i in cutlass.range(16, unroll=1):
            position, head, is_row = self.row_of(tile, first_row + i)
            is_upper, lane = i < 8, i % 8 * 4
            row_max = broadcast(self.done_max[0] if is_upper else self.done_max[1], lane)
            weight = broadcast(weights[0] if is_upper else weights[1], lane)
            if is_row:
                mQ = at_head(plain.q, plain.q, head, tile.origin_q)
                mO = at_head(self.mO, self.mO, head, tile.origin_out)
                low, high = key_range(position, position + 1, *geometry)
                if cutlass.const_expr(self.kernel.is_split):
                    low, high = maximum(low, tile.first * self.tile_n), minimum(high, tile.last * self.tile_n)
                scales = (self.scores.scale_log2, self.scores.tanh_scale)
                repair_rows.recompute_row(
                    mQ[position, None], mK, mV, mO[position, None], low, high, *scales, row_max, weight
                )

    @cute.jit
    def repair_tile(self, tile: Tile):
        """Every row of this warp, and its lse, from q, k and v in float32: parts that cannot hold them are NaN."""
        at_head, plain = self.kernel.at_head, self.plain
        head_kv = tile.head // self.kernel.tile_heads_per_kvhead
        mK, mV = (self.kernel.keys_at_head(t, t, head_kv, tile.origin_k) for t in (plain.k, plain.v))
        first_row = cute.arch.make_warp_uniform(broadcast(self.row_in_tile, 0))  # see `recompute`
        for i in cutlass.range(16, unroll=1):
            position, head, is_row = self.row_of(tile, first_row + i)
            if is_row:
                mQ = at_head(plain.q, plain.q, head, tile.origin_q)
                mO, mLSE = (at_head(t, t, head, tile.origin_out) for t in (self.mO, self.mLSE))
                sink = None
                if cutlass.const_expr(self.sinks is not None):
                    sink = self.sinks.of_row(head, tile.origin_q)
                keys = key_range(position, position + 1, *tile.geometry)
                lse = repair_rows.attend_row(mQ[position, None], mK, mV, mO[position, None], *keys, *self.scores, sink)
                epilogue.store_lse(lse, mLSE[None, 0], position, is_row, cute.arch.lane_idx())

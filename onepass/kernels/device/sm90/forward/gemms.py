"""The registers of a consumer warpgroup of the Hopper forward, and its GEMMs.

The GEMMs are issued in turns (blocks/tiles/pingpong.py) from circular buffers in shared memory. consumer.py decides in
which order.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, pipeline
from cutlass.cute.nvgpu import warpgroup

from ....config import ROWS_PER_WARPGROUP
from ...blocks.memory import wgmma
from ...blocks.memory.clear import clear_keys, clear_rows
from ...blocks.memory.layouts import as_operand_a, rows_and_columns, transposed
from ...blocks.memory.ptx import add_here
from ...blocks.memory.untraced import Untraced
from ...blocks.softmax import scaled
from ...blocks.softmax.modifiers import Modifiers
from ...blocks.softmax.online import OnlineSoftmax, Scores
from ...blocks.softmax.sinks import Sinks
from ...blocks.tiles.named_barrier import NamedBarrier
from ...blocks.tiles.pingpong import Turns
from .tile import WARPGROUP, Pipes, Tile


class WarpgroupGemms(Untraced):
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
        sources,
        descales,
        pages,
        all_splits,
        modifiers: Modifiers | None,
        producer,
    ):
        """Args:
        sources: the tensors in global memory that a repair reads.
        all_splits: for packed queries in splits, how many there are, and the rows from one split to the next.
        """
        config = self.config = kernel.config
        self.kernel = kernel
        self.num_warpgroups, self.score_buffers = config.num_warpgroups, config.score_buffers
        self.tile_m, self.tile_n, self.buffer_n = kernel.tile_m, kernel.tile_n, kernel.buffer_n
        self.has_window, self.cut_sides = kernel.has_window, kernel.cut_sides
        self.thread = cute.arch.thread_idx()[0] % WARPGROUP
        # without a producer warp, the first consumer warp loads in each step what the next step needs
        self.producer = producer
        first = 1 if producer is None else 0
        self.wg = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP - first)
        self.turns = Turns(config.pingpong and self.num_warpgroups > 1, self.wg, self.num_warpgroups)
        self.lane_in_quad = self.thread % 4
        # the first of this thread's two rows, 8 apart
        self.row_in_tile = self.wg * ROWS_PER_WARPGROUP + self.thread // 32 * 16 + self.thread % 32 // 4
        self.pipes, self.scores = pipes, scores
        self.mO, self.mLSE, self.sinks, self.sources = mO, mLSE, sinks, sources
        self.pages, self.all_splits = pages, all_splits
        self.descales = descales if kernel.is_scaled else None
        self.cache_descales = None if kernel.is_scaled else descales
        self.modifiers = modifiers

        self.tiled_mma_qk, self.tiled_mma_pv = tiled_mmas
        thr_qk, thr_pv = (tiled_mma.get_slice(self.thread) for tiled_mma in tiled_mmas)
        self.sQ, self.sV = sQ, sV
        self.rQ = self.tiled_mma_qk.make_fragment_A(thr_qk.partition_A(sQ))
        self.rK = self.tiled_mma_qk.make_fragment_B(thr_qk.partition_B(sK))
        self.rV = self.tiled_mma_pv.make_fragment_B(thr_pv.partition_B(sV if kernel.is_fp8 else transposed(sV)))
        shape_s = self.tiled_mma_qk.partition_shape_C((ROWS_PER_WARPGROUP, self.buffer_n))
        shape_o = self.tiled_mma_pv.partition_shape_C((ROWS_PER_WARPGROUP, kernel.head_dim_v))
        self.acc_s = [cute.make_rmem_tensor(shape_s, Float32) for _ in range(self.score_buffers)]
        self.acc_o = cute.make_rmem_tensor(shape_o, Float32)
        # the accumulator of P V: O itself, or the sum of one step
        self.acc_pv = self.acc_o
        self.pv_blocks = kernel.head_dim_v // kernel.pv_columns
        if config.two_level_sums:
            shape_pv = self.tiled_mma_pv.partition_shape_C((ROWS_PER_WARPGROUP, kernel.pv_columns))
            if config.overlap_gemm_softmax:
                self.acc_pv = cute.make_rmem_tensor(shape_pv, Float32)
            else:
                # P V is computed when S is no longer needed, in the same registers: ptxas would not see this by itself
                shared = cute.make_rmem_tensor((max(cute.size(shape_s), cute.size(shape_pv)),), Float32)
                self.acc_s = [cute.make_tensor(shared.iterator, cute.make_layout(shape_s))]
                self.acc_pv = cute.make_tensor(shared.iterator, cute.make_layout(shape_pv))
        self.s, self.o = [rows_and_columns(acc) for acc in self.acc_s], rows_and_columns(self.acc_o)
        if kernel.is_fp8:
            shape_p = self.tiled_mma_pv.partition_shape_A((ROWS_PER_WARPGROUP, self.buffer_n))
            self.rP = [cute.make_rmem_tensor(shape_p, kernel.dtype)]
            self.p = self.rP
        else:
            self.rP = [cute.make_rmem_tensor(self.acc_s[0].layout, kernel.dtype) for _ in range(kernel.num_halves)]
            self.p = [as_operand_a(rP) for rP in self.rP]
        self.slope = None  # of ALiBi, of a tile's head
        if self.modifiers is not None and self.modifiers.tensors.slopes is not None:
            self.slope = cute.make_rmem_tensor((1,), Float32)
        self.intervals = None  # the keys [low, high) that each of this thread's rows of a tile sees
        if kernel.has_intervals:
            self.intervals = cute.make_rmem_tensor((2, 2), Int32)
        self.kept_words = None  # flags of the pairs that dropout keeps, where P is 16 bits wide
        if self.modifiers is not None and self.modifiers.drops and kernel.num_halves == 1 and not kernel.is_fp8:
            self.kept_words = cute.make_rmem_tensor((cute.size(self.acc_s[0]) // 4,), Int32)
        if kernel.is_scaled:
            self.row_scale = cute.make_rmem_tensor((2,), Float32)
            self.key_scales = scaled.KeyScales(self.tile_n)
        self.is_lazy = config.rescale_threshold > 0
        if kernel.is_scaled:
            p_dtype = torch.float8_e4m3fn if kernel.is_fp8 else torch.float16
            self.softmax = scaled.ScaledSoftmax(
                scores, config.rescale_threshold, self.tile_n, p_dtype, p_codes=config.p_codes
            )
        elif self.cache_descales is not None:
            # the scale that K's descale of a tile's head is part of
            self.head_scale = cute.make_rmem_tensor((1,), Float32)
            has_cap = scores.tanh_scale is not None
            softmax_scale = scores.scale_log2 if has_cap else self.head_scale
            self.softmax = OnlineSoftmax(softmax_scale, config.rescale_threshold)
        else:
            self.softmax = OnlineSoftmax(scores.scale_log2, config.rescale_threshold)
        # row max and row sum of the tile whose last PV is still to come, while `softmax` is at the next tile already
        self.done_max, self.done_sum = (cute.make_rmem_tensor((2,), Float32) for _ in range(2))

    # ---------------------------------------------------------------- GEMMs

    def q_state(self, tile_count) -> pipeline.PipelineState:
        return self.kernel.q_state(self.wg, tile_count)

    @cute.jit
    def load_q(self, q_state):
        """Wait for this warpgroup's Q."""
        self.pipes.q.consumer_wait(q_state)

    @cute.jit
    def release_q(self, q_state, is_last: Boolean):
        if is_last:
            self.pipes.q.consumer_release(q_state)

    @cute.jit
    def issue_gemms(self, buffer: cutlass.Constexpr[int], k_state, v_state, q_state, ready=(None, None)):
        """S[buffer] = Q K^T and O += P V, issued in this order in this warpgroup's turn.

        Args: ready: whether K and V were already seen in shared memory; None: not known.
        """
        self.pipes.k.consumer_wait(k_state, ready[0])
        self.turns.wait()
        self._gemm_qk(buffer, k_state, q_state)
        self.issue_pv(v_state, ready[1])
        self.turns.pass_on()

    @cute.jit
    def issue_qk(self, buffer: cutlass.Constexpr[int], k_state, q_state):
        self.pipes.k.consumer_wait(k_state)
        self._gemm_qk(buffer, k_state, q_state)

    @cute.jit
    def _gemm_qk(self, buffer: cutlass.Constexpr[int], k_state, q_state):
        products = wgmma.products(self._halves(self.rQ, q_state), self._halves(self.rK, k_state))
        wgmma.issue_sum(self.tiled_mma_qk, self.acc_s[buffer], products, False)

    def _halves(self, buffers: cute.Tensor, state: pipeline.PipelineState) -> list:
        """The operands that lie in a buffer: one, or for float32 inputs the high and the low half."""
        num_halves = self.kernel.num_halves
        return [buffers[None, None, None, num_halves * state.index + half] for half in range(num_halves)]

    @cute.jit
    def issue_pv(self, v_state, is_ready=None):
        self.pipes.v.consumer_wait(v_state, is_ready)
        accumulate = not self.config.two_level_sums
        products = wgmma.products(self.p, self._halves(self.rV, v_state))
        wgmma.issue_sum(self.tiled_mma_pv, self.acc_pv, products, accumulate)

    @cute.jit
    def finish_pv(self, v_state):
        """What follows when P V is computed: V is released, and with two_level_sums P V is added to O."""
        self.pipes.v.consumer_release(v_state)
        if cutlass.const_expr(self.config.two_level_sums):
            self._add_pv(0)

    @cute.jit
    def _add_pv(self, block: cutlass.Constexpr[int]):
        """O += acc_pv. Args: block: the block of columns of O that acc_pv holds."""
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
            v = [wgmma.block_of_columns(t, block) for t in self._halves(self.rV, v_state)]
            wgmma.issue_sum(self.tiled_mma_pv, self.acc_pv, wgmma.products(self.p, v), False)
            warpgroup.wait_group(0)
            if cutlass.const_expr(block == self.pv_blocks - 1):
                self.pipes.v.consumer_release(v_state)
            self._add_pv(block)

    @cute.jit
    def clear_garbage(self, tile: Tile, v_state):
        """Clear what a tile's first block of V holds past the sequence's last key.

        P is 0 there, and 0 * NaN = NaN. In a dense problem the tensor V itself ends there, and TMA fills in zeros. All
        warpgroups write the same zeros, so they need not wait for each other.
        """
        if cutlass.const_expr(self.kernel.has_garbage):
            if tile.last * self.tile_n > tile.geometry.seqlen_k:
                state = v_state.clone()
                for score_buffer in cutlass.range_constexpr(self.score_buffers - 1, -1, -1):
                    self.pipes.v.consumer_wait(state)
                    first = tile.geometry.seqlen_k - (tile.last - 1) * self.tile_n - score_buffer * self.buffer_n
                    clear = clear_keys if self.kernel.is_fp8 else clear_rows
                    for i in cutlass.range_constexpr(self.kernel.num_halves):
                        buffer = self.kernel.num_halves * state.index + i
                        clear(self.sV[None, None, buffer], first, self.thread, WARPGROUP)
                    state.advance()
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + self.wg, number_of_threads=WARPGROUP)

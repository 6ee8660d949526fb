"""The Hopper forward kernel: warp-specialised, persistent, pipelined within and across tiles.

    producer warp        K,Q | V K | V K | V K' Q' | V' ...            TMA, through circular buffers in shared memory
                          |     \\     \\
    warpgroup 0          S=QK  softmax  [S=QK, O+=PV] softmax  [S'=Q'K', O+=PV] softmax' store(O) ...
    warpgroup 1                   [S=QK, O+=PV] softmax  ...                          (pingpong: in turns)

A consumer warpgroup owns 64 query rows. In each step it issues the QK^T of the next keys together with the PV of the
current ones, and computes the softmax of the former while the latter still runs (FlashAttention-3, Algorithm 2). The
step from one tile to the next has the same form: the first QK^T of the next tile goes with the last PV of this one, so
that the tensor cores never drain between tiles; the finished rows are stored straight from registers meanwhile.

Buffers and barriers (mbarrier pairs full / empty; arrivals)
    Q   q_stages x num_warpgroups tiles (64, head_dim)    full: TMA bytes     empty: the 4 warps of its warpgroup
    K   num_stages tiles (tile_n, head_dim)               full: TMA bytes     empty: all consumer warps
    V   num_stages tiles (tile_n, head_dim_v)             full: TMA bytes     empty: all consumer warps

Names as in CuTe code: mQ global, gQ a tile of it, sQ shared, rQ register fragment or descriptor; t... partitioned.

Source: FlashAttention-3, arXiv:2407.08608, sections 3.1, 3.2, Algorithms 1 and 2.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode as Major
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.cute.nvgpu.warpgroup import MmaF16BF16Op, OperandSource
from cutlass.memory import SmemAllocator

from ...problem import AttentionProblem
from ..blocks import epilogue, mask, tile_scheduler, wgmma
from ..blocks.block_range import key_blocks
from ..blocks.bundle import Bundle
from ..blocks.integers import minimum
from ..blocks.layouts import as_operand_a, rows_and_columns, rows_first, smem_tiles, transposed
from ..blocks.mask import Geometry
from ..blocks.named_barrier import NamedBarrier
from ..blocks.online_softmax import OnlineSoftmax, finish
from ..blocks.ptx import pack
from ..config import REGISTERS, ROWS_PER_WARPGROUP, ForwardConfig, head_dim_tile

WARPGROUP = 128  # threads
WARPS = 4  # of a warpgroup


class Schedule(NamedTuple):
    """The persistent grid's order of tiles, see blocks/tile_scheduler.py."""

    num_tiles: Int32
    num_m_blocks: Int32
    batch: Int32
    divisors: tile_scheduler.Divisors


class Scores(NamedTuple):
    """How raw scores q.k become exponents: exp2(scale_log2 * s), after s = tanh(s) of a softcap."""

    scale_log2: Float32
    tanh_scale: Float32 | None  # 2 log2(e) * softmax_scale / softcap; None: no softcap


class Tile(NamedTuple):
    """A tile of query rows and the key blocks it visits."""

    m_block: Int32
    head: Int32
    batch: Int32
    geometry: Geometry
    first: Int32
    clear_first: Int32
    clear_last: Int32
    last: Int32


class ForwardSm90:
    """One compiled forward: (static problem, config) -> device code. See the module's docstring for the picture."""

    def __init__(self, problem: AttentionProblem, config: ForwardConfig, dtype: type[cutlass.Numeric]):
        config.check(problem)
        self.config = config
        self.dtype = dtype
        self.qhead_per_kvhead = problem.qhead_per_kvhead
        self.tile_m, self.tile_n = config.tile_m, config.tile_n
        self.head_dim, self.head_dim_v = head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v)
        self.num_warpgroups = config.num_warpgroups
        self.has_window = problem.mask.window_left is not None, problem.mask.window_right is not None
        self.producer_registers, self.consumer_registers = REGISTERS[config.num_warpgroups]

    # ---------------------------------------------------------------- host

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, seqlen_q, num_heads_q, head_dim)
        k: cute.Tensor,  # (batch, seqlen_k, num_heads_kv, head_dim)
        v: cute.Tensor,  # (batch, seqlen_k, num_heads_kv, head_dim_v)
        out: cute.Tensor,  # (batch, seqlen_q, num_heads_q, head_dim_v)
        lse: cute.Tensor,  # (batch, num_heads_q, seqlen_q)
        sinks: cute.Tensor | None,  # (num_heads_q,) float32
        scale_log2: Float32,
        tanh_scale: Float32 | None,
        window_left: Int32 | None,
        window_right: Int32 | None,
        heads_per_section: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        tiled_mma_qk, tiled_mma_pv = self._make_tiled_mmas()
        sQ_layout = smem_tiles(
            ROWS_PER_WARPGROUP, self.head_dim, self.num_warpgroups * self.config.q_stages, self.dtype
        )
        sK_layout = smem_tiles(self.tile_n, self.head_dim, self.config.num_stages, self.dtype)
        sV_layout = smem_tiles(self.tile_n, self.head_dim_v, self.config.num_stages, self.dtype)
        tma = []
        for t, layout, rows, columns in (
            (q, sQ_layout, ROWS_PER_WARPGROUP, self.head_dim),
            (k, sK_layout, self.tile_n, self.head_dim),
            (v, sV_layout, self.tile_n, self.head_dim_v),
        ):
            one_tile = cute.slice_(layout, (None, None, 0))
            load = cpasync.CopyBulkTensorTileG2SOp()
            tma.append(cpasync.make_tiled_tma_atom(load, rows_first(t), one_tile, (rows, columns)))
        (tma_q, mQ), (tma_k, mK), (tma_v, mV) = tma

        seqlen_q, _, num_heads, batch = mQ.shape
        num_m_blocks = cute.ceil_div(seqlen_q, self.tile_m)
        heads_in_last = tile_scheduler.heads_in_last_section(num_heads * batch, heads_per_section)
        divisors = (num_m_blocks * heads_per_section, heads_per_section, heads_in_last, num_heads)
        divisors = tile_scheduler.Divisors(*(cute.FastDivmodDivisorV2(d) for d in divisors))
        schedule = Schedule(num_m_blocks * num_heads * batch, num_m_blocks, batch, divisors)
        self.kernel(
            tma_q,
            mQ,
            tma_k,
            mK,
            tma_v,
            mV,
            rows_first(out),
            lse,
            sinks,
            Scores(scale_log2, tanh_scale),
            window_left,
            window_right,
            schedule,
            tiled_mma_qk,
            tiled_mma_pv,
            sQ_layout,
            sK_layout,
            sV_layout,
        ).launch(grid=[num_ctas, 1, 1], block=[self.config.num_threads, 1, 1], stream=stream, min_blocks_per_mp=1)

    def _make_tiled_mmas(self):
        """S = Q K^T (Q from shared memory or registers) and O += P V (P from registers), one warpgroup each."""
        q_source = OperandSource.RMEM if self.config.q_in_registers else OperandSource.SMEM
        qk = MmaF16BF16Op(self.dtype, Float32, (64, self.tile_n, 16), q_source, Major.K, Major.K)
        pv = MmaF16BF16Op(self.dtype, Float32, (64, self.head_dim_v, 16), OperandSource.RMEM, Major.K, Major.MN)
        return cute.make_tiled_mma(qk, (1, 1, 1)), cute.make_tiled_mma(pv, (1, 1, 1))

    # ---------------------------------------------------------------- device: set-up and roles

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,  # (seqlen_q, head_dim, num_heads_q, batch), coordinates for TMA; mK, mV alike
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        mO: cute.Tensor,  # (seqlen_q, head_dim_v, num_heads_q, batch)
        mLSE: cute.Tensor,
        mSinks: cute.Tensor | None,
        scores: Scores,
        window_left: Int32 | None,
        window_right: Int32 | None,
        schedule: Schedule,
        tiled_mma_qk: cute.TiledMma,
        tiled_mma_pv: cute.TiledMma,
        sQ_layout: cute.ComposedLayout,
        sK_layout: cute.ComposedLayout,
        sV_layout: cute.ComposedLayout,
    ):
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_id == 0:
            for atom in (tma_q, tma_k, tma_v):
                cpasync.prefetch_descriptor(atom)

        smem = SmemAllocator()
        sQ = smem.allocate_tensor(self.dtype, sQ_layout.outer, 1024, sQ_layout.inner)
        sK = smem.allocate_tensor(self.dtype, sK_layout.outer, 1024, sK_layout.inner)
        sV = smem.allocate_tensor(self.dtype, sV_layout.outer, 1024, sV_layout.inner)
        q_tiles = self.num_warpgroups * self.config.q_stages
        pipe_q = self._make_pipeline(smem, q_tiles, WARPS, sQ_layout)
        pipe_k = self._make_pipeline(smem, self.config.num_stages, WARPS * self.num_warpgroups, sK_layout)
        pipe_v = self._make_pipeline(smem, self.config.num_stages, WARPS * self.num_warpgroups, sV_layout)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        seqlens = Geometry(mQ.shape[0], mK.shape[0], window_left, window_right)
        if warp_id < WARPS:  # warpgroup 0
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_id == 0:
                self.produce(tma_q, mQ, tma_k, mK, tma_v, mV, sQ, sK, sV, pipe_q, pipe_k, pipe_v, seqlens, schedule)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(
                mO,
                mLSE,
                mSinks,
                sQ,
                sK,
                sV,
                pipe_q,
                pipe_k,
                pipe_v,
                tiled_mma_qk,
                tiled_mma_pv,
                scores,
                seqlens,
                schedule,
            )

    def _make_pipeline(self, smem, num_tiles: int, consumer_warps: int, layout) -> pipeline.PipelineTmaAsync:
        """A circular buffer that TMA fills and `consumer_warps` warps empty; each of them arrives once a tile."""
        thread = pipeline.Agent.Thread
        return pipeline.PipelineTmaAsync.create(
            num_stages=num_tiles,
            producer_group=pipeline.CooperativeGroup(thread),
            consumer_group=pipeline.CooperativeGroup(thread, consumer_warps),
            tx_count=cute.size_in_bytes(self.dtype, cute.slice_(layout, (None, None, 0))),
            barrier_storage=smem.allocate_array(cutlass.Int64, 2 * num_tiles),
            defer_sync=True,
        )

    @cute.jit
    def tile_at(self, number: Int32, schedule: Schedule, seqlens: Geometry) -> Tile:
        """The tile of this number; past the end, the last one (which is then not computed)."""
        number = minimum(number, schedule.num_tiles - 1)
        coord = tile_scheduler.tile_coord(number, schedule.divisors, schedule.num_m_blocks, schedule.batch)
        m_block, head, batch = coord
        m_start = m_block * self.tile_m
        m_end = minimum(m_start + self.tile_m, seqlens.seqlen_q)
        blocks = key_blocks(m_start, m_end, *seqlens, self.tile_n)
        return Tile(m_block, head, batch, seqlens, *blocks)

    def q_state(self, warpgroup_id, tile_count) -> pipeline.PipelineState:
        """Buffer and phase of a warpgroup's Q in its tile_count-th tile, for the consumer; each has its own buffers."""
        stages = self.config.q_stages
        index = warpgroup_id * stages + tile_count % stages
        return pipeline.PipelineState(self.num_warpgroups * stages, Int32(0), Int32(index), (tile_count // stages) & 1)

    # ---------------------------------------------------------------- device: producer

    @cute.jit
    def produce(self, tma_q, mQ, tma_k, mK, tma_v, mV, sQ, sK, sV, pipe_q, pipe_k, pipe_v, seqlens, schedule):
        """One warp issues every load, in the order in which consumers need them.

        The first K and the Q of a tile come before the last V of the tile before it: consumers start on the next tile
        together with that V.
        """
        tQgQ, tQsQ = self._tma_partition(tma_q, mQ, sQ, ROWS_PER_WARPGROUP, self.head_dim)
        tKgK, tKsK = self._tma_partition(tma_k, mK, sK, self.tile_n, self.head_dim)
        tVgV, tVsV = self._tma_partition(tma_v, mV, sV, self.tile_n, self.head_dim_v)
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.num_stages)
        v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.num_stages)

        cta, num_ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        wave = Int32(0)
        number = tile_scheduler.tile_number(cta, wave, num_ctas)
        # the V tile that is still to be loaded
        v_block, v_head, v_batch = Int32(0), Int32(0), Int32(0)
        while number < schedule.num_tiles:
            tile = self.tile_at(number, schedule, seqlens)
            head_kv = tile.head // self.qhead_per_kvhead
            n_block = tile.last - 1

            pipe_k.producer_acquire(k_state)
            k_barrier = pipe_k.producer_get_barrier(k_state)
            cute.copy(tma_k, tKgK[None, n_block, head_kv, tile.batch], tKsK[None, k_state.index], tma_bar_ptr=k_barrier)
            k_state.advance()
            for w in cutlass.range_constexpr(self.num_warpgroups):
                q_state = self.q_state(w, wave)
                # a producer waits for the opposite phase: all buffers start empty
                q_state = pipeline.PipelineState(q_state.stages, q_state.count, q_state.index, q_state.phase ^ 1)
                pipe_q.producer_acquire(q_state)
                q_barrier = pipe_q.producer_get_barrier(q_state)
                q_block = tile.m_block * self.num_warpgroups + w
                q_tile = tQgQ[None, q_block, tile.head, tile.batch]
                cute.copy(tma_q, q_tile, tQsQ[None, q_state.index], tma_bar_ptr=q_barrier)
            if wave > 0:
                pipe_v.producer_acquire(v_state)
                v_barrier = pipe_v.producer_get_barrier(v_state)
                cute.copy(tma_v, tVgV[None, v_block, v_head, v_batch], tVsV[None, v_state.index], tma_bar_ptr=v_barrier)
                v_state.advance()

            for i in cutlass.range(tile.last - 1 - tile.first, unroll=1):
                pipe_k.producer_acquire(k_state)
                k_barrier = pipe_k.producer_get_barrier(k_state)
                k_tile = tKgK[None, n_block - 1 - i, head_kv, tile.batch]
                cute.copy(tma_k, k_tile, tKsK[None, k_state.index], tma_bar_ptr=k_barrier)
                k_state.advance()
                pipe_v.producer_acquire(v_state)
                v_barrier = pipe_v.producer_get_barrier(v_state)
                v_tile = tVgV[None, n_block - i, head_kv, tile.batch]
                cute.copy(tma_v, v_tile, tVsV[None, v_state.index], tma_bar_ptr=v_barrier)
                v_state.advance()
            v_block, v_head, v_batch = tile.first, head_kv, tile.batch
            wave += 1
            number = tile_scheduler.tile_number(cta, wave, num_ctas)
        pipe_v.producer_acquire(v_state)
        v_barrier = pipe_v.producer_get_barrier(v_state)
        cute.copy(tma_v, tVgV[None, v_block, v_head, v_batch], tVsV[None, v_state.index], tma_bar_ptr=v_barrier)
        v_state.advance()
        # shared memory must outlive the consumers' last arrivals
        pipe_k.producer_tail(k_state)
        pipe_v.producer_tail(v_state)

    def _tma_partition(self, tma_atom, m, s, rows: int, columns: int):
        """Global (tile bytes, block, head, batch) and shared (tile bytes, buffer) as one TMA copy sees them."""
        g = cute.local_tile(m, (rows, columns), (None, 0, None, None))
        partitioned = cpasync.tma_partition(
            tma_atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2)
        )
        return partitioned[1], partitioned[0]

    # ---------------------------------------------------------------- device: consumers

    @cute.jit
    def consume(
        self,
        mO,
        mLSE,
        mSinks,
        sQ,
        sK,
        sV,
        pipe_q,
        pipe_k,
        pipe_v,
        tiled_mma_qk,
        tiled_mma_pv,
        scores: Scores,
        seqlens: Geometry,
        schedule: Schedule,
    ):
        """One consumer warpgroup through all tiles of its thread block."""
        config = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        wg = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP - 1)
        thr_qk, thr_pv = tiled_mma_qk.get_slice(thread), tiled_mma_pv.get_slice(thread)
        rQ = tiled_mma_qk.make_fragment_A(thr_qk.partition_A(sQ))
        if cutlass.const_expr(config.q_in_registers):
            rQ = cute.make_rmem_tensor(cute.select(rQ.layout, [0, 1, 2]).shape, self.dtype)
        rK = tiled_mma_qk.make_fragment_B(thr_qk.partition_B(sK))
        rV = tiled_mma_pv.make_fragment_B(thr_pv.partition_B(transposed(sV)))
        acc_s = cute.make_rmem_tensor(tiled_mma_qk.partition_shape_C((ROWS_PER_WARPGROUP, self.tile_n)), Float32)
        acc_o = cute.make_rmem_tensor(tiled_mma_pv.partition_shape_C((ROWS_PER_WARPGROUP, self.head_dim_v)), Float32)
        rP = cute.make_rmem_tensor(acc_s.layout, self.dtype)
        softmax = OnlineSoftmax(scores.scale_log2, config.rescale_threshold, config.exp2_fma_period)
        # of the tile whose last PV is still to come, while `softmax` is on the next one already
        done_max, done_sum = (cute.make_rmem_tensor((2,), Float32) for _ in range(2))

        ctx = Consumer(
            self, wg, thread, sQ, rQ, rK, rV, acc_s, acc_o, rP, softmax, scores, tiled_mma_qk, tiled_mma_pv,
            pipe_q, pipe_k, pipe_v, mO, mLSE, mSinks,
        )  # fmt: skip
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.num_stages)
        v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.num_stages)

        cta, num_ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        wave = Int32(0)
        number = tile_scheduler.tile_number(cta, wave, num_ctas)
        tile = self.tile_at(number, schedule, seqlens)
        if cutlass.const_expr(config.pingpong and self.num_warpgroups > 1):
            if wg == self.num_warpgroups - 1:
                ctx.pass_turn()  # warpgroup 0 goes first
        if cutlass.const_expr(config.overlap_tiles):
            ctx.first_scores(tile, k_state, self.q_state(wg, wave))
            k_state.advance()
        while number < schedule.num_tiles:
            if cutlass.const_expr(not config.overlap_tiles):
                ctx.first_scores(tile, k_state, self.q_state(wg, wave))
                k_state.advance()
            acc_o.fill(0.0)

            # the keys, last block first: cut by the right edge of the mask, clear, cut by its left edge
            n_block = tile.last - 1
            clear_last, clear_first = minimum(tile.clear_last, n_block), minimum(tile.clear_first, n_block)
            if cutlass.const_expr(self.has_window[1]):
                for _ in cutlass.range(n_block - clear_last, unroll=1):
                    n_block -= 1
                    ctx.step(tile, n_block, k_state, v_state, self.q_state(wg, wave), True)
                    k_state.advance()
                    v_state.advance()
            n_clear = clear_last - clear_first if cutlass.const_expr(self.has_window[0]) else n_block - tile.first
            for _ in cutlass.range(n_clear, unroll=1):
                n_block -= 1
                ctx.step(tile, n_block, k_state, v_state, self.q_state(wg, wave), False)
                k_state.advance()
                v_state.advance()
            if cutlass.const_expr(self.has_window[0]):
                for _ in cutlass.range(n_block - tile.first, unroll=1):
                    n_block -= 1
                    ctx.step(tile, n_block, k_state, v_state, self.q_state(wg, wave), True)
                    k_state.advance()
                    v_state.advance()

            number = tile_scheduler.tile_number(cta, wave + 1, num_ctas)
            next_tile = self.tile_at(number, schedule, seqlens)
            if cutlass.const_expr(config.overlap_tiles):
                for r in cutlass.range_constexpr(2):
                    done_max[r], done_sum[r] = softmax.row_max[r], softmax.row_sum[r]
                if number < schedule.num_tiles:
                    ctx.step_to_next_tile(next_tile, k_state, v_state, self.q_state(wg, wave + 1))
                else:
                    ctx.last_pv(v_state)
                k_state.advance()
                ctx.store(tile, done_max, done_sum)
            else:
                ctx.last_pv(v_state)
                ctx.store(tile, softmax.row_max, softmax.row_sum)
            v_state.advance()
            wave += 1
            tile = next_tile


class Consumer(Bundle):
    """A consumer warpgroup's registers and what it does with them: the steps of `ForwardSm90.consume`.

    Buffer states are advanced by the caller, in its own loop: an update in here would not be carried around it.
    """

    def __init__(
        self, kernel, wg, thread, sQ, rQ, rK, rV, acc_s, acc_o, rP, softmax, scores, tiled_mma_qk, tiled_mma_pv,
        pipe_q, pipe_k, pipe_v, mO, mLSE, mSinks,
    ):  # fmt: skip
        self.config, self.num_warpgroups = kernel.config, kernel.num_warpgroups
        self.tile_m, self.tile_n, self.dtype = kernel.tile_m, kernel.tile_n, kernel.dtype
        self.has_window = kernel.has_window
        self.wg, self.thread = wg, thread
        self.lane_in_quad = thread % 4
        self.row_in_tile = wg * ROWS_PER_WARPGROUP + thread // 32 * 16 + thread % 32 // 4  # of the first of two rows
        self.sQ, self.rQ, self.rK, self.rV = sQ, rQ, rK, rV
        self.acc_s, self.acc_o, self.rP = acc_s, acc_o, rP
        self.s, self.o = rows_and_columns(acc_s), rows_and_columns(acc_o)
        self.p = as_operand_a(rP)
        self.softmax, self.scores = softmax, scores
        self.tiled_mma_qk, self.tiled_mma_pv = tiled_mma_qk, tiled_mma_pv
        self.pipe_q, self.pipe_k, self.pipe_v = pipe_q, pipe_k, pipe_v
        self.mO, self.mLSE, self.mSinks = mO, mLSE, mSinks

    # One step of the main loop, in the order of Algorithm 2

    @cute.jit
    def step(self, tile: Tile, n_block: Int32, k_state, v_state, q_state, is_masked: cutlass.Constexpr[bool]):
        """S = Q K_n^T issued with O += P V_(n+1); softmax of S while PV runs; then P = S and O rescaled."""
        if cutlass.const_expr(not self.config.overlap_gemm_softmax):
            # Algorithm 1: PV first, and nothing of this warpgroup runs beside its softmax
            self.last_pv(v_state)
        self.pipe_k.consumer_wait(k_state)
        self.wait_for_turn()
        self.issue_qk(k_state, q_state)
        if cutlass.const_expr(self.config.overlap_gemm_softmax):
            self.pipe_v.consumer_wait(v_state)
            self.issue_pv(v_state)
        self.pass_turn()

        warpgroup.wait_group(1 if self.config.overlap_gemm_softmax else 0)
        self.pipe_k.consumer_release(k_state)
        if cutlass.const_expr(not self.config.q_in_registers):
            if n_block == tile.first:
                self.pipe_q.consumer_release(q_state)
        self.modify_scores()
        if cutlass.const_expr(is_masked):
            self.apply_mask(tile, n_block)
        needs_rescale = self.softmax.update(self.s, False)

        if cutlass.const_expr(self.config.overlap_gemm_softmax):
            warpgroup.wait_group(0)
            self.pipe_v.consumer_release(v_state)
        pack(self.acc_s, self.rP)
        self.softmax.rescale(self.o, needs_rescale)

    @cute.jit
    def first_scores(self, tile: Tile, k_state, q_state):
        """S = Q K^T and softmax of a tile's first block of keys (its last), with nothing beside it."""
        self.load_q(q_state)
        self.pipe_k.consumer_wait(k_state)
        self.issue_qk(k_state, q_state)
        warpgroup.wait_group(0)
        self.first_softmax(tile, k_state, q_state)
        pack(self.acc_s, self.rP)

    @cute.jit
    def step_to_next_tile(self, next_tile: Tile, k_state, v_state, next_q_state):
        """The step between tiles: the first S of the next tile issued with the last PV of this one."""
        self.load_q(next_q_state)
        self.pipe_k.consumer_wait(k_state)
        self.wait_for_turn()
        self.issue_qk(k_state, next_q_state)
        self.pipe_v.consumer_wait(v_state)
        self.issue_pv(v_state)
        self.pass_turn()
        warpgroup.wait_group(1)
        self.first_softmax(next_tile, k_state, next_q_state)
        warpgroup.wait_group(0)
        self.pipe_v.consumer_release(v_state)
        pack(self.acc_s, self.rP)

    @cute.jit
    def last_pv(self, v_state):
        """O += P V with nothing beside it."""
        self.pipe_v.consumer_wait(v_state)
        self.issue_pv(v_state)
        warpgroup.wait_group(0)
        self.pipe_v.consumer_release(v_state)

    @cute.jit
    def first_softmax(self, tile: Tile, k_state, q_state):
        """Softmax of a tile's first scores. They are masked only if they have to be: one branch for the tile."""
        self.pipe_k.consumer_release(k_state)
        n_block = tile.last - 1
        if cutlass.const_expr(not self.config.q_in_registers):
            if n_block == tile.first:
                self.pipe_q.consumer_release(q_state)
        self.modify_scores()
        if n_block >= tile.clear_last or n_block < tile.clear_first:
            self.apply_mask(tile, n_block)
        self.softmax.update(self.s, True)

    @cute.jit
    def load_q(self, q_state):
        """Wait for this warpgroup's Q; with q_in_registers, copy it there and give its buffer back at once."""
        self.pipe_q.consumer_wait(q_state)
        if cutlass.const_expr(self.config.q_in_registers):
            ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
            copy = cute.make_tiled_copy_A(ldmatrix, self.tiled_mma_qk).get_slice(self.thread)
            source = copy.partition_S(self.sQ[None, None, q_state.index])
            cute.copy(copy, source, copy.retile(self.rQ))
            self.pipe_q.consumer_release(q_state)

    @cute.jit
    def issue_qk(self, k_state, q_state):
        rQ = self.rQ if self.config.q_in_registers else self.rQ[None, None, None, q_state.index]
        wgmma.issue(self.tiled_mma_qk, self.acc_s, rQ, self.rK[None, None, None, k_state.index], False)

    @cute.jit
    def issue_pv(self, v_state):
        wgmma.issue(self.tiled_mma_pv, self.acc_o, self.p, self.rV[None, None, None, v_state.index], True)

    @cute.jit
    def modify_scores(self):
        """Softcap: s -> tanh(softmax_scale * s / softcap) = 1 - 2 / (1 + exp2(tanh_scale * s)); the cap itself is in
        scale_log2. tanh.approx would be one instruction, with an error of 5e-4 * softcap in the score."""
        if cutlass.const_expr(self.scores.tanh_scale is not None):
            for i in cutlass.range_constexpr(cute.size(self.acc_s)):
                e = cute.math.exp2(self.acc_s[i] * self.scores.tanh_scale, fastmath=True)
                self.acc_s[i] = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + e)

    @cute.jit
    def apply_mask(self, tile: Tile, n_block: Int32):
        row = tile.m_block * self.tile_m + self.row_in_tile
        mask.apply(self.s, row, n_block * self.tile_n, self.lane_in_quad, tile.geometry)

    @cute.jit
    def store(self, tile: Tile, row_max: cute.Tensor, row_sum: cute.Tensor):
        """out = O / row_sum and lse of a finished tile; O is free afterwards."""
        weights = cute.make_rmem_tensor((2,), Float32)
        row = tile.m_block * self.tile_m + self.row_in_tile
        sink = None
        if cutlass.const_expr(self.mSinks is not None):
            sink = self.mSinks[tile.head]
        for r in cutlass.range_constexpr(2):
            weight, lse = finish(row_max[r], row_sum[r], self.scores.scale_log2, sink)
            weights[r] = weight
            mLSE = self.mLSE[tile.batch, tile.head, None]
            epilogue.store_lse(lse, mLSE, row + 8 * r, tile.geometry.seqlen_q, self.lane_in_quad)
        mO = self.mO[None, None, tile.head, tile.batch]
        epilogue.store_rows(self.o, weights, mO, row, tile.geometry.seqlen_q, self.lane_in_quad)

    # Pingpong (section 3.1): the GEMMs of the warpgroups in turns

    @cute.jit
    def wait_for_turn(self):
        if cutlass.const_expr(self.config.pingpong and self.num_warpgroups > 1):
            cute.arch.barrier(barrier_id=NamedBarrier.PINGPONG + self.wg, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def pass_turn(self):
        if cutlass.const_expr(self.config.pingpong and self.num_warpgroups > 1):
            following = self.wg + 1 if self.wg < self.num_warpgroups - 1 else Int32(0)
            cute.arch.barrier_arrive(barrier_id=NamedBarrier.PINGPONG + following, number_of_threads=2 * WARPGROUP)

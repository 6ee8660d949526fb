"""A consumer warpgroup of the Hopper forward: 64 query rows through the key blocks of each tile.

What runs beside what, in one warpgroup (S = QK^T of a block, O += PV of the block before; time goes right):

    Algorithm 1   [S ] softmax [PV] [S ] softmax [PV]          overlap_gemm_softmax=False
    2 stages      [S,PV] softmax [S,PV] softmax                PV beside the softmax; S is waited for
    3 stages      [S,PV]  [S,PV]  [S,PV]                       a block in two halves with an accumulator each: while
                  softmax softmax softmax                      the softmax of one half runs, the S of the other does,
                                                               too, and nothing is waited for

The first S of the next tile is issued with the last PV of this one (overlap_tiles), so the tensor cores do not drain
between tiles; finished rows are stored from registers meanwhile.

Source: FlashAttention-3, arXiv:2407.08608: Algorithm 1, Algorithm 2 (2 stages), appendix B.3 (3 stages; there with a
third buffer for P, here with halves of a block, which need fewer registers).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, pipeline
from cutlass.cute.nvgpu import warp, warpgroup

from ..blocks import epilogue, mask, plain_rows, wgmma
from ..blocks.block_range import KeyBlocks, blocks_of_part, key_blocks, key_range
from ..blocks.bundle import Bundle
from ..blocks.integers import maximum, minimum, select
from ..blocks.layouts import as_operand_a, rows_and_columns, transposed
from ..blocks.mask import Geometry
from ..blocks.named_barrier import NamedBarrier
from ..blocks.online_softmax import OnlineSoftmax, finish
from ..blocks.pack_gqa import unpack_row
from ..blocks.plain_rows import soft_cap
from ..blocks.ptx import order_after, pack
from ..blocks.warp import broadcast
from ..config import ROWS_PER_WARPGROUP
from .producer import as_producer

WARPGROUP = 128  # threads
WARPS = 4  # of a warpgroup


class Scores(NamedTuple):
    """How raw scores q.k become exponents: exp2(scale_log2 * s), after s = tanh(s) of a softcap."""

    scale_log2: Float32
    tanh_scale: Float32 | None  # 2 log2(e) * softmax_scale / softcap; None: no softcap


class Tile(NamedTuple):
    """A tile of query rows and the key blocks it visits."""

    m_block: Int32
    head: Int32
    place_q: Int32  # batch entry; of packed sequences the first row
    place_k: Int32
    geometry: Geometry
    first: Int32
    clear_first: Int32
    clear_last: Int32
    last: Int32

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


def after(state: pipeline.PipelineState) -> pipeline.PipelineState:
    following = state.clone()
    following.advance()
    return following


@cute.jit
def is_full(pipe: pipeline.PipelineTmaAsync, state) -> Boolean:
    """Whether the buffer after this state's is full, without waiting."""
    following = after(state)
    return cute.arch.mbarrier_test_wait(pipe.producer_get_barrier(following), following.phase)


class Consumer(Bundle):
    """A consumer warpgroup's registers and what it does with them.

    Buffer states are advanced in the loops of `two_stages` and `three_stages`: an update in a callee would not be
    carried around them.
    """

    def __init__(self, kernel, sQ, sK, sV, pipes: Pipes, tiled_mmas, scores: Scores, mO, mLSE, mSinks, plain, producer):
        config = self.config = kernel.config
        self.kernel = kernel
        self.num_warpgroups, self.parts = config.num_warpgroups, config.score_buffers
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
        self.mO, self.mLSE, self.mSinks, self.plain = mO, mLSE, mSinks, plain

        self.tiled_mma_qk, self.tiled_mma_pv = tiled_mmas
        thr_qk, thr_pv = (tiled_mma.get_slice(self.thread) for tiled_mma in tiled_mmas)
        self.sQ, self.sV = sQ, sV
        self.rQ = self.tiled_mma_qk.make_fragment_A(thr_qk.partition_A(sQ))
        if config.q_in_registers:
            self.rQ = cute.make_rmem_tensor(cute.select(self.rQ.layout, [0, 1, 2]).shape, kernel.dtype)
        self.rK = self.tiled_mma_qk.make_fragment_B(thr_qk.partition_B(sK))
        self.rV = self.tiled_mma_pv.make_fragment_B(thr_pv.partition_B(transposed(sV)))
        shape_s = self.tiled_mma_qk.partition_shape_C((ROWS_PER_WARPGROUP, self.part_n))
        shape_o = self.tiled_mma_pv.partition_shape_C((ROWS_PER_WARPGROUP, kernel.head_dim_v))
        self.acc_s = [cute.make_rmem_tensor(shape_s, Float32) for _ in range(self.parts)]
        self.acc_o = cute.make_rmem_tensor(shape_o, Float32)
        self.s, self.o = [rows_and_columns(acc) for acc in self.acc_s], rows_and_columns(self.acc_o)
        self.rP = cute.make_rmem_tensor(self.acc_s[0].layout, kernel.dtype)
        self.p = as_operand_a(self.rP)
        self.is_lazy = config.rescale_threshold > 0
        self.softmax = OnlineSoftmax(scores.scale_log2, config.rescale_threshold, config.exp2_fma_period)
        # of the tile whose last PV is still to come, while `softmax` is on the next one already
        self.done_max, self.done_sum = (cute.make_rmem_tensor((2,), Float32) for _ in range(2))

    # ---------------------------------------------------------------- through all tiles of the thread block

    @cute.jit
    def two_stages(self, queue, schedule, seqlens):
        """Algorithm 1 or 2: one accumulator of scores."""
        config = self.config
        k_state, v_state = self.kernel.buffer_states(pipeline.PipelineUserType.Consumer)
        wave, number = Int32(0), queue.first()
        tile, skipped = self.own_blocks(self.kernel.tile_at(number, schedule, seqlens))
        self.prime_turns()
        if cutlass.const_expr(config.overlap_tiles):
            for _ in cutlass.range(skipped, unroll=1):
                self.skip(self.pipes.k, k_state)
                k_state.advance()
            self.first_scores(tile, k_state, self.q_state(wave))
            k_state.advance()
        while number < queue.num_tiles:
            if cutlass.const_expr(not config.overlap_tiles):
                for _ in cutlass.range(skipped, unroll=1):
                    self.skip(self.pipes.k, k_state)
                    k_state.advance()
                self.load_first(tile, wave, k_state, v_state)
                self.first_scores(tile, k_state, self.q_state(wave))
                k_state.advance()
            for _ in cutlass.range(skipped, unroll=1):
                self.skip(self.pipes.v, v_state)
                v_state.advance()
                # turns go round once a block
                self.wait_for_turn()
                self.pass_turn()
            self.acc_o.fill(0.0)
            self.clear_rubbish(tile, v_state)

            # the keys, last block first: cut by the right edge of the mask, clear, cut by its left edge
            n_block = tile.last - 1
            ready = (Boolean(False), Boolean(False))
            clear_last, clear_first = minimum(tile.clear_last, n_block), minimum(tile.clear_first, n_block)
            if cutlass.const_expr(self.has_window[1]):
                for _ in cutlass.range(n_block - clear_last, unroll=1):
                    n_block -= 1
                    ready = self.step(tile, n_block, k_state, v_state, self.q_state(wave), ready, True)
                    k_state.advance()
                    v_state.advance()
            n_clear = clear_last - clear_first if cutlass.const_expr(self.has_window[0]) else n_block - tile.first
            for _ in cutlass.range(n_clear, unroll=1):
                n_block -= 1
                ready = self.step(tile, n_block, k_state, v_state, self.q_state(wave), ready, False)
                k_state.advance()
                v_state.advance()
            if cutlass.const_expr(self.has_window[0]):
                for _ in cutlass.range(n_block - tile.first, unroll=1):
                    n_block -= 1
                    ready = self.step(tile, n_block, k_state, v_state, self.q_state(wave), ready, True)
                    k_state.advance()
                    v_state.advance()

            number = queue.take(wave + 1)
            queue.want_next()
            next_tile, skipped = self.own_blocks(self.kernel.tile_at(number, schedule, seqlens))
            self.keep_done()
            if cutlass.const_expr(config.overlap_tiles):
                for _ in cutlass.range(skipped if number < queue.num_tiles else 0, unroll=1):
                    self.skip(self.pipes.k, k_state)
                    k_state.advance()
                if number < queue.num_tiles:
                    self.step_to_next_tile(next_tile, k_state, v_state, self.q_state(wave + 1))
                else:
                    self.last_pv(v_state)
                k_state.advance()
            else:
                self.last_pv(v_state)
            self.store(tile)
            v_state.advance()
            wave += 1
            tile = next_tile

    @cute.jit
    def three_stages(self, queue, schedule, seqlens):
        """Appendix B.3: a block of keys in two halves, the upper one (1) first, each with its accumulator.

        At the start of each half step the scores of one half are there, and P holds the half before it.
        """
        k_state, v_state = self.kernel.buffer_states(pipeline.PipelineUserType.Consumer)
        wave, number = Int32(0), queue.first()
        tile = self.kernel.tile_at(number, schedule, seqlens)
        self.prime_turns()
        self.load_q(self.q_state(wave))
        self.issue_qk(1, k_state, self.q_state(wave))
        warpgroup.wait_group(0)
        self.pipes.k.consumer_release(k_state)
        k_state.advance()
        self.issue_qk(0, k_state, self.q_state(wave))
        self.first_half(tile, k_state, self.q_state(wave))
        k_state.advance()
        while number < queue.num_tiles:
            self.acc_o.fill(0.0)
            self.clear_rubbish(tile, v_state)
            n_block = tile.last - 1
            for _ in cutlass.range(n_block - tile.first, unroll=1):
                self.half_step(tile, n_block, 0, k_state, v_state, self.q_state(wave), Boolean(False))
                k_state.advance()
                v_state.advance()
                n_block -= 1
                self.half_step(tile, n_block, 1, k_state, v_state, self.q_state(wave), n_block == tile.first)
                k_state.advance()
                v_state.advance()

            number = queue.take(wave + 1)
            queue.want_next()
            next_tile = self.kernel.tile_at(number, schedule, seqlens)
            next_k, next_v = k_state.clone(), v_state.clone()
            next_k.advance()
            next_v.advance()
            if number < queue.num_tiles:
                next_q = self.q_state(wave + 1)
                self.load_q(next_q)
                self.half_step(tile, n_block, 0, k_state, v_state, next_q, Boolean(False))
                self.keep_done()
                self.issue_gemms(0, next_k, next_v, next_q)
                self.first_half(next_tile, next_k, next_q)
                self.pipes.v.consumer_release(next_v)
            else:
                self.issue_pv(v_state)
                self.half_softmax(tile, n_block, 0)
                warpgroup.wait_group(0)
                self.pipes.v.consumer_release(v_state)
                self.next_p(0)
                self.keep_done()
                self.last_pv(next_v)
            self.store(tile)
            for _ in cutlass.range_constexpr(2):
                k_state.advance()
                v_state.advance()
            wave += 1
            tile = next_tile

    @cute.jit
    def own_blocks(self, tile: Tile):
        """The tile with the blocks that this warpgroup's rows see, and how many of its last blocks they do not.

        Under a causal mask the rows of the first warpgroup need 64 keys less than those of the next one. A skipped K is
        given back at once, so as many as have a buffer beside the first one can be skipped.
        """
        skipped = Int32(0)
        if cutlass.const_expr(self.has_window[1] and self.producer is None):
            seqlen_q = tile.geometry.seqlen_q
            rows = self.tile_m // self.num_warpgroups
            m_start = minimum(tile.m_block * self.tile_m + self.wg * rows, seqlen_q - 1)
            m_end = minimum(m_start + rows, seqlen_q)
            own = key_blocks(m_start, m_end, *tile.geometry, self.tile_n)
            blocks, skipped = blocks_of_part(tile.blocks, own, self.kernel.k_stages - 1)
            tile = tile.with_blocks(blocks)
        return tile, skipped

    @cute.jit
    def skip(self, pipe: pipeline.PipelineTmaAsync, state):
        """Give a buffer back unread."""
        pipe.consumer_wait(state)
        pipe.consumer_release(state)

    # ---------------------------------------------------------------- loads, without warp specialisation

    @cute.jit
    def load_first(self, tile: Tile, wave: Int32, k_state, v_state):
        """What a tile starts with: Q, the first V, and two blocks of K, the second one for the first step."""
        if cutlass.const_expr(self.producer is not None):
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
                self.producer.load_q(tile, wave)
                self._load(self.producer.load_k, tile, tile.last - 1, k_state)
                self._load(self.producer.load_v, tile, tile.last - 1, v_state)
                if tile.last - 1 > tile.first:
                    self._load(self.producer.load_k, tile, tile.last - 2, after(k_state))

    @cute.jit
    def load_next(self, tile: Tile, n_block: Int32, k_state, v_state):
        """In the step of K_n and V_(n+1): V_n and K_(n-1), while its GEMMs run."""
        if cutlass.const_expr(self.producer is not None):
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
                if n_block > tile.first:
                    self._load(self.producer.load_k, tile, n_block - 1, after(k_state))
                self._load(self.producer.load_v, tile, n_block, after(v_state))

    def _load(self, load, tile: Tile, n_block: Int32, state):
        load(self.producer.head_kv(tile), tile.place_k, n_block, as_producer(state))

    # ---------------------------------------------------------------- steps

    @cute.jit
    def step(self, tile: Tile, n_block: Int32, k_state, v_state, q_state, ready, is_masked: cutlass.Constexpr[bool]):
        """S = Q K_n^T issued with O += P V_(n+1); softmax of S while PV runs; then P = S and O rescaled.

        Args: ready: of K_n and V_(n+1), whether they were seen in shared memory before.
        Returns: the same for the next step.
        """
        if cutlass.const_expr(self.config.overlap_gemm_softmax):
            self.issue_gemms(0, k_state, v_state, q_state, ready)
            self.load_next(tile, n_block, k_state, v_state)
            warpgroup.wait_group(1)
        else:
            # Algorithm 1: PV first, and nothing of this warpgroup runs beside its softmax
            self.last_pv(v_state)
            self.wait_for_turn()
            self.issue_qk(0, k_state, q_state)
            self.pass_turn()
            self.load_next(tile, n_block, k_state, v_state)
            warpgroup.wait_group(0)
        self.pipes.k.consumer_release(k_state)
        self.release_q(q_state, n_block == tile.first)
        # asked now, the answers are there when the next step begins: about 80 cycles each otherwise
        ready = is_full(self.pipes.k, k_state), is_full(self.pipes.v, v_state)
        self.modify_scores(0)
        if cutlass.const_expr(is_masked):
            self.apply_mask(tile, n_block, 0)
        self.update_softmax(0, is_masked)
        if cutlass.const_expr(self.config.overlap_gemm_softmax):
            self.keep_softmax_above()
            warpgroup.wait_group(0)
            self.pipes.v.consumer_release(v_state)
        self.next_p(0)
        return ready

    @cute.jit
    def first_scores(self, tile: Tile, k_state, q_state):
        """S = Q K^T and softmax of a tile's first block of keys (its last), with nothing beside it."""
        self.load_q(q_state)
        self.issue_qk(0, k_state, q_state)
        warpgroup.wait_group(0)
        self.first_softmax(tile, k_state, q_state)
        pack(self.acc_s[0], self.rP)

    @cute.jit
    def step_to_next_tile(self, next_tile: Tile, k_state, v_state, next_q_state):
        """The step between tiles: the first S of the next tile issued with the last PV of this one."""
        self.load_q(next_q_state)
        self.issue_gemms(0, k_state, v_state, next_q_state)
        warpgroup.wait_group(1)
        self.first_softmax(next_tile, k_state, next_q_state)
        self.keep_softmax_above()
        warpgroup.wait_group(0)
        self.pipes.v.consumer_release(v_state)
        pack(self.acc_s[0], self.rP)

    @cute.jit
    def first_softmax(self, tile: Tile, k_state, q_state):
        """Softmax of a tile's first scores. They are masked only if they have to be: one branch for the tile."""
        self.pipes.k.consumer_release(k_state)
        n_block = tile.last - 1
        self.release_q(q_state, n_block == tile.first)
        self.modify_scores(0)
        self.mask_if_needed(tile, n_block, 0)
        self.softmax.begin(self.s[0])

    @cute.jit
    def half_step(self, tile: Tile, n_block: Int32, part: cutlass.Constexpr[int], k_state, v_state, q_state, ends_q):
        """Softmax of half `part` of block n, while the S of the half after it and the PV of the one before run.

        Args: ends_q: that S is the last one of this Q.
        """
        self.issue_gemms(1 - part, k_state, v_state, q_state)
        self.half_softmax(tile, n_block, part)
        self.keep_softmax_above()
        warpgroup.wait_group(0)
        self.pipes.k.consumer_release(k_state)
        self.release_q(q_state, ends_q)
        self.pipes.v.consumer_release(v_state)
        self.next_p(part)

    @cute.jit
    def first_half(self, tile: Tile, k_state, q_state):
        """Softmax of a tile's first half block, while the GEMMs issued before run."""
        n_block = tile.last - 1
        self.modify_scores(1)
        self.mask_if_needed(tile, n_block, 1)
        self.softmax.begin(self.s[1])
        self.keep_softmax_above()
        warpgroup.wait_group(0)
        self.pipes.k.consumer_release(k_state)
        self.release_q(q_state, n_block == tile.first)
        pack(self.acc_s[1], self.rP)

    @cute.jit
    def half_softmax(self, tile: Tile, n_block: Int32, part: cutlass.Constexpr[int]):
        self.modify_scores(part)
        self.mask_if_needed(tile, n_block, part)
        self.update_softmax(part, True)

    @cute.jit
    def next_p(self, part: cutlass.Constexpr[int]):
        """The exponentials become P of the next PV, and O is brought to their reference (now or when that PV comes)."""
        pack(self.acc_s[part], self.rP)
        if cutlass.const_expr(not self.is_lazy and not self.config.rescale_beside_qk):
            self.softmax.rescale(self.o)

    @cute.jit
    def update_softmax(self, part: cutlass.Constexpr[int], is_masked: cutlass.Constexpr[bool]):
        if cutlass.const_expr(self.is_lazy):
            self.softmax.update_lazily(self.s[part], self.o, is_masked)
        else:
            self.softmax.update(self.s[part])

    @cute.jit
    def last_pv(self, v_state):
        """O += P V with nothing beside it."""
        self.issue_pv(v_state)
        warpgroup.wait_group(0)
        self.pipes.v.consumer_release(v_state)

    @cute.jit
    def keep_softmax_above(self):
        """All exponentials before the wait that follows. ptxas takes the wait for free and would sink them below it
        (seen: 50 of 64 at tile_n 128), out of the time in which the GEMM runs."""
        if cutlass.const_expr(self.config.softmax_before_wait):
            order_after(self.softmax.row_sum[0], self.softmax.row_sum[1])

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
        rQ = self.rQ if self.config.q_in_registers else self.rQ[None, None, None, q_state.index]
        wgmma.issue(self.tiled_mma_qk, self.acc_s[part], rQ, self.rK[None, None, None, k_state.index], False)

    @cute.jit
    def issue_pv(self, v_state, is_ready=None):
        if cutlass.const_expr(not self.is_lazy and self.config.rescale_beside_qk):
            self.softmax.rescale(self.o)
        self.pipes.v.consumer_wait(v_state, is_ready)
        wgmma.issue(self.tiled_mma_pv, self.acc_o, self.p, self.rV[None, None, None, v_state.index], True)

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
                    self._clear_rows(self.sV[None, None, state.index], first)
                    state.advance()
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + self.wg, number_of_threads=WARPGROUP)

    @cute.jit
    def _clear_rows(self, tile_v: cute.Tensor, first: Int32):
        """Zeros in rows `first` (any number) to the last one, 16 bytes a store, by all threads of the warpgroup."""
        zeros = cute.make_rmem_tensor((8,), tile_v.element_type)
        zeros.fill(0.0)
        first = maximum(first, 0)
        vectors_per_row = cute.size(tile_v, mode=[1]) // 8
        vectors = cute.zipped_divide(tile_v, (1, 8))  # ((1, 8), (row, vector))
        for i in cutlass.range(self.thread, (self.part_n - first) * vectors_per_row, WARPGROUP, unroll=1):
            row, vector = first + i // vectors_per_row, i % vectors_per_row
            cute.autovec_copy(zeros, vectors[(0, None), (row, vector)])

    # ---------------------------------------------------------------- scores

    @cute.jit
    def modify_scores(self, part: cutlass.Constexpr[int]):
        """Softcap: s -> tanh(softmax_scale * s / softcap); the cap itself is in scale_log2."""
        if cutlass.const_expr(self.scores.tanh_scale is not None):
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
        position, head, is_used = unpack_row(row_in_tile, group)
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
            if cutlass.const_expr(self.mSinks is not None):
                sink = self.mSinks[head]
            weight, lse = finish(self.done_max[r], self.done_sum[r], self.scores.scale_log2, sink)
            weights[r] = weight
            mLSE = at_head(self.mLSE, self.mLSE, head, tile.place_q)[None, 0]
            epilogue.store_lse(lse, mLSE, position, is_row[r], self.lane_in_quad)
        out_rows = [at_head(self.mO, self.mO, head, tile.place_q)[position, None] for position, head, _ in rows]
        epilogue.store_rows(self.o, weights, out_rows, is_row, self.lane_in_quad)
        if cutlass.const_expr(self.plain is not None):
            if plain_rows.has_nan(self.o, is_row[0]):
                cute.arch.sync_warp()  # other lanes write the same rows again
                self.recompute(tile, weights)

    @cute.jit
    def recompute(self, tile: Tile, weights: cute.Tensor):
        """Every row of this warp from its visible keys alone: V of a hidden key may have brought NaN (0 * NaN)."""
        at_head, plain, geometry = self.kernel.at_head, self.plain, tile.geometry
        head_kv = tile.head // self.kernel.tile_heads_per_kvhead
        mK, mV = (at_head(t, t, head_kv, tile.place_k) for t in (plain.k, plain.v))
        # known to be uniform: if a branch could split the warp, ptxas would give up uniform registers in the main loop
        first_row = cute.arch.make_warp_uniform(broadcast(self.row_in_tile, 0))
        for i in cutlass.range(16, unroll=1):
            position, head, is_row = self.row_of(tile, first_row + i)
            is_upper, lane = i < 8, i % 8 * 4
            row_max = broadcast(self.done_max[0] if is_upper else self.done_max[1], lane)
            weight = broadcast(weights[0] if is_upper else weights[1], lane)
            if is_row:
                mQ, mO = (at_head(t, t, head, tile.place_q) for t in (plain.q, self.mO))
                low, high = key_range(position, position + 1, *geometry)
                scales = (self.scores.scale_log2, self.scores.tanh_scale)
                plain_rows.recompute_row(
                    mQ[position, None], mK, mV, mO[position, None], low, high, *scales, row_max, weight
                )

    # ---------------------------------------------------------------- pingpong (section 3.1): GEMMs in turns

    @cute.jit
    def prime_turns(self):
        """Warpgroup 0 goes first."""
        if cutlass.const_expr(self.config.pingpong and self.num_warpgroups > 1):
            if self.wg == self.num_warpgroups - 1:
                self.pass_turn()

    @cute.jit
    def wait_for_turn(self):
        if cutlass.const_expr(self.config.pingpong and self.num_warpgroups > 1):
            cute.arch.barrier(barrier_id=NamedBarrier.PINGPONG + self.wg, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def pass_turn(self):
        if cutlass.const_expr(self.config.pingpong and self.num_warpgroups > 1):
            following = self.wg + 1 if self.wg < self.num_warpgroups - 1 else Int32(0)
            cute.arch.barrier_arrive(barrier_id=NamedBarrier.PINGPONG + following, number_of_threads=2 * WARPGROUP)

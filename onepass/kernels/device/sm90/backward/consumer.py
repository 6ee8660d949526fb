"""A consumer warpgroup of the Hopper backward: 64 keys through the query blocks of each tile.

One step, query block i; in brackets what is in the tensor cores' queue, below it what the threads do meanwhile:

    [dQ_(i-1) = dS_(i-1) K   dP_i = V dO_i^T   dV += P_i^T dO_i]          [S_(i+1) = K Q_(i+1)^T   dK += dS_i^T Q_i]
                             dQ_(i-1) added          dS_i = P_i (dP_i - delta),              P_(i+1) =
                             to memory               to shared memory                        exp(S_(i+1) - lse)

Two warpgroups issue these batches in turns, 0 1 0 1: while the GEMMs of one run, the other has its arithmetic. With
turns in the second batch alone they drift, and the same kernel runs 15 % faster or slower. With overlap_gradients the
arithmetic also runs beside this warpgroup's own GEMMs: dS beside dV, P_(i+1) beside dK. Without it dS waits for dV, and
ptxas moves the exponentials of P_(i+1) behind the wait for dK, whatever the source says. dQ needs the dS of all
warpgroups; it comes a step late, so that none of them waits for another one's dS. A step holds dK, dV, one accumulator
(64, tile_m) for S and dP in turn, a share of dQ, and P and dS in 16 bits.

Source: FlashAttention-3, arXiv:2407.08608, appendix B.1, Algorithm 3.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, pipeline
from cutlass.cute.nvgpu import warp, warpgroup

from .....geometry.integers import ceil_div, minimum
from .....geometry.tile_scheduler import LANES
from ....config import ROWS_PER_WARPGROUP
from ...blocks.memory import epilogue, wgmma
from ...blocks.memory.clear import clear_rows
from ...blocks.memory.epilogue import STAGED_COLUMNS, STAGED_ROWS
from ...blocks.memory.layouts import as_operand_a, rows_and_columns, transposed
from ...blocks.memory.ptx import add_to_global, load_past_l1, order_after_words, pack
from ...blocks.repair import gradients as repair_gradients
from ...blocks.repair.rows import SourceTensors
from ...blocks.softmax.dropout import StagedFlags
from ...blocks.softmax.gradients import GradientScores, stat_of_column
from ...blocks.softmax.modifiers import Modifiers
from ...blocks.softmax.online import Scores
from ...blocks.tiles.dq_sums import Accumulator, AdditionTurns
from ...blocks.tiles.named_barrier import NamedBarrier
from ...blocks.tiles.pingpong import Turns
from ..forward.tile import WARPGROUP, WARPS, after


class BackwardPipes(NamedTuple):
    """The circular buffers in shared memory."""

    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    q: pipeline.PipelineTmaAsync
    do: pipeline.PipelineTmaAsync


class Mmas(NamedTuple):
    """The GEMMs of one warpgroup: each has 64 keys (dq: 64 queries) as rows of its result."""

    s: cute.TiledMma  # S^T = K Q^T
    dp: cute.TiledMma  # dP^T = V dO^T
    dv: cute.TiledMma  # dV += P^T dO, P from registers
    dk: cute.TiledMma  # dK += dS^T Q, dS from registers
    dq: cute.TiledMma  # dQ = dS K, over the keys of all warpgroups


class Inputs(NamedTuple):
    """What a consumer reads and writes, beside the buffers in shared memory."""

    pipes: BackwardPipes
    mmas: Mmas
    softmax_scale: Float32
    scores: Scores
    accumulator: Accumulator
    mdK: cute.Tensor
    mdV: cute.Tensor
    mdQ: cute.Tensor | None  # with private_dq
    sources: SourceTensors | None  # what a repair reads, if pairs may be hidden
    modifiers: Modifiers | None


class BackwardConsumer(Turns, AdditionTurns, GradientScores):
    """dK and dV of 64 keys in registers, and a share of each dQ."""

    def __init__(self, kernel, buffers, inputs: Inputs):
        self._keep(kernel, inputs)
        self.row_in_tile = self.wg * ROWS_PER_WARPGROUP + self.row_in_warpgroup

        sK, sV, sQ, sdO, self.sdS, self.sStats, self.ds_full, sFlags = buffers
        sdS = self.sdS
        self._make_fragments(sK, sV, sQ, sdO, sdS, self.wg)
        if sFlags is not None:
            self.flags = StagedFlags(self.modifiers, sFlags[None, None, self.warp], self.lane)
            self.dropped_words = cute.recast_tensor(self.rP_of_dv, Int32)
        # the keys that this warpgroup's GEMMs read: dQ sums over those of all warpgroups
        self.own_keys = [(sK[None, None, w], w * ROWS_PER_WARPGROUP) for w in range(self.num_warpgroups)]
        self.own_keys.append((sV[None, None, self.wg], self.wg * ROWS_PER_WARPGROUP))
        # this warpgroup's share of dQ: 64 of the queries, or some of the columns
        self.is_dq_by_rows = self.tile_m > ROWS_PER_WARPGROUP
        row_block, column_block = (self.wg, 0) if self.is_dq_by_rows else (0, self.wg)
        sdS_share = cute.local_tile(sdS, (ROWS_PER_WARPGROUP, ROWS_PER_WARPGROUP), (row_block, 0, None))
        sK_t = cute.local_tile(transposed(sK), (kernel.dq_columns, ROWS_PER_WARPGROUP), (column_block, 0, None))
        dq = self.mmas.dq.get_slice(self.thread)
        self.rdS_q = self.mmas.dq.make_fragment_A(dq.partition_A(sdS_share))
        self.rK_t = self.mmas.dq.make_fragment_B(dq.partition_B(sK_t))

    def _keep(self, kernel, inputs: Inputs):
        """Attributes that do not depend on which warpgroup computes which gradient."""
        self.kernel = kernel
        self.pipes, self.mmas, self.softmax_scale, self.scores, self.accumulator, *outputs = inputs
        self.mdK, self.mdV, self.mdQ, self.sources, self.modifiers = outputs
        self.num_warpgroups, self.tile_m, self.tile_n = kernel.num_warpgroups, kernel.tile_m, kernel.tile_n
        self.thread = cute.arch.thread_idx()[0] % WARPGROUP
        self.lane, self.lane_in_quad = self.thread % LANES, self.thread % 4
        self.wg = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP - 1)
        # this warp among those of all consumers
        self.warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // LANES - WARPS)
        # The first of this thread's two rows of an accumulator, 8 apart; row_in_tile counts it among the tile's keys.
        self.row_in_warpgroup = self.thread // LANES * 16 + self.lane // 4
        self.takes_turns = kernel.config.pingpong
        self.overlaps = kernel.config.overlap_gradients
        self.is_capped = self.scores.tanh_scale is not None
        # With a softcap registers are scarce: those of delta become those of dP. Dropout scales dP alone.
        self.delta_in_dp = self.is_capped and not self.drops
        self.dv_scale = self.modifiers.tensors.keep_scale if self.drops else Float32(1.0)

    def _make_fragments(self, sK, sV, sQ, sdO, sdS, tile_of_keys):
        """Operands and accumulators of all GEMMs but dQ, for one of the tiles of 64 keys in sK and sV."""
        self.sK, self.sV, self.sQ, self.sdO = sK, sV, sQ, sdO
        kernel, mmas = self.kernel, self.mmas
        s, dp, dv, dk = (mma.get_slice(self.thread) for mma in mmas[:4])
        self.rK = mmas.s.make_fragment_A(s.partition_A(sK))
        if kernel.keys_in_registers:
            self.rK = cute.make_rmem_tensor(cute.select(self.rK.layout, [0, 1, 2]).shape, kernel.dtype)
        else:
            self.rK = self.rK[None, None, None, tile_of_keys]
        self.rQ = mmas.s.make_fragment_B(s.partition_B(sQ))
        self.rV = mmas.dp.make_fragment_A(dp.partition_A(sV))[None, None, None, tile_of_keys]
        self.rdO = mmas.dp.make_fragment_B(dp.partition_B(sdO))
        self.rdO_t = mmas.dv.make_fragment_B(dv.partition_B(transposed(sdO)))
        self.rQ_t = mmas.dk.make_fragment_B(dk.partition_B(transposed(sQ)))

        self.shape_s = mmas.s.partition_shape_C((ROWS_PER_WARPGROUP, self.tile_m))
        self.shape_dq = mmas.dq.partition_shape_C((ROWS_PER_WARPGROUP, kernel.dq_columns))
        self.acc_dk = cute.make_rmem_tensor(mmas.dk.partition_shape_C((64, kernel.head_dim)), Float32)
        self.acc_dv = cute.make_rmem_tensor(mmas.dv.partition_shape_C((64, kernel.head_dim_v)), Float32)
        self.rP, self.rdS = (cute.make_rmem_tensor(self.shape_s, kernel.dtype) for _ in range(2))
        self.p_words, self.ds_words = (cute.recast_tensor(r, Int32) for r in (self.rP, self.rdS))
        # statistics of this thread's queries, see `read_stats`
        self.minus_lse, self.minus_delta = (cute.make_rmem_tensor((4, self.tile_m // 16), Float32) for _ in range(2))
        # whether a dq that this tile has written has a NaN (with private_dq)
        self.nan_in_dq = cute.make_rmem_tensor((1,), Int32)
        self.nan_in_dq[0] = Int32(0)
        self.begin_turns()
        if self.is_capped:
            # P (1 - tanh^2), in the order of p_words
            self.capped_words = cute.make_rmem_tensor((cute.size(self.p_words),), Int32)
        # the operand of dV: P, or what dropout keeps of it
        self.rP_of_dv = self.rP
        if self.drops:
            self.rP_of_dv, self.kept_values = (cute.make_rmem_tensor(self.shape_s, kernel.dtype) for _ in range(2))
            self.kept_words = cute.make_rmem_tensor((ceil_div(cute.size(self.rP), 32),), Int32)
        if self.modifiers is not None and self.modifiers.tensors.slopes is not None and kernel.group == 1:
            self.slope = cute.make_rmem_tensor((1,), Float32)  # all steps of a tile are of one head
        # dS lies in shared memory as rows of queries, as dQ reads it
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4), kernel.dtype)
        self.copy_ds = cute.make_tiled_copy_C(stmatrix, mmas.s).get_slice(self.thread)
        self.ds_target = self.copy_ds.partition_D(transposed(sdS))

    # ---------------------------------------------------------------- through all tiles of the thread block

    @cute.jit
    def run(self, queue, schedule, seqlens, tile_end: cute.Pointer | None):
        kv_state, q_state, do_state = self.kernel.buffer_states(pipeline.PipelineUserType.Consumer)
        wave, number = Int32(0), queue.first()
        ds_count = Int32(0)
        self.prime_turns()
        while number < queue.num_tiles:
            tile = self.kernel.tile_at(number, schedule, seqlens)
            num_steps = (tile.last - tile.first) * self.kernel.group
            self.acc_dk.fill(0.0)
            self.acc_dv.fill(0.0)
            if num_steps > 0:
                self.pipes.k.consumer_wait(kv_state)
                self.pipes.v.consumer_wait(kv_state)
                self.clear_keys(tile, self.own_keys)
                self.load_keys()
                head, m_block = self.kernel.first_visit(tile)
                self.load_slope(tile, head)
                before = head, m_block  # the query block of the step before
                self.pipes.q.consumer_wait(q_state)
                acc_s = self.issue_s(q_state)
                self.read_stats(self.minus_lse, q_state, 0)
                self.draw(tile, head, m_block)
                warpgroup.wait_group(0)
                self.make_p(acc_s, tile, head, m_block)
                for i in cutlass.range(num_steps - 1, unroll=1):
                    self.clear_queries(tile, m_block, q_state, do_state)
                    block, following = (head, m_block), self.kernel.next_visit(tile, head, m_block)
                    if i == 0:
                        self.step(tile, block, following, before, q_state, do_state, ds_count, False, True)
                    else:
                        self.step(tile, block, following, before, q_state, do_state, ds_count, True, True)
                    before = head, m_block
                    head, m_block = self.kernel.next_visit(tile, head, m_block)
                    q_state.advance()
                    do_state.advance()
                    ds_count += 1
                self.clear_queries(tile, m_block, q_state, do_state)
                block = head, m_block
                if num_steps == 1:
                    self.step(tile, block, block, before, q_state, do_state, ds_count, False, False)
                else:
                    self.step(tile, block, block, before, q_state, do_state, ds_count, True, False)
                self.last_dq(tile, block, ds_count)
                q_state.advance()
                do_state.advance()
                ds_count += 1
                self.pipes.k.consumer_release(kv_state)
                self.pipes.v.consumer_release(kv_state)
                kv_state.advance()
            self.end_tile(tile_end)
            wave += 1
            number = queue.take(wave)
            queue.want_next()
            self.store(tile, ds_count)

    @cute.jit
    def load_keys(self):
        """Load this warpgroup's K into registers, with keys_in_registers."""
        if cutlass.const_expr(self.kernel.keys_in_registers):
            ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.kernel.dtype)
            copy = cute.make_tiled_copy_A(ldmatrix, self.mmas.s).get_slice(self.thread)
            cute.copy(copy, copy.partition_S(self.sK[None, None, self.wg]), copy.retile(self.rK))

    @cute.jit
    def end_tile(self, tile_end: cute.Pointer | None):
        """One arrival of this warp: it adds nothing more to dQ of the tile."""
        if cutlass.const_expr(self.kernel.finishes_rows):
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(tile_end)

    @cute.jit
    def step(
        self,
        tile,
        block: tuple,
        following: tuple,
        before: tuple,
        q_state,
        do_state,
        ds_count: Int32,
        has_previous: cutlass.Constexpr[bool],
        has_next: cutlass.Constexpr[bool],
    ):
        """One query block.

        A step begins and ends with P and nothing in flight: ptxas, which does not follow GEMMs around a loop, would
        serialize all of them.

        Args: block, following, before: head and number of this query block, of the next one, and of the one before,
        whose dQ is computed now.
        """
        # The other warpgroup wakes up while the tensor cores have this one's last instruction.
        pass_early = self.pass_turn if self.overlaps else None
        next_q = after(q_state)
        self.pipes.do.consumer_wait(do_state)
        if cutlass.const_expr(has_previous):
            seen = self.look_at_turn(tile, *before)
            self.wait_for_ds(ds_count - 1)
        self.wait_for_turn()
        if cutlass.const_expr(has_previous):
            acc_dq = self.issue_dq(ds_count - 1)
        if cutlass.const_expr(self.delta_in_dp):
            self.read_stats(self.minus_delta, q_state, 1)
        acc_dp = self.issue_dp(do_state, self.delta_in_dp)
        self.issue_dv(do_state, pass_early)
        if cutlass.const_expr(not self.overlaps):
            self.pass_turn()
        if cutlass.const_expr(has_previous):
            self.take_turn(tile, *before, seen)
            warpgroup.wait_group(2)
            self.add_dq(acc_dq, tile, *before)
        # Read before they are needed, because shared memory answers late while GEMMs read it, as far as registers
        # permit: for 128 queries, those of the second half, which are needed last, come once P is free.
        if cutlass.const_expr(not self.delta_in_dp):
            self.read_stats(self.minus_delta, q_state, 1, 0, 64)
        warpgroup.wait_group(1 if self.overlaps else 0)  # dV may still run
        if cutlass.const_expr(not self.delta_in_dp):
            self.read_stats(self.minus_delta, q_state, 1, 64)
        if cutlass.const_expr(not self.overlaps):
            self.pipes.do.consumer_release(do_state)
        self.make_ds(acc_dp, tile, *block, self.delta_in_dp)
        # Written before the turn: dS is then complete. The compiler would move its arithmetic into the turn otherwise.
        self.write_ds(ds_count)
        cute.arch.sync_warp()
        self.publish_ds(ds_count)
        if cutlass.const_expr(self.overlaps):
            warpgroup.wait_group(0)
            self.pipes.do.consumer_release(do_state)
        if cutlass.const_expr(has_next):
            self.pipes.q.consumer_wait(next_q)
        self.wait_for_turn()
        if cutlass.const_expr(has_next):
            acc_s = self.issue_s(next_q)
        self.issue_dk(q_state, pass_early)
        if cutlass.const_expr(not self.overlaps):
            self.pass_turn()
        if cutlass.const_expr(has_next):
            self.read_stats(self.minus_lse, next_q, 0)
            self.draw(tile, *following)
            warpgroup.wait_group(1)
            self.make_p(acc_s, tile, *following)
            # ptxas takes a wait to cost nothing: without this it moves all exponentials below the one that follows
            if cutlass.const_expr(self.overlaps):
                order_after_words(self.p_words)
        warpgroup.wait_group(0)
        self.pipes.q.consumer_release(q_state)

    @cute.jit
    def last_dq(self, tile, block: tuple, ds_count: Int32):
        """The dQ of a tile's last query block."""
        seen = self.look_at_turn(tile, *block)
        self.wait_for_ds(ds_count)
        acc_dq = self.issue_dq(ds_count)
        self.take_turn(tile, *block, seen)
        warpgroup.wait_group(0)
        self.add_dq(acc_dq, tile, *block)
        if cutlass.const_expr(self.kernel.is_deterministic):
            self.finish_dq()

    # ---------------------------------------------------------------- past the end of a sequence

    # Past the end P is 0, but 0 * NaN = NaN. Where dense tensors end there themselves, TMA fills in zeros. All
    # warpgroups write the same zeros, so they need not wait for each other; a warpgroup that reads rows before they are
    # cleared masks what it computes from them.

    @cute.jit
    def clear_keys(self, tile, tiles_of_keys: list):
        """Put zeros in place of what tiles of 64 rows of K or V hold past the last key, before any GEMM reads them.

        Args: tiles_of_keys: tiles that have arrived, each with the number of its first key among those of the tile.
        """
        if cutlass.const_expr(self.kernel.has_garbage):
            end = tile.geometry.seqlen_k - tile.n_block * self.tile_n
            if end < self.tile_n:
                for rows, start in tiles_of_keys:
                    clear_rows(rows, end - start, self.thread, WARPGROUP)
                self.show_zeros()

    @cute.jit
    def clear_queries(self, tile, m_block: Int32, q_state, do_state):
        """Put zeros in place of what a block of Q and of dO holds past the last query, once they arrive.

        S of the block is masked.

        Args: q_state: None if this warpgroup does not read Q here.
        """
        if cutlass.const_expr(self.kernel.is_packed):
            end = tile.geometry.seqlen_q - m_block * self.tile_m
            if end < self.tile_m:
                if cutlass.const_expr(q_state is not None):
                    self.pipes.q.consumer_wait(q_state)
                    clear_rows(self.sQ[None, None, q_state.index], end, self.thread, WARPGROUP)
                self.pipes.do.consumer_wait(do_state)
                clear_rows(self.sdO[None, None, do_state.index], end, self.thread, WARPGROUP)
                self.show_zeros()

    @cute.jit
    def show_zeros(self):
        """Make what all threads of this warpgroup have cleared visible to its GEMMs."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + self.wg, number_of_threads=WARPGROUP)

    # ---------------------------------------------------------------- GEMMs

    # Accumulators that begin at zero are new registers each time: an old one would be an operand, and kept until then.

    @cute.jit
    def read_stats(
        self,
        target: cute.Tensor,
        q_state,
        which: cutlass.Constexpr[int],
        first: cutlass.Constexpr[int] = 0,
        end: cutlass.Constexpr[int] = 128,
    ):
        """-lse log2(e) (0) or -delta (1) of this thread's queries in [first, end): four of each sixteen."""
        count = self.tile_m // 16
        source = cute.domain_offset((which * self.tile_m + 4 * self.lane_in_quad,), self.sStats[None, q_state.index])
        source = cute.make_tensor(source.iterator.align(16), cute.make_layout((4, count), stride=(1, 16)))
        for j in cutlass.range_constexpr(first // 16, min(end // 16, count)):
            cute.autovec_copy(source[None, j], target[None, j])

    @cute.jit
    def issue_s(self, q_state) -> cute.Tensor:
        acc_s = cute.make_rmem_tensor(self.shape_s, Float32)
        b = self.rQ[None, None, None, q_state.index]
        wgmma.issue(self.mmas.s, acc_s, self.rK, b, False, self.kernel.steps_of_s)
        return acc_s

    @cute.jit
    def issue_dp(self, do_state, minus_delta: cutlass.Constexpr[bool] = False) -> cute.Tensor:
        """Issue dP, or with minus_delta dP - delta."""
        acc_dp = cute.make_rmem_tensor(self.shape_s, Float32)
        if cutlass.const_expr(minus_delta):
            for i in cutlass.range_constexpr(cute.size(acc_dp)):
                acc_dp[i] = stat_of_column(self.minus_delta, i)
        b = self.rdO[None, None, None, do_state.index]
        wgmma.issue(self.mmas.dp, acc_dp, self.rV, b, minus_delta, self.kernel.steps_of_dp)
        return acc_dp

    @cute.jit
    def issue_dv(self, do_state, before_last: cutlass.Constexpr = None):
        p, do = as_operand_a(self.rP_of_dv), self.rdO_t[None, None, None, do_state.index]
        wgmma.issue(self.mmas.dv, self.acc_dv, p, do, True, before_last=before_last)

    @cute.jit
    def issue_dk(self, q_state, before_last: cutlass.Constexpr = None):
        ds, q = as_operand_a(self.rdS), self.rQ_t[None, None, None, q_state.index]
        wgmma.issue(self.mmas.dk, self.acc_dk, ds, q, True, before_last=before_last)

    @cute.jit
    def issue_dq(self, count: Int32) -> cute.Tensor:
        acc_dq = cute.make_rmem_tensor(self.shape_dq, Float32)
        buffer = count % 2 * self.num_warpgroups
        pairs = [
            (self.rdS_q[None, None, None, buffer + w], self.rK_t[None, None, None, w])
            for w in range(self.num_warpgroups)
        ]
        wgmma.issue_sum(self.mmas.dq, acc_dq, pairs, False)
        return acc_dq

    # ---------------------------------------------------------------- P and dS

    @cute.jit
    def make_p(self, acc_s: cute.Tensor, tile, head: Int32, m_block: Int32):
        """P = exp2(scale_log2 * S - lse * log2(e)), rounded to 16 bits."""
        self.exponentials(acc_s, tile, head, m_block)
        self.take_p(acc_s, tile, head, m_block)

    @cute.jit
    def take_p(self, acc_s: cute.Tensor, tile, head: Int32, m_block: Int32):
        """P of the accumulator, in 16 bits, and what dropout keeps of it."""
        pack(acc_s, self.rP)
        if cutlass.const_expr(self.flags is not None):
            self.flags.apply(self.p_words, self.dropped_words)
        elif cutlass.const_expr(self.drops):
            self.draw_kept(tile, head, m_block)
            self.drop_p(acc_s)
            pack(acc_s, self.rP_of_dv)

    @cute.jit
    def draw(self, tile, head: Int32, m_block: Int32):
        """Draw the random bits of a block of scores; called while its GEMM runs."""
        if cutlass.const_expr(self.flags is not None):
            self.flags.draw(self.blocks_of(tile, head, m_block)[0])

    def slot_of(self, tile) -> Int32:
        """This warp's place in a tensor with one for each warp of a tile."""
        return tile.n_block * self.kernel.config.tile_warps + self.warp

    def ds_tile_number(self, count: Int32) -> Int32:
        """The tile of shared memory for this warpgroup's dS of a step."""
        return count % 2 * self.num_warpgroups + self.wg

    @cute.jit
    def write_ds(self, count: Int32):
        """Write dS of these keys to shared memory, where `publish_ds` makes it visible to all warpgroups.

        The buffer is free: every warpgroup has published the step before, and by then had waited for the dQ that read
        the buffer.
        """
        target = self.ds_target[None, None, None, self.ds_tile_number(count)]
        cute.copy(self.copy_ds, self.copy_ds.retile(self.rdS), target)

    @cute.jit
    def publish_ds(self, count: Int32):
        """One arrival of this warp: its dS is written, and its share of the dQ of the step before is finished."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.ds_full + count % 2)

    @cute.jit
    def wait_for_ds(self, count: Int32):
        """Wait until all warps have published their dS of a step, and make it visible to this warp's GEMMs.

        The fence between the writes of threads and the reads of GEMMs may stand on either side of the barrier that
        orders them (PTX ISA, "Causality order": a proxy fence along the path). It takes 150 to 250 cycles, which a
        writer would have to wait for in the middle of a step; a reader then waits anyway.
        """
        cute.arch.mbarrier_wait(self.ds_full + count % 2, count // 2 & 1)
        cute.arch.fence_proxy("async.shared", space="cta")

    # ---------------------------------------------------------------- results

    @cute.jit
    def dq_share(self, tile, head: Int32, m_block: Int32) -> Int32:
        """The number of this warp's share of a block of dQ in the accumulator."""
        if cutlass.const_expr(self.kernel.has_private_dq):
            in_group = head - tile.head_kv * self.kernel.group
            first = (cute.arch.block_idx()[0] * self.kernel.group + in_group) * self.accumulator.blocks_per_head
            number = first + m_block
        else:
            number = self.kernel.m_block_number(self.accumulator, tile, head, m_block)
        return number * self.kernel.config.consumer_warps + self.warp

    @cute.jit
    def add_dq(self, acc_dq: cute.Tensor, tile, head: Int32, m_block: Int32):
        """Add a share of dQ to the accumulator; the last addition with private_dq writes dq instead."""
        share = self.dq_share(tile, head, m_block)
        if cutlass.const_expr(self.kernel.has_private_dq):
            is_first, is_last = self.kernel.is_first_and_last(tile, m_block)
            if is_last:
                if not is_first:
                    self.add_from_accumulator(acc_dq, share)
                self.store_dq(acc_dq, tile, head, m_block)
            elif is_first:
                self.begin_in_accumulator(acc_dq, share)
            else:
                self.add_to_accumulator(acc_dq, share)
        else:
            self.add_to_accumulator(acc_dq, share)

    def address_in_accumulator(self, acc_dq: cute.Tensor, share: Int32) -> cute.Pointer:
        """The address of this thread's first values in a share.

        A share is laid out as [vector][lane]: 16 bytes a thread, 512 contiguous bytes a warp.
        """
        return self.accumulator.dq.iterator + (Int64(share) * (cute.size(acc_dq) * LANES) + self.lane * 4)

    @cute.jit
    def add_to_accumulator(self, acc_dq: cute.Tensor, share: Int32):
        start = self.address_in_accumulator(acc_dq, share)
        few, all_blocks = self.blocks_of_share()
        for i in cutlass.range_constexpr(0, 4 * few, 4):
            add_to_global(start + i * LANES, [acc_dq[i + c] for c in range(4)])
        if cutlass.const_expr(few < all_blocks):
            if self.wg == 0:
                for i in cutlass.range_constexpr(4 * few, 4 * all_blocks, 4):
                    add_to_global(start + i * LANES, [acc_dq[i + c] for c in range(4)])

    def blocks_of_share(self) -> tuple[int, int]:
        """Blocks of 8 columns of a share of dQ: those that every warpgroup has, and those of warpgroup 0.

        Columns past head_dim are zero, and are not added. (Where there are several pieces, all of each are.)
        """
        count = self.kernel.dq_columns // 8
        if self.kernel.config.by_gradient:
            return count, count
        first_columns = 0, 0 if self.is_dq_by_rows else self.kernel.dq_columns
        there = [min(count, ceil_div(self.kernel.true_head_dim - first, 8)) for first in first_columns]
        return max(0, there[1]), there[0]

    # With private_dq a thread is the only one that ever touches its values.

    @cute.jit
    def begin_in_accumulator(self, acc_dq: cute.Tensor, share: Int32):
        start = self.address_in_accumulator(acc_dq, share)
        vector = cute.make_rmem_tensor((4,), Float32)
        for i in cutlass.range_constexpr(0, cute.size(acc_dq), 4):
            for c in cutlass.range_constexpr(4):
                vector[c] = acc_dq[i + c]
            cute.autovec_copy(vector, cute.make_tensor((start + i * LANES).align(16), cute.make_layout((4,))))

    @cute.jit
    def add_from_accumulator(self, acc_dq: cute.Tensor, share: Int32):
        start = self.address_in_accumulator(acc_dq, share)
        count = cute.size(acc_dq) // 2  # values that there are registers for
        for first in cutlass.range_constexpr(0, cute.size(acc_dq), count):
            vectors = [load_past_l1(start + i * LANES) for i in range(first, first + count, 4)]
            for i in cutlass.range_constexpr(count):
                acc_dq[first + i] = acc_dq[first + i] + vectors[i // 4][i % 4]

    def row_of_dq(self) -> Int32:
        """The first of this thread's two rows of a block of dQ."""
        return self.row_in_tile if self.is_dq_by_rows else self.row_in_warpgroup

    @cute.jit
    def store_dq(self, acc_dq: cute.Tensor, tile, head: Int32, m_block: Int32):
        """Write dq of a finished block: this warpgroup's rows, or its columns of all rows."""
        rows = [m_block * self.tile_m + self.row_of_dq() + 8 * r for r in range(2)]
        is_row = [row < tile.geometry.seqlen_q for row in rows]
        weights = cute.make_rmem_tensor((2,), Float32)
        weights.fill(self.softmax_scale)
        gradient = self.kernel.at_head(self.mdQ, self.mdQ, head, tile.origin_q)
        out_rows = [gradient[row, None] for row in rows]
        first_block = 0 if self.is_dq_by_rows else self.wg * (self.kernel.dq_columns // 8)
        epilogue.store_rows(rows_and_columns(acc_dq), weights, out_rows, is_row, self.lane_in_quad, first_block)
        if cutlass.const_expr(self.sources is not None):
            ballots = repair_gradients.nan_rows(rows_and_columns(acc_dq), is_row)
            self.nan_in_dq[0] = self.nan_in_dq[0] | ballots[0] | ballots[1]

    @cute.jit
    def store(self, tile, next_ds: Int32):
        """Write dK and dV of a finished tile.

        They go through this warpgroup's part of the buffer that its next dS will be written to. The buffer is free:
        the last dQ came after all warps had published the last dS, and by then the dQ before was finished.
        """
        stage = (
            self.sdS[None, None, self.ds_tile_number(next_ds)].iterator
            + self.thread // LANES * STAGED_ROWS * STAGED_COLUMNS
        )
        self.store_gradient(tile, self.acc_dv, self.mdV, self.dv_scale, True, stage)
        self.store_gradient(tile, self.acc_dk, self.mdK, self.softmax_scale, False, stage)
        # a warp of the next tile writes its dS where another one has its stage
        cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + self.wg, number_of_threads=WARPGROUP)
        if cutlass.const_expr(self.kernel.has_private_dq and self.sources is not None):
            if self.nan_in_dq[0] != 0:
                cute.arch.sync_warp()  # other lanes write the same rows again
                self.recompute_dq(tile)
            self.nan_in_dq[0] = Int32(0)

    @cute.jit
    def recompute_dq(self, tile):
        """Compute this warp's rows of dq again, in all query blocks that this tile was the last to add to.

        The sequences of private_dq are so short that it is not worth remembering which rows have a NaN.
        """
        at_head, sources = self.kernel.at_head, self.sources
        mK, mV = (at_head(t, t, tile.head_kv, tile.origin_k) for t in (sources.k, sources.v))
        first_row = cute.arch.make_warp_uniform(self.row_of_dq() - self.lane // 4)
        for h in cutlass.range(self.kernel.group, unroll=1):
            head = tile.head_kv * self.kernel.group + h
            mQ, mdO, dq = (at_head(t, t, head, tile.origin_q) for t in (sources.q, sources.dout, self.mdQ))
            number = self.kernel.m_block_number(self.accumulator, tile, head, Int32(0))
            rows = (mQ, mdO, mK, mV, cute.domain_offset((number, 0), self.accumulator.stats))
            for m_block in cutlass.range(tile.first, tile.last, unroll=1):
                _, is_last = self.kernel.is_first_and_last(tile, m_block)
                start = m_block * self.tile_m + first_row
                end = minimum(start + 16, tile.geometry.seqlen_q)
                if is_last:
                    for query in cutlass.range(start, end, unroll=1):
                        repair_gradients.recompute_dq(dq, query, *rows, tile.geometry, *self.scores, self.softmax_scale)

    @cute.jit
    def store_gradient(
        self,
        tile,
        acc: cute.Tensor,
        m: cute.Tensor,
        scale: Float32,
        is_v: cutlass.Constexpr[bool],
        stage: cute.Pointer | None = None,
    ):
        """Write rows of dk, or with is_v of dv, and repair those that have a NaN.

        Args: stage: 2 KB of shared memory for this warp, if there is room.
        """
        rows = [self.key(tile, 0, r) for r in range(2)]
        is_row = [row < tile.rows_k for row in rows]
        # the first of this warp's 16 keys, made uniform: see Warpgroup.recompute
        first_key = cute.arch.make_warp_uniform(rows[0] - self.lane // 4)
        gradient = self.kernel.at_head(m, m, tile.head_kv, tile.origin_k)
        if cutlass.const_expr(stage is not None and m.element_type is not Float32):
            epilogue.store_rows_staged(rows_and_columns(acc), scale, gradient, first_key, tile.rows_k, stage)
        else:
            weights = cute.make_rmem_tensor((2,), Float32)
            weights.fill(scale)
            out_rows = [gradient[row, None] for row in rows]
            epilogue.store_16_bits(rows_and_columns(acc), weights, out_rows, is_row, self.lane_in_quad, 16)
        if cutlass.const_expr(self.sources is not None):
            ballots = repair_gradients.nan_rows(rows_and_columns(acc), is_row)
            if ballots[0] | ballots[1] != 0:
                cute.arch.sync_warp()  # other lanes write the same rows again
                inputs = (self.sources, self.accumulator, self.scores, is_v)
                self.kernel.recompute_keys(tile, gradient, scale, first_key, ballots, *inputs, modifiers=self.modifiers)

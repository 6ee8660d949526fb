"""A consumer warpgroup of the Hopper backward: 64 keys through the query blocks of each tile.

One step, query block i; in brackets what is in the tensor cores' queue, below it what the threads do meanwhile:

    [dQ_(i-1) = dS_(i-1) K   dP_i = V dO_i^T   dV += P_i^T dO_i]          [S_(i+1) = K Q_(i+1)^T   dK += dS_i^T Q_i]
                             dQ_(i-1) added          dS_i = P_i (dP_i - delta),              P_(i+1) =
                             to memory               to shared memory                        exp(S_(i+1) - lse)

Two warpgroups issue these batches in turns, 0 1 0 1: while the GEMMs of one run, the other has its arithmetic. With
turns in the second batch alone they drift, and the same kernel runs 15 % faster or slower. With overlap_gradients the
arithmetic also runs during this warpgroup's own GEMMs: dS during dV, P_(i+1) during dK. Without it dS waits for dV, and
ptxas moves the exponentials of P_(i+1) behind the wait for dK, whatever the source says. dQ needs the dS of all
warpgroups; it comes a step late, so that none of them waits for another one's dS. A step holds dK, dV, one accumulator
(64, tile_m) for S and dP in turn, a share of dQ, and P and dS in 16 bits.

Warpgroups that have the same keys (shared_keys.py) take no turns. Each has the blocks of queries of its own share, and
dQ in pieces, the first one with dP as above and the others with S.

What a step calls are parts of the consumer, each in a file of its own:

    gemms            gemms.py         operands and accumulators of the five GEMMs
    scores           scores.py        P and dS, with what mask, softcap, ALiBi, bias and dropout do to them
    pingpong         blocks/tiles/pingpong.py      which warpgroup issues its GEMMs
    exchange         exchange.py      dS of all warpgroups in shared memory
    sums             dq_atomic.py     where dQ is added; dq_private.py, if a thread block has sums of its own
    gradients        dkv.py           dK and dV of a finished tile
    past_the_end     past_the_end.py  zeros past the end of a sequence

Source: FlashAttention-3, arXiv:2407.08608, appendix B.1, Algorithm 3.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import warpgroup

from .....geometry.tile_scheduler import LANES
from ....config import ROWS_PER_WARPGROUP
from ...blocks.memory.epilogue import STAGED_COLUMNS, STAGED_ROWS
from ...blocks.memory.ptx import order_after_words
from ...blocks.memory.untraced import Untraced
from ...blocks.tiles.named_barrier import NamedBarrier
from ...blocks.tiles.pingpong import Pingpong
from ..forward.tile import WARPGROUP, after
from .dkv import KeyGradients
from .dq_atomic import AtomicSums
from .dq_private import PrivateSums
from .exchange import Exchange
from .gemms import BackwardGemms
from .inputs import Buffers, Inputs, this_thread
from .past_the_end import PastTheEnd
from .scores import BackwardScores


class BackwardConsumer(Untraced):
    """dK and dV of 64 keys in registers, and a share of each dQ."""

    def __init__(self, kernel, buffers: Buffers, inputs: Inputs):
        self.kernel, self.pipes = kernel, inputs.pipes
        self.thread = thread = this_thread()
        self.pingpong = Pingpong(kernel.config.takes_turns, thread.wg, kernel.num_warpgroups)
        self.make_parts(buffers, inputs)
        self.gradients = KeyGradients(kernel, self.scores.region, inputs)
        self.past_the_end = PastTheEnd(kernel, thread, inputs.pipes, buffers)
        self.overlaps = kernel.config.overlap_gradients
        # With a softcap registers are scarce: those of delta become those of dP. Dropout scales dP alone.
        self.delta_in_dp = self.scores.capped is not None and not self.scores.drops

    def make_parts(self, buffers: Buffers, inputs: Inputs):
        """Make what differs where warpgroups have the same keys (shared_keys.py)."""
        kernel, thread, mmas = self.kernel, self.thread, inputs.mmas
        self.gemms = BackwardGemms(kernel, thread, mmas, buffers)
        self.scores = BackwardScores(kernel, thread, inputs, buffers, thread.wg * ROWS_PER_WARPGROUP)
        self.exchange = Exchange(kernel, thread, mmas, buffers, thread.wg)
        self.sums = (PrivateSums if kernel.has_private_dq else AtomicSums)(kernel, thread, inputs)
        # the rows of K and V that this warpgroup's GEMMs read: K of all warpgroups, because dQ sums over their keys
        self.rows_of_keys = [(buffers.k[None, None, w], w * ROWS_PER_WARPGROUP) for w in range(kernel.num_warpgroups)]
        self.rows_of_keys.append((buffers.v[None, None, thread.wg], thread.wg * ROWS_PER_WARPGROUP))

    # ---------------------------------------------------------------- the blocks of queries that this warpgroup has

    stride = 1  # from one to its next one

    def first_buffers(self, q_state, do_state) -> tuple:
        """The states of the first buffers that this warpgroup reads, from those of all."""
        return q_state, do_state

    def num_steps(self, tile) -> Int32:
        """How many of a tile's blocks it has."""
        return (tile.last - tile.first) * self.kernel.group

    def first_visit(self, tile) -> tuple:
        return self.kernel.first_visit(tile)

    def next_visit(self, tile, head: Int32, m_block: Int32) -> tuple:
        for _ in range(self.stride):
            head, m_block = self.kernel.next_visit(tile, head, m_block)
        return head, m_block

    # ---------------------------------------------------------------- through all tiles of the thread block

    @cute.jit
    def run(self, queue, schedule, seqlens, tile_end: cute.Pointer | None):
        kv_state, q_state, do_state = self.kernel.buffer_states(pipeline.PipelineUserType.Consumer)
        wave, number = Int32(0), queue.first()
        ds_count = Int32(0)
        self.pingpong.begin()
        q_state, do_state = self.first_buffers(q_state, do_state)
        while number < queue.num_tiles:
            tile = self.kernel.tile_at(number, schedule, seqlens)
            num_steps = self.num_steps(tile)
            self.gemms.acc_dk.fill(0.0)
            self.gemms.acc_dv.fill(0.0)
            if num_steps > 0:
                self.pipes.k.consumer_wait(kv_state)
                self.pipes.v.consumer_wait(kv_state)
                self.past_the_end.clear_keys(tile, self.rows_of_keys)
                self.gemms.load_keys()
                head, m_block = self.first_visit(tile)
                self.scores.load_slope(tile, head)
                before = head, m_block  # the query block of the step before; of the first step itself, which has none
                self.pipes.q.consumer_wait(q_state)
                acc_s = self.gemms.issue_s(q_state)
                self.scores.read_lse(q_state)
                self.scores.prepare(tile, head, m_block)
                warpgroup.wait_group(0)
                self.scores.make_p(acc_s, tile, head, m_block)
                for i in cutlass.range(num_steps - 1, unroll=1):
                    self.past_the_end.clear_queries(tile, m_block, q_state, do_state)
                    block, following = (head, m_block), self.next_visit(tile, head, m_block)
                    if i == 0:
                        self.step(tile, block, following, before, q_state, do_state, ds_count, False, True)
                    else:
                        self.step(tile, block, following, before, q_state, do_state, ds_count, True, True)
                    before = head, m_block
                    head, m_block = self.next_visit(tile, head, m_block)
                    for _ in cutlass.range_constexpr(self.stride):
                        q_state.advance()
                        do_state.advance()
                    ds_count += 1
                self.past_the_end.clear_queries(tile, m_block, q_state, do_state)
                block = head, m_block
                if num_steps == 1:
                    self.step(tile, block, block, before, q_state, do_state, ds_count, False, False)
                else:
                    self.step(tile, block, block, before, q_state, do_state, ds_count, True, False)
                self.last_dq(tile, block, ds_count)
                for _ in cutlass.range_constexpr(self.stride):
                    q_state.advance()
                    do_state.advance()
                ds_count += 1
                if cutlass.const_expr(self.stride == 1):
                    self.pipes.k.consumer_release(kv_state)
                    self.pipes.v.consumer_release(kv_state)
                    kv_state.advance()
            if cutlass.const_expr(self.stride > 1):
                if tile.first < tile.last:  # another warpgroup may have the only block
                    self.pipes.k.consumer_release(kv_state)
                    self.pipes.v.consumer_release(kv_state)
                    kv_state.advance()
            self.sums.end_tile(tile_end, wave)
            wave += 1
            number = queue.take(wave)
            queue.want_next()
            self.store(tile, ds_count)

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
        # Passed on before the last instruction, the turn wakes the other warpgroup while the tensor cores execute it.
        pass_early = self.pingpong.pass_on if self.overlaps else None
        next_q = q_state
        for _ in range(self.stride):
            next_q = after(next_q)
        self.pipes.do.consumer_wait(do_state)
        if cutlass.const_expr(has_previous):
            self.exchange.wait_for_ds(ds_count - 1)
        self.pingpong.wait()
        if cutlass.const_expr(has_previous):
            acc_dq = self.gemms.issue_dq(ds_count - 1)
        if cutlass.const_expr(self.delta_in_dp):
            self.scores.read_delta(q_state)
        acc_dp = self.gemms.issue_dp(do_state, self.scores.minus_delta if self.delta_in_dp else None)
        self.gemms.issue_dv(self.scores.rP_of_dv, do_state, pass_early)
        if cutlass.const_expr(not self.overlaps):
            self.pingpong.pass_on()
        if cutlass.const_expr(has_previous):
            share = None
            if cutlass.const_expr(self.kernel.has_lists or self.kernel.pieces_of_share > 1):
                share = self.sums.share(tile, *before)
            self.sums.turns.take()
            warpgroup.wait_group(2)
            self.sums.add(acc_dq, tile, *before, share)
            self.sums.turns.give()
        # Read before they are needed, because shared memory answers late while GEMMs read it, as far as registers
        # permit: for 128 queries, those of the second half, which are needed last, come once P is free.
        if cutlass.const_expr(not self.delta_in_dp):
            self.scores.read_delta(q_state, 0, 64)
        warpgroup.wait_group(1 if self.overlaps else 0)  # dV may still run
        if cutlass.const_expr(not self.delta_in_dp):
            self.scores.read_delta(q_state, 64)
        if cutlass.const_expr(not self.overlaps):
            self.pipes.do.consumer_release(do_state)
        self.scores.make_ds(acc_dp, tile, *block, self.delta_in_dp)
        # Written before the turn: dS is then complete. The compiler would move its arithmetic into the turn otherwise.
        self.exchange.send_ds(self.scores.rdS, ds_count)
        if cutlass.const_expr(self.overlaps):
            warpgroup.wait_group(0)
            self.pipes.do.consumer_release(do_state)
        if cutlass.const_expr(has_next):
            self.pipes.q.consumer_wait(next_q)
        self.pingpong.wait()
        pieces = range(1, self.kernel.pieces_of_share) if has_previous else ()
        accs_dq = [self.gemms.issue_dq(ds_count - 1, piece) for piece in pieces]
        if cutlass.const_expr(has_next):
            acc_s = self.gemms.issue_s(next_q)
        self.gemms.issue_dk(self.scores.rdS, q_state, pass_early)
        if cutlass.const_expr(not self.overlaps):
            self.pingpong.pass_on()
        for piece in pieces:
            warpgroup.wait_group(len(pieces) - piece + 1 + has_next)
            self.sums.add_piece(accs_dq[piece - 1], share, piece)
        if cutlass.const_expr(has_next):
            self.scores.read_lse(next_q)
            self.scores.prepare(tile, *following)
            warpgroup.wait_group(1)
            self.scores.make_p(acc_s, tile, *following)
            # ptxas takes a wait to cost nothing: without this it moves all exponentials below the one that follows
            if cutlass.const_expr(self.overlaps):
                order_after_words(self.scores.p)
        warpgroup.wait_group(0)
        self.pipes.q.consumer_release(q_state)

    @cute.jit
    def last_dq(self, tile, block: tuple, ds_count: Int32):
        """The dQ of a tile's last query block."""
        self.exchange.wait_for_ds(ds_count)
        pieces = range(1, self.kernel.pieces_of_share)
        acc_dq = self.gemms.issue_dq(ds_count)
        accs_dq = [self.gemms.issue_dq(ds_count, piece) for piece in pieces]
        self.sums.turns.take()
        warpgroup.wait_group(len(pieces))
        share = self.sums.share(tile, *block) if cutlass.const_expr(len(pieces) > 0) else None
        self.sums.add(acc_dq, tile, *block, share)
        for piece in pieces:
            warpgroup.wait_group(len(pieces) - piece)
            self.sums.add_piece(accs_dq[piece - 1], share, piece)
        self.sums.turns.give()

    @cute.jit
    def store(self, tile, next_ds: Int32):
        """Write dK and dV of a finished tile.

        They go through this warpgroup's part of the buffer for its next dS, which is free (`Exchange.send_ds`): the
        last dQ has waited for the last dS of all warps.
        """
        scratch = (
            self.exchange.sdS[None, None, self.exchange.ds_tile(next_ds)].iterator
            + self.thread.number // LANES * STAGED_ROWS * STAGED_COLUMNS
        )
        self.store_gradients(tile, scratch)
        # in the next tile a warp writes dS where another warp's scratch was
        cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + self.thread.wg, number_of_threads=WARPGROUP)
        self.sums.repair(tile)

    @cute.jit
    def store_gradients(self, tile, scratch: cute.Pointer):
        self.gradients.store_dv(tile, self.gemms.acc_dv, scratch)
        self.gradients.store_dk(tile, self.gemms.acc_dk, scratch)

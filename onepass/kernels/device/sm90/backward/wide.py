"""The consumer warpgroups of the Hopper backward for head_dim above 128: one gradient each.

dK and dV of 64 keys do not fit into one warpgroup's registers, so warpgroup 0 accumulates dV and warpgroup 1 dK. One
step, in brackets what is in the tensor cores' queue:

    warpgroup 0    [S_(i+1) = K Q_(i+1)^T   dV += P_i^T dO_i]      P_(i+1) = exp(S_(i+1) - lse)             [dQ_i]
                                                                   | P, 16 bits, through shared memory
    warpgroup 1    [dK += dS_i^T Q_i   dP_(i+1) = V dO_(i+1)^T]    dS_(i+1) = P_(i+1) (dP_(i+1) - delta)    [dQ_i]
                                                                   | dS, through shared memory to both: dQ = dS K

In the machine code the exponentials stand behind the wait for dV. Held above it (`order_after_words`) they made the
kernel neither faster nor slower (0.99 to 1.00 of its speed at 256 and 192/128): additions of dQ bound it.

A dQ is computed 64 columns at a time (a piece): registers are left for an accumulator of that size.

The parts are those of consumer.py, except for the GEMMs of dQ, what the warpgroups exchange, and the sums of dQ.

Source: FlashAttention-3, arXiv:2407.08608, appendix B.1, Algorithm 3, with these roles for its warpgroups.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import warpgroup

from ....config import ROWS_PER_WARPGROUP
from ...blocks.memory import wgmma
from ...blocks.memory.layouts import transposed
from ...blocks.memory.untraced import Untraced
from ...blocks.tiles.named_barrier import NamedBarrier
from ..forward.tile import WARPGROUP, WARPS, after
from .dkv import KeyGradients
from .dq_atomic import AtomicSums
from .exchange import Exchange
from .gemms import KeyGemms
from .inputs import Buffers, Inputs, Mmas, Thread, this_thread
from .past_the_end import PastTheEnd
from .scores import BackwardScores

PIECE = 64  # columns of dQ
P_WORDS = 4  # 32-bit words of a 16-byte vector


class WideGemms(KeyGemms):
    """The GEMMs of 64 keys, which are all keys of the thread block; those of dQ one piece at a time."""

    def __init__(self, kernel, thread: Thread, mmas: Mmas, buffers: Buffers):
        super().__init__(kernel, thread, mmas, buffers, 0)
        sK_t = cute.local_tile(transposed(buffers.k), (PIECE, ROWS_PER_WARPGROUP), (None, 0, 0))
        dq = mmas.dq.get_slice(thread.number)
        self.rdS_q = mmas.dq.make_fragment_A(dq.partition_A(buffers.ds))
        self.rK_t = mmas.dq.make_fragment_B(dq.partition_B(sK_t))

    @cute.jit
    def issue_dq(self, count: Int32, piece: cutlass.Constexpr[int]) -> cute.Tensor:
        """A piece of dQ = dS K."""
        acc_dq = cute.make_rmem_tensor(self.shape_dq, Float32)
        a, b = self.rdS_q[None, None, None, count % 2], self.rK_t[None, None, None, piece]
        wgmma.issue(self.mmas.dq, acc_dq, a, b, False)
        return acc_dq


class WideExchange(Exchange):
    """P from each thread of warpgroup 0 to the same thread of warpgroup 1, and dS from warpgroup 1 to both."""

    def __init__(self, kernel, thread: Thread, mmas: Mmas, buffers: Buffers, scores: BackwardScores):
        super().__init__(kernel, thread, mmas, buffers, 0)
        self.sP, self.p_full, self.scores = buffers.p, buffers.p_full, scores

    @cute.jit
    def send_p(self, count: Int32):
        """Send P (`copies_of_p`).

        The buffer is free: this warp has waited for the dS that was computed from what was there.
        """
        vector = cute.make_rmem_tensor((P_WORDS,), Int32)
        copies = self.copies_of_p()
        for i in cutlass.range_constexpr(len(copies)):
            vectors = cute.size(copies[i]) // P_WORDS
            for j in cutlass.range_constexpr(vectors):
                for c in cutlass.range_constexpr(P_WORDS):
                    vector[c] = copies[i][P_WORDS * j + c]
                cute.autovec_copy(vector, self.sP[None, self.thread.number, vectors * i + j])
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.p_full + count % 2)

    @cute.jit
    def receive_p(self, count: Int32):
        cute.arch.mbarrier_wait(self.p_full + count % 2, count // 2 & 1)
        vector = cute.make_rmem_tensor((P_WORDS,), Int32)
        copies = self.copies_of_p()
        for i in cutlass.range_constexpr(len(copies)):
            vectors = cute.size(copies[i]) // P_WORDS
            for j in cutlass.range_constexpr(vectors):
                cute.autovec_copy(self.sP[None, self.thread.number, vectors * i + j], vector)
                for c in cutlass.range_constexpr(P_WORDS):
                    copies[i][P_WORDS * j + c] = vector[c]

    def copies_of_p(self) -> list[cute.Tensor]:
        """What `make_ds` needs of P: with a softcap P times its slope, and P itself for gradients of terms."""
        if self.scores.capped is None:
            return [self.scores.p]
        return [self.scores.capped, self.scores.p][: self.kernel.p_copies]

    def send_ds(self, rdS: cute.Tensor, count: Int32):
        """Send dS.

        The buffer is free: P of this step came after warpgroup 0's dQ of two steps before, and the warps of this
        warpgroup wait here for each other.
        """
        cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + self.thread.wg, number_of_threads=WARPGROUP)
        super().send_ds(rdS, count)


class PieceSums(AtomicSums):
    """Sums of dQ to which a warp adds its rows of a piece at a time."""

    def share_of_piece(self, m_block_number: Int32, piece: Int32 | int) -> Int32:
        """The number of this warp's rows of a piece among all shares."""
        return (m_block_number * self.kernel.num_pieces + piece) * WARPS + self.thread.warp % WARPS

    def column_blocks(self) -> tuple[int, int]:
        """All columns of a piece are added."""
        count = PIECE // 8
        return count, count


class WideConsumer(Untraced):
    """dV (warpgroup 0) or dK (warpgroup 1) of 64 keys in registers, and pieces of each dQ."""

    def __init__(self, kernel, buffers: Buffers, inputs: Inputs):
        self.kernel, self.pipes, self.thread = kernel, inputs.pipes, this_thread()
        self.past_the_end = PastTheEnd(kernel, self.thread, inputs.pipes, buffers)
        self.make_parts(buffers, inputs)
        self.gradients = KeyGradients(kernel, self.scores.region, inputs)

    def make_parts(self, buffers: Buffers, inputs: Inputs):
        """Make what differs in pairs."""
        kernel, thread, mmas = self.kernel, self.thread, inputs.mmas
        self.gemms = WideGemms(kernel, thread, mmas, buffers)
        self.scores = BackwardScores(kernel, thread, inputs, buffers, first_key=0)
        self.exchange = WideExchange(kernel, thread, mmas, buffers, self.scores)
        self.sums = PieceSums(kernel, thread, inputs)
        # tiles of K and V that this thread block's GEMMs read, each with the number of its first key
        self.keys, self.values = [(buffers.k[None, None, 0], 0)], [(buffers.v[None, None, 0], 0)]

    @cute.jit
    def run(self, queue, schedule, seqlens, tile_end: cute.Pointer | None):
        if self.thread.wg == 0:
            self.run_dv(queue, schedule, seqlens, tile_end)
        else:
            self.run_dk(queue, schedule, seqlens, tile_end)

    # ---------------------------------------------------------------- warpgroup 0: S, P and dV

    @cute.jit
    def run_dv(self, queue, schedule, seqlens, tile_end: cute.Pointer | None):
        """The loop of `BackwardConsumer.run` for dV: each block of queries has its P before its step."""
        kv_state, q_state, do_state = self.kernel.buffer_states(pipeline.PipelineUserType.Consumer)
        wave, number = Int32(0), queue.first()
        count = Int32(0)
        while number < queue.num_tiles:
            tile = self.kernel.tile_at(number, schedule, seqlens)
            num_steps = (tile.last - tile.first) * self.kernel.group
            self.gemms.acc_dv.fill(0.0)
            if num_steps > 0:
                self.pipes.v.consumer_release(kv_state)  # not read here
                self.pipes.k.consumer_wait(kv_state)
                self.past_the_end.clear_keys(tile, self.keys)
                head, m_block = self.kernel.first_visit(tile)
                self.scores.load_slope(tile, head)
                self.pipes.q.consumer_wait(q_state)
                acc_s = self.gemms.issue_s(q_state)
                self.scores.read_lse(q_state)
                self.scores.prepare(tile, head, m_block)
                warpgroup.wait_group(0)
                self.pipes.q.consumer_release(q_state)
                q_state.advance()
                self.scores.make_p(acc_s, tile, head, m_block)
                self.exchange.send_p(count)
                for _ in cutlass.range(num_steps - 1, unroll=1):
                    self.past_the_end.clear_queries(tile, m_block, None, do_state)
                    block = head, m_block
                    head, m_block = self.kernel.next_visit(tile, head, m_block)
                    self.dv_step(tile, block, (head, m_block), q_state, do_state, count, True)
                    q_state.advance()
                    do_state.advance()
                    count += 1
                self.past_the_end.clear_queries(tile, m_block, None, do_state)
                self.dv_step(tile, (head, m_block), (head, m_block), q_state, do_state, count, False)
                do_state.advance()
                count += 1
                self.pipes.k.consumer_release(kv_state)
                kv_state.advance()
            self.sums.end_tile(tile_end, wave)
            wave += 1
            number = queue.take(wave)
            queue.want_next()
            self.gradients.store_dv(tile, self.gemms.acc_dv)

    @cute.jit
    def dv_step(
        self,
        tile,
        block: tuple,
        following: tuple,
        next_q,
        do_state,
        count: Int32,
        has_next: cutlass.Constexpr[bool],
    ):
        """A step of dV, which begins and ends with P and nothing in flight, see BackwardConsumer.step.

        Args: block, following: head and number of this query block and of the next one.
        """
        self.pipes.do.consumer_wait(do_state)
        if cutlass.const_expr(has_next):
            self.pipes.q.consumer_wait(next_q)
            acc_s = self.gemms.issue_s(next_q)
        self.gemms.issue_dv(self.scores.rP_of_dv, do_state)
        if cutlass.const_expr(has_next):
            self.scores.read_lse(next_q)
            self.scores.prepare(tile, *following)
            warpgroup.wait_group(1)
            self.pipes.q.consumer_release(next_q)
            self.scores.exponentials(acc_s, tile, *following)
        warpgroup.wait_group(0)
        self.pipes.do.consumer_release(do_state)
        if cutlass.const_expr(has_next):
            self.scores.take_p(acc_s, tile, *following)
        self.exchange.wait_for_ds(count)
        if cutlass.const_expr(has_next):
            self.exchange.send_p(count + 1)
        self.add_pieces(tile, block, count, 0)

    # ---------------------------------------------------------------- warpgroup 1: dP, dS and dK

    @cute.jit
    def run_dk(self, queue, schedule, seqlens, tile_end: cute.Pointer | None):
        """The loop of `BackwardConsumer.run` for dK: each block of queries has its dS before its step."""
        kv_state, q_state, do_state = self.kernel.buffer_states(pipeline.PipelineUserType.Consumer)
        wave, number = Int32(0), queue.first()
        count = Int32(0)
        while number < queue.num_tiles:
            tile = self.kernel.tile_at(number, schedule, seqlens)
            num_steps = (tile.last - tile.first) * self.kernel.group
            self.gemms.acc_dk.fill(0.0)
            if num_steps > 0:
                head, m_block = self.kernel.first_visit(tile)
                self.pipes.q.consumer_wait(q_state)
                self.scores.read_delta(q_state)
                self.pipes.v.consumer_wait(kv_state)
                self.pipes.do.consumer_wait(do_state)
                self.past_the_end.clear_keys(tile, self.values)
                self.past_the_end.clear_queries(tile, m_block, q_state, do_state)
                acc_dp = self.gemms.issue_dp(do_state)
                self.pipes.k.consumer_wait(kv_state)
                warpgroup.wait_group(0)
                self.past_the_end.clear_keys(tile, self.keys)
                self.pipes.do.consumer_release(do_state)
                do_state.advance()
                self.exchange.receive_p(count)
                self.make_ds(acc_dp, tile, head, m_block)
                self.exchange.send_ds(self.scores.rdS, count)
                for _ in cutlass.range(num_steps - 1, unroll=1):
                    block = head, m_block
                    head, m_block = self.kernel.next_visit(tile, head, m_block)
                    self.past_the_end.clear_queries(tile, m_block, after(q_state), do_state)
                    self.dk_step(tile, block, (head, m_block), q_state, do_state, count, True)
                    q_state.advance()
                    do_state.advance()
                    count += 1
                self.dk_step(tile, (head, m_block), (head, m_block), q_state, do_state, count, False)
                q_state.advance()
                count += 1
                self.pipes.v.consumer_release(kv_state)
                self.pipes.k.consumer_release(kv_state)
                kv_state.advance()
            self.sums.end_tile(tile_end, wave)
            wave += 1
            number = queue.take(wave)
            queue.want_next()
            self.gradients.store_dk(tile, self.gemms.acc_dk)

    @cute.jit
    def dk_step(
        self,
        tile,
        block: tuple,
        following: tuple,
        q_state,
        next_do,
        count: Int32,
        has_next: cutlass.Constexpr[bool],
    ):
        """A step of dK, which begins and ends with dS and nothing in flight."""
        self.gemms.issue_dk(self.scores.rdS, q_state)
        if cutlass.const_expr(has_next):
            next_q = after(q_state)
            self.pipes.q.consumer_wait(next_q)
            self.pipes.do.consumer_wait(next_do)
            acc_dp = self.gemms.issue_dp(next_do)
            self.scores.read_delta(next_q)
        warpgroup.wait_group(0)
        self.pipes.q.consumer_release(q_state)
        if cutlass.const_expr(has_next):
            self.pipes.do.consumer_release(next_do)
            self.exchange.receive_p(count + 1)
            self.make_ds(acc_dp, tile, *following)
            self.exchange.send_ds(self.scores.rdS, count + 1)
        self.exchange.wait_for_ds(count)
        self.add_pieces(tile, block, count, 1)

    @cute.jit
    def make_ds(self, acc_dp: cute.Tensor, tile, head: Int32, m_block: Int32):
        """dS of the P that warpgroup 0 has sent; which pairs dropout keeps is drawn here again."""
        self.scores.draw_kept(tile, head, m_block)
        self.scores.make_ds(acc_dp, tile, head, m_block)

    # ---------------------------------------------------------------- dQ

    def pieces(self, wg: int) -> range:
        """A warpgroup's pieces of dQ: the first half of them (or one more) belongs to warpgroup 0."""
        half = (self.kernel.num_pieces + 1) // 2
        return range(half) if wg == 0 else range(half, self.kernel.num_pieces)

    @cute.jit
    def add_pieces(self, tile, block: tuple, count: Int32, wg: cutlass.Constexpr[int]):
        """Add a warpgroup's pieces of a dQ to global memory, each during the GEMM of the next one.

        Args: block: head and number of the query block.
        """
        pieces = self.pieces(wg)
        accs = [self.gemms.issue_dq(count, piece) for piece in pieces]
        self.sums.turns.take()
        head, m_block = block
        m_block = self.kernel.query_block(tile, m_block)
        number = self.kernel.m_block_number(self.sums.accumulator, tile, head, m_block)
        for i in cutlass.range_constexpr(len(accs)):
            warpgroup.wait_group(len(accs) - 1 - i)
            self.sums.add_share(accs[i], self.sums.share_of_piece(number, pieces[i]))
        self.sums.turns.give()

"""The Hopper backward for head_dim above 128 in clusters of two thread blocks (a pair).

Additions to dQ bound wide.py: there are as many of them as L2 can take. Here a tile has 128 keys, 64 for each thread
block of a pair, and both visit the same query blocks in the same order. They share the loads of Q and dO, each of which
brings half of every buffer to both, and exchange dS. Each thread block then computes half of the columns of dQ over the
keys of both, which halves the additions. One step, in brackets what is in the tensor cores' queue:

    warpgroup 0    [dV += P_i^T dO_i   S_(i+1) = K Q_(i+1)^T   dQ_i]         P_(i+1), to warpgroup 1
                   dQ_(i-1) added                              exp(S_(i+1) - lse)
    warpgroup 1    [dK += dS_i^T Q_i   dQ_i   dP_(i+1) = V dO_(i+1)^T]       dS_(i+1), to all four warpgroups
                                              dQ_i added

Warpgroup 0 is the slower one, and its step decides the speed. dV comes first because dO_i is there long before
Q_(i+1), whose buffer dK_(i-1) has read; the additions of the step before, which wait for L2, run during dV; and dQ is
issued before the exponentials, which run during it. With S first, and the exponentials before dQ, the kernel was 5
to 9 % slower at 2048 and 8192 (H200).

What a thread block has beyond the buffers and barriers of wide.py (arrivals of the mbarriers)
    Q, dO      full: bytes from both thread blocks      empty: all consumer warps of both
    K          the peer's, too, in the columns of dQ that are added here
    dS, inbox  one buffer each, for the own dS and the peer's     full: own dS, 1, and the peer's 8 KB
                                                                  empty: all consumer warps of both, after their dQ
    P          in the buffer of the dS that is computed from it, each value where its dS will be

Who waits for whom. P_(i+1) is written when both thread blocks have computed dQ_i (empty). Then nobody reads the own
dS_i any more: neither this thread block's GEMMs, nor the copy to the peer, for which the peer's dQ_i has waited. And
the peer's inbox is free for dS_(i+1), which comes after P_(i+1). tests/device/test_backward_protocol.py runs the warps
in random orders.

At head_dim 256 each warpgroup of the pair has one piece of 64 columns of every dQ. At 192 there are three pieces:
warpgroups 0 have the outer ones, and warpgroups 1 take turns with the middle one. (Both compute it, because ptxas does
not overlap GEMMs that a branch may leave out.)
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from ....config import ROWS_PER_WARPGROUP
from ...blocks.memory import wgmma
from ...blocks.memory.layouts import transposed
from ...blocks.memory.ptx import add_here, arrive_at_first, copy_to_peer, order_after_words
from ...blocks.tiles.named_barrier import NamedBarrier
from ..forward.tile import WARPGROUP, WARPS, after
from .exchange import Exchange
from .inputs import Buffers, Inputs, Mmas, Thread
from .scores import BackwardScores
from .wide import PieceSums, WideConsumer, WideGemms

PEER_PIECES = 2  # pieces of K that a thread block has of the peer


def first_piece_of_peer(rank: Int32, num_pieces: int) -> Int32:
    """The first of the pieces of dQ that thread block `rank` of a pair adds to."""
    return rank * (num_pieces - PEER_PIECES)


def adds_piece(kernel, wg: Int32, rank: Int32, m_block: Int32) -> Boolean | bool:
    """Whether warpgroup `wg` of thread block `rank` of a pair adds its piece of a block of dQ to memory."""
    if kernel.num_pieces == 2 * PEER_PIECES:
        return True
    return (wg == 0) | ((m_block & 1) == rank)


def piece_of(kernel, wg: Int32, rank: Int32) -> Int32:
    """The piece of dQ that warpgroup `wg` of thread block `rank` of a pair computes."""
    if kernel.num_pieces < 2 * PEER_PIECES:
        return wg + 2 * rank * (1 - wg)
    return PEER_PIECES * rank + wg


class PairedGemms(WideGemms):
    """The GEMMs of 64 keys, and a piece of dQ over the keys of the pair.

    Args: rank: the number of this thread block in its pair.
    """

    def __init__(self, kernel, thread: Thread, mmas: Mmas, buffers: Buffers, rank: Int32):
        super().__init__(kernel, thread, mmas, buffers)
        self.rank = rank
        dq = mmas.dq.get_slice(thread.number)
        self.rInbox_q = mmas.dq.make_fragment_A(dq.partition_A(buffers.inbox))
        self.rPeerK_t = mmas.dq.make_fragment_B(dq.partition_B(transposed(buffers.peer_k)))

    @cute.jit
    def issue_dq(self, piece: Int32) -> cute.Tensor:
        """A piece of dQ = dS K, with dS and K of both thread blocks."""
        peer_piece = piece - first_piece_of_peer(self.rank, self.kernel.num_pieces)
        acc_dq = cute.make_rmem_tensor(self.shape_dq, Float32)
        pairs = [
            (self.rdS_q[None, None, None, 0], self.rK_t[None, None, None, piece]),
            (self.rInbox_q[None, None, None, 0], self.rPeerK_t[None, None, None, peer_piece]),
        ]
        wgmma.issue_sum(self.mmas.dq, acc_dq, pairs, False)
        return acc_dq


class PairedExchange(Exchange):
    """P from each warp of warpgroup 0 to the same warp of warpgroup 1, and dS from there to all four warpgroups.

    Args: rank: the number of this thread block in its pair.
    """

    def __init__(self, kernel, thread: Thread, mmas: Mmas, buffers: Buffers, scores: BackwardScores, rank: Int32):
        super().__init__(kernel, thread, mmas, buffers, 0)
        self.p_full, self.ds_empty, self.scores, self.rank = buffers.p_full, buffers.ds_empty, scores, rank
        self.ds_address, self.inbox_address = (t.iterator.toint() for t in (buffers.ds, buffers.inbox))
        self.ds_bytes = cute.size(buffers.ds) * kernel.dtype.width // 8
        ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), kernel.dtype)
        self.copy_p = cute.make_tiled_copy_C(ldmatrix, mmas.s).get_slice(thread.number)
        self.p_source = self.copy_p.partition_S(transposed(buffers.ds))

    def sent_p(self) -> cute.Tensor:
        """What warpgroup 1 needs of P: with a softcap, P times its slope."""
        rP, capped = self.scores.rP, self.scores.capped
        if capped is None:
            return rP
        return cute.make_tensor(cute.recast_tensor(capped, self.kernel.dtype).iterator, rP.layout)

    @cute.jit
    def send_p(self, count: Int32):
        """Send P, once both thread blocks have computed dQ of the step before."""
        cute.arch.mbarrier_wait(self.ds_empty, (count & 1) ^ 1)
        self.write(self.sent_p(), 0)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.p_full)

    @cute.jit
    def receive_p(self, count: Int32):
        cute.arch.mbarrier_wait(self.p_full, count & 1)
        cute.copy(self.copy_p, self.p_source[None, None, None, 0], self.copy_p.retile(self.sent_p()))

    @cute.jit
    def send_ds(self, rdS: cute.Tensor, count: Int32):
        """Send dS. It takes the place of P, which this warp alone has read."""
        cute.arch.sync_warp()
        self.write(rdS, 0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + self.thread.wg, number_of_threads=WARPGROUP)
        if self.thread.warp % WARPS == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(self.ds_full, self.ds_bytes)
                copy_to_peer(self.inbox_address, self.ds_address, self.ds_bytes, self.ds_full, self.rank ^ 1)

    @cute.jit
    def wait_for_ds(self, count: Int32):
        """Wait for dS of both thread blocks, which its writers have made visible to GEMMs."""
        cute.arch.mbarrier_wait(self.ds_full, count & 1)

    @cute.jit
    def free_ds(self):
        """One arrival of this warp at both thread blocks: its dQ is computed."""
        arrive_at_first(self.ds_empty, 2, self.thread.lane)


class PairedSums(PieceSums):
    """Sums of dQ to which a warpgroup adds one piece, if it is not the middle one and the other thread block's turn.

    Args:
        rank: the number of this thread block in its pair.
        shape_dq: of a piece in registers.
    """

    def __init__(self, kernel, thread: Thread, inputs: Inputs, rank: Int32, shape_dq):
        super().__init__(kernel, thread, inputs)
        self.rank = rank
        # a piece that is not yet added, and the head and the number of its query block; -1: none
        self.kept, self.block = (cute.make_rmem_tensor(s, t) for s, t in ((shape_dq, Float32), ((2,), Int32)))
        self.kept.fill(0.0)
        self.block.fill(-1)

    @property
    def piece(self) -> Int32:
        """This warpgroup's piece of dQ."""
        return piece_of(self.kernel, self.thread.wg, self.rank)

    def share(self, tile, head: Int32, m_block: Int32) -> Int32:
        number = self.kernel.m_block_number(self.accumulator, tile, head, self.kernel.query_block(tile, m_block))
        return self.share_of_piece(number, self.piece)

    @cute.jit
    def add_in_turn(self, acc_dq: cute.Tensor, tile, head: Int32, m_block: Int32):
        """Add this warpgroup's piece, unless the other thread block adds it."""
        self.turns.take()
        if self.kernel.adds_share(self.thread.wg, self.rank, m_block):
            self.add(acc_dq, tile, head, m_block)
        self.turns.give()

    @cute.jit
    def keep(self, acc_dq: cute.Tensor, head: Int32, m_block: Int32):
        """Keep a computed piece for `add_kept`.

        It is moved to other registers by an addition that ptxas does not remove. It would serialize all GEMMs if the
        kept values, which live around the loop, were in the registers of an accumulator.
        """
        for i in cutlass.range_constexpr(cute.size(acc_dq)):
            self.kept[i] = add_here(acc_dq[i], Float32(0.0))
        self.block[0], self.block[1] = head, m_block

    @cute.jit
    def add_kept(self, tile):
        """Add the piece that was kept, if there is one."""
        head, m_block = self.block[0], self.block[1]
        if m_block >= 0:
            self.add_in_turn(self.kept, tile, head, m_block)
        self.block[1] = Int32(-1)


class PairedConsumer(WideConsumer):
    """dV (warpgroup 0) or dK (warpgroup 1) of 64 keys, and a piece of each dQ over the keys of the pair."""

    def make_parts(self, buffers: Buffers, inputs: Inputs):
        kernel, thread, mmas = self.kernel, self.thread, inputs.mmas
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        first_key = rank * ROWS_PER_WARPGROUP
        peer_key = ROWS_PER_WARPGROUP - first_key
        self.gemms = PairedGemms(kernel, thread, mmas, buffers, rank)
        first_warp = rank * kernel.config.consumer_warps
        self.scores = BackwardScores(kernel, thread, inputs, buffers, first_key, first_warp)
        self.exchange = PairedExchange(kernel, thread, mmas, buffers, self.scores, rank)
        self.sums = PairedSums(kernel, thread, inputs, rank, self.gemms.shape_dq)
        self.keys, self.values = [(buffers.k[None, None, 0], first_key)], [(buffers.v[None, None, 0], first_key)]
        self.keys += [(buffers.peer_k[None, None, i], peer_key) for i in range(PEER_PIECES)]

    # ---------------------------------------------------------------- steps

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
        self.pipes.do.consumer_wait(do_state)
        self.gemms.issue_dv(self.scores.rP_of_dv, do_state)
        # A wait for a turn may be long: it comes when all GEMMs that do not need it are issued.
        if cutlass.const_expr(not self.kernel.adds_in_turns):
            self.sums.add_kept(tile)
        if cutlass.const_expr(has_next):
            self.pipes.q.consumer_wait(next_q)
            acc_s = self.gemms.issue_s(next_q)
        if cutlass.const_expr(self.kernel.adds_in_turns):
            self.sums.add_kept(tile)
        if cutlass.const_expr(has_next):
            self.scores.read_lse(next_q)
            self.scores.prepare(tile, *following)
            warpgroup.wait_group(1)
        else:
            warpgroup.wait_group(0)
        self.pipes.do.consumer_release(do_state)
        self.exchange.wait_for_ds(count)
        acc_dq = self.gemms.issue_dq(self.sums.piece)
        if cutlass.const_expr(has_next):
            warpgroup.wait_group(1)
            self.pipes.q.consumer_release(next_q)
            self.scores.exponentials(acc_s, tile, *following)
            order_after_words(cute.recast_tensor(acc_s, Int32))
            self.scores.take_p(acc_s, tile, *following)
        warpgroup.wait_group(0)
        self.exchange.free_ds()
        self.sums.keep(acc_dq, *block)
        if cutlass.const_expr(has_next):
            self.exchange.send_p(count + 1)
        else:
            self.sums.add_kept(tile)

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
        self.gemms.issue_dk(self.scores.rdS, q_state)
        self.exchange.wait_for_ds(count)
        acc_dq = self.gemms.issue_dq(self.sums.piece)
        if cutlass.const_expr(has_next):
            next_q = after(q_state)
            self.pipes.q.consumer_wait(next_q)
            self.pipes.do.consumer_wait(next_do)
            acc_dp = self.gemms.issue_dp(next_do)
        warpgroup.wait_group(2 if has_next else 1)
        self.pipes.q.consumer_release(q_state)
        warpgroup.wait_group(1 if has_next else 0)
        self.exchange.free_ds()
        self.sums.add_in_turn(acc_dq, tile, *block)
        if cutlass.const_expr(has_next):
            self.scores.read_delta(next_q)
            warpgroup.wait_group(0)
            self.pipes.do.consumer_release(next_do)
            self.exchange.receive_p(count + 1)
            self.make_ds(acc_dp, tile, *following)
            self.exchange.send_ds(self.scores.rdS, count + 1)

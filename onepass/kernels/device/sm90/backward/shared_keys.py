"""The Hopper backward with warpgroups that have the same 64 keys, for masks of blocks of 64 keys.

Each warpgroup has every other block of queries that a tile visits, with dQ of all of the tile's keys and sums of dK and
dV of its own. So nothing passes between warpgroups during the steps of a tile. At its end warpgroup 0 gets the sums of
dV and warpgroup 1 those of dK, through shared memory. Blocks are counted through all tiles of the thread block: the
producer loads them in the order of its buffers, and each warpgroup uses every other buffer.

With by_gradient (wide.py) P and dS of each block pass between warpgroups, which wait for each other. H200, a quarter of
16k tokens in random blocks of 64, head_dim 128: 462 TFLOP/s and 421.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...blocks.memory import wgmma
from ...blocks.tiles.named_barrier import NamedBarrier
from ..forward.tile import WARPGROUP, WARPS
from .consumer import BackwardConsumer
from .exchange import Exchange
from .inputs import Buffers, Inputs, Mmas, Thread
from .scores import BackwardScores
from .wide import PieceSums, WideGemms

VECTOR = 4  # values of float32
VALUES_AT_A_TIME = 32  # of a thread that pass between warpgroups: 64 columns


class OwnExchange(Exchange):
    """dS of a warpgroup in two buffers of its own."""

    def __init__(self, kernel, thread: Thread, mmas: Mmas, buffers: Buffers):
        super().__init__(kernel, thread, mmas, buffers, 0)
        self.ds_full = buffers.ds_full + kernel.ds_buffers * thread.wg

    def ds_tile(self, count: Int32) -> Int32:
        return self.kernel.ds_buffers * self.thread.wg + count % 2

    def send_ds(self, rdS: cute.Tensor, count: Int32):
        """Write dS. The buffer was read by pieces of dQ of the last step but one, for which all warps have waited."""
        cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + self.thread.wg, number_of_threads=WARPGROUP)
        super().send_ds(rdS, count)


class SharedKeysGemms(WideGemms):
    """The GEMMs of a warpgroup, with pieces of the dQ of its own dS."""

    def __init__(self, kernel, thread: Thread, mmas: Mmas, buffers: Buffers, exchange: Exchange):
        super().__init__(kernel, thread, mmas, buffers)
        self.exchange = exchange

    def issue_dq(self, count: Int32, piece: int = 0) -> cute.Tensor:
        acc_dq = cute.make_rmem_tensor(self.shape_dq, Float32)
        a, b = self.rdS_q[None, None, None, self.exchange.ds_tile(count)], self.rK_t[None, None, None, piece]
        wgmma.issue(self.mmas.dq, acc_dq, a, b, False)
        return acc_dq


class SharedKeysSums(PieceSums):
    """Sums of dQ to which a warp adds its rows of all pieces."""

    def share(self, tile, head: Int32, m_block: Int32) -> Int32:
        """The number of this warp's rows of the first piece."""
        number = self.kernel.m_block_number(self.accumulator, tile, head, self.kernel.query_block(tile, m_block))
        return self.share_of_piece(number, 0)

    def add_piece(self, acc_dq: cute.Tensor, share: Int32, piece: int):
        self.add_share(acc_dq, share + WARPS * piece)


class SharedKeysConsumer(BackwardConsumer):
    """dK and dV of 64 keys and every other block of queries in registers, and all of its dQ."""

    def make_parts(self, buffers: Buffers, inputs: Inputs):
        kernel, thread, mmas = self.kernel, self.thread, inputs.mmas
        self.exchange = OwnExchange(kernel, thread, mmas, buffers)
        self.gemms = SharedKeysGemms(kernel, thread, mmas, buffers, self.exchange)
        self.scores = BackwardScores(kernel, thread, inputs, buffers, first_key=0)
        self.sums = SharedKeysSums(kernel, thread, inputs)
        self.rows_of_keys = [(buffers.k[None, None, 0], 0), (buffers.v[None, None, 0], 0)]
        # how many of the next tile's blocks lie before this warpgroup's first one, 0 or 1
        self.others_first = cute.make_rmem_tensor((1,), Int32)
        self.others_first[0] = thread.wg
        # sums on their way: [value of a vector][thread][vector][warpgroup], where dS is during steps
        shape = (VECTOR, WARPGROUP, VALUES_AT_A_TIME // VECTOR, kernel.num_warpgroups)
        place = cute.recast_ptr(buffers.ds.iterator, dtype=Float32)
        self.passed = cute.make_tensor(place, cute.make_ordered_layout(shape, order=(0, 1, 2, 3)))

    # ---------------------------------------------------------------- the blocks of queries that this warpgroup has

    @property
    def stride(self) -> int:
        return self.kernel.num_warpgroups

    def num_steps(self, tile) -> Int32:
        """How many of a tile's blocks this warpgroup has. Called once for each tile, before `first_visit`."""
        before, count = self.others_first[0], super().num_steps(tile)
        own = count - before + 1 >> 1
        self.others_first[0] = before + 2 * own - count
        self.skipped = before
        return own

    @cute.jit
    def first_buffers(self, q_state, do_state) -> tuple:
        for _ in cutlass.range(self.thread.wg, unroll=1):
            q_state.advance()
            do_state.advance()
        return q_state, do_state

    @cute.jit
    def first_visit(self, tile) -> tuple:
        head, m_block = self.kernel.first_visit(tile)
        if self.skipped == 1:
            head, m_block = self.kernel.next_visit(tile, head, m_block)
        return head, m_block

    # ---------------------------------------------------------------- the end of a tile

    @cute.jit
    def store_gradients(self, tile, scratch: cute.Pointer):
        if self.thread.wg == 0:
            self.pass_sums(tile, self.gemms.acc_dk, self.gemms.acc_dv, 0)
            self.gradients.store_dv(tile, self.gemms.acc_dv, scratch)
        else:
            self.pass_sums(tile, self.gemms.acc_dv, self.gemms.acc_dk, 1)
            self.gradients.store_dk(tile, self.gemms.acc_dk, scratch)

    @cute.jit
    def pass_sums(self, tile, given: cute.Tensor, kept: cute.Tensor, wg: cutlass.Constexpr[int]):
        """Pass one of this warpgroup's sums to the other one, and add what comes from there to the other sum."""
        if tile.first < tile.last:
            for first in cutlass.range_constexpr(0, max(cute.size(given), cute.size(kept)), VALUES_AT_A_TIME):
                self.wait_for_all()  # what lay here has been read
                if cutlass.const_expr(first < cute.size(given)):
                    self.put(given, first, wg)
                self.wait_for_all()
                if cutlass.const_expr(first < cute.size(kept)):
                    self.add(kept, first, 1 - wg)
            self.wait_for_all()

    @cute.jit
    def put(self, sums: cute.Tensor, first: cutlass.Constexpr[int], wg: cutlass.Constexpr[int]):
        vector = cute.make_rmem_tensor((VECTOR,), Float32)
        for i in cutlass.range_constexpr(VALUES_AT_A_TIME // VECTOR):
            for c in cutlass.range_constexpr(VECTOR):
                vector[c] = sums[first + VECTOR * i + c]
            cute.autovec_copy(vector, self.passed[None, self.thread.number, i, wg])

    @cute.jit
    def add(self, sums: cute.Tensor, first: cutlass.Constexpr[int], wg: cutlass.Constexpr[int]):
        vector = cute.make_rmem_tensor((VECTOR,), Float32)
        for i in cutlass.range_constexpr(VALUES_AT_A_TIME // VECTOR):
            cute.autovec_copy(self.passed[None, self.thread.number, i, wg], vector)
            for c in cutlass.range_constexpr(VECTOR):
                sums[first + VECTOR * i + c] += vector[c]

    @cute.jit
    def wait_for_all(self):
        threads = WARPGROUP * self.kernel.num_warpgroups
        cute.arch.barrier(barrier_id=NamedBarrier.CONSUMERS, number_of_threads=threads)

"""Where a warp of the Hopper backward adds its share of each dQ: to sums that all thread blocks add to."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .....geometry.integers import ceil_div
from .....geometry.tile_scheduler import LANES
from ...blocks.memory.ptx import add_to_global
from ...blocks.memory.untraced import Untraced
from .inputs import Inputs, Thread
from .turns import TurnsOfWarp


class AtomicSums(Untraced):
    """The sums of dQ in global memory (Accumulator.dq), for one warp.

    A share of them is laid out as [vector][lane]: 16 bytes a thread, 512 contiguous bytes a warp.
    """

    def __init__(self, kernel, thread: Thread, inputs: Inputs):
        self.kernel, self.thread, self.accumulator = kernel, thread, inputs.accumulator
        self.turns = TurnsOfWarp(kernel.adds_in_turns, thread.wg, inputs.turns)

    @cute.jit
    def share(self, tile, head: Int32, m_block: Int32) -> Int32:
        """The number of this warp's share of a block of dQ."""
        number = self.kernel.m_block_number(self.accumulator, tile, head, self.kernel.query_block(tile, m_block))
        return number * self.kernel.config.consumer_warps + self.thread.warp

    @cute.jit
    def add(self, acc_dq: cute.Tensor, tile, head: Int32, m_block: Int32, share: Int32 | None = None):
        """Add this warp's share of a block. Args: share: its number, where it is known."""
        share = self.share(tile, head, m_block) if cutlass.const_expr(share is None) else share
        self.add_share(acc_dq, share)

    @cute.jit
    def end_tile(self, tile_end: cute.Pointer | None, wave: Int32):
        """One arrival of this warp: it adds nothing more to dQ of the thread block's tile number `wave`.

        It may come before other warps have ended the tile before, if this one has no steps, but not before all have
        ended the one before that: two barriers take turns.
        """
        if cutlass.const_expr(self.kernel.finishes_rows):
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(tile_end + (wave & 1))

    @cute.jit
    def repair(self, tile):
        """Nothing to do: what writes dq repairs it."""

    def address(self, acc_dq: cute.Tensor, share: Int32) -> cute.Pointer:
        """The address of this thread's first values in a share."""
        return self.accumulator.dq.iterator + (Int64(share) * (cute.size(acc_dq) * LANES) + self.thread.lane * 4)

    @cute.jit
    def add_share(self, acc_dq: cute.Tensor, share: Int32):
        start = self.address(acc_dq, share)
        common, most = self.column_blocks()
        for i in cutlass.range_constexpr(0, 4 * common, 4):
            add_to_global(start + i * LANES, [acc_dq[i + c] for c in range(4)])
        if cutlass.const_expr(common < most):
            if self.thread.wg == 0:
                for i in cutlass.range_constexpr(4 * common, 4 * most, 4):
                    add_to_global(start + i * LANES, [acc_dq[i + c] for c in range(4)])

    def column_blocks(self) -> tuple[int, int]:
        """How many blocks of 8 columns every warpgroup adds of its share of dQ, and how many warpgroup 0 adds.

        Columns past head_dim are zero, and are not added: with shares of columns, the last warpgroup's may be short.
        """
        count = self.kernel.dq_columns // 8
        first_columns = 0, 0 if self.kernel.is_dq_by_rows else self.kernel.dq_columns
        there = [min(count, ceil_div(self.kernel.true_head_dim - first, 8)) for first in first_columns]
        return max(0, there[1]), there[0]

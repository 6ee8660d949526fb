"""Where the dQ of a backward is summed, and the order of additions if it has to be the same in every run."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..memory.ptx import increment, look_at, wait_until_equal


class Accumulator(NamedTuple):
    """What belongs to blocks of query rows, numbered batch -> head -> block.

    Attributes:
        dq: (blocks, tile_m * head_dim) float32: sums of dq, each thread's values of a wgmma accumulator together. With
            private_dq the blocks are those of the query heads of one kv head, for each thread block.
        stats: (blocks, 2 * tile_m) float32: -lse of the rows, divided by softmax_scale, or with a softcap times log2(e)
            (-inf: neither keys nor a sink, or no row); then -delta.
        turns: (blocks * consumer warps,) int32, zero, None unless deterministic: how many tiles of keys have been added
            to a warp's part of a block.
        zeroed: (1 + batch * num_heads,) int32, zero, None unless zeros are written in the background: how many blocks
            have been drawn; at the first head of each group, how many of the group's are zero (backward_zeros.py).
        blocks_per_head: of all packed sequences together.
    """

    dq: cute.Tensor
    stats: cute.Tensor
    turns: cute.Tensor | None
    zeroed: cute.Tensor | None
    blocks_per_head: Int32
    num_heads: Int32


class AdditionTurns:
    """A warp that adds to parts of dQ, if the problem is deterministic after the tiles of keys before its own.

    A subclass has kernel, accumulator, lane, unfinished (of `begin_turns`) and dq_share: the number of its part of a dQ.
    """

    def begin_turns(self):
        # number of the dQ part (see Accumulator.turns) that has been added, but perhaps not completely; -1: none
        self.unfinished = cute.make_rmem_tensor((1,), Int32)
        self.unfinished[0] = Int32(-1)

    # A turn costs an answer of L2 (about 700 cycles) and a fence. The counter is looked at a GEMM or more before it is
    # needed, and one fence makes this warp's last addition known to others and theirs to it.

    @cute.jit
    def look_at_turn(self, tile, head: Int32, m_block: Int32) -> Int32:
        """How many tiles have added to a part of dQ, or a part of them (unless deterministic: 0)."""
        seen = Int32(0)
        if cutlass.const_expr(self.kernel.is_deterministic):
            seen = look_at(self.accumulator.turns.iterator + self.dq_share(tile, head, m_block))
        return seen

    @cute.jit
    def take_turn(self, tile, head: Int32, m_block: Int32, seen: Int32):
        """Wait until all tiles before this one have added to a part of dQ, unless any order will do.

        They have lower numbers than this tile, and thread blocks, which all run at once, take tiles in ascending order:
        of the unfinished tiles the first one never waits.

        Args: seen: what `look_at_turn` gave.
        """
        if cutlass.const_expr(self.kernel.is_deterministic):
            self.finish_dq()
            self.unfinished[0] = self.dq_share(tile, head, m_block)
            turn = self.kernel.turn_of(tile, m_block)
            wait_until_equal(self.accumulator.turns.iterator + self.unfinished[0], turn, seen)
            cute.arch.sync_warp()

    @cute.jit
    def finish_dq(self):
        """Give the turn to the next tile: after the additions of all lanes, which a step ago were on their way."""
        cute.arch.sync_warp()
        if self.lane == 0:
            cute.arch.fence_acq_rel_gpu()
            if self.unfinished[0] >= 0:
                increment(self.accumulator.turns.iterator + self.unfinished[0])
        self.unfinished[0] = Int32(-1)

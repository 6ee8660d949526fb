"""Where the dQ of a backward is summed, and the order of the additions if results must be the same in every run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..memory.ptx import increment, look_at, wait_until_equal
from ..memory.untraced import Untraced


class Accumulator(NamedTuple):
    """Tensors of the blocks of query rows, which are numbered batch -> head -> block.

    Attributes:
        dq: (blocks, tile_m * head_dim) float32: sums of dq, each thread's values of a wgmma accumulator together. With
            private_dq the blocks are those of the query heads of one kv head, for each thread block.
        stats: (blocks, 2 * tile_m) float32: -lse * log2(e) of the rows (-inf: neither keys nor a sink, or no row);
            then -delta.
        turns: (blocks * consumer warps,) int32, None unless deterministic: how many tiles of keys have been added
            to a warp's share of a block. On Hopper a warpgroup has one counter, that of its first warp.
        blocks_per_head: blocks of a head, of all packed sequences together.
        num_heads: query heads.
    """

    dq: cute.Tensor
    stats: cute.Tensor
    turns: cute.Tensor | None
    blocks_per_head: Int32
    num_heads: Int32


class AdditionTurns(Untraced):
    """The turns of a warp to add to a dQ: if the problem is deterministic, after the tiles of keys before its own.

    A turn costs an answer of L2 (about 700 cycles) and a fence. The counter is looked at a GEMM or more before it is
    needed, and one fence makes this warp's last addition known to others and theirs to it.

    Args:
        kernel: a KeyTiles.
        lane: this thread's in its warp.
        share: (tile, head, m_block) -> the number of this warp's share of a block of dQ, see Accumulator.turns.
    """

    def __init__(self, kernel: Any, accumulator: Accumulator, lane: Int32, share: Callable[..., Int32]):
        self.kernel, self.counts, self.lane, self.share = kernel, accumulator.turns, lane, share
        # the number of the share that has been added to, but perhaps not completely; -1: none
        self.unfinished = cute.make_rmem_tensor((1,), Int32)
        self.unfinished[0] = Int32(-1)

    @cute.jit
    def look(self, tile, head: Int32, m_block: Int32) -> Int32:
        """How many tiles have added to this warp's share of dQ, or fewer; 0 unless deterministic."""
        seen = Int32(0)
        if cutlass.const_expr(self.kernel.adds_in_turns):
            seen = look_at(self.counts.iterator + self.share(tile, head, m_block))
        return seen

    @cute.jit
    def take(self, tile, head: Int32, m_block: Int32, seen: Int32):
        """Wait until all tiles before this one have added to this warp's share of dQ, unless any order will do.

        Those tiles have lower numbers than this one, and thread blocks, which all run at once, take tiles in ascending
        order: the first of the unfinished tiles never waits.

        Args: seen: what `look` returned.
        """
        if cutlass.const_expr(self.kernel.adds_in_turns):
            self.finish()
            self.unfinished[0] = self.share(tile, head, m_block)
            turn = self.kernel.turn_of(tile, m_block)
            wait_until_equal(self.counts.iterator + self.unfinished[0], turn, seen)
            cute.arch.sync_warp()

    @cute.jit
    def finish(self):
        """Give the turn to the next tile, after the additions of all lanes, which were issued a step ago."""
        if cutlass.const_expr(self.kernel.adds_in_turns):
            cute.arch.sync_warp()
            if self.lane == 0:
                cute.arch.fence_acq_rel_gpu()
                if self.unfinished[0] >= 0:
                    increment(self.counts.iterator + self.unfinished[0])
            self.unfinished[0] = Int32(-1)

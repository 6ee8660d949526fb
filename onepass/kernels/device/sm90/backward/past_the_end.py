"""What buffers of the Hopper backward hold past the end of a sequence.

Past the end P is 0, but 0 * NaN = NaN. Where dense tensors end there themselves, TMA fills in zeros. Elsewhere all
warpgroups write the same zeros, so they need not wait for each other; a warpgroup that reads rows before they are
cleared masks what it computes from them.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...blocks.memory.clear import clear_rows
from ...blocks.memory.untraced import Untraced
from ...blocks.tiles.named_barrier import NamedBarrier
from ..forward.tile import WARPGROUP
from .inputs import BackwardPipes, Buffers, Thread


class PastTheEnd(Untraced):
    """Overwrites rows past the end of a sequence with zeros, before a GEMM of this warpgroup reads them."""

    def __init__(self, kernel, thread: Thread, pipes: BackwardPipes, buffers: Buffers):
        self.kernel, self.thread, self.pipes, self.sQ, self.sdO = kernel, thread, pipes, buffers.q, buffers.do

    @cute.jit
    def clear_keys(self, tile, row_blocks: list):
        """Clear rows of K or V.

        Args: row_blocks: 64 rows each, which have arrived, with the number of the first key among those of the tile.
        """
        if cutlass.const_expr(self.kernel.has_garbage):
            end = tile.geometry.seqlen_k - tile.n_block * self.kernel.tile_n
            if end < self.kernel.tile_n:
                for rows, start in row_blocks:
                    clear_rows(rows, end - start, self.thread.number, WARPGROUP)
                self._make_visible()

    @cute.jit
    def clear_queries(self, tile, m_block: Int32, q_state, do_state):
        """Clear rows of a block of Q and of dO, once they arrive; S of the block is masked.

        Args: q_state: None where this warpgroup's next GEMMs do not read Q.
        """
        if cutlass.const_expr(self.kernel.is_packed):
            end = tile.geometry.seqlen_q - self.kernel.query_block(tile, m_block) * self.kernel.tile_m
            if end < self.kernel.tile_m:
                if cutlass.const_expr(q_state is not None):
                    self.pipes.q.consumer_wait(q_state)
                    clear_rows(self.sQ[None, None, q_state.index], end, self.thread.number, WARPGROUP)
                self.pipes.do.consumer_wait(do_state)
                clear_rows(self.sdO[None, None, do_state.index], end, self.thread.number, WARPGROUP)
                self._make_visible()

    @cute.jit
    def _make_visible(self):
        """Make what all threads of this warpgroup have cleared visible to its GEMMs."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + self.thread.wg, number_of_threads=WARPGROUP)

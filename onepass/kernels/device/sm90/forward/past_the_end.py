"""What buffers of V hold past the end of a sequence.

P is 0 there, but 0 * NaN = NaN. In a dense problem the tensor V itself ends there, and TMA fills in zeros.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from ...blocks.memory.clear import clear_keys, clear_rows
from ...blocks.memory.untraced import Untraced
from ...blocks.softmax.modifiers import Modifiers
from ...blocks.tiles.named_barrier import NamedBarrier
from .inputs import Buffers, Thread
from .tile import WARPGROUP, Pipes, Tile


class PastTheEnd(Untraced):
    """Overwrites V past the end of a sequence with zeros, before a GEMM of this warpgroup reads it.

    All warpgroups write the same zeros, so they need not wait for each other.
    """

    def __init__(self, kernel, thread: Thread, pipes: Pipes, buffers: Buffers, modifiers: Modifiers | None):
        self.kernel, self.thread, self.pipes, self.sV = kernel, thread, pipes, buffers.v
        self.modifiers = modifiers

    @cute.jit
    def clear_values(self, tile: Tile, v_state):
        """Clear rows of a tile's first block of V."""
        if cutlass.const_expr(self.kernel.has_garbage):
            last = tile.last
            if cutlass.const_expr(self.kernel.has_lists):
                last = self.kernel.key_block(tile, tile.last - 1, self.modifiers) + 1
            if last * self.kernel.tile_n > tile.geometry.seqlen_k:
                state = v_state.clone()
                for score_buffer in cutlass.range_constexpr(self.kernel.score_buffers - 1, -1, -1):
                    self.pipes.v.consumer_wait(state)
                    start = (last - 1) * self.kernel.tile_n
                    first = tile.geometry.seqlen_k - start - score_buffer * self.kernel.buffer_n
                    clear = clear_keys if self.kernel.is_fp8 else clear_rows
                    for i in cutlass.range_constexpr(self.kernel.num_halves):
                        buffer = self.kernel.num_halves * state.index + i
                        clear(self.sV[None, None, buffer], first, self.thread.number, WARPGROUP)
                    state.advance()
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + self.thread.wg, number_of_threads=WARPGROUP)

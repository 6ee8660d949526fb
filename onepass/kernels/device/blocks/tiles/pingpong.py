"""Pingpong (FlashAttention-3, arXiv:2407.08608, section 3.1): warpgroups issue their GEMMs in turns."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..memory.untraced import Untraced
from .named_barrier import NamedBarrier

THREADS = 2 * 128  # threads of two warpgroups: one waits, the one before it arrives


class Turns(Untraced):
    """A consumer warpgroup that may take turns. A subclass sets the attributes below."""

    takes_turns: bool  # known at compile time
    wg: Int32  # number of this warpgroup among the consumers
    num_warpgroups: int  # consumer warpgroups

    @cute.jit
    def prime_turns(self):
        """Warpgroup 0 goes first."""
        if cutlass.const_expr(self.takes_turns):
            if self.wg == self.num_warpgroups - 1:
                self.pass_turn()

    @cute.jit
    def wait_for_turn(self):
        if cutlass.const_expr(self.takes_turns):
            cute.arch.barrier(barrier_id=NamedBarrier.PINGPONG + self.wg, number_of_threads=THREADS)

    @cute.jit
    def pass_turn(self):
        if cutlass.const_expr(self.takes_turns):
            following = self.wg + 1 if self.wg < self.num_warpgroups - 1 else Int32(0)
            cute.arch.barrier_arrive(barrier_id=NamedBarrier.PINGPONG + following, number_of_threads=THREADS)

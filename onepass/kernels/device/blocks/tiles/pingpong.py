"""Pingpong (FlashAttention-3, arXiv:2407.08608, section 3.1): warpgroups issue their GEMMs in turns."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..memory.untraced import Untraced
from .named_barrier import NamedBarrier

THREADS = 2 * 128  # threads of two warpgroups: one waits, the one before it arrives


class Pingpong(Untraced):
    """The turns in which a consumer warpgroup issues its GEMMs, if it takes any.

    Args:
        wg, num_warpgroups: its number among the consumer warpgroups, and how many there are.
    """

    def __init__(self, are_taken: bool, wg: Int32, num_warpgroups: int):
        self.are_taken, self.wg, self.num_warpgroups = are_taken, wg, num_warpgroups

    @cute.jit
    def begin(self):
        """Warpgroup 0 goes first."""
        if cutlass.const_expr(self.are_taken):
            if self.wg == self.num_warpgroups - 1:
                self.pass_on()

    @cute.jit
    def wait(self):
        if cutlass.const_expr(self.are_taken):
            cute.arch.barrier(barrier_id=NamedBarrier.PINGPONG + self.wg, number_of_threads=THREADS)

    @cute.jit
    def pass_on(self):
        if cutlass.const_expr(self.are_taken):
            following = self.wg + 1 if self.wg < self.num_warpgroups - 1 else Int32(0)
            cute.arch.barrier_arrive(barrier_id=NamedBarrier.PINGPONG + following, number_of_threads=THREADS)

"""Sums and counts over the 32 lanes of a warp, all of which must take part."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Numeric

from .....geometry.tile_scheduler import LANES


@cute.jit
def inclusive_sum(x: Int32) -> Int32:
    """The sum of x over the lanes up to and including this one."""
    lane = cute.arch.lane_idx()
    for i in cutlass.range_constexpr(LANES.bit_length() - 1):
        below = cute.arch.shuffle_sync_up(x, offset=1 << i)
        x += below if lane >= (1 << i) else Int32(0)
    return x


@cute.jit
def count(condition: Boolean) -> Int32:
    """The number of lanes in which the condition holds."""
    return Int32(cute.arch.popc(cute.arch.vote_ballot_sync(condition)))


def broadcast(x: Numeric, lane: Int32) -> Numeric:
    """x of the given lane, in all lanes."""
    return cute.arch.shuffle_sync(x, lane)

"""The zeros that dQ is added to, written in the background by warps that have nothing else to do.

Written before the main kernel, the zeros would be half of the bytes that are moved there (134 of 268 MB for 16k rows of
2048 columns); in the main kernel they disappear behind the GEMMs. Blocks of the accumulator are drawn from a counter in
ascending order, the order in which tiles of keys need them. A count for each kv head says how many of its blocks are
zero, and a tile waits for all blocks of its head. A warp that has drawn a block is running and waits for nobody, so
that no launch depends on a thread block that has not begun.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .....geometry.tile_scheduler import LANES
from ...blocks.memory import warp
from ...blocks.memory.ptx import draw, increment, wait_until_equal

FIRST_WARP = 2  # the first of these warps in the producer's warpgroup; the last one is its last warp


@cute.jit
def zero_blocks(accumulator, group: cutlass.Constexpr[int]):
    """Write zeros to blocks of accumulator.dq until all have been drawn. For one warp."""
    lane = cute.arch.lane_idx()
    zeros = cute.make_rmem_tensor((4,), Float32)
    zeros.fill(0.0)
    num_blocks, vectors = cute.size(accumulator.dq, mode=[0]), cute.size(accumulator.dq, mode=[1]) // 4
    block = _draw_block(accumulator, lane)
    while block < num_blocks:
        target = cute.flat_divide(accumulator.dq[block, None], (4,))
        for i in cutlass.range(vectors // LANES, unroll=8):
            cute.autovec_copy(zeros, target[None, i * LANES + lane])
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.fence_acq_rel_gpu()
            head = block // accumulator.blocks_per_head  # numbered over all batch entries
            increment(_count(accumulator, head // group * group))
        block = _draw_block(accumulator, lane)


@cute.jit
def wait_for_zeros(accumulator, entry: Int32, first_head: Int32, group: cutlass.Constexpr[int]):
    """Wait until the blocks of the group of query heads that begins with first_head are zero."""
    if cutlass.const_expr(accumulator.zeroed is not None):
        count = _count(accumulator, entry * accumulator.num_heads + first_head)
        wait_until_equal(count, accumulator.blocks_per_head * group, Int32(-1))


def _count(accumulator, head: Int32) -> cute.Pointer:
    """The counter of the group that begins with this head, numbered over all batch entries."""
    return accumulator.zeroed.iterator + 1 + head


@cute.jit
def _draw_block(accumulator, lane: Int32) -> Int32:
    block = Int32(0)
    if lane == 0:
        block = draw(accumulator.zeroed.iterator)
    return cute.arch.make_warp_uniform(warp.broadcast(block, 0))

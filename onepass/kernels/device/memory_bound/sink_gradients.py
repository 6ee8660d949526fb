"""The gradients of sinks: a sink is a key of value 0, so dsink = -sum over rows of p * delta, p = exp(sink - lse).

A thread block has a query head, and goes through what a backward has left for all its rows, see dq_sums.Accumulator.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from ....geometry.tile_scheduler import LANES
from ...arguments import SinkGradientsArguments
from ..blocks.memory.row_stats import LOG2_E
from ..entry import takes

THREADS = 512


class SinkGradients:
    """dsinks of statistics of rows."""

    def __init__(self, tile_m: int):
        self.tile_m = tile_m

    @takes(SinkGradientsArguments)
    def __call__(self, a: SinkGradientsArguments, stream: cuda.CUstream):
        divisor = cute.FastDivmodDivisorV2(a.blocks_per_head)
        self.kernel(a.stats, a.sinks, a.dsinks, divisor, a.blocks_per_head).launch(
            grid=[a.sinks.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        stats: cute.Tensor,
        sinks: cute.Tensor,
        dsinks: cute.Tensor,
        divisor: cute.FastDivmodDivisorV2,
        blocks_per_head: Int32,
    ):
        thread, head, num_heads = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        per_block = self.tile_m // 4  # vectors of four rows
        num_blocks = stats.shape[0] // num_heads  # of this head
        sink = sinks[head] * LOG2_E
        lse, delta = (cute.make_rmem_tensor((4,), Float32) for _ in range(2))
        total = Float32(0.0)
        for i in cutlass.range(thread, num_blocks * per_block, THREADS, unroll=4):
            entry, block = divmod(i // per_block, divisor)
            number = (entry * num_heads + head) * blocks_per_head + block
            vectors = cute.flat_divide(stats[number, None], (4,))
            cute.autovec_copy(vectors[None, i % per_block], lse)
            cute.autovec_copy(vectors[None, per_block + i % per_block], delta)
            for c in cutlass.range_constexpr(4):
                total += cute.math.exp2(sink + lse[c], fastmath=True) * delta[c]
        sums = SmemAllocator().allocate_tensor(Float32, cute.make_layout((THREADS // LANES,)), 16)
        total = cute.arch.warp_reduction_sum(total)
        if thread % LANES == 0:
            sums[thread // LANES] = total
        cute.arch.sync_threads()
        if thread < LANES:
            total = sums[thread] if thread < THREADS // LANES else Float32(0.0)
            total = cute.arch.warp_reduction_sum(total)
            if thread == 0:
                dsinks[head] = total

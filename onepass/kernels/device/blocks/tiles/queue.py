"""Where a thread block gets its next tile: from a formula, or from a queue that all thread blocks draw from.

The queue is one counter in global memory. In each thread block a scheduler thread draws the next number and puts it
into shared memory, from where the producer and the consumers take it:

    full     the scheduler has written the number                                                       1 arrival
    empty    every consumer warp has read the one before, and the producer wants the next one     1 arrival a warp
             (warps that transpose V, where there are any, count as consumers)

In a cluster the scheduler of the first thread block draws for all of them: every warp of the cluster arrives at its
barrier `empty`, and it sends the number to all of them (st.async).

When to draw: numbers that are drawn early unbalance the work. With the longest tiles first, a draw at the start of a
tile leaves the busiest of 132 thread blocks 2 to 11 percent above the mean in the causal cases of the FlashAttention-3
paper (head_dim 128 to 256, tests/geometry/test_tile_scheduler.py); a draw 4 key blocks before its end, 0 to 3 percent.
The producer asks when it has DRAW_AHEAD blocks left to load.

The first tile of thread block c is number c; draw x is number num_ctas + x. A thread block stops at its first number
past the end, so a launch draws num_tiles times in all: num_tiles - num_ctas tiles and num_ctas ends. `atom.inc` wraps
at num_tiles - 1, which leaves the counter at 0 for the next launch of the stream: no memset, no host, any graph.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .....geometry import tile_scheduler
from ..memory.ptx import arrive_at, emit, send_word
from ..memory.untraced import Untraced

DRAW_AHEAD = 2  # key blocks: a draw takes about 1 us, a block of keys at least as long


class TileQueue(Untraced):
    """A thread block's view of the order of tiles.

    Args:
        cluster_size: thread blocks that take a number together.
        num_tiles: numbers from this one on are no tiles.
        counter: one Int32 in global memory, 0 between launches; None: the numbers of `tile_scheduler.tile_number`.
        in_a_row, forwards: arguments of `tile_number`; only without a counter.
        num_readers: warps that take numbers, without the producer: consumers, and those that transpose V.
    """

    def __init__(
        self, smem, num_tiles, counter, num_readers: int, cluster_size: int = 1, in_a_row=None, forwards: bool = False
    ):
        """Initialize the barriers by the calling threads; `mbarrier_init_fence` and a sync must follow."""
        self.num_tiles, self.counter, self.in_a_row, self.cluster_size = num_tiles, counter, in_a_row, cluster_size
        self.forwards = forwards
        self.index, self.count = (i[0] // cluster_size for i in (cute.arch.block_idx(), cute.arch.grid_dim()))
        if counter is not None:
            self.slot = smem.allocate_tensor(Int32, cute.make_layout((1,)), 8)
            self.full, self.empty = (smem.allocate_array(cutlass.Int64, 1) for _ in range(2))
            self._initialize((num_readers + 1) * cluster_size)

    @cute.jit
    def _initialize(self, num_readers: cutlass.Constexpr[int]):
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.mbarrier_init(self.full, 1)
            cute.arch.mbarrier_init(self.empty, num_readers)

    @cute.jit
    def first(self) -> Int32:
        """The first number of this thread block, for its consumers; the producer only reads it."""
        self.want_next()
        return self.start()

    def start(self) -> Int32:
        """The first number of this thread block, for a warp that is not counted as a consumer."""
        return self.index if self.in_a_row is None else self.index * self.in_a_row

    @cute.jit
    def take(self, wave: Int32, phase: Int32 | None = None) -> Int32:
        """The number of wave 1, 2, ...: called once a wave by every warp. A consumer calls `want_next` afterwards.

        Args: phase: (wave - 1) & 1, from a caller that has it.
        """
        number = Int32(0)
        if cutlass.const_expr(self.counter is None):
            number = tile_scheduler.tile_number(self.index, wave, self.count, self.in_a_row, self.forwards)
        else:
            cute.arch.mbarrier_wait(self.full, (wave - 1) & 1 if cutlass.const_expr(phase is None) else phase)
            number = cute.arch.make_warp_uniform(self.slot[0])
        return number

    @cute.jit
    def want_next(self):
        """One arrival of this warp: it has read its number, which may be overwritten, and wants the next one."""
        if cutlass.const_expr(self.counter is not None):
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                if cutlass.const_expr(self.cluster_size > 1):
                    arrive_at(self.empty, 0)
                else:
                    cute.arch.mbarrier_arrive(self.empty)

    @cute.jit
    def fill(self):
        """The scheduler's loop, for one thread of the (first) thread block."""
        number, wave = self.index, Int32(1)
        while number < self.num_tiles:
            number = self.fill_wave(wave)
            wave += 1

    @cute.jit
    def fill_wave(self, wave: Int32) -> Int32:
        """Draw the number of wave 1, 2, ..., and hand it out. Returns: the number."""
        cute.arch.mbarrier_wait(self.empty, (wave - 1) & 1)
        number = self.count + self._draw()
        if cutlass.const_expr(self.cluster_size > 1):
            for rank in cutlass.range_constexpr(self.cluster_size):
                send_word(self.slot.iterator, number, self.full, rank)
        else:
            self.slot[0] = number
            cute.arch.mbarrier_arrive(self.full)
        return number

    @cute.jit
    def _draw(self) -> Int32:
        return emit(
            "atom.relaxed.gpu.global.inc.u32 {$w0}, [{$r0}], {$r1};",
            [self.counter.iterator.toint(), self.num_tiles - 1],
            [Int32],
        )

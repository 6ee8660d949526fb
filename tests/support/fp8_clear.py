"""A kernel that puts V with its keys last into shared memory, clears keys there, and stores what is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from onepass.kernels.device.blocks.memory.clear import clear_keys
from onepass.kernels.device.blocks.memory.layouts import smem_tiles

THREADS = 32


@dataclass(frozen=True)
class Clear:
    rows: int
    keys: int

    def trace(self) -> tuple[Callable, tuple]:
        tile = make_fake_tensor(Float8E4M3FN, (self.rows, self.keys), (self.keys, 1), assumed_align=16)
        first = make_fake_tensor(cutlass.Int32, (1,), (1,), assumed_align=4)
        return self, (tile, first)

    @cute.jit
    def __call__(self, mV: cute.Tensor, mFirst: cute.Tensor):
        self.kernel(mV, mFirst, smem_tiles(self.rows, self.keys, 1, Float8E4M3FN)).launch(
            grid=[1, 1, 1], block=[THREADS, 1, 1]
        )

    @cute.kernel
    def kernel(self, mV: cute.Tensor, mFirst: cute.Tensor, layout: cute.ComposedLayout):
        thread = cute.arch.thread_idx()[0]
        smem = SmemAllocator()
        sV = smem.allocate_tensor(Float8E4M3FN, layout.outer, 1024, layout.inner)[None, None, 0]
        vectors = cute.zipped_divide(mV, (1, 16)), cute.zipped_divide(sV, (1, 16))
        registers = cute.make_rmem_tensor((16,), Float8E4M3FN)
        count = self.rows * self.keys // 16
        for source, target in (vectors, vectors[::-1]):
            for i in cutlass.range(thread, count, THREADS, unroll=1):
                row, run = i // (self.keys // 16), i % (self.keys // 16)
                cute.autovec_copy(source[(0, None), (row, run)], registers)
                cute.autovec_copy(registers, target[(0, None), (row, run)])
            cute.arch.sync_threads()
            if cutlass.const_expr(source is vectors[0]):
                clear_keys(sV, mFirst[0], thread, THREADS)
                cute.arch.sync_threads()

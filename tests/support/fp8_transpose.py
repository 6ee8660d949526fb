"""A kernel that puts rows of V into shared memory, transposes them there like the Hopper forward, and stores V."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from onepass.kernels.device.blocks.memory.layouts import smem_tiles
from onepass.kernels.device.sm90.forward.transposer import WARPS, Transposer

THREADS = 32 * WARPS


@dataclass(frozen=True)
class Transpose:
    keys: int
    columns: int
    ahead: int

    def trace(self) -> tuple[Callable, tuple]:
        shapes = (self.keys, self.columns), (self.columns, self.keys)
        return self, tuple(make_fake_tensor(Float8E4M3FN, s, (s[1], 1), assumed_align=16) for s in shapes)

    @cute.jit
    def __call__(self, mV: cute.Tensor, mOut: cute.Tensor):
        layouts = (smem_tiles(*t.shape, 1, Float8E4M3FN) for t in (mV, mOut))
        self.kernel(mV, mOut, *layouts).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])

    @cute.kernel
    def kernel(
        self, mV: cute.Tensor, mOut: cute.Tensor, raw_layout: cute.ComposedLayout, v_layout: cute.ComposedLayout
    ):
        smem = SmemAllocator()
        sRaw, sV = (
            smem.allocate_tensor(Float8E4M3FN, layout.outer, 1024, layout.inner) for layout in (raw_layout, v_layout)
        )
        transposer = Transposer(self.keys, self.columns, sRaw.iterator.toint(), sV.iterator.toint(), self.ahead)
        self.copy(mV, sRaw[None, None, 0])
        cute.arch.sync_threads()
        transposer.transpose(transposer.source, transposer.target)
        cute.arch.sync_threads()
        self.copy(sV[None, None, 0], mOut)

    @cute.jit
    def copy(self, source: cute.Tensor, target: cute.Tensor):
        vectors = cute.zipped_divide(source, (1, 16)), cute.zipped_divide(target, (1, 16))
        registers = cute.make_rmem_tensor((16,), Float8E4M3FN)
        runs = cute.size(source, mode=[1]) // 16
        for i in cutlass.range(cute.arch.thread_idx()[0], self.keys * self.columns // 16, THREADS, unroll=1):
            cute.autovec_copy(vectors[0][(0, None), (i // runs, i % runs)], registers)
            cute.autovec_copy(registers, vectors[1][(0, None), (i // runs, i % runs)])

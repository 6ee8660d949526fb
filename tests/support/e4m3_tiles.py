"""A kernel that puts e4m3 rows into shared memory, converts them there like the Hopper forward, and stores them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float8E4M3FN, Int32
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from onepass.kernels.device.blocks.memory.layouts import smem_tiles
from onepass.kernels.device.sm90.forward.converter import Converter
from onepass.kernels.device.sm90.forward.tile import WARPGROUP
from onepass.kernels.launch.arguments import element_type

TILES = 2  # in each of both buffers


@dataclass(frozen=True)
class Convert:
    keys: int
    columns: int
    dtype: torch.dtype

    def trace(self) -> tuple[Callable, tuple]:
        shape = TILES * self.keys, self.columns
        kinds = Float8E4M3FN, element_type(self.dtype)
        tensors = (make_fake_tensor(kind, shape, (self.columns, 1), assumed_align=16) for kind in kinds)
        return self, (*tensors, Int32(0))

    @cute.jit
    def __call__(self, rows: cute.Tensor, out: cute.Tensor, signs: Int32):
        layouts = (smem_tiles(self.keys, self.columns, TILES, t.element_type) for t in (rows, out))
        self.kernel(rows, out, signs, *layouts).launch(grid=[1, 1, 1], block=[WARPGROUP, 1, 1])

    @cute.kernel
    def kernel(
        self,
        rows: cute.Tensor,
        out: cute.Tensor,
        signs: Int32,
        raw_layout: cute.ComposedLayout,
        layout: cute.ComposedLayout,
    ):
        smem = SmemAllocator()
        raw = smem.allocate_tensor(rows.element_type, raw_layout.outer, 1024, raw_layout.inner)
        target = smem.allocate_tensor(out.element_type, layout.outer, 1024, layout.inner)
        converter = Converter(self.keys, self.columns, out.element_type, raw, target)
        for i in cutlass.range_constexpr(TILES):
            self.copy(cute.local_tile(rows, (self.keys, self.columns), (i, 0)), raw[None, None, i])
        cute.arch.sync_threads()
        # a tile of one buffer goes to another place in the other one
        converter.convert(Int32(0), Int32(1), None)
        converter.convert(Int32(1), Int32(0), signs)
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(TILES):
            self.copy(target[None, None, 1 - i], cute.local_tile(out, (self.keys, self.columns), (i, 0)))

    @cute.jit
    def copy(self, source: cute.Tensor, target: cute.Tensor):
        vectors = cute.zipped_divide(source, (1, 8)), cute.zipped_divide(target, (1, 8))
        registers = cute.make_rmem_tensor((8,), source.element_type)
        runs = self.columns // 8
        for i in cutlass.range(cute.arch.thread_idx()[0], self.keys * runs, WARPGROUP, unroll=1):
            cute.autovec_copy(vectors[0][(0, None), (i // runs, i % runs)], registers)
            cute.autovec_copy(registers, vectors[1][(0, None), (i // runs, i % runs)])

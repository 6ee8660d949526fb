"""A kernel with the softmax of the FP8 forward alone: scores come from memory, each thread sums P V for one column.

One warp stands for a warp of a consumer warpgroup: thread t has the rows t // 4 and t // 4 + 8, and of every 8 keys the
keys 2 (t % 4) and 2 (t % 4) + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from onepass.kernels.device.blocks.memory.e4m3 import pair_as_floats
from onepass.kernels.device.blocks.softmax import scaled as fp8
from onepass.kernels.device.blocks.softmax.online import ScoreFactors

THREADS = 32


@dataclass(frozen=True)
class Softmax:
    """Attributes:
    tiles: the number of tiles, some of which are masked.
    threshold: the rescale_threshold of ForwardConfigSm90.
    before: tiles of the head that are not visited.
    apart: P V of a tile is added to O after the softmax of the next one, as with two_level_sums.
    p_codes: that of ForwardConfigSm90; the threads then sum P V of the rounded P.
    """

    tile_n: int
    tiles: int
    masked: tuple[int, ...]
    threshold: float
    has_sink: bool = False
    has_softcap: bool = False
    before: int = 0
    apart: bool = False
    p_codes: bool = False

    def trace(self) -> tuple[Callable, tuple]:
        blocks = -(-self.tile_n * (self.before + self.tiles) // 64)

        def tensor(kind, *shape: int):
            strides = [1]
            for size in shape[:0:-1]:
                strides.insert(0, strides[0] * size)
            return make_fake_tensor(kind, shape, tuple(strides), assumed_align=16)

        arguments = (
            tensor(Float32, self.tiles, THREADS, 2, self.tile_n // 4),
            tensor(Float32, self.tiles, THREADS, self.tile_n // 4),
            tensor(Float32, 16),
            tensor(Float32, blocks),
            tensor(Float32, blocks),
            tensor(Float32, THREADS, 2),
            tensor(Float32, THREADS, 2),
            tensor(Int32, self.tiles, THREADS, self.tile_n // 8),
        )
        return self, arguments

    @cute.jit
    def __call__(
        self,
        mS: cute.Tensor,  # scores, -inf where hidden
        mV: cute.Tensor,  # V of each thread's keys, before its scale
        mQ_scale: cute.Tensor,
        mK_scale: cute.Tensor,
        mV_scale: cute.Tensor,
        mO: cute.Tensor,  # sums over each thread's keys
        mLSE: cute.Tensor,
        mP: cute.Tensor,  # e4m3, in the order of registers
    ):
        self.kernel(mS, mV, mQ_scale, mK_scale, mV_scale, mO, mLSE, mP).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])

    @cute.kernel
    def kernel(self, mS, mV, mQ_scale, mK_scale, mV_scale, mO, mLSE, mP):
        thread = cute.arch.thread_idx()[0]
        columns = self.tile_n // 4
        factors = ScoreFactors(Float32(SCALE_LOG2), Float32(TANH_SCALE) if self.has_softcap else None)
        softmax = fp8.ScaledSoftmax(factors, self.threshold, self.tile_n, p_codes=self.p_codes)
        keys = fp8.KeyScales(self.tile_n)
        s = cute.make_rmem_tensor((2, columns), Float32)
        acc_o = cute.make_rmem_tensor((2, 1), Float32)
        acc_o.fill(0.0)
        acc_step = cute.make_rmem_tensor((2, 1), Float32)
        acc_step.fill(0.0)
        words = cute.make_rmem_tensor((4, 2, 2, 1, columns // 8), cutlass.Float8E4M3FN)
        target = cute.make_tensor(words.iterator, cute.make_layout(((4, 2, 2), 1, columns // 8)))
        row_scale = cute.make_rmem_tensor((2,), Float32)
        for r in cutlass.range_constexpr(2):
            row_scale[r] = softmax.scale_of_row(mQ_scale[thread // 4 + 8 * r])
        for tile in cutlass.range_constexpr(self.tiles):
            n_block = self.tiles - 1 - tile
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(columns):
                    s[r, c] = mS[n_block, thread, r, c]
            if cutlass.const_expr(tile == 0):
                keys.load(mK_scale, mV_scale, Int32(0), Int32(self.before + n_block))
            keys.take(mK_scale, mV_scale, Int32(0), Int32(self.before + n_block), tile == 0)
            softmax.take_scales(row_scale, keys, Int32(self.before + n_block))
            if cutlass.const_expr(self.has_softcap):
                softmax.soft_cap(s)
                for r in cutlass.range_constexpr(2):  # a mask comes afterwards
                    for c in cutlass.range_constexpr(columns):
                        s[r, c] = mS[n_block, thread, r, c] if mS[n_block, thread, r, c] == -Float32.inf else s[r, c]
            if cutlass.const_expr(tile == 0):
                softmax.begin(s)
            elif cutlass.const_expr(self.threshold > 0):
                softmax.update_lazily(s, n_block in self.masked, None if self.apart else acc_o)
            else:
                softmax.update(s)
                softmax.rescale(acc_o)
            if cutlass.const_expr(self.apart):
                for r in cutlass.range_constexpr(2):
                    acc_o[r, 0] = acc_o[r, 0] + acc_step[r, 0]
                    acc_step[r, 0] = Float32(0.0)
                softmax.rescale_lazily(acc_o)
            for r in cutlass.range_constexpr(2):
                acc = acc_step if self.apart else acc_o
                if cutlass.const_expr(self.p_codes):
                    for c in cutlass.range_constexpr(0, columns, 2):
                        p = pair_as_floats(softmax.p[r, c // 4] >> 8 * (c % 4))
                        for i in cutlass.range_constexpr(2):
                            acc[r, 0] = acc[r, 0] + p[i] * mV[n_block, thread, c + i]
                else:
                    for c in cutlass.range_constexpr(columns):
                        acc[r, 0] = acc[r, 0] + s[r, c] * mV[n_block, thread, c]
            if cutlass.const_expr(self.p_codes):
                fp8.copy_p(softmax.p, target)
            else:
                fp8.pack_p(s, target)
            packed = cute.recast_tensor(words, Int32)
            for i in cutlass.range_constexpr(columns // 2):
                mP[n_block, thread, i] = packed[i]
        for r in cutlass.range_constexpr(2):
            sink = Float32(SINK) if cutlass.const_expr(self.has_sink) else None
            acc_o[r, 0] = acc_o[r, 0] + acc_step[r, 0]
            weight, lse = fp8.finish(softmax.row_max[r], softmax.row_sum[r], softmax.exponent, sink)
            mO[thread, r] = acc_o[r, 0] * weight
            mLSE[thread, r] = lse


SCALE_LOG2, TANH_SCALE, SINK = 0.37, 0.11, 1.5

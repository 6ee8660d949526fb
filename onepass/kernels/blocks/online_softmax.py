"""The online softmax on wgmma accumulators: the recurrence of `onepass/tiled/online_softmax.py`, in registers.

A thread holds two rows of the tile (8 apart) and a quarter of their columns; the other quarters are in the three other
lanes of its quad. Maxima are reduced over the quad at once, sums only at the end.

Scores stay unscaled: with scale_log2 = softmax_scale * log2(e), exp(scale * (s - m)) = exp2(s * scale_log2 -
m * scale_log2), one FMA and one exponential a score.

The reference m need not be the maximum (any value gives the same quotient); it only has to keep exp2 in range. With a
`rescale_threshold` it is left behind until a row's maximum has outgrown it by that many powers of two, which saves
most rescalings of acc_o. Exactness is kept: row_sum and acc_o refer to the same m, and the final division cancels it.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .bundle import Bundle
from .ptx import exp2_on_fma_pipe

ROWS = 2  # rows of a thread
LN2 = math.log(2.0)


class OnlineSoftmax(Bundle):
    """Running reference and sum of a thread's two rows.

    Args:
        scale_log2: softmax_scale * log2(e), positive.
        rescale_threshold: powers of two that a row maximum may outgrow its reference by; 0 = always follow it.
        exp2_fma_period: every so many-th exponential is computed on the FMA pipe; 0 = none.
    """

    def __init__(self, scale_log2: Float32, rescale_threshold: float, exp2_fma_period: int):
        self.scale_log2 = scale_log2
        self.rescale_threshold = rescale_threshold
        self.exp2_fma_period = exp2_fma_period
        self.row_max = cute.make_rmem_tensor((ROWS,), Float32)
        self.row_sum = cute.make_rmem_tensor((ROWS,), Float32)
        # what acc_o has to be multiplied with before the next P V is added to it, and whether that is worth it
        self.row_scale = cute.make_rmem_tensor((ROWS,), Float32)
        self.needs_rescale = cute.make_rmem_tensor((1,), Int32)

    @cute.jit
    def tile_maximum(self, scores: cute.Tensor, r: cutlass.Constexpr[int]) -> Float32:
        """Maximum of row r over the quad. Four chains, because one of N / 4 dependent maxima would be all latency."""
        columns = cute.size(scores, mode=[1])
        chains = [scores[r, c] for c in range(4)]
        for c in cutlass.range_constexpr(4, columns):
            chains[c % 4] = cute.arch.fmax(chains[c % 4], scores[r, c])
        largest = cute.arch.fmax(cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3]))
        largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=2))
        return cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=1))

    @cute.jit
    def update(self, scores: cute.Tensor, is_first: cutlass.Constexpr[bool]):
        """scores (2, columns) -> exp2(scale_log2 * (scores - row_max)), in place; row_max, row_sum, row_scale follow.

        With a threshold, needs_rescale says whether row_scale is anything but 1 in any lane of the warp.
        """
        new_max = [self.tile_maximum(scores, r) for r in range(ROWS)]
        if cutlass.const_expr(not is_first):
            new_max = [cute.arch.fmax(new_max[r], self.row_max[r]) for r in range(ROWS)]
            if cutlass.const_expr(self.rescale_threshold > 0):
                limit = self.rescale_threshold
                has_grown = [(new_max[r] - self.row_max[r]) * self.scale_log2 > limit for r in range(ROWS)]
                needs_rescale = Boolean(cute.arch.vote_any_sync(has_grown[0] or has_grown[1]))
                self.needs_rescale[0] = Int32(needs_rescale)
                new_max = [new_max[r] if needs_rescale else self.row_max[r] for r in range(ROWS)]
        for r in cutlass.range_constexpr(ROWS):
            # a row that has seen no key yet: -inf - -inf would be NaN
            reference = (new_max[r] if new_max[r] > -Float32.inf else Float32(0.0)) * self.scale_log2
            if cutlass.const_expr(is_first):
                self.row_scale[r] = Float32(1.0)
                self.needs_rescale[0] = Int32(0)
            else:
                self.row_scale[r] = cute.math.exp2(self.row_max[r] * self.scale_log2 - reference, fastmath=True)
            self.row_max[r] = new_max[r]
            sums = [Float32(0.0), Float32(0.0)]
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                p = self.exp2(scores[r, c] * self.scale_log2 - reference, c)
                scores[r, c] = p
                sums[c % 2] = p if c < 2 else sums[c % 2] + p
            tile_sum = sums[0] + sums[1]
            if cutlass.const_expr(is_first):
                self.row_sum[r] = tile_sum
            else:
                self.row_sum[r] = self.row_sum[r] * self.row_scale[r] + tile_sum

    @cute.jit
    def exp2(self, x: Float32, c: cutlass.Constexpr[int]) -> Float32:
        if cutlass.const_expr(self.exp2_fma_period > 0 and c % self.exp2_fma_period == self.exp2_fma_period - 1):
            return exp2_on_fma_pipe(x)
        return cute.math.exp2(x, fastmath=True)

    @cute.jit
    def rescale(self, acc_o: cute.Tensor):
        """acc_o (2, columns) *= row_scale, as the last update has left it."""
        if cutlass.const_expr(self.rescale_threshold > 0):
            if self.needs_rescale[0] != 0:
                self._multiply(acc_o)
        else:
            self._multiply(acc_o)

    @cute.jit
    def _multiply(self, acc_o: cute.Tensor):
        for r in cutlass.range_constexpr(ROWS):
            for c in cutlass.range_constexpr(cute.size(acc_o, mode=[1])):
                acc_o[r, c] = acc_o[r, c] * self.row_scale[r]


@cute.jit
def finish(row_max: Float32, row_sum: Float32, scale_log2: Float32, sink: Float32 | None):
    """The end of one row, reduced over its quad.

    Args: sink: score of a key of value 0 that joins the denominator of a row that sees a key; None at compile time.
    Returns: what acc_o has to be multiplied with, and lse (natural log); 0 and -inf for a row that saw no key.
    """
    total = cute.arch.warp_reduction_sum(row_sum, threads_in_group=4)
    is_empty = total == 0.0
    reference = row_max * scale_log2
    weight = Float32(1.0)
    if cutlass.const_expr(sink is not None):
        # move to the larger of both references, so that neither term overflows
        sink_log2 = sink * (1.0 / LN2)
        larger = cute.arch.fmax(reference, sink_log2)
        weight = cute.math.exp2(reference - larger, fastmath=True)
        total = total * weight + cute.math.exp2(sink_log2 - larger, fastmath=True)
        reference = larger
    safe_total = Float32(1.0) if is_empty else total
    weight = Float32(0.0) if is_empty else weight * cute.arch.rcp_approx(safe_total)
    lse = -Float32.inf if is_empty else (reference + cute.math.log2(safe_total, fastmath=True)) * LN2
    return weight, lse

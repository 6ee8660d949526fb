"""The online softmax on accumulators of wgmma or mma, in registers: the recurrence of onepass/tiled/online_softmax.py.

A thread holds two rows of the tile (8 apart) and a quarter of their columns; the other quarters are in the three other
lanes of its quad. Sums are reduced over the quad at the end; maxima in every block of keys, or with a threshold only
where a score is past its limit.

Scores stay unscaled: with scale_log2 = softmax_scale * log2(e), exp(scale * (s - m)) = exp2(s * scale_log2 -
m * scale_log2), one FMA and one exponential a score.

The reference m need not be the maximum (any value gives the same quotient); it only has to keep exp2 in range. With a
`rescale_threshold` it stays as it is until a score has outgrown it by that many powers of two. Then most tiles need
neither a maximum over the quad nor a rescaling of acc_o: each thread checks whether any of its scores is past the
limit, and if one is, its warp takes the long way. Exactness is kept: row_sum and acc_o refer to the same m, and the
final division cancels it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .....geometry.integers import maximum
from ..memory.ptx import bits
from ..memory.untraced import Untraced
from .sinks import weight_of_sink

ROWS = 2  # rows of a thread
LN2 = math.log(2.0)


class ScoreFactors(NamedTuple):
    """The factors that make raw scores q.k exponentials: exp2(scale_log2 * s), with a softcap after s = tanh(..)."""

    scale_log2: Float32
    tanh_scale: Float32 | None  # 2 log2(e) * softmax_scale / softcap; None: no softcap


class OnlineSoftmax(Untraced):
    """Running reference and sum of a thread's two rows.

    Args:
        scale_log2: softmax_scale * log2(e), positive; (1,) in registers if it changes from tile to tile.
        rescale_threshold: powers of two that a score may outgrow its row's reference by; 0 = always follow the maximum.
    """

    def __init__(self, scale_log2: Float32 | cute.Tensor, rescale_threshold: float):
        self.scale = scale_log2
        self.rescale_threshold = rescale_threshold
        self.row_max = cute.make_rmem_tensor((ROWS,), Float32)
        self.row_sum = cute.make_rmem_tensor((ROWS,), Float32)
        # the factor of acc_o before the next P V is added to it
        self.row_scale = cute.make_rmem_tensor((ROWS,), Float32)
        # row_max * scale_log2; with a threshold, limit is the bits of the largest score that needs no new reference, or
        # the least integer if that score is negative
        self.reference = cute.make_rmem_tensor((ROWS,), Float32)
        self.limit = cute.make_rmem_tensor((ROWS,), Int32)

    @property
    def scale_log2(self) -> Float32:
        return self.scale[0] if isinstance(self.scale, cute.Tensor) else self.scale

    @cute.jit
    def tile_maximum(self, scores: cute.Tensor, r: cutlass.Constexpr[int]) -> Float32:
        """Maximum of row r over the quad."""
        return self._quad_maximum(self._thread_maximum(scores, r))

    def _quad_maximum(self, largest: Float32) -> Float32:
        largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=2))
        return cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=1))

    def _thread_maximum(self, scores: cute.Tensor, r: int) -> Float32:
        """Maximum of this thread's scores of row r.

        It takes four chains, because one chain of N / 4 dependent maxima would be all latency.
        """
        chains = [scores[r, c] for c in range(4)]
        for c in range(4, cute.size(scores, mode=[1])):
            chains[c % 4] = cute.arch.fmax(chains[c % 4], scores[r, c])
        return cute.arch.fmax(cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3]))

    def _thread_maximum_bits(self, scores: cute.Tensor, r: int) -> Int32:
        """The bits of this thread's largest score as an integer, if that score is positive; a negative number if not.

        Floats >= 0 order like the integers of their bits, floats < 0 are integers < 0. Integers have a maximum of
        three in one instruction (VIMNMX3), half as many as FMNMX.
        """
        as_integers = cute.recast_tensor(scores, Int32)
        chains = [as_integers[r, c] for c in range(2)]
        for c in range(2, cute.size(scores, mode=[1]), 4):
            for i in range(2):
                chains[i] = maximum(maximum(chains[i], as_integers[r, c + i]), as_integers[r, c + i + 2])
        return maximum(*chains)

    def _may_have_grown(self, scores: cute.Tensor, r: int, is_masked: bool) -> Boolean:
        """Whether one of this thread's scores is past the limit of row r; with a limit below 0, possibly in vain."""
        if is_masked:
            return self._thread_maximum(scores, r) > self._limit(r)
        return self._thread_maximum_bits(scores, r) > self.limit[r]

    @cute.jit
    def reset(self):
        """Set the state of rows that have seen no key yet, for `update`.

        `begin`, which needs no such state, saves the first rescaling.
        """
        for r in cutlass.range_constexpr(ROWS):
            self.row_sum[r], self.row_scale[r] = Float32(0.0), Float32(1.0)
            self._refer_to(-Float32.inf, r)

    @cute.jit
    def begin(self, scores: cute.Tensor):
        """The first tile of a row: the reference is its maximum."""
        for r in cutlass.range_constexpr(ROWS):
            self.row_sum[r], self.row_scale[r] = Float32(0.0), Float32(1.0)
            self._refer_to(self.tile_maximum(scores, r), r)
        self._exponentiate(scores)

    @cute.jit
    def update(self, scores: cute.Tensor):
        """scores (2, columns) -> exp2(scale_log2 * (scores - row_max)), in place; the state follows."""
        for r in cutlass.range_constexpr(ROWS):
            old_max = self.row_max[r]
            self._refer_to(cute.arch.fmax(self.tile_maximum(scores, r), old_max), r)
            self.row_scale[r] = cute.math.exp2(old_max * self.scale_log2 - self.reference[r], fastmath=True)
            self.row_sum[r] = self.row_sum[r] * self.row_scale[r]
        self._exponentiate(scores)

    @cute.jit
    def update_lazily(self, scores: cute.Tensor, is_masked: cutlass.Constexpr[bool], acc_o: cute.Tensor | None = None):
        """`update`, but a row takes a new reference only if a score is past its limit: most blocks need none.

        All rows of a warp take the long way together, but a row follows its maximum only if that has grown: a row's
        result depends on no other row, not even in rounding.

        Args: acc_o: (2, columns), which is rescaled at once; None: GEMMs still add to it, and `rescale_lazily` follows
        when they have ended. The long way cannot wait for them: all warps of a warpgroup must execute the same wait,
        and each warp takes the long way by itself.
        """
        may_have_grown = Boolean(False)
        for r in cutlass.range_constexpr(ROWS):
            may_have_grown = may_have_grown or self._may_have_grown(scores, r, is_masked)
            if cutlass.const_expr(acc_o is None):
                self.row_scale[r] = Float32(1.0)
        if cute.arch.vote_any_sync(may_have_grown):
            for r in cutlass.range_constexpr(ROWS):
                old_max, tile_max = self.row_max[r], self.tile_maximum(scores, r)
                has_grown = tile_max > self._limit(r)
                self._refer_to(tile_max if has_grown else old_max, r)
                row_scale = cute.math.exp2(old_max * self.scale_log2 - self.reference[r], fastmath=True)
                row_scale = row_scale if has_grown else Float32(1.0)
                self.row_sum[r] = self.row_sum[r] * row_scale
                if cutlass.const_expr(acc_o is None):
                    self.row_scale[r] = row_scale
                else:
                    for c in cutlass.range_constexpr(cute.size(acc_o, mode=[1])):
                        acc_o[r, c] = acc_o[r, c] * row_scale
        self._exponentiate(scores)

    def _limit(self, r: int) -> Float32:
        return self.row_max[r] + self.rescale_threshold / self.scale_log2

    @cute.jit
    def _refer_to(self, new_max: Float32, r: cutlass.Constexpr[int]):
        """Make new_max the reference of row r."""
        self.row_max[r] = new_max
        # a row that has seen no key yet: -inf - -inf would be NaN
        self.reference[r] = (new_max if new_max > -Float32.inf else Float32(0.0)) * self.scale_log2
        if cutlass.const_expr(self.rescale_threshold > 0):
            limit = self._limit(r)
            # see _thread_maximum_bits: it finds scores past a limit of 0 or more, and has to be checked below 0
            self.limit[r] = bits(limit) if limit >= 0.0 else Int32(-(2**31))

    @cute.jit
    def _exponentiate(self, scores: cute.Tensor):
        """scores -> exponentials, in place, and their sums in two chains a row, which ptxas interleaves with them."""
        sums = [[Float32(0.0), Float32(0.0)] for _ in range(ROWS)]
        for r in cutlass.range_constexpr(ROWS):
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                p = cute.math.exp2(scores[r, c] * self.scale_log2 - self.reference[r], fastmath=True)
                scores[r, c] = p
                sums[r][c % 2] = p if c < 2 else sums[r][c % 2] + p
            self.row_sum[r] = self.row_sum[r] + (sums[r][0] + sums[r][1])

    @cute.jit
    def rescale(self, acc_o: cute.Tensor):
        """acc_o (2, columns) *= the row_scale that the last update has left."""
        for r in cutlass.range_constexpr(ROWS):
            for c in cutlass.range_constexpr(cute.size(acc_o, mode=[1])):
                acc_o[r, c] = acc_o[r, c] * self.row_scale[r]

    @cute.jit
    def rescale_lazily(self, acc_o: cute.Tensor):
        """`rescale` after `update_lazily`, by the warps that have a row with a new reference."""
        if cute.arch.vote_any_sync(self.row_scale[0] != 1.0 or self.row_scale[1] != 1.0):
            self.rescale(acc_o)


@cute.jit
def finish(row_max: Float32, row_sum: Float32, scale_log2: Float32, sink: Float32 | None):
    """The end of one row, reduced over its quad.

    Args: sink: score of a key of value 0 that joins the denominator; None (at compile time): there is none.
    Returns: the factor of acc_o, and lse (natural log); for an empty row 0, and the sink or -inf.
    """
    total = cute.arch.warp_reduction_sum(row_sum, threads_in_group=4)
    is_empty = total == 0.0
    reference = row_max * scale_log2
    weight, lse_of_empty = Float32(1.0), -Float32.inf
    if cutlass.const_expr(sink is not None):
        # move to the larger of both references, so that neither term overflows
        sink_log2 = sink * (1.0 / LN2)
        larger = cute.arch.fmax(reference, sink_log2)
        weight = cute.math.exp2(reference - larger, fastmath=True)
        total = total * weight + weight_of_sink(sink, sink_log2 - larger)
        reference, lse_of_empty = larger, sink
    safe_total = Float32(1.0) if is_empty else total
    weight = Float32(0.0) if is_empty else weight * cute.arch.rcp_approx(safe_total)
    lse = lse_of_empty if is_empty else (reference + cute.math.log2(safe_total, fastmath=True)) * LN2
    return weight, lse

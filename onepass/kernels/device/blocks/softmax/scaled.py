"""An online softmax whose scores and values have scales, for FP8 (e4m3) and for float32 in two float16 parts; and P of
e4m3 as operand of the next GEMM.

A score is q_scale * k_scale * (q.k), one factor for a row and a group of keys, and V counts v_scale of its group.
Neither costs an instruction for each score: with

    y = q.k * multiplier,  multiplier = q_scale * k_scale * softmax_scale * log2(e)
    P = exp2(y + log2(v_scale) + 8 - reference)

both are in the one FMA before the exponential. The reference is the largest y + log2(v_scale) of a row, so that P is
256 where p * v_scale is largest, a power of two with room below e4m3's 448, and O is in one unit. The sum that out is
divided by has v_scale taken out again, once for each group.

With a rescale_threshold the reference is left behind by up to that many powers of two (see online_softmax.py), and the
8 becomes so much less that e4m3 holds what P grows to: not at all up to 0.8, since 256 * 2^0.8 is 446; 6 with 2.8.
Parts in float16 have 15 in the place of 8, or 7 with a threshold of 8.
A part of the sum that is 2^-126 of the largest p * v_scale is lost.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32

from .....geometry.integers import maximum, minimum
from .....geometry.tile_scheduler import LANES
from .....quantization.codec import SCALE_BLOCK
from ....config import p_exponent
from ..memory.ptx import pack_four, power_below
from ..memory.untraced import Untraced
from ..memory.warp import broadcast
from ..repair.rows import soft_cap
from . import online as online_softmax
from .online import ROWS, OnlineSoftmax, Scores

SCALE_BLOCK_LOG2 = SCALE_BLOCK.bit_length() - 1
TINY = 2.0**-126


class DescaleTensors(NamedTuple):
    """Scales in global memory, float32, (batch, heads, blocks of rows); a head with one scale has one block.

    With packed sequences, sequences for entries of the batch; blocks of all of them lie one after another, and each
    entry sees all of them: see `first_block`.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    q_block: cute.FastDivmodDivisorV2  # rows of a block of q; those of k and v have SCALE_BLOCK


def scales_of_entry(t: cute.Tensor, place: Int32, sequence: Int32 | None) -> cute.Tensor:
    """(heads, blocks) of a batch entry or, where it is given, a sequence."""
    # rows behind the last sequence see no key: any scale will do
    entry = place if sequence is None else minimum(sequence, cute.size(t, mode=[0]) - 1)
    return t[entry, None, None]


def first_block(start: Int32, sequence: Int32 | None, block: cute.FastDivmodDivisorV2 | int) -> Int32:
    """Which of the blocks of rows is the first one of a sequence that begins with row `start`."""
    if sequence is None:
        return Int32(0)
    return (start // block if isinstance(block, int) else divmod(start, block)[0]) + sequence


def group_keys(tile_n: int) -> int:
    """Keys of a tile that have one scale wherever the tile begins."""
    return math.gcd(tile_n, SCALE_BLOCK)


def tiles_of_page(tile_n: int) -> int:
    """Tiles that 32 scales last for: a power of two."""
    blocks = LANES if tile_n % SCALE_BLOCK == 0 or SCALE_BLOCK % tile_n == 0 else LANES - 1
    return 1 << (blocks * SCALE_BLOCK // tile_n).bit_length() - 1


class KeyScales(Untraced):
    """The scales of K and V of one head, those of 32 blocks of keys at a time (a page), one in each lane of a warp.

    Tiles come last first. A step has no load and no logarithm of its own, only a broadcast of each scale; the next page
    is loaded in the last tile of a page, a step before it is needed.
    """

    def __init__(self, tile_n: int):
        self.tile_n, self.size = tile_n, tiles_of_page(tile_n)
        self.next_k, self.next_v = (cute.make_rmem_tensor((1,), Float32) for _ in range(2))
        self.k, self.v_log2, self.v_inverse = (cute.make_rmem_tensor((1,), Float32) for _ in range(3))

    @cute.jit
    def load(self, k_scale: cute.Tensor, v_scale: cute.Tensor, first: Int32, n_block: Int32):
        """The page of tile n_block, to be used after the next `take`.

        Args: k_scale, v_scale: (blocks,) of a head. first: the block of its first keys.
        """
        page_start = maximum(n_block, 0) & -self.size
        block = first + (page_start * self.tile_n >> SCALE_BLOCK_LOG2) + cute.arch.lane_idx()
        self.next_k[0] = k_scale[minimum(block, cute.size(k_scale) - 1)]
        self.next_v[0] = v_scale[minimum(block, cute.size(v_scale) - 1)]

    @cute.jit
    def take(self, k_scale, v_scale, first: Int32, n_block: Int32, is_first: cutlass.Constexpr[bool]):
        """What `group_scales` needs for tile n_block. Args: is_first: of this head; its page has been loaded."""
        if cutlass.const_expr(is_first):
            self._turn_page()
        if cutlass.const_expr(not is_first):
            if (n_block & self.size - 1) == self.size - 1:
                self._turn_page()
        if (n_block & self.size - 1) == 0:
            self.load(k_scale, v_scale, first, n_block - 1)

    @cute.jit
    def _turn_page(self):
        v_scale = cute.arch.fmax(self.next_v[0], Float32(TINY))
        self.k[0] = self.next_k[0]
        self.v_log2[0] = cute.math.log2(v_scale, fastmath=True)
        self.v_inverse[0] = cute.arch.rcp_approx(v_scale)

    def group_scales(self, n_block: Int32, g: int) -> tuple:
        """k_scale, log2(v_scale) and 1 / v_scale of the keys of group g."""
        lane = (n_block & self.size - 1) * self.tile_n + g * group_keys(self.tile_n) >> SCALE_BLOCK_LOG2
        return tuple(broadcast(t[0], lane) for t in (self.k, self.v_log2, self.v_inverse))


class ScaledSoftmax(OnlineSoftmax):
    """`OnlineSoftmax` of scores with scales. Its maxima and references are y + log2(v_scale), in powers of two.

    Args:
        tile_n: keys of a tile; its scales are given with `take_scales` before each update.
        p_dtype: of P.
    """

    def __init__(
        self,
        scores: Scores,
        rescale_threshold: float,
        exp2_fma_period: int,
        tile_n: int,
        p_dtype: torch.dtype = torch.float8_e4m3fn,
    ):
        super().__init__(Float32(1.0), rescale_threshold, exp2_fma_period)
        self.scale_log2 = 1.0  # a constant: multiplications with it are none
        self.scores = scores
        self.input_dtype = Float32 if p_dtype == torch.float16 else None  # for `soft_cap`: that of parts
        self.exponent = float(p_exponent(rescale_threshold, p_dtype))
        self.columns = group_keys(tile_n) // 4  # of a group that a thread has
        self.groups = tile_n // group_keys(tile_n)
        self.multiplier = cute.make_rmem_tensor((ROWS, self.groups), Float32)
        self.v_log2 = cute.make_rmem_tensor((self.groups,), Float32)
        self.v_inverse = cute.make_rmem_tensor((self.groups,), Float32)

    def scale_of_row(self, q_scale: Float32) -> Float32:
        """What `take_scales` wants of a row: all of its multiplier that no key changes."""
        return q_scale if self.scores.tanh_scale is not None else q_scale * self.scores.scale_log2

    @cute.jit
    def take_scales(self, row_scale: cute.Tensor, keys: KeyScales, n_block: Int32):
        """The scales of the rows (ROWS,) and of tile n_block of the keys, whose scores come next."""
        for g in cutlass.range_constexpr(self.groups):
            k_scale, self.v_log2[g], self.v_inverse[g] = keys.group_scales(n_block, g)
            for r in cutlass.range_constexpr(ROWS):
                # above 0: a hidden score is -inf
                self.multiplier[r, g] = cute.arch.fmax(row_scale[r] * k_scale, Float32(TINY))

    @cute.jit
    def soft_cap(self, scores: cute.Tensor):
        """Scores in place -> their tanh; what is left is the factor of the softcap."""
        for r in cutlass.range_constexpr(ROWS):
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                factor = self.multiplier[r, c // self.columns] * self.scores.tanh_scale
                scores[r, c] = soft_cap(scores[r, c], factor, self.input_dtype)
            for g in cutlass.range_constexpr(self.groups):
                self.multiplier[r, g] = self.scores.scale_log2

    # ---------------------------------------------------------------- what OnlineSoftmax asks

    @cute.jit
    def begin(self, scores: cute.Tensor):
        """The first tile of a row: the reference is its maximum, by integers if a score of each row is above 0."""
        of_zero = self.v_log2[0]
        for g in cutlass.range_constexpr(1, self.groups):
            of_zero = cute.arch.fmax(of_zero, self.v_log2[g])
        may_be_below = Boolean(False)
        for r in cutlass.range_constexpr(ROWS):
            self.row_max[r] = self._quad_maximum(self._thread_maximum_above_zero(scores, r))
            may_be_below = may_be_below or self.row_max[r] <= of_zero
        if cute.arch.vote_any_sync(may_be_below):
            for r in cutlass.range_constexpr(ROWS):
                self.row_max[r] = self.tile_maximum(scores, r)
        for r in cutlass.range_constexpr(ROWS):
            self.row_sum[r], self.row_scale[r] = Float32(0.0), Float32(1.0)
            self._refer_to(self.row_max[r], r)
        self._exponentiate(scores)

    def _columns_of(self, g: int) -> list[int]:
        return list(range(g * self.columns, (g + 1) * self.columns))

    def _thread_maximum(self, scores: cute.Tensor, r: int) -> Float32:
        found = []
        for g in range(self.groups):
            first, second, *columns = self._columns_of(g)
            chains = [scores[r, first], scores[r, second]]
            for i, c in enumerate(columns):
                chains[i % 2] = cute.arch.fmax(chains[i % 2], scores[r, c])
            found.append(cute.arch.fmax(*chains) * self.multiplier[r, g] + self.v_log2[g])
        largest = found[0]
        for value in found[1:]:
            largest = cute.arch.fmax(largest, value)
        return largest

    def _thread_maximum_above_zero(self, scores: cute.Tensor, r: int) -> Float32:
        """The same of the scores above 0 and of 0, found as `_thread_maximum_bits` finds it."""
        as_integers = cute.recast_tensor(scores, Int32)
        found = []
        for g in range(self.groups):
            largest = Int32(0)
            for c in self._columns_of(g):
                largest = maximum(largest, as_integers[r, c])
            found.append(largest.bitcast(Float32) * self.multiplier[r, g] + self.v_log2[g])
        largest = found[0]
        for value in found[1:]:
            largest = cute.arch.fmax(largest, value)
        return largest

    def _may_have_grown(self, scores: cute.Tensor, r: int, is_masked: bool) -> Boolean:
        # hidden scores, -inf, are integers below 0
        return self._thread_maximum_above_zero(scores, r) > self._limit(r)

    @cute.jit
    def _refer_to(self, new_max: Float32, r: cutlass.Constexpr[int]):
        self.row_max[r] = new_max
        self.reference[r] = new_max if new_max > -Float32.inf else Float32(0.0)

    @cute.jit
    def _exponentiate(self, scores: cute.Tensor):
        """scores -> P, in place, and its sums without V's scales: two chains a group, mixed by ptxas."""
        for r in cutlass.range_constexpr(ROWS):
            for g in cutlass.range_constexpr(self.groups):
                shift = self.v_log2[g] + (self.exponent - self.reference[r])
                sums = [Float32(0.0), Float32(0.0)]
                for i in cutlass.range_constexpr(self.columns):
                    c = g * self.columns + i
                    p = self.exp2(scores[r, c] * self.multiplier[r, g] + shift, c)
                    scores[r, c] = p
                    sums[i % 2] = p if i < 2 else sums[i % 2] + p
                self.row_sum[r] = self.row_sum[r] + (sums[0] + sums[1]) * self.v_inverse[g]


def finish(row_reference: Float32, row_sum: Float32, exponent: float, sink: Float32 | None) -> tuple:
    """`online_softmax.finish` of a row of `ScaledSoftmax`: P, its sum and O have 2^exponent, which lse has not."""
    return online_softmax.finish(row_reference - exponent, row_sum, 1.0, sink)


@cute.jit
def finish_exactly(row_reference: Float32, row_sum: Float32, exponent: float, sink: Float32 | None) -> tuple:
    """The same to float32's accuracy.

    V's scales are large powers of two in the reference and, inverse, in the sum: lse, the sum of both logarithms, would
    have fewer bits. So they are taken out first.
    """
    total = cute.arch.warp_reduction_sum(row_sum, threads_in_group=4)
    power, inverse = power_below(total)
    # a quarter, for it is summed over the quad again
    parts = row_reference + (power - exponent), total * inverse * 0.25
    weight, lse = online_softmax.finish(*parts, 1.0, sink)
    return weight * inverse, lse


@cute.jit
def pack_p(p: cute.Tensor, target: cute.Tensor):
    """p (2, columns) -> register operand A ((4, 2, 2), M, columns / 8) of e4m3.

    The accumulator gives lane q of a quad the keys 2q, 2q + 1 of every eight, operand A wants 4q to 4q + 3 of every 16.
    No value changes lanes: the lane's keys 2q, 2q + 1, 8 + 2q, 8 + 2q + 1 are said to be 4q to 4q + 3, and V's keys
    are stored in that order (FlashAttention-3, arXiv:2407.08608, section 3.3).
    """
    words = cute.recast_tensor(target, Int32)
    for k in cutlass.range_constexpr(cute.size(p, mode=[1]) // 8):
        for half in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                first = 8 * k + 4 * half
                words[(0, r, half), 0, k] = pack_four(*(p[r, first + i] for i in range(4)))

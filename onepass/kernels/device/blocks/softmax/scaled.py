"""An online softmax whose scores and values have scales, for FP8 (e4m3) and for float32 in two float16 halves; and P in
e4m3 as operand of the next GEMM.

A score is q_scale * k_scale * (q.k), with one factor for a row and a group of keys, and V of a group is multiplied by
v_scale. Neither costs an instruction for each score: with

    y = q.k * multiplier,  multiplier = q_scale * k_scale * softmax_scale * log2(e)
    P = exp2(y + log2(v_scale) + 8 - reference)

both are in the one FMA before the exponential. The reference is the largest y + log2(v_scale) of a row, so that P is
256 where p * v_scale is largest, a power of two with room below e4m3's 448, and O is in one unit. The sum that out is
divided by has v_scale taken out again, once for each group.

With a rescale_threshold the reference may stay behind by up to that many powers of two (see online.py), and the 8 is
reduced so far that e4m3 holds what P grows to: not at all up to 0.8, since 256 * 2^0.8 is 446; to 6 with 2.8. Float16
halves have 15 in the place of 8, or 7 with a threshold of 8. Terms of the sum below 2^-126 of the largest p * v_scale
are lost.

With p_codes there is no exponential. The bits of a float16 are the integer 2^10 (log2(P) + 15) wherever P is a power of
two, and linear in P between two of them. So with three bits of mantissa, as many as e4m3 has,

    u = round(8 (log2(P) + 15) - 0.465),  P = the float16 with the bits u << 7

A float16 below 2^-14 is an integer times 2^-24, so one FMA a score, with 2^-24 in its factor, and one conversion for
two of them compute u, and 0 for what is below it. P is 0.920 to 1.064 times the exact one, in the mean 1, which is what
the 0.465 is for. Below 2^-6 it is rounded once more, since e4m3 has fewer bits there. Sums are those of P in float16:
equal probabilities have no error at all, and the common factor of a row's P cancels in out, not in lse. A score past
the threshold changes the reference before codes are made, so u is at most 190, which is 448.
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
from .....quantization.codec import SCALE_BLOCK, TINY
from ....config import p_exponent
from ..memory.ptx import (
    add_pairs,
    copy_of,
    pack_four,
    pack_two_pairs,
    power_below,
    round_to_integers,
    shift_left,
    sum_of_pair,
)
from ..memory.untraced import Untraced
from ..memory.warp import broadcast
from ..repair.rows import soft_cap
from . import online as online_softmax
from .online import ROWS, OnlineSoftmax, ScoreFactors

SCALE_BLOCK_LOG2 = SCALE_BLOCK.bit_length() - 1
# With p_codes an octave has eight codes, P = 1 has the code 8 * 15 - 0.465, and a code is the bits of a float16 without
# the last seven.
CODE_UNIT, CODE_OF_ONE, CODE_SHIFT = 8 * 2.0**-24, 15.0 - 0.465 / 8, 7


class DescaleTensors(NamedTuple):
    """Descales in global memory, float32, (batch, heads, blocks of rows); a head with one descale has one block.

    With packed sequences the entries of the batch are sequences. The blocks of all sequences lie one after another, and
    each entry sees all of them: see `first_block`.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    q_block: cute.FastDivmodDivisorV2  # rows of a block of q; blocks of k and v have SCALE_BLOCK rows


def scales_of_entry(t: cute.Tensor, entry: Int32, sequence: Int32 | None) -> cute.Tensor:
    """(heads, blocks) of a sequence, or of a batch entry if there is no sequence."""
    # rows after the last sequence see no key: any scale will do
    entry = entry if sequence is None else minimum(sequence, cute.size(t, mode=[0]) - 1)
    return t[entry, None, None]


def first_block(start: Int32, sequence: Int32 | None, block: cute.FastDivmodDivisorV2 | int) -> Int32:
    """The number of the first block of rows of a sequence that begins with row `start`."""
    if sequence is None:
        return Int32(0)
    return (start // block if isinstance(block, int) else divmod(start, block)[0]) + sequence


def group_keys(tile_n: int) -> int:
    """The number of neighboring keys of a tile that share one scale wherever the tile begins."""
    return math.gcd(tile_n, SCALE_BLOCK)


def tiles_of_chunk(tile_n: int) -> int:
    """The number of tiles that 32 scales last for, a power of two."""
    blocks = LANES if tile_n % SCALE_BLOCK == 0 or SCALE_BLOCK % tile_n == 0 else LANES - 1
    return 1 << (blocks * SCALE_BLOCK // tile_n).bit_length() - 1


class KeyScales(Untraced):
    """The scales of K and V of one head: those of 32 blocks of keys at a time (a chunk), one in each lane of a warp.

    Tiles come in descending order. A step has no load and no logarithm of its own, only a broadcast of each scale; the
    next chunk is loaded in the last tile of a chunk, a step before it is needed.
    """

    def __init__(self, tile_n: int):
        self.tile_n, self.size = tile_n, tiles_of_chunk(tile_n)
        self.next_k, self.next_v = (cute.make_rmem_tensor((1,), Float32) for _ in range(2))
        self.k, self.v_log2, self.v_inverse = (cute.make_rmem_tensor((1,), Float32) for _ in range(3))

    @cute.jit
    def load(self, k_scale: cute.Tensor, v_scale: cute.Tensor, first: Int32, n_block: Int32):
        """Load the chunk of tile n_block, which is used after the next `take`.

        Args: k_scale, v_scale: (blocks,) of a head. first: the block of the sequence's first keys.
        """
        chunk_start = maximum(n_block, 0) & -self.size
        block = first + (chunk_start * self.tile_n >> SCALE_BLOCK_LOG2) + cute.arch.lane_idx()
        self.next_k[0] = k_scale[minimum(block, cute.size(k_scale) - 1)]
        self.next_v[0] = v_scale[minimum(block, cute.size(v_scale) - 1)]

    @cute.jit
    def take(self, k_scale, v_scale, first: Int32, n_block: Int32, begins: cutlass.Constexpr[bool]):
        """Prepare `group_scales` of tile n_block. Args: begins: whether it is visited first; its chunk is loaded."""
        if cutlass.const_expr(begins):
            self._next_chunk()
        if cutlass.const_expr(not begins):
            if (n_block & self.size - 1) == self.size - 1:
                self._next_chunk()
        if (n_block & self.size - 1) == 0:
            self.load(k_scale, v_scale, first, n_block - 1)

    @cute.jit
    def _next_chunk(self):
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
        tile_n: keys of a tile; `take_scales` sets their scales before each update.
        p_dtype: the dtype of P: e4m3, or float16 for halves.
        p_codes: whether P, which is e4m3 then, is computed from integers and not by exponentials.
    """

    def __init__(
        self,
        factors: ScoreFactors,
        rescale_threshold: float,
        tile_n: int,
        p_dtype: torch.dtype = torch.float8_e4m3fn,
        p_codes: bool = False,
    ):
        super().__init__(Float32(1.0), rescale_threshold)
        self.scale = 1.0  # a constant: multiplications with it vanish
        self.factors = factors
        self.input_dtype = Float32 if p_dtype == torch.float16 else None  # for `soft_cap`: float32 in halves
        self.exponent = float(p_exponent(rescale_threshold, p_dtype))
        self.columns = group_keys(tile_n) // 4  # a thread's columns of a group
        self.groups = tile_n // group_keys(tile_n)
        self.multiplier = cute.make_rmem_tensor((ROWS, self.groups), Float32)
        self.v_log2 = cute.make_rmem_tensor((self.groups,), Float32)
        self.v_inverse = cute.make_rmem_tensor((self.groups,), Float32)
        self.p = None  # the P of p_codes: four e4m3 of neighboring columns in a word
        if p_codes:
            self.p = cute.make_rmem_tensor((ROWS, tile_n // 16), Int32)

    def scale_of_row(self, q_scale: Float32) -> Float32:
        """What `take_scales` needs of a row: the factors of its multiplier that do not depend on the key."""
        return q_scale if self.factors.tanh_scale is not None else q_scale * self.factors.scale_log2

    @cute.jit
    def take_scales(self, row_scale: cute.Tensor, keys: KeyScales, n_block: Int32):
        """Take the scales of the rows, (ROWS,), and of tile n_block of the keys, whose scores come next."""
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
                factor = self.multiplier[r, c // self.columns] * self.factors.tanh_scale
                scores[r, c] = soft_cap(scores[r, c], factor, self.input_dtype)
            for g in cutlass.range_constexpr(self.groups):
                self.multiplier[r, g] = self.factors.scale_log2

    # ---------------------------------------------------------------- what OnlineSoftmax calls

    @cute.jit
    def begin(self, scores: cute.Tensor):
        """The first tile of a row: the reference is its maximum, by integers if each row has a score above 0."""
        zero_score = self.v_log2[0]
        for g in cutlass.range_constexpr(1, self.groups):
            zero_score = cute.arch.fmax(zero_score, self.v_log2[g])
        may_be_below = Boolean(False)
        for r in cutlass.range_constexpr(ROWS):
            self.row_max[r] = self._quad_maximum(self._thread_maximum_above_zero(scores, r))
            may_be_below = may_be_below or self.row_max[r] <= zero_score
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
        """The maximum of 0 and of this thread's scores, found by integers like in `_thread_maximum_bits`."""
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
        """scores -> P, and its sums: by `_encode`, or by exponentials."""
        if cutlass.const_expr(self.p is not None):
            self._encode(scores)
        else:
            self._exponentiate_in_place(scores)

    @cute.jit
    def _exponentiate_in_place(self, scores: cute.Tensor):
        """scores -> P, in place, and sums of P without V's scales, in two chains a group, which ptxas interleaves."""
        for r in cutlass.range_constexpr(ROWS):
            for g in cutlass.range_constexpr(self.groups):
                shift = self.v_log2[g] + (self.exponent - self.reference[r])
                sums = [Float32(0.0), Float32(0.0)]
                for i in cutlass.range_constexpr(self.columns):
                    c = g * self.columns + i
                    p = cute.math.exp2(scores[r, c] * self.multiplier[r, g] + shift, fastmath=True)
                    scores[r, c] = p
                    sums[i % 2] = p if i < 2 else sums[i % 2] + p
                self.row_sum[r] = self.row_sum[r] + (sums[0] + sums[1]) * self.v_inverse[g]

    @cute.jit
    def _encode(self, scores: cute.Tensor):
        """scores -> `p`, and sums of P before its rounding to e4m3, without V's scales, in two chains a group."""
        for r in cutlass.range_constexpr(ROWS):
            for g in cutlass.range_constexpr(self.groups):
                # above 0: a hidden score is -inf
                factor = cute.arch.fmax(self.multiplier[r, g] * CODE_UNIT, Float32(TINY))
                shift = (self.v_log2[g] + (self.exponent + CODE_OF_ONE - self.reference[r])) * CODE_UNIT
                sums = [Int32(0), Int32(0)]
                for i in cutlass.range_constexpr(self.columns // 4):
                    c, pairs = g * self.columns + 4 * i, []
                    for j in cutlass.range_constexpr(2):
                        codes = (scores[r, c + 2 * j + n] * factor + shift for n in range(2))
                        pairs.append(shift_left(round_to_integers(*codes), CODE_SHIFT))
                        sums[j] = pairs[j] if i == 0 else add_pairs(sums[j], pairs[j])
                    self.p[r, c // 4] = pack_two_pairs(*pairs)
                total = sum_of_pair(add_pairs(*sums))
                self.row_sum[r] = self.row_sum[r] + total * self.v_inverse[g]


def finish(row_reference: Float32, row_sum: Float32, exponent: float, sink: Float32 | None) -> tuple:
    """`online.finish` for a row of `ScaledSoftmax`: P, its sum and O have a factor 2^exponent, which lse has not."""
    return online_softmax.finish(row_reference - exponent, row_sum, 1.0, sink)


@cute.jit
def finish_exactly(row_reference: Float32, row_sum: Float32, exponent: float, sink: Float32 | None) -> tuple:
    """`finish` to the accuracy of float32.

    V's scales are large powers of two in the reference, and inverse ones in the sum: lse, the sum of both logarithms,
    would have fewer bits. So they are taken out first.
    """
    total = cute.arch.warp_reduction_sum(row_sum, threads_in_group=4)
    power, inverse = power_below(total)
    # a quarter, because `finish` sums over the quad again
    row = row_reference + (power - exponent), total * inverse * 0.25
    weight, lse = online_softmax.finish(*row, 1.0, sink)
    return weight * inverse, lse


@cute.jit
def pack_p(p: cute.Tensor, target: cute.Tensor):
    """p (2, columns) -> register operand A ((4, 2, 2), M, columns / 8) of e4m3.

    In the accumulator, lane q of a quad has the keys 2q, 2q + 1 of every eight; operand A wants 4q to 4q + 3 of every
    16. No value changes lanes: the lane's keys 2q, 2q + 1, 8 + 2q, 8 + 2q + 1 take the positions 4q to 4q + 3, and V's
    keys are stored in that order (FlashAttention-3, arXiv:2407.08608, section 3.3).
    """
    words = cute.recast_tensor(target, Int32)
    for k in cutlass.range_constexpr(cute.size(p, mode=[1]) // 8):
        for half in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                first = 8 * k + 4 * half
                words[(0, r, half), 0, k] = pack_four(*(p[r, first + i] for i in range(4)))


@cute.jit
def copy_p(p: cute.Tensor, target: cute.Tensor):
    """`pack_p` of P in e4m3, four neighboring columns in a word (2, columns / 4)."""
    words = cute.recast_tensor(target, Int32)
    for k in cutlass.range_constexpr(cute.size(p, mode=[1]) // 2):
        for half in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                words[(0, r, half), 0, k] = copy_of(p[r, 2 * k + half])

"""The rotation of quantization/rotation.py, random signs and a Hadamard transform, on the registers of a warp.

Columns come in groups of 64. Four lanes (a quad) share a row: lane q has the columns 16 q to 16 q + 15 of every group.
So bits 4 and 5 of a column's number say which lane has it, bits 0 to 3 in which register, and the others in which
group. The transform is a product of one transform for each bit, and these commute:

    bits 0, 1, 4, 5     one matrix product with 16 x 16 signs, on tensor cores (mma m16n8k16), which takes the 16-bit
                        numbers in the order of their loads. Its 16 terms are four neighboring columns in all lanes of
                        the quad; each lane gets back the columns it had. A row of the operand is such a four of a row.
    the others          numbers in two registers of a lane become their sum and their difference

Head dims that are not a power of two are cut into powers of two, the largest first: what is left after the last full
group lies in one group.

The sums are those of quantization/rotation.py, in another order and with the roundings of tensor cores.

The functions are ordinary Python over the run-time values of one thread: no branch depends on a value.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....geometry.integers import ceil_div, select
from ..blocks.memory.ptx import multiply_16x16

QUAD = 4
LANE_COLUMNS = 16  # columns of a lane in a group
GROUP = QUAD * LANE_COLUMNS
BOTH_SIGNS = 0x80008000 - (1 << 32)  # the sign bits of the two 16-bit numbers in a register

Groups = list[list[Float32]]  # a lane's values of a row: LANE_COLUMNS for each group


def num_groups(head_dim: int) -> int:
    """The number of groups of a row; in the last one, lanes past head_dim have nothing."""
    return ceil_div(head_dim, GROUP)


def blocks_of(head_dim: int) -> list[int]:
    """The number of columns of each block: the powers of two whose sum is head_dim, the largest first."""
    return [1 << i for i in reversed(range(head_dim.bit_length())) if head_dim & 1 << i]


def rotated(words: list, signs: list[Int32], head_dim: int, dtype: type[cutlass.Numeric]) -> Groups:
    """A row times H without its factor (`factors`). All lanes of a warp must call this together.

    Args:
        words: for each group the 8 registers of two 16-bit numbers; zeros in lanes past head_dim.
        signs: for each group 16 bits for the lane's columns: 1 flips the sign.
        head_dim: a multiple of 16.
    """
    groups = []
    for group in range(num_groups(head_dim)):
        # 48 columns are 32 in lanes 0 and 1, then 16 in lane 2. With 16 or 32, zeros in the other lanes do no harm.
        matrix = _signs_of_matrix(dtype, is_cut=head_dim - group * GROUP == 3 * LANE_COLUMNS)
        values: list[Float32] = []
        for half in range(2):
            w = [_with_signs(words[group][4 * half + i], signs[group] >> 8 * half & 0xFF, i) for i in range(4)]
            rows = w[0], w[2], w[1], w[3]  # columns 0 to 3 and 4 to 7 of the half
            # the resulting columns with bit 1 clear, and those with bit 1 set
            first = multiply_16x16(rows, matrix, matrix, dtype)
            second = multiply_16x16(rows, matrix, matrix ^ BOTH_SIGNS, dtype)
            values += [*first[:2], *second[:2], *first[2:], *second[2:]]
        groups.append(_butterflies(_butterflies(values, 4), 8))
    return _across_groups(groups, head_dim)


def factors(head_dim: int, lane: Int32) -> list[Float32]:
    """The factors that make H orthogonal, one for each group: size^-1/2 of the block that it lies in.

    Args: lane: 0 to 3, in the quad.
    """
    result = []
    for size in blocks_of(head_dim):
        if size >= GROUP:
            result += [Float32(size**-0.5)] * (size // GROUP)
    rest = head_dim % GROUP
    if rest == 3 * LANE_COLUMNS:
        result.append(select(lane < 2, Float32((2 * LANE_COLUMNS) ** -0.5), Float32(LANE_COLUMNS**-0.5)))
    elif rest:
        result.append(Float32(rest**-0.5))
    return result


def _signs_of_matrix(dtype: type[cutlass.Numeric], is_cut: bool) -> Int32:
    """This lane's register of the 16 x 16 signs: two rows (terms) of a column, 1 or -1.

    Lane 4 n + q of the operand has, for column n, the two terms of lane q whose bits 0 are 0 and 1. Bits 4 and 5 of the
    column are n // 2, its bit 0 is n % 2. If bit 1 of term and column are both 1, the signs are flipped once more.
    """
    lane = cute.arch.lane_idx()
    one = {cutlass.BFloat16: 0x3F803F80, cutlass.Float16: 0x3C003C00}[dtype]
    term, column = lane % QUAD, lane // 8
    both = term & column
    parity = both & 1 if is_cut else (both ^ (both >> 1)) & 1
    word = Int32(one) ^ (parity * BOTH_SIGNS) ^ ((lane // QUAD % 2) << 31)
    return select(term // 2 == column // 2, word, Int32(0)) if is_cut else word


def _with_signs(word: Int32, signs: Int32, pair: int) -> Int32:
    """The word with its two signs flipped where bits 2 pair and 2 pair + 1 of `signs` (8 bits) are 1."""
    # two copies of the bits, at such a distance that each has one bit where a sign is
    copies = signs * ((1 << 15 - 2 * pair) + (1 << 30 - 2 * pair))
    return word ^ (copies & BOTH_SIGNS)


def _butterflies(values: list, half: int) -> list:
    """The transform of one bit: values i and i + half, where i has no bit `half`, become their sum and difference."""
    result = list(values)
    for i in range(len(values)):
        if not i & half:
            a, b = values[i], values[i + half]
            result[i], result[i + half] = a + b, a - b
    return result


def _across_groups(groups: Groups, head_dim: int) -> Groups:
    """The transforms of the bits from 6 on, which number the groups, in each block."""
    done: Groups = []
    for size in blocks_of(head_dim):
        if size >= GROUP:
            block = groups[len(done) : len(done) + size // GROUP]
            columns = [list(column) for column in zip(*block, strict=True)]
            half = 1
            while half < len(block):
                columns = [_butterflies(column, half) for column in columns]
                half *= 2
            done += [list(group) for group in zip(*columns, strict=True)]
    return done + groups[len(done) :]

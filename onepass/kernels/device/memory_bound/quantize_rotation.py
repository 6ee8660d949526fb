"""The rotation of fp8.py, random signs and a Hadamard transform, on the registers of a warp.

Four lanes (a quad) share a row: lane q has the columns 16 q to 16 q + 15 of every 64, its "part" of them. Of the bits
of a column's number, 4 and 5 so say which lane, 0 to 3 which register of a part, the others which part. The transform
is a product of one for each bit, and they commute:

    bits 0, 1, 4, 5     one matrix product with 16 x 16 signs, on tensor cores (mma m16n8k16), which takes the 16-bit
                        numbers as they were loaded. Its 16 terms are four neighbouring columns in all lanes of the
                        quad; each lane gets the same columns back. A row of the operand is such a four of a row.
    the others          numbers in two registers of a lane become their sum and their difference

Head dims that are no power of two are cut into powers of two, the largest
first: what is left of them past the last 64 columns lies in one part.

All of it sums as fp8.py does, in another order and with tensor cores' roundings.

Plain Python over the run-time values of one thread: nothing here depends on a value.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....geometry.integers import ceil_div, select
from ..blocks.memory.ptx import multiply_16x16

QUAD = 4
PART = 16  # columns of a lane
GROUP = QUAD * PART
BOTH_SIGNS = 0x80008000 - (1 << 32)  # of the two 16-bit numbers in a register

Parts = list[list[Float32]]  # of a row, in one lane: PART values each


def num_parts(head_dim: int) -> int:
    """Of each lane; in the last one, lanes past head_dim have nothing."""
    return ceil_div(head_dim, GROUP)


def blocks_of(head_dim: int) -> list[int]:
    """The columns of each block: the powers of two that head_dim is the sum of, the largest first."""
    return [1 << i for i in reversed(range(head_dim.bit_length())) if head_dim & 1 << i]


def rotated(words: list, signs: list[Int32], head_dim: int, dtype: type[cutlass.Numeric]) -> Parts:
    """A row times H without its factor (`factors`). For all lanes of a warp at once.

    Args:
        words: of each part the 8 registers of two 16-bit numbers; zeros in lanes past head_dim.
        signs: of each part 16 bits for the lane's columns: 1 flips the sign.
        head_dim: a multiple of 16.
    """
    parts = []
    for part in range(num_parts(head_dim)):
        # 48 columns: 32 in lanes 0 and 1, then 16 in lane 2. Of 16 or 32, zeros in the other lanes do no harm.
        matrix = _signs_of_matrix(dtype, is_cut=head_dim - part * GROUP == 3 * PART)
        values: list[Float32] = []
        for half in range(2):
            w = [_with_signs(words[part][4 * half + i], signs[part] >> 8 * half & 0xFF, i) for i in range(4)]
            rows = w[0], w[2], w[1], w[3]  # columns 0 to 3 and 4 to 7 of the half
            # of the columns afterwards, those with bit 1 clear and those with it set
            first = multiply_16x16(rows, matrix, matrix, dtype)
            second = multiply_16x16(rows, matrix, matrix ^ BOTH_SIGNS, dtype)
            values += [*first[:2], *second[:2], *first[2:], *second[2:]]
        parts.append(_butterflies(_butterflies(values, 4), 8))
    return _across_parts(parts, head_dim)


def factors(head_dim: int, lane: Int32) -> list[Float32]:
    """What makes H orthogonal, for each part: size^-1/2 of the block that it lies in. lane: 0 to 3, in the quad."""
    result = []
    for size in blocks_of(head_dim):
        if size >= GROUP:
            result += [Float32(size**-0.5)] * (size // GROUP)
    rest = head_dim % GROUP
    if rest == 3 * PART:
        result.append(select(lane < 2, Float32((2 * PART) ** -0.5), Float32(PART**-0.5)))
    elif rest:
        result.append(Float32(rest**-0.5))
    return result


def _signs_of_matrix(dtype: type[cutlass.Numeric], is_cut: bool) -> Int32:
    """This lane's register of the 16 x 16 signs: two rows (terms) of a column, 1 or -1.

    Lane 4 n + q of the operand has the terms with lane q, their bits 0 being 0 and 1, of column n: bits 4 and 5 are
    n // 2, bit 0 is n % 2. Bit 1 of term and column, if both are 1, flips the signs once more.
    """
    lane = cute.arch.lane_idx()
    one = {cutlass.BFloat16: 0x3F803F80, cutlass.Float16: 0x3C003C00}[dtype]
    term, column = lane % QUAD, lane // 8
    both = term & column
    parity = both & 1 if is_cut else (both ^ (both >> 1)) & 1
    word = Int32(one) ^ (parity * BOTH_SIGNS) ^ ((lane // QUAD % 2) << 31)
    return select(term // 2 == column // 2, word, Int32(0)) if is_cut else word


def _with_signs(word: Int32, signs: Int32, pair: int) -> Int32:
    """The word with the signs flipped for which bits 2 pair and 2 pair + 1 of `signs`, 8 bits, are 1."""
    # two copies of the bits, so far apart that each has one where a sign is
    copies = signs * ((1 << 15 - 2 * pair) + (1 << 30 - 2 * pair))
    return word ^ (copies & BOTH_SIGNS)


def _butterflies(values: list, half: int) -> list:
    """One bit: places i and i + half become sum and difference, where i has no bit `half`."""
    result = list(values)
    for i in range(len(values)):
        if not i & half:
            a, b = values[i], values[i + half]
            result[i], result[i + half] = a + b, a - b
    return result


def _across_parts(parts: Parts, head_dim: int) -> Parts:
    """The bits from 6 on of each block."""
    done: Parts = []
    for size in blocks_of(head_dim):
        if size >= GROUP:
            block = parts[len(done) : len(done) + size // GROUP]
            columns = [list(column) for column in zip(*block, strict=True)]
            half = 1
            while half < len(block):
                columns = [_butterflies(column, half) for column in columns]
                half *= 2
            done += [list(part) for part in zip(*columns, strict=True)]
    return done + parts[len(done) :]

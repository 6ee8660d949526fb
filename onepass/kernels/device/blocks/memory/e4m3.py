"""e4m3 numbers as operands of the fp16 mma: half the bytes in memory and in shared memory, converted in registers.

Every e4m3 number is an fp16 number, and one instruction (from compute capability 8.9 on) converts two. Fragments of
16-bit values come out of shared memory by ldmatrix, which does not know of bytes: it sees K and V as pairs of bytes.
The order of values that results is corrected where this costs nothing:

    K   Lane t of a quad gets four neighboring bytes of a row, columns 4t .. 4t+3 of 16, as one register, and operand B
        wants 2t, 2t+1, 2t+8, 2t+9. The order of a sum over columns is free, so Q is put into the same order.
    V   Transposed, a register has the columns 2n, 2n+1 of two neighboring keys. A byte permutation separates even
        columns from odd ones, two 8-column blocks of O. The columns of O come out in another order, which `store_runs`
        takes into account.

Q in bf16 has a wider range than fp16. Its rows are multiplied by a power of two that brings their largest value to
2^14, and the scores of a row by the reciprocal. This is exact except for values below 2^-28 of the row's largest, which
lose bits below 2^-38 of it, far less than float32 sums lose. P is in fp16, finer than bf16.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32

from .ptx import bits, emit

_UNPACK = "mov.b32 {low, high}, word; cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high;"


@cute.jit
def neighbors_as_fp16(word: Int32) -> tuple:
    """Four e4m3 in a register as fp16 in two: bytes 0 and 1, bytes 2 and 3."""
    return emit("{ .reg .b32 word; .reg .b16 low, high; mov.b32 word, {$r0}; " + _UNPACK + " }", [word], [Int32, Int32])


@cute.jit
def neighbors_as_bf16(word: Int32) -> tuple:
    """Four e4m3 in a register as bf16 in two: bytes 0 and 1, bytes 2 and 3. Each e4m3 number is a bf16 number, too."""
    return emit(
        "{ .reg .b16 low, high, a, b; .reg .b32 first, second; .reg .f32 x, y; mov.b32 {low, high}, {$r0};"
        " cvt.rn.f16x2.e4m3x2 first, low; cvt.rn.f16x2.e4m3x2 second, high;"
        " mov.b32 {a, b}, first; cvt.f32.f16 x, a; cvt.f32.f16 y, b; cvt.rn.bf16x2.f32 {$w0}, y, x;"
        " mov.b32 {a, b}, second; cvt.f32.f16 x, a; cvt.f32.f16 y, b; cvt.rn.bf16x2.f32 {$w1}, y, x; }",
        [word],
        [Int32, Int32],
    )


@cute.jit
def evens_and_odds_as_fp16(word: Int32) -> tuple:
    """Four e4m3 in a register as fp16 in two: bytes 0 and 2, bytes 1 and 3."""
    return emit(
        "{ .reg .b32 word; .reg .b16 low, high; prmt.b32 word, {$r0}, 0, 0x3120; " + _UNPACK + " }",
        [word],
        [Int32, Int32],
    )


@cute.jit
def pair_as_floats(pair: Int32) -> tuple:
    """The two e4m3 in the low 16 bits, as float32."""
    return emit(
        "{ .reg .b16 low, high; .reg .b32 both; mov.b32 {low, high}, {$r0}; cvt.rn.f16x2.e4m3x2 both, low;"
        " mov.b32 {low, high}, both; cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }",
        [pair],
        [Float32, Float32],
    )


@cute.jit
def pack_two(low: Float32, high: Float32) -> Int16:
    """Two floats rounded to e4m3, in 16 bits. Magnitudes above 448 become 448; NaN stays NaN."""
    word = emit(
        "{ .reg .b16 pair, zero; mov.b16 zero, 0; cvt.rn.satfinite.e4m3x2.f32 pair, {$r1}, {$r0};"
        " mov.b32 {$w0}, {pair, zero}; }",
        [low, high],
        [Int32],
    )
    return word.to(Int16)


# log2 of a row's largest value once it is in fp16's range
LARGEST_EXPONENT = 14
_BIAS, _MANTISSA_BITS, _SMALLEST = 127, 23, 1 + LARGEST_EXPONENT


@cute.jit
def factors_of_row(largest: Float32) -> tuple:
    """A power of two that brings a row with this largest magnitude to fp16's range, and its reciprocal.

    Rows of zeros, tiny rows, and rows with infinities or NaN get a factor that is a number as well.
    """
    exponent = bits(largest) >> _MANTISSA_BITS  # biased; there is no sign
    exponent = cutlass.max(exponent, Int32(_SMALLEST))
    factor, reciprocal = 2 * _BIAS + LARGEST_EXPONENT - exponent, exponent - LARGEST_EXPONENT
    return _float(factor << _MANTISSA_BITS), _float(reciprocal << _MANTISSA_BITS)


def _float(x: Int32) -> Float32:
    return emit("mov.b32 {$w0}, {$r0};", [x], [Float32])

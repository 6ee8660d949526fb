"""A row of attention computed straight from global memory by one warp, to repair a tile after a NaN.

A tile multiplies the V of hidden keys by P = 0, and 0 * NaN = NaN: a NaN or infinity in V at a key of a masked block
reaches all rows of the tile, even those that do not see the key. This is rare and costs nothing to allow, so it is
repaired afterwards: `has_nan` looks at a finished tile, and `recompute_row` replaces a row by what its visible keys
give. gradients.py does this for gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .....geometry.integers import ceil_div, minimum
from .....geometry.tile_scheduler import LANES
from ..memory import warp
from ..softmax.modifiers import PairsOfQuery
from ..softmax.online import LN2, ScoreFactors
from ..softmax.sinks import weight_of_sink

VECTOR_BYTES = 16  # bytes of a load
HIDDEN = 3e38  # the weight of a pair that is left out
# tanh(x) = x + x^3 (c0 + c1 x^2 + ..) up to x = 0.5, relative error 2^-23
TANH_SERIES = (-0.3333331, 0.13330476, -0.05338711, 0.017988745)
TANH_SERIES_END = 0.5


class SourceTensors(NamedTuple):
    """q, k, v and, in a backward, dout for ordinary loads: (seqlen, dim, heads, batch), see layouts.rows_first."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    dout: cute.Tensor | None = None


@cute.jit
def sum_of_products(acc: cute.Tensor, r: cutlass.Constexpr[int]) -> Float32:
    """A sum of products of two values each: NaN if there is a NaN among this thread's values of row r.

    It takes half the instructions of a sum of values. The result is infinite or NaN also where a product or their sum
    exceeds 3e38.
    """
    sums = [Float32(0.0), Float32(0.0)]
    for c in cutlass.range_constexpr(0, cute.size(acc, mode=[1]), 2):
        sums[c // 2 % 2] = acc[r, c] * acc[r, c + 1] + sums[c // 2 % 2]
    return sums[0] + sums[1]


@cute.jit
def has_nan(acc_o: cute.Tensor, is_row: Boolean) -> Boolean:
    """Whether a NaN or infinity of V is in the rows of this warp.

    It is in every row (as NaN where the key is hidden), so each thread looks at its first row.

    Args: is_row: whether that row exists (rows past the last one may hold arbitrary values).
    """
    total = sum_of_products(acc_o, 0)
    return Boolean(cute.arch.vote_any_sync(is_row and total - total != 0.0))


@cute.jit
def has_nan_in_a_row(acc_o: cute.Tensor, is_row: list) -> Boolean:
    """`has_nan` where one row may have a NaN and another not: a thread looks at both of its rows."""
    found = Boolean(False)
    for r in cutlass.range_constexpr(2):
        total = sum_of_products(acc_o, r)
        found = found or (is_row[r] and total - total != 0.0)
    return Boolean(cute.arch.vote_any_sync(found))


@cute.jit
def soft_cap(score: Float32, tanh_scale: Float32, dtype: cutlass.Constexpr = None) -> Float32:
    """tanh(softmax_scale * score / softcap) = 1 - 2 / (1 + exp2(tanh_scale * score)).

    tanh.approx would be one instruction, with an error of 5e-4 * softcap in the score.

    Args: dtype: the dtype of the inputs. The formula has an absolute error of 1e-7; with float32, the error of small
    values is relative as well.
    """
    tanh = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + cute.math.exp2(score * tanh_scale, fastmath=True))
    if cutlass.const_expr(dtype is Float32):
        x = score * (tanh_scale * (0.5 * LN2))
        square = x * x
        series = Float32(TANH_SERIES[-1])
        for c in cutlass.range_constexpr(len(TANH_SERIES) - 1):
            series = series * square + TANH_SERIES[-2 - c]
        tanh = x * square * series + x if square < TANH_SERIES_END * TANH_SERIES_END else tanh
    return tanh


@cute.jit
def dot(a: cute.Tensor, b: cute.Tensor, vector_bytes: cutlass.Constexpr[int] = VECTOR_BYTES) -> Float32:
    """a . b of two contiguous rows in global memory, in float32, by loads of vector_bytes."""
    vector = vector_bytes * 8 // a.element_type.width
    a, b = (cute.flat_divide(row, (vector,)) for row in (a, b))
    a_vector, b_vector = (cute.make_rmem_tensor((vector,), row.element_type) for row in (a, b))
    total = Float32(0.0)
    for i in cutlass.range(cute.size(a, mode=[1]), unroll=2):
        cute.autovec_copy(a[None, i], a_vector)
        cute.autovec_copy(b[None, i], b_vector)
        for c in cutlass.range_constexpr(vector):
            total += a_vector[c].to(Float32) * b_vector[c].to(Float32)
    return total


@cute.jit
def row_sums(row: cute.Tensor) -> cute.Tensor:
    """Zeros for sums over rows like this one: a lane has every 32nd column."""
    acc = cute.make_rmem_tensor((ceil_div(cute.size(row), LANES),), Float32)
    acc.fill(0.0)
    return acc


@cute.jit
def add_rows(
    acc: cute.Tensor,
    weight: Float32,
    rows: cute.Tensor,
    first: Int32,
    count: Int32,
    skips: cutlass.Constexpr[bool] = False,
):
    """acc += the sum over the first `count` lanes of weight times row `first` + lane of rows (.., columns).

    Args: skips: whether rows whose weight is HIDDEN are left out.
    """
    lane, columns = cute.arch.lane_idx(), rows.shape[1]
    for i in cutlass.range(count, unroll=1):
        weight_i = warp.broadcast(weight, i)
        for c in cutlass.range_constexpr(cute.size(acc)):
            column = minimum(lane + c * LANES, columns - 1)
            if cutlass.const_expr(skips):
                term = weight_i * rows[first + i, column].to(Float32)
                acc[c] = acc[c] + (Float32(0.0) if weight_i == HIDDEN else term)
            else:
                acc[c] = acc[c] + weight_i * rows[first + i, column].to(Float32)


@cute.jit
def is_lost(acc: cute.Tensor) -> Boolean:
    """Whether all columns are NaN, which nothing added to them changes."""
    is_number = Boolean(False)
    for c in cutlass.range_constexpr(cute.size(acc)):
        is_number = is_number or acc[c] == acc[c]
    return not Boolean(cute.arch.vote_any_sync(is_number))


@cute.jit
def write_row(row: cute.Tensor, acc: cute.Tensor, weight: Float32):
    """row = weight * acc."""
    lane = cute.arch.lane_idx()
    for c in cutlass.range_constexpr(cute.size(acc)):
        if lane + c * LANES < cute.size(row):
            row[lane + c * LANES] = (acc[c] * weight).to(row.element_type)


@cute.jit
def recompute_row(
    q: cute.Tensor,  # (head_dim,)
    mK: cute.Tensor,  # (seqlen_k, head_dim)
    mV: cute.Tensor,  # (seqlen_k, head_dim_v)
    out: cute.Tensor,  # (head_dim_v,)
    low: Int32,
    high: Int32,
    factors: ScoreFactors,
    row_max: Float32,
    weight: Float32,
    vector_bytes: cutlass.Constexpr[int] = VECTOR_BYTES,
    pairs: PairsOfQuery | None = None,
):
    """out = weight * sum over the keys [low, high) of exp2(scale_log2 * (score - row_max)) * v, by all lanes of a warp.

    A lane computes the whole score of one key of every 32; in the sum over keys it has every 32nd column.

    Args: pairs: the modifiers of the row's pairs.
    """
    scale_log2, tanh_scale = factors
    reference = (row_max if row_max > -Float32.inf else Float32(0.0)) * scale_log2
    acc = row_sums(out)
    lost = Boolean(False)
    while low < high and not lost:
        score = dot(q, mK[minimum(low + cute.arch.lane_idx(), high - 1), None], vector_bytes)
        if cutlass.const_expr(tanh_scale is not None):
            score = soft_cap(score, tanh_scale, q.element_type)
        if cutlass.const_expr(pairs is not None):
            score = pairs.score(score, low + cute.arch.lane_idx())
        p = cute.math.exp2(score * scale_log2 - reference, fastmath=True)
        if cutlass.const_expr(pairs is not None):
            p = pairs.weight(p, low + cute.arch.lane_idx())
            p = Float32(HIDDEN) if score == -Float32.inf else p
        add_rows(acc, p, mV, low, minimum(high - low, LANES), pairs is not None)
        lost = is_lost(acc)
        low += LANES
    write_row(out, acc, weight)


@cute.jit
def attend_row(
    q: cute.Tensor,  # (head_dim,)
    mK: cute.Tensor,  # (seqlen_k, head_dim)
    mV: cute.Tensor,  # (seqlen_k, head_dim_v)
    out: cute.Tensor,  # (head_dim_v,)
    low: Int32,
    high: Int32,
    scale_log2: Float32,
    tanh_scale: Float32 | None,
    sink: Float32 | None,
) -> Float32:
    """Attention of a row over the keys [low, high), in two passes over them; writes out. Returns: lse."""
    largest, start = -Float32.inf, low
    while start < high:
        largest = cute.arch.fmax(largest, lane_exponent(q, mK, start, high, scale_log2, tanh_scale))
        start += LANES
    reference = cute.arch.warp_reduction_max(largest)
    is_empty, lse_of_empty = low >= high, -Float32.inf
    if cutlass.const_expr(sink is not None):
        sink_log2, lse_of_empty = sink * (1.0 / LN2), sink
        reference = cute.arch.fmax(reference, sink_log2)
    reference = Float32(0.0) if reference == -Float32.inf else reference
    acc, total, start = row_sums(out), Float32(0.0), low
    while start < high:
        exponent = lane_exponent(q, mK, start, high, scale_log2, tanh_scale)
        p = cute.math.exp2(exponent - reference, fastmath=True)
        add_rows(acc, p, mV, start, minimum(high - start, LANES))
        total += p
        start += LANES
    total = cute.arch.warp_reduction_sum(total)
    if cutlass.const_expr(sink is not None):
        total += weight_of_sink(sink, sink_log2 - reference)
    write_row(out, acc, Float32(0.0) if is_empty else cute.arch.rcp_approx(total))
    return lse_of_empty if is_empty else (reference + cute.math.log2(total, fastmath=True)) * LN2


@cute.jit
def lane_exponent(
    q: cute.Tensor, mK: cute.Tensor, start: Int32, high: Int32, scale_log2: Float32, tanh_scale: Float32 | None
) -> Float32:
    """scale_log2 * score of key start + lane; -inf from key `high` on."""
    key = start + cute.arch.lane_idx()
    score = dot(q, mK[minimum(key, high - 1), None])
    if cutlass.const_expr(tanh_scale is not None):
        score = soft_cap(score, tanh_scale, q.element_type)
    return score * scale_log2 if key < high else -Float32.inf

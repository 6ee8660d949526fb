"""Where the backward keeps -lse and -delta of its query rows: one row of float32 for each block of queries."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32

from .....geometry.integers import ceil_div, minimum
from .....geometry.tile_scheduler import LANES
from . import warp
from .ptx import copy_of

LOG2_E = math.log2(math.e)


def stats_position(row: Int32) -> Int32:
    """The index of a row's lse and delta among those of its block.

    A thread of the main kernel needs four of sixteen rows, two of each eight: these four lie together, in 16 bytes.
    """
    upper, in_eight = row // 8 % 2, row % 8
    return row // 16 * 16 + in_eight // 2 * 4 + upper * 2 + in_eight % 2


@cute.jit
def stats_of_row(stats: cute.Tensor, row: Int32) -> tuple[Float32, Float32]:
    """-lse and -delta of a row. Args: stats: (blocks, 2 * tile_m). row: counted from the first block of stats."""
    tile_m = cutlass.const_expr(cute.size(stats, mode=[1]) // 2)
    block, position = row // tile_m, stats_position(row % tile_m)
    return stats[block, position], stats[block, tile_m + position]


@cute.jit
def row_products(
    out: cute.Tensor,  # (rows, head_dim_v), like dout
    dout: cute.Tensor,
    count: cutlass.Constexpr[int],
    end: Int32 | None,
    vector: cutlass.Constexpr[int],
    unroll: cutlass.Constexpr[int],
) -> Float32:
    """rowsum(dout * out) of up to 32 rows: lane i gets that of row i. For a whole warp.

    The sums are the same bit by bit whatever `unroll`, and for zeros after the last column.

    Args:
        count: how many rows.
        end: rows from this one on are not read; the one before it is read in their place. None: all may be read.
        vector: elements of a load.
        unroll: how many times a lane loads before it needs what it has loaded.
    """
    num_vectors = cute.size(out, mode=[1]) // vector
    lanes = min(LANES, 1 << (num_vectors - 1).bit_length())  # lanes of a row
    rows_at_once = LANES // lanes
    lane = copy_of(cute.arch.lane_idx())
    part = lane % lanes
    a, b = (cute.make_rmem_tensor((vector,), out.element_type) for _ in range(2))
    result = Float32(0.0)
    for i in cutlass.range(ceil_div(count, rows_at_once), unroll=unroll):
        row = i * rows_at_once + lane // lanes
        if cutlass.const_expr(end is not None):
            row = minimum(row, end - 1)
        total, is_zero = Float32(0.0), Boolean(True)
        for start in cutlass.range_constexpr(0, num_vectors, lanes):
            if cutlass.const_expr(start + lanes > num_vectors):
                a.fill(0)
                b.fill(0)
                if start + part < num_vectors:
                    load_vector(out, row, start + part, a)
                    load_vector(dout, row, start + part, b)
            else:
                load_vector(out, row, start + part, a)
                load_vector(dout, row, start + part, b)
            for c in cutlass.range_constexpr(vector):
                total += a[c].to(Float32) * b[c].to(Float32)
            is_zero = is_zero and all_zero(a)
        # out of an empty row is 0, and its product, which a sink sees, is 0 even if dout is NaN
        total = cute.arch.warp_reduction_sum(Float32(0.0) if is_zero else total, threads_in_group=lanes)
        total = warp.broadcast(total, lane % rows_at_once * lanes)
        result = total if lane // rows_at_once == i else result
    return result


@cute.jit
def write_stats(
    stats: cute.Tensor,  # (2 * tile_m,) of a block
    first: Int32 | int,
    count: cutlass.Constexpr[int],
    num_rows: Int32,
    product: Float32,
    lse: cute.Tensor,  # (rows,) from the first row on, like dlse
    dlse: cute.Tensor | None,
):
    """Write -lse * log2(e) and -delta = dlse - product of rows of a block. For a whole warp.

    Args:
        first, count: the number of the first of these rows in the block, and how many they are: up to 32.
        num_rows: how many of them and of the rows after them exist.
        product: from `row_products`.
    """
    tile_m, lane = cute.size(stats) // 2, copy_of(cute.arch.lane_idx())
    if lane < count:
        delta, row_lse = Float32(0.0), Float32.inf
        if lane < num_rows:
            delta, row_lse = product, lse[lane]
            if cutlass.const_expr(dlse is not None):
                delta -= dlse[lane]
        is_empty = row_lse == -Float32.inf
        position = stats_position(first + lane)
        stats[position] = -Float32.inf if is_empty else -row_lse * LOG2_E
        stats[tile_m + position] = Float32(0.0) if is_empty else -delta


def load_vector(t: cute.Tensor, row: Int32, number: Int32, target: cute.Tensor):
    """Load a vector of a row of t."""
    vectors = cute.flat_divide(t[row, None], (cute.size(target),))
    cute.autovec_copy(vectors[None, number], target)


def all_zero(values: cute.Tensor) -> Boolean:
    """Whether all values of a vector are +0."""
    words = cute.recast_tensor(values, Int16 if cute.size(values) * values.element_type.width == 16 else Int32)
    found = words[0]
    for i in range(1, cute.size(words)):
        found = found | words[i]
    return found == 0

"""Writing a finished tile of rows: out straight from registers, lse beside it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .....geometry.integers import ceil_div
from .layouts import column_offset
from .ptx import pack_pair, transpose_in_quad


@cute.jit
def store_rows(
    acc_o: cute.Tensor, weights: cute.Tensor, out_rows: list, is_row: list, lane_in_quad: Int32, first_block=0
):
    """out_rows[r] = weights[r] * acc_o[r] for the thread's two rows, 16 bytes a store.

    Args:
        acc_o: (2, columns) of this thread; every 8-column block of a row is spread over its quad, 2 columns a lane.
        out_rows: (head_dim_v,) each, contiguous.
        is_row: whether each of the rows exists and is to be written.
        first_block: the number of the first 8-column block of out that acc_o holds.

    Four blocks at a time are transposed over the quad, after which lane i holds all 8 columns of block i: a quad
    writes 64 contiguous bytes. No shared memory and no barrier, so a warp that is done goes on to its next tile.
    """
    head_dim_v = cute.size(out_rows[0])
    num_blocks = cute.size(acc_o, mode=[1]) // 2
    vector = cute.make_rmem_tensor((4,), Int32)
    for r in cutlass.range_constexpr(2):
        row_words = cute.recast_tensor(out_rows[r], Int32)  # (head_dim_v / 2,)
        vectors = cute.flat_divide(row_words, (4,))  # (4, head_dim_v / 8)
        for first in cutlass.range_constexpr(0, num_blocks, 4):
            words = [
                pack_pair(acc_o[r, 2 * b] * weights[r], acc_o[r, 2 * b + 1] * weights[r], out_rows[r].element_type)
                for b in range(first, first + 4)
            ]
            words = transpose_in_quad(*words, lane_in_quad)
            for i in cutlass.range_constexpr(4):
                vector[i] = words[i]
            block = first_block + first + lane_in_quad
            if is_row[r] and block < head_dim_v // 8:
                cute.autovec_copy(vector, vectors[None, block])


@cute.jit
def store_pairs(
    acc_o: cute.Tensor,
    weights: cute.Tensor,
    out_rows: list,
    is_row: list,
    lane_in_quad: Int32,
    vector_bytes: cutlass.Constexpr[int],
    first_block=0,
):
    """`store_rows` for rows that are not 16-byte aligned: a lane writes its own two columns of each block.

    Args: vector_bytes: 2 to write columns one by one; with larger values both are written at once.
    """
    head_dim_v, dtype = cute.size(out_rows[0]), out_rows[0].element_type
    width = 1 if cutlass.const_expr(vector_bytes == 2) else 2
    values = cute.make_rmem_tensor((width,), dtype)
    for r in cutlass.range_constexpr(2):
        vectors = cute.flat_divide(out_rows[r], (width,))
        for c in cutlass.range_constexpr(0, min(cute.size(acc_o, mode=[1]), 2 * ceil_div(head_dim_v, 8)), width):
            for i in cutlass.range_constexpr(width):
                values[i] = (acc_o[r, c + i] * weights[r]).to(dtype)
            column = 8 * first_block + column_offset(c) + 2 * lane_in_quad
            if is_row[r] and column < head_dim_v:
                cute.autovec_copy(values, vectors[None, column // width])


@cute.jit
def store_16_bits(
    acc_o: cute.Tensor,
    weights: cute.Tensor,
    out_rows: list,
    is_row: list,
    lane_in_quad: Int32,
    vector_bytes: cutlass.Constexpr[int],
    first_block=0,
):
    """`store_rows`, or `store_pairs` if 16 does not divide the addresses and the rows of out.

    Args: vector_bytes: the bytes that divide these addresses and rows.
    """
    if cutlass.const_expr(vector_bytes == 16):
        store_rows(acc_o, weights, out_rows, is_row, lane_in_quad, first_block)
    else:
        store_pairs(acc_o, weights, out_rows, is_row, lane_in_quad, vector_bytes, first_block)


@cute.jit
def store_runs(
    acc_o: cute.Tensor,
    weights: cute.Tensor,
    out_rows: list,
    is_row: list,
    lane_in_quad: Int32,
    run: cutlass.Constexpr[int],
    width: cutlass.Constexpr[int],
    first_block=0,
):
    """out_rows[r] = weights[r] * acc_o[r] for lanes that hold `run` neighboring columns of each 4 * run.

    Args:
        acc_o: (2, columns). In every run / 2 blocks of 8 columns of the accumulator, the first columns of the lane's
            pairs are the first half of the run, the second columns are the other half.
        run: 8 in float32, 4 over an e4m3 cache (blocks/memory/e4m3.py).
        width: elements of a store.
    """
    head_dim_v, dtype = cute.size(out_rows[0]), out_rows[0].element_type
    count = min(cute.size(acc_o, mode=[1]), run * ceil_div(head_dim_v, 4 * run))
    values = cute.make_rmem_tensor((width,), dtype)
    for r in cutlass.range_constexpr(2):
        vectors = cute.flat_divide(out_rows[r], (width,))
        for first in cutlass.range_constexpr(0, count, width):
            number, offset = first // run, first % run
            for i in cutlass.range_constexpr(width):
                pair, second = (offset + i) % (run // 2), (offset + i) // (run // 2)
                values[i] = (acc_o[r, run * number + 2 * pair + second] * weights[r]).to(dtype)
            column = 8 * first_block + 4 * run * number + run * lane_in_quad + offset
            if is_row[r] and column < head_dim_v:
                cute.autovec_copy(values, vectors[None, column // width])


@cute.jit
def store_lse(lse: Float32, mLSE: cute.Tensor, row: Int32, is_row: Boolean, lane_in_quad: Int32):
    """mLSE[row] = lse, by one lane of the row's quad."""
    if lane_in_quad == 0 and is_row:
        mLSE[row] = lse

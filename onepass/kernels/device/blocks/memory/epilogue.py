"""Writing a finished tile of rows: out straight from registers, and lse."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .....geometry.integers import ceil_div
from .layouts import column_offset
from .ptx import pack_pair, store_matrices, transpose_in_quad

STAGED_ROWS, STAGED_COLUMNS = 16, 64  # of 16-bit values, which `store_rows_staged` has in shared memory at a time


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
                for b in range(first, min(first + 4, num_blocks))
            ]
            words = transpose_in_quad(*words, *[Int32(0)] * (4 - len(words)), lane_in_quad)
            for i in cutlass.range_constexpr(4):
                vector[i] = words[i]
            block = first_block + first + lane_in_quad
            is_column = block < head_dim_v // 8
            if cutlass.const_expr(first + 4 > num_blocks):  # others hold the blocks after them
                is_column = is_column and first + lane_in_quad < num_blocks
            if is_row[r] and is_column:
                cute.autovec_copy(vector, vectors[None, block])


@cute.jit
def store_rows_staged(
    acc: cute.Tensor, weight: Float32, out: cute.Tensor, first_row: Int32, end: Int32, scratch: cute.Pointer
):
    """out[first_row + i] = weight * row i of a warp's 16 rows, up to row `end`, through shared memory.

    Needs a sixth of the instructions of `store_rows` (which exchanges values by shuffles) and writes 128 contiguous
    bytes of a row at once, but room in shared memory. For a whole warp; other warps need not take part.

    Args:
        acc: (2, columns) of this thread; every 8-column block of a row is spread over its quad, 2 columns a lane. 16
            divides the columns.
        out: (rows, head_dim), each row contiguous and 16-byte aligned.
        scratch: 2 KB of shared memory for this warp alone, 128-byte aligned; free again when all lanes return.

    A row of 64 columns takes 128 bytes of it, in which 16-byte vectors are exchanged: vector v of row i lies at
    v xor (i mod 8), so that neither stmatrix nor the reads have bank conflicts.
    """
    lane = cute.arch.lane_idx()
    start = scratch.toint()
    # stmatrix: lane 8 m + i names row i of a matrix; matrices 0 and 1 are rows 0 to 7 and 8 to 15 of one block of 8
    # columns, 2 and 3 of the next block
    written = start + lane % 16 * 128 + ((lane // 16) ^ (lane % 8)) * 16
    # reading: a vector a lane, four rows at a time
    row, vector = lane // 8, lane % 8
    read = start + row * 128 + (vector ^ row) * 16
    num_vectors = cute.size(out, mode=[1]) // 8
    words = cute.make_rmem_tensor((4,), Int32)
    num_blocks = cute.size(acc, mode=[1]) // 2
    for first in cutlass.range_constexpr(0, num_blocks, STAGED_COLUMNS // 8):
        for b in cutlass.range_constexpr(0, min(STAGED_COLUMNS // 8, num_blocks - first), 2):
            packed = [
                pack_pair(acc[r, 2 * block] * weight, acc[r, 2 * block + 1] * weight, out.element_type)
                for block in (first + b, first + b + 1)
                for r in range(2)
            ]
            store_matrices(written ^ (16 * b), *packed)
        cute.arch.sync_warp()
        for j in cutlass.range_constexpr(STAGED_ROWS // 4):
            address = (read ^ (64 * (j % 2))) + 512 * j
            source = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout((4,))), words)
            out_row = first_row + 4 * j + row
            if out_row < end and first + vector < num_vectors:
                vectors = cute.flat_divide(cute.recast_tensor(out[out_row, None], Int32), (4,))
                cute.autovec_copy(words, vectors[None, first + vector])
        cute.arch.sync_warp()


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
    """`store_rows`, or `store_pairs` if 16 does not divide the addresses and the rows of out, or out is in float32.

    Args: vector_bytes: the bytes that divide these addresses and rows.
    """
    if cutlass.const_expr(vector_bytes == 16 and out_rows[0].element_type is not Float32):
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

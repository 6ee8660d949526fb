"""Writing a finished tile of rows: out straight from registers, lse beside it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .ptx import pack_pair, transpose_in_quad


@cute.jit
def store_rows(
    acc_o: cute.Tensor, weights: cute.Tensor, mO: cute.Tensor, row: Int32, seqlen_q: Int32, lane_in_quad: Int32
):
    """out[row + 8 r] = weights[r] * acc_o[r] for the thread's two rows, 16 bytes a store.

    Args:
        acc_o: (2, columns) of this thread; every 8-column block of a row is spread over its quad, 2 columns a lane.
        mO: (seqlen_q, head_dim_v) of one head, rows contiguous. Rows from seqlen_q on are not written.

    Four blocks at a time are transposed over the quad, after which lane i holds all 8 columns of block i: a quad
    writes 64 contiguous bytes. No shared memory and no barrier, so a warp that is done goes on to its next tile.
    """
    head_dim_v = cute.size(mO, mode=[1])
    num_blocks = cute.size(acc_o, mode=[1]) // 2
    vector = cute.make_rmem_tensor((4,), Int32)
    for r in cutlass.range_constexpr(2):
        is_row = row + 8 * r < seqlen_q
        row_words = cute.recast_tensor(mO[row + 8 * r, None], Int32)  # (head_dim_v / 2,)
        vectors = cute.flat_divide(row_words, (4,))  # (4, head_dim_v / 8)
        for first in cutlass.range_constexpr(0, num_blocks, 4):
            words = [
                pack_pair(acc_o[r, 2 * b] * weights[r], acc_o[r, 2 * b + 1] * weights[r], mO.element_type)
                for b in range(first, first + 4)
            ]
            words = transpose_in_quad(*words, lane_in_quad)
            for i in cutlass.range_constexpr(4):
                vector[i] = words[i]
            block = first + lane_in_quad
            if is_row and block < head_dim_v // 8:
                cute.autovec_copy(vector, vectors[None, block])


@cute.jit
def store_lse(lse: Float32, mLSE: cute.Tensor, row: Int32, seqlen_q: Int32, lane_in_quad: Int32):
    """mLSE[row] = lse, by one lane of the row's quad."""
    if lane_in_quad == 0 and row < seqlen_q:
        mLSE[row] = lse

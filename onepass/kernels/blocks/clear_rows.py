"""Zeros in place of what lies past the end of a sequence in shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .integers import maximum


@cute.jit
def clear_rows(tile: cute.Tensor, first: Int32, thread: Int32, num_threads: cutlass.Constexpr[int]):
    """Zeros in rows `first` (any number) to the last one of a tile (rows, columns), 16 bytes a store.

    For GEMMs to see them, each of the threads needs a proxy fence afterwards, and all of them a barrier.
    """
    zeros = cute.make_rmem_tensor((8,), tile.element_type)
    zeros.fill(0.0)
    first = maximum(first, 0)
    num_rows, vectors_per_row = cute.size(tile, mode=[0]), cute.size(tile, mode=[1]) // 8
    vectors = cute.zipped_divide(tile, (1, 8))  # ((1, 8), (row, vector))
    for i in cutlass.range(thread, (num_rows - first) * vectors_per_row, num_threads, unroll=1):
        row, vector = first + i // vectors_per_row, i % vectors_per_row
        cute.autovec_copy(zeros, vectors[(0, None), (row, vector)])

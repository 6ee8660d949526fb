"""Clearing what lies past the end of a sequence in shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .....geometry.integers import maximum


@cute.jit
def clear_rows(tile: cute.Tensor, first: Int32, thread: Int32, num_threads: cutlass.Constexpr[int]):
    """Write zeros to rows `first` (any number) to the last one of a tile (rows, columns), 16 bytes a store.

    For GEMMs to see the zeros, each of the threads needs a proxy fence afterwards, and all of them a barrier.
    """
    zeros = cute.make_rmem_tensor((8,), tile.element_type)
    zeros.fill(0.0)
    first = maximum(first, 0)
    num_rows, vectors_per_row = cute.size(tile, mode=[0]), cute.size(tile, mode=[1]) // 8
    vectors = cute.zipped_divide(tile, (1, 8))  # ((1, 8), (row, vector))
    for i in cutlass.range(thread, (num_rows - first) * vectors_per_row, num_threads, unroll=1):
        row, vector = first + i // vectors_per_row, i % vectors_per_row
        cute.autovec_copy(zeros, vectors[(0, None), (row, vector)])


KEY_RUN = 16  # keys that `fp8.keys_last` reorders among themselves, and bytes of a vector
KEYS_OF_WORD = (0, 1, 8, 9)  # the keys of word q of a run, minus 2 q


@cute.jit
def clear_keys(tile: cute.Tensor, first: Int32, thread: Int32, num_threads: cutlass.Constexpr[int]):
    """Write zeros to keys `first` (any number) to the last one of V in the layout of `fp8.keys_last`.

    In the run that has key `first`, bytes of other keys are written as they were.

    Args: tile: (head_dim_v, keys) of e4m3.
    """
    first = maximum(first, 0)
    first_run = first // KEY_RUN
    num_rows, num_runs = cute.size(tile, mode=[0]), cute.size(tile, mode=[1]) // KEY_RUN
    vectors = cute.zipped_divide(tile, (1, KEY_RUN))  # ((1, KEY_RUN), (row, run))
    # masks of the bytes to keep in each word of the first run
    kept = [Int32(0) for _ in range(4)]
    for q in cutlass.range_constexpr(4):
        for i in cutlass.range_constexpr(4):
            exists = first_run * KEY_RUN + KEYS_OF_WORD[i] + 2 * q < first
            kept[q] = kept[q] | (Int32(0xFF << 8 * i if i < 3 else -(1 << 24)) if exists else Int32(0))
    bytes_of_run = cute.make_rmem_tensor((KEY_RUN,), tile.element_type)
    words = cute.recast_tensor(bytes_of_run, Int32)
    for i in cutlass.range(thread, (num_runs - first_run) * num_rows, num_threads, unroll=1):
        row, run = i % num_rows, first_run + i // num_rows
        target = vectors[(0, None), (row, run)]
        cute.autovec_copy(target, bytes_of_run)
        for q in cutlass.range_constexpr(4):
            words[q] = words[q] & (kept[q] if run == first_run else Int32(0))
        cute.autovec_copy(bytes_of_run, target)

"""Where the backward keeps -lse and -delta of its query rows: one row of float32 for each block of queries."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


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

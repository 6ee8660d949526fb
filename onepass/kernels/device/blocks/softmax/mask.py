"""Masking of one tile of scores held in wgmma accumulators."""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .....geometry.integers import maximum, minimum
from ..memory.layouts import column_offset


class Geometry(NamedTuple):
    """What decides which pairs of a sequence are visible. An unbounded side of the window is None (at compile time)."""

    seqlen_q: Int32
    seqlen_k: Int32
    window_left: Int32 | None
    window_right: Int32 | None


@cute.jit
def apply(scores: cute.Tensor, rows: list, n_start: Int32, lane_in_quad: Int32, geometry: Geometry):
    """Set hidden scores to -inf.

    Args:
        scores: (2, columns), this thread's two rows.
        rows: the positions of these rows in the sequence.
        n_start: the key at the tile's column 0.

    A row sees the keys [low, high). Both bounds become column numbers counted from the thread's first column, so that
    every comparison is with a constant.
    """
    shift = geometry.seqlen_k - geometry.seqlen_q
    first_key = n_start + 2 * lane_in_quad
    for r in cutlass.range_constexpr(2):
        position = rows[r] + shift
        high = geometry.seqlen_k
        if cutlass.const_expr(geometry.window_right is not None):
            high = minimum(high, position + geometry.window_right + 1)
        high = high - first_key
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            scores[r, c] = scores[r, c] if column_offset(c) < high else -Float32.inf
        if cutlass.const_expr(geometry.window_left is not None):
            low = maximum(position - geometry.window_left, 0) - first_key
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                scores[r, c] = scores[r, c] if column_offset(c) >= low else -Float32.inf


@cute.jit
def apply_to_keys(
    scores: cute.Tensor,
    keys: list,
    m_start: Int32,
    lane_in_quad: Int32,
    geometry: Geometry,
    hidden: cutlass.Constexpr[float] = -math.inf,
):
    """`apply` for scores with a key in each row and a query in each column.

    Args:
        keys: positions of the thread's two rows.
        m_start: the query at the tile's column 0.
        hidden: the value that replaces a hidden score.
    """
    shift = geometry.seqlen_k - geometry.seqlen_q
    first_query = m_start + 2 * lane_in_quad
    for r in cutlass.range_constexpr(2):
        high = geometry.seqlen_q
        if cutlass.const_expr(geometry.window_left is not None):
            high = minimum(high, keys[r] - shift + geometry.window_left + 1)
        high = (high if keys[r] < geometry.seqlen_k else Int32(0)) - first_query
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            scores[r, c] = scores[r, c] if column_offset(c) < high else Float32(hidden)
        if cutlass.const_expr(geometry.window_right is not None):
            low = keys[r] - shift - geometry.window_right - first_query
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                scores[r, c] = scores[r, c] if column_offset(c) >= low else Float32(hidden)

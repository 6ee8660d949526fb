"""A row of dq, dk or dv computed straight from global memory by one warp, to repair a tile that a NaN has reached.

P of a hidden pair is 0, but its dS = P (dP - delta) and its terms of dV += P^T dO, dK += dS^T Q and dQ += dS K are NaN
where dO, delta, Q or K (with V, through dP) is NaN or infinite. A finished tile is searched for NaN (`nan_rows`), like
in the forward (rows.py), and rows that have one are replaced by the sum over their visible pairs.

Pairs are those of one head and one sequence, whose rows are counted from 0.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .....geometry.block_range import key_range
from .....geometry.integers import maximum, minimum, select
from .....geometry.tile_scheduler import LANES
from ..memory.row_stats import stats_of_row
from ..softmax.mask import Geometry
from ..softmax.modifiers import Modifiers, PairsOfKey, PairsOfQuery, Place
from ..softmax.online import ScoreFactors
from .rows import (
    HIDDEN,
    VECTOR_BYTES,
    SourceTensors,
    add_rows,
    dot,
    is_lost,
    row_sums,
    soft_cap,
    sum_of_products,
    write_row,
)


@cute.jit
def nan_rows(acc: cute.Tensor, is_row: list) -> tuple[Int32, Int32]:
    """Which of a warp's 16 rows of an accumulator (2, columns) hold a NaN: a ballot for each of a thread's two rows.

    A hidden pair brings a NaN, never an infinity.

    Args: is_row: whether each row exists (rows past the last one may hold arbitrary values, and are not written).
    """
    ballots = []
    for r in cutlass.range_constexpr(2):
        total = sum_of_products(acc, r)
        ballot = Int32(cute.arch.vote_ballot_sync(is_row[r] and total != total))
        ballots.append(cute.arch.make_warp_uniform(ballot))
    return ballots[0], ballots[1]


def has_nan(ballots: tuple, i: Int32) -> Boolean:
    """Whether the i-th of the 16 rows, which is spread over a quad, is among the `nan_rows`."""
    return (select(i < 8, ballots[0], ballots[1]) >> (i % 8 * 4)) & 15 != 0


@cute.jit
def has_nan_in_row(row: cute.Tensor) -> Boolean:
    """Whether a row in global memory has a NaN. For a whole warp."""
    found = Boolean(False)
    for i in cutlass.range(cute.arch.lane_idx(), cute.size(row), LANES, unroll=1):
        value = row[i].to(Float32)
        found = found or value != value
    return cute.arch.vote_any_sync(found)


@cute.jit
def _gradient_of_score(
    q: cute.Tensor,
    k: cute.Tensor,
    dout: cute.Tensor,
    v: cute.Tensor,
    minus_lse: Float32,
    minus_delta: Float32,
    factors: ScoreFactors,
    wants_p: cutlass.Constexpr[bool],
    vector_bytes: cutlass.Constexpr[int],
    pairs: PairsOfQuery | PairsOfKey | None = None,
    other: Int32 | None = None,
) -> Float32:
    """dS of a visible pair, with a softcap times its slope; or with wants_p its P.

    Args:
        minus_lse, minus_delta: the query's values in the backward's stats.
        vector_bytes: bytes of a load.
        pairs: the modifiers of the pairs of q or of k; `other` is the number of the key or of the query.

    Returns: with pairs, HIDDEN for a pair that they hide.
    """
    score = dot(q, k, vector_bytes)
    if cutlass.const_expr(factors.tanh_scale is not None):
        score = soft_cap(score, factors.tanh_scale, q.element_type)
    full_score = score
    if cutlass.const_expr(pairs is not None):
        full_score = pairs.score(score, other)
    p = cute.math.exp2(full_score * factors.scale_log2 + minus_lse, fastmath=True)
    result = p
    if cutlass.const_expr(wants_p):
        if cutlass.const_expr(pairs is not None):
            # the factor of what is kept is that of the whole sum
            result = Float32(0.0) if pairs.keep_factor(other) == 0.0 else p
    else:
        dp = dot(dout, v, vector_bytes)
        if cutlass.const_expr(pairs is not None):
            dp = dp * pairs.keep_factor(other)
        result = p * (dp + minus_delta)
        if cutlass.const_expr(factors.tanh_scale is not None):
            result *= 1.0 - score * score
    if cutlass.const_expr(pairs is not None):
        result = Float32(HIDDEN) if full_score == -Float32.inf else result
    return result


@cute.jit
def add_queries(
    acc: cute.Tensor,
    k: cute.Tensor,  # (head_dim,)
    v: cute.Tensor,  # (head_dim_v,)
    mQ: cute.Tensor,  # (seqlen_q, head_dim)
    mdO: cute.Tensor,  # (seqlen_q, head_dim_v)
    stats: cute.Tensor,  # from the sequence's first block of queries on
    queries: tuple,
    factors: ScoreFactors,
    is_v: cutlass.Constexpr[bool],
    vector_bytes: cutlass.Constexpr[int] = VECTOR_BYTES,
    pairs: PairsOfKey | None = None,
):
    """acc (from `row_sums`) += what the queries [low, high) = queries of a head add to dk of a key; with is_v, to dv.

    A lane has one query of every 32. The last queries come first: under a causal mask they see the most keys, so they
    are the most likely to make the whole row NaN.
    """
    low, high = queries
    lost = is_lost(acc)
    while low < high and not lost:
        first = maximum(high - LANES, low)
        query = minimum(first + cute.arch.lane_idx(), high - 1)
        q, dout = mQ[query, None], mdO[query, None]
        query_stats = stats_of_row(stats, query)
        arguments = (q, k, dout, v, *query_stats, factors, is_v, vector_bytes, pairs, query)
        weight = _gradient_of_score(*arguments)
        add_rows(acc, weight, mdO if cutlass.const_expr(is_v) else mQ, first, high - first, pairs is not None)
        lost = is_lost(acc)
        high = first


@cute.jit
def recompute_dq(
    dq: cute.Tensor,  # (seqlen_q, head_dim)
    query: Int32,
    sources: SourceTensors,  # (seqlen, dim) each
    stats: cute.Tensor,  # from the sequence's first block of queries on
    geometry: Geometry,
    factors: ScoreFactors,
    softmax_scale: Float32,
    vector_bytes: cutlass.Constexpr[int] = VECTOR_BYTES,
    modifiers: Modifiers | None = None,
    place: Place | None = None,
):
    """Compute a row of dq from the keys alone that it sees. A lane has one key of every 32."""
    pairs = None
    if cutlass.const_expr(modifiers is not None):
        pairs = modifiers.pairs_of_query(place, query)
    if cutlass.const_expr(modifiers is not None and modifiers.has_intervals):
        low, high = modifiers.interval(place, query)
    else:
        low, high = key_range(query, query + 1, *geometry)
    q, dout = sources.q[query, None], sources.dout[query, None]
    query_stats = stats_of_row(stats, query)
    acc = row_sums(dq[query, None])
    lost = Boolean(False)
    while low < high and not lost:
        key = minimum(low + cute.arch.lane_idx(), high - 1)
        k, v = sources.k[key, None], sources.v[key, None]
        arguments = (q, k, dout, v, *query_stats, factors, False, vector_bytes, pairs, key)
        weight = _gradient_of_score(*arguments)
        add_rows(acc, weight, sources.k, low, minimum(high - low, LANES), pairs is not None)
        lost = is_lost(acc)
        low += LANES
    write_row(dq[query, None], acc, softmax_scale)

"""`recompute_row` of rows.py for an e4m3 cache, whose rows are pairs of e4m3."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32

from .....geometry.integers import ceil_div, minimum
from .....geometry.tile_scheduler import LANES
from ..memory import warp
from ..memory.e4m3 import pair_as_floats
from ..softmax.cache_scales import CacheDescales
from ..softmax.modifiers import PairsOfQuery
from ..softmax.online import ScoreFactors
from . import rows as repair_rows


@cute.jit
def dot(q: cute.Tensor, k: cute.Tensor) -> Float32:
    """q (head_dim,) . k (head_dim,) of e4m3, or (head_dim / 2,) of pairs, in float32."""
    total, pairs = Float32(0.0), cute.recast_tensor(k, Int16)
    for i in cutlass.range(cute.size(pairs), unroll=4):
        low, high = pair_as_floats(pairs[i].to(Int32))
        total += q[2 * i].to(Float32) * low
        total += q[2 * i + 1].to(Float32) * high
    return total


@cute.jit
def recompute_row(
    q: cute.Tensor,  # (head_dim,)
    mK: cute.Tensor,  # (seqlen_k, head_dim), or (seqlen_k, head_dim / 2) of pairs
    mV: cute.Tensor,  # (seqlen_k, head_dim_v), or (seqlen_k, head_dim_v / 2) of pairs
    out: cute.Tensor,  # (head_dim_v,)
    low: Int32,
    high: Int32,
    factors: ScoreFactors,
    row_max: Float32,
    weight: Float32,
    descales: CacheDescales | None,
    modified: PairsOfQuery | None = None,
):
    """out = weight * sum over the keys [low, high) of exp2(scale_log2 * (score - row_max)) * v, by all lanes of a warp.

    A lane computes the whole score of one key of every 32; in the sum over keys it has every 32nd pair of columns.

    Args: modified: the modifiers of the row's pairs.
    """
    scale_log2, tanh_scale = factors
    lane, num_pairs = cute.arch.lane_idx(), cute.size(out) // 2
    reference = (row_max if row_max > -Float32.inf else Float32(0.0)) * scale_log2
    acc = cute.make_rmem_tensor((2 * ceil_div(num_pairs, LANES),), Float32)
    acc.fill(0.0)
    lost = Boolean(False)
    while low < high and not lost:
        key = minimum(low + lane, high - 1)
        score, v_descale = dot(q, mK[key, None]), Float32(1.0)
        if cutlass.const_expr(descales is not None):
            k_descale, v_descale = descales.at_key(key)
            score = score * k_descale
        if cutlass.const_expr(tanh_scale is not None):
            score = repair_rows.soft_cap(score, tanh_scale, q.element_type)
        if cutlass.const_expr(modified is not None):
            score = modified.score(score, low + lane)
        p = cute.math.exp2(score * scale_log2 - reference, fastmath=True) * v_descale
        if cutlass.const_expr(modified is not None):
            p = Float32(repair_rows.HIDDEN) if score == -Float32.inf else p
        for i in cutlass.range(minimum(high - low, LANES), unroll=1):
            p_i, pairs = warp.broadcast(p, i), cute.recast_tensor(mV[low + i, None], Int16)
            for c in cutlass.range_constexpr(cute.size(acc) // 2):
                even, odd = pair_as_floats(pairs[minimum(lane + c * LANES, num_pairs - 1)].to(Int32))
                if cutlass.const_expr(modified is not None):
                    is_hidden = p_i == repair_rows.HIDDEN
                    even, odd = (Float32(0.0) if is_hidden else x for x in (even, odd))
                acc[2 * c] = acc[2 * c] + p_i * even
                acc[2 * c + 1] = acc[2 * c + 1] + p_i * odd
        lost = repair_rows.is_lost(acc)
        low += LANES
    for c in cutlass.range_constexpr(cute.size(acc) // 2):
        column = 2 * (lane + c * LANES)
        if column < cute.size(out):
            for i in cutlass.range_constexpr(2):
                out[column + i] = (acc[2 * c + i] * weight).to(out.element_type)

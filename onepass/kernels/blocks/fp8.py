"""FP8 (e4m3) in kernels: scales of blocks of rows, and P as the operand of the next GEMM.

Scores are multiplied with q_scale * k_scale as soon as they are there; everything after that is as with 16 bits. P is
multiplied with p_scale = 256 * v_share before it is rounded: 256 P <= 256 uses e4m3's range up to 448, and v_share is
v's scale as a share of the largest one of its head, so that O is in one unit. In the end O is divided by 256 and
multiplied with that largest scale.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .integers import minimum
from .ptx import pack_four

SCALE_BLOCK = 64  # keys of one scale of K and V
KEY_RUN = 16  # keys in whose order P and V differ from the sequence
P_SCALE = 256.0


class DescaleTensors(NamedTuple):
    """Scales in global memory, float32."""

    q_scale: cute.Tensor  # (batch, num_heads_q, seqlen_q)
    k_scale: cute.Tensor  # (batch, num_heads_kv, ceil(seqlen_k / SCALE_BLOCK))
    v_share: cute.Tensor  # the same shape, at most 1
    v_scale: cute.Tensor  # (batch, num_heads_kv)


class BlockScales(NamedTuple):
    """Of one tile of keys: one number for every SCALE_BLOCK of them, at least one."""

    k_scale: list
    p_scale: list


def load_block_scales(k_scale: cute.Tensor, v_share: cute.Tensor, n_block: Int32, tile_n: int) -> BlockScales:
    """Of a tile, from one head's (blocks,); past the last key, those of the last block."""
    first, last = n_block * tile_n // SCALE_BLOCK, cute.size(k_scale) - 1
    blocks = [minimum(first + i, last) for i in range(max(1, tile_n // SCALE_BLOCK))]
    return BlockScales([k_scale[block] for block in blocks], [v_share[block] * P_SCALE for block in blocks])


@cute.jit
def scale_scores(scores: cute.Tensor, q_scale: cute.Tensor, k_scale: list):
    """scores (2, columns) *= q_scale of their row * k_scale of their block."""
    for r in cutlass.range_constexpr(2):
        factors = [q_scale[r] * k for k in k_scale]
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            scores[r, c] = scores[r, c] * factors[8 * (c // 2) // SCALE_BLOCK]


@cute.jit
def pack_p(p: cute.Tensor, target: cute.Tensor, p_scale: list):
    """p (2, columns) * p_scale of their block -> register operand A ((4, 2, 2), M, columns / 8) of e4m3.

    The accumulator gives lane q of a quad the keys 2q, 2q + 1 of every eight, operand A wants 4q to 4q + 3 of every 16.
    No value changes lanes: the lane's keys 2q, 2q + 1, 8 + 2q, 8 + 2q + 1 are said to be 4q to 4q + 3, and V's keys
    are stored in that order (FlashAttention-3, arXiv:2407.08608, section 3.3).
    """
    words = cute.recast_tensor(target, Int32)
    for k in cutlass.range_constexpr(cute.size(p, mode=[1]) // 8):
        factor = p_scale[32 * k // SCALE_BLOCK]
        for half in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                first = 8 * k + 4 * half
                words[(0, r, half), 0, k] = pack_four(*(p[r, first + i] * factor for i in range(4)))

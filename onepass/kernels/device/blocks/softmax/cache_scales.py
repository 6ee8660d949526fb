"""The descales of an e4m3 cache in a kernel: those of K multiply scores, those of V multiply P or O.

A descale is looked up once for 16 keys. With one descale for a batch entry and head, O is multiplied by V's descale in
the end. With one for each block of keys, P is multiplied before it is rounded to fp16, by the share of its descale in
the largest descale so far. O refers to that largest descale and is rescaled when a larger one comes, so that P stays in
fp16's range.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .....geometry.integers import maximum, minimum, select
from .....geometry.pages import page_of_key
from ..memory.untraced import Untraced
from ..tiles.paged import Pages

KEYS = 16  # keys that share a descale: blocks and pages are multiples of this
SMALLEST = 2.0**-100


class DescaleTensors(NamedTuple):
    """The descales of a call."""

    k: cute.Tensor  # (batch or num_pages, num_heads_kv, blocks), float32
    v: cute.Tensor
    kv_block: cute.FastDivmodDivisorV2 | None  # keys of a block, without pages


class SignOfKeys(Untraced):
    """Descales of keys where their magnitudes are part of other factors: K's has a sign left, V's is 1."""

    def __init__(self, k_descale: Float32):
        self.sign = select(k_descale < Float32(0.0), Float32(-1.0), Float32(1.0))

    def at_key(self, key: Int32) -> tuple:
        return self.sign, Float32(1.0)


class CacheDescales(Untraced):
    """The descales of the keys that a warp has in its registers, looked up a step before they are needed.

    Args:
        entry, head: batch entry and kv head of the tile.
        tile_n: keys of a step.
        by_block: whether each block of keys, or page, has a descale of its own.
    """

    def __init__(
        self, tensors: DescaleTensors, pages: Pages | None, entry: Any, head: Any, tile_n: int, by_block: bool
    ):
        self.tensors, self.pages, self.entry, self.head = tensors, pages, entry, head
        self.by_block = by_block
        count = tile_n // KEYS if self.by_block else 1
        self.k, self.v = (cute.make_rmem_tensor((count,), Float32) for _ in range(2))
        self.v_reference = cute.make_rmem_tensor((1,), Float32)

    def at_key(self, key: Int32) -> tuple:
        """The descales of K and V of a key that exists."""
        outer, block = self.entry, 0
        if self.by_block:
            if self.pages is None:
                block, _ = divmod(key, self.tensors.kv_block)
            else:
                table = self.pages.table[self.entry, None]
                outer, _ = page_of_key(key, table, self.pages.page_size, self.tensors.k.shape[0])
        return self.tensors.k[outer, self.head, block], self.tensors.v[outer, self.head, block]

    @cute.jit
    def look_up(self, first: Int32, seqlen_k: Int32):
        """Look up the descales of the keys first, first + 1, .. of a step; past the ends, those of the nearest key."""
        for g in cutlass.range_constexpr(cute.size(self.k)):
            key = maximum(minimum(first + g * KEYS, seqlen_k - 1), 0)
            self.k[g], self.v[g] = self.at_key(key)

    @cute.jit
    def begin(self, first: Int32, seqlen_k: Int32):
        self.look_up(first, seqlen_k)
        self.v_reference[0] = Float32(SMALLEST) if self.by_block else self.v[0]

    @cute.jit
    def scale_scores(self, scores: cute.Tensor, r: cutlass.Constexpr[int], factor: Float32):
        """Row r of scores (2, columns) *= factor * the descales of K."""
        factors = [self.k[g] * factor for g in range(cute.size(self.k))]
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            scores[r, c] = scores[r, c] * factors[8 * (c // 2) // KEYS if self.by_block else 0]

    @cute.jit
    def scale_p(self, p: cute.Tensor, acc_o: cute.Tensor):
        """Multiply P by V's descales, in the unit that O has afterwards; for all of P and O of a warp."""
        if cutlass.const_expr(self.by_block):
            old, new = self.v_reference[0], self.v_reference[0]
            for g in cutlass.range_constexpr(cute.size(self.v)):
                new = cute.arch.fmax(new, cute.arch.fmax(self.v[g], -self.v[g]))
            if cute.arch.vote_any_sync(new > old):
                for i in cutlass.range_constexpr(cute.size(acc_o)):
                    acc_o[i] = acc_o[i] * (old * cute.arch.rcp_approx(new))
            self.v_reference[0] = new
            shares = [self.v[g] * cute.arch.rcp_approx(new) for g in range(cute.size(self.v))]
            # p is ((2, 2), m_tiles, 8-column blocks)
            for n in cutlass.range_constexpr(cute.size(p, mode=[2])):
                for m in cutlass.range_constexpr(cute.size(p, mode=[1])):
                    for v in cutlass.range_constexpr(4):
                        at = (v % 2, v // 2), m, n
                        p[at] = p[at] * shares[8 * n // KEYS]

    @cute.jit
    def finish(self, acc_o: cute.Tensor):
        """Bring O to the unit of V's real values."""
        for i in cutlass.range_constexpr(cute.size(acc_o)):
            acc_o[i] = acc_o[i] * self.v_reference[0]

"""The scales of a consumer's scores in the Hopper forward, and the softmax that applies them.

Scores of 16-bit inputs have one scale. Those of FP8 and of float32 in halves have one for each row and block of keys
(`BlockScales`), and those over an e4m3 cache have the descale of K of a tile's head in it (`CacheScales`).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from .....geometry.integers import minimum
from .....quantization.codec import SCALE_BLOCK
from ...blocks.memory.layouts import rows_and_columns
from ...blocks.memory.untraced import Untraced
from ...blocks.repair.rows import soft_cap
from ...blocks.softmax import scaled
from ...blocks.softmax.online import OnlineSoftmax, ScoreFactors, finish
from .inputs import Inputs
from .rows import Rows
from .tile import Tile


def make_scales(kernel, rows: Rows, inputs: Inputs) -> Scales:
    if kernel.is_scaled:
        return BlockScales(kernel, rows, inputs)
    return (Scales if inputs.descales is None else CacheScales)(kernel, rows, inputs)


class Scales(Untraced):
    """One scale for all scores.

    Attributes:
        softmax: the online softmax of scores that `apply` has seen.
    """

    def __init__(self, kernel, rows: Rows, inputs: Inputs):
        self.kernel, self.rows, self.factors, self.descales = kernel, rows, inputs.factors, inputs.descales
        self.softmax = self._make_softmax()

    def _make_softmax(self) -> OnlineSoftmax:
        return OnlineSoftmax(self.factors.scale_log2, self.kernel.config.rescale_threshold)

    @property
    def tanh_scale(self) -> Float32 | None:
        return self.factors.tanh_scale

    def load(self, tile: Tile):
        """Load the scales of a tile's rows and of the keys that it begins with."""

    @cute.jit
    def apply(self, acc_s: cute.Tensor, tile: Tile, n_block: Int32, begins: cutlass.Constexpr[bool]):
        """Apply the softcap, s -> tanh(softmax_scale * s / softcap); the cap itself is in scale_log2.

        Args: begins: whether the tile begins with this block of keys.
        """
        if cutlass.const_expr(self.tanh_scale is not None):
            tanh_scale = self.tanh_scale
            for i in cutlass.range_constexpr(cute.size(acc_s)):
                acc_s[i] = soft_cap(acc_s[i], tanh_scale)

    def of_head(self, tile: Tile) -> tuple:
        """The magnitude of K's descale of a tile's head of an e4m3 cache, and V's descale; None without."""
        return None, None

    def with_descale(self, k_descale: Float32 | None) -> ScoreFactors:
        """The factors of scores, with K's descale."""
        return self.factors

    def finish(self, row_max: Float32, row_sum: Float32, sink: Float32 | None, k_descale: Float32 | None) -> tuple:
        """The factor of a row of O, and its lse."""
        return finish(row_max, row_sum, self.with_descale(k_descale).scale_log2, sink)


class CacheScales(Scales):
    """The scale of the scores, with K's descale of a tile's head. Its sign, if negative, comes with the converted K."""

    def _make_softmax(self) -> OnlineSoftmax:
        self.head_scale = cute.make_rmem_tensor((1,), Float32)  # the scale that has the descale in it
        has_cap = self.factors.tanh_scale is not None
        scale_log2 = self.factors.scale_log2 if has_cap else self.head_scale
        return OnlineSoftmax(scale_log2, self.kernel.config.rescale_threshold)

    @property
    def tanh_scale(self) -> Float32 | None:
        return None if self.factors.tanh_scale is None else self.head_scale[0]

    @cute.jit
    def load(self, tile: Tile):
        factors = self.with_descale(self.of_head(tile)[0])
        self.head_scale[0] = factors.scale_log2 if factors.tanh_scale is None else factors.tanh_scale

    def of_head(self, tile: Tile) -> tuple:
        head_kv = self.rows.head_kv(tile)
        k, v = (t[tile.origin_k, head_kv, 0] for t in (self.descales.k, self.descales.v))
        return cute.arch.fmax(k, -k), v

    def with_descale(self, k_descale: Float32 | None) -> ScoreFactors:
        scale_log2, tanh_scale = self.factors
        if tanh_scale is None:
            return ScoreFactors(scale_log2 * k_descale, None)
        return ScoreFactors(scale_log2, tanh_scale * k_descale)


class BlockScales(Scales):
    """A scale for each row and each block of keys, which the softmax is given with the scores."""

    def _make_softmax(self) -> OnlineSoftmax:
        kernel, config = self.kernel, self.kernel.config
        self.row_scale = cute.make_rmem_tensor((2,), Float32)
        self.key_scales = scaled.KeyScales(kernel.tile_n)
        p_dtype = torch.float8_e4m3fn if kernel.is_fp8 else torch.float16
        threshold = config.rescale_threshold
        return scaled.ScaledSoftmax(self.factors, threshold, kernel.tile_n, p_dtype, p_codes=config.p_codes)

    @cute.jit
    def load(self, tile: Tile):
        scales = scaled.scales_of_entry(self.descales.q, tile.origin_q, tile.sequence)
        first = scaled.first_block(tile.origin_q, tile.sequence, self.descales.q_block)
        for r in cutlass.range_constexpr(2):
            position, head, is_row = self.rows.own(tile, r)
            scale = Float32(0.0)
            if is_row:
                block = first + divmod(position, self.descales.q_block)[0]
                scale = scales[head, minimum(block, cute.size(scales, mode=[1]) - 1)]
            self.row_scale[r] = self.softmax.scale_of_row(scale)
        self.key_scales.load(*self._of_keys(tile), tile.last - 1)

    @cute.jit
    def apply(self, acc_s: cute.Tensor, tile: Tile, n_block: Int32, begins: cutlass.Constexpr[bool]):
        self.key_scales.take(*self._of_keys(tile), n_block, begins)
        self.softmax.take_scales(self.row_scale, self.key_scales, n_block)
        if cutlass.const_expr(self.factors.tanh_scale is not None):
            self.softmax.soft_cap(rows_and_columns(acc_s))

    def _of_keys(self, tile: Tile) -> tuple:
        """The descales of K and V of a tile's head, (blocks,) each, and the number of its sequence's first block."""
        head_kv = self.rows.head_kv(tile)
        entries = (scaled.scales_of_entry(t, tile.origin_k, tile.sequence) for t in (self.descales.k, self.descales.v))
        return *(t[head_kv, None] for t in entries), scaled.first_block(tile.origin_k, tile.sequence, SCALE_BLOCK)

    def finish(self, row_max: Float32, row_sum: Float32, sink: Float32 | None, k_descale: Float32 | None) -> tuple:
        finish_scaled = scaled.finish if self.kernel.is_fp8 else scaled.finish_exactly
        return finish_scaled(row_max, row_sum, self.softmax.exponent, sink)

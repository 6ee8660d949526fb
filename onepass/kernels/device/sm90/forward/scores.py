"""The scores of a consumer warpgroup of the Hopper forward, from the GEMM that computes S to the one that reads P."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...blocks.memory.ptx import pack, pack_halves
from ...blocks.memory.untraced import Untraced
from ...blocks.softmax import mask, scaled
from ...blocks.softmax.dropout import drop_packed
from ...blocks.softmax.modifiers import Block, Modifiers
from .gemms import ForwardGemms
from .rows import Rows
from .scales import Scales
from .tile import Tile


class ForwardScores(Untraced):
    """Scales, softcap, modifiers, mask and softmax of S, and how the exponentials become P.

    Methods take the number of a block of keys (n_block), and that of a score buffer, whose keys are a part of it.
    """

    def __init__(self, kernel, rows: Rows, gemms: ForwardGemms, scales: Scales, modifiers: Modifiers | None):
        self.kernel, self.config = kernel, kernel.config
        self.rows, self.gemms, self.scales, self.softmax = rows, gemms, scales, scales.softmax
        self.modifiers = None if modifiers is None else TileModifiers(kernel, rows, gemms, modifiers)
        self.is_lazy = kernel.config.rescale_threshold > 0

    @cute.jit
    def load(self, tile: Tile):
        """Load what belongs to a tile: scales, and values of modifiers."""
        self.scales.load(tile)
        if cutlass.const_expr(self.modifiers is not None):
            self.modifiers.load(tile)

    @cute.jit
    def modify(
        self, tile: Tile, n_block: Int32, buffer: cutlass.Constexpr[int], begins: cutlass.Constexpr[bool] = False
    ):
        """Apply the softcap, and add the terms of ALiBi and of a bias.

        Args: begins: whether the tile begins with this block.
        """
        self.scales.apply(self.gemms.acc_s[buffer], tile, n_block, begins)
        if cutlass.const_expr(self.modifiers is not None):
            self.modifiers.add_terms(tile, n_block, buffer)

    @cute.jit
    def mask_if_needed(self, tile: Tile, n_block: Int32, buffer: cutlass.Constexpr[int]):
        if n_block >= tile.clear_last or n_block < tile.clear_first:
            self.mask(tile, n_block, buffer)

    @cute.jit
    def mask(self, tile: Tile, n_block: Int32, buffer: cutlass.Constexpr[int]):
        if cutlass.const_expr(self.kernel.has_intervals):
            self.modifiers.hide(tile, n_block, buffer)
        else:
            rows = [self.rows.own(tile, r)[0] for r in range(2)]
            n_start = n_block * self.kernel.tile_n + buffer * self.kernel.buffer_n
            mask.apply(self.gemms.s[buffer], rows, n_start, self.rows.thread.lane_in_quad, tile.geometry)

    @cute.jit
    def begin_softmax(self, buffer: cutlass.Constexpr[int]):
        """The softmax of the scores with which a tile begins."""
        self.softmax.begin(self.gemms.s[buffer])

    @cute.jit
    def update_softmax(self, buffer: cutlass.Constexpr[int], is_masked: cutlass.Constexpr[bool]):
        if cutlass.const_expr(self.is_lazy):
            # while P V still runs, O has to wait for its new reference until `next_p`
            acc_o = None if self.config.overlap_gemm_softmax else self.gemms.o
            self.softmax.update_lazily(self.gemms.s[buffer], is_masked, acc_o)
        else:
            self.softmax.update(self.gemms.s[buffer])

    @cute.jit
    def drop(self, tile: Tile, n_block: Int32, buffer: cutlass.Constexpr[int]):
        """Leave out exponentials that dropout does not keep; they are in the sums already."""
        if cutlass.const_expr(self.modifiers is not None):
            self.modifiers.drop(tile, n_block, buffer)

    @cute.jit
    def next_p(self, buffer: cutlass.Constexpr[int]):
        """The exponentials become P of the next PV, and O is brought to their reference."""
        self.pack_p(buffer)
        if cutlass.const_expr(not self.is_lazy):
            self.softmax.rescale(self.gemms.o)
        elif cutlass.const_expr(self.config.overlap_gemm_softmax):
            self.softmax.rescale_lazily(self.gemms.o)

    @cute.jit
    def pack_p(self, buffer: cutlass.Constexpr[int]):
        """The exponentials in S[buffer] become P of the next PV."""
        rP = self.gemms.rP
        if cutlass.const_expr(self.config.p_codes):
            scaled.copy_p(self.softmax.p, rP[0])
        elif cutlass.const_expr(self.kernel.is_fp8):
            scaled.pack_p(self.gemms.s[buffer], rP[0])
        elif cutlass.const_expr(self.kernel.num_halves == 2):
            pack_halves(self.gemms.acc_s[buffer], *rP)
        else:
            pack(self.gemms.acc_s[buffer], rP[0])
            if cutlass.const_expr(self.modifiers is not None):
                self.modifiers.drop_packed(rP[0])


class TileModifiers(Untraced):
    """The modifiers of a tile's scores, with what they keep in registers.

    Attributes:
        slope: of ALiBi, of the tile's head.
        intervals: the keys [low, high) that each of this thread's rows sees.
        kept_words: flags of the pairs that dropout keeps, where P is 16 bits wide.
    """

    def __init__(self, kernel, rows: Rows, gemms: ForwardGemms, modifiers: Modifiers):
        self.kernel, self.rows, self.gemms, self.modifiers = kernel, rows, gemms, modifiers
        self.slope = self.intervals = self.kept_words = None
        if modifiers.tensors.slopes is not None:
            self.slope = cute.make_rmem_tensor((1,), Float32)
        if kernel.has_intervals:
            self.intervals = cute.make_rmem_tensor((2, 2), Int32)
        if modifiers.drops and kernel.num_halves == 1 and not kernel.is_fp8:
            self.kept_words = cute.make_rmem_tensor((cute.size(gemms.acc_s[0]) // 4,), Int32)

    @cute.jit
    def load(self, tile: Tile):
        """Load the slope and the intervals, because the compiler would move no load of theirs out of a step."""
        if cutlass.const_expr(self.slope is not None):
            self.slope[0] = self.modifiers.slope(self.rows.place(tile))
        if cutlass.const_expr(self.intervals is not None):
            for r in cutlass.range_constexpr(2):
                row, _, _ = self.rows.own(tile, r)
                self.intervals[r, 0], self.intervals[r, 1] = self.modifiers.interval(self.rows.place(tile), row)

    @cute.jit
    def add_terms(self, tile: Tile, n_block: Int32, buffer: cutlass.Constexpr[int]):
        if cutlass.const_expr(self.modifiers.adds_terms):
            self.modifiers.add_terms(self.gemms.s[buffer], self._block(tile, n_block, buffer))

    @cute.jit
    def hide(self, tile: Tile, n_block: Int32, buffer: cutlass.Constexpr[int]):
        """Hide scores outside of the rows' intervals."""
        self.modifiers.hide(self.gemms.s[buffer], self._block(tile, n_block, buffer), -math.inf)

    @cute.jit
    def drop(self, tile: Tile, n_block: Int32, buffer: cutlass.Constexpr[int]):
        """Leave out exponentials, or draw the flags with which `drop_packed` does."""
        if cutlass.const_expr(self.modifiers.drops):
            block = self._block(tile, n_block, buffer)
            if cutlass.const_expr(self.kept_words is None):
                self.modifiers.drop(self.gemms.s[buffer], block)
            else:
                words = self.modifiers.kept(block, cute.size(self.gemms.s[buffer], mode=[1])).words
                for i in cutlass.range_constexpr(len(words)):
                    self.kept_words[i] = words[i]

    @cute.jit
    def drop_packed(self, rP: cute.Tensor):
        """Leave out exponentials in 16 bits, two at a time."""
        if cutlass.const_expr(self.kept_words is not None):
            drop_packed(cute.recast_tensor(rP, Int32), self.kept_words)

    def _block(self, tile: Tile, n_block: Int32, buffer: int) -> Block:
        kernel, intervals = self.kernel, self.intervals
        rows = [self.rows.own(tile, r)[0] for r in range(2)]
        n_block = kernel.key_block(tile, n_block, self.modifiers)
        first_column = n_block * kernel.tile_n + buffer * kernel.buffer_n + 2 * self.rows.thread.lane_in_quad
        slope = None if self.slope is None else self.slope[0]
        if intervals is not None:
            intervals = [(intervals[r, 0], intervals[r, 1]) for r in range(2)]
        return Block(rows, first_column, 2 * [self.rows.place(tile)], slope=slope, intervals=intervals)

"""Which of a tile's key blocks a consumer warpgroup of the Hopper forward visits."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .....geometry.block_range import KeyBlocks, blocks_of_rows, key_blocks
from .....geometry.integers import maximum, minimum
from .....geometry.splits import blocks_within
from .....geometry.tile_scheduler import LANES
from ...blocks.memory.untraced import Untraced
from ...blocks.softmax.modifiers import Modifiers
from .rows import Rows
from .tile import Tile


class OwnBlocks(Untraced):
    """The blocks that a warpgroup's own rows see, of those that the tile's rows see."""

    def __init__(self, kernel, rows: Rows, modifiers: Modifiers | None):
        self.kernel, self.rows, self.wg, self.modifiers = kernel, rows, rows.thread.wg, modifiers

    @cute.jit
    def find(self, tile: Tile):
        """The blocks of a tile that this warpgroup visits.

        Under a causal mask the rows of the first warpgroup need 64 keys fewer than those of the next one, and intervals
        may say such a mask. A skipped K is released at once, so as many blocks can be skipped as have a buffer of K
        besides the one that the tile begins with, and one of V: the producer loads V of the blocks before, which waits
        for this warpgroup's last P V, before the K that the warpgroup waits for.

        Returns:
            tile: with the blocks that this warpgroup visits.
            skipped: how many of the last blocks it releases unread.
            unused: how many of the lowest blocks it leaves out: with intervals those that its rows do not see; without
                any row all but one, whose S and P V it computes in vain.
        """
        kernel = self.kernel
        skipped, unused = Int32(0), Int32(0)
        may_skip = (kernel.has_window[1] or kernel.has_intervals) and not kernel.has_lists
        if cutlass.const_expr(may_skip and kernel.config.warp_specialized):
            seqlen_q = tile.geometry.seqlen_q
            rows = kernel.tile_m // kernel.num_warpgroups
            m_start = tile.m_block * kernel.tile_m + self.wg * rows
            if cutlass.const_expr(kernel.has_intervals):
                own = self._of_intervals(tile, m_start, rows)
            else:
                m_start = minimum(m_start, seqlen_q - 1)
                own = key_blocks(m_start, minimum(m_start + rows, seqlen_q), *tile.geometry, kernel.tile_n)
            if cutlass.const_expr(kernel.is_split or kernel.has_intervals):
                own = blocks_within(own, tile.blocks)._replace(first=own.first)
            blocks, skipped = blocks_of_rows(tile.blocks, own, min(kernel.k_stages - 1, kernel.v_stages))
            if cutlass.const_expr(kernel.skips_lowest):
                first = minimum(maximum(own.first, tile.first), blocks.last - 1)
                unused = first - tile.first
                blocks = blocks._replace(first=first)
            tile = tile.with_blocks(blocks)
        if cutlass.const_expr(kernel.skips_unused):
            rows = kernel.tile_m // kernel.num_warpgroups
            if tile.m_block * self.kernel.tile_m + self.wg * rows >= tile.geometry.seqlen_q:
                unused = tile.last - 1 - tile.first
                tile = tile.with_blocks(KeyBlocks(tile.last - 1, tile.last - 1, tile.last - 1, tile.last))
        return tile, skipped, unused

    def _of_intervals(self, tile: Tile, m_start: Int32, rows: int) -> KeyBlocks:
        """The key blocks of this warpgroup's rows, from m_start on."""
        place, lane = self.rows.place(tile), cute.arch.lane_idx()
        queries = [(place, m_start + lane + i) for i in range(0, rows, LANES)]
        return self.modifiers.key_blocks(queries, tile.geometry.seqlen_k, self.kernel.tile_n)

"""Where the rows of a tile of the Hopper forward stand in their sequence."""

from __future__ import annotations

from cutlass import Int32

from .....geometry.integers import select
from .....geometry.pack_gqa import unpack_row
from ....config import ROWS_PER_WARPGROUP
from ...blocks.memory.untraced import Untraced
from ...blocks.softmax.modifiers import Place, place_of
from .inputs import Thread
from .tile import Tile


class Rows(Untraced):
    """The rows of a tile; with pack_gqa they are those of several heads."""

    def __init__(self, kernel, thread: Thread):
        self.kernel, self.thread = kernel, thread

    def own(self, tile: Tile, r: int) -> tuple:
        """`find` for one of this thread's two rows."""
        return self.find(tile, self.thread.row + 8 * r)

    def find(self, tile: Tile, row_in_tile) -> tuple:
        """A row's position in the sequence, its head, and whether there is such a row."""
        tile_m, group = self.kernel.tile_m, self.kernel.group
        if group == 1:
            position = tile.m_block * tile_m + row_in_tile
            return position, tile.head, position < tile.geometry.seqlen_q
        position, head, is_used = unpack_row(row_in_tile, group, ROWS_PER_WARPGROUP)
        position = tile.m_block * tile_m + position
        limit = select(is_used, tile.geometry.seqlen_q, Int32(0))
        return position, tile.head * group + head, position < limit

    def place(self, tile: Tile) -> Place:
        return place_of(tile.head, tile.origin_q, tile.origin_k, tile.sequence, tile.geometry, self.kernel.is_packed)

    def head_kv(self, tile: Tile) -> Int32:
        return tile.head // self.kernel.tile_heads_per_kvhead

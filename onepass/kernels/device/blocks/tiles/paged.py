"""Keys and values in pages, as a kernel sees them."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from .....geometry.integers import maximum, minimum
from .....geometry.pages import page_of_key
from ..memory import warp
from ..memory.untraced import Untraced


class Pages(NamedTuple):
    """The page table of a call, and the size of its pages."""

    table: cute.Tensor  # (batch, max_pages) int32
    page_size: cute.FastDivmodDivisorV2

    @property
    def capacity(self) -> Any:
        """The number of rows that a sequence has room for."""
        return self.table.shape[1] * self.page_size.divisor


class PagedRows(Untraced):
    """A sequence's rows of one head, indexed like a tensor (seqlen, dim): [key, None] and [key, column].

    Args: m: (page_size, dim, num_pages), one head of all pages.
    """

    def __init__(self, m: cute.Tensor, pages: Pages, entry: Any):
        self.m, self.table, self.page_size = m, pages.table[entry, None], pages.page_size
        self.shape = None, m.shape[1]

    def __getitem__(self, coord: tuple) -> Any:
        key, column = coord
        page, row = page_of_key(key, self.table, self.page_size, self.m.shape[2])
        return self.m[row, column, page]

    def row(self, key: Any, number: Any) -> Any:
        """The row (dim,) of a key. Args: number: the key's number among the keys that are loaded together."""
        return self[key, None]


class KeyLocations(Untraced):
    """Where the keys lie that a warp loads next: each lane has looked up one of them.

    Args: count: keys that are loaded together, at most as many as a warp has lanes.
    """

    def __init__(self, pages: Pages, entry: Any, num_pages: Any, count: int):
        self.table, self.page_size = pages.table[entry, None], pages.page_size
        self.num_pages, self.count = num_pages, count
        self.found = cute.make_rmem_tensor((2,), Int32)  # page, row in it
        self.found.fill(0)

    @cute.jit
    def look_up(self, first: Int32, seqlen_k: Int32):
        """Look up the keys first, first + 1, ..; numbers below 0 or from seqlen_k on stand for the nearest key."""
        key = maximum(minimum(first + cute.arch.lane_idx() % self.count, seqlen_k - 1), 0)
        page, row = page_of_key(key, self.table, self.page_size, self.num_pages)
        self.found[0], self.found[1] = page, row

    def at(self, number: Any) -> tuple[Any, Any]:
        """The page of the number-th key, and the row in it. All lanes must call this."""
        return warp.broadcast(self.found[0], number), warp.broadcast(self.found[1], number)


class BoxLocations(Untraced):
    """Where the boxes of rows lie that TMA loads: each lane looks up one box of a block of keys.

    A block of V is loaded after the next block of K: the locations of its boxes are kept until then.

    Args: box_rows: keys of a box; they divide a page. count: boxes of a block, at most as many as a warp has lanes.
    """

    def __init__(self, pages: Pages, num_pages: Any, box_rows: int, count: int):
        self.pages, self.num_pages, self.box_rows, self.count = pages, num_pages, box_rows, count
        self.k_boxes, self.v_boxes = (cute.make_rmem_tensor((2,), Int32) for _ in range(2))  # page, box of the page
        for locations in (self.k_boxes, self.v_boxes):
            locations.fill(0)

    @cute.jit
    def look_up(self, entry: Any, block: Int32, seqlen_k: Int32):
        """Look up the boxes of a block of a sequence's keys; a box without keys stands for that of the last key."""
        self.keep()
        lane = cute.arch.lane_idx() % self.count
        key = maximum(minimum((block * self.count + lane) * self.box_rows, seqlen_k - 1), 0)
        page, row = page_of_key(key, self.pages.table[entry, None], self.pages.page_size, self.num_pages)
        self.k_boxes[0], self.k_boxes[1] = page, row // self.box_rows

    @cute.jit
    def keep(self):
        """Keep the locations of the block of K that was looked up last for the next block of V."""
        self.v_boxes[0], self.v_boxes[1] = self.k_boxes[0], self.k_boxes[1]

    @staticmethod
    def box(locations: cute.Tensor, number: int) -> tuple[Any, Any]:
        """The page of the number-th box of a block, and the box in it. All lanes must call this."""
        return warp.broadcast(locations[0], number), warp.broadcast(locations[1], number)


class LocatedRows(PagedRows):
    """Rows in pages whose locations are looked up before their loads."""

    def __init__(self, m: cute.Tensor, pages: Pages, entry: Any, locations: KeyLocations):
        super().__init__(m, pages, entry)
        self.locations = locations

    def row(self, key: Any, number: Any) -> Any:
        page, row = self.locations.at(number)
        return self.m[row, None, page]

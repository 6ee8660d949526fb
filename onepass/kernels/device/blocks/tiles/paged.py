"""Keys and values that lie in pages, in a kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from .....geometry.integers import maximum, minimum
from .....geometry.pages import page_of_key
from ..memory import warp
from ..memory.untraced import Untraced


class Pages(NamedTuple):
    """What a kernel is told of them."""

    table: cute.Tensor  # (batch, max_pages) int32
    page_size: cute.FastDivmodDivisorV2

    @property
    def capacity(self) -> Any:
        """Rows that a sequence has room for."""
        return self.table.shape[1] * self.page_size.divisor


class PagedRows(Untraced):
    """A sequence's rows of one head, read as a tensor (seqlen, dim) is: [key, None] and [key, column].

    Args: m: (page_size, dim, num_pages), that head of all pages.
    """

    def __init__(self, m: cute.Tensor, pages: Pages, entry: Any):
        self.m, self.table, self.page_size = m, pages.table[entry, None], pages.page_size
        self.shape = None, m.shape[1]

    def __getitem__(self, coord: tuple) -> Any:
        key, column = coord
        page, row = page_of_key(key, self.table, self.page_size, self.m.shape[2])
        return self.m[row, column, page]

    def row(self, key: Any, number: Any) -> Any:
        """(dim,) of a key. Args: number: of it among those that are loaded together."""
        return self[key, None]


class KeyLocations(Untraced):
    """Where the next keys lie that a warp loads: each lane has looked up one of them.

    Args: count: keys that are loaded together, at most as many as a warp has lanes.
    """

    def __init__(self, pages: Pages, entry: Any, num_pages: Any, count: int):
        self.table, self.page_size = pages.table[entry, None], pages.page_size
        self.num_pages, self.count = num_pages, count
        self.found = cute.make_rmem_tensor((2,), Int32)  # page, row in it
        self.found.fill(0)

    @cute.jit
    def look_up(self, first: Int32, seqlen_k: Int32):
        """The keys first, first + 1, ..; what is none (from seqlen_k on, below 0) as the nearest key."""
        key = maximum(minimum(first + cute.arch.lane_idx() % self.count, seqlen_k - 1), 0)
        page, row = page_of_key(key, self.table, self.page_size, self.num_pages)
        self.found[0], self.found[1] = page, row

    def of(self, number: Any) -> tuple[Any, Any]:
        """Page and row in it of the number-th key. All lanes must ask."""
        return warp.broadcast(self.found[0], number), warp.broadcast(self.found[1], number)


class BoxLocations(Untraced):
    """Where the boxes of rows lie that TMA loads: a lane looks up one of a block of keys.

    A block of V is loaded after the next block of K: its places are kept until then.

    Args: box_rows: keys of a box; they divide a page. boxes: of a block, at most as many as a warp has lanes.
    """

    def __init__(self, pages: Pages, num_pages: Any, box_rows: int, boxes: int):
        self.pages, self.num_pages, self.box_rows, self.boxes = pages, num_pages, box_rows, boxes
        self.of_k, self.of_v = (cute.make_rmem_tensor((2,), Int32) for _ in range(2))  # page, box of the page
        for places in (self.of_k, self.of_v):
            places.fill(0)

    @cute.jit
    def look_up(self, entry: Any, block: Int32, seqlen_k: Int32):
        """Those of a block of keys of a sequence; a box without keys as the last key's."""
        self.keep()
        lane = cute.arch.lane_idx() % self.boxes
        key = maximum(minimum((block * self.boxes + lane) * self.box_rows, seqlen_k - 1), 0)
        page, row = page_of_key(key, self.pages.table[entry, None], self.pages.page_size, self.num_pages)
        self.of_k[0], self.of_k[1] = page, row // self.box_rows

    @cute.jit
    def keep(self):
        """The block of K that was looked up is the next one of V."""
        self.of_v[0], self.of_v[1] = self.of_k[0], self.of_k[1]

    @staticmethod
    def box(places: cute.Tensor, number: int) -> tuple[Any, Any]:
        """Page and box in it of the number-th box of a block. All lanes must ask."""
        return warp.broadcast(places[0], number), warp.broadcast(places[1], number)


class LocatedRows(PagedRows):
    """Rows in pages whose places are looked up ahead of their loads."""

    def __init__(self, m: cute.Tensor, pages: Pages, entry: Any, places: KeyLocations):
        super().__init__(m, pages, entry)
        self.places = places

    def row(self, key: Any, number: Any) -> Any:
        page, row = self.places.of(number)
        return self.m[row, None, page]

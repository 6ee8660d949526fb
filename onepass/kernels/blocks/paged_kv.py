"""Keys and values that lie in pages: row n of a sequence is row n % page_size of page table[n // page_size]."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute

from .bundle import Bundle
from .integers import maximum, minimum


def place_of_key(key: Any, table: Any, page_size: Any, num_pages: Any) -> tuple[Any, Any]:
    """Page and row in it. A page that the cache does not have is taken for its nearest one: nothing is read, and
    nothing can be written, outside of the cache.

    Args: table: of one sequence. page_size: what divmod takes, see tile_scheduler.Divisors.
    """
    number, row = divmod(key, page_size)
    return minimum(maximum(table[number], 0), num_pages - 1), row


class Pages(NamedTuple):
    """What a kernel is told of them."""

    table: cute.Tensor  # (batch, max_pages) int32
    page_size: cute.FastDivmodDivisorV2

    @property
    def capacity(self) -> Any:
        """Rows that a sequence has room for."""
        return self.table.shape[1] * self.page_size.divisor


class PagedRows(Bundle):
    """A sequence's rows of one head, read as a tensor (seqlen, dim) is: [key, None] and [key, column].

    Args: m: (page_size, dim, num_pages), that head of all pages.
    """

    def __init__(self, m: cute.Tensor, pages: Pages, entry: Any):
        self.m, self.table, self.page_size = m, pages.table[entry, None], pages.page_size
        self.shape = None, m.shape[1]

    def __getitem__(self, coord: tuple) -> Any:
        key, column = coord
        page, row = place_of_key(key, self.table, self.page_size, self.m.shape[2])
        return self.m[row, column, page]

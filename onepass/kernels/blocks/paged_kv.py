"""Keys and values that lie in pages, in a kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute

from .bundle import Bundle
from .pages import place_of_key


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

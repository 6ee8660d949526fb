"""Where a key lies in a cache of pages: a plain integer formula."""

from __future__ import annotations

from typing import Any

from .integers import maximum, minimum


def page_of_key(key: Any, table: Any, page_size: Any, num_pages: Any) -> tuple[Any, Any]:
    """Page and row in it: key n of a sequence is row n % page_size of page table[n // page_size].

    A page that the cache does not have is taken for its nearest one, so that nothing outside of the cache is read.

    Args: table: of the sequence. page_size: what divmod takes, see tile_scheduler.Divisors.
    """
    number, row = divmod(key, page_size)
    return minimum(maximum(table[number], 0), num_pages - 1), row

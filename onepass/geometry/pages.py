"""The page of a key in a paged cache, as an integer formula."""

from __future__ import annotations

from typing import Any

from .integers import maximum, minimum


def page_of_key(key: Any, table: Any, page_size: Any, num_pages: Any) -> tuple[Any, Any]:
    """The page of a key and the row in it: key n of a sequence is row n % page_size of page table[n // page_size].

    A page number outside of the cache is replaced by the nearest one in it, so that nothing outside is read.

    Args:
        table: the row of the page table for the sequence. page_size: a divisor for divmod, see tile_scheduler.Divisors.
    """
    number, row = divmod(key, page_size)
    return minimum(maximum(table[number], 0), num_pages - 1), row

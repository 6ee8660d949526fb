"""A mask as rectangles and triangles."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ..problem import Mask


class Region(NamedTuple):
    """Some queries of a sequence and keys that they see: all of them, or with `is_causal` those with j <= i.

    i and j count from the first query and from the first key of the region.
    """

    first_query: int
    num_queries: int
    first_key: int
    num_keys: int
    is_causal: bool

    def covers(self, seqlen_q: int, seqlen_k: int) -> bool:
        """Whether it holds all queries and keys of a sequence."""
        return (self.num_queries, self.num_keys) == (seqlen_q, seqlen_k)

    @property
    def queries(self) -> slice:
        return slice(self.first_query, self.first_query + self.num_queries)

    @property
    def keys(self) -> slice:
        return slice(self.first_key, self.first_key + self.num_keys)


@functools.lru_cache(maxsize=1024)
def regions(mask: Mask, seqlen_q: int, seqlen_k: int) -> tuple[Region, ...]:
    """Regions that hold each visible pair once, for a mask without a left side.

    All queries with keys are in the first region. A second one gives them more keys, and is needed when the first query
    with keys sees several: with more keys than queries, a causal mask is a rectangle next to a triangle.
    """
    if not seqlen_q or not seqlen_k:
        return ()
    if mask.window_right is None or mask.window_right >= seqlen_q - 1:
        return (Region(0, seqlen_q, 0, seqlen_k, False),)
    # query i sees the keys j <= i + diagonal
    diagonal = seqlen_k - seqlen_q + mask.window_right
    first_query = max(0, -diagonal)
    num_queries = seqlen_q - first_query
    if num_queries <= 0:
        return ()
    num_beside = max(0, diagonal)
    triangle = Region(first_query, num_queries, num_beside, min(num_queries, seqlen_k - num_beside), True)
    return (Region(0, seqlen_q, 0, num_beside, False), triangle) if num_beside else (triangle,)


def chunks(region: Region, size: int) -> list[Region]:
    """A region in pieces of at most `size` queries and `size` keys, those with the same keys one after the other."""
    if max(region.num_queries, region.num_keys) <= size:
        return [region]
    pieces = []
    for key in range(0, region.num_keys, size):
        for query in range(key if region.is_causal else 0, region.num_queries, size):
            pieces.append(
                Region(
                    region.first_query + query,
                    min(size, region.num_queries - query),
                    region.first_key + key,
                    min(size, region.num_keys - key),
                    region.is_causal and query == key,
                )
            )
    return pieces

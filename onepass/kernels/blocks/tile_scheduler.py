"""Which tile of the output a thread block computes next: plain integer formulas, the same on the host and in kernels.

The grid is persistent: `num_ctas` thread blocks (one per multiprocessor) walk through all tiles. A tile is
(m_block, head, batch entry); with `num_heads * batch` = "heads in all", tiles are numbered

    section (of `heads_per_section` heads) -> rank of m_block, longest first -> head in the section

* heads_per_section = 1: all m_blocks of one head follow each other, so its K and V stay in L2. For tiles of equal
  length.
* heads_per_section > 1: longest first over the heads of a section, for causal masks, where the last m_block sees all
  keys and the first one few. A section is as many heads as have their K and V in L2 together.

Thread blocks take numbers in waves of num_ctas, forwards and backwards in turn (0 1 2 | 2 1 0 | 0 1 2): numbers
descend in length inside a section, so going always forwards would give thread block 0 the longest tile of every wave.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from .integers import ceil_div

# Bytes of K and V that the heads of one section may hold: of the 50 MB L2 of a Hopper GPU the rest is left to Q, O
# and to the neighbouring sections.
L2_BUDGET_BYTES = 32 * 2**20


class TileCoord(NamedTuple):
    m_block: Any
    head: Any
    batch: Any


def tile_number(cta: Any, wave: Any, num_ctas: Any) -> Any:
    """The number of the tile that thread block `cta` computes in wave `wave`."""
    backwards = wave % 2
    return wave * num_ctas + cta + backwards * (num_ctas - 1 - 2 * cta)


def tile_coord(
    number: Any, tiles_per_section: Any, heads_per_section: Any, num_heads: Any, num_m_blocks: Any
) -> TileCoord:
    """Number -> tile. Divisors may be Python ints or precomputed fast divisors (`divmod` takes both)."""
    section, in_section = divmod(number, tiles_per_section)
    rank, head_in_section = divmod(in_section, heads_per_section)
    batch, head = divmod(section * _value(heads_per_section) + head_in_section, num_heads)
    return TileCoord(num_m_blocks - 1 - rank, head, batch)


def _value(divisor: Any) -> Any:
    return getattr(divisor, "divisor", divisor)


@functools.lru_cache(maxsize=4096)
def heads_per_section(heads_in_all: int, kv_bytes_per_head: int, longest_first: bool) -> int:
    """The largest divisor of `heads_in_all` whose K and V fit the L2 budget (1 where tiles have equal lengths).

    Args:
        kv_bytes_per_head: bytes of K and V that one query head reads; shared ones count in part under GQA.
    """
    if not longest_first:
        return 1
    limit = min(max(1, L2_BUDGET_BYTES // max(1, kv_bytes_per_head)), heads_in_all)
    return next(n for n in range(limit, 0, -1) if heads_in_all % n == 0)


def num_tiles(seqlen_q: int, tile_m: int, num_heads: int, batch: int) -> int:
    return ceil_div(seqlen_q, tile_m) * num_heads * batch

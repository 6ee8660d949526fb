"""Which tile of the output a thread block computes next: plain integer formulas, the same on the host and in kernels.

The grid is persistent: `num_ctas` thread blocks (one per multiprocessor) walk through all tiles. A tile is
(m_block, head, batch entry). With num_heads * batch "heads in all", tiles are numbered

    section (of `heads_per_section` heads; the last may have fewer) -> m_block, longest first -> head in the section

* heads_per_section = 1: all m_blocks of one head follow each other, so its K and V stay in L2. For tiles of equal
  length.
* heads_per_section > 1: longest first over the heads of a section, for causal masks, where the last m_block sees all
  keys and the first one few.

Thread blocks take numbers in waves of num_ctas, forwards and backwards in turn (0 1 2 | 2 1 0 | 0 1 2), because
lengths fall inside a section: going always forwards would give thread block 0 the longest tile of every wave. This
evens out if a section is a whole number of such double waves. Over the causal cases of the FlashAttention-3 paper (132
thread blocks) the busiest thread block then has 1 to 4 percent more work than the mean (7 for head_dim 64 at 512, with
its 3 m_blocks); with sections of arbitrary size it was up to 40.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from .integers import ceil_div, select

# Bytes of K and V that the heads of one section may hold: of the 50 MB L2 of a Hopper GPU the rest is left to Q, O
# and to the neighbouring sections.
L2_BUDGET_BYTES = 32 * 2**20


class TileCoord(NamedTuple):
    m_block: Any
    head: Any
    batch: Any


class Divisors(NamedTuple):
    """What tile numbers are divided by: Python ints, or fast divisors made on the host (`divmod` takes both)."""

    tiles_per_section: Any
    heads_per_section: Any
    heads_in_last_section: Any
    num_heads: Any


def tile_number(cta: Any, wave: Any, num_ctas: Any) -> Any:
    """The number of the tile that thread block `cta` computes in wave `wave`."""
    backwards = wave % 2
    return wave * num_ctas + cta + backwards * (num_ctas - 1 - 2 * cta)


def tile_coord(number: Any, divisors: Divisors, num_m_blocks: Any, batch: Any) -> TileCoord:
    """Number -> tile."""
    heads_per_section, num_heads = (_value(d) for d in (divisors.heads_per_section, divisors.num_heads))
    section, in_section = divmod(number, divisors.tiles_per_section)
    first_head = section * heads_per_section
    rank, head_in_section = divmod(in_section, divisors.heads_per_section)
    last_rank, head_in_last = divmod(in_section, divisors.heads_in_last_section)
    is_last = first_head + heads_per_section >= num_heads * batch
    rank = select(is_last, last_rank, rank)
    head_in_section = select(is_last, head_in_last, head_in_section)
    batch_entry, head = divmod(first_head + head_in_section, divisors.num_heads)
    return TileCoord(num_m_blocks - 1 - rank, head, batch_entry)


def _value(divisor: Any) -> Any:
    return getattr(divisor, "divisor", divisor)


@functools.lru_cache(maxsize=4096)
def heads_per_section(
    heads_in_all: int, num_m_blocks: int, num_ctas: int, kv_bytes_per_head: int, longest_first: bool, is_dynamic: bool
) -> int:
    """Heads of a section: as many as have their K and V in L2 together (1 to all heads), in the static order in whole
    double waves of tiles.

    Args:
        kv_bytes_per_head: bytes of K and V that one query head reads; shared ones count in part under GQA.
        longest_first: False where tiles have equal lengths.
        is_dynamic: thread blocks draw numbers from a queue (blocks/tile_queue.py).
    """
    if not longest_first:
        return 1
    unit = 1 if is_dynamic else 2 * num_ctas // math.gcd(2 * num_ctas, num_m_blocks)
    fitting = L2_BUDGET_BYTES // max(1, kv_bytes_per_head)
    return min(heads_in_all, max(unit, fitting // unit * unit))


def heads_in_last_section(heads_in_all: int, heads_per_section: int) -> int:
    return heads_in_all - (ceil_div(heads_in_all, heads_per_section) - 1) * heads_per_section


def num_tiles(seqlen_q: int, tile_m: int, num_heads: int, batch: int) -> int:
    return ceil_div(seqlen_q, tile_m) * num_heads * batch

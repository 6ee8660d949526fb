"""The tile of the output that a thread block computes next: integer formulas for the host and for kernels alike.

The grid is persistent: `num_ctas` thread blocks (one per multiprocessor) walk through all tiles. A tile is
(m_block, head, batch entry). With num_heads * batch "heads in all", tiles are numbered

    section (of `heads_per_section` heads; the last may have fewer) -> m_block, longest first -> head in the section

* heads_per_section = 1: all m_blocks of one head follow each other, so its K and V stay in L2. It suits tiles of
  equal length.
* heads_per_section > 1: the longest tiles come first over the heads of a section. It suits causal masks, where the
  last m_block sees all keys and the first one few.

Thread blocks take numbers in waves of num_ctas, forwards and backwards in turn (0 1 2 | 2 1 0 | 0 1 2), because
lengths fall inside a section: going always forwards would give thread block 0 the longest tile of every wave. This
evens out if a section is a whole number of such double waves. Over the causal cases of the FlashAttention-3 paper (132
thread blocks) the busiest thread block then has 1 to 4 percent more work than the mean (7 for head_dim 64 at 512, with
its 3 m_blocks); with sections of arbitrary size it was up to 40.

Packed sequences have their lengths on the device only. Their tiles are numbered sequence after sequence, and a thread
block finds the sequence of a number by adding up the tiles of the sequences before it (blocks/tiles/packed.py, 32
sequences at a time). The host has a bound for their number.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from .integers import ceil_div, maximum, minimum, select

# The bytes of K and V that the heads of one section may hold. The rest of the 50 MB L2 of a Hopper GPU is left to Q, O
# and to the neighboring sections.
L2_BUDGET_BYTES = 32 * 2**20


class TileCoord(NamedTuple):
    m_block: Any
    head: Any
    batch: Any


class Divisors(NamedTuple):
    """The divisors of tile numbers: Python ints, or fast divisors made on the host (`divmod` takes both)."""

    tiles_per_section: Any
    heads_per_section: Any
    heads_in_last_section: Any
    num_heads: Any


def tile_number(cta: Any, wave: Any, num_ctas: Any, in_a_row: Any = None, forwards: bool = False) -> Any:
    """The number of the tile that thread block `cta` computes in wave `wave`.

    Args:
        in_a_row: tiles that a thread block takes together, in ascending order; None: one.
        forwards: every wave goes forwards, so that any num_ctas tiles in a row are of different thread blocks.
    """
    if forwards:
        return wave * num_ctas + cta
    if in_a_row is not None:
        group = wave // in_a_row
        return tile_number(cta, group, num_ctas) * in_a_row + wave - group * in_a_row
    backwards = wave % 2
    return wave * num_ctas + cta + backwards * (num_ctas - 1 - 2 * cta)


def tile_coord(number: Any, divisors: Divisors, num_m_blocks: Any, batch: Any) -> TileCoord:
    """The tile with a number."""
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


def turning_coord(number: Any, divisors: Divisors, num_blocks: Any, batch: Any) -> tuple[TileCoord, Any]:
    """The tile of keys with a number, and whether the tiles of its head ascend (`block_range.following_query_block`).

    Heads descend one after another: n_block num_blocks - 1, ..., 0 of the first head, then those of the next one. The
    last heads (`heads_in_last_section`) ascend together: n_block 0 of all of them, then 1, ... Each order has its tiles
    in the order of their turns, and the longest tiles are not the last ones.

    Args: divisors: with sections of one head, but for the last section.
    """
    ascending = _value(divisors.heads_in_last_section)
    descending = _value(divisors.num_heads) * batch - ascending
    head, rank = divmod(number, divisors.tiles_per_section)
    ascends = number >= descending * num_blocks
    n_block, in_section = divmod(maximum(number - descending * num_blocks, 0), divisors.heads_in_last_section)
    batch_entry, head = divmod(select(ascends, descending + in_section, head), divisors.num_heads)
    return TileCoord(select(ascends, n_block, num_blocks - 1 - rank), head, batch_entry), ascends


def _value(divisor: Any) -> Any:
    return getattr(divisor, "divisor", divisor)


@functools.lru_cache(maxsize=4096)
def heads_per_section(
    heads_in_all: int,
    num_m_blocks: int,
    num_ctas: int,
    kv_bytes_per_head: int,
    longest_first: bool,
    is_dynamic: bool,
    least: int = 1,
) -> int:
    """The number of heads of a section (1 to all heads), whose K and V fit into L2 together.

    In the static order a section is a whole number of double waves of tiles.

    Args:
        kv_bytes_per_head: bytes of K and V that one query head reads; under GQA a share of those of its kv head.
        longest_first: False if tiles have equal lengths.
        is_dynamic: thread blocks draw numbers from a queue (blocks/tiles/queue.py).
        least: the least number of heads, even if they do not fit into L2.
    """
    if not longest_first:
        return 1
    unit = 1 if is_dynamic else 2 * num_ctas // math.gcd(2 * num_ctas, num_m_blocks)
    fitting = max(least, L2_BUDGET_BYTES // max(1, kv_bytes_per_head))
    return min(heads_in_all, max(unit, fitting // unit * unit))


def heads_in_last_section(heads_in_all: int, heads_per_section: int) -> int:
    return heads_in_all - (ceil_div(heads_in_all, heads_per_section) - 1) * heads_per_section


def rings(tiles: int, query_blocks: int, heads: int, num_ctas: int, lag: int) -> tuple[int, int]:
    """The size of the rings in which tiles of keys add to dQ (`block_range.turn_in_ring`), and the waves they take.

    All tiles of a ring must run at a time, in thread blocks of their own. As many heads are worked on at a time as
    there are thread blocks for their rings. Of the sizes that take the fewest waves it is the largest.
    """
    most = max(1, min(tiles, num_ctas, query_blocks // lag))

    def waves(ring: int) -> int:
        return ceil_div(heads, min(heads, num_ctas // ring)) * ceil_div(tiles, ring)

    sizes = {ceil_div(tiles, rings_of_head) for rings_of_head in range(ceil_div(tiles, most), tiles + 1)}
    ring = min(sorted(sizes, reverse=True), key=waves)
    return ring, waves(ring)


def num_tiles(seqlen_q: int, tile_m: int, num_heads: int, batch: int) -> int:
    return ceil_div(seqlen_q, tile_m) * num_heads * batch


# ---------------------------------------------------------------- packed sequences

LANES = 32  # lanes of a warp


def max_packed_tiles(total_q: int, tile_m: int, num_heads: int, batch: int) -> int:
    """An upper bound on the tiles of `batch` sequences, and of the rows after them, that add up to total_q rows."""
    return (total_q + (batch + 1) * (tile_m - 1)) // tile_m * num_heads


def packed_rows(sequence: Any, cu_seqlens: Any, batch: Any, total: Any) -> tuple[Any, Any]:
    """The first row and the number of rows of a sequence.

    The rows from cu_seqlens[batch] on, which belong to no sequence, are sequence number `batch`; later sequences are
    empty. Even inconsistent offsets give rows within the tensor.
    """
    start = select(sequence > batch, total, cu_seqlens[minimum(sequence, batch)])
    end = select(sequence < batch, cu_seqlens[minimum(sequence + 1, batch)], total)
    start = minimum(maximum(start, 0), total)
    return start, maximum(minimum(end, total) - start, 0)


def scan_sequences(number: Any, tiles_before: Any, tiles: Any, warp: Any) -> tuple[Any, Any]:
    """One step of the search for the sequence of tile `number`: a warp looks at 32 sequences, one per lane.

    Args:
        tiles_before: tiles of all sequences before these.
        tiles: tiles of this lane's sequence.
        warp: an object with `inclusive_sum` and `count` over the lanes, such as blocks/memory/warp.py.
    Returns: the lane whose sequence holds the tile, LANES if it is a later sequence; and the number of the first tile
    after this lane's sequence.
    """
    ends = tiles_before + warp.inclusive_sum(tiles)
    return warp.count(ends <= number), ends


def mixed_number(number: Any, num_singles: Any, num_others: Any) -> tuple[Any, Any]:
    """Tile `number` of an order in which tiles of two kinds alternate, until there are no more of one.

    Over a cache, sequences of one tile are mostly single tokens, which wait for memory, and sequences of several tiles
    are prompts, which compute. Side by side on the multiprocessors they take less time than one kind after the other,
    and a single token with a long cache does not come last, wherever in the batch it is.

    Returns: whether the tile is of the first kind, and its number among the tiles of its kind.
    """
    pairs = minimum(num_singles, num_others)
    in_pairs = number < 2 * pairs
    half = number // 2
    is_single = select(in_pairs, number - 2 * half == 0, num_singles > num_others)
    return is_single, select(in_pairs, half, number - pairs)


def packed_coord(number: Any, num_m_blocks: Any, num_heads: Any, longest_first: bool) -> tuple[Any, Any]:
    """m_block and head of a sequence's number-th tile.

    Args:
        longest_first: the last m_block of every head comes first; else all m_blocks of a head follow each other.
    """
    if longest_first:
        rank, head = divmod(number, num_heads)
    else:
        head = number // num_m_blocks
        rank = number - head * num_m_blocks
    return num_m_blocks - 1 - rank, head

"""The keys that a range of queries needs, and the reverse: the arithmetic that decides which tiles are visited.

All functions take the geometry of one sequence. Query i stands at key position i + seqlen_k - seqlen_q
(bottom-right alignment) and sees the keys from window_left before it to window_right after it, both inclusive;
None = unbounded on that side. A side may be negative, and left + right >= 0 where both are given, as in every `Mask`:
then the ranges of neighboring queries overlap or touch. Ranges are half open, [start, end), and empty ranges have
start == end.
"""

from __future__ import annotations

from typing import NamedTuple

from .integers import ceil_div, maximum, minimum, select


def key_range(
    m_start: int, m_end: int, seqlen_q: int, seqlen_k: int, window_left: int | None, window_right: int | None
) -> tuple[int, int]:
    """The keys that at least one of the queries [m_start, m_end) sees. No others need to be loaded."""
    shift = seqlen_k - seqlen_q
    start = 0 if window_left is None else minimum(maximum(0, m_start + shift - window_left), seqlen_k)
    end = seqlen_k if window_right is None else minimum(seqlen_k, m_end + shift + window_right)
    return start, maximum(start, end)


def unmasked_key_range(
    m_start: int, m_end: int, seqlen_q: int, seqlen_k: int, window_left: int | None, window_right: int | None
) -> tuple[int, int]:
    """The keys that every one of the queries [m_start, m_end) sees: tiles inside this range need no mask.

    The range lies inside `key_range` of the same queries.
    """
    shift = seqlen_k - seqlen_q
    low, high = key_range(m_start, m_end, seqlen_q, seqlen_k, window_left, window_right)
    start = low if window_left is None else minimum(maximum(low, m_end - 1 + shift - window_left), high)
    end = high if window_right is None else minimum(high, m_start + shift + window_right + 1)
    return start, maximum(start, end)


def query_range(
    n_start: int, n_end: int, seqlen_q: int, seqlen_k: int, window_left: int | None, window_right: int | None
) -> tuple[int, int]:
    """The queries that see at least one of the keys [n_start, n_end): `key_range` from the side of the keys."""
    shift = seqlen_k - seqlen_q
    start = 0 if window_right is None else minimum(maximum(0, n_start - shift - window_right), seqlen_q)
    end = seqlen_q if window_left is None else minimum(seqlen_q, n_end - shift + window_left)
    return start, maximum(start, end)


def queries_of_keys(
    n_start: int, n_end: int, seqlen_q: int, seqlen_k: int, window_left: int | None, window_right: int | None
) -> tuple[int, int]:
    """`query_range` of keys that may lie past the last one: keys from seqlen_k on are hidden from all queries."""
    low, high = query_range(n_start, minimum(n_end, seqlen_k), seqlen_q, seqlen_k, window_left, window_right)
    return low, select(n_start < seqlen_k, high, low)


class KeyBlocks(NamedTuple):
    """Key blocks of one query tile, as block indices: first <= clear_first <= clear_last <= last.

    Blocks [first, last) are visited, from last - 1 down to first; blocks [clear_first, clear_last) need no mask.
    """

    first: int
    clear_first: int
    clear_last: int
    last: int


def key_blocks(
    m_start: int,
    m_end: int,
    seqlen_q: int,
    seqlen_k: int,
    window_left: int | None,
    window_right: int | None,
    tile_n: int,
) -> KeyBlocks:
    """The key blocks of the queries [m_start, m_end), for kernels, whose blocks start at multiples of tile_n.

    There is always at least one block, with keys if there are any: a kernel that sees a fully masked block gives
    out = 0 and lse = -inf (or the sink) to a tile of queries that see nothing, by the code that every tile runs.
    """
    geometry = (m_start, m_end, seqlen_q, seqlen_k, window_left, window_right)
    low, high = key_range(*geometry)
    clear_low, clear_high = unmasked_key_range(*geometry)
    # queries that see only keys past the last one have low = seqlen_k
    first = 0 if window_left is None else minimum(low, maximum(seqlen_k - 1, 0)) // tile_n
    last = maximum(ceil_div(high, tile_n), first + 1)
    clear_last = maximum(clear_high // tile_n, first)
    clear_first = minimum(ceil_div(clear_low, tile_n), clear_last)
    return KeyBlocks(first, clear_first, clear_last, last)


def blocks_of_rows(tile: KeyBlocks, own: KeyBlocks, max_skipped: int) -> tuple[KeyBlocks, int]:
    """The blocks that some of a tile's rows (of a warpgroup, of a thread block in a cluster) visit.

    They go through the tile's blocks in step with it, except for its last ones, which they may skip if they see none
    of their keys. Their own rows decide which blocks need a mask.

    Args: own: `key_blocks` of these rows alone.
    Returns: their blocks, and how many are skipped.
    """
    # no rows' blocks end after those of their tile; the bound at 0 says so to the compiler
    skipped = minimum(maximum(tile.last - own.last, 0), max_skipped)
    return KeyBlocks(tile.first, own.clear_first, own.clear_last, tile.last - skipped), skipped


class QueryBlocks(NamedTuple):
    """Query blocks of one tile of keys, as block indices: first <= clear_first <= clear_last <= last.

    Blocks [first, last) are visited (none if the two are equal); blocks [clear_first, clear_last) need no mask.
    """

    first: int
    clear_first: int
    clear_last: int
    last: int


def query_blocks(
    n_start: int,
    n_end: int,
    seqlen_q: int,
    seqlen_k: int,
    window_left: int | None,
    window_right: int | None,
    tile_m: int,
) -> QueryBlocks:
    """The query blocks that see the keys [n_start, n_end), for kernels, whose blocks start at multiples of tile_m.

    Keys from seqlen_k on are hidden from all queries, and queries from seqlen_q on do not exist. Blocks that hold some
    of either need a mask.
    """
    shift = seqlen_k - seqlen_q
    low, high = queries_of_keys(n_start, n_end, seqlen_q, seqlen_k, window_left, window_right)
    clear_low = low if window_right is None else maximum(low, n_end - 1 - shift - window_right)
    clear_high = high if window_left is None else minimum(high, n_start - shift + window_left + 1)
    clear_high = select(n_end > seqlen_k, low, clear_high)
    first = low // tile_m
    last = select(high > low, ceil_div(high, tile_m), first)
    clear_first = minimum(ceil_div(clear_low, tile_m), last)
    clear_last = minimum(maximum(maximum(clear_high, 0) // tile_m, clear_first), last)
    return QueryBlocks(first, clear_first, clear_last, last)


def first_key_block(
    m_start: int, seqlen_q: int, seqlen_k: int, window_left: int | None, window_right: int | None, tile_n: int
) -> int:
    """The first of the tiles of keys whose `query_blocks` hold the block of queries that begins with m_start.

    These tiles follow each other without a gap: n_block - first_key_block of them come before tile n_block.
    """
    return key_range(m_start, m_start + 1, seqlen_q, seqlen_k, window_left, window_right)[0] // tile_n


def last_key_block(
    m_start: int,
    tile_m: int,
    seqlen_q: int,
    seqlen_k: int,
    window_left: int | None,
    window_right: int | None,
    tile_n: int,
) -> int:
    """The last of the tiles of keys that `first_key_block` begins. A block of queries that sees no key has neither."""
    m_end = minimum(m_start + tile_m, seqlen_q)
    return (key_range(m_end - 1, m_end, seqlen_q, seqlen_k, window_left, window_right)[1] - 1) // tile_n


def turn_in_ring(place: int, m_block: int, ring: int, lag: int) -> int:
    """How many tiles of a ring add to a block of queries before the tile at `place`, which begins with place * lag.

    Each tile of a ring begins `lag` blocks after the one before, and goes around: all of them work on different blocks
    at any time. The first to add to a block is the last tile that begins at it or before it.
    """
    first = minimum(m_block // lag, ring - 1)
    return first - place + select(first < place, ring, 0)


def following_query_block(
    head: int,
    m_block: int,
    first_head: int,
    num_heads: int,
    first: int,
    last: int,
    heads_together: bool,
    from_first: bool,
    in_ring: bool = False,
) -> tuple[int, int]:
    """The head and query block that a tile of keys visits after m_block, within the blocks [first, last) of each head.

    Args:
        heads_together: all heads visit a block before any of them visits the next one. Where tiles add to a block of
            dQ in turns, every head would otherwise begin with a wait for the longest tile. If False, the blocks of a
            head follow each other, from the first one.
        from_first: tiles begin with their first block, and turns with the last tile of keys (they descend). Under a
            causal mask no tile waits: tile n begins with a block that does not see later tiles, and goes on to blocks
            that tile n + 1 visited one step before. But short tiles come first, and the longest ends last. If False,
            tiles begin with their last block, and turns with the first tile (they ascend); among tiles that begin
            together each falls one step behind the one before.
        in_ring: the block after the last one is the first (see `turn_in_ring`).
    """
    if not heads_together:
        is_last = m_block == last - 1
        return head + select(is_last, 1, 0), select(is_last, first, m_block + 1)
    following = m_block + 1 if in_ring else select(from_first, m_block + 1, m_block - 1)
    if in_ring:
        following = select(following == last, first, following)
    if num_heads == 1:
        return head, following
    is_last = head == first_head + num_heads - 1
    return select(is_last, first_head, head + 1), select(is_last, following, m_block)


def tile_needs_mask(
    m_start: int,
    m_end: int,
    n_start: int,
    n_end: int,
    seqlen_q: int,
    seqlen_k: int,
    window_left: int | None,
    window_right: int | None,
) -> bool:
    """True if some query of [m_start, m_end) must not see some key of [n_start, n_end)."""
    low, high = unmasked_key_range(m_start, m_end, seqlen_q, seqlen_k, window_left, window_right)
    return n_start < low or n_end > high


def tiles(start: int, end: int, tile: int) -> list[tuple[int, int]]:
    """Cut [start, end) into consecutive ranges of at most `tile` elements."""
    return [(low, min(low + tile, end)) for low in range(start, end, tile)]


def key_tiles(
    m_start: int,
    m_end: int,
    seqlen_q: int,
    seqlen_k: int,
    window_left: int | None,
    window_right: int | None,
    tile_n: int,
) -> list[tuple[int, int, bool]]:
    """The key tiles of one query tile, in the order in which they are visited: (n_start, n_end, needs_mask).

    The last keys come first, as in the FlashAttention-3 kernels: the tiles cut by the causal diagonal come before the
    unmasked ones. Cuts are made where masking begins and ends, so that masks are applied to the corners only; the
    remainder of the unmasked keys joins the masked keys after it if both fit into one tile.
    """
    geometry = (m_start, m_end, seqlen_q, seqlen_k, window_left, window_right)
    low, high = key_range(*geometry)
    clear_low, clear_high = unmasked_key_range(*geometry)
    if clear_low == clear_high:
        clear_low = clear_high = low
    rest = clear_high - (clear_high - clear_low) % tile_n
    if clear_high < high <= rest + tile_n:
        clear_high = rest
    ascending = (
        [(a, b, True) for a, b in tiles(low, clear_low, tile_n)]
        + [(a, b, False) for a, b in tiles(clear_low, clear_high, tile_n)]
        + [(a, b, True) for a, b in tiles(clear_high, high, tile_n)]
    )
    return ascending[::-1]


def count_visible_pairs(seqlen_q: int, seqlen_k: int, window_left: int | None, window_right: int | None) -> int:
    """The number of (query, key) pairs that are not masked, from which FLOPs are counted.

    Row i sees clamp(i + shift + right + 1, 0, seqlen_k) - clamp(i + shift - left, 0, seqlen_k) keys (never below
    zero since left + right is not negative); each clamp is summed in closed form.
    """
    shift = seqlen_k - seqlen_q

    def sum_clamped(offset: int) -> int:
        """Sum over i in [0, seqlen_q) of min(max(i + offset, 0), seqlen_k)."""
        first = min(max(0, -offset), seqlen_q)  # below it the term is 0
        last = min(max(first, seqlen_k - offset), seqlen_q)  # from it on the term is seqlen_k
        ramp = (first + last - 1 + 2 * offset) * (last - first) // 2
        return ramp + (seqlen_q - last) * seqlen_k

    ends = seqlen_q * seqlen_k if window_right is None else sum_clamped(shift + window_right + 1)
    starts = 0 if window_left is None else sum_clamped(shift - window_left)
    return ends - starts

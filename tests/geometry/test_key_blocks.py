"""The key blocks that kernels visit, exhaustively against the definition of the mask."""

import itertools

import pytest

from onepass.geometry.block_range import blocks_of_rows, key_blocks

BOUNDS = (None, 0, 1, 3, 9, -1, -3, -6, -20)
WINDOWS = [(left, right) for left in BOUNDS for right in BOUNDS if None in (left, right) or left + right >= 0]


@pytest.mark.parametrize(("tile_m", "tile_n"), [(4, 4), (6, 4), (4, 6), (8, 2)])
def test_key_blocks_against_every_pair(tile_m, tile_n):
    for seqlen_q, seqlen_k in itertools.product((1, 3, 4, 7, 12, 13), (0, 1, 4, 5, 11, 16)):
        shift = seqlen_k - seqlen_q
        for left, right in WINDOWS:
            for m_start in range(0, seqlen_q, tile_m):
                rows = range(m_start, min(m_start + tile_m, seqlen_q))
                blocks = key_blocks(rows.start, rows.stop, seqlen_q, seqlen_k, left, right, tile_n)
                where = (seqlen_q, seqlen_k, left, right, m_start, blocks)
                first, clear_first, clear_last, last = blocks
                assert 0 <= first <= clear_first <= clear_last <= last, where
                assert last > first, where
                # even if no key is visible: the block begins with a key, if there are keys
                assert (last - 1) * tile_n < max(seqlen_k, 1), where

                def sees(i, j, shift=shift, left=left, right=right, seqlen_k=seqlen_k):
                    low = -1 if left is None else i + shift - left
                    high = seqlen_k if right is None else i + shift + right
                    return 0 <= j < seqlen_k and low <= j <= high

                num_blocks = -(-seqlen_k // tile_n)
                needed = [
                    n
                    for n in range(num_blocks)
                    if any(sees(i, j) for i in rows for j in range(n * tile_n, (n + 1) * tile_n))
                ]
                clear = [
                    n
                    for n in range(num_blocks)
                    if all(sees(i, j) for i in rows for j in range(n * tile_n, (n + 1) * tile_n))
                ]
                assert set(needed) <= set(range(first, last)), where
                assert set(range(clear_first, clear_last)) <= set(clear), where
                # every visited block is needed (except the block that a tile without keys visits) ...
                assert needed == list(range(first, last)) or (not needed and last == first + 1), where
                # ... and no block is masked that every row sees
                assert clear == list(range(clear_first, clear_last)), where


def visits(blocks):
    """The pairs (block, is masked) in the order of the consumer's loops."""
    first, clear_first, clear_last, last = blocks
    n = last - 1
    yield n, n >= clear_last or n < clear_first
    clear_first, clear_last = min(clear_first, n), min(clear_last, n)
    for n in range(last - 2, first - 1, -1):
        yield n, not clear_first <= n < clear_last


@pytest.mark.parametrize("max_skipped", [0, 1, 3])
@pytest.mark.parametrize(("part_m", "parts", "tile_n"), [(4, 2, 4), (4, 3, 6), (2, 4, 2), (3, 2, 8)])
def test_rows_of_a_tile_against_every_pair(part_m, parts, tile_n, max_skipped):
    """A warpgroup (or a thread block of a cluster) visits all keys of its rows, and masks the blocks that need it."""
    tile_m = part_m * parts
    for seqlen_q, seqlen_k in itertools.product((1, 3, 8, 13, 24), (1, 4, 5, 11, 16, 24)):
        shift = seqlen_k - seqlen_q
        for left, right in WINDOWS:
            geometry = (seqlen_q, seqlen_k, left, right, tile_n)
            for m_start in range(0, seqlen_q, tile_m):
                tile = key_blocks(m_start, min(m_start + tile_m, seqlen_q), *geometry)
                for part in range(parts):
                    # as in the kernel, rows past the end stand for the last row, and store nothing
                    start = min(m_start + part * part_m, seqlen_q - 1)
                    rows = range(start, min(start + part_m, seqlen_q))
                    own = key_blocks(rows.start, rows.stop, *geometry)
                    blocks, skipped = blocks_of_rows(tile, own, max_skipped)
                    where = (geometry, m_start, part, tile, own, blocks, skipped)
                    assert blocks.first == tile.first, where
                    assert blocks.last + skipped == tile.last, where
                    assert 0 <= skipped <= max_skipped, where
                    visited = dict(visits(blocks))
                    assert list(visited) == list(range(blocks.last - 1, blocks.first - 1, -1)), where
                    assert visited, where
                    for i in rows:
                        low = 0 if left is None else max(0, i + shift - left)
                        high = seqlen_k if right is None else min(seqlen_k, i + shift + right + 1)
                        assert all(j // tile_n in visited for j in range(low, high)), where
                        for n, is_masked in visited.items():
                            assert is_masked or (low <= n * tile_n and (n + 1) * tile_n <= high), where

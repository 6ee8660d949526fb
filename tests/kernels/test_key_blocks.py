"""The key blocks that kernels visit, exhaustively against the definition of the mask."""

import itertools

import pytest

from onepass.kernels.blocks.block_range import key_blocks

BOUNDS = (None, 0, 1, 3, 9)


@pytest.mark.parametrize(("tile_m", "tile_n"), [(4, 4), (6, 4), (4, 6), (8, 2)])
def test_key_blocks_against_every_pair(tile_m, tile_n):
    for seqlen_q, seqlen_k in itertools.product((1, 3, 4, 7, 12, 13), (0, 1, 4, 5, 11, 16)):
        shift = seqlen_k - seqlen_q
        for left, right in itertools.product(BOUNDS, BOUNDS):
            for m_start in range(0, seqlen_q, tile_m):
                rows = range(m_start, min(m_start + tile_m, seqlen_q))
                blocks = key_blocks(rows.start, rows.stop, seqlen_q, seqlen_k, left, right, tile_n)
                where = (seqlen_q, seqlen_k, left, right, m_start, blocks)
                first, clear_first, clear_last, last = blocks
                assert 0 <= first <= clear_first <= clear_last <= last, where
                assert last > first, where

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
                # nothing in vain: every visited block is needed (but the one a tile without keys visits) ...
                assert needed == list(range(first, last)) or (not needed and last == first + 1), where
                # ... and no block is masked that every row sees
                assert clear == list(range(clear_first, clear_last)), where

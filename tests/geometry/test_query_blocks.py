"""The query blocks that the backward visits, exhaustively against the definition of the mask."""

import itertools

import packages
import pytest
import torch

from onepass.geometry.block_range import first_key_block, key_range, last_key_block, queries_of_keys, query_blocks
from onepass.problem import Mask
from onepass.reference import visible_pairs

BOUNDS = (None, 0, 1, 3, 9, -1, -3, -6, -20)
WINDOWS = [(left, right) for left in BOUNDS for right in BOUNDS if None in (left, right) or left + right >= 0]


@pytest.mark.parametrize(("tile_m", "tile_n"), [(4, 4), (6, 4), (4, 6), (2, 8)])
def test_query_blocks_against_every_pair(tile_m, tile_n):
    for seqlen_q, seqlen_k in itertools.product((1, 3, 4, 7, 12, 13), (0, 1, 4, 5, 11, 16)):
        shift = seqlen_k - seqlen_q
        for left, right in WINDOWS:

            def sees(i, j, shift=shift, left=left, right=right, seqlen_q=seqlen_q, seqlen_k=seqlen_k):
                low = 0 if left is None else i + shift - left
                high = seqlen_k if right is None else i + shift + right
                return 0 <= i < seqlen_q and 0 <= j < seqlen_k and low <= j <= high

            # tiles past the last key are included: seqused_k may leave a tile of a padded batch without keys
            for n_start in range(0, seqlen_k + 2 * tile_n, tile_n):
                keys = range(n_start, n_start + tile_n)
                blocks = query_blocks(keys.start, keys.stop, seqlen_q, seqlen_k, left, right, tile_m)
                where = (seqlen_q, seqlen_k, left, right, n_start, blocks)
                first, clear_first, clear_last, last = blocks
                num_blocks = -(-seqlen_q // tile_m)
                assert 0 <= first <= clear_first <= clear_last <= last <= num_blocks, where
                pairs = [
                    [sees(i, j) for i in range(m * tile_m, (m + 1) * tile_m) for j in keys] for m in range(num_blocks)
                ]
                # every visible pair is visited, and no block is visited (or masked) without need
                assert [m for m in range(num_blocks) if any(pairs[m])] == list(range(first, last)), where
                assert [m for m in range(num_blocks) if all(pairs[m])] == list(range(clear_first, clear_last)), where


def test_the_pairs_of_a_row_against_the_oracle():
    """The pairs that rows of dk, dv and dq are summed over, including keys past the used ones."""
    for seqlen_q, seqlen_k, used in itertools.product((1, 4, 7, 13), (5, 16), (0, 1, 5, 11, 16)):
        used = min(used, seqlen_k)
        for left, right in WINDOWS:
            visible = visible_pairs(
                1, seqlen_q, seqlen_k, Mask(left, right), torch.tensor([used]), torch.device("cpu")
            )[0]
            geometry = (seqlen_q, used, left, right)
            for pairs, interval in ((visible, key_range), (visible.T, queries_of_keys)):
                for row, seen in enumerate(pairs):
                    low, high = interval(row, row + 1, *geometry)
                    assert 0 <= low <= high, (geometry, row)
                    assert seen.nonzero().flatten().tolist() == list(range(low, high)), (geometry, row)


@pytest.mark.parametrize(("tile_m", "tile_n"), [(4, 4), (6, 4), (4, 6), (2, 8)])
def test_first_and_last_key_block(tile_m, tile_n):
    """The first and the last tile of keys that visit a block of queries, where its sum begins and ends."""
    for seqlen_q, seqlen_k in itertools.product((1, 3, 4, 7, 12, 13), (0, 1, 4, 5, 11, 16)):
        for left, right in WINDOWS:
            geometry = seqlen_q, seqlen_k, left, right
            visits = [
                query_blocks(n * tile_n, (n + 1) * tile_n, *geometry, tile_m) for n in range(-(-seqlen_k // tile_n))
            ]
            for m in range(-(-seqlen_q // tile_m)):
                visitors = [n for n, blocks in enumerate(visits) if blocks.first <= m < blocks.last]
                first = first_key_block(m * tile_m, *geometry, tile_n)
                last = last_key_block(m * tile_m, tile_m, *geometry, tile_n)
                # the kernel never asks about a block that no tile visits
                assert not visitors or visitors == list(range(first, last + 1)), (geometry, m)


def test_no_queries():
    for left, right in WINDOWS:
        first, clear_first, clear_last, last = query_blocks(0, 4, 0, 7, left, right, 4)
        assert first == clear_first == clear_last == last


@packages.needs_compiler
def test_every_row_of_a_block_has_its_place():
    from onepass.kernels.device.blocks.memory.row_stats import stats_position

    for tile_m in (64, 128):
        assert sorted(stats_position(row) for row in range(tile_m)) == list(range(tile_m))


@packages.needs_compiler
def test_a_thread_finds_the_rows_of_its_columns():
    """In a wgmma accumulator a lane of a quad holds columns 2 * lane and 2 * lane + 1 of each eight."""
    from onepass.kernels.device.blocks.memory.row_stats import stats_position

    for lane, sixteen in itertools.product(range(4), range(8)):
        rows = [16 * sixteen + 8 * upper + 2 * lane + c for upper in range(2) for c in range(2)]
        assert [stats_position(row) for row in rows] == [16 * sixteen + 4 * lane + i for i in range(4)]

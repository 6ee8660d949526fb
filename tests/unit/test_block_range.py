"""The tile arithmetic against brute force over every small geometry."""

import itertools

import pytest

from onepass.kernels.blocks.block_range import (
    count_visible_pairs,
    key_range,
    key_tiles,
    query_range,
    tile_needs_mask,
    tiles,
    unmasked_key_range,
)

LENGTHS = (0, 1, 2, 5, 8)
WINDOWS = (None, 0, 1, 3, 20)
GEOMETRIES = list(itertools.product(LENGTHS, LENGTHS, WINDOWS, WINDOWS))


def sees(i: int, j: int, seqlen_q: int, seqlen_k: int, left: int | None, right: int | None) -> bool:
    position = i + seqlen_k - seqlen_q
    return (left is None or j >= position - left) and (right is None or j <= position + right)


def subranges(length: int):
    return [(a, b) for a in range(length) for b in range(a + 1, length + 1)]


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), list(itertools.product(LENGTHS, LENGTHS)))
def test_ranges_match_brute_force(seqlen_q, seqlen_k):
    for left, right in itertools.product(WINDOWS, WINDOWS):
        geometry = (seqlen_q, seqlen_k, left, right)
        for m in subranges(seqlen_q):
            visible = [[j for j in range(seqlen_k) if sees(i, j, *geometry)] for i in range(*m)]
            some, every = set().union(*visible), set.intersection(*map(set, visible))
            low, high = key_range(*m, *geometry)
            assert 0 <= low <= high <= seqlen_k
            assert some <= set(range(low, high))
            # no key is loaded in vain: a window is an interval, and so is the union over neighbouring queries
            assert some == set(range(low, high))
            clear_low, clear_high = unmasked_key_range(*m, *geometry)
            assert low <= clear_low <= clear_high <= high
            assert set(range(clear_low, clear_high)) == every
        for n in subranges(seqlen_k):
            seeing = {i for i in range(seqlen_q) if any(sees(i, j, *geometry) for j in range(*n))}
            low, high = query_range(*n, *geometry)
            assert 0 <= low <= high <= seqlen_q
            assert set(range(low, high)) == seeing


@pytest.mark.parametrize("tile_n", [1, 2, 3, 8])
def test_key_tiles_cover_each_visible_key_once(tile_n):
    for geometry in GEOMETRIES:
        seqlen_q = geometry[0]
        for m in subranges(seqlen_q):
            visited = []
            for n_start, n_end, needs_mask in key_tiles(*m, *geometry, tile_n):
                assert 0 < n_end - n_start <= tile_n
                visited += range(n_start, n_end)
                hidden = [(i, j) for i in range(*m) for j in range(n_start, n_end) if not sees(i, j, *geometry)]
                assert needs_mask or not hidden
                assert tile_needs_mask(*m, n_start, n_end, *geometry) == bool(hidden)
            assert len(visited) == len(set(visited))
            assert set(visited) == set(range(*key_range(*m, *geometry)))


@pytest.mark.parametrize("tile_n", [1, 2, 3, 8])
def test_without_a_hidden_key_no_tile_is_masked(tile_n):
    for geometry in GEOMETRIES:
        for m in subranges(geometry[0]):
            hides = any(not sees(i, j, *geometry) for i in range(*m) for j in range(*key_range(*m, *geometry)))
            if not hides:
                assert not any(needs_mask for *_, needs_mask in key_tiles(*m, *geometry, tile_n))


def test_key_tiles_go_from_the_last_key_to_the_first():
    starts = [n_start for n_start, _, _ in key_tiles(4, 8, 8, 8, None, 0, 2)]
    assert starts == sorted(starts, reverse=True)


def test_the_rest_of_the_unmasked_keys_joins_the_masked_ones():
    # queries 8..15 of 16 see keys 0..8 all and mask 9..15: one clear tile and one masked one, none of a single key
    assert key_tiles(8, 16, 16, 16, None, 0, 8) == [(8, 16, True), (0, 8, False)]


def test_visible_pairs_are_counted_exactly():
    for seqlen_q, seqlen_k, left, right in GEOMETRIES:
        count = sum(sees(i, j, seqlen_q, seqlen_k, left, right) for i in range(seqlen_q) for j in range(seqlen_k))
        assert count_visible_pairs(seqlen_q, seqlen_k, left, right) == count


def test_tiles_cut_without_gaps():
    assert tiles(3, 11, 4) == [(3, 7), (7, 11)]
    assert tiles(0, 5, 4) == [(0, 4), (4, 5)]
    assert tiles(2, 2, 4) == []

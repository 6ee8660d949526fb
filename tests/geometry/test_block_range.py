"""The tile arithmetic against brute force over every small geometry."""

import itertools

import pytest
import torch

from onepass.geometry.block_range import (
    count_visible_pairs,
    key_range,
    key_tiles,
    query_range,
    tile_needs_mask,
    tiles,
    unmasked_key_range,
)
from onepass.kernels.launch.arguments import window_bounds
from onepass.problem import AttentionProblem, Mask

LENGTHS = (0, 1, 2, 5, 8)
SIDES = (None, 0, 1, 3, 20, -1, -2, -4, -20)
# a Mask has no other windows: one that hides all keys does so by its right side alone
WINDOWS = [(left, right) for left in SIDES for right in SIDES if None in (left, right) or left + right >= 0]
GEOMETRIES = [(*lengths, *window) for lengths in itertools.product(LENGTHS, LENGTHS) for window in WINDOWS]


def sees(i: int, j: int, seqlen_q: int, seqlen_k: int, left: int | None, right: int | None) -> bool:
    position = i + seqlen_k - seqlen_q
    return (left is None or j >= position - left) and (right is None or j <= position + right)


def subranges(length: int):
    return [(a, b) for a in range(length) for b in range(a + 1, length + 1)]


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), list(itertools.product(LENGTHS, LENGTHS)))
def test_ranges_match_brute_force(seqlen_q, seqlen_k):
    for window in WINDOWS:
        geometry = (seqlen_q, seqlen_k, *window)
        for m in subranges(seqlen_q):
            visible = [[j for j in range(seqlen_k) if sees(i, j, *geometry)] for i in range(*m)]
            some, every = set().union(*visible), set.intersection(*map(set, visible))
            low, high = key_range(*m, *geometry)
            assert 0 <= low <= high <= seqlen_k
            assert some <= set(range(low, high))
            # every key that is loaded is needed: a window is an interval, and so is the union over neighboring queries
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
    # queries 8..15 of 16 all see keys 0..8 and mask 9..15: one clear tile and one masked tile, none of a single key
    assert key_tiles(8, 16, 16, 16, None, 0, 8) == [(8, 16, True), (0, 8, False)]


def test_visible_pairs_are_counted_exactly():
    for seqlen_q, seqlen_k, left, right in GEOMETRIES:
        count = sum(sees(i, j, seqlen_q, seqlen_k, left, right) for i in range(seqlen_q) for j in range(seqlen_k))
        assert count_visible_pairs(seqlen_q, seqlen_k, left, right) == count


def test_tiles_cut_without_gaps():
    assert tiles(3, 11, 4) == [(3, 7), (7, 11)]
    assert tiles(0, 5, 4) == [(0, 4), (4, 5)]
    assert tiles(2, 2, 4) == []


def test_masks_of_options():
    """`causal` hides the keys after the query's own and reveals none; a right side alone can hide all keys."""
    for causal, (left, right) in itertools.product((False, True), itertools.product(SIDES, SIDES)):
        mask = Mask.from_options(causal, (left, right))
        window = mask.window_left, mask.window_right
        assert None in window or sum(window) >= 0
        for lengths in itertools.product(LENGTHS, LENGTHS):
            for i, j in itertools.product(*map(range, lengths)):
                wanted = sees(i, j, *lengths, left, right) and not (causal and j > i + lengths[1] - lengths[0])
                assert sees(i, j, *lengths, *window) == wanted, (causal, left, right, lengths, i, j)
    assert Mask.from_options(True, None) == Mask(None, 0)
    assert Mask.from_options(True, (4, 2)) == Mask(4, 0)
    assert Mask.from_options(True, (4, -2)) == Mask(4, -2)


FAR = 2**40


@pytest.mark.parametrize("is_shorter", [False, True])
def test_bounds_of_kernels_stay_in_range(is_shorter):
    """Clamped bounds hide what the window hides, up to these lengths, and lie no further from 0 than the longest."""
    sides = [*SIDES, *(side * FAR + 3 for side in (-1, 1))]
    for most_q, most_k in ((8, 5), (2, 8), (8, 8), (1, 1)):
        for left, right in itertools.product(sides, sides):
            mask = Mask.from_options(False, (left, right))
            bounds = window_bounds(problem(most_q, most_k, mask))
            assert [bound is None for bound in bounds] == [side is None for side in vars(mask).values()]
            assert all(abs(bound or 0) <= max(most_q, most_k) for bound in bounds)
            assert None in bounds or sum(bounds) >= 0
            lengths = [(most_q, most_k)]
            if is_shorter:  # packed sequences, or seqused_k
                lengths = itertools.product(range(most_q + 1), range(most_k + 1))
            for seqlen_q, seqlen_k in lengths:
                for i, j in itertools.product(range(seqlen_q), range(seqlen_k)):
                    wanted = sees(i, j, seqlen_q, seqlen_k, left, right)
                    assert sees(i, j, seqlen_q, seqlen_k, *bounds) == wanted, (left, right, bounds, seqlen_q, seqlen_k)


def problem(seqlen_q, seqlen_k, mask):
    heads = {"num_heads_q": 1, "num_heads_kv": 1, "head_dim": 8, "head_dim_v": 8}
    sizes = {"batch": 1, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "softmax_scale": 1.0}
    return AttentionProblem(torch.float16, "cuda", mask=mask, **heads, **sizes)

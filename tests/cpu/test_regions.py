"""A mask as rectangles and triangles: each visible pair is in one region, and no hidden pair in any."""

import itertools

import pytest
import torch

from onepass.cpu.regions import Region, chunks, regions
from onepass.problem import Mask
from onepass.tiled.mask import hidden_pairs

SIDES = [None, 0, 1, 3, 50, -1, -4, -50]


def pairs(found: list[Region], seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """How many regions hold each pair, (seqlen_q, seqlen_k)."""
    counts = torch.zeros(seqlen_q, seqlen_k, dtype=torch.int32)
    for region in found:
        ones = torch.ones(region.num_queries, region.num_keys, dtype=torch.int32)
        counts[region.queries, region.keys] += ones.tril() if region.is_causal else ones
    return counts


@pytest.mark.parametrize("right", SIDES)
def test_each_visible_pair_is_in_one_region(right):
    for seqlen_q, seqlen_k in itertools.product((1, 2, 5, 8), repeat=2):
        found = regions(Mask(None, right), seqlen_q, seqlen_k)
        hidden = hidden_pairs(
            (0, seqlen_q), (0, seqlen_k), seqlen_k - seqlen_q, None, right, device=torch.device("cpu")
        )
        assert torch.equal(pairs(found, seqlen_q, seqlen_k), (~hidden).int()), (seqlen_q, seqlen_k)
        assert all(region.num_queries > 0 and region.num_keys > 0 for region in found)
        # the rows of the first region are those with keys
        rows = torch.zeros(seqlen_q, dtype=torch.bool)
        for region in found[:1]:
            rows[region.queries] = True
        assert torch.equal(rows, ~hidden.all(1))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 3), (3, 0)])
def test_no_pairs(seqlen_q, seqlen_k):
    assert regions(Mask(), seqlen_q, seqlen_k) == ()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_chunks_hold_each_pair_once(size, is_causal):
    for num_queries, num_keys in ((6, 6), (6, 4), (1, 5), (7, 7)):
        if is_causal and num_keys > num_queries:
            continue
        region = Region(2, num_queries, 3, num_keys, is_causal)
        pieces = chunks(region, size)
        assert torch.equal(pairs(pieces, 12, 12), pairs([region], 12, 12))
        assert max(max(piece.num_queries, piece.num_keys) for piece in pieces) <= max(size, 1)
        keys = [piece.first_key for piece in pieces]
        assert keys == sorted(keys)  # all chunks of the same keys follow each other

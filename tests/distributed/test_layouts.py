"""The balanced layout: equal tokens, equal work, and few keys that travel."""

import random
from itertools import pairwise

import pytest

from onepass import distributed
from onepass.distributed import layouts
from onepass.distributed.layout import Layout, visible_pairs
from onepass.distributed.layouts import SLACK, make_layout
from onepass.distributed.schedule import Schedule, Step
from onepass.problem import Mask

CAUSAL = Mask(None, 0)
STEP = Step(1, 0, 1)


def random_lengths(rng: random.Random, tokens: int) -> tuple[int, ...]:
    """Offsets of sequences of 256 to 16384 tokens, log-uniform."""
    offsets = [0]
    while offsets[-1] < tokens:
        offsets.append(min(tokens, offsets[-1] + int(256 * 64 ** rng.random())))
    return tuple(offsets)


def work_of(layout: Layout, offsets: tuple[int, ...], mask: Mask) -> list[int]:
    return [sum(visible_pairs(run, offsets, mask) for run in runs) for runs in layout.runs]


def received(layout: Layout, offsets: tuple[int, ...], mask: Mask) -> list[int]:
    """The rows of k that each rank receives from others."""
    schedule = Schedule(layout, offsets, mask, 1, 1, (STEP,))
    pieces = [schedule.key_pieces(STEP, rank) for rank in range(layout.num_ranks)]
    return [sum(piece.rows for piece in of_rank if piece.source != rank) for rank, of_rank in enumerate(pieces)]


@pytest.mark.parametrize("mask", [CAUSAL, Mask(), Mask(1000, 0), Mask(0, None)], ids=str)
def test_work_and_tokens_are_equal(mask):
    rng = random.Random(0)
    for num_ranks in (2, 3, 5, 8, 16):
        offsets = random_lengths(rng, num_ranks * rng.choice([2048, 8192, 8191]))
        layout = make_layout("balanced", num_ranks, offsets, mask)
        counts = [layout.count(rank) for rank in range(num_ranks)]
        assert max(counts) - min(counts) <= 1
        work = work_of(layout, offsets, mask)
        mean = sum(work) / num_ranks
        assert max(abs(w - mean) for w in work) <= SLACK * mean


def test_the_slowest_rank_of_the_balanced_layout_needs_the_least_time():
    """It is compared with the layouts that divide none, one or all sequences first. Keys that travel cost time, too."""
    rng, chosen = random.Random(0), set()
    for _ in range(100):
        num_ranks = rng.choice([2, 3, 5, 8])
        tokens = num_ranks * rng.choice([512, 2048, 8192])
        offsets = (0, *sorted(rng.sample(range(1, tokens), rng.randint(1, 6))), tokens)

        def seconds(layout, offsets=offsets):
            pairs = zip(work_of(layout, offsets, CAUSAL), received(layout, offsets, CAUSAL), strict=True)
            return max(work + layouts.PAIRS_OF_A_ROW * rows for work, rows in pairs)

        several = [layouts._Division(num_ranks, offsets, CAUSAL).make(n) for n in (0, 1, num_ranks)]
        costs = [seconds(layout) for layout in several]
        assert seconds(make_layout("balanced", num_ranks, offsets, CAUSAL)) == min(costs)
        chosen.add(costs.index(min(costs)))
    assert chosen == {0, 1, 2}


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_sequences_of_a_share_stay_whole(num_ranks):
    """Nothing travels where whole sequences fill the ranks."""
    lengths = [4096, 2048, 2048, 1024, 512, 512] * num_ranks
    random.Random(1).shuffle(lengths)
    offsets = tuple(sum(lengths[:i]) for i in range(len(lengths) + 1))
    layout = make_layout("balanced", num_ranks, offsets, CAUSAL)
    assert received(layout, offsets, CAUSAL) == [0] * num_ranks


@pytest.mark.parametrize(("num_ranks", "share"), [(2, 0.5), (4, 1.0), (8, 1.3), (16, 1.5)])
def test_few_keys_travel(num_ranks, share):
    """The rows that all ranks receive, as a share of all tokens, in the mean over ten packings.

    It is P - 1 where each rank needs all keys of the others.
    """
    rng, shares = random.Random(2), []
    for _ in range(10):
        offsets = random_lengths(rng, num_ranks * 8192)
        shares.append(sum(received(make_layout("balanced", num_ranks, offsets, CAUSAL), offsets, CAUSAL)) / offsets[-1])
    assert sum(shares) / 10 < share


def test_long_sequences_are_divided():
    """A sequence that no rank can hold goes to several, and the others stay whole beside it."""
    offsets = (0, 12000, 14000, 15000, 16000)
    layout = make_layout("balanced", 2, offsets, CAUSAL)
    owners = [{run.rank for run in layout.owned(start, stop)} for start, stop in pairwise(offsets)]
    assert owners[0] == {0, 1}
    assert all(len(ranks) == 1 for ranks in owners[1:])


def test_a_plan_deals_tokens_once():
    """Packed sequences are other ones in each step of training, so that plans are made often."""
    layouts._balanced.cache_clear()
    distributed.plan([0, 3000, 5000], num_ranks=4, num_heads_q=8, num_heads_kv=8, causal=True)
    assert layouts._balanced.cache_info().misses == 1

"""Deterministic backward: tiles of keys add to a block of dQ in a fixed order, and none waits forever.

A model of the Hopper backward on Python ints: thread blocks go through tiles of keys, tiles go through query blocks,
and every addition waits for its turn. Order, turns and numbering are the kernel's own functions. Run as a program, this
file prints the cost of the order.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict
from dataclasses import replace
from typing import NamedTuple

import pytest
from shipped import problem
from turn_model import (
    Case,
    padded_tiles,
    run,
    steps_of,
    tiles_in_rings,
    tiles_with_ascending_end,
    visits,
)

from onepass.geometry.integers import ceil_div
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.kernels.launch.backward_sm90 import heads_per_section, tiles_in_ring
from onepass.problem import Mask


class SmallRings(NamedTuple):
    """What the choice of rings asks of a configuration, with small tiles."""

    ring_lag: int
    tile_m: int = 4
    tile_n: int = 6

    def adds_in_turns(self, problem):
        return True

    def adds_in_rings(self, problem):
        return True

    def has_ascending_end(self, problem):
        return False

    def bytes_per_head(self, problem):
        return 512 * problem.seqlen_q * problem.qhead_per_kvhead


# ---------------------------------------------------------------- turns

BOUNDS = (None, 0, 1, 3, 9, -1, -4)
WINDOWS = [(left, right) for left in BOUNDS for right in BOUNDS if None in (left, right) or left + right >= 0]
LENGTHS = (1, 3, 4, 7, 12, 13)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(("tile_m", "tile_n"), [(4, 4), (6, 4), (4, 6), (2, 8), (8, 2)])
def test_turns_count_the_tiles_before(tile_m, tile_n, descending):
    """The tiles that visit a block have the turns 0, 1, 2, ... in their order; padding has none."""
    for seqlen_q, used, window in itertools.product(LENGTHS, (0, 1, 4, 5, 11, 16, 29), WINDOWS):
        for num_blocks in (ceil_div(used, tile_n), ceil_div(used, tile_n) + 2):
            case = Case(seqlen_q, used, *window, tile_m, tile_n, 1, descending)
            turns = {}
            for n_block in range(num_blocks)[:: -1 if descending else 1]:
                for (_, _, m_block), turn in steps_of(case, n_block, 0, 0):
                    assert 0 <= m_block < ceil_div(seqlen_q, tile_m), case
                    turns.setdefault(m_block, []).append(turn)
            for m_block, block_turns in turns.items():
                assert block_turns == list(range(len(block_turns))), (case, m_block)


def turns_of_blocks(tiles):
    """The turns at each block of dQ, in the order of the tiles that visit it."""
    turns = {}
    for tile in tiles:
        for key, turn in tile:
            turns.setdefault(key, []).append(turn)
    return turns


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("ring", "lag"), [(1, 1), (3, 1), (3, 2), (4, 1), (5, 1)])
def test_rings_visit_every_block_in_turn(ring, lag, group):
    """Tiles of a ring have different blocks at any time, and come to a block in the order of its turns."""
    for num_keys, num_queries in itertools.product(range(1, 9), range(ring * lag, ring * lag + 4)):
        case = Case(4 * num_queries, 6 * num_keys, None, None, 4, 6, group)
        tiles = tiles_in_rings(case, 1, 1, 1, ring, lag)
        assert len(tiles) == num_keys
        for first in range(0, num_keys, ring):
            steps = list(zip(*tiles[first : first + ring], strict=True))
            visited = {}
            for step in steps:
                assert len({key for key, _ in step}) == len(step), case
                for key, turn in step:
                    visited.setdefault(key, []).append(turn)
            expected = list(range(first, min(first + ring, num_keys)))
            assert len(visited) == num_queries * group
            assert all(turns == expected for turns in visited.values()), case


@pytest.mark.parametrize("ascending", [1, 2, 6])
def test_the_last_heads_ascend(ascending):
    """Each tile has one number, and each block of dQ its turns in the order of the numbers; long tiles come early."""
    for seqlen_q, seqlen_k, right in itertools.product(LENGTHS, LENGTHS, (None, 0, 3, -4)):
        case = Case(seqlen_q, seqlen_k, None, right, 4, 6, 1)
        tiles = tiles_with_ascending_end(case, 3, 2, ascending)
        expected = padded_tiles(case, 3, 2, 1)
        assert sorted(sorted(key for key, _ in tile) for tile in tiles) == sorted(
            sorted(key for key, _ in tile) for tile in expected
        )
        for turns in turns_of_blocks(tiles).values():
            assert turns == list(range(len(turns))), case
        if right == 0:
            lengths = [len(tile) for tile in tiles[-ascending * ceil_div(seqlen_k, 6) :]]
            assert lengths == sorted(lengths, reverse=True)


# ---------------------------------------------------------------- deadlock


@pytest.mark.parametrize("num_ctas", [1, 2, 3, 7, 64])
def test_no_deadlock_in_rings(num_ctas):
    """The tiles of a ring are in thread blocks of their own, whatever ring and section a launch chooses."""
    rng = random.Random(num_ctas)
    for seqlen_q, seqlen_k, heads, group in itertools.product((3, 25, 64), (5, 41, 100), (1, 2, 5), (1, 2)):
        asked = replace(problem(64, 64, mask=Mask()), seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch=2)
        asked = replace(asked, num_heads_kv=heads, num_heads_q=heads * group, deterministic=True)
        for lag in (1, 2, 4):
            config = SmallRings(ring_lag=lag)
            ring, section = tiles_in_ring(asked, config, num_ctas), heads_per_section(asked, config, num_ctas)
            assert ring * section <= num_ctas
            case = Case(seqlen_q, seqlen_k, None, None, config.tile_m, config.tile_n, group)
            tiles = tiles_in_rings(case, heads, 2, section, ring, lag)
            run(tiles, num_ctas, False, jitter=lambda: rng.randint(0, 30), forwards=True)


def test_rings_that_do_not_fit_wait_forever():
    """A ring needs all of its tiles at a time, and a thread block must not have two of them in a row."""
    tiles = tiles_in_rings(Case(24, 24, None, None, 4, 6, 1), 3, 1, 1, 4, 1)
    run(tiles, 5, False, forwards=True)
    for num_ctas, forwards in ((3, True), (5, False)):
        with pytest.raises(AssertionError, match="deadlock"):
            run(tiles, num_ctas, False, forwards=forwards)


# ---------------------------------------------------------------- cost


def cost(seqlen, left, right, group, head_dim=128, num_ctas=132, in_turns=False):
    """Steps, as the kernel is launched by default; 16384 tokens of hidden size 2048."""
    heads_q = 2048 // head_dim
    heads, batch = heads_q // group, max(1, 16384 // seqlen)
    asked = problem(head_dim, head_dim, seqlen, mask=Mask(left, right), num_heads_kv=heads)
    asked = replace(asked, batch=batch, num_heads_q=heads_q)
    tile_m = heuristics.backward_config_sm90(asked).tile_m
    asked = replace(asked, deterministic=in_turns)
    config = heuristics.backward_config_sm90(asked)
    case = Case(seqlen, seqlen, left, right, tile_m, 128, group, config.adds_descending(asked))
    section = heads_per_section(asked, config, num_ctas)
    is_ring = config.adds_in_rings(asked)
    if is_ring:
        tiles = tiles_in_rings(case, heads, batch, section, tiles_in_ring(asked, config, num_ctas), config.ring_lag)
    elif config.has_ascending_end(asked):
        tiles = tiles_with_ascending_end(case, heads, batch, section)
    else:
        tiles = padded_tiles(case, heads, batch, section, in_turns=in_turns)
    return run(tiles, num_ctas, config.dynamic_tiles, in_turns, forwards=is_ring)


@pytest.mark.sampled(quick=3, slow=6)
@pytest.mark.parametrize(
    ("left", "right", "group", "head_dim", "most"),
    [
        *((None, 0, group, 128, 1.08) for group in (1, 4)),
        (None, 0, 1, 64, 1.2),  # orders that are best in the model lose more on a GPU: see tiles_in_step
        *((None, None, *kind, 1.05) for kind in ((1, 128), (4, 128), (1, 64))),
        *((512, 0, *kind, 1.1) for kind in ((1, 128), (4, 128), (1, 64))),
    ],
)
def test_turns_cost_little(left, right, group, head_dim, most):
    free, in_turns = (cost(2048, left, right, group, head_dim, in_turns=turns) for turns in (False, True))
    assert in_turns < most * free, (free, in_turns)


@pytest.mark.sampled(quick=2, slow=2)
@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("seqlen", [2048, 8192])
def test_groups_of_heads_are_balanced(seqlen, group):
    """Groups take about the steps of equally many heads without groups."""
    alone, grouped = cost(seqlen, None, 0, 1), cost(seqlen, None, 0, group)
    assert grouped < 1.05 * alone, (alone, grouped)


def misses(tiles, num_ctas, room):
    """The share of visits whose block of queries is not among the `room` blocks that were visited last."""
    kept, drawn, found = OrderedDict(), itertools.count(num_ctas), 0
    events = [(0, cta, cta, 0) for cta in range(num_ctas)]  # in step: time, thread block, tile, step of it
    while events:
        now, cta, number, step = heapq.heappop(events)
        if number >= len(tiles):
            continue
        found += tiles[number][step] in kept
        kept[tiles[number][step]] = None
        kept.move_to_end(tiles[number][step])
        if len(kept) > room:
            kept.popitem(last=False)
        is_last = step == len(tiles[number]) - 1
        heapq.heappush(events, (now + 1, cta, next(drawn) if is_last else number, 0 if is_last else step + 1))
    return 1 - found / sum(map(len, tiles))


def test_heads_of_a_group_share_blocks_of_queries():
    """Two waves of tiles, longest first: with heads_together nearly all visits are of blocks that are in L2."""
    seqlen, group, heads, num_ctas = 2048, 4, 4, 32
    case = Case(seqlen, seqlen, None, 0, 64, 128, group)
    number_of = itertools.count()
    apart, together = [], []
    for n_block, head in itertools.product(range(seqlen // case.tile_n), range(heads)):
        apart.append(list(visits(case, n_block, head, in_turns=False)))
        ascends = next(number_of) // num_ctas % 2 == 1
        together.append(list(visits(case._replace(descending=ascends), n_block, head)))
        assert sorted(apart[-1]) == sorted(together[-1])
    room = seqlen // case.tile_m * group  # the blocks of one kv head
    assert misses(together, num_ctas, room) < 0.2
    assert misses(apart, num_ctas, room) > 0.4


def test_a_head_with_a_tile_for_every_thread_block_is_worked_on_alone():
    """Such a head is balanced alone, and two that do not fit into L2 together would evict each other's rows."""
    seqlen, heads, group, num_ctas = 8192, 4, 8, 33
    asked = problem(128, 128, seqlen, mask=Mask(None, 0), num_heads_kv=heads)
    asked = replace(asked, num_heads_q=heads * group)
    config = heuristics.backward_config_sm90(asked)
    assert ceil_div(seqlen, config.tile_n) >= num_ctas
    assert heads_per_section(asked, config, num_ctas) == 1
    tiles = padded_tiles(Case(seqlen, seqlen, None, 0, config.tile_m, config.tile_n, group), heads, 1, 1)
    assert run(tiles, num_ctas, config.dynamic_tiles, False) < 1.02 * sum(map(len, tiles)) / num_ctas


if __name__ == "__main__":
    for head_dim, seqlen, (left, right), group in itertools.product(
        (64, 128), (2048, 4096, 8192, 16384), ((None, 0), (None, None), (1024, 0)), (1, 4)
    ):
        free, in_turns = (cost(seqlen, left, right, group, head_dim, in_turns=turns) for turns in (False, True))
        what = f"{head_dim:3} {seqlen:6} window {left}, {right}, group {group}"
        print(f"{what}: {free:.0f} -> {in_turns:.0f} ({in_turns / free:.3f})")

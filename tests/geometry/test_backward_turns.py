"""Deterministic backward: tiles of keys add to a block of dQ in a fixed order, and nobody waits for ever.

A model of the Hopper backward on Python ints: thread blocks go through tiles of keys, tiles through query blocks, and
every addition waits for its turn. Order, turns and numbering are the kernel's own functions. Run as a program it prints
what the order costs.
"""

import heapq
import itertools
import random
from dataclasses import replace
from typing import NamedTuple

import pytest
from shipped import problem

from onepass.geometry import tile_scheduler
from onepass.geometry.block_range import first_key_block, following_query_block, last_key_block, query_blocks
from onepass.geometry.integers import ceil_div
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.kernels.launch.backward_sm90 import heads_per_section
from onepass.problem import Mask

# Time of the model: a step; from a tile's last addition until it is complete; from giving a turn until another thread
# block sees it; the rest of a tile's end.
STEP, COMPLETE, SEEN, STORE = 10, 6, 3, 5


class Case(NamedTuple):
    seqlen_q: int
    seqlen_k: int
    left: int | None
    right: int | None
    tile_m: int
    tile_n: int
    group: int
    descending: bool = False

    @property
    def geometry(self):
        return self.seqlen_q, self.seqlen_k, self.left, self.right


def visits(case, n_block, head_kv, in_turns=True):
    """(query head, query block) of a tile in the kernel's order."""
    start = n_block * case.tile_n
    first, _, _, last = query_blocks(start, start + case.tile_n, *case.geometry, case.tile_m)
    head, m_block = head_kv * case.group, last - 1 if in_turns and not case.descending else first
    for _ in range((last - first) * case.group):
        yield head, m_block
        order = in_turns, case.descending
        head, m_block = following_query_block(head, m_block, head_kv * case.group, case.group, first, last, *order)


def steps_of(case, n_block, head_kv, entry, in_turns=True):
    """((counter of the block, turn), ...) of a tile."""

    def turn(i):
        if case.descending:
            return last_key_block(i * case.tile_m, case.tile_m, *case.geometry, case.tile_n) - n_block
        return n_block - first_key_block(i * case.tile_m, *case.geometry, case.tile_n)

    return [((entry, head, i), turn(i)) for head, i in visits(case, n_block, head_kv, in_turns)]


def padded_tiles(case, heads_kv, batch, section, used=None, in_turns=True):
    """Tiles by number. Args: used: valid keys of each batch entry."""
    blocks = ceil_div(case.seqlen_k, case.tile_n)
    last = tile_scheduler.heads_in_last_section(heads_kv * batch, section)
    divisors = tile_scheduler.Divisors(blocks * section, section, last, heads_kv)
    tiles = []
    for number in range(blocks * heads_kv * batch):
        coord = tile_scheduler.tile_coord(number, divisors, blocks, batch)
        of_entry = case if used is None else case._replace(seqlen_k=used[coord.batch])
        n_block = coord.m_block if in_turns and case.descending else blocks - 1 - coord.m_block
        tiles.append(steps_of(of_entry, n_block, coord.head, coord.batch, in_turns))
    return tiles


def packed_tiles(case, lengths, heads_kv):
    """Args: lengths: (queries, keys) of each sequence."""
    tiles = []
    for sequence, (queries, keys) in enumerate(lengths):
        of_sequence = case._replace(seqlen_q=queries, seqlen_k=keys)
        blocks = ceil_div(keys, case.tile_n)
        for number in range(blocks * heads_kv):
            m_block, head = tile_scheduler.packed_coord(number, blocks, heads_kv, True)
            n_block = m_block if case.descending else blocks - 1 - m_block
            tiles.append(steps_of(of_sequence, n_block, head, sequence))
    return tiles


def run(tiles, num_ctas, is_dynamic, in_turns=True, jitter=None):
    """Steps until all tiles are done; AssertionError if some wait for ever, or twice for one turn."""
    num_ctas = min(num_ctas, len(tiles))
    counts, waiting, drawn = {}, {}, itertools.count(num_ctas)

    def thread_block(cta):
        """Yields a time to pass or a turn to wait for."""
        number, unfinished = cta, None
        for wave in itertools.count(1):
            if number >= len(tiles):
                return
            for key, turn in tiles[number]:
                yield STEP + (jitter() if jitter else 0)
                if unfinished is not None:
                    give(unfinished)
                if in_turns:
                    yield key, turn
                unfinished = key
            if unfinished is not None:
                yield COMPLETE
                give(unfinished)
                unfinished = None
            yield STORE
            number = next(drawn) if is_dynamic else tile_scheduler.tile_number(cta, wave, num_ctas)

    def give(key):
        counts[key] = counts.get(key, 0) + 1
        if (key, counts[key]) in waiting:
            heapq.heappush(events, (now + SEEN, waiting.pop((key, counts[key]))))

    blocks = [thread_block(cta) for cta in range(num_ctas)]
    events, now = [(0, cta) for cta in range(num_ctas)], 0
    while events:
        now, cta = heapq.heappop(events)
        for event in blocks[cta]:
            if isinstance(event, int):
                heapq.heappush(events, (now + event, cta))
                break
            key, turn = event
            assert counts.get(key, 0) <= turn, event
            assert event not in waiting, event
            if counts.get(key, 0) < turn:
                waiting[event] = cta
                break
    assert not waiting, f"deadlock: {len(waiting)} thread blocks wait"
    assert sum(counts.values()) == sum(map(len, tiles))
    return now / STEP


# ---------------------------------------------------------------- turns

BOUNDS = (None, 0, 1, 3, 9, -1, -4)
WINDOWS = [(left, right) for left in BOUNDS for right in BOUNDS if None in (left, right) or left + right >= 0]
LENGTHS = (1, 3, 4, 7, 12, 13)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(("tile_m", "tile_n"), [(4, 4), (6, 4), (4, 6), (2, 8), (8, 2)])
def test_turns_count_the_tiles_before(tile_m, tile_n, descending):
    """Of the tiles that visit a block, in their order, the turns are 0, 1, 2, ...; padding has no part in it."""
    for seqlen_q, used, window in itertools.product(LENGTHS, (0, 1, 4, 5, 11, 16, 29), WINDOWS):
        for num_blocks in (ceil_div(used, tile_n), ceil_div(used, tile_n) + 2):
            case = Case(seqlen_q, used, *window, tile_m, tile_n, 1, descending)
            turns = {}
            for n_block in range(num_blocks)[:: -1 if descending else 1]:
                for (_, _, m_block), turn in steps_of(case, n_block, 0, 0):
                    assert 0 <= m_block < ceil_div(seqlen_q, tile_m), case
                    turns.setdefault(m_block, []).append(turn)
            for m_block, of_block in turns.items():
                assert of_block == list(range(len(of_block))), (case, m_block)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("in_turns", "descending"), [(False, False), (True, False), (True, True)])
def test_every_head_and_block_is_visited_once(group, in_turns, descending):
    for seqlen_q, seqlen_k, window in itertools.product(LENGTHS, LENGTHS, WINDOWS):
        case = Case(seqlen_q, seqlen_k, *window, 4, 6, group, descending)
        for n_block in range(ceil_div(seqlen_k, 6)):
            first, _, _, last = query_blocks(n_block * 6, n_block * 6 + 6, *case.geometry, 4)
            visited = list(visits(case, n_block, 2, in_turns))
            blocks = range(first, last)[:: -1 if in_turns and not descending else 1]
            heads = range(2 * group, 3 * group)
            expected = [(h, i) for i in blocks for h in heads] if in_turns else list(itertools.product(heads, blocks))
            assert visited == expected, case


# ---------------------------------------------------------------- deadlock


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("num_ctas", [1, 2, 3, 7, 64])
def test_no_deadlock(num_ctas, is_dynamic):
    rng = random.Random(num_ctas)
    windows = *itertools.product((None, 0, 9), (None, 0, 9)), (9, -3), (-3, 9), (None, -3), (-3, None)
    for seqlen_q, seqlen_k, window in itertools.product((3, 12, 25), (5, 16, 41), windows):
        case = Case(seqlen_q, seqlen_k, *window, 4, 6, rng.choice((1, 2)), rng.choice((False, True)))
        heads, batch = rng.choice(((1, 1), (3, 1), (2, 3)))
        used = [rng.randint(0, seqlen_k) for _ in range(batch)]
        for section in {1, 2, heads * batch}:
            if section <= heads * batch:
                run(padded_tiles(case, heads, batch, section), num_ctas, is_dynamic)
                tiles = padded_tiles(case, heads, batch, section, used)
                run(tiles, num_ctas, is_dynamic, jitter=lambda: rng.randint(0, 30))


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("num_ctas", [1, 3, 10, 64])
def test_no_deadlock_in_packed_sequences(num_ctas, is_dynamic):
    rng = random.Random(num_ctas)
    for left, right, group, descending in itertools.product((None, 5), (None, 0), (1, 3), (False, True)):
        lengths = [(rng.randint(0, 30), rng.randint(0, 40)) for _ in range(12)]
        tiles = packed_tiles(Case(0, 0, left, right, 4, 6, group, descending), lengths, 2)
        run(tiles, num_ctas, is_dynamic, jitter=lambda: rng.randint(0, 30))


def test_the_model_sees_a_deadlock():
    """The reverse order makes tiles wait for higher numbers, which nobody may be left to compute."""
    case = Case(24, 24, None, None, 4, 6, 1)
    tiles = [[(key, 3 - turn) for key, turn in tile] for tile in padded_tiles(case, 2, 1, 1)]
    run(tiles, 8, False)
    with pytest.raises(AssertionError, match="deadlock"):
        run(tiles, 3, False)


# ---------------------------------------------------------------- cost


def cost(seqlen, left, right, group, head_dim=128, num_ctas=132):
    """Steps (as the kernel is launched by default) without and with turns; 16384 tokens of hidden size 2048."""
    heads_q = 2048 // head_dim
    heads, batch = heads_q // group, max(1, 16384 // seqlen)
    asked = problem(head_dim, head_dim, seqlen, mask=Mask(left, right), num_heads_kv=heads)
    asked = replace(asked, batch=batch, num_heads_q=heads_q)
    tile_m = heuristics.backward_config(asked).tile_m
    steps = []
    for one in (asked, replace(asked, deterministic=True)):
        config = heuristics.backward_config(one)
        case = Case(seqlen, seqlen, left, right, tile_m, 128, group, config.adds_descending(one))
        section = heads_per_section(one, config, num_ctas)
        tiles = padded_tiles(case, heads, batch, section, in_turns=one.deterministic)
        steps.append(run(tiles, num_ctas, config.dynamic_tiles, one.deterministic))
    return tuple(steps)


@pytest.mark.parametrize(
    ("left", "right", "group", "head_dim", "most"),
    [
        *((None, 0, group, 128, 1.08) for group in (1, 4)),
        (None, 0, 1, 64, 1.2),  # the model's best lose more on a GPU: see tiles_in_step
        *((None, None, *kind, 1.05) for kind in ((1, 128), (4, 128), (1, 64))),
        *((512, 0, *kind, 1.1) for kind in ((1, 128), (4, 128), (1, 64))),
    ],
)
def test_turns_cost_little(left, right, group, head_dim, most):
    free, in_turns = cost(2048, left, right, group, head_dim)
    assert in_turns < most * free, (free, in_turns)


@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("seqlen", [2048, 8192])
def test_groups_of_heads_are_balanced(seqlen, group):
    """About the steps of as many heads without groups."""
    (alone, _), (grouped, _) = cost(seqlen, None, 0, 1), cost(seqlen, None, 0, group)
    assert grouped < 1.05 * alone, (alone, grouped)


if __name__ == "__main__":
    for head_dim, seqlen, (left, right), group in itertools.product(
        (64, 128), (2048, 4096, 8192, 16384), ((None, 0), (None, None), (1024, 0)), (1, 4)
    ):
        free, in_turns = cost(seqlen, left, right, group, head_dim)
        what = f"{head_dim:3} {seqlen:6} window {left}, {right}, group {group}"
        print(f"{what}: {free:.0f} -> {in_turns:.0f} ({in_turns / free:.3f})")

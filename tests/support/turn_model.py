"""A model of the deterministic Hopper backward on Python ints: which tile adds to which block of dQ, and when.

Thread blocks go through tiles of keys, tiles through query blocks, and every addition waits for its turn. Order, turns
and numbering are the functions of the kernel itself.
"""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

from onepass.geometry import tile_scheduler
from onepass.geometry.block_range import (
    first_key_block,
    following_query_block,
    last_key_block,
    query_blocks,
    turn_in_ring,
)
from onepass.geometry.integers import ceil_div

# Times of the model: a step; from an addition until another thread block sees the turn; the remaining work at the end
# of a tile.
STEP, SEEN, STORE = 10, 9, 5


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
    """The pairs (query head, query block) that a tile visits, in the kernel's order."""
    start = n_block * case.tile_n
    first, _, _, last = query_blocks(start, start + case.tile_n, *case.geometry, case.tile_m)
    head, m_block = head_kv * case.group, last - 1 if in_turns and not case.descending else first
    for _ in range((last - first) * case.group):
        yield head, m_block
        order = in_turns, case.descending
        head, m_block = following_query_block(head, m_block, head_kv * case.group, case.group, first, last, *order)


def steps_of(case, n_block, head_kv, entry, in_turns=True):
    """The pairs (counter of a block of dQ, turn) of a tile, in its order."""

    def turn(i):
        if case.descending:
            return last_key_block(i * case.tile_m, case.tile_m, *case.geometry, case.tile_n) - n_block
        return n_block - first_key_block(i * case.tile_m, *case.geometry, case.tile_n)

    return [((entry, head, i), turn(i)) for head, i in visits(case, n_block, head_kv, in_turns)]


def padded_tiles(case, heads_kv, batch, section, used=None, in_turns=True):
    """The steps of all tiles of a dense batch, by number. Args: used: valid keys of each batch entry."""
    blocks = ceil_div(case.seqlen_k, case.tile_n)
    last = tile_scheduler.heads_in_last_section(heads_kv * batch, section)
    divisors = tile_scheduler.Divisors(blocks * section, section, last, heads_kv)
    tiles = []
    for number in range(blocks * heads_kv * batch):
        coord = tile_scheduler.tile_coord(number, divisors, blocks, batch)
        entry_case = case if used is None else case._replace(seqlen_k=used[coord.batch])
        n_block = coord.m_block if in_turns and case.descending else blocks - 1 - coord.m_block
        tiles.append(steps_of(entry_case, n_block, coord.head, coord.batch, in_turns))
    return tiles


def tiles_with_ascending_end(case, heads_kv, batch, ascending, used=None):
    """The steps of all tiles of a dense batch, by number. Args: ascending: heads that ascend, the last ones."""
    blocks = ceil_div(case.seqlen_k, case.tile_n)
    divisors = tile_scheduler.Divisors(blocks, 1, ascending, heads_kv)
    tiles = []
    for number in range(blocks * heads_kv * batch):
        coord, ascends = tile_scheduler.turning_coord(number, divisors, blocks, batch)
        entry_case = case if used is None else case._replace(seqlen_k=used[coord.batch])
        tiles.append(steps_of(entry_case._replace(descending=not ascends), coord.m_block, coord.head, coord.batch))
    return tiles


def tiles_in_rings(case, heads_kv, batch, section, ring, lag):
    """The steps of all tiles of a dense batch without a mask, by number, in rings of `ring` tiles."""
    blocks, queries = ceil_div(case.seqlen_k, case.tile_n), ceil_div(case.seqlen_q, case.tile_m)
    last = tile_scheduler.heads_in_last_section(heads_kv * batch, section)
    divisors = tile_scheduler.Divisors(blocks * section, section, last, heads_kv)
    tiles = []
    for number in range(blocks * heads_kv * batch):
        coord = tile_scheduler.tile_coord(number, divisors, blocks, batch)
        n_block = blocks - 1 - coord.m_block
        place = n_block % ring
        size = min(ring, blocks - n_block + place)
        first_head, steps = coord.head * case.group, []
        head, m_block = first_head, place * lag
        for _ in range(queries * case.group):
            turn = n_block - place + turn_in_ring(place, m_block, size, lag)
            steps.append(((coord.batch, head, m_block), turn))
            head, m_block = following_query_block(head, m_block, first_head, case.group, 0, queries, True, False, True)
        tiles.append(steps)
    return tiles


def run(tiles, num_ctas, is_dynamic, in_turns=True, jitter=None, forwards=False):
    """Steps until all tiles are done. Raises: AssertionError if a tile waits forever, or two wait for one turn."""
    num_ctas = min(num_ctas, len(tiles))
    counts, waiting, drawn = {}, {}, itertools.count(num_ctas)

    def thread_block(cta):
        """Yield the times that pass and the turns to wait for."""
        number = cta
        for wave in itertools.count(1):
            if number >= len(tiles):
                return
            for key, turn in tiles[number]:
                yield STEP + (jitter() if jitter else 0)
                if in_turns:
                    yield key, turn
                heapq.heappush(events, (now + SEEN, next(order), key))
            yield STORE
            number = next(drawn) if is_dynamic else tile_scheduler.tile_number(cta, wave, num_ctas, forwards=forwards)

    blocks, order = [thread_block(cta) for cta in range(num_ctas)], itertools.count()
    events, now, end = [(0, next(order), cta) for cta in range(num_ctas)], 0, 0
    while events:
        now, _, cta = heapq.heappop(events)
        if isinstance(cta, tuple):  # a key, to whose turn others may have waited
            counts[cta] = counts.get(cta, 0) + 1
            cta = waiting.pop((cta, counts[cta]), None)
            if cta is None:
                continue
        for event in blocks[cta]:
            if isinstance(event, int):
                heapq.heappush(events, (now + event, next(order), cta))
                break
            key, turn = event
            assert counts.get(key, 0) <= turn, event
            assert event not in waiting, event
            if counts.get(key, 0) < turn:
                waiting[event] = cta
                break
        else:
            end = now
    assert not waiting, f"deadlock: {len(waiting)} thread blocks wait"
    assert sum(counts.values()) == sum(map(len, tiles))
    return end / STEP

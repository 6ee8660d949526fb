"""A model of the deterministic Hopper backward on Python ints: which tile adds to which block of dQ, and when.

Thread blocks go through tiles of keys, tiles through query blocks, and every addition waits for its turn. Order, turns
and numbering are the functions of the kernel itself.
"""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

from onepass.geometry import tile_scheduler
from onepass.geometry.block_range import first_key_block, following_query_block, last_key_block, query_blocks
from onepass.geometry.integers import ceil_div

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

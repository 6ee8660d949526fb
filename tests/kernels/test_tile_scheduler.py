"""The persistent grid computes every tile once, in the order that it promises."""

import heapq
import itertools

import pytest

from onepass.kernels.blocks import tile_scheduler


@pytest.mark.parametrize("num_ctas", [1, 2, 3, 7, 132])
def test_every_number_is_taken_once(num_ctas):
    for tiles in (1, 2, num_ctas, num_ctas + 1, 5 * num_ctas - 1):
        taken = []
        for cta in range(min(num_ctas, tiles)):
            for wave in itertools.count():
                number = tile_scheduler.tile_number(cta, wave, min(num_ctas, tiles))
                if number >= tiles:
                    break
                taken.append(number)
        assert sorted(taken) == list(range(tiles))


def test_a_thread_block_that_stops_has_no_later_tile():
    """Consumers stop at the first number past the end: no later wave may come back below it."""
    for num_ctas, cta, wave in itertools.product((1, 2, 5), range(5), range(6)):
        if cta < num_ctas:
            number = tile_scheduler.tile_number(cta, wave, num_ctas)
            assert wave * num_ctas <= number < (wave + 1) * num_ctas


def divisors_of(m_blocks, heads, batch, section):
    last = tile_scheduler.heads_in_last_section(heads * batch, section)
    return tile_scheduler.Divisors(m_blocks * section, section, last, heads)


@pytest.mark.parametrize(("m_blocks", "heads", "batch"), [(1, 1, 1), (4, 6, 2), (5, 3, 3), (2, 1, 7)])
def test_every_tile_has_one_number(m_blocks, heads, batch):
    for section in range(1, heads * batch + 1):
        divisors = divisors_of(m_blocks, heads, batch, section)
        tiles = [
            tile_scheduler.tile_coord(number, divisors, m_blocks, batch) for number in range(m_blocks * heads * batch)
        ]
        expected = itertools.product(range(m_blocks), range(heads), range(batch))
        assert sorted(tuple(t) for t in tiles) == sorted(expected)
        for start in range(0, len(tiles), m_blocks * section):
            in_section = [t.m_block for t in tiles[start : start + m_blocks * section]]
            assert in_section == sorted(in_section, reverse=True)


def test_sections_are_whole_double_waves_within_the_l2_budget():
    for heads, m_blocks, kv_bytes in itertools.product((1, 7, 64, 512), (1, 3, 16), (1, 2**20, 2**24, 2**30)):
        n = tile_scheduler.heads_per_section(heads, m_blocks, 132, kv_bytes, True, False)
        assert 1 <= n <= heads
        unit = next(k for k in itertools.count(1) if k * m_blocks % 264 == 0)
        assert n == heads or n % unit == 0
        assert n in (unit, heads) or n * kv_bytes <= tile_scheduler.L2_BUDGET_BYTES
        assert tile_scheduler.heads_per_section(heads, m_blocks, 132, kv_bytes, False, False) == 1


def test_sections_of_a_queue_fill_the_l2_budget():
    for heads, kv_bytes in itertools.product((1, 7, 64, 512), (1, 2**20, 2**24, 2**30)):
        n = tile_scheduler.heads_per_section(heads, 16, 132, kv_bytes, True, True)
        assert n == min(heads, max(1, tile_scheduler.L2_BUDGET_BYTES // kv_bytes))


NUM_CTAS = 132  # multiprocessors of an H200
CAUSAL_CASES = list(
    itertools.product([512, 1024, 2048, 4096, 8192, 16384], [(64, 192, 128), (128, 128, 128), (256, 128, 80)])
)


def causal_tiles(seqlen, head_dim, tile_m, tile_n, is_dynamic):
    """Work of each tile, by number, in key blocks. 16k tokens of hidden size 2048."""
    heads, batch, m_blocks = 2048 // head_dim, 16384 // seqlen, -(-seqlen // tile_m)
    section = tile_scheduler.heads_per_section(
        heads * batch, m_blocks, NUM_CTAS, 4 * seqlen * head_dim, True, is_dynamic
    )
    divisors = divisors_of(m_blocks, heads, batch, section)
    blocks = [
        tile_scheduler.tile_coord(number, divisors, m_blocks, batch).m_block
        for number in range(m_blocks * heads * batch)
    ]
    # a tile costs about 0.6 blocks beside its blocks
    return [-(-min(seqlen, (m_block + 1) * tile_m) // tile_n) + 0.6 for m_block in blocks]


@pytest.mark.parametrize(("seqlen", "tile"), CAUSAL_CASES)
def test_causal_work_is_balanced(seqlen, tile):
    """The busiest thread block against the mean, in the static order."""
    work = causal_tiles(seqlen, *tile, False)
    totals = []
    for cta in range(NUM_CTAS):
        numbers = (tile_scheduler.tile_number(cta, wave, NUM_CTAS) for wave in itertools.count())
        totals.append(sum(work[n] for n in itertools.takewhile(lambda n: n < len(work), numbers)))
    assert max(totals) <= 1.08 * sum(work) / NUM_CTAS


@pytest.mark.parametrize(("seqlen", "tile"), CAUSAL_CASES)
def test_causal_work_from_the_queue_is_balanced(seqlen, tile):
    """Thread blocks draw their next tile when they have 4 key blocks left to compute."""
    work = causal_tiles(seqlen, *tile, True)
    # (when it draws, thread block, when it ends its tile)
    draws = [(max(0.0, work[cta] - 4), cta, work[cta]) for cta in range(NUM_CTAS)]
    heapq.heapify(draws)
    drawn, last = NUM_CTAS, 0.0
    while draws:
        _, cta, end = heapq.heappop(draws)
        last = max(last, end)
        if drawn < len(work):
            start, end = end, end + work[drawn]
            drawn += 1
            heapq.heappush(draws, (max(start, end - 4), cta, end))
    assert last <= 1.035 * sum(work) / NUM_CTAS

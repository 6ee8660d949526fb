"""The persistent grid computes every tile once, in the order that it promises."""

import heapq
import itertools
import random

import pytest
import torch

from onepass.geometry import tile_scheduler


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


@pytest.mark.parametrize("num_ctas", [1, 2, 7, 132])
def test_rows_of_tiles_are_taken_by_one_thread_block_in_ascending_order(num_ctas):
    in_a_row, num_rows = 4, 300
    taken = []
    for cta in range(num_ctas):
        numbers = [
            tile_scheduler.tile_number(cta, wave, num_ctas, in_a_row)
            for wave in range(in_a_row * (num_rows // num_ctas + 2))
        ]
        for start in range(0, len(numbers), in_a_row):
            assert numbers[start] % in_a_row == 0
            assert numbers[start : start + in_a_row] == list(range(numbers[start], numbers[start] + in_a_row))
        taken += [number for number in numbers if number < num_rows * in_a_row]
    assert sorted(taken) == list(range(num_rows * in_a_row))


def test_a_thread_block_that_stops_has_no_later_tile():
    """Consumers stop at the first number past the end, so no later wave may have a number below it."""
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


class Warp:
    """blocks/memory/warp.py on tensors with one element per lane."""

    @staticmethod
    def inclusive_sum(x):
        assert x.shape == (tile_scheduler.LANES,)
        return x.cumsum(0)

    @staticmethod
    def count(condition):
        return int(condition.sum())


def packed_tiles(lengths, slack, tile_m, heads, longest_first, numbers):
    """The tiles (sequence, head, m_block) of the numbers, found one after the other, as in a thread block's warps."""
    cu_seqlens = [0, *itertools.accumulate(lengths)]
    batch, total = len(lengths), cu_seqlens[-1] + slack

    def rows(sequence):
        return tile_scheduler.packed_rows(sequence, cu_seqlens, batch, total)

    def tiles(first):
        return torch.tensor([-(-rows(first + lane)[1] // tile_m) * heads for lane in range(tile_scheduler.LANES)])

    first = tiles_before = 0
    for number in numbers:
        lane, ends = tile_scheduler.scan_sequences(number, tiles_before, tiles(first), Warp)
        while lane == tile_scheduler.LANES:
            first, tiles_before = first + tile_scheduler.LANES, int(ends[-1])
            lane, ends = tile_scheduler.scan_sequences(number, tiles_before, tiles(first), Warp)
        in_sequence = number - int((ends - tiles(first))[lane])
        num_m_blocks = -(-rows(first + lane)[1] // tile_m)
        m_block, head = tile_scheduler.packed_coord(in_sequence, num_m_blocks, heads, longest_first)
        yield first + lane, head, m_block


@pytest.mark.sampled(quick=2, slow=4)
@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize("slack", [0, 1, 9])
def test_every_packed_tile_has_one_number(longest_first, slack):
    rng = random.Random(0)
    batches = [list(lengths) for n in range(4) for lengths in itertools.product((0, 1, 4, 5, 9), repeat=n)]
    batches += [[rng.choice((0, 0, 1, 7, 20)) for _ in range(n)] for n in (31, 32, 33, 64, 100)]
    batches += [[0] * 70 + [3], [3] + [0] * 70]
    for lengths, heads in itertools.product(batches, (1, 3)):
        expected = [
            (sequence, head, m_block)
            for sequence, length in enumerate([*lengths, slack])
            for head, m_block in itertools.product(range(heads), range(-(-length // 4)))
        ]
        assert len(expected) <= tile_scheduler.max_packed_tiles(sum(lengths) + slack, 4, heads, len(lengths))
        found = list(packed_tiles(lengths, slack, 4, heads, longest_first, range(len(expected))))
        assert sorted(found) == expected
        # sequence after sequence, and the longest tiles of a sequence (or of its head) first
        order = [(s, -m) if longest_first else (s, h, -m) for s, h, m in found]
        assert order == sorted(order)
        # whichever numbers a thread block gets
        some = sorted(rng.sample(range(len(expected)), len(expected) // 3))
        assert list(packed_tiles(lengths, slack, 4, heads, longest_first, some)) == [found[n] for n in some]


@pytest.mark.parametrize(("num_singles", "num_others"), list(itertools.product((0, 1, 2, 7), repeat=2)))
def test_kinds_of_tiles_alternate(num_singles, num_others):
    """Each tile comes once, tiles of a kind in ascending order, and the kinds alternate while there are two."""
    order = [tile_scheduler.mixed_number(n, num_singles, num_others) for n in range(num_singles + num_others)]
    for kind, count in ((True, num_singles), (False, num_others)):
        assert [i for is_single, i in order if is_single == kind] == list(range(count))
    paired = order[: 2 * min(num_singles, num_others)]
    assert [is_single for is_single, _ in paired] == [n % 2 == 0 for n in range(len(paired))]


def test_packed_rows_stay_inside_the_tensor():
    for cu_seqlens in itertools.product((-3, 0, 2, 5, 99), repeat=3):
        for sequence in range(6):
            start, length = tile_scheduler.packed_rows(sequence, cu_seqlens, 2, 7)
            assert 0 <= start <= start + length <= 7


@pytest.mark.parametrize("num_ctas", [1, 2, 5])
def test_the_queue_gives_every_tile_and_ends_where_it_began(num_ctas):
    """Thread blocks without a first tile stop before they draw, however many they are."""
    rng = random.Random(num_ctas)
    for tiles in range(20):
        counter, taken = 0, list(range(min(num_ctas, tiles)))
        active = list(taken)
        while active:
            cta = rng.choice(active)
            number = num_ctas + counter
            counter = 0 if counter >= tiles - 1 else counter + 1  # atom.inc
            if number < tiles:
                taken.append(number)
            else:
                active.remove(cta)
        assert sorted(taken) == list(range(tiles))
        assert counter == 0


NUM_CTAS = 132  # multiprocessors of an H200
CAUSAL_CASES = list(
    itertools.product([512, 1024, 2048, 4096, 8192, 16384], [(64, 192, 128), (128, 128, 128), (256, 128, 80)])
)


def causal_tiles(seqlen, head_dim, tile_m, tile_n, is_dynamic):
    """The work of each tile, by number, in key blocks, for 16k tokens of hidden size 2048."""
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
    """The busiest thread block is close to the mean in the static order."""
    work = causal_tiles(seqlen, *tile, False)
    totals = []
    for cta in range(NUM_CTAS):
        numbers = (tile_scheduler.tile_number(cta, wave, NUM_CTAS) for wave in itertools.count())
        totals.append(sum(work[n] for n in itertools.takewhile(lambda n: n < len(work), numbers)))
    assert max(totals) <= 1.08 * sum(work) / NUM_CTAS


@pytest.mark.parametrize(("seqlen", "tile"), CAUSAL_CASES)
def test_causal_work_from_the_queue_is_balanced(seqlen, tile):
    """Work is balanced if thread blocks draw their next tile when they have 4 key blocks left to compute."""
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

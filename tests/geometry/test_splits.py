"""Splits of the keys, and rows in pages: the integer formulas of the decoding kernels, exhaustively."""

import itertools
from dataclasses import replace

import pytest
import torch

from onepass.geometry import splits
from onepass.geometry.block_range import blocks_of_rows, key_blocks, key_range
from onepass.geometry.pages import page_of_key
from onepass.geometry.splits import (
    blocks_of_split,
    blocks_within,
    choose_num_splits,
    split_ranges,
    visited_blocks,
    workspace_bytes,
)
from onepass.kernels.config import head_dim_tile
from onepass.kernels.config.decode import DecodeConfigSm80
from onepass.kernels.heuristics import decode as heuristics_decode
from onepass.kernels.launch.forward_sm80 import ARCHS
from onepass.problem import AttentionProblem, Mask
from onepass.problem.decode import DecodeProblem

E4M3 = torch.float8_e4m3fn

TILE_N = 4
WINDOWS = (
    (None, None),
    (None, 0),
    (5, 0),
    (9, 3),
    (0, 0),
    (None, -3),
    (-3, None),
    (9, -3),
    (-2, 9),
    (-2, 2),
    (None, -99),
)


def tiles():
    for seqlen_k, window, seqlen_q in itertools.product(range(0, 42, 3), WINDOWS, (1, 5, 20)):
        for m_start in range(0, seqlen_q, 8):
            yield key_blocks(m_start, min(m_start + 8, seqlen_q), seqlen_q, seqlen_k, *window, TILE_N)


@pytest.mark.parametrize("split_blocks", [0, 1, 3])
@pytest.mark.parametrize("num_splits", [1, 2, 5, 16])
def test_splits_share_out_the_blocks_of_a_tile(num_splits, split_blocks):
    """Splits visit each block of a tile once, with the mask that it needs; empty splits have first == last."""
    if split_blocks:
        num_splits = -(-12 // split_blocks)  # the number of splits of the longest sequence
    for tile in tiles():
        pieces = [blocks_of_split(tile, s, num_splits, split_blocks) for s in range(num_splits)]
        visited = [n for piece in pieces for n in range(piece.first, piece.last)]
        assert visited == list(range(tile.first, tile.last))
        clear = [n for piece in pieces for n in range(piece.clear_first, piece.clear_last)]
        assert clear == list(range(tile.clear_first, tile.clear_last))
        for s, piece in enumerate(pieces):
            assert piece.first <= piece.clear_first <= piece.clear_last <= piece.last
            assert (
                tile.clear_first > tile.first or piece.clear_first == piece.first
            )  # without a left edge there are no masked blocks before the clear ones
            if split_blocks and piece.first < piece.last:
                assert s * split_blocks <= piece.first < piece.last <= (s + 1) * split_blocks


@pytest.mark.sampled(quick=4, slow=8)
@pytest.mark.parametrize("split_blocks", [0, 1, 3])
@pytest.mark.parametrize("num_splits", [1, 2, 5, 16])
def test_warpgroups_of_a_split_see_every_key_once(num_splits, split_blocks):
    """Model how the Hopper consumer goes through the blocks of its own rows.

    A warpgroup visits at least one block in each split, masks the blocks that its rows need masked, and never goes past
    the blocks of its tile.
    """
    if split_blocks:
        num_splits = -(-12 // split_blocks)
    for seqlen_k, window, seqlen_q in itertools.product(range(0, 42, 3), WINDOWS, (1, 5, 20)):
        geometry = seqlen_q, seqlen_k, *window
        for start in range(0, seqlen_q, 8):
            tile = key_blocks(start, min(start + 8, seqlen_q), *geometry, TILE_N)
            for m_start in (start, min(start + 4, seqlen_q - 1)):
                m_end = min(m_start + 4, seqlen_q)
                own = key_blocks(m_start, m_end, *geometry, TILE_N)
                visits = []
                for split in range(num_splits):
                    of_tile = visited_blocks(
                        blocks_of_split(tile, split, num_splits, split_blocks), -(-seqlen_k // TILE_N)
                    )
                    assert of_tile.first < of_tile.last
                    within = blocks_within(own, of_tile)
                    blocks, skipped = blocks_of_rows(of_tile, within, 2)
                    assert blocks.first < blocks.last == of_tile.last - skipped
                    visits += seen_in(blocks, m_start, m_end, geometry)
                expected = [
                    (row, key) for row in range(m_start, m_end) for key in range(*key_range(row, row + 1, *geometry))
                ]
                assert sorted(visits) == expected


def seen_in(blocks, m_start, m_end, geometry):
    """(row, key) of all scores that are not masked, in the loops of `Consumer.run_blocks`."""
    n_block, visits = blocks.last - 1, []

    def visit(n, is_masked):
        for row in range(m_start, m_end):
            low, high = key_range(row, row + 1, *geometry)
            keys = range(n * TILE_N, (n + 1) * TILE_N)
            visits.extend((row, key) for key in keys if not is_masked or low <= key < high)

    visit(n_block, n_block >= blocks.clear_last or n_block < blocks.clear_first)
    clear_last, clear_first = min(blocks.clear_last, n_block), min(blocks.clear_first, n_block)
    visits_of = ((n_block - clear_last, True), (clear_last - clear_first, False), (clear_first - blocks.first, True))
    for count, is_masked in visits_of:
        assert count >= 0
        for _ in range(count):
            n_block -= 1
            visit(n_block, is_masked)
    assert n_block == blocks.first
    return visits


def test_balanced_splits_differ_by_one_share():
    for tile, num_splits in itertools.product(tiles(), (1, 3, 7)):
        counts = [p.last - p.first for p in (blocks_of_split(tile, s, num_splits, 0) for s in range(num_splits))]
        assert max(counts) == -(-(tile.last - tile.first) // num_splits)


def test_ranges_of_keys():
    for seqlen_k, num_splits in itertools.product(range(30), (1, 2, 7, 32)):
        for ranges in (split_ranges(seqlen_k, num_splits, None), split_ranges(seqlen_k, 1, 4)):
            assert [n for a, b in ranges for n in range(a, b)] == list(range(seqlen_k))
            assert all(a < b for a, b in ranges)
        assert len(split_ranges(seqlen_k, num_splits, None)) <= num_splits
        assert all(a % 4 == 0 for a, _ in split_ranges(seqlen_k, 1, 4))


def test_places_in_pages():
    for page_size in (1, 3, 8):
        table = [4, 0, 2, 2, -5, 99]
        for key in range(len(table) * page_size):
            page, row = page_of_key(key, table, page_size, 5)
            assert (page, row) == ([4, 0, 2, 2, 0, 4][key // page_size], key % page_size)


@pytest.mark.parametrize(
    ("num_tiles", "seqlen_k", "expected"),
    [
        (1, 2**20, splits.MAX_SPLITS),
        (8, 2**19, 33),  # one full wave
        (264, 2**17, 1),
        (512, 2**17, 1),  # almost two waves
        (8, 1024, 8),  # LEAST_KEYS each
        (8, 100, 1),
        (0, 0, 1),
    ],
)
def test_number_of_splits(num_tiles, seqlen_k, expected):
    assert choose_num_splits(num_tiles, seqlen_k, 264, 1) == expected


def test_waves_are_filled():
    """The rest after full waves is tiny or a large share of one; short caches fill one wave."""
    for num_tiles in range(1, 2000, 7):
        waves = num_tiles * choose_num_splits(num_tiles, 2**19, 264, 1) / 264
        assert waves > 0.95
        assert waves % 1 > splits.LEAST_SHARE - 0.05 or waves % 1 < 0.1 * waves
        assert num_tiles * choose_num_splits(num_tiles, 2**13, 264, 1) >= min(264 / 2, num_tiles * 64)


def test_number_of_splits_keeps_to_the_workspace():
    per_split = workspace_bytes(1, 1000, 128)
    assert per_split == 1000 * 129 * 4
    chosen = choose_num_splits(1, 2**20, 1000, 40 * per_split)
    assert chosen * 40 * per_split <= splits.WORKSPACE_BYTES < (chosen + 1) * 40 * per_split


def problem(**changes):
    fields = {
        "dtype": torch.bfloat16,
        "device_type": "cuda",
        "batch": 1,
        "seqlen_q": 1,
        "seqlen_k": 4096,
        "num_heads_q": 32,
        "num_heads_kv": 8,
        "head_dim": 128,
        "head_dim_v": 128,
        "softmax_scale": 1.0,
        "mask": Mask(None, 0),
        "has_seqused_k": True,
    }
    return AttentionProblem(**(fields | changes))


@pytest.mark.parametrize("arch", ARCHS)
def test_configurations(arch):
    """Every head dim has a configuration, independent of batch and keys, whose tiles divide splits."""
    for dtype, (d, dv), heads, seqlen_q in itertools.product(
        (torch.bfloat16, torch.float32),
        itertools.product((5, 64, 96, 128, 192, 256), repeat=2),
        (8, 32, 96, 1024),
        (1, 4, 16),
    ):
        asked = problem(dtype=dtype, head_dim=d, head_dim_v=dv, num_heads_q=heads, seqlen_q=seqlen_q)
        config, group = heuristics_decode.decode_config_sm80(asked, arch), heads // 8
        assert splits.SPLIT_UNIT % config.block_keys == 0
        assert config.pack_gqa == (1 < group <= config.tile_m)
        if seqlen_q * group <= 16:
            assert isinstance(config, DecodeConfigSm80)
            assert config.tile_m == 16
        for changes in ({"batch": 100}, {"seqlen_k": 10**6}):
            assert heuristics_decode.decode_config_sm80(replace(asked, **changes), arch) == config


@pytest.mark.parametrize(
    ("seqlen_q", "tile_m", "is_few"), [(1, 16, True), (4, 16, True), (5, 32, True), (16, 64, False)]
)
def test_rows_decide_where_the_warps_lie(seqlen_q, tile_m, is_few):
    config = heuristics_decode.decode_config_sm80(problem(seqlen_q=seqlen_q), "sm_90a")
    assert (config.tile_m, isinstance(config, DecodeConfigSm80)) == (tile_m, is_few)
    assert config.positions(problem()) >= min(seqlen_q, 16)


@pytest.mark.slow
def test_configurations_of_hopper():
    """Every head dim has a configuration that fits, and all its warpgroups have rows; only few rows are Ampere's."""
    for (d, dv), heads, seqlen_q, split_size, softcap in itertools.product(
        itertools.product((8, 64, 96, 128, 192, 256), repeat=2),
        (8, 32, 56, 96, 1024),
        (1, 4, 16, 100, 5000),
        (None, 64, 192, 256),
        (None, 5.0),
    ):
        asked = problem(head_dim=d, head_dim_v=dv, num_heads_q=heads, seqlen_q=seqlen_q, softcap=softcap)
        config, group = heuristics_decode.decode_config_sm90(asked, split_size), heads // 8
        config.check(asked)
        assert split_size is None or split_size % config.tile_n == 0
        assert config.pack_gqa == (
            1 < group <= 64 and seqlen_q < (192 if max(d, dv) <= 64 and softcap is None else 128)
        )
        rows = seqlen_q if not config.pack_gqa else -(-seqlen_q // (64 // group)) * 64
        assert 64 * (config.num_warpgroups - 1) < rows
        for changes in ({"batch": 100}, {"seqlen_k": 10**6}):
            assert heuristics_decode.decode_config_sm90(replace(asked, **changes), split_size) == config
        ampere_config = heuristics_decode.decode_config_sm80(asked, "sm_90a")
        assert heuristics_decode.has_few_rows(asked) == isinstance(ampere_config, DecodeConfigSm80)


@pytest.mark.parametrize(("seqlen_q", "expected"), [(16, 1), (40, 3), (48, 3), (96, 3), (128, 2), (144, 3), (1024, 3)])
def test_warpgroups_of_hopper_fill_their_tiles(seqlen_q, expected):
    """head_dim 64, 4 heads per kv head: 128 queries are 512 rows, 4 tiles of 128 or 3 of 192 with 64 rows empty."""
    asked = problem(head_dim=64, head_dim_v=64, num_heads_q=32, num_heads_kv=8, seqlen_q=seqlen_q)
    assert heuristics_decode.decode_config_sm90(asked).num_warpgroups == expected


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen_q", "seqlen_k", "expected"),
    [
        (8, (16, 1), 16, 65536, 8),  # one full wave, not two: 110 us instead of 149 us
        (1, (32, 8), 128, 65536, 4),  # 207 us instead of 216 us
        (8, (32, 8), 16, 8192, 2),
        (64, (32, 8), 16, 8192, 1),
        (1, (32, 8), 1024, 65536, 1),
        (1, (32, 8), 16, 100, 1),
    ],
)
def test_splits_of_hopper(batch, heads, seqlen_q, seqlen_k, expected):
    sizes = {"num_heads_q": heads[0], "num_heads_kv": heads[1], "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    asked = problem(batch=batch, **sizes)
    config = heuristics_decode.decode_config_sm90(asked)
    assert heuristics_decode.num_splits_sm90(asked, config, 132) == expected


def test_packed_queries_count_as_many_unless_max_seqlen_q_says_few():
    """The configuration depends on neither the batch nor the total of queries, so the bits of a sequence do not."""
    for (d, dv), heads in itertools.product(itertools.product((64, 128, 256), repeat=2), (8, 32, 96, 1024)):
        asked = problem(head_dim=d, head_dim_v=dv, num_heads_q=heads, is_packed=True, batch=7, seqlen_q=100)
        assert not heuristics_decode.has_few_rows(asked)
        config = heuristics_decode.decode_config_sm90(asked)
        ampere_config = heuristics_decode.decode_config_sm80(asked, "sm_90a")
        config.check(asked)
        assert (config.num_warpgroups, config.dynamic_tiles, config.pack_gqa) == (2, True, 1 < heads // 8 <= 64)
        assert not isinstance(ampere_config, DecodeConfigSm80)
        for changes in ({"batch": 100}, {"seqlen_k": 10**6}, {"seqlen_q": 1}, {"seqlen_q": 10**5}):
            assert heuristics_decode.decode_config_sm90(replace(asked, **changes)) == config
            assert heuristics_decode.decode_config_sm80(replace(asked, **changes), "sm_90a") == ampere_config
    few = DecodeProblem(problem(is_packed=True, batch=7, seqlen_q=20), max_seqlen_q=4)
    assert heuristics_decode.has_few_rows(few.attention, few.max_seqlen_q)
    assert isinstance(heuristics_decode.decode_config_sm80(few.sizing_problem, "sm_90a"), DecodeConfigSm80)


def test_an_e4m3_cache_takes_the_kernel_for_few_rows_up_to_32():
    for is_packed, kv_dtype, expected in ((True, None, 16), (False, None, 32), (True, E4M3, 32), (False, E4M3, 32)):
        asked = problem(num_heads_q=8, is_packed=is_packed, kv_dtype=kv_dtype)
        given = [
            (asked, rows) if is_packed else (replace(asked, seqlen_q=rows), None) for rows in (expected, expected + 1)
        ]
        assert [heuristics_decode.has_few_rows(*call) for call in given] == [True, False]


def test_configurations_over_an_e4m3_cache():
    """They fit, with at least two buffers for what is loaded, and warps that convert 32 keys of a step each."""
    for (d, dv), heads, options in itertools.product(
        itertools.product((16, 64, 96, 128), repeat=2),
        (8, 32, 1024),
        ({"seqlen_q": 8}, {"seqlen_q": 5000}, {"seqlen_q": 100, "is_packed": True}),
    ):
        asked = problem(head_dim=d, head_dim_v=dv, num_heads_q=heads, kv_dtype=E4M3, **options)
        for split_size in (None, 192):
            config = heuristics_decode.decode_config_sm90(asked, split_size)
            config.check(asked)
            assert config.raw_stages(asked) >= 2
            assert config.num_warpgroups <= 2
            raw = config.raw_stages(asked) * config.tile_n * (head_dim_tile(d) + head_dim_tile(dv))
            assert config.smem_bytes(asked) == config.smem_bytes(replace(asked, kv_dtype=None)) + raw


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({}, {"tile_n": 96}, r"e4m3 cache: expected tile_n of \(64, 128\) and 1 or 2 warpgroups, got .*tile_n=96"),
        ({}, {"num_warpgroups": 3}, "e4m3 cache: expected tile_n of .* and 1 or 2 warpgroups"),
        ({}, {"cluster_size": 2}, "e4m3 cache: expected warp_specialized, cluster_size=1 and score_buffers=1"),
        ({}, {"num_stages": 4}, "shared memory: .* needs"),
        (
            {"dtype": torch.float32},
            {},
            "cache: expected e4m3 under 16-bit q, got torch.float8_e4m3fn and torch.float32",
        ),
    ],
)
def test_what_a_configuration_over_an_e4m3_cache_cannot_be(changes, config, message):
    asked = problem(head_dim=128, head_dim_v=128, kv_dtype=E4M3, **changes)
    config = replace(
        heuristics_decode.decode_config_sm90(problem(head_dim=128, head_dim_v=128, kv_dtype=E4M3)), **config
    )
    with pytest.raises(NotImplementedError, match=message):
        config.check(asked)


@pytest.mark.parametrize(
    ("batch", "total_q", "seqlen_k", "expected"),
    [
        (64, 64, 16384, 8),  # one warp merges so many splits
        (1, 1, 131072, 66),  # 8 tiles; 528 would be 4 for each multiprocessor
        (4, 1027, 131072, 15),  # 17 would need too much workspace
        (64, 2111, 8192, 1),  # merging 2048 rows of 32 heads would cost too much for caches this short
        (1, 1, 100, 1),
    ],
)
def test_most_splits_of_packed_queries(batch, total_q, seqlen_k, expected):
    asked = problem(is_packed=True, batch=batch, seqlen_q=total_q, seqlen_k=seqlen_k)
    config = heuristics_decode.decode_config_sm90(asked)
    most = heuristics_decode.most_splits_sm90(asked, config, 132)
    assert most == expected
    rows = total_q * asked.num_heads_q
    assert most == 1 or splits.workspace_bytes(most, rows, asked.head_dim_v) <= splits.WORKSPACE_BYTES


def test_splits_by_length():
    """For sequences of any lengths a multiprocessor has about 4 splits, and no split is too short to be worthwhile."""
    for lengths, num_heads in itertools.product(((128,) * 64, (64,) * 63 + (1000,), (1,) * 8, (4000,)), (1, 8, 64)):
        part = splits.blocks_per_split(sum(lengths), num_heads, 132)
        assert part >= splits.LEAST_SPLIT_BLOCKS
        tiles = sum(-(-n // part) for n in lengths) * num_heads
        assert part == splits.LEAST_SPLIT_BLOCKS or tiles <= 132 * splits.SPLITS_PER_CTA + len(lengths) * num_heads
    splits_ = splits.Splits(8, splits.BY_LENGTH)
    assert splits_.for_sequence(3, True) == (3, 0)
    assert splits.Splits(8, 5).for_sequence(8, True) == (8, 5)
    assert splits.Splits(1, 5).for_sequence(1, False) == (1, 0)


def test_splits_fill_the_gpu():
    asked = problem(seqlen_k=2**17)
    config = heuristics_decode.decode_config_sm80(asked, "sm_90a")
    # 100 KB of shared memory, so 2 thread blocks per multiprocessor, for 8 kv heads
    num_splits = heuristics_decode.num_splits_sm80(asked, config, "sm_90a", 132)
    assert 0.95 * 2 * 132 <= 8 * num_splits <= 2 * 132
    assert heuristics_decode.num_splits_sm80(problem(seqlen_k=2**17, batch=64), config, "sm_90a", 132) == 1

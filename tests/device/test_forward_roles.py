"""The Hopper forward's own steps, run as Python: producer, consumers and the warps between them (forward_roles.py)."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from shipped import problem

from onepass.kernels.config import ForwardConfigSm90
from onepass.problem import Mask, Quantization

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"
)

FULL, CAUSAL, LEFT, WINDOW = Mask(), Mask(None, 0), Mask(100, None), Mask(100, 40)
CONFIG = ForwardConfigSm90(tile_n=64, rescale_threshold=8.0)
FP8 = {"dtype": torch.float8_e4m3fn, "quantization": Quantization(torch.bfloat16)}
E4M3 = {"kv_dtype": torch.float8_e4m3fn}


def run(config=CONFIG, seeds=1, head_dim=64, seqlens=(200, 330), mask=CAUSAL, options=None, **asked):
    from forward_roles import Forward

    asked = replace(problem(head_dim, head_dim, mask=mask, num_heads_kv=2, **asked), num_heads_q=2)
    asked = replace(asked, seqlen_q=seqlens[0], seqlen_k=seqlens[1])
    for seed in range(seeds):
        Forward(asked, config, seed, **(options or {})).run()


@pytest.mark.parametrize("mask", [FULL, CAUSAL, LEFT, WINDOW], ids=["full", "causal", "left", "window"])
@pytest.mark.parametrize("overlap_tiles", [True, False])
@pytest.mark.parametrize("pingpong", [True, False])
def test_with_a_producer(pingpong, overlap_tiles, mask):
    for num_warpgroups, num_stages, v_stages, q_stages in ((1, 2, 0, 1), (2, 3, 2, 2), (3, 2, 3, 1), (4, 2, 2, 2)):
        stages = {"num_stages": num_stages, "v_stages": v_stages, "q_stages": q_stages}
        config = replace(
            CONFIG, num_warpgroups=num_warpgroups, pingpong=pingpong, overlap_tiles=overlap_tiles, **stages
        )
        run(config, mask=mask)


def test_blocks_that_are_skipped_have_buffers_of_k_and_of_v():
    """The first warpgroup's rows do not see the last three blocks of a causal tile."""
    config = replace(CONFIG, num_warpgroups=4, num_stages=4, v_stages=2)
    run(config, mask=CAUSAL, seqlens=(512, 512), seeds=3)


@pytest.mark.parametrize("seqlens", [(1, 1), (64, 64), (65, 20), (300, 129), (130, 512)])
def test_lengths(seqlens):
    run(replace(CONFIG, num_stages=3), seqlens=seqlens)
    run(replace(CONFIG, num_stages=3), seqlens=seqlens, mask=FULL, has_seqused_k=True)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW], ids=["full", "causal", "window"])
def test_tiles_that_are_drawn(mask):
    for num_ctas in (1, 2, 3):
        run(replace(CONFIG, dynamic_tiles=True, q_stages=2), mask=mask, options={"num_ctas": num_ctas})
        run(replace(CONFIG, q_stages=2), mask=mask, options={"num_ctas": num_ctas})


@pytest.mark.parametrize("threshold", [0.0, 8.0])
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=["full", "causal"])
def test_halves_of_blocks(mask, threshold):
    for num_warpgroups in (1, 2, 3):
        config = replace(CONFIG, score_buffers=2, num_warpgroups=num_warpgroups, rescale_threshold=threshold)
        run(config, mask=mask, has_seqused_k=num_warpgroups == 2)


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_without_overlap(threshold):
    in_sequence = replace(CONFIG, overlap_gemm_softmax=False, overlap_tiles=False, rescale_threshold=threshold)
    run(in_sequence)
    run(replace(in_sequence, num_stages=1, num_warpgroups=3))
    run(replace(in_sequence, two_level_sums=True, overlap_tiles=True, tile_n=64), **FP8)
    columns = replace(in_sequence, two_level_sums=True, overlap_tiles=True, pv_columns=128, tile_n=128)
    run(columns, head_dim=256, **FP8)


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("overlaps", [True, False])
def test_without_a_producer(overlaps, mask):
    alone = replace(CONFIG, warp_specialized=False, overlap_tiles=False, overlap_gemm_softmax=overlaps)
    for num_warpgroups in (1, 2, 3):
        run(replace(alone, num_warpgroups=num_warpgroups), mask=mask)


def test_float32():
    run(replace(CONFIG, two_level_sums=True), dtype=torch.float32)
    run(replace(CONFIG, rescale_threshold=0.0, q_stages=2), dtype=torch.float32, mask=FULL, has_seqused_k=True)


def test_p_of_codes():
    codes = {"dtype": torch.float8_e4m3fn, "quantization": Quantization(torch.bfloat16, exact_lse=False)}
    run(replace(CONFIG, two_level_sums=True, rescale_threshold=2.0, p_codes=True), **codes)


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("dynamic_tiles", [True, False])
def test_with_warps_that_transpose(dynamic_tiles, mask):
    for num_warpgroups, num_stages, v_stages in ((1, 2, 0), (2, 3, 2), (2, 2, 3)):
        config = replace(CONFIG, num_warpgroups=num_warpgroups, num_stages=num_stages, v_stages=v_stages)
        run(replace(config, dynamic_tiles=dynamic_tiles, transposes_v=True, rescale_threshold=2.0), mask=mask, **FP8)


def sequences(num_heads, tile_m, lengths):
    """What `PackedSchedule.find` returns for each tile of packed sequences over a cache.

    Args: lengths: of queries and of keys of each sequence.
    """
    found, start = [], 0
    for sequence, (seqlen_q, seqlen_k) in enumerate(lengths):
        for m_block in range(-(-seqlen_q // tile_m)):
            found += [(m_block, head, start, seqlen_q, sequence, seqlen_k, sequence, 1) for head in range(num_heads)]
        start += seqlen_q
    return found


LENGTHS = [(1, 200), (150, 330), (3, 64), (70, 70), (1, 1)]
TILES = sequences(2, 128, LENGTHS)
STARTS = [sum(seqlen_k for _, seqlen_k in LENGTHS[: tile[6]]) for tile in TILES]  # of keys


@pytest.mark.parametrize("has_descales", [False, True])
@pytest.mark.parametrize("dynamic_tiles", [True, False])
def test_with_warps_that_convert(dynamic_tiles, has_descales):
    options = {"reads_cache": True, "has_descales": has_descales}
    for num_warpgroups, q_stages in ((1, 1), (2, 2)):
        config = replace(CONFIG, num_warpgroups=num_warpgroups, q_stages=q_stages, dynamic_tiles=dynamic_tiles)
        run(config, has_seqused_k=True, options=options, **E4M3)


@pytest.mark.parametrize("mask", [CAUSAL, WINDOW], ids=["causal", "window"])
@pytest.mark.parametrize("has_pages", [False, True])
def test_packed_sequences_over_a_cache(has_pages, mask):
    """Most warpgroups have no row in many tiles."""
    options = {"reads_cache": True, "sequences": TILES, "box_rows": 16 if has_pages else None}
    for dynamic_tiles in (False, True):
        config = replace(CONFIG, num_stages=3, dynamic_tiles=dynamic_tiles)
        run(config, seqlens=(225, 330), mask=mask, is_packed=True, has_seqused_k=True, options=options)


def test_packed_sequences_whose_keys_come_last():
    """Each sequence of V in FP8 begins at a multiple of 64 keys."""
    found = [(*tile[:4], start, *tile[5:7], None) for tile, start in zip(TILES, STARTS, strict=True)]
    config = replace(CONFIG, two_level_sums=True, rescale_threshold=2.0)
    run(config, seqlens=(225, 665), is_packed=True, options={"sequences": found}, **FP8)


@pytest.mark.parametrize("num_splits", [2, 3])
def test_splits(num_splits):
    for mask in (FULL, CAUSAL):
        run(mask=mask, seqlens=(130, 600), has_seqused_k=True, options={"reads_cache": True, "num_splits": num_splits})


@pytest.mark.parametrize("has_pages", [False, True])
@pytest.mark.parametrize("overlap_tiles", [False, True])
def test_intervals(overlap_tiles, has_pages):
    """Rows of documents: with intervals a warpgroup leaves out blocks on both sides."""

    def interval(query, seqlen_k):
        start = query // 48 * 131 % (seqlen_k - 40)
        return start, min(seqlen_k, start + 150 - query % 48)

    options = {"intervals": interval, "box_rows": 32 if has_pages else None}
    for num_warpgroups, num_stages in ((1, 2), (2, 3), (3, 2)):
        config = replace(CONFIG, num_warpgroups=num_warpgroups, num_stages=num_stages, overlap_tiles=overlap_tiles)
        run(config, seqlens=(400, 500), mask=FULL, has_key_ranges=True, options=options)

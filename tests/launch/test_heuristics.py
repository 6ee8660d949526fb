"""The tables of configurations: every row is used, and every problem gets a configuration that it can take."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from shipped import CAUSAL, ROWS, problem

from onepass.geometry.splits import SPLIT_UNIT
from onepass.kernels.config import HEAD_DIM_TILES
from onepass.kernels.heuristics import decode as heuristics_decode
from onepass.kernels.heuristics import sm80 as heuristics_sm80
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.kernels.launch import backward_sm80 as backward_launch
from onepass.kernels.launch import backward_sm90, decode_sm80, decode_sm90, forward_sm90
from onepass.kernels.launch import forward_sm80 as launch
from onepass.problem import AttentionProblem, Mask, Quantization
from onepass.problem.decode import DecodeProblem


def test_no_row_is_missed():
    configs = [row.config for table in heuristics.FORWARD_SM90.values() for row in table]
    assert len({id(config) for config in configs}) == len({id(row.config) for row in ROWS})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_is_used_from_its_first_to_its_last_length(row):
    assert row.shortest <= row.longest, "no length is left for this row"
    row.config.check(row.problem)
    for seqlen in (row.shortest, min(row.longest, 2**20)):
        asked = replace(row.problem, seqlen_q=4096, seqlen_k=seqlen)
        assert heuristics.forward_config_sm90(asked) == row.config


def test_no_warpgroup_is_without_rows():
    for row, seqlen_q in itertools.product(ROWS, (1, 64, 65, 200)):
        config = heuristics.forward_config_sm90(replace(row.problem, seqlen_q=seqlen_q))
        assert config.tile_m < seqlen_q + 64
        assert config.cluster_size == 1 or config.tile_m < seqlen_q


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_serves_the_head_dims_below_its_tile(row):
    below = max((tile for tile in HEAD_DIM_TILES if tile < row.problem.head_dim), default=0)
    assert heuristics.forward_config_sm90(replace(row.problem, head_dim=below + 8, seqlen_q=4096)) == row.config


def test_every_pair_of_head_dims_has_a_configuration():
    for head_dim, head_dim_v in itertools.product(range(8, 257, 8), repeat=2):
        for mask, dtype in ((Mask(), torch.bfloat16), (CAUSAL, torch.float16)):
            for seqlen in (1, 1024, 2049, 2**20):
                asked = problem(head_dim, head_dim_v, seqlen, dtype=dtype, mask=mask)
                heuristics.forward_config_sm90(asked).check(asked)


@pytest.mark.sampled(quick=2, slow=4)
@pytest.mark.parametrize("arch", launch.ARCHS)
def test_every_pair_of_head_dims_has_configurations_for_ampere_kernels(arch):
    for head_dim, head_dim_v in itertools.product(range(8, 257, 8), repeat=2):
        for dtype, softcap in itertools.product((torch.bfloat16, torch.float32), (None, 5.0)):
            asked = replace(problem(head_dim, head_dim_v, dtype=dtype), softcap=softcap)
            heuristics_sm80.forward_config_sm80(asked, arch).check(asked, arch)
            if backward_launch.unsupported(asked) is None:
                heuristics_sm80.backward_config_sm80(asked, arch).check(asked, arch)


@pytest.mark.parametrize(
    ("changes", "tile_m"),
    [
        ({}, 128),
        ({"has_alibi": True}, 128),
        ({"has_seqstart_k": True}, 128),
        ({"has_alibi": True, "has_seqstart_k": True}, 64),
        ({"has_alibi": True, "num_heads_kv": 2}, 64),
        ({"has_key_ranges": True}, 128),
        ({"has_q_positions": True, "num_heads_kv": 2}, 128),
        ({"has_key_ranges": True, "has_q_positions": True}, 64),
        ({"has_key_ranges": True, "dropout_p": 0.1}, 64),
        ({"dropout_p": 0.1}, 128),
        ({"dropout_p": 0.1, "has_alibi": True}, 64),
        ({"dropout_p": 0.1, "num_heads_kv": 2}, 64),
        ({"bias_dtype": torch.bfloat16}, 64),
    ],
)
def test_the_larger_tile_of_a_backward_is_for_modifiers_that_leave_it_registers(changes, tile_m):
    asked = problem(64, 64, 4096, mask=CAUSAL, **changes)
    assert heuristics.backward_config_sm90(asked).tile_m == tile_m


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(
    ("changes", "is_together"),
    [
        ({"num_heads_kv": 1}, True),
        ({"num_heads_kv": 2, "has_seqused_k": True}, True),
        ({}, False),
        ({"num_heads_kv": 1, "mask": Mask()}, False),
        ({"num_heads_kv": 1, "mask": Mask(64, 0)}, False),
        ({"num_heads_kv": 1, "deterministic": True}, False),
        ({"num_heads_kv": 1, "is_packed": True}, False),
        ({"num_heads_kv": 1, "has_key_ranges": True}, False),
        ({"num_heads_kv": 1, "seqlen": 512, "batch": 132}, None),  # a thread block has all tiles of a head
    ],
)
def test_heads_of_a_group_visit_blocks_together_under_a_causal_mask(head_dim, changes, is_together):
    changes = {"seqlen": 4096, "mask": CAUSAL} | changes
    batch = changes.pop("batch", 1)
    asked = replace(problem(head_dim, head_dim, **changes), batch=batch)
    config = heuristics.backward_config_sm90(asked)
    config.check(asked)
    assert config.heads_together == (not config.private_dq if is_together is None else is_together)


@pytest.mark.parametrize("head_dims", [(96, 96), (72, 96), (96, 64), (64, 96)])
@pytest.mark.parametrize("mask", [Mask(), CAUSAL])
def test_a_backward_of_head_dim_96_has_k_in_registers(head_dims, mask):
    asked = problem(*head_dims, 4096, mask=mask)
    config = heuristics.backward_config_sm90(asked)
    assert config.head_dims(asked) == tuple(64 if d == 64 else 96 for d in head_dims)
    assert config.keys_in_registers(asked)
    wide = problem(head_dims[0], 200, 4096, mask=mask)  # with pieces of 64 columns of dQ
    assert heuristics.backward_config_sm90(wide).head_dims(wide) == (64 if head_dims[0] == 64 else 128, 256)


def test_few_queries_of_a_group_with_modifiers_have_a_configuration():
    asked = problem(128, 128, 4, num_heads_kv=1, has_alibi=True)
    heuristics.forward_config_sm90(asked).check(asked)


@pytest.mark.parametrize(
    ("head_dim", "mask", "num_heads_kv", "overlaps"),
    [(64, CAUSAL, 4, False), (128, CAUSAL, 4, True), (128, Mask(), 4, True), (128, CAUSAL, 1, False)],
)
def test_dropout_overlaps_gradients_where_there_are_no_larger_tiles(head_dim, mask, num_heads_kv, overlaps):
    asked = problem(head_dim, head_dim, 4096, mask=mask, num_heads_kv=num_heads_kv, dropout_p=0.1)
    assert heuristics.backward_config_sm90(asked).overlap_gradients == overlaps


def deterministic(head_dim, seqlen, mask, **changes):
    """A deterministic problem of 16384 tokens of hidden size 2048."""
    heads = 2048 // head_dim
    asked = problem(head_dim, head_dim, seqlen, mask=mask, num_heads_kv=heads, deterministic=True)
    return replace(asked, **{"num_heads_q": heads, "batch": 16384 // seqlen} | changes)


@pytest.mark.parametrize(
    ("asked", "lag"),
    [
        (deterministic(128, 2048, Mask()), 3),
        (deterministic(128, 512, Mask()), 2),
        (deterministic(128, 512, Mask(), batch=4), 0),  # 2 waves
        (deterministic(256, 16384, Mask()), 3),
        (deterministic(64, 1024, Mask()), 0),  # blocks of 128 queries, 8 of them
        (deterministic(128, 2048, CAUSAL), 0),
        (deterministic(128, 2048, Mask(), is_packed=True), 0),
        (deterministic(128, 2048, Mask(), has_seqused_k=True), 0),
        (deterministic(128, 2048, Mask(), seqlen_q=300), 0),  # fewer blocks than tiles
        (deterministic(128, 4096, Mask(), num_heads_kv=2), 0),  # groups do not fit into L2
        (deterministic(128, 1152, Mask()), 0),  # 9 tiles a head: rings take 18 waves, a queue 16
    ],
)
def test_turns_go_around_where_rings_are_even_and_fit_into_l2(asked, lag):
    config = heuristics.backward_config_sm90(asked)
    config.check(asked)
    assert config.ring_lag == lag
    assert config.dynamic_tiles == (lag == 0)


@pytest.mark.parametrize(
    ("asked", "mib", "descends"),
    [
        (deterministic(128, 2048, CAUSAL), 16, True),
        (deterministic(128, 8192, CAUSAL), 32, True),
        (deterministic(256, 1024, CAUSAL), 32, True),
        (deterministic(64, 4096, CAUSAL), 64, True),
        (deterministic(64, 2048, CAUSAL), 0, False),  # a lead of one step
        (deterministic(128, 4096, CAUSAL, num_heads_kv=2), 0, False),  # 32 ascending tiles
        (deterministic(128, 4096, Mask(1024, 0)), 0, True),
        (deterministic(128, 4096, CAUSAL, is_packed=True, seqlen_q=16384, seqlen_k=16384), 0, True),
        (deterministic(128, 4096, CAUSAL, deterministic=False), 0, False),
    ],
)
def test_the_last_heads_ascend_where_they_have_a_wave_of_tiles(asked, mib, descends):
    config = heuristics.backward_config_sm90(asked)
    config.check(asked)
    assert (config.ascending_mib, config.descending_turns) == (mib, descends)


BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
MASKS = Mask(), CAUSAL, Mask(300, 0), Mask(7, None), Mask(-9, None)
SINGLE = ("has_sinks", "has_seqused_k", "is_packed", "deterministic")
MODIFIERS = ("has_seqstart_k", "has_key_ranges", "has_q_positions", "has_alibi")


def random_problem(rng, dtype):
    """A problem with a random subset of all options."""

    def given(chance, value, otherwise):
        return value if rng.random() < chance else otherwise

    multiple = 16 if dtype == E4M3 else 8
    head_dim, group = multiple * rng.randint(1, 256 // multiple), rng.choice([1, 1, 2, 3, 8, 16, 70])
    lengths = [rng.choice([1, 3, 16, 64, 130, 512, 1000, 4096, 20000]) for _ in range(2)]
    flags = {name: rng.random() < 0.25 for name in SINGLE}
    if rng.random() < 0.5:
        flags |= {name: rng.random() < 0.3 for name in MODIFIERS}
        flags["bias_dtype"], flags["dropout_p"] = given(0.3, BF16, None), given(0.3, 0.1, 0.0)
        flags["constant_slopes"], flags["constant_bias"] = rng.random() < 0.5, rng.random() < 0.5
    if dtype == E4M3:
        of_out, keys_last = rng.choice([BF16, FP16]), rng.random() < 0.5
        flags["quantization"] = Quantization(of_out, 64, 64, keys_last, exact_lse=rng.random() < 0.5)
    return AttentionProblem(
        dtype,
        "cuda",
        rng.choice([1, 2, 7, 64, 300]),
        *lengths,
        num_heads_q=group * (num_heads_kv := rng.choice([1, 2, 8])),
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=given(0.7, head_dim, multiple * rng.randint(1, 256 // multiple)),
        softmax_scale=0.1,
        mask=rng.choice(MASKS),
        softcap=given(0.25, 5.0, None),
        **flags,
    )


@pytest.mark.parametrize("dtype", [BF16, FP32, E4M3], ids=str)
def test_random_problems_have_configurations(dtype):
    """What the tables choose is what a launch can have, whatever the options are."""
    rng, count = random.Random(0), 0
    for _ in range(600):
        asked, arch = random_problem(rng, dtype), rng.choice(launch.ARCHS)
        if forward_sm90.unsupported(asked) is None:
            heuristics.forward_config_sm90(asked).check(asked)
            count += 1
        if dtype == E4M3:
            continue
        if backward_sm90.unsupported(asked) is None:
            heuristics.backward_config_sm90(asked).check(asked)
        heuristics_sm80.forward_config_sm80(asked, arch).check(asked, arch)
        heuristics_sm80.backward_config_sm80(asked, arch).check(asked, arch)
    assert count > 150


@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=str)
def test_random_steps_over_a_cache_have_configurations(kv_dtype):
    """Their steps divide the unit of splits, and the splits that a call asks for."""
    rng, count = random.Random(1), 0
    for _ in range(400):
        attention = random_problem(rng, BF16 if kv_dtype else rng.choice([BF16, FP16, FP32]))
        attention = replace(attention, has_seqused_k=True, deterministic=False, dropout_p=0.0, kv_dtype=kv_dtype)
        split_size = rng.choice([None, SPLIT_UNIT, 3 * SPLIT_UNIT, 8 * SPLIT_UNIT])
        asked, arch = DecodeProblem(attention, page_size=rng.choice([None, 64]), split_size=split_size), "sm_90a"
        if decode_sm80.unsupported(asked) is None:
            config = heuristics_decode.decode_config_sm80(asked.sizing_problem, arch)
            config.check(attention, arch)
            assert SPLIT_UNIT % config.block_keys == 0
        if decode_sm90.unsupported(asked) is None:
            config = heuristics_decode.decode_config_sm90(attention, split_size)
            config.check(attention)
            assert (split_size or config.tile_n) % config.tile_n == 0
            count += 1
    assert count > 30

"""The tables of configurations: every row is used, and every problem gets a configuration that it can take."""

import itertools
from dataclasses import replace

import pytest
import torch
from shipped import CAUSAL, ROWS, problem

from onepass.kernels.config import HEAD_DIM_TILES
from onepass.kernels.heuristics import sm80 as heuristics_sm80
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.kernels.launch import backward_sm80 as backward_launch
from onepass.kernels.launch import forward_sm80 as launch
from onepass.problem import Mask


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

"""`BackwardConfigSm90`: the values that it accepts, and the configurations that a problem refuses."""

import itertools
from dataclasses import replace

import pytest
import torch

from onepass.errors import UnsupportedError
from onepass.kernels.config import SMEM_BYTES, BackwardConfigSm90
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.problem import AttentionProblem, Mask

PROBLEM = AttentionProblem(torch.bfloat16, "cuda", 2, 4096, 4096, 32, 8, 128, 128, 0.1, Mask(None, 0))


def test_text_holds_every_field():
    config = BackwardConfigSm90(tile_m=128, q_stages=3, pingpong=False)
    assert BackwardConfigSm90.from_text(config.text) == config
    assert type(BackwardConfigSm90.from_text(config.text)) is BackwardConfigSm90


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tile_m": 128.0}, "tile_m: expected int, got 128.0"),
        ({"pingpong": 1}, "pingpong: expected bool, got 1"),
        ({"q_stages": None}, "q_stages: expected int, got None"),
    ],
)
def test_a_field_of_the_wrong_type(fields, message):
    with pytest.raises(TypeError, match=message):
        BackwardConfigSm90(**fields)


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        ({"num_warpgroups": 3}, {}, "num_warpgroups: expected 1 or 2, got 3"),
        ({"tile_m": 96}, {}, "tile_m: expected 64 or 128, got 96"),
        ({"tile_m": 128, "by_gradient": True}, {}, "tile_m: expected 64 with by_gradient, got 128"),
        ({"private_dq": True, "dynamic_tiles": True}, {}, "private_dq: expected .* dynamic_tiles off"),
        ({"private_dq": True}, {"is_packed": True}, "private_dq: expected .* no packed sequences"),
        ({"q_stages": 1}, {}, "q_stages: expected 2 or more, .*, got 1"),
        ({"do_stages": 0}, {}, "do_stages: expected 1 or more, got 0"),
        ({}, {"head_dim": 192}, "head_dim: expected up to 128 without by_gradient, got 192 and 128"),
        ({}, {"head_dim_v": 256}, "head_dim: expected up to 128 without by_gradient, got 128 and 256"),
        ({"paired": True}, {}, "paired: expected by_gradient and no private_dq"),
        ({"paired": True, "by_gradient": True}, {}, "paired: expected a head_dim above 128, got 128"),
        (
            {"paired": True, "by_gradient": True},
            {"head_dim": 192, "softcap": 30.0, "has_alibi": True},
            "paired: expected no softcap with gradients of slopes or of a bias",
        ),
        ({"tile_m": 128}, {}, r"shared memory: BackwardConfigSm90\(.* needs 264320 bytes, a thread block has 232448"),
        (
            {"tile_m": 128},
            {"head_dim": 64, "head_dim_v": 64, "softcap": 30.0},
            r"registers: BackwardConfigSm90\(.* needs 224 for dK, dV, S, P and dS, a thread has 240 and addresses take",
        ),
    ],
)
def test_what_does_not_fit_is_refused(fields, changes, message):
    with pytest.raises(UnsupportedError, match=message):
        BackwardConfigSm90(**fields).check(replace(PROBLEM, **changes))


def test_what_fits_is_taken():
    BackwardConfigSm90(q_stages=3, do_stages=1).check(PROBLEM)
    BackwardConfigSm90(tile_m=128).check(replace(PROBLEM, head_dim=64, head_dim_v=40))
    BackwardConfigSm90(by_gradient=True).check(replace(PROBLEM, head_dim=256, head_dim_v=192))


def test_every_problem_gets_a_configuration_that_it_can_take():
    masks = Mask(), Mask(None, 0), Mask(128, 0)
    for d, dv, mask, softcap, is_packed in itertools.product(
        range(8, 257, 8), range(8, 257, 8), masks, (None, 30.0), (False, True)
    ):
        asked = replace(PROBLEM, head_dim=d, head_dim_v=dv, mask=mask, softcap=softcap, is_packed=is_packed)
        blocks = {"block_size": (64, 64)}
        for changes in ({}, {"seqlen_q": 100, "seqlen_k": 100, "batch": 33}, blocks, {**blocks, "deterministic": True}):
            changed = replace(asked, **changes)
            config = heuristics.backward_config_sm90(changed)
            config.check(changed)
            assert config.smem_bytes(changed) <= SMEM_BYTES


@pytest.mark.parametrize(
    ("head_dim", "changes", "chosen"),
    [
        (64, {}, BackwardConfigSm90(num_warpgroups=1, dynamic_tiles=True)),
        (64, {"deterministic": True}, BackwardConfigSm90(num_warpgroups=1, dynamic_tiles=True)),
        (96, {}, BackwardConfigSm90(by_queries=True, q_stages=4, do_stages=4, dynamic_tiles=True)),
        (128, {"deterministic": True}, None),
        (
            128,
            {"has_block_bits": True},
            BackwardConfigSm90(by_queries=True, q_stages=4, do_stages=4, dynamic_tiles=True),
        ),
        (128, {"has_block_bits": True, "softcap": 30.0}, None),
        (128, {"dropout_p": 0.1}, None),
        (128, {"block_size": (64, 128)}, BackwardConfigSm90(q_stages=3, dynamic_tiles=True, overlap_gradients=True)),
        (192, {}, None),
    ],
)
def test_masks_of_blocks_of_64_keys(head_dim, changes, chosen):
    """None: a gradient for each warpgroup."""
    asked = replace(PROBLEM, head_dim=head_dim, head_dim_v=head_dim, mask=Mask(), **{"block_size": (64, 64), **changes})
    config = heuristics.backward_config_sm90(asked)
    assert (
        (config.by_gradient and not config.paired)
        if chosen is None
        else replace(config, background_rows=True) == chosen
    )


def test_where_pairs_of_thread_blocks_share_tiles():
    def is_paired(**changes):
        config = heuristics.backward_config_sm90(replace(PROBLEM, **changes))
        assert not (config.paired and config.rows_in_background(PROBLEM))
        return config.paired

    assert is_paired(head_dim=256, head_dim_v=256)
    assert is_paired(head_dim=200, head_dim_v=64, is_packed=True, softcap=30.0)
    assert is_paired(head_dim=136, deterministic=True)
    assert not is_paired(head_dim=128, head_dim_v=256)
    assert not is_paired(head_dim=256, seqlen_k=64)
    assert not is_paired(head_dim=256, softcap=30.0, has_alibi=True)
    stages = [
        heuristics.backward_config_sm90(replace(PROBLEM, head_dim=d, deterministic=in_turns)).q_stages
        for d, in_turns in ((192, False), (192, True), (256, False))
    ]
    assert stages == [3, 2, 2]


def test_a_pair_has_tiles_of_twice_the_keys():
    alone, pair = (BackwardConfigSm90(by_gradient=True, paired=paired) for paired in (False, True))
    wide = replace(PROBLEM, head_dim=256, head_dim_v=256)
    assert (alone.tile_n, pair.tile_n) == (64, 128)
    assert (alone.tile_warps, pair.tile_warps) == (8, 16)
    assert alone.warps_of_dq(wide) == 8
    assert pair.warps_of_dq(wide) == 16
    assert pair.warps_of_dq(replace(wide, head_dim=192)) == 12


def test_short_sequences_keep_dq_to_themselves():
    asked = replace(PROBLEM, head_dim=64, head_dim_v=64, num_heads_kv=32, seqlen_q=512, seqlen_k=512, batch=32)
    assert heuristics.backward_config_sm90(asked).private_dq
    for changes in (
        {"seqlen_k": 513},
        {"seqlen_q": 2048},  # the sums of all thread blocks exceed the L2 cache
        {"batch": 5},  # 160 heads for 132 multiprocessors
        {"softcap": 30.0},
        {"is_packed": True},
        {"head_dim": 256},
    ):
        assert not heuristics.backward_config_sm90(replace(asked, **changes)).private_dq, changes
    wide = replace(asked, head_dim=128, num_heads_q=16, num_heads_kv=16)
    assert heuristics.backward_config_sm90(wide).private_dq
    assert not heuristics.backward_config_sm90(replace(wide, mask=Mask())).private_dq

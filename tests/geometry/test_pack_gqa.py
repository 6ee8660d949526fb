"""The rows of a tile that the query heads of one kv head share."""

import dataclasses

import pytest
import torch

from onepass.errors import UnsupportedError
from onepass.geometry.pack_gqa import unpack_row
from onepass.kernels.config import ROWS_PER_WARPGROUP, ForwardConfigSm90
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.problem import AttentionProblem, Mask


def problem(seqlen_q, group, **options):
    return AttentionProblem(
        dtype=torch.bfloat16,
        device_type="cuda",
        batch=2,
        seqlen_q=seqlen_q,
        seqlen_k=1000,
        num_heads_q=2 * group,
        num_heads_kv=2,
        head_dim=128,
        head_dim_v=128,
        softmax_scale=1.0,
        mask=Mask(),
        **options,
    )


@pytest.mark.parametrize("group", range(1, 65))
@pytest.mark.parametrize("num_warpgroups", [1, 2, 3])
def test_every_position_of_every_head_has_one_row(group, num_warpgroups):
    config = ForwardConfigSm90(tile_n=64, num_warpgroups=num_warpgroups, pack_gqa=True)
    positions = config.positions(problem(1, group))
    rows = [unpack_row(row, group, ROWS_PER_WARPGROUP) for row in range(config.tile_m)]
    used = [(position, head) for position, head, is_used in rows if is_used]
    assert used == [(position, head) for position in range(positions) for head in range(group)]
    for first in range(0, config.tile_m, 64):
        # used rows of a warpgroup come first, as TMA writes them
        flags = [is_used for _, _, is_used in rows[first : first + 64]]
        assert flags == sorted(flags, reverse=True)


def test_without_packing_a_tile_has_one_head():
    config = ForwardConfigSm90(tile_n=64)
    assert (config.group(problem(1, 4)), config.positions(problem(1, 4))) == (1, 128)


def test_a_group_of_more_heads_than_rows_is_refused():
    with pytest.raises(UnsupportedError, match="pack_gqa: expected up to 64 query heads a kv head, got 65"):
        ForwardConfigSm90(tile_n=64, pack_gqa=True).check(problem(1, 65))


@pytest.mark.parametrize(
    ("seqlen_q", "group", "expected"), [(1, 8, True), (16, 8, True), (17, 8, False), (1, 1, False), (1, 65, False)]
)
def test_groups_share_a_tile_where_they_fit_into_one(seqlen_q, group, expected):
    assert heuristics.forward_config_sm90(problem(seqlen_q, group)).pack_gqa == expected
    packed = dataclasses.replace(problem(2 * seqlen_q, group), is_packed=True)
    assert heuristics.forward_config_sm90(packed).pack_gqa == expected

"""Problem -> configuration: one table per architecture, each row with the measurement behind it."""

from __future__ import annotations

from dataclasses import replace

from ..errors import UnsupportedError
from ..problem import AttentionProblem
from .config import ForwardConfig, head_dim_tile

# Hopper, by (head_dim, head_dim_v) tile.
FORWARD_SM90 = {
    (64, 64): ForwardConfig(tile_n=128, num_warpgroups=3, q_stages=2),
    (96, 96): ForwardConfig(tile_n=128, q_stages=2),
    (128, 128): ForwardConfig(tile_n=128, q_stages=2),
    (192, 128): ForwardConfig(tile_n=128),
    (192, 192): ForwardConfig(tile_n=112),
    (256, 256): ForwardConfig(tile_n=80),
}


def forward_config(problem: AttentionProblem) -> ForwardConfig:
    """The configuration that a call of this problem runs with on Hopper."""
    dims = head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v)
    if dims in FORWARD_SM90:
        return FORWARD_SM90[dims]
    # other pairs of head dims: the largest tile that leaves 60 registers beside the accumulators and fits
    for tile_n in (128, 112, 96, 80, 64, 48):
        config = ForwardConfig(tile_n=tile_n)
        try:
            config.check(problem)
        except UnsupportedError:
            continue
        if config.accumulator_registers(problem) <= 180:
            return config
    return replace(config, tile_n=32)

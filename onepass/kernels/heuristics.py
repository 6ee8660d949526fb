"""Problem -> configuration: one table per architecture, each row with the measurement behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..errors import UnsupportedError
from ..problem import AttentionProblem
from .config import ROWS_PER_WARPGROUP, ForwardConfig, head_dim_tile

LONG = 2**62


class Row(NamedTuple):
    """The configuration of the problems of one kind up to a length."""

    is_causal: bool | None  # None: both
    seqlen_k: int  # longest
    config: ForwardConfig


# Hopper, by (head_dim, head_dim_v) tile; the first row that holds. In the comments bf16 TFLOP/s on an H200 at sequence
# lengths 512, 1024, 2048, 4096, 8192 and 16384 (16k tokens of hidden size 2048), and of the next best configuration.
FORWARD_SM90 = {
    (64, 64): (
        # 415 439; 3 warpgroups need 15 percent more rows at 512, which costs less than what they hide
        Row(False, 1024, ForwardConfig(tile_n=128, num_warpgroups=3, q_stages=2)),
        # 503 511 533 541; with overlap_tiles 495 505 523 524
        Row(False, LONG, ForwardConfig(tile_n=128, num_warpgroups=3, q_stages=2, overlap_tiles=False)),
        # 290 366; with 3 warpgroups 243 302
        Row(True, 1024, ForwardConfig(tile_n=128, q_stages=2)),
        # 413 455 477 502; with 2 warpgroups 410 441 423 446
        Row(True, LONG, ForwardConfig(tile_n=128, num_warpgroups=3, q_stages=2)),
    ),
    (96, 96): (Row(None, LONG, ForwardConfig(tile_n=128, q_stages=2)),),
    # 571 624 650 663 655 664, causal 387 500 590 612 648 634; tile_n 176: 492 565 594 607 661 671, causal 271 ... 623
    (128, 128): (
        Row(False, LONG, ForwardConfig(tile_n=128, q_stages=2)),
        Row(True, 2048, ForwardConfig(tile_n=128, q_stages=2)),
        # 606 621 639 from 4096 on; without these four switches 563 590 608 in the same run
        Row(
            True,
            LONG,
            ForwardConfig(
                tile_n=128,
                q_stages=2,
                dynamic_tiles=True,
                softmax_before_wait=True,
                rescale_beside_qk=True,
                rescale_threshold=8.0,
            ),
        ),
    ),
    (192, 128): (Row(None, LONG, ForwardConfig(tile_n=128)),),
    (192, 192): (Row(None, LONG, ForwardConfig(tile_n=112)),),
    # 577 667 711 748 735 738, causal 354 502 581 633 679 704; tile_n 80, too: 548 659 697 713 724 737, causal ... 713
    (256, 256): (Row(None, LONG, ForwardConfig(tile_n=64, rescale_threshold=8.0)),),
}


def forward_config(problem: AttentionProblem) -> ForwardConfig:
    """The configuration that a call of this problem runs with on Hopper."""
    dims = head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v)
    is_causal = problem.mask.window_right is not None
    # of packed sequences only the total is known here: their mean
    seqlen_k = problem.seqlen_k // max(1, problem.batch) if problem.is_packed else problem.seqlen_k
    for row in FORWARD_SM90.get(dims, ()):
        if row.is_causal in (None, is_causal) and seqlen_k <= row.seqlen_k:
            return _adapted(row.config, problem)
    # other pairs of head dims: the largest tile that leaves 60 registers beside the accumulators and fits
    for tile_n in (128, 112, 96, 80, 64, 48):
        config = ForwardConfig(tile_n=tile_n)
        try:
            config.check(problem)
        except UnsupportedError:
            continue
        if config.accumulator_registers(problem) <= 180:
            return _adapted(config, problem)
    return _adapted(replace(config, tile_n=32), problem)


def _adapted(config: ForwardConfig, problem: AttentionProblem) -> ForwardConfig:
    """The configuration of a dense problem for one that differs from it in its lengths or its groups of heads."""
    seqlen_q = problem.seqlen_q
    if problem.is_packed:  # of unequal lengths, which no fixed order balances (not measured yet)
        config = replace(config, dynamic_tiles=True)
        seqlen_q //= max(1, problem.batch)
    # few rows: all heads of a group fit into one tile and read their K and V once (not measured yet)
    group = problem.qhead_per_kvhead
    if 1 < group <= ROWS_PER_WARPGROUP and seqlen_q * group <= config.tile_m:
        config = replace(config, pack_gqa=True)
    return config

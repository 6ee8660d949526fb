"""Problem -> configuration: one table per architecture, each row with the measurement behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..errors import UnsupportedError
from ..problem import AttentionProblem
from .config import ForwardConfig, head_dim_tile

LONG = 2**62


class Row(NamedTuple):
    """The configuration of the problems of one kind up to a length."""

    is_causal: bool | None  # None: both
    seqlen_k: int  # longest
    config: ForwardConfig


# Hopper, by (head_dim, head_dim_v) tile; the first row that holds. In the comments bf16 TFLOP/s on an H200 at sequence
# lengths 512, 1024, 2048, 4096, 8192 and 16384 (16k tokens of hidden size 2048), and of the next best configuration.
LAZY = 8.0
FORWARD_SM90 = {
    (64, 64): (
        # 425 466 530 551; 3 warpgroups need 15 percent more rows at 512, which costs less than what they hide
        Row(
            False,
            4096,
            ForwardConfig(tile_n=128, num_warpgroups=3, q_stages=2, rescale_threshold=LAZY, overlap_tiles=False),
        ),
        # 578 587; without overlap_tiles 574 585
        Row(False, LONG, ForwardConfig(tile_n=128, num_warpgroups=3, q_stages=2, rescale_threshold=LAZY)),
        # 286 361 426; with 3 warpgroups 245 307 419
        Row(True, 2048, ForwardConfig(tile_n=128, q_stages=2, rescale_threshold=LAZY, dynamic_tiles=True)),
        # 479 534 552; with 2 warpgroups 468 497 504
        Row(
            True,
            LONG,
            ForwardConfig(tile_n=128, num_warpgroups=3, q_stages=2, rescale_threshold=LAZY, dynamic_tiles=True),
        ),
    ),
    (96, 96): (
        # at 2048 and 8192 609 669; tile_n 128 and 2 warpgroups 593 612
        Row(False, LONG, ForwardConfig(tile_n=112, num_warpgroups=3, q_stages=2, rescale_threshold=LAZY)),
        # at 2048 512; the next row 502
        Row(True, 2048, ForwardConfig(tile_n=128, q_stages=2, rescale_threshold=LAZY, dynamic_tiles=True)),
        # at 8192 598; the row above 570
        Row(
            True,
            LONG,
            ForwardConfig(tile_n=96, num_warpgroups=3, q_stages=2, rescale_threshold=LAZY, dynamic_tiles=True),
        ),
    ),
    (128, 128): (
        # 559 617 676 690; the next row 497 571 664 685
        Row(False, 4096, ForwardConfig(tile_n=128, q_stages=2, rescale_threshold=LAZY)),
        # 720 731; the row above 703 705
        Row(
            False,
            LONG,
            ForwardConfig(tile_n=80, num_warpgroups=3, num_stages=3, q_stages=2, rescale_threshold=LAZY),
        ),
        # 371; drawn from the queue 349
        Row(True, 512, ForwardConfig(tile_n=128, q_stages=2, rescale_threshold=LAZY)),
        # 473 556 618; the next row 400 529 601
        Row(True, 4096, ForwardConfig(tile_n=128, q_stages=2, rescale_threshold=LAZY, dynamic_tiles=True)),
        # 668 693; the row above 662 677
        Row(
            True,
            LONG,
            ForwardConfig(
                tile_n=80, num_warpgroups=3, num_stages=3, q_stages=2, rescale_threshold=LAZY, dynamic_tiles=True
            ),
        ),
    ),
    (192, 128): (Row(None, LONG, ForwardConfig(tile_n=128, rescale_threshold=LAZY)),),
    (192, 192): (
        # at 2048 and 8192 679 727; tile_n 112 667 711, 96 645 723
        Row(False, LONG, ForwardConfig(tile_n=80, rescale_threshold=LAZY)),
        # at 2048 and 8192 585 673; tile_n 80 569 675
        Row(True, LONG, ForwardConfig(tile_n=112, rescale_threshold=LAZY, dynamic_tiles=True)),
    ),
    (256, 256): (
        # 576 645 692 708 726 735; tile_n 80: 537 638 685 712 721 734
        Row(False, LONG, ForwardConfig(tile_n=64, rescale_threshold=LAZY)),
        # 367 492 577 645 688 712; tile_n 80, two buffers for V: 343 479 568 641 682 702
        Row(True, LONG, ForwardConfig(tile_n=64, v_stages=3, rescale_threshold=LAZY, dynamic_tiles=True)),
    ),
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
        config = ForwardConfig(tile_n=tile_n, rescale_threshold=LAZY)
        try:
            config.check(problem)
        except UnsupportedError:
            continue
        if config.accumulator_registers(problem) <= 180:
            return _adapted(config, problem)
    return _adapted(replace(config, tile_n=32), problem)


def _adapted(config: ForwardConfig, problem: AttentionProblem) -> ForwardConfig:
    """The configuration of a dense problem for one that differs from it in its lengths alone."""
    if problem.is_packed:  # of unequal lengths, which no fixed order balances (not measured yet)
        return replace(config, dynamic_tiles=True)
    return config

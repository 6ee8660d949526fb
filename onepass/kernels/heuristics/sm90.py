"""Problem -> configuration on Hopper, each row of the table with the measurement behind it; and who configures what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from ...errors import UnsupportedError
from ...geometry.integers import ceil_div
from ...problem import AttentionProblem
from ..config import (
    HOPPER,
    ROWS_PER_WARPGROUP,
    BackwardConfig,
    BackwardConfigSm80,
    ForwardConfig,
    ForwardConfigSm80,
    LaunchConfig,
    head_dim_tile,
    value_columns,
)
from .sm80 import backward_config_sm80, forward_config_sm80, has_descending_turns

LONG = 2**62


class Chooser(NamedTuple):
    """Who configures the launches of a backend.

    Attributes:
        choose: (problem, architecture) -> configuration.
    """

    config_type: type[LaunchConfig]
    choose: Callable[[AttentionProblem, str], LaunchConfig]


class Row(NamedTuple):
    """The configuration of the problems of one kind up to a length."""

    is_causal: bool | None  # None: both
    seqlen_k: int  # longest
    config: ForwardConfig


# Hopper, by (head_dim, head_dim_v) tile; the first row that holds. In the comments bf16 TFLOP/s on an H200 at sequence
# lengths 512, 1024, 2048, 4096, 8192 and 16384 (16k tokens of hidden size 2048), and of the next best configuration.
LAZY = 8.0
# Of normal data at 512, 2048 and 16384 keys 2, 2 and 1.5 percent of a warp's steps rescale (0.8: 90, 52, 13); the error
# of Table 3 is the same (docs/kernels/fp8.md). Simulated.
LAZY_FP8 = 2.8
FORWARD_SM90 = {
    (64, 64): (
        # 457 494; the next row 425 455
        Row(False, 1024, ForwardConfig(tile_n=64, num_warpgroups=4, q_stages=2, rescale_threshold=LAZY)),
        # 530 549; with overlap_tiles 529 549
        Row(
            False,
            4096,
            ForwardConfig(tile_n=128, num_warpgroups=3, q_stages=2, rescale_threshold=LAZY, overlap_tiles=False),
        ),
        # 578 587; without overlap_tiles 574 585
        Row(False, LONG, ForwardConfig(tile_n=128, num_warpgroups=3, q_stages=2, rescale_threshold=LAZY)),
        # 304 409 471 518 547; 3 warpgroups 257 327 443 505 542, 2 of them 290 361 444 476 498
        Row(
            True,
            8192,
            ForwardConfig(
                tile_n=64, num_warpgroups=4, num_stages=4, q_stages=2, rescale_threshold=LAZY, dynamic_tiles=True
            ),
        ),
        # 569; the row above 559
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
        # 560 615; by themselves 554 587
        Row(False, 1024, ForwardConfig(tile_n=128, q_stages=2, rescale_threshold=LAZY, cluster_size=2)),
        # 676 690; the next row 664 685
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
        # 568 643 700 730 750 754; by themselves with two buffers for V 563 643 683 719 740 741
        Row(False, LONG, ForwardConfig(tile_n=64, v_stages=3, rescale_threshold=LAZY, cluster_size=2)),
        # 367 492 577 645 688 712; tile_n 80, two buffers for V: 343 479 568 641 682 702
        Row(True, LONG, ForwardConfig(tile_n=64, v_stages=3, rescale_threshold=LAZY, dynamic_tiles=True)),
    ),
}

# Configurations for FP8, by the wider head dim: TFLOP/s at 1024, 2048, 4096, 8192 and 16384 where they are the row's
# (benchmarks/results/h200-fp8-variants.json, in which the same configuration twice differs by up to 5 percent).
# The tensor cores cut the sums of P V off (docs/kernels/fp8.md), so P V of each step is added to O by the FMA pipe.
FP8_BESIDE = ForwardConfig(tile_n=128, q_stages=2, rescale_threshold=LAZY_FP8, two_level_sums=True)
FP8_AFTER = replace(FP8_BESIDE, overlap_gemm_softmax=False)
FORWARD_FP8 = {
    64: (
        # 518; 128 keys and 3 warpgroups 490
        Row(False, 1024, replace(FP8_AFTER, tile_n=64, num_warpgroups=4)),
        # 573 598 635 634; 64 keys and 4 warpgroups 556 575 592 596, with overlap and 96 keys at 2048, 4096 and 16384 in
        # another run 489 544 600
        Row(False, LONG, replace(FP8_AFTER, num_warpgroups=3)),
        # 337; 128 keys and 3 warpgroups 316
        Row(True, 1024, replace(FP8_AFTER, tile_n=64, num_warpgroups=4, dynamic_tiles=True)),
        # 431 498 564 600; 64 keys and 4 warpgroups 410 472 521 551
        Row(True, LONG, replace(FP8_AFTER, num_warpgroups=3, dynamic_tiles=True)),
    ),
    128: (
        # 757; without overlap 3 warpgroups 729
        Row(False, 1024, FP8_BESIDE),
        # 856 897 946 929; with overlap 2 warpgroups 825 863 878 906
        Row(False, LONG, replace(FP8_AFTER, num_warpgroups=3)),
        # 519; without overlap 3 warpgroups 493
        Row(True, 1024, FP8_BESIDE),
        # 667 751 897 887; with overlap 2 warpgroups 639 727 797 841
        Row(True, LONG, replace(FP8_AFTER, num_warpgroups=3, dynamic_tiles=True)),
    ),
    256: (
        # pairs of thread blocks share K and V: 908 992 1035 1062 1092; by themselves 896 984 1028 1057 1067
        Row(False, LONG, replace(FP8_AFTER, cluster_size=2)),
        # 671; with a queue 652
        Row(True, 1024, FP8_AFTER),
        # 815 920 1029 1020; in pairs 778 865 973 1045
        Row(True, LONG, replace(FP8_AFTER, dynamic_tiles=True)),
    ),
}
# Head dims of V above 128: keys of a tile, and columns whose P V has registers beside O, by turns. P V takes the
# registers of S, and where it has not as many ptxas drains every wgmma by itself.
FP8_COLUMNS = {192: (96, 96), 256: (128, 128)}


def forward_config(problem: AttentionProblem, arch: str = HOPPER) -> ForwardConfig:
    """The configuration that a call of this problem runs with on Hopper."""
    if problem.quantization is not None:
        return _of_rows(_fp8_config(problem), problem)
    if problem.dtype == torch.float32:
        return _adapted(
            FLOAT32_SM90[max(head_dim_tile(d) for d in (problem.head_dim, value_columns(problem)))], problem
        )
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


# float32 in two float16 parts, by the wider head_dim tile; TFLOP/s at 2048 and 16384 keys (h200-float32.json)
FLOAT32_SM90 = {
    # 188 216; at 2048 in another run 199, 112 keys 191, with one accumulator 212 and too large errors
    64: ForwardConfig(tile_n=128, rescale_threshold=LAZY, two_level_sums=True),
    # not measured
    96: ForwardConfig(tile_n=64, rescale_threshold=LAZY, two_level_sums=True),
    # 198 239, nothing else measured
    128: ForwardConfig(tile_n=64, rescale_threshold=LAZY, two_level_sums=True),
    # not measured
    192: ForwardConfig(tile_n=48, rescale_threshold=LAZY, two_level_sums=True),
    # 108 118, nothing else measured
    256: ForwardConfig(tile_n=32, rescale_threshold=LAZY, two_level_sums=True),
}


def _fp8_config(problem: AttentionProblem) -> ForwardConfig:
    """FP8 on Hopper."""
    is_causal = problem.mask.window_right is not None
    widest = max(problem.head_dim, problem.head_dim_v)
    columns = head_dim_tile(problem.head_dim_v)
    # these take registers, which the rows below do not leave; not measured
    takes_registers = problem.softcap is not None or problem.mask.window_left is not None
    takes_registers = takes_registers or (widest > 128 and problem.has_seqused_k)
    if takes_registers:
        config = replace(FP8_AFTER, dynamic_tiles=is_causal)
    else:
        seqlen_k = problem.seqlen_k // max(1, problem.batch) if problem.is_packed else problem.seqlen_k
        rows = FORWARD_FP8[64 if widest <= 64 else 128 if widest <= 128 else 256]
        config = next(row.config for row in rows if row.is_causal in (None, is_causal) and seqlen_k <= row.seqlen_k)
    is_measured = widest <= 64 and not (takes_registers or problem.is_packed or problem.has_seqused_k)
    if columns > 128:
        tile_n, pv_columns = (64, 64) if takes_registers and columns > 192 else FP8_COLUMNS[columns]
        config = replace(config, tile_n=tile_n, pv_columns=pv_columns)
    elif not config.overlap_gemm_softmax and columns < config.tile_n and not is_measured:
        # enough registers for P V of its own
        config = replace(FP8_BESIDE, dynamic_tiles=config.dynamic_tiles)
    return _adapted(config, problem)


# Queries up to which the kernel transposes V itself, once for each tile of queries, by the wider head dim: without a
# mask and under a causal one. For more of them it costs less to lay V out once, by a kernel of its own (about 19 us).
# TFLOP/s of both ways, transposed first (h200-fp8-variants.json): 64 at 1024 and 2048 466 453, 532 542, causal at 4096
# and 8192 486 479, 547 553; 128 at 4096 and 8192 876 856, 899 916, causal 739 719, 841 834; 256 at 1024 and 2048
# 849 825, 936 957, causal at 4096 and 8192 883 870, 943 957.
TRANSPOSED_QUERIES = {64: (1024, 4096), 128: (4096, 4096), 256: (1024, 4096)}


def _of_rows(config: ForwardConfig, problem: AttentionProblem) -> ForwardConfig:
    """The configuration for V that lies as `fp8.keys_last` lays it, for the V of this problem."""
    assert problem.quantization is not None
    seqlen_q = problem.seqlen_q // max(1, problem.batch) if problem.is_packed else problem.seqlen_q
    widest = max(problem.head_dim, problem.head_dim_v)
    most = TRANSPOSED_QUERIES[64 if widest <= 64 else 128 if widest <= 128 else 256]
    if problem.quantization.v_keys_last or seqlen_q > most[problem.mask.window_right is not None]:
        return config
    # pairs share what they load, and none of what they transpose; by themselves they are faster with a queue
    is_dynamic = config.dynamic_tiles or config.cluster_size > 1
    transposing = replace(config, transposes_v=True, cluster_size=1, dynamic_tiles=is_dynamic)
    try:
        transposing.check(problem)
    except UnsupportedError:
        return config
    return transposing


def _adapted(config: ForwardConfig, problem: AttentionProblem) -> ForwardConfig:
    """The configuration of a long dense problem for one that differs from it in its lengths or its groups of heads."""
    seqlen_q = problem.seqlen_q
    if problem.is_packed:  # of unequal lengths, which no fixed order balances (not measured yet)
        config = replace(config, dynamic_tiles=True, cluster_size=1)
        seqlen_q //= max(1, problem.batch)
    # few rows: all heads of a group fit into one tile and read their K and V once (not measured yet)
    group = problem.qhead_per_kvhead
    pack_gqa = 1 < group <= ROWS_PER_WARPGROUP and seqlen_q * group <= config.tile_m
    if problem.is_packed:
        return replace(config, pack_gqa=pack_gqa)
    # warpgroups and thread blocks without a row would only take part
    positions = ROWS_PER_WARPGROUP // group if pack_gqa else ROWS_PER_WARPGROUP
    needed = max(1, ceil_div(seqlen_q, positions))
    num_warpgroups = min(config.num_warpgroups, needed)
    cluster_size = config.cluster_size if needed > num_warpgroups else 1
    return replace(config, pack_gqa=pack_gqa, num_warpgroups=num_warpgroups, cluster_size=cluster_size)


def backward_config(problem: AttentionProblem, arch: str = HOPPER) -> BackwardConfig:
    """The configuration that a backward of this problem runs with on Hopper."""
    is_growing = problem.mask.window_right is not None and problem.mask.window_left is None
    # who waits for a turn delays its thread block, and a queue makes up for it
    is_dynamic = is_growing or problem.is_packed or problem.deterministic
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > 128:
        config = BackwardConfig(by_gradient=True, dynamic_tiles=is_dynamic)
        return replace(config, descending_turns=has_descending_turns(problem, config.tile_m, config.tile_n))
    # the slopes of a softcap take the registers of the larger tile
    if widest > 64 or problem.softcap is not None:
        config = BackwardConfig(q_stages=3, dynamic_tiles=is_dynamic)
    else:
        config = BackwardConfig(tile_m=128, q_stages=3, dynamic_tiles=is_dynamic)
    if _has_short_sequences(problem, config, is_growing):
        return replace(config, private_dq=True, dynamic_tiles=False)
    return replace(config, descending_turns=has_descending_turns(problem, config.tile_m, config.tile_n))


NUM_SMS = 132
PRIVATE_BYTES = 20 * 2**20, 36 * 2**20  # full, causal
PRIVATE_SEQLEN = 512
PRIVATE_SEQLEN_IN_ORDER = 1024  # deterministic and causal


def _has_short_sequences(problem: AttentionProblem, config: BackwardConfig, is_growing: bool) -> bool:
    """Whether private_dq pays: H200, TFLOP/s with / without it, 16k tokens of hidden size 2048.

        head_dim 64, 512: 356 / 322, causal 237 / 198 (accumulators of all thread blocks together: 17 MB)
        head_dim 64, 1024: 336 / 393, causal 288 / 291 (35 MB)
        head_dim 128, 512: 317 / 353, causal 245 / 225 (35 MB)

    The sums must stay in L2; under a causal mask half as much is added to them. Heads must fill the waves of thread
    blocks. A thread block by itself adds in order, which takes others turns: deterministic and causal, 1024, head_dim
    64: 288 / 252, 128: 301 / 269.
    """
    heads = problem.num_heads_kv * problem.batch
    waves = ceil_div(heads, NUM_SMS)
    if problem.is_packed or problem.softcap is not None or heads < 0.9 * waves * NUM_SMS:
        return False
    if problem.deterministic and is_growing:
        return max(problem.seqlen_q, problem.seqlen_k) <= PRIVATE_SEQLEN_IN_ORDER
    num_bytes = 4 * problem.seqlen_q * problem.qhead_per_kvhead * config.head_dims(problem)[0] * min(heads, NUM_SMS)
    return problem.seqlen_k <= PRIVATE_SEQLEN and num_bytes <= PRIVATE_BYTES[is_growing]


# ---------------------------------------------------------------- by backend

FORWARD = {
    "sm90": Chooser(ForwardConfig, forward_config),
    "sm80": Chooser(ForwardConfigSm80, forward_config_sm80),
}
BACKWARD = {
    "sm90": Chooser(BackwardConfig, backward_config),
    "sm80": Chooser(BackwardConfigSm80, backward_config_sm80),
}


def chooser(direction: Literal["fwd", "bwd"], backend: str) -> Chooser:
    return (FORWARD if direction == "fwd" else BACKWARD)[backend]

"""Problem -> configuration of the Hopper kernels, each row of a table with the measurement behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from ...errors import UnsupportedError
from ...geometry.integers import ceil_div
from ...geometry.tile_scheduler import L2_BUDGET_BYTES, rings
from ...problem import AttentionProblem
from ..config import (
    HOPPER,
    ROWS_PER_WARPGROUP,
    BackwardConfigSm90,
    ForwardConfigSm90,
    head_dim_tile,
    value_columns,
)
from .sm80 import LAZY, NUM_SMS, has_descending_turns

LONG = 2**62


class Row(NamedTuple):
    """The configuration of the problems of one kind up to a length.

    Attributes:
        causal: whether the mask bounds the keys on the right; None: the row holds for both.
        up_to: the longest seqlen_k.
    """

    causal: bool | None
    up_to: int
    config: ForwardConfigSm90


# With normal data at 512, 2048 and 16384 keys, 2, 2 and 1.5 percent of a warp's steps rescale (with 0.8: 90, 52, 13);
# the error of Table 3 is the same (docs/kernels/fp8.md). This was simulated.
LAZY_FP8 = 2.8
_LAZY = ForwardConfigSm90(tile_n=64, rescale_threshold=LAZY)
_WIDE = replace(_LAZY, tile_n=128, q_stages=2)
_THREE = replace(_LAZY, tile_n=80, num_warpgroups=3, num_stages=3, q_stages=2)

# Hopper, by (head_dim, head_dim_v) tile; the first row that holds counts. The comment before a row has its TFLOP/s by
# sequence length (each twice the one before) and, in parentheses, those of the next best configurations, in bf16 on an
# H200 with 16k tokens of hidden size 2048. Rows without one were not measured.
FORWARD_SM90 = {
    (64, 64): (
        # 512 and 1024: 457 494 (the next row: 425 455)
        Row(False, 1024, replace(_LAZY, tile_n=64, num_warpgroups=4, q_stages=2)),
        # 2048 and 4096: 530 549 (with overlap_tiles: 529 549)
        Row(False, 4096, replace(_WIDE, num_warpgroups=3, overlap_tiles=False)),
        # 8192 and 16384: 578 587 (without overlap_tiles: 574 585)
        Row(False, LONG, replace(_WIDE, num_warpgroups=3)),
        # 512 to 8192: 304 409 471 518 547 (3 warpgroups: 257 327 443 505 542; 2 warpgroups: 290 361 444 476 498)
        Row(True, 8192, replace(_LAZY, tile_n=64, num_warpgroups=4, num_stages=4, q_stages=2, dynamic_tiles=True)),
        # 16384: 569 (the row above: 559)
        Row(True, LONG, replace(_WIDE, num_warpgroups=3, dynamic_tiles=True)),
    ),
    (96, 96): (
        # 2048 and 8192: 609 669 (tile_n 128, 2 warpgroups: 593 612)
        Row(False, LONG, replace(_LAZY, tile_n=112, num_warpgroups=3, q_stages=2)),
        # 2048: 512 (the next row: 502)
        Row(True, 2048, replace(_WIDE, dynamic_tiles=True)),
        # 8192: 598 (the row above: 570)
        Row(True, LONG, replace(_LAZY, tile_n=96, num_warpgroups=3, q_stages=2, dynamic_tiles=True)),
    ),
    (128, 128): (
        # 512 and 1024: 560 615 (without clusters: 554 587)
        Row(False, 1024, replace(_WIDE, cluster_size=2)),
        # 2048 and 4096: 676 690 (the next row: 664 685)
        Row(False, 4096, _WIDE),
        # 8192 and 16384: 720 731 (the row above: 703 705)
        Row(False, LONG, _THREE),
        # 512: 371 (with dynamic_tiles: 349)
        Row(True, 512, _WIDE),
        # 1024 to 4096: 473 556 618 (the next row: 400 529 601)
        Row(True, 4096, replace(_WIDE, dynamic_tiles=True)),
        # 8192 and 16384: 668 693 (the row above: 662 677)
        Row(True, LONG, replace(_THREE, dynamic_tiles=True)),
    ),
    (192, 128): (Row(None, LONG, replace(_LAZY, tile_n=128)),),
    (192, 192): (
        # 2048 and 8192: 679 727 (tile_n 112: 667 711; tile_n 96: 645 723)
        Row(False, LONG, replace(_LAZY, tile_n=80)),
        # 2048 and 8192: 585 673 (tile_n 80: 569 675)
        Row(True, LONG, replace(_LAZY, tile_n=112, dynamic_tiles=True)),
    ),
    (256, 256): (
        # 512 to 16384: 568 643 700 730 750 754 (without clusters, two buffers for V: 563 643 683 719 740 741)
        Row(False, LONG, replace(_LAZY, tile_n=64, v_stages=3, cluster_size=2)),
        # 512 to 16384: 367 492 577 645 688 712 (tile_n 80, two buffers for V: 343 479 568 641 682 702)
        Row(True, LONG, replace(_LAZY, tile_n=64, v_stages=3, dynamic_tiles=True)),
    ),
}

# FP8, by the wider head dim. TFLOP/s of V as `fp8.keys_last` lays it, from docs/lab/2026-11-27-fp8-codes.md (H200),
# with p_codes, where "exponentials" are FORWARD_FP8_EXACT. The tensor cores truncate the sums of P V, so P V of each
# step is added to O by the FMA pipe (docs/kernels/fp8.md). "With overlap" it runs during the softmax of the next step.
# At head_dim 256 GEMMs are issued in any order: the softmax of one warpgroup is shorter than those of the other.
FP8_OVERLAPPED = ForwardConfigSm90(tile_n=128, q_stages=2, rescale_threshold=LAZY_FP8, two_level_sums=True)
FP8_IN_SEQUENCE = replace(FP8_OVERLAPPED, overlap_gemm_softmax=False)
FP8_THREE = replace(FP8_IN_SEQUENCE, num_warpgroups=3)
FP8_FREE = replace(FP8_IN_SEQUENCE, pingpong=False)
FORWARD_FP8 = {
    64: (
        # 1024: 600 (the next row: 546; exponentials: 491)
        Row(False, 1024, FP8_OVERLAPPED),
        # 2048 to 16384: 655 688 737 735 (the row above: 653 682 675 696; exponentials: 564 591 622 632)
        Row(False, LONG, FP8_THREE),
        # 1024: 394 (192 keys: 381; the next row: 357; exponentials: 327)
        Row(True, 1024, replace(FP8_OVERLAPPED, dynamic_tiles=True)),
        # 2048 to 16384: 503 585 662 692 (the row above: 492 563 601 659; the row above, 192 keys: 502 586 639 670;
        # exponentials: 434 493 561 591)
        Row(True, LONG, replace(FP8_THREE, dynamic_tiles=True)),
    ),
    128: (
        # 1024 to 16384: 859 937 1011 998 1043 (without overlap, 3 warpgroups: 763 910 935 954 968; exponentials: 765
        # 883 908 920 941)
        Row(False, LONG, FP8_OVERLAPPED),
        # 1024 to 16384: 562 723 854 895 980 (without overlap, 3 warpgroups: 513 730 816 915 941; exponentials: 515 683
        # 766 859 909)
        Row(True, LONG, replace(FP8_OVERLAPPED, dynamic_tiles=True)),
    ),
    256: (
        # 1024 to 16384: 962 1049 1107 1083 1132 (with turns: 913 1036 1036 1057 1082; a turn for each GEMM: 965 1059
        # 1093 1130 1149; exponentials: 929 1006 1046 1068 1094)
        Row(False, LONG, FP8_FREE),
        # 1024 to 16384: 695 869 1003 1055 1099 (with turns: 687 854 961 1045 1018; a turn for each GEMM: 683 856 971
        # 1044 1091; exponentials: 677 827 955 1019 1046)
        Row(True, LONG, replace(FP8_FREE, dynamic_tiles=True)),
    ),
}
# Calls whose lse or gradients are used run without p_codes, by these rows. FORWARD_FP8 has their TFLOP/s as
# "exponentials".
FORWARD_FP8_EXACT = {
    64: (
        Row(False, 1024, replace(FP8_IN_SEQUENCE, tile_n=64, num_warpgroups=4)),
        Row(False, LONG, FP8_THREE),
        Row(True, 1024, replace(FP8_IN_SEQUENCE, tile_n=64, num_warpgroups=4, dynamic_tiles=True)),
        Row(True, LONG, replace(FP8_THREE, dynamic_tiles=True)),
    ),
    128: (
        Row(None, 1024, FP8_OVERLAPPED),
        Row(False, LONG, FP8_THREE),
        Row(True, LONG, replace(FP8_THREE, dynamic_tiles=True)),
    ),
    256: (
        Row(False, LONG, replace(FP8_IN_SEQUENCE, cluster_size=2)),
        Row(True, 1024, FP8_IN_SEQUENCE),
        Row(True, LONG, replace(FP8_IN_SEQUENCE, dynamic_tiles=True)),
    ),
}
# For head dims of V above 128: the keys of a tile, and the columns whose P V has registers besides O at a time. P V
# takes the registers of S; where it has fewer, ptxas drains every wgmma by itself.
FP8_COLUMNS = {192: (96, 96), 256: (128, 128)}


def row_of(rows: tuple[Row, ...], is_causal: bool, seqlen_k: int) -> Row | None:
    """The first row that holds for a mask and a length."""
    return next((row for row in rows if row.causal in (None, is_causal) and seqlen_k <= row.up_to), None)


def forward_config_sm90(problem: AttentionProblem, arch: str = HOPPER) -> ForwardConfigSm90:
    """The configuration that a call of this problem runs with on Hopper."""
    if problem.quantization is not None:
        return _fp8_config(problem)
    if problem.dtype == torch.float32:
        return _adapted(
            FLOAT32_SM90[max(head_dim_tile(d) for d in (problem.head_dim, value_columns(problem)))], problem
        )
    if _is_of_blocks(problem):
        return _of_blocks(problem)
    dims = head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v)
    is_causal = problem.mask.window_right is not None or problem.has_intervals
    # only the total length of packed sequences is known here: take their mean
    seqlen_k = problem.seqlen_k // max(1, problem.batch) if problem.is_packed else problem.seqlen_k
    row = row_of(FORWARD_SM90.get(dims, ()), is_causal, seqlen_k)
    if row is not None:
        return _modified(_adapted(row.config, problem), problem)
    # other pairs of head dims: the largest tile that leaves 60 registers besides the accumulators and fits
    for tile_n in (128, 112, 96, 80, 64, 48):
        config = ForwardConfigSm90(tile_n=tile_n, rescale_threshold=LAZY)
        if _fits(config, problem) and config.accumulator_registers(problem) <= 180:
            return _modified(_adapted(config, problem), problem)
    return _modified(_adapted(replace(config, tile_n=32), problem), problem)


def _is_of_blocks(problem: AttentionProblem) -> bool:
    """Whether a mask is one of blocks, and not of ranges of which blocks were made."""
    return problem.block_size is not None and not (problem.has_key_ranges or problem.has_query_ranges)


def _of_blocks(problem: AttentionProblem) -> ForwardConfigSm90:
    """The configuration of a block_mask without ranges, whose tiles are blocks of the mask or parts of them.

    A tile of several blocks visits what any of them sees. H200, random blocks, 16k tokens of hidden size 2048, a
    quarter kept, TFLOP/s of the kept ones (dense: 770 at head_dim 128, 625 at 64):

        blocks of 64: tiles of 64 queries, two thread blocks on a multiprocessor, 583 and 476; one 492 and 343; three
            460 where two have 427 (head_dim 64, another run; 537 and 543 at 96)
            tiles of 128 queries and 64 keys 260 and 140, the tiles of dense attention 139 and 88
        blocks of 128: tiles of 128 queries and 128 keys 729 and 522, and 64 keys 679 and 476
    """
    assert problem.block_size is not None
    q_block, kv_block = problem.block_size
    num_warpgroups, most_keys = (2 if size % 128 == 0 else 1 for size in (q_block, kv_block))
    base = _modified(_adapted(replace(_LAZY, tile_n=64, num_warpgroups=num_warpgroups), problem), problem)
    base = replace(base, dynamic_tiles=True)
    choices = [replace(base, tile_n=64 * most_keys, q_stages=2), base]
    if base.num_warpgroups == 1:
        two = replace(base, blocks_per_sm=2)
        choices = [replace(two, num_stages=4), replace(two, num_stages=3), two, base]
        if max(problem.head_dim, problem.head_dim_v) <= 64:
            choices.insert(0, replace(base, blocks_per_sm=3))
    return next(config for config in choices if _fits(config, problem))


# float32 in two float16 halves, by the wider head_dim tile. TFLOP/s at 2048 and 16384 keys (h200-float32.json): 188 and
# 216 at head_dim 64 (at 2048 in another run 199; with 112 keys 191, with one accumulator 212 and too large errors), 198
# and 239 at 128, 108 and 118 at 256. 96 and 192 were not measured.
FLOAT32_SM90 = {
    head_dim: replace(_LAZY, tile_n=tile_n, two_level_sums=True)
    for head_dim, tile_n in ((64, 128), (96, 64), (128, 64), (192, 48), (256, 32))
}


# Queries up to which the kernel transposes V itself, once for each tile of queries, by the wider head dim: without a
# mask and under a causal one. For more of them it costs less to lay V out once, by a kernel of its own (about 19 us).
# TFLOP/s of both ways at 1024, 2048 and 4096, transposed first (docs/lab/2026-11-27-fp8-codes.md): 64 594 562, 653
# 632, 677 681, causal 401 361, 506 471, 583 567; 128 781 790, 861 942, 887 1008, causal 555 490, 698 669, 797 793;
# 256 935 864, 1026 973, 1070 1034, causal 681 581, 868 798, 963 940. Longer ones were not measured. Three warpgroups
# of head_dim 64 lack the registers where warps transpose.
TRANSPOSED_QUERIES = {64: (2048, 4096), 128: (512, 4096), 256: (4096, 4096)}
# Without p_codes, 64 at 1024 and 2048 466 453, 532 542, causal at 4096 486 479; 128 at 4096 876 856, causal 739 719;
# 256 at 1024 and 2048 849 825, 936 957, causal at 4096 883 870.
TRANSPOSED_QUERIES_EXACT = {64: (1024, 4096), 128: (4096, 4096), 256: (1024, 4096)}
TRANSPOSING_FP8 = {64: FP8_OVERLAPPED, 128: FP8_OVERLAPPED, 256: FP8_FREE}


def _fp8_config(problem: AttentionProblem, may_transpose: bool = True) -> ForwardConfigSm90:
    """FP8 on Hopper."""
    assert problem.quantization is not None
    is_causal = problem.mask.window_right is not None
    widest = max(problem.head_dim, problem.head_dim_v)
    width = 64 if widest <= 64 else 128 if widest <= 128 else 256
    columns = head_dim_tile(problem.head_dim_v)
    lengths = problem.seqlen_q, problem.seqlen_k
    seqlen_q, seqlen_k = (n // max(1, problem.batch) if problem.is_packed else n for n in lengths)
    exact_lse = problem.quantization.exact_lse
    most = (TRANSPOSED_QUERIES_EXACT if exact_lse else TRANSPOSED_QUERIES)[width][is_causal]
    transposes_v = may_transpose and not problem.quantization.v_keys_last and seqlen_q <= most
    # these take registers, which the rows below do not leave; not measured
    takes_registers = problem.softcap is not None or problem.mask.window_left is not None
    takes_registers = takes_registers or (widest > 128 and problem.has_seqused_k)
    if takes_registers:
        config = replace(FP8_IN_SEQUENCE, dynamic_tiles=is_causal)
    elif transposes_v and not exact_lse:
        config = replace(TRANSPOSING_FP8[width], dynamic_tiles=is_causal)
    else:
        row = row_of((FORWARD_FP8_EXACT if exact_lse else FORWARD_FP8)[width], is_causal, seqlen_k)
        assert row is not None
        config = row.config
        if transposes_v and config.cluster_size > 1:  # pairs share what they load, and none of what they transpose
            config = replace(config, cluster_size=1, dynamic_tiles=True)
    is_measured = widest <= 64 and not (takes_registers or problem.is_packed or problem.has_seqused_k)
    if columns > 128:
        tile_n, pv_columns = (64, 64) if takes_registers and columns > 192 else FP8_COLUMNS[columns]
        config = replace(config, tile_n=tile_n, pv_columns=pv_columns)
    elif not config.overlap_gemm_softmax and columns < config.tile_n and not is_measured:
        # enough registers for P V of its own
        config = replace(FP8_OVERLAPPED, dynamic_tiles=config.dynamic_tiles)
    config = _adapted(replace(config, transposes_v=transposes_v, p_codes=not exact_lse), problem)
    if transposes_v and not _fits(config, problem):
        return _fp8_config(problem, may_transpose=False)
    config.check(problem)
    return config


def _fits(config: ForwardConfigSm90, problem: AttentionProblem) -> bool:
    """Whether a kernel of this configuration computes a problem."""
    try:
        config.check(problem)
    except UnsupportedError:
        return False
    return True


def _modified(config: ForwardConfigSm90, problem: AttentionProblem) -> ForwardConfigSm90:
    """The configuration of an ordinary problem for one with modifiers."""
    if not problem.has_modifiers:
        return config
    # intervals differ from tile to tile: no fixed order balances them
    dynamic_tiles = config.dynamic_tiles or problem.has_intervals
    return replace(config, pack_gqa=False, cluster_size=1, dynamic_tiles=dynamic_tiles)


def _adapted(config: ForwardConfigSm90, problem: AttentionProblem) -> ForwardConfigSm90:
    """The configuration of a long dense problem for one that differs from it in its lengths or its groups of heads."""
    seqlen_q = problem.seqlen_q
    if problem.is_packed:  # no fixed order balances sequences of unequal lengths (not measured yet)
        config = replace(config, dynamic_tiles=True, cluster_size=1)
        seqlen_q //= max(1, problem.batch)
    # few rows: all heads of a group fit into one tile and read their K and V once (not measured yet)
    group = problem.qhead_per_kvhead
    pack_gqa = 1 < group <= ROWS_PER_WARPGROUP and seqlen_q * group <= config.tile_m
    if problem.is_packed:
        return replace(config, pack_gqa=pack_gqa)
    # warpgroups and thread blocks without a row would only take up room
    positions = ROWS_PER_WARPGROUP // group if pack_gqa else ROWS_PER_WARPGROUP
    needed = max(1, ceil_div(seqlen_q, positions))
    num_warpgroups = min(config.num_warpgroups, needed)
    cluster_size = config.cluster_size if needed > num_warpgroups else 1
    return replace(config, pack_gqa=pack_gqa, num_warpgroups=num_warpgroups, cluster_size=cluster_size)


def backward_config_sm90(problem: AttentionProblem, arch: str = HOPPER) -> BackwardConfigSm90:
    """The configuration that a backward of this problem runs with on Hopper."""
    is_growing = problem.mask.window_right is not None and problem.mask.window_left is None
    # waiting for a turn delays a thread block, and a queue makes up for it
    is_dynamic = True
    widest = max(problem.head_dim, problem.head_dim_v)
    in_background = _does_rows_in_background(problem)
    has_narrow_blocks = _is_of_blocks(problem) and (problem.block_size or (0, 0))[1] % 128 != 0
    if has_narrow_blocks and (config := _of_narrow_blocks(problem)):
        return config
    if widest > 128 or has_narrow_blocks:
        config = BackwardConfigSm90(by_gradient=True, dynamic_tiles=is_dynamic, background_rows=in_background)
        if _is_paired(problem) and not has_narrow_blocks:
            has_room = head_dim_tile(problem.head_dim) == 192 and not problem.deterministic
            config = replace(config, paired=True, background_rows=False, q_stages=3 if has_room else 2)
        config = replace(config, heads_together=_visits_heads_together(problem))
        return _with_turns(config, problem)
    # the slopes of a softcap, and most modifiers, take the registers of the larger tile
    if widest > 64 or problem.softcap is not None or _takes_registers_in_backward(problem):
        config = BackwardConfigSm90(q_stages=3, dynamic_tiles=is_dynamic, background_rows=in_background)
    else:
        config = BackwardConfigSm90(tile_m=128, q_stages=3, dynamic_tiles=is_dynamic, background_rows=in_background)
    config = replace(config, overlap_gradients=_overlaps_gradients(problem, config))
    if not problem.has_backward_lists and _has_short_sequences(problem, config, is_growing):
        return replace(config, private_dq=True, dynamic_tiles=False)
    config = replace(config, heads_together=_visits_heads_together(problem))
    return _with_turns(config, problem)


def _of_narrow_blocks(problem: AttentionProblem) -> BackwardConfigSm90 | None:
    """The configuration of a block_mask whose blocks have 64 keys, up to head_dim 128; None: by_gradient.

    H200, random blocks of 64, 16k tokens of hidden size 2048, 10, 25 and 50 percent kept, TFLOP/s of the kept ones:

        head_dim 64, a warpgroup in each of two thread blocks 374 411 403, by_queries 346 368 376, by_gradient 304 326
            337; tiles of 128 keys 176 (25 percent, another run)
        head_dim 128, by_queries 423 462 464, by_gradient 398 421 423; tiles of 128 keys 287 (likewise)

    At head_dim 128 a warpgroup of two thread blocks lacks registers. There by_queries spills 4 values with bits (1062
    us, by_gradient 1240: 8192 tokens, a quarter of the blocks), and 6 to 59 with dropout, a bias, or bits and other
    terms, where by_gradient spills none.
    """
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest <= 64:
        return BackwardConfigSm90(num_warpgroups=1, dynamic_tiles=True)
    has_terms = problem.softcap is not None or problem.has_alibi
    takes_registers = problem.dropout_p > 0 or problem.has_bias or (problem.has_block_bits and has_terms)
    if widest <= 128 and not (problem.deterministic or takes_registers):
        return BackwardConfigSm90(by_queries=True, q_stages=4, do_stages=4, dynamic_tiles=True)
    return None


def _with_turns(config: BackwardConfigSm90, problem: AttentionProblem) -> BackwardConfigSm90:
    """The configuration with the order of turns of deterministic gradients.

    Without rings and an ascending end (windows, packed sequences, groups) the order is that of the Ampere kernels.
    Turns of tiles that have lists ascend.
    """
    if not problem.deterministic or problem.has_backward_lists:
        return config
    if (lag := _ring_lag(config, problem)) > 0:
        return replace(config, ring_lag=lag, dynamic_tiles=False)
    if (size := _ascending_mib(config, problem)) > 0:
        return replace(config, descending_turns=True, ascending_mib=size)
    return replace(config, descending_turns=has_descending_turns(problem, config.tile_m, config.tile_n))


def _ring_lag(config: BackwardConfigSm90, problem: AttentionProblem) -> int:
    """Query blocks between the tiles of a ring, 0: no rings. H200, percent more time than without turns, 16k tokens.

        with 3 blocks, 2048 to 16384: head_dim 64 3, 2, -1, 2; 128 3, 1, 3, 5; 256 8, 9, 8, 6
        with 2 blocks: 64 3, 2, 0, -1; 128 6, 5, 5, 5; 256 13, 12, 10, 7
        1024, with 3, with 2, in ascending order: 64 11, 14, 6; 128 14, 15, 15; 256 8, 13, 13
        512, with 2, in ascending order: 128 12, 29; 256 8, 9
        groups of eight, 128, 4096, with 2: 21, in ascending order before there was a keeper of turns 12

    The heads of all rings must fit into L2 together: those of groups do not. With 8 query blocks and a lag of 3 a ring
    has 2 tiles (not measured at 128 and 256), and for blocks as large as tiles of keys another order is faster. Rings
    run in whole waves: they may take a tenth more of them than tiles that are drawn. They leave query rows to kernels
    before and after, whose launches weigh more where there are few waves (the figures are of 16).
    """
    in_rings = replace(config, ring_lag=1, dynamic_tiles=False)
    tiles, blocks = ceil_div(problem.seqlen_k, config.tile_n), ceil_div(problem.seqlen_q, config.tile_m)
    is_short = blocks < 16
    if not in_rings.permits_rings(problem) or blocks < tiles or (is_short and config.tile_m >= config.tile_n):
        return 0
    lag, heads = 2 if is_short else 3, problem.num_heads_kv * problem.batch
    num_ctas = min(NUM_SMS // config.tile_blocks, tiles * heads)
    ring, waves = rings(tiles, blocks, heads, num_ctas, lag)
    fits = min(heads, num_ctas // ring) * config.bytes_per_head(problem) <= 1.1 * L2_BUDGET_BYTES
    is_balanced = waves <= 1.1 * ceil_div(tiles * heads, num_ctas)
    pays_for_rows = waves >= 8 or not config.rows_in_background(problem)
    return lag if fits and is_balanced and pays_for_rows else 0


def _ascending_mib(config: BackwardConfigSm90, problem: AttentionProblem) -> int:
    """`ascending_mib` of a causal problem: H200, percent more time than without turns, 16k tokens.

        head_dim 64, 4096 to 16384: with 32 MiB 12, 8, 3, with 16 13, 10, 5, with 64 9 (4096), ascending 16 (4096)
        head_dim 128, 2048 to 16384: with 32 MiB 12, 6, 4, 7, with 16 6, 2, 7, 7
        head_dim 256, 512 to 16384: with 32 MiB 7, 9, 2, 3, 6, 8, with 16 from 2048 on 6, 7, 6, 8
        head_dim 64, 2048: with 32 MiB 25, ascending 13

    Blocks as large as tiles of keys have a lead of one step, which is not enough in short tiles. Without a wave of
    ascending tiles, or nearly so, nothing evens out the others: 49 percent with groups of eight at 4096, head_dim 128.
    """
    is_growing = problem.mask.window_right is not None and problem.mask.window_left is None
    has_lead = config.tile_m < config.tile_n or problem.seqlen_q >= 32 * config.tile_m
    if not is_growing or problem.is_packed or problem.has_intervals or not has_lead:
        return 0
    size = 32
    if problem.seqlen_q <= 4096 and not config.by_gradient:
        size = 64 if config.tile_m == 128 else 16
    ascending = replace(config, ascending_mib=size).ascending_heads(problem)
    tiles = ascending * ceil_div(problem.seqlen_k, config.tile_n)
    return size if tiles >= 0.9 * NUM_SMS // config.tile_blocks else 0


def _takes_registers_in_backward(problem: AttentionProblem) -> bool:
    """Whether tiles of 128 queries cost more than they save, at head_dim 64.

    One of these modifiers alone has them. H100, causal, 8192, time beyond that of a call without it, with 64 and with
    128 queries: ranges 20 and 7 %, positions 22 and 3 %, ALiBi 14 and 0 %, left padding -12 and -18 %. H200, 2048 and
    8192: dropout 44 and 55 with 64 queries, 36 and 40 with 128 (causal), 50 and 61, 34 and 40 (full). Ranges and
    positions spill about 30 values where a block is masked, and dropout 40 with grouped heads. Pairs of modifiers were
    not tried, nor ALiBi with grouped heads, whose slopes differ between steps.
    """
    is_grouped = problem.qhead_per_kvhead > 1
    single = problem.has_alibi, problem.dropout_p > 0
    few = *single, problem.has_seqstart_k, problem.has_key_ranges, problem.has_q_positions
    return problem.has_bias or problem.has_block_bits or (is_grouped and any(single)) or sum(few) > 1


def _is_paired(problem: AttentionProblem) -> bool:
    """Whether pairs of thread blocks share tiles, above head_dim 128: H200, speed with / without them, 16k tokens.

        head_dim 256, 512 to 16384: causal 0.99, 1.17, 1.22, 1.24, 1.30, 1.29; full 1.19, 1.20, 1.26, 1.30, 1.26, 1.27
            deterministic, 1024 and 4096: causal 1.25, 1.35; full 1.26, 1.29
            4096 or 8192: groups of eight 1.30, window 1.19, packed 1.37, softcap 1.16, seqused_k 1.28
        head_dim 192 and 128, 512 to 16384: causal 0.94, 1.09, 1.08, 1.07, 1.01, 1.05
            full 1.16, 1.13, 1.13, 1.06, 1.06, 1.08
            deterministic, 1024 and 4096: causal 0.99, 1.12; full 1.13, 1.17
            4096 or 8192: groups of eight 1.47, window 1.04, packed 1.09, softcap 1.09, seqused_k 1.03

    At head_dim 192 there is room for a third buffer of Q: with two, pairs had 0.87 to 1.08 times the speed of the
    kernel without pairs. (That has no use for it: 1.00 to 1.01.) With turns two are faster. A pair has 128 keys: with
    64 or fewer, one of its thread blocks would have none.
    """
    has_two_copies_of_p = problem.softcap is not None and problem.adds_terms
    if has_two_copies_of_p or problem.seqlen_k <= ROWS_PER_WARPGROUP:
        return False
    return head_dim_tile(problem.head_dim) in (192, 256)


def _visits_heads_together(problem: AttentionProblem) -> bool:
    """Whether all query heads of a group visit a block of queries together: H200, causal, speed with / without it.

        16k tokens, 2048 to 16384, head_dim 128: groups of eight 1.24, 1.16, 1.08, 1.09; of four 1.07, 1.01, 1.04, 1.05
            head_dim 64, groups of eight: 1.04, 1.05, 1.05, 1.03
        2048 and 8192, head_dim 256, groups of eight: 1.25, 1.08

    Tiles of a kv head that run at the same time then read the same blocks from L2 (docs/kernels/backward_sm90.md). If
    the blocks of a head follow each other, short tiles are several heads ahead of long ones. Other head dims were not
    measured, nor packed sequences and modifiers, whose tiles differ in other ways.
    """
    is_growing = problem.mask.window_right is not None and problem.mask.window_left is None
    is_free = not (problem.deterministic or problem.is_packed or problem.has_modifiers)
    return problem.qhead_per_kvhead > 1 and is_growing and is_free


def _overlaps_gradients(problem: AttentionProblem, config: BackwardConfigSm90) -> bool:
    """Whether dS and P are computed during GEMMs of the same warpgroup: H200, speed with it / without it.

        head_dim 128, 512 to 16384: causal 1.02, 1.04, 1.03, 1.04, 1.05, 1.03; full 1.00, 0.98, -, 0.97
        head_dim 64, 1024 to 16384: causal 1.02, 1.03, 1.02, 1.03, 1.02; full 1.04, 1.04, 1.02, 1.00, 1.01
        4096 or 8192, head_dim 128 and 64: windows 1.05 to 1.07 and 1.02, groups of eight 0.99 (causal), 1.15 (full) and
            0.98, 1.07; packed 1.00 (causal), 0.98 (full) and 1.09, 1.09; ALiBi 1.09 and 1.03; softcap 0.96,
            0.94 and 0.99; seqused_k 0.98 and 0.95
        deterministic, 4096: windows 1.00 and 0.99, groups of eight 0.94 (128, full)
        2048 and 8192 with dropout: head_dim 128 1.01, 1.02 (causal), 1.03, 1.04 (full); 64, with tiles of 64 queries,
            0.95, 0.95 and 0.94, 0.93
        head_dim 96, 2048 to 16384, with K in registers: full 1.08, 1.05, 1.07, 1.06
        8192 to 24576 with lists of blocks, head_dim 64 and 128: ranges 1.04 to 1.08 and 1.02 to 1.07; random blocks of
            128 1.03 and 0.96
        2048 to 16384 with heads_together, head_dim 128, causal: groups of eight 0.92, 0.91, 0.93, 0.95; of four 0.93,
            0.92, 0.92, 0.92

    ALiBi spills values at head_dim 64, where K takes 32 registers, or makes ptxas serialize GEMMs. So do groups of
    heads under a mask, or with lists of blocks, at 64 and 128.
    """
    if problem.softcap is not None:
        return False
    is_grouped, drops = problem.qhead_per_kvhead > 1, problem.dropout_p > 0
    has_lists = problem.has_backward_lists
    is_full = problem.mask.is_full and (not has_lists or _is_of_blocks(problem))
    if problem.deterministic and is_grouped:
        return False
    if config.tile_m == 128:
        is_full = is_full and not has_lists
        return not (problem.has_seqused_k or problem.has_alibi or drops) and (is_full or not is_grouped)
    widest = max(config.head_dims(problem))
    if widest == 96 and not is_grouped:
        return True
    return widest > 64 and (is_full == is_grouped or (drops and not is_grouped))


FULL_SEQLEN_IN_BACKGROUND = 1024


def _does_rows_in_background(problem: AttentionProblem) -> bool:
    """Whether the main kernel does what is to be done for query rows: H200, time with kernels before and after / in it.

        head_dim 64, 1024 to 8192: causal 0.99, 1.06, 1.05, 1.04; full 1.02, 0.98, 0.98, 0.99
        head_dim 128, 1024 to 8192: causal 1.05, 1.08, 1.03, 1.04; full 1.03, 1.00, 0.97, 1.00
        head_dim 256, 1024 to 4096: causal 0.98, 1.00, 0.99; full 1.03, 1.00, 1.01
        head_dim 64 and 128, 2048 and 8192: causal window of 1024 0.99 to 1.05; seqused_k 1.00 to 1.04

    It takes as much of the L1 cache during tiles as before them. Under a causal mask, where tiles differ, it fills what
    they leave; at head_dim 256 its smaller stages cost that again.
    """
    if problem.mask.is_full:
        return max(problem.seqlen_q, problem.seqlen_k) <= FULL_SEQLEN_IN_BACKGROUND
    return max(problem.head_dim, problem.head_dim_v) <= 128


PRIVATE_BYTES = 20 * 2**20, 36 * 2**20  # full, causal
PRIVATE_SEQLEN = 512
PRIVATE_SEQLEN_IN_ORDER = 1024  # deterministic and causal


def _has_short_sequences(problem: AttentionProblem, config: BackwardConfigSm90, is_growing: bool) -> bool:
    """Whether private_dq pays: H200, TFLOP/s with / without it, 16k tokens of hidden size 2048.

        head_dim 64, 512: 356 / 322, causal 237 / 198 (accumulators of all thread blocks together: 17 MB)
        head_dim 64, 1024: 336 / 393, causal 288 / 291 (35 MB)
        head_dim 128, 512: 317 / 353, causal 245 / 225 (35 MB)

    The sums must stay in L2; under a causal mask half as much is added to them. Heads must fill the waves of thread
    blocks. A thread block by itself adds in order, for which others have to take turns: deterministic and
    causal, 1024, head_dim 64: 288 / 252, 128: 301 / 269.
    """
    if problem.has_modifiers:
        return False
    heads = problem.num_heads_kv * problem.batch
    waves = ceil_div(heads, NUM_SMS)
    if problem.is_packed or problem.softcap is not None or heads < 0.9 * waves * NUM_SMS:
        return False
    if problem.deterministic and is_growing:
        return max(problem.seqlen_q, problem.seqlen_k) <= PRIVATE_SEQLEN_IN_ORDER
    num_bytes = 4 * problem.seqlen_q * problem.qhead_per_kvhead * config.head_dims(problem)[0] * min(heads, NUM_SMS)
    return problem.seqlen_k <= PRIVATE_SEQLEN and num_bytes <= PRIVATE_BYTES[is_growing]

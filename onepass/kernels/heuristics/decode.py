"""Problem -> configuration and number of splits of a split-KV forward, on the Ampere and on the Hopper kernels.

Guesses, with which docs/kernels/decode.md's figures were measured; alternatives were not.

A configuration depends on dtypes, head dims, the group and the number of queries alone, never on the lengths of keys or
the batch: what a sequence gets does not depend on what else is in the call. Its steps divide `splits.SPLIT_UNIT`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...geometry.integers import ceil_div
from ...geometry.splits import (
    FEW_PARTIALS,
    LEAST_KEYS,
    LEAST_SHARE_SM90,
    MAX_SPLITS,
    OVERHEAD_STEPS_SM90,
    SPLIT_UNIT,
    SPLITS_PER_CTA,
    WORKSPACE_BYTES,
    choose_num_splits,
    workspace_bytes,
)
from ...problem import AttentionProblem
from ..config import (
    ROWS_PER_MMA,
    ROWS_PER_WARPGROUP,
    SMEM_BYTES,
    SMEM_BYTES_BY_ARCH,
    VECTOR_BYTES,
    ForwardConfigSm80,
    ForwardConfigSm90,
    head_dim_tile,
)
from ..config.decode import DecodeConfigSm80
from .sm80 import FORWARD_FEW_TILES, FORWARD_FLOAT32, LAZY, first_that_fits

# Few rows: warps along the keys and buffers of each, by the bytes of a row of K or of V, whichever is wider. Two thread
# blocks of about 100 KB share Hopper's 227 KB where they fit, 4.8 TB/s * 1 us / 132 = 36 KB being needed under way;
# the later ones are for GPUs with less shared memory.
KEY_WARPS_AND_STAGES = {
    64: ((4, 8), (4, 6)),
    96: ((4, 6), (4, 5)),
    128: ((4, 6), (4, 4)),
    192: ((4, 4), (4, 3)),
    256: ((4, 3), (4, 2), (2, 4)),
    384: ((2, 4), (2, 3), (2, 2)),
    512: ((2, 3), (2, 2)),
    768: ((2, 3), (2, 2), (1, 3)),
    1024: ((2, 3), (2, 2), (1, 2)),
}

# More rows than that: warps along the rows.
DECODE = {
    **{head_dim: (config,) for head_dim, config in FORWARD_FEW_TILES.items()},
    192: (ForwardConfigSm80(tile_m=64, tile_n=32, rescale_threshold=LAZY),),
    256: (ForwardConfigSm80(tile_m=64, tile_n=32, q_in_registers=False, rescale_threshold=LAZY),),
}


def decode_config_sm80(problem: AttentionProblem, arch: str) -> ForwardConfigSm80:
    """The configuration of a call, if its tensors are aligned. Query heads of a kv head share a tile if they can."""
    row_bytes = (problem.head_dim | problem.head_dim_v) * problem.kv_itemsize
    vector_bytes = next(n for n in VECTOR_BYTES if row_bytes % n == 0)
    return first_that_fits([replace(one, vector_bytes=vector_bytes) for one in _candidates(problem)], problem, arch)


def _candidates(problem: AttentionProblem) -> Iterator[ForwardConfigSm80]:
    """Best first."""
    widest = max(head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v))
    group, is_float32 = problem.qhead_per_kvhead, problem.dtype.itemsize == 4
    along_rows = FORWARD_FLOAT32[widest] if is_float32 else DECODE[widest]
    packs = group <= ROWS_PER_MMA * along_rows[0].num_warps
    rows = max(1, problem.seqlen_q) * (group if packs else 1)
    if problem.is_packed:
        rows = PACKED_ROWS
    tile_m = ROWS_PER_MMA * ceil_div(rows, ROWS_PER_MMA)
    # registers hold twice 16 rows of O up to 128 columns, or once 16 rows and Q up to 192
    if tile_m == ROWS_PER_MMA or (tile_m == 2 * ROWS_PER_MMA and widest <= 128 and not is_float32):
        for key_warps, num_stages in KEY_WARPS_AND_STAGES[widest * problem.kv_itemsize]:
            yield DecodeConfigSm80(
                tile_m=tile_m,
                num_stages=num_stages,
                key_warps=key_warps,
                q_in_registers=not is_float32 and tile_m == ROWS_PER_MMA and widest <= 192,
                rescale_threshold=LAZY,
                pack_gqa=packs and group > 1,
            )
    for config in along_rows:
        tile_m = ROWS_PER_MMA * config.num_warps
        config = replace(config, tile_m=tile_m, pack_gqa=1 < group <= tile_m)
        yield config
        yield replace(config, tile_n=SPLIT_UNIT)  # rows of 96 e4m3, 64 of them loaded at once, next to wider ones


def num_splits_sm80(problem: AttentionProblem, config: ForwardConfigSm80, arch: str, num_sms: int) -> int:
    """Splits that give each multiprocessor the thread blocks that it has shared memory for, up to 16 warps."""
    tiles = num_tiles(problem, problem.num_heads_q // config.group(problem), config.positions(problem))
    warps = config.num_threads // 32
    # the system takes 1 KB of each thread block
    resident = min((SMEM_BYTES_BY_ARCH[arch] + 1024) // (config.smem_bytes(problem) + 1024), 16 // warps)
    slots = num_sms * max(1, resident)
    per_split = workspace_bytes(1, num_rows(problem), problem.head_dim_v)
    return choose_num_splits(tiles, problem.seqlen_k, slots, per_split, config.block_keys)


# Hopper, by the wider head_dim tile: keys of a step, and warpgroups where there are rows for so many. On an H200, 1024
# bfloat16 queries of 32 heads over 65536 keys of 8: head_dim 64 1032 us, with 2 warpgroups 1076; 128 1590, with 64 keys
# 1723, with 80 and 3 warpgroups 1712. 128 queries, packed (512 rows a kv head, in tiles of
# 192 that are partly empty): head_dim 64 155 us, with 2 warpgroups 145, and with one query head a tile 149
# (h200-decode-rows-variants.json). Over an e4m3 cache there are at most 2 warpgroups, and 2 buffers for K and for V;
# pingpong off and a third buffer at head_dim 64 are in docs/lab/2026-11-27-e4m3-caches.md.
DECODE_SM90 = {64: (128, 3), 96: (128, 2), 128: (128, 2), 192: (64, 2), 256: (64, 2)}
MAX_STAGES = 6
# Only the device knows how many packed queries a sequence has: they are taken for many, whatever the total, so that
# the bits of one sequence do not depend on the others.
PACKED_ROWS = 2**16
# With 1 instead a chunk of 2048 with 63 tokens takes 979 us for 816, with 3 at head_dim 64 621 for 568
# (h200-decode-packed-steps.json).
PACKED_WARPGROUPS = 2


def num_tiles(problem: AttentionProblem, heads: int, positions: int) -> int:
    """Tiles of a call; of packed sequences the fewest that there can be, if none is empty."""
    if problem.is_packed:
        return max(problem.batch, ceil_div(problem.seqlen_q, positions)) * heads
    return ceil_div(problem.seqlen_q, positions) * heads * problem.batch


def num_rows(problem: AttentionProblem) -> int:
    return (1 if problem.is_packed else problem.batch) * problem.seqlen_q * problem.num_heads_q


def has_few_rows(problem: AttentionProblem, max_seqlen_q: int | None = None) -> bool:
    """Whether `decode_config_sm80` has warps along the keys for rows this few, which leave only the memory to wait for.

    Of 16 bits. Without making a configuration, which torch.compile would have to trace.
    """
    if problem.is_packed and max_seqlen_q is None:
        return False
    group = problem.qhead_per_kvhead
    seqlen_q = problem.seqlen_q if max_seqlen_q is None else max_seqlen_q
    rows = seqlen_q * (group if group <= ROWS_PER_WARPGROUP else 1)
    # 64 packed drafts of 1 to 5 tokens, 20 rows: 531 us, in tiles of 32 rows 552 (h200-decode-packed-steps.json). Over
    # an e4m3 cache drafts of 5 take 527 us and in tiles of 32 rows 495 (docs/lab/2026-11-27-e4m3-caches.md).
    in_tiles_of_32 = not problem.is_packed or problem.has_e4m3_cache
    has_two = max(problem.head_dim, problem.head_dim_v) <= 128 and in_tiles_of_32
    return rows <= (2 if has_two else 1) * ROWS_PER_MMA


def _rows(problem: AttentionProblem, positions: int) -> int:
    """Queries of a head, in whole tiles."""
    return ceil_div(problem.seqlen_q, positions) * positions


def decode_config_sm90(problem: AttentionProblem, split_size: int | None = None) -> ForwardConfigSm90:
    """The configuration of a call on the Hopper kernel, in 16 bits."""
    group = problem.qhead_per_kvhead
    tile_n, most = DECODE_SM90[max(head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v))]
    if split_size is not None and split_size % tile_n:
        tile_n = SPLIT_UNIT
    if problem.softcap is not None or problem.has_e4m3_cache:
        most = min(most, 2)  # 3 leave it, or warps that convert the cache, too few registers
    # a tile of one head's queries alone would be partly empty
    is_short = problem.is_packed or problem.seqlen_q < most * ROWS_PER_WARPGROUP
    pack_gqa = 1 < group <= ROWS_PER_WARPGROUP and is_short
    positions = ROWS_PER_WARPGROUP // group if pack_gqa else ROWS_PER_WARPGROUP
    num_warpgroups = min(most, ceil_div(max(1, problem.seqlen_q), positions))
    if problem.is_packed:
        num_warpgroups = PACKED_WARPGROUPS
    elif pack_gqa and num_warpgroups == 3 and _rows(problem, 2 * positions) < _rows(problem, 3 * positions):
        num_warpgroups = 2
    config = ForwardConfigSm90(
        tile_n=tile_n,
        num_warpgroups=num_warpgroups,
        rescale_threshold=LAZY,
        # tiles of one head and split, which read the same K and V, follow each other
        longest_first=False,
        dynamic_tiles=problem.is_packed,
        pack_gqa=pack_gqa,
    )
    if problem.has_e4m3_cache:
        return config  # loads under way have buffers of their own
    # as many loads under way as there is room for
    for num_stages in range(MAX_STAGES, 2, -1):
        deeper = replace(config, num_stages=num_stages)
        if deeper.smem_bytes(problem) <= SMEM_BYTES:
            return deeper
    return config


def most_splits_sm90(problem: AttentionProblem, config: ForwardConfigSm90, num_sms: int) -> int:
    """The most splits of a call with packed queries, in which a sequence has as many splits as its length asks for.

    1 means that there are no splits and no merge.

    A merge writes and reads 8 bytes for each column of each row of out, of prompts, too, which are not split. A tile of
    a single token among them reads 4 bytes for each column and key it may have, where it is one of the last at some 70
    GB/s (131072 keys of 512 bytes in 0.95 ms): more than ten times as long, if there are no more than twice as many
    rows as such keys.
    """
    if num_rows(problem) > 2 * problem.seqlen_k:
        return 1
    heads = problem.num_heads_q // config.group(problem)
    per_split = workspace_bytes(1, num_rows(problem), problem.head_dim_v)
    enough = ceil_div(num_sms * SPLITS_PER_CTA, max(1, problem.batch * heads))
    return max(
        1, min(MAX_SPLITS, max(FEW_PARTIALS, enough), problem.seqlen_k // LEAST_KEYS, WORKSPACE_BYTES // per_split)
    )


def num_splits_sm90(problem: AttentionProblem, config: ForwardConfigSm90, num_sms: int) -> int:
    """A thread block of the persistent kernel has a multiprocessor for itself."""
    tiles = num_tiles(problem, problem.num_heads_q // config.group(problem), config.positions(problem))
    per_split = workspace_bytes(1, num_rows(problem), problem.head_dim_v)
    kernel_costs = OVERHEAD_STEPS_SM90, LEAST_SHARE_SM90
    return choose_num_splits(tiles, problem.seqlen_k, num_sms, per_split, config.tile_n, *kernel_costs)

"""Problem -> configuration of the Ampere kernels: tables by the larger head_dim tile, each row with its measurement.

Measured on an H200 alone: there bf16 (float32 where said) TFLOP/s at sequence lengths 512, 1024, 2048, 4096, 8192 and
16384 (16k tokens of hidden size 2048), from the runs in which rows were chosen
(benchmarks/results/h200-ampere-*-variants.json; the grid with the chosen ones is next to them). Other GPUs get the
same rows where their shared memory has room: the first that fits into 227, 163 or 99 KB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...errors import UnsupportedError
from ...geometry.integers import ceil_div
from ...problem import AttentionProblem
from ..config import (
    HOPPER,
    ROWS_PER_MMA,
    SCALAR_ADDS,
    SMEM_BYTES_BY_ARCH,
    VECTOR_BYTES,
    BackwardConfigSm80,
    Config,
    ForwardConfigSm80,
    head_dim_tile,
)

# The largest score of a row may grow by this much (in powers of two) before O is rescaled.
LAZY = 8.0
# Q in shared memory leaves registers for twice 16 rows a warp, and a fragment of K or V serves both
FORWARD = {
    # 299 331 347 344 351 362, causal 213 271 306 337 341 354; 64 x 64 and Q in registers at 512, 2048 and 8192: 244 286
    # 297, causal 198 284 299
    64: (ForwardConfigSm80(tile_m=128, tile_n=64, q_in_registers=False, rescale_threshold=LAZY),),
    # not measured
    96: (ForwardConfigSm80(tile_m=128, tile_n=32, q_in_registers=False, rescale_threshold=LAZY),),
    # 322 347 361 371 376 377, causal 235 286 324 341 360 376; 64 x 64 and Q in registers 289 312 312 319 323 325,
    # causal 218 267 295 309 322 327
    128: (ForwardConfigSm80(tile_m=128, tile_n=32, q_in_registers=False, rescale_threshold=LAZY),),
    # not measured
    192: (ForwardConfigSm80(tile_m=64, tile_n=32, rescale_threshold=LAZY),),
    # 279 295 317 324 324 323, causal 214 264 300 318 327 (16384 is missing); tile_n 32 266 285 291 301 306 303,
    # causal 214 257 285 300 308
    256: (
        ForwardConfigSm80(tile_m=64, tile_n=48, num_stages=1, q_in_registers=False, rescale_threshold=LAZY),
        ForwardConfigSm80(tile_m=64, tile_n=32, num_stages=1, q_in_registers=False, rescale_threshold=LAZY),
    ),
}

# Fewer rows a thread block, where the others would leave multiprocessors without one (not measured).
FORWARD_FEW_TILES = dict.fromkeys((64, 96, 128), ForwardConfigSm80(tile_m=64, tile_n=64, rescale_threshold=LAZY))
NUM_SMS = 132

_FOUR_WARPS = ForwardConfigSm80(tile_m=64, tile_n=32, q_in_registers=False, rescale_threshold=LAZY)
_EIGHT_WARPS = replace(_FOUR_WARPS, tile_m=128, num_warps=8)
# float32; at 2048: head_dim 64 67 (4 warps with 16 rows each 61), 128 59 (4 warps 58), 256 57 (64 x 16: 47)
FORWARD_FLOAT32 = {
    64: (replace(_FOUR_WARPS, tile_m=128),),
    96: (_EIGHT_WARPS, _FOUR_WARPS),
    128: (_EIGHT_WARPS, _FOUR_WARPS),
    192: (_EIGHT_WARPS, replace(_EIGHT_WARPS, num_stages=1), replace(_FOUR_WARPS, tile_n=16)),
    256: (
        replace(_EIGHT_WARPS, num_stages=1),
        replace(_FOUR_WARPS, tile_n=16),
        replace(_FOUR_WARPS, tile_n=16, num_stages=1),
    ),
}


def _copies(problem: AttentionProblem) -> int:
    """Bytes of the widest copy that divides the rows of a problem's tensors."""
    row_bytes = (problem.head_dim | problem.head_dim_v) * problem.dtype.itemsize
    return next(n for n in VECTOR_BYTES if row_bytes % n == 0)


def first_that_fits(candidates: Sequence[Config], problem: AttentionProblem, arch: str) -> Config:
    """Raises: UnsupportedError, the last one's, if none does."""
    for config in candidates[:-1]:
        try:
            config.check(problem, arch)
        except UnsupportedError:
            continue
        return config
    candidates[-1].check(problem, arch)
    return candidates[-1]


def forward_config_sm80(problem: AttentionProblem, arch: str) -> ForwardConfigSm80:
    """The configuration that a call of this problem runs with on the Ampere kernels, if its tensors are aligned."""
    widest = max(head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v))
    is_float32 = problem.dtype.itemsize == 4
    seqlen_q = problem.seqlen_q // max(1, problem.batch) if problem.is_packed else problem.seqlen_q
    group = problem.qhead_per_kvhead
    candidates = []
    for config in FORWARD_FLOAT32[widest] if is_float32 else FORWARD[widest]:
        num_tiles = ceil_div(seqlen_q, config.tile_m) * problem.num_heads_q * problem.batch
        if num_tiles < NUM_SMS and widest in FORWARD_FEW_TILES and not is_float32:
            config = FORWARD_FEW_TILES[widest]
        config = replace(config, vector_bytes=_copies(problem))
        # few rows: all heads of a group fit into one tile and read their K and V once (not measured yet)
        rows = ROWS_PER_MMA * config.num_warps
        if 1 < group <= rows and seqlen_q * group <= rows:
            config = replace(config, tile_m=rows, pack_gqa=True)
        candidates.append(config)
    return first_that_fits(candidates, problem, arch)


# At 512, 1024, 2048, 4096 and 16384 but for gaps; with 163 KB of shared memory or more.
BACKWARD = {
    # 224 254 271 280 283, causal 163 210 245 262 276; 64 x 128 and 8 warps 211 242 259 269 277, causal 145 192 228 248
    # 268
    64: BackwardConfigSm80(tile_m=64, tile_n=64, num_warps=4, s_key_warps=4, dkv_key_warps=4, dq_query_warps=2),
    # not measured
    96: BackwardConfigSm80(tile_m=64, tile_n=128),
    # 219 249 272, causal 240 at 2048; 64 x 64 and 4 warps 226 255 277 (265 in another run), causal 233
    128: BackwardConfigSm80(tile_m=64, tile_n=128),
    # not measured
    192: BackwardConfigSm80(tile_m=64, tile_n=64, s_key_warps=4, dkv_key_warps=4, dq_query_warps=2),
    # at 2048 238, causal 221; 32 x 64 213, causal 200
    256: BackwardConfigSm80(tile_m=64, tile_n=64, s_key_warps=4, dkv_key_warps=4, dq_query_warps=4, dq_pieces=4),
}
# head_dim 128 on Hopper, where it was measured: at 8192 311, at 16384 316, causal 314; the row above 286 288 285.
# Warp tiles of 32 x 32 and 32 x 64 load less than tiles of 16 x 64 and 16 x 128. Faster in spite of 59 loads
# and stores of spilled registers (31 of sm_80) between the GEMMs.
BACKWARD_128_HOPPER = BackwardConfigSm80(tile_m=64, tile_n=128, s_key_warps=4, dkv_key_warps=4)
# In 99 KB, and for what does not fit into the rows above. Not measured.
BACKWARD_SMALL = {
    64: BackwardConfigSm80(tile_m=64, tile_n=64, num_warps=4, s_key_warps=4, dkv_key_warps=4, dq_query_warps=2),
    96: BackwardConfigSm80(tile_m=32, tile_n=64, num_warps=4, s_key_warps=4, dkv_key_warps=4, dq_query_warps=2),
    128: BackwardConfigSm80(tile_m=32, tile_n=64, s_key_warps=4, dkv_key_warps=4, dq_query_warps=2),
    192: BackwardConfigSm80(tile_m=32, tile_n=64, num_stages=1, s_key_warps=4, dkv_key_warps=4, dq_query_warps=2),
    256: BackwardConfigSm80(
        tile_m=32, tile_n=32, num_warps=4, num_stages=1, s_key_warps=2, dkv_key_warps=2, dq_query_warps=1, dq_pieces=4
    ),
}
# head_dim 256 in 163 KB
BACKWARD_MEDIUM = BackwardConfigSm80(tile_m=32, tile_n=64, s_key_warps=4, dkv_key_warps=4, dq_query_warps=2)


_SQUARE = BackwardConfigSm80(tile_m=32, tile_n=32, num_warps=4, s_key_warps=2, dkv_key_warps=2, dq_query_warps=2)
_NARROW = BackwardConfigSm80(
    tile_m=32, tile_n=16, num_warps=4, num_stages=1, s_key_warps=1, dkv_key_warps=1, dq_query_warps=1
)
_WIDE = BackwardConfigSm80(tile_m=32, tile_n=64, s_key_warps=4, dkv_key_warps=2, dq_query_warps=2)
# float32, by the wider of the head dims that kernels are compiled for; of each list the first that a problem and an
# architecture have room for. Not measured.
BACKWARD_FLOAT32 = {
    # two thread blocks on a multiprocessor with 163 KB
    64: (replace(_SQUARE, tile_n=64),),
    128: (replace(_WIDE, tile_m=64), _WIDE, replace(_SQUARE, num_stages=1)),
    192: (replace(_SQUARE, dq_pieces=3), replace(_NARROW, num_warps=2, dq_pieces=3)),
    256: (
        replace(_WIDE, num_stages=1, dq_pieces=2),
        replace(_SQUARE, num_stages=1, dq_pieces=2),
        replace(_NARROW, one_score_buffer=True),
    ),
}


def has_descending_turns(problem: AttentionProblem, tile_m: int, tile_n: int) -> bool:
    """Whether deterministic sums of dQ begin with the last tile of keys (see `block_range.following_query_block`).

    Under a causal mask the longest tile of a head then comes last, and the GPU waits for those of the last heads: the
    share of all time that its multiprocessors are of all tiles, in the model of tests/geometry/test_backward_turns.py.
    And a tile is only tile_n / tile_m steps behind the one before it, which at one step and 2048 cost more on Hopper
    than the other order: 36 percent more time instead of 26 (head_dim 64); at 4096 19 instead of 27, and with two steps
    (head_dim 128) 11 instead of 20.
    """
    if not problem.deterministic or problem.mask.window_right is None or problem.has_backward_lists:
        return False
    batch = max(1, problem.batch)
    # only the total length of packed sequences is known here: take their mean
    seqlen_k = problem.seqlen_k // batch if problem.is_packed else problem.seqlen_k
    if tile_m >= tile_n and seqlen_k < 4096:
        return False
    num_tiles = ceil_div(seqlen_k, tile_n) * problem.num_heads_kv * batch
    return problem.mask.window_left is not None or 0.1 * num_tiles >= NUM_SMS


def backward_config_sm80(problem: AttentionProblem, arch: str) -> BackwardConfigSm80:
    """The configuration that a backward of this problem runs with on the Ampere kernels, if its tensors are aligned."""
    if problem.dtype.itemsize == 4:
        return _backward_float32(problem, arch)
    smem_bytes = SMEM_BYTES_BY_ARCH[arch]
    is_small = smem_bytes < SMEM_BYTES_BY_ARCH["sm_80"]
    widest = max(head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v))
    config = (BACKWARD_SMALL if is_small else BACKWARD)[widest]
    if widest == 128 and not is_small:
        # the slopes of a softcap, or more bounds, take the registers in which P and dS would stay
        if problem.softcap is not None:
            config = replace(config, tile_n=64, s_key_warps=4, dkv_key_warps=4, dq_query_warps=2)
        elif problem.is_packed or problem.has_seqused_k:
            config = replace(config, s_key_warps=4, dkv_key_warps=4, dq_query_warps=2)
        elif arch == HOPPER:
            config = BACKWARD_128_HOPPER
    if widest == 256 and not is_small and (problem.softcap is not None or config.smem_bytes(problem) > smem_bytes):
        config = BACKWARD_MEDIUM
    # pieces have 64 columns each, where head_dim is less than head_dim_v
    pieces = min(config.dq_pieces, max(1, config.head_dims(problem)[0] // 64))
    config = replace(
        config,
        vector_adds=arch not in SCALAR_ADDS,
        dq_pieces=1 if pieces == 3 else pieces,
        vector_bytes=_copies(problem),
        descending_turns=has_descending_turns(problem, config.tile_m, config.tile_n),
    )
    config.check(problem, arch)
    return config


def _backward_float32(problem: AttentionProblem, arch: str) -> BackwardConfigSm80:
    candidates = []
    for config in BACKWARD_FLOAT32[max(BackwardConfigSm80().head_dims(problem))]:
        if config.head_dims(problem)[0] < max(config.head_dims(problem)):
            config = replace(config, dq_pieces=1)
        config = replace(config, descending_turns=has_descending_turns(problem, config.tile_m, config.tile_n))
        candidates.append(replace(config, vector_adds=arch not in SCALAR_ADDS, vector_bytes=_copies(problem)))
    return first_that_fits(candidates, problem, arch)

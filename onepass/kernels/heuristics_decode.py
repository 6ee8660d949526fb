"""Problem -> configuration of a split-KV forward on the Ampere kernels. Nothing here is measured yet.

A configuration depends on dtypes, head dims and the group alone, never on lengths or the batch: what a sequence gets
does not depend on what else is in the call. Every tile_n divides `splits.SPLIT_UNIT`.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import UnsupportedError
from ..problem import AttentionProblem
from .blocks.integers import ceil_div
from .blocks.splits import choose_num_splits, workspace_bytes
from .config import ROWS_PER_MMA, SMEM_BYTES_BY_ARCH, VECTOR_BYTES, ForwardConfigSm80, head_dim_tile
from .heuristics_sm80 import FORWARD_FLOAT32, LAZY

# Few query rows: the smallest tile that keeps four warps busy loading.
DECODE = {
    64: (ForwardConfigSm80(tile_m=64, tile_n=64, rescale_threshold=LAZY),),
    96: (ForwardConfigSm80(tile_m=64, tile_n=64, rescale_threshold=LAZY),),
    128: (ForwardConfigSm80(tile_m=64, tile_n=64, rescale_threshold=LAZY),),
    192: (ForwardConfigSm80(tile_m=64, tile_n=32, rescale_threshold=LAZY),),
    256: (ForwardConfigSm80(tile_m=64, tile_n=32, q_in_registers=False, rescale_threshold=LAZY),),
}


def decode_config_sm80(problem: AttentionProblem, arch: str) -> ForwardConfigSm80:
    """The configuration of a call, if its tensors are aligned. Query heads of a kv head share a tile if they can."""
    widest = max(head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v))
    row_bytes = (problem.head_dim | problem.head_dim_v) * problem.dtype.itemsize
    vector_bytes = next(n for n in VECTOR_BYTES if row_bytes % n == 0)
    group = problem.qhead_per_kvhead
    refusal: UnsupportedError | None = None
    for config in FORWARD_FLOAT32[widest] if problem.dtype.itemsize == 4 else DECODE[widest]:
        rows = ROWS_PER_MMA * config.num_warps
        config = replace(config, tile_m=rows, pack_gqa=1 < group <= rows, vector_bytes=vector_bytes)
        try:
            config.check(problem, arch)
        except UnsupportedError as error:
            refusal = error
        else:
            return config
    assert refusal is not None
    raise refusal


def num_splits_sm80(problem: AttentionProblem, config: ForwardConfigSm80, arch: str, num_sms: int) -> int:
    """Splits that give each multiprocessor the thread blocks that it has shared memory for, up to 16 warps."""
    heads = problem.num_heads_q // config.group(problem)
    num_tiles = ceil_div(problem.seqlen_q, config.positions(problem)) * heads * problem.batch
    resident = min(SMEM_BYTES_BY_ARCH[arch] // config.smem_bytes(problem), 16 // config.num_warps)
    rows = problem.batch * problem.seqlen_q * problem.num_heads_q
    slots = num_sms * max(1, resident)
    return choose_num_splits(num_tiles, problem.seqlen_k, slots, workspace_bytes(1, rows, problem.head_dim_v))

"""The sizes of the tiles of the backend `tiled`, and the precision of its GEMMs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..problem import AttentionProblem

EXACT = ("ieee", "none")  # settings of torch under which float32 operands are not rounded


@dataclass(frozen=True)
class TileSizes:
    """The sizes of tiles, which change speed and summation order, never the result.

    Attributes:
        tile_m: queries in a tile; with qhead_per_kvhead query heads stacked, its matrix has that many times more rows.
        tile_n: keys in a tile.
        heads: kv heads that go through one batched GEMM.
    """

    tile_m: int
    tile_n: int
    heads: int

    @classmethod
    def choose(cls, problem: AttentionProblem, seqlen_k: int) -> TileSizes:
        """Tiles of 256 rows and 256 keys, eight heads at a time; of 512 keys, four heads, where rows see 4096 or more.

        Where sequences fill no tile, sixteen heads go together: with dropout at seqlen 128 that takes 0.86 of the time
        of eight forward and 0.93 backward, and 0.99 and 0.96 of that of 32 (AMD EPYC, 1 MiB of second-level cache).

        Measured on 2 cores with 2 MiB of second-level cache each, float32, 8 heads, head_dim 64 and 128, causal and
        not, as geometric means of speed relative to torch's SDPA (forward / backward). Seqlen 512 and 2048:
        256x256x8 0.90 / 0.91, 256x512x8 0.89 / 0.82, 128x256x8 0.84 / 0.88, 256x256x4 0.88 / 0.90, 512x256x8
        0.87 / 0.86: larger tiles waste more on the causal diagonal, smaller ones and fewer heads more on calls.
        Seqlen 8192: 256x256x8 0.91 / 0.91, 256x512x4 0.93 / 0.93, 256x512x8 0.92 / 0.92.
        """
        left, right = problem.mask.window_left, problem.mask.window_right
        in_sight = seqlen_k if left is None or right is None else min(seqlen_k, left + right + 1)
        tile_m = max(16, 256 // problem.qhead_per_kvhead)
        if in_sight >= 4096:
            return cls(tile_m, 512, 4)
        fills_tile = problem.seqlen_q * problem.qhead_per_kvhead >= 256 or seqlen_k >= 256
        return cls(tile_m, 256, 8 if fills_tile else 16)


def work_dtype(problem: AttentionProblem) -> torch.dtype:
    """The dtype that tiles are computed in: float32 (float64 for float64), where torch multiplies float32 as it is.

    Where its settings allow products of TF32 or bfloat16 (`torch.set_float32_matmul_precision`,
    `torch.backends.fp32_precision` and those below it), it is float64, which no setting touches. Settings belong to all
    threads, so a call leaves them alone. Float32 out of products of TF32 would need operands in three terms, and sums
    that tensor cores do not round to the nearest; on data center GPUs float64 is as fast as float32 without TF32.
    """
    accum = problem.accum_dtype
    return accum if float32_products_are_exact(problem.device_type) else torch.float64


def float32_products_are_exact(device_type: str) -> bool:
    """Whether torch multiplies float32 matrices on this device without rounding their elements first.

    The settings that the products themselves use decide: `torch.get_float32_matmul_precision` raises where both the
    older and the newer functions have been used.
    """
    if device_type == "mps":  # has neither TF32 nor float64
        return True
    if device_type == "cuda":
        return torch.backends.cuda.matmul.fp32_precision in EXACT
    return torch.backends.mkldnn.matmul.fp32_precision in EXACT  # type: ignore[attr-defined]  # since torch 2.9

"""How large the tiles of the torch backend are, and in which precision its GEMMs run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..problem import AttentionProblem


@dataclass(frozen=True)
class TileSizes:
    """Speed and summation order, never the result.

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
        """Tiles of 256 rows and 256 keys, eight heads at a time; of 512 keys, four heads, from seqlen 4096 on.

        Measured on 2 cores with 2 MiB of second-level cache each, float32, 8 heads, head_dim 64 and 128, causal and
        not, as geometric means of speed relative to torch's SDPA (forward / backward). Seqlen 512 and 2048:
        256x256x8 0.90 / 0.91, 256x512x8 0.89 / 0.82, 128x256x8 0.84 / 0.88, 256x256x4 0.88 / 0.90, 512x256x8
        0.87 / 0.86: larger tiles waste more on the causal diagonal, smaller ones and fewer heads more on calls.
        Seqlen 8192: 256x256x8 0.91 / 0.91, 256x512x4 0.93 / 0.93, 256x512x8 0.92 / 0.92.
        """
        tile_m = max(16, 256 // problem.qhead_per_kvhead)
        return cls(tile_m, 512, 4) if seqlen_k >= 4096 else cls(tile_m, 256, 8)


@contextmanager
def matmul_precision(problem: AttentionProblem) -> Iterator[None]:
    """float32 GEMMs in true float32, whatever torch.set_float32_matmul_precision allows elsewhere."""
    previous = torch.get_float32_matmul_precision()
    if previous == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)

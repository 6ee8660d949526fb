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
    def choose(cls, problem: AttentionProblem, n: int, seqlen_q: int, seqlen_k: int) -> TileSizes:
        rows = 256
        tile_m = max(16, rows // problem.qhead_per_kvhead)
        return cls(tile_m, 512, 2)


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

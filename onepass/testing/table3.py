"""Table 3 of the FlashAttention-3 paper, arXiv:2407.08608, section 4.3: errors on inputs with outliers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onepass

from .. import reference

PAPER_SEQLEN = 8192
HEAD_DIM = 128
CPU_QUERIES = 2048  # rows of a full mask do not depend on one another: fewer of them are a sample
FP8_BAR, FP8_BASELINE_RATIO = 9.5e-3, 2.2  # at PAPER_SEQLEN


class RmsError(NamedTuple):
    """The root mean square error of out against float64 attention, over all seeds.

    Attributes:
        rmse: the error against attention of the inputs as they were drawn, in float32.
        rounded_rmse: the error against attention of the inputs after their rounding to the dtype, which the method
            itself adds. None for FP8, whose scales and rounding belong to the method.
        paper: the figure in the paper.
        limit: the limit of rmse (for 16 bits: of rounded_rmse); None if the row is there to compare with.
    """

    method: str
    rmse: float
    rounded_rmse: float | None
    paper: float | None
    limit: float | None

    @property
    def ok(self) -> bool:
        error = self.rmse if self.rounded_rmse is None else self.rounded_rmse
        return self.limit is None or error <= self.limit


# options of quantize_fp8, and the paper's figure
FP8_METHODS: dict[str, tuple[dict[str, Any], float | None]] = {
    "FP8 baseline: one scale a tensor": ({"granularity": "tensor", "rotate": False}, 2.4e-2),
    "FP8 onepass: block scales, rotation": ({}, 9.1e-3),
    "FP8 without block scales": ({"granularity": "tensor"}, 9.3e-3),
    "FP8 without rotation": ({"rotate": False}, 2.4e-2),
    "FP8 option: one scale a row": ({"granularity": "row"}, None),
    "FP8 option: means of K and V": ({"center_k": True, "center_v": True}, None),
    "FP8 option: both": ({"granularity": "row", "center_k": True, "center_v": True}, None),
}
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
BASELINE, ONEPASS = list(FP8_METHODS)[:2]
# the paper's figures for standard attention and for onepass
_PAPER_16 = {"float16": (3.2e-4, 1.9e-4), "bfloat16": (None, None)}


def with_outliers(seqlen: int, generator: torch.Generator) -> Tensor:
    """A (1, seqlen, 1, 128) float32 tensor of N(0, 1) + N(0, 100) Bernoulli(0.001)."""
    shape = 1, seqlen, 1, HEAD_DIM
    is_outlier = torch.rand(shape, generator=generator, dtype=torch.float32) < 0.001
    # N(0, 100) is given by its variance: the standard deviation is 10
    outlier = 10.0 * torch.randn(shape, generator=generator, dtype=torch.float32)
    return torch.randn(shape, generator=generator, dtype=torch.float32) + outlier * is_outlier


def _dense(dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense attention in this dtype, 512 rows at a time, so that the scores fit anywhere."""
    return torch.cat([reference.attention(rows, k, v, compute_dtype=dtype).out for rows in q.split(512, 1)], 1)


def num_queries(seqlen: int, device: str) -> int:
    """The number of queries that are computed."""
    return min(seqlen, CPU_QUERIES) if device == "cpu" else seqlen


def steps(seeds: int) -> int:
    """How often `table3` reports progress."""
    return seeds * (len(_DTYPES) + len(FP8_METHODS))


def table3(
    seqlen: int, device: str, seeds: int, progress: Callable[[], None] = lambda: None, backend: str | None = None
) -> list[RmsError]:
    """The rows of the table: standard and onepass attention in 16 bits, then FP8 with one thing at a time left out.

    Args:
        seqlen: the number of keys, 8192 in the paper. The number of queries is `num_queries`.
        seeds: inputs are drawn with the seeds 0, 1, ..., seeds - 1.
        progress: called after each of `steps(seeds)`.
        backend: the backend of the FP8 rows, where it takes them; None means the one that is chosen for them.
    """
    squares: dict[str, list[float]] = {}
    rounded_squares: dict[str, list[float]] = {}

    def add(method: str, out: Tensor, exact: Tensor, exact_of_rounded: Tensor | None = None) -> None:
        for sums, oracle in ((squares, exact), (rounded_squares, exact_of_rounded)):
            if oracle is not None:
                sums.setdefault(method, []).append(float((out.double() - oracle).square().mean()))

    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (with_outliers(seqlen, generator).to(device) for _ in range(3))
        q = q[:, : num_queries(seqlen, device)]
        exact = _dense(torch.float64, q, k, v)
        for name, dtype in _DTYPES.items():
            rounded = [x.to(dtype) for x in (q, k, v)]
            exact_of_rounded = _dense(torch.float64, *rounded)
            add(f"standard {name}", _dense(dtype, *rounded), exact, exact_of_rounded)
            add(f"onepass {name}", onepass.attention(*rounded), exact, exact_of_rounded)
            progress()
        for method, (options, _) in FP8_METHODS.items():
            quantized = onepass.quantize_fp8(*(x.half() for x in (q, k, v)), **options)
            takes = backend if onepass.supports(quantized, backend=backend).ok else None
            add(method, onepass.attention(quantized, backend=takes), exact)
            progress()

    def rms(sums: list[float]) -> float:
        return (sum(sums) / len(sums)) ** 0.5

    rows = []
    for name, figures in _PAPER_16.items():
        standard, ours = f"standard {name}", f"onepass {name}"
        standard_rmse = rms(rounded_squares[standard])
        for method, paper in zip((standard, ours), figures, strict=True):
            # 16-bit inputs with float32 intermediates must not be worse than 16-bit intermediates
            limit = None if method == standard else standard_rmse
            rows.append(RmsError(method, rms(squares[method]), rms(rounded_squares[method]), paper, limit))
    baseline = rms(squares[BASELINE])
    bar = min(FP8_BAR, baseline / FP8_BASELINE_RATIO) if seqlen == PAPER_SEQLEN else baseline
    for method, (_, paper) in FP8_METHODS.items():
        limit = bar if method == ONEPASS else None
        rows.append(RmsError(method, rms(squares[method]), None, paper, limit))
    return rows

"""`onepass verify`: errors against float64, beside those of plain PyTorch and what they may be."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import onepass

from .. import reference
from ..bench.cases import DTYPES
from ..testing import Call, Comparison
from .console import TABLE_STYLE, fail, make_console, resolve_device


class ErrorRow(NamedTuple):
    """The tensor of one call that came closest to its budget."""

    dtype: str
    option: str
    worst: Comparison
    ok: bool


class OutlierErrors(NamedTuple):
    """Root mean square errors of out against float64, on inputs with outliers."""

    dtype: str
    seqlen: int
    standard_rmse: float
    onepass_rmse: float

    @property
    def ok(self) -> bool:
        """16-bit inputs with float32 intermediates must not be worse than 16-bit intermediates."""
        return self.onepass_rmse <= self.standard_rmse


def verify(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    seqlen: Annotated[int, typer.Option(min=16, help="length for the outlier table; the paper uses 8192")] = 8192,
    quick: Annotated[bool, typer.Option("--quick", help="short lengths: seconds instead of a minute")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="also write the tables here")] = None,
) -> None:
    """Errors of onepass and of plain PyTorch against float64, in each dtype and option.

    Exits with 1 if any error is over its budget: for out twice, for gradients three times the error of plain
    PyTorch in the same dtype, plus what rounding alone may do; for lse a tolerance fixed in each dtype.
    """
    console = make_console()
    device = resolve_device(device)
    length, outlier_seqlen = (96, min(seqlen, 512)) if quick else (320, seqlen)
    options = _options(length)

    rows: list[ErrorRow] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("verify", total=len(DTYPES) * len(options) + 2)
        for dtype in DTYPES:
            for option, build in options.items():
                rows.append(_error_row(dtype, option, build(DTYPES[dtype], device)))
                progress.advance(task)
        outliers = []
        for dtype in ("float16", "bfloat16"):
            outliers.append(outlier_errors(dtype, outlier_seqlen, device))
            progress.advance(task)

    columns = ("dtype", "option", "tensor", "max error", "budget", "plain PyTorch", "")
    table = Table(*columns, title=f"Errors against float64, {device}", **TABLE_STYLE)
    for row in rows:
        c = row.worst
        verdict = "ok" if row.ok else "[bold red]OVER BUDGET[/]"
        errors = (f"{value:.2e}" for value in (c.error, c.budget, c.plain_error))
        table.add_row(row.dtype, row.option, c.name, *errors, verdict)
    console.print(table)
    console.print("Each line shows the tensor (out, lse, dq, dk, dv or dsinks) that came closest to its budget.\n")

    outlier_columns = ("dtype", "standard attention", "onepass", "ratio", "")
    table = Table(*outlier_columns, title=f"RMSE with outliers, {outlier_seqlen} keys", **TABLE_STYLE)
    for o in outliers:
        ratio = o.standard_rmse / o.onepass_rmse if o.onepass_rmse else float("inf")
        verdict = "ok" if o.ok else "[bold red]OVER BUDGET[/]"
        table.add_row(o.dtype, f"{o.standard_rmse:.2e}", f"{o.onepass_rmse:.2e}", f"{ratio:.2f}", verdict)
    console.print(table)
    console.print(
        "Entries N(0, 1) + N(0, 100) Bernoulli(0.001), head_dim 128, as in Table 3 of arXiv:2407.08608;"
        " standard attention keeps its intermediates in 16 bits."
    )
    if json_path is not None:
        _write_json(json_path, device, rows, outliers)
        console.print(f"wrote {json_path}")
    bad = sum(not row.ok for row in rows) + sum(not o.ok for o in outliers)
    if bad:
        fail(f"{bad} of {len(rows) + len(outliers)} rows are over their budget", code=1)


def _options(length: int) -> dict[str, Callable[[torch.dtype, str], Call]]:
    """Name -> maker of a call with that option. Lengths are no multiples of any tile."""
    m = length + 1

    def call(
        seqlen_q: int = m, seqlen_k: int = m, heads_kv: int = 2, head_dim_v: int = 64, **options: Any
    ) -> Callable[[torch.dtype, str], Call]:
        def build(dtype: torch.dtype, device: str) -> Call:
            generator = torch.Generator().manual_seed(0)

            def normal(*shape: int) -> Tensor:
                return torch.randn(shape, generator=generator).to(device, dtype)

            is_packed = "cu_seqlens_q" in options
            lead: tuple[int, ...] = () if is_packed else (2,)
            tensors = {
                "q": normal(*lead, seqlen_q, 4, 64),
                "k": normal(*lead, seqlen_k, heads_kv, 64),
                "v": normal(*lead, seqlen_k, heads_kv, head_dim_v),
            }
            placed = {n: o.to(device) if isinstance(o, Tensor) else o for n, o in options.items()}
            return Call(tensors, placed)

        return build

    def offsets(*ends: int) -> Tensor:
        return torch.tensor([0, *ends], dtype=torch.int32)

    return {
        "full": call(heads_kv=4),
        "causal": call(causal=True),
        "causal, more keys": call(seqlen_q=m // 2, causal=True),
        "window": call(window=(m // 4, m // 8)),
        "softcap": call(softcap=5.0),
        "sinks": call(sinks=torch.linspace(-1.0, 2.0, 4)),
        "scale": call(softmax_scale=0.3),
        "GQA 4:1": call(heads_kv=1),
        "head_dim_v 40": call(head_dim_v=40),
        "seqused_k": call(seqused_k=torch.tensor([m // 3, m], dtype=torch.int32)),
        "packed": call(cu_seqlens_q=offsets(m // 3, m), cu_seqlens_k=offsets(m // 2, m), causal=True),
        "all at once": call(causal=True, window=(m // 2, 0), softcap=20.0, sinks=torch.linspace(-1.0, 2.0, 4)),
    }


def _error_row(dtype: str, option: str, call: Call) -> ErrorRow:
    comparisons = call.compare()
    return ErrorRow(dtype, option, max(comparisons, key=lambda c: c.share), all(c.ok for c in comparisons))


def outlier_errors(dtype: str, seqlen: int, device: str) -> OutlierErrors:
    """The setting of Table 3 of the FlashAttention-3 paper, arXiv:2407.08608, section 4.3: one head, head_dim 128."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, seqlen, 1, 128)

    def with_outliers() -> Tensor:
        is_outlier = torch.rand(shape, generator=generator) < 0.001
        # N(0, 100) is given by its variance: the standard deviation is 10
        outlier = 10.0 * torch.randn(shape, generator=generator)
        return (torch.randn(shape, generator=generator) + outlier * is_outlier).to(device, DTYPES[dtype])

    q, k, v = (with_outliers() for _ in range(3))
    out = onepass.attention(q, k, v)
    squares = torch.zeros(2, dtype=torch.float64)
    # rows of a full mask do not depend on one another: 512 at a time, so that float64 scores fit anywhere
    for start in range(0, seqlen, 512):
        rows = slice(start, start + 512)
        exact = reference.attention(q[:, rows], k, v).out
        standard = reference.attention(q[:, rows], k, v, compute_dtype=DTYPES[dtype]).out
        for i, actual in enumerate((standard, out[:, rows])):
            squares[i] += (actual.double() - exact).square().sum().cpu()
    standard_rmse, onepass_rmse = (squares / out.numel()).sqrt().tolist()
    return OutlierErrors(dtype, seqlen, standard_rmse, onepass_rmse)


def _write_json(path: Path, device: str, rows: list[ErrorRow], outliers: list[OutlierErrors]) -> None:
    from ..bench.machine import describe
    from ..bench.run import write_json

    content = {
        "header": describe(device),
        "errors": [
            {
                "dtype": row.dtype,
                "option": row.option,
                "tensor": row.worst.name,
                # JSON has no inf: null is an error without a size (NaN or inf in the wrong place)
                "max_error": row.worst.error if math.isfinite(row.worst.error) else None,
                "budget": row.worst.budget,
                "plain_error": row.worst.plain_error,
                "ok": row.ok,
            }
            for row in rows
        ],
        "outliers": [
            {**o._asdict(), "onepass_rmse": o.onepass_rmse if math.isfinite(o.onepass_rmse) else None, "ok": o.ok}
            for o in outliers
        ],
    }
    write_json(path, content)

"""`onepass verify`: errors against float64, with the errors of plain PyTorch and their limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..testing import Call, Comparison, table3
from ..validation.tensors import SUPPORTED_DTYPES, short_name
from .console import INTERRUPTED, TABLE_STYLE, Steps, fail, make_console, require_output, resolve_device


class ErrorRow(NamedTuple):
    """The tensor of one call that came closest to its budget."""

    dtype: str
    option: str
    worst: Comparison
    ok: bool


def verify(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    seqlen: Annotated[int, typer.Option(min=16, help="keys of the outlier table; the paper uses 8192")] = 8192,
    quick: Annotated[bool, typer.Option("--quick", help="use short lengths: seconds instead of a minute")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="also write the tables to this file")] = None,
) -> None:
    """Compare the errors of onepass and of plain PyTorch against float64, in each dtype and with each option.

    Exits with 1 if any error is over its budget. The budget is two times (for gradients three times) the error of plain
    PyTorch in the same dtype, plus what rounding alone may do; for lse it is a tolerance that is fixed for each dtype.
    Each block of rows of each head must also have the right scale: within 0.4 % in bfloat16, 0.12 % in float16, 0.04 %
    in float32. After Ctrl-C, which exits with 130, the rows measured so far are shown and kept.
    """
    console = make_console()
    device = resolve_device(device)
    length, outlier_seqlen, seeds = (96, min(seqlen, 512), 1) if quick else (320, seqlen, 3)
    options = _options(length)
    require_output("--json", json_path)

    rows: list[ErrorRow] = []
    outliers: list[Any] = []
    total = len(SUPPORTED_DTYPES) * len(options) + table3.steps(seeds)
    is_interrupted = False
    with Steps(console, "verify", total) as steps:
        try:
            for dtype in SUPPORTED_DTYPES:
                for option, build in options.items():
                    rows.append(_error_row(short_name(dtype), option, build(dtype, device)))
                    steps.advance()
            outliers = list(table3.table3(outlier_seqlen, device, seeds, steps.advance))
        except KeyboardInterrupt:
            is_interrupted = True

    columns = ("dtype", "option", "tensor", "max error", "budget", "plain PyTorch", "scale off by", "")
    table = Table(*columns, title=f"Errors against float64, {device}", **TABLE_STYLE)
    for row in rows:
        c = row.worst
        verdict = "ok" if row.ok else "[bold red]OVER BUDGET[/]"
        errors = (f"{value:.2e}" for value in (c.error, c.budget, c.plain_error))
        table.add_row(row.dtype, row.option, c.name, *errors, f"{c.scale.error:+.1e}", verdict)
    console.print(table)
    console.print(
        "Each line shows the tensor (out, lse or a gradient) that came closest to its budget: by its largest "
        "error, or by the scale of a block of rows."
    )
    for row in rows:
        if not row.ok:
            console.print(f"{row.dtype}, {row.option}: {row.worst}", style="red")
    console.print()
    if outliers:
        _print_outliers(console, outliers, device, outlier_seqlen, seeds)
    if json_path is not None:
        _write_json(json_path, device, rows, outliers)
        console.print(f"wrote {json_path}")
    if is_interrupted:
        fail(f"interrupted after {len(rows)} of {len(SUPPORTED_DTYPES) * len(options)} rows", code=INTERRUPTED)
    bad = sum(not row.ok for row in rows) + sum(not o.ok for o in outliers)
    if bad:
        fail(f"{bad} of {len(rows) + len(outliers)} rows are over their budget", code=1)


def _print_outliers(console: Console, outliers: list[Any], device: str, outlier_seqlen: int, seeds: int) -> None:
    outlier_columns = ("method", "RMSE", "of rounded inputs", "paper", "limit", "")
    table = Table(*outlier_columns, title=f"RMSE with outliers, {outlier_seqlen} keys", **TABLE_STYLE)
    for o in outliers:
        verdict = "" if o.limit is None else "ok" if o.ok else "[bold red]OVER BUDGET[/]"
        figures = (o.rmse, o.rounded_rmse, o.paper, o.limit)
        table.add_row(o.method, *("" if value is None else f"{value:.2e}" for value in figures), verdict)
    console.print(table)
    queries = table3.num_queries(outlier_seqlen, device)
    shorter = "" if outlier_seqlen == table3.PAPER_SEQLEN else f" (there {table3.PAPER_SEQLEN}: its figures differ)"
    console.print(
        f"The setting is that of Table 3 of arXiv:2407.08608: entries N(0, 1) + N(0, 100) Bernoulli(0.001), head_dim "
        f"128, {outlier_seqlen} keys{shorter}, against float64; {queries} of the queries, {seeds} "
        f'seed{"s" if seeds > 1 else ""}. Standard attention keeps its intermediates in 16 bits. "Of rounded inputs" '
        "compares with float64 attention of the inputs after their rounding to 16 bits."
    )


def _options(length: int) -> dict[str, Callable[[torch.dtype, str], Call]]:
    """For each option a function that makes a call with it. No length is a multiple of a tile."""
    m = length + 1
    rows = torch.arange(m)

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
            on_device = {n: o.to(device) if isinstance(o, Tensor) else o for n, o in options.items()}
            return Call(tensors, on_device)

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
        "left padding": call(seqstart_k=torch.tensor([m // 3, 0], dtype=torch.int32), causal=True),
        "ranges": call(key_ranges=torch.stack([rows // 2, rows + 3], -1)[None, None].int()),
        "query ranges": call(query_ranges=torch.stack([rows // 2, rows + 3], -1)[None, None].int()),
        "positions": call(q_positions=rows.flip(0)[None].int(), causal=True),
        "ALiBi": call(alibi_slopes=torch.linspace(0.01, 0.3, 4)),
        "bias": call(bias=torch.linspace(-3.0, 3.0, 4 * m).view(1, 4, 1, m)),
        "dropout": call(dropout_p=0.1),
        "packed": call(cu_seqlens_q=offsets(m // 3, m), cu_seqlens_k=offsets(m // 2, m), causal=True),
        "all at once": call(causal=True, window=(m // 2, 0), softcap=20.0, sinks=torch.linspace(-1.0, 2.0, 4)),
    }


def _error_row(dtype: str, option: str, call: Call) -> ErrorRow:
    comparisons = call.compare()
    return ErrorRow(dtype, option, max(comparisons, key=lambda c: c.share), all(c.ok for c in comparisons))


def _write_json(path: Path, device: str, rows: list[ErrorRow], outliers: list[table3.RmsError]) -> None:
    from ..testing.machine import describe
    from ..testing.results import write_json

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
                "scale_error": row.worst.scale.error,
                "scale_budget": row.worst.scale.budget,
                "ok": row.ok,
            }
            for row in rows
        ],
        "outliers": [{**o._asdict(), "rmse": o.rmse if math.isfinite(o.rmse) else None, "ok": o.ok} for o in outliers],
    }
    write_json(path, content)

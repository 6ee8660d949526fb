"""`onepass ablate`: what each choice of a kernel is worth, after Table 2 of the FlashAttention-3 paper."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..bench.ablation import (
    FULL,
    KERNELS,
    PAPER_BATCH,
    PAPER_HEAD_DIM,
    PAPER_HEADS,
    PAPER_SEQLEN,
    Kernel,
    Report,
    kernels,
    refusal,
)
from ..bench.ablation import ablate as measure
from ..bench.cases import DTYPES, Case, Direction
from ..bench.rows import Options
from .console import INTERRUPTED, TABLE_STYLE, fail, make_console, require_output, require_plot, resolve_device

DIRECTIONS: dict[str, Direction] = {"forward": "fwd", "backward": "bwd"}


def ablate(
    arch: Annotated[str, typer.Option(help=f"architecture of the kernel: {', '.join(KERNELS)}")] = "sm90",
    direction: Annotated[str, typer.Option(help=f"pass of the kernel: {' or '.join(DIRECTIONS)}")] = "forward",
    head_dim: Annotated[int, typer.Option(min=1)] = PAPER_HEAD_DIM,
    head_dim_v: Annotated[int | None, typer.Option(min=1, help="default: head_dim")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="with a causal mask")] = False,
    seqlen: Annotated[int, typer.Option(min=1)] = PAPER_SEQLEN,
    batch: Annotated[int | None, typer.Option(min=1, help="default: the paper's 33792 tokens / seqlen")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="default: the paper's hidden size 2048 / head_dim")] = None,
    heads_kv: Annotated[int | None, typer.Option(min=1, help="default: heads")] = None,
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16")] = "float16",
    device: Annotated[str, typer.Option(help="auto, cuda or cuda:N")] = "auto",
    json_path: Annotated[Path | None, typer.Option("--json", help="results file, JSON")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="PNG file")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="default: as the budget allows")] = None,
    time_budget: Annotated[float, typer.Option(min=0.0, help="seconds of timing, all configurations together")] = 10.0,
) -> None:
    """Measure what each choice of a kernel is worth: its default configuration and others with one choice off.

    Without options the setting is that of Table 2 of the FlashAttention-3 paper: forward, fp16, not causal, batch 4,
    seqlen 8448, 16 heads of 128. Each configuration is checked against attention in PyTorch, then all are timed in
    turns. For a backward kernel the backward pass alone is timed.

    For sm80 the table shows the road to the default configuration instead, one step per line, and torch's SDPA with
    the same instructions.

    Exits with 1 if a configuration is wrong or does not run, 2 if this machine or kernel cannot take the case (with
    the reason), 130 after Ctrl-C (the rounds finished so far are kept).
    """
    console = make_console()
    if direction not in DIRECTIONS:
        fail(f"--direction: expected {' or '.join(DIRECTIONS)}, got {direction!r}")
    found = kernels(DIRECTIONS[direction])
    if arch not in found:
        fail(f"--arch: expected one of {', '.join(found)}, got {arch!r}")
    if dtype not in DTYPES:
        fail(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    heads = heads or max(1, PAPER_HEADS * PAPER_HEAD_DIM // head_dim)
    if heads % (heads_kv or heads):
        fail(f"--heads-kv: expected a divisor of {heads} heads, got {heads_kv}")
    batch = batch or max(1, PAPER_BATCH * PAPER_SEQLEN // seqlen)
    shape = batch, seqlen, seqlen, heads, heads_kv or heads, head_dim, head_dim_v or head_dim
    case = Case(*shape, dtype, causal, direction=DIRECTIONS[direction])
    kernel = found[arch]
    device = resolve_device(device)
    if reason := refusal(kernel, case, device):
        fail(f"the {arch} {direction} kernel cannot be measured here: {reason}")
    require_output("--json", json_path)
    require_plot("--plot", plot_path)

    report = _measure_with_progress(console, case, kernel, Options(device, (), rounds, time_budget), json_path)
    _print_report(console, report)
    if json_path is not None:
        console.print(f"wrote {json_path}", markup=False)
    if plot_path is not None:
        from ..bench.plot import plot_ablation

        for path in plot_ablation(report.to_dict(), plot_path):
            console.print(f"wrote {path}", markup=False)
    if report.status == "interrupted":
        fail(f"interrupted after {report.row.get('rounds', 0)} rounds", code=INTERRUPTED)
    if report.wrong:
        failed, tried = report.row["failed"], len(report.row["configurations"]) - len(report.row["skipped"])
        fail(f"{len(failed)} of {tried} configurations failed", code=1)


def _measure_with_progress(console: Console, case: Case, kernel: Kernel, options: Options, path: Path | None) -> Report:
    """Show a bar for the checks, then one for the rounds; where there is no terminal, print a line for each check."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("ablate", total=None)
        started = 0.0

        def on_check(label: str) -> None:
            progress.update(task, description=f"compiling and checking: {label}")
            if not console.is_terminal:
                console.print(f"compiling and checking: {label}", markup=False)

        def on_round(done: int) -> None:
            nonlocal started
            started = started or time.perf_counter()
            elapsed = time.perf_counter() - started
            total, completed = (options.rounds, done) if options.rounds else (options.time_budget_s, elapsed)
            progress.update(task, description=f"timing: round {done}", total=total, completed=completed)

        return measure(case, kernel, options, path, on_check, on_round)


def _print_report(console: Console, report: Report) -> None:
    header, row = report.header, report.row
    console.print(f"{header['device_name']}, torch {header['versions']['torch']}", markup=False)
    console.print(_table(row))
    full = ", ".join(f"{name}={value}" for name, value in row["configurations"][0]["config"].items())
    console.print(f"{FULL}: {full}", markup=False)
    absent: dict[str, list[str]] = {}
    for label, reason in row["absent"].items():
        absent.setdefault(reason, []).append(label)
    for reason, labels in absent.items():
        console.print(f"no row, {reason}: {'; '.join(labels)}", markup=False)
    for label, reason in row["failed"].items():
        console.print(f"FAILED {label}: {reason}", style="red", markup=False)


def _table(row: dict[str, Any]) -> Table:
    paper_tflops = {entry["label"]: entry["paper_tflops"] for entry in row["configurations"] if entry["paper_tflops"]}
    full = row["contenders"].get(FULL, {}).get("tflops")
    fastest = max((entry.get("tflops", 0.0) for entry in row["contenders"].values()), default=0.0)
    unit, scale = ("TFLOP/s", 1.0) if fastest >= 10 else ("GFLOP/s", 1e3)
    caption = f"{row.get('rounds', 0)} rounds; ratio: speed over the full configuration's, median of the rounds"
    table = Table(title=f"{row['backend']} {row['label']}", caption=caption, **TABLE_STYLE)
    table.add_column("configuration")
    headings = ["ms", "20-80 %", unit, "change", "ratio"]
    peers = {name: row["contenders"].get(name, {}).get("tflops", 0.0) for name in row.get("peers", ())}
    best_peer = max(peers.values(), default=0.0)
    for heading in headings + ["of best peer"] * bool(best_peer) + ["paper, H100", "ratio"] * bool(paper_tflops):
        table.add_column(heading, justify="right")
    peer_entries = [{"label": name, "changes": {}, "paper": None} for name, tflops in peers.items() if tflops]
    for entry in [*row["configurations"], *peer_entries]:
        label = entry["label"]
        result = row["contenders"].get(label, {})
        if "median_ms" in result:
            tflops = result["tflops"] * scale
            is_full = label == FULL
            cells = [
                f"{result['median_ms']:.3f}",
                f"{result['p20_ms']:.3f}-{result['p80_ms']:.3f}",
                f"{tflops:.1f}",
                "" if is_full or full is None else f"{tflops - full * scale:+.1f}",
                f"{result['relative_speed']['median']:.3f}" if "relative_speed" in result else "",
            ]
        elif label in row["failed"]:
            cells = ["[bold red]FAILED[/]", *[""] * 4]
        else:
            cells = ["refused" if label in row["skipped"] else "not timed", *[""] * 4]
        if best_peer:
            cells.append(f"{result['tflops'] / best_peer:.2f}" if "tflops" in result else "")
        if paper_tflops:
            paper = paper_tflops.get(label)
            cells += [f"{paper:.0f}", f"{paper / paper_tflops[FULL]:.3f}"] if paper else ["", ""]
        table.add_row(_name(entry, row["skipped"].get(label)), *cells)
    return table


def _name(entry: dict[str, Any], refused: str | None) -> str:
    """The label, and below it the other changes, the paper's name for it, and why it is refused."""
    also = list(entry["changes"].items())[1:]
    lines = [entry["label"]]
    if also:
        lines.append(f"  also {', '.join(f'{name}={value}' for name, value in also)}")
    if entry["paper"]:
        lines.append(f"  paper: {entry['paper']}")
    if refused:
        lines.append(f"  refused: {refused}")
    return "\n".join(lines)

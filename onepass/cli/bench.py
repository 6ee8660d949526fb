"""`onepass bench`: case sets, compared with peers, as a table, JSON and pictures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..bench.cases import CASE_SETS, DTYPES, Case, CaseSet, get_case_set, select
from ..bench.flops import flops
from ..bench.peers import PEERS
from ..bench.rows import Options
from ..bench.run import Report, run
from ..testing.machine import counted
from .console import INTERRUPTED, TABLE_STYLE, Steps, fail, make_console, require_output, require_plot, resolve_device

_CONTEXT_PARALLEL = "context-parallel"  # a suite of its own, whose processes torchrun starts
_DEFAULT_SETS = {"cpu": ("cpu", "cpu-bf16", "window", "memory"), "cuda": ("paper",)}


def bench(
    sets: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"case sets: {', '.join(CASE_SETS)}; default: cpu cpu-bf16 window memory, on a GPU paper; "
            f"under torchrun {_CONTEXT_PARALLEL}"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    peers: Annotated[str | None, typer.Option(help=f"comma-separated: {', '.join(PEERS)}; default: all")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="results file, JSON, written row by row")] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="PNG file; with several sets, one file for each")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="rounds of each case; default: as the budget allows")
    ] = None,
    time_budget: Annotated[float, typer.Option(min=0.0, help="seconds of timing for each case")] = 10.0,
    dtype: Annotated[str | None, typer.Option(help=f"run all cases in this dtype: {', '.join(DTYPES)}")] = None,
    only: Annotated[str | None, typer.Option(help='cases to keep, such as "direction=fwd,head_dim=64/128"')] = None,
) -> None:
    """Time onepass and its peers in turns; each result is checked before it is timed.

    Exits with 1 if a result of onepass is wrong or missing, 130 after Ctrl-C (the rows measured so far are kept).
    """
    console = make_console()
    device = resolve_device(device)
    if _CONTEXT_PARALLEL in (sets or ()):
        if sets != [_CONTEXT_PARALLEL] or peers not in (None, "none") or plot_path is not None or dtype is not None:
            fail(f"{_CONTEXT_PARALLEL}: expected no other set, --peers none or all of them, no --plot and no --dtype")
        require_output("--json", json_path)
        raise typer.Exit(_bench_context_parallel(device, json_path, rounds, only, peers is None))
    names = sets or list(_DEFAULT_SETS[device.partition(":")[0]])
    if device == "cpu":  # the caches of the other sets are too large for a CPU
        names = ["decode-cpu" if name in ("decode", "decode-rows") else name for name in names]
    peer_names = None if peers is None else [name.strip() for name in peers.split(",") if name.strip()]
    if unknown := sorted(set(peer_names or ()) - set(PEERS)):
        fail(f"--peers: expected names of {', '.join(PEERS)}, got {', '.join(unknown)}")
    if dtype is not None and dtype not in DTYPES:
        fail(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    try:
        case_sets = [select(get_case_set(name), only, dtype) for name in names]
    except ValueError as error:
        fail(str(error))
    options = Options(device, peer_names, rounds, time_budget)
    if device == "cpu" and "paper" in names and only is None:
        _confirm_on_cpu(next(case_set for case_set in case_sets if case_set.name == "paper"))

    require_output("--json", json_path)
    require_plot("--plot", plot_path)
    report = _run_with_progress(console, case_sets, options, json_path)
    _print_report(console, report, case_sets)
    if json_path is not None:
        console.print(f"wrote {json_path}")
    if plot_path is not None:
        from ..bench.plot import plot

        for path in plot(report.to_dict(), plot_path):
            console.print(f"wrote {path}")
    if report.status == "interrupted":
        fail(f"interrupted after {len(report.rows)} of {sum(len(s.cases) for s in case_sets)} cases", code=INTERRUPTED)
    if report.wrong:
        fail(f"onepass failed in {len(report.wrong)} of {len(report.rows)} cases", code=1)


def _confirm_on_cpu(paper: CaseSet) -> None:
    """Ask before the paper's cases run on a CPU; without a terminal, refuse."""
    work = sum(flops(case) for case in paper.cases)
    reason = f"paper: {len(paper.cases)} cases of {work / 1e12:.0f} TFLOP in all, made for a GPU"
    if not sys.stdin.isatty():
        fail(f"{reason}; expected the set cpu on a CPU, or --only with the cases to run")
    if not typer.confirm(f"{reason}. Run them on a CPU?"):
        raise typer.Exit(2)


def _bench_context_parallel(device: str, path: Path | None, rounds: int | None, only: str | None, peers: bool) -> int:
    """Run this rank of the suite; on a CPU its small cases. `only` has words of cases. Returns: the exit status."""
    from ..bench.clone import load

    try:
        suite = load("benchmarks.suites.context_parallel").SUITE
    except ImportError as error:
        fail(str(error))
    device_type = device.partition(":")[0]
    arguments = ["--device", device_type, "--peers", str(int(peers)), "--cases", only or ""]
    arguments += ["--smoke"] if device_type == "cpu" else []
    arguments += ["--rounds", str(rounds)] if rounds is not None else []
    arguments += ["--out", str(path)] if path is not None else []
    return suite.main(arguments)


def _run_with_progress(console: Console, case_sets: list[CaseSet], options: Options, path: Path | None) -> Report:
    """Show a bar on a terminal; elsewhere print a line for each case, and every 10 seconds the time that is left."""
    with Steps(console, "bench", sum(len(case_set.cases) for case_set in case_sets)) as steps:

        def on_start(case_set: CaseSet, case: Case) -> None:
            steps.show(f"{case_set.name}: {case.label}")

        def on_row(row: dict[str, Any]) -> None:
            if not console.is_terminal:
                console.print(f"{row['set']}: {row['label']}: {_in_short(row)}", markup=False)
            steps.advance()

        return run(case_sets, options, path, on_start, on_row)


def _in_short(row: dict[str, Any]) -> str:
    if row["measure"] == "memory":
        entries = (f"{name} {entry['extra_bytes'] / 2**20:.1f} MiB" for name, entry in row["contenders"].items())
    else:
        entries = (f"{name} {entry['median_ms']:.3f} ms" for name, entry in row["contenders"].items())
    failures = (f"{name} FAILED: {reason}" for name, reason in row["failed"].items())
    return ", ".join([*entries, *failures]) or "skipped"


def _print_report(console: Console, report: Report, case_sets: list[CaseSet]) -> None:
    header = report.header
    threads = "" if header["gpu"] else f", {counted(header['cpu']['torch_threads'], 'thread')}"
    console.print(f"{header['device_name']}{threads}, torch {header['versions']['torch']}", markup=False)
    absent: dict[str, list[str]] = {}
    for name, reason in header["peers"]["absent"].items():
        absent.setdefault(reason, []).append(name)
    for reason, peers in absent.items():
        console.print(f"absent: {', '.join(peers)} ({reason})", markup=False)
    summary = report.to_dict()["summary"]
    for case_set in case_sets:
        rows = [row for row in report.rows if row["set"] == case_set.name]
        if rows:
            table = {"time": _time_table, "memory": _memory_table, "decode": _decode_table}[case_set.measure]
            console.print(table(case_set, rows))
        for key, entry in summary.items():
            if key.startswith(f"{case_set.name} "):
                _print_summary(console, key, entry)
    for row in report.rows:
        for name, reason in row["failed"].items():
            console.print(f"FAILED {name}, {row['label']}: {reason}", style="red", markup=False)


def _names(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["contenders"]))


def _short_label(row: dict[str, Any]) -> str:
    """The label without the dtype, which stands in the title."""
    return row["label"].replace(f" {row['case']['dtype']}", "")


def _title(case_set: CaseSet, rows: list[dict[str, Any]]) -> str:
    dtypes = dict.fromkeys(row["case"]["dtype"] for row in rows)
    return f"{case_set.name}: {case_set.description}; {', '.join(dtypes)}"


def _time_table(case_set: CaseSet, rows: list[dict[str, Any]]) -> Table:
    others = [name for name in _names(rows) if name != "onepass"]
    fastest = max((e["tflops"] for row in rows for e in row["contenders"].values()), default=0.0)
    unit, scale = ("TFLOP/s", 1.0) if fastest >= 10 else ("GFLOP/s", 1e3)
    table = Table(title=_title(case_set, rows), caption="a ratio above 1x: onepass is faster", **TABLE_STYLE)
    table.add_column("case")
    for heading in ("onepass ms", "20-80 %", unit, "of GEMM", *(f"{name} ms, ratio" for name in others), "rounds"):
        table.add_column(heading, justify="right", overflow="fold")
    for row in rows:
        mine = row["contenders"].get("onepass")
        cells = ["-"] * 4
        if mine:
            cells = [
                f"{mine['median_ms']:.3f}",
                f"{mine['p20_ms']:.3f}-{mine['p80_ms']:.3f}",
                f"{mine['tflops'] * scale:.1f}",
                f"{100 * mine['gemm_share']:.0f} %",
            ]
        for name in others:
            entry = row["contenders"].get(name)
            ratio = row.get("speed_ratio", {}).get(name)
            ratio_text = f"{ratio['median']:.2f}x" if ratio else "-"
            cells.append(f"{entry['median_ms']:.3f} {ratio_text:>6}" if entry else "-")
        table.add_row(_short_label(row), *cells, str(row.get("rounds", "-")))
    return table


def _memory_table(case_set: CaseSet, rows: list[dict[str, Any]]) -> Table:
    names = _names(rows)
    table = Table(title=_title(case_set, rows), **TABLE_STYLE)
    table.add_column("case")
    for heading in (*(f"{name} MiB" for name in names), "score matrix MiB"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [
            f"{row['contenders'][name]['extra_bytes'] / 2**20:.1f}" if name in row["contenders"] else "-"
            for name in names
        ]
        table.add_row(_short_label(row), *cells, f"{row['score_matrix_bytes'] / 2**20:.0f}")
    return table


def _decode_table(case_set: CaseSet, rows: list[dict[str, Any]]) -> Table:
    names = _names(rows)
    caption = "TB/s of K, V, q, out and lse, and the share of a copy's; speed of onepass over the other"
    table = Table(title=_title(case_set, rows), caption=caption, **TABLE_STYLE)
    table.add_column("case")
    for heading in (*names, "copies"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = []
        for name in names:
            entry = row["contenders"].get(name, {})
            ratio = row.get("speed_ratio", {}).get(name)
            text = f" {ratio['median']:.2f}x" if ratio else ""
            bandwidth = f"{1e3 * entry['tb_per_s']:.0f} GB/s" if entry.get("tb_per_s", 1) < 1 else ""
            bandwidth = bandwidth or f"{entry.get('tb_per_s', 0):.2f} TB/s"
            cells.append(
                f"{1e3 * entry['median_ms']:.1f} us, {bandwidth}, {100 * entry['of_copy']:.0f} %{text}"
                if "median_ms" in entry
                else "-"
            )
        table.add_row(_short_label(row), *cells, row.get("copies", "-"))
    return table


def _print_summary(console: Console, key: str, entry: dict[str, Any]) -> None:
    for name, ratio in entry.get("speed_ratio", {}).items():
        console.print(
            f"{key}, speed of onepass over {name}: geometric mean {ratio['geomean']:.2f},"
            f" least {ratio['min']:.2f} ({ratio['min_case']}), {counted(ratio['cases'], 'case')}",
            markup=False,
        )
    for name, extra_bytes in entry.get("max_extra_bytes", {}).items():
        console.print(f"{key}, most extra memory of {name}: {extra_bytes / 2**20:.1f} MiB", markup=False)
    for what in ("failed", "skipped"):
        if entry[what]:
            console.print(
                f"{key}: onepass {what} in {entry[what]} of {entry['cases']} cases", style="red", markup=False
            )

"""`onepass tune`: the fastest configuration for a problem on this GPU, found by timing and kept for calls to come."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from ..bench.cases import DTYPES, get_case_set, select
from ..errors import UnsupportedError
from ..kernels.config import LaunchConfig
from ..testing.machine import describe
from ..testing.results import Report
from ..tuning import TuningResult, tasks_of
from ..tuning.result import Progress, Task, changes, summary
from .console import INTERRUPTED, TABLE_STYLE, Steps, fail, make_console, require_output, resolve_device

Shape = tuple[int, int, int, int]


def tune(
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    head_dim_v: Annotated[int | None, typer.Option(min=1, help="default: head_dim")] = None,
    seqlen: Annotated[int, typer.Option(min=1, help="length of the queries and, by default, of the keys")] = 4096,
    seqlen_k: Annotated[int | None, typer.Option(min=1, help="default: seqlen")] = None,
    batch: Annotated[int, typer.Option(min=1)] = 4,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    heads_kv: Annotated[int | None, typer.Option(min=1, help="default: heads")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="with a causal mask")] = False,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    backend: Annotated[str | None, typer.Option(help="sm90 or sm80; default: what the call would run on")] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cuda:N")] = "auto",
    backward: Annotated[bool, typer.Option("--backward", help="tune the backward pass instead of the forward")] = False,
    paper_grid: Annotated[
        bool, typer.Option("--paper-grid", help="tune the 36 cases of the FlashAttention-3 paper instead, in --dtype")
    ] = False,
    only: Annotated[
        str | None, typer.Option(help='cases of the paper\'s grid to keep: "head_dim=64/128,causal=true,seqlen=512"')
    ] = None,
    missing: Annotated[bool, typer.Option("--missing", help="leave out cases whose result is kept already")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="rounds of the final of each case")] = 25,
    candidates: Annotated[int, typer.Option(min=2, help="the most configurations that are tried for a case")] = 24,
    workers: Annotated[
        int | None, typer.Option(min=1, help="processes that compile at the same time; default: one per CPU")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="name each candidate before it runs; show tracebacks")
    ] = False,
    table: Annotated[
        Path | None, typer.Option(help="keep the results in this file, which no call reads, instead of the cache")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="results file, JSON, with everything that was timed")
    ] = None,
) -> None:
    """Time other configurations of a kernel, and keep the fastest for calls to come.

    Candidates are compiled in parallel, their results are compared with the results of the heuristics' choice, and they
    are timed in turns on random data. A candidate replaces the heuristics' choice only where it is faster by more than
    1 % and by more than the noise of the run. ONEPASS_TUNED=0 in the environment turns off what was kept; onepass cache
    clear --tuned removes it.

    Exits with 2 if this machine or kernel cannot take the case (with the reason), 1 if a candidate gave wrong results,
    130 after Ctrl-C (what was found is kept).
    """
    console = make_console()
    if dtype not in DTYPES:
        fail(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if heads % (heads_kv or heads):
        fail(f"--heads-kv: expected a divisor of {heads} heads, got {heads_kv}")
    if only is not None and not paper_grid:
        fail("--only: expected --paper-grid with it")
    if paper_grid:
        calls = _paper_calls(dtype, only)
    else:
        q = batch, seqlen, heads, head_dim
        k = batch, seqlen_k or seqlen, heads_kv or heads, head_dim
        calls = [_call(q, k, (*k[:3], head_dim_v or head_dim), dtype, causal)]
    if device != "auto" and not resolve_device(device).startswith("cuda"):
        fail(f"--device: expected a GPU to measure on, got {device!r}")
    with contextlib.ExitStack() as stack:
        if device != "auto":
            stack.enter_context(torch.cuda.device(device))
        _tune(console, calls, backend, backward, missing, (rounds, candidates, workers), verbose, table, json_path)


def _tune(
    console: Console,
    calls: list[dict[str, Any]],
    backend: str | None,
    backward: bool,
    missing: bool,
    limits: tuple[int, int, int | None],
    verbose: bool,
    table: Path | None,
    json_path: Path | None,
) -> None:
    """Tune calls on the current device, and show what was found. `limits`: rounds, candidates, workers."""
    try:
        tasks = tasks_of(calls, backend, gradients=backward)
    except (UnsupportedError, ValueError, TypeError) as error:
        fail(f"cannot be tuned here: {str(error).removeprefix('tune: ')}")
    tasks = [task for task in tasks if task.direction == ("bwd" if backward else "fwd")]
    if not tasks:
        fail("--backward: expected a case whose gradients come from kernels; in this case they do not")
    if missing:
        tasks = _not_kept(tasks, table)

    require_output("--table", table)
    require_output("--json", json_path)

    found: list[TuningResult] = []
    report = Report(describe("cuda") if json_path is not None else {}, json_path)
    with Steps(console, "tuning", len(tasks)) as steps:
        progress = _Shown(console, steps, found, report, verbose)
        try:
            with report.recording():
                _measure(tasks, *limits, table, progress)
        except (OSError, RuntimeError) as error:
            if verbose:
                raise
            fail(str(error), code=1)
    if found:
        console.print(_summary(found))
    kept = sum(result.kept for result in found)
    console.print(_conclusion(kept, found, table), markup=False)
    if json_path is not None:
        console.print(f"wrote {json_path}", markup=False)
    if report.status == "interrupted":
        fail(f"interrupted after {kept} of {len(tasks)}", code=INTERRUPTED)
    wrong = [c for result in found for c in result.candidates if c.is_wrong]
    if wrong:
        fail(f"candidates with wrong results, which were not timed: {len(wrong)}", code=1)


def _measure(
    tasks: list[Task], rounds: int, limit: int, workers: int | None, table: Path | None, progress: _Shown
) -> None:
    from ..tuning.tuner import Machine, tune_all

    device = torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.stream(torch.cuda.Stream(device)):  # the default stream cannot be captured
        machine = Machine.here(device)
        tune_all(tasks, machine, rounds=rounds, limit=limit, workers=workers, table=table, progress=progress)


def _call(q: Shape, k: Shape, v: Shape, dtype: str, causal: bool) -> dict[str, Any]:
    return {"q": q, "k": k, "v": v, "dtype": DTYPES[dtype], "causal": causal}


def _paper_calls(dtype: str, only: str | None) -> list[dict[str, Any]]:
    try:
        grid = select(get_case_set("paper"), ",".join(filter(None, ["direction=fwd", only])))
    except ValueError as error:
        fail(f"--{error}")
    return [
        _call(
            (case.batch, case.seqlen_q, case.heads_q, case.head_dim),
            (case.batch, case.seqlen_k, case.heads_kv, case.head_dim),
            (case.batch, case.seqlen_k, case.heads_kv, case.head_dim_v),
            dtype,
            case.causal,
        )
        for case in grid.cases
    ]


def _not_kept(tasks: list[Task], path: Path | None) -> list[Task]:
    """The tasks for which nothing is kept on this GPU with these kernels."""
    from ..kernels.compiler import compile
    from ..kernels.heuristics import tuned

    try:
        table = tuned.parse(path.read_bytes()) if path is not None else tuned.load(tuned.own_path())
    except (OSError, ValueError):
        return tasks
    entries = table.get(tuned.gpu_name() or "", {})
    kept = {key for key, entry in entries.items() if entry.environment == compile.environment()}
    return [task for task in tasks if tuned.key_of(*task) not in kept]


# ---------------------------------------------------------------- what is shown


class _Shown(Progress):
    """A bar of the tasks and one of the current work; each result is printed and added to the report."""

    def __init__(
        self,
        console: Console,
        steps: Steps,
        found: list[TuningResult],
        report: Report,
        is_verbose: bool,
    ) -> None:
        self.console, self.steps, self.results, self.report, self.is_verbose = console, steps, found, report, is_verbose
        self.bar = steps.bar
        self.current = self.bar.add_task("", total=None)

    def compiling(self, done: int, total: int) -> None:
        self.bar.update(self.current, description="compiling candidates", completed=done, total=total)
        if not self.console.is_terminal and (done == total or done % 20 == 0):
            self.console.print(f"compiled {done} of {total}", markup=False)

    def checking(self, task: Task, config: LaunchConfig) -> None:
        self.bar.update(self.current, description=f"checking {task.label}", completed=0, total=None)
        if self.is_verbose:
            self.console.print(f"{task.label}: {config.text}", markup=False)

    def timing(self, task: Task, done: int, total: int) -> None:
        self.bar.update(self.current, description=f"timing {task.label}", completed=done, total=total)

    def found(self, result: TuningResult) -> None:
        self.results.append(result)
        self.report.add(result.to_dict())  # the file is written after each result: it outlives this process
        self.console.print(_line(result), markup=False)
        self.steps.advance()
        for candidate in result.candidates:
            if candidate.refusal is not None:
                self.console.print(f"    not timed: {candidate.changes}: {candidate.refusal}", markup=False)


def _line(result: TuningResult) -> str:
    label = Task(result.direction, result.backend, result.problem).label
    timed = sum(candidate.ms is not None for candidate in result.candidates)
    if not result.kept:
        return f"{label}: interrupted, nothing kept"
    if not result.is_gain:
        return f"{label}: the heuristics' choice stays, of {timed}"
    gain = f"{100 * (result.speedup - 1):.1f} % faster"
    return f"{label}: {changes(result.heuristic, result.config)}: {gain} (noise {100 * result.noise:.1f} %), of {timed}"


def _summary(found: list[TuningResult]) -> Table:
    caption = "ms: medians; faster: median of the rounds of the final; noise: the same configuration twice"
    table = Table(title=f"Tuned on {found[0].gpu}", caption=caption, **TABLE_STYLE)
    for column in ("pass", "problem", "instead of the heuristics' choice"):
        table.add_column(column, overflow="fold")
    for column in ("heuristics ms", "tuned ms", "faster %", "noise %"):
        table.add_column(column, justify="right")
    for result in found:
        ms = {candidate.config: candidate.ms for candidate in result.candidates}
        table.add_row(
            f"{result.direction} {result.backend}",
            summary(result.problem),
            changes(result.heuristic, result.config) or ("-" if result.kept else "interrupted"),
            _ms(ms.get(result.heuristic)),
            _ms(ms.get(result.config)),
            f"{100 * (result.speedup - 1):.1f}" if result.is_gain else "",
            f"{100 * result.noise:.1f}",
        )
    return table


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _conclusion(kept: int, found: list[TuningResult], table: Path | None) -> str:
    from ..kernels.heuristics import tuned

    gains = [result.speedup for result in found if result.kept and result.is_gain]
    most = f", at most {100 * (max(gains) - 1):.1f} %" if gains else ""
    where = f"; kept in {table or tuned.own_path()}" if kept else ""
    return f"faster than the heuristics: {len(gains)} of {kept}{most}{where}"

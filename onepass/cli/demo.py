"""`onepass demo`: exact attention at work, on the device of this machine.

demo_layer.py   one attention layer of a Llama-3-8B shape, torch's SDPA and the naive form; with a window, too
demo_search.py  real input: sentences searched by meaning, every attention layer of the model run by onepass
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import onepass

from ..testing.results import write_json
from . import demo_layer, demo_search
from .console import INTERRUPTED, TABLE_STYLE, Steps, make_console, require_output, resolve_device
from .demo_layer import GIB, LayerReport, Row
from .demo_search import SearchReport


def demo(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    seqlen: Annotated[
        int | None, typer.Option(min=1, help="tokens of the layer; default: chosen by a short probe")
    ] = None,
    skip_search: Annotated[bool, typer.Option("--skip-search", help="show only the attention layer")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="use 512 tokens, one timed run, and check fewer heads")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="also write all measurements to this file")] = None,
) -> None:
    """Show onepass at work: a model-sized attention layer, and a search by meaning. Takes about a minute.

    Exits with 0 if all results are right, 1 if a result is farther from float64, or embeddings are farther from eager
    attention's, than allowed, 2 for wrong arguments, 130 after Ctrl-C (what was measured until then is shown).
    """
    where = torch.device(resolve_device(device))
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"no such directory: {json_file.absolute().parent}", param_hint="--json")
    require_output("--json", json_file)
    console = make_console()
    layer: LayerReport | None = None
    found: SearchReport | None = None
    interrupted = False
    repeats = 1 if quick else 2
    num_steps = demo_layer.num_steps(repeats) + 1 + (0 if skip_search else demo_search.NUM_STEPS)
    with Steps(console, "demo", num_steps) as steps:

        def step(what: str) -> None:
            steps.show(what)
            steps.advance()

        try:
            step("choosing a length")
            seqlen = seqlen or (512 if quick else demo_layer.choose_seqlen(where, target_s=2.0))
            checked = demo_layer.CHECKED_KV_HEADS[: 1 if quick else None]
            layer = demo_layer.prepare(where, seqlen, checked)
            inputs = demo_layer.Inputs.random(seqlen, where)
            demo_layer.measure(layer, inputs, where, repeats, step)
            if not skip_search:
                found = demo_search.search(where, step)
        except KeyboardInterrupt:
            interrupted = True
    if layer is not None and layer.rows:
        console.print(layer_table(layer))
    if found is not None:
        console.print()
        show_search(console, found)
    if json_file is not None:
        write_json(json_file, as_json(layer, found, interrupted))
    if interrupted or layer is None:
        console.print("Interrupted: the rest was not measured.")
        raise typer.Exit(INTERRUPTED)
    console.print()
    console.print(summary(layer, found))
    if not (layer.ok and (found is None or found.ok)):
        raise typer.Exit(1)


def layer_table(report: LayerReport) -> Table:
    """Time, memory and error of each contender, and how each was measured."""
    is_cpu = report.device.startswith("CPU")
    memory = "resident memory" if is_cpu else "PyTorch's allocator"
    heads = len(report.checked_kv_heads) * demo_layer.GROUP
    table = Table(
        title=f"One attention layer of Llama 3 8B, {report.seqlen} tokens, causal, {report.dtype}; {report.device}",
        caption=(
            f"Time: best of {report.repeats}. Peak memory: beyond the inputs, the {mebibytes(report.results_bytes)} of "
            f"results included; {memory}. Errors: largest difference from float64, all rows of {heads} of the "
            f"{demo_layer.NUM_HEADS_Q} query heads. Budget: 2 times (gradients 3 times) the error of dense PyTorch "
            f"in {report.dtype}, plus one rounding. Window: each query sees {demo_layer.WINDOW} keys; SDPA has a mask."
        ),
        **TABLE_STYLE,
    )
    table.add_column("", no_wrap=True)
    for name in ("forward\nms", "backward\nms", "peak\nmemory"):
        table.add_column(name, justify="right", no_wrap=True)
    names = "out", "dq", "dk", "dv"
    for name in names:
        table.add_column(f"error\n{name}", justify="right", no_wrap=True)
    for kind, rows, budget in (
        ("", report.rows, report.budget),
        (", window", report.window_rows, report.window_budget),
    ):
        for row in rows:
            table.add_row(f"{row.name}{kind}", *layer_cells(row), *_errors(row.errors, names))
        if budget:
            table.add_section()
            table.add_row(f"budget{kind}", "", "", "", *_errors(budget, names), end_section=True)
    for row in (*report.rows, *report.window_rows):
        if row.note:  # next to the numbers the note would make the columns wide
            table.caption = f"{row.name}: {row.note}. {table.caption}"
    if report.is_disturbed:
        table.caption = f"The machine was busy (load {report.load_average:.1f}): times are disturbed. {table.caption}"
    return table


def layer_cells(row: Row) -> list[str]:
    """Forward and backward milliseconds and peak memory; "-" for what was not measured."""
    times = [
        "-" if ms is None else f"{ms:,.0f}" if ms >= 10 else f"{ms:.2f}" for ms in (row.forward_ms, row.backward_ms)
    ]
    return [*times, mebibytes(row.peak_extra_bytes)]


def _errors(errors: dict[str, float], names: tuple[str, ...]) -> list[str]:
    return [f"{errors[name]:.1e}" if name in errors else "-" for name in names]


def mebibytes(num_bytes: int | None) -> str:
    """A number of bytes in MiB or GiB; "-" for what was not measured."""
    if num_bytes is None:
        return "-"
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def show_search(console: Console, report: SearchReport) -> None:
    """Print the ranking, or what is missing for one."""
    if report.missing:
        # not rich's markup: the command has square brackets
        console.print(
            f"Search by meaning skipped: {' and '.join(report.missing)} not installed; {demo_search.PIP_COMMAND}",
            markup=False,
        )
        return
    table = Table(
        title=f"{len(demo_search.CORPUS)} sentences searched by meaning (all-MiniLM-L6-v2)",
        caption=(
            f"{report.onepass_calls} calls of onepass ({report.num_layers} layers, {report.num_batches} batches, "
            f"{report.padding_share:.0%} of the input padding), {report.other_calls} of any other attention. Largest "
            f"difference from the embeddings of eager attention: {report.max_difference:.1e}, "
            f"{demo_search.MAX_DIFFERENCE:.0e} allowed."
        ),
        **TABLE_STYLE,
    )
    table.add_column("query")
    table.add_column("cosine", justify="right")
    table.add_column("sentence")
    for query in report.queries:
        for i, (cosine, sentence) in enumerate(query.matches):
            is_last = i == len(query.matches) - 1
            table.add_row("" if i else query.text, f"{cosine:.3f}", sentence, end_section=is_last)
    console.print(table)


def summary(layer: LayerReport, found: SearchReport | None) -> str:
    """The results in two or three sentences."""
    rows = {row.name: row for row in layer.rows}
    mine, sdpa, naive = (rows[name] for name in demo_layer.CONTENDERS)
    verdict = "within its error budget" if mine.within_budget else "OUTSIDE ITS ERROR BUDGET"
    sentences = [
        f"onepass computed the layer and its gradients {verdict} against float64, "
        f"at {sdpa.total_ms / mine.total_ms:.2f} times the speed of torch SDPA."
    ]
    if naive.note:
        sentences.append(f"It took {mebibytes(mine.peak_extra_bytes)}; the naive form {naive.note}.")
    else:
        naive_memory = mebibytes(naive.peak_extra_bytes)
        sentences.append(f"It took {mebibytes(mine.peak_extra_bytes)}, the naive form {naive_memory}.")
    if len(layer.window_rows) == 2 and not layer.window_rows[1].note:
        mine, sdpa = layer.window_rows
        sentences.append(
            f"With a window of {demo_layer.WINDOW} keys it has {sdpa.total_ms / mine.total_ms:.1f} times the speed of "
            "SDPA with a mask."
        )
    if found is not None and not found.missing:
        layers = "Every attention layer" if found.every_layer_used_onepass else "NOT EVERY ATTENTION LAYER"
        agree = "agree with" if found.max_difference <= demo_search.MAX_DIFFERENCE else "DIFFER FROM"
        sentences.append(f"{layers} of MiniLM ran on onepass, and its embeddings {agree} eager attention's.")
    sentences.append(
        "onepass is for exact attention whose memory does not grow with the square of the length. On NVIDIA GPUs since "
        "Ampere these calls run its kernels, which README.md compares with other libraries."
    )
    return " ".join(sentences)


def as_json(layer: LayerReport | None, found: SearchReport | None, interrupted: bool) -> dict:
    """Everything measured, with the versions. Numbers that JSON cannot hold (inf, NaN) become strings."""
    report = {
        "onepass": onepass.__version__,
        "torch": torch.__version__,
        "interrupted": interrupted,
        "layer": None if layer is None else layer.as_dict(),
        "search": None if found is None else found.as_dict(),
    }
    return _strict(report)


def _strict(value):
    if isinstance(value, dict):
        return {name: _strict(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

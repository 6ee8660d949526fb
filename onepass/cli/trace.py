"""`onepass trace`: timelines of the Hopper kernels, from time stamps of the running kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ..bench.cases import DTYPES, Case
from ..bench.clone import load
from ..errors import UnsupportedError
from ..testing.machine import describe
from .ablate import DIRECTIONS
from .console import TABLE_STYLE, fail, make_console, require_output, require_plot, resolve_device

_HIDDEN_SIZE, _TOKENS = 2048, 16384  # of the FlashAttention-3 paper's grid


def trace(
    direction: Annotated[str, typer.Option(help=f"pass of the kernel: {' or '.join(DIRECTIONS)}")] = "forward",
    head_dim: Annotated[int, typer.Option(min=1, help="a backward: at most 128")] = 128,
    causal: Annotated[bool, typer.Option("--causal", help="with a causal mask")] = False,
    seqlen: Annotated[int, typer.Option(min=1)] = 2048,
    batch: Annotated[int | None, typer.Option(min=1, help="default: 16384 tokens / seqlen")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="default: hidden size 2048 / head_dim")] = None,
    heads_kv: Annotated[int | None, typer.Option(min=1, help="default: heads")] = None,
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cuda or cuda:N")] = "auto",
    row: Annotated[
        list[str] | None, typer.Option(help="a row of `onepass ablate`, several times; default: those that change much")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Chrome trace, for ui.perfetto.dev")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="PNG file")] = None,
) -> None:
    """Record what producer and consumers of one thread block do, and when, in a Hopper forward or backward.

    The kernel is the one that calls run, with its configuration, and then with single choices undone, as in `onepass
    ablate`. It is compiled once more with time stamps, whose cost is in the table: a stamp reads the clock and stores
    eight bytes. Kernels that are not traced do not contain them.

    The command needs a clone of the repository. It exits with 2 if this machine or kernel cannot take the case, with
    the reason.
    """
    console = make_console()
    if direction not in DIRECTIONS:
        fail(f"--direction: expected {' or '.join(DIRECTIONS)}, got {direction!r}")
    if dtype not in DTYPES:
        fail(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    heads = heads or max(1, _HIDDEN_SIZE // head_dim)
    if heads % (heads_kv or heads):
        fail(f"--heads-kv: expected a divisor of {heads} heads, got {heads_kv}")
    shape = batch or max(1, _TOKENS // seqlen), seqlen, seqlen, heads, heads_kv or heads, head_dim, head_dim
    case = Case(*shape, dtype, causal, direction=DIRECTIONS[direction])
    device = resolve_device(device)
    if not device.startswith("cuda"):
        fail("the kernels with time stamps run on a Hopper GPU (compute capability 9.0) alone; torch sees none here")
    require_output("--json", json_path)
    require_plot("--plot", plot_path)

    try:
        record, traces = load("benchmarks.timeline.record").record, load("benchmarks.timeline.traces")
        timelines = record(case, row or None, device, lambda label: console.print(f"compiling: {label}", markup=False))
    except (ImportError, UnsupportedError) as error:
        fail(str(error))
    table = Table(title=f"{direction}, {case.label}", **TABLE_STYLE)
    for heading in ("configuration", "ms", "with stamps", "change", "stamps"):
        table.add_column(heading, justify="left" if heading == "configuration" else "right")
    for timeline in timelines:
        change = f"{100 * (timeline.ms / timeline.ms_without - 1):+.1f} %"
        count = sum(len(role.spans) for role in timeline.roles)
        table.add_row(timeline.label, f"{timeline.ms_without:.3f}", f"{timeline.ms:.3f}", change, str(count))
    console.print(table)
    about = {**describe(device), "case": f"{direction}, {case.label}"}
    if json_path is not None:
        traces.write(traces.to_chrome(timelines, about), json_path)
        console.print(f"wrote {json_path}: open it in https://ui.perfetto.dev", markup=False)
    if plot_path is not None:
        picture = load("benchmarks.timeline.picture")
        picture.draw(timelines, picture.title_of(about), plot_path)
        console.print(f"wrote {plot_path}", markup=False)

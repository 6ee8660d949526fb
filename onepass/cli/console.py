"""Output shared by the commands."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..startup import INTERRUPTED as INTERRUPTED
from ..testing.machine import counted
from ..testing.results import check_output

WIDE = 140  # columns in which every table has room
# Without vertical lines more columns fit into a terminal.
TABLE_STYLE: dict[str, Any] = {
    "box": box.SIMPLE_HEAD,
    "padding": (0, 1, 0, 0),
    "title_justify": "left",
    "caption_justify": "left",
}


def printable(text: str) -> str:
    """A text whose every character is shown: those on which a terminal would act become escapes, such as \\x1b."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Console(Console):
    """Shows every text as it is. A table is as wide as its longest words, up to `WIDE`: no number is cut."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def print(self, *objects: Any, **options: Any) -> None:
        unbounded = self.options.update(max_width=10_000)
        least = [Measurement.get(self, unbounded, table).minimum for table in objects if isinstance(table, Table)]
        width, needed = self.width, min(WIDE, max(least, default=0))
        if needed <= width:
            return super().print(*objects, **options)
        self.width = needed
        super().print(*objects, **options)
        self.width = width


def make_console() -> Console:
    """A console on standard output; wide enough for the tables where there is no terminal (CI, a pipe)."""
    is_terminal = sys.stdout.isatty()
    width = None if is_terminal or "COLUMNS" in os.environ else WIDE
    return _Console(width=width, soft_wrap=False, highlight=False, emoji=False)


class Steps:
    """Progress of a command: a bar on a terminal; elsewhere a line every 10 seconds, with the time that is left.

    Args: name: of the work. total: the number of steps, which are taken to last equally long.
    Attributes: bar: the bars on a terminal.
    """

    def __init__(self, console: Console, name: str, total: int, seconds_between: float = 10.0):
        self.console, self.name, self.total, self.seconds_between = console, name, total, seconds_between
        self.done = 0
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self.bar.add_task(name, total=total)
        self._start = self._last = time.monotonic()

    def __enter__(self) -> Steps:
        self.bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.__exit__(*error)

    def show(self, what: str) -> None:
        """Show what is being done, next to the bar."""
        self.bar.update(self._task, description=escape(what))

    def advance(self) -> None:
        """One more step is done."""
        self.done += 1
        self.bar.advance(self._task)
        now = time.monotonic()
        if not self.console.is_terminal and now - self._last >= self.seconds_between and self.done < self.total:
            left = (now - self._start) / self.done * (self.total - self.done)
            self.console.print(f"{self.name}: {self.done} of {self.total}, about {left:.0f} s left")
            self._last = now


def fail(message: str, code: int = 2) -> NoReturn:
    """Print one line on standard error and exit: 2 for a request that makes no sense, 1 for a result that is wrong."""
    typer.echo(f"onepass: {printable(message)}", err=True)
    raise typer.Exit(code)


def words_of(error: Exception) -> str:
    """An error as words for a message: that of the system without its number and its quotes."""
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(str(part) for part in (error.filename, error.strerror.lower()) if part is not None)
    return str(error) or type(error).__name__


def require_output(option: str, path: Path | None) -> None:
    """Exit if no results file can be written there: before the measurements, not after them."""
    if path is not None:
        try:
            check_output(path)
        except OSError as error:
            fail(f"{option}: {error}")


def require_plot(option: str, path: Path | None) -> None:
    """Exit if no picture can be drawn there: before the measurements, not after them."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        fail(f"{option} needs matplotlib: pip install '.[bench]' in a checkout of onepass", code=1)
    if path.suffix.lower() != ".png":
        fail(f"{option}: expected a name that ends in .png, got {path}")
    require_output(option, path)


def resolve_device(name: str) -> str:
    """The device of that name; "auto" is a GPU if torch sees one. Exits with a reason if the device is not there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        fail(f"--device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        seen = counted(torch.cuda.device_count(), "GPU")
        fail(f"--device: expected a device that torch sees, got {name!r}; it sees {seen}")
    return name

"""Output shared by the commands."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from typing import Any, NoReturn

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress

from ..bench.machine import counted

INTERRUPTED = 130  # exit code that a shell reports for a program that Ctrl-C ended
# Without vertical lines more columns fit into a terminal.
TABLE_STYLE: dict[str, Any] = {
    "box": box.SIMPLE_HEAD,
    "padding": (0, 1, 0, 0),
    "title_justify": "left",
    "caption_justify": "left",
}


def make_console() -> Console:
    """A console on standard output; wide enough for the tables where there is no terminal (CI, a pipe)."""
    is_terminal = sys.stdout.isatty()
    return Console(width=None if is_terminal or "COLUMNS" in os.environ else 140, soft_wrap=False, highlight=False)


class Steps:
    """Progress of a command: a bar on a terminal; elsewhere a line every 10 seconds, with the time that is left.

    Args: name: of the work. total: the number of steps, which are taken to last equally long.
    """

    def __init__(self, console: Console, name: str, total: int, seconds_between: float = 10.0):
        self.console, self.name, self.total, self.seconds_between = console, name, total, seconds_between
        self.done = 0
        self._bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(name, total=total)
        self._start = self._last = time.monotonic()

    def __enter__(self) -> Steps:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def advance(self) -> None:
        """One more step is done."""
        self.done += 1
        self._bar.advance(self._task)
        now = time.monotonic()
        if not self.console.is_terminal and now - self._last >= self.seconds_between and self.done < self.total:
            left = (now - self._start) / self.done * (self.total - self.done)
            self.console.print(f"{self.name}: {self.done} of {self.total}, about {left:.0f} s left")
            self._last = now


def fail(message: str, code: int = 2) -> NoReturn:
    """Print one line on standard error and exit: 2 for a request that makes no sense, 1 for a result that is wrong."""
    typer.echo(f"onepass: {message}", err=True)
    raise typer.Exit(code)


def require_matplotlib(option: str) -> None:
    """Exit if matplotlib is missing: before the measurements, not after them."""
    if importlib.util.find_spec("matplotlib") is None:
        fail(f"{option} needs matplotlib: pip install '.[bench]' in a checkout of onepass", code=1)


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

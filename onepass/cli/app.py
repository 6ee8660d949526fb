"""The commands, each in a module of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from . import cache
from .ablate import ablate
from .bench import bench
from .demo import demo
from .info import info
from .tune import tune
from .verify import verify

app = typer.Typer(
    name="onepass",
    help="Exact attention for PyTorch in one pass over memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Exact attention for PyTorch in one pass over memory."""


app.command()(info)
app.command()(demo)
app.command()(verify)
app.command()(bench)
app.command()(ablate)
app.command()(tune)
app.add_typer(cache.app, name="cache")

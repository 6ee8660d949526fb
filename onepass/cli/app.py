"""The commands, each in a module of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__, variables
from . import cache
from .ablate import ablate
from .bench import bench
from .console import fail
from .demo import demo
from .info import info
from .trace import trace
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
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and end")
    ] = False,
) -> None:
    """Exact attention for PyTorch in one pass over memory."""
    if context.invoked_subcommand != "info":  # which shows them
        for variable in variables.ALL:
            try:
                variable.read()
            except ValueError as error:
                fail(str(error))


def flowing(text: str) -> str:
    """A docstring whose paragraphs are one line each, which the help wraps to the width of the terminal."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


for _command in (info, demo, verify, bench, ablate, trace, tune):
    app.command(help=flowing(_command.__doc__ or ""))(_command)
for _command_of_cache in cache.app.registered_commands:
    _command_of_cache.help = flowing(getattr(_command_of_cache.callback, "__doc__", None) or "")
app.add_typer(cache.app, name="cache")

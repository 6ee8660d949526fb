"""`onepass cache`: the compiled kernels on this machine's disk, and what `onepass tune` found."""

from __future__ import annotations

import importlib.metadata
import math
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..testing.results import check_output
from .console import TABLE_STYLE, fail, make_console, printable, words_of

app = typer.Typer(invoke_without_command=True)


@app.callback()
def cache(context: typer.Context) -> None:
    """List the compiled kernels on disk, or clear them.

    Exits with 1 if the directory belongs to another user: nothing is read from it.
    """
    if context.invoked_subcommand is not None:
        return
    console = make_console()
    entries, directory = _entries(_disk_cache())
    _say_tuned(console)
    if not entries:
        return _say_empty(console, directory)
    environment = _environment()
    table = Table(title=f"Compiled kernels in {escape(str(directory))}", **TABLE_STYLE)
    for column in ("kernel", "for", "key", "arch"):
        table.add_column(column, overflow="fold")
    for column in ("KiB", "compile s", "age"):
        table.add_column(column, justify="right")
    table.add_column("state")
    for entry in entries:
        about = entry.about
        state = f"[red]{escape(entry.problem)}[/]" if entry.problem else "intact"
        if not entry.problem and environment not in (None, about.get("environment")):
            state = "intact, of other versions"
        table.add_row(
            *(escape(str(about.get(name, "-"))) for name in ("name", "summary")),
            entry.key[:8],
            escape(str(about.get("arch", "-"))),
            f"{entry.size_bytes / 1024:.0f}",
            _seconds(about.get("compile_s")),
            _age(time.time() - entry.modified),
            state,
        )
    console.print(table)
    total = sum(entry.size_bytes for entry in entries)
    console.print(f"entries: {len(entries)}, {_mib(total)}; onepass cache clear removes them", markup=False)


@app.command()
def clear(
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    tuned: Annotated[
        bool, typer.Option("--tuned", help="remove the configurations that onepass tune kept instead")
    ] = False,
) -> None:
    """Remove the compiled kernels; each is compiled again, in seconds, when it is next needed.

    Exits with 1 if the answer is no, if the directory belongs to another user, or if a file cannot be removed. Files
    that are not compiled kernels stay, and so do kernels that another process is building.
    """
    console = make_console()
    disk_cache = _disk_cache()
    if tuned:
        return _clear_tuned(console, yes)
    entries, directory = _entries(disk_cache)
    if not entries:
        return _say_empty(console, directory)
    total = sum(entry.size_bytes for entry in entries)
    if not yes:
        question = f"Remove all compiled kernels ({len(entries)}, {_mib(total)}) from {directory}?"
        typer.confirm(printable(question), abort=True)
    try:
        removed, kept = disk_cache.clear(directory)
    except OSError as error:
        fail(words_of(error), code=1)
    console.print(f"entries removed: {len(removed)}, {_mib(sum(entry.size_bytes for entry in removed))}", markup=False)
    for entry, reason in kept:
        console.print(f"kept {entry.key[:8]}: {reason}", markup=False)
    if any(reason != disk_cache.BEING_BUILT for _, reason in kept):
        raise typer.Exit(1)


@app.command("export")
def export_cache(file: Annotated[Path, typer.Argument(help="the archive to write, such as kernels.tar.xz")]) -> None:
    """Write the compiled kernels into one file, for other machines with the same versions.

    A name that ends in .xz makes a file half as large as one that ends in .gz.

    Exits with 1 if there are none, or the file cannot be written.
    """
    from ..kernels.compiler import cache_archive

    try:
        check_output(file)
        directory = _disk_cache().cache_directory()
        entries = cache_archive.export_entries(directory, file)
    except OSError as error:
        fail(words_of(error), code=1)
    if not entries:
        fail(f"no compiled kernels in {directory}; nothing was written to {file}", code=1)
    make_console().print(f"entries written to {file}: {len(entries)}, {_mib(file.stat().st_size)}", markup=False)


@app.command("import")
def import_cache(
    file: Annotated[Path, typer.Argument(help="what onepass cache export wrote")],
) -> None:
    """Put the compiled kernels of an archive into the cache. They are machine code: import what you trust.

    Exits with 1 if the archive cannot be read or has no kernels, or an entry in it is broken or needs features that
    this CPU lacks.
    """
    from ..kernels.compiler import cache_archive

    disk_cache = _disk_cache()
    if not file.is_file():
        what = "which is no file" if file.exists() else "which does not exist"
        fail(f"expected an archive of onepass cache export, got {file}, {what}", code=1)
    try:
        found = cache_archive.import_entries(disk_cache.cache_directory(), file)
    except (OSError, ValueError) as error:
        fail(words_of(error), code=1)
    console = make_console()
    console.print(f"entries added: {len(found.added)}, there before: {len(found.present)}", markup=False)
    for key, reason in found.broken.items():
        console.print(f"not added {key[:8]}: {reason}", markup=False)
    if found.broken:
        raise typer.Exit(1)


def _disk_cache() -> ModuleType:
    from ..kernels.compiler import disk_cache

    if disk_cache.fcntl is None:  # no kernel runs on such a system, either
        fail("compiled kernels are not cached on this system, which has no file locks", code=1)
    return disk_cache


def _entries(disk_cache: ModuleType) -> tuple[list, Path]:
    try:
        directory = disk_cache.cache_directory()
        return disk_cache.entries(directory), directory
    except OSError as error:
        fail(words_of(error), code=1)


def _say_tuned(console: Console) -> None:
    """Print how many configurations are kept, if there are any."""
    from ..kernels.heuristics import tuned

    try:
        path = tuned.own_path()
        table = tuned.load(path)
    except (OSError, ValueError) as error:
        return console.print(f"tuned configurations: not used: {words_of(error)}", style="red", markup=False)
    for gpu, entries in table.items():
        gains = sum(entry.config != entry.instead_of for entry in entries.values())
        counts = f"{len(entries)}, {gains} of them instead of the heuristics' choice"
        console.print(f"tuned configurations for {gpu}: {counts}; {path}", markup=False)


def _clear_tuned(console: Console, yes: bool) -> None:
    from ..kernels.heuristics import tuned

    try:
        path = tuned.own_path()
        if not os.path.lexists(path):
            return console.print(f"no tuned configurations in {path}", markup=False)
        if not yes:
            typer.confirm(printable(f"Remove all tuned configurations, {path}?"), abort=True)
        tuned.clear()
    except OSError as error:
        fail(words_of(error), code=1)
    console.print(f"removed {path}", markup=False)


def _say_empty(console: Console, directory: Path) -> None:
    console.print(f"no compiled kernels in {directory}{'' if directory.exists() else ' (not made yet)'}", markup=False)


def _environment() -> str | None:
    """The environment with which an entry must have been built to be used; None without the kernel compiler."""
    from ..kernels.compiler import compile

    try:
        return compile.environment()
    except importlib.metadata.PackageNotFoundError:
        return None


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def _seconds(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) and math.isfinite(value) else "-"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"

"""The command line, `onepass`. Importing this package needs nothing; running it needs the extra `bench`."""

from __future__ import annotations

import errno
import os
import sys

from .. import startup

_NEEDED = {"typer", "rich", "click"}


def main() -> None:
    """Entry of the console script. Without typer or rich: one line that says what to install, exit code 1."""
    _open_what_is_closed()
    try:
        from .app import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _NEEDED:
            raise
        print(
            f"onepass: the command line needs {missing}: pip install '.[bench]' in a checkout of onepass",
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    startup.end()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(startup.INTERRUPTED) from None
    except OSError as error:  # the output cannot be written; what is left of it goes nowhere
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # open until the process ends
        if error.errno != errno.EPIPE:  # who closed the pipe has read enough
            from .console import words_of

            print(f"onepass: {words_of(error)}", file=sys.stderr)
        raise SystemExit(1) from None


def _open_what_is_closed() -> None:
    """Give the process the standard streams that its parent has closed, and let no character end it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # open until the process ends
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

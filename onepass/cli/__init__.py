"""The command line, `onepass`. Importing this package needs nothing; running it needs the extra `bench`."""

from __future__ import annotations

import sys

_NEEDED = {"typer", "rich", "click"}


def main() -> None:
    """Entry of the console script. Without typer or rich: one line that says what to install, exit code 1."""
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
    app()

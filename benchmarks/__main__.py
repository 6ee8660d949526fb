"""Run a program that measures, in a clone of the repository.

python -m benchmarks                         the names of the programs
python -m benchmarks forward_sm90 --help     what one of them takes
python -m benchmarks chart                   the pictures of docs/performance.md, from results files
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from . import suites


def main(argv: Sequence[str] | None = None) -> int | None:
    """Returns: the exit status of the program."""
    name, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__, suites.__doc__, sep="\n")
        return 0
    if name != "chart" and name not in suites.NAMES:
        print(f"expected chart or a suite, got {name}\n\n{suites.__doc__}", file=sys.stderr)
        return 2
    if name == "chart":
        return importlib.import_module("benchmarks.chart").main(arguments)
    return importlib.import_module(f"benchmarks.suites.{name}").SUITE.main(arguments)


if __name__ == "__main__":
    sys.exit(main())

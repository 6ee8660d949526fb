"""Programs for traces that `onepass trace` has written.

    python -m benchmarks.timeline cut TRACE.json CUT.json --cycles 90000     the beginning of a trace
    python -m benchmarks.timeline picture TRACE.json PICTURE.png             a panel for each configuration
    python -m benchmarks.timeline summary TRACE.json                         steps, shares of time, what overlaps

A trace that was cut says so in its `otherData`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from onepass.testing.results import output_file

from .picture import BATCHES, draw, title_of
from .summary import table
from .traces import cut, from_chrome, trace_file, write


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    programs = parser.add_subparsers(dest="program", required=True)
    added = {name: programs.add_parser(name) for name in ("cut", "picture", "summary")}
    for program in added.values():
        program.add_argument("trace", type=trace_file)
    added["cut"].add_argument("cut", type=output_file)
    added["cut"].add_argument("--cycles", type=int, required=True, help="how many of each configuration are kept")
    picture = added["picture"]
    picture.add_argument("picture", type=output_file)
    picture.add_argument("--row", action="append", help="a configuration by its label, several times; default: all")
    picture.add_argument("--batches", type=int, default=BATCHES, help="batches of GEMMs that the first panel shows")
    options = parser.parse_args(argv)
    try:
        if options.program == "cut":
            write(cut(options.trace, options.cycles), options.cut)
        elif options.program == "summary":
            print(table(from_chrome(options.trace)))
        else:
            _draw(options)
    except ValueError as error:
        added[options.program].error(str(error))


def _draw(options: argparse.Namespace) -> None:
    """Draw the rows that were chosen. Raises: ValueError for a row that the trace does not have."""
    timelines = from_chrome(options.trace)
    if options.row:
        found = {timeline.label: timeline for timeline in timelines}
        if unknown := [label for label in options.row if label not in found]:
            raise ValueError(f"--row: expected {' or '.join(found)}, got {', '.join(unknown)}")
        timelines = [found[label] for label in options.row]
    draw(timelines, title_of(options.trace["otherData"]), options.picture, options.batches)


if __name__ == "__main__":
    main()

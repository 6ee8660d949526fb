"""A suite as data, and the one program that runs it: compile, check, then measure case by case.

Every row goes to the results file at once, so that Ctrl-C leaves what was measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from onepass.kernels.compiler.compile import CompileRequest
from onepass.testing.budget import Comparison
from onepass.testing.results import Report, Row, output_file

from .ahead import compile_ahead

Args = argparse.Namespace
CaseT = TypeVar("CaseT", bound=Any)


class Check(NamedTuple):
    """One comparison that is made before anything is timed.

    Attributes:
        label: the contender and the case.
        run: returns whether the result is right, and what to print.
        is_peer: whether a wrong result is reported and does not fail the suite.
    """

    label: str
    run: Callable[[], tuple[bool, str]]
    is_peer: bool = False


def verdict(rows: Sequence[Comparison], differs: bool = False) -> tuple[bool, str]:
    """Whether all comparisons hold, and what to print. Args: differs: whether two equal runs gave different results."""
    wrong = [str(row) for row in rows if not row.ok] + ["runs differ"] * differs
    return not wrong, "; ".join(wrong) or f"{max(row.share for row in rows):.2f} of the budget"


def passed(checks: Iterable[Check]) -> bool:
    """Run the checks and print a line for each. Returns: whether all those of onepass passed."""
    tried, wrong = 0, []
    for check in checks:
        print(f"  {check.label:88s}", end="", flush=True)  # before the run: a hang shows where
        try:
            ok, message = check.run()
        except Exception as error:  # a kernel compiler has errors of its own, and each means that it did not run
            ok, message = False, f"{type(error).__name__}: {str(error)[:300]}"
        tried += 1
        wrong += [] if ok else [check]
        print(f"{'ok  ' if ok else 'FAIL'} {message}", flush=True)
    print(f"check: {tried - len(wrong)} of {tried} passed", flush=True)
    return all(check.is_peer for check in wrong)


def chosen(
    cases: Sequence[CaseT], text: str, how: Callable[[Iterable[bool]], bool], parser: argparse.ArgumentParser
) -> list[CaseT]:
    """The cases whose labels have any (or all) of the words of --cases, which are separated by commas; all without."""
    words = [word for word in text.split(",") if word]
    found = [case for case in cases if not words or how(word in case.label for word in words)]
    if not found:
        parser.error(f"--cases: expected words of {', '.join(case.label for case in cases)}, got {text}")
    return found


def _nothing(*arguments: Any) -> Any:
    return ()


@dataclass(frozen=True)
class Suite(Generic[CaseT]):
    """A program that measures.

    Attributes:
        name, about: the name of the program, and what --help says: the docstring of its module.
        add_options: adds the options of its own to a parser.
        start: completes the options, refuses wrong ones by `parser.error`, and returns the header of the results file.
        cases: the cases that are measured.
        measure: measures a case, adds its rows to the report, and prints them.
        checks: what is checked before; it may add to the header. None: the suite has no check of its own before.
        requests: the kernels that checks and cases need, which are compiled in parallel.
        finish: called when all cases have been measured, for a summary.
        is_wrong: whether a row says that a result was wrong.
        out: the results file, in $OUT or here; None: none, unless --out asks for one.
        report: the class of the report.
        prints_header: whether the header is printed.
    """

    name: str
    about: str | None
    add_options: Callable[[argparse.ArgumentParser], object]
    start: Callable[[Args, argparse.ArgumentParser], dict[str, Any]]
    cases: Callable[[Args], Iterable[CaseT]]
    measure: Callable[[CaseT, Args, Report], object]
    checks: Callable[[Args, dict[str, Any]], Iterable[Check]] | None = None
    requests: Callable[[Args], Iterable[CompileRequest]] = _nothing
    finish: Callable[[Args, Report], object] = _nothing
    is_wrong: Callable[[Row], object] = _nothing
    out: str | None = None
    report: type[Report] = Report
    prints_header: bool = True

    def parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            f"python -m benchmarks {self.name}",
            description=self.about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_options(parser)
        if self.checks is not None:
            parser.add_argument("--no-check", action="store_true", help="do not check the results")
            parser.add_argument("--no-grid", action="store_true", help="do not time the cases")
        default = self.out and os.path.join(os.environ.get("OUT", "."), self.out)
        where = f"{self.out} in $OUT or here" if self.out else "none"
        parser.add_argument("--out", type=output_file, default=default, help=f"results file, JSON; default: {where}")
        return parser

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Returns: the exit status: 0, 1 if a result was wrong, 130 after Ctrl-C."""
        parser = self.parser()
        args = parser.parse_args(argv)
        args.argv = list(sys.argv[1:] if argv is None else argv)
        return self.run(args, self.start(args, parser))

    def run(self, args: Args, header: dict[str, Any]) -> int:
        warnings.filterwarnings("ignore", message="Argument aux_data")  # FlashAttention-4 gives it under this compiler
        report = self.report(header, args.out)
        if self.prints_header:
            print(report.header, flush=True)
        ok = False
        with report.recording():
            compile_ahead(self.requests(args))
            ok = self.checks is None or args.no_check or passed(self.checks(args, report.header))
            report.save()
            for case in () if self.checks is not None and args.no_grid else self.cases(args):
                self.measure(case, args, report)
            self.finish(args, report)
        return report.exit_status(ok and not any(map(self.is_wrong, report.rows)))

"""The program that runs every suite: checks before timing, rows as they come, Ctrl-C, exit statuses."""

from __future__ import annotations

import json

import pytest

from benchmarks.harness import suite as harness
from benchmarks.harness.suite import Check, Suite, chosen, passed, verdict
from onepass.testing.budget import Comparison, Scale


def comparison(error):
    return Comparison("out", error, 1.0, 0.0, 0.0, (), Scale(0.0, 1.0))


def raises():
    raise RuntimeError("no kernel")


RIGHT = Check("onepass, a case", lambda: (True, "0.50 of the budget"))
WRONG = Check("onepass, another case", lambda: (False, "out: too far off"))
PEER = Check("fa4, a case", raises, is_peer=True)


def test_what_checks_say(capsys):
    assert verdict([comparison(0.5), comparison(0.25)]) == (True, "0.50 of the budget")
    assert verdict([comparison(0.5)], differs=True) == (False, "runs differ")
    ok, message = verdict([comparison(0.5), comparison(2.0)])
    assert not ok
    assert message == str(comparison(2.0))
    assert passed([RIGHT, PEER])  # a peer is reported
    assert not passed([RIGHT, WRONG])
    assert not passed([PEER._replace(is_peer=False)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if "of" in line and "passed" in line] == ["passed"] * 3
    assert lines[1].endswith("FAIL RuntimeError: no kernel")
    assert lines[2] == "check: 1 of 2 passed"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a suite of the cases 1, 2, 3. Returns: a function to the exit status, the rows, and what was compiled."""
    compiled = []
    monkeypatch.setattr(harness, "compile_ahead", compiled.extend)

    def run(*options, measure=lambda case, args, report: report.add({"case": case}), **parts):
        path = tmp_path / "results.json"
        suite = Suite(
            "numbers",
            "about",
            lambda parser: parser.add_argument("--cases", type=int, nargs="*", default=[1, 2, 3]),
            lambda args, parser: {"suite": "numbers"},
            lambda args: args.cases,
            measure,
            requests=lambda args: args.cases,
            **parts,
        )
        status = suite.main([*options, "--out", str(path)])
        data = json.loads(path.read_text())
        return status, [row["case"] for row in data["rows"]], data["status"], compiled

    return run


def test_rows(run):
    assert run() == (0, [1, 2, 3], "complete", [1, 2, 3])
    assert run("--cases", "2", is_wrong=lambda row: row["case"] == 2)[0] == 1
    assert run("--cases", "1", is_wrong=lambda row: row["case"] == 2)[0] == 0


def test_checks_come_first(run):
    seen = []

    def checks(args, header):
        seen.append("checks")
        header["seed"] = 3
        yield from (RIGHT, WRONG)

    def measure(case, args, report):
        seen.append(report.header["seed"])

    assert run(checks=checks, measure=measure, finish=lambda args, report: seen.append("end"))[0] == 1
    assert seen == ["checks", 3, 3, 3, "end"]
    seen.clear()
    assert run("--no-check", checks=checks)[:2] == (0, [1, 2, 3])
    assert run("--no-grid", checks=checks)[:2] == (1, [])
    assert seen == ["checks"]


def test_rows_stay_after_an_interrupt(run):
    def measure(case, args, report):
        if case == 3:
            raise KeyboardInterrupt
        report.add({"case": case})

    assert run(measure=measure)[:3] == (130, [1, 2], "interrupted")


def test_cases_by_words(capsys):
    class Parser:
        def error(self, text):
            raise SystemExit(text)

    class Case(str):
        label = property(str)

    cases = [Case("packed d64"), Case("window d64"), Case("window d128")]
    assert chosen(cases, "", any, Parser()) == cases
    assert chosen(cases, "packed,d128", any, Parser()) == ["packed d64", "window d128"]
    assert chosen(cases, "window,d128", all, Parser()) == ["window d128"]
    with pytest.raises(SystemExit, match="expected words of packed d64, window d64, window d128, got sinks"):
        chosen(cases, "sinks", any, Parser())

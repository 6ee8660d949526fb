"""The programs of benchmarks/: how they are found, and the old names by which they run for one release."""

from __future__ import annotations

import runpy
import sys

import pytest
from typer.testing import CliRunner

from benchmarks import __main__ as programs
from benchmarks import suites
from onepass.bench import clone
from onepass.cli import trace
from onepass.cli.app import app

OLD_NAMES = {
    "onepass.bench.suites.call_cost": "benchmarks call_cost",
    "onepass.bench.suites.decode": "benchmarks decode",
    "onepass.bench.chart": "benchmarks chart",
    "onepass.bench.timeline.chrome": "benchmarks.timeline cut",
    "onepass.bench.timeline.picture": "benchmarks.timeline picture",
    "onepass.bench.timeline.summary": "benchmarks.timeline summary",
}


def test_names(capsys):
    assert programs.main([]) == programs.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"{name}.py" in text for name in suites.NAMES)
    assert programs.main(["forward"]) == 2
    assert "expected chart or a suite, got forward" in capsys.readouterr().err


def run_module(name, monkeypatch, *arguments):
    """The exit status of `python -m name arguments`."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    return end.value.code


@pytest.mark.parametrize("old", OLD_NAMES)
def test_old_names_warn_and_run(old, monkeypatch, capsys):
    with pytest.warns(FutureWarning, match=f"python -m {old} is now python -m {OLD_NAMES[old]}, in "):
        assert run_module(old, monkeypatch, "--help") == 0
    assert "usage: " in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_without_a_clone(monkeypatch, tmp_path):
    monkeypatch.setattr(clone, "ROOT", tmp_path)
    text = f"expected onepass in a clone of its repository, which has benchmarks/, got {tmp_path}"
    assert text in run_module("onepass.bench.suites.decode", monkeypatch, "--help")
    monkeypatch.setattr(trace, "resolve_device", lambda name: "cuda")
    for command in (["bench", "context-parallel", "--device", "cpu"], ["trace"]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2
        assert "expected onepass in a clone" in " ".join(result.output.split())

"""What the commands show while they run, what Ctrl-C leaves, and how their help is wrapped."""

from __future__ import annotations

import io
import itertools
import json
import time

import pytest

pytest.importorskip("typer")

from rich.console import Console
from typer.testing import CliRunner

from onepass.cli import verify as cli_verify
from onepass.cli.app import app, flowing
from onepass.cli.console import Steps


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_ctrl_c_in_verify_keeps_what_was_measured(tmp_path, monkeypatch):
    measure, path = cli_verify._error_row, tmp_path / "verify.json"
    seen = []

    def interrupted(*arguments):
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(arguments[1])
        return measure(*arguments)

    monkeypatch.setattr(cli_verify, "_error_row", interrupted)
    monkeypatch.setenv("COLUMNS", "140")
    result = invoke("verify", "--quick", "--device", "cpu", "--json", str(path))
    assert result.exit_code == 130
    assert "interrupted after 3 of" in result.output
    assert [row["option"] for row in json.loads(path.read_text())["errors"]] == seen
    assert all(option in result.output for option in seen)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_lines_of_progress_without_a_terminal(monkeypatch, is_terminal):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=100)
    with Steps(console, "verify", 10) as steps:
        for _ in range(10):
            now[0] += 4
            steps.advance()
    lines = ["verify: 3 of 10, about 28 s left", "verify: 6 of 10, about 16 s left", "verify: 9 of 10, about 4 s left"]
    assert is_terminal or out.getvalue().splitlines() == lines
    assert "left" not in out.getvalue() or not is_terminal


def test_paragraphs_of_help_are_wrapped_to_the_terminal(monkeypatch):
    assert flowing("One\n    two.\n\n    Three\n    four.\n    ") == "One two.\n\nThree four."
    monkeypatch.setenv("COLUMNS", "60")
    for command in ("verify", "tune", "ablate", "demo", "bench", "cache clear", "cache import"):
        lines = [line.strip() for line in invoke(*command.split(), "--help").output.split("╭─")[0].splitlines()]
        # a paragraph's lines are full but for its last one
        for line, after in itertools.pairwise(lines):
            assert not after or not line or len(line) + len(after.split()[0]) >= 50, (command, line, after)

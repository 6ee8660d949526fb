"""benchmarks/results/: every file has the form that onepass.bench.rows describes, and something refers to it."""

import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from onepass.bench.rows import SCHEMA_VERSION

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
RECORD = "h200-tests.json"  # a record of tests, not of measurements
pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not a checkout")


@pytest.mark.parametrize("path", [path for path in FILES if path.name != RECORD], ids=lambda path: path.stem)
def test_form(path):
    data = json.loads(path.read_text())
    assert data["schema_version"] == SCHEMA_VERSION
    for run in data.get("runs", [data]):
        assert run["header"]
        assert run["rows"]
        assert all(isinstance(row, dict) for row in run["rows"])


def test_each_file_is_the_source_of_something():
    """A page, a docstring or a test names it; git keeps what a newer run has replaced."""
    sources = [ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").rglob("*.md")]
    sources += [*(ROOT / "onepass").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    named = {name for source in sources for name in re.findall(r"\b(?:cpu|h200)[\w*-]*\.json", source.read_text())}
    assert [path.name for path in FILES if not any(fnmatch(path.name, name) for name in named)] == []

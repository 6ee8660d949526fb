"""benchmarks/results/: every file has the form that onepass.testing.results describes, and something refers to it."""

import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from benchmarks.timeline import picture
from benchmarks.timeline.summary import table
from benchmarks.timeline.traces import from_chrome
from onepass.testing.results import SCHEMA_VERSION

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
RECORD = "h200-tests.json"  # a record of tests, not of measurements
TRACES = [path for path in FILES if path.name.startswith("h200-trace-")]  # Chrome traces of `onepass trace`
MOST_BYTES_OF_A_TRACE = 400_000
pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not a checkout")


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.name != RECORD and path not in TRACES], ids=lambda path: path.stem
)
def test_form(path):
    data = json.loads(path.read_text())
    assert data["schema_version"] == SCHEMA_VERSION
    for run in data.get("runs", [data]):
        assert run["header"]
        assert run["rows"]
        assert all(isinstance(row, dict) for row in run["rows"])


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_traces_can_be_read_and_drawn(path, tmp_path):
    """They are Chrome traces, small, and say what they are of; the picture and the table can be made from them."""
    pytest.importorskip("matplotlib")
    trace = json.loads(path.read_text())
    assert path.stat().st_size < MOST_BYTES_OF_A_TRACE
    about = trace["otherData"]
    assert {"case", "commit", "cut", "device_name", "timelines"} <= about.keys()
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "args"} <= event.keys()
        assert event["ph"] == "M" or (event["ts"] >= 0 and event["dur"] >= 0)
    timelines = from_chrome(trace)
    assert [timeline.label for timeline in timelines] == [timeline["label"] for timeline in about["timelines"]]
    picture.draw(timelines[:1], picture.title_of(about), tmp_path / "picture.png")
    assert table(timelines).count("\n") == 1 + len(timelines)


def test_each_file_is_the_source_of_something():
    """A page, a docstring or a test names it; git keeps what a newer run has replaced."""
    sources = [ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").rglob("*.md")]
    sources += [path for folder in ("onepass", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")]
    named = {name for source in sources for name in re.findall(r"\b(?:cpu|h\d+)[\w*-]*\.json", source.read_text())}
    assert [path.name for path in FILES if not any(fnmatch(path.name, name) for name in named)] == []

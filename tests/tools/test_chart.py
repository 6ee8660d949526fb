"""The pictures of docs/performance.md: what is read from results files, and that it can be drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import chart

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def write(folder: Path, name: str, rows: list[dict]) -> None:
    (folder / name).write_text(json.dumps({"rows": rows}))


def grid_row(seqlen: int, contender: str, tflops: float | None) -> dict:
    return {"head_dim": 64, "causal": False, "seqlen": seqlen, "contender": contender, "tflops": tflops}


MEASUREMENT = chart.Measurement("a", "TFLOP/s", ("1.json", "2.json"), {"own": "onepass", "x": "cuDNN", "y": "cuDNN"})


def test_the_fastest_contender_of_a_library_counts(tmp_path):
    rows = [grid_row(512, name, speed) for name, speed in (("own", 6.0), ("x", 2.0), ("y", 3.0), ("other", 100.0))]
    write(tmp_path, "1.json", rows)
    write(tmp_path, "2.json", [grid_row(1024, "own", 5.0), grid_row(1024, "x", None)])
    (speeds,) = chart.read(MEASUREMENT, tmp_path).values()
    assert speeds == {"onepass": 6.0, "cuDNN": 3.0}


def test_later_files_replace_earlier_ones(tmp_path):
    for file, speed in (("1.json", 3.0), ("2.json", 9.0)):
        write(tmp_path, file, [grid_row(512, "own", speed), grid_row(512, "x", 1.0)])
    (speeds,) = chart.read(MEASUREMENT, tmp_path).values()
    assert speeds["onepass"] == 9.0


def test_rows_with_all_contenders_of_a_case(tmp_path):
    case = {"head_dim": 128, "causal": True, "batch": 2, "seqlen_k": 8, "heads_q": 4, "heads_kv": 1}
    contenders = {"own": {"tb_per_s": 4.0}, "x": {"tb_per_s": 2.0}}
    write(tmp_path, "1.json", [{"case": case, "kv_bytes": 64, "contenders": contenders}])
    speeds = chart.read(MEASUREMENT._replace(files=("1.json",), kind="tb_per_s"), tmp_path)
    assert speeds == {chart.Case(128, True, 2, 8, "4/1", 64): {"onepass": 4.0, "cuDNN": 2.0}}
    assert list(chart.ratios(speeds).values()) == [2.0]


@pytest.mark.parametrize(
    ("name", "count"), [("forward", 36), ("backward", 36), ("fp8", 30), ("decode", 56), ("cpu", 24)]
)
def test_every_case_of_the_results_is_drawn(name, count):
    assert len(chart.read(chart.MEASUREMENTS[name], RESULTS)) == count


def test_pictures_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    written = chart.draw(RESULTS, tmp_path)
    assert [path.name for path in written] == [
        "performance.png",
        "performance-forward.png",
        "performance-backward.png",
        "performance-fp8.png",
        "performance-cpu.png",
        "performance-decode.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)

"""The record of GPU tests: logs are read as pytest writes them, and what is older than the kernels is said."""

import collections
import concurrent.futures
import importlib.util
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "gpu" / "record.py"
spec = importlib.util.spec_from_file_location("gpu_record", PATH)
record = importlib.util.module_from_spec(spec)
spec.loader.exec_module(record)

LOG = """
tests/gpu/test_values.py::test_masks[q 3 - k 4]
[gw8] [  0%] PASSED tests/gpu/test_values.py::test_masks[q 3 - k 4]
[gw2] [  1%] FAILED tests/gpu/test_values.py::test_masks[q 5]
tests/gpu/test_fp8.py::test_values[64-{'causal': True}] PASSED     [ 10%]
tests/gpu/test_fp8.py::test_two SKIPPED (no Hopper GPU)            [ 20%]
[gw1] [ 30%] ERROR tests/gpu/test_graphs.py::test_replay
"""
ABOUT = {"commit": "1234567890", "date": "2026-11-22", "gpu": "NVIDIA H200", "backend": "sm90", "kernels": "new"}


def test_outcomes_with_and_without_xdist():
    assert record.outcomes(LOG) == {
        "tests/gpu/test_values.py::test_masks[q 3 - k 4]": "PASSED",
        "tests/gpu/test_values.py::test_masks[q 5]": "FAILED",
        "tests/gpu/test_fp8.py::test_values[64-{'causal': True}]": "PASSED",
        "tests/gpu/test_fp8.py::test_two": "SKIPPED",
        "tests/gpu/test_graphs.py::test_replay": "ERROR",
    }


def test_a_new_row_takes_the_place_of_the_old_one():
    kernels = {"old": {"forward": "1", "backward": "1"}, "new": {"forward": "1", "backward": "2"}}
    empty = {"schema": 2, "kernels": kernels, "rows": []}
    old = record.added(empty, record.outcomes(LOG), {**ABOUT, "kernels": "old"})
    assert list(old["kernels"]) == ["old"]  # no row was run with the others
    counts = {row["file"]: (row["passed"], row["failed"], row["skipped"]) for row in old["rows"]}
    assert counts == {"test_fp8.py": (1, 0, 1), "test_graphs.py": (0, 1, 0), "test_values.py": (1, 1, 0)}
    again = "[gw1] [ 30%] PASSED tests/gpu/test_graphs.py::test_replay"
    new = record.added({**old, "kernels": kernels}, record.outcomes(again), ABOUT)
    assert {row["file"]: row["kernels"] for row in new["rows"]} == {
        "test_fp8.py": "old",
        "test_graphs.py": "new",
        "test_values.py": "old",
    }
    new["rows"].append({**new["rows"][0], "backend": "sm80"})
    tests = {"test_fp8.py": 5, "test_graphs.py": 1, "test_large.py": 2}
    names = [f"tests/gpu/{file}::test_{i}" for file, count in tests.items() for i in range(count)]
    run = "(1234567, 2026-11-22, NVIDIA H200)"
    lines = [" ".join(line.split()) for line in record.report(new, names, kernels["new"])]
    assert lines == [
        f"test_fp8.py (sm80) 1 of 5 passed, 0 failed, 3 not run; 1 of 2 kernels have changed since {run}",
        f"test_fp8.py 1 of 5 passed, 0 failed, 3 not run; 1 of 2 kernels have changed since {run}",
        f"test_graphs.py 1 of 1 passed, 0 failed, 0 not run; these kernels {run}",
        "test_large.py never recorded (2 tests)",
    ]
    unchanged = record.report(new, names, {"forward": "1"})  # a draw that leaves out the changed one
    assert all("these kernels" in line for line in unchanged[:3])
    more = record.report(new, names, {"forward": "1", "decode": "3"})  # the digests have not always covered decode
    assert more[:3] == unchanged[:3]
    new["kernels"]["new"] = {}
    assert "not run; kernels not compared" in record.report(new, names, kernels["new"])[2]


def test_a_kernel_that_does_not_compile_has_no_digest(monkeypatch):
    """Otherwise two trees in which nothing compiles would have equal kernels."""
    code_digests = pytest.importorskip("code_digests", reason="nvidia-cutlass-dsl is not installed")
    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", lambda *options: ThreadPoolExecutor(1))
    monkeypatch.setattr(code_digests, "requests", lambda: iter([("forward", ("sm_90a", None)), ("forward 2", ())]))
    with pytest.raises(RuntimeError, match=r"^1 of 1 kernels have no digest: forward$"):
        code_digests.digests(["forward"])


def test_every_file_has_passed_on_a_gpu():
    if not record.RECORD.exists():
        pytest.skip("the results are not part of the package")
    kept = json.loads(record.RECORD.read_text())
    passed = collections.Counter()
    for row in kept["rows"]:
        passed[row["file"]] += row["passed"]  # on Hopper, odd head dims are left to the Ampere kernels
        assert row["passed"] + row["skipped"] > 0, row
        assert row["failed"] == 0, row
        assert row["kernels"] in kept["kernels"], row
    files = {path.name for path in PATH.parent.glob("test_*.py")}
    assert passed.keys() == files
    assert min(passed.values()) > 0, passed

"""`onepass bench` on the command line, without a terminal."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from benchmarks.harness.suite import Suite
from onepass.bench import rows, run
from onepass.bench.cases import get_case_set
from onepass.bench.flops import flops
from onepass.cli import bench as cli_bench
from onepass.cli.app import app

pytestmark = pytest.mark.usefixtures("wide_and_single_threaded")


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def _small_gemm(monkeypatch):
    """A CPU without instructions for float16 takes seconds for the GEMM of the full size."""
    monkeypatch.setattr(cli_bench, "Options", functools.partial(rows.Options, gemm_size=64))


@pytest.mark.slow
@pytest.mark.usefixtures("_small_gemm")
def test_bench_smoke(tmp_path):
    path, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = ["bench", "smoke", "--device", "cpu", "--rounds", "2", "--peers", "sdpa,fa4"]
    result = invoke(*arguments, "--json", str(path), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text())
    assert data["status"] == "complete"
    assert len(data["rows"]) == 4
    assert list(data["header"]["peers"]["absent"]) == ["fa4"]
    assert "absent: fa4" in result.output
    assert "geometric mean" in result.output
    assert picture.exists()


def test_bench_passes_its_options_on(monkeypatch):
    asked = []
    report = SimpleNamespace(status="complete", wrong=[], rows=[])
    monkeypatch.setattr(cli_bench, "run", lambda sets, options, *rest: asked.append((sets, options)) or report)
    monkeypatch.setattr(cli_bench, "_print_report", lambda *arguments: None)
    arguments = ("--rounds", "2", "--time-budget", "0.5", "--peers", "sdpa , fa4,", "--dtype", "float64")
    result = invoke("bench", "smoke", "--device", "cpu", *arguments)
    assert result.exit_code == 0, result.output
    ((sets, options),) = asked
    assert options == rows.Options("cpu", ["sdpa", "fa4"], 2, 0.5)
    assert {case.dtype for case_set in sets for case in case_set.cases} == {"float64"}
    invoke("bench", "decode", "decode-rows", "--device", "cpu")
    assert [case_set.name for case_set in asked[1][0]] == ["decode-cpu"] * 2


def test_the_papers_cases_run_on_a_cpu_where_somebody_says_so(monkeypatch):
    asked = []
    report = SimpleNamespace(status="complete", wrong=[], rows=[])
    monkeypatch.setattr(cli_bench, "run", lambda sets, *rest: asked.append(sets) or report)
    monkeypatch.setattr(cli_bench, "_print_report", lambda *arguments: None)
    cases = get_case_set("paper").cases
    reason = f"paper: {len(cases)} cases of {sum(map(flops, cases)) / 1e12:.0f} TFLOP in all, made for a GPU"
    result = invoke("bench", "paper", "--device", "cpu")
    assert result.exit_code == 2
    assert f"{reason}; expected the set cpu on a CPU" in result.output
    monkeypatch.setattr(cli_bench, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    for answer, exit_code in (("n", 2), ("y", 0)):
        assert asked == []
        result = CliRunner().invoke(app, ["bench", "paper", "--device", "cpu"], input=f"{answer}\n")
        assert result.exit_code == exit_code
        assert f"{reason}. Run them on a CPU?" in result.output
    assert [case_set.name for case_set in asked.pop()] == ["paper"]
    result = invoke("bench", "paper", "--device", "cpu", "--only", "head_dim=64,seqlen=512")
    assert (result.exit_code, reason in result.output) == (0, False)


@pytest.mark.parametrize("status", [0, 1, 130])
def test_bench_runs_the_context_parallel_suite(monkeypatch, status):
    asked = []
    monkeypatch.setattr(Suite, "main", lambda suite, arguments: asked.append((suite.name, arguments)) or status)
    suite = ("bench", "context-parallel", "--device", "cpu")
    assert invoke(*suite, "--rounds", "3", "--only", "causal", "--peers", "none").exit_code == status
    assert invoke(*suite).exit_code == status
    common = ["--device", "cpu", "--peers"]
    assert asked == [
        ("context_parallel", [*common, "0", "--cases", "causal", "--smoke", "--rounds", "3"]),
        ("context_parallel", [*common, "1", "--cases", "", "--smoke"]),
    ]
    assert invoke(*suite, "--dtype", "float32").exit_code == 2


def test_plain_bench_on_a_cpu_runs_its_sets_into_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_time_row", lambda *args: _empty_row("time", *args))
    monkeypatch.setattr(run, "_memory_row", lambda *args: _empty_row("memory", *args))
    path = tmp_path / "all.json"
    result = invoke("bench", "--device", "cpu", "--json", str(path))
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["set"] for row in rows] == ["cpu"] * 24 + ["cpu-bf16"] * 24 + ["window"] * 4 + ["memory"] * 4
    assert {row["measure"] for row in rows if row["set"] == "memory"} == {"memory"}


def _empty_row(measure, set_name, case, found, options):
    return {**run._new_row(set_name, measure, case, options), "score_matrix_bytes": 0}


@pytest.mark.parametrize(
    ("failure", "exit_code", "text"),
    [
        (KeyboardInterrupt, 130, "interrupted after 0 of 4 cases"),
        ({"onepass": "max error 1"}, 1, "onepass failed in 4 of 4 cases"),
        ({"sdpa": "out of memory"}, 0, "FAILED sdpa"),
    ],
)
def test_exit_codes_of_bench(monkeypatch, failure, exit_code, text):
    def row(*args):
        if failure is KeyboardInterrupt:
            raise KeyboardInterrupt
        return {**_empty_row("time", *args), "failed": failure}

    monkeypatch.setattr(run, "_time_row", row)
    result = invoke("bench", "smoke", "--device", "cpu")
    assert result.exit_code == exit_code
    assert text in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nonsense"], "expected one of paper, cpu"),
        (["smoke", "--device", "tpu"], "expected auto, cpu, cuda"),
        (["smoke", "--peers", "fa9"], "fa9"),
        (["smoke", "--dtype", "int8"], "int8"),
        (["smoke", "--only", "head_dim=7"], "no case"),
    ],
)
def test_bench_refuses_what_makes_no_sense(arguments, text):
    result = invoke("bench", *arguments)
    assert result.exit_code == 2
    assert text in result.output
    assert "Traceback" not in result.output

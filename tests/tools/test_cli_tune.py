"""`onepass tune` and what `onepass cache` says of it, without a GPU: on the machine of tuning_fakes.py."""

import contextlib
import dataclasses
import gc
import importlib
import json

import pytest
import torch

pytest.importorskip("typer")

import tuning_fakes
from tuning_fakes import GPU, PROBLEM, TASK, FakeRuns, machine, samples_of_a_race
from typer.testing import CliRunner

from onepass.cli.app import app
from onepass.kernels.config import HOPPER
from onepass.kernels.heuristics import tuned
from onepass.tuning import tuner
from onepass.tuning.space import candidates

cli = importlib.import_module("onepass.cli.tune")  # `onepass.cli.tune` may be the function
CONFIGS = candidates(*TASK, HOPPER)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(gc, "collect", lambda: 0)  # it precedes each measurement, and there are many imagined ones here
    monkeypatch.setenv("COLUMNS", "200")
    yield from tuning_fakes.own_cache(monkeypatch, tmp_path)


@pytest.fixture
def imagine(monkeypatch):
    """Make the command run on a fake machine: imagine(runs, tasks=(TASK,), failed=()) -> the calls that it asks for."""

    def imagined(runs, tasks=(TASK,), failed=()):
        asked = []

        def tasks_of(calls, backend, gradients):
            asked.append((calls, backend, gradients))
            return list(tasks)

        def measure(tasks, rounds, limit, workers, table, progress):
            options = {"rounds": rounds, "limit": limit, "workers": workers, "table": table, "progress": progress}
            tuner.tune_all(tasks, machine(runs, failed), **options)

        monkeypatch.setattr(cli, "tasks_of", tasks_of)
        monkeypatch.setattr(cli, "_measure", measure)
        monkeypatch.setattr(cli, "describe", lambda device: {"device": device})
        return asked

    return imagined


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def gaining(config):
    return 0.9 if config == CONFIGS[3] else 1.0


def test_help():
    result = invoke("tune", "--help")
    assert result.exit_code == 0
    for text in ("--paper-grid", "--backward", "ONEPASS_TUNED=0", "130 after Ctrl-C"):
        assert text in result.output
    assert "tune" in invoke("--help").output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    result = invoke("tune")
    assert result.exit_code == 2
    assert "cannot be tuned here: expected a GPU to measure on, torch sees none here" in result.stderr
    for device, text in (("cpu", "expected a GPU to measure on, got 'cpu'"), ("cuda:1", "it sees 0 GPUs")):
        result = invoke("tune", "--device", device)
        assert result.exit_code == 2
        assert text in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dtype", "int8"), "--dtype: expected one of"),
        (("--heads", "8", "--heads-kv", "3"), "--heads-kv: expected a divisor of 8 heads, got 3"),
    ],
)
def test_bad_options(arguments, message):
    result = invoke("tune", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_v_may_be_narrower(imagine):
    asked = imagine(FakeRuns(lambda config: 1.0))
    assert invoke("tune", "--head-dim", "64", "--head-dim-v", "32", "--backend", "sm90").exit_code == 0
    ((call,), _, _) = asked[0]
    assert (call["k"][3], call["v"][3]) == (64, 32)


def test_keys_may_be_more_than_queries(imagine):
    asked = imagine(FakeRuns(lambda config: 1.0))
    assert invoke("tune", "--seqlen", "500", "--seqlen-k", "900", "--backend", "sm90").exit_code == 0
    ((call,), _, _) = asked[0]
    assert [call[name][1] for name in "qkv"] == [500, 900, 900]


def test_a_gain(imagine, tmp_path):
    asked = imagine(FakeRuns(gaining))
    path = tmp_path / "tune.json"
    options = ("--head-dim", "64", "--seqlen", "1000", "--batch", "2", "--heads", "8", "--heads-kv", "2", "--causal")
    result = invoke("tune", *options, "--backend", "sm90", "--json", str(path))
    assert result.exit_code == 0, result.output
    shapes = {"q": (2, 1000, 8, 64), "k": (2, 1000, 2, 64), "v": (2, 1000, 2, 64)}
    assert asked == [([shapes | {"dtype": torch.bfloat16, "causal": True}], "sm90", False)]
    assert "11.1 % faster (noise 0.0 %), of 24" in result.output
    assert "faster than the heuristics: 1 of 1, at most 11.1 %; kept in" in result.output
    data = json.loads(path.read_text())
    assert data["rows"][0]["config"] == CONFIGS[3].text
    assert tuned.load(tuned.own_path())[GPU][tuned.key_of(*TASK)].config == CONFIGS[3].text


def test_no_gain(imagine):
    imagine(FakeRuns(lambda config: 1.0))
    result = invoke("tune", "--verbose")
    assert result.exit_code == 0
    assert result.output.replace("\n", " ").count("tile_n=112") > 0
    assert "the heuristics' choice stays, of 24" in result.output
    assert "faster than the heuristics: 0 of 1; kept in" in result.output


def test_another_table(imagine, tmp_path):
    imagine(FakeRuns(gaining))
    path = tmp_path / "table.json"
    assert invoke("tune", "--table", str(path), "--candidates", "8", "--rounds", "9").exit_code == 0
    assert not tuned.own_path().exists()
    assert tuned.parse(path.read_bytes())[GPU][tuned.key_of(*TASK)].config == CONFIGS[3].text


def test_wrong_results(imagine):
    imagine(FakeRuns(gaining, wrong=lambda config: config == CONFIGS[3]), failed=(CONFIGS[4],))
    result = invoke("tune")
    assert result.exit_code == 1
    assert "not timed" in result.output
    assert "does not compile: out of registers" in result.output
    assert "candidates with wrong results, which were not timed: 1" in result.stderr


def other_task():
    return TASK._replace(problem=dataclasses.replace(PROBLEM, dtype=torch.float16))


def test_ctrl_c(imagine, tmp_path):
    other = other_task()
    heats, final = samples_of_a_race(len(CONFIGS), 25)
    # the final has three other contenders only if three are faster
    speeds = {config: 0.9 + 0.01 * i for i, config in enumerate(CONFIGS[1:4])}
    imagine(FakeRuns(lambda config: speeds.get(config, 1.0), interrupt_after=heats + final + 3), (TASK, other))
    path = tmp_path / "tune.json"
    result = invoke("tune", "--json", str(path))
    assert result.exit_code == 130
    assert "interrupted after 1 of 2" in result.stderr
    data = json.loads(path.read_text())
    assert ([one["kept"] for one in data["rows"]], data["status"]) == ([True, False], "interrupted")
    assert len(tuned.load(tuned.own_path())[GPU]) == 1


def test_the_backward_instead_of_the_forward(imagine):
    imagine(FakeRuns(lambda config: 1.0), (TASK, TASK._replace(direction="bwd")))
    result = invoke("tune", "--backward")
    assert result.exit_code == 0
    assert [key.split()[0] for key in tuned.load(tuned.own_path())[GPU]] == ["bwd"]


def test_backward_where_there_is_none(imagine):
    asked = imagine(FakeRuns(gaining))
    result = invoke("tune", "--backward")
    assert result.exit_code == 2
    assert "gradients come from kernels" in result.stderr
    assert asked[0][2] is True


def test_the_papers_grid(imagine):
    asked = imagine(FakeRuns(gaining))
    assert invoke("tune", "--paper-grid", "--dtype", "float16").exit_code == 0
    calls = asked[0][0]
    assert len(calls) == 36
    assert {call["dtype"] for call in calls} == {torch.float16}
    assert {call["q"][0] * call["q"][1] for call in calls} == {16384}
    assert {call["q"][2] * call["q"][3] for call in calls} == {2048}
    assert invoke("tune", "--paper-grid", "--only", "head_dim=128,causal=true,seqlen=512/1024").exit_code == 0
    assert [call["q"] for call in asked[1][0]] == [(32, 512, 16, 128), (16, 1024, 16, 128)]
    result = invoke("tune", "--paper-grid", "--only", "size=3")
    assert result.exit_code == 2
    assert "--only: expected field=value" in result.stderr
    assert "expected --paper-grid with it" in invoke("tune", "--only", "head_dim=64").stderr


def test_only_what_is_missing(imagine, monkeypatch):
    monkeypatch.setattr(tuned, "gpu_name", lambda device=None: GPU)
    imagine(FakeRuns(gaining), (TASK, other_task()))
    tuned.save(GPU, {tuned.key_of(*TASK): tuned.Entry("a", "b", 1.0, "these kernels", "")})
    result = invoke("tune", "--missing")
    assert "of 1, at most" in result.output
    assert set(tuned.load(tuned.own_path())[GPU]) == {tuned.key_of(*TASK), tuned.key_of(*other_task())}
    assert "faster than the heuristics: 0 of 0" in invoke("tune", "--missing").output
    tuned.save(GPU, {tuned.key_of(*TASK): tuned.Entry("a", "b", 1.0, "other kernels", "")})
    assert "of 1, at most" in invoke("tune", "--missing").output


def test_cache_lists_and_clears(imagine):
    imagine(FakeRuns(gaining))
    assert "tuned configurations" not in invoke("cache").output
    assert "no tuned configurations" in invoke("cache", "clear", "--tuned").output
    invoke("tune")
    assert f"tuned configurations for {GPU}: 1, 1 of them instead of the heuristics' choice" in invoke("cache").output
    assert invoke("cache", "clear", "--yes").exit_code == 0
    assert tuned.own_path().exists()
    assert invoke("cache", "clear", "--tuned", "--yes").exit_code == 0
    assert not tuned.own_path().exists()
    tuned.own_path().symlink_to("nowhere")
    assert invoke("cache", "clear", "--tuned", "--yes").exit_code == 0
    assert not tuned.own_path().is_symlink()


def test_cache_says_what_is_wrong_with_the_table():
    tuned.save(GPU, {})
    tuned.own_path().write_text("{")
    assert "tuned configurations: not used" in invoke("cache").output


def test_measuring_passes_all_limits_on(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(tuner, "tune_all", lambda tasks, machine, **options: asked.append((tasks, machine, options)))
    monkeypatch.setattr(tuner.Machine, "here", lambda device: device)
    for name in ("current_device", "Stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *a: contextlib.nullcontext() if a else 3)
    monkeypatch.setattr(torch, "device", lambda *names: names)
    cli._measure([TASK], 9, 8, 2, tmp_path, "progress")
    expected = {"rounds": 9, "limit": 8, "workers": 2, "table": tmp_path, "progress": "progress"}
    assert asked == [([TASK], ("cuda", 3), expected)]


def test_the_device_and_the_limits_of_the_command(imagine, monkeypatch):
    imagine(FakeRuns(lambda config: 1.0))
    entered, asked = [], []
    monkeypatch.setattr(cli, "resolve_device", lambda name: name)
    monkeypatch.setattr(torch.cuda, "device", lambda name: entered.append(name) or contextlib.nullcontext())
    monkeypatch.setattr(cli, "_measure", lambda tasks, *limits: asked.append(limits[:3]))
    assert invoke("tune").exit_code == 0
    limits = ("--rounds", "9", "--candidates", "8", "--workers", "2")
    assert invoke("tune", "--device", "cuda:1", *limits).exit_code == 0
    assert entered == ["cuda:1"]
    assert asked == [(25, 24, None), (9, 8, 2)]


@pytest.mark.parametrize("verbose", [False, True])
def test_errors_of_the_measurement(imagine, monkeypatch, verbose):
    def fails(*arguments):
        raise RuntimeError("the heuristics' choice does not compile")

    imagine(FakeRuns(lambda config: 1.0))
    monkeypatch.setattr(cli, "_measure", fails)
    result = invoke("tune", *["--verbose"] * verbose)
    assert result.exit_code == 1
    assert isinstance(result.exception, RuntimeError if verbose else SystemExit)
    assert verbose or "the heuristics' choice does not compile" in result.stderr


@pytest.mark.parametrize("option", ["--table", "--json"])
def test_files_are_tried_before_the_work(imagine, monkeypatch, tmp_path, option):
    imagine(FakeRuns(gaining))
    monkeypatch.setattr(cli, "_measure", lambda *arguments: pytest.fail("it has begun"))
    result = invoke("tune", option, str(tmp_path))
    assert result.exit_code == 2
    assert f"{option}: expected a file to write" in result.stderr


def test_only_what_is_missing_in_another_table(imagine, monkeypatch, tmp_path):
    monkeypatch.setattr(tuned, "gpu_name", lambda device=None: GPU)
    imagine(FakeRuns(gaining), (TASK, other_task()))
    path = tmp_path / "table.json"
    tuned.save(GPU, {tuned.key_of(*TASK): tuned.Entry("a", "b", 1.0, "these kernels", "")})
    assert "of 2, at most" in invoke("tune", "--missing", "--table", str(path)).output
    assert "faster than the heuristics: 0 of 0" in invoke("tune", "--missing", "--table", str(path)).output

"""The plugin that runs peers' tests: its sample is a Latin hypercube, and its outcomes are counted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from onepass import compat

HERE = Path(__file__).resolve().parents[1] / "peers"

pytestmark = pytest.mark.skipif(not hasattr(compat, "install"), reason="the plugin puts modules in place by install()")

TESTS = """
import pytest
import torch
from flash_attn import flash_attn_func


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [8, 16, 32, 64])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(4, 8), (8, 4), (1, 5), (64, 64)])
def test_sampled(seqlen_q, seqlen_k, d, causal):
    q = torch.randn(1, seqlen_q, 2, d, device="cuda")
    assert flash_attn_func(q, q, q, causal=causal).is_cuda
    for i in range(50):
        pass
    assert i < 50


def test_refused():
    raise NotImplementedError("no")


def test_failed():
    raise AssertionError("wrong")


def test_skipped():
    pytest.skip("not here")
"""


def run(folder, *options):
    """Run `TESTS` with 4 cases of each function. Returns: the outcomes, from --peer-json."""
    (folder / "test_peer.py").write_text(TESTS)
    options = [
        "--peer-cases=4",
        "--peer-pairs=100",
        "--peer-device=cpu",
        *options,
        f"--peer-json={folder / 'out.json'}",
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "peer_tests",
        "-p",
        "no:cacheprovider",
        "-q",
        *options,
        "test_peer.py",
    ]
    environment = {"PYTHONPATH": f"{HERE}:{HERE.parents[1]}", "PATH": "", "ONEPASS_CACHE_DIR": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return json.loads((folder / "out.json").read_text())


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run(tmp_path_factory.mktemp("peers"))


def test_outcomes(outcomes):
    kinds = {name: {case["outcome"] for case in cases.values()} for name, cases in outcomes.items()}
    assert kinds == {
        "test_sampled": {"passed"},
        "test_refused": {"refused"},
        "test_failed": {"failed"},
        "test_skipped": {"skipped"},
    }


def test_each_value_of_each_parameter_is_met_equally_often(outcomes):
    """4 cases: each of 4 head_dims once, causal twice, and each of the 3 pairs of lengths that are small enough."""
    names = [node.split("[")[1].rstrip("]").split("-") for node in outcomes["test_sampled"]]
    assert len(names) == 4
    assert sorted(int(name[2]) for name in names) == [8, 16, 32, 64]
    assert sorted(name[3] for name in names) == ["False", "False", "True", "True"]
    assert {tuple(name[:2]) for name in names} == {("4", "8"), ("8", "4"), ("1", "5")}


@pytest.mark.slow
def test_a_run_goes_on_where_another_ended(outcomes, tmp_path):
    """Cases that have run count and do not run again; only the named function runs; each outcome is written at once."""
    names = [node.split("::")[1] for node in outcomes["test_sampled"]]
    (tmp_path / "done.json").write_text(json.dumps(names[:3]))
    lines = tmp_path / "lines"
    options = f"--peer-done={tmp_path / 'done.json'}", f"--peer-lines={lines}", "--peer-function=test_sampled"
    found = run(tmp_path, *options)
    assert [node.split("::")[1] for node in found.pop("test_sampled")] == names[3:]
    assert found == {}
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(row["case"], row["outcome"]) for row in rows] == [(names[3], "passed")]


@pytest.mark.slow
def test_processes_side_by_side(tmp_path, monkeypatch):
    """Functions that need a GPU alone run last, all outcomes are in the file, and a second run changes nothing.

    Failures are tried again, once in a run. A function that has ended without one is not collected again.
    """
    monkeypatch.syspath_prepend(str(HERE))
    import run_peer_tests

    for folder in run_peer_tests.FOLDERS:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test_flash_attn.py").write_text(
            "def test_a():\n    pass\n\n\ndef test_b():\n    assert 0\n"
        )
    monkeypatch.setattr(run_peer_tests, "MODULES", {"fa4": ["--peer-device", "cpu"]})
    monkeypatch.setattr(run_peer_tests, "FOLDERS", ("fa4",))
    monkeypatch.setattr(run_peer_tests, "ALONE", {("fa4", "test_a")})
    monkeypatch.setattr(run_peer_tests, "describe", lambda device: {})
    monkeypatch.setattr(run_peer_tests.torch.cuda, "device_count", lambda: 2)
    jobs = run_peer_tests.jobs_of(tmp_path, [0, 1])
    assert [(job.function, job.seed, job.is_alone) for job in jobs] == [
        ("test_b", 0, False),
        ("test_b", 1, False),
        ("test_a", 0, True),
        ("test_a", 1, True),
    ]
    results = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["run", f"--tests={tmp_path}", f"--results={results}", "--workers=2", "--seeds=0"])
    start, started = run_peer_tests.Run.start, []
    monkeypatch.setattr(run_peer_tests.Run, "start", lambda self, job: started.append(job) or start(self, job))
    for before in (["test_b", "test_a"], ["test_b"]):
        started.clear()
        run_peer_tests.main()
        found = json.loads(results.read_text())
        outcomes = [(row["case"], row["outcome"]) for row in found["rows"]]
        assert outcomes == [("test_a", "passed"), ("test_b", "failed")]
        assert found["ended"] == [["fa4", "test_a", 0]]
        jobs = [(job.function, job.is_retry) for job in started]
        assert jobs == [*((name, False) for name in before), ("test_b", True)]

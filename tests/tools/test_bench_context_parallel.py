"""The suite context_parallel: small cases on ranks of a CPU, and what its rows say."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import types
import weakref
from pathlib import Path

import pytest
import torch
from ranks import loopback

from benchmarks.suites import context_parallel as suite
from benchmarks.suites import context_parallel_cases as cases
from benchmarks.suites import context_parallel_contenders as contenders
from onepass import distributed
from onepass.tuning.timing import Samples

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_command_on_two_ranks(tmp_path):
    path = tmp_path / "rows.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["bench", "context-parallel", "--device", "cpu", "--rounds", "2", "--peers", "none"]
    command = [*launcher, "-m", "onepass.cli", *arguments, "--json", str(path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    data = json.loads(path.read_text())
    assert data["status"] == "complete"
    assert [row["kind"] for row in data["rows"]] == list(cases.KINDS)
    for row in data["rows"]:
        assert done.stdout.count(f"{row['case']} on 2 ranks") == 1  # one rank prints
        assert row["failed"] == {}
        assert set(row["contenders"]) == {"one device", "onepass heads", "onepass keys"}
        assert row["planned"] in row["contenders"]
        alone = row["contenders"]["one device"]
        assert alone["error"] == 0
        for name in ("onepass heads", "onepass keys"):
            entry = row["contenders"][name]
            assert entry["E"] == pytest.approx(alone["ms"] / 2 / entry["ms"], abs=1e-3)
            assert entry["E_prime"] == pytest.approx(entry["own_calls_ms"] / entry["ms"], abs=1e-3)
            assert entry["error"] < suite.TOLERANCE
            assert entry["received_bytes"] > 0


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield suite.Ranks(torch.device("cpu"), 0, 1)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_wrong_results_are_not_timed(one_rank, monkeypatch):
    """A contender that is off beside one device is a failure, and so is the run."""
    right = distributed.attention
    monkeypatch.setattr(contenders.distributed, "attention", lambda *a, **k: _scaled(right(*a, **k)))
    args = argparse.Namespace(graphs=False, rounds=1, sample_ms=0.1, peers=0, out=None)
    case = cases.ContextCase("causal", 4, 2, 20, "fwd", 16)
    args.chosen, args.ranks = [case], one_rank
    row = suite.measured(case, args, one_rank)
    assert set(row["contenders"]) == {"one device"}
    assert set(row["failed"]) == {"onepass heads", "onepass keys"}
    assert all("expected an error up to" in reason for reason in row["failed"].values())
    assert suite.SUITE.run(args, {}) == 1


def _scaled(found):
    return found * 1.1 if isinstance(found, torch.Tensor) else found


def test_graphs_are_timed_beside_calls(one_rank, monkeypatch):
    """A CUDA graph of each of onepass's calls is a contender with the shares of the call."""
    names = []
    monkeypatch.setattr(suite, "Captured", lambda work: names.append(work) or work)
    args = argparse.Namespace(graphs=True, rounds=1, sample_ms=0.1, peers=0, out=None)
    row = suite.measured(cases.ContextCase("causal", 4, 2, 20, "fwd", 16), args, one_rank)
    engines = {"onepass heads", "onepass keys"}
    assert set(row["contenders"]) == {"one device", *engines, *(f"{name}, graph" for name in engines)}
    assert len(names) == 2
    for name in engines:
        assert row["contenders"][f"{name}, graph"]["own_calls_ms"] == row["contenders"][name]["own_calls_ms"]


def test_a_graph_keeps_the_tensors_that_it_reads(monkeypatch):
    """Without them a replay reads memory that capturing another graph has given back."""
    replays = []
    graph = types.SimpleNamespace(replay=lambda: replays.append(1))
    fakes = {"Stream": lambda: None, "synchronize": lambda: None, "CUDAGraph": lambda: graph}
    fakes |= dict.fromkeys(("stream", "graph"), lambda of: contextlib.nullcontext())
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    q = torch.ones(2)
    is_alive = weakref.ref(q)
    captured = suite.Captured(lambda q=q: q + 1)
    del q
    assert torch.equal(captured(), torch.full((2,), 2.0))
    assert len(replays) == 1
    assert is_alive() is not None


def test_cases():
    four = cases.cases(4)
    assert len(four) == 28
    assert {case.tokens for case in four} == {32768, 65536}
    assert {case.tokens for case in four if case.kind == "window"} == {65536}
    packed = next(case for case in four if case.kind == "packed")
    lengths = torch.tensor(packed.offsets).diff()
    assert packed.offsets[-1] == packed.tokens
    assert lengths[:-1].min() >= 256
    assert lengths.max() <= 16384
    assert packed.offsets == packed.offsets


def test_flops():
    causal = cases.ContextCase("causal", 4, 2, 100, "fwd", 16)
    assert causal.flops == 4 * 16 * 4 * 100 * 101 // 2
    assert cases.ContextCase("causal", 4, 2, 100, "fwd+bwd", 16).flops == causal.flops * 7 // 2
    assert cases.ContextCase("window", 4, 2, 100, "fwd", 16, window=1).flops == 4 * 16 * 4 * 100


def test_shares():
    case = cases.ContextCase("full", 4, 4, 64, "fwd", 16)
    ms = {"one device": [8.0, 8.0], "onepass heads": [2.5, 2.5], "own": [2.0, 2.0]}
    prepared = {name: suite.Prepared(lambda: None, lambda: None) for name in ms}
    prepared["one device"].facts["peak_bytes"] = 4000
    row = {"contenders": {}}
    suite.fill(row, case, Samples(ms), prepared, {"onepass heads": "own"}, 4)
    entry = row["contenders"]["onepass heads"]
    assert (entry["E"], entry["E_prime"]) == (0.8, 0.8)
    assert set(row["contenders"]) == {"one device", "onepass heads"}
    assert row["peak_limit_bytes"] == 1000 + 2 * (2 * 64 * 4 * 16 * 2) // 16


def test_without_torchrun(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="expected a process of torchrun"):
        suite.SUITE.main(["--device", "cpu", "--smoke"])


def test_graphs_need_gpus(one_rank, monkeypatch, capsys):
    monkeypatch.setattr(suite.Ranks, "join", lambda device: one_rank)
    with pytest.raises(SystemExit):
        suite.SUITE.main(["--device", "cpu", "--smoke", "--graphs"])
    assert "--graphs: expected GPUs, got --device cpu" in capsys.readouterr().err

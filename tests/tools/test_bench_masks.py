"""The suite of masks on a CPU: all contenders get one mask, and a run with a clock that stands in for a GPU's."""

import json
import sys

import pytest
import torch

from benchmarks.harness import grid
from benchmarks.suites import masks as suite
from onepass import masks

INTERVALS = ("causal", "prefix", "documents", "rollouts")
SMALL = {"PREFIX": 30, "DOCUMENT": 40, "PROMPT": 64, "ANSWER": 32, "DEVICE": "cpu"}
N = 160


@pytest.fixture(autouse=True)
def small(monkeypatch, one_thread):
    def clock(call, *options):
        return lambda: call() and 1.0

    for name, value in SMALL.items():
        monkeypatch.setattr(suite, name, value)
    monkeypatch.setattr(grid, "do_bench_sampler", clock)
    monkeypatch.setattr(suite, "device_sampler", clock)


@pytest.mark.parametrize("name", INTERVALS)
def test_all_forms_of_a_mask_are_one_mask(name):
    case, device = suite.MaskCase(name, 16, N, 2, 2, "fwd"), torch.device("cpu")
    visible = masks.visible_pairs(N, **suite.ranges_of(case, device))[0, 0]
    i = torch.arange(N)
    assert torch.equal(suite.mask_mod(case, device)(0, 0, i[:, None], i), visible)
    first, *interval = suite.endpoints(case, device)[..., None]
    found = i < first
    if interval:
        found |= (i >= interval[0]) & (i < interval[1])
    assert torch.equal(found, visible)
    assert case.pairs == int(visible.sum())


RANDOM = suite.MaskCase("random", 16, 192, 1, 2, "bwd", 64, 0.5)


def run(monkeypatch, path, cases, *names):
    """The exit status and the rows. Args: names: of contenders."""
    monkeypatch.setattr(suite, "cases", lambda long: cases)
    monkeypatch.setattr(suite, "lists_ms", lambda case, arguments: 0.1)  # a kernel makes them
    monkeypatch.setitem(sys.modules, "cudnn", None)
    status = suite.SUITE.main(["--rounds", "1", "--contenders", ",".join(names), "--out", str(path)])
    return status, json.loads(path.read_text())["rows"]


def test_a_run(monkeypatch, tmp_path):
    small = [suite.MaskCase(*what, N, 2, 2, way) for *what, way in (("documents", 16, "bwd"), ("rollouts", 16, "fwd"))]
    ours = ("key_ranges", "query_ranges", "block_mask", "causal", "packed", "dense")
    status, rows = run(monkeypatch, tmp_path / "r.json", [*small, RANDOM], *ours, "cudnn")
    assert status == 0
    for row in rows:
        assert row["refused"].keys() == {"cudnn"}
        assert row["ms"].keys() == row["device_ms"].keys() == row["making_ms"].keys() == row["tflops"].keys()
    documents, rollouts, random = rows
    assert documents["case"] == "documents d16 s160 bwd"
    assert documents["ms"].keys() == {"key_ranges", "block_mask", "packed"}
    assert rollouts["lists_ms"] == {"query_ranges": 0.1, "block_mask": 0.1}
    assert random["pairs"] == 3 * 2 * 64 * 64
    assert random["of_dense"]["block_mask"] == pytest.approx(2 / 3, abs=1e-3)


def test_a_contender_with_another_mask_disagrees(monkeypatch, tmp_path):
    monkeypatch.setattr(suite, "causal", suite.dense)
    small = [suite.MaskCase("causal", 16, N, 2, 2, direction) for direction in ("fwd", "bwd")]
    status, rows = run(monkeypatch, tmp_path / "r.json", small, "key_ranges", "causal", "block_mask")
    assert status == 1
    assert [row["disagrees"] for row in rows] == [["causal"], ["causal"]]


def test_unknown_contenders_are_refused(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "r.json", [RANDOM], "key_rangs")
    assert "got key_rangs" in capsys.readouterr().err

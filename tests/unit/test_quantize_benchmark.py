"""benchmarks/quantize.py on a CPU: a small tensor, with kernels and a clock that stand for a GPU's."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from onepass import dispatch
from onepass.kernels.fp8 import launch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="not a checkout")


def test_shares_of_a_copy(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("common", "quantize"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("quantize")
    monkeypatch.setattr(module, "circumstances", dict)
    launched = set()

    def timed(calls, *_):
        for call in calls if isinstance(calls, list) else [calls]:
            call()
        return 10.0

    def on_cpu(make):
        return lambda *shape, device=None, **options: make(*shape, **options)

    monkeypatch.setattr(module, "TOKENS", 256)
    monkeypatch.setattr(module, "HIDDEN", 128)
    monkeypatch.setattr(module, "graph_us", timed)
    monkeypatch.setattr(module, "median_us", timed)
    monkeypatch.setattr(module, "compile_all", lambda jobs, compile_one: launched.update(j.name for j in jobs))
    monkeypatch.setattr(launch, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(launch, "kernel_of", lambda kernel, arch: lambda *arguments: launched.add(kernel))
    monkeypatch.setattr(dispatch, "_has_e4m3_kernels", lambda t: True)
    monkeypatch.setattr(torch, "randn", on_cpu(torch.randn))
    monkeypatch.setattr(torch, "zeros", on_cpu(torch.zeros))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    out = tmp_path / "quantize.json"
    monkeypatch.setattr(sys, "argv", ["quantize.py", "--head-dims", "64", "--out", str(out)])
    module.main()
    assert {"rows", "values"} < launched
    assert set(module.kernels([64])) < launched  # all that was compiled ahead, and nothing else
    assert len(launched) == 2 + 4
    rows = {row["what"]: row for row in json.loads(out.read_text())["rows"]}
    # 3 bytes a number and a scale for 64 * 64 of them, in the time of the copy of 3 bytes
    assert rows["q or k, rotated"]["share_of_copy"] == pytest.approx(1 + 4 / (3 * 64 * 64))
    assert rows["quantize_fp8"]["share_of_copy"] == pytest.approx(3 * (1 + 4 / (3 * 64 * 64)))
    assert rows["e4m3 to keys last"]["gb_s"] == pytest.approx(2 * 256 * 128 / 10.0 / 1e3)
    assert "quantize_fp8 in torch" in capsys.readouterr().out

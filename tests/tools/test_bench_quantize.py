"""The suite of quantize_fp8 on a CPU: a small tensor, with kernels and a clock that stand in for a GPU's."""

import json

import pytest
import torch

from benchmarks.harness import suite as harness
from benchmarks.suites import quantize as module
from onepass.api import fast_path
from onepass.dispatch import fp8
from onepass.kernels.launch import quantize as launch


@pytest.mark.slow
def test_shares_of_a_copy(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(module, "DEVICE", "cpu")
    launched = set()

    def timed(calls, *_):
        for call in calls:
            call()
        return 10.0

    def on_cpu(make):
        return lambda *shape, device=None, **options: make(*shape, **options)

    monkeypatch.setattr(module, "TOKENS", 256)
    monkeypatch.setattr(module, "HIDDEN", 128)
    monkeypatch.setattr(module, "median_us", timed)
    monkeypatch.setattr(module, "num_launches", lambda call: call() is not None and 1)
    compiled = set()
    monkeypatch.setattr(harness, "compile_ahead", lambda requests: compiled.update(key for _, key, *_ in requests))
    monkeypatch.setattr(fast_path, "_forwards", {})
    monkeypatch.setattr(launch, "prepare", launch.prepare.__wrapped__)
    monkeypatch.setattr(launch, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(launch, "kernel_of", lambda kernel, arch: lambda *arguments: launched.add(kernel))
    monkeypatch.setattr(fp8, "_has_e4m3_kernels", lambda t: True)
    monkeypatch.setattr(torch, "randn", on_cpu(torch.randn))
    monkeypatch.setattr(torch, "zeros", on_cpu(torch.zeros))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    out = tmp_path / "quantize.json"
    module.SUITE.main(["--head-dims", "64", "--out", str(out)])
    assert launched == set(module.kernels([64]))
    # what was compiled ahead of time is what was launched
    assert compiled == {launch.compile_request(kernel, "sm_90a")[1] for kernel in launched}
    written = json.loads(out.read_text())
    rows = {row["what"]: row for row in written["rows"]}
    # 3 bytes a number and a scale for 64 * 64 of them, for three tensors in the time of the copy of 3 bytes
    assert rows["quantize_fp8"]["share_of_copy"] == pytest.approx(3 * (1 + 4 / (3 * 64 * 64)))
    assert rows["v as it lies"]["share_of_copy"] == rows["quantize_fp8"]["share_of_copy"]
    assert rows["e4m3 to keys last"]["gb_s"] == pytest.approx(2 * 256 * 128 / 10.0 / 1e3)
    calls = {row["what"]: row for row in written["calls"]}
    assert calls["quantize_fp8"]["launches"] == 1
    assert 0 < calls["quantize_fp8"]["cpu_us"] < 1e5
    assert "attention, precision=fp8" in calls
    assert "quantize_fp8 in torch" in capsys.readouterr().out

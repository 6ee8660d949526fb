"""The suites of the paper's grid on a CPU: small grids, with a clock and kernels that stand in for a GPU's."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
from dataclasses import dataclass, replace

import fresh_process
import pytest
import torch

from benchmarks import suites
from benchmarks.harness import contenders, kernels
from benchmarks.harness import grid as grid_module
from benchmarks.harness import suite as suite_module
from benchmarks.suites import backward_sm90, float32, forward_sm90, fp8, sm80
from onepass import reference, tiled
from onepass.bench import ablation
from onepass.bench.ablation import Kernel
from onepass.bench.cases import Case, make_inputs
from onepass.bench.check import choose_samples, expected_rows
from onepass.bench.flops import flops
from onepass.errors import UnsupportedError
from onepass.kernels.launch import forward_sm90 as launch
from onepass.testing.results import Report


@dataclass(frozen=True)
class Config:
    tile_n: int = 64
    wrong: bool = False
    name: str | None = None

    def check(self, problem, arch) -> None:
        if self.tile_n > 128:
            raise UnsupportedError(f"tile_n: expected up to 128, got {self.tile_n}")


def run_forward(problem, inputs, config):
    return tiled.forward(problem, inputs)


def run_forward_config(problem, inputs, config):
    out, lse = tiled.forward(problem, inputs)
    return (out * 1.5 if config is not None and config.wrong else out), lse


def run_backward(problem, inputs, out, lse, dout, dlse, config):
    dq, dk, dv, dsinks = tiled.backward(problem, inputs, out, lse, dout, dlse)
    return dq, dk, (dv * 1.5 if config.wrong else dv), dsinks


@pytest.fixture
def grid(monkeypatch, one_thread):
    """A grid of 64 tokens, and a clock by which each call takes longer than the one before."""
    monkeypatch.setattr(grid_module, "TOKENS", 64)
    monkeypatch.setattr(grid_module, "HIDDEN", 32)
    samples = []

    def clock(call, warmup_ms, rep_ms):
        def sample():
            call()
            samples.append(call)
            return float(len(samples))

        return sample

    monkeypatch.setattr(grid_module, "do_bench_sampler", clock)
    return grid_module


def compile_nothing(requests):
    assert all(len(request) == 4 for request in requests)


@pytest.fixture
def on_a_cpu(grid, monkeypatch):
    """Makes a suite of a kernel that is computed by tiles, from one of a GPU's."""
    monkeypatch.setattr(suite_module, "compile_ahead", compile_nothing)
    monkeypatch.setattr(kernels, "requests_of", lambda task, config: [("kernel", (task, config), "", None)])
    stand_in = Kernel("tiled", "cpu", lambda problem, arch: Config(), run_forward_config, (), arch=lambda: "")
    monkeypatch.setitem(ablation.KERNELS, "tiled", stand_in)
    backward = stand_in._replace(forward=run_forward, backward=run_backward)
    monkeypatch.setitem(ablation.BACKWARD_KERNELS, "tiled", backward)
    contenders._say_once.cache_clear()

    def make(module):
        peers = {"torch": "sdpa", "fa4": "fa4"}
        kernel = replace(module.KERNEL, backend="tiled", device="cpu", peers=peers, seqlens=(24,))
        return kernel.suite(module.SUITE.name, module.__doc__)

    return make


def run(suite, tmp_path, *arguments):
    """The exit status and the results file."""
    path = tmp_path / "results.json"
    status = suite.main(["--cases", "16c32,16n64", "--peers", "torch", "--out", str(path), *arguments])
    return status, json.loads(path.read_text())


def test_cases_of_the_command_line(grid):
    assert grid.parse_cases("128c8192,64n512") == [grid.Cell(128, True, 8192), grid.Cell(64, False, 512)]
    with pytest.raises(argparse.ArgumentTypeError, match="got 64x512"):
        grid.parse_cases("128c8192,64x512")


def test_the_grid_is_the_papers(grid, monkeypatch):
    monkeypatch.setattr(grid, "TOKENS", 16384)
    monkeypatch.setattr(grid, "HIDDEN", 2048)
    parser = argparse.ArgumentParser()
    grid.add_arguments(parser, peers="")
    cells = grid.cells(parser.parse_args([]))
    assert len(set(cells)) == 36
    assert {cell.batch * cell.seqlen for cell in cells} == {16384}
    assert {cell.heads * cell.head_dim for cell in cells} == {2048}
    # the paper halves seqlen^2 under a causal mask; the visible pairs are one more in 8192
    assert flops(grid.Cell(128, True, 8192).case()) == 4 * 8192 * 8193 / 2 * 128 * 16 * 2
    assert flops(grid.Cell(64, False, 512).case(direction="bwd")) == 2.5 * 4 * 512**2 * 64 * 32 * 32


def test_neighbours_change_from_round_to_round(grid):
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abcd"}
    times = grid.time_in_turns(calls, argparse.Namespace(rounds=4, warmup_ms=0, rep_ms=0), seed=0)
    assert {name: len(ms) for name, ms in times.items()} == dict.fromkeys("abcd", 4)
    rounds = [order[i : i + 4] for i in range(0, 16, 4)]
    assert all(sorted(names) == list("abcd") for names in rounds)
    assert len({names[0] for names in rounds}) > 1
    before = {name: {names[i - 1] for names in rounds for i in range(1, 4) if names[i] == name} for name in "abcd"}
    assert all(len(names) > 1 for names in before.values())


def test_summary(grid, tmp_path, capsys):
    results = grid.Results(Report({}, tmp_path / "r.json"), ["cudnn", "fa4"])
    no_errors = dict.fromkeys(("cudnn", "fa4", "onepass", "other"), 0.0)
    for seqlen, ms in ((32, [4.0, 2.0, 1.0, 3.0]), (64, [4.0, 8.0, 8.0, 2.0])):
        times = {name: [each] for name, each in zip(no_errors, ms, strict=True)}
        results.add(grid.Cell(16, True, seqlen), times, no_errors, {}, {})
    results.summarize()
    text = capsys.readouterr().out
    assert "| head_dim | causal | 32 | 64 |" in text
    assert "| 16 | yes | 0 (2.00) | 0 (0.50) |" in text
    assert "all: geometric mean 1.000, least 0.500 (16 causal 64), 2 cases" in text
    assert "all: geometric mean 2.000" in text[text.index("best variant") :]


def test_backward(on_a_cpu, tmp_path, capsys):
    suite = on_a_cpu(backward_sm90)
    status, data = run(suite, tmp_path, "--deterministic", "--rounds", "2", "--peers", "torch,fa4")
    text = capsys.readouterr().out
    assert status == 0, text
    assert "fa4 not measured: measured on cuda only" in text
    assert "check: 6 of 6 passed" in text
    by_cell = {}
    for row in data["rows"]:
        by_cell.setdefault((row["head_dim"], row["causal"], row["seqlen"]), []).append(row)
    assert list(by_cell) == [(16, True, 32), (16, False, 64)]
    for cell, rows in by_cell.items():
        assert [row["contender"] for row in rows] == ["torch", "onepass", "deterministic"]
        work = flops(grid_module.Cell(*cell).case(direction="bwd"))
        for row in rows:
            assert len(row["ms"]) == 2
            assert row["tflops"] == round(work / (sum(row["ms"]) / 2) / 1e9, 2)
            assert row["error"] < 0.05
    assert "all: geometric mean" in text[text.index("| head_dim |") :]


def test_where_the_kernel_cannot_be_measured(grid, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(replace(backward_sm90.KERNEL, device="cpu").suite("backward_sm90", None), tmp_path)
    assert "expected a Hopper GPU" in capsys.readouterr().err


def test_unknown_peers(on_a_cpu, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(on_a_cpu(sm80), tmp_path, "--peers", "fa9")
    assert "--peers: expected names of torch, fa4, got fa9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "options", "wrong", "work"),
    [
        (forward_sm90, (), "out", 1.0),
        (backward_sm90, (), "dv", 2.5),
        (sm80, ("--dtype", "float32"), "out", 1.0),
        (sm80, ("--direction", "bwd", "--dtype", "float32"), "dv", 2.5),
    ],
)
def test_variants(on_a_cpu, tmp_path, capsys, module, options, wrong, work):
    suite = on_a_cpu(module)
    options = (*options, "--rounds", "2")
    status, data = run(suite, tmp_path, *options, "--variants", "tile_n=32; tile_n=32, wrong=True; tile_n=256")
    text = capsys.readouterr().out
    assert status == 1  # one of them is wrong
    assert text.count("tile_n=256 not measured: tile_n: expected up to 128, got 256") == 1
    assert text.count(f"FAIL {wrong}: max error") == 2
    assert "check: 6 of 8 passed" in text
    rows = {row["contender"]: row for row in data["rows"] if row["causal"]}
    assert list(rows) == ["torch", "onepass", "tile_n=32", "tile_n=32,wrong=True"]
    assert rows["onepass"]["config"] == {"tile_n": 64, "wrong": False, "name": None}
    assert rows["tile_n=32"]["config"] == {"tile_n": 32, "wrong": False, "name": None}
    assert rows["tile_n=32"]["error"] < 0.05 < rows["tile_n=32,wrong=True"]["error"]
    # what is wrong is marked in the table
    assert "!" in next(line for line in text.splitlines() if line.split()[:3] == ["16", "True", "32"])
    work *= 4 * (32 * 33 / 2) * 16 * 2 * 2
    assert rows["onepass"]["tflops"] == round(work / (sum(rows["onepass"]["ms"]) / 2) / 1e9, 2)


def test_kernels_are_compiled_ahead(on_a_cpu, monkeypatch, tmp_path):
    found = []
    suite = on_a_cpu(backward_sm90)
    monkeypatch.setattr(suite_module, "compile_ahead", lambda requests: found.append([key for _, key, *_ in requests]))
    run(suite, tmp_path, "--no-check", "--rounds", "1", "--deterministic", "--variants", "tile_n=32")
    # of each mask 2 configurations, and one with deterministic gradients
    assert [len(keys) for keys in found] == [6]
    assert len(set(found[0])) == 6


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ("tile_m=3", "expected name=value with a name of tile_n, wrong, name, got 'tile_m=3'"),
        ("tile_n", "expected a Python literal for tile_n, got ''"),
        ("tile_n=many", "expected a Python literal for tile_n, got 'many'"),
    ],
)
def test_variants_that_make_no_sense(changes, text):
    with pytest.raises(ValueError, match=text):
        contenders.configuration(Config(), changes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_attention_in_pytorch(causal, direction):
    case = Case.square(40, 2, 16, batch=2, dtype="bfloat16", causal=causal, direction=direction)
    inputs = make_inputs(case, "cpu")
    found = contenders.attention_in_pytorch(case, inputs, torch.float32)
    (sample, _) = choose_samples(case)
    expected = expected_rows(case, inputs, sample, torch.float64)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name][0, :, :1].transpose(0, 1).squeeze(0), tensor.reshape(40, 16).float())
        assert not math.isnan(float(found[name].sum()))


@pytest.mark.parametrize("suite", suites.NAMES)
def test_help(suite, capsys):
    module = importlib.import_module(f"benchmarks.suites.{suite}")
    assert module.SUITE.name == suite
    with pytest.raises(SystemExit) as end:
        module.SUITE.main(["--help"])
    assert end.value.code == 0
    assert "--out" in capsys.readouterr().out


def test_importing_suites_imports_no_kernel_compiler():
    fresh_process.check(f"""
        import importlib, pkgutil, sys
        sys.path[:0] = {[path or os.getcwd() for path in sys.path]}
        from benchmarks import suites
        for module in pkgutil.iter_modules(suites.__path__):
            importlib.import_module(f"{{suites.__name__}}.{{module.name}}")
        assert not {{"cutlass", "tvm_ffi", "triton"}} & set(sys.modules)
    """)


@pytest.fixture
def fp8_suite(grid, monkeypatch):
    monkeypatch.setattr(fp8, "DEVICE", "cpu")
    monkeypatch.setattr(fp8, "BACKEND", "tiled")
    monkeypatch.setattr(fp8, "TABLE3_SEQLEN", 64)
    monkeypatch.setattr(fp8, "SUM_LENGTHS", (64,))
    monkeypatch.setattr(fp8, "CHECKS", ((2, 40, 70, 4, 2, 1.0), (1, 70, 30, 2, 2, 20.0)))
    monkeypatch.setattr(suite_module, "compile_ahead", compile_nothing)

    def prepare(problem, device, config):
        wrong = config is not None and config.tile_n == 32

        def forward(inputs):
            out, lse = tiled.forward(problem, inputs)
            return (out * 1.5 if wrong else out), lse

        return forward

    monkeypatch.setattr(launch, "prepare", prepare)
    return fp8


def test_fp8(fp8_suite, tmp_path, capsys):
    path = tmp_path / "r.json"
    arguments = ["--cases", "16c32,16n64", "--head-dims", "16", "--rounds", "2", "--out", str(path)]
    arguments += ["--peers", "bf16,rows,whole,fa3"]
    assert fp8.SUITE.main([*arguments, "--variants", "tile_n=64; tile_n=32; tile_n=80"]) == 1
    text = capsys.readouterr().out
    assert "tile_n=80 not measured: tile_n: expected a multiple of 32 in FP8, got 80" in text
    assert text.count("FAIL share of the budget: out ") == 2  # tile_n=32 is wrong
    assert "Table 3: FP8 onepass: block scales, rotation" in text
    assert "fa3 not measured: ModuleNotFoundError" in text
    results = json.loads(path.read_text())
    assert 0 < results["header"]["table3_rmse"]["FP8 onepass: block scales, rotation"] < 0.1
    rows = results["rows"]
    assert [row["contender"] for row in rows] == 2 * ["onepass", "bf16", "rows", "whole", "tile_n=64", "tile_n=32"]
    first_case = {row["contender"]: row for row in rows[:6]}
    assert first_case["onepass"]["error"] == first_case["rows"]["error"] == first_case["whole"]["error"] < 0.3
    assert first_case["bf16"]["error"] == 0
    assert first_case["tile_n=64"]["config"]["tile_n"] == 64
    sums = results["header"]["sums"]
    assert sums.keys() == {
        f"head_dim 16, 64 keys, {kind}, onepass{how}" for kind in ("ones", "mean 1") for how in ("", " with one sum")
    }
    assert all(0.99 < share < 1.01 for share in sums.values())

    # a run in which FlashAttention-3 was half as fast, and one in which it was as fast
    rows = [row | {"tflops": 2.0} for row in rows]
    for name, factor in (("slow", 0.5), ("fast", 1.0)):
        fa3_rows = [
            row | {"contender": "fa3", "tflops": factor * row["tflops"]} for row in rows if row["contender"] == "rows"
        ]
        (tmp_path / name).write_text(json.dumps({"rows": rows + fa3_rows}))
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        fp8.SUITE.main(["--summarize", *(str(tmp_path / name) for name in ("slow", "fast", "fast"))])
    text = capsys.readouterr().out
    assert "from rows of e4m3: rows vs. fa3, 3 runs" in text
    assert "all: geometric mean 1.000, least 1.000" in text
    assert "from bfloat16" not in text  # nobody to compare with


@pytest.mark.parametrize("wrong", [False, True])
def test_check_of_float32(monkeypatch, wrong):
    """It holds onepass to the errors of attention in torch's float32."""
    monkeypatch.setattr(float32, "DEVICE", "cpu")
    monkeypatch.setattr(float32, "ERROR_CASES", [(16, False, 24), (16, True, 40)])

    def contenders(case, inputs, args):
        out = reference.attention(*inputs[:3], causal=case.causal).out
        return {"onepass": lambda: out.float() * (1 + 1e-4 * wrong)}

    monkeypatch.setattr(float32, "contenders", contenders)
    about = {}
    args = argparse.Namespace(variants=None)
    assert suite_module.passed(float32.checks(args, about)) is not wrong
    assert [row["seqlen"] for row in about["rmse"]] == [24, 40]
    assert all(0 < row["math"] < 1e-6 for row in about["rmse"])

"""The command line, without a terminal."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import math
import os
import re
import signal
import sys
import time
from types import SimpleNamespace

import fresh_process
import pytest
import torch

pytest.importorskip("typer")

import typer
from rich.table import Table
from typer.testing import CliRunner

import onepass
from onepass import cli, startup, tiled
from onepass.bench import ablation, rows
from onepass.bench.cases import Case
from onepass.cli import ablate as cli_ablate
from onepass.cli import cache as cli_cache
from onepass.cli import console
from onepass.cli import info as cli_info
from onepass.cli import verify as cli_verify
from onepass.cli.app import app
from onepass.cli.console import make_console
from onepass.kernels.compiler import disk_cache
from onepass.kernels.config import ForwardConfigSm90
from onepass.testing import table3
from onepass.testing.budget import Comparison, Scale

pytestmark = pytest.mark.usefixtures("wide_and_single_threaded")


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_info():
    result = invoke("info")
    assert result.exit_code == 0, result.output
    for text in (onepass.__version__, "torch", "tiled", "packed sequences", "flash-attn-4"):
        assert text in result.output
    assert "no:" in result.output  # a peer that is absent
    if not torch.cuda.is_available():
        assert "no: backend sm90: expected tensors on cuda, got cpu" in result.output


def test_info_of_one_device():
    found = json.loads(invoke("info", "--device", "cpu", "--json").output)
    assert list(found["devices"]) == ["cpu"]
    assert {"dropout", "bias", "ALiBi", "ranges", "positions", "left padding"} <= set(found["features"])
    assert all(answers["cpu"]["ok"] for answers in found["features"].values())
    assert invoke("info", "--device", "tpu").exit_code == 2


def test_info_lists_environment_variables(monkeypatch):
    monkeypatch.setenv("ONEPASS_TUNED", "off")
    monkeypatch.setenv("ONEPASS_CACHE_LIMIT", "[much]\x1b[31m")
    result = invoke("info", "--device", "cpu")
    assert re.search(r"ONEPASS_TUNED +off", result.output), result.output
    assert r"ONEPASS_CACHE_LIMIT: expected a number of bytes" in result.output
    assert "[much]" in result.output
    assert "\x1b" not in result.output
    found = json.loads(invoke("info", "--device", "cpu", "--json").output)["variables"]
    assert (found["ONEPASS_TUNED"]["text"], found["ONEPASS_TUNED"]["problem"]) == ("off", None)
    assert found["ONEPASS_CACHE_LIMIT"]["problem"].startswith("ONEPASS_CACHE_LIMIT: expected")
    assert found["ONEPASS_VLLM"]["text"] is None


def test_probes_use_the_features_that_they_are_named_after():
    probes = {name: make("cpu") for name, make in cli_info._probes().items()}
    for name in ("float64", "float32", "bfloat16", "float16"):
        assert probes[name]["q"].dtype == getattr(torch, name)
    assert [name for name, call in probes.items() if call["q"].requires_grad] == ["backward", "deterministic"]
    assert probes["GQA / MQA"]["k"].shape[2] < probes["GQA / MQA"]["q"].shape[2]
    assert probes["head_dim_v != head_dim"]["v"].shape[3] != probes["head_dim_v != head_dim"]["k"].shape[3]
    given = [
        *("causal", "window", "softcap", "sinks", "seqused_k", "seqstart_k", "key_ranges", "query_ranges"),
        *("q_positions",),
        *("alibi_slopes", "bias", "dropout_p", "cu_seqlens_q", "return_lse", "deterministic"),
    ]
    assert set(given) <= {name for call in probes.values() for name in call}
    backends = {name: answers["cpu"] for name, answers in cli_info.gather("cpu")["backends"].items()}
    assert {name: found["backend"] for name, found in backends.items() if found["ok"]} == {
        "cpu": "cpu",
        "tiled": "tiled",
    }


def test_version():
    result = invoke("--version")
    assert (result.exit_code, result.output.strip()) == (0, onepass.__version__)


def test_onepass_alone():
    """Windows has neither fcntl nor fork: onepass can be imported there without any of the extras, and computes."""
    fresh_process.check("""
        import os, sys, torch
        sys.modules["fcntl"] = None
        del os.register_at_fork
        import onepass, onepass.cli
        assert not {"typer", "rich", "matplotlib", "psutil", "onepass.bench"} & set(sys.modules)
        q = torch.randn(1, 5, 2, 8)
        assert onepass.attention(q, q, q, causal=True).shape == q.shape
    """)


def test_info_says_no_where_the_library_does(monkeypatch):
    def supports(q, k, v, **options):
        return onepass.Support(False, "", "not today") if options.get("softcap") else onepass.Support(True, "tiled", "")

    monkeypatch.setattr(onepass, "supports", supports)
    assert invoke("info").output.count("no: not today") == 1


def test_verify_quick(tmp_path):
    path = tmp_path / "verify.json"
    result = invoke("verify", "--quick", "--device", "cpu", "--json", str(path))
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text())
    dtypes = {row["dtype"] for row in data["errors"]}
    assert dtypes == {"float64", "float32", "bfloat16", "float16"}
    for row in data["errors"]:
        assert row["ok"]
        assert row["max_error"] <= row["budget"]
    outliers = {row["method"]: row for row in data["outliers"]}
    # float32 intermediates are better than 16-bit ones, and still worse than float64
    for dtype in ("float16", "bfloat16"):
        ours, standard = outliers[f"onepass {dtype}"], outliers[f"standard {dtype}"]
        assert 0 < ours["rounded_rmse"] < standard["rounded_rmse"] < standard["rmse"] < 0.1
        assert ours["rounded_rmse"] < ours["rmse"] < standard["rmse"]
    fp8 = {method: row["rmse"] for method, row in outliers.items() if method.startswith("FP8")}
    assert len(fp8) == len(table3.FP8_METHODS)
    assert 1.5 * fp8[table3.ONEPASS] < fp8[table3.BASELINE] < 0.1
    assert fp8["FP8 option: one scale a row"] < fp8[table3.ONEPASS] < fp8["FP8 without rotation"]
    assert "512 keys (there 8192" in result.output


@pytest.mark.slow
def test_verify_fails_if_an_error_is_over_its_budget(monkeypatch):
    right = onepass.attention

    def slightly_wrong(q, k=None, v=None, **options):
        return right(q, k, v, **{**options, "softmax_scale": (options.get("softmax_scale") or 64**-0.5) * 1.01})

    options = cli_verify._options
    monkeypatch.setattr(cli_verify, "_options", lambda length: dict(itertools.islice(options(length).items(), 2)))
    monkeypatch.setattr(table3, "table3", lambda *arguments: [])
    monkeypatch.setattr(onepass, "attention", slightly_wrong)
    result = invoke("verify", "--quick", "--device", "cpu")
    assert result.exit_code == 1
    assert "OVER BUDGET" in result.output


def test_verify_fails_if_any_tensor_of_a_call_is_over_its_budget(monkeypatch, tmp_path):
    """JSON has no infinity: an error without a size is null."""
    found = {"good": [(1e-3, 1e-2)], "late": [(9e-3, 1e-2), (math.inf, 1e-2)], "bad": [(2e-2, 1e-2), (0.0, 1e-2)]}

    def call(*errors):
        comparisons = [Comparison("out", error, budget, 0.0, 0.0, (), Scale(0.1, 0.2)) for error, budget in errors]
        return lambda dtype, device: SimpleNamespace(compare=lambda: comparisons)

    outlier = table3.RmsError("one", math.nan, None, None, 1e-2)
    monkeypatch.setattr(cli_verify, "SUPPORTED_DTYPES", (torch.float32,))
    monkeypatch.setattr(cli_verify, "_options", lambda length: {name: call(*errors) for name, errors in found.items()})
    monkeypatch.setattr(table3, "table3", lambda *arguments: [outlier])
    path = tmp_path / "verify.json"
    result = invoke("verify", "--quick", "--device", "cpu", "--json", str(path))
    assert result.exit_code == 1
    assert "3 of 4 rows are over their budget" in result.output
    data = json.loads(path.read_text())
    assert [row["ok"] for row in data["errors"]] == [True, False, False]
    assert [row["max_error"] for row in data["errors"]] == [1e-3, None, 2e-2]
    assert [row["scale_budget"] for row in data["errors"]] == [0.2] * 3
    assert data["outliers"][0]["rmse"] is None


def test_lengths_of_verify(monkeypatch):
    asked = []
    monkeypatch.setattr(cli_verify, "_options", lambda length: asked.append(length) or {})
    monkeypatch.setattr(table3, "table3", lambda seqlen, device, seeds, progress: asked.append((seqlen, seeds)) or [])
    for arguments in ((), ("--quick",), ("--quick", "--seqlen", "100"), ("--seqlen", "600")):
        assert invoke("verify", "--device", "cpu", *arguments).exit_code == 0
    assert asked == [320, (8192, 3), 96, (512, 1), 96, (100, 1), 320, (600, 3)]


def test_verify_fails_if_an_outlier_row_is_over_its_limit(monkeypatch):
    rows = [table3.RmsError(name, 2e-2, None, None, limit) for name, limit in (("one", 1e-2), ("two", 3e-2))]
    monkeypatch.setattr(cli_verify, "_options", lambda length: {})
    monkeypatch.setattr(table3, "table3", lambda *arguments: rows)
    result = invoke("verify", "--quick", "--device", "cpu")
    assert result.exit_code == 1
    assert "1 of 2 rows are over their budget" in result.output


def test_outliers_have_the_distribution_of_the_paper():
    drawn = table3.with_outliers(1024, torch.Generator().manual_seed(0))
    # variance of N(0, 1) + N(0, 100) Bernoulli(0.001): 1 + 0.1
    assert drawn.var().item() == pytest.approx(1.1, abs=0.04)
    assert 50 < (drawn.abs() > 6).sum() < 110  # P(|N(0, 101)| > 6) = 0.55 of 131


@pytest.mark.parametrize(("baseline", "ours", "limit"), [(0.03, 0.01, 9.5e-3), (0.02, 0.0094, 0.02 / 2.2)])
def test_the_bar_of_fp8_is_that_of_the_paper_at_its_length(monkeypatch, baseline, ours, limit):
    def quantized_for_nothing(q, k, v, **options):
        return q, k, v

    outs = iter([baseline, ours, *([0.0] * 5)])

    def attention(q, *others, backend=None):
        return torch.zeros_like(q) if not isinstance(q, tuple) else torch.full_like(q[0], next(outs))

    monkeypatch.setattr(onepass, "quantize_fp8", quantized_for_nothing)
    monkeypatch.setattr(onepass, "attention", attention)
    monkeypatch.setattr(table3, "_dense", lambda dtype, q, k, v: torch.zeros_like(q))
    rows = {row.method: row for row in table3.table3(8192, "cpu", 1)}
    assert rows[table3.ONEPASS].rmse == pytest.approx(ours, rel=1e-3)
    assert rows[table3.ONEPASS].limit == pytest.approx(limit, rel=1e-3)
    assert not rows[table3.ONEPASS].ok


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_packages_are_named_in_one_line(missing, monkeypatch, capsys):
    for name, module in list(sys.modules.items()):
        if name.startswith("onepass.cli."):  # they are imported again
            monkeypatch.setattr(cli, name.rpartition(".")[2], module)
            monkeypatch.delitem(sys.modules, name)
        if name.partition(".")[0] == missing:
            monkeypatch.setitem(sys.modules, name, None)
    assert run_main(monkeypatch) == 1
    output = capsys.readouterr()
    assert (output.out, output.err) == (
        "",
        f"onepass: the command line needs {missing}: pip install '.[bench]' in a checkout of onepass\n",
    )


# ablate: test_bench_ablation.py tests the runs; here are the output and the exit codes


@pytest.fixture
def ablated(monkeypatch):
    """A kernel for the CPU under the name sm90; `wrong` makes one configuration wrong."""

    def make(wrong: bool = False):
        def forward(problem, inputs, config):
            out, lse = tiled.forward(problem, inputs)
            return (out if config.pingpong or not wrong else out * 1.5), lse

        full = ForwardConfigSm90(tile_n=64, q_stages=2)
        refused = ablation.Switch("num_stages", 1, "one buffer each for K and V")
        switches = (*ablation.FORWARD_SM90, refused)
        kernel = ablation.Kernel("tiled", "cpu", lambda problem, arch: full, forward, switches)
        monkeypatch.setitem(ablation.KERNELS, "sm90", kernel)

        def backward(problem, inputs, out, lse, dout, dlse, config):
            return tiled.backward(problem, inputs, out, lse, dout, dlse)

        by_default = kernel._replace(forward=lambda problem, inputs, config: tiled.forward(problem, inputs))
        monkeypatch.setitem(ablation.BACKWARD_KERNELS, "sm90", by_default._replace(backward=backward))
        # a CPU without instructions for float16 takes 6 s for the GEMM of the full size
        monkeypatch.setattr(cli_ablate, "Options", functools.partial(rows.Options, gemm_size=64))

    return make


ABLATE = ("ablate", "--device", "cpu", "--rounds", "2")
SMALL = ("--seqlen", "32", "--heads", "1", "--batch", "1", "--head-dim", "16")


def test_ablate(ablated, tmp_path):
    ablated()
    path, picture = tmp_path / "a.json", tmp_path / "a.png"
    result = invoke(*ABLATE, *SMALL, "--json", str(path), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    for text in (
        "full configuration",
        "no pingpong between warpgroups",
        "also overlap_tiles=False",
        "paper: No GEMM-Softmax Pipelining, Warp-Specialization",
        "no row, changes nothing here: not the longest tiles first",
        "refused: stages: overlap_gemm_softmax needs 2 for K and V, got 1",
        "2 rounds",
        f"wrote {picture}",
    ):
        assert text in result.output.replace("\n", "") if text.startswith("wrote") else text in result.output
    row = json.loads(path.read_text())["rows"][0]
    assert (row["case"]["dtype"], row["case"]["head_dim"], row["case"]["causal"]) == ("float16", 16, False)
    assert picture.exists()


def test_ablate_backward(ablated, tmp_path):
    ablated()
    path = tmp_path / "a.json"
    result = invoke(*ABLATE, *SMALL, "--direction", "backward", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "tiled bwd d16" in result.output
    assert "paper:" not in result.output
    row = json.loads(path.read_text())["rows"][0]
    assert row["case"]["direction"] == "bwd"
    assert "no pingpong between warpgroups" in row["contenders"]


def test_ablate_takes_the_papers_case_by_default(ablated, monkeypatch):
    cases = []

    def record(kernel, case, device):
        cases.append(case)
        return "seen enough"

    monkeypatch.setattr(cli_ablate, "refusal", record)
    for options in ((), ("--head-dim", "64", "--causal", "--seqlen", "1024", "--dtype", "bfloat16")):
        assert invoke("ablate", *options).exit_code == 2
    assert cases[0] == ablation.PAPER_CASE
    # the same tokens and hidden size
    assert cases[1] == Case.square(1024, 32, 64, batch=33, dtype="bfloat16", causal=True)
    options = ("--head-dim-v", "96", "--heads", "6", "--heads-kv", "2", "--batch", "3", "--direction", "backward")
    assert invoke("ablate", *options).exit_code == 2
    assert cases[2] == Case(3, 8448, 8448, 6, 2, 128, 96, "float16", direction="bwd")


@pytest.mark.parametrize(
    ("what", "exit_code", "text"),
    [
        ("wrong", 1, "1 of 6 configurations failed"),
        ("interrupted", 130, "interrupted after 1 rounds"),
    ],
)
def test_exit_codes_of_ablate(ablated, monkeypatch, what, exit_code, text):
    ablated(wrong=what == "wrong")
    if what == "interrupted":
        measure = cli_ablate.measure

        def interrupted(case, kernel, options, path, on_check, on_round):
            def stop(done):
                raise KeyboardInterrupt

            return measure(case, kernel, options, path, on_check, stop)

        monkeypatch.setattr(cli_ablate, "measure", interrupted)
    result = invoke(*ABLATE, *SMALL)
    assert result.exit_code == exit_code, result.output
    assert text in result.output
    assert ("FAILED no pingpong" in result.output) == (what == "wrong")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--arch", "sm70"], "expected one of sm90, sm80, got 'sm70'"),
        (["--direction", "sideways"], "expected forward or backward, got 'sideways'"),
        (["--dtype", "int8"], "int8"),
        (["--heads", "6", "--heads-kv", "4"], "expected a divisor of 6 heads, got 4"),
        (["--device", "cpu"], "the sm90 forward kernel cannot be measured here: expected a Hopper GPU"),
    ],
)
def test_ablate_refuses_with_the_reason(arguments, text):
    result = invoke("ablate", *arguments)
    assert result.exit_code == 2
    assert text in result.output
    assert "Traceback" not in result.output


# cache


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A cache directory with an intact entry and the remains of a killed build."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(directory))
    disk_cache.make_usable(directory)
    about = {"name": "forward", "summary": "head_dim=64 [causal]", "arch": "sm_90a", "compile_s": 1.75}
    disk_cache.write(directory / f"{'ab' * 16}.o", lambda path: path.write_bytes(b"x" * 3072), lambda: about)
    (directory / f"{'cd' * 16}.7.part.o").write_bytes(b"half")
    (directory / "notes.txt").write_text("not a kernel")
    return directory


def test_cache_lists(cached):
    result = invoke("cache")
    assert result.exit_code == 0, result.output
    for text in ("head_dim=64 [causal]", "abababab", "sm_90a", "1.8", "intact", "unfinished build", "entries: 2"):
        assert text in result.output
    assert str(cached) in result.output.replace("\n", "")


def test_cache_lists_sizes_ages_and_versions(cached, monkeypatch):
    """KiB and MiB, and whether this environment would load an entry."""
    now = time.time()
    monkeypatch.setattr(cli_cache.time, "time", lambda: now)
    shown = ((30, "30 s", 0), (600, "10 min", 0), (7200, "2 h", 3), (259200, "3 d", 5))
    for number, (age, _, size) in enumerate(shown):
        about = {"name": f"kernel{number}", "summary": "s", "arch": "a", "environment": f"environment {number}"}
        path = cached / f"{f'{number:02}' * 16}.o"
        disk_cache.write(path, lambda p, size=size: p.write_bytes(b"x" * (size * 2**20)), lambda about=about: about)
        for file in cached.glob(f"{f'{number:02}' * 16}*"):
            os.utime(file, (now - age, now - age))
    monkeypatch.setattr(cli_cache, "_environment", lambda: "environment 2")
    lines = {line.split()[0]: line for line in invoke("cache").output.splitlines() if line.strip()}
    for number, (_, unit, size) in enumerate(shown):
        line = lines[f"kernel{number}"]
        assert unit in line
        assert f" {1024 * size} " in line
        assert ("of other versions" in line) == (number != 2)
    assert "8.0 MiB" in invoke("cache").output
    monkeypatch.setattr(cli_cache, "_environment", lambda: None)  # without the kernel compiler nobody can tell
    assert "of other versions" not in invoke("cache").output


@pytest.mark.parametrize("command", ["cache", "cache clear --yes", "cache import notes.txt"])
def test_a_system_without_file_locks_has_no_cache(cached, monkeypatch, command):
    monkeypatch.setattr(disk_cache, "fcntl", None)
    result = invoke(*command.split())
    assert result.exit_code == 1
    assert "no file locks" in result.output


def test_cache_clear_asks(cached):
    result = CliRunner().invoke(app, ["cache", "clear"], input="n\n")
    assert result.exit_code == 1
    assert len(list(cached.iterdir())) == 4
    result = CliRunner().invoke(app, ["cache", "clear"], input="y\n")
    assert result.exit_code == 0, result.output
    assert [path.name for path in cached.iterdir()] == ["notes.txt"]


def test_cache_clear_yes(cached):
    with disk_cache.exclusive(cached / f"{'cd' * 16}.lock"):
        result = invoke("cache", "clear", "--yes")
    assert result.exit_code == 0, result.output
    assert "entries removed: 1" in result.output
    assert "kept cdcdcdcd: being built" in result.output
    assert invoke("cache", "clear", "--yes").exit_code == 0
    assert "no compiled kernels" in invoke("cache").output
    assert "no compiled kernels" in invoke("cache", "clear").output


@pytest.mark.parametrize("arguments", [["cache"], ["cache", "clear", "--yes"]])
def test_another_users_cache_is_left_alone(cached, monkeypatch, arguments):
    owner = cached.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert "not a directory of this user" in result.output
    assert len(list(cached.iterdir())) == 4


# ---------------------------------------------------------------- what a shell may do to the command


WORK = {
    ("verify", "--quick"): "onepass.cli.verify._error_row",
    ("bench", "smoke", "--device", "cpu"): "onepass.cli.bench.run",
    ("bench", "context-parallel", "--device", "cpu"): "benchmarks.harness.suite.Suite.main",
    ("demo", "--quick", "--seqlen", "64"): "onepass.cli.demo_layer.prepare",
    ("ablate", "--device", "cpu"): "onepass.cli.ablate.measure",
}


@pytest.mark.parametrize("command", WORK, ids=" ".join)
@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_output_paths_are_tried_before_the_work(ablated, tmp_path, monkeypatch, command, option):
    def work(*arguments, **options):
        raise AssertionError("it has begun to work")

    if option == "--plot" and (command[0] in ("verify", "demo") or "context-parallel" in command):
        return  # they draw nothing
    ablated()
    monkeypatch.setattr(WORK[command], work)
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("")
    for path in (
        tmp_path / "folder.png",
        "/proc/q.png",
        "/dev/null",
        tmp_path / "file" / "q.png",
        tmp_path / ("q" * 300),
    ):
        result = invoke(*command, option, str(path))
        assert result.exit_code == 2, (path, result.output, result.exception)
        assert option in result.output
    if option == "--plot":
        assert "expected a name that ends in .png, got q.jpg" in invoke(*command, option, "q.jpg").output
    result = invoke(*command, option, str(tmp_path / "good.png"))
    assert "it has begun to work" in repr(result.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.png"]


def run_main(monkeypatch, *arguments):
    """The exit status of the console script."""
    monkeypatch.setattr(sys, "argv", ["onepass", *arguments])
    with pytest.raises(SystemExit) as ending:
        cli.main()
    return ending.value.code


def test_devices_and_pictures_that_a_command_takes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("cpu", "cuda", "cuda:0", "cuda:1"):
        assert console.resolve_device(name) == name
    for is_available, name in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda value=is_available: value)
        assert console.resolve_device("auto") == name
    console.require_plot("--plot", tmp_path / "a.PNG")
    for refused in (
        lambda: console.resolve_device("cuda:2"),
        lambda: console.resolve_device("meta"),
        lambda: console.resolve_device("tpu\x1b[31m"),
        lambda: console.require_plot("--plot", tmp_path / "a.pdf"),
        lambda: console.require_output("--json", tmp_path),
        lambda: console.fail("--json: \x1b"),
    ):
        with pytest.raises(typer.Exit) as ending:
            refused()
        assert ending.value.exit_code == 2
    errors = capsys.readouterr().err
    assert "\x1b" not in errors
    lines = errors.splitlines()
    assert lines[0] == "onepass: --device: expected a device that torch sees, got 'cuda:2'; it sees 2 GPUs"
    assert [line.split()[1] for line in lines] == ["--device:"] * 3 + ["--plot:", "--json:", "--json:"]


def test_closed_streams(cached, monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert run_main(monkeypatch, "cache") == 0
    assert run_main(monkeypatch, "cache", "clear") == 1  # nobody says yes
    assert len(list(cached.iterdir())) == 4
    for name in ("stdin", "stdout", "stderr"):
        getattr(sys, name).close()


def test_a_full_disk(cached, monkeypatch, capsys):
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # closing it writes what is left
        monkeypatch.setattr(sys, "stdout", full)
        status = run_main(monkeypatch, "cache")
    sys.stdout.close()
    assert (status, capsys.readouterr().err) == (1, "onepass: no space left on device\n")


def test_what_the_output_cannot_encode(cached, monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    path = cached / f"{'ab' * 16}.json"
    path.write_text(path.read_text().replace("head_dim=64", "\u00b5s of \\udce9"))
    assert run_main(monkeypatch, "cache") == 0
    output.flush()
    assert rb"\xb5s of \udce9" in output.buffer.getvalue()


def test_a_narrow_terminal_cuts_no_number(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    console = make_console()
    table = Table("tensor", "max error", "budget")
    table.add_row("out", "1.33e-15", "6.80e-15")
    with console.capture() as captured:
        console.print(table)
        console.print("words " * 20)
    assert "1.33e-15" in captured.get()
    assert "6.80e-15" in captured.get()
    assert max(map(len, captured.get().splitlines()[-3:])) <= 30
    table.add_row("long" * 1000, "", "")
    with console.capture() as captured:
        console.print(table)
    assert max(map(len, captured.get().splitlines())) <= 140


@pytest.mark.parametrize(
    "argv", ["/usr/bin/onepass", "-m onepass", "-m onepass.cli", "-monepass", "-Im onepass.cli", "onepass.exe"]
)
def test_ctrl_c_while_modules_load_ends_the_command_with_130(argv, monkeypatch, capsys):
    argv = argv.split()
    monkeypatch.setattr(sys, "argv", ["-m" if argv[0].startswith("-") else argv[0]])
    monkeypatch.setattr(sys, "orig_argv", ["python", *argv, "info"])
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        startup._begin()
        signal.raise_signal(signal.SIGINT)
        assert ended == [130]
        startup.end()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what ignores Ctrl-C goes on doing so
        startup._begin()
        startup.end()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        for name, expected in (("ONEPASS_LOG", "1, true, yes or on"), ("ONEPASS_BACKEND", "one of")):
            monkeypatch.setenv(name, "sm70")
            with pytest.raises(SystemExit, match="2"):
                startup._begin()
            assert capsys.readouterr().err.startswith(f"onepass: {name}: expected {expected}")
            monkeypatch.delenv(name)
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("argv", [["train.py"], ["-m", "onepass.compat"], ["-m", "onepasses"], ["-c"], [""], []])
def test_other_programs_keep_their_ctrl_c(argv, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv[:1])
    monkeypatch.setattr(sys, "orig_argv", ["python", *argv])
    handler = signal.getsignal(signal.SIGINT)
    startup._begin()
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_variable_that_is_not_understood_is_refused_at_once(cached, monkeypatch):
    monkeypatch.setenv("ONEPASS_TUNED", "2")
    result = invoke("cache", "clear", "--yes")
    assert (result.exit_code, len(list(cached.iterdir()))) == (2, 4)
    assert result.output.startswith("onepass: ONEPASS_TUNED: expected 1, true, yes or on, or 0")

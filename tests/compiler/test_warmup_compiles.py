"""`onepass.warmup` with the real compiler, without a GPU."""

import platform
import shutil
import subprocess

import packages
import pytest
import shipped
import torch

import onepass
from onepass.kernels.compiler import compile
from onepass.kernels.config import BackwardConfigSm90
from onepass.kernels.heuristics import chooser
from onepass.kernels.launch import backward_sm90 as backward_launch

pytestmark = packages.needs_compiler


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("objdump") is None, reason="not an x86-64 CPU, or no disassembler"
)
def test_host_code_runs_on_every_x86_cpu(tmp_path):
    """It has no VEX or EVEX instructions (AVX, BMI), whose names begin with v or end with x."""
    problem = shipped.problem(64, 64)
    file = tmp_path / "kernel.o"
    for request in backward_launch.compile_requests(problem):
        compile.compile_now(request.arch, request.trace).export_to_c(str(file), function_name="kernel")
        code = subprocess.run(["objdump", "-d", file], capture_output=True, text=True, check=True).stdout
        names = {line.split("\t")[2].split()[0] for line in code.splitlines() if line.count("\t") > 1}
        assert {"movups", "push", "call"} <= names
        assert [
            n for n in sorted(names) if n.startswith("v") or n in {"shlx", "shrx", "sarx", "rorx", "mulx", "andn"}
        ] == []


@pytest.mark.slow
def test_two_processes_fill_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile, "_kernels", {})
    calls = [dict.fromkeys("qkv", (1, 512, 4, d)) | {"dtype": torch.float16} for d in (64, 128)]
    first = onepass.warmup(calls, backend="sm90", workers=2)
    assert [kernel.was_cached for kernel in first] == [False, False]
    assert all(kernel.seconds > 0.5 for kernel in first)
    assert len(list(tmp_path.glob("*.o"))) == len(list(tmp_path.glob("*.json"))) == 2
    assert len(compile._kernels) == 2
    compile._kernels.clear()
    again = onepass.warmup(calls, backend="sm90")
    assert [kernel.was_cached for kernel in again] == [True, True]
    assert len(compile._kernels) == 2
    assert all(kernel.seconds < 0.5 for kernel in again)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(BackwardConfigSm90(), id="plain"),
        pytest.param(BackwardConfigSm90(private_dq=True), id="private_dq", marks=pytest.mark.slow),
    ],
)
def test_a_backward_finds_its_kernels_in_the_cache(tmp_path, monkeypatch, config):
    """A backward finds its kernels in the cache, with a gradient of lse and without."""
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile, "_kernels", {})
    monkeypatch.setitem(chooser.BACKWARD, "sm90", chooser.Chooser(BackwardConfigSm90, lambda problem, arch: config))
    call = dict.fromkeys("qkv", (1, 512, 4, 64)) | {"dtype": torch.bfloat16, "return_lse": True}
    made = onepass.warmup([call], backend="sm90", workers=2, gradients=True)
    assert not any(kernel.was_cached for kernel in made)
    assert len(list(tmp_path.glob("*.o"))) == len(compile._kernels) == len(made)
    compile._kernels.clear()
    monkeypatch.setattr(compile, "compile_now", None)
    for has_dlse in (False, True):
        for request in backward_launch.compile_requests(made[0].problem, has_dlse, config):
            compile.get(*request)
    assert len(compile._kernels) == len(made) - 1  # all kernels except for the forward

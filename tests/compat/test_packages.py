"""Packages that call flash-attn, as they are, with onepass in its place: scripts that compare them with float64."""

import subprocess
import sys
from pathlib import Path

import pytest

PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


@pytest.mark.parametrize(
    ("launcher", "script", "cases"),
    [
        pytest.param(PROCESSES, "ring_ranks.py", 7, marks=pytest.mark.package("ring_flash_attn"), id="ring_flash_attn"),
        pytest.param(PROCESSES, "yunchang_ranks.py", 18, marks=pytest.mark.package("yunchang"), id="yunchang"),
        pytest.param((), "diffusers_model.py", 10, marks=pytest.mark.package("diffusers"), id="diffusers"),
    ],
)
def test_beside_float64(launcher, script, cases):
    path = Path(__file__).with_name(script)
    command = [sys.executable, *launcher, "-m", "onepass.compat", "run", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if "error" in line]
    assert len(lines) == cases, done.stdout

"""Packages that call flash-attn, as they are, with onepass in its place: scripts that compare them with float64."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


@pytest.mark.parametrize(
    ("package", "version", "launcher", "script", "cases"),
    [
        ("ring_flash_attn", "0.1.8", PROCESSES, "ring_ranks.py", 7),
        ("yunchang", "0.6.4", PROCESSES, "yunchang_ranks.py", 18),
        ("diffusers", "0.42.1", (), "diffusers_model.py", 10),
    ],
)
def test_beside_float64(package, version, launcher, script, cases):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package} {version}")
    path = Path(__file__).with_name(script)
    command = [sys.executable, *launcher, "-m", "onepass.compat", "run", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if "error" in line]
    assert len(lines) == cases, done.stdout

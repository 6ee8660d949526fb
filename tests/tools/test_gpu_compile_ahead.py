"""The kernels of the GPU tests are compiled on a machine without a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from onepass.kernels.compiler import disk_cache

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.nightly
def test_kernels_of_chosen_tests_are_compiled(tmp_path):
    expression = "test_modifiers and sm80 and alibi and d64 and float32"
    command = [sys.executable, "tests/gpu/compile_ahead.py", "--workers", "2", "-k", expression]
    environment = os.environ | {"ONEPASS_CACHE_DIR": str(tmp_path / "kernels")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    entries = disk_cache.entries(tmp_path / "kernels")
    assert re.search(rf"{len(entries)} of {len(entries)} kernels", done.stdout), done.stdout
    assert {"forward_sm80", "backward_sm80"} <= {entry.about["name"] for entry in entries}
    assert {(entry.problem, entry.about["arch"]) for entry in entries} == {("", "sm_90a")}

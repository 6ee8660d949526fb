"""ring-flash-attn 0.1.8 as it is, on four processes, its functions of flash-attn being onepass's."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("ring_flash_attn") is None, reason="needs ring-flash-attn 0.1.8")
def test_rings_beside_full_attention():
    script = Path(__file__).with_name("ring_ranks.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*launcher, "-m", "onepass.compat", "run", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if "error" in line]
    assert len(lines) == 5, done.stdout

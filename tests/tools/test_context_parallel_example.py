"""The example that trains a Llama over ranks, beside one rank and beside transformers alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import loopback

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "context_parallel_llama.py"
TOKENS, STEPS = 151, 4
LEARNING_RATE = 0.02  # so high that attention soon matters: wrong positions change losses by 1e-2


def losses_of_example(num_ranks: int, *arguments: str) -> list[float]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *(launcher if num_ranks > 1 else []), str(EXAMPLE), "--device", "cpu"]
    command += ["--tokens", str(TOKENS), "--steps", str(STEPS)]
    command += ["--learning-rate", str(LEARNING_RATE), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


def losses_of_transformers() -> list[float]:
    """Losses of this training by transformers alone, on one device, with its own attention and shift of labels."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(1024, (1, -(-TOKENS // 2))).repeat(1, 2)[:, :TOKENS]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
@pytest.mark.nightly
def test_losses_do_not_depend_on_the_number_of_ranks():
    """Head-tail shards: each rank has two runs of tokens, whose successors belong to the other rank."""
    expected = pytest.approx(losses_of_transformers(), abs=5e-5)
    assert losses_of_example(1) == expected
    assert losses_of_example(2, "--layout", "head_tail", "--engine", "keys") == expected

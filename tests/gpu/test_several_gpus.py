"""`onepass.distributed` with NCCL on all GPUs of a machine.

python -m pytest -m gpu tests/gpu/test_several_gpus.py      on a machine with two or more GPUs
"""

import checks_on_gpus
import pytest
import torch
from gpu_cases import BACKEND, DEVICE, ON_GPU, size
from ranks import run_ranks

NUM_RANKS = size(torch.cuda.device_count(), 2)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(ON_GPU and (NUM_RANKS < 2 or BACKEND != "sm90"), reason="needs two Hopper GPUs"),
]
CALLS = size(4, 3)  # of a test: on a GPU each compiles a dozen kernels, and tests run beside each other


def run(function, *args):
    return run_ranks(NUM_RANKS, function, *args, device=DEVICE, timeout=400.0)


TRANSPORTS = ["messages", "copies"] if ON_GPU else ["messages"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("first", range(1000, 1000 + size(16, 5) * CALLS, CALLS))
def test_random_calls(first, transport):
    run(checks_on_gpus.random_calls, DEVICE, transport, list(range(first, first + CALLS)))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("engine", ["keys", "heads"])
def test_errors_are_those_of_one_device(engine, transport):
    for errors in run(checks_on_gpus.errors_of_a_large_call, DEVICE, engine, transport, size(4096, 200)):
        for name, (found, alone, _) in errors.items():
            assert found <= 1.05 * alone, (name, found, alone)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("engine", ["keys", "heads"])
def test_attention_in_a_graph(engine, transport):
    run(checks_on_gpus.attention_in_a_graph, DEVICE, engine, transport, size(3000, 60), size(40, 5))


@pytest.mark.parametrize("engine", ["keys", "heads"])
def test_memory(engine):
    if not ON_GPU:
        pytest.skip("needs the memory counters of a GPU")
    for whole, found, chunk in run(checks_on_gpus.peak_memory, 32768, engine):
        assert found <= whole / NUM_RANKS + 10 * chunk, (found, whole, chunk)  # gathered keys and values are 16


@pytest.mark.parametrize("kind", ["plain", "rotary", "packed", "e4m3"])
def test_decoding_in_a_graph(kind):
    run(checks_on_gpus.decoding_in_a_graph, DEVICE, size(40, 3), kind)

"""Compile the kernels of all selected cases in parallel instead of one by one in the tests."""

import os

import compile_ahead
import gpu_cases
import pytest
import torch

import onepass

# Many processes with a thread on every core each would wait for one another; oracles are small.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    if gpu_cases.ON_GPU and gpu_cases.IS_READY:  # the processes are dealt to all GPUs
        torch.cuda.set_device(int(os.environ["PYTEST_XDIST_WORKER"][2:]) % torch.cuda.device_count())


@pytest.fixture(scope="session", autouse=True)
def _compiled_ahead(request):
    cases = compile_ahead.cases_of(request.session.items)
    # starting processes does not pay for a few kernels; with several pytest processes, the first one compiles for all
    is_first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    if gpu_cases.ON_GPU and gpu_cases.IS_READY and is_first and len(cases) >= 8:
        compile_ahead.compile_behind(cases)


@pytest.fixture(autouse=True)
def _tiled_on_a_cpu(request):
    """On a CPU these tests are of `tiled`, the algorithm that all backends follow."""
    if gpu_cases.ON_GPU:
        yield
        return
    with onepass.use_backend("tiled"):
        yield

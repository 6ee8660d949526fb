"""Compile the kernels of all selected cases in parallel instead of one by one in the tests."""

import inspect
import os
import re

import compile_ahead
import decode_cases
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
    # dicts rather than sets, to keep the order of the tests
    calls, decoding = {"forward": {}, "backward": {}, "deterministic": {}}, {}
    for item in request.session.items:
        for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
            if isinstance(value, (gpu_cases.Case, gpu_cases.RandomCase)):
                calls[kernels_of(item)][value] = None
            elif isinstance(value, (decode_cases.DecodeCase, decode_cases.RandomDecodeCase)):
                decoding[value] = None
    # starting processes does not pay for a few kernels; with several pytest processes, the first one compiles for all
    is_first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    count = sum(map(len, calls.values())) + len(decoding)
    if not (gpu_cases.ON_GPU and gpu_cases.IS_READY and is_first) or count < 8:
        yield
        return
    calls_by_kind = {name: [case.call("meta") for case in found] for name, found in calls.items()}
    with compile_ahead.compiled_ahead(**calls_by_kind, decoding=decoding):
        yield


@pytest.fixture(autouse=True)
def _tiled_on_a_cpu(request):
    """On a CPU these tests are of `tiled`, the algorithm that all backends follow."""
    if gpu_cases.ON_GPU:
        yield
        return
    with onepass.use_backend("tiled"):
        yield


def kernels_of(item) -> str:
    """The last pass whose kernels a test of attention needs: "forward", "backward" or "deterministic" (backward)."""
    if not re.search("backward|gradients|training", item.nodeid):
        return "forward"
    is_deterministic = item.callspec.params.get(
        "deterministic", "deterministic=True" in inspect.getsource(item.function)
    )
    return "deterministic" if is_deterministic else "backward"

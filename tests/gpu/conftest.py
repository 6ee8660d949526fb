"""Compile the kernels of all selected cases in parallel, not one in each test."""

import os

import compile_ahead
import gpu_cases
import pytest


@pytest.fixture(scope="session", autouse=True)
def _compiled_ahead(request):
    # a dict, not a set: in the order of the tests
    calls = {True: {}, False: {}}  # by whether gradients are wanted
    for item in request.session.items:
        for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
            if isinstance(value, (gpu_cases.Case, gpu_cases.RandomCase)):
                calls[item.path.name.startswith(("test_backward", "test_training"))][value] = None
    # for a few it is not worth starting processes; of several pytest processes one does it
    is_first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    if not (gpu_cases.ON_GPU and gpu_cases.IS_READY and is_first) or len(calls[True]) + len(calls[False]) < 8:
        yield
        return
    with compile_ahead.compiled_ahead(*([case.call("meta") for case in calls[needs]] for needs in (False, True))):
        yield

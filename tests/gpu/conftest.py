"""Compile the kernels of all selected cases in parallel, not one in each test."""

import os

import compile_ahead
import decode_cases
import gpu_cases
import pytest


@pytest.fixture(scope="session", autouse=True)
def _compiled_ahead(request):
    # a dict, not a set: in the order of the tests
    calls = {True: {}, False: {}}  # by whether gradients are wanted
    decoding = {}
    for item in request.session.items:
        for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
            if isinstance(value, (gpu_cases.Case, gpu_cases.RandomCase)):
                calls[item.path.name.startswith(("test_backward", "test_training"))][value] = None
            elif isinstance(value, decode_cases.DecodeCase):
                decoding[value] = None
    # for a few it is not worth starting processes; of several pytest processes one does it
    is_first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    count = len(calls[True]) + len(calls[False]) + len(decoding)
    if not (gpu_cases.ON_GPU and gpu_cases.IS_READY and is_first) or count < 8:
        yield
        return
    plain, differentiated = ([case.call("meta") for case in calls[needs]] for needs in (False, True))
    with compile_ahead.compiled_ahead(plain, differentiated, decoding):
        yield

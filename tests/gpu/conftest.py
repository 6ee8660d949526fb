"""Compile the kernels of all selected cases in parallel, not one in each test."""

import compile_ahead
import gpu_cases
import pytest


@pytest.fixture(scope="session", autouse=True)
def _compiled_ahead(request):
    params = [v for item in request.session.items if hasattr(item, "callspec") for v in item.callspec.params.values()]
    # a dict, not a set: in the order of the tests
    wanted = dict.fromkeys(v for v in params if isinstance(v, (gpu_cases.Case, gpu_cases.RandomCase)))
    # for a few it is not worth starting processes
    if not (gpu_cases.ON_GPU and gpu_cases.IS_READY) or len(wanted) < 8:
        yield
        return
    with compile_ahead.compiled_ahead(case.call("meta") for case in wanted):
        yield

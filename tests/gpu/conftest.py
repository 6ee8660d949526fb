"""Compile the kernels of all selected cases before the first test: in parallel, not one in each test."""

import compile_ahead
import gpu_cases
import pytest


@pytest.fixture(scope="session", autouse=True)
def _compiled_ahead(request):
    if not (gpu_cases.ON_GPU and gpu_cases.IS_READY):
        return
    values = [v for item in request.session.items if hasattr(item, "callspec") for v in item.callspec.params.values()]
    wanted = {v for v in values if isinstance(v, (gpu_cases.Case, gpu_cases.RandomCase))}
    if len(wanted) > 8:  # starting the processes takes as long as two compiles
        compile_ahead.compile_ahead(v.call("meta") for v in wanted)

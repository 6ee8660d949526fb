"""These tests name the backend `tiled`. What holds for any data holds for a CPU's own choice, too (onepass/cpu)."""

import pytest

import onepass

ALSO_AS_CHOSEN = {"test_semantics", "test_negative_windows", "test_zero_heads"}


def pytest_generate_tests(metafunc):
    if metafunc.module.__name__ in ALSO_AS_CHOSEN:
        metafunc.parametrize("_backend", ["tiled", None], indirect=True, ids=["tiled", "as chosen"])


@pytest.fixture(autouse=True)
def _backend(request):
    with onepass.use_backend(getattr(request, "param", "tiled")):
        yield

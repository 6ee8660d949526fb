"""These tests are of the backend `tiled`, which a CPU runs where torch's C++ operators do not (onepass/cpu)."""

import pytest

import onepass


@pytest.fixture(autouse=True)
def _tiled():
    with onepass.use_backend("tiled"):
        yield

"""Settings for tests of the tools."""

import gc
import types

import pytest

from onepass.bench import memory
from onepass.tuning import timing


@pytest.fixture(scope="module", autouse=True)
def _no_collections():
    """The bench collects garbage before it measures, which takes half a second in a process with all tests loaded."""
    standing_in = types.SimpleNamespace(**vars(gc) | {"collect": lambda: 0})
    with pytest.MonkeyPatch.context() as patch:
        for module in (memory, timing):
            patch.setattr(module, "gc", standing_in)
        yield


@pytest.fixture
def wide_and_single_threaded(monkeypatch, one_thread):
    """Keep tables in one piece, and use one thread."""
    monkeypatch.setenv("COLUMNS", "200")

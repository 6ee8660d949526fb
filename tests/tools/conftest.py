"""Settings for tests of the tools."""

import gc
import types

import pytest
import torch

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
def wide_and_single_threaded(monkeypatch):
    """Keep tables in one piece, and use one thread: threads that wait for one another make small problems slow."""
    monkeypatch.setenv("COLUMNS", "200")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

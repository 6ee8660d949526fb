"""Settings for tests of the tools."""

import gc
import types

import pytest

from onepass.bench import timing


@pytest.fixture(autouse=True)
def _timing_without_a_collection(monkeypatch):
    """Before each timing the bench collects garbage, which takes half a second in a process with all tests loaded."""
    standing_in = types.SimpleNamespace(**vars(gc) | {"collect": lambda: 0})
    monkeypatch.setattr(timing, "gc", standing_in)

"""A GPU where there is none, for the choice of backends."""

from types import SimpleNamespace

import pytest
import torch

from onepass.dispatch import backends
from onepass.kernels.heuristics import tuned


@pytest.fixture
def gpu(monkeypatch):
    """A function that pretends a GPU of a compute capability, with the kernel compiler."""

    def make(*capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        properties = SimpleNamespace(multi_processor_count=132, name="Pretended GPU")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        monkeypatch.setattr(backends, "_HAS_KERNEL_COMPILER", True)
        monkeypatch.setattr(tuned, "gpu_name", lambda device=None: "Pretended GPU")

    return make

"""Settings for every test process."""

import gc
import os

import pytest
import torch

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # only tests of the CPU draw examples: a GPU machine may do without it
    settings = None

# Compiling kernels makes millions of objects that live on. To search them all for garbage as often as Python does by
# default took 7 % of the time of two files of the kernels' tests.
gc.set_threshold(200_000, 20, 100)

# Nothing under test may reach for the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if settings is not None:
    settings.register_profile(
        "onepass", deadline=None, print_blob=True, derandomize=False, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("onepass")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

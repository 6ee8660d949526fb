"""Settings for every test process."""

import gc
import os

import packages
import pytest
import quick_cases
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


def pytest_runtest_setup(item):
    for mark in item.iter_markers("package"):
        packages.skip_or_fail(*mark.args)


COLLECTED = pytest.StashKey[list[str]]()


def pytest_addoption(parser):
    parser.addoption("--first-cases", action="store_true", help="of each GPU test, run the first case alone")


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config, items):
    """Mark the slow cases; with --first-cases, keep only the first case of each GPU test."""
    config.stash[COLLECTED] = [item.nodeid for item in items]
    seen, kept, others = set(), [], []
    for item in items:
        if quick_cases.is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)
        test = item.path, getattr(item, "originalname", item.name)
        is_left_out = config.getoption("--first-cases") and item.get_closest_marker("gpu") and test in seen
        (others if is_left_out else kept).append(item)
        seen.add(test)
    items[:] = kept
    config.hook.pytest_deselected(items=others)


@pytest.fixture
def collected(request) -> list[str]:
    """The names of all tests that this run has found, before `-m` and `-k` chose among them."""
    return request.config.stash[COLLECTED]


@pytest.fixture(scope="session", autouse=True)
def _kernel_cache(request, tmp_path_factory):
    """Let all processes of a run share one temporary cache, in which each kernel is compiled once.

    ONEPASS_TEST_CACHE_DIR names a directory to use instead, for runs that follow each other. A run of GPU tests alone
    has the cache of its user: there each new directory would cost minutes.
    """
    if all(item.get_closest_marker("gpu") for item in request.session.items):
        yield
        return
    directory = os.environ.get("ONEPASS_TEST_CACHE_DIR")
    if directory is None:
        own = tmp_path_factory.getbasetemp()  # of several pytest-xdist workers each has a folder in that of the run
        directory = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "kernels"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEPASS_CACHE_DIR", str(directory))
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

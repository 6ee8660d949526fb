"""Settings for every test process."""

import gc
import os

import packages
import pytest
import sampling
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


def pytest_addoption(parser):
    parser.addoption(
        "--gpu-cases", choices=("file", "test"), help="run one case of each file of GPU tests, or of each GPU test"
    )


def pytest_collection_finish():
    gc.freeze()  # what has been imported lives on, too


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config, items):
    """Mark the cases of sampled tests (sampling.py), and leave out GPU tests as --gpu-cases says."""
    tests = {}
    for item in items:
        tests.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    for cases in tests.values():
        if sampled := cases[0].get_closest_marker("sampled"):
            _mark(cases, **sampled.kwargs)
    wanted, seen, others = config.getoption("--gpu-cases"), set(), set()
    for (path, _), cases in tests.items():
        if wanted and cases[0].get_closest_marker("gpu"):
            others.update(cases[0 if wanted == "file" and path in seen else 1 :])
            seen.add(path)
    config.hook.pytest_deselected(items=[item for item in items if item in others])
    items[:] = [item for item in items if item not in others]


def _mark(cases, quick, slow):
    order = sampling.covering_order([{"id": case.callspec.id, **case.callspec.params} for case in cases])
    for rank, number in enumerate(order):
        if rank >= quick:
            cases[number].add_marker(pytest.mark.slow)
        if rank >= quick + slow:
            cases[number].add_marker(pytest.mark.nightly)


@pytest.fixture(scope="session", autouse=True)
def _kernel_cache(request, tmp_path_factory):
    """Let all processes of a run share one temporary cache, in which each kernel is compiled once.

    A run of GPU tests alone has the cache of its user: there each new directory would cost minutes.
    """
    if all(item.get_closest_marker("gpu") for item in request.session.items):
        yield
        return
    own = tmp_path_factory.getbasetemp()  # of several pytest-xdist workers each has a folder in that of the run
    directory = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "kernels"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEPASS_CACHE_DIR", str(directory))
        yield


@pytest.fixture
def one_thread():
    """Threads that wait for one another on a busy machine make small problems slow."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

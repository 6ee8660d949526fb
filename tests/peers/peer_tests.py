"""A pytest plugin that runs another library's tests of attention on the functions of `onepass.compat`.

    pytest -p peer_tests --peer-cases 40 --peer-seed 0 --peer-device cpu test_flash_attn.py

It samples the cases of each test function as a Latin hypercube over its parameters, so that each value of each
parameter is met equally often, and it lets tests that ask for device="cuda" run on a CPU. tests/peers/README.md says
how to get the tests, and which cases are known to test the other library's internals.
"""

from __future__ import annotations

import builtins
import collections
import gc
import importlib.util
import inspect
import json
import random
import sys
import types
from pathlib import Path

import peer_device
import pytest
import torch

LENGTHS = {"seqlen", "seqlen_q", "seqlen_k"}
SPARE = 8  # times as many cases are chosen as are run, because tests skip some of their own combinations
REPEATS = {50, 100, 250, 1000}  # the numbers of times that some tests repeat a call
ENOUGH = "enough cases of this function have run"
# tests of the other library's internals, and what they look at; their failures are counted apart
INTERNALS = {
    "test_flash_attn_cache_separates_broadcast_layouts": "flash-attn 4's cache of compiled kernels",
    "test_flash_attn_invalid_head_dim": "an error for head dimensions that flash-attn 4 has no kernel for",
    "test_flash_attn_sm120_rejects_splitkv": "an error for splits that a kernel of flash-attn 4 lacks",
    "test_flash_attn_varlen_seqlen_k_per_split": "bits that must change with the size of a split",
}


def pytest_addoption(parser):
    group = parser.getgroup("peer tests")
    group.addoption("--peer-cases", type=int, default=0, help="cases of each test function that run; 0: all")
    group.addoption("--peer-seed", type=int, default=0, help="seed of the sample")
    group.addoption("--peer-device", default="cuda", choices=("cpu", "cuda"), help="cpu: run device='cuda' on the CPU")
    group.addoption("--peer-capability", default="9.0", help="compute capability that the CPU claims to have")
    group.addoption("--peer-pairs", type=int, default=0, help="largest seqlen_q * seqlen_k of a case; 0: any")
    group.addoption("--peer-repeats", type=int, default=0, help="how often a test repeats a call; 0: as it says")
    group.addoption(
        "--peer-module",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="a module that tests import, from a file",
    )
    group.addoption("--peer-json", default=None, help="file for the outcome of each case")
    group.addoption("--peer-lines", default=None, help="file to which each outcome is added at once, as a line of JSON")
    group.addoption("--peer-done", default=None, help="file with a JSON list of cases that need not run again")
    group.addoption(
        "--peer-function", default=None, help="the only test function to collect; to collect all can take a minute"
    )


def pytest_configure(config):
    config._peer_outcomes = collections.defaultdict(dict)
    config._peer_runs = collections.Counter()
    config._peer_left_out = {}
    config._peer_has_failed = False
    done = config.getoption("peer_done")
    config._peer_done = set(json.loads(Path(done).read_text())) if done else set()
    if config.getoption("peer_device") == "cpu":
        capability = tuple(int(n) for n in config.getoption("peer_capability").split("."))
        peer_device.pretend_cuda(capability)
    from onepass import compat

    compat.install()
    stub_module("flash_attn.cute.cache_utils", JITCache=type("JITCache", (), {}))
    for option in config.getoption("peer_module"):
        name, path = option.split("=", 1)
        load_module(name, path)


def stub_module(name, **attributes):
    """Put a module with these attributes into sys.modules."""
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module


def load_module(name, path):
    """Load a file as a module of this name."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)


# --- which cases run --------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector, name, obj):
    function = collector.config.getoption("peer_function")
    if function and name.startswith("test") and inspect.isfunction(obj) and name != function:
        return []  # no other plugin makes items of this function
    return None


def pytest_collection_modifyitems(config, items):
    functions = collections.defaultdict(list)
    for item in items:
        functions[item.originalname, item.path].append(item)
    kept = []
    for (name, _), cases in functions.items():
        small = [case for case in cases if is_small(case, config.getoption("peer_pairs"))]
        config._peer_left_out[name] = len(cases) - len(small)
        count = config.getoption("peer_cases")
        seed = f"{config.getoption('peer_seed')} {name}"
        chosen = sample(small, count, seed) if count else small
        done = [case for case in chosen if case.name in config._peer_done]
        config._peer_runs[name] += len(done)
        kept += [case for case in chosen if case.name not in config._peer_done]
    chosen = set(map(id, kept))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = kept


def is_small(case, most_pairs):
    """Whether a case has at most so many pairs of a query and a key."""
    params = getattr(case, "callspec", None) and case.callspec.params
    if not most_pairs or not params or not LENGTHS & params.keys():
        return True
    seqlen_q = params.get("seqlen", params.get("seqlen_q", 1))
    seqlen_k = params.get("seqlen", params.get("seqlen_k", 1))
    return seqlen_q * seqlen_k <= most_pairs


def axes_of(case):
    """The names of the parameters of each decorator of a case."""
    axes = []
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0]
        axes.append(tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names))
    return axes


def sample(cases, count, seed):
    """Cases in an order in which each `count` of them in turn are a Latin hypercube over the decorators' values."""
    if not cases or not hasattr(cases[0], "callspec"):
        return cases
    axes = axes_of(cases[0])
    by_values = {tuple(repr([case.callspec.params[n] for n in axis]) for axis in axes): case for case in cases}
    levels_of = [list(dict.fromkeys(values[i] for values in by_values)) for i in range(len(axes))]
    rng = random.Random(seed)
    found, rounds = {}, 0
    while len(found) < min(SPARE * count, len(by_values)) and rounds < 100 * SPARE:
        rounds += 1
        strata = []
        for levels in levels_of:
            column = [levels[n * len(levels) // count] for n in range(count)]
            rng.shuffle(column)
            strata.append(column)
        for values in zip(*strata, strict=True):
            if values in by_values:
                found.setdefault(values, by_values[values])
    return list(found.values())


def pytest_runtest_setup(item):
    config = item.config
    if config._peer_has_failed:  # the tensors of a failed case and its traceback hold each other
        gc.collect()
        config._peer_has_failed = False
    count = config.getoption("peer_cases")
    if count and config._peer_runs[item.originalname] >= count:
        pytest.skip(ENOUGH)
    repeats = config.getoption("peer_repeats")
    if repeats:
        item.module.range = lambda *args: builtins.range(
            *((min(args[0], repeats),) if len(args) == 1 and args[0] in REPEATS else args)
        )


def pytest_runtest_teardown(item):
    if item.config.getoption("peer_device") == "cuda" and torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # other processes share the GPU


# --- outcomes ---------------------------------------------------------------------------------------------------------


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.when == "setup" and report.skipped and ENOUGH in str(report.longrepr):
        return
    if not (report.when == "call" or report.outcome != "passed"):
        return
    outcome, reason = report.outcome, ""
    if call.excinfo is not None:
        item.config._peer_has_failed = True
        reason = f"{call.excinfo.typename}: {call.excinfo.value}".strip()[:300]
        if call.excinfo.errisinstance(NotImplementedError):
            outcome = "refused"
        elif outcome == "failed" and item.originalname in INTERNALS:
            outcome, reason = "internal", f"{INTERNALS[item.originalname]} ({reason})"
    if hasattr(report, "wasxfail"):
        outcome = "skipped"
    if outcome != "skipped":
        item.config._peer_runs[item.originalname] += 1
    item.config._peer_outcomes[item.originalname][item.nodeid] = {"outcome": outcome, "reason": reason}
    lines = item.config.getoption("peer_lines")
    if lines and outcome != "skipped":
        row = {"case": item.name, "outcome": outcome, "reason": reason, "seconds": round(call.duration, 1)}
        with open(lines, "a") as file:
            file.write(json.dumps(row) + "\n")


def pytest_terminal_summary(terminalreporter, config):
    outcomes = config._peer_outcomes
    kinds = ("passed", "failed", "refused", "internal", "skipped")
    terminalreporter.section("peer tests")
    terminalreporter.line(f"{'function':60}" + "".join(f"{kind:>9}" for kind in kinds) + "  too large")
    total = collections.Counter()
    for name, cases in outcomes.items():
        counts = collections.Counter(case["outcome"] for case in cases.values())
        total += counts
        row = "".join(f"{counts[kind]:9}" for kind in kinds)
        terminalreporter.line(f"{name:60}{row}{config._peer_left_out.get(name, 0):11}")
    terminalreporter.line(f"{'all':60}" + "".join(f"{total[kind]:9}" for kind in kinds))
    path = config.getoption("peer_json")
    if path:
        with open(path, "w") as file:
            json.dump(outcomes, file, indent=1)

"""Compile the kernels of many calls in parallel, before the tests that would compile them one by one.

    ONEPASS_CACHE_DIR=kernels python tests/gpu/compile_ahead.py     compile them for Hopper, on any machine

`onepass cache export` and `import` carry them to the machine with the GPU, where the tests then take minutes in place
of hours. This is the one place of the GPU tests that knows how the backends are built.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))  # as in pyproject.toml, for this script

from decode_cases import DecodeCase, RandomDecodeCase
from gpu_cases import Case, RandomCase

from onepass.api import calls, decode_calls
from onepass.dispatch import attention as dispatch
from onepass.kernels.compiler import compile, pool
from onepass.kernels.config import ForwardConfigSm90
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.problem import AttentionProblem
from onepass.testing import Call
from onepass.validation.attention import check_attention


def problem_of(call: Call) -> AttentionProblem:
    """The problem that a call poses on a GPU. The call's tensors may be on the "meta" device."""
    _, problem = check_attention(**call.tensors, **{"deterministic": False, "return_lse": True} | call.options)
    return replace(problem, device_type="cuda")


def config_of(call: Call) -> ForwardConfigSm90:
    return heuristics.forward_config_sm90(problem_of(call))


def compile_behind(cases: Iterable[tuple]) -> None:
    """Fill the kernel cache in this order while the tests run, with a process on every core but one.

    A test that comes to its kernel first waits for the process that compiles it, or compiles it itself.
    """
    requests = (request for case in cases for request in requests_of(*case))
    pool.compile_behind(requests, max(1, pool.num_cpus() - 1))


def cases_of(items: Iterable[pytest.Item]) -> dict[tuple, None]:
    """The cases of these tests, each with the last pass whose kernels it needs, in the order of the tests."""
    found = {}
    for item in items:
        for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
            if isinstance(value, (Case, RandomCase)):
                found[value, kernels_of(item)] = None
            elif isinstance(value, (DecodeCase, RandomDecodeCase)) or hasattr(value, "requests"):
                found[value, "forward"] = None
    return found


def kernels_of(item: pytest.Item) -> str:
    """The last pass whose kernels a test of attention needs: "forward", "backward" or "deterministic" (backward)."""
    if not re.search("backward|gradients|training", item.nodeid):
        return "forward"
    is_deterministic = item.callspec.params.get(
        "deterministic", "deterministic=True" in inspect.getsource(item.function)
    )
    return "deterministic" if is_deterministic else "backward"


def requests_of(case: object, kernels: str) -> list[tuple]:
    """The arguments of `compile.get` for every kernel of a case. Args: as `cases_of` finds them."""
    if isinstance(case, (DecodeCase, RandomDecodeCase)):
        return decode_requests(case)
    if not isinstance(case, (Case, RandomCase)):
        return case.requests()
    problem = problem_of(case.call("meta"))
    if kernels == "deterministic":
        problem = replace(problem, deterministic=True)
    return _requests(problem, kernels != "forward")


def _requests(problem: AttentionProblem, needs_gradients: bool) -> list[tuple]:
    """The arguments of `compile.get` for every kernel of a problem."""
    support = dispatch.choose(problem)
    if not support.ok or support.backend == "tiled" or problem.num_heads_q == 0:
        return []
    config = dispatch.forward_config(support.backend, problem)
    requests = dispatch.forward_requests(support.backend, problem, config)
    if needs_gradients:
        for has_dlse in (False, True):
            requests += [request for _, request in dispatch.backward_requests(support.backend, problem, has_dlse)]
    return requests


def decode_requests(case: DecodeCase | RandomDecodeCase) -> list[tuple]:
    """The arguments of `compile.get` for every kernel of a call of attention_decode."""
    problem, inputs = decode_calls.problem_of("compiled_ahead", case.arguments("meta"))
    return [job.request for job in calls.jobs_of_decode(problem, inputs, None)]


@contextlib.contextmanager
def _as_on(name: str) -> Iterator[None]:
    """Let torch say that there is a Hopper GPU of this name. A call's kernels depend on name, architecture and size."""
    properties = types.SimpleNamespace(name=name, multi_processor_count=132)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        yield


class _Collected:
    """A plugin of pytest that keeps the tests it has found."""

    items: tuple[pytest.Item, ...] = ()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = tuple(session.items)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the kernels of the GPU tests for Hopper.")
    parser.add_argument("--workers", type=int, default=pool.num_cpus(), help="processes that compile")
    parser.add_argument("--gpu", default="NVIDIA H200", help="its name, as torch gives it: some have tuned kernels")
    parser.add_argument("--expression", "-k", default="", help="tests, as pytest takes it")
    options = parser.parse_args()
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    collected = _Collected()
    tests = str(Path(__file__).parent)
    pytest.main(["--collect-only", "-qq", "-m", "gpu", "-k", options.expression, tests], plugins=[collected])
    requests = {}
    with _as_on(options.gpu):
        for case, kernels in cases_of(collected.items):
            requests |= {repr(request[:3]): request for request in requests_of(case, kernels)}

    def say(done: int, count: int) -> None:
        if done % 20 == 0 or done == count:
            print(f"{done} of {count} kernels", flush=True)

    failures = pool.compile_each(requests.values(), options.workers, on_done=say)
    print(f"kernels of these tests: {len(requests)}")
    for (name, key, _), reason in failures.items():
        print(f"{name} was not compiled: {reason}: {compile.summary(key)}")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()

"""Compile the kernels of many calls in parallel, before the tests that would compile them one by one.

This is the one place of the GPU tests that knows how the backends are built.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace

from decode_cases import DecodeCase, RandomDecodeCase

from onepass.api import calls, decode_calls
from onepass.dispatch import attention as dispatch
from onepass.kernels.compiler import pool
from onepass.kernels.config import ForwardConfigSm90
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.problem import AttentionProblem
from onepass.testing import Call
from onepass.validation import attention as validation
from onepass.validation import modifiers


def problem_of(call: Call) -> AttentionProblem:
    """The problem that a call poses on a GPU. The call's tensors may be on the "meta" device."""
    check = validation.check_attention_varlen if call.is_packed else validation.check_attention
    absent = dict.fromkeys(("window", "softcap", "sinks", "softmax_scale", "tuning"))
    options = {**absent, "causal": False, "deterministic": False, "return_lse": True, **call.options}
    given = {name: options.pop(name, None) for name in modifiers.NAMES}
    options["modifiers"] = {"given": given, "dropout_p": options.pop("dropout_p", 0.0)}
    return replace(check(**call.tensors, **options), device_type="cuda")


def config_of(call: Call) -> ForwardConfigSm90:
    return heuristics.forward_config_sm90(problem_of(call))


@contextlib.contextmanager
def compiled_ahead(
    forward: Iterable[Call],
    backward: Iterable[Call],
    deterministic: Iterable[Call],
    decoding: Iterable[DecodeCase | RandomDecodeCase],
) -> Iterator[None]:
    """Fill the kernel cache in the order of the calls while the tests run, with a process on every core but one.

    A test that comes to its kernel first waits for the process that compiles it, or compiles it itself.

    Args:
        forward: calls that need their forward kernels.
        backward: calls that need the kernels of their forward and of their backward.
        deterministic: calls that need the kernels of their forward and of their deterministic backward.
        decoding: calls of attention_decode.
    """
    requests = [request for case in decoding for request in decode_requests(case)]
    requests += [request for call in forward for request in _requests(problem_of(call), False)]
    requests += [request for call in backward for request in _requests(problem_of(call), True)]
    for call in deterministic:
        requests += _requests(replace(problem_of(call), deterministic=True), True)
    with pool.compiling_in_background(requests, max(1, pool.num_cpus() - 1)) as failures:
        yield
    for (name, *_), reason in failures.items():
        warnings.warn(f"{name} was not compiled ahead of time: {reason}", RuntimeWarning, stacklevel=1)


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

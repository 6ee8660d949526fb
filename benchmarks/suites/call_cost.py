"""The CPU time of one call, by component: what Python spends before and after the kernel's own launch.

    python -m benchmarks call_cost

On a Hopper GPU the real kernel is launched, and never waited for within a sample. Elsewhere the tensors lie on the CPU
and a function that does nothing stands in for the kernel, so that the rows show all but its launch (about 5 us) and
the difference between allocating on the two devices. A figure is the CPU time of this thread in microseconds, the
median of the samples. With --out the rows go there as JSON.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

import onepass
from onepass.dispatch import attention as dispatch
from onepass.dispatch import backends
from onepass.kernels.compiler import compile
from onepass.kernels.launch import backward_sm90 as backward_launch
from onepass.kernels.launch import decode_sm80 as decode_launch
from onepass.kernels.launch import forward_sm90 as launch
from onepass.ops import attention as ops
from onepass.problem import AttentionInputs
from onepass.problem.outputs import empty_outputs
from onepass.testing.machine import describe
from onepass.testing.results import Report
from onepass.validation import attention as validation

from ..harness.suite import Args, Suite
from ..harness.timing import host_us

NUM_CALLS, NUM_SAMPLES = 500, 21


def components() -> dict[str, Callable[[], object]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(1, 128, 4, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
    sinks = torch.zeros(4, device=device)
    inputs = AttentionInputs(q, k, v)

    def check():
        return validation.check_attention(q, k, v, causal=True)

    _, problem = check()
    options = ops.options_of(problem, "sm90")
    leaf = q.detach().requires_grad_()
    out, lse = torch.ops.onepass.attention_forward(*inputs[:7], *options)
    dout = torch.randn_like(out)
    graph = torch.ops.onepass.attention_forward(leaf, *inputs[1:7], *options)[0]
    given = (*inputs[:7], *options)
    rows: dict[str, Callable[[], object]] = {
        "empty_outputs": lambda: empty_outputs(problem, inputs),
        "check_attention": check,
        "dispatch.require": lambda: dispatch.require(problem),
        "launch.forward": lambda: launch.forward(problem, inputs),
        "the operator": lambda: torch.ops.onepass.attention_forward(*given),
        "attention": lambda: onepass.attention(q, k, v, causal=True),
        "attention, sinks and lse": lambda: onepass.attention(q, k, v, sinks=sinks, return_lse=True),
        "attention, with gradient": lambda: onepass.attention(leaf, k, v, causal=True),
        "launch.backward": lambda: backward_launch.backward(problem, inputs, out, lse, dout, None),
        "the backward operator": lambda: torch.ops.onepass.attention_backward(dout, None, out, lse, *given),
        "autograd.grad": lambda: torch.autograd.grad(graph, leaf, dout, retain_graph=True),
    }
    cache, lengths = torch.zeros(1, 8192, 4, 128, device=device, dtype=q.dtype), torch.zeros(1, device=device).int()
    for name, extra in (
        ("one split", {"num_splits": 1}),
        ("splits", {}),
        ("splits, new keys", {"k_new": k, "v_new": v}),
    ):
        arguments: dict[str, Any] = {"cache_seqlens": lengths, "backend": "sm80", **extra}
        rows[f"decode, {name}"] = functools.partial(
            onepass.attention_decode, q[:, :1], cache, cache.clone(), **arguments
        )
    if device == "cuda":
        # every launch looks up its stream
        queue = onepass.ForwardConfigSm90(tile_n=128, q_stages=2, dynamic_tiles=True)
        rows["attention, queue of tiles"] = lambda: onepass.attention(q, k, v, causal=True, tuning=queue)
    return rows


def start(args: Args, parser: argparse.ArgumentParser) -> dict[str, Any]:
    has_kernels = torch.cuda.is_available()
    if not has_kernels:
        print("no GPU: CPU tensors, a kernel that does nothing")
        stand_in_for_a_gpu()
    return describe("cuda" if has_kernels else "cpu") | {"suite": "call_cost", "has_kernels": has_kernels}


def measure(case: tuple[str, Callable[[], object]], args: Args, report: Report) -> None:
    name, call = case
    report.add({"what": name, "cpu_us": round(host_us(call, NUM_CALLS, NUM_SAMPLES), 1)})
    print(f"{name:26s} {report.rows[-1]['cpu_us']:6.1f} us", flush=True)


def stand_in_for_a_gpu() -> None:
    """Let calls of CPU tensors take the path of a Hopper GPU, to a kernel that does nothing."""
    stand_ins: list[tuple[Any, str, Callable]] = [
        (backends, "refusal", lambda name, problem, device: None),
        (decode_launch, "arch_of", lambda device: "sm_90a"),
        (compile, "get", lambda *request: lambda *arguments: None),
        (launch, "tile_counter", lambda device: None),
        (backward_launch, "tile_counter", lambda device: None),
        (backward_launch, "zero_counters", lambda purpose, device, count: None),
        (torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132)),
    ]
    for module, name, function in stand_ins:
        setattr(module, name, function)


SUITE = Suite("call_cost", __doc__, lambda parser: None, start, lambda args: components().items(), measure)

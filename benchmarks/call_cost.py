"""CPU time of one call, by component: what Python spends before and after the kernel's own launch.

    python benchmarks/call_cost.py

On a Hopper GPU the real kernel is launched, and never waited for within a sample. Elsewhere the tensors lie on the CPU
and a function that does nothing stands in for the kernel, so that the rows show all but its launch (about 5 us) and
the difference between allocating on the two devices. CPU time of this thread in microseconds, median of the samples.
"""

from __future__ import annotations

import functools
import statistics
import time
import timeit
from collections.abc import Callable
from types import SimpleNamespace

import torch

import onepass
from onepass.dispatch import attention as dispatch
from onepass.dispatch import backends
from onepass.kernels.compiler import compile
from onepass.kernels.launch import decode_sm80 as decode_launch
from onepass.kernels.launch import forward_sm90 as launch
from onepass.ops import attention as ops
from onepass.problem import AttentionInputs
from onepass.problem.outputs import empty_outputs
from onepass.validation import attention as validation

NUM_CALLS, NUM_SAMPLES = 500, 21
NO_OPTIONS = dict.fromkeys(("window", "softcap", "sinks", "softmax_scale", "deterministic", "tuning"))


def cost_us(call: Callable[[], object]) -> float:
    def wait():
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    for _ in range(50):
        call()
    samples = []
    for _ in range(NUM_SAMPLES):
        wait()
        samples.append(timeit.timeit(call, timer=time.thread_time, number=NUM_CALLS))
    wait()
    return statistics.median(samples) / NUM_CALLS * 1e6


def components() -> dict[str, Callable[[], object]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(1, 128, 4, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
    sinks = torch.zeros(4, device=device)
    inputs = AttentionInputs(q, k, v)

    def check():
        return validation.check_attention(q, k, v, causal=True, return_lse=False, **NO_OPTIONS)

    problem = check()
    options = ops.options_of(problem, "sm90")
    leaf = q.detach().requires_grad_()
    rows: dict[str, Callable[[], object]] = {
        "empty_outputs": lambda: empty_outputs(problem, inputs),
        "check_attention": check,
        "dispatch.require": lambda: dispatch.require(problem),
        "launch.forward": lambda: launch.forward(problem, inputs),
        "the operator": lambda: torch.ops.onepass.attention_forward(*inputs, *options),
        "attention": lambda: onepass.attention(q, k, v, causal=True),
        "attention, sinks and lse": lambda: onepass.attention(q, k, v, sinks=sinks, return_lse=True),
        "attention, gradient asked": lambda: onepass.attention(leaf, k, v, causal=True),
    }
    cache, lengths = torch.zeros(1, 8192, 4, 128, device=device, dtype=q.dtype), torch.zeros(1, device=device).int()
    for name, extra in (("one part", {"num_splits": 1}), ("parts", {}), ("parts, new keys", {"k_new": k, "v_new": v})):
        arguments = {"cache_seqlens": lengths, "backend": "sm80"} | extra
        rows[f"decode, {name}"] = functools.partial(
            onepass.attention_decode, q[:, :1], cache, cache.clone(), **arguments
        )
    if device == "cuda":
        # every launch looks up its stream
        queue = onepass.ForwardConfig(tile_n=128, q_stages=2, dynamic_tiles=True)
        rows["attention, queue of tiles"] = lambda: onepass.attention(q, k, v, causal=True, tuning=queue)
    return rows


def main() -> None:
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name())
    else:
        print("no GPU: CPU tensors, a kernel that does nothing")
        backends.refusal = lambda name, problem, device: None
        decode_launch.arch_of = lambda device: "sm_90a"
        compile.get = lambda *request: lambda *arguments: None
        launch.tile_counter = lambda device: None
        torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
    for name, call in components().items():
        print(f"{name:26s} {cost_us(call):6.1f} us", flush=True)


if __name__ == "__main__":
    main()

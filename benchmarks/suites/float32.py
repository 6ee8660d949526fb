"""The forward in float32 on a Hopper GPU: how exact is it, and how fast compared with torch's memory-efficient SDPA?

    python -m benchmarks float32                                        # errors, then the grid
    python -m benchmarks float32 --no-check --cases 128c8192,64n512     # some cases only
    python -m benchmarks float32 --variants "tile_n=64; dynamic_tiles=True"     # also these configurations

Contenders: "onepass" as a call runs it, with the split of q, k and v into halves of float16; "kernel" without it, from
halves that are there; "sm80", the Ampere kernels with three products of tf32; "efficient", torch's, with TF32 off.
FLOPs are counted once, though each product takes three. Grid, variants and timing are those of forward_sm90.py.
The results go to --out as JSON.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import onepass
from onepass.bench import ablation
from onepass.bench.cases import Case, Inputs, make_inputs
from onepass.dispatch import attention as dispatch
from onepass.kernels.config import HOPPER, value_blocks
from onepass.kernels.launch import float32_halves
from onepass.kernels.launch import forward_sm90 as launch
from onepass.problem import AttentionInputs, AttentionProblem
from onepass.problem.outputs import empty_outputs
from onepass.testing.machine import describe
from onepass.testing.results import Report, finite

from ..harness import grid
from ..harness.contenders import attention_in_pytorch, configurations
from ..harness.suite import Args, Check, Suite

DEVICE = "cuda"
ERROR_CASES = [(d, causal, seqlen) for d in (64, 96, 128, 256) for causal in (False, True) for seqlen in (1000, 4096)]


def efficient(inputs: Inputs, case: Case) -> Callable[[], Tensor]:
    q, k, v = (t.transpose(1, 2) for t in inputs[:3])

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal).transpose(1, 2)

    return call


def kernel_alone(inputs: Inputs, problem: AttentionProblem) -> Callable[[], Tensor]:
    """A call of the kernel with halves that were made before."""
    tensors = inputs[:3]
    halves = float32_halves.split(*tensors, value_blocks(problem))
    ready = launch.prepare(problem, inputs.q.device)
    outputs = empty_outputs(ready.problem, AttentionInputs(*tensors))  # type: ignore[attr-defined]

    def call() -> Tensor:
        ready.attend_parts(AttentionInputs(*tensors), *outputs, halves, *tensors)  # type: ignore[attr-defined]
        return outputs[0]

    return call


def contenders(case: Case, inputs: Inputs, args: Args) -> dict[str, Callable]:
    def public(**options: Any) -> Callable[[], Tensor]:
        return lambda: onepass.attention(*inputs[:3], causal=case.causal, **options)

    found: dict[str, Callable] = {"onepass": public(), "efficient": efficient(inputs, case)}
    problem = ablation.problem_of(case, DEVICE)
    if launch.unsupported(problem) is None:
        found["sm80"] = public(backend="sm80")
        found["kernel"] = kernel_alone(inputs, problem)
        configs = configurations_of(problem, args)
        found |= {name: public(backend="sm90", tuning=config) for name, config in configs.items() if name != "onepass"}
    return found


def configurations_of(problem: AttentionProblem, args: Args) -> dict[str, Any]:
    """The configuration of onepass, and those of --variants, which change fields of the Hopper kernel's."""
    default = dispatch.forward_config("sm90", problem)
    found = configurations(default, args.variants, lambda config: config.check(problem, HOPPER))
    return found | {"onepass": dispatch.forward_config(dispatch.choose(problem).backend, problem)}


def checks(args: Args, header: dict[str, Any]) -> Iterator[Check]:
    """Whether onepass is as exact as attention in torch's float32.

    Errors are root mean squares against float64, relative to that of out. They go into the header.
    """
    seed = time.time_ns() % 2**31
    print("seed of the check:", seed)
    header["rmse"] = []
    for what in ERROR_CASES:
        yield Check(
            "head_dim {}, causal {}, seqlen {}".format(*what), functools.partial(errors_of, what, seed, args, header)
        )


def errors_of(what: tuple[int, bool, int], seed: int, args: Args, header: dict[str, Any]) -> tuple[bool, str]:
    head_dim, causal, seqlen = what
    case = Case.square(seqlen, 4, head_dim, batch=2, dtype="float32", causal=causal)
    inputs = make_inputs(case, DEVICE, seed)
    exact, plain = (attention_in_pytorch(case, inputs, dtype)["out"] for dtype in (torch.float64, torch.float32))
    found = {"math": plain}
    found |= {name: call() for name, call in contenders(case, inputs, args).items()}
    errors = {name: float((out - exact).square().mean().sqrt()) for name, out in found.items()}
    errors = {name: error / float(exact.square().mean().sqrt()) for name, error in errors.items()}
    row = {"head_dim": head_dim, "causal": causal, "seqlen": seqlen}
    header["rmse"].append(row | {name: finite(float(f"{error:.3e}")) for name, error in errors.items()})
    return errors["onepass"] <= errors["math"], " ".join(f"{name} {error:.2e}" for name, error in errors.items())


def results_in(report: Report) -> grid.Results:
    return grid.Results(report, ["efficient"], "float32", tolerance=1e-4)


def measure(cell: grid.Cell, args: Args, report: Report) -> None:
    case = cell.case("float32")
    calls = contenders(case, make_inputs(case, DEVICE), args)
    expected = calls["efficient"]()
    errors = {name: float((call() - expected).abs().max()) for name, call in calls.items()}
    configs = configurations_of(ablation.problem_of(case, DEVICE), args)
    results_in(report).measure(cell, calls, errors, configs, args)


def start(args: Args, parser: argparse.ArgumentParser) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = False
    return describe(DEVICE) | {"suite": "float32", "dtype": "float32"}


SUITE = Suite(
    "float32",
    __doc__,
    lambda parser: grid.add_arguments(parser, peers="efficient"),
    start,
    grid.cells,
    measure,
    checks,
    finish=lambda args, report: results_in(report).summarize(),
    out="float32.json",
)

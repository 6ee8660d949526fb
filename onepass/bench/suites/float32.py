"""The forward in float32 on a Hopper GPU: how exact is it, and how fast beside torch's memory-efficient SDPA?

    python -m onepass.bench.suites.float32                                        # errors, then the grid
    python -m onepass.bench.suites.float32 --no-check --cases 128c8192,64n512     # some cases only
    python -m onepass.bench.suites.float32 --variants "n64 lazy sums; n64 lazy sums queue"     # also these

Contenders: "onepass" as a call runs it, with the split of q, k and v into halves of float16; "kernel" without it, from
halves that are there; "sm80", the Ampere kernels with three products of tf32; "efficient", torch's, with TF32 off.
FLOPs are counted once, though each product takes three. Grid, configurations and timing are those of forward_sm90.py.
The results go to --out as JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import onepass

from ...dispatch import attention as dispatch
from ...kernels.config import ForwardConfigSm90, value_blocks
from ...kernels.launch import float32_halves
from ...kernels.launch import forward_sm90 as launch
from ...problem import AttentionInputs
from ...problem.outputs import empty_outputs
from ..cases import Case, make_inputs
from ..check import attention_in_pytorch
from ..machine import describe
from ..rows import Report, finite
from . import grid
from .forward_sm90 import configuration, problem_of

DEVICE = "cuda"
ERROR_CASES = [(d, causal, seqlen) for d in (64, 96, 128, 256) for causal in (False, True) for seqlen in (1000, 4096)]


def efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Callable[[], Tensor]:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return call


def kernel_alone(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Callable[[], Tensor]:
    """A call of the kernel with halves that were made before."""
    inputs = AttentionInputs(q, k, v)
    problem = problem_of(inputs, causal=causal)
    halves = float32_halves.split(q, k, v, value_blocks(problem))
    ready = launch.prepare(problem, q.device)
    outputs = empty_outputs(ready.problem, inputs)  # type: ignore[attr-defined]

    def call() -> Tensor:
        ready.attend_parts(inputs, *outputs, halves, q, k, v)  # type: ignore[attr-defined]
        return outputs[0]

    return call


def contenders(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, configs: dict[str, ForwardConfigSm90]
) -> dict[str, Callable]:
    def public(**options: Any) -> Callable[[], Tensor]:
        return lambda: onepass.attention(q, k, v, causal=causal, **options)

    found: dict[str, Callable] = {"onepass": public(), "efficient": efficient(q, k, v, causal)}
    if launch.unsupported(problem_of(AttentionInputs(q, k, v), causal=causal)) is None:
        found["sm80"] = public(backend="sm80")
        found["kernel"] = kernel_alone(q, k, v, causal)
        found |= {name: public(backend="sm90", tuning=config) for name, config in configs.items()}
    return found


def run_check(configs: dict[str, ForwardConfigSm90], about: dict[str, Any]) -> bool:
    """Whether onepass is as exact as attention in torch's float32.

    Errors are root mean squares against float64, relative to that of out. They go into `about`.
    """
    seed = time.time_ns() % 2**31
    print("seed of the check:", seed)
    about["rmse"], failed = [], 0
    for head_dim, causal, seqlen in ERROR_CASES:
        case = Case.square(seqlen, 4, head_dim, batch=2, dtype="float32", causal=causal)
        inputs = make_inputs(case, DEVICE, seed)
        exact, plain = (attention_in_pytorch(case, inputs, dtype)["out"] for dtype in (torch.float64, torch.float32))
        found = {"math": plain}
        found |= {name: call() for name, call in contenders(*inputs[:3], causal, configs).items()}
        errors = {name: float((out - exact).square().mean().sqrt()) for name, out in found.items()}
        errors = {name: error / float(exact.square().mean().sqrt()) for name, error in errors.items()}
        failed += not errors["onepass"] <= errors["math"]
        row = {"head_dim": head_dim, "causal": causal, "seqlen": seqlen}
        about["rmse"].append(row | {name: finite(float(f"{error:.3e}")) for name, error in errors.items()})
        print(*row.values(), *(f"{name} {error:.2e}" for name, error in errors.items()), flush=True)
    print(f"check: {len(ERROR_CASES) - failed} of {len(ERROR_CASES)} passed", flush=True)
    return not failed


def run_grid(args: argparse.Namespace, configs: dict[str, ForwardConfigSm90], report: Report) -> None:
    results = grid.Results(report, ["efficient"], "float32", tolerance=1e-4)
    for cell in grid.cells(args):
        shape = cell.batch, cell.seqlen, cell.heads, cell.head_dim
        q, k, v = (torch.randn(shape, device=DEVICE) for _ in range(3))
        calls = contenders(q, k, v, cell.causal, configs)
        expected = calls["efficient"]()
        errors = {name: float((call() - expected).abs().max()) for name, call in calls.items()}
        problem = problem_of(AttentionInputs(q, k, v), causal=cell.causal)
        chosen = {"onepass": dispatch.forward_config(dispatch.choose(problem).backend, problem)}
        results.add(cell, grid.time_in_turns(calls, args, seed=cell.seqlen), errors, chosen | configs, {})
        del q, k, v, calls, expected
    results.summarize()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    grid.add_arguments(parser, peers="efficient", out="float32.json")
    parser.add_argument("--variants", default="", help="also check and time these: configurations separated by ;")
    args = parser.parse_args(argv)
    configs = {name: configuration(name) for name in grid.split_variants(args.variants)}
    torch.backends.cuda.matmul.allow_tf32 = False
    report = Report(describe(DEVICE) | {"suite": "float32", "dtype": "float32"}, args.out)
    print(report.header, flush=True)
    ok = False
    with report.recording():
        ok = args.no_check or run_check(configs, report.header)
        if not args.no_grid:
            run_grid(args, configs, report)
    return report.exit_status(ok)


if __name__ == "__main__":
    sys.exit(main())

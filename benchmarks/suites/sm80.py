"""The Ampere kernels: are they right, how fast are they, and which configuration is fastest?

    python -m benchmarks sm80                       # forward, bf16: check, then the paper's grid
    python -m benchmarks sm80 --direction bwd       # the backward pass alone
    python -m benchmarks sm80 --dtype float32       # compared with torch's memory-efficient SDPA, TF32 off
    python -m benchmarks sm80 --no-check --cases 128c8192 --variants "tile_m=128,tile_n=32; num_stages=1"

The suite runs on any GPU of compute capability 8.0 or more. On Hopper, too, it times these kernels, and not what
onepass would choose there. Peers are torch's SDPA: FlashAttention-2 (`fa2`) or, in float32, memory-efficient attention
(`efficient`). Cases, variants and timing are those of backward_sm90.py. FLOPs of float32 are counted once, though each
product takes three. The results go to --out as JSON.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import torch

from onepass.bench import ablation
from onepass.bench.cases import Case
from onepass.bench.peers import Contender
from onepass.dispatch import attention as dispatch
from onepass.dispatch import backends
from onepass.kernels.compiler.compile import CompileRequest
from onepass.kernels.launch import backward_sm80, forward_sm80
from onepass.testing.machine import describe

from ..harness import contenders as shared
from ..harness import grid
from ..harness.suite import Args, Check
from .backward_sm90 import CHECKED_SEQLENS

DEVICE, BACKEND = "cuda", "sm80"
PEERS = {"fa2": "sdpa-flash", "efficient": "sdpa-efficient", "cudnn": "sdpa-cudnn"}  # as `onepass bench` calls them


@functools.cache  # what cannot be measured is said once
def configurations(case: Case, text: str | None) -> dict[str, Any]:
    """The configuration of each contender: the default ("onepass") and those of --variants that the case can take."""
    problem, arch = ablation.problem_of(case, DEVICE), backends.arch_of(BACKEND)
    default = ablation.kernels(case.direction)[BACKEND].default(problem, arch)
    return shared.configurations(default, text, lambda config: config.check(problem, arch))


def contenders(case: Case, args: Args) -> shared.Contenders:
    kernel, problem = ablation.kernels(case.direction)[BACKEND], ablation.problem_of(case, DEVICE)
    ours = {
        name: Contender(name, ablation.attend_with(kernel, problem, config))
        for name, config in configurations(case, args.variants).items()
    }
    return {name: one for name, one in (dict(args.rivals) | ours).items() if one.refusal(case) is None}


def checked_cases(args: Args) -> list[Case]:
    return shared.checked_cases(args, CHECKED_SEQLENS, args.dtype, args.direction)


def requests(args: Args) -> list[CompileRequest]:
    """The kernels of all contenders."""
    cases = [] if args.no_check else checked_cases(args)
    cases += [] if args.no_grid else [cell.case(args.dtype, args.direction) for cell in grid.cells(args)]
    found: list[CompileRequest] = []
    arch = backends.arch_of(BACKEND)
    for case in cases:
        problem = ablation.problem_of(case, DEVICE)
        for config in configurations(case, args.variants).values():
            if case.direction == "fwd":
                found.append(forward_sm80.compile_request(problem, config, arch))
            else:
                found.append(dispatch.compile_request(BACKEND, problem, dispatch.forward_config(BACKEND, problem)))
                found += backward_sm80.compile_requests(problem, False, config, arch)
    return found


def checks(args: Args, header: dict[str, Any]) -> Iterator[Check]:
    def contenders_of(case: Case) -> shared.Contenders:
        return contenders(case, args)

    return shared.checks(checked_cases(args), contenders_of, args.rivals, DEVICE, torch.float64)


def add_options(parser: argparse.ArgumentParser) -> None:
    grid.add_arguments(parser, peers="")
    parser.add_argument("--direction", choices=("fwd", "bwd"), default="fwd")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")


def start(args: Args, parser: argparse.ArgumentParser) -> dict[str, Any]:
    peers = args.peers or ("efficient" if args.dtype == "float32" else "fa2")
    args.rivals = shared.find_rivals(peers, PEERS, DEVICE, parser)
    first = grid.cells(args)[0].case(args.dtype)
    support = dispatch.choose(ablation.problem_of(first, DEVICE), BACKEND)
    if not support.ok:
        parser.error(support.reason)
    torch.backends.cuda.matmul.allow_tf32 = False
    facts = {"suite": "sm80", "backend": support.reason, "dtype": args.dtype, "direction": args.direction}
    return describe(DEVICE) | facts


def case_of(cell: grid.Cell, args: Args) -> Case:
    return cell.case(args.dtype, args.direction)


SUITE = shared.grid_suite(
    "sm80",
    __doc__,
    lambda: DEVICE,
    case_of,
    configurations,
    contenders,
    add_options=add_options,
    start=start,
    checks=checks,
    requests=requests,
)

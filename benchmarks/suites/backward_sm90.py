"""The Hopper backward: is it right, how fast is it, and which configuration is fastest?

    python -m benchmarks backward_sm90                                    # check, then the grid
    python -m benchmarks backward_sm90 --no-check --cases 128c8192,256n512    # some cases only
    python -m benchmarks backward_sm90 --deterministic            # also onepass with deterministic=True
    python -m benchmarks backward_sm90 --variants "tile_n=64; tile_n=128,num_stages=1"    # these, too

A case is head_dim, c (causal) or n, and the sequence length; a variant changes fields of the default configuration. The
grid is that of the FlashAttention-3 paper, see grid.py. The backward pass alone is timed: for all contenders,
torch.autograd.grad on the graph of a forward pass that was made before. These passes are so long that the CPU runs
ahead of the GPU, and its share does not count. Contenders take turns in each case; a figure is the median over the
rounds of triton's do_bench median (which flushes the L2 cache before each run). The results go to --out as JSON.
fa3-fwd has no backward.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import onepass
from onepass.bench import ablation
from onepass.bench.cases import Case
from onepass.bench.peers import Contender, ask_support, onepass_contender
from onepass.kernels.compiler.compile import CompileRequest
from onepass.kernels.launch import backward_sm90 as backward_launch
from onepass.testing.machine import describe

from ..harness import contenders as shared
from ..harness import grid
from ..harness.suite import Args, Check

DEVICE = "cuda"
PEERS = {"cudnn": "sdpa-cudnn", "fa2": "sdpa-flash", "fa4": "fa4"}  # as `onepass bench` calls them
CHECKED_SEQLENS = 512, 333


# ---------------------------------------------------------------- contenders


def deterministic() -> Contender:
    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        return onepass.attention(q, k, v, causal=case.causal, deterministic=True)

    return Contender("deterministic", attend)


@functools.cache  # what cannot be measured is said once
def configurations(case: Case, text: str | None) -> dict[str, Any]:
    """The configuration of each contender: the default ("onepass") and those of --variants that the case can take.

    There are none where no kernel runs the case.
    """
    kernel = ablation.kernels("bwd")["sm90"]
    if ablation.refusal(kernel, case, DEVICE) is not None:
        return {}
    problem = ablation.problem_of(case, DEVICE)
    return shared.configurations(
        kernel.default(problem, kernel.arch()), text, lambda config: config.check(problem, kernel.arch())
    )


def contenders(case: Case, args: Args) -> shared.Contenders:
    """Peers, onepass as a user gets it, and the kernel with other configurations, by name."""
    kernel, problem = ablation.kernels("bwd")["sm90"], ablation.problem_of(case, DEVICE)
    found = dict(args.rivals) | {"onepass": onepass_contender(DEVICE)}
    if args.deterministic:
        found["deterministic"] = deterministic()
    for name, config in configurations(case, args.variants).items():
        if name != "onepass":
            found[name] = Contender(name, ablation.attend_with(kernel, problem, config))
    return {name: contender for name, contender in found.items() if contender.refusal(case) is None}


def checked_cases(args: Args) -> list[Case]:
    return shared.checked_cases(args, CHECKED_SEQLENS, "bfloat16", "bwd")


def requests(args: Args) -> list[CompileRequest]:
    """The kernels of all contenders."""
    cases = [] if args.no_check else checked_cases(args)
    cases += [] if args.no_grid else [cell.case(direction="bwd") for cell in grid.cells(args)]
    found = []
    for case in cases:
        problem = ablation.problem_of(case, DEVICE)
        problems = [problem, replace(problem, deterministic=True)] if args.deterministic else [problem]
        for config, one in itertools.product(configurations(case, args.variants).values(), problems):
            found += backward_launch.compile_requests(one, config=config)
    return found


def checks(args: Args, header: dict[str, Any]) -> Iterator[Check]:
    def contenders_of(case: Case) -> shared.Contenders:
        return contenders(case, args)

    return shared.checks(
        checked_cases(args), contenders_of, args.rivals, DEVICE, torch.float32, repeated=("deterministic",)
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    grid.add_arguments(parser, peers="cudnn,fa2,fa4")
    parser.add_argument("--deterministic", action="store_true", help="also measure onepass with deterministic=True")


def start(args: Args, parser: argparse.ArgumentParser) -> dict[str, Any]:
    first = grid.cells(args)[0].case(direction="bwd")
    reason = ablation.refusal(ablation.kernels("bwd")["sm90"], first, DEVICE)
    if args.variants and reason is not None:
        parser.error(f"--variants: {reason}")
    args.rivals = shared.find_rivals(args.peers, PEERS, DEVICE, parser)
    return describe(DEVICE) | {"suite": "backward_sm90", "backend": ask_support(first, DEVICE).reason}


def case_of(cell: grid.Cell, args: Args) -> Case:
    return cell.case(direction="bwd")


SUITE = shared.grid_suite(
    "backward_sm90",
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

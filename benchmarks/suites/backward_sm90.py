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
import math
import warnings
from ast import literal_eval
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

import onepass
from onepass.bench import ablation
from onepass.bench.cases import Case, make_inputs
from onepass.bench.check import PEER_FACTOR, attention_in_pytorch
from onepass.bench.peers import Contender, ask_support, find_peers, onepass_contender, prepare
from onepass.errors import UnsupportedError
from onepass.kernels.compiler.compile import CompileRequest
from onepass.kernels.launch import backward_sm90 as backward_launch
from onepass.testing.budget import GRADIENT_FACTOR, compare
from onepass.testing.machine import describe, under_load
from onepass.testing.results import Report

from ..harness import grid
from ..harness.ahead import compile_ahead

DEVICE = "cuda"
PEERS = {"cudnn": "sdpa-cudnn", "fa2": "sdpa-flash", "fa4": "fa4"}  # as `onepass bench` calls them
CHECKED_SEQLENS = 512, 333
GRADIENTS = "dq", "dk", "dv"


# ---------------------------------------------------------------- contenders


def peers(names: Sequence[str]) -> dict[str, Contender]:
    """The peers that can be imported. Raises: SystemExit for names that are not in PEERS."""
    if unknown := sorted(set(names) - set(PEERS)):
        raise SystemExit(f"--peers: expected names of {', '.join(PEERS)}, got {', '.join(unknown)}")
    found = find_peers(DEVICE, [PEERS[name] for name in names])
    for name in names:
        if PEERS[name] in found.absent:
            print(f"{name} not measured: {found.absent[PEERS[name]]}")
    return {name: found.present[PEERS[name]] for name in names if PEERS[name] in found.present}


def deterministic() -> Contender:
    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        return onepass.attention(q, k, v, causal=case.causal, deterministic=True)

    return Contender("deterministic", attend)


def configuration(default: Any, changes: str) -> Any:
    """The default with changes such as "tile_n=64,num_stages=1".

    Raises: ValueError for an unknown field, and for a value that is no Python literal.
    """
    names = [field.name for field in fields(default)]
    values = {}
    for change in changes.split(","):
        name, _, value = (part.strip() for part in change.partition("="))
        if name not in names:
            raise ValueError(
                f"variant {changes!r}: expected name=value with a name of {', '.join(names)}, got {change!r}"
            )
        try:
            values[name] = literal_eval(value)
        except (ValueError, SyntaxError):
            raise ValueError(f"variant {changes!r}: expected a Python literal for {name}, got {value!r}") from None
    return replace(default, **values)


@functools.cache  # what cannot be measured is said once
def configurations(case: Case, text: str | None) -> dict[str, Any]:
    """The configuration of each contender: the default ("onepass") and those of --variants that the case can take.

    There are none where no kernel runs the case.
    """
    kernel = ablation.kernels("bwd")["sm90"]
    if ablation.refusal(kernel, case, DEVICE) is not None:
        return {}
    problem = ablation.problem_of(case, DEVICE)
    found = {"onepass": kernel.default(problem, kernel.arch())}
    for changes in grid.split_variants(text, ""):
        config = configuration(found["onepass"], changes)
        try:
            config.check(problem, kernel.arch())
        except UnsupportedError as error:
            print(f"{changes} not measured: {error}")
            continue
        found[changes] = config
    return found


def contenders(
    case: Case, rivals: dict[str, Contender], configs: dict[str, Any], also_deterministic: bool
) -> dict[str, Contender]:
    """Peers, onepass as a user gets it, and the kernel with other configurations, by name."""
    kernel, problem = ablation.kernels("bwd")["sm90"], ablation.problem_of(case, DEVICE)
    found = rivals | {"onepass": onepass_contender(DEVICE)}
    if also_deterministic:
        found["deterministic"] = deterministic()
    for name, config in configs.items():
        if name != "onepass":
            found[name] = Contender(name, ablation.attend_with(kernel, problem, config))
    return {name: contender for name, contender in found.items() if contender.refusal(case) is None}


def requests(cases: Sequence[Case], args: argparse.Namespace) -> list[CompileRequest]:
    """The arguments of `compile.get` for the kernels of all contenders."""
    found = []
    for case in cases:
        problem = ablation.problem_of(case, DEVICE)
        problems = [problem, replace(problem, deterministic=True)] if args.deterministic else [problem]
        for config, one in itertools.product(configurations(case, args.variants).values(), problems):
            found += backward_launch.compile_requests(one, config=config)
    return found


# ---------------------------------------------------------------- correctness


def run_check(args: argparse.Namespace, rivals: dict[str, Contender]) -> bool:
    """Compare dq, dk and dv of every contender with attention in float32; with deterministic=True, also two runs.

    Returns: whether onepass is right; peers are reported.
    """
    kinds = list(dict.fromkeys((cell.head_dim, cell.causal) for cell in grid.cells(args)))
    cases = [
        Case.square(seqlen, 4, head_dim, batch=2, dtype="bfloat16", causal=causal, direction="bwd")
        for head_dim, causal in kinds
        for seqlen in CHECKED_SEQLENS
    ]
    compile_ahead(requests(cases, args))
    tried, wrong = 0, []
    for case in cases:
        inputs = make_inputs(case, DEVICE)
        exact, plain = (attention_in_pytorch(case, inputs, dtype) for dtype in (torch.float32, torch.bfloat16))
        configs = configurations(case, args.variants)
        for name, contender in contenders(case, rivals, configs, args.deterministic).items():
            label = f"{name}, {case.label}"
            print(f"  {label:88s}", end="", flush=True)  # before the run: a hang shows where
            tried += 1
            try:
                prepared = prepare(contender, case, inputs)
                poison = [torch.full_like(x, math.nan) for x in inputs]  # what the allocator hands out next
                del poison
                results = prepared.results()
                factor = PEER_FACTOR if name in rivals else GRADIENT_FACTOR
                rows = [compare(x, results[x], exact[x], plain[x], factor) for x in GRADIENTS]
                ok = all(row.ok for row in rows)
                message = "; ".join(str(row) for row in rows if not row.ok)
                message = message or f"{max(row.share for row in rows):.2f} of the budget"
                if name == "deterministic":
                    again = prepared.results()
                    same = all(torch.equal(results[x], again[x]) for x in GRADIENTS)
                    ok, message = ok and same, message if same else f"{message}; runs differ"
            except Exception as error:
                ok, message = False, f"{type(error).__name__}: {str(error)[:300]}"
            wrong += [] if ok else [name]
            print(f"{'ok  ' if ok else 'FAIL'} {message}", flush=True)
    print(f"check: {tried - len(wrong)} of {tried} passed", flush=True)
    return set(wrong) <= set(rivals)


# ---------------------------------------------------------------- speed


def max_relative_error(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest error of the three gradients, each relative to its largest value; NaN if any value is NaN."""
    pairs = [(gradients[name].float(), expected[name].float()) for name in GRADIENTS]
    return float(torch.stack([(actual - right).abs().max() / right.abs().max() for actual, right in pairs]).max())


def run_grid(args: argparse.Namespace, rivals: dict[str, Contender], report: Report) -> None:
    results = grid.Results(report, list(rivals), direction="bwd")
    cells = {cell: cell.case(direction="bwd") for cell in grid.cells(args)}
    compile_ahead(requests(list(cells.values()), args))
    for cell, case in cells.items():
        configs = configurations(case, args.variants)
        inputs = make_inputs(case, DEVICE)
        calls, errors, expected = {}, {}, None
        for name, contender in contenders(case, rivals, configs, args.deterministic).items():
            try:
                prepared = prepare(contender, case, inputs)
                gradients = prepared.results()
                if expected is None:  # the first contender's, for a rough look at the others: the check is above
                    expected = gradients
                errors[name] = max_relative_error(gradients, expected)
                calls[name] = prepared.run
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        times = grid.time_in_turns(calls, args, seed=cell.seqlen)
        loads = {name: under_load(call) for name, call in calls.items()} if args.load else {}
        results.add(cell, times, errors, configs, loads)
    results.summarize()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    grid.add_arguments(parser, peers="cudnn,fa2,fa4", out="backward_sm90.json")
    parser.add_argument("--deterministic", action="store_true", help="also measure onepass with deterministic=True")
    parser.add_argument("--variants", help='"name=value,name=value", several separated by ;')
    args = parser.parse_args(argv)

    warnings.filterwarnings("ignore", message="Argument aux_data")  # FlashAttention-4 gives it under this compiler
    first = grid.cells(args)[0].case(direction="bwd")
    reason = ablation.refusal(ablation.kernels("bwd")["sm90"], first, DEVICE)
    if args.variants and reason is not None:
        parser.error(f"--variants: {reason}")
    rivals = peers([name for name in args.peers.split(",") if name])
    facts = {"suite": "backward_sm90", "backend": ask_support(first, DEVICE).reason}
    report = Report(describe(DEVICE) | facts, args.out)
    print(report.header, flush=True)
    ok = False
    with report.recording():
        ok = args.no_check or run_check(args, rivals)
        if not args.no_grid:
            run_grid(args, rivals, report)
    return report.exit_status(ok)

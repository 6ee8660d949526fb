"""The backward pass on a Hopper GPU: is it right, how fast is it, and which configuration is fastest?

    python benchmarks/hopper_backward.py                                       # check, then the grid beside the peers
    python benchmarks/hopper_backward.py --no-check --cases 128c8192,256n512   # some cases only
    python benchmarks/hopper_backward.py --deterministic                       # ... and onepass with deterministic=True
    python benchmarks/hopper_backward.py --variants "tile_n=64; tile_n=128,num_stages=1"    # ... with these changes

A case is head_dim, c (causal) or n, and the sequence length; a variant changes fields of the default configuration.
Grid and FLOPs are those of the FlashAttention-3 paper, see common.py. Timed is the backward pass alone, of all
contenders by torch.autograd.grad on the graph of a forward pass made before; the CPU runs ahead of passes as long as
these, so that its share does not count. Contenders take turns in each case; a figure is the median over the rounds of
triton's do_bench median (which flushes the L2 cache before each run). Writes JSON to --out. fa3-fwd has no backward.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
import time
import warnings
from ast import literal_eval
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import common
import torch
from torch import Tensor

import onepass
from onepass.bench import ablation
from onepass.bench.cases import Case, Inputs, make_inputs
from onepass.bench.check import PEER_FACTOR
from onepass.bench.peers import Contender, ask_support, find_peers, onepass_contender, prepare
from onepass.errors import UnsupportedError
from onepass.kernels.compiler import compile
from onepass.kernels.launch import backward_sm90 as backward_launch
from onepass.testing.budget import GRADIENT_FACTOR, compare

DEVICE = "cuda"
PEERS = {"cudnn": "sdpa-cudnn", "fa2": "sdpa-flash", "fa4": "fa4"}  # as `onepass bench` calls them
CHECKED_SEQLENS = 512, 333
GRADIENTS = "dq", "dk", "dv"


def case_of(cell: common.Cell) -> Case:
    shape = {"heads": cell.heads, "head_dim": cell.head_dim, "batch": cell.batch}
    return Case.square(cell.seqlen, **shape, dtype="bfloat16", causal=cell.causal, direction="bwd")


# ---------------------------------------------------------------- contenders


def peers(names: Sequence[str]) -> dict[str, Contender]:
    """Those that can be imported."""
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
    """The default with "tile_n=64,num_stages=1" applied. Raises: ValueError for what is no field, or no value."""
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
    """By contender: the default ("onepass") and those of --variants that the case can take; none without a kernel."""
    kernel = ablation.kernels("bwd")["sm90"]
    if ablation.refusal(kernel, case, DEVICE) is not None:
        return {}
    problem = ablation.problem_of(case, DEVICE)
    found = {"onepass": kernel.default(problem, kernel.arch())}
    for changes in filter(None, ("".join(part.split()) for part in (text or "").split(";"))):
        config = configuration(found["onepass"], changes)
        try:
            config.check(problem, kernel.arch())
        except UnsupportedError as error:
            print(f"{changes} not measured: {error}")
            continue
        found[changes] = config
    return found


def contenders(case: Case, rivals: dict[str, Contender], configs: dict[str, Any], also_deterministic: bool) -> dict:
    """By name: peers, onepass as a user gets it, and the kernel with other configurations."""
    kernel, problem = ablation.kernels("bwd")["sm90"], ablation.problem_of(case, DEVICE)
    found = rivals | {"onepass": onepass_contender(DEVICE)}
    if also_deterministic:
        found["deterministic"] = deterministic()
    for name, config in configs.items():
        if name != "onepass":
            found[name] = Contender(name, ablation.attend_with(kernel, problem, config))
    return {name: contender for name, contender in found.items() if contender.refusal(case) is None}


def compile_ahead(cases: Sequence[Case], args: argparse.Namespace) -> None:
    """In parallel, if the launch says what it compiles; else each kernel is compiled when it is first run."""
    problems = {case: ablation.problem_of(case, DEVICE) for case in cases}
    jobs = {}
    for case, problem in problems.items():
        both = [problem, replace(problem, deterministic=True)] if args.deterministic else [problem]
        for config, one in itertools.product(configurations(case, args.variants).values(), both):
            jobs[one.static(), config] = one, config
    if jobs:
        common.compile_all(list(jobs.values()), compile_one)


def compile_one(job: tuple) -> float:
    started = time.perf_counter()
    problem, config = job
    for request in backward_launch.compile_requests(problem, config=config):
        compile.get(*request)
    return time.perf_counter() - started


# ---------------------------------------------------------------- correctness


def gradients_by_math(inputs: Inputs, causal: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """dq, dk and dv of plain attention, every intermediate in one dtype."""
    q, k, v, dout = (x.detach().to(dtype).transpose(1, 2) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -math.inf)
    gradients = torch.autograd.grad(scores.softmax(-1) @ v, leaves, dout)
    return {name: gradient.transpose(1, 2) for name, gradient in zip(GRADIENTS, gradients, strict=True)}


def run_check(args: argparse.Namespace, rivals: dict[str, Contender]) -> bool:
    """dq, dk and dv of every contender beside plain attention in float32; with deterministic=True also the same bits
    twice. Returns: whether onepass is right; peers are reported.
    """
    kinds = list(dict.fromkeys((cell.head_dim, cell.causal) for cell in common.cells(args)))
    cases = [
        Case.square(seqlen, 4, head_dim, batch=2, dtype="bfloat16", causal=causal, direction="bwd")
        for head_dim, causal in kinds
        for seqlen in CHECKED_SEQLENS
    ]
    compile_ahead(cases, args)
    tried, wrong = 0, []
    for case in cases:
        inputs = make_inputs(case, DEVICE)
        exact, plain = (gradients_by_math(inputs, case.causal, dtype) for dtype in (torch.float32, torch.bfloat16))
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
    """Of the three, each relative to its largest value; NaN if any value is."""
    pairs = [(gradients[name].float(), expected[name].float()) for name in GRADIENTS]
    return float(torch.stack([(actual - right).abs().max() / right.abs().max() for actual, right in pairs]).max())


def run_grid(args: argparse.Namespace, rivals: dict[str, Contender], about: dict[str, Any]) -> None:
    results = common.Results(about, args.out, list(rivals), work=2.5)
    cells = {cell: case_of(cell) for cell in common.cells(args)}
    compile_ahead(list(cells.values()), args)
    for cell, case in cells.items():
        configs = configurations(case, args.variants)
        inputs = make_inputs(case, DEVICE)
        calls, errors, expected = {}, {}, None
        for name, contender in contenders(case, rivals, configs, args.deterministic).items():
            try:
                prepared = prepare(contender, case, inputs)
                gradients = prepared.results()
                if expected is None:  # the first's, for a rough look at the others: the check is above
                    expected = gradients
                errors[name] = max_relative_error(gradients, expected)
                calls[name] = prepared.run
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        times = common.time_in_turns(calls, args, seed=cell.seqlen)
        loads = {name: common.under_load(call) for name, call in calls.items()} if args.load else {}
        results.add(cell, times, errors, configs, loads)
    results.summarise()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_arguments(parser, peers="cudnn,fa2,fa4", out="hopper_backward.json")
    parser.add_argument("--deterministic", action="store_true", help="beside it onepass with deterministic=True")
    parser.add_argument("--variants", help='"name=value,name=value", several separated by ;')
    args = parser.parse_args(argv)

    warnings.filterwarnings("ignore", message="Argument aux_data")  # of FlashAttention-4 under this compiler
    first = case_of(common.cells(args)[0])
    reason = ablation.refusal(ablation.kernels("bwd")["sm90"], first, DEVICE)
    if args.variants and reason is not None:
        parser.error(f"--variants: {reason}")
    rivals = peers([name for name in args.peers.split(",") if name])
    about = common.circumstances()
    about["backend"] = ask_support(first, DEVICE).reason
    print(about, flush=True)
    ok = args.no_check or run_check(args, rivals)
    if not args.no_grid:
        run_grid(args, rivals, about)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

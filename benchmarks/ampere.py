"""The Ampere kernels on a GPU: are they right, how fast are they, and which configuration is fastest?

    python benchmarks/ampere.py                                       # forward, bf16: check, then the paper's grid
    python benchmarks/ampere.py --direction bwd                       # the backward pass alone
    python benchmarks/ampere.py --dtype float32                       # beside torch's memory-efficient SDPA, TF32 off
    python benchmarks/ampere.py --no-check --cases 128c8192 --variants "tile_m=128,tile_n=32; num_stages=1"

Run on any GPU of compute capability 8.0 or more; on Hopper, too, these kernels are timed, not those that onepass would
choose there. Peers are torch's SDPA: FlashAttention-2 (`fa2`) or, in float32, memory-efficient attention (`efficient`).
Cases, variants and timing are those of hopper_backward.py; FLOPs of float32 are counted once, though each product takes
three. Writes JSON to --out.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import common
import torch
from hopper_backward import CHECKED_SEQLENS, configuration
from torch import Tensor

from onepass.bench import ablation
from onepass.bench.cases import Case, Inputs, make_inputs
from onepass.bench.check import PEER_FACTOR
from onepass.bench.peers import Contender, find_peers, prepare
from onepass.dispatch import attention as dispatch
from onepass.dispatch import backends
from onepass.errors import UnsupportedError
from onepass.kernels.compiler import compile
from onepass.testing.budget import GRADIENT_FACTOR, OUT_FACTOR, compare

DEVICE, BACKEND = "cuda", "sm80"
PEERS = {"fa2": "sdpa-flash", "efficient": "sdpa-efficient", "cudnn": "sdpa-cudnn"}  # as `onepass bench` calls them
RESULTS = {"fwd": ("out",), "bwd": ("dq", "dk", "dv")}


def case_of(cell: common.Cell, args: argparse.Namespace) -> Case:
    shape = {"heads": cell.heads, "head_dim": cell.head_dim, "batch": cell.batch}
    return Case.square(cell.seqlen, **shape, dtype=args.dtype, causal=cell.causal, direction=args.direction)


@functools.cache  # what cannot be measured is said once
def configurations(case: Case, text: str | None) -> dict[str, Any]:
    """By contender: the default ("onepass") and those of --variants that the case can take."""
    problem, arch = ablation.problem_of(case, DEVICE), backends.arch_of(BACKEND)
    found = {"onepass": ablation.kernels(case.direction)[BACKEND].default(problem, arch)}
    for changes in filter(None, ("".join(part.split()) for part in (text or "").split(";"))):
        config = configuration(found["onepass"], changes)
        try:
            config.check(problem, arch)
        except UnsupportedError as error:
            print(f"{case.label}: {changes} not measured: {error}")
            continue
        found[changes] = config
    return found


def contenders(case: Case, rivals: dict[str, Contender], args: argparse.Namespace) -> dict[str, Contender]:
    kernel, problem = ablation.kernels(case.direction)[BACKEND], ablation.problem_of(case, DEVICE)
    ours = {
        name: Contender(name, ablation.attend_with(kernel, problem, config))
        for name, config in configurations(case, args.variants).items()
    }
    return {name: one for name, one in (rivals | ours).items() if one.refusal(case) is None}


def compile_ahead(cases: Sequence[Case], args: argparse.Namespace) -> None:
    jobs = {}
    for case in cases:
        problem = ablation.problem_of(case, DEVICE)
        for config in configurations(case, args.variants).values():
            jobs[problem.static(), config] = problem, config, case.direction
    common.compile_all(list(jobs.values()), compile_one)


def compile_one(job: tuple) -> float:
    from onepass.kernels.launch import backward_sm80 as backward_launch
    from onepass.kernels.launch import forward_sm80 as launch

    started = time.perf_counter()
    problem, config, direction = job
    arch = backends.arch_of(BACKEND)
    requests = [
        launch.compile_request(
            problem, config if direction == "fwd" else dispatch.forward_config(BACKEND, problem), arch
        )
    ]
    if direction == "bwd":
        requests += backward_launch.compile_requests(problem, False, config, arch)
    for request in requests:
        compile.get(*request)
    return time.perf_counter() - started


def by_math(case: Case, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """The results of plain attention, every intermediate in one dtype."""
    q, k, v, dout = (x.detach().to(dtype).transpose(1, 2) for x in inputs)
    leaves = [x.requires_grad_(case.direction == "bwd") for x in (q, k, v)]
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if case.causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    out = scores.softmax(-1) @ v
    results = (out,) if case.direction == "fwd" else torch.autograd.grad(out, leaves, dout)
    return {name: x.detach().transpose(1, 2) for name, x in zip(RESULTS[case.direction], results, strict=True)}


def run_check(args: argparse.Namespace, rivals: dict[str, Contender]) -> bool:
    """Every contender beside plain attention in float64. Returns: whether onepass is right; peers are reported."""
    kinds = list(dict.fromkeys((cell.head_dim, cell.causal) for cell in common.cells(args)))
    cases = [
        Case.square(n, 4, d, batch=2, dtype=args.dtype, causal=causal, direction=args.direction)
        for d, causal in kinds
        for n in CHECKED_SEQLENS
    ]
    compile_ahead(cases, args)
    tried, wrong = 0, []
    for case in cases:
        inputs = make_inputs(case, DEVICE)
        exact, plain = (by_math(case, inputs, dtype) for dtype in (torch.float64, case.torch_dtype))
        for name, contender in contenders(case, rivals, args).items():
            tried += 1
            factor = PEER_FACTOR if name in rivals else OUT_FACTOR if case.direction == "fwd" else GRADIENT_FACTOR
            try:
                results = prepare(contender, case, inputs).results()
                rows = [compare(x, results[x], exact[x], plain[x], factor) for x in RESULTS[case.direction]]
                message = "; ".join(str(row) for row in rows if not row.ok)
            except Exception as error:
                message = f"{type(error).__name__}: {str(error)[:300]}"
            if message:
                wrong.append(name)
                print(f"  FAIL {name}, {case.label}: {message}", flush=True)
    print(f"check: {tried - len(wrong)} of {tried} passed", flush=True)
    return set(wrong) <= set(rivals)


def run_grid(args: argparse.Namespace, rivals: dict[str, Contender], about: dict[str, Any]) -> None:
    results = common.Results(about, args.out, list(rivals), work=1.0 if args.direction == "fwd" else 2.5)
    cells = {cell: case_of(cell, args) for cell in common.cells(args)}
    compile_ahead(list(cells.values()), args)
    for cell, case in cells.items():
        inputs = make_inputs(case, DEVICE)
        calls, errors, expected = {}, {}, None
        for name, contender in contenders(case, rivals, args).items():
            try:
                prepared = prepare(contender, case, inputs)
                found = prepared.results()
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
                continue
            expected = expected or found  # a rough look: the check is above
            pairs = [(found[x].float(), expected[x].float()) for x in RESULTS[case.direction]]
            errors[name] = float(max((a - b).abs().max() / b.abs().max() for a, b in pairs))
            calls[name] = prepared.run
        times = common.time_in_turns(calls, args, seed=cell.seqlen)
        loads = {name: common.under_load(call) for name, call in calls.items()} if args.load else {}
        results.add(cell, times, errors, configurations(case, args.variants), loads)
    results.summarise()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_arguments(parser, peers="", out="ampere.json")
    parser.add_argument("--direction", choices=tuple(RESULTS), default="fwd")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--variants", help='"name=value,name=value", several separated by ;')
    args = parser.parse_args(argv)

    names = args.peers.split(",") if args.peers else ["efficient" if args.dtype == "float32" else "fa2"]
    if unknown := sorted(set(names) - set(PEERS)):
        parser.error(f"--peers: expected names of {', '.join(PEERS)}, got {', '.join(unknown)}")
    found = find_peers(DEVICE, [PEERS[name] for name in names])
    rivals = {name: found.present[PEERS[name]] for name in names if PEERS[name] in found.present}
    first = replace(case_of(common.cells(args)[0], args), direction="fwd")
    support = dispatch.choose(ablation.problem_of(first, DEVICE), BACKEND)
    if not support.ok:
        parser.error(support.reason)
    torch.backends.cuda.matmul.allow_tf32 = False
    about = common.circumstances() | {"backend": support.reason, "dtype": args.dtype, "direction": args.direction}
    print(about, flush=True)
    ok = args.no_check or run_check(args, rivals)
    if not args.no_grid:
        run_grid(args, rivals, about)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

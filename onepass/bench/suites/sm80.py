"""The Ampere kernels: are they right, how fast are they, and which configuration is fastest?

    python -m onepass.bench.suites.sm80                       # forward, bf16: check, then the paper's grid
    python -m onepass.bench.suites.sm80 --direction bwd       # the backward pass alone
    python -m onepass.bench.suites.sm80 --dtype float32       # beside torch's memory-efficient SDPA, TF32 off
    python -m onepass.bench.suites.sm80 --no-check --cases 128c8192 --variants "tile_m=128,tile_n=32; num_stages=1"

The suite runs on any GPU of compute capability 8.0 or more. On Hopper, too, it times these kernels, and not what
onepass would choose there. Peers are torch's SDPA: FlashAttention-2 (`fa2`) or, in float32, memory-efficient attention
(`efficient`). Cases, variants and timing are those of backward_sm90.py. FLOPs of float32 are counted once, though each
product takes three. The results go to --out as JSON.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ...dispatch import attention as dispatch
from ...dispatch import backends
from ...errors import UnsupportedError
from ...kernels.compiler.compile import CompileRequest
from ...kernels.launch import backward_sm80, forward_sm80
from ...testing.budget import GRADIENT_FACTOR, OUT_FACTOR, compare
from .. import ablation
from ..cases import Case, make_inputs
from ..check import PEER_FACTOR, attention_in_pytorch
from ..machine import describe, under_load
from ..peers import Contender, find_peers, prepare
from ..rows import Report
from . import grid
from .ahead import compile_ahead
from .backward_sm90 import CHECKED_SEQLENS, configuration

DEVICE, BACKEND = "cuda", "sm80"
PEERS = {"fa2": "sdpa-flash", "efficient": "sdpa-efficient", "cudnn": "sdpa-cudnn"}  # as `onepass bench` calls them
RESULTS = {"fwd": ("out",), "bwd": ("dq", "dk", "dv")}


@functools.cache  # what cannot be measured is said once
def configurations(case: Case, text: str | None) -> dict[str, Any]:
    """The configuration of each contender: the default ("onepass") and those of --variants that the case can take."""
    problem, arch = ablation.problem_of(case, DEVICE), backends.arch_of(BACKEND)
    found = {"onepass": ablation.kernels(case.direction)[BACKEND].default(problem, arch)}
    for changes in grid.split_variants(text, ""):
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


def requests(cases: Sequence[Case], args: argparse.Namespace) -> list[CompileRequest]:
    """The arguments of `compile.get` for the kernels of all contenders."""
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


def run_check(args: argparse.Namespace, rivals: dict[str, Contender]) -> bool:
    """Compare every contender with attention in float64. Returns: whether onepass is right; peers are reported."""
    kinds = list(dict.fromkeys((cell.head_dim, cell.causal) for cell in grid.cells(args)))
    cases = [
        Case.square(n, 4, d, batch=2, dtype=args.dtype, causal=causal, direction=args.direction)
        for d, causal in kinds
        for n in CHECKED_SEQLENS
    ]
    compile_ahead(requests(cases, args))
    tried, wrong = 0, []
    for case in cases:
        inputs = make_inputs(case, DEVICE)
        exact, plain = (attention_in_pytorch(case, inputs, dtype) for dtype in (torch.float64, case.torch_dtype))
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


def run_grid(args: argparse.Namespace, rivals: dict[str, Contender], report: Report) -> None:
    results = grid.Results(report, list(rivals), args.dtype, args.direction)
    cells = {cell: cell.case(args.dtype, args.direction) for cell in grid.cells(args)}
    compile_ahead(requests(list(cells.values()), args))
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
        times = grid.time_in_turns(calls, args, seed=cell.seqlen)
        loads = {name: under_load(call) for name, call in calls.items()} if args.load else {}
        results.add(cell, times, errors, configurations(case, args.variants), loads)
    results.summarize()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    grid.add_arguments(parser, peers="", out="sm80.json")
    parser.add_argument("--direction", choices=tuple(RESULTS), default="fwd")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--variants", help='"name=value,name=value", several separated by ;')
    args = parser.parse_args(argv)

    names = args.peers.split(",") if args.peers else ["efficient" if args.dtype == "float32" else "fa2"]
    if unknown := sorted(set(names) - set(PEERS)):
        parser.error(f"--peers: expected names of {', '.join(PEERS)}, got {', '.join(unknown)}")
    found = find_peers(DEVICE, [PEERS[name] for name in names])
    rivals = {name: found.present[PEERS[name]] for name in names if PEERS[name] in found.present}
    first = grid.cells(args)[0].case(args.dtype)
    support = dispatch.choose(ablation.problem_of(first, DEVICE), BACKEND)
    if not support.ok:
        parser.error(support.reason)
    torch.backends.cuda.matmul.allow_tf32 = False
    facts = {"suite": "sm80", "backend": support.reason, "dtype": args.dtype, "direction": args.direction}
    report = Report(describe(DEVICE) | facts, args.out)
    print(report.header, flush=True)
    ok = False
    with report.recording():
        ok = args.no_check or run_check(args, rivals)
        if not args.no_grid:
            run_grid(args, rivals, report)
    return report.exit_status(ok)


if __name__ == "__main__":
    sys.exit(main())

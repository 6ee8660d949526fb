"""attention_decode on a GPU: is it right, how near to the memory's bandwidth is it, and which configuration is fastest?

    python -m benchmarks decode                     # check, then the grid with FlashAttention-3
    python -m benchmarks decode --quick             # six cases
    python -m benchmarks decode --rows              # 4 to 1024 queries a sequence
    python -m benchmarks decode --no-check --cases b8k8192h32/8d128,b64k8192h32/8d128q4
    python -m benchmarks decode --quick --variants "num_splits=8; key_warps=2,num_stages=4; num_stages=2"

A case is the batch (b), keys (k), heads of q and of the cache (h), head_dim (d) and queries (q, 1 by default).
Contenders take turns: onepass over a dense cache ("onepass") and over pages of 16, 64 and 256 keys at random places,
FlashAttention-3 ("fa3", where a package has flash_attn_with_kvcache; "fa3 prepared" with scheduler metadata from
before, which an engine makes once for all layers; "fa3 page 64" where it takes pages). Ratios are to the fastest of the
fa3 contenders. Variants are fields of `DecodeConfigSm80` (of `ForwardConfigSm90` or `ForwardConfigSm80` where a case
has more rows) and num_splits; several are separated by semicolons. --backend sm80 measures the Ampere kernels alone.

Times are those of replayed CUDA graphs, without the host's part; --host prints the host's time of a call. K and V come
from memory: copies of a cache smaller than 4 times the L2 cache are read in turn, and where 64 do not reach that size
the L2 cache is flushed (column "copies"). TB/s counts K, V, q, out and lse once; the share is of the bandwidth of a
copy in the same run, read and written bytes together. The results go to --out as JSON after every case.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from onepass import reference
from onepass.bench import decode as bench
from onepass.bench.cases import Case, decode_case, get_case_set
from onepass.bench.decode import CacheCopies, Decoder, Step, problem_of
from onepass.bench.flops import bytes_moved, kv_bytes
from onepass.dispatch import decode
from onepass.errors import UnsupportedError
from onepass.kernels.compiler.compile import CompileRequest
from onepass.kernels.config import LaunchConfig
from onepass.kernels.config.arch import arch_of
from onepass.kernels.launch import decode_sm80 as sm80
from onepass.kernels.launch import decode_sm90 as sm90
from onepass.kernels.launch.decode import DecodeLaunch, compile_requests
from onepass.problem.decode import DecodeInputs, DecodeProblem
from onepass.testing.results import Report, Row

from ..harness import grid, steps
from ..harness.contenders import literals
from ..harness.steps import Contender
from ..harness.suite import Args, Check, Suite

DEVICE = "cuda"
CONTENDERS = "onepass,onepass page 16,onepass page 64,onepass page 256,fa3,fa3 prepared,fa3 page 64"
QUICK = "b1k8192h32/8d128,b1k65536h32/8d128,b8k8192h32/8d128,b8k65536h32/8d128,b64k8192h64/8d128,b64k65536h16/1d128"


def parse_cases(text: str) -> list[Case]:
    """b8k8192h32/8d128q4 -> decode_case(8, 8192, 32, 8, 128, 4)."""
    found = [re.fullmatch(r"b(\d+)k(\d+)h(\d+)/(\d+)d(\d+)(?:q(\d+))?", part.strip()) for part in text.split(",")]
    if None in found:
        raise argparse.ArgumentTypeError(f"expected cases such as b8k8192h32/8d128 or b1k1024h8/1d64q4, got {text}")
    numbers = [[int(n or 1) for n in match.groups()] for match in found if match]
    return [decode_case(b, k, h, h_kv, d, q) for b, k, h, h_kv, d, q in numbers]


# ---------------------------------------------------------------- configurations


@functools.cache  # what cannot be measured is said once
def variant(case: Case, changes: str, is_paged: bool, backend: str | None) -> tuple[LaunchConfig, int | None] | None:
    """Configuration and splits of a variant; None where the case cannot take it."""
    problem = on_gpu(case, is_paged)
    config = launches(problem, backend).config_of(problem, torch.device(DEVICE))
    try:
        values = literals(changes, ["num_splits", *asdict(config)])
        num_splits = values.pop("num_splits", None)
        config = replace(config, **values)
        config.check(problem.attention, arch_of(torch.device(DEVICE)))
    except (ValueError, UnsupportedError) as error:
        print(f"{case.label}: {changes} not measured: {error}")
        return None
    return config, num_splits


def on_meta(case: Case, is_paged: bool) -> Step:
    """The tensors of a case, without memory."""
    rows = (case.batch, case.seqlen_k) if not is_paged else (case.batch * case.seqlen_k // 64, 64)
    dtype: dict[str, Any] = {"dtype": case.torch_dtype, "device": "meta"}
    ints: dict[str, Any] = {"dtype": torch.int32, "device": "meta"}
    q = torch.empty(case.batch, case.seqlen_q, case.heads_q, case.head_dim, **dtype)
    k, v = (torch.empty(*rows, case.heads_kv, case.head_dim, **dtype) for _ in range(2))
    table = torch.empty(case.batch, case.seqlen_k // 64, **ints) if is_paged else None
    return Step(q, k, v, torch.empty(case.batch, **ints), table)


def on_gpu(case: Case, is_paged: bool) -> DecodeProblem:
    problem = problem_of(on_meta(case, is_paged))
    return replace(problem, attention=replace(problem.attention, device_type="cuda"))


backend_of = decode.require_decode


def launches(problem: DecodeProblem, backend: str | None) -> ModuleType:
    """The launch module of the backend that runs this problem."""
    return {"sm90": sm90, "sm80": sm80}[backend_of(problem, backend)]


def prepared(
    problem: DecodeProblem, backend: str | None, config: LaunchConfig | None = None, num_splits: int | None = None
) -> DecodeLaunch:
    """A launch of this problem. Args: config: None means the one that onepass chooses."""
    module, device = launches(problem, backend), torch.device(DEVICE)
    problem = replace(problem, num_splits=num_splits)
    return module.launch_with(problem, config or module.config_of(problem, device), device)


def variant_run(config: LaunchConfig, num_splits: int | None, backend: str | None, step: Step) -> Tensor:
    """A step with another configuration than onepass would choose."""
    launch = prepared(problem_of(step), backend, config, num_splits)
    return launch(DecodeInputs(step.q, step.k_cache, step.v_cache, step.cache_seqlens, step.page_table))[0]


def checked_cases(args: Args) -> list[Case]:
    """Short cases of the same heads, also with fewer queries."""
    shapes = {(c.heads_q, c.heads_kv, c.head_dim, q) for c in args.chosen for q in {min(c.seqlen_q, 40), 1, 3}}
    return [decode_case(3, 2048, *shape) for shape in sorted(shapes)]


def requests(args: Args) -> list[CompileRequest]:
    """The kernels of our contenders."""
    cases = [] if args.no_check else checked_cases(args)
    cases += [] if args.no_grid else args.chosen
    found: list[CompileRequest] = []
    for case in cases:
        for is_paged in (False, True):
            step, problem = on_meta(case, is_paged), on_gpu(case, is_paged)
            chosen = (variant(case, changes, is_paged, args.backend) for changes in variants(args))
            for config, num_splits in [(None, None), *filter(None, chosen)]:
                launch = prepared(problem, args.backend, config, num_splits)
                inputs = DecodeInputs(step.q, step.k_cache, step.v_cache, step.cache_seqlens, step.page_table)
                found += [request for _, request in compile_requests(problem, inputs, launch, launch.arch)]
    return found


def variants(args: Args) -> list[str]:
    return grid.split_variants(args.variants, "")


# ---------------------------------------------------------------- contenders


def contenders(case: Case, args: Args) -> dict[str, Contender]:
    found = {name: d for name, d in bench.onepass_decoders(args.backend).items() if name in args.contenders}
    for changes in variants(args):
        for name, size in ((changes, None), (f"{changes} page 64", 64))[: 2 if args.paged_variants else 1]:
            chosen = variant(case, changes, size is not None, args.backend)
            if chosen is not None:
                found[name] = Decoder(functools.partial(variant_run, *chosen, args.backend), size)
    if args.has_fa3:
        for name, is_prepared, size in (("fa3", False, None), ("fa3 prepared", True, None), ("fa3 page 64", False, 64)):
            if name in args.contenders:
                found[name] = Decoder(bench.flash_attention_3_run(is_prepared), size)
    return {name: Contender(one.adapt, one.run, is_peer=is_fa3(name)) for name, one in found.items()}


def has_fa3() -> bool:
    try:
        bench.flash_attention_3_run()
    except ImportError as error:
        print("fa3 not measured:", error)
        return False
    return True


# ---------------------------------------------------------------- check


def checks(args: Args, header: dict[str, Any]) -> Iterator[Check]:
    found = {case: contenders(case, args) for case in checked_cases(args)}
    return steps.checks(lambda seed: checked_steps(found, seed), in_pytorch)


def checked_steps(
    cases: Mapping[Case, dict[str, Contender]], seed: int
) -> Iterator[tuple[str, Step, dict[str, Contender]]]:
    """Steps whose caches are filled in part, with their labels and contenders."""
    for case, found in cases.items():
        step = bench.make_step(case, DEVICE, seed)
        step.cache_seqlens.copy_(torch.tensor([2048, 1, 1499], dtype=torch.int32))
        yield case.label, step, found


def is_fa3(name: str) -> bool:
    return name.startswith("fa3")


def in_pytorch(step: Step, dtype: torch.dtype) -> Tensor:
    """Attention over the filled keys of each sequence in PyTorch, every intermediate in one dtype."""
    outs = []
    for b, filled in enumerate(step.cache_seqlens.tolist()):
        k, v = (bench.Sequences(step, t)[b, :filled][None] for t in (step.k_cache, step.v_cache))
        outs.append(reference.attention(step.q[b, None], k, v, causal=True, compute_dtype=dtype).out[0])
    return torch.stack(outs)


# ---------------------------------------------------------------- grid


def measure(case: Case, args: Args, report: Report) -> None:
    copies = CacheCopies.of(kv_bytes(case), report.header["l2_bytes"])
    given = [bench.make_step(case, DEVICE, seed) for seed in range(copies.number)]
    problem = problem_of(given[0])
    chosen = prepared(problem, args.backend)
    row: Row = {
        "case": case.to_dict(),
        "label": case.label,
        "kv_bytes": kv_bytes(case),
        "backend": backend_of(problem, args.backend),
        "num_splits": chosen.num_splits,
        "config": asdict(chosen.config),
    }
    samples = steps.measure(row, contenders(case, args), given, copies, lambda name: bytes_moved(case), args, report)
    for name in filter(is_fa3, row["failed"]):  # a call that FlashAttention-3 refuses once is refused in every case
        args.contenders.remove(name)
    fa3 = [name for name in samples.ms if is_fa3(name)]
    fastest = min(fa3, key=lambda name: samples.spread(name).median, default=None)
    for name, entry in row["contenders"].items():
        entry["speed_over_fa3"] = None if fastest is None else samples.speed_ratio(name, fastest).median
    gigabytes = f"{row['kv_bytes'] / 1e9:.2f} GB in {row['copies']} copies"
    steps.finish(row, "speed_over_fa3", f"{gigabytes}, {row['num_splits']} splits, {row['backend']}", report)


# ---------------------------------------------------------------- the suite


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="six cases")
    parser.add_argument("--rows", action="store_true", help="cases of several queries a sequence")
    parser.add_argument("--cases", type=parse_cases, help="such as b8k8192h32/8d128,b1k65536h64/8d128q4")
    parser.add_argument("--max-gb", type=float, default=40.0, help="skip cases with more gigabytes of K and V")
    parser.add_argument("--variants", help=f"such as {grid.FIELDS}, several separated by ;")
    parser.add_argument("--backend", choices=("sm80", "sm90"), help="default: as onepass chooses")
    parser.add_argument("--paged-variants", action="store_true", help="also measure variants over pages of 64")
    parser.add_argument("--contenders", default=CONTENDERS, help="comma-separated; default: %(default)s")
    steps.add_timing(parser)


def start(args: Args, parser: argparse.ArgumentParser) -> dict[str, Any]:
    args.contenders = [name.strip() for name in args.contenders.split(",")]
    default_cases = parse_cases(QUICK) if args.quick else get_case_set("decode-rows" if args.rows else "decode").cases
    args.chosen = [case for case in args.cases or default_cases if kv_bytes(case) <= args.max_gb * 1e9]
    args.has_fa3 = has_fa3()
    return steps.header_of("decode", DEVICE) | {"arch": arch_of(torch.device(DEVICE))}


SUITE = Suite(
    "decode", __doc__, add_options, start, lambda args: args.chosen, measure, checks, requests, out="decode.json"
)

"""The Hopper forward in FP8: is it right, how fast is it, and which configuration is fastest?

    python -m benchmarks fp8                                        # check, sums, then the grid
    python -m benchmarks fp8 --no-check --cases 128c8192,256n512    # some cases only
    python -m benchmarks fp8 --variants "tile_n=192; num_warpgroups=3"    # also these configurations
    python -m benchmarks fp8 --summarize a.json b.json c.json       # tables of the medians of several runs

Contenders, and what is in their time:

    onepass      from e4m3 tensors, scales of blocks, V as `onepass.fp8.keys_last` lays it: the kernel alone
    rows         as onepass, with V as it comes, (batch, seqlen, heads, dim)
    whole        onepass.attention(q, k, v, precision="fp8") from bfloat16, which each call quantizes
    fa3          FlashAttention-3 from e4m3 tensors with scales of heads, V as it comes: transposed in its kernel
    fa3 columns  as fa3, with the keys of V contiguous, which its kernel need not transpose
    fa3 whole    as fa3, from bfloat16: scales of heads and rounding by torch's operators in each call
    bf16         onepass in bfloat16

Three comparisons are like for like: rows vs. fa3, onepass vs. the faster of fa3 and fa3 columns, and whole vs.
fa3 whole. Grid, configurations, options and timing are those of forward_sm90.py. The check compares with float64
attention over the dequantized tensors, then prints the paper's Table 3. The sums are those of P V at up to 65536 keys:
of q = 0 and v = 1, and of V with mean 1. The results go to --out as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import onepass
from onepass.kernels.compiler.compile import CompileRequest
from onepass.kernels.config import ForwardConfigSm90, p_exponent
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.kernels.launch import forward_sm90 as launch
from onepass.ops import quantize
from onepass.problem import AttentionInputs, AttentionProblem, Mask, Quantization
from onepass.quantization import codec, dequantize, layout
from onepass.testing import fp8_budget, table3
from onepass.testing.machine import describe
from onepass.testing.results import Report, finite, input_file

from ..harness import grid
from ..harness.contenders import configurations
from ..harness.suite import Args, Check, Suite

DEVICE, BACKEND = "cuda", "sm90"
TABLE3_SEQLEN = table3.PAPER_SEQLEN

# For each comparison, our contender and the peers, the fastest of which counts.
LIKE_FOR_LIKE = {
    "from rows of e4m3": ("rows", ("fa3",)),
    "from e4m3, V as each likes it best": ("onepass", ("fa3", "fa3 columns")),
    "from bfloat16": ("whole", ("fa3 whole",)),
}
PEERS = ("fa3", "fa3 columns", "fa3 whole")


def variants(text: str | None, head_dim: int, causal: bool, seqlen: int = 1024) -> dict[str, ForwardConfigSm90]:
    """The configurations of --variants that a case can take, by name."""
    problem = static_problem(head_dim, causal, seqlen)
    default = heuristics.forward_config_sm90(problem)
    found = configurations(default, text, lambda config: config.check(problem))
    del found["onepass"]
    return found


def static_problem(head_dim: int, causal: bool, seqlen: int = 1, keys_last: bool = True) -> AttentionProblem:
    t = torch.empty(1, seqlen, 1, head_dim, dtype=codec.E4M3, device="meta")
    last = torch.empty(1, 1, head_dim, -(-seqlen // 64) * 64, dtype=codec.E4M3, device="meta")
    inputs = AttentionInputs(t, t, last if keys_last else t)
    blocks = codec.Q_BLOCK, codec.KV_BLOCK
    problem = problem_of(inputs, causal, Quantization(torch.bfloat16, *blocks, keys_last))
    return dataclasses.replace(problem, device_type=DEVICE)


def problem_of(inputs: AttentionInputs, causal: bool, quantization: Quantization) -> AttentionProblem:
    """The problem of a call without lse."""
    return AttentionProblem.of(
        inputs,
        softmax_scale=inputs.q.shape[-1] ** -0.5,
        mask=Mask.from_options(causal, None),
        softcap=None,
        deterministic=False,
        quantization=dataclasses.replace(quantization, exact_lse=False),
    )


def prepared(q: Tensor, k: Tensor, v: Tensor) -> onepass.QuantizedQKV:
    """The tensors quantized, with V as the kernel reads it."""
    quantized = onepass.quantize_fp8(q, k, v)
    if quantized.v_keys_last:
        return quantized
    return dataclasses.replace(quantized, v=quantize.keys_last(quantized.v), v_keys_last=True)


def run_kernel(
    quantized: onepass.QuantizedQKV, causal: bool, config: ForwardConfigSm90 | None
) -> Callable[[], tuple[Tensor, Tensor]]:
    inputs = AttentionInputs(quantized.q, quantized.k, quantized.v, descales=quantized.descales)
    problem = problem_of(inputs, causal, quantized.quantization)
    return functools.partial(launch.prepare(problem, quantized.q.device, config), inputs)


def out_of(run: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], Tensor]:
    return lambda: run()[0]


# ---------------------------------------------------------------- correctness

# batch, seqlen_q, seqlen_k, heads_q, heads_kv, factor of q
CHECKS = (
    (2, 1000, 1000, 4, 2, 1.0),
    (2, 300, 777, 4, 2, 1.0),
    (1, 700, 300, 4, 2, 20.0),
    (2, 128, 1, 4, 4, 1.0),
    (1, 1024, 4096, 2, 2, 4.0),
)


def checked(args: Args) -> list[tuple[int, bool, str, ForwardConfigSm90 | None]]:
    """Head dims, masks and configurations with their names; None is the default."""
    return [
        (head_dim, causal, name, config)
        for head_dim in args.head_dims
        for causal in (False, True)
        for name, config in ({"default": None} | variants(args.variants, head_dim, causal)).items()
    ]


def checks(args: Args, header: dict[str, Any]) -> Iterator[Check]:
    """The results of the kernel, and the paper's Table 3, which goes into the header."""
    torch.manual_seed(time.time_ns() % 2**31)
    print("seed of the check:", torch.initial_seed())
    for head_dim, causal, name, config in checked(args):
        label = f"d{head_dim}{' causal' if causal else ''} {name}"
        yield Check(label, functools.partial(check_one, head_dim, causal, config))
    rows = table3.table3(TABLE3_SEQLEN, DEVICE, seeds=1, backend=BACKEND)
    header["table3_rmse"] = {row.method: finite(float(f"{row.rmse:.2e}")) for row in rows}
    for row in rows:
        limit = "" if row.limit is None else f", limit {row.limit:.2e}"
        paper = "" if row.paper is None else f", paper {row.paper:.1e}"
        yield Check(f"Table 3: {row.method}", lambda row=row, rest=paper + limit: (row.ok, f"{row.rmse:.2e}{rest}"))  # type: ignore[misc]


def check_one(head_dim: int, causal: bool, config: ForwardConfigSm90 | None) -> tuple[bool, str]:
    """Compare the calls of `CHECKS` with float64 attention over the dequantized tensors, and with second runs."""
    worst, differs = [0.0, 0.0], False
    for batch, seqlen_q, seqlen_k, heads_q, heads_kv, scale in CHECKS:
        shapes = (seqlen_q, heads_q), (seqlen_k, heads_kv), (seqlen_k, heads_kv)
        q, k, v = (torch.randn(batch, *s, head_dim, device=DEVICE, dtype=torch.bfloat16) for s in shapes)
        quantized = prepared(q * scale, k, v)
        call = run_kernel(quantized, causal, config)
        (out, lse), (again, lse_again) = call(), call()
        differs |= not (torch.equal(out, again) and torch.equal(lse, lse_again))
        tensors = quantized.dequantize()
        v_scale = dequantize.row_scales(tensors[2], quantized.v_descale, quantized.kv_block, None)
        used = config or heuristics.forward_config_sm90(static_problem(head_dim, causal, seqlen_q))
        rounding: dict[str, Any] = {"short_sums": True, "v_scale": v_scale, "p_codes": used.p_codes}
        rounding["p_exponent"] = p_exponent(used.rescale_threshold)
        budget = fp8_budget(*tensors, out.dtype, causal=causal, **rounding)
        for i, (actual, oracle, allowed) in enumerate(
            ((out, budget.oracle.out, budget.out), (lse, budget.oracle.lse, budget.lse))
        ):
            same = actual.double() == oracle  # -inf in rows that see no key
            share = ((actual.double() - oracle).abs() / allowed).masked_fill(same, 0.0)
            worst[i] = max(worst[i], float(share.nan_to_num(torch.inf).max()))
        worst[0] = max(worst[0], budget.scale(out).share)
    message = f"share of the budget: out {worst[0]:.2f}, lse {worst[1]:.2f}" + (", runs differ" if differs else "")
    return max(worst) <= 1 and not differs, message


# ---------------------------------------------------------------- speed


def fa3(q: Tensor, k: Tensor, v: Tensor, causal: bool, columns: bool = False) -> Callable[[], Tensor]:
    """FlashAttention-3 from tensors with one scale per head. Args: columns: whether the keys of V are contiguous."""
    z = onepass.quantize_fp8(q, k, v, granularity="head", rotate=False)
    values = z.v.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if columns else z.v
    descales = [getattr(z, f"{n}_descale").contiguous() for n in "qkv"]
    return lambda: _fa3(z.q, z.k, values, descales, causal)


def fa3_whole(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Callable[[], Tensor]:
    """FlashAttention-3 from bfloat16: scales of heads and rounding by torch's operators, in the call."""

    def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
        descale = (
            torch.linalg.vector_norm(x, math.inf, dim=(1, 3), dtype=torch.float32).clamp_(min=1e-20) / codec.E4M3_MAX
        )
        return (x * descale.reciprocal()[:, None, :, None].to(x.dtype)).to(codec.E4M3), descale

    def call() -> Tensor:
        (q_codes, q_descale), (k_codes, k_descale), (v_codes, v_descale) = map(quantized, (q, k, v))
        return _fa3(q_codes, k_codes, v_codes, [q_descale, k_descale, v_descale], causal)

    return call


def _fa3(q: Tensor, k: Tensor, v: Tensor, descales: list[Tensor], causal: bool) -> Tensor:
    import fa3_fwd_interface

    names = ("q_descale", "k_descale", "v_descale")
    result = fa3_fwd_interface.flash_attn_func(q, k, v, causal=causal, **dict(zip(names, descales, strict=True)))
    return result[0] if isinstance(result, tuple) else result


def contenders(q: Tensor, k: Tensor, v: Tensor, causal: bool, names: list[str]) -> dict[str, Callable[[], Tensor]]:
    z = prepared(q, k, v)
    rows = dataclasses.replace(z, v=layout.keys_first(z.v, k.shape[1]).contiguous(), v_keys_last=False)

    def public(*tensors: Any, **options: Any) -> Callable[[], Tensor]:
        return lambda: onepass.attention(*tensors, causal=causal, **options)

    makers: dict[str, Callable[[], Callable[[], Tensor]]] = {
        "fa3": lambda: fa3(q, k, v, causal),
        "fa3 columns": lambda: fa3(q, k, v, causal, columns=True),
        "fa3 whole": lambda: fa3_whole(q, k, v, causal),
        "bf16": lambda: public(q, k, v),
        "rows": lambda: public(rows, backend=BACKEND),
        "whole": lambda: public(q, k, v, precision="fp8", backend=BACKEND),
    }
    found: dict[str, Callable[[], Tensor]] = {"onepass": public(z, backend=BACKEND)}
    for name in names:
        try:
            found[name] = makers[name]()
            found[name]()
        except Exception as error:
            print(f"{name} not measured: {type(error).__name__}: {str(error)[:300]}")
            found.pop(name, None)
    return found


def requests(args: Args) -> list[CompileRequest]:
    """The kernels of the check, of the sums and of the grid."""
    jobs: list[tuple[AttentionProblem, ForwardConfigSm90 | None]] = []
    for head_dim, causal, _, config in [] if args.no_check else checked(args):
        jobs += [(static_problem(head_dim, causal, seqlen_q), config) for _, seqlen_q, *_ in CHECKS]
    for head_dim, keys in [] if args.no_sums else itertools.product(args.head_dims, SUM_LENGTHS):
        jobs += [(static_problem(head_dim, False, keys), config) for config in of_sums(head_dim, keys).values()]
    for cell in [] if args.no_grid else grid.cells(args):
        what = cell.head_dim, cell.causal, cell.seqlen
        jobs += [(static_problem(*what), config) for config in variants(args.variants, *what).values()]
        jobs += [(static_problem(*what, keys_last=keys_last), None) for keys_last in (False, True)]
    return [launch.compile_request(one, config or heuristics.forward_config_sm90(one)) for one, config in jobs]


def measure(cell: grid.Cell, args: Args, report: Report) -> None:
    own = variants(args.variants, cell.head_dim, cell.causal, cell.seqlen)
    shape = cell.batch, cell.seqlen, cell.heads, cell.head_dim
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    calls = contenders(q, k, v, cell.causal, [name for name in args.peers.split(",") if name])
    quantized = prepared(q, k, v)
    for name, config in own.items():
        calls[name] = out_of(run_kernel(quantized, cell.causal, config))
    expected = onepass.attention(q, k, v, causal=cell.causal)
    assert isinstance(expected, Tensor)
    errors = {name: float((call().float() - expected.float()).abs().max()) for name, call in calls.items()}
    default, in_rows = (
        heuristics.forward_config_sm90(static_problem(cell.head_dim, cell.causal, cell.seqlen, keys_last=keys_last))
        for keys_last in (True, False)
    )
    # ratios are to the fastest contender of FlashAttention-3
    results = grid.Results(report, PEERS, tolerance=0.3)
    results.measure(cell, calls, errors, {"onepass": default, "rows": in_rows} | own, args)


def summarize(paths: Sequence[Path]) -> None:
    """Print the comparisons of `LIKE_FOR_LIKE`: for each case TFLOP/s and ratio, medians over the files' runs."""
    tflops: dict[grid.Cell, dict[str, list[float]]] = {}
    for path in paths:
        for row in json.loads(path.read_text())["rows"]:
            cell = grid.Cell(row["head_dim"], row["causal"], row["seqlen"], row.get("tokens"))
            tflops.setdefault(cell, {}).setdefault(row["contender"], []).append(row["tflops"])
    for title, (ours, peers) in LIKE_FOR_LIKE.items():
        if any(ours in found and not found.keys().isdisjoint(peers) for found in tflops.values()):
            grid.summarize(f"{title}: {ours} vs. {' or '.join(peers)}, {len(paths)} runs", tflops, ours, peers)


# ---------------------------------------------------------------- sums of many keys

SUM_LENGTHS = (2048, 8192, 16384, 65536)


def of_sums(head_dim: int, keys: int) -> dict[str, ForwardConfigSm90]:
    """The configurations of the sums, by name."""
    config = heuristics.forward_config_sm90(static_problem(head_dim, False, keys))
    # 3 warpgroups of head_dim 128 have no registers for the overlap
    changes: dict[str, Any] = {"overlap_gemm_softmax": True, "num_warpgroups": 2}
    one_sum = dataclasses.replace(config, two_level_sums=False, pv_columns=0, **changes)
    return {"onepass": config, "onepass with one sum": one_sum}


def run_sums(args: Args, about: dict[str, Any]) -> None:
    """Measure out of q = 0 and v = 1, and the bias of out for scores of N(0, 1) and V of mean 1, by number of keys."""
    found = about["sums"] = {}
    has_fa3 = "fa3" in args.peers.split(",") and importlib.util.find_spec("fa3_fwd_interface") is not None
    for head_dim, keys in itertools.product(args.head_dims, SUM_LENGTHS):
        q, k, v = (torch.randn(1, n, 2, head_dim, device=DEVICE, dtype=torch.bfloat16) for n in (512, keys, keys))
        for kind, tensors in (("ones", (torch.zeros_like(q), k, torch.ones_like(v))), ("mean 1", (q, k, v + 1))):
            quantized = prepared(*tensors)
            expected = onepass.attention(*(t.double() for t in quantized.dequantize()), backend="tiled")
            assert isinstance(expected, Tensor)
            own = of_sums(head_dim, keys)
            calls = {name: out_of(run_kernel(quantized, False, config)) for name, config in own.items()}
            if has_fa3:
                calls["fa3"] = fa3(*tensors, causal=False)
            for contender, call in calls.items():
                out = call().double()
                share = float((out * expected).sum() / expected.square().sum())
                found[f"head_dim {head_dim}, {keys} keys, {kind}, {contender}"] = finite(round(share, 5))
                print(f"  head_dim {head_dim}, {keys} keys, {kind}: {contender} {share:.5f}", flush=True)


# ---------------------------------------------------------------- the suite


def add_options(parser: argparse.ArgumentParser) -> None:
    grid.add_arguments(parser, peers="fa3,fa3 columns,fa3 whole,rows,whole,bf16")
    parser.add_argument("--no-sums", action="store_true", help="do not measure sums of many keys")
    help_text = "results files of earlier runs: measure nothing"
    parser.add_argument("--summarize", type=input_file, nargs="+", help=help_text)


def start(args: Args, parser: argparse.ArgumentParser) -> dict[str, Any]:
    if args.summarize:
        summarize(args.summarize)
        parser.exit()
    return describe(DEVICE) | {"suite": "fp8"}


def finish(args: Args, report: Report) -> None:
    if not args.no_sums:
        run_sums(args, report.header)
    if report.rows:
        summarize([args.out])


SUITE = Suite("fp8", __doc__, add_options, start, grid.cells, measure, checks, requests, finish, out="fp8.json")

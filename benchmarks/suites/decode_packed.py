"""attention_decode of packed queries on a GPU: prompts in chunks with single tokens, vs. FlashAttention-3.

    python -m benchmarks decode_packed                                        # check, then all cases
    python -m benchmarks decode_packed --variants "dynamic_tiles=False; pack_gqa=False; num_warpgroups=3"
    python -m benchmarks decode_packed --prompts --e4m3                       # prompts, also over e4m3 caches

A case is a batch as an engine with continuous batching makes it, see CASES. Contenders take turns: onepass over a dense
cache and over pages of 16 and 64 keys at random places, and FlashAttention-3's flash_attn_with_kvcache with
cu_seqlens_q over the same caches ("fa3 .."). Times are those of replayed CUDA graphs; TFLOP/s counts visible pairs,
TB/s K and V of every sequence once, q, out and lse. Ratios are to fa3 over the same cache. Variants are fields of
`ForwardConfigSm90` (for the Hopper forward), num_splits, and hint=False for a call without max_seqlen_q. With --e4m3
onepass also reads the same caches rounded to e4m3, and is compared with attention over the rounded values. The results
go to --out as JSON after every case.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onepass
from onepass import reference
from onepass.api import decode_calls
from onepass.bench import decode as bench
from onepass.bench.cases import Case, decode_case
from onepass.bench.decode import CacheCopies
from onepass.bench.flops import bytes_moved, flops
from onepass.kernels.config import ForwardConfigSm90
from onepass.kernels.launch import decode_sm90 as decode_launch
from onepass.kernels.launch.decode import DecodeLaunch
from onepass.problem.decode import DecodeProblem
from onepass.testing.results import Report, Row

from ..harness import grid, steps
from ..harness.contenders import literals
from ..harness.steps import Contender
from ..harness.suite import Args, Check, Suite

DEVICE = "cuda"
PAGE_SIZES = (None, 16, 64)
E4M3 = "onepass e4m3"
CHECKED = (1, 300, 2, 1, 40), (2048, 301, 1000, 1, 1499)  # queries and keys of the sequences of the check


class Batch(NamedTuple):
    """Sequences, one after the other, with the numbers of queries and keys of each."""

    name: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128

    @property
    def label(self) -> str:
        return f"{self.name} h{self.heads[0]}/{self.heads[1]} d{self.head_dim}"

    @property
    def sequences(self) -> list[Case]:
        """Each sequence as a case by itself."""
        lengths = zip(self.queries, self.keys, strict=True)
        return [decode_case(1, keys, *self.heads, self.head_dim, queries) for queries, keys in lengths]

    @property
    def flops(self) -> int:
        return sum(map(flops, self.sequences))

    @property
    def bytes(self) -> int:
        return sum(map(bytes_moved, self.sequences))

    def bytes_of(self, name: str) -> int:
        """The bytes that a contender moves: from an e4m3 cache one for each element of K and V, not two."""
        elements = 2 * sum(self.keys) * self.heads[1] * self.head_dim
        return self.bytes - (elements if name.startswith(E4M3) else 0)


def _batches() -> list[Batch]:
    singles = (1,) * 63
    found = []
    for heads, head_dim in (((32, 8), 128), ((64, 8), 128), ((32, 8), 64)):
        shape = heads, head_dim
        found += [
            Batch("a chunk of 2048 of 8192 and 63 tokens over 8192", (2048, *singles), (8192,) * 64, *shape),
            Batch("a chunk of 512 of 8192 and 63 tokens over 1k to 16k", (*singles, 512), (*spread(63), 8192), *shape),
            Batch("4 chunks of 1024 of 1k to 16k", (1024,) * 4, (1024, 4096, 8192, 16384), *shape),
            Batch("64 drafts of 1 to 5 over 1k to 16k", tuple(1 + b % 5 for b in range(64)), spread(64), *shape),
            Batch("a chunk of 8192 and 8 tokens over 65536", (8192, *singles[:8]), (8192, *(65536,) * 8), *shape),
            Batch(
                "a chunk of 1024 of 8192 and 4 tokens over 131072", (1024, *singles[:4]), (8192, *(131072,) * 4), *shape
            ),
        ]
    for head_dim in (128, 64):
        found += [
            Batch("64 tokens over 1k to 16k", (1,) * 64, spread(64), (32, 8), head_dim),
            Batch("1 token over 8192", (1,), (8192,), (32, 8), head_dim),
            Batch("8 tokens over 8192", (1,) * 8, (8192,) * 8, (32, 8), head_dim),
        ]
    return found


def _prompts() -> list[Batch]:
    found = []
    for head_dim in (128, 64):
        found += [Batch(f"a prompt of {n}", (n,), (n,), (32, 8), head_dim) for n in (2048, 8192, 32768)]
        found += [Batch(f"a chunk of {n} of 32768", (n,), (32768,), (32, 8), head_dim) for n in (512, 2048)]
        found.append(Batch("4 prompts of 2048", (2048,) * 4, (2048,) * 4, (32, 8), head_dim))
    return found


def spread(count: int) -> tuple[int, ...]:
    """Lengths from 1024 to 16384 in no order."""
    return tuple(1024 + 15360 * (b * 29 % count) // (count - 1) for b in range(count))


CASES, PROMPTS = _batches(), _prompts()


class Step(NamedTuple):
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    cu_seqlens_q: Tensor
    page_table: Tensor | None
    max_seqlen_q: int


def make_step(page_size: int | None, batch: Batch, seed: int, dtype: torch.dtype = torch.bfloat16) -> Step:
    """A step of standard normal values, with caches of this dtype.

    A dense cache has room for the longest sequence; there are only as many pages as are filled.
    """
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(generator=generator)

    def integers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    (heads, heads_kv), table = batch.heads, None
    rows = len(batch.keys), max(batch.keys)
    if page_size is not None:
        counts = [-(-n // page_size) for n in batch.keys]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).int()
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for b, pages in enumerate(order.split(counts)):
            table[b, : len(pages)] = pages
        table, rows = table.to(DEVICE), (sum(counts), page_size)
    q = normal(sum(batch.queries), heads, batch.head_dim)
    k, v = (normal(*rows, heads_kv, batch.head_dim).to(dtype) for _ in range(2))
    ends = integers([0, *itertools.accumulate(batch.queries)])
    return Step(q, k, v, integers(batch.keys), ends, table, max(batch.queries))


def in_16_bits(step: Step) -> Step:
    """The step with caches in bfloat16, of equal values."""
    return step._replace(k_cache=step.k_cache.bfloat16(), v_cache=step.v_cache.bfloat16())


def onepass_run(step: Step) -> Tensor:
    return onepass.attention_decode(**step._asdict())


def fa3_run(module: Any, step: Step) -> Tensor:
    q, k, v, lengths, ends, table, longest = step
    more = {} if table is None else {"page_table": table}
    options = {"cu_seqlens_q": ends, "max_seqlen_q": longest, "cache_seqlens": lengths, "causal": True, "num_splits": 0}
    out = module.flash_attn_with_kvcache(q, k, v, **options, **more)
    return out[0] if isinstance(out, tuple) else out


def variant_run(changes: str, step: Step) -> Tensor:
    """A step with another configuration of the Hopper forward than onepass would choose, or with another call."""
    values = literals(changes, ["hint", "num_splits", *(field.name for field in fields(ForwardConfigSm90))])
    arguments = step._asdict()
    if not values.pop("hint", True):
        arguments["max_seqlen_q"] = None
    if set(values) <= {"num_splits"}:
        return onepass.attention_decode(**arguments | values)
    del arguments["max_seqlen_q"]
    problem, inputs = decode_calls.problem_of("bench", arguments)
    num_splits = values.pop("num_splits", None)
    return _variant_launch(frozenset(values.items()), replace(problem, num_splits=num_splits))(inputs)[0]


@functools.cache
def _variant_launch(changes: frozenset[tuple[str, Any]], problem: DecodeProblem) -> DecodeLaunch:
    device = torch.device(DEVICE)
    config = replace(decode_launch.config_of(problem, device), **dict(changes))
    return decode_launch.launch_with(problem, config, device)


def contenders(args: Args) -> dict[str, Contender]:
    found: dict[str, Contender] = {}
    for size in PAGE_SIZES:
        suffix = "" if size is None else f" page {size}"
        given = functools.partial(make_step, size)
        found["onepass" + suffix] = Contender(given, onepass_run)
        if args.fa3 is not None:
            found["fa3" + suffix] = Contender(given, functools.partial(fa3_run, args.fa3), is_peer=True)
        if args.e4m3:
            in_e4m3 = functools.partial(make_step, size, dtype=torch.float8_e4m3fn)
            found[E4M3 + suffix] = Contender(in_e4m3, onepass_run, in_16_bits)
    for changes in grid.split_variants(args.variants):
        found[changes] = Contender(functools.partial(make_step, None), functools.partial(variant_run, changes))
    return found


def in_pytorch(step: Step, dtype: torch.dtype) -> Tensor:
    """Attention of each sequence in PyTorch, every intermediate in one dtype."""
    ends, outs = step.cu_seqlens_q.tolist(), []
    for b, keys in enumerate(step.cache_seqlens.tolist()):
        rows = step.q[None, ends[b] : ends[b + 1]]
        k, v = (
            (t[b] if step.page_table is None else t[step.page_table[b].long()].flatten(0, 1))[None, :keys]
            for t in (step.k_cache, step.v_cache)
        )
        outs.append(reference.attention(rows, k, v, causal=True, compute_dtype=dtype).out[0])
    return torch.cat(outs)


def checks(args: Args, header: dict[str, Any]) -> Iterator[Check]:
    """Checks of a smaller batch of the same heads."""
    shapes = dict.fromkeys((case.heads, case.head_dim) for case in args.chosen)
    small = [Batch("check", *CHECKED, *shape) for shape in shapes]
    return steps.checks(lambda seed: [(batch.label, batch, contenders(args)) for batch in small], in_pytorch)


def measure(batch: Batch, args: Args, report: Report) -> None:
    copies = CacheCopies.of(batch.bytes, report.header["l2_bytes"])
    step = make_step(None, batch, 0)
    problem, _ = decode_calls.problem_of("bench", step._asdict())
    launch = decode_launch.launch_with(problem, decode_launch.config_of(problem, step.q.device), step.q.device)
    row: Row = {
        "case": batch._asdict(),
        "label": batch.label,
        "num_splits": launch.num_splits,
        "config": asdict(launch.config),
    }
    samples = steps.measure(row, contenders(args), [batch] * copies.number, copies, batch.bytes_of, args, report)
    for name, entry in row["contenders"].items():
        peer = "fa3" + "".join(re.findall(r" page \d+", name))
        entry["tflops"] = batch.flops / entry["median_ms"] / 1e9
        entry["speed_over_fa3"] = samples.speed_ratio(name, peer).median if peer in samples.ms else None
    steps.finish(row, "speed_over_fa3", f"{row['num_splits']} splits", report)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of cases in CASES (PROMPTS); default: all")
    parser.add_argument("--prompts", action="store_true", help="the cases in PROMPTS, not those in CASES")
    parser.add_argument("--e4m3", action="store_true", help="also over caches in e4m3")
    parser.add_argument("--variants", help=f"such as {grid.FIELDS}, several separated by ;")
    steps.add_timing(parser, seconds=0.05)


def start(args: Args, parser: argparse.ArgumentParser) -> dict[str, Any]:
    cases = PROMPTS if args.prompts else CASES
    args.chosen = cases if args.cases is None else [cases[n] for n in args.cases]
    try:
        args.fa3 = bench._flash_attention_3()
    except ImportError as error:
        print("fa3 not measured:", error)
        args.fa3 = None
    return steps.header_of("decode_packed", DEVICE)


SUITE = Suite(
    "decode_packed", __doc__, add_options, start, lambda args: args.chosen, measure, checks, out="decode-packed.json"
)

"""attention_decode over e4m3 caches on a GPU: is it right, and how much faster is it than over 16-bit caches?

    python -m benchmarks decode_e4m3                                     # check, then six cases
    python -m benchmarks decode_e4m3 --no-check --cases b8k8192h32/8d128,b64k8192h32/8d128q4

Cases are written, and timed, as in decode.py: contenders in turns, replayed CUDA graphs, caches that do not lie in L2.
TB/s counts the bytes of a contender's own K and V, q, out and lse. The results go to --out as JSON after every case.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onepass
from onepass.bench import decode as bench
from onepass.bench.cases import Case, decode_case
from onepass.bench.decode import CacheCopies, Step
from onepass.bench.flops import bytes_moved, kv_bytes
from onepass.testing.budget import compare
from onepass.testing.results import Report, Row

from ..harness.suite import Args, Check, Suite, verdict
from .decode import DEVICE, QUICK, add_timing, header_of, host_time_us, in_pytorch, parse_cases, time_in_turns

E4M3 = torch.float8_e4m3fn


class Contender(NamedTuple):
    """A form of the cache.

    Attributes:
        page_size: keys of a page; None without pages.
        scaled: what has a descale of its own: None (a 16-bit cache), "tensor", "head" or "block" (of page_size keys,
            or of 64).
    """

    page_size: int | None
    scaled: str | None

    @property
    def kv_block(self) -> int | None:
        return (self.page_size or 64) if self.scaled == "block" else None

    def arguments(self, step: Step, seed: int = 0) -> dict[str, Any]:
        """The arguments of attention_decode, made from a dense 16-bit step."""
        step = step if self.page_size is None else step.in_pages(self.page_size, seed)
        arguments = {n: t for n, t in step._asdict().items() if t is not None}
        if self.scaled is None:
            return arguments
        outer, size, heads = step.k_cache.shape[:3]
        shape = {"tensor": (), "head": (len(step.q), heads), "block": (outer, heads)}[self.scaled]
        if self.scaled == "block" and self.page_size is None:
            shape = *shape, -(-size // 64)
        generator = torch.Generator(DEVICE).manual_seed(seed)
        descales = [torch.rand(shape, generator=generator, device=DEVICE) + 0.5 for _ in range(2)]
        caches = {n: arguments[n].to(E4M3) for n in ("k_cache", "v_cache")}
        return arguments | caches | {"k_descale": descales[0], "v_descale": descales[1], "kv_block": self.kv_block}

    def real_step(self, arguments: dict[str, Any]) -> Step:
        """The step of 16-bit or float32 caches with the same real values."""
        step = Step(**{name: arguments[name] for name in Step._fields if name in arguments})
        if self.scaled is None:
            return step
        caches = []
        for name in "kv":
            cache, descale = arguments[f"{name}_cache"].float(), arguments[f"{name}_descale"]
            if descale.dim() == 3:
                descale = descale.repeat_interleave(64, 2)[:, :, : cache.shape[1]].transpose(1, 2)[..., None]
            elif descale.dim() == 2:
                if self.page_size is not None and self.scaled == "head":
                    raise NotImplementedError("a page may belong to any entry")
                descale = descale[:, None, :, None]
            caches.append(cache * descale)
        return step._replace(k_cache=caches[0], v_cache=caches[1])


CONTENDERS = {
    "16 bits": Contender(None, None),
    "16 bits, pages of 64": Contender(64, None),
    "e4m3, one descale": Contender(None, "tensor"),
    "e4m3, descale of each head": Contender(None, "head"),
    "e4m3, of each block of 64": Contender(None, "block"),
    "e4m3, of each page of 64": Contender(64, "block"),
    "e4m3, of each page of 16": Contender(16, "block"),
}


def run(arguments: dict[str, Any]) -> Tensor:
    return onepass.attention_decode(**arguments, backend="sm80")


def warm_up(args: Args) -> None:
    """Compile the kernels of all contenders, several at a time."""
    cases = [*([] if args.no_check else checked_cases(args.cases)), *([] if args.no_grid else args.cases)]
    calls = [
        {n: t.to("meta") if isinstance(t, Tensor) else t for n, t in contender.arguments(step).items()}
        for case in cases
        for step in (bench.make_step(case, DEVICE),)
        for contender in CONTENDERS.values()
    ]
    started = time.perf_counter()
    made = onepass.warmup(calls, backend="sm80")
    print(f"{len(made)} kernels ready in {time.perf_counter() - started:.1f} s", flush=True)


def checked_cases(cases: Sequence[Case]) -> list[Case]:
    """Short cases of the same heads, also with numbers of queries that take other kernels."""
    shapes = {(c.heads_q, c.heads_kv, c.head_dim, q) for c in cases for q in (1, 3, 20)}
    return [decode_case(3, 2048, *shape) for shape in sorted(shapes)]


def checks(args: Args, header: dict[str, Any]) -> Iterator[Check]:
    """Compare every contender with attention in float64, on new random data."""
    seed = time.time_ns() % 2**31
    print("seed of the check:", seed)
    for case in checked_cases(args.cases):
        step = bench.make_step(case, DEVICE, seed)
        step.cache_seqlens.copy_(torch.tensor([2048, 1, 1499], dtype=torch.int32))
        for name, contender in CONTENDERS.items():
            yield Check(f"{name}, {case.label}", functools.partial(check_one, contender, step, seed))


def check_one(contender: Contender, step: Step, seed: int) -> tuple[bool, str]:
    arguments = contender.arguments(step, seed)
    real = contender.real_step(arguments)
    exact, plain = (in_pytorch(real, dtype) for dtype in (torch.float64, step.q.dtype))
    return verdict([compare("out", run(arguments), exact, plain)])


def measure(case: Case, args: Args, report: Report) -> None:
    about = report.header
    # there are enough copies for e4m3 caches, which are half as large and must not lie in L2 either
    copies = CacheCopies.of(case, 2 * about["l2_bytes"])
    steps = [bench.make_step(case, DEVICE, seed) for seed in range(copies.number)]
    samplers: dict[str, Any] = {}
    host = {}
    for name, contender in CONTENDERS.items():
        given = [contender.arguments(step, seed) for seed, step in enumerate(steps)]
        calls: list[Callable] = [functools.partial(run, arguments) for arguments in given]
        samplers[name] = bench.sampler_of(calls, copies)
        host[name] = host_time_us(calls[0]) if args.host else None
    samples = time_in_turns(samplers, args)
    rows = {}
    for name, ms in samples.ms.items():
        saved = 0 if CONTENDERS[name].scaled is None else kv_bytes(case) // 2
        rows[name] = bench.times(samples, name, bytes_moved(case) - saved, about["copy_tb_per_s"]) | {
            "speed_over_16_bits": round(samples.speed_ratio(name, "16 bits").median, 4),
            "launch": samplers[name].launch,
            "host_us": host[name],
            "ms": [round(x, 5) for x in ms],
        }
    report.add({"case": case.to_dict(), "label": case.label, "copies": str(copies), "contenders": rows})
    print_row(report.rows[-1])
    torch.cuda.empty_cache()


def print_row(row: Row) -> None:
    """Print a line for the case, then one for each contender."""
    print(f"{row['label']}: {row['copies']} copies")
    for name, entry in row["contenders"].items():
        host = "" if entry["host_us"] is None else f"  host {entry['host_us']:.0f} us"
        share = f"{100 * entry['of_copy']:4.0f} % of a copy's bandwidth"
        print(
            f"    {name:28s} {1e3 * entry['median_ms']:9.1f} us {entry['speed_over_16_bits']:6.2f}x {share}{host}",
            flush=True,
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=parse_cases, default=parse_cases(QUICK), help="such as b8k8192h32/8d128q4")
    parser.add_argument("--host", action="store_true", help="also measure the host's time of a call")
    add_timing(parser)


def start(args: Args, parser: argparse.ArgumentParser) -> dict[str, Any]:
    header = header_of("decode_e4m3", DEVICE)
    warm_up(args)
    return header


SUITE = Suite(
    "decode_e4m3", __doc__, add_options, start, lambda args: args.cases, measure, checks, out="decode_e4m3.json"
)

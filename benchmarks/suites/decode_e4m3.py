"""attention_decode over e4m3 caches on a GPU: is it right, and how much faster is it than over 16-bit caches?

    python -m benchmarks decode_e4m3                                     # check, then six cases
    python -m benchmarks decode_e4m3 --no-check --cases b8k8192h32/8d128,b64k8192h32/8d128q4

Cases are written, and timed, as in decode.py: contenders in turns, replayed CUDA graphs, caches that do not lie in L2.
TB/s counts the bytes of a contender's own K and V, q, out and lse. The results go to --out as JSON after every case.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onepass
from onepass.bench import decode as bench
from onepass.bench.cases import Case, decode_case
from onepass.bench.decode import CacheCopies, Step
from onepass.bench.flops import bytes_moved, kv_bytes
from onepass.testing.results import Report, Row

from ..harness import steps
from ..harness.steps import Contender
from ..harness.suite import Args, Check, Suite
from .decode import DEVICE, QUICK, checked_steps, in_pytorch, parse_cases

E4M3 = torch.float8_e4m3fn


class Form(NamedTuple):
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


FORMS = {
    "16 bits": Form(None, None),
    "16 bits, pages of 64": Form(64, None),
    "e4m3, one descale": Form(None, "tensor"),
    "e4m3, descale of each head": Form(None, "head"),
    "e4m3, of each block of 64": Form(None, "block"),
    "e4m3, of each page of 64": Form(64, "block"),
    "e4m3, of each page of 16": Form(16, "block"),
}


def run(arguments: dict[str, Any]) -> Tensor:
    return onepass.attention_decode(**arguments, backend="sm80")


def warm_up(args: Args) -> None:
    """Compile the kernels of all contenders, several at a time."""
    cases = [*([] if args.no_check else checked_cases(args.cases)), *([] if args.no_grid else args.cases)]
    calls = [
        {n: t.to("meta") if isinstance(t, Tensor) else t for n, t in form.arguments(step).items()}
        for case in cases
        for step in (bench.make_step(case, DEVICE),)
        for form in FORMS.values()
    ]
    started = time.perf_counter()
    made = onepass.warmup(calls, backend="sm80")
    print(f"{len(made)} kernels ready in {time.perf_counter() - started:.1f} s", flush=True)


def checked_cases(cases: Sequence[Case]) -> list[Case]:
    """Short cases of the same heads, also with numbers of queries that take other kernels."""
    shapes = {(c.heads_q, c.heads_kv, c.head_dim, q) for c in cases for q in (1, 3, 20)}
    return [decode_case(3, 2048, *shape) for shape in sorted(shapes)]


def contenders() -> dict[str, Contender]:
    return {name: Contender(form.arguments, run, form.real_step) for name, form in FORMS.items()}


def checks(args: Args, header: dict[str, Any]) -> Iterator[Check]:
    found = dict.fromkeys(checked_cases(args.cases), contenders())
    return steps.checks(lambda seed: checked_steps(found, seed), in_pytorch)


def measure(case: Case, args: Args, report: Report) -> None:
    # there are enough copies for e4m3 caches, which are half as large and must not lie in L2 either
    copies = CacheCopies.of(kv_bytes(case), 2 * report.header["l2_bytes"])
    given = [bench.make_step(case, DEVICE, seed) for seed in range(copies.number)]
    row: Row = {"case": case.to_dict(), "label": case.label}

    def num_bytes(name: str) -> int:
        return bytes_moved(case) - (0 if FORMS[name].scaled is None else kv_bytes(case) // 2)

    samples = steps.measure(row, contenders(), given, copies, num_bytes, args, report)
    for name, entry in row["contenders"].items():
        entry["speed_over_16_bits"] = round(samples.speed_ratio(name, "16 bits").median, 4)
    steps.finish(row, "speed_over_16_bits", f"{copies} copies", report)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=parse_cases, default=parse_cases(QUICK), help="such as b8k8192h32/8d128q4")
    steps.add_timing(parser)


def start(args: Args, parser: argparse.ArgumentParser) -> dict[str, Any]:
    header = steps.header_of("decode_e4m3", DEVICE)
    warm_up(args)
    return header


SUITE = Suite(
    "decode_e4m3", __doc__, add_options, start, lambda args: args.cases, measure, checks, out="decode_e4m3.json"
)

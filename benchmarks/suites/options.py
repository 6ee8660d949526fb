"""The Hopper kernels beyond the paper's grid: query heads in groups, packed sequences, windows, head dims, options.

    python -m benchmarks options                                # all cases, compared with FlashAttention-4
    python -m benchmarks options --cases packed,GQA             # cases whose labels have one of the words
    python -m benchmarks options --cases fwd                    # the forward alone; bwd: the backward

The forward and the backward pass are timed separately; contenders take turns. A case with sinks or a softcap is
compared with onepass without this option ("plain"), all others with FlashAttention-4. Cases have 16k tokens of
hidden size 2048, except for packed ones, whose lengths are drawn log-uniformly from 128 to 8192 until they sum to 32k.
Every contender's out or gradients are compared with those of the first one. The results go to --out as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onepass
from onepass.geometry.block_range import count_visible_pairs
from onepass.testing.machine import describe
from onepass.testing.results import Report

from ..harness import grid
from ..harness.contenders import max_relative_error
from ..harness.suite import Args, Suite, chosen

DEVICE = "cuda"
TOKENS, PACKED_TOKENS, HIDDEN = 16384, 32768, 2048
TOLERANCE = 0.05  # of the rough comparison with the first contender


class OptionCase(NamedTuple):
    """One pass, "fwd" or "bwd", of one case: self-attention of sequences of one length, or of packed ones."""

    direction: str
    name: str
    heads: tuple[int, int]  # query, kv
    head_dims: tuple[int, int]  # of q and k, of v
    lengths: tuple[int, ...]  # packed if they differ
    causal: bool = False
    window: tuple[int, int] | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def is_packed(self) -> bool:
        return len(set(self.lengths)) > 1

    @property
    def label(self) -> str:
        d, dv = self.head_dims
        mask = " causal" if self.causal else ""
        mask += f" window {self.window[0]},{self.window[1]}" if self.window else ""
        lengths = f"{len(self.lengths)} packed" if self.is_packed else f"s{self.lengths[0]}"
        dims = f"d{d}" if d == dv else f"d{d}/{dv}"
        return f"{self.direction} {self.name}: {dims} h{self.heads[0]}/{self.heads[1]} {lengths}{mask}"

    @property
    def flops(self) -> int:
        """Two GEMMs of all visible pairs in the forward, five in the backward."""
        left, right = self.window or (None, None)
        right = 0 if self.causal else right
        pairs = sum(count_visible_pairs(n, n, left, right) for n in self.lengths)
        d, dv = self.head_dims
        return 2 * pairs * self.heads[0] * (d + dv if self.direction == "fwd" else 3 * d + 2 * dv)

    @property
    def has_peer(self) -> bool:
        return self.softcap is None and not self.has_sinks


def packed_lengths(seed: int = 0) -> tuple[int, ...]:
    """Lengths drawn log-uniformly from 128 to 8192; the last one is what is left of the tokens."""
    rng = random.Random(seed)
    found: list[int] = []
    while (left := PACKED_TOKENS - sum(found)) > 0:
        found.append(min(round(math.exp(rng.uniform(math.log(128), math.log(8192)))), left))
    return tuple(found)


def _equal(seqlen: int) -> tuple[int, ...]:
    return (seqlen,) * (TOKENS // seqlen)


def cases() -> list[OptionCase]:
    found: list[OptionCase] = []

    def add(name: str, heads: tuple[int, int], head_dims: tuple[int, int], lengths: tuple[int, ...], **options: Any):
        found.extend(OptionCase(direction, name, heads, head_dims, lengths, **options) for direction in ("fwd", "bwd"))

    for d, group, seqlen in itertools.product((64, 128), (4, 8), (2048, 4096, 8192, 16384)):
        add(f"GQA {group}", (HIDDEN // d, HIDDEN // d // group), (d, d), _equal(seqlen), causal=True)
    for d, causal in itertools.product((64, 128), (False, True)):
        add("packed", (HIDDEN // d, HIDDEN // d), (d, d), packed_lengths(), causal=causal)
    for d in (64, 128, 256):
        add("window", (HIDDEN // d, HIDDEN // d), (d, d), _equal(16384), causal=True, window=(1023, 0))
    for (d, dv), seqlen, causal in itertools.product(((96, 96), (192, 128)), (2048, 8192), (False, True)):
        add("head dims", (16, 16), (d, dv), _equal(seqlen), causal=causal)
    for d, seqlen in itertools.product((64, 128), (2048, 8192)):
        heads = HIDDEN // d, HIDDEN // d
        add("sinks", heads, (d, d), _equal(seqlen), causal=True, has_sinks=True)
        add("softcap", heads, (d, d), _equal(seqlen), causal=True, softcap=30.0)
    return found


class Tensors(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Tensor | None
    cu_seqlens: Tensor | None


def make_tensors(case: OptionCase, device: str = DEVICE) -> Tensors:
    torch.manual_seed(0)
    (hq, hkv), (d, dv) = case.heads, case.head_dims
    lead = (sum(case.lengths),) if case.is_packed else (len(case.lengths), case.lengths[0])
    shapes = (*lead, hq, d), (*lead, hkv, d), (*lead, hkv, dv), (*lead, hq, dv)
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    sinks = torch.randn(hq, device=device).requires_grad_() if case.has_sinks else None
    offsets = None
    if case.is_packed:
        offsets = torch.tensor([0, *itertools.accumulate(case.lengths)], dtype=torch.int32, device=device)
    return Tensors(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout, sinks, offsets)


def arguments_of(case: OptionCase, t: Tensors) -> dict[str, Any]:
    """The arguments of onepass's call."""
    found: dict[str, Any] = {"q": t.q, "k": t.k, "v": t.v, "sinks": t.sinks, "softcap": case.softcap}
    found |= {"causal": case.causal and case.window is None, "window": case.window}
    if t.cu_seqlens is not None:
        found |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(case.lengths))
        found |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), t.cu_seqlens)
    return found


def attend_onepass(case: OptionCase, t: Tensors) -> Tensor:
    function = onepass.attention if t.cu_seqlens is None else onepass.attention_varlen
    return function(**arguments_of(case, t))


def attend_fa4(case: OptionCase, t: Tensors) -> Tensor:
    from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

    options: dict[str, Any] = {"causal": case.causal}
    if case.window is not None:
        options = {"causal": False, "window_size": case.window}
    if t.cu_seqlens is None:
        result = flash_attn_func(t.q, t.k, t.v, **options)
    else:
        longest = {"max_seqlen_q": max(case.lengths), "max_seqlen_k": max(case.lengths)}
        offsets = {"cu_seqlens_q": t.cu_seqlens, "cu_seqlens_k": t.cu_seqlens}
        result = flash_attn_varlen_func(t.q, t.k, t.v, **offsets, **longest, **options)
    return result[0] if isinstance(result, tuple) else result


def forward_of(attend: Callable[[OptionCase, Tensors], Tensor], case: OptionCase, t: Tensors) -> Callable[[], Any]:
    """Returns: a function that runs the forward without gradients and returns (out,)."""
    t = t._replace(**{name: x.detach() for name, x in t._asdict().items() if x is not None})

    def run() -> tuple[Tensor]:
        with torch.no_grad():
            return (attend(case, t),)

    return run


def backward_of(attend: Callable[[OptionCase, Tensors], Tensor], case: OptionCase, t: Tensors) -> Callable[[], Any]:
    """Run a forward. Returns: a function that runs its backward pass."""
    out = attend(case, t)
    leaves = [x for x in (t.q, t.k, t.v, t.sinks) if x is not None]
    return lambda: torch.autograd.grad(out, leaves, t.dout, retain_graph=True)


def contenders(case: OptionCase, t: Tensors) -> dict[str, Callable[[], Any]]:
    """The passes that are timed, by name. What a peer refuses is printed."""
    pass_of = forward_of if case.direction == "fwd" else backward_of
    plain = case._replace(softcap=None, has_sinks=False)
    others: dict[str, tuple] = {"plain": (attend_onepass, plain, t._replace(sinks=None))}
    if case.has_peer:
        others = {"fa4": (attend_fa4, case, t)}
    found = {"onepass": pass_of(attend_onepass, case, t)}
    for name, (attend, what, tensors) in others.items():
        try:
            found[name] = pass_of(attend, what, tensors)
            found[name]()
        except Exception as error:
            found.pop(name, None)
            print(f"{case.label}: {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    return found


def measure(case: OptionCase, args: Args, report: Report) -> None:
    """Time a case and add its row."""
    tensors = make_tensors(case)
    calls = contenders(case, tensors)
    names = ("out",) if case.direction == "fwd" else ("dq", "dk", "dv")
    results = {name: dict(zip(names, call()[: len(names)], strict=True)) for name, call in calls.items()}
    first = results["onepass"]
    errors = {name: max_relative_error(found, first) for name, found in results.items() if name != "plain"}
    times = grid.time_in_turns(calls, args, seed=len(case.lengths))
    ms = {name: statistics.median(found) for name, found in times.items()}
    other = next((name for name in ms if name != "onepass"), None)
    ratio = None if other is None else round(ms[other] / ms["onepass"], 4)
    wrong = [name for name, error in errors.items() if not error < TOLERANCE]
    report.add(
        {
            "case": case.label,
            **case._asdict(),
            "ms": {name: [round(x, 5) for x in found] for name, found in times.items()},
            "tflops": {name: round(case.flops / value / 1e9, 1) for name, value in ms.items()},
            "beside": other,
            "ratio": ratio,
            "disagrees": wrong,
        }
    )
    speeds = ", ".join(f"{name} {case.flops / value / 1e9:.0f}" for name, value in ms.items())
    print(f"{case.label:60s} {speeds:40s} ratio {ratio}{' DISAGREES' if wrong else ''}", flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default="", help="words; cases whose names have one of them; default: all")
    grid.add_timing(parser, rounds=3)


def start(args: Args, parser: argparse.ArgumentParser) -> dict[str, Any]:
    args.chosen = chosen(cases(), args.cases, any, parser)
    for direction in ("fwd", "bwd"):
        calls = [arguments_of(c, make_tensors(c, "meta")) for c in args.chosen if c.direction == direction]
        onepass.warmup(calls, gradients=direction == "bwd")
    return describe(DEVICE) | {"suite": "options"}


SUITE = Suite(
    "options",
    __doc__,
    add_options,
    start,
    lambda args: args.chosen,
    measure,
    is_wrong=lambda row: row["disagrees"],
    out="options.json",
)

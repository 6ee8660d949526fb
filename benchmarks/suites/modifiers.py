"""What ranges of keys, left padding, ALiBi, a bias and dropout cost on a GPU, compared with a call without them.

    python -m benchmarks modifiers                              # all cases, forward and backward
    python -m benchmarks modifiers --cases dropout,d128         # cases whose names have all of the words

A case is compared with the ordinary call that does as much work: a causal mask in the form of ranges or of positions
with `causal=True`, documents in the form of ranges with packed sequences, and any other option with the same call
without it. All cases have 16k tokens of hidden size 2048 in bfloat16. The contenders take turns, and "added" is the
ratio of their times less 1. The results of ranges, positions and documents are compared with those of the ordinary
call, too. The results go to --out as JSON.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onepass
from onepass.testing.machine import describe
from onepass.testing.results import Report

from ..harness import grid
from ..harness.suite import Args, Suite, chosen

DEVICE = "cuda"
TOKENS, HIDDEN, DOCUMENT = 16384, 2048, 1000
TOLERANCE = 0.02  # of the rough comparison with the ordinary call
SAME = ("ranges", "positions", "documents")  # options whose results are those of the ordinary call


class ModifierCase(NamedTuple):
    """Causal self-attention with one option."""

    option: str
    head_dim: int
    seqlen: int

    @property
    def label(self) -> str:
        return f"{self.option} d{self.head_dim} s{self.seqlen}"

    @property
    def batch(self) -> int:
        return TOKENS // self.seqlen

    @property
    def heads(self) -> int:
        return HIDDEN // self.head_dim


OPTIONS = ("ranges", "positions", "documents", "left padding", "alibi", "bias", "dropout")


def cases() -> list[ModifierCase]:
    return [ModifierCase(*what) for what in itertools.product(OPTIONS, (64, 128), (2048, 8192))]


class Tensors(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def make_tensors(case: ModifierCase, device: str = DEVICE) -> Tensors:
    torch.manual_seed(0)
    shape = case.batch, case.seqlen, case.heads, case.head_dim
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    return Tensors(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)


def with_option(case: ModifierCase, t: Tensors) -> dict[str, Any]:
    """The arguments of the call with the option."""
    return {"q": t.q, "k": t.k, "v": t.v} | _option(case, t.q.device)


def _option(case: ModifierCase, device: torch.device) -> dict[str, Any]:
    n = case.seqlen
    rows = torch.arange(n, device=device, dtype=torch.int32)
    zeros = torch.zeros_like(rows)
    if case.option == "ranges":
        return {"key_ranges": torch.stack((zeros, rows + 1), -1)[None, None]}
    if case.option == "documents":
        return {"key_ranges": torch.stack((rows // DOCUMENT * DOCUMENT, rows + 1), -1)[None, None]}
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / case.heads) for h in range(case.heads)], device=device)
    more: dict[str, Any] = {
        "positions": {"q_positions": rows[None]},
        "left padding": {"seqstart_k": torch.full((case.batch,), n // 8, device=device, dtype=torch.int32)},
        "alibi": {"alibi_slopes": slopes},
        "bias": {"bias": torch.randn(1, 1, n, n, device=device, dtype=torch.bfloat16)},
        "dropout": {"dropout_p": 0.1},
    }
    return {"causal": True} | more[case.option]


def ordinary(case: ModifierCase, t: Tensors) -> dict[str, Any]:
    """The arguments of the call that the option is compared with."""
    if case.option != "documents":
        return {"q": t.q, "k": t.k, "v": t.v, "causal": True}
    starts = [b * case.seqlen + i for b in range(case.batch) for i in range(0, case.seqlen, DOCUMENT)]
    offsets = torch.tensor([*starts, TOKENS], device=t.q.device, dtype=torch.int32)
    lengths: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), offsets)
    lengths |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), DOCUMENT)
    q, k, v = (x.flatten(0, 1) for x in t[:3])
    return {"q": q, "k": k, "v": v, "causal": True} | lengths


def attend(arguments: dict[str, Any], t: Tensors) -> Tensor:
    function = onepass.attention_varlen if "cu_seqlens_q" in arguments else onepass.attention
    return function(**arguments).view_as(t.dout)


def compile_ahead(cases: Sequence[ModifierCase]) -> None:
    """Compile all kernels of the cases, several at a time."""
    pairs = [(case, make_tensors(case, "meta")) for case in cases]
    onepass.warmup([call for pair in pairs for call in (with_option(*pair), ordinary(*pair))], gradients=True)


def backward_of(call: Callable[[], Tensor], t: Tensors) -> Callable[[], Any]:
    """Run a forward. Returns: a function that runs its backward pass."""
    out = call()
    return lambda: torch.autograd.grad(out, (t.q, t.k, t.v), t.dout, retain_graph=True)


def measure(case: ModifierCase, args: Args, report: Report) -> None:
    """Time the forward and the backward of a case, and add its row."""
    t = make_tensors(case)
    forward: dict[str, Callable[[], Tensor]] = {
        "with": functools.partial(attend, with_option(case, t), t),
        "ordinary": functools.partial(attend, ordinary(case, t), t),
    }
    results = {name: (call().detach(), *backward_of(call, t)()) for name, call in forward.items()}
    disagrees = False
    if case.option in SAME:
        pairs = zip(*results.values(), strict=True)
        disagrees = any(float((a - b).abs().max() / b.abs().max()) > TOLERANCE for a, b in pairs)
    del results
    row: dict[str, Any] = {"case": case.label, **case._asdict(), "disagrees": disagrees}
    for direction in ("forward", "backward"):
        calls: dict[str, Callable[[], Any]] = dict(forward)
        if direction == "backward":
            calls = {name: backward_of(call, t) for name, call in forward.items()}
        times = grid.time_in_turns(calls, args, seed=case.seqlen)
        ms = {name: statistics.median(found) for name, found in times.items()}
        row[direction] = {
            "ms": {name: [round(x, 5) for x in found] for name, found in times.items()},
            "added": round(ms["with"] / ms["ordinary"] - 1, 4),
        }
    report.add(row)
    added = ", ".join(f"{name} {row[name]['added']:+.1%}" for name in ("forward", "backward"))
    print(f"{case.label:32s} {added}{' DISAGREES' if disagrees else ''}", flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default="", help="words; cases whose names have all of them; default: all")
    grid.add_timing(parser, rounds=3)


def start(args: Args, parser: argparse.ArgumentParser) -> dict[str, Any]:
    args.chosen = chosen(cases(), args.cases, all, parser)
    header = describe(DEVICE) | {"suite": "modifiers"}
    compile_ahead(args.chosen)
    return header


SUITE = Suite(
    "modifiers",
    __doc__,
    add_options,
    start,
    lambda args: args.chosen,
    measure,
    is_wrong=lambda row: row["disagrees"],
    out="modifiers.json",
)

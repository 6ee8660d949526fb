"""The FlashAttention-3 paper's grid: its cases, the options of a suite that measures it, tables and results files.

The grid is that of arXiv:2407.08608, section 4.1: 16k tokens in all, hidden size 2048. TFLOP/s counts visible pairs
(see flops.py): for a causal case that is the paper's half of seqlen^2 times 1 + 1 / seqlen.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from onepass.bench.cases import Case, Direction
from onepass.bench.flops import flops
from onepass.testing.results import Report, finite
from onepass.tuning.timing import Call, measure_interleaved

from .timing import do_bench_sampler, under_load

TOKENS, HIDDEN = 16384, 2048
HEAD_DIMS = [64, 128, 256]
SEQLENS = [512, 1024, 2048, 4096, 8192, 16384]


class Cell(NamedTuple):
    """One case of the grid."""

    head_dim: int
    causal: bool
    seqlen: int
    tokens: int | None = None  # None: as many as the grid has

    @property
    def batch(self) -> int:
        return max(1, (self.tokens or TOKENS) // self.seqlen)

    @property
    def heads(self) -> int:
        return HIDDEN // self.head_dim

    def case(self, dtype: str = "bfloat16", direction: Direction = "fwd") -> Case:
        shape = {"heads": self.heads, "head_dim": self.head_dim, "batch": self.batch}
        return Case.square(self.seqlen, **shape, dtype=dtype, causal=self.causal, direction=direction)


def parse_cases(text: str) -> list[Cell]:
    """128c8192,64n512 -> [Cell(128, True, 8192), Cell(64, False, 512)]."""
    found = [(case, re.fullmatch(r"(\d+)([cn])(\d+)", case)) for case in text.split(",")]
    if wrong := [case for case, match in found if match is None]:
        raise argparse.ArgumentTypeError(f"expected cases such as 128c8192 or 64n512, got {', '.join(wrong)}")
    return [Cell(int(m[1]), m[2] == "c", int(m[3])) for _, m in found if m]


FIELDS = '"name=value,name=value"'  # how a variant is written


def add_arguments(parser: argparse.ArgumentParser, peers: str | None) -> None:
    """Add the options of a grid: its cases, peers and variants, and how they are timed.

    Args:
        peers: the default of --peers; None: it depends on other options.
    """

    def integers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    parser.add_argument("--cases", type=parse_cases, help="such as 128c8192,64n512; default: the grid")
    parser.add_argument("--head-dims", type=integers, default=HEAD_DIMS, help="comma-separated")
    parser.add_argument("--seqlens", type=integers, default=SEQLENS, help="comma-separated")
    parser.add_argument("--tokens", type=int, help=f"batch * seqlen; default: the grid's, {TOKENS}")
    parser.add_argument("--peers", default=peers, help=f"comma-separated; default: {peers or 'by dtype'}")
    parser.add_argument("--variants", help=f"also check and time these: {FIELDS}, separated by ;")
    parser.add_argument("--load", action="store_true", help="also record clock and power under each contender (0.7 s)")
    add_timing(parser, rounds=5)


def add_timing(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Add the options of `time_in_turns`."""
    parser.add_argument("--rounds", type=int, default=rounds, help="how often each contender is timed in each case")
    parser.add_argument("--warmup-ms", type=int, default=25, help="warm-up of each timing")
    parser.add_argument("--rep-ms", type=int, default=50, help="length of each timing")


def cells(args: argparse.Namespace) -> list[Cell]:
    found = args.cases or [Cell(d, c, s) for d in args.head_dims for c in (False, True) for s in args.seqlens]
    return [cell._replace(tokens=args.tokens) for cell in found]


def split_variants(text: str | None, joint: str = " ") -> list[str]:
    """The variants of a command line, which are separated by semicolons, with `joint` in place of all white space."""
    return [joint.join(words.split()) for words in (text or "").split(";") if words.strip()]


def time_in_turns(calls: Mapping[str, Call], args: argparse.Namespace, seed: int) -> dict[str, list[float]]:
    """Milliseconds of each call in each round; the order changes from round to round."""
    samplers = {name: do_bench_sampler(call, args.warmup_ms, args.rep_ms) for name, call in calls.items()}
    return measure_interleaved(samplers, rounds=args.rounds, seed=seed, warms_up=False).ms


@dataclasses.dataclass
class Results:
    """The rows of a grid in a results file, which is written again after every case, and as tables on the screen.

    Attributes:
        peers: names of the contenders that are not ours. "onepass" is ours with its defaults, all others are variants.
        tolerance: an error above it gets a "!" in the tables.
    """

    report: Report
    peers: Sequence[str] = ()
    dtype: str = "bfloat16"
    direction: Direction = "fwd"
    tolerance: float = 0.05

    def tflops(self, cell: Cell, ms: Sequence[float]) -> float:
        return flops(cell.case(self.dtype, self.direction)) / statistics.median(ms) / 1e9

    def measure(
        self, cell: Cell, calls: Mapping[str, Call], errors: Mapping[str, float], configs: Mapping[str, Any], args: Any
    ) -> None:
        """Time the calls of a case in turns, add its rows, and print a line.

        Args: errors: of each call, and NaN if it has a NaN. configs: the configurations of the calls that have one.
        """
        times = time_in_turns(calls, args, seed=cell.seqlen)
        loads = {name: under_load(call) for name, call in calls.items()} if args.load else {}
        self.add(cell, times, errors, configs, loads)

    def add(
        self,
        cell: Cell,
        times: Mapping[str, list[float]],
        errors: Mapping[str, float],
        configs: Mapping[str, Any],
        loads: Mapping[str, dict[str, str]],
    ) -> None:
        """Add the rows of a case, and print a line."""
        tflops = {name: self.tflops(cell, ms) for name, ms in times.items()}
        names = list(tflops)
        if names != list(next(reversed(self.by_cell().values()), {})):
            print(f"\n{'D':>4} {'causal':>6} {'S':>6} " + " ".join(f"{n[:22]:>9}" for n in names) + "   ratio  best")
        ours = {name: value for name, value in tflops.items() if name not in self.peers}
        best_peer = max((tflops[name] for name in self.peers if name in tflops), default=math.nan)
        ratio = tflops.get("onepass", math.nan) / best_peer
        marks = {name: "" if errors[name] < self.tolerance else "!" for name in names}  # ! = wrong values
        line = " ".join(f"{marks[n]}{tflops[n]:.1f}".rjust(max(9, min(22, len(n)))) for n in names)
        best = max(ours, key=lambda name: ours[name], default="-")
        print(f"{cell.head_dim:>4} {cell.causal!s:>6} {cell.seqlen:>6} {line}   {ratio:5.3f}  {best}", flush=True)
        for name, load in loads.items():
            print(f"    {name:32s} {load}", flush=True)
        for name in names:
            self.report.rows.append(
                {
                    **cell._asdict(),
                    "contender": name,
                    "ms": [round(ms, 5) for ms in times[name]],
                    "tflops": round(tflops[name], 2),
                    "error": finite(errors[name]),
                    "under_load": loads.get(name),
                    "config": dataclasses.asdict(configs[name]) if name in configs else None,
                }
            )
        self.report.save()

    def by_cell(self) -> dict[Cell, dict[str, float]]:
        """TFLOP/s of each contender."""
        found: dict[Cell, dict[str, float]] = {}
        for row in self.report.rows:
            cell = Cell(row["head_dim"], row["causal"], row["seqlen"], row["tokens"])
            found.setdefault(cell, {})[row["contender"]] = self.tflops(cell, row["ms"])
        return found

    def summarize(self) -> None:
        """Print onepass over the grid, compared with the peers, and where there are variants the fastest of ours."""
        speeds = {cell: {name: [value] for name, value in found.items()} for cell, found in self.by_cell().items()}
        summarize("onepass", speeds, "onepass", self.peers)
        for found in speeds.values():
            found["best variant"] = [max(value for name, (value,) in found.items() if name not in self.peers)]
        if any(found["best variant"] != found.get("onepass") for found in speeds.values()):
            summarize("best variant", speeds, "best variant", self.peers)


def summarize(
    title: str, speeds: Mapping[Cell, Mapping[str, Sequence[float]]], ours: str, peers: Sequence[str]
) -> None:
    """Print a contender over the grid: TFLOP/s (ratio to the fastest peer), geometric means and minima of the ratios.

    Args: speeds: TFLOP/s of each contender in several runs, whose medians count.
    """
    entries: dict[Cell, str] = {}
    ratios: dict[Cell, float] = {}
    for cell, found in speeds.items():
        if ours in found:
            entries[cell] = f"{statistics.median(found[ours]):.0f}"
        runs = list(zip(*(found[name] for name in peers if name in found), strict=True))
        if ours in found and runs:
            ratios[cell] = statistics.median(own / max(others) for own, others in zip(found[ours], runs, strict=False))
            entries[cell] += f" ({ratios[cell]:.2f})"
    if not entries:
        return
    seqlens = sorted({cell.seqlen for cell in entries})
    print(f"\n{title}\n| head_dim | causal | {' | '.join(map(str, seqlens))} |")
    print("|" + "---|" * (2 + len(seqlens)))
    for head_dim, causal, tokens in dict.fromkeys((*cell[:2], cell.tokens) for cell in entries):
        row = " | ".join(entries.get(Cell(head_dim, causal, seqlen, tokens), "") for seqlen in seqlens)
        print(f"| {head_dim} | {'yes' if causal else 'no'} | {row} |")
    head_dims = sorted({cell.head_dim for cell in ratios})
    for name, only in {"all": head_dims, **{f"head_dim {d}": [d] for d in head_dims}}.items() if ratios else ():
        values = {cell: ratio for cell, ratio in ratios.items() if cell.head_dim in only}
        mean = math.exp(statistics.mean(map(math.log, values.values())))
        least = min(values, key=lambda cell: values[cell])
        where = f"{least.head_dim}{' causal' if least.causal else ''} {least.seqlen}"
        print(f"{name}: geometric mean {mean:.3f}, least {values[least]:.3f} ({where}), {len(values)} cases")


def results_of(calls: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What each call returns. A call that does not run is left out, and the reason is printed."""
    found = {}
    for name, call in calls.items():
        try:
            found[name] = call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:  # a kernel compiler has errors of its own
            print(f"{name} not measured: {type(error).__name__}: {str(error)[:300]}")
    return found

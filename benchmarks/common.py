"""What the benchmarks of the Hopper kernels share: the paper's grid, contenders in turns, tables and results files.

The grid is that of the FlashAttention-3 paper, section 4.1: 16k tokens in all, hidden size 2048. TFLOP/s counts
4 * seqlen^2 * head_dim * heads * batch for a forward pass, halved when causal, and 2.5 times that for a backward pass.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib.metadata
import json
import math
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import onepass

TOKENS, HIDDEN = 16384, 2048
HEAD_DIMS = [64, 128, 256]
SEQLENS = [512, 1024, 2048, 4096, 8192, 16384]
PACKAGES = ("fa3-fwd", "flash-attn-4", "nvidia-cutlass-dsl")

Call = Callable[[], object]


class Cell(NamedTuple):
    """One case of the grid."""

    head_dim: int
    causal: bool
    seqlen: int
    tokens: int | None = None  # None: the grid's

    @property
    def batch(self) -> int:
        return max(1, (self.tokens or TOKENS) // self.seqlen)

    @property
    def heads(self) -> int:
        return HIDDEN // self.head_dim

    @property
    def flops(self) -> float:
        """Of the forward pass."""
        return 4 * self.seqlen**2 * self.head_dim * self.heads * self.batch * (0.5 if self.causal else 1.0)


def parse_cases(text: str) -> list[Cell]:
    """128c8192,64n512 -> [Cell(128, True, 8192), Cell(64, False, 512)]."""
    found = [(case, re.fullmatch(r"(\d+)([cn])(\d+)", case)) for case in text.split(",")]
    if wrong := [case for case, match in found if match is None]:
        raise argparse.ArgumentTypeError(f"expected cases such as 128c8192 or 64n512, got {', '.join(wrong)}")
    return [Cell(int(m[1]), m[2] == "c", int(m[3])) for _, m in found if m]


def add_arguments(parser: argparse.ArgumentParser, peers: str, out: str) -> None:
    """The options of a grid: its cases and peers, how they are timed, where the results go."""

    def integers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-grid", action="store_true")
    parser.add_argument("--cases", type=parse_cases, help="such as 128c8192,64n512; default: the grid")
    parser.add_argument("--head-dims", type=integers, default=HEAD_DIMS)
    parser.add_argument("--seqlens", type=integers, default=SEQLENS)
    parser.add_argument("--tokens", type=int, help=f"batch * seqlen; default: the grid's, {TOKENS}")
    parser.add_argument("--peers", default=peers)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", action="store_true", help="clock and power of each contender, 0.7 s each")
    parser.add_argument("--warmup-ms", type=int, default=25)
    parser.add_argument("--rep-ms", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "."), out))


def cells(args: argparse.Namespace) -> list[Cell]:
    found = args.cases or [Cell(d, c, s) for d in args.head_dims for c in (False, True) for s in args.seqlens]
    return [cell._replace(tokens=args.tokens) for cell in found]


# ---------------------------------------------------------------- compiling


def compile_all(jobs: Sequence[Any], compile_one: Callable[[Any], float]) -> None:
    """Compile into the disk cache with one process per core; `compile_one` tells the seconds that a job took."""
    workers = max(1, min(len(jobs), (os.cpu_count() or 2) - 1, 24))
    started = time.perf_counter()
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        seconds = list(pool.map(compile_one, jobs))
    wall = time.perf_counter() - started
    mean = statistics.mean(seconds) if seconds else 0.0
    print(f"compiled {len(jobs)} kernels in {wall:.1f} s with {workers} processes, {mean:.1f} s each", flush=True)


# ---------------------------------------------------------------- timing


def median_ms(call: Call, warmup_ms: int, rep_ms: int) -> float:
    """Of triton's do_bench, which flushes the L2 cache before each run."""
    from triton.testing import do_bench

    return do_bench(call, warmup=warmup_ms, rep=rep_ms, return_mode="median")


def time_in_turns(calls: Mapping[str, Call], args: argparse.Namespace, seed: int) -> dict[str, list[float]]:
    """Milliseconds of each call in each round.

    The chip runs at its power limit: who comes after a frugal contender finds a higher clock. Each round starts
    elsewhere and every other one goes backwards, so that neighbours change.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(seed).sample(list(calls), len(calls))
    for turn in range(args.rounds):
        start = turn * len(order) // args.rounds
        in_turn = order[start:] + order[:start]
        for name in in_turn[:: -1 if turn % 2 else 1]:
            times[name].append(median_ms(calls[name], args.warmup_ms, args.rep_ms))
    return times


def under_load(call: Call, seconds: float = 0.7) -> dict[str, str]:
    """Clock, power and what holds the clock down, after `seconds` of nothing but this call."""
    names = "clocks.sm,power.draw.instant,clocks_event_reasons.active"
    ended = time.perf_counter() + seconds
    while time.perf_counter() < ended:
        for _ in range(20):
            call()
        torch.cuda.synchronize()
    for _ in range(400):  # still to be done when the clock is read
        call()
    values = output("nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader").split(", ")
    torch.cuda.synchronize()
    return dict(zip(names.split(","), values, strict=False))


# ---------------------------------------------------------------- results


def output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def circumstances() -> dict[str, Any]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "driver_clocks_power": output(
            "nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit", "--format=csv,noheader"
        ),
        "commit": output("git", "rev-parse", "HEAD"),
        "onepass": onepass.__version__,
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclasses.dataclass
class Results:
    """A results file, written again after every case, and the same on the screen.

    Attributes:
        peers: names of the contenders that are not ours. "onepass" is ours with its defaults, all others variants.
        work: FLOPs of the pass over those of a forward pass.
        tolerance: an error above it gets a "!" in the tables.
    """

    about: dict[str, Any]
    path: Path
    peers: Sequence[str] = ()
    work: float = 1.0
    tolerance: float = 0.05
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    _names: list[str] = dataclasses.field(default_factory=list)

    def save(self) -> None:
        self.path.write_text(json.dumps({"circumstances": self.about, "rows": self.rows}, indent=1))

    def tflops(self, cell: Cell, ms: Sequence[float]) -> float:
        return self.work * cell.flops / statistics.median(ms) / 1e9

    def add(
        self,
        cell: Cell,
        times: Mapping[str, list[float]],
        errors: Mapping[str, float],
        configs: Mapping[str, Any],
        loads: Mapping[str, dict[str, str]],
    ) -> None:
        """A line and rows for one case."""
        tflops = {name: self.tflops(cell, ms) for name, ms in times.items()}
        names = list(tflops)
        if names != self._names:
            self._names = names
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
            self.rows.append(
                {
                    **cell._asdict(),
                    "contender": name,
                    "ms": [round(ms, 5) for ms in times[name]],
                    "tflops": round(tflops[name], 2),
                    "error": errors[name],
                    "under_load": loads.get(name),
                    "config": dataclasses.asdict(configs[name]) if name in configs else None,
                }
            )
        self.save()

    def by_cell(self) -> dict[Cell, dict[str, float]]:
        """TFLOP/s of each contender."""
        found: dict[Cell, dict[str, float]] = {}
        for row in self.rows:
            cell = Cell(row["head_dim"], row["causal"], row["seqlen"], row["tokens"])
            found.setdefault(cell, {})[row["contender"]] = self.tflops(cell, row["ms"])
        return found

    def ratios(self) -> dict[str, dict[Cell, float]]:
        """Speed over the best peer of each case: of onepass, and of the best of it and its variants."""
        found: dict[str, dict[Cell, float]] = {"onepass": {}, "best variant": {}}
        for cell, tflops in self.by_cell().items():
            peer = max((tflops[name] for name in self.peers if name in tflops), default=0.0)
            ours = {name: value for name, value in tflops.items() if name not in self.peers}
            if peer and "onepass" in ours:
                found["onepass"][cell] = ours["onepass"] / peer
                found["best variant"][cell] = max(ours.values()) / peer
        return found

    def summarise(self) -> None:
        """onepass over the grid: TFLOP/s (ratio to the best peer), the geometric mean of the ratios and the least."""
        ratios = self.ratios()
        tflops = {cell: values["onepass"] for cell, values in self.by_cell().items() if "onepass" in values}
        seqlens = sorted({cell.seqlen for cell in tflops})
        print(f"\n| head_dim | causal | {' | '.join(map(str, seqlens))} |\n|{'---|' * (2 + len(seqlens))}")
        for head_dim, causal, tokens in dict.fromkeys((*cell[:2], cell.tokens) for cell in tflops):
            entries = []
            for cell in (Cell(head_dim, causal, seqlen, tokens) for seqlen in seqlens):
                ratio = f" ({ratios['onepass'][cell]:.2f})" if cell in ratios["onepass"] else ""
                entries.append(f"{tflops[cell]:.0f}{ratio}" if cell in tflops else "")
            print(f"| {head_dim} | {'yes' if causal else 'no'} | {' | '.join(entries)} |")
        for name, values in ratios.items():
            if values and (name == "onepass" or values != ratios["onepass"]):
                mean = math.exp(statistics.mean(math.log(ratio) for ratio in values.values()))
                least = min(values, key=lambda cell: values[cell])
                where = f"head_dim {least.head_dim}{' causal' if least.causal else ''}, seqlen {least.seqlen}"
                print(
                    f"{name}: geometric mean {mean:.3f} of the best peer, least {values[least]:.3f} ({where}), "
                    f"{len(values)} cases"
                )

"""Attention over the ranks of a process group, compared with one device and the peers.

    torchrun --nproc-per-node 4 -m onepass.cli bench context-parallel --json context-parallel.json
    torchrun --nproc-per-node 4 -m benchmarks context_parallel --cases causal,64/8 --out part.json
    torchrun --nproc-per-node 2 -m benchmarks context_parallel --smoke --device cpu

On GPUs each rank takes the GPU of its LOCAL_RANK and NCCL; on a CPU gloo. A row has, for each contender:

- ms: the time of the slowest rank. The contenders take turns, and the median over the rounds counts.
- E: T1 / (P TP), where T1 is the time of one device on the whole sequence (all ranks compute it at the same time, and
  the fastest one counts) and TP is ms.
- E_prime: the time of the slowest rank's own attention calls, on keys that have already arrived, over TP. It is 1 where
  nothing but these calls takes time.
- error: how far the results are from those of one device, by root mean squares, in the worst tensor of the worst rank.
- peak_bytes: the inputs and the most further memory, on the rank that needs most, without the memory that "copies"
  publish; peak_limit_bytes: the peak_bytes of one device divided by P, and two of 16 chunks of all keys and values.
- received_bytes: the most bytes that a rank receives, by the estimate of the plan.

onepass has a contender for each engine, and on GPUs also one that reads rows by copies (the plan's transport). With
--graphs each of them is timed a second time as a CUDA graph, whose replays take nothing of the host's time. A row's
"skipped" says why a peer does not take the case. Rank 0 alone prints, and writes the results file.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.testing.machine import describe
from onepass.testing.results import Report, Row, reason_of
from onepass.tuning.timing import Samples, cpu_sampler, measure_interleaved

from ..harness.suite import Args, Suite, chosen
from .context_parallel_cases import ContextCase, cases, smoke_cases
from .context_parallel_contenders import Contender, LocalWork, Work, one_device, onepass_contenders, peers

TOLERANCE = 0.03  # of the rough comparison with one device, relative to the root mean square
CHUNKS = 16
SAMPLE_MS = 60.0
ONE_DEVICE = "one device"


# ---------------------------------------------------------------- ranks


@dataclass
class Ranks:
    """This process among the processes of the group."""

    device: torch.device
    rank: int
    size: int

    @classmethod
    def join(cls, device_type: str) -> Ranks:
        """Initialize the process group that torchrun describes. Raises: SystemExit without torchrun."""
        if not dist.is_initialized():
            if "LOCAL_RANK" not in os.environ:
                raise SystemExit(
                    "context-parallel: expected a process of torchrun, got none: "
                    "torchrun --nproc-per-node 4 -m onepass.cli bench context-parallel"
                )
            if device_type == "cuda":
                device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
                torch.cuda.set_device(device)
                dist.init_process_group("nccl", device_id=device)
            else:
                dist.init_process_group("gloo")
        index = f":{torch.cuda.current_device()}" if device_type == "cuda" else ""
        return cls(torch.device(device_type + index), dist.get_rank(), dist.get_world_size())

    def reduced(self, value: float, op: Any) -> float:
        """A value of all ranks, equal on all of them."""
        found = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=op)
        return float(found)

    def greatest(self, value: float) -> float:
        return self.reduced(value, dist.ReduceOp.MAX)

    def first_reason(self, reason: str | None) -> str | None:
        """Why a rank cannot go on; None if all of them can."""
        found: list[str | None] = [None] * self.size
        dist.all_gather_object(found, reason)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(found) if text), None)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.greatest(0.0)


# ---------------------------------------------------------------- one contender


@dataclass
class Prepared:
    """A contender whose calls are timed.

    Attributes:
        by_fastest: whether a sample is the time of the fastest rank, not of the slowest.
    """

    work: Work
    surroundings: Callable[[], AbstractContextManager]
    by_fastest: bool = False
    calls: int = 1
    facts: dict[str, Any] = field(default_factory=dict)

    def sample(self, ranks: Ranks) -> float:
        """Milliseconds of a call, equal on all ranks."""
        with self.surroundings():
            ranks.wait()
            if ranks.device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(self.calls):
                    self.work()
                end.record()
                end.synchronize()
                ms = start.elapsed_time(end)
            else:
                ms = cpu_sampler(lambda: [self.work() for _ in range(self.calls)])()
        op = dist.ReduceOp.MIN if self.by_fastest else dist.ReduceOp.MAX
        return ranks.reduced(ms, op) / self.calls

    def warm_up(self, ranks: Ranks, sample_ms: float) -> None:
        """Make the first calls, and choose how many calls a sample has, the same number on all ranks."""
        self.sample(ranks)
        self.calls = max(1, min(50, round(sample_ms / max(1e-3, self.sample(ranks)))))


def step_of(contender: Contender, case: ContextCase, tensors: Sequence[Tensor]) -> tuple[Work, int]:
    """A function that computes a case, and the bytes of its inputs. It returns out, or out, dq, dk and dv."""
    q, k, v, dout = (contender.shard(t) for t in tensors)
    if not case.has_backward:

        def forward() -> list[Tensor]:
            with torch.no_grad():
                return [contender.attend(q, k, v)]

        return forward, sum(t.nbytes for t in (q, k, v))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]

    def both() -> list[Tensor]:
        out = contender.attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    return both, sum(t.nbytes for t in (q, k, v, dout))


class Captured:
    """A CUDA graph of one call. Calling it replays the graph, and returns the graph's tensors.

    Attributes:
        work: kept because the graph reads its inputs. Capturing another graph gives freed memory back to the driver.
    """

    def __init__(self, work: Work):
        self.work = work
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.found = work()

    def __call__(self) -> Any:
        self.graph.replay()
        return self.found


def prepare(contender: Contender, case: ContextCase, tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> Prepared:
    """Check a contender, and measure its memory, on this rank. Only the contender's own calls send messages here."""
    work, input_bytes = step_of(contender, case, tensors)
    if contender.is_captured:
        work = Captured(work)
    prepared = Prepared(work, contender.surroundings)
    with contender.surroundings():
        found = work()
    pairs = zip(found, (contender.shard(t) for t in expected), strict=True)
    prepared.facts["error"] = max(relative_error(a, b) for a, b in pairs)
    del found
    if tensors[0].is_cuda and not contender.is_captured:
        with contender.surroundings():
            prepared.facts["peak_bytes"] = input_bytes + extra_bytes(work)
    if contender.received_bytes is not None:
        forward, backward = contender.received_bytes
        prepared.facts["received_bytes"] = forward + backward * case.has_backward
    return prepared


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The root mean square of the difference, relative to that of what is expected; 1e9 if it is not finite."""
    if not expected.numel():
        return 0.0
    error = (found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30)
    return min(float(error.nan_to_num(1e9)), 1e9)


def extra_bytes(work: Work) -> int:
    """The most memory of the GPU that a call allocates."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# ---------------------------------------------------------------- one case


def make_tensors(case: ContextCase, ranks: Ranks) -> list[Tensor]:
    """q, k, v and dout of all tokens, (1, tokens, heads, head_dim), equal on all ranks."""
    generator = torch.Generator(ranks.device).manual_seed(0)
    heads = case.heads_q, case.heads_kv, case.heads_kv, case.heads_q
    found = []
    for count in heads:
        t = torch.randn(
            1, case.tokens, count, case.head_dim, device=ranks.device, dtype=torch.bfloat16, generator=generator
        )
        dist.broadcast(t, 0)
        found.append(t)
    return found


def measured(case: ContextCase, args: Args, ranks: Ranks) -> Row:
    """The row of a case. All ranks call this and return equal rows."""
    tensors = make_tensors(case, ranks)
    row: Row = {
        "case": case.label,
        **asdict(case),
        "ranks": ranks.size,
        "documents": len(case.offsets) - 1,
        "contenders": {},
        "skipped": {},
        "failed": {},
    }
    whole = one_device(case)
    expected = [t if t.dim() == 4 else t[None] for t in step_of(whole, case, tensors)[0]()]
    prepared: dict[str, Prepared] = {}
    contenders, row["planned"] = onepass_contenders(case, ranks.device)
    if args.graphs:
        contenders += [replace(one, name=f"{one.name}, graph", is_captured=True) for one in contenders]
    row["skipped"], others = peers(case, ranks.device, args.peers)
    for contender in (whole, *contenders, *others):
        reason = None
        try:
            prepared[contender.name] = prepare(contender, case, tensors, expected)
        except Exception as error:
            reason = reason_of(error)
        reason = ranks.first_reason(reason)
        if reason is None:
            facts = prepared[contender.name].facts
            facts |= {name: ranks.greatest(facts[name]) for name in ("error", "peak_bytes") if name in facts}
            if facts["error"] > TOLERANCE:
                reason = f"expected an error up to {TOLERANCE} compared with one device, got {facts['error']:.3g}"
        if reason is not None:
            prepared.pop(contender.name, None)
            row["failed"][contender.name] = reason
    del expected
    if ONE_DEVICE in row["failed"]:
        return row
    prepared[ONE_DEVICE].by_fastest = True
    locals_of = {}
    for contender in contenders:
        if contender.name in prepared and contender.plan is not None:
            name = locals_of[contender.name] = f"own calls of {contender.plan.engine}"
            if name in prepared:
                continue
            work = LocalWork(contender.plan, case.has_backward, [contender.shard(t) for t in tensors])
            prepared[name] = Prepared(work, contender.surroundings)
    del tensors
    for one in prepared.values():
        one.warm_up(ranks, args.sample_ms)
    samplers = {name: (lambda one=one: one.sample(ranks)) for name, one in prepared.items()}
    samples = measure_interleaved(samplers, rounds=args.rounds, seed=case.tokens, warms_up=False)
    fill(row, case, samples, prepared, locals_of, ranks.size)
    return row


def fill(
    row: Row,
    case: ContextCase,
    samples: Samples,
    prepared: dict[str, Prepared],
    locals_of: dict[str, str],
    num_ranks: int,
) -> None:
    """Write times, shares and bytes of the contenders into the row."""
    alone_ms = samples.spread(ONE_DEVICE).median
    peak = prepared[ONE_DEVICE].facts.get("peak_bytes")
    if peak is not None:
        gathered = 2 * case.tokens * case.heads_kv * case.head_dim * 2
        row["peak_limit_bytes"] = peak // num_ranks + 2 * gathered // CHUNKS
    for name, one in prepared.items():
        if name in locals_of.values():
            continue
        spread = samples.spread(name)
        devices = 1 if name == ONE_DEVICE else num_ranks
        entry = {
            "ms": round(spread.median, 4),
            "p20_ms": round(spread.p20, 4),
            "p80_ms": round(spread.p80, 4),
            "tflops_per_device": round(case.flops / devices / spread.median / 1e9, 3),
            **one.facts,
        }
        if name != ONE_DEVICE:
            entry["E"] = round(alone_ms / (num_ranks * spread.median), 4)
        if name in locals_of:
            own_ms = samples.spread(locals_of[name]).median
            entry |= {"own_calls_ms": round(own_ms, 4), "E_prime": round(own_ms / spread.median, 4)}
        row["contenders"][name] = entry


def in_short(row: Row) -> list[str]:
    """A row as lines of text."""
    lines = [f"{row['case']} on {row['ranks']} ranks, planned: {row['planned']}"]
    for name, entry in row["contenders"].items():
        shares = "".join(f"  {key} {entry[key]:.3f}" for key in ("E", "E_prime") if key in entry)
        peak = f"  {entry['peak_bytes'] / 2**20:.0f} MiB" if "peak_bytes" in entry else ""
        lines.append(
            f"  {name:34s} {entry['ms']:10.3f} ms {entry['tflops_per_device']:8.3g} TFLOP/s a device{shares}{peak}"
        )
    lines += [f"  FAILED {name}: {reason}" for name, reason in row["failed"].items()]
    if row["skipped"]:
        lines.append(f"  not measured: {', '.join(row['skipped'])}")
    return lines


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default="", help="words; cases whose names have all of them; default: all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=7, help="how often each contender is timed in each case")
    parser.add_argument("--sample-ms", type=float, default=SAMPLE_MS, help="length of each timing")
    parser.add_argument("--peers", type=int, default=1, choices=(0, 1), help="0: onepass and one device alone")
    parser.add_argument("--graphs", action="store_true", help="on GPUs: time CUDA graphs of onepass's calls, too")
    parser.add_argument("--smoke", action="store_true", help="a few small cases")


def start(args: Args, parser: argparse.ArgumentParser) -> dict[str, Any]:
    args.ranks = ranks = Ranks.join(args.device)
    if args.graphs and ranks.device.type != "cuda":
        parser.error(f"--graphs: expected GPUs, got --device {args.device}")
    args.chosen = chosen(smoke_cases(ranks.size) if args.smoke else cases(ranks.size), args.cases, all, parser)
    if ranks.rank > 0:
        args.out = None
    header = describe(str(ranks.device)) | {"suite": "context-parallel", "ranks": ranks.size}
    return header | {"backend": dist.get_backend(), "rounds": args.rounds}


def measure(case: ContextCase, args: Args, report: Report) -> None:
    row = measured(case, args, args.ranks)
    report.add(row)
    if args.ranks.rank == 0:
        print("\n".join(in_short(row)), flush=True)
    if args.ranks.device.type == "cuda":
        torch.cuda.empty_cache()


def is_wrong(row: Row) -> bool:
    return any(name.startswith("onepass") or name == ONE_DEVICE for name in row["failed"])


SUITE = Suite(
    "context_parallel",
    __doc__,
    add_options,
    start,
    lambda args: args.chosen,
    measure,
    finish=lambda args, report: dist.destroy_process_group(),
    is_wrong=is_wrong,
    prints_header=False,
)

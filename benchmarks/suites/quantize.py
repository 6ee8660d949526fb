"""The time of quantize_fp8, as a share of the bandwidth of a copy in the same run; its CPU time and launches.

    python -m benchmarks quantize --out quantize.json

The tensors have 16k tokens of hidden size 2048 in bfloat16, so 64 MB each. Calls are captured in a CUDA graph, several
in a row on tensors that take turns, so that none of these is in the L2 cache; times are medians of replays, per call. A
copy moves as many bytes as are read and written for one tensor. CPU time is the time of the calling thread, on short
tensors, where no call waits for the GPU; calls of attention are measured next to quantize_fp8. The results go to --out
as JSON: "rows" and "calls".
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

import onepass
from onepass.kernels.compiler.compile import CompileRequest
from onepass.kernels.launch import quantize as launch
from onepass.ops import quantize
from onepass.problem import AttentionInputs, AttentionProblem, Mask
from onepass.quantization import layout
from onepass.testing.machine import describe
from onepass.testing.results import Report, Row
from onepass.tuning.timing import CudaSampler

from ..harness.grid import HIDDEN, TOKENS
from ..harness.suite import Args, Suite
from ..harness.timing import host_us

DEVICE = "cuda"
REPLAYS, SETS = 30, 4
SHORT = 128  # tokens of a call whose CPU time is measured
BATCH = 4
BF16 = torch.bfloat16

Call = Callable[[], object]


def median_us(calls: Sequence[Call], replays: int = REPLAYS) -> float:
    """Microseconds of one call on the GPU, where the calls take turns."""
    sampler = CudaSampler(calls)
    return 1e3 * statistics.median(sampler() for _ in range(replays))


def num_launches(call: Call) -> int:
    """The number of kernels of a call, as a graph captures it."""
    from cuda.bindings import driver

    call()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    raw = driver.CUgraph(graph.raw_cuda_graph())
    *_, count = driver.cuGraphGetNodes(raw)
    _, nodes, _ = driver.cuGraphGetNodes(raw, count)
    kinds = [driver.cuGraphNodeGetType(node)[1] for node in nodes]
    return kinds.count(driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL)


def copy_gb_s() -> float:
    """GB/s of a copy that reads, and writes, 1.5 bytes for every 16-bit number that a kernel reads."""
    count = TOKENS * HIDDEN * 3 // 8  # numbers of 4 bytes
    pairs = [torch.zeros(2, count, device=DEVICE) for _ in range(SETS)]
    copies: list[Call] = [functools.partial(pair[1].copy_, pair[0]) for pair in pairs]
    return 8 * count / median_us(copies) / 1e3


def num_bytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


class Contender(NamedTuple):
    """Calls that do the same work on different tensors.

    Attributes:
        moved: bytes read and written by a call, each once.
        is_torch: whether a call is many kernels of torch, so that few replays are enough.
    """

    name: str
    calls: list[Call]
    moved: int
    is_torch: bool = False


def by_kernel(inputs: AttentionInputs, seed: int | None, keys_last: bool) -> launch.Launch:
    options: dict[str, Any] = {"softmax_scale": 1.0, "mask": Mask(), "softcap": None, "deterministic": False}
    return launch.prepare(AttentionProblem.of(inputs, **options), inputs.q.device, seed, keys_last)


def contenders(head_dim: int) -> list[Contender]:
    shape = BATCH, TOKENS // BATCH, HIDDEN // head_dim, head_dim
    sets = []
    for _ in range(SETS):
        q, k, v = (torch.randn(shape, device=DEVICE, dtype=BF16) for _ in range(3))
        sets.append(AttentionInputs(q, k, v))
    *stored, descales = by_kernel(sets[0], 0, True)(sets[0])
    whole = num_bytes(*sets[0][:3], *stored, *descales)
    rounded = [by_kernel(s, 0, False)(s)[2] for s in sets]

    def calls_with(function: Callable[..., object], arguments: list) -> list[Call]:
        return [functools.partial(function, argument) for argument in arguments]

    def launches(seed: int | None, keys_last: bool) -> list[Call]:
        return calls_with(by_kernel(sets[0], seed, keys_last), sets)

    return [
        Contender("quantize_fp8", calls_with(lambda s: onepass.quantize_fp8(*s[:3]), sets), whole),
        Contender("not rotated", launches(None, True), whole),
        Contender("v as it lies", launches(0, False), whole),
        Contender(
            "e4m3 to keys last",
            calls_with(lambda t: launch.keys_last(t, None), rounded),
            2 * num_bytes(rounded[0]),
        ),
        Contender(
            "quantize_fp8 in torch",
            calls_with(lambda s: quantize._quantize_in_torch(s, "block", 0, None, None, None), sets[:1]),
            whole,
            True,
        ),
        Contender(
            "keys_last in torch",
            calls_with(lambda t: layout.keys_last_in_torch(t, None), rounded[:1]),
            2 * num_bytes(rounded[0]),
            True,
        ),
    ]


@dataclass
class Results(Report):
    """A results file with the CPU time and launches of calls next to its rows."""

    calls: list[Row] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"calls": self.calls}


def measure(case: tuple[str, int], args: Args, report: Report) -> None:
    assert isinstance(report, Results)
    what, head_dim = case
    if what == "kernels":
        report.rows += measure_kernels(head_dim, report.header["copy_gb_s"])
    else:
        report.calls += measure_calls(head_dim)
    report.save()


def measure_kernels(head_dim: int, copied_gb_s: float) -> list[Row]:
    rows: list[Row] = []
    for name, calls, moved, is_torch in contenders(head_dim):
        us = median_us(calls, 5 if is_torch else REPLAYS)
        row = {"head_dim": head_dim, "what": name, "us": round(us, 2), "share_of_copy": moved / us / 1e3 / copied_gb_s}
        row["gb_s"] = moved / us / 1e3
        rows.append(row)
        print(f"{head_dim:>8}  {name:22s} {us:8.1f} {row['gb_s']:8.0f} {row['share_of_copy']:8.2f}", flush=True)
    return rows


def measure_calls(head_dim: int) -> list[Row]:
    """Measure CPU time and launches of calls, on tensors that take the GPU no time."""
    shape = 1, SHORT, HIDDEN // head_dim, head_dim
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=BF16) for _ in range(3))
    quantized = onepass.quantize_fp8(q, k, v)
    calls: dict[str, Call] = {
        "quantize_fp8": lambda: onepass.quantize_fp8(q, k, v),
        "attention(QuantizedQKV)": lambda: onepass.attention(quantized, causal=True),
        "attention, precision=fp8": lambda: onepass.attention(q, k, v, precision="fp8", causal=True),
        "attention in bfloat16": lambda: onepass.attention(q, k, v, causal=True),
    }
    rows: list[Row] = []
    for name, call in calls.items():
        row = {"head_dim": head_dim, "what": name, "launches": num_launches(call), "cpu_us": host_us(call, 200)}
        rows.append(row)
        print(f"{head_dim:>8}  {name:26s} {row['cpu_us']:8.1f} us {row['launches']:4d} launches", flush=True)
    return rows


def kernels(head_dims: list[int]) -> list[launch.Kernel | launch.LayoutKernel]:
    return [
        kernel
        for d in head_dims
        for kernel in (
            launch.Kernel(BF16, d, d, True, rotates=True),
            launch.Kernel(BF16, d, d, True),
            launch.Kernel(BF16, d, d, False, rotates=True),
            launch.LayoutKernel(d),
        )
    ]


def requests(args: Args) -> list[CompileRequest]:
    arch = launch.arch_of(torch.device(DEVICE))
    return [launch.compile_request(kernel, arch) for kernel in kernels(args.head_dims)]


def add_options(parser: argparse.ArgumentParser) -> None:
    head_dims: dict[str, Any] = {"type": lambda text: [int(d) for d in text.split(",")], "default": [64, 128, 256]}
    parser.add_argument("--head-dims", **head_dims, help="comma-separated")


def start(args: Args, parser: argparse.ArgumentParser) -> dict[str, Any]:
    torch.cuda.set_stream(torch.cuda.Stream())  # graphs cannot be captured on the default one
    facts = {
        "suite": "quantize",
        "tokens": TOKENS,
        "hidden": HIDDEN,
        "batch": BATCH,
        "copy_gb_s": copy_gb_s(),
        "tokens_of_calls": SHORT,
    }
    print(f"{'head_dim':>8}  {'what':22s} {'us':>8} {'GB/s':>8} {'of copy':>8}")
    return describe(DEVICE) | facts


SUITE = Suite(
    "quantize",
    __doc__,
    add_options,
    start,
    lambda args: itertools.product(("kernels", "calls"), args.head_dims),
    measure,
    requests=requests,
    out="quantize.json",
    report=Results,
)

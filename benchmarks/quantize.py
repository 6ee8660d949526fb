"""Time of quantize_fp8, as a share of the bandwidth of a copy measured in the same run; its CPU time and launches.

    python benchmarks/quantize.py --out quantize.json

16k tokens of hidden size 2048 in bfloat16, so 64 MB a tensor. Calls are captured in a CUDA graph, CALLS in a row on
tensors that take turns, so that none of them is in the L2 cache; times are medians of replays, per call. A copy moves
as many bytes as is read and written for one tensor. CPU time is that of the calling thread, on short tensors, where no
call waits for the GPU; with it come calls of attention.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import HIDDEN, TOKENS, circumstances, compile_all

import onepass
from onepass.kernels.launch import quantize as launch
from onepass.ops import quantize
from onepass.problem import AttentionInputs, AttentionProblem, Mask
from onepass.quantization import layout

CALLS, REPLAYS, SETS = 12, 30, 4
SHORT = 128  # tokens of a call whose CPU time is measured
BATCH = 4
BF16 = torch.bfloat16

Call = Callable[[], object]


def median_us(run: Call, count: int) -> float:
    """On the GPU, after a fifth more that do not count."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count + count // 5 + 1)]
    for before, after in events:
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in events[-count:]) * 1e3


def graph_us(calls: list[Call]) -> float:
    """Of one call, the calls in turns."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            calls[i % len(calls)]()
    return median_us(graph.replay, REPLAYS) / CALLS


def cpu_us(call: Call, count: int = 200) -> float:
    """What Python spends on a call."""
    torch.cuda.synchronize()
    started = time.thread_time()
    for _ in range(count):
        call()
    spent = time.thread_time() - started
    torch.cuda.synchronize()
    return spent / count * 1e6


def num_launches(call: Call) -> int:
    """Kernels of a call, as a graph captures it."""
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
    """Read and written by a copy, for every 16-bit number that a kernel reads 1.5 bytes each."""
    count = TOKENS * HIDDEN * 3 // 8  # of 4 bytes
    pairs = [torch.zeros(2, count, device="cuda") for _ in range(SETS)]
    return 8 * count / graph_us([lambda p=p: p[1].copy_(p[0]) for p in pairs]) / 1e3


def num_bytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


class Contender(NamedTuple):
    name: str
    calls: list[Call]
    moved: int  # bytes read and written, each once
    is_torch: bool = False  # many kernels, timed one call after the other


def by_kernel(inputs: AttentionInputs, seed: int | None, keys_last: bool) -> launch.Launch:
    options: dict[str, Any] = {"softmax_scale": 1.0, "mask": Mask(), "softcap": None, "deterministic": False}
    return launch.prepare(AttentionProblem.of(inputs, **options), inputs.q.device, seed, keys_last)


def contenders(head_dim: int) -> list[Contender]:
    shape = BATCH, TOKENS // BATCH, HIDDEN // head_dim, head_dim
    sets = [AttentionInputs(*(torch.randn(shape, device="cuda", dtype=BF16) for _ in range(3))) for _ in range(SETS)]
    *stored, descales = by_kernel(sets[0], 0, True)(sets[0])
    whole = num_bytes(*sets[0][:3], *stored, *descales)
    rounded = [by_kernel(s, 0, False)(s)[2] for s in sets]

    def of_each(function: Callable[..., object], of: list) -> list[Call]:
        return [lambda x=x: function(x) for x in of]

    def launches(seed: int | None, keys_last: bool) -> list[Call]:
        return of_each(by_kernel(sets[0], seed, keys_last), sets)

    return [
        Contender("quantize_fp8", of_each(lambda s: onepass.quantize_fp8(*s[:3]), sets), whole),
        Contender("not rotated", launches(None, True), whole),
        Contender("v as it lies", launches(0, False), whole),
        Contender(
            "e4m3 to keys last",
            of_each(lambda t: launch.keys_last(t, None), rounded),
            2 * num_bytes(rounded[0]),
        ),
        Contender(
            "quantize_fp8 in torch",
            of_each(lambda s: quantize._quantize_in_torch(s, "block", 0, None, None, None), sets[:1]),
            whole,
            True,
        ),
        Contender(
            "keys_last in torch",
            of_each(lambda t: layout.keys_last_in_torch(t, None), rounded[:1]),
            2 * num_bytes(rounded[0]),
            True,
        ),
    ]


def measure(head_dim: int, of_copy: float) -> list[dict[str, Any]]:
    rows = []
    for name, calls, moved, is_torch in contenders(head_dim):
        us = median_us(calls[0], 5) if is_torch else graph_us(calls)
        row = {"head_dim": head_dim, "what": name, "us": round(us, 2), "share_of_copy": moved / us / 1e3 / of_copy}
        row["gb_s"] = moved / us / 1e3
        rows.append(row)
        print(f"{head_dim:>8}  {name:22s} {us:8.1f} {row['gb_s']:8.0f} {row['share_of_copy']:8.2f}", flush=True)
    return rows


def measure_calls(head_dim: int) -> list[dict[str, Any]]:
    """CPU time and launches of calls that Python makes, on tensors that take the GPU no time."""
    shape = 1, SHORT, HIDDEN // head_dim, head_dim
    q, k, v = (torch.randn(shape, device="cuda", dtype=BF16) for _ in range(3))
    quantized = onepass.quantize_fp8(q, k, v)
    calls: dict[str, Call] = {
        "quantize_fp8": lambda: onepass.quantize_fp8(q, k, v),
        "attention(QuantizedQKV)": lambda: onepass.attention(quantized, causal=True),
        "attention, precision=fp8": lambda: onepass.attention(q, k, v, precision="fp8", causal=True),
        "attention in bfloat16": lambda: onepass.attention(q, k, v, causal=True),
    }
    rows = []
    for name, call in calls.items():
        row = {"head_dim": head_dim, "what": name, "launches": num_launches(call), "cpu_us": cpu_us(call)}
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


def compile_one(kernel: launch.Kernel | launch.LayoutKernel) -> float:
    started = time.perf_counter()
    launch.kernel_of(kernel, launch.arch_of(torch.device("cuda")))
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=lambda text: [int(d) for d in text.split(",")], default=[64, 128, 256])
    parser.add_argument("--threads", type=int, help="of a thread block; default: what quantize_fp8 chooses")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "."), "quantize.json"))
    args = parser.parse_args()
    if args.threads:
        launch.default_threads = lambda head_dim: args.threads
    compile_all([k._replace(num_threads=args.threads) for k in kernels(args.head_dims)], compile_one)
    of_copy = copy_gb_s()
    print(f"{torch.cuda.get_device_name()}; a copy reads and writes {of_copy:.0f} GB/s")
    print(f"{'head_dim':>8}  {'what':22s} {'us':>8} {'GB/s':>8} {'of copy':>8}")
    rows = [row for head_dim in args.head_dims for row in measure(head_dim, of_copy)]
    calls = [row for head_dim in args.head_dims for row in measure_calls(head_dim)]
    about = circumstances() | {
        "tokens": TOKENS,
        "hidden": HIDDEN,
        "batch": BATCH,
        "threads": args.threads,
        "copy_gb_s": of_copy,
        "tokens_of_calls": SHORT,
    }
    args.out.write_text(json.dumps({"circumstances": about, "rows": rows, "calls": calls}, indent=1))


if __name__ == "__main__":
    main()

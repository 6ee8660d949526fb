"""What the suites of decoding share: the form of a contender, and how contenders are checked, timed and printed.

Contenders take turns. Times are those of replayed CUDA graphs, of steps whose caches do not lie in the L2 cache.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.bench import decode as bench
from onepass.bench.check import PEER_FACTOR
from onepass.testing.budget import OUT_FACTOR, compare
from onepass.testing.machine import describe
from onepass.testing.results import Report, Row
from onepass.tuning.timing import Samples, measure_interleaved

from .suite import Args, Check, verdict
from .timing import host_us


def _same(given: Any) -> Any:
    return given


class Contender(NamedTuple):
    """One way to compute a step.

    Attributes:
        given: what `run` takes, from what the suite calls a step, and a seed.
        run: out.
        real: of what `run` is given, the tensors whose attention is expected.
        is_peer: whether it is not ours.
    """

    given: Callable[[Any, int], Any]
    run: Callable[[Any], Tensor]
    real: Callable[[Any], Any] = _same
    is_peer: bool = False


# ---------------------------------------------------------------- check


def checks(
    steps: Callable[[int], Iterable[tuple[str, Any, Mapping[str, Contender]]]],
    in_pytorch: Callable[[Any, torch.dtype], Tensor],
) -> Iterator[Check]:
    """Compare contenders with attention in float64, on new random data.

    Args:
        steps: labels and steps from a seed, with the contenders of each.
        in_pytorch: attention over real tensors, every intermediate in one dtype.
    """
    seed = time.time_ns() % 2**31
    print("seed of the check:", seed)
    for label, step, contenders in steps(seed):
        for name, contender in contenders.items():
            run = functools.partial(_check_one, contender, step, seed, in_pytorch)
            yield Check(f"{name}, {label}", run, contender.is_peer)


def _check_one(contender: Contender, step: Any, seed: int, in_pytorch: Callable) -> tuple[bool, str]:
    given = contender.given(step, seed)
    real = contender.real(given)
    exact, plain = (in_pytorch(real, dtype) for dtype in (torch.float64, real.q.dtype))
    factor = PEER_FACTOR if contender.is_peer else OUT_FACTOR
    return verdict([compare("out", contender.run(given), exact, plain, factor)])


# ---------------------------------------------------------------- times


def add_timing(parser: argparse.ArgumentParser, seconds: float = 0.04) -> None:
    """Add the options of `measure`."""
    parser.add_argument("--seconds", type=float, default=seconds, help="seconds of timing for each contender")
    parser.add_argument("--host", action="store_true", help="also measure the host's time of a call")


def header_of(suite: str, device: str) -> dict[str, Any]:
    """The header of a suite of decoding. The current stream is another one afterwards, which graphs can capture."""
    torch.cuda.set_stream(torch.cuda.Stream())
    facts = {
        "suite": suite,
        "l2_bytes": torch.cuda.get_device_properties(device).L2_cache_size,
        "copy_tb_per_s": round(bench.copy_bandwidth(device), 4),
    }
    return describe(device) | facts


def measure(
    row: Row,
    contenders: Mapping[str, Contender],
    steps: Sequence[Any],
    copies: bench.CacheCopies,
    num_bytes: Callable[[str], int],
    args: Args,
    report: Report,
) -> Samples:
    """Time the contenders in turns, each on all steps, and write their rows, and why some do not run, into the row.

    Args: num_bytes: what a contender moves.
    """
    samplers: dict[str, Any] = {}
    host: dict[str, float | None] = {}
    row |= {"copies": str(copies), "contenders": {}, "failed": {}}
    for name, contender in contenders.items():
        try:
            calls = [functools.partial(contender.run, contender.given(step, i)) for i, step in enumerate(steps)]
            samplers[name] = bench.sampler_of(calls, copies)
            # the host's time while the GPU is behind
            host[name] = host_us(calls[0], calls=5, samples=30, clock=time.perf_counter) if args.host else None
        except Exception as error:
            row["failed"][name] = f"{type(error).__name__}: {str(error)[:200]}"
            print(f"{row['label']}: {name} not measured: {row['failed'][name]}", flush=True)
    samples = measure_interleaved(samplers, time_budget_s=args.seconds * len(samplers), min_rounds=7)
    for name, ms in samples.ms.items():
        row["contenders"][name] = bench.times(samples, name, num_bytes(name), report.header["copy_tb_per_s"]) | {
            "launch": samplers[name].launch,
            "host_us": host[name],
            "ms": [round(x, 5) for x in ms],
        }
    return samples


def finish(row: Row, ratio: str, about: str, report: Report) -> None:
    """Add a row to the report, and print a line for it, then one for each contender.

    Args: ratio: the key of a contender's ratio of speeds. about: what the first line says.
    """
    report.add(row)
    print(f"{row['label'].removesuffix(' bfloat16 causal')}: {about}")
    for name, entry in row["contenders"].items():
        speed = "" if entry[ratio] is None else f"{entry[ratio]:6.2f}x"
        tflops = f"{entry['tflops']:6.0f} TFLOP/s " if "tflops" in entry else ""
        host = "" if entry["host_us"] is None else f"  host {entry['host_us']:.0f} us"
        rest = "" if entry["launch"] == "graph" else f"  {entry['launch'][:60]}"
        share = f"{tflops}{entry['tb_per_s']:5.2f} TB/s {100 * entry['of_copy']:4.0f} %"
        print(f"    {name:40s} {1e3 * entry['median_ms']:9.1f} us {share} {speed}{host}{rest}", flush=True)
    torch.cuda.empty_cache()

"""Runs case sets: check, interleaved timing, ratios; every finished row goes to the JSON file at once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..testing import results
from ..testing.machine import describe
from ..testing.results import Row, reason_of
from ..tuning.timing import Call, CudaSampler, Sampler, Samples, cpu_sampler, input_copies, measure_interleaved
from . import decode
from .cases import DTYPES, Case, CaseSet, Inputs, make_inputs
from .check import Oracle
from .flops import bytes_moved, flops, score_matrix_bytes, visible_pairs
from .memory import measure_in_subprocess
from .peers import Contender, Found, ask_support, find_peers, onepass_contender, prepare, without_window
from .rows import Options, fill_ratios, new_row

GEMM = "gemm"
GEMM_ROUNDS = 7


@dataclass
class Report(results.Report):
    """The results file of case sets, with a summary of its rows."""

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"summary": summarize(self.rows)}

    @property
    def wrong(self) -> list[Row]:
        """Rows in which onepass itself failed its check or did not run."""
        return [row for row in self.rows if "onepass" in row["failed"]]


def run(
    case_sets: Sequence[CaseSet],
    options: Options,
    path: Path | None = None,
    on_start: Callable[[CaseSet, Case], None] | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> Report:
    """Measure all cases, one after another.

    Args:
        path: where the JSON goes, row by row; None keeps it in memory.
        on_start, on_row: called before and after each case, for progress.

    Returns: Report. After Ctrl-C it holds the rows measured so far, and its status says "interrupted".
    """
    found = find_peers(options.device_type, options.peers)
    header = {
        **describe(options.device),
        "sets": [case_set.name for case_set in case_sets],
        "peers": {"present": sorted(found.present), "absent": found.absent},
        "rounds": options.rounds,
        "time_budget_s": options.time_budget_s,
    }
    report = Report(header, path)
    with report.recording(), side_stream(options):
        for case_set in case_sets:
            for case in case_set.cases:
                if on_start is not None:
                    on_start(case_set, case)
                measure = {"time": _time_row, "memory": _memory_row, "decode": decode.measure_row}[case_set.measure]
                row = measure(case_set.name, case, found, options)
                report.add(row)
                if on_row is not None:
                    on_row(row)
    return report


def side_stream(options: Options) -> contextlib.AbstractContextManager:
    """A stream of its own on a GPU, because CUDA graphs cannot be captured on the default stream."""
    if options.device_type != "cuda":
        return contextlib.nullcontext()
    use_device(options.device)
    return torch.cuda.stream(torch.cuda.Stream())


def use_device(device: str) -> None:
    """Make a device the current one. "cuda" means the device that is current already: torch wants a number here."""
    index = torch.device(device).index
    if device.startswith("cuda") and index is not None:
        torch.cuda.set_device(index)


def _new_row(set_name: str, measure: str, case: Case, options: Options) -> Row:
    support = ask_support(case, options.device)
    return new_row(set_name, measure, case, support.backend if support.ok else None)


def _contenders(case: Case, found: Found, options: Options) -> list[Contender]:
    ours = onepass_contender(options.device)
    return [ours, *([without_window(ours)] if case.window is not None else []), *found.present.values()]


# Time


def _time_row(set_name: str, case: Case, found: Found, options: Options) -> Row:
    row = _new_row(set_name, "time", case, options)
    peers = set(found.present)
    samples = time_contenders(row, case, _contenders(case, found, options), options, peers)
    fill_ratios(row, samples, peers)
    return row


def time_contenders(
    row: Row,
    case: Case,
    contenders: Sequence[Contender],
    options: Options,
    peers: Collection[str] = (),
    on_check: Callable[[str], object] | None = None,
    on_round: Callable[[Samples], object] | None = None,
) -> Samples:
    """Check all contenders, then time the ones that are right, in turns. Each result goes into the row at once.

    Args:
        peers: names of the contenders that are held to the wider budget.
        on_check: called with a contender's name before it is prepared and checked.
        on_round: as in `measure_interleaved`. After Ctrl-C the row has the figures of the rounds that were finished.
    Returns: the samples; none if no contender was right.
    """
    work = flops(case)
    row |= {"flops": work, "bytes": bytes_moved(case), "visible_pairs": visible_pairs(case)}
    is_cuda = options.device_type == "cuda"
    copies = input_copies(bytes_moved(case)) if is_cuda else 1
    inputs = [make_inputs(case, options.device, seed) for seed in range(copies)]
    oracles: dict[Case, Oracle] = {}
    samplers: dict[str, Sampler] = {}
    work_of = {}

    for contender in contenders:
        name, adapted = contender.name, contender.adapt(case)
        if refusal := contender.refusal(adapted):
            row["skipped"][name] = refusal
            continue
        if on_check is not None:
            on_check(name)
        try:
            prepared = [prepare(contender, case, one) for one in inputs]
            if adapted not in oracles:
                oracles[adapted] = Oracle(adapted, inputs[0])
            _poison(inputs[0])
            checked = oracles[adapted].compare(prepared[0].results(), is_peer=name in peers)
            bad = [str(comparison) for comparison in checked if not comparison.ok]
            if bad:
                row["failed"][name] = "; ".join(bad)
                continue
            samplers[name] = sampler = _sampler([one.run for one in prepared], is_cuda)
        except Exception as error:  # a kernel compiler has errors of its own, and each means that it did not run
            row["failed"][name] = reason_of(error)
            continue
        worst = max(checked, key=lambda comparison: comparison.share)
        row["contenders"][name] = {"max_error": worst.error, "error_budget": worst.budget}
        if isinstance(sampler, CudaSampler):
            row["contenders"][name]["launch"] = sampler.launch
        work_of[name] = flops(adapted)
    so_far = Samples({})
    if not samplers:
        return so_far
    # the ceiling is measured right before the rounds, not within them, so that no contender finds its caches emptied
    # by a large GEMM
    gemm, gemm_flops = _gemm(case, options)
    gemm_ms = measure_interleaved({GEMM: gemm}, rounds=GEMM_ROUNDS).spread(GEMM).median
    row["gemm"] = {"median_ms": gemm_ms, "tflops": gemm_flops / gemm_ms / 1e9}

    def keep(samples: Samples) -> None:
        nonlocal so_far
        so_far = samples
        if on_round is not None:
            on_round(samples)

    try:
        measure_interleaved(samplers, rounds=options.rounds, time_budget_s=options.time_budget_s, on_round=keep)
    finally:
        if so_far.rounds:
            _fill_times(row, so_far, work_of)
    return so_far


def _poison(inputs: Inputs) -> None:
    """Leave NaN in the memory that results are likely to get.

    A contender that writes too little must not find another contender's result in this memory.
    """
    poisoned = [torch.full_like(t, math.nan) for t in inputs]
    del poisoned


def _sampler(calls: Sequence[Call], is_cuda: bool) -> Sampler:
    return CudaSampler(calls) if is_cuda else cpu_sampler(calls[0])


def _gemm(case: Case, options: Options) -> tuple[Sampler, int]:
    is_cuda = options.device_type == "cuda"
    size = options.gemm_size or (8192 if is_cuda else 1536)
    a, b = (torch.randn(size, size, device=options.device).to(DTYPES[case.dtype]) for _ in range(2))
    return _sampler([lambda: a @ b], is_cuda), 2 * size**3


def _fill_times(row: Row, samples: Samples, work_of: dict[str, int]) -> None:
    """Add medians, spread and TFLOP/s to the row."""
    row["rounds"] = samples.rounds
    for name, work in work_of.items():
        ms = samples.spread(name)
        row["contenders"][name] |= {
            "median_ms": ms.median,
            "p20_ms": ms.p20,
            "p80_ms": ms.p80,
            "tflops": work / ms.median / 1e9,
            "gemm_share": work / ms.median / 1e9 / row["gemm"]["tflops"],
        }


# Memory


def _memory_row(set_name: str, case: Case, found: Found, options: Options) -> Row:
    row = _new_row(set_name, "memory", case, options)
    row["score_matrix_bytes"] = score_matrix_bytes(case)
    for contender in [onepass_contender(options.device), *found.present.values()]:
        name = contender.name
        if refusal := contender.refusal(case):
            row["skipped"][name] = refusal
            continue
        try:
            result = measure_in_subprocess(name, case, options.device)
        except RuntimeError as error:
            row["failed"][name] = reason_of(error)
            continue
        if wrong := result.pop("wrong"):
            row["failed"][name] = wrong
            continue
        row["contenders"][name] = result
    return row


# Summary


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """One entry for each set and direction.

    Where time was measured, it has the geometric mean and the minimum of the speed ratio over each other contender and
    over the best peer of each case, with the case of the minimum. Where memory was measured, it has the largest extra
    memory of each contender.
    """
    summary: dict[str, Any] = {}
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["set"], row["case"]["direction"]), []).append(row)
    for (set_name, direction), members in groups.items():
        entry: dict[str, Any] = {
            "cases": len(members),
            "failed": sum("onepass" in row["failed"] for row in members),
            "skipped": sum("onepass" in row["skipped"] for row in members),
        }
        if members[0]["measure"] == "memory":
            names = {name for row in members for name in row["contenders"]}
            entry["max_extra_bytes"] = {
                name: max(row["contenders"][name]["extra_bytes"] for row in members if name in row["contenders"])
                for name in sorted(names)
            }
        else:
            ratios: dict[str, list[tuple[float, str]]] = {}
            for row in members:
                for name, spread in row.get("speed_ratio", {}).items():
                    ratios.setdefault(name, []).append((spread["median"], row["label"]))
                if "best_peer" in row:
                    ratios.setdefault("best peer", []).append((row["speed_ratio_best_peer"], row["label"]))
            entry["speed_ratio"] = {
                name: {
                    "geomean": geometric_mean([ratio for ratio, _ in values]),
                    "min": min(values)[0],
                    "min_case": min(values)[1],
                    "cases": len(values),
                }
                for name, values in ratios.items()
            }
        summary[f"{set_name} {direction}"] = entry
    return summary

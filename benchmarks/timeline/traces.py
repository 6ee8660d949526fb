"""Traces that `onepass trace` has written: back into timelines, and cut to their beginning."""

from __future__ import annotations

import argparse
import json
from typing import Any

from onepass.bench.timeline.acts import Role, Span
from onepass.bench.timeline.chrome import GEMMS_SUFFIX, to_chrome
from onepass.bench.timeline.record import Timeline
from onepass.testing.results import input_file


def from_chrome(trace: dict[str, Any]) -> list[Timeline]:
    """The timelines of a trace that `to_chrome` has made."""
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    spans: dict[tuple[int, int], list[Span]] = {}
    for e in trace["traceEvents"]:
        if e["ph"] == "X":
            spans.setdefault((e["pid"], e["tid"]), []).append(Span(e["name"], *e["args"]["cycles"]))
    timelines = []
    for pid, about in enumerate(trace["otherData"]["timelines"]):
        rates = iter(about["ns_per_cycle"])
        threads = sorted(tid for kind, p, tid in names if kind == "thread_name" and p == pid)
        lanes = [(names["thread_name", pid, tid], spans[pid, tid]) for tid in threads]
        roles = [Role(name, found, next(rates)) for name, found in lanes if not name.endswith(GEMMS_SUFFIX)]
        timelines.append(Timeline(about["label"], about["changes"], roles, about["ms"], about["ms_without"]))
    return timelines


def cut(trace: dict[str, Any], cycles: int) -> dict[str, Any]:
    """The spans of a trace that end in the first `cycles` cycles of their configuration; the rest stays as it is."""
    about = {key: value for key, value in trace["otherData"].items() if key != "timelines"}
    about["cut"] = f"spans that end in the first {cycles} cycles of a configuration; the recording is longer"
    timelines = []
    for timeline in from_chrome(trace):
        roles = [role._replace(spans=[span for span in role.spans if span.end <= cycles]) for role in timeline.roles]
        timelines.append(timeline._replace(roles=[role for role in roles if role.spans]))
    return to_chrome(timelines, about)


def trace_file(text: str) -> dict[str, Any]:
    """The trace in a file that `onepass trace` has written, as the type of an argument of a parser."""
    try:
        trace = json.loads(input_file(text).read_bytes())
        if from_chrome(trace) and all(isinstance(trace["otherData"][name], str) for name in ("case", "device_name")):
            return trace
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError):
        pass
    raise argparse.ArgumentTypeError(f"expected a trace that onepass trace has written, got {text}")

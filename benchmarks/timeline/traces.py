"""Timelines as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing show: made, read back, and cut."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from onepass.testing.results import input_file

from .acts import Role, Span, gemms_in_flight
from .record import Timeline

GEMMS_SUFFIX = ": GEMMs in flight"
_SLOWEST_CLOCK_NS = 1.0  # the length of a cycle where the global clock was not read twice


def to_chrome(timelines: list[Timeline], about: dict[str, Any]) -> dict[str, Any]:
    """A trace with a process for each configuration and a thread for each role, and for the GEMMs of each consumer.

    Times begin with the first stamp of the configuration. Args: about: what `otherData` says.
    """
    events: list[dict[str, Any]] = []
    for pid, timeline in enumerate(timelines):
        events.append(_name("process_name", pid, 0, timeline.label))
        origin = min(role.spans[0].start for role in timeline.roles)
        tid = 0
        for role in timeline.roles:
            lanes = [(role.name, role.spans)]
            if gemms := gemms_in_flight(role, timeline.overlaps):
                lanes.append((role.name + GEMMS_SUFFIX, gemms))
            for name, spans in lanes:
                events.append(_name("thread_name", pid, tid, name))
                events += [_event(span, pid, tid, origin, role.ns_per_cycle or _SLOWEST_CLOCK_NS) for span in spans]
                tid += 1
    summary = [
        {
            "label": t.label,
            "changes": t.changes,
            "ms": t.ms,
            "ms_without": t.ms_without,
            "ns_per_cycle": [role.ns_per_cycle for role in t.roles],
        }
        for t in timelines
    ]
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {**about, "timelines": summary}}


def write(trace: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(trace, separators=(",", ":")) + "\n")


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _event(span: Span, pid: int, tid: int, origin: int, ns_per_cycle: float) -> dict[str, Any]:
    microseconds = [round((clock - origin) * ns_per_cycle / 1000, 4) for clock in (span.start, span.end)]
    return {
        "name": span.act,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": microseconds[0],
        "dur": round(microseconds[1] - microseconds[0], 4),
        "args": {"cycles": [span.start - origin, span.end - origin]},
    }


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

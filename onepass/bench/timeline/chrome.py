"""Timelines as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..clone import run_by_old_name
from .acts import Span, gemms_in_flight
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


if __name__ == "__main__":
    run_by_old_name("onepass.bench.timeline.chrome", "benchmarks.timeline", "cut")

"""What a GPU does during a call, as torch's profiler sees it: attention, messages, copies, other kernels, nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from onepass.api import fast_path

# Parts of the names of kernels of each kind; the first kind that fits counts.
KINDS = {
    "messages": ("nccl",),
    "copies": ("memcpy",),
    "attention": ("onepass", "flash", "sdpa", "fmha", "attention"),
}
OTHERS = "others"
LANES = (*KINDS, OTHERS)
MARKS = {"messages": "=", "copies": "-", "attention": "#", OTHERS: "."}


class Activity(NamedTuple):
    """A kernel or a copy, with its start and its end in microseconds."""

    kind: str
    start: float
    end: float


def kind_of(name: str) -> str:
    """The kind of a kernel, by its name."""
    name = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), OTHERS)


def record(call: Callable[[], Any]) -> list[Activity]:
    """What the current GPU does during a call.

    onepass's fast path steps aside for a profiler, which would make the host slower than it is without one. During this
    recording the fast path stays.
    """
    enabled = fast_path._profiler_enabled
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fast_path._profiler_enabled = lambda: False
        try:
            call()
            torch.cuda.synchronize()
        finally:
            fast_path._profiler_enabled = enabled
    events = (e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    return [Activity(kind_of(e.name), e.time_range.start, e.time_range.end) for e in events]


def _union(activities: Iterable[Activity]) -> list[tuple[float, float]]:
    """The times in which there is some activity, as spans in order that do not touch."""
    spans: list[tuple[float, float]] = []
    for _, start, end in sorted(activities, key=lambda a: a.start):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], end)
        else:
            spans.append((start, end))
    return spans


def _length(activities: Iterable[Activity]) -> float:
    return sum(end - start for start, end in _union(activities))


def summary(activities: Sequence[Activity]) -> dict[str, float]:
    """Milliseconds of the time from the first activity to the last, of each kind, and of what attention does not hide.

    Returns: "whole", each of `LANES`, "idle" (nothing runs), and "beside_attention": messages and copies while no
    attention runs.
    """
    if not activities:
        return {}
    whole = max(a.end for a in activities) - min(a.start for a in activities)
    of_kind = {kind: [a for a in activities if a.kind == kind] for kind in LANES}
    attention, moving = of_kind["attention"], of_kind["messages"] + of_kind["copies"]
    found = {"whole": whole, **{kind: _length(own) for kind, own in of_kind.items()}}
    found["idle"] = whole - _length(activities)
    found["beside_attention"] = _length(attention + moving) - _length(attention)
    return {name: round(us / 1000, 4) for name, us in found.items()}


def picture(activities: Sequence[Activity], width: int = 100) -> list[str]:
    """A line for each kind that occurs: a mark wherever it runs for at least half of a column."""
    if not activities:
        return []
    first, last = min(a.start for a in activities), max(a.end for a in activities)
    step = (last - first) / width or 1.0
    lines = []
    for kind in LANES:
        spans = _union(a for a in activities if a.kind == kind)
        if not spans:
            continue
        marks = ""
        for column in range(width):
            start, end = first + column * step, first + (column + 1) * step
            busy = sum(max(0.0, min(end, e) - max(start, s)) for s, e in spans)
            marks += MARKS[kind] if busy >= step / 2 else " "
        lines.append(f"{kind:10s}|{marks}|")
    return lines

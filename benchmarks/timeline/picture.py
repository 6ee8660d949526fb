"""Timelines as a picture: a panel for each configuration, a few steps in the middle of what was recorded.

The panels have the same scale, in cycles. The upper bar of a consumer says what its threads do, and the lower one when
GEMMs that the consumer has issued are in flight. Where the upper bar is blank, the threads do something else, such as
barriers or writing dS to shared memory.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from onepass.bench.plot import INK, LINES, MUTED

from .acts import ISSUE, WAITS_FOR_GEMMS, Role, Span, gemms_in_flight, step_cycles
from .record import Timeline

BATCHES = 4  # of the first configuration, which set the width of all panels
_WIDTH = 12.0  # inches
_LABELS = 1.3  # inches to the left of the panels
_INCHES_PER_LETTER = 0.062
_WAITS = ("wait for the turn", "wait for dS", *WAITS_FOR_GEMMS)
_LOADS = ("load Q", "load K", "load V", "load dO")
_COLORS = {
    "softmax": "#d1495b",
    "P = exp(S - lse)": "#d1495b",
    "dS = P (dP - delta)": "#edae49",
    "add dQ": "#7a5195",
    "rescale O": "#e9a0a9",
    "store": "#7a5195",
    ISSUE: "#3b5f86",
    "GEMMs": "#9cc0dc",
    **dict.fromkeys(_LOADS, "#8fb996"),
    **dict.fromkeys(_WAITS, "#d9dee4"),
}
_DARK = {"softmax", "P = exp(S - lse)", "add dQ", "store", ISSUE}  # colors under white letters
# names of acts in the legend, and in _INSIDE the texts in a bar: the longest one that fits
_NAMES = {
    "GEMMs": "GEMMs in flight",
    ISSUE: "issuing GEMMs",
    "rescale O": "P to 16 bits, rescaling O",
    "add dQ": "dQ added to memory",
    "dS = P (dP - delta)": "dS = P (dP - delta)",
    **dict.fromkeys(_LOADS, "TMA load, with its wait for an empty buffer"),
    **dict.fromkeys(_WAITS, "waiting"),
}
_INSIDE = {
    "GEMMs": ("GEMMs in flight", "GEMMs"),
    ISSUE: ("issue",),
    "P = exp(S - lse)": ("P = exp(S)", "P"),
    "dS = P (dP - delta)": ("dS",),
    "add dQ": ("add dQ", "dQ"),
    "rescale O": ("P",),
    **{act: (act,) for act in ("softmax", "store", *_LOADS)},
}


def draw(timelines: list[Timeline], title: str, path: Path, batches: int = BATCHES) -> None:
    """Write the picture. Raises: ValueError if a timeline has too few steps of a consumer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    windows = [_window(timeline, batches) for timeline in timelines]
    width = windows[0][1]
    heights = [_height(timeline) for timeline in timelines]
    figure, axes = plt.subplots(
        len(timelines),
        1,
        figsize=(_WIDTH, 1.5 + 0.3 * sum(heights) + 0.55 * len(timelines)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    seen: set[str] = set()
    for timeline, (first, _), (axis,) in zip(timelines, windows, axes, strict=True):
        _draw_panel(axis, timeline, first, width, seen)
    rates = [role.ns_per_cycle for role in timelines[0].roles if role.ns_per_cycle]
    clock = f" ({width / 10 * statistics.mean(rates) / 100:.1f} µs in all)" if rates else ""
    axes[-1][0].set_xlabel(f"cycles of the multiprocessor's clock{clock}", fontsize=9, color=MUTED)
    handles = {_NAMES.get(act, act): Patch(facecolor=color) for act, color in _COLORS.items() if act in seen}
    figure.suptitle(title, fontsize=11, x=0.01, ha="left", color=INK)
    figure.legend(list(handles.values()), list(handles), loc="outside lower left", ncols=4, fontsize=9, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_panel(axis: Any, timeline: Timeline, first: int, width: int, seen: set[str]) -> None:
    """Draw one timeline. Args: first, width: the cycles that are drawn. seen: gets the acts that are drawn."""
    ticks, y = {}, 0.0
    for role in timeline.roles:
        lanes = [(role.spans, 1.0)]
        if gemms := gemms_in_flight(role, timeline.overlaps):
            lanes.append((gemms, 0.65))
        ticks[role.name.replace("consumer ", "")] = y + 0.5
        for spans, height in lanes:
            for span in spans:
                start, end = max(span.start - first, 0), min(span.end - first, width)
                if end > start and span.act in _COLORS:
                    seen.add(span.act)
                    bar = {"facecolor": _COLORS[span.act], "edgecolor": "white", "linewidth": 0.5}
                    axis.broken_barh([(start, end - start)], (y, height), **bar)
                    if text := _inside(span, (end - start) / width):
                        color = "white" if span.act in _DARK else INK
                        style = {"ha": "center", "va": "center", "fontsize": 7.5, "color": color}
                        axis.text((start + end) / 2, y + height / 2, text, **style)
            y += height
        y += 0.45
    axis.set_yticks(list(ticks.values()), list(ticks), fontsize=9, color=INK)
    axis.set_ylim(y - 0.2, -0.15)
    axis.set_xlim(0, width)
    axis.set_title(_heading(timeline), fontsize=10, loc="left", color=INK)
    axis.tick_params(axis="x", labelsize=8, colors=MUTED)
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(LINES)


def _inside(span: Span, part: float) -> str:
    """What is written in a bar that takes a part of the panel's width: the longest text that fits."""
    room = part * (_WIDTH - _LABELS) - 0.06
    return next((text for text in _INSIDE.get(span.act, ()) if len(text) * _INCHES_PER_LETTER < room), "")


def _height(timeline: Timeline) -> float:
    return sum(1.45 if role.name == "producer" else 2.1 for role in timeline.roles)


def _heading(timeline: Timeline) -> str:
    overhead = 100 * (timeline.ms / timeline.ms_without - 1)
    return (
        f"{timeline.label}: {timeline.ms_without:.3f} ms, with time stamps {timeline.ms:.3f} ({overhead:+.0f} %); "
        f"a step with them takes {step_cycles(_first_consumer(timeline)):.0f} cycles"
    )


def _window(timeline: Timeline, batches: int) -> tuple[int, int]:
    """The first cycle that is drawn, and how many: batches from the middle of what the first consumer did."""
    issues = [span.start for span in _first_consumer(timeline).spans if span.act == ISSUE]
    if len(issues) < 2 * batches:
        raise ValueError(f"{timeline.label}: expected at least {2 * batches} batches of GEMMs, got {len(issues)}")
    middle = len(issues) // 2
    return issues[middle], issues[middle + batches] - issues[middle]


def _first_consumer(timeline: Timeline) -> Role:
    return next(role for role in timeline.roles if role.name != "producer")


def title_of(about: dict[str, Any]) -> str:
    return f"{about['case']}, {about['device_name']}: thread block 0"

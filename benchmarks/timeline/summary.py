"""What a trace says in numbers: a table with a row for each configuration."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from .acts import (
    EXPONENTIALS,
    ISSUE,
    WAITS_FOR_GEMMS,
    Role,
    Span,
    gemms_in_flight,
    shares,
    step_cycles,
)
from .record import Timeline

WAITS = ("wait for the turn", "wait for dS", *WAITS_FOR_GEMMS)


class Summary(NamedTuple):
    """Numbers of a timeline; what concerns consumers is a mean over all consumers, or counts all of them.

    Attributes:
        step: the median of the cycles from one step's exponentials to the next step's.
        exponentials, issuing, waiting: shares of a consumer's time.
        beside_own, beside_other: the shares of the exponentials' time in which GEMMs of the same warpgroup, and of
            another warpgroup, are in flight.
        issuing_together: the share of the time of issuing in which two or more warpgroups issue GEMMs.
    """

    step: float
    exponentials: float
    issuing: float
    waiting: float
    beside_own: float
    beside_other: float
    issuing_together: float


def summarize(timeline: Timeline) -> Summary:
    """The numbers of the time in which all consumers were recorded.

    Raises: ValueError if a consumer has fewer than two steps.
    """
    consumers = [role for role in timeline.roles if role.name != "producer"]
    first = max(role.spans[0].start for role in consumers)
    last = min(role.spans[-1].end for role in consumers)
    parts = [[span for span in role.spans if span.start >= first and span.end <= last] for role in consumers]
    roles = [role._replace(spans=spans) for role, spans in zip(consumers, parts, strict=True)]
    gemms = [gemms_in_flight(role, timeline.overlaps) for role in roles]
    softmax = [[span for span in role.spans if span.act in EXPONENTIALS] for role in roles]
    issues = [[span for span in role.spans if span.act == ISSUE] for role in roles]
    own, other, total = 0, 0, sum(_cycles(spans) for spans in softmax)
    for i, spans in enumerate(softmax):
        own += _together(spans, gemms[i])
        other += _together(spans, [span for j, found in enumerate(gemms) if j != i for span in found])
    counts = _counts(span for spans in issues for span in spans)
    return Summary(
        statistics.mean(step_cycles(role) for role in roles),
        _mean_share(roles, EXPONENTIALS),
        _mean_share(roles, (ISSUE,)),
        _mean_share(roles, WAITS),
        own / total,
        other / total,
        sum(cycles for n, cycles in counts.items() if n > 1) / max(1, sum(counts.values())),
    )


def _mean_share(roles: list[Role], acts: tuple[str, ...]) -> float:
    return statistics.mean(sum(share for act, share in shares(role).items() if act in acts) for role in roles)


def _cycles(spans: list[Span]) -> int:
    return sum(span.end - span.start for span in spans)


def _counts(spans: Iterable[Span]) -> dict[int, int]:
    """By a number of spans, which is at least 1, the cycles that so many spans cover at once."""
    events = sorted([(time, change) for span in spans for time, change in ((span.start, 1), (span.end, -1))])
    found: dict[int, int] = {}
    covering = before = 0
    for time, change in events:
        if covering:
            found[covering] = found.get(covering, 0) + time - before
        covering, before = covering + change, time
    return found


def _together(spans: list[Span], others: list[Span]) -> int:
    """The cycles of spans, none of which overlap, in which at least one of the others covers the time."""
    both = sum(_counts([*spans, *others]).values())
    return _cycles(spans) + sum(_counts(others).values()) - both


def table(timelines: list[Timeline]) -> str:
    """The numbers as a table in Markdown."""
    headings = (
        "configuration",
        "ms",
        "with stamps",
        "step, cycles",
        "exponentials",
        "issuing",
        "waiting",
        "exponentials beside own GEMMs",
        "beside another's",
        "issuing at once",
    )
    lines = [f"| {' | '.join(headings)} |", "|---|" + "---:|" * (len(headings) - 1)]
    for timeline in timelines:
        step, *parts = summarize(timeline)
        change = f"{timeline.ms:.3f} ({100 * (timeline.ms / timeline.ms_without - 1):+.0f} %)"
        cells = [timeline.label, f"{timeline.ms_without:.3f}", change, f"{step:.0f}", *(f"{p:.0%}" for p in parts)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)

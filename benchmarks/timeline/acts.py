"""What a role of a kernel does from one time stamp to the next, and how stamps lie in memory."""

from __future__ import annotations

import itertools
import statistics
from typing import NamedTuple

import numpy

STAMPS_PER_ROLE = 1024  # a power of two; the last place stays empty
ROLES = 5  # the producer, and up to four consumer warpgroups
GLOBAL_TIME = "global time"
WAIT_FOR_PV = "wait for P V"
WAITS_FOR_GEMMS = ("wait for S", WAIT_FOR_PV, "wait for GEMMs")
ISSUE = "issue GEMMs"
EXPONENTIALS = ("softmax", "P = exp(S - lse)")  # once a step, of a forward and of a backward
ACTS = (
    GLOBAL_TIME,
    "other",
    "load Q",
    "load K",
    "load V",
    "load dO",
    "wait for the turn",
    ISSUE,
    *WAITS_FOR_GEMMS,
    "wait for dS",
    "softmax",
    "rescale O",
    "P = exp(S - lse)",
    "dS = P (dP - delta)",
    "add dQ",
    "store",
)  # a stamp has 8 bits for its number here


class Span(NamedTuple):
    """An act of one role, in cycles of its multiprocessor's clock."""

    act: str
    start: int
    end: int


class Role(NamedTuple):
    """What one role did: spans in order, each up to the beginning of the next.

    Attributes:
        ns_per_cycle: nanoseconds of a cycle; 0 if the global clock was not read twice.
    """

    name: str
    spans: list[Span]
    ns_per_cycle: float


def roles_of(stamps: numpy.ndarray) -> list[Role]:
    """The roles that have written stamps.

    Args: stamps: (ROLES, STAMPS_PER_ROLE) int64, each clock << 8 | number of an act, 0 where nothing was written.
    Raises: ValueError if a number belongs to no act, or clocks run backwards.
    """
    names = ["producer", *(f"consumer warpgroup {i}" for i in range(ROLES - 1))]
    found = (_role(name, row[row != 0]) for name, row in zip(names, stamps, strict=True))
    return [role for role in found if role.spans]


def _role(name: str, words: numpy.ndarray) -> Role:
    clocks, numbers = (words >> 8).tolist(), (words & 0xFF).tolist()
    if any(number >= len(ACTS) for number in numbers):
        raise ValueError(f"{name}: expected numbers of acts below {len(ACTS)}, got {max(numbers)}")
    beginnings, looks, i = [], [], 0
    while i < len(clocks):
        if ACTS[numbers[i]] == GLOBAL_TIME:  # a pair: the clock, then the global one
            if i + 1 < len(clocks):
                looks.append((clocks[i], clocks[i + 1]))
            i += 2
            continue
        beginnings.append((ACTS[numbers[i]], clocks[i]))
        i += 1
    ends = [start for _, start in beginnings[1:]]
    if any(end < start for (_, start), end in zip(beginnings, ends, strict=False)):
        raise ValueError(f"{name}: expected clocks that rise")
    spans = [Span(act, start, end) for (act, start), end in zip(beginnings, ends, strict=False)]
    (first, first_ns), (last, last_ns) = (looks[0], looks[-1]) if looks else ((0, 0), (0, 0))
    return Role(name, spans, (last_ns - first_ns) / (last - first) if last > first else 0.0)


def gemms_in_flight(role: Role, overlaps: bool = True) -> list[Span]:
    """For each batch of GEMMs that a consumer issues, the time until it has seen the last of them finished.

    The time is an upper bound: the consumer looks when its softmax is done, and may see the end late.

    Args:
        overlaps: whether P V is issued with S (forward). If not, or where a tile's last P V has nothing next to it, P V
            counts as issued where the wait for it begins.
    """
    found: list[Span] = []
    start: int | None = None
    end: int | None = None
    for span in role.spans:
        is_pv_alone = span.act == WAIT_FOR_PV and (start is None or not overlaps)
        if start is not None and end is not None and (span.act == ISSUE or is_pv_alone):
            found.append(Span("GEMMs", start, end))
            start = end = None
        if is_pv_alone:
            found.append(Span("GEMMs", span.start, span.end))
            start = end = None
        elif span.act == WAIT_FOR_PV:
            assert start is not None
            found.append(Span("GEMMs", start, span.end))
            start = end = None
        elif span.act == ISSUE and start is None:
            start = span.start
        elif span.act in WAITS_FOR_GEMMS and start is not None:
            end = span.end
    if start is not None and end is not None:
        found.append(Span("GEMMs", start, end))
    return found


def step_cycles(role: Role) -> float:
    """The median time from one step's exponentials to the next step's. Raises: ValueError for fewer than two steps."""
    starts = [span.start for span in role.spans if span.act in EXPONENTIALS]
    if len(starts) < 2:
        raise ValueError(f"{role.name}: expected at least 2 steps, got {len(starts)}")
    return statistics.median(end - start for start, end in itertools.pairwise(starts))


def shares(role: Role) -> dict[str, float]:
    """The share of each act in the recorded time of a role, the largest first."""
    cycles: dict[str, int] = {}
    for span in role.spans:
        cycles[span.act] = cycles.get(span.act, 0) + span.end - span.start
    return {act: n / sum(cycles.values()) for act, n in sorted(cycles.items(), key=lambda item: -item[1])}

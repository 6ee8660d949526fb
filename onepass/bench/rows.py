"""How case sets are run, and the rows of their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..testing.results import Row
from ..tuning.timing import Samples
from .cases import Case


@dataclass(frozen=True)
class Options:
    """How to run.

    Attributes:
        device: "cpu", "cuda" or "cuda:N".
        peers: names of PEERS, or None for all.
        rounds: rounds of each case, as in `measure_interleaved`.
        time_budget_s: seconds of timing for each case, as in `measure_interleaved`.
        gemm_size: the ceiling is a square GEMM of this size in the case's dtype; None chooses by device.
    """

    device: str = "cpu"
    peers: Sequence[str] | None = None
    rounds: int | None = None
    time_budget_s: float = 10.0
    gemm_size: int | None = None

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]


def new_row(set_name: str, measure: str, case: Case, backend: str | None) -> Row:
    """The row of a case before anything is measured."""
    return {
        "set": set_name,
        "measure": measure,
        "label": case.label,
        "case": case.to_dict(),
        "backend": backend,
        "contenders": {},
        "skipped": {},  # name -> why it does not compute this case
        "failed": {},  # name -> what went wrong, or how far off its result was
    }


def fill_ratios(row: Row, samples: Samples, peers: set[str]) -> None:
    """Add the speed of onepass over each other contender, and over the fastest of the peers."""
    if "onepass" not in samples.ms:
        return
    others = [name for name in samples.ms if name != "onepass"]
    # speed of onepass over each other contender: above 1, onepass is faster
    row["speed_ratio"] = {name: samples.speed_ratio("onepass", name)._asdict() for name in others}
    rivals = [name for name in others if name in peers]
    if rivals:
        best = min(rivals, key=lambda name: samples.spread(name).median)
        row["best_peer"] = best
        row["speed_ratio_best_peer"] = row["speed_ratio"][best]["median"]

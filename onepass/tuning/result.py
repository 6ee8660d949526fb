"""What is tuned, and what came of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..kernels.config import LaunchConfig
from ..problem import AttentionProblem

if TYPE_CHECKING:
    from ..kernels.heuristics.tuned import Direction


class Task(NamedTuple):
    """A pass of a problem on a backend with kernels."""

    direction: Direction
    backend: str
    problem: AttentionProblem

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.direction} {self.backend}, {summary(self.problem)}"


@dataclass(frozen=True)
class Candidate:
    """A configuration that was considered.

    Attributes:
        changes: from the heuristics' choice; "" for that itself.
        ms: of a call, the median of all its rounds; None if it was not timed.
        speedup: over the heuristics' choice in the heats, the median of the ratios; None if it was not timed.
        refusal: why it was not timed: it did not compile or run, or gave other results.
        is_wrong: it gave other results.
    """

    config: LaunchConfig
    changes: str
    ms: float | None
    speedup: float | None
    refusal: str | None
    is_wrong: bool = False


@dataclass(frozen=True)
class TuningResult:
    """What `onepass.tune` found for one pass of one problem.

    Attributes:
        direction: "fwd" or "bwd".
        backend: whose kernels.
        problem: that was timed.
        gpu: its name.
        key: the problems that the choice is used for, for people.
        config: the choice: the heuristics' unless another is faster beyond the noise.
        heuristic: the heuristics' choice.
        speedup: of config over heuristic, the median of the final's rounds; 1.0 where they are the same.
        noise: what the heuristics' choice differed by from itself, as a share (see tuning/race.py).
        rounds: of the final.
        candidates: all that were considered, the heuristics' choice first, the others by speed.
        interrupted: Ctrl-C came before the last round. Few rounds decide nothing: then nothing is kept.
        kept: whether calls use the choice from now on.
    """

    direction: Direction
    backend: str
    problem: AttentionProblem
    gpu: str
    key: str
    config: LaunchConfig
    heuristic: LaunchConfig
    speedup: float
    noise: float
    rounds: int
    candidates: tuple[Candidate, ...]
    interrupted: bool
    kept: bool

    @property
    def is_gain(self) -> bool:
        return self.config != self.heuristic

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        data = asdict(self)
        data["problem"] = {name: _plain(value) for name, value in data["problem"].items()}
        data["config"], data["heuristic"] = self.config.text, self.heuristic.text
        for one, candidate in zip(data["candidates"], self.candidates, strict=True):
            one["config"] = candidate.config.text
        return data


def _plain(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


class Progress:
    """Who is told how far it is; this one does nothing."""

    def compiling(self, done: int, total: int) -> None:
        """So many kernels are compiled."""

    def checking(self, task: Task, config: LaunchConfig) -> None:
        """This candidate is run next: if it hangs, this is the one."""

    def timing(self, task: Task, done: int, total: int) -> None:
        """So many rounds are done."""

    def found(self, result: TuningResult) -> None:
        """A task is done, or interrupted."""


def changes(usual: LaunchConfig, config: LaunchConfig) -> str:
    """Fields of config that differ, as "tile_n=96 num_stages=3"."""
    before, after = vars(usual), vars(config)
    return " ".join(f"{name}={after[name]}" for name in before if name != "text" and before[name] != after[name])


def summary(problem: AttentionProblem) -> str:
    """A problem for people."""

    def pair(a: int, b: int, sign: str = "/") -> str:
        return f"{a}" if a == b else f"{a}{sign}{b}"

    mask = problem.mask
    window = ""
    if mask.window_left is None and mask.window_right == 0:
        window = " causal"
    elif not mask.is_full:
        window = f" window {mask.window_left}, {mask.window_right}"
    return (
        f"{_plain(problem.dtype)} head_dim {pair(problem.head_dim, problem.head_dim_v)}{window}, batch {problem.batch},"
        f" seqlen {pair(problem.seqlen_q, problem.seqlen_k, ' x ')}, heads"
        f" {pair(problem.num_heads_q, problem.num_heads_kv)}"
    )

"""The tasks of tuning, and their results."""

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
        """The task as text."""
        return f"{self.direction} {self.backend}, {summary(self.problem)}"


@dataclass(frozen=True)
class Candidate:
    """A configuration that was considered.

    Attributes:
        changes: its differences from the heuristics' choice; "" for the choice itself.
        ms: the median of the milliseconds of a call over all its rounds; None if it was not timed.
        speedup: the median of the ratios to the heuristics' choice in the heats; None if it was not timed.
        refusal: why it was not timed: it did not compile or run, or gave other results.
        is_wrong: whether it gave other results.
    """

    config: LaunchConfig
    changes: str
    ms: float | None
    speedup: float | None
    refusal: str | None
    is_wrong: bool = False


@dataclass(frozen=True)
class TuningResult:
    """The result of `onepass.tune` for one pass of one problem.

    Attributes:
        direction: "fwd" or "bwd".
        backend: the name of the backend whose kernels were timed.
        problem: the problem that was timed.
        gpu: the name of the GPU.
        key: the problems that the choice is used for, as text.
        config: the choice: the heuristics' unless another is faster beyond the noise.
        heuristic: the heuristics' choice.
        speedup: the speed of config over heuristic, the median of the final's rounds; 1.0 where they are the same.
        noise: by what share the heuristics' choice differed from itself (see tuning/race.py).
        rounds: the number of rounds of the final.
        candidates: all configurations that were considered, the heuristics' choice first, the others by speed.
        interrupted: whether Ctrl-C came before the last round. Few rounds decide nothing: then nothing is kept.
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
        """The result as data for JSON."""
        data = asdict(self)
        data["problem"] = {name: _as_data(value) for name, value in data["problem"].items()}
        data["config"], data["heuristic"] = self.config.text, self.heuristic.text
        for one, candidate in zip(data["candidates"], self.candidates, strict=True):
            one["config"] = candidate.config.text
        return data


def _as_data(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


class Progress:
    """A listener to the progress of tuning; this one does nothing."""

    def compiling(self, done: int, total: int) -> None:
        """Called after each kernel with the numbers of kernels that are compiled, and of all."""

    def checking(self, task: Task, config: LaunchConfig) -> None:
        """Called before a candidate is run for the first time: if something hangs, this candidate does."""

    def timing(self, task: Task, done: int, total: int) -> None:
        """Called after each round with the numbers of rounds that are done, and of all."""

    def found(self, result: TuningResult) -> None:
        """Called when a task is done, or interrupted."""


def changes(usual: LaunchConfig, config: LaunchConfig) -> str:
    """The fields of config that differ, such as "tile_n=96 num_stages=3"."""
    before, after = vars(usual), vars(config)
    return " ".join(f"{name}={after[name]}" for name in before if name != "text" and before[name] != after[name])


def summary(problem: AttentionProblem) -> str:
    """The problem as text."""

    def pair(a: int, b: int, sign: str = "/") -> str:
        return f"{a}" if a == b else f"{a}{sign}{b}"

    mask = problem.mask
    window = ""
    if mask.window_left is None and mask.window_right == 0:
        window = " causal"
    elif not mask.is_full:
        window = f" window {mask.window_left}, {mask.window_right}"
    dims = pair(problem.head_dim, problem.head_dim_v)
    return (
        f"{_as_data(problem.dtype)} head_dim {dims}{window}, batch {problem.batch},"
        f" seqlen {pair(problem.seqlen_q, problem.seqlen_k, ' x ')}, heads"
        f" {pair(problem.num_heads_q, problem.num_heads_kv)}"
    )

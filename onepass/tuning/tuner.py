"""The tuner: it compiles the candidates of each problem, checks their results, races them and keeps the winner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..api import fast_path
from ..dispatch import attention as dispatch
from ..dispatch import backends
from ..kernels.compiler import compile, disk_cache
from ..kernels.compiler.pool import compile_each
from ..kernels.config import LaunchConfig
from ..kernels.heuristics import tuned
from .launches import Launches, difference
from .race import FINAL_ROUNDS, Verdict, race
from .result import Candidate, Progress, Task, TuningResult, changes, summary
from .space import MAX_CANDIDATES, candidates
from .timing import Sampler


class Refusal(NamedTuple):
    """Why a candidate is not timed, and whether that is because its results are wrong."""

    reason: str | None
    is_wrong: bool = False


class Runs(Protocol):
    """The interface of `Launches`: the runs of a problem."""

    def results(self, config: Any) -> dict[str, Tensor]: ...

    def sampler(self, config: Any) -> Sampler: ...


@dataclass(frozen=True)
class Machine:
    """The machine as a tuner needs it, so that its logic can be tested without a GPU.

    Attributes:
        gpu: the name of the GPU.
        runs: gives the runs of a task.
        requests: gives the kernels of a task with a configuration, as the arguments of `compile.get`.
        compile: takes requests, workers and progress, and says why some kernels (name, key, arch) cannot be compiled.
    """

    gpu: str
    runs: Callable[[Task], Runs]
    requests: Callable[[Task, LaunchConfig], list[tuple]]
    compile: Callable[..., Mapping[tuple, str]]

    @classmethod
    def here(cls, device: torch.device) -> Machine:
        gpu = tuned.gpu_name(device)
        assert gpu is not None
        return cls(gpu, lambda task: Launches(*task, device), requests_of, compile_each)


def requests_of(task: Task, config: LaunchConfig) -> list[tuple]:
    direction, backend, problem = task
    if direction == "fwd":
        return [dispatch.compile_request(backend, problem, config)]
    forward = dispatch.compile_request(backend, problem, dispatch.forward_config(backend, problem))
    return [forward, *(request for _, request in dispatch.backward_requests(backend, problem, False, config))]


def tune_all(
    tasks: Iterable[Task],
    machine: Machine,
    *,
    rounds: int = FINAL_ROUNDS,
    limit: int = MAX_CANDIDATES,
    workers: int | None = None,
    table: Path | None = None,
    progress: Progress | None = None,
) -> list[TuningResult]:
    """Tune one task after the other, and keep what was found after each.

    Args:
        rounds: rounds of each final.
        limit: the most candidates of a task.
        workers: processes that compile at the same time.
        table: the file to keep the results in; None means this user's own, which calls use from then on.
    Raises: KeyboardInterrupt after Ctrl-C; progress has heard of all that was found until then. OSError, before
        anything is measured, if the cache directory belongs to another user or cannot be written. RuntimeError if the
        heuristics' own choice does not compile.
    """
    progress = progress or Progress()
    if table is None:
        disk_cache.make_usable(disk_cache.cache_directory())
    considered = {}
    for task in dict.fromkeys(tasks):
        arch = backends.arch_of(task.backend)
        considered[task] = candidates(*task, arch, limit)
    requests = {(task, c): machine.requests(task, c) for task, configs in considered.items() for c in configs}
    distinct = {request[:3]: request for several in requests.values() for request in several}
    failed = machine.compile(list(distinct.values()), workers, progress.compiling)
    results = []
    for task, configs in considered.items():
        refusals: dict[LaunchConfig, Refusal] = {}
        for config in configs:
            reasons = [failed[request[:3]] for request in requests[task, config] if request[:3] in failed]
            if reasons:
                refusals[config] = Refusal(f"does not compile: {reasons[0]}")
        results.append(_tune_one(task, configs, refusals, machine, rounds, table, progress))
        progress.found(results[-1])
        if results[-1].interrupted:
            raise KeyboardInterrupt
    return results


def _tune_one(
    task: Task,
    configs: list[LaunchConfig],
    refusals: dict[LaunchConfig, Refusal],
    machine: Machine,
    rounds: int,
    table: Path | None,
    progress: Progress,
) -> TuningResult:
    usual = configs[0]
    if usual in refusals:
        raise RuntimeError(f"onepass: tuning {task.label}: the heuristics' choice {refusals[usual].reason}")
    runs = machine.runs(task)
    samplers = _samplers(task, runs, configs, refusals, progress)
    verdict = race(samplers, usual.text, rounds, lambda done, total: progress.timing(task, done, total))
    by_text = {config.text: config for config in configs}
    winner = by_text[verdict.winner]
    if verdict.is_decided:
        speedup = round(verdict.speedup.median, 4)
        entry = tuned.Entry(winner.text, usual.text, speedup, compile.environment(), summary(task.problem))
        tuned.save(machine.gpu, {tuned.key_of(*task): entry}, table)
        if table is None:
            tuned.forget()
            dispatch.forget_prepared()
            fast_path.forget()
    return TuningResult(
        *task,
        gpu=machine.gpu,
        key=tuned.key_of(*task),
        config=winner,
        heuristic=usual,
        speedup=verdict.speedup.median,
        noise=verdict.noise,
        rounds=verdict.final.rounds,
        candidates=_table(configs, refusals, verdict),
        interrupted=verdict.interrupted,
        kept=verdict.is_decided,
    )


def _samplers(
    task: Task, runs: Runs, configs: list[LaunchConfig], refusals: dict[LaunchConfig, Refusal], progress: Progress
) -> dict[str, Sampler]:
    """The samplers of the configurations that run and give the results of the first; refusals get the others."""
    samplers: dict[str, Sampler] = {}
    expected: dict[str, Tensor] = {}
    for config in configs:
        if config in refusals:
            continue
        progress.checking(task, config)
        # a kernel that leaves a row out must not find the results of the last one in the memory that it is given
        poison = [torch.full_like(t, torch.nan) for t in expected.values()]
        del poison
        try:
            results = runs.results(config)
            reason = difference(results, expected) if expected else None
            expected = expected or results
            if reason is None:
                samplers[config.text] = runs.sampler(config)
            else:
                refusals[config] = Refusal(reason, is_wrong=True)
        except Exception as error:
            if not expected:
                raise  # without the heuristics' choice there is nothing to compare with
            refusals[config] = Refusal(f"does not run: {type(error).__name__}: {str(error)[:500]}")
    return samplers


def _table(
    configs: list[LaunchConfig], refusals: dict[LaunchConfig, Refusal], verdict: Verdict
) -> tuple[Candidate, ...]:
    usual = configs[0]
    found = []
    for config in configs:
        ms, speedup = None, None
        if verdict.heats.rounds and config.text in verdict.heats.ms:
            samples = verdict.final if config.text in verdict.final.ms else verdict.heats
            ms = samples.spread(config.text).median
            speedup = verdict.heats.speed_ratio(config.text, usual.text).median
        refusal = refusals.get(config, Refusal(None))
        found.append(Candidate(config, changes(usual, config), ms, speedup, *refusal))
    return (found[0], *sorted(found[1:], key=lambda candidate: -(candidate.speedup or 0.0)))

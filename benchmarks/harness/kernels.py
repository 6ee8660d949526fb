"""The suites of one kernel in the paper's grid: its check, its other configurations, and its peers."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onepass.bench import ablation
from onepass.bench.cases import Case, Direction, Inputs, make_inputs
from onepass.bench.check import PEER_FACTOR
from onepass.bench.peers import Contender, find_peers, prepare
from onepass.kernels.compiler.compile import CompileRequest
from onepass.testing.budget import GRADIENT_FACTOR, OUT_FACTOR, compare
from onepass.testing.machine import describe
from onepass.testing.results import Report
from onepass.tuning.result import Task
from onepass.tuning.tuner import requests_of

from . import grid
from .contenders import attention_in_pytorch, configurations, max_relative_error
from .suite import Args, Check, Suite, verdict

DETERMINISTIC = "deterministic"


@dataclass(frozen=True)
class KernelSuite:
    """A kernel that is measured in the grid.

    Attributes:
        backend: the name of its backend.
        peers: the names of --peers, and what `onepass bench` calls each.
        directions, dtypes: those that may be chosen, the default first. Where there is one, there is no option.
        default_peers: by dtype, the names that are measured without --peers.
        device: where the kernel runs.
        seqlens: the sequence lengths of the check.
    """

    backend: str
    peers: Mapping[str, str]
    default_peers: Mapping[str, str]
    directions: tuple[Direction, ...]
    dtypes: tuple[str, ...] = ("bfloat16",)
    device: str = "cuda"
    seqlens: tuple[int, ...] = (512, 333)

    def suite(self, name: str, about: str | None) -> Suite[grid.Cell]:
        return Suite(
            name,
            about,
            self.add_options,
            functools.partial(self.start, name),
            grid.cells,
            self.measure,
            self.checks,
            self.requests,
            lambda args, report: self.results_in(args, report).summarize(),
            out=f"{name}.json",
        )

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        grid.add_arguments(parser, peers=None)
        for option, choices in (("direction", self.directions), ("dtype", self.dtypes)):
            parser.set_defaults(**{option: choices[0]})
            if len(choices) > 1:
                parser.add_argument(f"--{option}", choices=choices)
        parser.set_defaults(deterministic=False)
        if "bwd" in self.directions:
            parser.add_argument("--deterministic", action="store_true", help="also measure reproducible gradients")

    def start(self, name: str, args: Args, parser: argparse.ArgumentParser) -> dict[str, Any]:
        first = self.case_of(grid.cells(args)[0], args)
        if reason := ablation.refusal(self._kernel(args), first, self.device):
            parser.error(reason)
        args.rivals = self._find_rivals(self.default_peers[args.dtype] if args.peers is None else args.peers, parser)
        torch.backends.cuda.matmul.allow_tf32 = False
        return describe(self.device) | {"suite": name, "dtype": args.dtype, "direction": args.direction}

    def _find_rivals(self, text: str, parser: argparse.ArgumentParser) -> dict[str, Contender]:
        """The peers of --peers that can be imported. What is absent is printed."""
        names = [name for name in text.split(",") if name]
        if unknown := sorted(set(names) - set(self.peers)):
            parser.error(f"--peers: expected names of {', '.join(self.peers)}, got {', '.join(unknown)}")
        found = find_peers(self.device, [self.peers[name] for name in names])
        for name in names:
            if self.peers[name] in found.absent:
                print(f"{name} not measured: {found.absent[self.peers[name]]}")
        return {name: found.present[self.peers[name]] for name in names if self.peers[name] in found.present}

    def _kernel(self, args: Args) -> ablation.Kernel:
        return ablation.kernels(args.direction)[self.backend]

    # ---------------------------------------------------------------- contenders

    def case_of(self, cell: grid.Cell, args: Args) -> Case:
        return cell.case(args.dtype, args.direction)

    def configurations(self, case: Case, args: Args) -> dict[str, Any]:
        """The default ("onepass") and those of --variants that the case can take, by name."""
        kernel, problem = self._kernel(args), ablation.problem_of(case, self.device)
        default = kernel.default(problem, kernel.arch())
        return configurations(default, args.variants, lambda config: config.check(problem, kernel.arch()))

    def contenders(self, case: Case, args: Args) -> dict[str, Contender]:
        """Peers, and the kernel with its configurations, by name."""
        kernel, problem = self._kernel(args), ablation.problem_of(case, self.device)
        found = {name: rival for name, rival in args.rivals.items() if rival.refusal(case) is None}
        for name, config in self.configurations(case, args).items():
            found[name] = Contender(name, ablation.attend_with(kernel, problem, config))
        if args.deterministic:
            problem = replace(problem, deterministic=True)
            config = kernel.default(problem, kernel.arch())
            found[DETERMINISTIC] = Contender(DETERMINISTIC, ablation.attend_with(kernel, problem, config))
        return found

    def requests(self, args: Args) -> list[CompileRequest]:
        """The kernels of all contenders."""
        cases = [] if args.no_check else self.checked_cases(args)
        cases += [] if args.no_grid else [self.case_of(cell, args) for cell in grid.cells(args)]
        kernel = self._kernel(args)
        found: list[Any] = []
        for case in cases:
            problem = ablation.problem_of(case, self.device)
            jobs = [(problem, config) for config in self.configurations(case, args).values()]
            if args.deterministic:
                problem = replace(problem, deterministic=True)
                jobs.append((problem, kernel.default(problem, kernel.arch())))
            for one, config in jobs:
                found += requests_of(Task(args.direction, self.backend, one), config)
        return found

    # ---------------------------------------------------------------- check and grid

    def checked_cases(self, args: Args) -> list[Case]:
        """Small cases of the head dims and masks that are measured."""
        kinds = dict.fromkeys((cell.head_dim, cell.causal) for cell in grid.cells(args))
        more: dict[str, Any] = {"batch": 2, "dtype": args.dtype, "direction": args.direction}
        return [Case.square(n, 4, head_dim, causal=causal, **more) for head_dim, causal in kinds for n in self.seqlens]

    def checks(self, args: Args, header: dict[str, Any]) -> Iterator[Check]:
        """Compare every contender with attention in PyTorch."""
        for case in self.checked_cases(args):
            inputs = make_inputs(case, self.device)
            exact, plain = (attention_in_pytorch(case, inputs, dtype) for dtype in (torch.float64, case.torch_dtype))
            for name, contender in self.contenders(case, args).items():
                run = functools.partial(check_one, contender, case, inputs, exact, plain, name in args.rivals)
                yield Check(f"{name}, {case.label}", run, name in args.rivals)

    def results_in(self, args: Args, report: Report) -> grid.Results:
        return grid.Results(report, list(args.rivals), args.dtype, args.direction)

    def measure(self, cell: grid.Cell, args: Args, report: Report) -> None:
        """Time the contenders of a case. Their errors are those to the first one, for a rough look."""
        case = self.case_of(cell, args)
        inputs = make_inputs(case, self.device)
        makers: dict[str, Callable[[], Any]] = {
            name: functools.partial(prepare, one, case, inputs) for name, one in self.contenders(case, args).items()
        }
        prepared = grid.results_of(makers)
        found = grid.results_of({name: one.results for name, one in prepared.items()})
        first: dict[str, Tensor] = next(iter(found.values()), {})
        errors = {name: max_relative_error(tensors, first) for name, tensors in found.items()}
        calls = {name: prepared[name].run for name in errors}
        self.results_in(args, report).measure(cell, calls, errors, self.configurations(case, args), args)


def check_one(
    contender: Contender,
    case: Case,
    inputs: Inputs,
    exact: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    is_rival: bool,
) -> tuple[bool, str]:
    """Compare the results of a contender with exact ones, by the errors of plain attention times a factor."""
    prepared = prepare(contender, case, inputs)
    poison = [torch.full_like(x, math.nan) for x in inputs]  # what the allocator hands out next
    del poison
    results = prepared.results()
    factor = PEER_FACTOR if is_rival else OUT_FACTOR if case.direction == "fwd" else GRADIENT_FACTOR
    rows = [compare(name, found, exact[name], plain[name], factor) for name, found in results.items()]
    # two runs of a forward have equal bits, and so have reproducible gradients
    is_repeated = not is_rival and (case.direction == "fwd" or contender.name == DETERMINISTIC)
    again = prepared.results() if is_repeated else results
    return verdict(rows, differs=any(not torch.equal(results[name], again[name]) for name in results))

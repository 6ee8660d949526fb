"""Kernels with other configurations, and peers, in the call form of onepass/bench/peers.py: checks and the grid."""

from __future__ import annotations

import argparse
import functools
import math
from ast import literal_eval
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from onepass.bench.cases import Case, Direction, Inputs, make_inputs
from onepass.bench.check import PEER_FACTOR, attention_in_pytorch
from onepass.bench.peers import Contender, Prepared, find_peers, prepare
from onepass.errors import UnsupportedError
from onepass.testing.budget import GRADIENT_FACTOR, OUT_FACTOR, compare
from onepass.testing.results import Report

from . import grid
from .suite import Args, Check, Suite, verdict

Contenders = Mapping[str, Contender]


def find_rivals(text: str, known: Mapping[str, str], device: str, parser: argparse.ArgumentParser) -> Contenders:
    """The peers of --peers that can be imported. Args: known: what `onepass bench` calls each that may be given."""
    names = [name for name in text.split(",") if name]
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"--peers: expected names of {', '.join(known)}, got {', '.join(unknown)}")
    found = find_peers(device, [known[name] for name in names])
    for name in names:
        if known[name] in found.absent:
            print(f"{name} not measured: {found.absent[known[name]]}")
    return {name: found.present[known[name]] for name in names if known[name] in found.present}


def configuration(default: Any, changes: str) -> Any:
    """The default with changes such as "tile_n=64,num_stages=1".

    Raises: ValueError for an unknown field, and for a value that is no Python literal.
    """
    return replace(default, **literals(changes, [field.name for field in fields(default)]))


def literals(changes: str, names: Sequence[str]) -> dict[str, Any]:
    """The values of changes such as "tile_n=64,num_stages=1". Raises: ValueError as `configuration`."""
    values = {}
    for change in changes.split(","):
        name, _, value = (part.strip() for part in change.partition("="))
        if name not in names:
            raise ValueError(
                f"variant {changes!r}: expected name=value with a name of {', '.join(names)}, got {change!r}"
            )
        try:
            values[name] = literal_eval({"true": "True", "false": "False"}.get(value, value))
        except (ValueError, SyntaxError):
            raise ValueError(f"variant {changes!r}: expected a Python literal for {name}, got {value!r}") from None
    return values


def configurations(default: Any, text: str | None, check: Callable[[Any], object]) -> dict[str, Any]:
    """The default ("onepass") and those of --variants that `check` does not refuse, which is printed."""
    found = {"onepass": default}
    for changes in grid.split_variants(text, ""):
        config = configuration(default, changes)
        try:
            check(config)
        except UnsupportedError as error:
            print(f"{changes} not measured: {error}")
            continue
        found[changes] = config
    return found


def checked_cases(args: Args, seqlens: Sequence[int], dtype: str, direction: Direction) -> list[Case]:
    """Small cases of the head dims and masks that are measured."""
    kinds = dict.fromkeys((cell.head_dim, cell.causal) for cell in grid.cells(args))
    return [
        Case.square(seqlen, 4, head_dim, batch=2, dtype=dtype, causal=causal, direction=direction)
        for head_dim, causal in kinds
        for seqlen in seqlens
    ]


def checks(
    cases: Sequence[Case],
    contenders_of: Callable[[Case], Contenders],
    rivals: Collection[str],
    device: str,
    exact_dtype: torch.dtype,
    repeated: Collection[str] = (),
) -> Iterator[Check]:
    """Compare every contender with attention in PyTorch. Args: repeated: contenders of which two runs must be equal."""
    for case in cases:
        inputs = make_inputs(case, device)
        exact, plain = (attention_in_pytorch(case, inputs, dtype) for dtype in (exact_dtype, case.torch_dtype))
        for name, contender in contenders_of(case).items():
            run = functools.partial(
                check_one,
                contender,
                case,
                inputs,
                exact,
                plain,
                PEER_FACTOR if name in rivals else OUT_FACTOR if case.direction == "fwd" else GRADIENT_FACTOR,
                name in repeated,
            )
            yield Check(f"{name}, {case.label}", run, name in rivals)


def check_one(
    contender: Contender,
    case: Case,
    inputs: Inputs,
    exact: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    factor: float,
    is_repeated: bool,
) -> tuple[bool, str]:
    """Compare the results of a contender with exact ones, by the errors of plain attention times a factor."""
    prepared = prepare(contender, case, inputs)
    poison = [torch.full_like(x, math.nan) for x in inputs]  # what the allocator hands out next
    del poison
    results = prepared.results()
    rows = [compare(name, found, exact[name], plain[name], factor) for name, found in results.items()]
    again = prepared.results() if is_repeated else results
    return verdict(rows, differs=any(not torch.equal(results[name], again[name]) for name in results))


def max_relative_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest error of the tensors, each relative to its largest value; NaN if any value is NaN."""
    pairs = [(found[name].float(), expected[name].float()) for name in expected]
    return float(torch.stack([(actual - right).abs().max() / right.abs().max() for actual, right in pairs]).max())


def grid_suite(
    name: str,
    about: str | None,
    device: Callable[[], str],
    case_of: Callable[[grid.Cell, Args], Case],
    configurations_of: Callable[[Case, str | None], Mapping[str, Any]],
    contenders_of: Callable[[Case, Args], Contenders],
    finish: Callable[[Args, Report], object] = lambda args, report: None,
    **parts: Any,
) -> Suite[grid.Cell]:
    """A suite of the paper's grid. `start` puts the peers into args.rivals.

    Args: parts: options, start, checks and requests of the suite.
    """

    def results_in(args: Args, report: Report) -> grid.Results:
        case = case_of(grid.cells(args)[0], args)
        return grid.Results(report, list(args.rivals), case.dtype, case.direction)

    def measure(cell: grid.Cell, args: Args, report: Report) -> None:
        """Time the contenders of a case. Their errors are those to the first one, for a rough look."""
        case = case_of(cell, args)
        inputs = make_inputs(case, device())
        prepared: dict[str, Prepared] = grid.results_of(
            {name: functools.partial(prepare, one, case, inputs) for name, one in contenders_of(case, args).items()}
        )
        found = grid.results_of({name: one.results for name, one in prepared.items()})
        first: dict[str, Tensor] = next(iter(found.values()), {})
        errors = {name: max_relative_error(tensors, first) for name, tensors in found.items()}
        configs = configurations_of(case, args.variants)
        results_in(args, report).measure(cell, {name: prepared[name].run for name in errors}, errors, configs, args)

    def finish_all(args: Args, report: Report) -> None:
        finish(args, report)
        results_in(args, report).summarize()

    return Suite(name, about, cases=grid.cells, measure=measure, finish=finish_all, out=f"{name}.json", **parts)

"""Configurations of a kernel from the words of --variants, and what results are compared with."""

from __future__ import annotations

import functools
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from onepass import reference
from onepass.bench.cases import Case, Inputs
from onepass.errors import UnsupportedError

from . import grid


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
    """The default ("onepass") and those of --variants that `check` does not refuse; what it refuses is printed."""
    found = {"onepass": default}
    for changes in grid.split_variants(text, ""):
        config = configuration(default, changes)
        try:
            check(config)
        except UnsupportedError as error:
            _say_once(f"{changes} not measured: {error}")
            continue
        found[changes] = config
    return found


@functools.cache
def _say_once(text: str) -> None:
    print(text)


def attention_in_pytorch(case: Case, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """All rows of out, or of dq, dk and dv, by the definition with every intermediate in one dtype."""
    q, k, v, dout = (x.detach().to(dtype) for x in inputs)
    leaves = [x.requires_grad_(case.direction == "bwd") for x in (q, k, v)]
    out = reference.attention(*leaves, causal=case.causal, compute_dtype=dtype).out
    if case.direction == "fwd":
        return {"out": out}
    return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, dout), strict=True))


def max_relative_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest error of the tensors, each relative to its largest value; NaN if any value is NaN."""
    pairs = [(found[name].float(), expected[name].float()) for name in expected]
    return float(torch.stack([(actual - right).abs().max() / right.abs().max() for actual, right in pairs]).max())

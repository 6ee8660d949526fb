"""Schemas of operators from the classes that their implementations take arguments as."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_TYPES = {
    torch.Tensor: "Tensor",
    torch.dtype: "ScalarType",
    float: "float",
    int: "SymInt",
    bool: "bool",
    str: "str",
}

# Tensors that came later than the others of an operator are its last arguments, which exported programs do not give.
LATER = ("query_ranges",)


def tensors(names: Iterable[str]) -> str:
    """Tensors that may be None as arguments of an operator."""
    return ", ".join(f"Tensor? {name}{'=None' if name in LATER else ''}" for name in names)


def split(given: Mapping[str, Any]) -> tuple[list, list]:
    """The values of those names that are not in `LATER`, and of those that are, up to the last one that is given."""
    later = [given[name] for name in LATER]
    while later and later[-1] is None:
        later.pop()
    return [value for name, value in given.items() if name not in LATER], later


def joined(names: Iterable[str], values: Iterable[Any], later: Iterable[Any]) -> dict[str, Any]:
    """The values of these names, and of `LATER` (None where torch has left out a default), by their names."""
    return dict(zip(names, values, strict=True)) | dict.fromkeys(LATER) | dict(zip(LATER, later, strict=False))


def arguments(fields: type, count: int | None = None) -> str:
    """The first fields of a class as arguments of an operator, such as "float softmax_scale, float? softcap".

    A default that is not None is in the schema, too: a field that programs exported earlier do not know needs one, and
    comes last. torch leaves out the last arguments of a call, for the implementation, that have their defaults.
    """
    found = []
    for name, hint in list(typing.get_type_hints(fields).items())[:count]:
        kind, *optional = typing.get_args(hint) or (hint,)
        default = getattr(fields, "_field_defaults", {}).get(name)
        found.append(f"{_TYPES[kind]}{'?' * len(optional)} {name}{'' if default is None else f'={default}'}")
    return ", ".join(found)

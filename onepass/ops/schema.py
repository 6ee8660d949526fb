"""Schemas of operators from the classes that their implementations take arguments as."""

from __future__ import annotations

import typing

import torch

_TYPES = {
    torch.Tensor: "Tensor",
    torch.dtype: "ScalarType",
    float: "float",
    int: "SymInt",
    bool: "bool",
    str: "str",
}


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

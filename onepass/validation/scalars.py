"""Options that are a number or a flag: what is taken as one, and as which Python value it goes on.

numpy's scalars are taken, by the protocols of `numbers`, so that numpy need not be here. Tensors are not: no gradient
would flow through them, and reading them waits for a device. Under torch.compile a number may stand for any, so each is
compared with Python's own operators only, which it can trace.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import torch

_REAL = (int, float, torch.SymInt, torch.SymFloat, numbers.Real)
_INTEGER = (int, torch.SymInt, numbers.Integral)


def is_real(value: Any) -> bool:
    """Whether the value is a real number of Python, numpy or torch's symbols; a bool is one, as it is to Python."""
    return isinstance(value, _REAL)


def is_integer(value: Any) -> bool:
    """Whether the value is an integer of Python, numpy or torch's symbols; a bool is one, as it is to Python."""
    return isinstance(value, _INTEGER)


def check_real(name: str, value: Any) -> float:
    """A plain finite number; tensors are refused, because their gradient would be lost."""
    if isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a float, got a tensor (no gradient flows through it)")
    if isinstance(value, bool) or not is_real(value):
        raise TypeError(f"{name}: expected a float, got {type(value).__name__}")
    try:
        number: Any = value if isinstance(value, (torch.SymInt, torch.SymFloat)) else float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a finite number, got one beyond the range of a float") from None
    # not math.isfinite, which torch.compile cannot trace where the number is an input
    if not -math.inf < number < math.inf:
        raise ValueError(f"{name}: expected a finite number, got {number}")
    return number


def check_int(name: str, value: Any, expected: str = "an int", *, least: int | None = None) -> int:
    """An integer. Args: expected: in words, for the message. least: the smallest that is taken; None: any is."""
    if isinstance(value, bool) or not is_integer(value):
        raise TypeError(f"{name}: expected {expected}, got {value!r}")
    number: Any = value if isinstance(value, (int, torch.SymInt)) else operator.index(value)
    if least is not None and number < least:
        raise ValueError(f"{name}: expected at least {least}, got {number}")
    return number


def check_flag(name: str, value: Any, none_too: bool = False) -> bool:
    """A bool. Args: none_too: None is taken, and returned as False."""
    if not (isinstance(value, bool) or (none_too and value is None) or _is_bool_of_numpy(value)):
        raise TypeError(f"{name}: expected a bool{' or None' if none_too else ''}, got {value!r}")
    return bool(value)


def _is_bool_of_numpy(value: Any) -> bool:
    # in no class of `numbers`; it is called bool_ before numpy 2
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")

"""Checks of options that are a number or a flag, and their conversion to Python values.

Scalars of numpy are accepted through the protocols of `numbers`, so that numpy need not be installed. Tensors are
refused: no gradient would flow through them, and reading them waits for a device. Under torch.compile a number may be
symbolic, so numbers are compared with Python's own operators only, which torch.compile can trace.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import torch

_REAL = (int, float, torch.SymInt, torch.SymFloat, numbers.Real)
_INTEGER = (int, torch.SymInt, numbers.Integral)
LARGEST_BLOCK = 2**31 - 1  # the largest int32, the type of a kernel's argument


def is_real(value: Any) -> bool:
    """Whether the value is a real number of Python, numpy or torch's symbols. A bool counts, as in Python."""
    return isinstance(value, _REAL)


def is_integer(value: Any) -> bool:
    """Whether the value is an integer of Python, numpy or torch's symbols. A bool counts, as in Python."""
    return isinstance(value, _INTEGER)


def check_real(name: str, value: Any) -> float:
    """A finite number; tensors are refused, because their gradient would be lost."""
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
    """An integer.

    Args:
        expected: words for the message. least: the smallest integer that is accepted; None: any is.
    """
    if isinstance(value, bool) or not is_integer(value):
        raise TypeError(f"{name}: expected {expected}, got {value!r}")
    number: Any = value if isinstance(value, (int, torch.SymInt)) else operator.index(value)
    if least is not None and number < least:
        raise ValueError(f"{name}: expected at least {least}, got {number}")
    return number


def check_block(name: str, value: Any) -> int | None:
    """A number of rows or keys of a block, small enough for an argument of a kernel, or None."""
    if value is None:
        return None
    block = check_int(name, value, "an int or None", least=1)
    if block > LARGEST_BLOCK:
        raise ValueError(f"{name}: expected at most {LARGEST_BLOCK}, got {block}")
    return block


def check_flag(name: str, value: Any, allow_none: bool = False) -> bool:
    """A bool. Args: allow_none: None is accepted, and returned as False."""
    if not (isinstance(value, bool) or (allow_none and value is None) or _is_numpy_bool(value)):
        raise TypeError(f"{name}: expected a bool{' or None' if allow_none else ''}, got {value!r}")
    return bool(value)


def _is_numpy_bool(value: Any) -> bool:
    # numpy's bool implements no protocol of `numbers`; before numpy 2 it is called bool_
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")

"""min, max and division that take Python ints and, while a kernel is traced, its run-time integers.

The integer formulas of a kernel (block ranges, schedulers) are written once with these: the CPU tests run them on
Python ints, exhaustively, and the kernels trace the same lines.
"""

from __future__ import annotations

from typing import Any


def minimum(a: Any, b: Any) -> Any:
    """min(a, b)."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    import cutlass  # only a kernel under trace brings other types

    return cutlass.min(a, b)


def maximum(a: Any, b: Any) -> Any:
    """max(a, b)."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    import cutlass

    return cutlass.max(a, b)


def select(condition: Any, a: Any, b: Any) -> Any:
    """a if condition else b, both evaluated."""
    if isinstance(condition, bool):
        return a if condition else b
    import cutlass

    return cutlass.select_(condition, a, b)


def overlapping(size: int, other: int) -> int:
    """The most intervals of a size `other` that one of size `size` overlaps; both begin at multiples of their sizes."""
    if max(size, other) % min(size, other) == 0:
        return max(1, size // other)
    return (size - 2) // other + 2


def ceil_div(a: Any, b: Any) -> Any:
    """The least n with n * b >= a, for a >= 0 and b > 0."""
    return (a + b - 1) // b

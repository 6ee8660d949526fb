"""Calls with their float64 oracle, error budgets and results files for the tests and the benchmarks."""

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

from .budget import Comparison, compare, compare_gradients, compare_lse, fp8_budget
from .inputs import Call
from .rounding import floor_of_out

__all__ = [
    "Call",
    "Comparison",
    "compare",
    "compare_gradients",
    "compare_lse",
    "floor_of_out",
    "fp8_budget",
]

# Names that this module had, and the modules of tests/support/ that have them now.
_MOVED = {
    "random_call": "random_calls",
    "random_decode_call": "decode_calls",
    "DecodeCall": "decode_calls",
    "assert_same_rounding": "same_rounding",
}


def __getattr__(name: str) -> Any:
    """An old name, for one release and in a clone of the repository alone."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    folder = Path(__file__).resolve().parents[2] / "tests" / "support"
    warnings.warn(f"onepass.testing.{name} is now in {folder / _MOVED[name]}.py", FutureWarning, stacklevel=2)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return getattr(importlib.import_module(_MOVED[name]), name)

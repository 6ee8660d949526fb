"""Input makers, error budgets, random problems and results files for the tests and the benchmarks."""

from .budget import Comparison, compare, compare_gradients, compare_lse, fp8_budget
from .decoding import DecodeCall, random_decode_call
from .inputs import Call, random_call
from .quantized import assert_same_rounding
from .rounding import floor_of_out

__all__ = [
    "Call",
    "Comparison",
    "DecodeCall",
    "assert_same_rounding",
    "compare",
    "compare_gradients",
    "compare_lse",
    "floor_of_out",
    "fp8_budget",
    "random_call",
    "random_decode_call",
]

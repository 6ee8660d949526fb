"""Input makers, error budgets and random problems, used by the tests and by the bench alike."""

from .budget import Comparison, compare, compare_gradients, compare_lse, fp8_budget
from .inputs import Call, random_call

__all__ = ["Call", "Comparison", "compare", "compare_gradients", "compare_lse", "fp8_budget", "random_call"]

"""One sequence over many ranks: `plan` says who owns which tokens, `attention` computes over all of them."""

from .attention import attention
from .cost import Hardware
from .layout import Layout, Run
from .plan import ContextPlan, plan
from .schedule import Schedule, Segment, Step

__all__ = ["ContextPlan", "Hardware", "Layout", "Run", "Schedule", "Segment", "Step", "attention", "plan"]

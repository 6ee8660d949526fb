"""One sequence over many ranks: `plan` says who owns which tokens; `attention` and `decode` compute over them all."""

from .attention import attention
from .cost import Hardware
from .decode import decode
from .layout import Layout, Run
from .parallel_style import ContextParallel
from .plan import ContextPlan, plan
from .schedule import Schedule, Segment, Step

__all__ = [
    "ContextParallel",
    "ContextPlan",
    "Hardware",
    "Layout",
    "Run",
    "Schedule",
    "Segment",
    "Step",
    "attention",
    "decode",
    "plan",
]

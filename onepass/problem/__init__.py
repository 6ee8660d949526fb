"""What a backend is asked to compute: attention and attention over a cache, described without their data."""

from .attention import (
    V_KEYS,
    AttentionInputs,
    AttentionProblem,
    Blocks,
    Descales,
    Mask,
    Modifiers,
    Quantization,
)

__all__ = [
    "V_KEYS",
    "AttentionInputs",
    "AttentionProblem",
    "Blocks",
    "Descales",
    "Mask",
    "Modifiers",
    "Quantization",
]

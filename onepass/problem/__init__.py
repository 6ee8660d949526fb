"""What is asked of a backend, without its data: attention, attention over a cache, and the tensors of both."""

from .attention import (
    V_KEYS,
    AttentionInputs,
    AttentionProblem,
    Descales,
    Mask,
    Quantization,
    QuantizedInputs,
)

__all__ = [
    "V_KEYS",
    "AttentionInputs",
    "AttentionProblem",
    "Descales",
    "Mask",
    "Quantization",
    "QuantizedInputs",
]

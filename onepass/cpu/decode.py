"""Attention over a key/value cache on a CPU: as `tiled` does it, with sequences by torch's C++ operator."""

from __future__ import annotations

from torch import Tensor

from ..problem import AttentionInputs, AttentionProblem
from ..problem.decode import DecodeInputs, DecodeProblem
from ..tiled import decode as tiled_decode
from .forward import by_operators, forward
from .masks import needs_masks


def decode(problem: DecodeProblem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
    """out and lse of a call of `onepass.attention_decode`; the cache is untouched if it raises."""
    return tiled_decode.decode(problem, inputs, forward, _batch)


def _batch(problem: AttentionProblem, inputs: AttentionInputs) -> tuple[Tensor, Tensor] | None:
    """`by_operators`, but not by masks, which depend on the capacity of a cache.

    On one thread its bits are those of the sequences alone. On several, a product with one row is rounded by where the
    buffer of its thread lies in memory (MKL 2024.2), and the batch decides which thread computes a head.
    """
    return None if needs_masks(problem) else by_operators(problem, inputs)

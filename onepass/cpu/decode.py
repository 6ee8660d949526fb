"""Attention over a key/value cache on a CPU: as `tiled` does it, with sequences by torch's C++ operator."""

from __future__ import annotations

from torch import Tensor

from ..problem.decode import DecodeInputs, DecodeProblem
from ..tiled import decode as tiled_decode
from .forward import by_operators, forward


def decode(problem: DecodeProblem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
    """out and lse of a call of `onepass.attention_decode`; the cache is untouched if it raises."""
    return tiled_decode.decode(problem, inputs, forward, by_operators)

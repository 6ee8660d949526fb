"""Sinks in a kernel: one more key, of value 0, that every row of a sequence sees."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from .....geometry.integers import select


class Sinks(NamedTuple):
    """The sinks of a call.

    Attributes:
        logits: (num_heads_q,) float32.
        cu_seqlens_q: offsets of packed sequences; rows from the last offset on belong to no sequence and have no sink.
    """

    logits: cute.Tensor
    cu_seqlens_q: cute.Tensor | None

    def at_row(self, head: Int32, row: Int32) -> Float32:
        """The sink of a row of a head. Args: row: for packed sequences, the row or the first row of its sequence."""
        sink = self.logits[head]
        if self.cu_seqlens_q is None:
            return sink
        end = self.cu_seqlens_q[cute.size(self.cu_seqlens_q) - 1]
        return select(row < end, sink, -Float32.inf)


def weight_of_sink(sink: Float32, exponent: Float32) -> Float32:
    """exp2(exponent): what a sink adds to a sum of exponentials.

    With an infinite sink no key counts: the exponent is inf - inf, and the weight is 1.

    Args: exponent: the sink minus the sum's reference, which is no smaller.
    """
    return select(sink == Float32.inf, Float32(1.0), cute.math.exp2(exponent, fastmath=True))

"""Sinks in a kernel: a key of value 0 more, which every row of a sequence sees."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from .....geometry.integers import select


class Sinks(NamedTuple):
    """What a kernel is told of them.

    Attributes:
        logits: (num_heads_q,) float32.
        cu_seqlens_q: of packed sequences; rows from its last offset on belong to none, and have no sink.
    """

    logits: cute.Tensor
    cu_seqlens_q: cute.Tensor | None

    def at_row(self, head: Int32, row: Int32) -> Float32:
        """The sink of a row of a head. Args: row: of packed sequences it, or the first one of its sequence."""
        sink = self.logits[head]
        if self.cu_seqlens_q is None:
            return sink
        end = self.cu_seqlens_q[cute.size(self.cu_seqlens_q) - 1]
        return select(row < end, sink, -Float32.inf)


def weight_of_sink(sink: Float32, exponent: Float32) -> Float32:
    """exp2(exponent): what a sink adds to a sum of exponentials.

    Args: exponent: from the sum's reference, which is no smaller, to the sink. Of an infinite one it is inf - inf, and
    the weight is 1: no key counts beside it.
    """
    return select(sink == Float32.inf, Float32(1.0), cute.math.exp2(exponent, fastmath=True))

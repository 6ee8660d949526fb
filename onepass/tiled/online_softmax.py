"""The online softmax: softmax(s) @ v over keys that arrive tile by tile, in one pass.

For one row with scores s_j, after any set of keys has been seen, three values are enough:

    m   = max_j s_j                   row_max   (the reference; any value would do, but the maximum cannot overflow)
    l   = sum_j exp(s_j - m)          row_sum
    acc = sum_j exp(s_j - m) v_j      acc_o

A new tile T moves the reference from m to m' = max(m, max_T s) and rescales the earlier sums:

    l'   = exp(m - m') l   + sum_T exp(s_j - m')
    acc' = exp(m - m') acc + sum_T exp(s_j - m') v_j

At the end, out = acc / l and lse = m + log l, for any order of the keys. This is exact, because softmax does not
depend on the reference. (Milakov & Gimelshein, arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691, section 3.1.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .mask import TilePairs, fill_hidden, zero_hidden

# The reference exists to keep exp(s - m) away from overflow and underflow, and scores of ordinary size need none: with
# m = 0 the sums themselves tell afterwards whether all was well. Every term is positive, so row_sum <= 1e10 means that
# none was larger, and row_sum >= 1e-3 that the largest of n terms was at least 1e-3 / n: terms that underflowed next to
# it (below 1e-38) are 1e-35 n of it, far below float32's 6e-8.
SAFE_ROW_SUM = (1e-3, 1e10)
# Scores known beforehand to lie in [-23, 23] cannot overflow either: exp(23) = 1e10.
SAFE_SCORE = 23.0


def log_tiny(dtype: torch.dtype) -> float:
    """A floor for exponents just above the logarithm of the smallest normal number.

    exp and GEMMs are up to 200 times slower on denormal numbers (measured on a CPU with AVX-512), and a probability
    of 2e-38 is negligible compared with its row's maximum of 1.
    """
    return math.log(torch.finfo(dtype).tiny) + 0.5


def _first_call_of_vector_math() -> None:
    """Let one thread call the vector functions that the tiles use before all others.

    MKL sets them up in their first call, and where two threads make that call together, one of them can get the
    low-accuracy variant for it: relative errors of 1.5e-4 in exp, in 3 of 16 new processes (torch 2.13.0).
    """
    for dtype in (torch.float32, torch.float64):
        zeros = torch.zeros(64, dtype=dtype, device="cpu")
        for function in (torch.exp, torch.log, torch.tanh):
            function(zeros)


_first_call_of_vector_math()


class OnlineSoftmax:
    """The three values of every row of a query tile.

    Args:
        acc_o: (heads, rows, head_dim_v), contiguous and uninitialized: becomes the unnormalized output.
        fixed_reference: take m = 0 throughout, which needs neither a maximum nor a rescaling; `is_safe` tells in the
            end whether that was right.
    """

    def __init__(self, acc_o: Tensor, fixed_reference: bool):
        self.acc_o = acc_o
        self.fixed_reference = fixed_reference
        self.row_max: Tensor | None = None  # (heads, rows, 1); stays None with a fixed reference
        self.row_sum: Tensor | None = None  # (heads, rows, 1); None: no key seen yet, and nothing to finish

    def update(self, scores: Tensor, pairs: TilePairs | None) -> tuple[Tensor, bool]:
        """One step of the recurrence for l; scores (heads, rows, keys) become exp(scores - row_max) in place.

        Args:
            pairs: the mask of the tile; None if every row sees every key.

        Returns: those probabilities, and whether they are the first (then acc_o = p @ v, else acc_o += p @ v).
        """
        is_first = self.row_sum is None
        if self.fixed_reference:
            p = scores.exp_()
            zero_hidden(p, pairs)  # a hidden inf or NaN becomes NaN, and is_safe says no
            tile_sum = p.sum(-1, keepdim=True)
            self.row_sum = tile_sum if self.row_sum is None else self.row_sum.add_(tile_sum)
            return p, is_first
        fill_hidden(scores, pairs, -torch.inf)
        row_max = scores.amax(-1, keepdim=True)
        if self.row_max is not None:
            torch.maximum(self.row_max, row_max, out=row_max)
        # a row that has seen no key yet: -inf - -inf would be NaN
        reference = row_max.masked_fill(row_max == -torch.inf, 0.0)
        p = scores.sub_(reference).clamp_(min=log_tiny(scores.dtype)).exp_()
        zero_hidden(p, pairs)
        tile_sum = p.sum(-1, keepdim=True)
        if self.row_sum is None or self.row_max is None:
            self.row_sum = tile_sum
        else:
            row_scale = self.row_max.sub_(reference).exp_()
            self.row_sum.mul_(row_scale).add_(tile_sum)
            self.acc_o.mul_(row_scale)
        self.row_max = row_max
        return p, is_first

    def is_safe(self) -> bool:
        """Whether a fixed reference served every row; if not, the tile has to be done again without."""
        assert self.row_sum is not None
        low, high = torch.aminmax(self.row_sum)
        in_range = SAFE_ROW_SUM[0] <= float(low) and float(high) <= SAFE_ROW_SUM[1]
        # values so large that p v overflowed, or a NaN
        return in_range and math.isfinite(float(self.acc_o.sum()))

    def finish(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """The factor by which acc_o becomes the output, and lse; (heads, rows, 1) each.

        Args:
            sinks: (heads, rows, 1) or None: a key of this score and of value 0, seen by every row.
        """
        assert self.row_sum is not None
        lse = torch.log(self.row_sum)
        if self.row_max is not None:
            lse += self.row_max
        if sinks is None:
            weight = self.row_sum.reciprocal()
        else:
            reference = 0.0 if self.row_max is None else self.row_max
            lse = torch.logaddexp(lse, sinks)
            weight = torch.exp(reference - lse)
        if self.row_max is not None:  # else is_safe has seen that no row is empty
            weight.masked_fill_(self.row_sum == 0, 0.0)
        return weight, lse

"""The online softmax: softmax(s) @ v over keys that arrive tile by tile, in one pass.

For one row with scores s_j, after any set of keys has been seen, three values are enough:

    m   = max_j s_j                   row_max   (the reference: any value would do, the maximum cannot overflow)
    l   = sum_j exp(s_j - m)          row_sum
    acc = sum_j exp(s_j - m) v_j      acc_o

A new tile T moves the reference from m to m' = max(m, max_T s) and rescales what was summed before it:

    l'   = exp(m - m') l   + sum_T exp(s_j - m')
    acc' = exp(m - m') acc + sum_T exp(s_j - m') v_j

and in the end out = acc / l and lse = m + log l, whatever the order of the keys was. This is exact: softmax does not
depend on the reference. (Milakov & Gimelshein, arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691, section 3.1.)
"""

from __future__ import annotations

import torch
from torch import Tensor

# If every score of a call is known to lie in [-24, 24], exp(s) lies in [4e-11, 3e10] and a sum of 2^40 of them is
# far from float32's limit of 3e38: then 0 is a safe reference, and neither a maximum nor a rescaling is needed.
SAFE_SCORE = 24.0
# ... as long as the values it is multiplied with leave room on both sides, too.
SAFE_VALUES = (1e-16, 1e16)


def scores_are_safe(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, softcap: float | None) -> bool:
    """True if no score can leave [-SAFE_SCORE, SAFE_SCORE], by |q.k| <= |q| |k| (Cauchy-Schwarz), or by the softcap.

    Costs one read of q, k and v, where the maximum over scores would read every score. NaN and inf compare false.
    """
    accum = torch.float64 if q.dtype == torch.float64 else torch.float32
    bound = softcap
    if bound is None or bound > SAFE_SCORE:
        q_norm, k_norm = (torch.linalg.vector_norm(x, dim=-1, dtype=accum).amax() for x in (q, k))
        bound = abs(softmax_scale) * float(q_norm) * float(k_norm)
    largest_value = float(v.abs().amax())
    return bound <= SAFE_SCORE and SAFE_VALUES[0] <= largest_value <= SAFE_VALUES[1]


class OnlineSoftmax:
    """Row maxima and row sums of one tile of queries, (heads, rows, 1) each.

    Args:
        acc_o: (heads, rows, head_dim_v), the unnormalised output; rescaled in place when a maximum grows.
        fixed_reference: use 0 in place of the row maximum (only when `scores_are_safe`).
    """

    def __init__(self, acc_o: Tensor, fixed_reference: bool):
        shape = (*acc_o.shape[:-1], 1)
        self.acc_o = acc_o
        self.row_max = None if fixed_reference else acc_o.new_full(shape, -torch.inf)
        self.row_sum = acc_o.new_zeros(shape)

    def update(self, scores: Tensor) -> Tensor:
        """Turn a tile of scores (heads, rows, keys) into exp(scores - row_max), in place; rescale earlier sums."""
        if self.row_max is None:
            p = scores.exp_()
            self.row_sum += p.sum(-1, keepdim=True)
            return p
        row_max = torch.maximum(self.row_max, scores.amax(-1, keepdim=True))
        # a row that has seen no key yet: -inf - -inf would be NaN
        reference = torch.where(row_max == -torch.inf, 0.0, row_max)
        row_scale = torch.exp(self.row_max - reference)
        p = scores.sub_(reference).exp_()
        self.row_sum.mul_(row_scale).add_(p.sum(-1, keepdim=True))
        self.acc_o.mul_(row_scale)
        self.row_max = row_max
        return p

    def finish(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """The normalised rows and their lse, (heads, rows, head_dim_v) and (heads, rows, 1).

        Args:
            sinks: (heads, rows, 1) or None: a key of this score and of value 0, seen by every row that sees a key.
        """
        is_empty = self.row_sum == 0
        lse = torch.log(self.row_sum)
        if self.row_max is not None:
            lse += self.row_max
        if sinks is None:
            weight = torch.where(is_empty, 0.0, 1.0 / self.row_sum)
        else:
            reference = 0.0 if self.row_max is None else self.row_max
            lse = torch.where(is_empty, -torch.inf, torch.logaddexp(lse, sinks))
            weight = torch.where(is_empty, 0.0, torch.exp(reference - lse))
        return self.acc_o.mul_(weight), lse

"""`merge_partials`: attention over a union of sets of keys, from attention over each set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..namespace import OPERATORS
from ..ops.partials import merges_in_one_kernel
from ..tiled.merge import merge_in_torch
from ..validation import partials
from .attention import AttentionOutput


def merge_partials(outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor) -> AttentionOutput:
    """Attention over the union of disjoint key sets, from the attention over each: exact, not an approximation.

    With lse = log(sum_i exp(lse_i)), the merged row is sum_i exp(lse_i - lse) * out_i. Order and grouping do not
    matter beyond rounding. A partial in which a row saw neither key nor sink (lse_i = -inf) adds nothing to that row,
    whatever its out_i holds.

    Args:
        outs: sequence of n tensors (batch, seqlen_q, num_heads, head_dim_v) or (total_q, num_heads, head_dim_v),
            or one tensor that stacks them in dimension 0.
        lses: n tensors (batch, num_heads, seqlen_q) or (num_heads, total_q), natural log, float32 or float64, as
            `return_lse=True` gives them. At most one partial may include sinks; it keeps their share even in rows that
            see none of its keys.

    Returns: AttentionOutput(out, lse), out in the dtype of outs; both are differentiable. lse = -inf and out = 0 where
    no partial saw a key or a sink. Raises: TypeError or ValueError if shapes, dtypes or devices disagree.

    Source: FlashAttention-2, arXiv:2307.08691, section 2.3.
    """
    stacked = outs, lses
    outs, lses = partials.check_partials(outs, lses)
    if merges_in_one_kernel(outs, lses):
        whole = (t if isinstance(t, Tensor) else torch.stack(tuple(t)) for t in stacked)
        return AttentionOutput(*OPERATORS.merge_partials(*whole))
    merged, lse = merge_in_torch(outs, lses)
    return AttentionOutput(merged.to(outs[0].dtype), lse)

"""Results of attention over sets of keys, merged into attention over all keys: plain PyTorch, differentiable."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_in_torch(
    outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The formula of `onepass.merge_partials`.

    Args:
        outs: (.., seqlen_q, num_heads, head_dim_v) each. lses: (.., num_heads, seqlen_q) each, natural log.
        sinks: (num_heads,): one more key of value 0, which every row sees and no partial includes.

    Returns: out in lse's dtype, and lse. A partial in which a row saw no key adds nothing, whatever its out holds.
    """
    partial_lse = torch.stack(tuple(lses))
    row_max = partial_lse.detach().amax(0)
    if sinks is not None:
        sinks = sinks.to(row_max.dtype)[:, None]
        row_max = torch.fmax(row_max, sinks.detach())
    row_max = torch.where(row_max == -torch.inf, 0.0, row_max)
    weights = torch.exp(partial_lse - row_max)
    total = weights.sum(0)
    is_empty = total == 0
    if sinks is not None:
        # next to an infinite sink no other term counts; and inf - inf would be NaN
        sink_weight = torch.where(sinks == torch.inf, 1.0, torch.exp(sinks - row_max))
        is_empty = is_empty & (sink_weight == 0)
        total = total + sink_weight
    # both branches of a where are differentiated: keep log and the division away from zero
    safe_total = torch.where(is_empty, 1.0, total)
    lse = torch.where(is_empty, -torch.inf, safe_total.log() + row_max)
    # a sink of NaN must not reach the share of a partial that adds nothing
    shares = torch.where(weights == 0, 0.0, weights / safe_total).transpose(-1, -2).unsqueeze(-1)
    # an empty partial is taken out before the product, not after: 0 * NaN would reach the gradient of lse
    merged = torch.zeros((), dtype=lse.dtype, device=lse.device)
    for share, out in zip(shares, outs, strict=True):
        merged = merged + share * torch.where(share != 0, out.to(share.dtype), 0.0)
    return merged, lse

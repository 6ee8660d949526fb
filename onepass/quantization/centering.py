"""The means that are subtracted from K and V before rounding, and the correction of out and lse for them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import AttentionInputs
from .segments import rows_of, sequence_of


def as_rows(t: Tensor, exists: Tensor | None = None) -> Tensor:
    """t as (batch or 1, rows, heads, head_dim), with 0 where a row does not exist."""
    rows = t if t.dim() == 4 else t.unsqueeze(0)
    return rows if exists is None else torch.where(exists[..., None, None], rows, 0.0)


def existing_keys(inputs: AttentionInputs) -> Tensor | None:
    """(batch or 1, seqlen_k) bool: whether a key belongs to a sequence, within its seqused_k; None: all keys do."""
    total = inputs.k.shape[-3]
    row = torch.arange(total, device=inputs.k.device)
    if inputs.cu_seqlens_k is None:
        return None if inputs.seqused_k is None else row < inputs.seqused_k[:, None]
    sequence = sequence_of(inputs.cu_seqlens_k, total)
    exists = row < inputs.cu_seqlens_k[-1]
    if inputs.seqused_k is not None and inputs.seqused_k.numel() > 0:
        exists &= row - inputs.cu_seqlens_k[sequence] < inputs.seqused_k[sequence]
    return exists[None]


def mean_of_keys(x: Tensor, exists: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """(batch, heads, head_dim) float32: the mean of the rows that exist.

    NaN and inf count as 0: subtracting any vector is exact, so the mean need not be.
    """
    finite = x.nan_to_num(0.0, 0.0, 0.0)
    weight = torch.ones(x.shape[:2], dtype=torch.float32, device=x.device) if exists is None else exists.float()
    if cu_seqlens is None:
        sums, count = finite.sum(1, dtype=torch.float32), weight.sum(1)
    else:
        sequence, batch = sequence_of(cu_seqlens, x.shape[1]), cu_seqlens.shape[0] - 1
        sums = weight.new_zeros(batch, *x.shape[2:])
        count = weight.new_zeros(batch)
        if batch > 0:
            sums.index_add_(0, sequence, finite[0].float())
            count.index_add_(0, sequence, weight[0])
    return sums / count.clamp(min=1.0)[:, None, None]


def without_mean(x: Tensor, mean: Tensor, exists: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """x minus the mean of its sequence, with 0 where a row does not exist."""
    difference = x - rows_of(mean, cu_seqlens, x.shape[1])
    return difference if exists is None else torch.where(exists[..., None, None], difference, 0.0)


def k_mean_scores(x_q: Tensor, k_mean: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """(batch or 1, num_heads_q, rows): the dot product of each query with the mean of its keys."""
    group = x_q.shape[2] // max(1, k_mean.shape[1])
    mean = rows_of(k_mean.repeat_interleave(group, 1), cu_seqlens_q, x_q.shape[1])
    return torch.linalg.vecdot(x_q, mean).transpose(1, 2).contiguous()


def restored(
    score_shift: Tensor | None,
    v_mean: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """out and lse of a call with the original K and V, from out and lse of the call with their means subtracted.

    Args:
        score_shift, v_mean: attributes of `QuantizedQKV`.
        sinks: the sinks of the call. The given out and lse do not include them if there is a score_shift, and include
            them otherwise.
    """
    if score_shift is None and v_mean is None:
        return out, lse
    is_empty = lse == -torch.inf
    share = torch.ones_like(lse)  # the fraction of a row's probability that lies on keys, not on the sink
    sink = None if sinks is None else sinks.to(lse.dtype)[:, None]
    if score_shift is not None:
        lse = lse_of_keys = torch.where(is_empty, lse, lse + scale * score_shift)
        if sink is not None:
            lse = torch.logaddexp(lse_of_keys, sink)
            if cu_seqlens_q is not None:  # rows that belong to no sequence have no sink
                lse.masked_fill_(torch.arange(lse.shape[-1], device=lse.device) >= cu_seqlens_q[-1], -torch.inf)
            share = torch.where(is_empty, 0.0, torch.exp(lse_of_keys - lse))
            out = (out * share.transpose(-1, -2)[..., None]).to(out.dtype)
    elif sink is not None:
        # An empty row has lse = sink. Where the share is NaN, out is NaN already or no key has a share.
        share = (1.0 - torch.exp(sink - lse)).nan_to_num(0.0)
    if v_mean is not None:
        share = torch.where(is_empty, 0.0, share)
        mean = v_mean.repeat_interleave(out.shape[-2] // max(1, v_mean.shape[1]), 1)
        mean = rows_of(mean, cu_seqlens_q, out.shape[-3])
        mean = mean if cu_seqlens_q is None else mean[0]
        out = torch.add(out, mean * share.transpose(-1, -2)[..., None]).to(out.dtype)
    return out, lse

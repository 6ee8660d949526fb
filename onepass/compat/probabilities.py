"""S_dmask: the dense probabilities of a call with dropout, and which of them were dropped, for debugging.

flash-attn 2 returns S_dmask with `return_attn_probs=True`. The magnitude of an element is exp(score - maximum of its
row); divided by the sum of the magnitudes of its row it is the probability before dropout. An element is negative where
dropout left the pair out, even if the probability rounds to 0, and 0 where the mask hides the key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api.steps import Steps
from ..geometry import philox
from ..ops.autocast import without_autocast
from ..problem import AttentionProblem
from ..validation.scalars import LARGEST_BLOCK, check_int

ROUNDED_TO = 128  # the sizes of S_dmask are multiples of this number
ONE_BLOCK = 2**31 - 1  # elements of a row are relative to one maximum, as if a block of keys held all of them


def round_up(length: int) -> int:
    """The length as a size of S_dmask."""
    return -(-length // ROUNDED_TO) * ROUNDED_TO


def of_call(call: Steps, alibi_slopes: Tensor | None, lengths: dict[str, Any], starts: Tensor | None = None) -> Tensor:
    """S_dmask of a call with dropout, (batch, num_heads_q, round_up(longest queries), round_up(longest keys)).

    Args:
        lengths: offsets, longest lengths and used lengths of packed sequences, or {}.
        starts: (batch,) int32: keys of a sequence before it do not exist.
    """
    assert call.dropout_state is not None
    q, k = call.inputs[:2]
    if lengths:
        longest = (_longest(name, lengths[name]) for name in ("max_seqlen_q", "max_seqlen_k"))
        offsets = lengths["cu_seqlens_q"], lengths["cu_seqlens_k"]
        q, k = (_in_batches(*packed) for packed in zip((q, k), offsets, longest, strict=True))
        lengths_q, lengths_k = (cu_seqlens.diff() for cu_seqlens in offsets)
        used = lengths.get("seqused_k")
        lengths_k = lengths_k if used is None else used
    else:
        lengths_q, lengths_k = (torch.full((q.shape[0],), t.shape[1], device=q.device) for t in (q, k))
    return _signed(call.problem, q, k, lengths_q, lengths_k, alibi_slopes, call.dropout_state, starts)


def _longest(name: str, value: Any) -> int:
    """The longest length of sequences, as a size of S_dmask. A tensor is read, which waits for its device."""
    value = value.item() if isinstance(value, Tensor) else value
    value = check_int(name, value, "an int where the probabilities of a call with dropout are returned", least=0)
    if value > LARGEST_BLOCK:
        raise ValueError(f"{name}: expected at most {LARGEST_BLOCK}, got {value}")
    return value


def _in_batches(packed: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """(batch, longest, num_heads, head_dim): packed rows, and arbitrary rows past the end of each sequence."""
    if packed.shape[0] == 0:
        return packed.new_zeros(cu_seqlens.shape[0] - 1, longest, *packed.shape[1:])
    rows = cu_seqlens[:-1, None] + torch.arange(longest, device=packed.device)
    return packed[rows.clamp(max=packed.shape[0] - 1)]


def _signed(
    problem: AttentionProblem,
    q: Tensor,
    k: Tensor,
    lengths_q: Tensor,
    lengths_k: Tensor,
    alibi_slopes: Tensor | None,
    state: Tensor,
    starts: Tensor | None,
) -> Tensor:
    """S_dmask of a padded batch.

    Args:
        lengths_q, lengths_k: (batch,), how many rows of each entry exist.
        starts: (batch,), the first key of each entry, or None.
    """
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, dtype = k.shape[1], q.dtype
    with torch.no_grad(), without_autocast(q.device.type):
        accum = problem.accum_dtype
        q, k = (x.to(accum).transpose(1, 2) for x in (q, k))
        scores = (q * problem.softmax_scale) @ k.repeat_interleave(problem.qhead_per_kvhead, 1).mT
        if problem.softcap is not None:
            scores = problem.softcap * torch.tanh(scores / problem.softcap)
        row, column = (torch.arange(n, device=q.device) for n in (seqlen_q, seqlen_k))
        position = (row + (lengths_k - lengths_q)[:, None])[:, None, :, None]
        if alibi_slopes is not None:
            slopes = alibi_slopes.to(accum).expand(batch, heads)[..., None, None]
            scores = scores - slopes * (position - column).abs()
        is_visible = (row < lengths_q[:, None])[:, None, :, None] & (column < lengths_k[:, None])[:, None, None]
        if starts is not None:
            is_visible = is_visible & (column >= starts[:, None])[:, None, None]
        left, right = problem.mask.window_left, problem.mask.window_right
        if left is not None:
            is_visible = is_visible & (column >= position - left)
        if right is not None:
            is_visible = is_visible & (column <= position + right)
        scores = scores.masked_fill(~is_visible, -torch.inf)
        maximum = scores.amax(-1, keepdim=True) if seqlen_k else scores
        found = torch.where(is_visible, torch.exp(scores - maximum), 0.0).to(dtype)
        instances = torch.arange(batch * heads, device=q.device).view(batch, heads, 1, 1)
        is_kept = philox.kept_pairs(state, problem.dropout_p, instances, row[:, None], column)
        dropped = -found.clamp(min=torch.finfo(dtype).smallest_normal)
        found = torch.where(is_visible & ~is_kept, dropped, found)
        return torch.nn.functional.pad(found, (0, round_up(seqlen_k) - seqlen_k, 0, round_up(seqlen_q) - seqlen_q))

"""The number of (query, key) pairs that a call computes with, from which the FLOPs of its operators are counted.

Lengths in tensors are read if the tensors have values, which waits for a GPU. If they have none (FakeTensorMode, the
"meta" device), the count is an upper bound: the most work that a call of that shape could have.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from ..problem import AttentionInputs
from ..problem.decode import DecodeInputs
from .block_range import count_visible_pairs


def visible_pairs(inputs: AttentionInputs, window_left: int | None, window_right: int | None) -> int:
    """The unmasked (query, key) pairs of all sequences, for one head.

    Without values, packed rows count as one sequence (no way to cut them has more pairs), and all keys count as used.
    """
    window = window_left, window_right
    used = _values(inputs.seqused_k)
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        batch, seqlen_q, seqlen_k = inputs.q.shape[0], inputs.q.shape[1], inputs.k.shape[1]
        if used is None:
            return batch * count_visible_pairs(seqlen_q, seqlen_k, *window)
        return sum(count_visible_pairs(seqlen_q, n, *window) for n in used)
    queries, keys = _lengths(inputs.cu_seqlens_q), _lengths(inputs.cu_seqlens_k)
    if queries is None or keys is None:
        return count_visible_pairs(inputs.q.shape[0], inputs.k.shape[0], *window)
    return sum(count_visible_pairs(m, n, *window) for m, n in zip(queries, used or keys, strict=True))


def visible_pairs_of_cache(inputs: DecodeInputs, window_left: int | None, window_right: int | None) -> int:
    """The unmasked pairs of a call of `attention_decode`, for one head; keys are the filled ones and the new ones.

    Without values the cache counts as full, and packed queries see all of its keys that the window reaches.
    """
    window, capacity = (window_left, window_right), inputs.capacity
    filled = _values(inputs.cache_seqlens)
    if inputs.cu_seqlens_q is None:
        queries: list[int] | None = [inputs.q.shape[1]] * inputs.batch
    else:
        queries = _lengths(inputs.cu_seqlens_q)
    if queries is None:
        in_sight = capacity if None in window else min(capacity, sum(n for n in window if n is not None) + 1)
        total = inputs.q.shape[0]
        return min(total * in_sight, count_visible_pairs(total, inputs.batch * capacity, *window))
    filled = [capacity] * inputs.batch if filled is None else filled
    keys = (min(n + inputs.seqlen_new, capacity) for n in filled)
    return sum(count_visible_pairs(m, n, *window) for m, n in zip(queries, keys, strict=True))


def _lengths(cu_seqlens: Tensor) -> list[int] | None:
    """The number of rows of each packed sequence; None if the offsets have no values."""
    offsets = _values(cu_seqlens)
    return None if offsets is None else [end - start for start, end in pairwise(offsets)]


def _values(t: Tensor | None) -> list[int] | None:
    """The values of a tensor as a list; None if it has none."""
    return None if t is None or t.is_meta or is_fake(t) else t.tolist()

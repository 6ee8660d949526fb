"""Hints for messages that refuse a shape which would fit if seqlen and num_heads were exchanged."""

from __future__ import annotations

from torch import Tensor


def transposed(t: Tensor) -> Tensor:
    """A view of t with seqlen and num_heads exchanged."""
    return t.transpose(-3, -2)


def head_count_hint(queries: dict[str, Tensor], keys: dict[str, Tensor]) -> str:
    """The hint of a call whose head counts do not fit: which tensors would fit if they were transposed, or "".

    Args:
        queries, keys: q, and k and v, by the names of the caller's arguments.
    """
    (q,), (k, *_) = queries.values(), keys.values()
    fitting = []
    for tensors in (queries | keys, queries, keys):
        seqlens_and_heads = [
            (t.shape[-2], t.shape[-3]) if any(t is other for other in tensors.values()) else (t.shape[-3], t.shape[-2])
            for t in (q, k)
        ]
        (seqlen_q, num_heads_q), (seqlen_k, num_heads_kv) = seqlens_and_heads
        if 0 < num_heads_kv <= num_heads_q and num_heads_q % num_heads_kv == 0:
            fitting.append((seqlen_q == seqlen_k, tensors))
    # among several choices, the first that gives queries and keys equal lengths, or else the first
    return transpose_hint(max(fitting, key=lambda one: one[0])[1]) if fitting else ""


def transpose_hint(tensors: dict[str, Tensor]) -> str:
    """The hint to pass transposed tensors. Args: tensors: by the names of the caller's arguments."""
    is_packed = all(t.dim() == 3 for t in tensors.values())
    dims = "(num_heads, total_tokens, head_dim)" if is_packed else "(batch, num_heads, seqlen, head_dim)"
    *most, last = tensors
    subject = f"{', '.join(most)} and {last} look" if most else f"{last} looks"
    calls = (f"{name}.transpose({t.dim() - 3}, {t.dim() - 2})" for name, t in tensors.items())
    return f" ({subject} like {dims}: pass {', '.join(calls)})"

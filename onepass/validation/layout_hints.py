"""Hints for messages that refuse a shape which would fit if seqlen and num_heads were exchanged.

They are questions, and are asked only where a tensor has fewer rows than heads: a tensor whose heads are wrong and
whose layout is right would be accepted after the exchange, and give wrong values.
"""

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
    exchangeable = {name for name, t in (queries | keys).items() if _has_few_rows(t)}
    exchangeable |= {name for name, t in queries.items() if t.shape[-2] == 1}  # one query, as in decoding
    for tensors in (queries | keys, queries, keys):
        if not exchangeable.issuperset(tensors):
            continue
        seqlens_and_heads = [
            (t.shape[-2], t.shape[-3]) if any(t is other for other in tensors.values()) else (t.shape[-3], t.shape[-2])
            for t in (q, k)
        ]
        (seqlen_q, num_heads_q), (seqlen_k, num_heads_kv) = seqlens_and_heads
        if 0 < num_heads_kv <= num_heads_q and num_heads_q % num_heads_kv == 0:
            fitting.append((seqlen_q == seqlen_k, tensors))
    # among several choices, the first that gives queries and keys equal lengths, or else the first
    return _question(max(fitting, key=lambda one: one[0])[1]) if fitting else ""


def transpose_hint(name: str, t: Tensor) -> str:
    """The hint of a tensor that would fit if it were transposed, or "". Args: name: of the caller's argument."""
    return _question({name: t}) if _has_few_rows(t) else ""


def _has_few_rows(t: Tensor) -> bool:
    return t.shape[-3] < t.shape[-2]


def _question(tensors: dict[str, Tensor]) -> str:
    is_packed = all(t.dim() == 3 for t in tensors.values())
    dims = "(num_heads, total_tokens, head_dim)" if is_packed else "(batch, num_heads, seqlen, head_dim)"
    *most, last = tensors
    subject = f"are {', '.join(most)} and {last}" if most else f"is {last}"
    calls = (f"{name}.transpose({t.dim() - 3}, {t.dim() - 2})" for name, t in tensors.items())
    return f" ({subject} {dims}? Then pass {', '.join(calls)})"

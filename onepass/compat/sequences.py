"""Lengths of sequences, brought from the forms of flash-attn to the form of `onepass.attention_varlen`.

flash-attn cuts queries and keys independently: each may be packed, with offsets, or dense, with the number of rows that
exist in each batch entry. Everything here is computed on the device of the lengths, and no value is read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..validation.tensors import DENSE_DIMS, check_int32, check_ranks, check_tensor, shape_of


class Packed(NamedTuple):
    """Sequences that lie one after the other in one tensor.

    Attributes:
        cu_seqlens: (batch + 1,) int32 offsets of the sequences.
        seqused: (batch,) int32: how many rows of each sequence exist; None: all rows do.
    """

    cu_seqlens: Tensor
    seqused: Tensor | None

    @property
    def lengths(self) -> Tensor:
        """The number of existing rows of each sequence, (batch,) int32."""
        lengths = self.cu_seqlens.diff()
        return lengths if self.seqused is None else torch.minimum(lengths, self.seqused).clamp_(min=0)


def as_packed(names: tuple[str, str], tensor: Tensor, cu_seqlens: Any, seqused: Any) -> Packed:
    """Queries or keys as packed sequences, from a packed tensor and its offsets or from a dense one.

    Args:
        names: the names of cu_seqlens (int32 of one dimension) and of seqused, for messages.
        tensor: packed (total, num_heads, head_dim) with cu_seqlens, else (batch, seqlen, num_heads, head_dim), which
            the caller flattens.
    """
    if cu_seqlens is None:
        batch, seqlen = tensor.shape[:2]
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=tensor.device) * seqlen
    elif cu_seqlens.shape[0] < 1:
        raise ValueError(f"{names[0]}: expected shape (batch + 1,), got {shape_of(cu_seqlens)}")
    if seqused is not None:
        shape = (cu_seqlens.shape[0] - 1,)
        check_int32(names[1], seqused, shape, "one per batch entry or sequence", tensor.device)
    return Packed(cu_seqlens, seqused)


def flattened(name: str, tensor: Any, cu_seqlens: Any) -> Tensor:
    """A packed tensor as it is, or a dense one with batch and sequence in one dimension."""
    check_tensor(name, tensor)
    rank = 4 if cu_seqlens is None else 3
    if tensor.dim() != rank:
        leading = "(batch, seqlen" if rank == 4 else "(total_tokens"
        raise ValueError(f"{name}: expected shape {leading}, num_heads, head_dim), got {shape_of(tensor)}")
    return tensor.flatten(0, 1) if rank == 4 else tensor


def without_unused_queries(queries: Packed, keys: Packed) -> tuple[Packed, Packed]:
    """Sequences in which all queries exist, with the same results as the given ones.

    Queries past seqused become sequences of their own without a key, so that their results are 0, and masks are aligned
    to the queries that exist. This doubles the number of sequences.
    """
    if queries.seqused is None:
        return queries, keys
    starts = queries.cu_seqlens[:-1]
    q_offsets = torch.stack((starts, starts + queries.lengths), 1).flatten()
    q_offsets = torch.cat((q_offsets, queries.cu_seqlens[-1:]))
    # the sequence of unused queries of entry b begins and ends where the keys of entry b + 1 begin
    k_offsets = keys.cu_seqlens.repeat_interleave(2)[1:]
    k_used = None
    if keys.seqused is not None:
        k_used = torch.stack((keys.seqused, torch.zeros_like(keys.seqused)), 1).flatten()
    return Packed(q_offsets, None), Packed(k_offsets, k_used)


class Lengths(NamedTuple):
    """The arguments of flash-attn that say where sequences begin and end; see `Arranged`."""

    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_q: Any = None
    seqused_k: Any = None
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None

    @classmethod
    def of(cls, arguments: Any) -> Lengths:
        """The lengths among the arguments of a call, see `conventions.takes`."""
        return cls._make(getattr(arguments, name) for name in cls._fields)


class Arranged:
    """q, k and v of a call of flash-attn as `onepass.attention` or `onepass.attention_varlen` takes them.

    A dense call in which all queries exist stays dense. Any other call is packed, and its results are brought back to
    the shapes of the call.

    Args:
        q, k, v: packed (total, num_heads, head_dim) with their cu_seqlens, else (batch, seqlen, num_heads, head_dim).
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths):
        self.is_dense = lengths.cu_seqlens_q is lengths.cu_seqlens_k is lengths.seqused_q is None
        self.entries = 1  # sequences of the packed call for each sequence of the given call
        if self.is_dense:
            named = {"q": q, "k": k, "v": v}
            for name, t in named.items():
                check_tensor(name, t)
            check_ranks(named, DENSE_DIMS, 4)
            if lengths.seqused_k is not None:
                check_int32("seqused_k", lengths.seqused_k, (q.shape[0],), "one per batch entry", q.device)
            self.tensors = q, k, v
            self.options: dict[str, Any] = {"seqused_k": lengths.seqused_k}
            return
        for name, offsets in (("cu_seqlens_q", lengths.cu_seqlens_q), ("cu_seqlens_k", lengths.cu_seqlens_k)):
            if offsets is not None:
                check_int32(name, offsets, ("batch + 1",), "one more offset than sequences", q.device)
        self.tensors = (
            flattened("q", q, lengths.cu_seqlens_q),
            flattened("k", k, lengths.cu_seqlens_k),
            flattened("v", v, lengths.cu_seqlens_k),
        )
        self.batch = None if lengths.cu_seqlens_q is not None else q.shape[0]
        queries = as_packed(("cu_seqlens_q", "seqused_q"), q, lengths.cu_seqlens_q, lengths.seqused_q)
        keys = as_packed(("cu_seqlens_k", "seqused_k"), k, lengths.cu_seqlens_k, lengths.seqused_k)
        if queries.cu_seqlens.shape != keys.cu_seqlens.shape:
            expected, given = (packed.cu_seqlens.shape[0] - 1 for packed in (queries, keys))
            raise ValueError(f"k: expected {expected} sequences like q, got {given}")
        self.entries = 1 if queries.seqused is None else 2
        queries, keys = without_unused_queries(queries, keys)
        self.options = {
            "cu_seqlens_q": queries.cu_seqlens,
            "cu_seqlens_k": keys.cu_seqlens,
            "seqused_k": keys.seqused,
            "max_seqlen_q": lengths.max_seqlen_q,
            "max_seqlen_k": lengths.max_seqlen_k,
        }
        self.lengths_k = keys.lengths

    def chunks(self, chunk: int) -> Tensor:
        """The `key_ranges` of attention within chunks."""
        q, k = self.tensors[:2]
        if not self.is_dense:
            return row_ranges(q.shape[0], self.options["cu_seqlens_q"], self.lengths_k, chunk=chunk)
        lengths = self.options["seqused_k"]
        if lengths is None:
            lengths = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
        return row_ranges(q.shape[1], None, lengths, chunk=chunk)

    def per_entry(self, t: Tensor) -> Tensor:
        """A tensor (batch, ..), with its entries repeated for the sequences of the packed call."""
        return t if self.entries == 1 else t.repeat_interleave(self.entries, 0)

    def as_given(self, rows: Tensor) -> Tensor:
        """Rows of queries in the shape of the call: (batch, seqlen_q, ..) or (total_q, ..)."""
        return rows if self.is_dense or self.batch is None else rows.unflatten(0, (self.batch, -1))

    def stats_as_given(self, lse: Tensor) -> Tensor:
        """lse in the shape of the call: (batch, num_heads_q, seqlen_q) or (num_heads_q, total_q)."""
        if self.is_dense or self.batch is None:
            return lse
        return lse.unflatten(1, (self.batch, -1)).transpose(0, 1)

    def rows(self, t: Tensor) -> Tensor:
        """The opposite of `as_given`."""
        return t if self.is_dense or self.batch is None else t.flatten(0, 1)

    def stats(self, lse: Tensor) -> Tensor:
        """The opposite of `stats_as_given`."""
        return lse if self.is_dense or self.batch is None else lse.transpose(0, 1).flatten(1)


def row_ranges(
    rows: int,
    cu_seqlens_q: Tensor | None,
    lengths_k: Tensor,
    *,
    starts: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """The `key_ranges` of left padding and of chunks.

    A chunk holds `chunk` keys, counted from the first key that exists, and a query sees the keys of the chunk in which
    it stands.

    Args:
        rows: seqlen_q, or the total number of packed queries.
        cu_seqlens_q: (batch + 1,) int32 offsets of packed queries; None: queries are dense.
        lengths_k: (batch,) int32, the position past the last key of each sequence.
        starts: (batch,) int32, the position of the first key that exists; None: 0.

    Returns: (batch, 1, seqlen_q, 2) int32, or (1, total_q, 2) for packed queries.
    """
    row = torch.arange(rows, dtype=torch.int32, device=lengths_k.device)
    first = torch.zeros_like(lengths_k) if starts is None else starts
    if cu_seqlens_q is None:
        position = row + (lengths_k - rows)[:, None]
        low, high = first[:, None].expand_as(position), lengths_k[:, None].expand_as(position)
    else:
        # rows past the last offset belong to no sequence and may get any range
        owner = torch.searchsorted(cu_seqlens_q[1:], row, right=True, out_int32=True)
        padded = torch.nn.functional.pad  # one more entry, for rows without a sequence
        lengths_q = cu_seqlens_q.diff()
        shift = padded(lengths_k - lengths_q - cu_seqlens_q[:-1], (0, 1))[owner]
        position = row + shift
        low, high = padded(first, (0, 1))[owner], padded(lengths_k, (0, 1))[owner]
    if chunk is not None:
        begin = position - (position - low).remainder(chunk)
        low, high = torch.maximum(low, begin), torch.minimum(high, begin + chunk)
    ranges = torch.stack((low, high), -1)
    return ranges[:, None] if cu_seqlens_q is None else ranges[None]

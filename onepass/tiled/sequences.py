"""The parts with equal geometry into which a call is cut: first sequences, then groups of heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from ..problem import AttentionInputs, AttentionProblem
from ..problem.lengths import read_values


class Sequences(NamedTuple):
    """Sequences of equal lengths, as indices into the dense or packed tensors of a call."""

    batch: slice | None  # entries of a dense tensor; None: packed
    queries: slice
    keys: slice
    entry: int = 0  # the first of these sequences among those of the call
    first_query: int = 0  # numbers of the first query and of the first key in their sequence
    first_key: int = 0

    @property
    def num_keys(self) -> int:
        return self.keys.stop - self.keys.start

    def rows(self, t: Tensor) -> Tensor:
        """View of q, out or their gradients: (n, seqlen_q, num_heads_q, head_dim)."""
        return t[self.batch, self.queries] if self.batch is not None else t[self.queries].unsqueeze(0)

    def cols(self, t: Tensor) -> Tensor:
        """View of k, v or their gradients: (n, seqlen_k, num_heads_kv, head_dim)."""
        return t[self.batch, self.keys] if self.batch is not None else t[self.keys].unsqueeze(0)

    def stats(self, t: Tensor) -> Tensor:
        """View of lse or delta: (n, num_heads_q, seqlen_q)."""
        return t[self.batch, :, self.queries] if self.batch is not None else t[:, self.queries].unsqueeze(0)


def sequences(problem: AttentionProblem, inputs: AttentionInputs) -> list[Sequences]:
    """All sequences of a call. Checks the values of the length tensors first.

    Keys before the start of a sequence, and queries before it, are left out.
    """
    cu_q, cu_k, used, starts = read_values(problem, inputs)
    if cu_q is None or cu_k is None:
        all_queries = slice(0, problem.seqlen_q)
        if used is None and starts is None:
            return [Sequences(slice(0, problem.batch), all_queries, slice(0, problem.seqlen_k))]
        cu_q, cu_k = [0] * (problem.batch + 1), [0] * (problem.batch + 1)
        ends_q, ends_k = [problem.seqlen_q] * problem.batch, used or [problem.seqlen_k] * problem.batch
        entries: list[slice | None] = [slice(b, b + 1) for b in range(problem.batch)]
    else:
        ends_q = cu_q[1:]
        ends_k = cu_k[1:] if used is None else [start + n for start, n in zip(cu_k, used, strict=False)]
        entries = [None] * problem.batch
    pieces = []
    for b in range(problem.batch):
        start = 0 if starts is None else starts[b]
        # the queries before the start, where positions are not given; with them a query says itself what it sees
        num_queries, num_keys = ends_q[b] - cu_q[b], ends_k[b] - cu_k[b]
        first = 0 if problem.has_q_positions else min(max(0, num_queries - (num_keys - start)), num_queries)
        first = 0 if starts is None else first
        queries, keys = slice(cu_q[b] + first, ends_q[b]), slice(cu_k[b] + start, ends_k[b])
        pieces.append(Sequences(entries[b], queries, keys, b, first, start))
    return pieces


def merged(pieces: list[Sequences]) -> list[Sequences]:
    """The pieces of dense tensors with neighbors that have the same rows and keys as one."""
    result: list[Sequences] = []
    for piece in pieces:
        last = result[-1] if result else None
        if last is not None and last.batch is not None and piece.batch is not None and last[1:3] == piece[1:3]:
            result[-1] = last._replace(batch=slice(last.batch.start, piece.batch.stop))
        else:
            result.append(piece)
    return result


class HeadGroup(NamedTuple):
    """Kv heads that go through the GEMMs together, with the query heads that they serve.

    Cutting one out of a tensor gives (entries, kv heads, ...): `q_rows` (.., qhead_per_kvhead, seqlen_q, head_dim),
    `kv_rows` (.., seqlen_k, head_dim), `stats` (.., qhead_per_kvhead, seqlen_q).
    """

    entries: slice
    heads: slice
    qhead_per_kvhead: int

    def q_rows(self, t: Tensor) -> Tensor:
        return t.unflatten(2, (-1, self.qhead_per_kvhead))[self.entries, :, self.heads].permute(0, 2, 3, 1, 4)

    def kv_rows(self, t: Tensor) -> Tensor:
        return t[self.entries, :, self.heads].permute(0, 2, 1, 3)

    def stats(self, t: Tensor) -> Tensor:
        return t.unflatten(1, (-1, self.qhead_per_kvhead))[self.entries, self.heads]

    def per_head(self, t: Tensor) -> Tensor:
        """sinks: (num_heads_q,) -> (kv heads, qhead_per_kvhead)."""
        return t.unflatten(0, (-1, self.qhead_per_kvhead))[self.heads]


def head_groups(problem: AttentionProblem, n: int, group_size: int) -> Iterator[HeadGroup]:
    """Cut n sequences x num_heads_kv into rectangles of about `group_size`."""
    heads = min(problem.num_heads_kv, group_size)
    entries = max(1, group_size // problem.num_heads_kv)
    for b in range(0, n, entries):
        for h in range(0, problem.num_heads_kv, heads):
            yield HeadGroup(slice(b, b + entries), slice(h, h + heads), problem.qhead_per_kvhead)

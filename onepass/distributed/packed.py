"""The tensors that turn a rank's share of packed sequences into one packed call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .exchange import to_device
from .plan import ContextPlan
from .schedule import Step


class PackedTables(NamedTuple):
    """The segments of a step as the sequences of one packed call.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: (segments + 1,) int32 offsets.
        documents: (segments,) int64, the number of each segment's sequence among the plan's.
        first_keys, key_counts: (segments,) int32, the first key of each segment in its sequence, and how many it has.
        lengths: (sequences,) int32, tokens of each of the plan's sequences.
        tokens, row_segments: (rows,) int64, the token and the segment of each row of q.
        positions: (rows,) int32, where the query of each row stands among the keys of its segment.
        are_aligned: whether the last query of each segment stands at its last key, and the others right before it.
        is_whole: whether the segments are the plan's sequences.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    documents: Tensor
    first_keys: Tensor
    key_counts: Tensor
    lengths: Tensor
    tokens: Tensor
    row_segments: Tensor
    positions: Tensor
    are_aligned: bool
    is_whole: bool

    def rows_of_queries(self, query_ranges: Tensor, num_keys: int) -> Tensor:
        """The `query_ranges` of all tokens (heads or 1, tokens, 2) as those of the packed call, of its rows of k."""
        total, starts = query_ranges.shape[1], self.lengths.cumsum(0) - self.lengths
        segments = torch.repeat_interleave(self.key_counts.long(), output_size=num_keys)
        first_tokens = starts[self.documents]
        offset = torch.arange(num_keys, device=segments.device) - self.cu_seqlens_k[segments]
        own = query_ranges[:, first_tokens[segments] + self.first_keys[segments] + offset].long()
        # the ends as tokens, and segments before tokens: rows ascend in that order
        lengths = self.lengths[self.documents][segments][:, None]
        ends = own.clamp(min=0).minimum(lengths) + first_tokens[segments][:, None]
        order = self.row_segments * (total + 1) + self.tokens
        rows = torch.searchsorted(order, segments[:, None] * (total + 1) + ends)
        return (rows - self.cu_seqlens_q[segments][:, None]).int()


def make_tables(plan: ContextPlan, step: Step, device: torch.device) -> PackedTables:
    segments, cu_seqlens = plan.segments(step), plan.schedule.cu_seqlens
    is_whole = plan.schedule.layout.num_ranks == step.width
    if is_whole:  # sequences without a token are there, too
        documents, queries = list(range(len(cu_seqlens) - 1)), list(cu_seqlens)
        first_keys, keys = [0] * len(documents), list(cu_seqlens)
    else:
        documents = [segment.document for segment in segments]
        first_keys = [segment.keys.start - cu_seqlens[segment.document] for segment in segments]
        queries, keys = [0], [0]
        for segment in segments:
            queries.append(queries[-1] + segment.num_queries)
            keys.append(keys[-1] + segment.keys.size)
    runs = [(run, segment.keys.start) for segment in segments for run in segment.runs]
    are_aligned = is_whole or all(len(s.runs) == 1 and s.runs[0].stop == s.keys.stop for s in segments)

    lengths = torch.tensor(cu_seqlens).diff()
    query_offsets, key_offsets = torch.tensor(queries), torch.tensor(keys)
    empty = [torch.empty(0, dtype=torch.int64)]
    tokens = torch.cat([torch.arange(*run) for run, _ in runs] or empty)
    positions = torch.cat([torch.arange(*run) - first for run, first in runs] or empty)
    row_segments = torch.repeat_interleave(query_offsets.diff(), output_size=len(tokens))
    int32, int64 = (lambda t, dtype=dtype: to_device(t.to(dtype), device) for dtype in (torch.int32, torch.int64))
    return PackedTables(
        int32(query_offsets),
        int32(key_offsets),
        int64(torch.tensor(documents)),
        int32(torch.tensor(first_keys)),
        int32(key_offsets.diff()),
        int32(lengths),
        int64(tokens),
        int64(row_segments),
        int32(positions),
        are_aligned,
        is_whole,
    )

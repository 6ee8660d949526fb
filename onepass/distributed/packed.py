"""The tensors that turn a rank's share of packed sequences into one packed call."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .schedule import Step

if TYPE_CHECKING:
    from .plan import ContextPlan


class PackedTables(NamedTuple):
    """A step's segments, each a sequence of the call.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32 offsets.
        documents: (segments,) int64, numbers of the plan's sequences.
        first_keys, key_counts: (segments,) int32, the first key of each segment in its sequence, and its keys.
        lengths: (sequences,) int32, tokens of each of the plan's sequences.
        tokens: (rows,) int64, the token of each row of q. row_segments: (rows,) int64, its segment.
        positions: (rows,) int32, where it stands among the segment's keys.
        are_aligned: the last query of each segment stands at its last key, and the others before it.
        is_whole: the segments are the plan's sequences.
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


def make_tables(plan: ContextPlan, step: Step, device: torch.device) -> PackedTables:
    segments, cu_seqlens = plan.segments(step), plan.schedule.cu_seqlens
    is_whole = plan.schedule.layout.num_ranks == step.width
    if is_whole:  # with the sequences that have no token
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

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    query_offsets, key_offsets = int32(queries), int32(keys)
    counts = query_offsets.diff().long()
    empty = [torch.empty(0, dtype=torch.int64)]
    tokens = torch.cat([torch.arange(*run) for run, _ in runs] or empty)
    positions = torch.cat([torch.arange(*run) - first for run, first in runs] or empty)
    return PackedTables(
        query_offsets,
        key_offsets,
        torch.tensor(documents, dtype=torch.int64, device=device),
        int32(first_keys),
        key_offsets.diff(),
        int32(list(cu_seqlens)).diff(),
        tokens.to(device),
        torch.repeat_interleave(torch.arange(len(documents), device=device), counts),
        positions.to(device, torch.int32),
        are_aligned,
        is_whole,
    )

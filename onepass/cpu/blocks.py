"""Calls with a block_mask by torch's C++ operator: each block of queries with the blocks of keys that it sees.

An item is a block of queries of one head, or of the heads of a group if they see the same keys. Items that see equally
many blocks of keys are entries of a batch, wherever they are, and their blocks of keys are copied next to each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..problem import AttentionInputs, AttentionProblem
from ..problem.attention import EMPTY
from ..tiled.modifiers import ScoreModifiers
from ..tiled.sequences import HeadGroup, Sequences

# Elements of K in a batch, unless one item has more. Measured with a fifth of the blocks of 64 x 64, 2048 keys, 8 heads
# of 64, and 2 cores: 2**16 takes 1.1 (forward) and 1.5 times as long (with the backward), and 2**20 1.07 and 1.09.
BATCH_ELEMENTS = 2**18


def gathers(problem: AttentionProblem) -> bool:
    """Whether keys are gathered. Those of ranges are often neighbors: rows with masks need no copies of them."""
    hides_pairs = problem.has_key_ranges or problem.has_query_ranges or problem.has_block_bits
    return problem.block_size is not None and not (hides_pairs or problem.adds_terms or problem.has_seqstart_k)


class Batch(NamedTuple):
    """Items that one call of the operator computes.

    Attributes:
        items: (n,) their numbers.
        keys: (n, count) the numbers of their blocks of keys, in `KeptBlocks.blocks_of_keys`.
        mask: (n, 1, queries of a block, count * keys of a block), added to scores; None if it would be 0.
    """

    items: Tensor
    keys: Tensor
    mask: Tensor | None


class KeptBlocks:
    """The items of sequences of equal lengths. `together` is the number of query heads of an item."""

    def __init__(self, problem: AttentionProblem, inputs: AttentionInputs, piece: Sequences):
        assert problem.block_size is not None
        modifiers = ScoreModifiers(
            problem, inputs, piece, HeadGroup(slice(None), slice(None), problem.qhead_per_kvhead)
        )
        assert modifiers.kinds is not None
        self.q_size, self.k_size = problem.block_size
        self.q_blocks, self.k_blocks = -(-modifiers.seqlen_q // self.q_size), -(-modifiers.seqlen_k // self.k_size)
        self.seqlen_q, self.seqlen_k = modifiers.seqlen_q, modifiers.seqlen_k
        self.head_dim, self.dtype = problem.head_dim, problem.accum_dtype
        seen = modifiers.kinds[..., : self.q_blocks, : self.k_blocks] != EMPTY
        entries, heads_kv, group = modifiers.shape
        self.together = group if bool((seen == seen[:, :, :1]).all()) else 1
        self.lead = entries, heads_kv, group // self.together
        # the intervals of keys of the rows of each item; rows past the last query are like it
        rows = torch.arange(self.q_blocks * self.q_size).clamp_(max=self.seqlen_q - 1)
        self.low, self.high = (
            self._of_items(t[..., rows].unflatten(-1, (self.q_blocks, self.q_size)))
            for t in (modifiers.low, modifiers.high)
        )
        start = torch.arange(self.k_blocks) * self.k_size
        end = start + self.k_size
        lowest, low = (t[:, None] for t in self.low.aminmax(dim=-1))
        high, highest = (t[:, None] for t in self.high.aminmax(dim=-1))
        self.is_seen = self._of_items(seen) & (lowest < end) & (highest > start)
        self.is_full = (low <= start) & (high >= end)

    def _of_items(self, t: Tensor) -> Tensor:
        """(entries or 1, kv heads or 1, .., blocks of queries, columns) -> (items, columns)."""
        return t[:, :, : self.lead[2]].expand(*self.lead, *t.shape[3:]).flatten(0, 3)

    def items(self, t: Tensor) -> Tensor:
        """(entries, seqlen_q, query heads, columns) -> (items, queries of a block, heads together, columns)."""
        t = _padded(t, self.q_blocks * self.q_size)
        t = t.view(t.shape[0], self.q_blocks, self.q_size, *self.lead[1:], self.together, t.shape[-1])
        return t.permute(0, 3, 4, 1, 5, 2, 6).flatten(0, 3).transpose(1, 2)

    def rows(self, t: Tensor) -> Tensor:
        """The tensor of rows from which `items` makes these items."""
        t = t.transpose(1, 2).unflatten(0, (*self.lead, self.q_blocks)).permute(0, 3, 5, 1, 2, 4, 6)
        return t.flatten(3, 5).flatten(1, 2)[:, : self.seqlen_q]

    def blocks_of_keys(self, t: Tensor) -> Tensor:
        """(entries, seqlen_k, kv heads, columns) -> (entries * kv heads * blocks, keys of a block, columns)."""
        t = _padded(t, self.k_blocks * self.k_size)
        return t.unflatten(1, (self.k_blocks, self.k_size)).permute(0, 3, 1, 2, 4).flatten(0, 2)

    def keys(self, t: Tensor) -> Tensor:
        """The tensor of keys from which `blocks_of_keys` makes these blocks."""
        t = t.unflatten(0, (*self.lead[:2], self.k_blocks)).permute(0, 2, 3, 1, 4)
        return t.flatten(1, 2)[:, : self.seqlen_k]

    def batches(self, most_keys: int | None = None) -> Iterator[Batch]:
        """All items that see keys. One that sees more than most_keys comes several times, with some of them each."""
        counts = self.is_seen.sum(-1)
        first_block = torch.arange(len(counts)) // (self.lead[2] * self.q_blocks) * self.k_blocks
        for count in counts[counts > 0].unique().tolist():
            part = count if most_keys is None else min(count, max(1, most_keys // self.k_size))
            at_once = max(1, BATCH_ELEMENTS // (part * self.k_size * self.head_dim))
            for items in (counts == count).nonzero().flatten().split(at_once):
                numbers = self.is_seen[items].nonzero()[:, 1].view(-1, count)
                for some in numbers.split(part, 1):
                    yield Batch(items, first_block[items, None] + some, self._mask(items, some))

    def _mask(self, items: Tensor, numbers: Tensor) -> Tensor | None:
        entry, place = (~self.is_full[items].gather(1, numbers)).nonzero(as_tuple=True)
        if not len(entry):
            return None
        mask = torch.zeros(len(items), self.q_size, numbers.shape[1], self.k_size, dtype=self.dtype)
        j = numbers[entry, place, None, None] * self.k_size + torch.arange(self.k_size)
        low, high = (t[items[entry], :, None] for t in (self.low, self.high))
        mask[entry, :, place] = mask.new_zeros(()).masked_fill((j < low) | (j >= high), -torch.inf)
        return mask.flatten(2)[:, None]


def gathered(blocks: Tensor, numbers: Tensor) -> Tensor:
    """(blocks, keys of a block, columns), numbers (n, count) -> (n, count * keys of a block, 1, columns)."""
    return blocks[numbers].flatten(1, 2).unsqueeze(2)


def _padded(t: Tensor, num_rows: int) -> Tensor:
    missing = num_rows - t.shape[1]
    return torch.nn.functional.pad(t, (0, 0, 0, 0, 0, missing)) if missing else t

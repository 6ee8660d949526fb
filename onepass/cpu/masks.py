"""Masks of torch's operators: what is added to the scores of a block of rows, with -inf for hidden pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import AttentionProblem, Inputs
from ..tiled.mask import Range
from ..tiled.modifiers import ScoreModifiers
from ..tiled.scratch import Scratch
from ..tiled.sequences import HeadGroup, Sequences, sequences
from .regions import regions

ROWS = 256  # of a block; twice as many where no row hides keys, so that none are computed in vain
MASK_ELEMENTS = 2**20  # in a block of rows, unless one head for each thread has more; 2 to 5 % faster than 2**21


def needs_masks(problem: AttentionProblem) -> bool:
    """Whether regions do not hold the visible pairs, or something is added to scores."""
    left = problem.mask.window_left
    return problem.has_row_ranges or problem.adds_terms or (left is not None and left < problem.seqlen_k)


def rows_of_block(problem: AttentionProblem) -> int:
    return ROWS if problem.has_row_ranges or not problem.mask.is_full else 2 * ROWS


def heads_together(problem: AttentionProblem, inputs: Inputs, num_keys: int) -> int:
    """How many kv heads to compute at a time: some for each thread, few enough for MASK_ELEMENTS."""
    group, modifiers = problem.qhead_per_kvhead, inputs.modifiers
    if modifiers is None:
        has_masks_by_head = False
    else:
        by_head = modifiers.key_ranges, modifiers.bias
        has_masks_by_head = problem.has_alibi or any(t is not None and t.shape[-3] > 1 for t in by_head)
    rows = min(rows_of_block(problem), problem.seqlen_q)
    at_once = MASK_ELEMENTS // max(1, rows * num_keys * (group if has_masks_by_head else 1))
    if not has_masks_by_head:
        at_once *= problem.num_heads_kv
    per_thread = -(-torch.get_num_threads() // group)
    return max(per_thread, at_once)


class RowMasks:
    """The masks of a group of heads of sequences of equal lengths.

    Queries and keys are numbered from the first ones of the piece.

    Args: in_blocks: rows or keys are computed in parts, even where no mask has to be made.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        inputs: Inputs,
        piece: Sequences,
        group: HeadGroup,
        scratch: Scratch,
        in_blocks: bool = False,
    ):
        self.scratch = scratch
        self.modifiers = ScoreModifiers(problem, inputs, piece, group)
        self.seqlen_q, self.seqlen_k = self.modifiers.seqlen_q, self.modifiers.seqlen_k
        has_bias_alone = not (problem.has_row_ranges or problem.has_alibi)
        found = regions(problem.mask, self.seqlen_q, self.seqlen_k) if problem.mask.window_left is None else ()
        covers_all = len(found) == 1 and found[0].covers(self.seqlen_q, self.seqlen_k)
        # the operator's own triangle, beside the bias
        self.is_causal = has_bias_alone and covers_all and found[0].is_causal and not in_blocks
        self.hides_keys = problem.has_row_ranges or not (problem.mask.is_full or self.is_causal)
        self.low: Tensor | None = None  # the interval of each query, see `ScoreModifiers.intervals`
        self.high: Tensor | None = None
        if self.hides_keys:
            self.low, self.high = self.modifiers.intervals()
        self.num_rows = self.seqlen_q if has_bias_alone and not self.hides_keys else rows_of_block(problem)

    def keys_of(self, queries: Range) -> Range | None:
        """From the first to the last key that one of these queries sees; all with `is_causal`. None: they see none."""
        if self.low is None or self.high is None:
            return 0, self.seqlen_k
        low, high = (t[..., slice(*queries)] for t in (self.low, self.high))
        seen = low < high
        return (int(low[seen].min()), int(high[seen].max())) if bool(seen.any()) else None

    def mask(self, queries: Range, keys: Range) -> Tensor | None:
        """(entries or 1, query heads or 1, queries or 1, keys or 1), beside `is_causal`; None if it would be 0.

        It is a view of the bias, or a buffer that the next mask overwrites.
        """
        modifiers, dtype = self.modifiers, self.scratch.dtype
        bias = None if modifiers.bias is None else modifiers.bias_tile(modifiers.bias, queries, keys)
        parts = self._parts_with_hidden_keys(queries, keys)
        if modifiers.slopes is None and not parts:
            return None if bias is None else self._as_operand(bias)
        num_rows, num_keys = queries[1] - queries[0], keys[1] - keys[0]
        sizes = [t.shape[:3] for t in (modifiers.slopes, bias, self.low if parts else None) if t is not None]
        mask = self.scratch.empty("mask", *torch.broadcast_shapes(*sizes), num_rows, num_keys)
        if modifiers.slopes is not None:
            torch.mul(self._distance(queries, keys).expand_as(mask), -modifiers.slopes.to(dtype), out=mask)
            if bias is not None:
                mask.add_(bias)
        elif bias is not None:
            mask.copy_(bias)
        else:
            mask.zero_()
        for start, end in parts:
            j = torch.arange(start, end, dtype=dtype) + 0.5
            low, high = (t[..., slice(*queries), None] for t in (self.low, self.high) if t is not None)
            # -inf where negative, else 0: a quarter of the time of comparisons and `where`
            hidden = torch.minimum(j - low, high - j).mul_(torch.inf).clamp_(max=0.0)
            mask[..., start - keys[0] : end - keys[0]].add_(hidden)
        return _by_heads(mask)

    def _parts_with_hidden_keys(self, queries: Range, keys: Range) -> list[Range]:
        """The keys that some of the queries do not see, as up to two ranges; the others are seen by all."""
        if self.low is None or self.high is None:
            return []
        start, end = int(self.low[..., slice(*queries)].max()), int(self.high[..., slice(*queries)].min())
        if start >= end:
            return [keys]
        return [(a, b) for a, b in ((keys[0], start), (end, keys[1])) if a < b]

    def _distance(self, queries: Range, keys: Range) -> Tensor:
        """`ScoreModifiers.distance` in a buffer, in the dtype of scores."""
        positions = self.modifiers.positions[..., slice(*queries), None] - self.modifiers.piece.first_key - keys[0]
        j = torch.arange(keys[1] - keys[0], dtype=self.scratch.dtype)
        distance = self.scratch.empty("distance", *positions.shape[:-1], len(j))
        return torch.sub(positions.to(j.dtype), j, out=distance).abs_()

    def _as_operand(self, bias: Tensor) -> Tensor:
        """A tile of the bias in a dtype and an order that the operators take."""
        if bias.dtype not in (torch.float32, self.scratch.dtype, self.scratch.like.dtype):
            bias = bias.to(self.scratch.dtype)
        if bias.shape[-1] > 1 and bias.stride(-1) != 1:
            bias = bias.contiguous()
        return _by_heads(bias)


def masks_of_whole(
    problem: AttentionProblem, inputs: Inputs, scratch: Scratch, in_blocks: bool = False
) -> RowMasks | None:
    """The masks of a dense call of one block of rows that see all keys together; None for other calls."""
    lengths = problem.seqlen_q, problem.seqlen_k
    if in_blocks or problem.is_packed or problem.has_seqused_k or problem.has_seqstart_k or problem.is_empty:
        return None
    if heads_together(problem, inputs, lengths[1]) < problem.batch * problem.num_heads_kv:
        return None
    group = HeadGroup(slice(0, problem.batch), slice(0, problem.num_heads_kv), problem.qhead_per_kvhead)
    masks = RowMasks(problem, inputs, sequences(problem, inputs)[0], group, scratch)
    is_whole = masks.num_rows >= lengths[0] and masks.keys_of((0, lengths[0])) == (0, lengths[1])
    return masks if is_whole else None


def _by_heads(mask: Tensor) -> Tensor:
    """(entries, kv heads or 1, qhead_per_kvhead or 1, ...) -> (entries, query heads or 1, ...)."""
    entries, kv_heads, group, rows, keys = mask.shape
    return mask.reshape(entries, kv_heads * group, rows, keys)

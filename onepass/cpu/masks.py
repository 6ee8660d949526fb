"""Masks of torch's operators: what is added to the scores of a block of rows, with -inf for hidden pairs."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from ..problem import AttentionInputs, AttentionProblem
from ..problem.attention import NO_MODIFIERS
from ..tiled.mask import Range
from ..tiled.modifiers import ScoreModifiers
from ..tiled.scratch import Scratch
from ..tiled.sequences import HeadGroup, Sequences, sequences
from .regions import regions

ROWS = 256  # of a block; with 64 a backward takes up to 1.4 times as long, and with 1024 as long
MASK_ELEMENTS = 2**20  # in a block of rows, unless one head for each thread has more; 2 to 5 % faster than 2**21


def needs_masks(problem: AttentionProblem) -> bool:
    """Whether regions do not hold the visible pairs, or something is added to scores."""
    left = problem.mask.window_left
    return problem.has_row_ranges or problem.adds_terms or (left is not None and left < problem.seqlen_k)


def groups(problem: AttentionProblem, inputs: AttentionInputs, num_entries: int, num_keys: int) -> Iterator[HeadGroup]:
    """The heads to compute at a time: some for each thread, few enough for MASK_ELEMENTS, all that share masks."""
    modifiers, group = inputs.modifiers or NO_MODIFIERS, problem.qhead_per_kvhead
    _, ranges, positions, slopes, bias, query_ranges = modifiers[:-1]
    blocks = () if inputs.blocks is None else (inputs.blocks.kinds, inputs.blocks.bits)
    by_pair = ranges, bias, query_ranges, *blocks
    by_head = slopes is not None or any(t is not None and t.shape[-3] > 1 for t in by_pair)
    by_entry = (slopes is not None and slopes.dim() == 2) or any(
        t is not None and t.shape[0] > 1 for t in (positions, *by_pair)
    )
    at_once = MASK_ELEMENTS // max(1, min(ROWS, problem.seqlen_q) * num_keys)
    per_thread = -(-torch.get_num_threads() // group)
    heads = min(max(per_thread, at_once // group), problem.num_heads_kv) if by_head else problem.num_heads_kv
    entries = max(1, at_once // (heads * group if by_head else 1)) if by_entry else num_entries
    for b in range(0, num_entries, entries):
        for h in range(0, problem.num_heads_kv, heads):
            yield HeadGroup(slice(b, b + entries), slice(h, h + heads), group)


class RowMasks:
    """The masks of a group of heads of sequences of equal lengths.

    Queries and keys are numbered from the first ones of the piece.

    Args: in_blocks: rows or keys are computed in parts, even where no mask has to be made.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        inputs: AttentionInputs,
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
        # the operator's own triangle, with the bias
        self.is_causal = has_bias_alone and covers_all and found[0].is_causal and not in_blocks
        self.hides_keys = problem.has_row_ranges or not (problem.mask.is_full or self.is_causal)
        self.low: Tensor | None = None  # the interval of each query, see `ScoreModifiers.intervals`
        self.high: Tensor | None = None
        if self.hides_keys:
            self.low, self.high = self.modifiers.intervals()
        self.num_rows = self.seqlen_q if has_bias_alone and not self.hides_keys else ROWS
        self.window = problem.mask
        self.is_band = not (problem.has_row_ranges or problem.has_bias)  # all depends on the distance alone

    def keys_of(self, queries: Range) -> Range | None:
        """From the first to the last key that one of these queries sees; all with `is_causal`. None: they see none."""
        if self.low is None or self.high is None:
            return 0, self.seqlen_k
        low, high = (t[..., slice(*queries)] for t in (self.low, self.high))
        seen = low < high
        if not bool(seen.any()):
            return None
        start, end = int(low[seen].min()), int(high[seen].max())
        reached = self.modifiers.keys_reached(queries, (start, end))
        if reached is None:
            return start, end
        found = start + reached.nonzero()
        return (int(found[0]), int(found[-1]) + 1) if len(found) else None

    def mask(self, queries: Range, keys: Range) -> Tensor | None:
        """(entries or 1, query heads or 1, queries or 1, keys or 1), with `is_causal`; None if it would be 0.

        It is a view of the bias or of `_band`, or a buffer that the next mask overwrites.
        """
        modifiers = self.modifiers
        bias = None if modifiers.bias is None else modifiers.bias_tile(modifiers.bias, queries, keys)
        low, high = (None if t is None else t[..., slice(*queries)] for t in (self.low, self.high))
        by_key = modifiers.outside_of_keys(queries, keys)
        if modifiers.slopes is None and by_key is None and not _parts_with_hidden_keys(low, high, keys):
            return None if bias is None else self._as_operand(bias)
        if self.is_band:
            first = self._last_row - queries[0] - self._band_columns[0]
            return self._band[:, :, : queries[1] - queries[0], first + keys[0] : first + keys[1]]
        positions = modifiers.positions[..., slice(*queries)] - modifiers.piece.first_key
        return self._made(positions, low, high, bias, keys, by_key)

    @property
    def _last_row(self) -> int:
        """The first row of the last block."""
        return (self.seqlen_q - 1) // self.num_rows * self.num_rows

    @property
    def _band_columns(self) -> Range:
        """The columns of `_band`. Column c of the block of rows from m on is its key c - (last_row - m)."""
        left, right = self.window.window_left, self.window.window_right
        end, first = self._last_row + self.seqlen_k, self._last_row + self.seqlen_k - self.seqlen_q
        last = first + min(self.num_rows, self.seqlen_q) - 1
        return (
            0 if left is None else max(0, first - left),
            end if right is None else min(end, last + right + 1),
        )

    @functools.cached_property
    def _band(self) -> Tensor:
        """The masks of all blocks, which differ in their columns alone: earlier blocks read further to the right."""
        left, right = self.window.window_left, self.window.window_right
        start, end = self._band_columns
        first = self._last_row + self.seqlen_k - self.seqlen_q
        positions = torch.arange(first, first + min(self.num_rows, self.seqlen_q)).view(1, 1, 1, -1)
        low = torch.full_like(positions, start) if left is None else positions - left
        high = torch.full_like(positions, end) if right is None else positions + right + 1
        return self._made(positions, low.clamp(start, end), high.clamp(start, end), None, (start, end))

    def _made(
        self,
        positions: Tensor,
        low: Tensor | None,
        high: Tensor | None,
        bias: Tensor | None,
        keys: Range,
        by_key: Tensor | None = None,
    ) -> Tensor:
        """A mask in a buffer.

        Args:
            positions, low, high: (entries or 1, kv heads or 1, qhead_per_kvhead or 1, queries), of the queries.
            by_key: more pairs that are hidden, see `ScoreModifiers.outside_of_keys`.
        """
        slopes, dtype = self.modifiers.slopes, self.scratch.dtype
        sizes = [t.shape[:3] for t in (slopes, bias, low, by_key) if t is not None]
        shape = *torch.broadcast_shapes(*sizes), positions.shape[-1], keys[1] - keys[0]
        mask = self.scratch.empty("mask", *shape)
        if slopes is not None:
            j = torch.arange(shape[-1], dtype=dtype)
            distance = self.scratch.empty("distance", *positions.shape, shape[-1])
            torch.sub((positions[..., None] - keys[0]).to(dtype), j, out=distance).abs_()
            torch.mul(distance.expand(shape), -slopes.to(dtype), out=mask)
            if bias is not None:
                mask.add_(bias)
        elif bias is not None:
            mask.copy_(bias)
        else:
            mask.zero_()
        for start, end in _parts_with_hidden_keys(low, high, keys):
            assert low is not None
            assert high is not None
            j = torch.arange(start, end, dtype=dtype) + 0.5
            # -inf where negative, else 0: a quarter of the time of comparisons and `where`
            hidden = torch.minimum(j - low[..., None], high[..., None] - j).mul_(torch.inf).clamp_(max=0.0)
            mask[..., start - keys[0] : end - keys[0]].add_(hidden)
        if by_key is not None:
            mask.masked_fill_(by_key, -torch.inf)
        return _by_heads(mask)

    def _as_operand(self, bias: Tensor) -> Tensor:
        """A tile of the bias in a dtype and an order that the operators take: the operands' own, or float32 with
        operands of 16 bits. (With float64 operands they accept float32 as well, but read it as float64.)"""
        if bias.dtype not in (self.scratch.dtype, self.scratch.like.dtype):
            bias = bias.to(self.scratch.dtype)
        if bias.shape[-1] > 1 and bias.stride(-1) != 1:
            bias = bias.contiguous()
        return _by_heads(bias)


def masks_of_whole(
    problem: AttentionProblem, inputs: AttentionInputs, scratch: Scratch, in_blocks: bool = False
) -> RowMasks | None:
    """The masks of a dense call of one block of rows that see all keys together; None for other calls."""
    lengths = problem.seqlen_q, problem.seqlen_k
    if in_blocks or problem.is_packed or problem.has_seqused_k or problem.has_seqstart_k or problem.is_empty:
        return None
    group, *others = groups(problem, inputs, problem.batch, lengths[1])
    if others:
        return None
    masks = RowMasks(problem, inputs, sequences(problem, inputs)[0], group, scratch)
    is_whole = masks.num_rows >= lengths[0] and masks.keys_of((0, lengths[0])) == (0, lengths[1])
    return masks if is_whole else None


def _parts_with_hidden_keys(low: Tensor | None, high: Tensor | None, keys: Range) -> list[Range]:
    """The keys that some queries do not see, as up to two ranges; the others are seen by all."""
    if low is None or high is None:
        return []
    start, end = max(keys[0], int(low.max())), min(keys[1], int(high.min()))
    if start >= end:
        return [keys]
    return [(a, b) for a, b in ((keys[0], start), (end, keys[1])) if a < b]


def _by_heads(mask: Tensor) -> Tensor:
    """(entries, kv heads or 1, qhead_per_kvhead or 1, ...) -> (entries, query heads or 1, ...)."""
    entries, kv_heads, group, rows, keys = mask.shape
    return mask.reshape(entries, kv_heads * group, rows, keys)

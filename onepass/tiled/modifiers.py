"""Changes to the scores of a group of heads other than scale, softcap and window.

key_ranges, q_positions     the keys that each query sees: one interval per query, [low, high)
query_ranges                the queries that see each key: one interval per key
block_mask                  blocks of queries and keys of which no query sees a key, and bits of pairs
alibi_slopes, bias          terms that are added to scores, after the softcap
dropout                     probabilities that are left out of the product with V
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry import philox
from ..geometry.block_range import tiles
from ..problem import AttentionInputs, AttentionProblem
from ..problem.attention import EMPTY, FULL, NO_MODIFIERS, WORD
from .mask import Range, TilePairs
from .scratch import Scratch
from .sequences import HeadGroup, Sequences


class Gradients(NamedTuple):
    """Sums of gradients of the terms, in float32 or float64, in the shapes of the tensors."""

    alibi_slopes: Tensor | None
    bias: Tensor | None


class ScoreModifiers:
    """The modifiers of one group of heads of sequences of equal lengths.

    Tiles are (entries, kv heads, qhead_per_kvhead, queries, keys), or have a size of 1 where a tensor is broadcast.
    Queries and keys are numbered from the first ones of the piece.
    """

    def __init__(self, problem: AttentionProblem, inputs: AttentionInputs, piece: Sequences, group: HeadGroup):
        self.problem, self.piece, self.group = problem, piece, group
        self.inputs = inputs.modifiers or NO_MODIFIERS
        self.device = inputs.q.device
        n = 1 if piece.batch is None else piece.batch.stop - piece.batch.start
        entries = range(n)[group.entries]
        self.entries = slice(piece.entry + entries.start, piece.entry + entries.stop)  # of the call
        self.num_entries = self.entries.stop - self.entries.start
        self.num_kv_heads = len(range(problem.num_heads_kv)[group.heads])
        self.seqlen_q, self.seqlen_k = piece.queries.stop - piece.queries.start, piece.num_keys
        self.positions = self._positions()
        # the interval of each query, see `intervals`; used with problem.has_row_ranges
        self.low, self.high = self.intervals() if problem.has_row_ranges else (self.positions, self.positions)
        # query_ranges: the numbers that they count queries by, and the interval of each key
        self.numbers, self.first, self.end = self._query_ranges()
        kinds, _, bits, _ = inputs.blocks or (None, None, None, None)
        # (entries or 1, kv heads or 1, .., blocks of queries, blocks of keys), with a block_mask
        self.kinds = None if kinds is None else self._of_entries(kinds)
        # (entries or 1, kv heads or 1, .., queries, words), with a block_mask that has bits
        self.bits = None if bits is None else self._of_entries(bits)
        self.slopes = None if self.inputs.alibi_slopes is None else self._slopes(self.inputs.alibi_slopes)
        self.bias = None if self.inputs.bias is None else self._bias(self.inputs.bias)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Entries, kv heads, query heads of a kv head."""
        return self.num_entries, self.num_kv_heads, self.problem.qhead_per_kvhead

    # ---------------------------------------------------------------- views of the call's tensors

    def _batched(self, t: Tensor) -> Tensor:
        """The entries of this group of a dense tensor, or the sequence of a packed one, which has no batch."""
        if self.problem.is_packed:
            return t.unsqueeze(0)
        return t if t.shape[0] == 1 else t[self.entries]

    def _by_heads(self, t: Tensor) -> Tensor:
        """(entries, heads, ...) -> (entries, kv heads, qhead_per_kvhead, ...), of the heads of this group."""
        if t.shape[1] == 1:
            return t.unsqueeze(2)
        return t.unflatten(1, (-1, self.problem.qhead_per_kvhead))[:, self.group.heads]

    def _positions(self) -> Tensor:
        """(entries or 1, 1, 1, queries): where queries stand among the keys of their sequence."""
        if self.inputs.q_positions is not None:
            own = self._batched(self.inputs.q_positions)[:, self.piece.queries]
            return own.long()[:, None, None]
        end = self.piece.first_key + self.seqlen_k  # of the keys
        return torch.arange(end - self.seqlen_q, end, device=self.device).view(1, 1, 1, -1)

    def intervals(self) -> tuple[Tensor, Tensor]:
        """The interval of keys of each query, (entries or 1, kv heads or 1, .., queries), in numbers of the piece."""
        left, right = self.problem.mask.window_left, self.problem.mask.window_right
        first, end = self.piece.first_key, self.piece.first_key + self.seqlen_k
        low, high = torch.full_like(self.positions, first), torch.full_like(self.positions, end)
        if left is not None:
            low = torch.maximum(low, self.positions - left)
        if right is not None:
            high = torch.minimum(high, self.positions + right + 1)
        if self.inputs.key_ranges is not None:
            own = self._by_heads(self._batched(self.inputs.key_ranges)[:, :, self.piece.queries]).long()
            low, high = torch.maximum(low, own[..., 0]), torch.minimum(high, own[..., 1])
        if self.problem.has_seqstart_k:
            high = torch.where(self.positions >= first, high, low)
        return low - first, torch.maximum(high, low) - first

    def _query_ranges(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(entries or 1, 1, 1, queries), and twice (entries or 1, kv heads or 1, .., keys)."""
        rows = torch.arange(self.seqlen_q, device=self.device).view(1, 1, 1, -1)
        if self.inputs.query_ranges is None:
            return rows, None, None
        own = self._by_heads(self._batched(self.inputs.query_ranges)[:, :, self.piece.keys]).long()
        numbers = self.positions if self.problem.query_ranges_of_positions else rows + self.piece.first_query
        return numbers, own[..., 0], own[..., 1]

    def _of_entries(self, t: Tensor) -> Tensor:
        """Blocks and bits of this group. They are counted in each entry, also in packed sequences."""
        return self._by_heads(t if t.shape[0] == 1 else t[self.entries])

    def _slopes(self, slopes: Tensor) -> Tensor:
        """(entries or 1, kv heads, qhead_per_kvhead, 1, 1)."""
        slopes = slopes[None] if slopes.dim() == 1 else slopes[self.entries]
        return self._by_heads(slopes)[..., None, None]

    def _bias(self, bias: Tensor) -> Tensor:
        """(entries or 1, kv heads or 1, qhead_per_kvhead or 1, rows or 1, keys or 1)."""
        own = self._by_heads(self._batched(bias))
        if own.shape[-2] > 1 and self.inputs.q_positions is None:
            own = own[..., self.piece.queries, :]
        return own if own.shape[-1] == 1 else own[..., self.piece.first_key : self.piece.first_key + self.seqlen_k]

    # ---------------------------------------------------------------- which keys

    def key_tiles(self, queries: Range, tile_n: int) -> list[tuple[int, int, bool]]:
        """The key tiles that some of these queries see, the last ones first: (n_start, n_end, needs_mask)."""
        low, high = (x[..., slice(*queries)] for x in (self.low, self.high))
        seen = low < high
        if not bool(seen.any()):
            return []
        start, end = int(low[seen].min()), int(high[seen].max())
        clear = bool(seen.all())
        clear_start, clear_end = int(low.max()), int(high.min())
        is_clear = clear and self.first is self.kinds is None
        found = [(a, b, not (is_clear and clear_start <= a and b <= clear_end)) for a, b in tiles(start, end, tile_n)]
        reached = self.keys_reached(queries, (0, self.seqlen_k))
        return [tile for tile in found[::-1] if reached is None or bool(reached[tile[0] : tile[1]].any())]

    def keys_reached(self, queries: Range, keys: Range) -> Tensor | None:
        """(keys,) bool: whether some of these queries may be in the interval of a key, and in a block with it.

        None: there are neither intervals nor blocks.
        """
        reached = None
        if self.first is not None and self.end is not None:
            lowest, highest = torch.aminmax(self.numbers[..., slice(*queries)])
            first, end = (x[..., slice(*keys)] for x in (self.first, self.end))
            found = (first <= highest) & (end > lowest) & (first < end)
            reached = found.flatten(0, -2).any(0)
        if self.kinds is not None:
            of_queries, of_keys = self._numbers_of_blocks(queries, keys)
            kinds = self.kinds[..., of_queries[0] : of_queries[-1] + 1, :]
            blocks = (kinds != EMPTY).flatten(0, -2).any(0)
            reached = blocks[of_keys] if reached is None else reached & blocks[of_keys]
        return reached

    def _numbers_of_blocks(self, queries: Range, keys: Range) -> tuple[Tensor, Tensor]:
        """The numbers of the blocks that queries and keys belong to."""
        assert self.problem.block_size is not None
        ranges = (queries, self.piece.first_query), (keys, self.piece.first_key)
        of_queries, of_keys = (
            torch.arange(first + a, first + b, device=self.device) // size
            for ((a, b), first), size in zip(ranges, self.problem.block_size, strict=True)
        )
        return of_queries, of_keys

    def sees(self, queries: Range, keys: Range) -> bool:
        """Whether some of these queries see some of the keys."""
        low, high = (x[..., slice(*queries)] for x in (self.low, self.high))
        reached = self.keys_reached(queries, keys)
        if reached is not None and not bool(reached.any()):
            return False
        return bool(((low < keys[1]) & (high > keys[0]) & (low < high)).any())

    def outside(self, queries: Range, keys: Range) -> Tensor | None:
        """Boolean tile, True where a key or a query is outside of the other's interval; None if no pair is."""
        if not self.problem.has_row_ranges:
            return None
        by_key = self.outside_of_keys(queries, keys)
        low, high = (x[..., slice(*queries), None] for x in (self.low, self.high))
        if int(low.max()) <= keys[0] and keys[1] <= int(high.min()):
            return by_key
        j = torch.arange(*keys, device=self.device)
        hidden = (j < low) | (j >= high)
        return hidden if by_key is None else hidden | by_key

    def outside_of_keys(self, queries: Range, keys: Range) -> Tensor | None:
        """Boolean tile, True where a query is outside of a key's interval or blocks; None if no query is."""
        hidden = None
        if self.kinds is not None:
            of_queries, of_keys = self._numbers_of_blocks(queries, keys)
            kinds = self.kinds[..., of_queries[:, None], of_keys]
            hidden = kinds == EMPTY
            if self.bits is not None:
                hidden = hidden | ((kinds != FULL) & ~self._seen_by_bits(self.bits, queries, keys))
            hidden = hidden if bool(hidden.any()) else None
        if self.first is None or self.end is None:
            return hidden
        i = self.numbers[..., slice(*queries), None]
        first, end = (x[..., None, slice(*keys)] for x in (self.first, self.end))
        lowest, highest = torch.aminmax(i)
        if bool(((first <= lowest) & (end > highest)).all()):
            return hidden
        by_interval = (i < first) | (i >= end)
        return by_interval if hidden is None else hidden | by_interval

    def _seen_by_bits(self, bits: Tensor, queries: Range, keys: Range) -> Tensor:
        """Boolean tile, True where the bit of a pair is 1."""
        rows = slice(self.piece.first_query + queries[0], self.piece.first_query + queries[1])
        j = torch.arange(*keys, device=self.device) + self.piece.first_key
        return (bits[..., rows, :][..., j // WORD] >> (j % WORD) & 1).bool()

    # ---------------------------------------------------------------- scores

    def modify_scores_(
        self, scores: Tensor, window: TilePairs | None, queries: Range, keys: Range
    ) -> tuple[TilePairs | None, bool]:
        """Add the terms to scores, and find the mask of the tile. Hidden pairs get finite terms.

        Args:
            scores: (entries, kv heads, qhead_per_kvhead, queries, keys).
            window: the mask of the call's window alone, (queries, keys); None if it hides nothing here.

        Returns: the mask, window itself if nothing else hides pairs; and whether a term is not 0.
        """
        hidden = self.outside(queries, keys)
        has_terms = self.slopes is not None
        if self.slopes is not None:
            scores.sub_(self.slopes.to(scores.dtype) * self.distance(queries, keys))
        if self.bias is not None:
            tile = self.bias_tile(self.bias, queries, keys)
            lowest, highest = (float(x) for x in torch.aminmax(tile))
            if not lowest > -torch.inf:  # or NaN, which may stand next to it
                by_bias = tile == -torch.inf
                hidden = by_bias if hidden is None else hidden | by_bias
                tile = tile.masked_fill(by_bias, 0.0)
                lowest = 0.0 if highest == 0.0 and not tile.any() else lowest
            if not lowest == highest == 0.0:  # a mask of 0 and -inf adds nothing
                has_terms = True
                scores.add_(tile.to(scores.dtype))
        if hidden is None:
            return window, has_terms
        if window is not None:
            hidden = hidden | window.hidden
        return TilePairs(hidden, (~hidden).to(scores.dtype), tuple(scores.shape)), has_terms

    def bias_tile(self, bias: Tensor, queries: Range, keys: Range) -> Tensor:
        columns = slice(*keys) if bias.shape[-1] > 1 else slice(None)
        if bias.shape[-2] == 1:
            return bias[..., columns]
        if self.inputs.q_positions is None:
            return bias[..., slice(*queries), columns]
        rows = self.bias_rows(bias, queries)
        if rows.shape[0] == 1:
            return bias[..., rows.flatten(), columns]
        entries = zip(bias.expand(rows.shape[0], -1, -1, -1, -1), rows, strict=True)
        return torch.stack([b[..., own.flatten(), columns] for b, own in entries])

    def bias_rows(self, bias: Tensor, queries: Range) -> Tensor:
        """The rows of a bias for positions, (entries or 1, 1, 1, queries): the nearest one where none is theirs."""
        return self.positions[..., slice(*queries)].clamp(0, bias.shape[-2] - 1)

    def distance(self, queries: Range, keys: Range) -> Tensor:
        """|position - key|, (entries or 1, 1, 1, queries, keys)."""
        j = torch.arange(*keys, device=self.device) + self.piece.first_key
        return (self.positions[..., slice(*queries), None] - j).abs()

    def largest_term(self) -> float:
        """A bound, at least 0, of what is added to a score."""
        bound = 0.0
        if self.slopes is not None and self.slopes.numel():
            farthest = max(int(self.positions.abs().max()), 0) + self.piece.first_key + self.seqlen_k
            bound = max(0.0, -float(self.slopes.min())) * farthest
        if self.bias is not None and self.bias.numel():
            bound += max(0.0, float(self.bias.max()))
        return bound

    def add_gradients(self, sums: Gradients, ds: Tensor, queries: Range, keys: Range) -> None:
        """Add what ds (entries, kv heads, qhead_per_kvhead, queries, keys), of scores with their terms, contributes."""
        if sums.alibi_slopes is not None:
            found = -(ds * self.distance(queries, keys)).sum((-1, -2))
            target = sums.alibi_slopes
            if target.dim() == 1:
                found, target = found.sum(0, keepdim=True), target[None]
            else:
                target = target[self.entries]
            self._by_heads(target).add_(found)
        if sums.bias is not None:
            target = self._bias(sums.bias)
            columns = slice(*keys) if target.shape[-1] > 1 else slice(None)
            target = target[..., columns]
            by_positions = target.shape[-2] > 1 and self.inputs.q_positions is not None
            # rows of entries go to places of their own first
            dims = [d for d in range(by_positions, 5) if target.shape[d] == 1 and ds.shape[d] > 1]
            found = ds.sum(dims, keepdim=True) if dims else ds
            if by_positions:
                rows = self.bias_rows(target, queries).expand(found.shape[0], -1, -1, -1)
                for e in range(found.shape[0]):
                    target[min(e, target.shape[0] - 1)].index_add_(-2, rows[e].flatten(), found[e])
            elif target.shape[-2] == 1:
                target.add_(found)
            else:
                target[..., slice(*queries), :].add_(found)

    # ---------------------------------------------------------------- dropout

    def kept(self, queries: Range, keys: Range, dtype: torch.dtype) -> Tensor | None:
        """1 for the pairs that dropout keeps and 0 for others, (entries, kv heads, qhead_per_kvhead, queries, keys)."""
        if not self.problem.dropout_p or self.inputs.dropout_state is None:
            return None
        heads = torch.arange(self.problem.num_heads_q, device=self.device) + self.problem.first_head
        heads = heads.view(-1, self.problem.qhead_per_kvhead)[self.group.heads]
        entries = torch.arange(self.entries.start, self.entries.stop, device=self.device).view(-1, 1, 1)
        instances = entries * (self.problem.all_heads or self.problem.num_heads_q) + heads
        p, state = self.problem.dropout_p, self.inputs.dropout_state
        first_row, first_column = self.piece.first_query, self.piece.first_key
        if self.inputs.q_positions is None:
            rows, columns = ((a + first, b + first) for (a, b), first in ((queries, first_row), (keys, first_column)))
            tile = philox.kept_tile(state, p, instances.flatten(), rows, columns, dtype, self._counters.empty)
            return tile.view(*self.shape, *tile.shape[1:])
        positions = self.positions[..., slice(*queries), None]
        all_columns = torch.arange(*keys, device=self.device) + first_column
        return philox.kept_pairs(state, p, instances[..., None, None], positions, all_columns).to(dtype)

    @functools.cached_property
    def _counters(self) -> Scratch:
        return Scratch(self.positions, torch.int64)

    def drop_(self, tile: Tensor, kept: Tensor | None) -> None:
        """Set the pairs of a tile (heads, rows, keys) that dropout does not keep to 0."""
        if kept is not None:
            tile.view(kept.shape).mul_(kept)


def make_modifiers(
    problem: AttentionProblem, inputs: AttentionInputs, piece: Sequences, group: HeadGroup
) -> ScoreModifiers | None:
    """The modifiers of a group; None if there are none, so that an ordinary call does no work for them."""
    if not (problem.has_row_ranges or problem.has_alibi or problem.has_bias or problem.dropout_p):
        return None
    return ScoreModifiers(problem, inputs, piece, group)

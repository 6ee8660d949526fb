"""The tiles of keys of a backward: which one a thread block takes, which query blocks it visits, and in which order."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .....geometry import tile_scheduler
from .....geometry.block_range import (
    QueryBlocks,
    first_key_block,
    following_query_block,
    last_key_block,
    queries_of_keys,
    query_blocks,
    turn_in_ring,
)
from .....geometry.integers import minimum, select
from ....arguments import ModifierTensors
from ..memory.layouts import at_head
from ..repair import gradients as repair_gradients
from ..repair.rows import VECTOR_BYTES, SourceTensors, row_sums, write_row
from ..softmax.mask import Geometry
from ..softmax.modifiers import Modifiers, place_of
from ..softmax.online import ScoreFactors
from .dq_sums import Accumulator
from .packed import Lengths, PackedSchedule, used_keys
from .schedule import Schedule, Sequences


class KeyTile(NamedTuple):
    """A tile of keys and the query blocks it visits.

    Blocks [first, last) see keys of the tile, and among them [clear_first, clear_last) need no mask (QueryBlocks).
    `first_visit` and `next_visit` have the order.
    """

    n_block: Int32
    head_kv: Int32
    origin_q: Int32  # batch entry; for packed sequences the first row
    origin_k: Int32  # batch entry; for packed sequences the first row
    rows_k: Int32  # rows of dk and dv that exist, and are written, in this sequence
    first_m_block: Int32  # number of the sequence's first query block among those of a head
    geometry: Geometry
    first: Int32
    clear_first: Int32
    clear_last: Int32
    last: Int32
    sequence: Int32  # batch entry, or number of the packed sequence
    place: Int32 | None  # its place in its ring; with ring_lag
    ring: Int32 | None  # the number of tiles of its ring; with ring_lag
    in_ascending_end: Boolean | None  # whether its head is one of the last, whose tiles ascend; with has_ascending_end
    from_first: Boolean | None  # whether it begins with its first query block, not with its last; with heads_together
    listed: cute.Tensor | None  # the numbers of these blocks, at their places in the tile's list; with lists


class KeyTiles:
    """A backward kernel that goes through tiles of keys. A subclass sets the attributes below."""

    tile_m: int  # queries of a block
    tile_n: int  # keys of a tile
    group: int  # query heads of a kv head
    is_packed: bool
    adds_in_turns: bool  # tiles add to a block of dQ one after the other
    is_descending: bool  # these turns begin with the last tile, see `block_range.following_query_block`
    has_ascending_end: bool = False  # the last heads do not descend, see `tile_scheduler.turning_coord`
    ring_lag: int = 0  # tiles add in rings, see `block_range.turn_in_ring`; 0: in one of the orders above
    heads_together: bool = False  # see BackwardConfigSm90
    cluster_size: int = 1  # thread blocks that take a tile together
    has_lists: bool = False  # of the query blocks of a tile: a block's number is then its place in one
    lists: ModifierTensors | None = None  # set while the kernel is traced
    vector_bytes: int = VECTOR_BYTES  # of loads of rows for what is computed again

    def schedule_of_keys(self, schedule: Schedule, lengths: Lengths, rows_k: Int32, rows_q: Int32) -> PackedSchedule:
        """The order of tiles of packed sequences.

        Tiles are made of keys here, so this is a schedule of queries with both sides exchanged. Where tiles add in
        turns, all heads take a tile before the next one.
        """
        lengths_of_keys = Lengths(lengths.cu_seqlens_k, lengths.cu_seqlens_q, None)
        num_heads = schedule.divisors.num_heads
        return PackedSchedule(lengths_of_keys, rows_k, rows_q, num_heads, self.tile_n, self.adds_in_turns)

    @cute.jit
    def tile_at(self, number: Int32, schedule: Schedule, seqlens: Sequences) -> KeyTile:
        """The tile with this number; past the end, the last one (which is then not computed).

        Tiles of a head come in ascending order: under a causal mask the first keys are seen by the most queries. If
        tiles add in turns, they come in the order of the turns: a tile waits only for tiles of lower numbers.
        """
        number = minimum(number, schedule.num_tiles - 1)
        first_m_block = Int32(0)
        if cutlass.const_expr(self.is_packed):
            n_block, head, origin_k, rows_k, origin_q, seqlen_q, sequence, _ = schedule.find(number)
            num_blocks = cute.ceil_div(rows_k, self.tile_n)
            first_m_block = origin_q // self.tile_m + sequence
            entry = minimum(sequence, schedule.batch - 1)
        else:
            order = schedule.divisors, schedule.tiles_of_head, schedule.batch
            if cutlass.const_expr(self.has_ascending_end):
                (n_block, head, origin_q), in_ascending_end = tile_scheduler.turning_coord(number, *order)
            else:
                n_block, head, origin_q = tile_scheduler.tile_coord(number, *order)
            num_blocks = schedule.tiles_of_head
            origin_k, entry, sequence = origin_q, origin_q, origin_q
            seqlen_q, rows_k = seqlens.seqlen_q, seqlens.seqlen_k
        if cutlass.const_expr(not self.is_descending):
            n_block = num_blocks - 1 - n_block
        seqlen_k = used_keys(seqlens.lengths, entry, rows_k)
        geometry = Geometry(seqlen_q, seqlen_k, seqlens.window_left, seqlens.window_right)
        n_start, listed = n_block * self.tile_n, None
        if cutlass.const_expr(self.has_lists):
            counts = seqlens.modifiers.tensors.counts
            own, own_entry = self.list_of(n_block, origin_k, sequence)
            full, last = (counts[i, own, head, own_entry] for i in range(2))
            listed = seqlens.modifiers.tensors.numbers[None, own, head, own_entry]
            blocks = QueryBlocks(Int32(0), Int32(0), full, last)
        else:
            blocks = query_blocks(n_start, n_start + self.tile_n, *geometry, self.tile_m)
        place, ring = None, None
        in_ascending_end = in_ascending_end if cutlass.const_expr(self.has_ascending_end) else None
        if cutlass.const_expr(self.ring_lag > 0):
            place = n_block % schedule.tiles_in_ring
            ring = minimum(schedule.tiles_in_ring, num_blocks - n_block + place)
        from_first = None
        if cutlass.const_expr(self.heads_together):
            # A thread block draws its second tile when its first one ends. Longest first, a tile that begins n blocks
            # of queries later than another one has n blocks less, at its beginning: if tiles of the second wave begin
            # with their first block, all visit the same one. Those of the first wave begin at the same time, and end
            # with the same block.
            _, in_section = divmod(number, schedule.divisors.tiles_per_section)
            from_first = in_section // (cute.arch.grid_dim()[0] // self.cluster_size) % 2 == 1
        coordinates = n_block, head, origin_q, origin_k, rows_k, first_m_block
        return KeyTile(*coordinates, geometry, *blocks, sequence, place, ring, in_ascending_end, from_first, listed)

    def at_head(self, t: cute.Tensor, m: cute.Tensor, head, origin) -> cute.Tensor:
        return at_head(t, m, head, origin, self.is_packed)

    def first_visit(self, tile: KeyTile) -> tuple:
        """The head and the query block with which a tile begins; `next_visit` says how it goes on."""
        m_block = select(self._from_first(tile), tile.first, tile.last - 1)
        if cutlass.const_expr(self.ring_lag > 0):
            m_block = tile.place * self.ring_lag
        return tile.head_kv * self.group, m_block

    def query_block(self, tile: KeyTile, m_block: Int32) -> Int32:
        """The number of a block of queries: of the one at this place of the tile's list, where there are lists."""
        return tile.listed[m_block] if self.has_lists else m_block

    def list_of(self, n_block: Int32, origin_k: Int32, sequence: Int32) -> tuple:
        """The number of a tile among those that have lists, and its entry there."""
        if self.is_packed:
            return origin_k // self.tile_n + sequence + n_block, Int32(0)
        return n_block, origin_k

    def _from_first(self, tile: KeyTile) -> Boolean | bool:
        """Whether a tile begins with its first query block and goes up, not with its last one and down."""
        if self.heads_together:
            return tile.from_first
        if self.has_ascending_end:
            return tile.in_ascending_end == 0
        return self.is_descending or not self.adds_in_turns

    def next_visit(self, tile: KeyTile, head: Int32, m_block: Int32) -> tuple:
        first_head = tile.head_kv * self.group
        order = self.adds_in_turns or self.heads_together, self._from_first(tile), self.ring_lag > 0
        return following_query_block(head, m_block, first_head, self.group, tile.first, tile.last, *order)

    def turn_of(self, tile: KeyTile, m_block: Int32) -> Int32:
        """How many tiles add to the dQ of a block before this one."""
        if cutlass.const_expr(self.has_lists):
            block, entry = self.query_block(tile, m_block), Int32(0) if self.is_packed else tile.origin_q
            return self.lists.turns[tile.n_block, tile.first_m_block + block, tile.head_kv, entry]
        if cutlass.const_expr(self.ring_lag > 0):
            return tile.n_block - tile.place + turn_in_ring(tile.place, m_block, tile.ring, self.ring_lag)
        if cutlass.const_expr(self.is_descending and not self.has_ascending_end):
            return self.last_key_block(tile, m_block) - tile.n_block
        ascending = tile.n_block - first_key_block(m_block * self.tile_m, *tile.geometry, self.tile_n)
        if cutlass.const_expr(not self.has_ascending_end):
            return ascending
        return select(tile.in_ascending_end, ascending, self.last_key_block(tile, m_block) - tile.n_block)

    def last_key_block(self, tile: KeyTile, m_block: Int32) -> Int32:
        return last_key_block(m_block * self.tile_m, self.tile_m, *tile.geometry, self.tile_n)

    def is_first_and_last(self, tile: KeyTile, m_block: Int32) -> tuple:
        """Whether a tile is the first, and the last, to add to the dQ of a block."""
        return self.turn_of(tile, m_block) == 0, tile.n_block == self.last_key_block(tile, m_block)

    @cute.jit
    def m_block_number(self, accumulator: Accumulator, tile: KeyTile, head: Int32, m_block: Int32) -> Int32:
        """The number of a block of query rows, see Accumulator."""
        entry = Int32(0) if cutlass.const_expr(self.is_packed) else tile.origin_q
        return (entry * accumulator.num_heads + head) * accumulator.blocks_per_head + tile.first_m_block + m_block

    @cute.jit
    def recompute_keys(
        self,
        tile: KeyTile,
        gradient: cute.Tensor,  # (seqlen_k, head_dim) of the tile's head
        scale: Float32,
        first_key: Int32,
        ballots: tuple,
        sources: SourceTensors,
        accumulator: Accumulator,
        factors: ScoreFactors,
        is_v: cutlass.Constexpr[bool],
        modifiers: Modifiers | None = None,
    ):
        """Compute rows of dk (is_v: of dv) that have a NaN from the queries alone that see them.

        0 * NaN may have brought the NaN.

        Args:
            first_key: the first of the warp's 16 keys, counted in the sequence; uniform.
            ballots: what `repair_gradients.nan_rows` returned.
        """
        mK, mV = (self.at_head(t, t, tile.head_kv, tile.origin_k) for t in (sources.k, sources.v))
        for i in cutlass.range(16, unroll=1):
            if repair_gradients.has_nan(ballots, i):
                key = first_key + i
                queries = queries_of_keys(key, key + 1, *tile.geometry)
                acc = row_sums(gradient[key, None])
                for h in cutlass.range(self.group, unroll=1):
                    head = tile.head_kv * self.group + h
                    mQ, mdO = (self.at_head(t, t, head, tile.origin_q) for t in (sources.q, sources.dout))
                    number = self.m_block_number(accumulator, tile, head, Int32(0))
                    stats = cute.domain_offset((number, 0), accumulator.stats)
                    rows = (mK[key, None], mV[key, None], mQ, mdO, stats)
                    pairs = None
                    if cutlass.const_expr(modifiers is not None):
                        place = place_of(
                            head, tile.origin_q, tile.origin_k, tile.sequence, tile.geometry, self.is_packed
                        )
                        pairs = modifiers.pairs_of_key(place, key)
                    repair_gradients.add_queries(acc, *rows, queries, factors, is_v, self.vector_bytes, pairs)
                write_row(gradient[key, None], acc, scale)

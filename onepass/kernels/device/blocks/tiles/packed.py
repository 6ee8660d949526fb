"""The order of the tiles of packed sequences, whose lengths only the device knows.

Every warp finds the sequence of a tile by itself, from cu_seqlens and without shared memory. The numbers that a thread
block gets only grow, so a search begins where the one before ended: a launch reads the offsets about once.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from .....geometry import tile_scheduler
from .....geometry.integers import ceil_div, maximum, minimum, select
from .....geometry.splits import blocks_per_split
from .....geometry.tile_scheduler import LANES
from ..memory import warp
from ..memory.untraced import Untraced


class Lengths(NamedTuple):
    """The length tensors of a call, int32 on the device; None at compile time if it has none."""

    cu_seqlens_q: cute.Tensor | None  # (batch + 1,)
    cu_seqlens_k: cute.Tensor | None  # (batch + 1,); packed queries over a cache have none
    seqused_k: cute.Tensor | None  # (batch,)
    added_k: Int32 | None = None  # keys beyond those that seqused_k counts, equally many for all


def used_keys(lengths: Lengths, entry: Int32, seqlen_k: Int32) -> Int32:
    """The number of keys that a batch entry (or a sequence) uses of its seqlen_k."""
    if lengths.seqused_k is None:
        return seqlen_k
    count = lengths.seqused_k[entry]
    if lengths.added_k is not None:
        count = count + lengths.added_k
    return minimum(maximum(count, 0), seqlen_k)


class PackedTile(NamedTuple):
    """A tile and the sequence it belongs to.

    Attributes:
        head: the head; for a sequence that is split, head + num_heads * split.
        start_k: the first row of the sequence's keys; in a cache its batch entry.
        num_splits: the number of splits of the sequence's keys.
    """

    m_block: Int32
    head: Int32
    start_q: Int32
    seqlen_q: Int32
    start_k: Int32
    seqlen_k: Int32
    sequence: Int32
    num_splits: Int32


class PackedSchedule(Untraced):
    """A warp's view of the order of tiles.

    Args:
        total_q, total_k: rows of the packed tensors; for a cache, total_k is the keys that a sequence has room for.
        num_heads: FastDivmodDivisorV2 of the number of heads.
        splits: the splits of sequences of one tile; other sequences, which give a GPU enough tiles, are not split. With
            split_blocks < 0 each has as many splits as its length asks for, up to num_splits (`blocks_per_split`).
        tile_n: keys of a block; only with splits.

    Over a cache, sequences of one tile and of several tiles alternate (`tile_scheduler.mixed_number`).
    """

    def __init__(
        self,
        lengths: Lengths,
        total_q,
        total_k,
        num_heads,
        tile_m: int,
        longest_first: bool,
        splits=None,
        tile_n: int = 1,
    ):
        self.lengths, self.total_q, self.total_k = lengths, total_q, total_k
        self.batch = cute.size(lengths.cu_seqlens_q) - 1
        self.num_heads, self.splits, self.tile_n = num_heads, splits, tile_n
        self.tile_m, self.longest_first = tile_m, longest_first
        self.mixes = lengths.cu_seqlens_k is None
        # where the search goes on, for sequences of one tile and for others: a sequence, and the tiles before it
        self.position = cute.make_rmem_tensor((1 + self.mixes, 2), Int32)
        self.position.fill(0)
        self.blocks_per_split = None
        if splits is not None:
            self.blocks_per_split = cute.arch.make_warp_uniform(self._share_out())
        self.num_singles = None
        if self.mixes:
            self.num_singles = cute.arch.make_warp_uniform(self._count_tiles(Boolean(True)))
        self.num_tiles = cute.arch.make_warp_uniform(self._count_tiles(None))

    @cute.jit
    def _count_tiles(self, wants_single: Boolean | None) -> Int32:
        """The number of tiles of all sequences, counted as in `_tiles_of`."""
        tiles = Int32(0)
        for first in cutlass.range(0, self.batch + 1, LANES, unroll=4):
            tiles += self._tiles_of(first + cute.arch.lane_idx(), wants_single)
        return cute.arch.warp_reduction_sum(tiles)

    def _rows_of(self, sequence: Int32) -> tuple:
        return tile_scheduler.packed_rows(sequence, self.lengths.cu_seqlens_q, self.batch, self.total_q)

    def _tiles_of(self, sequence: Int32, wants_single: Boolean | None) -> Int32:
        """The tiles of a sequence, or 0 if it is not of the kind that counts.

        Args: wants_single: whether sequences of one tile count, or those of several; None: all do.
        """
        tiles = ceil_div(self._rows_of(sequence)[1], self.tile_m)
        if wants_single is not None:
            tiles = select(wants_single == (tiles == 1), tiles, Int32(0))
        if self.splits is not None:  # splits are further heads
            tiles = select(tiles == 1, self._splits_of(sequence), tiles)
        return tiles * self.num_heads.divisor

    def _key_blocks_of(self, sequence: Int32) -> Int32:
        entry = minimum(sequence, self.batch - 1)
        keys = used_keys(self.lengths, entry, self.total_k)
        return select(sequence < self.batch, ceil_div(keys, self.tile_n), Int32(0))

    @cute.jit
    def _share_out(self) -> Int32:
        """The key blocks of a split, see `splits.blocks_per_split`."""
        blocks = Int32(0)
        for first in cutlass.range(0, self.batch, LANES, unroll=4):
            sequence = first + cute.arch.lane_idx()
            is_single = ceil_div(self._rows_of(sequence)[1], self.tile_m) == 1
            blocks += select(is_single, self._key_blocks_of(sequence), Int32(0))
        return blocks_per_split(cute.arch.warp_reduction_sum(blocks), self.num_heads.divisor, cute.arch.grid_dim()[0])

    def _splits_of(self, sequence: Int32) -> Int32:
        """The number of splits of a sequence of one tile."""
        num_splits, split_blocks = self.splits
        by_length = maximum(ceil_div(self._key_blocks_of(sequence), self.blocks_per_split), 1)
        return select(split_blocks < 0, minimum(by_length, num_splits), num_splits)

    def _keep(self, kind: int, first: Int32, tiles_before: Int32, is_kind: Boolean):
        for i, value in ((0, first), (1, tiles_before)):
            self.position[kind, i] = select(is_kind, value, self.position[kind, i])

    @cute.jit
    def find(self, number: Int32) -> PackedTile:
        """The tile with this number, which is below num_tiles and never below that of the call before."""
        is_single = None
        first, tiles_before = self.position[0, 0], self.position[0, 1]
        if cutlass.const_expr(self.mixes):
            others = self.num_tiles - self.num_singles
            is_single, number = tile_scheduler.mixed_number(number, self.num_singles, others)
            first = select(is_single, first, self.position[1, 0])
            tiles_before = select(is_single, tiles_before, self.position[1, 1])
        lane, tiles, ends = Int32(LANES), Int32(0), Int32(0)
        while lane == LANES:
            tiles = self._tiles_of(first + cute.arch.lane_idx(), is_single)
            lane, ends = tile_scheduler.scan_sequences(number, tiles_before, tiles, warp)
            if lane == LANES:
                first += LANES
                tiles_before = warp.broadcast(ends, LANES - 1)
        if cutlass.const_expr(self.mixes):
            self._keep(0, first, tiles_before, is_single)
            self._keep(1, first, tiles_before, not is_single)
        else:
            self.position[0, 0], self.position[0, 1] = first, tiles_before

        sequence = cute.arch.make_warp_uniform(first + lane)
        in_sequence = cute.arch.make_warp_uniform(number - warp.broadcast(ends - tiles, lane))
        start_q, seqlen_q = self._rows_of(sequence)
        num_m_blocks = ceil_div(seqlen_q, self.tile_m)
        coord = tile_scheduler.packed_coord(in_sequence, num_m_blocks, self.num_heads, self.longest_first)
        entry = minimum(sequence, self.batch - 1)
        start_k, seqlen_k = entry, self.total_k
        if cutlass.const_expr(self.lengths.cu_seqlens_k is not None):
            offsets = self.lengths.cu_seqlens_k
            start_k, seqlen_k = tile_scheduler.packed_rows(sequence, offsets, self.batch, self.total_k)
        # rows that belong to no sequence see no key
        is_sequence = sequence < self.batch
        seqlen_k = used_keys(self.lengths, entry, seqlen_k)
        seqlen_k = seqlen_k if is_sequence else Int32(0)
        num_splits = Int32(1)
        if cutlass.const_expr(self.splits is not None):
            num_splits = select(num_m_blocks == 1, self._splits_of(sequence), num_splits)
        return PackedTile(*coord, start_q, seqlen_q, start_k, seqlen_k, sequence, num_splits)

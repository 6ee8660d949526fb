"""The blocks that each tile visits, where tensors say which pairs are visible: lists, made before the main kernel.

    extremes   A warp for each block of queries finds the extremes of the first keys of its queries, and of their ends,
               over the query heads that share lists. With query_ranges also the other way round.
    lists      A warp for each tile compares it with the blocks of its sequence. A forward's tiles are of queries and
               visit blocks of keys, a backward's are of keys and visit blocks of queries.
    turns      Where tiles add to dQ in turns, a warp for each block of queries counts the tiles that visit it.

These are launches of their own, because a tile needs the extremes of all blocks. They stay in L2 in between.

A list has the full blocks first, in ascending order, and then the partial ones: a kernel that goes through it from its
end masks the partial ones, and then runs without a mask. A block is partial unless all of its pairs are known to be
visible. It may be partial and hold no visible pair, because intervals are known by their extremes alone.

The blocks and the tiles of packed sequences are numbered one sequence after the other: those of sequence i begin with
number cu_seqlens[i] // tile + i. Some numbers have no rows. Nobody writes, or reads, the extremes of such a block.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ....geometry.integers import ceil_div, maximum, minimum, overlapping, select
from ....geometry.tile_scheduler import LANES, packed_rows
from ...arguments import BlockListsArguments, ModifierTensors
from ..blocks.memory.untraced import Untraced
from ..blocks.memory.warp import count
from ..blocks.softmax.modifiers import FULL, Modifiers, Place
from ..blocks.tiles.packed import Lengths, used_keys
from ..entry import takes
from .backward_rows import sequence_of_block

WARPS = 4  # warps of a thread block, each with a block or a tile of its own


class Sequence(NamedTuple):
    """The sequence of a block or of a tile.

    Attributes:
        place: its `Place`, for the first of the query heads that share lists.
        first_block, first_tile: the numbers of its first block of queries and of its first block of keys.
    """

    place: Place
    first_block: Int32
    first_tile: Int32


class BlockLists:
    """The kernels of one pair of tiles: (tiles, which tensors there are) -> device code.

    Args:
        tile_m, tile_n: queries of a block and keys of a block.
        of_keys: lists of tiles of keys (for a backward), not of tiles of queries.
        block_size: queries and keys of a block of `ModifierTensors.kinds`, if there are any.
        has_bits: whether blocks that are seen are full only if their kind says so.
    """

    def __init__(
        self,
        tile_m: int,
        tile_n: int,
        of_keys: bool,
        is_packed: bool,
        block_size: tuple[int, int] | None = None,
        has_bits: bool = False,
    ):
        self.tile_m, self.tile_n, self.of_keys = tile_m, tile_n, of_keys
        self.is_packed, self.block_size, self.least_full = is_packed, block_size, FULL if has_bits else 1

    @takes(BlockListsArguments)
    def __call__(self, a: BlockListsArguments, stream: cuda.CUstream):
        lengths = Lengths(a.cu_seqlens_q, a.cu_seqlens_k, a.seqused_k)
        given = a.modifiers, (a.window_left, a.window_right), lengths, (a.seqlen_q, a.seqlen_k), a.group
        extremes = a.of_queries, a.of_keys
        self.extremes(a.of_queries, *given, False).launch(**self.grid(a.of_queries), stream=stream)
        if cutlass.const_expr(a.of_keys is not None):
            self.extremes(a.of_keys, *given, True).launch(**self.grid(a.of_keys), stream=stream)
        self.lists(a.numbers, a.counts, extremes, *given).launch(**self.grid(a.counts), stream=stream)
        if cutlass.const_expr(a.turns is not None):
            self.turns(a.turns, extremes, *given).launch(**self.grid(a.turns), stream=stream)

    def grid(self, found: cute.Tensor) -> dict:
        """The launch in which each row of (entries, heads, rows, ..) has a warp."""
        return {
            "grid": [ceil_div(found.shape[2], WARPS), found.shape[1], found.shape[0]],
            "block": [WARPS * LANES, 1, 1],
        }

    @cute.kernel
    def extremes(
        self,
        found: cute.Tensor,
        tensors: ModifierTensors,
        window: tuple,
        lengths: Lengths,
        seqlens: tuple,
        group: Int32,
        of_keys: cutlass.Constexpr[bool],
    ):
        block, head, entry = self.number_of_warp()
        if block < found.shape[2]:
            place, first_block, first_tile = self.sequence_of(block, head * group, entry, lengths, seqlens, of_keys)
            rows, columns, tile, number = place.seqlen_q, place.seqlen_k, self.tile_m, block - first_block
            if cutlass.const_expr(of_keys):
                rows, columns, tile, number = columns, rows, self.tile_n, block - first_tile
            start = number * tile
            if start < rows:
                modifiers, lane = Modifiers(tensors, window), cute.arch.lane_idx()
                first, clear_first, clear_last, last = columns, Int32(0), columns, Int32(0)
                for h in cutlass.range(group, unroll=1):
                    here = place._replace(head=place.head + h)
                    for i in cutlass.range_constexpr(ceil_div(tile, LANES)):
                        # where the lanes do not divide a tile, some look at the last row, too
                        row = start + minimum(i * LANES + lane, tile - 1)
                        if cutlass.const_expr(of_keys):
                            low, high = modifiers.queries_of_key(here, row)
                        else:
                            if cutlass.const_expr(not self.of_keys):
                                row = minimum(row, rows - 1)  # a forward stores no others
                            low, high = modifiers.interval(here, row)
                        # the block of a row that sees nothing is not clear, and begins nowhere
                        is_empty = low >= high
                        low, high = select(is_empty, columns, low), select(is_empty, Int32(0), high)
                        first, clear_first = minimum(first, low), maximum(clear_first, low)
                        clear_last, last = minimum(clear_last, high), maximum(last, high)
                values = (first, "min"), (clear_first, "max"), (clear_last, "min"), (last, "max")
                write_four(found[entry, head, block, None], [redux(value, kind) for value, kind in values])

    @cute.kernel
    def lists(
        self,
        numbers: cute.Tensor,
        counts: cute.Tensor,
        extremes: tuple,
        tensors: ModifierTensors,
        window: tuple,
        lengths: Lengths,
        seqlens: tuple,
        group: Int32,
    ):
        tile, head, entry = self.number_of_warp()
        if tile < counts.shape[2]:
            sequence = self.sequence_of(tile, head * group, entry, lengths, seqlens, self.of_keys)
            sequence = self.within_mask(sequence, tensors.kinds)
            pairs, place = Pairs(self, extremes, sequence, (head, entry), tensors.kinds, group), sequence.place
            m, n = tile - sequence.first_block, tile - sequence.first_tile
            exists, blocks = m * self.tile_m < place.seqlen_q, ceil_div(place.seqlen_k, self.tile_n)
            if cutlass.const_expr(self.of_keys):
                exists, blocks = n * self.tile_n < place.seqlen_k, ceil_div(place.seqlen_q, self.tile_m)
            blocks, lane = select(exists, blocks, Int32(0)), cute.arch.lane_idx()
            num_full, num_visited = Int32(0), Int32(0)
            for start in cutlass.range(0, blocks, LANES, unroll=1):
                pair = (start + lane, n) if cutlass.const_expr(self.of_keys) else (m, start + lane)
                visits, is_full = pairs.compared(*pair, start + lane < blocks)
                num_full, num_visited = num_full + count(is_full), num_visited + count(visits)
            full, partial = Int32(0), num_full
            for start in cutlass.range(0, blocks, LANES, unroll=1):
                pair = (start + lane, n) if cutlass.const_expr(self.of_keys) else (m, start + lane)
                visits, is_full = pairs.compared(*pair, start + lane < blocks)
                is_partial = visits and not is_full
                position = select(is_full, full + count_below(is_full), partial + count_below(is_partial))
                if visits:  # past the last place only if a compact mask has changed
                    numbers[entry, head, tile, minimum(position, numbers.shape[3] - 1)] = start + lane
                full, partial = full + count(is_full), partial + count(is_partial)
            if lane == 0:
                if cutlass.const_expr(not self.of_keys):
                    # a tile of queries that sees nothing visits one block, all of whose pairs are hidden
                    if num_visited == 0:
                        numbers[entry, head, tile, 0] = Int32(0)
                    num_visited = maximum(num_visited, 1)
                counts[entry, head, tile, 0] = minimum(num_full, numbers.shape[3])
                counts[entry, head, tile, 1] = minimum(num_visited, numbers.shape[3])

    @cute.kernel
    def turns(
        self,
        turns: cute.Tensor,
        extremes: tuple,
        tensors: ModifierTensors,
        window: tuple,
        lengths: Lengths,
        seqlens: tuple,
        group: Int32,
    ):
        block, head, entry = self.number_of_warp()
        if block < turns.shape[2]:
            sequence = self.sequence_of(block, head * group, entry, lengths, seqlens, False)
            sequence = self.within_mask(sequence, tensors.kinds)
            pairs, place = Pairs(self, extremes, sequence, (head, entry), tensors.kinds, group), sequence.place
            m, lane, turn = block - sequence.first_block, cute.arch.lane_idx(), Int32(0)
            tiles = select(m * self.tile_m < place.seqlen_q, ceil_div(place.seqlen_k, self.tile_n), Int32(0))
            for start in cutlass.range(0, tiles, LANES, unroll=1):
                visits, _ = pairs.compared(m, start + lane, start + lane < tiles)
                own = turn + count_below(visits)  # all lanes must take part
                if visits:
                    turns[entry, head, block, start + lane] = own
                turn += count(visits)

    @cute.jit
    def number_of_warp(self) -> tuple:
        """The block or tile of this warp, its head of extremes and lists, and its entry there."""
        x, head, entry = cute.arch.block_idx()
        return cute.arch.make_warp_uniform(x * WARPS + cute.arch.thread_idx()[0] // LANES), head, entry

    @cute.jit
    def sequence_of(
        self,
        number: Int32,
        head: Int32,
        entry: Int32,
        lengths: Lengths,
        seqlens: tuple,
        of_keys: cutlass.Constexpr[bool],
    ) -> Sequence:
        """The sequence of a block of queries, or with of_keys of a block of keys."""
        seqlen_q, seqlen_k = seqlens
        sequence, row_entry, first_block, first_tile = entry, entry, Int32(0), Int32(0)
        first_row, first_key = Int32(0), Int32(0)
        if cutlass.const_expr(self.is_packed):
            numbered = (lengths.cu_seqlens_k, self.tile_n) if of_keys else (lengths.cu_seqlens_q, self.tile_m)
            sequence, _ = sequence_of_block(number, *numbered)
            batch = cute.size(lengths.cu_seqlens_q) - 1
            first_row, seqlen_q = packed_rows(sequence, lengths.cu_seqlens_q, batch, seqlen_q)
            first_key, seqlen_k = packed_rows(sequence, lengths.cu_seqlens_k, batch, seqlen_k)
            first_block, first_tile = first_row // self.tile_m + sequence, first_key // self.tile_n + sequence
        seqlen_k = used_keys(lengths, sequence, seqlen_k)
        place = Place(head, first_row, first_key, row_entry, sequence, seqlen_q, seqlen_k)
        return Sequence(place, first_block, first_tile)

    def within_mask(self, sequence: Sequence, kinds: cute.Tensor | None) -> Sequence:
        """A packed sequence as far as a mask has blocks for it: lists are no longer than that."""
        if kinds is None or not self.is_packed:
            return sequence
        lengths = zip(("seqlen_q", "seqlen_k"), kinds.shape[:2], self.block_size, strict=True)
        place = sequence.place
        most = {name: minimum(getattr(place, name), count * size) for name, count, size in lengths}
        return sequence._replace(place=place._replace(**most))


class Pairs(Untraced):
    """What is known of the pairs of the blocks of one sequence, for the query heads that share lists.

    Args:
        extremes: of blocks of queries, and of blocks of keys or None.
        coordinates: the head and the entry of extremes.
        kinds: those of `ModifierTensors`.
    """

    def __init__(
        self,
        kernel: BlockLists,
        extremes: tuple,
        sequence: Sequence,
        coordinates: tuple,
        kinds: cute.Tensor | None,
        group: Int32,
    ):
        self.kernel, self.place, self.kinds, self.group = kernel, sequence.place, kinds, group
        head, entry = coordinates
        self.of_queries, self.of_keys = (
            None if t is None else cute.domain_offset((first, 0), t[entry, head, None, None])
            for t, first in zip(extremes, (sequence.first_block, sequence.first_tile), strict=True)
        )

    @cute.jit
    def compared(self, m: Int32, n: Int32, exists: Boolean) -> tuple:
        """Whether some pairs of a block m of queries and a block n of keys may be visible, and whether all are."""
        tile_m, tile_n = self.kernel.tile_m, self.kernel.tile_n
        some, every = Boolean(False), Boolean(False)
        if exists:
            some, every = overlap(self.of_queries[m, None], n * tile_n, tile_n)
            if cutlass.const_expr(self.of_keys is not None):
                of_keys = overlap(self.of_keys[n, None], m * tile_m, tile_m)
                some, every = some and of_keys[0], every and of_keys[1]
            if cutlass.const_expr(self.kinds is not None):
                of_kinds = self.kinds_of(m, n)
                some, every = some and of_kinds[0], every and of_kinds[1]
        return some, some and every

    @cute.jit
    def kinds_of(self, m: Int32, n: Int32) -> tuple:
        """Whether kinds let some pairs of these blocks be visible, and whether they let all be."""
        kernel, place, some, every = self.kernel, self.place, Boolean(False), Boolean(True)
        (q_block, kv_block), (most_q, most_k) = kernel.block_size, self.kinds.shape[:2]
        rows = blocks_of_tile(m, kernel.tile_m, q_block, minimum(most_q, ceil_div(place.seqlen_q, q_block)))
        columns = blocks_of_tile(n, kernel.tile_n, kv_block, minimum(most_k, ceil_div(place.seqlen_k, kv_block)))
        for h in cutlass.range(self.group, unroll=1):
            for i in cutlass.range_constexpr(len(rows)):
                for j in cutlass.range_constexpr(len(columns)):
                    kind = self.kinds[rows[i], columns[j], place.head + h, place.entry]
                    some, every = some or kind != 0, every and kind >= kernel.least_full
        return some, every


def blocks_of_tile(tile: Int32, tile_size: int, block_size: int, count: Int32) -> list:
    """The numbers of the mask's blocks that overlap a tile; some may be there twice.

    Args: count: how many blocks the mask has.
    """
    start = tile * tile_size
    last = minimum((start + tile_size - 1) // block_size, count - 1)
    return [minimum(start // block_size + i, last) for i in range(overlapping(tile_size, block_size))]


def count_below(condition: Boolean) -> Int32:
    """The number of lanes below this one in which the condition holds. All lanes of a warp must call it."""
    ballot = Int32(cute.arch.vote_ballot_sync(condition))
    return Int32(cute.arch.popc(ballot & ((Int32(1) << cute.arch.lane_idx()) - 1)))


@cute.jit
def overlap(extremes: cute.Tensor, start: Int32, size: cutlass.Constexpr[int]) -> tuple:
    """Whether the rows of a block may see some of the columns [start, start + size), and whether all see all."""
    values = cute.make_rmem_tensor((4,), Int32)
    cute.autovec_copy(extremes, values)
    some = values[0] < start + size and values[3] > start
    return some, values[1] <= start and values[2] >= start + size


def redux(value: Int32, kind: str) -> Int32:
    """The least ("min") or the greatest ("max") value of a warp's lanes."""
    return cute.arch.make_warp_uniform(cute.arch.warp_redux_sync(value, kind))


@cute.jit
def write_four(target: cute.Tensor, values: list):
    """Write four numbers that all lanes of a warp have."""
    if cute.arch.lane_idx() == 0:
        vector = cute.make_rmem_tensor((4,), Int32)
        for i in cutlass.range_constexpr(4):
            vector[i] = values[i]
        cute.autovec_copy(vector, target)

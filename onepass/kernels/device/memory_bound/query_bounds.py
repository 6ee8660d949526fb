"""The query blocks that each tile of keys of a backward visits, where tensors say which keys a query sees.

    extremes_of_blocks   A warp for each block of queries finds the extremes of the first keys of its queries, and of
                         their ends, over the query heads that share bounds.
    bounds_of_tiles      A warp for each tile of keys compares it with the extremes of its sequence's blocks.

These are two launches, because a tile needs the extremes of all blocks. The extremes stay in L2 in between.

The blocks and the tiles of packed sequences are numbered one sequence after the other: those of sequence i begin with
number cu_seqlens[i] // tile + i. Some numbers have no rows. Nobody writes, or reads, the extremes of such a block.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ....geometry.integers import ceil_div, maximum, minimum, select
from ....geometry.tile_scheduler import LANES, packed_rows
from ...arguments import ModifierTensors, QueryBoundsArguments
from ..blocks.softmax.modifiers import Modifiers, Place
from ..blocks.tiles.packed import Lengths, used_keys
from ..entry import takes
from .backward_rows import sequence_of_block

WARPS = 4  # warps of a thread block, each with a block of queries or a tile of keys of its own


class Sequence(NamedTuple):
    """The sequence of a block or of a tile.

    Attributes:
        place: its `Place`, for the first of the query heads that share bounds.
        first_block, first_tile: the numbers of its first block of queries and of its first tile of keys.
    """

    place: Place
    first_block: Int32
    first_tile: Int32


class QueryBounds:
    """One compiled pair of kernels: (tiles, which tensors there are) -> device code.

    Args:
        visits_all: tiles add to dQ in turns. Each tile with keys visits every block then, so that turns can be counted.
    """

    def __init__(self, tile_m: int, tile_n: int, is_packed: bool, visits_all: bool):
        self.tile_m, self.tile_n = tile_m, tile_n
        self.is_packed, self.visits_all = is_packed, visits_all

    @takes(QueryBoundsArguments)
    def __call__(self, a: QueryBoundsArguments, stream: cuda.CUstream):
        entries, heads, num_blocks, _ = a.extremes.shape
        lengths = Lengths(a.cu_seqlens_q, a.cu_seqlens_k, a.seqused_k)
        seqlens, threads, window = (a.seqlen_q, a.seqlen_k), [WARPS * LANES, 1, 1], (a.window_left, a.window_right)
        self.extremes_of_blocks(a.extremes, a.modifiers, window, lengths, seqlens, a.group).launch(
            grid=[ceil_div(num_blocks, WARPS), heads, entries], block=threads, stream=stream
        )
        self.bounds_of_tiles(a.extremes, a.bounds, lengths, seqlens).launch(
            grid=[ceil_div(a.bounds.shape[2], WARPS), heads, entries], block=threads, stream=stream
        )

    @cute.kernel
    def extremes_of_blocks(
        self,
        extremes: cute.Tensor,
        tensors: ModifierTensors,
        window: tuple,
        lengths: Lengths,
        seqlens: tuple,
        group: Int32,
    ):
        block, head, entry = self.number_of_warp()
        if block < extremes.shape[2]:
            place, first_block, _ = self.sequence_of(block, head * group, entry, lengths, seqlens, of_keys=False)
            first_query = (block - first_block) * self.tile_m
            if first_query < place.seqlen_q:
                modifiers, lane = Modifiers(tensors, window), cute.arch.lane_idx()
                first, clear_first, clear_last, last = place.seqlen_k, Int32(0), place.seqlen_k, Int32(0)
                for h in cutlass.range(group, unroll=1):
                    here = place._replace(head=place.head + h)
                    for i in cutlass.range_constexpr(ceil_div(self.tile_m, LANES)):
                        # where tile_m is no multiple of the lanes, some look at the last query, too
                        query = first_query + minimum(i * LANES + lane, self.tile_m - 1)
                        low, high = modifiers.interval(here, query)
                        # the block of a query that sees nothing, or does not exist, is not clear, and begins nowhere
                        is_empty = low >= high
                        low, high = select(is_empty, place.seqlen_k, low), select(is_empty, Int32(0), high)
                        first, clear_first = minimum(first, low), maximum(clear_first, low)
                        clear_last, last = minimum(clear_last, high), maximum(last, high)
                found = (first, "min"), (clear_first, "max"), (clear_last, "min"), (last, "max")
                write_four(extremes[entry, head, block, None], [redux(value, kind) for value, kind in found])

    @cute.kernel
    def bounds_of_tiles(self, extremes: cute.Tensor, bounds: cute.Tensor, lengths: Lengths, seqlens: tuple):
        tile, head, entry = self.number_of_warp()
        if tile < bounds.shape[2]:
            place, first_block, first_tile = self.sequence_of(tile, head, entry, lengths, seqlens, of_keys=True)
            start, lane = (tile - first_tile) * self.tile_n, cute.arch.lane_idx()
            blocks = cute.domain_offset((first_block, 0), extremes[entry, head, None, None])
            num_blocks = ceil_div(place.seqlen_q, self.tile_m)
            # there are numbers past a sequence's last tile, and tiles of keys that nobody uses
            num_blocks = select(start < place.seqlen_k, num_blocks, Int32(0))
            begin, clear_begin, clear_stop, stop = num_blocks, num_blocks, num_blocks, Int32(0)
            for m in cutlass.range(lane, num_blocks, LANES, unroll=2):
                visits, is_clear = self.compared(blocks[m, None], start)
                begin = select(visits, minimum(begin, m), begin)
                stop = select(visits, m + 1, stop)
                clear_begin = select(is_clear, minimum(clear_begin, m), clear_begin)
            begin, clear_begin, stop = redux(begin, "min"), redux(clear_begin, "min"), redux(stop, "max")
            # A block in between that sees none of the keys ends the clear ones, too: it is visited, and needs a mask.
            for m in cutlass.range(clear_begin + lane, stop, LANES, unroll=2):
                _, is_clear = self.compared(blocks[m, None], start)
                clear_stop = select(is_clear, clear_stop, minimum(clear_stop, m))
            found = [minimum(value, stop) for value in (begin, clear_begin, redux(clear_stop, "min"))]
            write_four(bounds[entry, head, tile, None], [*found, stop])

    @cute.jit
    def number_of_warp(self) -> tuple:
        """The block or tile of this warp, its head of extremes and bounds, and its entry there."""
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
        """The sequence of a block of queries, or with of_keys of a tile of keys."""
        seqlen_q, seqlen_k = seqlens
        sequence, first_row, row_entry, first_block, first_tile = entry, Int32(0), entry, Int32(0), Int32(0)
        if cutlass.const_expr(self.is_packed):
            numbered = (lengths.cu_seqlens_k, self.tile_n) if of_keys else (lengths.cu_seqlens_q, self.tile_m)
            sequence, _ = sequence_of_block(number, *numbered)
            batch = cute.size(lengths.cu_seqlens_q) - 1
            first_row, seqlen_q = packed_rows(sequence, lengths.cu_seqlens_q, batch, seqlen_q)
            first_key, seqlen_k = packed_rows(sequence, lengths.cu_seqlens_k, batch, seqlen_k)
            first_block, first_tile = first_row // self.tile_m + sequence, first_key // self.tile_n + sequence
        seqlen_k = used_keys(lengths, sequence, seqlen_k)
        return Sequence(
            Place(head, first_row, Int32(0), row_entry, sequence, seqlen_q, seqlen_k), first_block, first_tile
        )

    @cute.jit
    def compared(self, extremes: cute.Tensor, start: Int32) -> tuple:
        """Whether a block visits the tile of keys that begins with `start`, and whether it needs no mask there."""
        values = cute.make_rmem_tensor((4,), Int32)
        cute.autovec_copy(extremes, values)
        end = start + self.tile_n
        visits = values[0] < end and values[3] > start
        is_clear = visits and values[1] <= start and values[2] >= end
        if cutlass.const_expr(self.visits_all):
            visits = Boolean(True)
        return visits, is_clear


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

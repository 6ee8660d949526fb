"""A warpgroup that turns K and V of an e4m3 cache into 16 bits, between TMA and the tensor cores.

    raw K, raw V   (tile_n, columns) of e4m3       full: TMA bytes          empty: these warps
    K, V           (tile_n, columns) of 16 bits    full: these warps        empty: all consumer warps

A lane converts a row, 16 columns at a time: it loads 16 bytes and stores 32. Eight neighboring lanes have the same
columns of eight rows, which the swizzles of both tiles put into different banks. Each e4m3 number is a number of the
16-bit types, so the tensor cores compute the same bits as from a 16-bit cache of these values.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32

from ...blocks.memory import e4m3
from ...blocks.memory.ptx import load_words, store_words
from ...blocks.memory.untraced import Untraced
from .producer import NO_TILE, as_producer
from .tile import WARPS
from .transposer import COLUMNS, state_of, step_of_columns, swizzled_offset

ROWS = 32  # keys of a warp, one a lane
AHEAD = 1  # loads, of 4 registers each, that come before a store that does not need them


def warps_of_rows(keys: int) -> int:
    """The number of warps that share rows: each of them has every so many-th piece of 16 columns."""
    return WARPS * ROWS // keys


def first_offset(warp, lane, keys: int, row_bytes: int, each: int):
    """The byte of a lane's first piece in a tile. Args: each: pieces of 16 bytes for 16 columns."""
    groups = keys // ROWS
    return swizzled_offset(warp % groups * ROWS + lane, each * (warp // groups), keys, row_bytes)


class Converter(Untraced):
    """One of the warps that convert tiles of one circular buffer to another."""

    def __init__(self, keys: int, head_dim: int, dtype: type[cutlass.Numeric], raw, target):
        """Args: raw, target: tiles (keys, head_dim, count) in shared memory, of e4m3 and of the dtype."""
        self.keys, self.head_dim, self.dtype = keys, head_dim, dtype
        self.sharing = warps_of_rows(keys)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
        lane = cute.arch.lane_idx()
        self.source = raw.iterator.toint() + first_offset(warp, lane, keys, head_dim, 1)
        self.target = target.iterator.toint() + first_offset(warp, lane, keys, 2 * head_dim, 2)

    @cute.jit
    def convert(self, raw: Int32, index: Int32, signs: Int32 | None):
        """Convert this lane's share of a tile.

        Args:
            raw, index: the numbers of the tile's buffers.
            signs: `SIGNS` to change the sign of all values, else 0; None: they keep it.
        """
        source = self.source + raw * (self.keys * self.head_dim)
        target = self.target + index * (2 * self.keys * self.head_dim)
        pieces = range(0, self.head_dim // COLUMNS, self.sharing)
        loaded = []
        for i in cutlass.range_constexpr(len(pieces)):
            for piece in pieces[i + len(loaded) : i + 1 + AHEAD]:
                loaded.append(load_words(step_of_columns(source, piece, self.keys, self.head_dim)))
            self._store(target, pieces[i], loaded.pop(0), signs)

    def _store(self, target: Int32, piece: int, words: tuple, signs: Int32 | None):
        as_16_bits = e4m3.neighbors_as_bf16 if self.dtype is BFloat16 else e4m3.neighbors_as_fp16
        for half in range(2):
            two = words[2 * half : 2 * half + 2]
            if signs is not None:
                two = [word ^ signs for word in two]
            address = step_of_columns(target, 2 * piece + half, self.keys, 2 * self.head_dim)
            store_words(address, *as_16_bits(two[0]), *as_16_bits(two[1]))


class ConvertingWarp(Untraced):
    """A warp that converts K and V of all tiles of a thread block: K, V of each block (the producer is a K ahead)."""

    def __init__(self, kernel, sRawK, sK, sRawV, sV, raw_pipes, pipes, notes):
        """Args: notes: see `Producer`."""
        self.kernel, self.raw_pipes, self.pipes, self.notes = kernel, raw_pipes, pipes, notes
        self.k = Converter(kernel.buffer_n, kernel.head_dim, kernel.dtype, sRawK, sK)
        self.v = Converter(kernel.buffer_n, kernel.head_dim_v, kernel.dtype, sRawV, sV)

    @cute.jit
    def run(self):
        fill = Int32(0)
        note = self.next_note(fill)
        while note != NO_TILE:
            raw_state = state_of(fill, self.kernel.raw_stages)
            signs = note if cutlass.const_expr(self.kernel.has_descales) else None
            self.pass_on(self.k, self.raw_pipes.k, raw_state, self.pipes.k, self.kernel.k_stages, fill, signs)
            self.pass_on(self.v, self.raw_pipes.v, raw_state, self.pipes.v, self.kernel.v_stages, fill, None)
            fill += 1
            note = self.next_note(fill)

    @cute.jit
    def next_note(self, fill: Int32) -> Int32:
        """Wait for the fill-th block of K. Returns: its note."""
        state = state_of(fill, self.kernel.raw_stages)
        self.raw_pipes.k.consumer_wait(state)
        return cute.arch.make_warp_uniform(self.notes[state.index])

    @cute.jit
    def pass_on(self, converter, raw_pipe, raw_state, pipe, stages: cutlass.Constexpr[int], fill: Int32, signs):
        """Convert the fill-th tile from one circular buffer to the other."""
        state = as_producer(state_of(fill, stages))
        raw_pipe.consumer_wait(raw_state)
        # `producer_acquire` would expect bytes of TMA
        pipe.sync_object_empty.wait(state.index, state.phase)
        converter.convert(raw_state.index, state.index, signs)
        # the tensor cores see what each lane has stored once the lane has waited here
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(raw_pipe.consumer_get_barrier(raw_state))
            cute.arch.mbarrier_arrive(pipe.producer_get_barrier(state))

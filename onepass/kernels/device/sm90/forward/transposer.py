"""Two warps of the producer's warpgroup transpose V of e4m3, from the rows of TMA to what the tensor cores read.

    raw V   (tile_n, head_dim_v), a row for each key       full: TMA bytes          empty: these warps
    V       (head_dim_v, tile_n), a row for each column    full: these warps        empty: all consumer warps

`ldmatrix` with .trans takes keys 2q, 2q + 1 of columns 2c, 2c + 1 to lane 4c + q, as one word of pairs of bytes: two of
them, of keys 0 to 7 and 8 to 15, hold the four keys that `fp8.keys_last` puts together, of two columns. Two byte
permutations separate the columns, and `stmatrix` puts the words of a quad together: 16 keys of a column.

Rows of 128 bytes, swizzled, have their bank from row % 8 (of 64 and 32 bytes from more bits of the row): even columns
alone would meet in half of the banks. So the lower lanes store their even column with the odd one of the upper lanes,
which takes other selectors and no instruction. Neither loads nor stores meet a bank conflict.

Source: FlashAttention-3, arXiv:2407.08608, section 3.3.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline

from .....geometry.integers import select
from ...blocks.memory.ptx import load_transposed, permute_bytes, store_matrices
from ...blocks.memory.untraced import Untraced
from .producer import as_producer

FIRST_WARP, WARPS = 2, 2  # the first of these warps in the producer's warpgroup, and their number
KEYS = 32  # keys of four 8 x 8 matrices of 16-bit values
COLUMNS = 16  # columns, and bytes, of a piece that the swizzle leaves together
# Loads that do not wait for the store before them, by a thread's registers. A load has four.
LOADS_AHEAD = {24: 0, 32: 1, 40: 3, 56: 3}
EVEN_COLUMN, ODD_COLUMN = 0x6420, 0x7531  # bytes of two words of pairs


def row_bytes(columns: int) -> int:
    """The number of columns of the blocks in which a swizzled e4m3 tile of `layouts.smem_tiles` lies."""
    return next(width for width in (128, 64, 32) if columns % width == 0)


def divided(number, by: int) -> tuple:
    """`divmod` of a number that is not negative by a power of two."""
    return number >> by.bit_length() - 1, number & by - 1


def swizzled_offset(row, piece, rows: int, columns: int):
    """The byte at which a piece (16 bytes) of a row begins in a swizzled tile (rows, columns)."""
    width = row_bytes(columns)
    block, in_row = divided(piece, width // COLUMNS)
    in_row = in_row ^ (row * width >> 7) & width // COLUMNS - 1
    return block * (rows * width) + row * width + in_row * COLUMNS


def loaded_offset(lane, keys: int, head_dim_v: int):
    """The byte of the row that a lane names to `ldmatrix`, its key's row, for the first keys and columns."""
    return swizzled_offset(lane, 0, keys, head_dim_v)


def stored_offset(lane, keys: int, head_dim_v: int):
    """The byte of the row that a lane names to `stmatrix`.

    The matrices are the even and the odd columns of 16 keys, then of the next 16.
    """
    matrix, i = divided(lane, 8)
    next_keys, is_odd = divided(matrix, 2)
    return swizzled_offset(2 * i + (is_odd ^ i >> 2), next_keys, head_dim_v, keys)


def selectors(is_upper) -> tuple:
    """The bytes of a lane's two words that go to the even and to the odd matrices that it stores.

    Args: is_upper: 1 for lanes from 16 on, 0 for the others.
    """
    first = EVEN_COLUMN + is_upper * (ODD_COLUMN - EVEN_COLUMN)
    return first, first ^ EVEN_COLUMN ^ ODD_COLUMN


def step_of_columns(offset, step, keys: int, head_dim_v: int):
    """`loaded_offset` of the columns 16 * step and following, from that of the first ones in an aligned tile."""
    block, in_row = divided(step, row_bytes(head_dim_v) // COLUMNS)
    return (offset ^ in_row * COLUMNS) + block * (keys * row_bytes(head_dim_v))


def step_of_keys(offset, step: int, keys: int, head_dim_v: int):
    """`stored_offset` of the keys 32 * step and following, from that of the first ones in an aligned tile."""
    block, in_row = divided(2 * step, row_bytes(keys) // COLUMNS)
    return (offset ^ in_row * COLUMNS) + block * (head_dim_v * row_bytes(keys))


class Transposer(Untraced):
    """One of the warps that transpose; each takes every WARPS-th block of 16 columns."""

    def __init__(self, keys: int, head_dim_v: int, raw: Int32, target: Int32, ahead: int):
        """Args:
        raw, target: addresses in shared memory of the first tiles.
        ahead: how many loads, of 4 registers each, come before a store that does not need them.
        """
        self.keys, self.head_dim_v, self.ahead = keys, head_dim_v, ahead
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane, step = cute.arch.lane_idx(), warp & WARPS - 1
        # from here on even steps are enough: they do not touch the bit of the warp
        self.source = raw + step_of_columns(loaded_offset(lane, keys, head_dim_v), step, keys, head_dim_v)
        self.target = target + stored_offset(lane, keys, head_dim_v) + step * (COLUMNS * row_bytes(keys))
        self.selectors = selectors(lane >> 4)

    @cute.jit
    def transpose(self, source: Int32, target: Int32):
        """Transpose this warp's share of a tile.

        Args: source, target: this lane's addresses in the raw tile and in the transposed one.
        """
        # no loop: its counter would be a register too many
        units = [(step, k) for step in range(0, self.head_dim_v // COLUMNS, WARPS) for k in range(self.keys // KEYS)]
        loaded = []
        for i in cutlass.range_constexpr(len(units)):
            for unit in units[i + len(loaded) : i + 1 + self.ahead]:
                loaded.append(self._load(source, *unit))
            self._store(target, *units[i], loaded.pop(0))

    def _load(self, source: Int32, step: int, k: int) -> tuple:
        columns = step_of_columns(source, step, self.keys, self.head_dim_v)
        return load_transposed(columns + k * (KEYS * row_bytes(self.head_dim_v)))

    def _store(self, target: Int32, step: int, k: int, words: tuple):
        columns = [permute_bytes(*words[i : i + 2], by) for i in (0, 2) for by in self.selectors]
        rows = target + step * (COLUMNS * row_bytes(self.keys))
        store_matrices(step_of_keys(rows, k, self.keys, self.head_dim_v), *columns)


def state_of(fill: Int32, stages: int) -> pipeline.PipelineState:
    """Buffer and phase of a fill, for its reader: one number in a register instead of two a circular buffer."""
    times, index = divided(fill, stages) if stages & stages - 1 == 0 else (fill // stages, fill % stages)
    return pipeline.PipelineState(stages, Int32(0), Int32(index), Int32(times & 1))


class TransposingWarp(Untraced):
    """A warp that transposes V of all tiles of a thread block."""

    def __init__(self, kernel, sRaw, sV, raw_pipe, v_pipe):
        self.kernel, self.raw_pipe, self.v_pipe = kernel, raw_pipe, v_pipe
        self.raw_stages, self.v_stages = kernel.loaded_v_stages, kernel.v_stages
        addresses = (t.iterator.toint() for t in (sRaw, sV))
        ahead = LOADS_AHEAD[kernel.producer_registers]
        self.transposer = Transposer(kernel.buffer_n, kernel.head_dim_v, *addresses, ahead)

    @cute.jit
    def run(self, queue, schedule, seqlens):
        """Transpose every block of V, in the order in which the producer loads them."""
        wave, number = Int32(0), queue.first()
        # twice the blocks that have been passed on, plus the phase of the queue: one register fewer than with the wave
        progress = Int32(0)
        # Through a shuffle that moves nothing: the assembler gives the terms of a sum that it sees their own registers.
        source, target = (
            cute.arch.shuffle_sync_bfly(t, offset=0) for t in (self.transposer.source, self.transposer.target)
        )
        while number < schedule.num_tiles:
            tile = self.kernel.tile_at(number, schedule, seqlens, exists=True)
            for _ in cutlass.range(tile.last - tile.first, unroll=1):
                raw_state, v_state = (state_of(progress >> 1, stages) for stages in (self.raw_stages, self.v_stages))
                self.pass_on(raw_state, v_state, source, target)
                # carried along: a first address and a distance from it would take more registers
                source += self.to_next(raw_state)
                target += self.to_next(v_state)
                progress += 2
            wave += 1
            number = queue.take(wave, progress & 1)
            progress = progress ^ 1
            queue.want_next()

    def to_next(self, state: pipeline.PipelineState) -> Int32:
        """Bytes from this buffer to the next one."""
        tile = self.kernel.buffer_n * self.kernel.head_dim_v
        return select(state.index == state.stages - 1, Int32(-(state.stages - 1) * tile), Int32(tile))

    @cute.jit
    def pass_on(self, raw_state, v_state, source: Int32, target: Int32):
        """Transpose a tile from one circular buffer to the other."""
        v_state = as_producer(v_state)
        self.raw_pipe.consumer_wait(raw_state)
        # `producer_acquire` would expect bytes of TMA
        self.v_pipe.sync_object_empty.wait(v_state.index, v_state.phase)
        self.transposer.transpose(source, target)
        # the tensor cores see what each lane has stored once the lane has waited here
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.raw_pipe.consumer_get_barrier(raw_state))
            cute.arch.mbarrier_arrive(self.v_pipe.producer_get_barrier(v_state))

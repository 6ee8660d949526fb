"""The forward of few query rows: the warps of a thread block lie along the keys, and each goes its own way.

    warp 0   keys  0..15 of 64: K V | S=QK softmax O+=PV | ..  ┐
    warp 1   keys 16..31            | ..                       ├ merge, exactly -> out and lse, or a split's
    warp 2   keys 32..47            | ..                       │
    warp 3   keys 48..63            | ..                       ┘

Decoding has 1 to about 32 rows a kv head (query heads of a group, times proposed tokens), and its time is the time to
read K and V. In kernel.py a warp has 16 rows and all warps read all K and V from shared memory: with 8 rows three of
four warps would work in vain, and shared memory would be read four times. Here each warp has all rows, and tile_n keys
of every step of the thread block, in buffers that it alone fills and reads: it waits for its own copies and for no
other warp, so there is no barrier in the loop, and as many bytes stay under way as the buffers hold.

In the end the warps are merged like splits (memory_bound/merge.py), in the order of their numbers: with m the largest
of their references m_w,   O = sum_w exp(m_w - m) O_w,   and row_sum in the same way. Each warp adds up and writes some
columns.

Everything else is in kernel.py: the loop over blocks of keys, masks, softmax, GEMMs, splits, and what is not here.

With pages, a lane looks up one key of the warp's step, a step before it is loaded, and hands what it found to the lanes
that copy that row. So any page size costs the same, and no copy waits for a table.

State: an H200 has run this kernel, over caches in e4m3, 16 and 32 bits; nothing is tuned. The tests compile it for six
architectures, read the machine code, and run the PTX on the CPU.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .....geometry.integers import ceil_div
from .....geometry.tile_scheduler import LANES
from ...blocks.memory.layouts import rows_and_columns
from ...blocks.repair import rows as repair_rows
from ...blocks.tiles.paged import KeyLocations, LocatedRows
from ..loads import RowLoader
from .kernel import ForwardSm80
from .warps import Tile, Warps

COLUMN_BLOCKS = 4  # blocks of 8 columns that a warp writes at a time; all compiled head dims are multiples of 32


def warp_number() -> Int32:
    """The number of this warp in its thread block."""
    return cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // LANES)


class KeyWarps(Warps):
    """A warp with all rows of the tile and with keys of its own."""

    def __init__(self, kernel, buffers: tuple, *inputs):
        super().__init__(kernel, buffers, *inputs)
        self.warp, self.key_warps = warp_number(), self.config.key_warps
        self.column_blocks = kernel.head_dim_v // 8
        pieces = self.m_tiles * self.column_blocks
        # over the buffers of K and V: four values of O a lane, from an 8-column block of its two rows ..
        base = cute.recast_ptr(buffers[1].iterator, dtype=Float32)
        shape, strides = (4, LANES, pieces, self.key_warps), (1, 4, 4 * LANES, 4 * LANES * pieces)
        self.sO = cute.make_tensor(base, cute.make_layout(shape, stride=strides))
        # .. then the references and sums of these rows, and whether the warp has met a NaN
        base = base + 4 * LANES * pieces * self.key_warps
        shape, strides = (2, LANES, 2 * self.m_tiles, self.key_warps), (1, 2, 2 * LANES, 4 * LANES * self.m_tiles)
        self.sState = cute.make_tensor(base, cute.make_layout(shape, stride=strides))
        base = cute.recast_ptr(base + 4 * LANES * self.m_tiles * self.key_warps, dtype=Int32)
        self.sHasNan = cute.make_tensor(base, cute.make_layout(self.key_warps))

    def keys_and_values(self, tile: Tile) -> tuple:
        if self.pages is None:
            return super().keys_and_values(tile)
        k, v, head = self.tensors.k, self.tensors.v, self.kernel.head_kv(tile)
        locations = KeyLocations(self.pages, tile.origin_k, k.shape[3], self.tile_n)
        return tuple(LocatedRows(t[None, None, head, None], self.pages, tile.origin_k, locations) for t in (k, v))

    # ---------------------------------------------------------------- end of a tile

    @cute.jit
    def store(self, tile: Tile):
        """Merge the states of all warps, and write out = O / row_sum and lse, some columns a warp."""
        self.finish_o()
        cute.arch.sync_threads()  # all warps are done with K and V
        self._put_state(tile)
        cute.arch.sync_threads()
        has_nan = Boolean(False)
        for w in cutlass.range_constexpr(self.key_warps):
            has_nan = has_nan or self.sHasNan[w] != 0
        has_nan = cute.arch.make_warp_uniform(Int32(has_nan)) != 0
        for i in cutlass.range_constexpr(self.m_tiles):
            rows = [self.row_of(tile, i, r) for r in range(2)]
            is_row = [exists for _, _, exists in rows]
            shares, weights = cute.make_rmem_tensor((2, self.key_warps), Float32), cute.make_rmem_tensor((2,), Float32)
            self._merge_sums(i, shares)
            self.finish_rows(tile, i, rows, [exists and self.warp == 0 for exists in is_row], weights)
            if has_nan:
                self.recompute(tile, i, weights, self.warp, self.key_warps)
            else:
                mO = self.mO
                out_rows = [
                    self.kernel.at_head(mO, mO, head, tile.origin_q)[position, None] for position, head, _ in rows
                ]
                self._store_columns(i, shares, weights, out_rows, is_row)

    @cute.jit
    def _put_state(self, tile: Tile):
        """Write O, references and sums of this warp to shared memory, each lane to a range of its own."""
        lane, has_nan = cute.arch.lane_idx(), Boolean(False)
        piece = cute.make_rmem_tensor((4,), Float32)
        for i in cutlass.range_constexpr(self.m_tiles):
            for b in cutlass.range_constexpr(self.column_blocks):
                for v in cutlass.range_constexpr(4):
                    piece[v] = self.acc_o[(v % 2, v // 2), i, b]
                cute.autovec_copy(piece, self.sO[None, lane, i * self.column_blocks + b, self.warp])
            for r in cutlass.range_constexpr(2):
                self.sState[0, lane, 2 * i + r, self.warp] = self.softmax[i].row_max[r]
                self.sState[1, lane, 2 * i + r, self.warp] = self.softmax[i].row_sum[r]
            # V of a hidden key may have brought a NaN, see `Warps.store`
            if cutlass.const_expr(self.kernel.hides_pairs or self.kernel.dtype is Float32):
                has_nan = has_nan or repair_rows.has_nan(self.o[i], self.row_of(tile, i, 0)[2])
        if lane == 0:
            self.sHasNan[self.warp] = Int32(has_nan)

    @cute.jit
    def _merge_sums(self, i: cutlass.Constexpr[int], shares: cute.Tensor):
        """Merge references and sums of this thread's rows of an m_tile over all warps.

        Args: shares: (2 rows, warps), set to the factor of each warp's O.
        """
        lane, softmax = cute.arch.lane_idx(), self.softmax[i]
        for r in cutlass.range_constexpr(2):
            largest = -Float32.inf
            for w in cutlass.range_constexpr(self.key_warps):
                largest = cute.arch.fmax(largest, self.sState[0, lane, 2 * i + r, w])
            # in an empty row -inf - -inf would be NaN
            reference = largest if largest > -Float32.inf else Float32(0.0)
            total = Float32(0.0)
            for w in cutlass.range_constexpr(self.key_warps):
                distance = self.sState[0, lane, 2 * i + r, w] - reference
                shares[r, w] = cute.math.exp2(distance * softmax.scale_log2, fastmath=True)
                total += shares[r, w] * self.sState[1, lane, 2 * i + r, w]
            softmax.row_max[r], softmax.row_sum[r] = largest, total

    @cute.jit
    def _store_columns(
        self, i: cutlass.Constexpr[int], shares: cute.Tensor, weights: cute.Tensor, out_rows: list, is_row: list
    ):
        """Add up this warp's columns of an m_tile over all warps, and write them."""
        lane, groups = cute.arch.lane_idx(), self.column_blocks // COLUMN_BLOCKS
        piece = cute.make_rmem_tensor((4,), Float32)
        acc = cute.make_rmem_tensor(((2, 2), 1, COLUMN_BLOCKS), Float32)
        for turn in cutlass.range_constexpr(ceil_div(groups, self.key_warps)):
            group = self.warp + turn * self.key_warps
            if group < groups:
                first = group * COLUMN_BLOCKS
                acc.fill(0.0)
                for w in cutlass.range_constexpr(self.key_warps):
                    for b in cutlass.range_constexpr(COLUMN_BLOCKS):
                        cute.autovec_copy(self.sO[None, lane, i * self.column_blocks + first + b, w], piece)
                        for v in cutlass.range_constexpr(4):
                            at = (v % 2, v // 2), 0, b
                            acc[at] = acc[at] + shares[v // 2, w] * piece[v]
                self.gemms.store_rows(rows_and_columns(acc), weights, out_rows, is_row, self.lane_in_quad, first)


class DecodeSm80(ForwardSm80):
    """One compiled forward of few rows: (static problem, config) -> device code. See the module's docstring.

    The arguments are those of ForwardSm80, with a DecodeConfigSm80 as config.
    """

    make_warps = KeyWarps

    def announce(self):
        """Allow the launch of the merge, which waits for the end of this kernel."""
        if self.config.early_merge and self.is_split:
            cute.arch.griddepcontrol_launch_dependents()

    def loading_thread(self) -> Int32:
        return cute.arch.lane_idx()

    def first_key(self, n_block: Int32) -> Int32:
        return n_block * self.config.block_keys + warp_number() * self.config.tile_n

    def buffer_of(self, buffer):
        return warp_number() * self.config.num_stages + buffer

    @cute.jit
    def load_q(self, loader: RowLoader, q: cute.Tensor, tile: Tile):
        """Load Q by the first warp for all warps, which meet once, when Q has arrived."""
        if warp_number() == 0:
            ForwardSm80.load_q(self, loader, q, tile)

    @cute.jit
    def load_first(self, loaders: tuple, mK: cute.Tensor, mV: cute.Tensor, tile: Tile):
        self._look_up(mK, tile, tile.blocks.last - 1)
        ForwardSm80.load_first(self, loaders, mK, mV, tile)

    @cute.jit
    def load_block(self, loaders: tuple, mK, mV, tile: Tile, n_block: Int32, limit: Int32 | None, buffer):
        ForwardSm80.load_block(self, loaders, mK, mV, tile, n_block, limit, buffer)
        if cutlass.const_expr(limit is not None):  # the first block
            self._look_up(mK, tile, n_block - 1)

    @cute.jit
    def load_ahead(self, loaders: tuple, mK, mV, tile: Tile, n_block: Int32, buffer):
        ForwardSm80.load_ahead(self, loaders, mK, mV, tile, n_block, buffer)
        self._look_up(mK, tile, n_block - 1)

    @cute.jit
    def _look_up(self, mK, tile: Tile, n_block: Int32):
        """Look up the pages of the block that this warp loads next."""
        if cutlass.const_expr(self.is_paged):
            mK.locations.look_up(self.first_key(n_block), tile.geometry.seqlen_k)

    @cute.jit
    def _wait_for_loads(self, still_under_way: cutlass.Constexpr[int]):
        """Wait until the loads of this warp, except for its last groups, are visible in shared memory to its lanes."""
        cute.arch.cp_async_wait_group(still_under_way)
        cute.arch.sync_warp()

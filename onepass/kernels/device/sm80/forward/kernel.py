"""The Ampere forward kernel: one thread block a tile of query rows, all warps load and compute.

    loads      Q K V(n-1) | K V(n-2)           | K V(n-3)           | ..       cp.async, through num_stages buffers
    each warp               S=QK softmax O+=PV | S=QK softmax O+=PV | ..       mma, from shared memory by ldmatrix

A warp owns 16 query rows (m_tiles times), and their softmax needs no other warp: a row of S lies in the four lanes of a
quad. Warps meet once a step of tile_n keys: after `wait_group` and a barrier the buffers of step j are full for all of
them, and those of step j - 1 are free to be filled for step j + num_stages - 1. Configurations choose other orders of
loads:

    num_stages=1           K of the next step is loaded during softmax and PV, V of this one during QK^T; two barriers
    prefetch=False         load, wait, compute

Thread blocks of neighboring tiles of a head have neighboring numbers, so their K and V meet in L2.

With splits, each thread block (tile, split) takes one split of the tile's keys and writes float32 partials, which
memory_bound/merge.py merges; with pages, loads.py looks up where each row of K and V lies. Everything between is the
same.

What depends on the type of the elements stands elsewhere: fragments, mma and the order of O's columns in gemms_16bit.py
and, for float32 by three products of tf32 limbs, in gemms_float32.py; the width of copies in loads.py.

Shared memory: Q (tile_m, head_dim); num_stages of K (tile_n, head_dim) and of V (tile_n, head_dim_v); columns up to the
compiled head dim are zeros, and so are rows past the end of a sequence: P = 0 there, and 0 * NaN = NaN.

The tests compile the kernel for six architectures, read the machine code, and run the PTX on the CPU; an H200 is the
GPU that has run it. With float32, infinities in Q and K give NaN where they could give a number.

Names follow CuTe code: mQ global, sQ shared, rQ register fragment.

Source: FlashAttention-2, arXiv:2307.08691, Algorithm 1 and section 3.3.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32
from cutlass.memory import SmemAllocator

from .....geometry import tile_scheduler
from .....geometry.block_range import key_blocks
from .....geometry.integers import minimum, select
from .....geometry.pack_gqa import unpack_row
from .....geometry.splits import Splits, blocks_of_split
from .....geometry.tile_scheduler import LANES
from .....problem import AttentionProblem, Mask
from ....arguments import ForwardSm80Arguments
from ....config import ForwardConfigSm80, head_dim_tile
from ...blocks.memory.layouts import (
    as_batch_of_one,
    at_head,
    pack_heads,
    partials_rows_first,
    partials_rows_first_of_lse,
    rows_first,
    rows_first_of_lse,
    smem_tiles,
)
from ...blocks.memory.ptx import exit_if
from ...blocks.repair.rows import SourceTensors
from ...blocks.softmax.cache_scales import CacheDescales, DescaleTensors
from ...blocks.softmax.mask import Geometry
from ...blocks.softmax.modifiers import place_of
from ...blocks.softmax.sinks import Sinks
from ...blocks.tiles.packed import Lengths, PackedSchedule, used_keys
from ...blocks.tiles.paged import Pages
from ...blocks.tiles.schedule import Schedule, ScoreArguments, Sequences, make_schedule
from ...entry import takes
from ..loads import RowLoader
from . import gemms_16bit, gemms_e4m3, gemms_float32
from .warps import Tile, Warps


class Cache(NamedTuple):
    """What only calls over a cache have; None at compile time where there is none."""

    pages: Pages | None
    splits: Splits | None
    descales: DescaleTensors | None


class ForwardSm80:
    """One compiled forward: (static problem, config) -> device code. See the module's docstring for the picture.

    Args:
        reads_cache: K and V are a cache, which has batch entries even where queries are packed.
        is_split: each thread block (tile, split) handles one split of the keys, and writes float32 partials.
        is_paged: K and V lie in pages.
        descales_by_block: with an e4m3 cache, each block of keys, or page, has a descale of its own.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        config: ForwardConfigSm80,
        dtype: type[cutlass.Numeric],
        arch: str,
        reads_cache: bool = False,
        is_split: bool = False,
        is_paged: bool = False,
        descales_by_block: bool = False,
    ):
        config.check(problem, arch)
        self.is_split, self.is_paged, self.descales_by_block = is_split, is_paged, descales_by_block
        self.config, self.dtype = config, dtype
        self.group = config.group(problem)  # query heads of a tile
        self.tile_heads_per_kvhead = problem.qhead_per_kvhead // self.group
        self.positions = config.positions(problem)  # positions of a tile
        self.head_dims = problem.head_dim, problem.head_dim_v  # columns of the tensors
        self.head_dim, self.head_dim_v = (head_dim_tile(d) for d in self.head_dims)  # columns of the tiles
        self.has_intervals, self.hides_pairs = problem.has_intervals, problem.hides_pairs
        mask = Mask() if self.has_intervals else problem.mask
        self.has_window = mask.window_left is not None, mask.window_right is not None
        self.longest_first = config.longest_first and (self.has_window == (False, True) or self.has_intervals)
        self.is_packed, self.packs_keys = problem.is_packed, problem.is_packed and not reads_cache
        self.has_e4m3_cache = problem.has_e4m3_cache
        # K and V in memory: e4m3 numbers come in pairs
        self.kv_dtype, per_element = (Float16, 2) if self.has_e4m3_cache else (dtype, 1)
        self.kv_columns = tuple(d // per_element for d in self.head_dims)
        self.kv_tile_columns = self.head_dim // per_element, self.head_dim_v // per_element
        if self.has_e4m3_cache:
            self.make_tiled_mma, self.gemms = gemms_16bit.make_tiled_mma, gemms_e4m3.GemmsE4M3
        elif dtype is Float32:
            self.make_tiled_mma, self.gemms = gemms_float32.make_tiled_mma, gemms_float32.GemmsFloat32
        else:
            self.make_tiled_mma, self.gemms = gemms_16bit.make_tiled_mma, gemms_16bit.Gemms16Bit

    # ---------------------------------------------------------------- host

    @takes(ForwardSm80Arguments)
    def __call__(self, a: ForwardSm80Arguments, stream: cuda.CUstream):
        q, k, v, out, lse = a[:5]
        if cutlass.const_expr(self.is_packed):
            q = as_batch_of_one(q)
            if cutlass.const_expr(self.packs_keys):
                k, v = as_batch_of_one(k), as_batch_of_one(v)
            if cutlass.const_expr(not self.is_split):  # partials have a batch
                out, lse = as_batch_of_one(out), as_batch_of_one(lse)
        config = self.config
        mQ, mK, mV = (rows_first(t) for t in (q, k, v))
        if cutlass.const_expr(self.is_split):
            mO, mLSE = partials_rows_first(out), partials_rows_first_of_lse(lse)
        else:
            mO, mLSE = rows_first(out), rows_first_of_lse(lse)
        descales = None
        if cutlass.const_expr(a.k_descale is not None):
            divisor = None if a.kv_block is None else cute.FastDivmodDivisorV2(a.kv_block)
            descales = DescaleTensors(a.k_descale, a.v_descale, divisor)
        num_heads, batch = mQ.shape[2] // self.group, mQ.shape[3]
        num_m_blocks = None if self.is_packed else cute.ceil_div(mQ.shape[0], self.positions)
        self.kernel(
            SourceTensors(mQ, mK, mV),
            mO,
            mLSE,
            a.sinks,
            Lengths(a.cu_seqlens_q, a.cu_seqlens_k, a.seqused_k, a.added_k),
            ScoreArguments.of(a),
            make_schedule(num_m_blocks, num_heads, batch, a.heads_per_section),
            Cache(
                Pages(a.page_table, cute.FastDivmodDivisorV2(mK.shape[0])) if self.is_paged else None,
                Splits(a.num_splits, a.split_blocks) if self.is_split else None,
                descales,
            ),
            self.make_tiled_mma(config, self.kv_dtype),
            (
                smem_tiles(config.tile_m, self.head_dim, 1, self.dtype),
                *(smem_tiles(config.tile_n, n, config.num_buffers, self.kv_dtype) for n in self.kv_tile_columns),
            ),
        ).launch(
            grid=[a.num_tiles, a.num_splits if self.is_split else 1, 1],
            block=[config.num_threads, 1, 1],
            stream=stream,
        )

    # ---------------------------------------------------------------- device: set-up

    @cute.kernel
    def kernel(
        self,
        tensors: SourceTensors,  # (seqlen, head_dim, num_heads, batch) each
        mO: cute.Tensor,  # (seqlen_q, head_dim_v, num_heads_q, batch)
        mLSE: cute.Tensor,  # (seqlen_q, 1, num_heads_q, batch)
        mSinks: cute.Tensor | None,
        lengths: Lengths,
        scores: ScoreArguments,
        schedule: Schedule,
        cache: Cache,
        tiled_mma: cute.TiledMma,
        layouts: tuple,  # of Q, K and V in shared memory
    ):
        pages, splits, descale_tensors = cache
        self.announce()
        number, split, _ = cute.arch.block_idx()
        seqlen_k = pages.capacity if self.is_paged else tensors.k.shape[0]
        seqlens = scores.sequences(tensors.q.shape[0], seqlen_k, lengths)
        if cutlass.const_expr(self.is_packed):
            num_heads = schedule.divisors.num_heads
            schedule = PackedSchedule(
                lengths, seqlens.seqlen_q, seqlens.seqlen_k, num_heads, self.positions, self.longest_first
            )
            # the grid was made for the worst case
            exit_if(number >= schedule.num_tiles)
        tile = self.tile_at(number, schedule, seqlens)
        if cutlass.const_expr(self.is_split):
            if cutlass.const_expr(self.is_packed):
                # packed sequences of one tile are split; of the others, the first split has all keys
                is_split = tile.geometry.seqlen_q <= self.positions
                splits = splits.for_sequence(select(is_split, splits.num_splits, Int32(1)), is_split)
            tile = tile._replace(blocks=blocks_of_split(tile.blocks, split, *splits))
            mO, mLSE = (t[None, None, None, None, split] for t in (mO, mLSE))

        smem = SmemAllocator()
        sQ = self._allocate(smem, layouts[0], self.dtype)
        sK, sV = (self._allocate(smem, layout, self.kv_dtype) for layout in layouts[1:])
        thread, num_threads = self.loading_thread(), self.config.loading_threads
        loaders = tuple(
            RowLoader(buffers, columns, self.config.vector_bytes, num_threads, thread)
            for buffers, columns in zip((sQ, sK, sV), (self.head_dims[0], *self.kv_columns), strict=True)
        )
        descales = None
        if cutlass.const_expr(descale_tensors is not None):
            entry, head, tile_n = tile.origin_k, self.head_kv(tile), self.config.tile_n
            descales = CacheDescales(descale_tensors, pages, entry, head, tile_n, self.descales_by_block)
        sinks = None if cutlass.const_expr(mSinks is None) else Sinks(mSinks, lengths.cu_seqlens_q)
        inputs = tiled_mma, scores.factors, tensors, (mO, mLSE), sinks, pages, descales, seqlens.modifiers
        warps = self.make_warps(self, (sQ, sK, sV), *inputs)
        if cutlass.const_expr(self.is_split):
            has_no_keys = tile.blocks.first == tile.blocks.last
            if has_no_keys:
                warps.store_no_keys(tile)
            exit_if(has_no_keys)
        self.compute(warps, loaders, tensors, tile)

    def _allocate(self, smem: SmemAllocator, layout: cute.ComposedLayout, dtype: type[cutlass.Numeric]) -> cute.Tensor:
        swizzle = layout.inner if self.config.swizzle else None
        return smem.allocate_tensor(dtype, layout.outer, 1024, swizzle)

    @cute.jit
    def tile_at(self, number: Int32, schedule, seqlens: Sequences) -> Tile:
        """The tile with this number."""
        if cutlass.const_expr(self.is_packed):
            m_block, head, origin_q, seqlen_q, origin_k, seqlen_k, sequence, _ = schedule.find(number)
        else:
            coord = tile_scheduler.tile_coord(number, schedule.divisors, schedule.tiles_of_head, schedule.batch)
            m_block, head, origin_q = coord
            origin_k = sequence = origin_q
            seqlen_q, seqlen_k = seqlens.seqlen_q, used_keys(seqlens.lengths, origin_k, seqlens.seqlen_k)
        geometry = Geometry(seqlen_q, seqlen_k, seqlens.window_left, seqlens.window_right)
        m_start = m_block * self.positions
        if cutlass.const_expr(self.has_intervals):
            rows = [
                self.row_and_place(
                    *(m_block, head, (origin_q, origin_k), sequence, geometry),
                    minimum(cute.arch.lane_idx() + i, self.config.tile_m - 1),
                )
                for i in range(0, self.config.tile_m, LANES)
            ]
            blocks = seqlens.modifiers.key_blocks(rows, seqlen_k, self.config.block_keys)
        else:
            blocks = key_blocks(m_start, minimum(m_start + self.positions, seqlen_q), *geometry, self.config.block_keys)
        return Tile(m_block, head, origin_q, origin_k, geometry, blocks, sequence)

    def row_and_place(self, m_block, head, origins: tuple, sequence, geometry: Geometry, row_in_tile) -> tuple:
        """The place and the position of a row of a tile."""
        row, head, is_used = row_in_tile, head, True
        if self.group > 1:
            row, in_group, is_used = unpack_row(row_in_tile, self.group, self.config.tile_m)
            head = head * self.group + in_group
        place = place_of(head, *origins, sequence, geometry, self.is_packed)
        # a row that is not used counts as one past the last query
        return place, select(is_used, m_block * self.positions + row, geometry.seqlen_q)

    def at_head(self, t: cute.Tensor, m: cute.Tensor, head, origin) -> cute.Tensor:
        """A head of q, out or lse: `layouts.at_head` for tensors of queries."""
        return at_head(t, m, head, origin, self.is_packed)

    def keys_at_head(self, t: cute.Tensor, head, origin) -> cute.Tensor:
        """A head of k or v: `layouts.at_head` for tensors of keys."""
        return at_head(t, t, head, origin, self.packs_keys)

    def head_kv(self, tile: Tile):
        return tile.head // self.tile_heads_per_kvhead

    # These hooks differ in few_rows.py, where each warp has keys and buffers of its own.

    make_warps = Warps

    def announce(self):
        """What a thread block does first."""

    def loading_thread(self) -> Int32:
        """The number of this thread among those that load a tile together."""
        return cute.arch.thread_idx()[0]

    def first_key(self, n_block: Int32) -> Int32:
        """The first of the keys of a block that this warp works on."""
        return n_block * self.config.tile_n

    def buffer_of(self, buffer):
        """The number of a buffer among all buffers of the thread block."""
        return buffer

    # ---------------------------------------------------------------- device: a tile

    @cute.jit
    def compute(self, warps: Warps, loaders: tuple, tensors: SourceTensors, tile: Tile):
        """A whole tile: its blocks of keys, last first.

        They are cut by the right edge of the mask, then clear, then cut by its left edge.
        """
        mK, mV = warps.keys_and_values(tile)
        first, clear_first, clear_last, last = tile.blocks
        config = self.config

        self.load_q(loaders[0], tensors.q, tile)
        self.load_first(loaders, mK, mV, tile)
        # Q has arrived afterwards; as many groups of K and V may be under way as `load_first` has begun
        cute.arch.cp_async_wait_group(max(1, config.num_stages - 1) if config.prefetch else 0)
        cute.arch.sync_threads()
        warps.gemms.load_q()
        warps.begin(tile)

        n_block, buffer = last - 1, Int32(0)
        for _ in cutlass.range(last - clear_last, unroll=1):
            buffer = self.step(warps, loaders, mK, mV, tile, n_block, buffer, True)
            n_block -= 1
        for _ in cutlass.range(clear_last - clear_first, unroll=1):
            buffer = self.step(warps, loaders, mK, mV, tile, n_block, buffer, False)
            n_block -= 1
        if cutlass.const_expr(self.has_window[0] or self.has_intervals):
            for _ in cutlass.range(clear_first - first, unroll=1):
                buffer = self.step(warps, loaders, mK, mV, tile, n_block, buffer, True)
                n_block -= 1
        warps.store(tile)

    @cute.jit
    def load_q(self, loader: RowLoader, q: cute.Tensor, tile: Tile):
        """Load Q of a tile, as a group of its own."""
        m_start, seqlen_q = tile.m_block * self.positions, tile.geometry.seqlen_q
        if cutlass.const_expr(self.group == 1):
            loader.load(self.at_head(q, q, tile.head, tile.origin_q), m_start, seqlen_q, 0)
        else:
            packed = pack_heads(q, self.group)
            loader.load_packed(self.at_head(packed, packed, tile.head, tile.origin_q), self.group, m_start, seqlen_q)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_first(self, loaders: tuple, mK: cute.Tensor, mV: cute.Tensor, tile: Tile):
        """The loads under way before the first step: K, or num_stages - 1 groups of K and V."""
        config, n_block, limit = self.config, tile.blocks.last - 1, tile.geometry.seqlen_k
        if cutlass.const_expr(config.prefetch):
            if cutlass.const_expr(config.num_stages > 1):
                self.load_block(loaders, mK, mV, tile, n_block, limit, 0)
            else:
                loaders[1].load(mK, self.first_key(n_block), limit, 0)
            cute.arch.cp_async_commit_group()
            for stage in cutlass.range_constexpr(1, config.num_stages - 1):
                self.load_ahead(loaders, mK, mV, tile, n_block - stage, stage)

    @cute.jit
    def load_ahead(self, loaders: tuple, mK, mV, tile: Tile, n_block: Int32, buffer):
        """Load K and V of a block as one group; an empty one if the tile has no such block, so that groups count steps.

        Only a tile's first step can meet the end of the sequence: here all rows exist.
        """
        if n_block >= tile.blocks.first:
            self.load_block(loaders, mK, mV, tile, n_block, None, buffer)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_block(self, loaders: tuple, mK, mV, tile: Tile, n_block: Int32, limit: Int32 | None, buffer):
        """Load K and V of a block, with zeros from `limit` on."""
        _, load_k, load_v = loaders
        load_k.load(mK, self.first_key(n_block), limit, self.buffer_of(buffer))
        load_v.load(mV, self.first_key(n_block), limit, self.buffer_of(buffer))

    @cute.jit
    def step(
        self,
        warps: Warps,
        loaders: tuple,
        mK: cute.Tensor,
        mV: cute.Tensor,
        tile: Tile,
        n_block: Int32,
        buffer: Int32,
        is_masked: cutlass.Constexpr[bool],
    ) -> Int32:
        """S = Q K_n^T, softmax, O += P V_n. A block that meets the end of the sequence counts as masked.

        Returns: the next step's buffer.
        """
        _, load_k, load_v = loaders
        config = self.config
        stages, n_start = config.num_stages, self.first_key(n_block)
        limit = tile.geometry.seqlen_k if cutlass.const_expr(is_masked) else None
        following = Int32(0)
        if cutlass.const_expr(not config.prefetch):
            cute.arch.sync_threads()  # all warps are done with the buffers
            load_k.load(mK, n_start, limit, 0)
            load_v.load(mV, n_start, limit, 0)
            cute.arch.cp_async_commit_group()
            self._wait_for_loads(0)
            warps.gemms.qk(0)
        elif cutlass.const_expr(stages == 1):
            self._wait_for_loads(0)  # K has arrived, and all warps are done with V
            load_v.load(mV, n_start, limit, 0)
            cute.arch.cp_async_commit_group()
            warps.gemms.qk(0)
            self._wait_for_loads(0)  # V has arrived, and all warps are done with K
            if n_block > tile.blocks.first:
                load_k.load(mK, n_start - config.tile_n, None, 0)
            cute.arch.cp_async_commit_group()
        else:
            self._wait_for_loads(stages - 2)
            following = buffer + 1 if buffer < stages - 1 else Int32(0)
            # the buffer of the step before, for the step num_stages - 1 steps later
            freed = buffer - 1 if buffer > 0 else Int32(stages - 1)
            self.load_ahead(loaders, mK, mV, tile, n_block - (stages - 1), freed)
            warps.gemms.qk(self.buffer_of(buffer))
        warps.scores_to_p(tile, n_start, is_masked)
        warps.gemms.pv(self.buffer_of(buffer))
        return following

    @cute.jit
    def _wait_for_loads(self, still_under_way: cutlass.Constexpr[int]):
        """Wait until the loads of all threads, except for their last groups, are visible in shared memory to all."""
        cute.arch.cp_async_wait_group(still_under_way)
        cute.arch.sync_threads()

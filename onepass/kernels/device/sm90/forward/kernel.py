"""The Hopper forward kernel: warp-specialized, persistent, pipelined within and across tiles.

    producer warp        K,Q | K V | K V | K' Q' V | K' V' ...         TMA, through circular buffers in shared memory
                          |     \\     \\
    warpgroup 0          S=QK  softmax  [S=QK, O+=PV] softmax  [S'=Q'K', O+=PV] softmax' store(O) ...
    warpgroup 1                   [S=QK, O+=PV] softmax  ...                          (pingpong: in turns)

A consumer warpgroup owns 64 query rows. In each step it issues the QK^T of the next keys together with the PV of the
current ones, and computes the softmax of the former while the latter still runs (FlashAttention-3, Algorithm 2); see
consumer.py for this and its variants.

Buffers and barriers (mbarrier pairs full / empty; arrivals)
    Q   q_stages x num_warpgroups tiles (64, head_dim)    full: TMA bytes     empty: the 4 warps of its warpgroup
    K   num_stages tiles (tile_n, head_dim)               full: TMA bytes     empty: all consumer warps (of a cluster)
    V   num_stages (v_stages) tiles (tile_n, head_dim_v)  full: TMA bytes     empty: all consumer warps (of a cluster)
        (score_buffers=2: twice as many tiles of half as many rows)
        (transposes_v: full: the warps of transposer.py, which take V from raw tiles that TMA has filled)
        (an e4m3 cache: full: the warps of converter.py, which take K and V from raw tiles)
    numbers of the next tiles, with dynamic_tiles: see blocks/tiles/queue.py

Names follow CuTe code: mQ global, gQ a tile of it, sQ shared, rQ register fragment or descriptor; t... partitioned.

Source: FlashAttention-3, arXiv:2407.08608, sections 3.1, 3.2, Algorithms 1 and 2.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode as Major
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.warpgroup import MmaF8Op, MmaF16BF16Op, OperandSource
from cutlass.memory import SmemAllocator

from .....errors import UnsupportedError
from .....geometry import tile_scheduler
from .....geometry.block_range import KeyBlocks, blocks_of_rows, key_blocks
from .....geometry.integers import ceil_div, minimum
from .....geometry.splits import Splits, blocks_of_split, visited_blocks
from .....geometry.tile_scheduler import LANES
from .....problem import AttentionProblem, Mask
from ....arguments import ForwardSm90Arguments
from ....config import (
    REGISTERS,
    REGISTERS_OF_PAGES,
    REGISTERS_OF_SEVERAL,
    REGISTERS_TO_CONVERT,
    ROWS_PER_WARPGROUP,
    ForwardConfigSm90,
    head_dim_tile,
)
from ...blocks.memory.layouts import (
    as_batch_of_one,
    at_head,
    dims_first,
    first_rows,
    one_tile,
    pack_heads,
    rows_first,
    rows_first_of_lse,
    smem_tiles,
    splits_as_batch,
)
from ...blocks.memory.ptx import exit_if
from ...blocks.repair.rows import SourceTensors
from ...blocks.softmax import cache_scales
from ...blocks.softmax.mask import Geometry
from ...blocks.softmax.modifiers import Modifiers, place_of
from ...blocks.softmax.scaled import DescaleTensors
from ...blocks.softmax.sinks import Sinks
from ...blocks.tiles.packed import Lengths, PackedSchedule, used_keys
from ...blocks.tiles.paged import Pages
from ...blocks.tiles.queue import TileQueue
from ...blocks.tiles.schedule import Schedule, ScoreArguments, Sequences, make_schedule
from ...entry import takes
from .consumer import Consumer
from .converter import ConvertingWarp
from .inputs import Buffers, Inputs, Mmas
from .producer import Producer
from .tile import WARPGROUP, WARPS, Loads, Pipes, Tile
from .transposer import FIRST_WARP as FIRST_TRANSPOSING_WARP
from .transposer import WARPS as TRANSPOSING_WARPS
from .transposer import TransposingWarp

PRODUCER_WARP, SCHEDULER_WARP = 0, 1


class Tensors(NamedTuple):
    """All tensors but those that TMA loads, which `Loads` has."""

    out: cute.Tensor  # (seqlen_q, head_dim_v, num_heads_q, batch)
    lse: cute.Tensor  # (seqlen_q, 1, num_heads_q, batch)
    sources: SourceTensors | None  # with a mask, and for float32
    sinks: cute.Tensor | None


class Layouts(NamedTuple):
    """The layouts of buffers in shared memory."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    raw_k: cute.ComposedLayout | None  # for K before it is converted
    raw_v: cute.ComposedLayout | None  # for V before it is converted or transposed


class ForwardSm90:
    """One compiled forward: (static problem, config) -> device code. See the module's docstring for the picture."""

    def __init__(
        self,
        problem: AttentionProblem,
        config: ForwardConfigSm90,
        dtype: type[cutlass.Numeric],
        reads_cache: bool = False,
        is_split: bool = False,
        box_rows: int | None = None,
        has_descales: bool = False,
    ):
        """Args:
        reads_cache: K and V are a cache, which has batch entries even where queries are packed.
        is_split: out and lse are partials, one for each split of the keys. For packed queries they hold the rows of
            split 0, then those of split 1, and so on.
        box_rows: K and V lie in pages; this many of a page's rows are loaded together; None: they lie in rows.
        has_descales: each head of a sequence in an e4m3 cache has descales.
        """
        config.check(problem)
        if (is_split or box_rows is not None) and (
            not config.warp_specialized or config.cluster_size > 1 or config.score_buffers > 1
        ):
            expected = "warp_specialized, cluster_size=1 and score_buffers=1"
            raise UnsupportedError(f"splits and pages: expected {expected}, got {config}")
        self.config = config
        self.dtype = dtype
        self.is_split, self.is_paged, self.box_rows = is_split, box_rows is not None, box_rows
        # e4m3 GEMMs read both operands with the summed dimension contiguous: V is transposed by the caller or here
        self.is_fp8 = problem.quantization is not None
        self.transposes_v = config.transposes_v
        self.loads_keys_last = self.is_fp8 and not self.transposes_v
        # float32 comes as two adjacent float16 halves, see memory_bound/float32_halves.py
        self.num_halves = 2 if problem.dtype == torch.float32 else 1
        self.is_scaled = self.is_fp8 or self.num_halves > 1
        self.converts, self.has_descales = problem.has_e4m3_cache, has_descales
        self.kv_dtype = cutlass.Float8E4M3FN if self.converts else dtype  # of K and V as they are loaded
        self.num_threads = config.num_threads + (WARPGROUP if self.converts else 0)
        self.group = config.group(problem)  # query heads of a tile
        self.tile_heads_per_kvhead = problem.qhead_per_kvhead // self.group
        # rows of one head in a tile: all of them, or fewer with pack_gqa
        self.tile_m, self.tile_n = config.positions(problem), config.tile_n
        self.q_rows = ROWS_PER_WARPGROUP // self.group * self.group  # rows that a warpgroup loads
        self.score_buffers = config.score_buffers
        self.buffer_n = config.tile_n // config.score_buffers  # keys of one score buffer and one QK^T
        self.k_stages, self.v_stages = (stages * config.score_buffers for stages in config.kv_stages)
        self.raw_stages = config.raw_stages(problem)
        self.loaded_v_stages = self.raw_stages or self.v_stages
        self.loaded_k_stages = self.raw_stages if self.converts else self.k_stages
        self.head_dim, self.head_dim_v = head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v)
        self.pv_columns = config.pv_columns or self.head_dim_v  # columns of one P V
        self.num_warpgroups, self.cluster_size = config.num_warpgroups, config.cluster_size
        self.has_intervals = problem.has_intervals
        mask = Mask() if self.has_intervals else problem.mask
        self.has_window = mask.window_left is not None, mask.window_right is not None
        # the sides on which blocks of keys are cut, besides the end of a sequence
        self.cut_sides = (True, True) if self.has_intervals else self.has_window
        self.has_lists, self.block_size = (
            problem.has_lists,
            problem.block_size,
        )  # the partial blocks come first, so that all masks are on one side
        if self.has_lists:
            self.cut_sides = (False, True)
        self.longest_first = config.longest_first and (self.has_window == (False, True) or self.has_intervals)
        self.is_packed, self.packs_keys = problem.is_packed, problem.is_packed and not reads_cache
        self.hides_pairs = problem.hides_pairs
        self.needs_sequence = self.is_scaled or problem.has_modifiers
        # where single tokens stand next to prompts in chunks, most warpgroups have no row in many tiles
        self.skips_unused = self.is_packed and reads_cache and config.num_warpgroups > 1
        # rows of a document may begin inside a tile, and see none of the keys of those before
        self.skips_lowest = self.has_intervals and config.warp_specialized and not self.skips_unused
        self.skips_lowest = self.skips_lowest and not self.has_lists
        # V may hold arbitrary values past the last key of a sequence
        self.has_garbage = problem.is_packed or problem.has_seqused_k
        registers = REGISTERS_OF_PAGES if self.is_paged else REGISTERS
        registers = REGISTERS_TO_CONVERT if self.converts else registers
        several = REGISTERS_OF_SEVERAL.get(config.blocks_per_sm)
        self.producer_registers, self.consumer_registers, *more = several or registers[config.num_warpgroups]
        if self.transposes_v:
            self.producer_registers, self.consumer_registers = config.registers_to_transpose(problem)
        self.converter_registers = more[0] if more else None

    # ---------------------------------------------------------------- host

    @takes(ForwardSm90Arguments)
    def __call__(self, a: ForwardSm90Arguments, stream: cuda.CUstream):
        q, k, v, out, lse, float32 = *a[:5], a.float32
        if cutlass.const_expr(self.is_packed):
            q, out, lse = (as_batch_of_one(t) for t in (q, out, lse))
            if cutlass.const_expr(self.packs_keys):
                k, v = as_batch_of_one(k), as_batch_of_one(v)
            if cutlass.const_expr(float32 is not None):
                float32 = tuple(as_batch_of_one(t) for t in float32)
        elif cutlass.const_expr(self.is_split):
            out, lse = splits_as_batch(out), splits_as_batch(lse)
        sQ_layout = smem_tiles(
            ROWS_PER_WARPGROUP,
            self.head_dim,
            self.num_halves * self.num_warpgroups * self.config.q_stages,
            self.dtype,
        )
        sK_layout = smem_tiles(self.buffer_n, self.head_dim, self.num_halves * self.k_stages, self.dtype)
        v_box = (self.head_dim_v, self.buffer_n) if self.loads_keys_last else (self.buffer_n, self.head_dim_v)
        loaded_v_layout = smem_tiles(*v_box, self.num_halves * self.loaded_v_stages, self.kv_dtype)
        loaded_k_layout, sV_layout = sK_layout, loaded_v_layout
        if cutlass.const_expr(self.transposes_v):
            sV_layout = smem_tiles(self.head_dim_v, self.buffer_n, self.v_stages, self.dtype)
        elif cutlass.const_expr(self.converts):
            loaded_k_layout = smem_tiles(self.buffer_n, self.head_dim, self.loaded_k_stages, self.kv_dtype)
            sV_layout = smem_tiles(*v_box, self.v_stages, self.dtype)
        v_rows = dims_first(v) if cutlass.const_expr(self.loads_keys_last) else rows_first(v)
        k_box = (self.buffer_n, self.head_dim)
        if cutlass.const_expr(self.is_paged):
            k_box, v_box = (self.box_rows, self.head_dim), (self.box_rows, self.head_dim_v)
        tma = []
        for t, layout, rows, columns, num_receivers in (
            (self._rows_of_q(q), sQ_layout, self.q_rows, self.head_dim, 1),
            (rows_first(k), loaded_k_layout, *k_box, self.cluster_size),
            (v_rows, loaded_v_layout, *v_box, self.cluster_size),
        ):
            load = cpasync.CopyBulkTensorTileG2SOp()
            if cutlass.const_expr(num_receivers > 1):
                load = cpasync.CopyBulkTensorTileG2SMulticastOp()
            box = one_tile(layout, rows)
            tma.append(cpasync.make_tiled_tma_atom(load, t, box, (rows, columns), num_receivers))
        loads = Loads(*(tuple(atom_and_tensor) for atom_and_tensor in tma))
        mQ = loads.q[1]

        _, _, num_heads, batch = mQ.shape
        seqlen_q = self._seqlen_q(mQ)
        num_m_blocks = None if self.is_packed else cute.ceil_div(seqlen_q, self.tile_m * self.cluster_size)
        if cutlass.const_expr(self.is_split):
            schedule = make_schedule(num_m_blocks, num_heads, batch * a.num_splits, a.heads_per_section)
            splits = Splits(a.num_splits, a.split_blocks)
            schedule = schedule._replace(splits=splits, entries=cute.FastDivmodDivisorV2(batch))
        else:
            schedule = make_schedule(num_m_blocks, num_heads, batch, a.heads_per_section)
        descales = None
        if cutlass.const_expr(self.is_scaled):
            descales = DescaleTensors(a.q_scale, a.k_scale, a.v_scale, cute.FastDivmodDivisorV2(a.q_block))
        elif cutlass.const_expr(self.has_descales):
            descales = cache_scales.DescaleTensors(a.k_scale, a.v_scale, None)
        sources = None
        if cutlass.const_expr(self.num_halves > 1 or (self.hides_pairs and not self.is_fp8)):
            tensors = float32 if cutlass.const_expr(self.num_halves > 1) else (q, k, v)
            sources = SourceTensors(*(rows_first(t) for t in tensors))
        self.kernel(
            loads,
            Tensors(rows_first(out), rows_first_of_lse(lse), sources, a.sinks),
            Lengths(a.cu_seqlens_q, a.cu_seqlens_k, a.seqused_k, a.added_k),
            Pages(a.page_table, cute.FastDivmodDivisorV2(loads.k[1].shape[0])) if self.is_paged else None,
            descales,
            ScoreArguments.of(a),
            schedule,
            a.counter,
            self._make_tiled_mmas(),
            Layouts(
                sQ_layout,
                sK_layout,
                sV_layout,
                loaded_k_layout if cutlass.const_expr(self.converts) else None,
                loaded_v_layout if cutlass.const_expr(self.raw_stages) else None,
            ),
        ).launch(
            grid=[a.num_ctas, 1, 1],
            block=[self.num_threads, 1, 1],
            cluster=(self.cluster_size, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.config.blocks_per_sm,
            preferred_smem_carveout=100 if self.config.blocks_per_sm > 1 else None,  # percent
        )

    def _rows_of_q(self, q: cute.Tensor) -> cute.Tensor:
        """The view of q that tiles are cut from: (seqlen_q, ..), or with pack_gqa ((group, seqlen_q), ..)."""
        return rows_first(q) if self.group == 1 else pack_heads(rows_first(q), self.group)

    def _seqlen_q(self, mQ: cute.Tensor):
        return mQ.shape[0] if self.group == 1 else mQ.shape[0][1]

    def loaded_rows(self, sQ: cute.Tensor) -> cute.Tensor:
        return cute.make_tensor(sQ.iterator, first_rows(sQ.layout, self.q_rows))

    def _make_tiled_mmas(self):
        """S = Q K^T (Q from shared memory) and O += P V (P from registers), one warpgroup each."""
        if cutlass.const_expr(self.is_fp8):
            dtypes = self.dtype, self.dtype, Float32
            qk = MmaF8Op(*dtypes, (64, self.buffer_n, 32), OperandSource.SMEM, Major.K, Major.K)
            pv = MmaF8Op(*dtypes, (64, self.pv_columns, 32), OperandSource.RMEM, Major.K, Major.K)
            return cute.make_tiled_mma(qk, (1, 1, 1)), cute.make_tiled_mma(pv, (1, 1, 1))
        qk = MmaF16BF16Op(self.dtype, Float32, (64, self.buffer_n, 16), OperandSource.SMEM, Major.K, Major.K)
        pv = MmaF16BF16Op(self.dtype, Float32, (64, self.pv_columns, 16), OperandSource.RMEM, Major.K, Major.MN)
        return cute.make_tiled_mma(qk, (1, 1, 1)), cute.make_tiled_mma(pv, (1, 1, 1))

    # ---------------------------------------------------------------- device: set-up and roles

    @cute.kernel
    def kernel(
        self,
        loads: Loads,
        tensors: Tensors,
        lengths: Lengths,
        pages: Pages | None,
        descales: DescaleTensors | cache_scales.DescaleTensors | None,  # for FP8 and halves; of a cache
        scores: ScoreArguments,
        schedule: Schedule,
        counter: cute.Tensor | None,
        tiled_mmas: tuple,  # of Q K^T and of P V
        layouts: Layouts,
    ):
        mQ, mK = loads.q[1], loads.k[1]
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if cutlass.const_expr(self.is_packed):
            total_k = pages.capacity if self.is_paged else mK.shape[0]
            order = schedule.divisors.num_heads, self.tile_m, self.longest_first, schedule.splits, self.tile_n
            schedule = PackedSchedule(lengths, self._seqlen_q(mQ), total_k, *order)
            # the grid was made for the worst case
            exit_if(cute.arch.block_idx()[0] >= schedule.num_tiles)
        if warp_id == 0:
            for atom, _ in loads:
                cpasync.prefetch_descriptor(atom)

        smem = SmemAllocator()
        sQ, sK, sV = (
            smem.allocate_tensor(self.dtype, layout.outer, 1024, layout.inner)
            for layout in (layouts.q, layouts.k, layouts.v)
        )
        sLoadedK, sLoadedV = sK, sV
        if cutlass.const_expr(self.converts):
            sLoadedK, sLoadedV = (
                smem.allocate_tensor(self.kv_dtype, layout.outer, 1024, layout.inner)
                for layout in (layouts.raw_k, layouts.raw_v)
            )
        consumer_warps = WARPS * self.num_warpgroups
        # warps between the raw tiles and the consumers
        v_warps = WARPS if self.converts else TRANSPOSING_WARPS if self.transposes_v else 0
        k_warps = WARPS if self.converts else 0
        readers = consumer_warps + (TRANSPOSING_WARPS if self.transposes_v else 0)  # of the numbers of tiles
        pipes = Pipes(
            self._make_pipeline(smem, self.num_warpgroups * self.config.q_stages, WARPS, layouts.q, self.q_rows, 1),
            self._make_pipeline(
                smem, self.k_stages, consumer_warps, layouts.k, self.buffer_n, self.cluster_size, k_warps or 1
            ),
            self._make_pipeline(
                smem,
                self.v_stages,
                consumer_warps,
                layouts.v,
                self.head_dim_v if self.is_fp8 else self.buffer_n,
                self.cluster_size,
                v_warps or 1,
            ),
        )
        loaded = pipes
        if cutlass.const_expr(self.converts):
            raw = self._make_pipeline(
                smem, self.loaded_k_stages, k_warps, layouts.raw_k, self.buffer_n, 1, dtype=self.kv_dtype
            )
            loaded = loaded._replace(k=raw)
        if cutlass.const_expr(self.raw_stages):
            if cutlass.const_expr(self.transposes_v):
                sLoadedV = smem.allocate_tensor(self.dtype, layouts.raw_v.outer, 1024, layouts.raw_v.inner)
            raw = self._make_pipeline(
                smem, self.loaded_v_stages, v_warps, layouts.raw_v, self.buffer_n, 1, dtype=self.kv_dtype
            )
            loaded = loaded._replace(v=raw)
        notes = smem.allocate_tensor(Int32, cute.make_layout(self.raw_stages), 8) if self.converts else None
        queue = TileQueue(smem, schedule.num_tiles, counter, readers, self.cluster_size)
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.cluster_size > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        seqlen_k = pages.capacity if self.is_paged else mK.shape[0]
        seqlens = scores.sequences(self._seqlen_q(mQ), seqlen_k, lengths, False, self.block_size)
        loaded_tiles = sQ, sLoadedK, sLoadedV
        producer = Producer(self, loads, loaded_tiles, loaded, pages, notes, descales, seqlens.modifiers)
        all_splits = None
        if cutlass.const_expr(self.is_split and self.is_packed):
            all_splits = schedule.splits.num_splits, schedule.total_q
        sinks = None if cutlass.const_expr(tensors.sinks is None) else Sinks(tensors.sinks, lengths.cu_seqlens_q)
        inputs = Inputs(
            pipes,
            Mmas(*tiled_mmas),
            scores.factors,
            tensors.out,
            tensors.lse,
            sinks,
            tensors.sources,
            descales,
            pages,
            all_splits,
            seqlens.modifiers,
        )
        buffers = Buffers(sQ, sK, sV)
        if cutlass.const_expr(not self.config.warp_specialized):
            Consumer(self, buffers, inputs, producer).run_blocks(queue, schedule, seqlens)
        elif warp_id < WARPS:  # warpgroup 0
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_id == PRODUCER_WARP:
                producer.run(queue, schedule, seqlens)
            if cutlass.const_expr(counter is not None):
                if cute.arch.thread_idx()[0] == SCHEDULER_WARP * 32:
                    queue.fill()
            if cutlass.const_expr(self.transposes_v):
                if warp_id >= FIRST_TRANSPOSING_WARP:
                    TransposingWarp(self, sLoadedV, sV, loaded.v, pipes.v).run(queue, schedule, seqlens)
        elif cutlass.const_expr(self.converts):
            if warp_id >= WARPS + consumer_warps:
                cute.arch.setmaxregister_decrease(self.converter_registers)
                ConvertingWarp(self, sLoadedK, sK, sLoadedV, sV, loaded, pipes, notes).run()
            else:
                cute.arch.setmaxregister_increase(self.consumer_registers)
                Consumer(self, buffers, inputs).run_blocks(queue, schedule, seqlens)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            consumer = Consumer(self, buffers, inputs)
            if cutlass.const_expr(self.score_buffers == 1):
                consumer.run_blocks(queue, schedule, seqlens)
            else:
                consumer.run_halves(queue, schedule, seqlens)

    def _make_pipeline(
        self,
        smem,
        num_tiles: int,
        consumer_warps: int,
        layout,
        rows: int,
        cluster_size: int,
        producers: int = 1,
        dtype: type[cutlass.Numeric] | None = None,
    ):
        """A circular buffer that TMA fills with `rows` of each tile and that `consumer_warps` warps empty.

        Each of these warps arrives once a tile. Where there are several producers, they are warps that arrive as well.
        With a cluster, each thread block fills its share of every buffer of all thread blocks, once all of them have
        emptied it.

        Args: dtype: of the tiles, if it is not that of Q.
        """
        thread, dtype = pipeline.Agent.Thread, dtype or self.dtype
        return pipeline.PipelineTmaAsync.create(
            num_stages=num_tiles,
            producer_group=pipeline.CooperativeGroup(thread, producers),
            consumer_group=pipeline.CooperativeGroup(thread, consumer_warps * cluster_size),
            # not cute.size_in_bytes: it counts the unused rows between the column blocks of a swizzled tile
            tx_count=self.num_halves * rows * cute.size(layout.outer, mode=[1]) * dtype.width // 8,
            barrier_storage=smem.allocate_array(cutlass.Int64, 2 * num_tiles),
            cta_layout_vmnk=cute.make_layout((1, cluster_size, 1, 1)),
            defer_sync=True,
        )

    @cute.jit
    def tile_at(
        self, number: Int32, schedule: Schedule, seqlens: Sequences, exists: cutlass.Constexpr[bool] = False
    ) -> Tile:
        """The tile with this number; past the end, where there may be none, the last one (which is not computed)."""
        if cutlass.const_expr(not exists):
            number = minimum(number, schedule.num_tiles - 1)
        if cutlass.const_expr(self.is_packed):
            m_block, head, origin_q, seqlen_q, origin_k, seqlen_k, sequence, num_splits = schedule.find(number)
            split, origin_out = None, origin_q
            if cutlass.const_expr(self.is_split):
                split, head = divmod(head, schedule.num_heads)
                origin_out = origin_q + split * schedule.total_q
        else:
            coord = tile_scheduler.tile_coord(number, schedule.divisors, schedule.tiles_of_head, schedule.batch)
            m_block, head, origin_out = coord
            split, origin_q = divmod(origin_out, schedule.entries) if self.is_split else (None, origin_out)
            origin_k, sequence, num_splits = origin_q, None, None
            seqlen_q, seqlen_k = seqlens.seqlen_q, used_keys(seqlens.lengths, origin_k, seqlens.seqlen_k)
        geometry = Geometry(seqlen_q, seqlen_k, seqlens.window_left, seqlens.window_right)
        tile_m = self.tile_m * self.cluster_size
        m_start = m_block * tile_m
        if cutlass.const_expr(self.has_lists):
            counts = seqlens.modifiers.tensors.counts
            number, entry = self.list_of(m_block, origin_q, sequence)
            full, last = (counts[i, number, head, entry] for i in range(2))
            blocks = KeyBlocks(Int32(0), Int32(0), full, last)
        elif cutlass.const_expr(self.has_intervals):
            place, lane = place_of(head, origin_q, origin_k, sequence, geometry, self.is_packed), cute.arch.lane_idx()
            rows = [(place, m_start + lane + i) for i in range(0, tile_m, LANES)]
            blocks = seqlens.modifiers.key_blocks(rows, seqlen_k, self.tile_n)
        else:
            blocks = key_blocks(m_start, minimum(m_start + tile_m, seqlen_q), *geometry, self.tile_n)
        if cutlass.const_expr(self.cluster_size > 1):
            # All thread blocks of the cluster visit the same blocks; which of them need a mask is up to each of them.
            # Where the last m_block is past the end, its thread block computes and does not store.
            m_block = m_block * self.cluster_size + cute.arch.block_idx_in_cluster()
            m_start = minimum(m_block * self.tile_m, seqlen_q - 1)
            own = key_blocks(m_start, minimum(m_start + self.tile_m, seqlen_q), *geometry, self.tile_n)
            blocks, _ = blocks_of_rows(blocks, own, 0)
        if cutlass.const_expr(self.is_split):
            splits = schedule.splits
            if cutlass.const_expr(self.is_packed):
                splits = splits.for_sequence(num_splits, seqlen_q <= self.tile_m)
            blocks = blocks_of_split(blocks, split, *splits)
            blocks = visited_blocks(blocks, ceil_div(seqlen_k, self.tile_n))
        sequence = sequence if self.needs_sequence else None
        num_splits = num_splits if self.is_split and self.is_packed else None
        return Tile(m_block, head, origin_q, origin_k, geometry, *blocks, sequence, origin_out, num_splits)

    def key_block(self, tile: Tile, n_block: Int32, modifiers: Modifiers | None) -> Int32:
        """The number of a block of keys: of the one at this position of a list, where there are lists."""
        if not self.has_lists:
            return n_block
        number, entry = self.list_of(tile.m_block, tile.origin_q, tile.sequence)
        return modifiers.tensors.numbers[n_block, number, tile.head, entry]

    def list_of(self, m_block: Int32, origin_q: Int32, sequence: Int32 | None) -> tuple:
        """The number of a tile among those that have lists, and its entry there."""
        if self.is_packed:
            return origin_q // self.tile_m + sequence + m_block, Int32(0)
        return m_block, origin_q

    def at_head(self, t: cute.Tensor, m: cute.Tensor, head, origin) -> cute.Tensor:
        """A head of q, out or lse: `layouts.at_head` for tensors of queries."""
        return at_head(t, m, head, origin, self.is_packed)

    def keys_at_head(self, t: cute.Tensor, m: cute.Tensor, head, origin, along: int = 0) -> cute.Tensor:
        """A head of k or v: `layouts.at_head` for tensors of keys."""
        return at_head(t, m, head, origin, self.packs_keys, along)

    def buffer_states(self, user: pipeline.PipelineUserType) -> tuple:
        """The states of the buffers of K and V that are loaded (or read) first."""
        k_stages, v_stages = self.k_stages, self.v_stages
        if user is pipeline.PipelineUserType.Producer:
            k_stages, v_stages = self.loaded_k_stages, self.loaded_v_stages
        return tuple(pipeline.make_pipeline_state(user, stages) for stages in (k_stages, v_stages))

    def q_state(self, warpgroup_id, tile_count) -> pipeline.PipelineState:
        """Buffer and phase of a warpgroup's Q in its tile_count-th tile, for the consumer.

        Each warpgroup has buffers of its own.
        """
        stages = self.config.q_stages
        index = warpgroup_id * stages + tile_count % stages
        return pipeline.PipelineState(self.num_warpgroups * stages, Int32(0), Int32(index), (tile_count // stages) & 1)

"""The Hopper backward kernel: warp-specialized, persistent, five GEMMs a step.

A tile is 64 keys of one kv head for each warpgroup (`tile_n`); the steps go through the query blocks that see them, of
each query head of the group in turn, or with heads_together of all heads before the next block. Everything is computed
transposed, keys in rows: S^T = K Q^T and dP^T = V dO^T leave P^T and dS^T in registers, in the layout in which the
next GEMMs read them as operand A. So dV += P^T dO and dK += dS^T Q accumulate in registers through the whole tile, and
only dS goes through shared memory: dQ = dS K sums over the keys of all warpgroups. The dQ of a step is added to a
float32 accumulator in global memory.

    producer warp        Q0 | K V | dO0 | Q1 dO1 | Q2 dO2 ...                      TMA, through circular buffers
    scheduler warp       the number of the next tile; how many tiles of each head are done
    two warps            lse and delta of query rows and zeros for dQ, before tiles need them; dq, after them: rows.py
                         with turns, the second of them keeps these: turns.py
    each warpgroup       S0 P0 | dP0 dV0 | dS0 | S1 dK0 | P1 | dQ0 dP1 dV1 | dS1 | S2 dK1 | P2 ...

P and dS are computed while the tensor cores work on the GEMMs around them; see consumer.py, and there the parts.

With private_dq (BackwardConfigSm90) a thread block is the only one that adds to a dQ, and writes it when it is
complete. Otherwise these additions come in any order. If the problem is deterministic, tiles of keys add to a block of
dQ one after another: see turns.py. A tile then visits the query blocks in another order, so that the waits for turns
are short: block_range.following_query_block.

Buffers and barriers (mbarrier pairs full / empty; arrivals)
    K, V  one tile each, as tiles (64, head_dim) per warpgroup     full: TMA bytes     empty: all consumer warps
    Q     q_stages tiles (tile_m, head_dim), with their lse, delta full: TMA bytes     empty: all consumer warps
    dO    do_stages tiles (tile_m, head_dim_v)                     full: TMA bytes     empty: all consumer warps
    dS    2 tiles (tile_m, keys)                                   full: all consumer warps
Above head_dim 128 (wide.py) P goes through shared memory, too, and in pairs of thread blocks (paired.py) buffers and
barriers are shared. Where warpgroups have the same keys (shared_keys.py), each buffer of Q, dO and dS belongs to one.

Source: FlashAttention-3, arXiv:2407.08608, appendix B.1, Algorithm 3.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode as Major
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.warpgroup import MmaF16BF16Op, OperandSource
from cutlass.memory import SmemAllocator

from .....geometry.integers import ceil_div
from .....problem import AttentionProblem, Mask
from ....arguments import BackwardSm90Arguments
from ....config import ROWS_PER_WARPGROUP, STAT_ROWS, BackwardConfigSm90
from ...blocks.memory.layouts import as_batch_of_one, one_tile, rows_first, smem_tiles
from ...blocks.memory.ptx import exit_if, increment
from ...blocks.repair.rows import SourceTensors
from ...blocks.tiles.dq_sums import Accumulator
from ...blocks.tiles.key_tiles import KeyTiles
from ...blocks.tiles.named_barrier import NamedBarrier
from ...blocks.tiles.packed import Lengths
from ...blocks.tiles.queue import TileQueue
from ...blocks.tiles.schedule import Schedule, ScoreArguments, make_schedule
from ...entry import takes
from ..forward.tile import WARPGROUP, WARPS
from .consumer import BackwardConsumer
from .inputs import BackwardPipes, Buffers, Inputs, Mmas
from .paired import PEER_PIECES, PairedConsumer, adds_piece, piece_of
from .producer import BackwardProducer
from .rows import FIRST_WARP as FIRST_BACKGROUND_WARP
from .rows import BackgroundRows, Progress, RowTensors, Scratch, make_row_tensors
from .shared_keys import SharedKeysConsumer
from .turns import SLOTS, TurnBarriers, TurnKeeper
from .wide import P_WORDS, WideConsumer

PRODUCER_WARP, SCHEDULER_WARP = 0, 1
KEEPER_WARP = 3  # with turns; there is then one background warp less


class Loads(NamedTuple):
    """For each tensor that TMA loads its atom, and its coordinates (seqlen, head_dim or head_dim_v, heads, batch)."""

    k: tuple[cute.CopyAtom, cute.Tensor]
    v: tuple[cute.CopyAtom, cute.Tensor]
    q: tuple[cute.CopyAtom, cute.Tensor]
    do: tuple[cute.CopyAtom, cute.Tensor]
    peer_k: tuple[cute.CopyAtom | None, cute.Tensor | None]  # in pairs only


class Tensors(NamedTuple):
    """All other tensors."""

    dk: cute.Tensor  # (seqlen_k, head_dim, num_heads_kv, batch)
    dv: cute.Tensor
    dq: cute.Tensor | None
    rows: RowTensors | None
    progress: Progress | None
    sources: SourceTensors | None  # with hidden pairs only
    accumulator: Accumulator


class Layouts(NamedTuple):
    """The layouts of buffers in shared memory."""

    k: cute.ComposedLayout
    v: cute.ComposedLayout
    q: cute.ComposedLayout
    do: cute.ComposedLayout
    ds: cute.ComposedLayout
    peer_k: cute.ComposedLayout | None


class BackwardSm90(KeyTiles):
    """One compiled backward: (static problem, config) -> device code. See the module's docstring for the picture."""

    def __init__(self, problem: AttentionProblem, config: BackwardConfigSm90, dtype: type[cutlass.Numeric]):
        config.check(problem)
        self.config = config
        self.dtype = dtype
        self.group = problem.qhead_per_kvhead
        self.num_warpgroups = config.num_warpgroups
        self.tile_m, self.tile_n = config.tile_m, config.tile_n
        self.head_dim, self.head_dim_v = config.head_dims(problem)
        self.true_head_dim = problem.head_dim
        # instructions of the GEMMs S and dP, which sum over 16 columns each; columns past the head dim are zero
        self.steps_of_s, self.steps_of_dp = (ceil_div(d, 16) for d in (problem.head_dim, problem.head_dim_v))
        self.row_blocks, self.dq_columns = config.row_blocks, config.dq_columns(problem)
        self.keys_in_registers = config.keys_in_registers(problem)
        self.num_pieces = self.head_dim // self.dq_columns  # of the columns of a dQ, with by_gradient and by_queries
        self.query_shares = config.query_shares
        self.pieces_of_share = self.num_pieces if config.by_queries else 1
        # a warpgroup's share of a dQ: 64 of the queries, or some of the columns
        self.is_dq_by_rows = self.tile_m > ROWS_PER_WARPGROUP
        self.is_paired, self.cluster_size, self.ds_buffers = config.paired, config.tile_blocks, config.ds_buffers
        mask = Mask() if problem.has_intervals else problem.mask
        self.has_window = mask.window_left is not None, mask.window_right is not None
        self.has_lists, self.block_size = problem.has_backward_lists, problem.block_size
        self.is_deterministic = problem.deterministic
        # tiles may hold hidden pairs, which may bring NaN to gradients
        self.hides_pairs = problem.hides_pairs or problem.has_seqused_k
        self.longest_first = config.longest_first and self.has_window == (False, True)
        self.is_packed = problem.is_packed
        self.has_private_dq = config.private_dq
        self.adds_in_turns = config.adds_in_turns(problem)
        self.is_descending = config.adds_descending(problem)
        self.has_ascending_end = config.has_ascending_end(problem)
        self.ring_lag = config.ring_lag if self.adds_in_turns else 0
        self.heads_together = config.heads_together
        # K, V, Q and dO may hold arbitrary values past the end of a sequence
        self.has_garbage = problem.is_packed or problem.has_seqused_k
        self.has_background_rows = config.rows_in_background(problem)
        # whether dq is written when the tiles of a head are done
        self.finishes_rows = self.has_background_rows and not self.has_private_dq
        self.p_copies = config.p_copies(problem)
        self.producer_registers, self.consumer_registers = config.registers
        self.flag_vectors = config.flag_vectors(problem)

    # ---------------------------------------------------------------- host

    @takes(BackwardSm90Arguments)
    def __call__(self, a: BackwardSm90Arguments, stream: cuda.CUstream):
        q, k, v, dout, dk, dv = a[:6]
        if cutlass.const_expr(self.is_packed):
            q, k, v, dout, dk, dv = (as_batch_of_one(t) for t in a[:6])
        sK_layout = smem_tiles(ROWS_PER_WARPGROUP, self.head_dim, self.row_blocks, self.dtype, self.dq_columns)
        sV_layout = smem_tiles(ROWS_PER_WARPGROUP, self.head_dim_v, self.row_blocks, self.dtype)
        sQ_layout = smem_tiles(self.tile_m, self.head_dim, self.config.q_stages, self.dtype)
        sdO_layout = smem_tiles(self.tile_m, self.head_dim_v, self.config.do_stages, self.dtype)
        sdS_layout = smem_tiles(self.tile_m, ROWS_PER_WARPGROUP, self.config.ds_tiles, self.dtype)
        sPeerK_layout = None
        if cutlass.const_expr(self.is_paired):
            sPeerK_layout = smem_tiles(ROWS_PER_WARPGROUP, self.dq_columns, PEER_PIECES, self.dtype)
        tma = []
        for t, layout, rows, columns, receivers in (
            (k, sK_layout, ROWS_PER_WARPGROUP, self.head_dim, 1),
            (v, sV_layout, ROWS_PER_WARPGROUP, self.head_dim_v, 1),
            (q, sQ_layout, self.tile_m, self.head_dim, self.cluster_size),
            (dout, sdO_layout, self.tile_m, self.head_dim_v, self.cluster_size),
            (k, sPeerK_layout, ROWS_PER_WARPGROUP, self.dq_columns, 1),
        ):
            if cutlass.const_expr(layout is None):
                tma.append((None, None))
            else:
                load = cpasync.CopyBulkTensorTileG2SOp()
                if cutlass.const_expr(receivers > 1):
                    load = cpasync.CopyBulkTensorTileG2SMulticastOp()
                box = one_tile(layout, rows), (rows, columns), receivers
                tma.append(cpasync.make_tiled_tma_atom(load, rows_first(t), *box))
        loads = Loads(*(tuple(atom_and_tensor) for atom_and_tensor in tma))
        mQ = loads.q[1]
        seqlen_k, _, num_heads_kv, batch = loads.k[1].shape
        sources = None
        if cutlass.const_expr(self.hides_pairs):
            sources = SourceTensors(*(rows_first(t) for t in (q, k, v, dout)))
        rows = progress = None
        if cutlass.const_expr(self.has_background_rows):
            rows = make_row_tensors(self, a.out, dout, a.lse, a.dlse, a.dq)
            blocks = a.blocks_per_head, a.blocks_per_head * self.group, mQ.shape[2]
            progress = Progress(
                a.progress,
                cute.domain_offset((2,), a.progress),
                num_heads_kv * batch,
                *(cute.FastDivmodDivisorV2(n) for n in blocks),
            )
        num_n_blocks = None if self.is_packed else cute.ceil_div(seqlen_k, self.tile_n)
        heads = num_heads_kv, batch, a.heads_per_section
        if cutlass.const_expr(self.has_ascending_end):
            heads = num_heads_kv, batch, 1, a.heads_per_section
        schedule = make_schedule(num_n_blocks, *heads)._replace(tiles_in_ring=a.tiles_in_ring)
        self.kernel(
            loads,
            Tensors(
                rows_first(dk),
                rows_first(dv),
                None if cutlass.const_expr(a.dq is None) else rows_first(a.dq),
                rows,
                progress,
                sources,
                Accumulator(a.dq_accum, a.stats, a.turns, a.blocks_per_head, mQ.shape[2]),
            ),
            Lengths(a.cu_seqlens_q, a.cu_seqlens_k, a.seqused_k),
            ScoreArguments.of(a, a.softmax_scale),
            schedule,
            a.counter,
            self._make_tiled_mmas(),
            Layouts(sK_layout, sV_layout, sQ_layout, sdO_layout, sdS_layout, sPeerK_layout),
        ).launch(
            grid=[a.num_ctas, 1, 1],
            block=[self.config.num_threads, 1, 1],
            cluster=(self.cluster_size, 1, 1) if self.is_paired else None,
            stream=stream,
            min_blocks_per_mp=self.config.blocks_per_sm,
            preferred_smem_carveout=100 if self.config.blocks_per_sm > 1 else None,  # percent
            cooperative=self.adds_in_turns,  # a wait for a turn is a wait for a thread block that runs
        )

    def _make_tiled_mmas(self) -> Mmas:
        """The tiled GEMMs of one warpgroup; see Mmas."""

        def tiled_mma(columns: int, a: OperandSource, a_major: Major, b_major: Major) -> cute.TiledMma:
            op = MmaF16BF16Op(self.dtype, Float32, (64, columns, 16), a, a_major, b_major)
            return cute.make_tiled_mma(op, (1, 1, 1))

        smem, registers = OperandSource.SMEM, OperandSource.RMEM
        return Mmas(
            s=tiled_mma(self.tile_m, registers if self.keys_in_registers else smem, Major.K, Major.K),
            dp=tiled_mma(self.tile_m, smem, Major.K, Major.K),
            dv=tiled_mma(self.head_dim_v, registers, Major.K, Major.MN),
            dk=tiled_mma(self.head_dim, registers, Major.K, Major.MN),
            dq=tiled_mma(self.dq_columns, smem, Major.K, Major.MN),
        )

    # ---------------------------------------------------------------- device: set-up and roles

    @cute.kernel
    def kernel(
        self,
        loads: Loads,
        tensors: Tensors,
        lengths: Lengths,
        scores: ScoreArguments,
        schedule: Schedule,
        counter: cute.Tensor | None,
        tiled_mmas: Mmas,
        layouts: Layouts,
    ):
        mK, mQ = loads.k[1], loads.q[1]
        accumulator = tensors.accumulator
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if cutlass.const_expr(self.is_packed):
            schedule = self.schedule_of_keys(schedule, lengths, mK.shape[0], mQ.shape[0])
            # the grid was made for the worst case
            exit_if(cute.arch.block_idx()[0] // self.cluster_size >= schedule.num_tiles)
        if warp_id == 0:
            for atom, _ in (loads.k, loads.v, loads.q, loads.do):
                cpasync.prefetch_descriptor(atom)

        consumer_warps = WARPS * self.num_warpgroups
        smem = SmemAllocator()  # BackwardConfigSm90.smem_bytes counts the same
        sK, sV, sQ, sdO, sdS = (
            smem.allocate_tensor(self.dtype, layout.outer, 1024, layout.inner)
            for layout in (layouts.k, layouts.v, layouts.q, layouts.do, layouts.ds)
        )
        sPeerK = sInbox = sP = sFlags = ds_empty = None
        if cutlass.const_expr(self.is_paired):
            sPeerK, sInbox = (
                smem.allocate_tensor(self.dtype, layout.outer, 1024, layout.inner)
                for layout in (layouts.peer_k, layouts.ds)
            )
        elif cutlass.const_expr(self.config.by_gradient):
            # the P that each thread of warpgroup 0 hands to one of warpgroup 1
            p_vectors = self.p_copies * self.tile_m * ROWS_PER_WARPGROUP // (2 * WARPGROUP * P_WORDS)
            p_layout = cute.make_ordered_layout((P_WORDS, WARPGROUP, p_vectors), order=(0, 1, 2))
            sP = smem.allocate_tensor(Int32, p_layout, 128)
        if cutlass.const_expr(self.flag_vectors > 0):
            flags_layout = cute.make_ordered_layout((4, self.flag_vectors, consumer_warps), order=(0, 1, 2))
            sFlags = smem.allocate_tensor(Int32, flags_layout, 128)
        stats_layout = cute.make_layout((STAT_ROWS * self.tile_m, self.config.q_stages))
        sStats = smem.allocate_tensor(Float32, stats_layout, 128)
        k_columns = self.head_dim + (PEER_PIECES * self.dq_columns if self.is_paired else 0)
        k_bytes, v_bytes = (self._bytes(ROWS_PER_WARPGROUP * self.row_blocks, d) for d in (k_columns, self.head_dim_v))
        stats_bytes = 4 * STAT_ROWS * self.tile_m
        pipes = BackwardPipes(
            self._make_pipeline(smem, 1, consumer_warps, k_bytes),
            self._make_pipeline(smem, 1, consumer_warps, v_bytes),
            *(
                self._make_pipeline(smem, stages, consumer_warps // self.query_shares, num_bytes, self.cluster_size)
                for stages, num_bytes in (
                    (self.config.q_stages, self._bytes(self.tile_m, self.head_dim) + stats_bytes),
                    (self.config.do_stages, self._bytes(self.tile_m, self.head_dim_v)),
                )
            ),
        )
        in_a_row = schedule.tiles_of_head if cutlass.const_expr(self.has_private_dq) else None
        readers = consumer_warps + self.adds_in_turns
        queue = TileQueue(smem, schedule.num_tiles, counter, readers, self.cluster_size, in_a_row, self.ring_lag > 0)
        num_ds = self.ds_buffers * self.query_shares
        ds_full, p_full = (smem.allocate_array(cutlass.Int64, num_ds) for _ in range(2))
        if cutlass.const_expr(self.is_paired):
            ds_empty = smem.allocate_array(cutlass.Int64, 1)
        turns = None
        if cutlass.const_expr(self.adds_in_turns):
            slots = SLOTS * self.num_warpgroups
            turns = TurnBarriers(*(smem.allocate_array(cutlass.Int64, slots) for _ in range(2)))
        tile_end = None
        if cutlass.const_expr(self.has_background_rows):
            tile_end = smem.allocate_array(cutlass.Int64, 2)
            rows_full = smem.allocate_array(cutlass.Int64, WARPS + consumer_warps)  # of each warp's scratch
            sRows = smem.allocate_tensor(cutlass.Int8, cute.make_layout((2 * self.config.rows_bytes,)), 128)
        if cute.arch.thread_idx()[0] == 0:
            if cutlass.const_expr(self.has_background_rows):
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(tile_end + i, consumer_warps)
                for i in cutlass.range_constexpr(WARPS + consumer_warps):
                    cute.arch.mbarrier_init(rows_full + i, 1)
            if cutlass.const_expr(self.adds_in_turns):
                for i in cutlass.range_constexpr(SLOTS * self.num_warpgroups):
                    cute.arch.mbarrier_init(turns.granted + i, 1)
                    cute.arch.mbarrier_init(turns.added + i, WARPS)
            for i in cutlass.range_constexpr(num_ds):
                cute.arch.mbarrier_init(ds_full + i, 1 if self.is_paired else WARPS * self.row_blocks)
                cute.arch.mbarrier_init(p_full + i, WARPS)
            if cutlass.const_expr(self.is_paired):
                cute.arch.mbarrier_init(ds_empty, self.config.tile_warps)
        cute.arch.mbarrier_init_fence()
        self.sync_cluster()

        seqlens = scores.sequences(mQ.shape[0], mK.shape[0], lengths, self.is_deterministic, self.block_size)
        self.lists = seqlens.modifiers.tensors if self.has_lists else None
        # made by each role, which then keeps nothing in registers for another one
        make_background = functools.partial(
            BackgroundRows,
            *(self, tensors.rows, tensors.sources, accumulator, tensors.progress, scores, seqlens, schedule),
        )
        if warp_id < WARPS:  # the producer's warpgroup; those of consumers are numbered from 0
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_id == PRODUCER_WARP:
                producer = BackwardProducer(
                    self,
                    (*loads.k, sK),
                    (*loads.v, sV),
                    (*loads.q, sQ),
                    (*loads.do, sdO),
                    (*loads.peer_k, sPeerK) if self.is_paired else None,
                    sStats,
                    accumulator,
                    pipes,
                    make_background() if self.has_background_rows else None,
                )
                producer.run(queue, schedule, seqlens)
            if cutlass.const_expr(counter is not None):
                if warp_id == SCHEDULER_WARP:
                    if cutlass.const_expr(self.finishes_rows):
                        counting = make_background()
                        if cute.arch.lane_idx() == 0:
                            self.schedule_and_count_tiles(queue, schedule, seqlens, tile_end, counting)
                        counting.leave(self.row_warps)
                    else:
                        if cute.arch.lane_idx() == 0 and self.is_first_of_cluster():
                            queue.fill()
            if cutlass.const_expr(self.has_background_rows):
                if (warp_id >= FIRST_BACKGROUND_WARP) & (warp_id < FIRST_BACKGROUND_WARP + self.background_warps):
                    background = make_background()
                    place = (warp_id - FIRST_BACKGROUND_WARP) * self.config.rows_bytes
                    scratch = Scratch(sRows.iterator.toint() + place, rows_full + warp_id)
                    background.prepare(background.num_blocks, scratch)
                    if cutlass.const_expr(self.finishes_rows):
                        if background.all_have_started():
                            background.finish(scratch)
                    background.leave(self.row_warps)
            if cutlass.const_expr(self.adds_in_turns):
                if warp_id == KEEPER_WARP:
                    background = make_background() if self.has_background_rows else None
                    TurnKeeper(self, accumulator, turns, background).run(queue, schedule, seqlens)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            outputs = tensors.dk, tensors.dv, tensors.dq, tensors.sources, seqlens.modifiers
            inputs = Inputs(pipes, tiled_mmas, scores.softmax_scale, scores.factors, accumulator, *outputs, turns)
            buffers = Buffers(sK, sV, sQ, sdO, sdS, sStats, ds_full, sFlags, sP, p_full, sPeerK, sInbox, ds_empty)
            if cutlass.const_expr(self.is_paired):
                consumer = PairedConsumer(self, buffers, inputs)
            elif cutlass.const_expr(self.config.by_gradient):
                consumer = WideConsumer(self, buffers, inputs)
            elif cutlass.const_expr(self.config.by_queries):
                consumer = SharedKeysConsumer(self, buffers, inputs)
            else:
                consumer = BackwardConsumer(self, buffers, inputs)
            if cutlass.const_expr(self.has_background_rows):
                background = make_background()
                # all rows up to those of this thread block's first tile, whose origin_q is its batch entry
                first = self.tile_at(queue.start(), schedule, seqlens)
                heads = first.origin_q * mK.shape[2] + first.head_kv + 1
                background.prepare(heads * background.blocks_of_group, None)
            consumer.run(queue, schedule, seqlens, tile_end)
            if cutlass.const_expr(self.finishes_rows):
                cute.arch.barrier(barrier_id=NamedBarrier.CONSUMERS, number_of_threads=32 * consumer_warps)
                if background.all_have_started():
                    # nobody needs the buffers any more
                    place = (warp_id - WARPS) * self.config.rows_bytes
                    background.finish(Scratch(sK.iterator.toint() + place, rows_full + warp_id))
                    if cutlass.const_expr(self.hides_pairs):
                        background.repair()
            if cutlass.const_expr(self.has_background_rows):
                background.leave(self.row_warps)
        if cutlass.const_expr(self.is_paired):
            # shared memory must outlive what the peer sends to it
            cute.arch.sync_warp()
            self.sync_cluster()

    @cute.jit
    def sync_cluster(self):
        """Wait for all threads of the cluster."""
        if cutlass.const_expr(self.is_paired):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def is_first_of_cluster(self) -> Boolean | bool:
        return True if self.cluster_size == 1 else cute.arch.block_idx_in_cluster() == 0

    @property
    def row_warps(self) -> int:
        """Warps of a thread block that use the counters of rows.Progress."""
        return WARPS * self.num_warpgroups + self.background_warps + self.finishes_rows

    @property
    def background_warps(self) -> int:
        return WARPS - FIRST_BACKGROUND_WARP - self.adds_in_turns

    def share_of(self, accumulator: Accumulator, tile, head: Int32, m_block: Int32, wg: Int32, rank: Int32) -> Int32:
        """The number of a warpgroup's first share of a block of dQ, and of the counter of turns of all its shares."""
        number = self.m_block_number(accumulator, tile, head, self.query_block(tile, m_block))
        if cutlass.const_expr(self.is_paired):
            return (number * self.num_pieces + piece_of(self, wg, rank)) * WARPS
        return (number * self.num_warpgroups + wg) * WARPS

    def adds_share(self, wg: Int32, rank: Int32, m_block: Int32) -> Boolean | bool:
        """Whether a warpgroup adds what it computes of a block of dQ, and counts turns there."""
        return adds_piece(self, wg, rank, m_block) if self.is_paired else True

    @cute.jit
    def schedule_and_count_tiles(self, queue, schedule, seqlens, tile_end: cute.Pointer, background):
        """Draw the numbers of tiles, and count each tile when its consumers have added to dQ. For one thread."""
        increment(background.progress.started())
        number, wave = queue.start(), Int32(1)
        while number < queue.num_tiles:
            following = queue.fill_wave(wave)
            tile = self.tile_at(number, schedule, seqlens)
            cute.arch.mbarrier_wait(tile_end + (wave - 1 & 1), wave - 1 >> 1 & 1)
            background.end_tile(tile.origin_q, tile.head_kv)
            number = following
            wave += 1

    def _bytes(self, rows: int, columns: int) -> int:
        return rows * columns * self.dtype.width // 8

    def _make_pipeline(self, smem, num_stages: int, consumer_warps: int, num_bytes: int, cluster_size: int = 1):
        """A circular buffer that TMA fills and so many warps (of each thread block) empty, each with one arrival."""
        thread = pipeline.Agent.Thread
        return pipeline.PipelineTmaAsync.create(
            num_stages=num_stages,
            producer_group=pipeline.CooperativeGroup(thread),
            consumer_group=pipeline.CooperativeGroup(thread, consumer_warps * cluster_size),
            tx_count=num_bytes,
            cta_layout_vmnk=cute.make_layout((1, cluster_size, 1, 1)),
            barrier_storage=smem.allocate_array(cutlass.Int64, 2 * num_stages),
            defer_sync=True,
        )

    def buffer_states(self, user: pipeline.PipelineUserType) -> tuple:
        """The states of the buffers of K and V, of Q, and of dO that are filled (or read) first."""
        stages = 1, self.config.q_stages, self.config.do_stages
        return tuple(pipeline.make_pipeline_state(user, count) for count in stages)

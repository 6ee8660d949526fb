"""The Ampere backward kernel: one thread block a tile of keys, all warps load and compute.

The steps go through the query blocks that see the keys, of each query head of the group in turn, so that dK and dV
stay in registers through all of them. Everything is computed transposed, with keys in rows, like on Hopper:

    S^T = K Q^T    P = exp(S - lse)    dP^T = V dO^T    dS = P (dP - delta)    dV += P^T dO    dK += dS^T Q    dQ = dS K

    loads          K V Q0 dO0 | Q1 dO1                              | Q2 dO2       cp.async, through num_stages buffers
    each warp                 | S0 P0 dP0 dS0 dV0 || dQ0 dK0        | S1 ..        | and || are barriers

A step has two barriers. After the first one, Q, dO, lse and delta of the step have arrived for all warps, and the
buffers of the step before are free. Between the two, dS (and P, see below) of all warps come together in shared memory.
With one_score_buffer there are two more: P is read before dS is written in its place.

How the warps divide a GEMM among themselves is up to the configuration. With all of them along the keys
(p_in_registers), a warp's P and dS are operands of its dV and dK as they lie in registers; only dQ, which sums over all
keys, needs shared memory. With fewer warps along the keys, dK and dV of large head dims are spread over the registers
of all warps, and P goes through shared memory as well; in float32 it always does. What depends on the type of the
elements is in gemms_16bit.py and gemms_float32.py.

dQ is added to a float32 accumulator in global memory, from which memory_bound/backward_rows.py makes dq. These
additions come in any order. If the problem is deterministic, tiles of keys add to a block of dQ in ascending order, see
blocks/tiles/dq_sums.py. Then thread blocks draw the numbers of their tiles, so that a wait for a lower number is a wait
for a thread block that runs.

Shared memory: K (tile_n, head_dim), V (tile_n, head_dim_v), num_stages of Q (tile_m, head_dim) and of dO (tile_m,
head_dim_v), dS and perhaps P (tile_n, tile_m), num_stages of lse and delta. Columns up to the compiled head dim are
zeros, and so are rows past the end of a sequence: P = 0 there, and 0 * NaN = NaN.

State: an H200 has run fp16 and bf16; no GPU has run float32, or copies of less than 16 bytes, yet. The tests compile
the kernel for six architectures, read the machine code, and run the PTX on the CPU.

    done      fp16, bf16 and float32, all that the forward supports, the gradient of lse, deterministic, NaN in hidden
              pairs, head dims from 1 to 256, tensors of any alignment
    not yet   stmatrix where a GPU has it, turns whose wait hides behind a GEMM, dQ a step late (one barrier)

Source: FlashAttention-2, arXiv:2307.08691, Algorithm 2.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from .....problem import AttentionProblem
from ....arguments import BackwardSm80Arguments
from ....config import STAT_ROWS, BackwardConfigSm80
from ...blocks.memory.layouts import as_batch_of_one, rows_first, smem_tiles
from ...blocks.memory.ptx import draw, exit_if
from ...blocks.repair.rows import SourceTensors
from ...blocks.tiles.dq_sums import Accumulator
from ...blocks.tiles.key_tiles import KeyTile, KeyTiles
from ...blocks.tiles.packed import Lengths
from ...blocks.tiles.schedule import Schedule, ScoreArguments, make_schedule
from ...entry import takes
from ..loads import RowLoader
from . import gemms_16bit as backward_gemms_16bit
from . import gemms_float32 as backward_gemms_float32
from .warps import BackwardWarps, Buffers, Mmas

STATS_VECTOR = 4  # float32 of a 16-byte copy


class BackwardSm80(KeyTiles):
    """One compiled backward: (static problem, config) -> device code. See the module's docstring for the picture."""

    def __init__(self, problem: AttentionProblem, config: BackwardConfigSm80, dtype: type[cutlass.Numeric], arch: str):
        config.check(problem, arch)
        self.config, self.dtype = config, dtype
        self.group = problem.qhead_per_kvhead
        self.tile_m, self.tile_n, self.vector_bytes = config.tile_m, config.tile_n, config.vector_bytes
        self.head_dims = problem.head_dim, problem.head_dim_v  # columns of the tensors
        self.head_dim, self.head_dim_v = config.head_dims(problem)  # columns of the tiles
        self.p_in_registers = config.keeps_p(problem)
        # Tiles may hold hidden pairs, whose terms of the gradients may be NaN; and the low limb of a float32 infinity
        # is NaN.
        self.may_recompute = problem.hides_pairs or problem.has_seqused_k or dtype is Float32
        self.has_lists = problem.has_backward_lists
        if dtype is Float32:
            module, self.gemms = backward_gemms_float32, backward_gemms_float32.BackwardGemmsFloat32
        else:
            module, self.gemms = backward_gemms_16bit, backward_gemms_16bit.BackwardGemms16Bit
        self.make_tiled_mmas = module.make_tiled_mmas
        self.is_packed = problem.is_packed
        self.adds_in_turns = problem.deterministic
        self.is_descending = config.adds_descending(problem)

    # ---------------------------------------------------------------- host

    @takes(BackwardSm80Arguments)
    def __call__(self, a: BackwardSm80Arguments, stream: cuda.CUstream):
        q, k, v, dout, dk, dv = a[:6]
        if cutlass.const_expr(self.is_packed):
            q, k, v, dout, dk, dv = (as_batch_of_one(t) for t in a[:6])
        config = self.config
        mQ, mK, mV, mdO = (rows_first(t) for t in (q, k, v, dout))
        seqlen_k, _, num_heads_kv, batch = mK.shape
        num_n_blocks = None if self.is_packed else cute.ceil_div(seqlen_k, self.tile_n)
        self.kernel(
            SourceTensors(mQ, mK, mV, mdO),
            rows_first(dk),
            rows_first(dv),
            Accumulator(a.dq_accum, a.stats, a.turns, a.blocks_per_head, mQ.shape[2]),
            Lengths(a.cu_seqlens_q, a.cu_seqlens_k, a.seqused_k),
            ScoreArguments.of(a, a.softmax_scale),
            make_schedule(num_n_blocks, num_heads_kv, batch, a.heads_per_section),
            self.make_tiled_mmas(config, self.dtype),
            (
                smem_tiles(self.tile_n, self.head_dim, 1, self.dtype),
                smem_tiles(self.tile_n, self.head_dim_v, 1, self.dtype),
                smem_tiles(self.tile_m, self.head_dim, config.num_stages, self.dtype),
                smem_tiles(self.tile_m, self.head_dim_v, config.num_stages, self.dtype),
                smem_tiles(self.tile_n, self.tile_m, 1, self.dtype),
            ),
        ).launch(grid=[a.num_tiles, 1, 1], block=[config.num_threads, 1, 1], stream=stream)

    # ---------------------------------------------------------------- device: set-up

    @cute.kernel
    def kernel(
        self,
        tensors: SourceTensors,  # (seqlen, head_dim, num_heads, batch) each
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        accumulator: Accumulator,
        lengths: Lengths,
        scores: ScoreArguments,
        schedule: Schedule,
        tiled_mmas: Mmas,
        layouts: tuple,  # of K, V, Q, dO and dS in shared memory
    ):
        smem = SmemAllocator()  # BackwardConfigSm80.smem_bytes counts the same
        sK, sV, sQ, sdO, sdS = (
            smem.allocate_tensor(self.dtype, layout.outer, 1024, layout.inner) for layout in layouts
        )
        sP = None
        if cutlass.const_expr(self.config.one_score_buffer):
            sP = sdS
        elif cutlass.const_expr(not self.p_in_registers):
            sP = smem.allocate_tensor(self.dtype, layouts[-1].outer, 1024, layouts[-1].inner)
        stats_layout = cute.make_layout((STAT_ROWS * self.tile_m, self.config.num_stages))
        sStats = smem.allocate_tensor(Float32, stats_layout, 128)

        thread = cute.arch.thread_idx()[0]
        number = cute.arch.block_idx()[0]
        if cutlass.const_expr(self.adds_in_turns):
            number = self.draw_number(smem, accumulator, thread)
        seqlens = scores.sequences(tensors.q.shape[0], tensors.k.shape[0], lengths, self.adds_in_turns)
        self.lists = seqlens.modifiers.tensors if self.has_lists else None
        if cutlass.const_expr(self.is_packed):
            schedule = self.schedule_of_keys(schedule, lengths, seqlens.seqlen_k, seqlens.seqlen_q)
            # the grid was made for the worst case
            exit_if(number >= schedule.num_tiles)
        tile = self.tile_at(number, schedule, seqlens)

        head_dim, head_dim_v = self.head_dims
        loaders = tuple(
            RowLoader(buffers, columns, self.config.vector_bytes, self.config.num_threads, thread)
            for buffers, columns in ((sK, head_dim), (sV, head_dim_v), (sQ, head_dim), (sdO, head_dim_v))
        )
        buffers = Buffers(sK, sV, sQ, sdO, sdS, sP, sStats)
        sources = tensors if cutlass.const_expr(self.may_recompute) else None
        outputs = mdK, mdV, sources, seqlens.modifiers
        warps = BackwardWarps(self, buffers, tiled_mmas, scores.softmax_scale, scores.factors, accumulator, *outputs)
        self.compute(warps, loaders, tensors, tile)

    @cute.jit
    def draw_number(self, smem: SmemAllocator, accumulator: Accumulator, thread: Int32) -> Int32:
        """The number of this thread block's tile: how many thread blocks have drawn before it."""
        slot = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
        if thread == 0:
            slot[0] = draw(accumulator.turns.iterator + cute.size(accumulator.turns) - 1)
        cute.arch.sync_threads()
        return cute.arch.make_warp_uniform(slot[0])

    # ---------------------------------------------------------------- device: a tile

    @cute.jit
    def compute(self, warps: BackwardWarps, loaders: tuple, tensors: SourceTensors, tile: KeyTile):
        """A whole tile: all query blocks that see its keys."""
        load_k, load_v, _, _ = loaders
        num_steps = (tile.last - tile.first) * self.group
        warps.begin()
        if num_steps > 0:
            mK, mV = (self.at_head(t, t, tile.head_kv, tile.origin_k) for t in (tensors.k, tensors.v))
            for loader, m in ((load_k, mK), (load_v, mV)):
                loader.load(m, tile.n_block * self.tile_n, tile.geometry.seqlen_k, 0)
            head, m_block = self.first_visit(tile)
            if cutlass.const_expr(self.config.num_stages > 1):
                self.load_step(warps, loaders, tensors, tile, head, m_block, 0)
            buffer = Int32(0)
            for i in cutlass.range(num_steps, unroll=1):
                next_head, next_m_block = self.next_visit(tile, head, m_block)
                if cutlass.const_expr(self.config.num_stages > 1):
                    self._wait_for_loads()
                    # into the buffers that the step before has read
                    if i < num_steps - 1:
                        self.load_step(warps, loaders, tensors, tile, next_head, next_m_block, 1 - buffer)
                else:
                    cute.arch.sync_threads()  # all warps are done with the buffers
                    self.load_step(warps, loaders, tensors, tile, head, m_block, 0)
                    self._wait_for_loads()
                warps.step(tile, head, m_block, buffer)
                head, m_block = next_head, next_m_block
                if cutlass.const_expr(self.config.num_stages > 1):
                    buffer = 1 - buffer
            warps.turns.finish()
        warps.store(tile)

    @cute.jit
    def load_step(
        self, warps: BackwardWarps, loaders: tuple, tensors: SourceTensors, tile: KeyTile, head, m_block, buffer
    ):
        """Load Q, dO, lse and delta of a query block as one group."""
        _, _, load_q, load_do = loaders
        block = self.query_block(tile, m_block)
        for loader, t in ((load_q, tensors.q), (load_do, tensors.dout)):
            m = self.at_head(t, t, head, tile.origin_q)
            loader.load(m, block * self.tile_m, tile.geometry.seqlen_q, buffer)
        thread, count = cute.arch.thread_idx()[0], STAT_ROWS * self.tile_m // STATS_VECTOR
        number = self.m_block_number(warps.accumulator, tile, head, block)
        source = cute.flat_divide(warps.accumulator.stats[number, None], (STATS_VECTOR,))
        target = cute.flat_divide(warps.buffers.stats[None, buffer], (STATS_VECTOR,))
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL), Float32, num_bits_per_copy=128
        )
        if thread < count:
            cute.copy(atom, source[None, thread], target[None, thread])
        cute.arch.cp_async_commit_group()

    @cute.jit
    def _wait_for_loads(self):
        """Wait until the loads of all threads are visible in shared memory to all."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

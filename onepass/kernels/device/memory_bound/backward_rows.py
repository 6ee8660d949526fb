"""What a backward does for query rows: lse and delta before the main kernel, dq from its accumulator after it.

A thread block of the preprocess kernel has 128 threads and a block of rows. A thread block of the postprocess kernel
has a row block of up to 64 of these rows, with 128 threads or, for shorter blocks, fewer. Both kernels are bound by
memory.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....geometry.integers import select
from ....geometry.tile_scheduler import LANES, packed_rows
from ....problem import AttentionProblem
from ...arguments import PostprocessArguments, PreprocessArguments
from ...config import ROWS_PER_MMA, ROWS_PER_WARPGROUP, BackwardConfigSm80, BackwardConfigSm90
from ..blocks.memory import epilogue
from ..blocks.memory.layouts import as_batch_of_one, at_head, rows_first, rows_first_of_lse
from ..blocks.memory.ptx import exit_if
from ..blocks.memory.row_stats import row_products, write_stats
from ..blocks.memory.warp import broadcast
from ..blocks.repair import gradients as repair_gradients
from ..blocks.repair.rows import SourceTensors
from ..blocks.softmax.mask import Geometry
from ..blocks.softmax.modifiers import place_of
from ..blocks.tiles.packed import Lengths, used_keys
from ..blocks.tiles.schedule import ScoreArguments
from ..entry import takes

THREADS = 128


@cute.jit
def last_first() -> tuple:
    """The number of this thread block, counted from the end of the grid.

    The main kernel goes from the first head to the last one. It begins with what the kernel before it has read last,
    which is still in L2; and what the main kernel has added last is in L2 when the next kernel begins.
    """
    return tuple(n - 1 - i for i, n in zip(cute.arch.block_idx(), cute.arch.grid_dim(), strict=True))


@cute.jit
def sequence_of_block(block: Int32, cu_seqlens: cute.Tensor, tile_m: cutlass.Constexpr[int]) -> tuple:
    """The sequence whose rows a block of the accumulator holds, and the number of its first block.

    Sequence s begins with block cu_seqlens[s] // tile_m + s: there is room for its rows before the next one.
    """
    low, high = Int32(0), cute.size(cu_seqlens) - 2
    while low < high:
        middle = (low + high + 1) // 2
        is_before = cu_seqlens[middle] // tile_m + middle <= block
        low = select(is_before, middle, low)
        high = select(is_before, high, middle - 1)
    return low, cu_seqlens[low] // tile_m + low


class BlockRows(NamedTuple):
    """The rows that a block of the accumulator holds."""

    start: Int32  # the first one in the tensors
    num_rows: Int32  # from it to the end of its sequence
    position: Int32  # the first one in its sequence
    sequence: Int32  # 0 unless packed


class RowsKernel:
    """What both kernels have in common: which rows a thread block has."""

    def __init__(self, problem: AttentionProblem, config: BackwardConfigSm90 | BackwardConfigSm80):
        self.tile_m = config.tile_m
        self.row_block_size = min(config.tile_m, ROWS_PER_WARPGROUP)  # rows of a thread block of the postprocess kernel
        self.row_block_warps = self.row_block_size // ROWS_PER_MMA
        self.vector_adds = config.vector_adds
        self.head_dim, self.head_dim_v = config.head_dims(problem)
        self.dq_columns = config.dq_columns(problem)
        self.is_packed = problem.is_packed
        self.vector_bytes = config.vector_bytes
        self.vector = config.vector_bytes // problem.dtype.itemsize  # elements of a load

    @cute.jit
    def rows_of_block(self, block: Int32, seqlen_q: Int32, cu_seqlens_q: cute.Tensor | None) -> BlockRows:
        """The rows of a block of a head."""
        start = position = block * self.tile_m
        num_rows, sequence = seqlen_q - start, Int32(0)
        if cutlass.const_expr(self.is_packed):
            sequence, first_block = sequence_of_block(block, cu_seqlens_q, self.tile_m)
            position = (block - first_block) * self.tile_m
            start = cu_seqlens_q[sequence] + position
            num_rows = cu_seqlens_q[sequence + 1] - start
        return BlockRows(start, num_rows, position, sequence)


class Preprocess(RowsKernel):
    """stats = (-lse * log2(e), -delta = dlse - rowsum(dout * out)) of every row, and zeros where sums begin."""

    @takes(PreprocessArguments)
    def __call__(self, a: PreprocessArguments, stream: cuda.CUstream):
        out, dout, lse, dlse = a[:4]
        if cutlass.const_expr(self.is_packed):
            out, dout, lse = (as_batch_of_one(t) for t in (out, dout, lse))
            dlse = None if cutlass.const_expr(dlse is None) else as_batch_of_one(dlse)
        batch, _, num_heads, _ = out.shape
        self.kernel(
            rows_first(out),
            rows_first(dout),
            rows_first_of_lse(lse),
            None if cutlass.const_expr(dlse is None) else rows_first_of_lse(dlse),
            a.stats,
            a.dq_accum,
            a.cu_seqlens_q,
        ).launch(grid=[a.blocks_per_head, num_heads, batch], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        mO: cute.Tensor,  # (seqlen_q, head_dim_v, num_heads_q, batch)
        mdO: cute.Tensor,
        mLSE: cute.Tensor,  # (seqlen_q, 1, num_heads_q, batch)
        mdLSE: cute.Tensor | None,
        stats: cute.Tensor,
        dq_accum: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
    ):
        thread, (block, head, entry) = cute.arch.thread_idx()[0], last_first()
        blocks_per_head, num_heads, _ = cute.arch.grid_dim()
        start, num_rows, _, _ = self.rows_of_block(block, mO.shape[0], cu_seqlens_q)
        exit_if(num_rows <= 0)
        number = (entry * num_heads + head) * blocks_per_head + block

        if cutlass.const_expr(dq_accum is not None):
            zeros = cute.make_rmem_tensor((4,), Float32)
            zeros.fill(0.0)
            targets = cute.flat_divide(dq_accum[number, None], (4,))
            for i in cutlass.range_constexpr(self.tile_m * self.head_dim // 4 // THREADS):
                cute.autovec_copy(zeros, targets[None, i * THREADS + thread])

        count = self.tile_m // (THREADS // LANES)  # rows of a warp
        first = thread // LANES * count
        start += first
        out, dout = (cute.domain_offset((start, 0), t[None, None, head, entry]) for t in (mO, mdO))
        lse = cute.domain_offset((start,), mLSE[None, 0, head, entry])
        dlse = None
        if cutlass.const_expr(mdLSE is not None):
            dlse = cute.domain_offset((start,), mdLSE[None, 0, head, entry])
        product = row_products(out, dout, count, num_rows - first, self.vector, 4)
        write_stats(stats[number, None], first, count, num_rows - first, product, lse, dlse)


class Recomputation(NamedTuple):
    """The inputs from which rows of dq are computed again where hidden pairs of a tile have made them NaN."""

    sources: SourceTensors
    stats: cute.Tensor  # see dq_sums.Accumulator
    scores: ScoreArguments


class Postprocess(RowsKernel):
    """dq = softmax_scale * dq_accum, in the dtype of dq."""

    def __init__(self, problem: AttentionProblem, config: BackwardConfigSm90 | BackwardConfigSm80):
        super().__init__(problem, config)
        self.group, self.block_size = problem.qhead_per_kvhead, problem.block_size

    @takes(PostprocessArguments)
    def __call__(self, a: PostprocessArguments, stream: cuda.CUstream):
        dq, again = a.dq, None
        if cutlass.const_expr(self.is_packed):
            dq = as_batch_of_one(dq)
        if cutlass.const_expr(a.q is not None):
            sources = (a.q, a.k, a.v, a.dout)
            if cutlass.const_expr(self.is_packed):
                sources = tuple(as_batch_of_one(t) for t in sources)
            again = Recomputation(SourceTensors(*(rows_first(t) for t in sources)), a.stats, ScoreArguments.of(a))
        batch, _, num_heads, _ = dq.shape
        num_row_blocks = self.tile_m // self.row_block_size
        lengths = Lengths(a.cu_seqlens_q, a.cu_seqlens_k, a.seqused_k)
        self.kernel(a.dq_accum, rows_first(dq), lengths, a.softmax_scale, again).launch(
            grid=[a.blocks_per_head * num_row_blocks, num_heads, batch],
            block=[self.row_block_warps * LANES, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        dq_accum: cute.Tensor,
        mdQ: cute.Tensor,
        lengths: Lengths,
        softmax_scale: Float32,
        again: Recomputation | None,
    ):
        thread, (index, head, entry) = cute.arch.thread_idx()[0], last_first()
        num_row_blocks = self.tile_m // self.row_block_size
        block, row_block = index // num_row_blocks, index % num_row_blocks
        blocks_per_head, num_heads = cute.arch.grid_dim()[0] // num_row_blocks, cute.arch.grid_dim()[1]
        block_rows = self.rows_of_block(block, mdQ.shape[0], lengths.cu_seqlens_q)
        start, num_rows = block_rows.start, block_rows.num_rows
        exit_if(num_rows <= row_block * self.row_block_size)
        number = (entry * num_heads + head) * blocks_per_head + block

        # a warp's values of an accumulator of 16 rows, in the order in which the main kernel added them
        num_blocks = self.head_dim // 8
        values = cute.make_rmem_tensor((4 * num_blocks,), Float32)
        # [piece of up to 64 rows][warp][vector][lane], in the order of a piece's accumulator; see `vector_adds`
        vectors_of_warp = self.dq_columns // 8
        pieces = num_blocks // vectors_of_warp
        vectors = cute.flat_divide(dq_accum[number, None], (4,))
        for j in cutlass.range_constexpr(num_blocks):
            target = cute.make_tensor(values.iterator + 4 * j, cute.make_layout((4,)))
            warp_id = (row_block * pieces + j // vectors_of_warp) * self.row_block_warps + thread // LANES
            vector = (warp_id * vectors_of_warp + j % vectors_of_warp) * LANES
            if cutlass.const_expr(self.vector_adds):
                cute.autovec_copy(vectors[None, vector + thread % LANES], target)
            else:
                for c in cutlass.range_constexpr(4):
                    target[c] = dq_accum[number, 4 * vector + c * LANES + thread % LANES]
        acc = cute.make_tensor(values.iterator, cute.make_layout((2, (2, num_blocks)), stride=(2, (1, 4))))
        weights = cute.make_rmem_tensor((2,), Float32)
        weights.fill(softmax_scale)
        rows = [row_block * self.row_block_size + thread // 32 * 16 + thread % 32 // 4 + 8 * r for r in range(2)]
        is_row = [row < num_rows for row in rows]
        out_rows = [mdQ[start + row, None, head, entry] for row in rows]
        if cutlass.const_expr(mdQ.element_type is Float32):
            epilogue.store_runs(acc, weights, out_rows, is_row, thread % 4, 8, self.vector)
        else:
            epilogue.store_16_bits(acc, weights, out_rows, is_row, thread % 4, self.vector_bytes)
        if cutlass.const_expr(again is not None):
            ballots = repair_gradients.nan_rows(acc, is_row)
            if ballots[0] | ballots[1] != 0:
                cute.arch.sync_warp()  # other lanes write the same rows again
                first_row = broadcast(rows[0], 0)
                self.recompute(mdQ, lengths, softmax_scale, again, block_rows, number, first_row, ballots)

    @cute.jit
    def recompute(
        self,
        mdQ: cute.Tensor,
        lengths: Lengths,
        softmax_scale: Float32,
        again: Recomputation,
        block_rows: BlockRows,
        number: Int32,
        first_row: Int32,
        ballots: tuple,
    ):
        """Compute this warp's rows that have a NaN from the keys alone that they see.

        0 * NaN may have brought the NaN.

        Args:
            number: the number of the block.
            first_row: the first of the warp's 16 rows in the block.
        """
        _, head, entry = last_first()
        sources, packed = again.sources, self.is_packed
        origin_q, origin_k, rows_k, sequence = entry, entry, sources.k.shape[0], entry
        seqlen_q = block_rows.position + block_rows.num_rows
        if cutlass.const_expr(packed):
            sequence = block_rows.sequence
            origin_q = block_rows.start - block_rows.position
            batch = cute.size(lengths.cu_seqlens_k) - 1
            origin_k, rows_k = packed_rows(sequence, lengths.cu_seqlens_k, batch, rows_k)
        seqlen_k = used_keys(lengths, sequence, rows_k)
        geometry = Geometry(seqlen_q, seqlen_k, again.scores.window_left, again.scores.window_right)
        mQ, mdO, dq = (at_head(t, t, head, origin_q, packed) for t in (sources.q, sources.dout, mdQ))
        mK, mV = (at_head(t, t, head // self.group, origin_k, packed) for t in (sources.k, sources.v))
        first_block = number - block_rows.position // self.tile_m
        rows = SourceTensors(mQ, mK, mV, mdO), cute.domain_offset((first_block, 0), again.stats)
        modifiers, place = again.scores.modifiers(False, self.block_size), None
        if cutlass.const_expr(modifiers is not None):
            place = place_of(head, origin_q, origin_k, sequence, geometry, packed)
        for i in cutlass.range(16, unroll=1):
            if repair_gradients.has_nan(ballots, i):
                query = block_rows.position + first_row + i
                factors = (again.scores.factors, softmax_scale)
                more = (self.vector_bytes, modifiers, place)
                repair_gradients.recompute_dq(dq, query, *rows, geometry, *factors, *more)

"""With private_dq a thread block takes all tiles of keys of a kv head: its sums of dQ are its own.

A thread is the only one that ever touches its values. The first tile that visits a block of queries stores its sums,
and the last one adds what is stored to its registers and writes dq.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .....geometry.integers import minimum
from .....geometry.tile_scheduler import LANES
from ....config import ROWS_PER_WARPGROUP
from ...blocks.memory import epilogue
from ...blocks.memory.layouts import rows_and_columns
from ...blocks.memory.ptx import load_past_l1
from ...blocks.repair import gradients as repair_gradients
from ...blocks.repair.rows import SourceTensors
from .dq_atomic import AtomicSums
from .inputs import Inputs, Thread


class PrivateSums(AtomicSums):
    """The sums of dQ of one thread block, for one warp."""

    def __init__(self, kernel, thread: Thread, inputs: Inputs):
        super().__init__(kernel, thread, inputs)
        self.mdQ, self.sources = inputs.mdQ, inputs.sources
        self.softmax_scale, self.factors = inputs.softmax_scale, inputs.factors
        # the first of this thread's two rows of a block of dQ
        self.row = thread.wg * ROWS_PER_WARPGROUP + thread.row if kernel.is_dq_by_rows else thread.row
        # whether a dq that this tile has written has a NaN
        self.nan_in_dq = cute.make_rmem_tensor((1,), Int32)
        self.nan_in_dq[0] = Int32(0)

    @cute.jit
    def share(self, tile, head: Int32, m_block: Int32) -> Int32:
        in_group = head - tile.head_kv * self.kernel.group
        first = (cute.arch.block_idx()[0] * self.kernel.group + in_group) * self.accumulator.blocks_per_head
        return (first + m_block) * self.kernel.config.consumer_warps + self.thread.warp

    @cute.jit
    def add(self, acc_dq: cute.Tensor, tile, head: Int32, m_block: Int32, share: Int32 | None = None):
        """Add this warp's share of a block; the last addition writes dq instead."""
        share = self.share(tile, head, m_block)
        is_first, is_last = self.kernel.is_first_and_last(tile, m_block)
        if is_last:
            if not is_first:
                self.load_and_add(acc_dq, share)
            self.write(acc_dq, tile, head, m_block)
        elif is_first:
            self.store(acc_dq, share)
        else:
            self.add_share(acc_dq, share)

    @cute.jit
    def store(self, acc_dq: cute.Tensor, share: Int32):
        start = self.address(acc_dq, share)
        vector = cute.make_rmem_tensor((4,), Float32)
        for i in cutlass.range_constexpr(0, cute.size(acc_dq), 4):
            for c in cutlass.range_constexpr(4):
                vector[c] = acc_dq[i + c]
            cute.autovec_copy(vector, cute.make_tensor((start + i * LANES).align(16), cute.make_layout((4,))))

    @cute.jit
    def load_and_add(self, acc_dq: cute.Tensor, share: Int32):
        """acc_dq += the stored sums."""
        start = self.address(acc_dq, share)
        count = cute.size(acc_dq) // 2  # values that there are registers for
        for first in cutlass.range_constexpr(0, cute.size(acc_dq), count):
            vectors = [load_past_l1(start + i * LANES) for i in range(first, first + count, 4)]
            for i in cutlass.range_constexpr(count):
                acc_dq[first + i] = acc_dq[first + i] + vectors[i // 4][i % 4]

    @cute.jit
    def write(self, acc_dq: cute.Tensor, tile, head: Int32, m_block: Int32):
        """Write dq of a finished block: this warpgroup's rows, or its columns of all rows."""
        rows = [m_block * self.kernel.tile_m + self.row + 8 * r for r in range(2)]
        is_row = [row < tile.geometry.seqlen_q for row in rows]
        weights = cute.make_rmem_tensor((2,), Float32)
        weights.fill(self.softmax_scale)
        gradient = self.kernel.at_head(self.mdQ, self.mdQ, head, tile.origin_q)
        out_rows = [gradient[row, None] for row in rows]
        first_block = 0 if self.kernel.is_dq_by_rows else self.thread.wg * (self.kernel.dq_columns // 8)
        epilogue.store_rows(rows_and_columns(acc_dq), weights, out_rows, is_row, self.thread.lane_in_quad, first_block)
        if cutlass.const_expr(self.sources is not None):
            ballots = repair_gradients.nan_rows(rows_and_columns(acc_dq), is_row)
            self.nan_in_dq[0] = self.nan_in_dq[0] | ballots[0] | ballots[1]

    @cute.jit
    def repair(self, tile):
        """Compute dq again if hidden pairs may have brought a NaN to a block that this tile has written."""
        if cutlass.const_expr(self.sources is not None):
            if self.nan_in_dq[0] != 0:
                cute.arch.sync_warp()  # other lanes write the same rows again
                self.recompute(tile)
            self.nan_in_dq[0] = Int32(0)

    @cute.jit
    def recompute(self, tile):
        """Compute this warp's rows of dq again, in all query blocks that this tile was the last to add to.

        The sequences of private_dq are so short that it is not worth remembering which rows have a NaN.
        """
        at_head, sources = self.kernel.at_head, self.sources
        mK, mV = (at_head(t, t, tile.head_kv, tile.origin_k) for t in (sources.k, sources.v))
        first_row = cute.arch.make_warp_uniform(self.row - self.thread.lane // 4)
        for h in cutlass.range(self.kernel.group, unroll=1):
            head = tile.head_kv * self.kernel.group + h
            mQ, mdO, dq = (at_head(t, t, head, tile.origin_q) for t in (sources.q, sources.dout, self.mdQ))
            number = self.kernel.m_block_number(self.accumulator, tile, head, Int32(0))
            rows = SourceTensors(mQ, mK, mV, mdO), cute.domain_offset((number, 0), self.accumulator.stats)
            for m_block in cutlass.range(tile.first, tile.last, unroll=1):
                _, is_last = self.kernel.is_first_and_last(tile, m_block)
                start = m_block * self.kernel.tile_m + first_row
                end = minimum(start + 16, tile.geometry.seqlen_q)
                if is_last:
                    for query in cutlass.range(start, end, unroll=1):
                        repair_gradients.recompute_dq(dq, query, *rows, tile.geometry, self.factors, self.softmax_scale)

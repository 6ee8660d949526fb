"""Merges partials, the results of attention over disjoint sets of keys, exactly.

With m = max_s lse_s, total = sum_s exp(lse_s - m):   out = sum_s exp(lse_s - m) out_s / total,   lse = m + log(total)

Partials are added in the order of their numbers: first within groups of AT_A_TIME, whose loads are begun together, then
the sums of the groups. So one warp can merge a few partials of a row, and the warps of a thread block can share many,
with the same bits.

A partial in which the row saw no key (lse_s = -inf) has weight 0, and its out_s is not read. Partials after the last
one that has keys change no bit of the result. Sinks are in none of the partials: they are added here, once.

Source: FlashAttention-2, arXiv:2307.08691, section 2.3.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from ....geometry.integers import ceil_div, minimum
from ....geometry.tile_scheduler import LANES
from ...arguments import MergeArguments
from ..blocks.memory import warp
from ..blocks.softmax.online import LN2
from ..blocks.softmax.sinks import Sinks, weight_of_sink
from ..entry import takes

WARPS = 2  # warps of a thread block, if each has a row
AT_A_TIME = 8  # divides the lanes of a warp
LOG2_E = 1.0 / LN2


class Merge:
    """One compiled merge: (dtypes, head_dim_v, whether there are sinks) -> device code.

    Args:
        vector_bytes: bytes of a load of partial_out, to which its rows are aligned: 16, 8, 4 or 2.
        row_warps: warps of a row.
        is_early: launched while the kernel before it may still run (programmatic dependent launch). Needs Hopper or
            newer.
    """

    def __init__(self, head_dim_v: int, vector_bytes: int, row_warps: int = 1, is_early: bool = False):
        self.head_dim_v, self.vector_bytes = head_dim_v, vector_bytes
        self.row_warps, self.is_early = row_warps, is_early
        self.block_warps = WARPS if row_warps == 1 else row_warps

    @takes(MergeArguments)
    def __call__(self, a: MergeArguments, stream: cuda.CUstream):
        sinks = None if cutlass.const_expr(a.sinks is None) else Sinks(a.sinks, a.cu_seqlens_q)
        self.kernel(a.partial_out, a.partial_lse, a.out, a.lse, sinks).launch(
            grid=[a.num_blocks, 1, 1], block=[self.block_warps * LANES, 1, 1], stream=stream, use_pdl=self.is_early
        )

    @cute.kernel
    def kernel(
        self,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sinks: Sinks | None,
    ):
        batch, seqlen_q, num_heads, _ = out.shape
        warp_number = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // LANES)
        row = cute.arch.block_idx()[0]
        if cutlass.const_expr(self.row_warps == 1):
            row = row * WARPS + warp_number
        if cutlass.const_expr(self.is_early):
            cute.arch.griddepcontrol_wait()  # until the kernel before has ended and its stores are visible
        if row < batch * seqlen_q * num_heads:
            rest, head = row // num_heads, row % num_heads
            entry, position = rest // seqlen_q, rest % seqlen_q
            self.merge_row(
                partial_out[None, entry, position, head, None],
                partial_lse[None, entry, head, position],
                out[entry, position, head, None],
                lse[entry, head, None],
                position,
                None if cutlass.const_expr(sinks is None) else sinks.at_row(head, position),
                warp_number,
            )

    @cute.jit
    def merge_row(
        self,
        partials: cute.Tensor,  # (splits, head_dim_v)
        lses: cute.Tensor,  # (splits,)
        out: cute.Tensor,  # (head_dim_v,)
        lse: cute.Tensor,  # (seqlen_q,)
        position: Int32,
        sink: Float32 | None,
        warp_number: Int32,
    ):
        """Merge the partials of one row of a head, by one warp or by all warps of the thread block."""
        lane, num_splits = cute.arch.lane_idx(), lses.shape[0]
        largest = -Float32.inf
        for split in cutlass.range(lane, num_splits, LANES, unroll=1):
            largest = cute.arch.fmax(largest, lses[split])
        largest = cute.arch.warp_reduction_max(largest)
        # in an empty row -inf - -inf would be NaN
        reference = largest if largest > -Float32.inf else Float32(0.0)
        total = Float32(0.0)
        for split in cutlass.range(lane, num_splits, LANES, unroll=1):
            total += cute.math.exp2((lses[split] - reference) * LOG2_E, fastmath=True)
        total = cute.arch.warp_reduction_sum(total)
        is_empty, lse_of_empty = total == 0.0, -Float32.inf
        scale = Float32(1.0)
        if cutlass.const_expr(sink is not None):
            # the larger of both is the reference, so that neither term overflows
            larger = cute.arch.fmax(reference, sink)
            scale = cute.math.exp2((reference - larger) * LOG2_E, fastmath=True)
            total = total * scale + weight_of_sink(sink, (sink - larger) * LOG2_E)
            reference, lse_of_empty = larger, sink
        safe_total = Float32(1.0) if is_empty else total
        share = scale / safe_total

        # in the unit of the partials alone, without the sink
        key_reference = largest if largest > -Float32.inf else Float32(0.0)
        vector = self.vector_bytes * 8 // partials.element_type.width
        passes = ceil_div(self.head_dim_v, vector * LANES)
        acc, sums = (cute.make_rmem_tensor((vector, passes), Float32) for _ in range(2))
        acc.fill(0.0)
        vectors = cute.flat_divide(partials, (1, vector))[0, None, None, None]  # (vector, splits, vectors of a row)
        if cutlass.const_expr(self.row_warps == 1):
            for first in cutlass.range(0, num_splits, AT_A_TIME, unroll=1):
                self.add_partials(sums, vectors, lses, first, key_reference)
                for i in cutlass.range_constexpr(cute.size(acc)):
                    acc[i] = acc[i] + sums[i]
        else:
            shape = (vector, LANES, passes, self.row_warps, 2)
            shared = SmemAllocator().allocate_tensor(Float32, cute.make_layout(shape), 16)
            buffer = Int32(0)
            for turn in cutlass.range(ceil_div(num_splits, AT_A_TIME * self.row_warps), unroll=1):
                first = (turn * self.row_warps + warp_number) * AT_A_TIME
                self.add_partials(sums, vectors, lses, first, key_reference)
                for k in cutlass.range_constexpr(passes):
                    cute.autovec_copy(sums[None, k], shared[None, lane, k, warp_number, buffer])
                cute.arch.sync_threads()  # once a turn: the other buffer is read before the next one
                if warp_number == 0:
                    for w in cutlass.range_constexpr(self.row_warps):
                        for k in cutlass.range_constexpr(passes):
                            cute.autovec_copy(shared[None, lane, k, w, buffer], sums[None, k])
                        for i in cutlass.range_constexpr(cute.size(acc)):
                            acc[i] = acc[i] + sums[i]
                buffer = 1 - buffer
        if cutlass.const_expr(self.row_warps == 1) or warp_number == 0:
            result = cute.make_rmem_tensor((vector,), out.element_type)
            out_vectors = cute.flat_divide(out, (vector,))
            for k in cutlass.range_constexpr(passes):
                for c in cutlass.range_constexpr(vector):
                    result[c] = (acc[c, k] * share).to(out.element_type)
                if lane + k * LANES < self.head_dim_v // vector:
                    cute.autovec_copy(result, out_vectors[None, lane + k * LANES])
            if lane == 0:
                log_total = cute.math.log2(safe_total, fastmath=True) * LN2
                lse[position] = lse_of_empty if is_empty else reference + log_total

    @cute.jit
    def add_partials(self, acc: cute.Tensor, vectors: cute.Tensor, lses: cute.Tensor, first: Int32, reference: Float32):
        """acc = the weighted sum of the partials first, first + 1, .., AT_A_TIME of them or as many as there are."""
        lane, num_splits = cute.arch.lane_idx(), lses.shape[0]
        vector, passes = (cute.size(acc, mode=[i]) for i in range(2))
        loaded = cute.make_rmem_tensor((vector, passes, AT_A_TIME), vectors.element_type)
        acc.fill(0.0)
        weight, own = Float32(0.0), first + lane % AT_A_TIME
        if own < num_splits:
            weight = cute.math.exp2((lses[own] - reference) * LOG2_E, fastmath=True)
        if cute.arch.vote_any_sync(weight != 0.0):
            for j in cutlass.range_constexpr(AT_A_TIME):
                split = minimum(first + j, num_splits - 1)
                for k in cutlass.range_constexpr(passes):
                    # lanes past the last column load the last one
                    column = minimum(lane + k * LANES, self.head_dim_v // vector - 1)
                    cute.autovec_copy(vectors[None, split, column], loaded[None, k, j])
            for j in cutlass.range_constexpr(AT_A_TIME):
                weight_j = warp.broadcast(weight, j)
                for i in cutlass.range_constexpr(vector * passes):
                    total = acc[i] + weight_j * loaded[i % vector, i // vector, j].to(Float32)
                    acc[i] = total if weight_j != 0.0 else acc[i]

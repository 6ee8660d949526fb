"""Merges what attention over disjoint parts of the keys gave, exactly: a warp a row.

With m = max_s lse_s, total = sum_s exp(lse_s - m):   out = sum_s exp(lse_s - m) out_s / total,   lse = m + log(total)

A part in which the row saw no key (lse_s = -inf) has weight 0 and its out_s is not looked at. Parts behind the last one
that has keys change no bit of the result: parts are added in the order of their numbers, and those of weight 0 are not.

A lane has `vector_bytes` of a part's row at a time, and begins the loads of AT_A_TIME parts before it adds the first.

Source: FlashAttention-2, arXiv:2307.08691, section 2.3.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .blocks import warp
from .blocks.integers import ceil_div, minimum
from .blocks.online_softmax import LN2
from .blocks.tile_scheduler import LANES

WARPS = 2
AT_A_TIME = 8  # divides the lanes of a warp
LOG2_E = 1.0 / LN2


class Merge:
    """One compiled merge: (dtypes, head_dim_v, whether there are sinks) -> device code.

    Args:
        vector_bytes: 16, 8, 4 or 2, of the loads of partial_out: what its rows are aligned to.
        is_early: launched while the kernel before it may still run (programmatic dependent launch). From Hopper on.
    """

    def __init__(self, head_dim_v: int, vector_bytes: int, is_early: bool = False):
        self.head_dim_v, self.vector_bytes, self.is_early = head_dim_v, vector_bytes, is_early

    @cute.jit
    def __call__(
        self,
        partial_out: cute.Tensor,  # (splits, batch, seqlen_q, num_heads, head_dim_v)
        partial_lse: cute.Tensor,  # (splits, batch, num_heads, seqlen_q) float32
        out: cute.Tensor,  # (batch, seqlen_q, num_heads, head_dim_v)
        lse: cute.Tensor,  # (batch, num_heads, seqlen_q) float32
        sinks: cute.Tensor | None,  # (num_heads,) float32: in none of the parts
        num_blocks: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(partial_out, partial_lse, out, lse, sinks).launch(
            grid=[num_blocks, 1, 1], block=[WARPS * LANES, 1, 1], stream=stream, use_pdl=self.is_early
        )

    @cute.kernel
    def kernel(
        self,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sinks: cute.Tensor | None,
    ):
        batch, seqlen_q, num_heads, _ = out.shape
        row = cute.arch.block_idx()[0] * WARPS + cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // LANES)
        if cutlass.const_expr(self.is_early):
            cute.arch.griddepcontrol_wait()  # until the kernel before has ended and its stores are there
        if row < batch * seqlen_q * num_heads:
            rest, head = row // num_heads, row % num_heads
            entry, position = rest // seqlen_q, rest % seqlen_q
            self.merge_row(
                partial_out[None, entry, position, head, None],
                partial_lse[None, entry, head, position],
                out[entry, position, head, None],
                lse[entry, head, None],
                position,
                None if cutlass.const_expr(sinks is None) else sinks[head],
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
    ):
        lane, num_splits = cute.arch.lane_idx(), lses.shape[0]
        largest = -Float32.inf
        for split in cutlass.range(lane, num_splits, LANES, unroll=1):
            largest = cute.arch.fmax(largest, lses[split])
        largest = cute.arch.warp_reduction_max(largest)
        # of a row that saw no key: -inf - -inf would be NaN
        reference = largest if largest > -Float32.inf else Float32(0.0)
        total = Float32(0.0)
        for split in cutlass.range(lane, num_splits, LANES, unroll=1):
            total += cute.math.exp2((lses[split] - reference) * LOG2_E, fastmath=True)
        total = cute.arch.warp_reduction_sum(total)
        is_empty = total == 0.0
        scale = Float32(1.0)
        if cutlass.const_expr(sink is not None):
            # the larger of both is the reference, so that neither term overflows
            larger = cute.arch.fmax(reference, sink)
            scale = cute.math.exp2((reference - larger) * LOG2_E, fastmath=True)
            total = total * scale + cute.math.exp2((sink - larger) * LOG2_E, fastmath=True)
            reference = larger
        safe_total = Float32(1.0) if is_empty else total
        share = scale / safe_total

        key_reference = largest if largest > -Float32.inf else Float32(0.0)
        vector = self.vector_bytes * 8 // partials.element_type.width
        passes = ceil_div(self.head_dim_v, vector * LANES)
        acc = cute.make_rmem_tensor((vector, passes), Float32)
        acc.fill(0.0)
        parts = cute.make_rmem_tensor((vector, passes, AT_A_TIME), partials.element_type)
        # of a lane behind the last column the last one's
        vectors = cute.flat_divide(partials, (1, vector))[0, None, None, None]  # (vector, splits, vectors of a row)
        places = [minimum(lane + i * LANES, self.head_dim_v // vector - 1) for i in range(passes)]
        for first in cutlass.range(0, num_splits, LANES, unroll=1):
            weight = Float32(0.0)
            if first + lane < num_splits:
                weight = cute.math.exp2((lses[first + lane] - key_reference) * LOG2_E, fastmath=True)
            for i in cutlass.range(0, minimum(num_splits - first, LANES), AT_A_TIME, unroll=1):
                weights = [warp.broadcast(weight, i + j) for j in range(AT_A_TIME)]
                counts = weights[0] != 0.0
                for j in cutlass.range_constexpr(1, AT_A_TIME):
                    counts = counts or weights[j] != 0.0
                if cute.arch.vote_any_sync(counts):
                    for j in cutlass.range_constexpr(AT_A_TIME):
                        split = minimum(first + i + j, num_splits - 1)
                        for k in cutlass.range_constexpr(passes):
                            cute.autovec_copy(vectors[None, split, places[k]], parts[None, k, j])
                    for j in cutlass.range_constexpr(AT_A_TIME):
                        is_added = weights[j] != 0.0
                        for k in cutlass.range_constexpr(passes):
                            for c in cutlass.range_constexpr(vector):
                                total_c = acc[c, k] + weights[j] * parts[c, k, j].to(Float32)
                                acc[c, k] = total_c if is_added else acc[c, k]
        result = cute.make_rmem_tensor((vector,), out.element_type)
        out_vectors = cute.flat_divide(out, (vector,))
        for k in cutlass.range_constexpr(passes):
            for c in cutlass.range_constexpr(vector):
                result[c] = (acc[c, k] * share).to(out.element_type)
            if lane + k * LANES < self.head_dim_v // vector:
                cute.autovec_copy(result, out_vectors[None, lane + k * LANES])
        if lane == 0:
            lse[position] = -Float32.inf if is_empty else reference + cute.math.log2(safe_total, fastmath=True) * LN2

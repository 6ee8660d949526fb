"""The scores of a consumer warpgroup of the Hopper backward: how S becomes P, and dP becomes dS."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ....config import ROWS_PER_WARPGROUP
from ...blocks.memory.ptx import pack
from ...blocks.softmax.dropout import StagedFlags
from ...blocks.softmax.gradients import GradientScores, KeptBits, Region
from .inputs import Buffers, Inputs, Thread


class BackwardScores(GradientScores):
    """P and dS of 64 keys and a block of queries, as 16-bit operands of the GEMMs that follow.

    Args:
        first_key: the first of these keys among those of a tile.
        first_warp: the number of this thread block's first warp among those of a tile.

    Attributes:
        rP, rdS: P and dS.
        rP_of_dv: the operand of dV: P, or what dropout keeps of it.
    """

    def __init__(
        self,
        kernel,
        thread: Thread,
        inputs: Inputs,
        buffers: Buffers,
        first_key: Int32 | int,
        first_warp: Int32 | int = 0,
    ):
        self.sStats, self.first_warp = buffers.stats, first_warp
        shape = inputs.mmas.s.partition_shape_C((ROWS_PER_WARPGROUP, kernel.tile_m))
        self.rP, self.rdS = (cute.make_rmem_tensor(shape, kernel.dtype) for _ in range(2))
        p, ds = (cute.recast_tensor(r, Int32) for r in (self.rP, self.rdS))
        region = Region(
            thread.number, thread.lane, thread.lane_in_quad, thread.warp, first_key + thread.row, kernel.tile_m
        )
        modifiers, kept, flags, dropped = inputs.modifiers, None, None, None
        self.rP_of_dv = self.rP
        if modifiers is not None and modifiers.drops:
            self.rP_of_dv = cute.make_rmem_tensor(shape, kernel.dtype)
            if buffers.flags is None:
                kept = KeptBits(modifiers, cute.size(shape), m_tiles=1)
            else:
                flags = StagedFlags(modifiers, buffers.flags[None, None, thread.warp], thread.lane)
                dropped = cute.recast_tensor(self.rP_of_dv, Int32)
        # all steps of a tile are of one head, if each query head has keys of its own
        keeps_slope = modifiers is not None and modifiers.tensors.slopes is not None and kernel.group == 1
        super().__init__(kernel, region, inputs.factors, modifiers, p, ds, kept, flags, dropped, keeps_slope)
        # Masks that are read ahead save 1 to 12 % of the time of pairs of thread blocks (H200, ranges of keys), but
        # cost 1 % with query_ranges and 2 % with blocks; without pairs they cost 11 % (head_dim 64, clear blocks).
        if kernel.config.by_gradient:
            reads_ahead = kernel.is_paired and modifiers is not None and not modifiers.hides_by_key
            self.masks = self.masks if reads_ahead else None

    def slot(self, tile) -> Int32:
        return super().slot(tile) + self.first_warp

    @cute.jit
    def read_lse(self, q_state):
        self._read(self.minus_lse, q_state, 0, 0, self.kernel.tile_m)

    @cute.jit
    def read_delta(self, q_state, first: cutlass.Constexpr[int] = 0, end: cutlass.Constexpr[int] = 128):
        """Read delta of the queries [first, end)."""
        self._read(self.minus_delta, q_state, 1, first, end)

    @cute.jit
    def _read(
        self,
        target: cute.Tensor,
        q_state,
        which: cutlass.Constexpr[int],
        first: cutlass.Constexpr[int],
        end: cutlass.Constexpr[int],
    ):
        """-lse log2(e) (0) or -delta (1) of this thread's queries in [first, end): four of each sixteen."""
        tile_m, count = self.kernel.tile_m, self.kernel.tile_m // 16
        source = cute.domain_offset((which * tile_m + 4 * self.region.lane_in_quad,), self.sStats[None, q_state.index])
        source = cute.make_tensor(source.iterator.align(16), cute.make_layout((4, count), stride=(1, 16)))
        for j in cutlass.range_constexpr(first // 16, min(end // 16, count)):
            cute.autovec_copy(source[None, j], target[None, j])

    @cute.jit
    def make_p(self, acc_s: cute.Tensor, tile, head: Int32, m_block: Int32):
        """P = exp2(scale_log2 * S - lse * log2(e)), rounded to 16 bits."""
        self.exponentials(acc_s, tile, head, m_block)
        self.take_p(acc_s, tile, head, m_block)

    @cute.jit
    def take_p(self, acc_s: cute.Tensor, tile, head: Int32, m_block: Int32):
        """P of the accumulator, in 16 bits, and what dropout keeps of it."""
        pack(acc_s, self.rP)
        if cutlass.const_expr(self.flags is not None):
            self.flags.apply(self.p, self.dropped)
        elif cutlass.const_expr(self.kept is not None):
            self.draw_kept(tile, head, m_block)
            self.kept.drop(acc_s)
            pack(acc_s, self.rP_of_dv)

    @cute.jit
    def prepare(self, tile, head: Int32, m_block: Int32):
        """Read the masks of a block of scores, and draw its flags of dropout, while its GEMM runs."""
        self.read_masks(tile, head, m_block)
        if cutlass.const_expr(self.flags is not None):
            self.flags.draw(self.blocks_of(tile, head, m_block)[0])

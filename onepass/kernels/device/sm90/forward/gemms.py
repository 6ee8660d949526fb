"""The GEMMs of a consumer warpgroup of the Hopper forward: operands in shared memory and registers, accumulators."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, pipeline

from ....config import ROWS_PER_WARPGROUP
from ...blocks.memory import wgmma
from ...blocks.memory.layouts import as_operand_a, rows_and_columns, transposed
from ...blocks.memory.ptx import add_here
from ...blocks.memory.untraced import Untraced
from .inputs import Buffers, Mmas, Thread


class ForwardGemms(Untraced):
    """S = Q K^T and O += P V of 64 query rows: S, P and O in registers, Q, K and V in shared memory.

    Attributes:
        acc_s, acc_o: S of each score buffer, and O; s and o are their views (2, columns).
        acc_pv: what P V is added to: O itself, or with two_level_sums the sum of one step.
        rP: P, for float32 its high and its low half.
        pv_blocks: blocks of columns of O of which P V is computed at a time.
    """

    def __init__(self, kernel, thread: Thread, mmas: Mmas, buffers: Buffers):
        config = self.config = kernel.config
        self.kernel, self.mmas = kernel, mmas
        qk, pv = (mma.get_slice(thread.number) for mma in mmas)
        self.rQ = mmas.qk.make_fragment_A(qk.partition_A(buffers.q))
        self.rK = mmas.qk.make_fragment_B(qk.partition_B(buffers.k))
        self.rV = mmas.pv.make_fragment_B(pv.partition_B(buffers.v if kernel.is_fp8 else transposed(buffers.v)))
        shape_s = mmas.qk.partition_shape_C((ROWS_PER_WARPGROUP, kernel.buffer_n))
        shape_o = mmas.pv.partition_shape_C((ROWS_PER_WARPGROUP, kernel.head_dim_v))
        self.acc_s = [cute.make_rmem_tensor(shape_s, Float32) for _ in range(config.score_buffers)]
        self.acc_pv = self.acc_o = cute.make_rmem_tensor(shape_o, Float32)
        self.pv_blocks = kernel.head_dim_v // kernel.pv_columns
        if config.two_level_sums:
            shape_pv = mmas.pv.partition_shape_C((ROWS_PER_WARPGROUP, kernel.pv_columns))
            if config.overlap_gemm_softmax:
                self.acc_pv = cute.make_rmem_tensor(shape_pv, Float32)
            else:
                # P V is computed when S is no longer needed, in the same registers: ptxas would not see this by itself
                shared = cute.make_rmem_tensor((max(cute.size(shape_s), cute.size(shape_pv)),), Float32)
                self.acc_s = [cute.make_tensor(shared.iterator, cute.make_layout(shape_s))]
                self.acc_pv = cute.make_tensor(shared.iterator, cute.make_layout(shape_pv))
        self.s, self.o = [rows_and_columns(acc) for acc in self.acc_s], rows_and_columns(self.acc_o)
        if kernel.is_fp8:
            shape_p = mmas.pv.partition_shape_A((ROWS_PER_WARPGROUP, kernel.buffer_n))
            self.rP = [cute.make_rmem_tensor(shape_p, kernel.dtype)]
            self._p = self.rP
        else:
            self.rP = [cute.make_rmem_tensor(self.acc_s[0].layout, kernel.dtype) for _ in range(kernel.num_halves)]
            self._p = [as_operand_a(rP) for rP in self.rP]

    @cute.jit
    def issue_qk(self, buffer: cutlass.Constexpr[int], k_state, q_state):
        """S[buffer] = Q K^T."""
        products = wgmma.products(self._halves(self.rQ, q_state), self._halves(self.rK, k_state))
        wgmma.issue_sum(self.mmas.qk, self.acc_s[buffer], products, False)

    @cute.jit
    def issue_pv(self, v_state):
        """O += P V; with two_level_sums P V alone, which `add_pv` adds."""
        accumulate = not self.config.two_level_sums
        products = wgmma.products(self._p, self._halves(self.rV, v_state))
        wgmma.issue_sum(self.mmas.pv, self.acc_pv, products, accumulate)

    @cute.jit
    def issue_pv_block(self, block: cutlass.Constexpr[int], v_state):
        """P V of a block of columns, which `add_pv` adds to O."""
        v = [wgmma.block_of_columns(t, block) for t in self._halves(self.rV, v_state)]
        wgmma.issue_sum(self.mmas.pv, self.acc_pv, wgmma.products(self._p, v), False)

    @cute.jit
    def add_pv(self, block: cutlass.Constexpr[int] = 0):
        """O += acc_pv. Args: block: the block of columns of O that acc_pv holds."""
        acc_o = self.acc_o[None, None, block] if cutlass.const_expr(self.pv_blocks > 1) else self.acc_o
        for i in cutlass.range_constexpr(cute.size(self.acc_pv)):
            if cutlass.const_expr(self.config.overlap_gemm_softmax):
                acc_o[i] = acc_o[i] + self.acc_pv[i]
            else:
                acc_o[i] = add_here(acc_o[i], self.acc_pv[i])

    def _halves(self, buffers: cute.Tensor, state: pipeline.PipelineState) -> list:
        """The operands that lie in a buffer: one, or for float32 inputs the high and the low half."""
        num_halves = self.kernel.num_halves
        return [buffers[None, None, None, num_halves * state.index + half] for half in range(num_halves)]

"""The GEMMs of a consumer warpgroup of the Hopper backward: operands in shared memory and registers, accumulators."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from ....config import ROWS_PER_WARPGROUP
from ...blocks.memory import wgmma
from ...blocks.memory.layouts import as_operand_a, transposed
from ...blocks.memory.untraced import Untraced
from ...blocks.softmax.gradients import stat_of_column
from .inputs import Buffers, Mmas, Thread


class KeyGemms(Untraced):
    """S, dP, dV and dK of 64 keys, which are the rows of all results.

    Accumulators that begin at zero are new registers each time: an old one would be an operand, and kept until then.

    Args:
        row_block: the number of these 64 keys among those of K and V in shared memory.

    Attributes:
        acc_dk, acc_dv: the sums over all query blocks of a tile.
    """

    def __init__(self, kernel, thread: Thread, mmas: Mmas, buffers: Buffers, row_block: Int32 | int):
        self.kernel, self.thread, self.mmas = kernel, thread, mmas
        s, dp, dv, dk = (mma.get_slice(thread.number) for mma in mmas[:4])
        self.own_k = buffers.k[None, None, row_block]
        rK = mmas.s.make_fragment_A(s.partition_A(buffers.k))
        if kernel.keys_in_registers:
            self.rK = cute.make_rmem_tensor(cute.select(rK.layout, [0, 1, 2]).shape, kernel.dtype)
        else:
            self.rK = rK[None, None, None, row_block]
        self.rQ = mmas.s.make_fragment_B(s.partition_B(buffers.q))
        self.rV = mmas.dp.make_fragment_A(dp.partition_A(buffers.v))[None, None, None, row_block]
        self.rdO = mmas.dp.make_fragment_B(dp.partition_B(buffers.do))
        self.rdO_t = mmas.dv.make_fragment_B(dv.partition_B(transposed(buffers.do)))
        self.rQ_t = mmas.dk.make_fragment_B(dk.partition_B(transposed(buffers.q)))
        self.shape_s = mmas.s.partition_shape_C((ROWS_PER_WARPGROUP, kernel.tile_m))
        self.shape_dq = mmas.dq.partition_shape_C((ROWS_PER_WARPGROUP, kernel.dq_columns))
        self.acc_dk, self.acc_dv = (
            cute.make_rmem_tensor(mma.partition_shape_C((ROWS_PER_WARPGROUP, columns)), Float32)
            for mma, columns in ((mmas.dk, kernel.head_dim), (mmas.dv, kernel.head_dim_v))
        )

    @cute.jit
    def load_keys(self):
        """Load this warpgroup's K into registers, with keys_in_registers."""
        if cutlass.const_expr(self.kernel.keys_in_registers):
            ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.kernel.dtype)
            copy = cute.make_tiled_copy_A(ldmatrix, self.mmas.s).get_slice(self.thread.number)
            cute.copy(copy, copy.partition_S(self.own_k), copy.retile(self.rK))

    @cute.jit
    def issue_s(self, q_state) -> cute.Tensor:
        """S^T = K Q^T."""
        acc_s = cute.make_rmem_tensor(self.shape_s, Float32)
        b = self.rQ[None, None, None, q_state.index]
        wgmma.issue(self.mmas.s, acc_s, self.rK, b, False, self.kernel.steps_of_s)
        return acc_s

    @cute.jit
    def issue_dp(self, do_state, minus_delta: cute.Tensor | None = None) -> cute.Tensor:
        """dP^T = V dO^T, or with minus_delta dP - delta."""
        acc_dp = cute.make_rmem_tensor(self.shape_s, Float32)
        if cutlass.const_expr(minus_delta is not None):
            for i in cutlass.range_constexpr(cute.size(acc_dp)):
                acc_dp[i] = stat_of_column(minus_delta, i)
        b = self.rdO[None, None, None, do_state.index]
        wgmma.issue(self.mmas.dp, acc_dp, self.rV, b, minus_delta is not None, self.kernel.steps_of_dp)
        return acc_dp

    @cute.jit
    def issue_dv(self, rP: cute.Tensor, do_state, before_last: cutlass.Constexpr = None):
        """dV += P^T dO."""
        do = self.rdO_t[None, None, None, do_state.index]
        wgmma.issue(self.mmas.dv, self.acc_dv, as_operand_a(rP), do, True, before_last=before_last)

    @cute.jit
    def issue_dk(self, rdS: cute.Tensor, q_state, before_last: cutlass.Constexpr = None):
        """dK += dS^T Q."""
        q = self.rQ_t[None, None, None, q_state.index]
        wgmma.issue(self.mmas.dk, self.acc_dk, as_operand_a(rdS), q, True, before_last=before_last)


class BackwardGemms(KeyGemms):
    """All five GEMMs of a warpgroup up to head_dim 128: its dQ is 64 of the queries, or some of the columns."""

    def __init__(self, kernel, thread: Thread, mmas: Mmas, buffers: Buffers):
        super().__init__(kernel, thread, mmas, buffers, thread.wg)
        queries, column_block = (thread.wg, 0) if kernel.is_dq_by_rows else (0, thread.wg)
        sdS = cute.local_tile(buffers.ds, (ROWS_PER_WARPGROUP, ROWS_PER_WARPGROUP), (queries, 0, None))
        sK_t = cute.local_tile(transposed(buffers.k), (kernel.dq_columns, ROWS_PER_WARPGROUP), (column_block, 0, None))
        dq = mmas.dq.get_slice(thread.number)
        self.rdS_q = mmas.dq.make_fragment_A(dq.partition_A(sdS))
        self.rK_t = mmas.dq.make_fragment_B(dq.partition_B(sK_t))

    @cute.jit
    def issue_dq(self, count: Int32) -> cute.Tensor:
        """This warpgroup's share of dQ = dS K, over the keys of all warpgroups."""
        acc_dq = cute.make_rmem_tensor(self.shape_dq, Float32)
        row_blocks = self.kernel.row_blocks
        first = count % 2 * row_blocks
        pairs = [(self.rdS_q[None, None, None, first + w], self.rK_t[None, None, None, w]) for w in range(row_blocks)]
        wgmma.issue_sum(self.mmas.dq, acc_dq, pairs, False)
        return acc_dq

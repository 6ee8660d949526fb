"""The two GEMMs of a step in fp16 or bf16: mma.m16n8k16 with float32 sums, fragments by ldmatrix."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from ....config import ROWS_PER_MMA, ForwardConfigSm80
from ...blocks.memory import epilogue
from ...blocks.memory.layouts import as_operand_a_of_mma, transposed
from ...blocks.memory.ptx import pack
from ...blocks.memory.untraced import Untraced


def make_tiled_mma(config: ForwardConfigSm80, dtype: type[cutlass.Numeric]) -> cute.TiledMma:
    """All warps in a row along M; 16 columns, which one ldmatrix of four 8x8 matrices serves."""
    rows = ROWS_PER_MMA * config.num_warps
    op = warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16))
    return cute.make_tiled_mma(op, (config.num_warps, 1, 1), permutation_mnk=(rows, 16, 16))


class Operand(NamedTuple):
    """An operand of the GEMMs in shared memory, and the registers that its fragments pass through."""

    copy: cute.TiledCopy
    source: cute.Tensor  # (.., .., k, buffer)
    target: cute.Tensor  # `fragment` in the order of ldmatrix
    fragment: cute.Tensor

    @property
    def steps(self) -> int:
        return cute.size(self.fragment, mode=[2])

    def load(self, k: int, buffer: Int32):
        """Load step k of the sum (16 of its terms) from a buffer into registers."""
        cute.copy(self.copy, self.source[None, None, k, buffer], self.target[None, None, k])


class Gemms16Bit(Untraced):
    """S = Q K^T and O += P V of a warp's query rows, with S, P and O in registers.

    Attributes:
        acc_s, acc_o: ((2, 2), m_tiles, columns / 8).
    """

    def __init__(self, kernel, sQ, sK, sV, tiled_mma: cute.TiledMma, thread: Int32):
        self.config, self.tiled_mma = kernel.config, tiled_mma
        thr = tiled_mma.get_slice(thread)
        ldmatrix, ldmatrix_transposed = (
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=transpose, num_matrices=4), kernel.dtype)
            for transpose in (False, True)
        )
        sVt = transposed(sV)
        copy_a, copy_b, copy_bt = (
            make(atom, tiled_mma).get_slice(thread)
            for make, atom in (
                (cute.make_tiled_copy_A, ldmatrix),
                (cute.make_tiled_copy_B, ldmatrix),
                (cute.make_tiled_copy_B, ldmatrix_transposed),
            )
        )
        self.q = self._operand(copy_a, sQ, thr.make_fragment_A(thr.partition_A(sQ[None, None, 0])))
        self.k = self._operand(copy_b, sK, thr.make_fragment_B(thr.partition_B(sK[None, None, 0])))
        self.v = self._operand(copy_bt, sVt, thr.make_fragment_B(thr.partition_B(sVt[None, None, 0])))
        self.acc_s = cute.make_rmem_tensor(thr.partition_shape_C((self.config.tile_m, self.config.tile_n)), Float32)
        self.acc_o = cute.make_rmem_tensor(thr.partition_shape_C((self.config.tile_m, kernel.head_dim_v)), Float32)
        self.rP = cute.make_rmem_tensor(self.acc_s.layout, kernel.dtype)
        self.p = as_operand_a_of_mma(self.rP)

    def _operand(self, copy: cute.TiledCopy, buffers: cute.Tensor, fragment: cute.Tensor) -> Operand:
        return Operand(copy, copy.partition_S(buffers), copy.retile(fragment), fragment)

    @cute.jit
    def load_q(self):
        """With q_in_registers, load all of Q once."""
        if cutlass.const_expr(self.config.q_in_registers):
            for k in cutlass.range_constexpr(self.q.steps):
                self.q.load(k, 0)

    @cute.jit
    def qk(self, buffer: Int32):
        """S = Q K^T."""
        self.acc_s.fill(0.0)
        q_buffer = None if cutlass.const_expr(self.config.q_in_registers) else 0
        self._gemm(self.acc_s, self.q.fragment, self.q, q_buffer, self.k, buffer)

    @cute.jit
    def take_p(self):
        """Take P from acc_s for `pv`."""
        pack(self.acc_s, self.rP)

    @cute.jit
    def pv(self, buffer: Int32):
        """O += P V."""
        self._gemm(self.acc_o, self.p, None, None, self.v, buffer)

    @cute.jit
    def _gemm(self, acc, a: cute.Tensor, a_operand: Operand | None, a_buffer, b: Operand, b_buffer: Int32):
        """acc += a b, with the fragments of b, and of a where it has a buffer, from shared memory.

        With fragments_ahead, the fragments of a step are loaded before the mma of the step before; without it, all are
        loaded before the first mma.
        """
        steps = b.steps
        ahead = 1 if cutlass.const_expr(self.config.fragments_ahead) else steps
        for k in cutlass.range_constexpr(steps + ahead):
            if cutlass.const_expr(k < steps):
                if cutlass.const_expr(a_buffer is not None):
                    a_operand.load(k, a_buffer)
                b.load(k, b_buffer)
            if cutlass.const_expr(k >= ahead):
                step = k - ahead
                cute.gemm(self.tiled_mma, acc, a[None, None, step], b.fragment[None, None, step], acc)

    @cute.jit
    def store_rows(
        self,
        acc_o: cute.Tensor,
        weights: cute.Tensor,
        out_rows: list,
        is_row: list,
        lane_in_quad: Int32,
        first_block=0,
    ):
        """out_rows[r] = weights[r] * acc_o[r] for a thread's two rows of an m_tile, acc_o (2, columns).

        Args: first_block: the number of the first 8-column block of out that acc_o holds.
        """
        if cutlass.const_expr(out_rows[0].element_type is Float32):  # partials of a split
            is_even = cute.size(out_rows[0]) % 2 == 0
            epilogue.store_pairs(acc_o, weights, out_rows, is_row, lane_in_quad, 8 if is_even else 2, first_block)
        else:
            width = self.config.vector_bytes
            epilogue.store_16_bits(acc_o, weights, out_rows, is_row, lane_in_quad, width, first_block)

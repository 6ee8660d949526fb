"""The two GEMMs of a step over an e4m3 cache: mma.m16n8k16 of fp16 with float32 sums; see blocks/memory/e4m3.py."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32
from cutlass.cute.nvgpu import warp

from .....geometry.tile_scheduler import LANES
from ....config import ROWS_PER_MMA
from ...blocks.memory import e4m3, epilogue
from ...blocks.memory.layouts import as_operand_a_of_mma, transposed
from ...blocks.memory.ptx import pack, pack_pair
from ...blocks.memory.untraced import Untraced
from .gemms_16bit import Operand


class GemmsE4M3(Untraced):
    """S = Q K^T and O += P V of a warp's query rows, with S, P and O in registers.

    Q is in registers as well, or (without q_in_registers) in shared memory in fp16, a lane's four registers of each 16
    columns together.

    Args:
        sQ: 16-bit Q. sK, sV: pairs of e4m3 as 16-bit elements, half as many columns.

    Attributes:
        acc_s, acc_o: ((2, 2), m_tiles, columns / 8). The first 8-column block of 16 columns of O has the even columns.
        score_factors: (2 rows, m_tiles): the factors that make S the product Q K^T.
    """

    def __init__(self, kernel, sQ, sK, sV, tiled_mma: cute.TiledMma, thread: Int32):
        self.config, self.tiled_mma, self.thread = kernel.config, tiled_mma, thread
        thr = tiled_mma.get_slice(thread)
        copy_b, copy_bt = (
            cute.make_tiled_copy_B(
                cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=transpose, num_matrices=4), Float16), tiled_mma
            ).get_slice(thread)
            for transpose in (False, True)
        )
        sVt = transposed(sV)
        self.sQ, m_tiles = sQ, self.config.m_tiles
        self.k = self._operand(copy_b, sK, thr.make_fragment_B(thr.partition_B(sK[None, None, 0])))
        self.v = self._operand(copy_bt, sVt, thr.make_fragment_B(thr.partition_B(sVt[None, None, 0])))
        self.acc_s = cute.make_rmem_tensor(thr.partition_shape_C((self.config.tile_m, self.config.tile_n)), Float32)
        self.acc_o = cute.make_rmem_tensor(thr.partition_shape_C((self.config.tile_m, kernel.head_dim_v)), Float32)
        steps = kernel.head_dim // 16
        self.rQ = cute.make_rmem_tensor(((2, 2, 2), m_tiles, steps), Float16)
        lanes = LANES * self.config.num_warps
        layout = cute.make_layout((4, lanes, m_tiles, steps), stride=(1, 4, 4 * lanes, 4 * lanes * m_tiles))
        self.sQ_words = cute.make_tensor(cute.recast_ptr(sQ.iterator, dtype=Int32), layout)
        self.score_factors = cute.make_rmem_tensor((2, m_tiles), Float32)
        self.rP = cute.make_rmem_tensor(self.acc_s.layout, Float16)
        self.p = as_operand_a_of_mma(self.rP)

    def _operand(self, copy: cute.TiledCopy, buffers: cute.Tensor, fragment: cute.Tensor) -> Operand:
        return Operand(copy, copy.partition_S(buffers), copy.retile(fragment), fragment)

    # ---------------------------------------------------------------- Q

    @cute.jit
    def load_q(self):
        """Load all of Q, in the order of columns that K comes in, with bf16 brought to fp16's range."""
        words = cute.recast_tensor(self.rQ, Int32)  # ((1, 2, 2), m_tiles, k)
        four = cute.make_rmem_tensor((4,), self.sQ.element_type)
        first = self.thread // 32 * ROWS_PER_MMA + self.thread % 32 // 4
        for i in cutlass.range_constexpr(self.config.m_tiles):
            for r in cutlass.range_constexpr(2):
                row = self.sQ[first + ROWS_PER_MMA * self.config.num_warps * i + 8 * r, None, 0]
                fours = cute.flat_divide(row, (4,))
                factor = self._range_of_row(fours, i, r)
                for k in cutlass.range_constexpr(cute.size(words, mode=[2])):
                    cute.autovec_copy(fours[None, 4 * k + self.thread % 4], four)
                    values = [four[j].to(Float32) * factor for j in range(4)]
                    for half in cutlass.range_constexpr(2):
                        words[(0, r, half), i, k] = pack_pair(values[2 * half], values[2 * half + 1], Float16)
        if cutlass.const_expr(not self.config.q_in_registers):
            self._put_q(words)

    @cute.jit
    def _put_q(self, words: cute.Tensor):
        """Overwrite Q in shared memory with Q in fp16. Warps that have the same rows write the same values."""
        cute.arch.sync_threads()  # all warps have read Q
        four = cute.make_rmem_tensor((4,), Int32)
        for i in cutlass.range_constexpr(self.config.m_tiles):
            for k in cutlass.range_constexpr(cute.size(words, mode=[2])):
                for j in cutlass.range_constexpr(4):
                    four[j] = words[(0, j % 2, j // 2), i, k]
                cute.autovec_copy(four, self.sQ_words[None, self.thread, i, k])
        cute.arch.sync_threads()

    @cute.jit
    def _operand_a(self, k: cutlass.Constexpr[int]) -> cute.Tensor:
        """Q of 16 columns as operand A."""
        if cutlass.const_expr(self.config.q_in_registers):
            return self.rQ[None, None, k]
        a = cute.make_rmem_tensor(((2, 2, 2), self.config.m_tiles), Float16)
        words, four = cute.recast_tensor(a, Int32), cute.make_rmem_tensor((4,), Int32)
        for i in cutlass.range_constexpr(self.config.m_tiles):
            cute.autovec_copy(self.sQ_words[None, self.thread, i, k], four)
            for j in cutlass.range_constexpr(4):
                words[(0, j % 2, j // 2), i] = four[j]
        return a

    @cute.jit
    def _range_of_row(self, fours: cute.Tensor, i: cutlass.Constexpr[int], r: cutlass.Constexpr[int]) -> Float32:
        """The factor that brings a row to fp16's range; sets `score_factors`."""
        factor, reciprocal = Float32(1.0), Float32(1.0)
        if cutlass.const_expr(fours.element_type is not Float16):
            four, largest = cute.make_rmem_tensor((4,), fours.element_type), Float32(0.0)
            for k in cutlass.range_constexpr(cute.size(fours, mode=[1]) // 4):
                cute.autovec_copy(fours[None, 4 * k + self.thread % 4], four)
                for j in cutlass.range_constexpr(4):
                    x = four[j].to(Float32)
                    largest = cute.arch.fmax(largest, cute.arch.fmax(x, -x))
            for offset in cutlass.range_constexpr(1, 3):
                largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=offset))
            factor, reciprocal = e4m3.factors_of_row(largest)
        self.score_factors[r, i] = reciprocal
        return factor

    # ---------------------------------------------------------------- GEMMs

    @cute.jit
    def qk(self, buffer: Int32):
        """S = Q K^T."""
        self.acc_s.fill(0.0)
        raw = cute.recast_tensor(self.k.fragment, Int32)  # ((1, 2), n, k): 32 columns, 16 in each register
        b = cute.make_rmem_tensor(((2, 2), cute.size(raw, mode=[1]), 2), Float16)
        words = cute.recast_tensor(b, Int32)
        for k in cutlass.range_constexpr(self.k.steps + 1):
            if cutlass.const_expr(k < self.k.steps):
                self.k.load(k, buffer)
            if cutlass.const_expr(k > 0):
                for n in cutlass.range_constexpr(cute.size(raw, mode=[1])):
                    for half in cutlass.range_constexpr(2):
                        low, high = e4m3.neighbors_as_fp16(raw[(0, half), n, k - 1])
                        words[(0, 0), n, half], words[(0, 1), n, half] = low, high
                for half in cutlass.range_constexpr(2):
                    a = self._operand_a(2 * (k - 1) + half)
                    cute.gemm(self.tiled_mma, self.acc_s, a, b[None, None, half], self.acc_s)

    @cute.jit
    def take_p(self):
        """Take P from acc_s for `pv`."""
        pack(self.acc_s, self.rP)

    @cute.jit
    def pv(self, buffer: Int32):
        """O += P V."""
        raw = cute.recast_tensor(self.v.fragment, Int32)  # ((1, 2), n, k): 16 columns in 8 pairs
        shape, stride = self.acc_o.layout.shape, self.acc_o.layout.stride
        two_blocks = cute.make_layout((*shape[:2], 2), stride=stride)
        b = cute.make_rmem_tensor(((2, 2), 2), Float16)
        words = cute.recast_tensor(b, Int32)
        for k in cutlass.range_constexpr(self.v.steps + 1):
            if cutlass.const_expr(k < self.v.steps):
                self.v.load(k, buffer)
            if cutlass.const_expr(k > 0):
                for n in cutlass.range_constexpr(cute.size(raw, mode=[1])):
                    for half in cutlass.range_constexpr(2):
                        evens, odds = e4m3.evens_and_odds_as_fp16(raw[(0, half), n, k - 1])
                        words[(0, half), 0], words[(0, half), 1] = evens, odds
                    acc = cute.make_tensor(self.acc_o.iterator + 2 * n * stride[2], two_blocks)
                    cute.gemm(self.tiled_mma, acc, self.p[None, None, k - 1], b, acc)

    @cute.jit
    def store_rows(
        self, acc_o: cute.Tensor, weights: cute.Tensor, out_rows: list, is_row: list, lane_in_quad: Int32, first_block=0
    ):
        """out_rows[r] = weights[r] * acc_o[r] for a thread's two rows of an m_tile, acc_o (2, columns).

        Args: first_block: the number of the first 8-column block of out that acc_o holds, which is even.
        """
        dtype, vector_bytes = out_rows[0].element_type, self.config.vector_bytes
        if cutlass.const_expr(dtype is Float32):  # partials of a split, whose rows are dense
            vector_bytes = 16 if cute.size(out_rows[0]) % 4 == 0 else 8
        width = min(4, 8 * vector_bytes // dtype.width)
        epilogue.store_runs(acc_o, weights, out_rows, is_row, lane_in_quad, 4, width, first_block)

"""The five GEMMs of a backward's step in fp16 or bf16: mma.m16n8k16 with float32 sums, fragments by ldmatrix."""

from __future__ import annotations

import itertools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from ....config import ROWS_PER_MMA, BackwardConfigSm80, column_block
from ...blocks.memory import epilogue
from ...blocks.memory.layouts import as_operand_a_of_mma, transposed
from ...blocks.memory.ptx import pack
from ...blocks.memory.untraced import Untraced
from ...blocks.softmax.gradients import Region
from ..forward.gemms_16bit import Operand
from .warps import COLUMNS_OF_STORE, Buffers, Mmas

COLUMNS_OF_LDMATRIX = 16  # four matrices of 8 x 8


def make_tiled_mmas(config: BackwardConfigSm80, dtype: type[cutlass.Numeric]) -> Mmas:
    queries_of_warp = config.tile_m * config.s_key_warps // config.num_warps

    def tiled_mma(row_warps: int, together: int) -> cute.TiledMma:
        """A GEMM whose warps lie along the rows of the result (row_warps of them) and along its columns.

        A warp has 16 rows of every 16 * row_warps, and `together` neighboring columns.
        """
        op = warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16))
        column_warps = config.num_warps // row_warps
        columns = COLUMNS_OF_LDMATRIX
        if column_warps > 1:
            columns = cute.make_layout((8, column_warps, together // 8), stride=(1, together, 8))
        return cute.make_tiled_mma(
            op, (row_warps, column_warps, 1), permutation_mnk=(ROWS_PER_MMA * row_warps, columns, 16)
        )

    return Mmas(
        s=tiled_mma(config.s_key_warps, queries_of_warp),
        dkv=tiled_mma(config.dkv_key_warps, COLUMNS_OF_STORE),
        dq=tiled_mma(config.dq_query_warps, COLUMNS_OF_LDMATRIX),
    )


class BackwardGemms16Bit(Untraced):
    """GEMMs of all warps, each of which has a region of the result in registers.

    The accumulators acc_s, acc_dp and acc_dq of a step are ((2, 2), rows / 16, columns / 8).

    Attributes:
        acc_dk, acc_dv: the accumulators of a tile, of the same form.
        p_words, ds_words: P and dS, in the order of acc_s.
        dq_together: columns of dQ that lie together.
    """

    dq_together = COLUMNS_OF_LDMATRIX

    def __init__(self, kernel, buffers: Buffers, mmas: Mmas, region: Region):
        config = self.config = kernel.config
        self.kernel, self.buffers, self.mmas, self.region = kernel, buffers, mmas, region
        self.tile_m, self.tile_n = kernel.tile_m, kernel.tile_n
        self.p_in_registers = kernel.p_in_registers
        self._make_operands()
        _, dkv, _ = slices = tuple(mma.get_slice(region.thread) for mma in mmas)
        self.shape_s = slices[0].partition_shape_C((self.tile_n, self.tile_m))
        self.shape_dq = slices[2].partition_shape_C((self.tile_m, kernel.head_dim // config.dq_pieces))
        self.acc_dk = cute.make_rmem_tensor(dkv.partition_shape_C((self.tile_n, kernel.head_dim)), Float32)
        self.acc_dv = cute.make_rmem_tensor(dkv.partition_shape_C((self.tile_n, kernel.head_dim_v)), Float32)
        self.rP, self.rdS = (cute.make_rmem_tensor(self.shape_s, kernel.dtype) for _ in range(2))
        self.p_words, self.ds_words = (cute.recast_tensor(r, Int32) for r in (self.rP, self.rdS))

    def _make_operands(self):
        """Make the fragments of the GEMMs; operands that are summed over the rows of a tile are transposed on load."""
        mmas, (k, v, q, do, ds, p, _) = self.mmas, self.buffers
        self.k_of_s, self.q_of_s = self._operand_a(mmas.s, k, False), self._operand_b(mmas.s, q, False)
        self.v_of_dp, self.do_of_dp = self._operand_a(mmas.s, v, False), self._operand_b(mmas.s, do, False)
        self.do_of_dv, self.q_of_dk = self._operand_b(mmas.dkv, do, True), self._operand_b(mmas.dkv, q, True)
        self.ds_of_dq, self.k_of_dq = self._operand_a(mmas.dq, ds, True), self._pieces_of_k(k)
        if not self.p_in_registers:
            self.p_of_dv, self.ds_of_dk = self._operand_a(mmas.dkv, p, False), self._operand_a(mmas.dkv, ds, False)

    def _operand_a(self, tiled_mma: cute.TiledMma, tiles: cute.Tensor, is_transposed: bool) -> Operand:
        tiles, atom = self._source(tiles, is_transposed)
        thr = tiled_mma.get_slice(self.region.thread)
        fragment = thr.make_fragment_A(thr.partition_A(tiles[None, None, 0]))
        return self._operand(cute.make_tiled_copy_A(atom, tiled_mma), tiles, fragment)

    def _operand_b(self, tiled_mma: cute.TiledMma, tiles: cute.Tensor, is_transposed: bool) -> Operand:
        tiles, atom = self._source(tiles, is_transposed)
        thr = tiled_mma.get_slice(self.region.thread)
        fragment = thr.make_fragment_B(thr.partition_B(tiles[None, None, 0]))
        return self._operand(cute.make_tiled_copy_B(atom, tiled_mma), tiles, fragment)

    def _pieces_of_k(self, k: cute.Tensor) -> list:
        """Operand B of dQ = dS K, in pieces of as many columns as dQ has registers for."""
        count = self.config.dq_pieces
        if count == 1:
            return [self._operand_b(self.mmas.dq, k, True)]
        shape = (self.tile_n, self.kernel.head_dim // count)
        pieces = [cute.local_tile(k, shape, (0, i, None)) for i in range(count)]
        return [self._operand_b(self.mmas.dq, piece, True) for piece in pieces]

    def _source(self, tiles: cute.Tensor, is_transposed: bool) -> tuple:
        op = warp.LdMatrix8x8x16bOp(transpose=is_transposed, num_matrices=4)
        return transposed(tiles) if is_transposed else tiles, cute.make_copy_atom(op, self.kernel.dtype)

    def _operand(self, tiled_copy: cute.TiledCopy, tiles: cute.Tensor, fragment: cute.Tensor) -> Operand:
        copy = tiled_copy.get_slice(self.region.thread)
        return Operand(copy, copy.partition_S(tiles), copy.retile(fragment), fragment)

    # ---------------------------------------------------------------- the GEMMs

    def make_acc_s(self) -> cute.Tensor:
        """An accumulator for S or dP."""
        return cute.make_rmem_tensor(self.shape_s, Float32)

    def make_acc_dq(self) -> cute.Tensor:
        return cute.make_rmem_tensor(self.shape_dq, Float32)

    @cute.jit
    def s(self, acc_s: cute.Tensor, buffer: Int32):
        """S^T += K Q^T."""
        self._gemm(self.mmas.s, acc_s, self.k_of_s, 0, self.q_of_s, buffer)

    @cute.jit
    def dp(self, acc_dp: cute.Tensor, buffer: Int32):
        """dP^T += V dO^T."""
        self._gemm(self.mmas.s, acc_dp, self.v_of_dp, 0, self.do_of_dp, buffer)

    @cute.jit
    def take_p(self, acc_s: cute.Tensor):
        """Take P from acc_s for `dv`, which needs a barrier before it unless P stays in registers."""
        pack(acc_s, self.rP)
        if cutlass.const_expr(not self.p_in_registers):
            self._write(self.p_words, self.buffers.p)

    @cute.jit
    def take_ds(self, acc_dp: cute.Tensor):
        """Take dS from ds_words for `dk` and, after a barrier, for `dq`."""
        self._write(self.ds_words, self.buffers.ds)

    @cute.jit
    def dv(self, buffer: Int32):
        """dV += P^T dO."""
        if cutlass.const_expr(self.p_in_registers):
            self._gemm_registers(self.mmas.dkv, self.acc_dv, self.rP, self.do_of_dv, buffer)
        else:
            self._gemm(self.mmas.dkv, self.acc_dv, self.p_of_dv, 0, self.do_of_dv, buffer)

    @cute.jit
    def dk(self, buffer: Int32):
        """dK += dS^T Q."""
        if cutlass.const_expr(self.p_in_registers):
            self._gemm_registers(self.mmas.dkv, self.acc_dk, self.rdS, self.q_of_dk, buffer)
        else:
            self._gemm(self.mmas.dkv, self.acc_dk, self.ds_of_dk, 0, self.q_of_dk, buffer)

    @cute.jit
    def dq(self, acc_dq: cute.Tensor, piece: cutlass.Constexpr[int]):
        """A piece of the columns of dQ = dS K."""
        acc_dq.fill(0.0)
        self._gemm(self.mmas.dq, acc_dq, self.ds_of_dq, 0, self.k_of_dq[piece], 0)

    @cute.jit
    def _gemm(
        self, tiled_mma: cute.TiledMma, acc: cute.Tensor, a: Operand, a_buffer: Int32, b: Operand, b_buffer: Int32
    ):
        """acc += a b, with both operands from shared memory."""
        for k in cutlass.range_constexpr(cute.size(b.fragment, mode=[2])):
            a.load(k, a_buffer)
            b.load(k, b_buffer)
            cute.gemm(tiled_mma, acc, a.fragment[None, None, k], b.fragment[None, None, k], acc)

    @cute.jit
    def _gemm_registers(self, tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: Operand, buffer: Int32):
        """acc += a b, with a in the registers of an accumulator."""
        a = as_operand_a_of_mma(a)
        for k in cutlass.range_constexpr(cute.size(b.fragment, mode=[2])):
            b.load(k, buffer)
            cute.gemm(tiled_mma, acc, a[None, None, k], b.fragment[None, None, k], acc)

    @cute.jit
    def _write(self, words: cute.Tensor, tiles: cute.Tensor):
        """Write P or dS, in pairs of 16 bits, to shared memory, where all warps read it after the next barrier.

        Rows 8 apart have their 16-byte pieces exchanged alike, so every address is one of at most eight plus a
        constant. From the layout, the compiler would make an address for each word, and keep all through the loop.
        """
        region, columns = self.region, column_block(self.tile_m)
        row_bytes, pieces = 2 * columns, columns // 8  # 8 columns each
        start = tiles.iterator.toint() + region.row_in_tile * row_bytes + 4 * region.lane_in_quad
        first_piece = region.first_query // 8
        swizzle = region.lane // 4 * row_bytes // 128 % pieces
        start += first_piece // pieces * (self.tile_n * row_bytes)
        shape = (2, region.m_tiles, max(1, region.num_queries // columns))
        stride = (8 * row_bytes // 4, region.rows_between * row_bytes // 4, self.tile_n * row_bytes // 4)
        for piece in cutlass.range_constexpr(min(pieces, region.num_queries // 8)):
            address = start + 16 * ((first_piece % pieces) ^ piece ^ swizzle)
            pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4)
            target = cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))
            for block in cutlass.range_constexpr(shape[2]):
                for i, r in itertools.product(range(region.m_tiles), range(2)):
                    target[r, i, block] = words[r + 2 * (i + region.m_tiles * (block * pieces + piece))]

    @cute.jit
    def store_rows(
        self, acc: cute.Tensor, weights: cute.Tensor, rows: list, is_row: list, lane_in_quad: Int32, first_block: Int32
    ):
        """rows[r] = weights[r] * acc[r] for a thread's two rows of COLUMNS_OF_STORE columns."""
        epilogue.store_16_bits(acc, weights, rows, is_row, lane_in_quad, self.config.vector_bytes, first_block)

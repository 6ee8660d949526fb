"""The warps of the Ampere backward: their registers, and single acts with them.

All fragments are those of a warp's 16 x 8 x 16 mma: of a result a thread has two rows, 8 apart, and two of 8 columns,
in each of its 16 x 8 blocks. In which order the acts are done, and what is loaded when, is backward.py's.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warp

from ..blocks import epilogue, plain_gradients
from ..blocks.bundle import Bundle
from ..blocks.dq_accumulator import Accumulator, AdditionTurns
from ..blocks.gradient_scores import GradientScores, of_column
from ..blocks.key_tiles import KeyTile
from ..blocks.layouts import as_operand_a_of_mma, rows_and_columns, transposed
from ..blocks.online_softmax import Scores
from ..blocks.plain_rows import PlainTensors
from ..blocks.ptx import add_one_to_global, add_to_global, pack
from ..blocks.tile_scheduler import LANES
from ..blocks.warp import broadcast
from ..config import ROWS_PER_MMA, column_block
from .gemms_16bit import Operand

COLUMNS_OF_LDMATRIX = 16  # four matrices of 8 x 8
COLUMNS_OF_STORE = 32  # epilogue.store_rows


class Mmas(NamedTuple):
    """Each a GEMM of all warps."""

    s: cute.TiledMma  # S^T = K Q^T and dP^T = V dO^T: (keys, queries)
    dkv: cute.TiledMma  # dV += P^T dO and dK += dS^T Q: (keys, head_dim)
    dq: cute.TiledMma  # dQ = dS K: (queries, head_dim)


class Buffers(NamedTuple):
    """Shared memory: (rows, columns, count) each."""

    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    ds: cute.Tensor  # transposed: (keys, queries)
    p: cute.Tensor | None
    stats: cute.Tensor  # (2 * tile_m, count)


class BackwardWarps(Bundle, AdditionTurns, GradientScores):
    """dK and dV of a tile in registers, and S, P, dP, dS and dQ of a step."""

    def __init__(
        self,
        kernel,
        buffers: Buffers,
        mmas: Mmas,
        softmax_scale: Float32,
        scores: Scores,
        accumulator: Accumulator,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        plain: PlainTensors | None,
    ):
        config = self.config = kernel.config
        self.kernel, self.buffers, self.mmas = kernel, buffers, mmas
        self.softmax_scale, self.scores, self.accumulator = softmax_scale, scores, accumulator
        self.mdK, self.mdV, self.plain = mdK, mdV, plain
        self.tile_m, self.tile_n = kernel.tile_m, kernel.tile_n
        self.is_capped = scores.tanh_scale is not None
        self.thread = cute.arch.thread_idx()[0]
        self.lane, self.lane_in_quad = self.thread % LANES, self.thread % 4
        self.warp_id = cute.arch.make_warp_uniform(self.thread // LANES)

        # in S and dP: the first of this thread's rows of the tile, and its warp's first query
        s_warps = config.s_key_warps
        self.rows_between = ROWS_PER_MMA * s_warps
        self.m_tiles = self.tile_n // self.rows_between
        self.row_in_tile = self.warp_id % s_warps * ROWS_PER_MMA + self.lane // 4
        self.queries_of_warp = self.tile_m * s_warps // config.num_warps
        self.first_query = self.warp_id // s_warps * self.queries_of_warp

        self._make_operands()
        _, dkv, _ = slices = tuple(mma.get_slice(self.thread) for mma in mmas)
        self.shape_s = slices[0].partition_shape_C((self.tile_n, self.tile_m))
        self.shape_dq = slices[2].partition_shape_C((self.tile_m, kernel.head_dim // config.dq_pieces))
        self.acc_dk = cute.make_rmem_tensor(dkv.partition_shape_C((self.tile_n, kernel.head_dim)), Float32)
        self.acc_dv = cute.make_rmem_tensor(dkv.partition_shape_C((self.tile_n, kernel.head_dim_v)), Float32)
        self.rP, self.rdS = (cute.make_rmem_tensor(self.shape_s, kernel.dtype) for _ in range(2))
        self.p_words, self.ds_words = (cute.recast_tensor(r, Int32) for r in (self.rP, self.rdS))
        if self.is_capped:
            # P (1 - tanh^2), in the order of p_words
            self.capped_words = cute.make_rmem_tensor((cute.size(self.p_words),), Int32)
        # of this thread's queries, see `read_stats`
        self.minus_lse, self.minus_delta = (
            cute.make_rmem_tensor((4, self.queries_of_warp // 16), Float32) for _ in range(2)
        )
        self.begin_turns()

    def _make_operands(self):
        """Fragments of the GEMMs; those whose sum goes over the rows of a tile are transposed on the way."""
        mmas, buffers = self.mmas, self.buffers
        k, v, q, do, ds, p, _ = buffers
        self.k_of_s, self.q_of_s = self._operand_a(mmas.s, k, False), self._operand_b(mmas.s, q, False)
        self.v_of_dp, self.do_of_dp = self._operand_a(mmas.s, v, False), self._operand_b(mmas.s, do, False)
        self.do_of_dv, self.q_of_dk = self._operand_b(mmas.dkv, do, True), self._operand_b(mmas.dkv, q, True)
        self.ds_of_dq, self.k_of_dq = self._operand_a(mmas.dq, ds, True), self._pieces_of_k(k)
        if not self.config.p_in_registers:
            self.p_of_dv, self.ds_of_dk = self._operand_a(mmas.dkv, p, False), self._operand_a(mmas.dkv, ds, False)

    def _operand_a(self, tiled_mma: cute.TiledMma, tiles: cute.Tensor, is_transposed: bool) -> Operand:
        tiles, atom = self._source(tiles, is_transposed)
        thr = tiled_mma.get_slice(self.thread)
        fragment = thr.make_fragment_A(thr.partition_A(tiles[None, None, 0]))
        return self._operand(cute.make_tiled_copy_A(atom, tiled_mma), tiles, fragment)

    def _operand_b(self, tiled_mma: cute.TiledMma, tiles: cute.Tensor, is_transposed: bool) -> Operand:
        tiles, atom = self._source(tiles, is_transposed)
        thr = tiled_mma.get_slice(self.thread)
        fragment = thr.make_fragment_B(thr.partition_B(tiles[None, None, 0]))
        return self._operand(cute.make_tiled_copy_B(atom, tiled_mma), tiles, fragment)

    def _pieces_of_k(self, k: cute.Tensor) -> list:
        """Operand B of dQ = dS K, so many columns at a time that dQ fits into registers."""
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
        copy = tiled_copy.get_slice(self.thread)
        return Operand(copy, copy.partition_S(tiles), copy.retile(fragment), fragment)

    # ---------------------------------------------------------------- a step

    @cute.jit
    def begin(self):
        self.acc_dk.fill(0.0)
        self.acc_dv.fill(0.0)

    @cute.jit
    def step(self, tile: KeyTile, head: Int32, m_block: Int32, buffer: Int32):
        """A query block, whose Q, dO, lse and delta are in the buffer."""
        p_in_registers = cutlass.const_expr(self.config.p_in_registers)
        seen = self.look_at_turn(tile, head, m_block)
        self.read_stats(self.minus_lse, buffer, 0)
        acc_s = cute.make_rmem_tensor(self.shape_s, Float32)
        # S - lse, but a softcap is applied to S alone; dP - delta
        self.begin_columns(acc_s, None if cutlass.const_expr(self.is_capped) else self.minus_lse)
        self.gemm(self.mmas.s, acc_s, self.k_of_s, 0, self.q_of_s, buffer)
        self.exponentials(acc_s, tile, m_block)
        pack(acc_s, self.rP)
        if cutlass.const_expr(not p_in_registers):
            self.write(self.p_words, self.buffers.p)
        self.read_stats(self.minus_delta, buffer, 1)
        acc_dp = cute.make_rmem_tensor(self.shape_s, Float32)
        self.begin_columns(acc_dp, self.minus_delta)
        self.gemm(self.mmas.s, acc_dp, self.v_of_dp, 0, self.do_of_dp, buffer)
        self.make_ds(acc_dp, True)
        self.write(self.ds_words, self.buffers.ds)
        if cutlass.const_expr(p_in_registers):
            self.gemm_registers(self.mmas.dkv, self.acc_dv, self.rP, self.do_of_dv, buffer)
        cute.arch.sync_threads()
        if cutlass.const_expr(not p_in_registers):
            self.gemm(self.mmas.dkv, self.acc_dv, self.p_of_dv, 0, self.do_of_dv, buffer)
        for piece in cutlass.range_constexpr(self.config.dq_pieces):
            acc_dq = cute.make_rmem_tensor(self.shape_dq, Float32)
            acc_dq.fill(0.0)
            self.gemm(self.mmas.dq, acc_dq, self.ds_of_dq, 0, self.k_of_dq[piece], 0)
            if cutlass.const_expr(piece == 0):
                self.take_turn(tile, head, m_block, seen)
            cute.arch.sync_warp()  # ptxas would begin dK before, and keep too much in registers
            self.add_dq(acc_dq, tile, head, m_block, piece)
        if cutlass.const_expr(p_in_registers):
            self.gemm_registers(self.mmas.dkv, self.acc_dk, self.rdS, self.q_of_dk, buffer)
        else:
            self.gemm(self.mmas.dkv, self.acc_dk, self.ds_of_dk, 0, self.q_of_dk, buffer)

    @cute.jit
    def gemm(
        self, tiled_mma: cute.TiledMma, acc: cute.Tensor, a: Operand, a_buffer: Int32, b: Operand, b_buffer: Int32
    ):
        """acc += a b, both from shared memory."""
        for k in cutlass.range_constexpr(cute.size(b.fragment, mode=[2])):
            a.load(k, a_buffer)
            b.load(k, b_buffer)
            cute.gemm(tiled_mma, acc, a.fragment[None, None, k], b.fragment[None, None, k], acc)

    @cute.jit
    def gemm_registers(self, tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: Operand, buffer: Int32):
        """acc += a b, a as it lies in the registers of an accumulator."""
        a = as_operand_a_of_mma(a)
        for k in cutlass.range_constexpr(cute.size(b.fragment, mode=[2])):
            b.load(k, buffer)
            cute.gemm(tiled_mma, acc, a[None, None, k], b.fragment[None, None, k], acc)

    @cute.jit
    def read_stats(self, target: cute.Tensor, buffer: Int32, which: cutlass.Constexpr[int]):
        """-lse (0) or -delta (1) of this thread's queries, four of each sixteen: `stats_position`."""
        count = self.queries_of_warp // 16
        first = which * self.tile_m + self.first_query + 4 * self.lane_in_quad
        source = cute.domain_offset((first,), self.buffers.stats[None, buffer])
        source = cute.make_tensor(source.iterator.align(16), cute.make_layout((4, count), stride=(1, 16)))
        for j in cutlass.range_constexpr(count):
            cute.autovec_copy(source[None, j], target[None, j])

    @cute.jit
    def begin_columns(self, acc: cute.Tensor, stats: cute.Tensor | None):
        """An accumulator with a value of `read_stats` in each of its columns; None: zeros."""
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = Float32(0.0) if cutlass.const_expr(stats is None) else of_column(stats, i, self.m_tiles)

    @cute.jit
    def write(self, words: cute.Tensor, tiles: cute.Tensor):
        """P or dS, in pairs of 16 bits, to where all warps read it after the next barrier.

        Rows 8 apart have their 16-byte pieces exchanged alike, so all addresses are one of at most eight plus a
        constant. From the layout the compiler would make an address for each word, and keep them through the loop.
        """
        columns = column_block(self.tile_m)
        row_bytes, pieces = 2 * columns, columns // 8  # 8 columns each
        start = tiles.iterator.toint() + self.row_in_tile * row_bytes + 4 * self.lane_in_quad
        first_piece = self.first_query // 8
        swizzle = self.lane // 4 * row_bytes // 128 % pieces
        start += first_piece // pieces * (self.tile_n * row_bytes)
        shape = (2, self.m_tiles, max(1, self.queries_of_warp // columns))
        stride = (8 * row_bytes // 4, self.rows_between * row_bytes // 4, self.tile_n * row_bytes // 4)
        for piece in cutlass.range_constexpr(min(pieces, self.queries_of_warp // 8)):
            address = start + 16 * ((first_piece % pieces) ^ piece ^ swizzle)
            pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4)
            target = cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))
            for block in cutlass.range_constexpr(shape[2]):
                for i, r in itertools.product(range(self.m_tiles), range(2)):
                    target[r, i, block] = words[r + 2 * (i + self.m_tiles * (block * pieces + piece))]

    # ---------------------------------------------------------------- dQ

    def dq_part(self, tile: KeyTile, head: Int32, m_block: Int32) -> Int32:
        """Number of this warp's part of a dQ among the turns."""
        number = self.kernel.m_block_number(self.accumulator, tile, head, m_block)
        return number * self.config.num_warps + self.warp_id

    @cute.jit
    def add_dq(self, acc_dq: cute.Tensor, tile: KeyTile, head: Int32, m_block: Int32, piece: cutlass.Constexpr[int]):
        """The accumulator is laid out as [16 rows][8 columns][lane], four values a lane, or, where they are added one
        by one, [16 rows][8 columns][value][lane]: a warp's additions lie together."""
        row_warps, column_blocks = self.config.dq_query_warps, self.kernel.head_dim // 8
        column_warps, together = self.config.num_warps // row_warps, COLUMNS_OF_LDMATRIX // 8
        number = self.kernel.m_block_number(self.accumulator, tile, head, m_block)
        first_block = self.warp_id % row_warps * column_blocks + self.warp_id // row_warps * together
        lane_offset = self.lane * 4 if cutlass.const_expr(self.config.vector_adds) else self.lane
        start = self.accumulator.dq.iterator + (
            Int64(number) * (self.tile_m * self.kernel.head_dim) + first_block * 4 * LANES + lane_offset
        )
        blocks_of_piece = column_blocks // self.config.dq_pieces
        for j in cutlass.range_constexpr(blocks_of_piece // column_warps):
            column = piece * blocks_of_piece + j // together * together * column_warps + j % together
            for i in cutlass.range_constexpr(self.tile_m // (ROWS_PER_MMA * row_warps)):
                target = start + (i * row_warps * column_blocks + column) * 4 * LANES
                values = [acc_dq[(c, i, j)] for c in range(4)]
                if cutlass.const_expr(self.config.vector_adds):
                    add_to_global(target, values)
                else:
                    for c in cutlass.range_constexpr(4):
                        add_one_to_global(target + c * LANES, values[c])

    @cute.jit
    def end_turns(self):
        if cutlass.const_expr(self.kernel.is_deterministic):
            self.finish_dq()

    # ---------------------------------------------------------------- end of a tile

    @cute.jit
    def store(self, tile: KeyTile):
        """dK and dV of a finished tile."""
        dv = self.store_gradient(tile, self.acc_dv, self.mdV, Float32(1.0))
        dk = self.store_gradient(tile, self.acc_dk, self.mdK, self.softmax_scale)
        if cutlass.const_expr(self.plain is not None):
            # rows that are written again may be partly another warp's
            cute.arch.sync_threads()
            self.recompute(tile, dv, self.mdV, Float32(1.0), True)
            self.recompute(tile, dk, self.mdK, self.softmax_scale, False)

    def first_key(self, tile: KeyTile, i: int) -> Int32:
        """In the sequence, of the i-th 16 keys of a warp in dK and dV."""
        key_warps = self.config.dkv_key_warps
        row = self.warp_id % key_warps * ROWS_PER_MMA + i * ROWS_PER_MMA * key_warps
        return tile.n_block * self.tile_n + row

    @cute.jit
    def store_gradient(self, tile: KeyTile, acc: cute.Tensor, m: cute.Tensor, scale: Float32) -> list:
        """Returns: of each 16 keys of the warp `plain_gradients.nan_rows`, if pairs may be hidden."""
        key_warps = self.config.dkv_key_warps
        column_warps, together = self.config.num_warps // key_warps, COLUMNS_OF_STORE // 8
        gradient = self.kernel.at_head(m, m, tile.head_kv, tile.place_k)
        weights = cute.make_rmem_tensor((2,), Float32)
        weights.fill(scale)
        found = []
        for i in cutlass.range_constexpr(self.tile_n // (ROWS_PER_MMA * key_warps)):
            keys = [self.first_key(tile, i) + self.lane // 4 + 8 * r for r in range(2)]
            is_row = [key < tile.rows_k for key in keys]
            rows = [gradient[key, None] for key in keys]
            for j in cutlass.range_constexpr(cute.size(acc, mode=[2]) // together):
                first_block = (j * column_warps + self.warp_id // key_warps) * together
                part = self._part(acc, i, j * together, together)
                epilogue.store_rows(part, weights, rows, is_row, self.lane_in_quad, first_block)
            if cutlass.const_expr(self.plain is not None):
                part = self._part(acc, i, 0, cute.size(acc, mode=[2]))
                found.append(plain_gradients.nan_rows(part, is_row))
        return found

    def _part(self, acc: cute.Tensor, i: int, first: int, count: int) -> cute.Tensor:
        """(2 rows, columns) of an accumulator's i-th 16 rows and `count` of its 8-column blocks."""
        shape, stride = acc.layout.shape, acc.layout.stride
        layout = cute.make_layout((shape[0], 1, count), stride=(stride[0], 0, stride[2]))
        return rows_and_columns(cute.make_tensor(acc.iterator + i * stride[1] + first * stride[2], layout))

    @cute.jit
    def recompute(self, tile: KeyTile, found: list, m: cute.Tensor, scale: Float32, of_v: cutlass.Constexpr[bool]):
        """The rows in which `store_gradient` has found a NaN."""
        gradient = self.kernel.at_head(m, m, tile.head_kv, tile.place_k)
        for i in cutlass.range_constexpr(len(found)):
            if found[i][0] | found[i][1] != 0:
                first_key = cute.arch.make_warp_uniform(broadcast(self.first_key(tile, i), 0))
                others = (self.plain, self.accumulator, self.scores, of_v)
                self.kernel.recompute_keys(tile, gradient, scale, first_key, found[i], *others)

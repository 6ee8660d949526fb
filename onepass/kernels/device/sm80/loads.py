"""Loads of tiles of rows from global to swizzled shared memory, with zeros where there is nothing to read."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import LoadCacheMode, cpasync

from ....geometry.integers import maximum, minimum
from ....geometry.pack_gqa import unpack_row
from ...config import threads_per_row
from ..blocks.memory.untraced import Untraced
from ..blocks.tiles.paged import PagedRows

ASYNC_BYTES = (16, 8, 4)  # bytes that one cp.async can copy


class RowLoader(Untraced):
    """All threads of a thread block loading tiles (rows, columns) into the buffers of one tensor.

    With 16-byte copies, eight threads take 128 contiguous bytes of a row (four take 64 bytes where the rows of shared
    memory are that short), and the next eight take the next row: whole sectors from global memory, and with the swizzle
    no bank conflict. Narrower copies have more threads in a row. Copies of 2 bytes pass through registers, and `load`
    waits for them.

    Args:
        buffers: (rows, columns, count) in shared memory.
        head_dim: columns that global memory has; the other columns become zeros.
        vector_bytes: bytes of a copy.
    """

    def __init__(self, buffers: cute.Tensor, head_dim: int, vector_bytes: int, num_threads: int, thread: Int32):
        self.shape = rows, columns = tuple(cute.size(buffers, mode=[i]) for i in range(2))
        self.head_dim, dtype = head_dim, buffers.element_type
        self.is_async = vector_bytes in ASYNC_BYTES
        vector, in_a_row = vector_bytes * 8 // dtype.width, threads_per_row(columns, dtype.width // 8, vector_bytes)
        self.step_columns = vector * in_a_row
        if self.is_async:
            # only copies of 16 bytes can bypass L1
            op = cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL if vector_bytes == 16 else LoadCacheMode.ALWAYS)
        else:
            op = cute.nvgpu.CopyUniversalOp()
        atom = cute.make_copy_atom(op, dtype, num_bits_per_copy=8 * vector_bytes)
        threads = cute.make_ordered_layout((num_threads // in_a_row, in_a_row), order=(1, 0))
        tiled_copy = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, vector)))
        self.copy = tiled_copy.get_slice(thread)
        self.target = self.copy.partition_D(buffers)  # (vector, row, column step, buffer)
        self.coordinates = self.copy.partition_S(cute.make_identity_tensor((rows, columns)))

    @cute.jit
    def load(self, m: cute.Tensor | PagedRows, first: Int32, limit: Int32 | None, buffer: Int32):
        """Load rows first, first + 1, .. of m (seqlen, head_dim) into a buffer; the caller commits the group.

        Args: limit: rows from this one on are not read, and zeros are written instead; None: all rows exist.
        """
        if cutlass.const_expr(isinstance(m, PagedRows)):
            self._load_paged(m, first, limit, buffer)
        else:
            self._load_rows(m, first, limit, buffer)

    @cute.jit
    def _load_rows(self, m: cute.Tensor, first: Int32, limit: Int32 | None, buffer: Int32):
        moved = cute.domain_offset((first, 0), m)
        rows = cute.make_tensor(moved.iterator, cute.make_layout(self.shape, stride=m.stride))
        source = self.copy.partition_S(rows)
        num_rows, num_steps = (cute.size(source, mode=[i]) for i in (1, 2))
        for i in cutlass.range_constexpr(num_rows):
            if cutlass.const_expr(limit is None and self.head_dim == self.shape[1]):
                self._copy_row(source[None, i, None], self.target[None, i, None, buffer], None)
            else:
                is_there = Boolean(True)
                if cutlass.const_expr(limit is not None):
                    is_there = first + self.coordinates[0, i, 0][0] < limit
                predicate = cute.make_rmem_tensor((1, num_steps), Boolean)
                for b in cutlass.range_constexpr(num_steps):
                    predicate[0, b] = is_there
                    if cutlass.const_expr(self.head_dim < (b + 1) * self.step_columns):
                        predicate[0, b] = is_there and self.coordinates[0, i, b][1] < self.head_dim
                self._copy_row(source[None, i, None], self.target[None, i, None, buffer], predicate)

    @cute.jit
    def _load_paged(self, m: PagedRows, first: Int32, limit: Int32 | None, buffer: Int32):
        """`load` from pages: each thread finds where each of its rows lies."""
        num_rows, num_steps = (cute.size(self.coordinates, mode=[i]) for i in (1, 2))
        for i in cutlass.range_constexpr(num_rows):
            row = self.coordinates[0, i, 0][0]
            key, is_there = first + row, Boolean(True)
            if cutlass.const_expr(limit is not None):
                is_there = key < limit
                key = maximum(minimum(key, limit - 1), 0)
            predicate = cute.make_rmem_tensor((1, num_steps), Boolean)
            for b in cutlass.range_constexpr(num_steps):
                predicate[0, b] = is_there
                if cutlass.const_expr(self.head_dim < (b + 1) * self.step_columns):
                    predicate[0, b] = is_there and self.coordinates[0, i, b][1] < self.head_dim
            source = self._as_every_row(m.row(key, row))
            self._copy_row(source[None, i, None], self.target[None, i, None, buffer], predicate)

    def _as_every_row(self, row: cute.Tensor) -> cute.Tensor:
        """The source of a copy all rows of which are the given one."""
        return self.copy.partition_S(
            cute.make_tensor(row.iterator, cute.make_layout(self.shape, stride=(0, row.stride[0])))
        )

    @cute.jit
    def load_packed(self, m: cute.Tensor, group: cutlass.Constexpr[int], first: Int32, limit: Int32):
        """Load positions first, first + 1, .. of m ((group, seqlen), head_dim) into buffer 0.

        The rows are (position, head in the group), see geometry/pack_gqa.py. Positions from `limit` on become zeros.
        """
        num_rows, num_steps = (cute.size(self.coordinates, mode=[i]) for i in (1, 2))
        for i in cutlass.range_constexpr(num_rows):
            position, head, is_used = unpack_row(self.coordinates[0, i, 0][0], group, self.shape[0])
            rows = self._as_every_row(m[(head, first + position), None])
            predicate = cute.make_rmem_tensor((1, num_steps), Boolean)
            for b in cutlass.range_constexpr(num_steps):
                predicate[0, b] = is_used and first + position < limit
                if cutlass.const_expr(self.head_dim < (b + 1) * self.step_columns):
                    predicate[0, b] = predicate[0, b] and self.coordinates[0, i, b][1] < self.head_dim
            self._copy_row(rows[None, i, None], self.target[None, i, None, 0], predicate)

    @cute.jit
    def _copy_row(self, source: cute.Tensor, target: cute.Tensor, predicate: cute.Tensor | None):
        if cutlass.const_expr(self.is_async):
            cute.copy(self.copy, source, target, pred=predicate)
        else:
            row = cute.make_rmem_tensor(source.shape, source.element_type)
            row.fill(0.0)
            cute.copy(self.copy, source, row, pred=predicate)
            cute.copy(self.copy, row, target)

"""Tiles of rows from global to swizzled shared memory by 16-byte cp.async, zeros where there is nothing to read."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import LoadCacheMode, cpasync

from ..blocks.bundle import Bundle
from ..config import column_block

VECTOR = 8  # 16-bit elements of a 16-byte copy


class RowLoader(Bundle):
    """All threads of a thread block loading tiles (rows, columns) into the buffers of one tensor.

    Eight threads take 128 contiguous bytes of a row (four 64 bytes where the rows of shared memory are that short), the
    next eight those of the next row: whole sectors from global memory, and with the swizzle no bank conflict.

    Args:
        buffers: (rows, columns, count) in shared memory.
        head_dim: columns that global memory has; zeros are put into the others.
    """

    def __init__(self, buffers: cute.Tensor, head_dim: int, num_threads: int, thread: Int32):
        self.shape = rows, columns = tuple(cute.size(buffers, mode=[i]) for i in range(2))
        self.head_dim = head_dim
        threads_per_row = column_block(columns) // VECTOR
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL), buffers.element_type, num_bits_per_copy=128
        )
        threads = cute.make_ordered_layout((num_threads // threads_per_row, threads_per_row), order=(1, 0))
        tiled_copy = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, VECTOR)))
        self.copy = tiled_copy.get_slice(thread)
        self.target = self.copy.partition_D(buffers)  # (vector, row, column block, buffer)
        self.places = self.copy.partition_S(cute.make_identity_tensor((rows, columns)))

    @cute.jit
    def load(self, m: cute.Tensor, first: Int32, limit: Int32 | None, buffer: Int32):
        """Rows first, first + 1, .. of m (seqlen, head_dim) into a buffer; the caller commits the group.

        Args: limit: rows from this one on are not read, zeros are written instead; None: no row is past it.
        """
        moved = cute.domain_offset((first, 0), m)
        rows = cute.make_tensor(moved.iterator, cute.make_layout(self.shape, stride=m.stride))
        source = self.copy.partition_S(rows)
        num_rows, num_blocks = (cute.size(source, mode=[i]) for i in (1, 2))
        for i in cutlass.range_constexpr(num_rows):
            target = self.target[None, i, None, buffer]
            if cutlass.const_expr(limit is None and self.head_dim == self.shape[1]):
                cute.copy(self.copy, source[None, i, None], target)
            else:
                is_there = Boolean(True)
                if cutlass.const_expr(limit is not None):
                    is_there = first + self.places[0, i, 0][0] < limit
                predicate = cute.make_rmem_tensor((1, num_blocks), Boolean)
                for b in cutlass.range_constexpr(num_blocks):
                    predicate[0, b] = is_there
                    # only the last block of columns can be cut
                    if cutlass.const_expr(self.head_dim < self.shape[1]):
                        predicate[0, b] = is_there and self.places[0, i, b][1] < self.head_dim
                cute.copy(self.copy, source[None, i, None], target, pred=predicate)

"""Writes new keys and values into a cache, and rotates them and the queries on the way.

    grid (row, 1, tensor)    tensor 0: K, 1: V, 2: Q; rows of the longer of seqlen_new and seqlen_q, entry by entry

A thread block has one row of one of the tensors. Rows that a length or a page table would put outside of the cache are
not written.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32

from ....geometry.integers import maximum, minimum, select
from ...arguments import AppendArguments
from ..blocks.memory.e4m3 import pack_two
from ..blocks.memory.ptx import quotient
from ..entry import takes

NUM_THREADS = 128
NUM_TENSORS = 3


class Append:
    """One compiled append: (dtypes, head dims, rotary columns and order, what there is) -> device code.

    Args:
        interleaved: rotated pairs are neighbors; otherwise one column of a pair is in the first half of the rotated
            columns and the other in the second half.
        vector_bytes: bytes of a load and a store, which divide addresses, strides and head dims, and, unless
            interleaved, half of the rotated columns.
        is_e4m3: the cache is e4m3, passed as pairs of numbers, (.., dim / 2) int16.
        descales_by_page: each page has descales; otherwise each batch entry has, for blocks of keys.
    """

    def __init__(self, interleaved: bool, vector_bytes: int, is_e4m3: bool = False, descales_by_page: bool = False):
        self.interleaved, self.vector_bytes = interleaved, vector_bytes
        self.is_e4m3, self.descales_by_page = is_e4m3, descales_by_page

    @takes(AppendArguments)
    def __call__(self, a: AppendArguments, stream: cuda.CUstream):
        self.kernel(a._replace(num_blocks=None)).launch(
            grid=[a.num_blocks, 1, NUM_TENSORS], block=[NUM_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, a: AppendArguments):
        number, _, which = cute.arch.block_idx()
        entry, row = number // a.rows, number % a.rows
        filled = a.cache_seqlens[entry]
        if cutlass.const_expr(a.k_new is not None):
            descales = a.k_descale, a.v_descale
            page, cache_row, exists = self.locate(a.k_cache, a.page_table, entry, filled + row)  # for K and V alike
            for i, (new, cache) in enumerate(((a.k_new, a.k_cache), (a.v_new, a.v_cache))):
                if which == i and row < a.seqlen_new and exists:
                    angles = (a.cos, a.sin) if i == 0 else (None, None)
                    source, target = new[entry, row, None, None], cache[page, cache_row, None, None]
                    if cutlass.const_expr(self.is_e4m3):
                        descale = descales[i]
                        if cutlass.const_expr(descale is not None):
                            block = 0 if a.kv_block is None else (filled + row) // a.kv_block
                            descale = descale[page if self.descales_by_page else entry, None, block]
                        self.round(source, target, *angles, filled + row, descale)
                    else:
                        self.move(source, target, *angles, filled + row)
        if cutlass.const_expr(a.q is not None):
            seqlen_q = a.q.shape[1]
            if which == 2 and row < seqlen_q:
                position = filled + a.seqlen_new - seqlen_q + row
                self.move(a.q[entry, row, None, None], a.q_out[entry, row, None, None], a.cos, a.sin, position)

    @cute.jit
    def locate(self, cache: cute.Tensor, page_table: cute.Tensor | None, entry: Int32, position: Int32) -> tuple:
        """The page (or batch entry) and the row of a position in the cache, and whether the cache has that row."""
        if cutlass.const_expr(page_table is None):
            return entry, position, position >= 0 and position < cache.shape[1]
        page_size = cache.shape[1]
        exists = position >= 0 and position < page_table.shape[1] * page_size
        safe = select(exists, position, Int32(0))
        page = page_table[entry, safe // page_size]
        return page, safe % page_size, exists and page >= 0 and page < cache.shape[0]

    @cute.jit
    def move(
        self,
        source: cute.Tensor,
        target: cute.Tensor,
        cos: cute.Tensor | None,
        sin: cute.Tensor | None,
        position: Int32,
    ):
        """target = source, (num_heads, dim) each, with the first columns rotated; a thread takes vectors of columns."""
        (num_heads, dim), dtype = source.shape, source.element_type
        width = self.vector_bytes * 8 // dtype.width
        sources, targets = (cute.flat_divide(t, (1, width))[0, None, None, None] for t in (source, target))
        values = cute.make_rmem_tensor((width,), dtype)
        for i in cutlass.range(cute.arch.thread_idx()[0], num_heads * (dim // width), NUM_THREADS, unroll=1):
            head, vector = i // (dim // width), i % (dim // width)
            cute.autovec_copy(sources[None, head, vector], values)
            if cutlass.const_expr(cos is not None):
                self.rotate(values, sources[None, head, None], vector, cos, sin, position)
            cute.autovec_copy(values, targets[None, head, vector])

    @cute.jit
    def round(
        self,
        source: cute.Tensor,
        target: cute.Tensor,
        cos: cute.Tensor | None,
        sin: cute.Tensor | None,
        position: Int32,
        descale: cute.Tensor | None,
    ):
        """`move` to e4m3, after a division by the head's descale. Args: target: (num_heads, dim / 2) pairs."""
        (num_heads, dim), dtype = source.shape, source.element_type
        width = self.vector_bytes * 8 // dtype.width
        count = 2 if width == 1 else 1  # vectors of a thread, which has at least a pair of values
        num_pairs = width * count // 2
        sources = cute.flat_divide(source, (1, width))[0, None, None, None]
        targets = cute.flat_divide(target, (1, num_pairs))[0, None, None, None]
        values = cute.make_rmem_tensor((width,), dtype)
        floats, pairs = cute.make_rmem_tensor((width * count,), Float32), cute.make_rmem_tensor((num_pairs,), Int16)
        groups = dim // (width * count)
        for i in cutlass.range(cute.arch.thread_idx()[0], num_heads * groups, NUM_THREADS, unroll=1):
            head, group = i // groups, i % groups
            for j in cutlass.range_constexpr(count):
                vector = group * count + j
                cute.autovec_copy(sources[None, head, vector], values)
                if cutlass.const_expr(cos is not None):
                    self.rotate(values, sources[None, head, None], vector, cos, sin, position)
                for e in cutlass.range_constexpr(width):
                    floats[j * width + e] = values[e].to(Float32)
                    if cutlass.const_expr(descale is not None):
                        floats[j * width + e] = quotient(floats[j * width + e], descale[head])
            for p in cutlass.range_constexpr(num_pairs):
                pairs[p] = pack_two(floats[2 * p], floats[2 * p + 1])
            cute.autovec_copy(pairs, targets[None, head, group])

    @cute.jit
    def rotate(
        self, values: cute.Tensor, row: cute.Tensor, vector: Int32, cos: cute.Tensor, sin: cute.Tensor, position: Int32
    ):
        """Rotate values, which are row[:, vector], in place, if their columns are to be rotated."""
        width, half, dtype = cute.size(values), cos.shape[1], values.element_type
        angle = minimum(maximum(position, 0), cos.shape[0] - 1)
        first = vector * width
        others = cute.make_rmem_tensor((width,), dtype)
        if cutlass.const_expr(not self.interleaved):
            step = half // width
            cute.autovec_copy(row[None, select(vector < step, vector + step, maximum(vector - step, 0))], others)
        elif cutlass.const_expr(width > 1):
            for j in cutlass.range_constexpr(width):
                others[j] = values[j ^ 1]
        else:
            others[0] = row[0, minimum(vector ^ 1, row.shape[1] - 1)]
        for j in cutlass.range_constexpr(width):
            column = first + j
            if cutlass.const_expr(self.interleaved):
                pair, is_second = minimum(column // 2, half - 1), column % 2 == 1
            else:
                is_second = column >= half
                pair = minimum(select(is_second, column - half, column), half - 1)
            product = others[j].to(Float32) * sin[angle, pair].to(Float32)
            turned = values[j].to(Float32) * cos[angle, pair].to(Float32) + (product if is_second else -product)
            values[j] = turned.to(dtype) if column < 2 * half else values[j]

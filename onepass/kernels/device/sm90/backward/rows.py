"""What is done for query rows while tiles are computed: statistics and zeros before them, dq after them.

Two warps of each thread block that have nothing else to do go through blocks of query rows, which they draw from
counters in global memory:

    before    -lse and -delta of the rows, and zeros for the sums of dQ        in the order in which tiles need them
    after     dq = softmax_scale * sum, in 16 bits                             when all tiles of the head have added

Consumers help where somebody would wait for them: before their first tile, and after their last one. As kernels of
their own, before and after the main one, the two take 75 and 49 us (H200, 16k rows of 2048 columns, any length).

Who waits for whom. A tile waits for the rows of its head, all of which are drawn by warps that run and wait for nobody.
(A tile whose keys no query sees does not wait, so dq waits for the rows of its head as well.) After its last tile a
thread block waits for the tiles of all heads, but only once all thread blocks have started: others may have the
multiprocessor that one of them needs (other streams, NCCL, MPS). If some have not, it leaves its share of dq to those.
So no launch depends on a thread block that has not begun.

A row of dq to which hidden pairs have brought a NaN is computed again from the pairs alone that it sees. Background
warps have no registers for that: they make a list of blocks, which consumers go through at the end.

The counters are zero between launches: the last warp that needs them puts the zeros back.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync

from .....geometry.integers import ceil_div, minimum
from .....geometry.tile_scheduler import LANES
from ....config import PROGRESS_HEADER
from ...blocks.memory import warp
from ...blocks.memory.layouts import rows_first, rows_first_of_lse
from ...blocks.memory.ptx import (
    copy_bulk,
    copy_of,
    draw,
    increment,
    look_at,
    pack_pair,
    publish,
    store_matrices,
    wait_until_equal,
    wait_while_zero,
)
from ...blocks.memory.row_stats import row_products, write_stats
from ...blocks.memory.untraced import Untraced
from ...blocks.repair import gradients as repair_gradients
from ...blocks.repair.rows import SourceTensors
from ...blocks.softmax.mask import Geometry
from ...blocks.tiles.packed import used_keys
from ..forward.tile import WARPS

FIRST_WARP = 2  # the first of the background warps in the producer's warpgroup; the last one is its last warp
VECTOR = 8  # elements of a load
BOX_ROWS, MOST_BOX_COLUMNS = 16, 32  # of dq, which a warp converts at a time
LOADS_AHEAD = 8  # of a consumer, which has registers for them


class Progress(NamedTuple):
    """Counters of a launch, all zero before and after it.

    Attributes:
        words: int32: the header below; then three for each kv head of all batch entries: how many of its blocks of rows
            are prepared, how many of its tiles are done, and the list of heads that are done, in that order, each plus
            one; then the list of blocks with a NaN in dq.
        num_heads: kv heads of all batch entries.
        blocks_of_head, blocks_of_group, heads_of_entry: blocks of a query head, and of those of a kv head; query heads.
    """

    words: cute.Tensor
    words_after: cute.Tensor  # these from `drawn_after` on: an address that needs no register
    num_heads: Int32
    blocks_of_head: cute.FastDivmodDivisorV2
    blocks_of_group: cute.FastDivmodDivisorV2
    heads_of_entry: cute.FastDivmodDivisorV2

    def drawn_before(self) -> cute.Pointer:
        """How many blocks have been drawn to be prepared."""
        return self.words.iterator

    def started(self) -> cute.Pointer:
        """Thread blocks that have started."""
        return self.words.iterator + 1

    def drawn_after(self) -> cute.Pointer:
        """How many blocks have been drawn to be finished."""
        return self.words_after.iterator

    def heads_done(self) -> cute.Pointer:
        """Heads in the list of those that are done."""
        return self.words_after.iterator + 1

    def written(self) -> cute.Pointer:
        """Blocks whose dq is written."""
        return self._anew(self.words_after) + 2

    def with_nan(self) -> cute.Pointer:
        """Blocks in the list of those with a NaN in dq."""
        return self._anew(self.words_after) + 3

    def drawn_again(self) -> cute.Pointer:
        """How many of these have been drawn to be repaired."""
        return self.words_after.iterator + 4

    def finished(self) -> cute.Pointer:
        """Warps that need the counters no more."""
        return self.words_after.iterator + 5

    @staticmethod
    def _anew(words: cute.Tensor) -> cute.Pointer:
        """The address of words, from which no sum is kept in registers."""
        return cute.make_ptr(Int32, copy_of(words.iterator.toint()), cute.AddressSpace.gmem, assumed_align=4)

    def _word(self, number: Int32) -> cute.Pointer:
        return self.words.iterator + number

    def prepared(self, head: Int32) -> cute.Pointer:
        return self._word(PROGRESS_HEADER + head)

    def tiles_done(self, head: Int32) -> cute.Pointer:
        return self._word(PROGRESS_HEADER + self.num_heads + head)

    def head_done(self, position: Int32) -> cute.Pointer:
        return self._word(PROGRESS_HEADER + 2 * self.num_heads + position)

    def block_with_nan(self, position: Int32) -> cute.Pointer:
        return self._word(PROGRESS_HEADER + 3 * self.num_heads + position)


class TmaRows(NamedTuple):
    """A copy of boxes of rows and columns by TMA."""

    atom: cute.CopyAtom
    t: cute.Tensor  # coordinates in the tensor (rows, columns, heads, batch)

    def partition(self, box: tuple[int, int], address: Int32, dtype: type[cutlass.Numeric]) -> tuple:
        """A box at an address in shared memory, and [, row of boxes, column of boxes, head, entry] in global memory."""
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=128)
        s = cute.make_tensor(pointer, cute.make_ordered_layout(box, order=(1, 0)))
        g = cute.local_tile(self.t, box, (None, None, None, None))
        return cpasync.tma_partition(self.atom, 0, cute.make_layout(1), *(cute.group_modes(x, 0, 2) for x in (s, g)))


def tma_rows(t: cute.Tensor, box: tuple, op) -> TmaRows:
    layout = cute.make_ordered_layout(box, order=(1, 0))
    return TmaRows(*cpasync.make_tiled_tma_atom(op, t, layout, box))


class RowTensors(NamedTuple):
    """Tensors of query rows, dense: (seqlen_q, head_dim or head_dim_v, num_heads_q, batch)."""

    out: cute.Tensor
    dout: cute.Tensor
    lse: cute.Tensor  # (seqlen_q, 1, num_heads_q, batch) float32
    dlse: cute.Tensor | None
    dq: cute.Tensor
    tma_out: TmaRows  # boxes of as many rows as the scratch of a background warp has room for
    tma_dout: TmaRows
    tma_dq: TmaRows  # boxes of (BOX_ROWS, box_columns)


def make_row_tensors(kernel, out, dout, lse, dlse, dq) -> RowTensors:
    """Args: tensors as the kernel gets them, see BackwardSm90."""
    out, dout, dq = (rows_first(t) for t in (out, dout, dq))
    lse, dlse = (None if t is None else rows_first_of_lse(t) for t in (lse, dlse))
    box = rows_of_scratch(kernel), kernel.head_dim_v
    load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    loads = (tma_rows(t, box, load) for t in (out, dout))
    return RowTensors(out, dout, lse, dlse, dq, *loads, tma_rows(dq, (BOX_ROWS, box_columns(kernel)), store))


def box_columns(kernel) -> int:
    """Columns of dq that a warp converts at a time."""
    return math.gcd(kernel.dq_columns, MOST_BOX_COLUMNS)


def rows_of_scratch(kernel) -> int:
    """Rows of out and of dout that the scratch of a background warp has room for: a power of two."""
    return min(LANES, 1 << (kernel.config.rows_bytes // (4 * kernel.head_dim_v)).bit_length() - 1)


class Scratch(NamedTuple):
    """Shared memory of one warp, through which it reads what it works on: bytes on their way need no registers.

    Each block of rows goes through it in an even number of parts, so that part i ends phase i % 2 of the barrier.
    """

    start: Int32  # address, a multiple of 128; there are BackwardConfigSm90.rows_bytes
    barrier: cute.Pointer  # an mbarrier with one arrival


class BackgroundRows(Untraced):
    """The work of one warp on query rows."""

    def __init__(self, kernel, tensors: RowTensors, sources, accumulator, progress, scores, seqlens, schedule):
        """Args: scores: a ScoreArguments. schedule: the order of tiles of keys."""
        self.kernel, self.tensors, self.sources = kernel, tensors, sources
        self.accumulator, self.progress, self.seqlens, self.schedule = accumulator, progress, seqlens, schedule
        self.softmax_scale, self.factors = scores.softmax_scale, scores.factors

    @property
    def num_blocks(self) -> Int32:
        """Blocks of rows of all heads."""
        return self.accumulator.stats.shape[0]

    @property
    def blocks_of_group(self) -> Int32:
        """Blocks of the query heads of a kv head."""
        return self.accumulator.blocks_per_head * self.kernel.group

    # ---------------------------------------------------------------- before the tiles

    @cute.jit
    def prepare(self, end: Int32, scratch: Scratch | None):
        """Prepare blocks until this warp has drawn block end - 1 or a later one, or all are drawn.

        Args: scratch: None for a warp that has registers for what it loads.
        """
        block = self._draw(self.progress.drawn_before())
        while block < self.num_blocks:
            self._prepare_block(block, scratch)
            following = self.num_blocks
            if block < end - 1:
                following = self._draw(self.progress.drawn_before())
            block = following

    @cute.jit
    def _prepare_block(self, block: Int32, scratch: Scratch | None):
        kernel, tensors = self.kernel, self.tensors
        count = LANES if cutlass.const_expr(scratch is None) else rows_of_scratch(kernel)  # rows at a time
        parts = kernel.tile_m // count
        for part in cutlass.range(parts, unroll=1):
            product = Float32(0.0)
            if cutlass.const_expr(scratch is not None):
                self._load_rows(block, part, scratch, count)
                self._zero(block, part, parts)  # meanwhile
                cute.arch.mbarrier_wait(scratch.barrier, part % 2)
                out, dout = (self._staged(scratch, n, count) for n in range(2))
                product = row_products(out, dout, count, None, VECTOR, 1)
            else:
                self._zero(block, part, parts)
                head, entry, row = self._place(block, part * count)
                out, dout = (
                    cute.domain_offset((row, 0), t[None, None, head, entry]) for t in (tensors.out, tensors.dout)
                )
                product = row_products(out, dout, count, tensors.out.shape[0] - row, VECTOR, LOADS_AHEAD)
            self._write_stats(block, part * count, count, product)
            cute.arch.sync_warp()  # the scratch is free
        if cutlass.const_expr(kernel.adds_in_turns):
            if self.lane < kernel.config.consumer_warps:
                self.accumulator.turns[block * kernel.config.consumer_warps + self.lane] = Int32(0)
        group, _ = divmod(block, self.progress.blocks_of_group)
        self._count(self.progress.prepared(group))

    @cute.jit
    def _load_rows(self, block: Int32, part: Int32, scratch: Scratch, count: cutlass.Constexpr[int]):
        """Load rows of out and of dout."""
        box = count, self.kernel.head_dim_v
        with cute.arch.elect_one():
            num_bytes = 2 * cute.size(box) * self.kernel.dtype.width // 8
            cute.arch.mbarrier_arrive_and_expect_tx(scratch.barrier, num_bytes)
        head, entry, row = self._place(block, part * count)
        for n, tma in enumerate((self.tensors.tma_out, self.tensors.tma_dout)):
            s, g = tma.partition(box, self._half(scratch, n), self.kernel.dtype)
            cute.copy(tma.atom, g[None, row // count, 0, head, entry], s, tma_bar_ptr=scratch.barrier)

    @cute.jit
    def _write_stats(self, block: Int32, first: Int32, count: cutlass.Constexpr[int], product: Float32):
        """Write lse and delta of the rows [first, first + count) of a block."""
        head, entry, row = self._place(block, first)
        lse, dlse = self.tensors.lse, self.tensors.dlse
        lse = cute.domain_offset((row,), lse[None, 0, head, entry])
        dlse = None if cutlass.const_expr(dlse is None) else cute.domain_offset((row,), dlse[None, 0, head, entry])
        num_rows = self.tensors.out.shape[0] - row
        write_stats(self.accumulator.stats[copy_of(block), None], first, count, num_rows, product, lse, dlse)

    def _half(self, scratch: Scratch, n: int) -> Int32:
        """Where rows of out (0) or dout (1) are."""
        return scratch.start + n * (self.kernel.config.rows_bytes // 2)

    def _staged(self, scratch: Scratch, n: int, count: int) -> cute.Tensor:
        """Rows of out (0) or dout (1) in shared memory."""
        pointer = cute.make_ptr(self.kernel.dtype, self._half(scratch, n), cute.AddressSpace.smem, assumed_align=128)
        return cute.make_tensor(pointer, cute.make_ordered_layout((count, self.kernel.head_dim_v), order=(1, 0)))

    @cute.jit
    def _zero(self, block: Int32, part: Int32, parts: cutlass.Constexpr[int]):
        """Write zeros to one of equal parts of a block of the sums that dQ is added to."""
        if cutlass.const_expr(not self.kernel.has_private_dq):
            zeros = cute.make_rmem_tensor((4,), Float32)
            zeros.fill(0.0)
            target = cute.flat_divide(self.accumulator.dq[copy_of(block), None], (4,))
            vectors = cute.size(self.accumulator.dq, mode=[1]) // (4 * LANES * parts)
            lane = self.lane
            for i in cutlass.range(vectors, unroll=4):
                cute.autovec_copy(zeros, target[None, (part * vectors + i) * LANES + lane])

    @cute.jit
    def wait_for_rows(self, entry: Int32, head_kv: Int32):
        """Wait until the rows of the query heads of this kv head are prepared, for copies of their statistics too."""
        head = entry * (self.progress.num_heads // self.tensors.out.shape[3]) + head_kv
        wait_until_equal(self.progress.prepared(head), self.blocks_of_group, Int32(-1))
        cute.arch.fence_proxy("async.global")

    # ---------------------------------------------------------------- after the tiles

    @cute.jit
    def end_tile(self, entry: Int32, head_kv: Int32):
        """Count a tile to whose dQ nothing will be added; the last one of a head puts the head on the list."""
        head = entry * (self.progress.num_heads // self.tensors.out.shape[3]) + head_kv
        cute.arch.fence_acq_rel_gpu()
        if draw(self.progress.tiles_done(head)) == self.schedule.tiles_of_head - 1:
            cute.arch.fence_acq_rel_gpu()  # the additions of the tiles before come with the list
            publish(self.progress.head_done(draw(self.progress.heads_done())), head + 1)

    @cute.jit
    def all_have_started(self) -> Boolean:
        return cute.arch.make_warp_uniform(look_at(self.progress.started())) == cute.arch.grid_dim()[0]

    @cute.jit
    def finish(self, scratch: Scratch):
        """Write dq of blocks, each when its head is done, until all have been drawn."""
        ticket = self._draw(self.progress.drawn_after())
        while ticket < self.num_blocks:
            position, number = divmod(ticket, self.progress.blocks_of_group)
            head = wait_while_zero(self.progress.head_done(position)) - 1
            # tiles whose keys nobody sees have not waited
            wait_until_equal(self.progress.prepared(head), self.blocks_of_group, Int32(-1))
            self._write_block(head * self.blocks_of_group + number, scratch)
            ticket = self._draw(self.progress.drawn_after())
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _write_block(self, block: Int32, scratch: Scratch):
        """dq = softmax_scale * sums, for a block whose sums are complete."""
        kernel = self.kernel
        box_bytes, block_bytes = 4 * BOX_ROWS * box_columns(kernel), 4 * kernel.tile_m * kernel.head_dim
        parts = 2 * ceil_div(block_bytes, 2 * kernel.config.rows_bytes)  # an even number
        num_bytes = block_bytes // parts
        count = num_bytes // box_bytes  # boxes at a time
        found = Int32(0)
        cute.arch.fence_proxy("async.global")  # what others have added is read by a copy
        for part in cutlass.range(parts, unroll=1):
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # dq in the scratch is read
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(scratch.barrier, num_bytes)
                source = self.accumulator.dq[copy_of(block), None].iterator + part * (num_bytes // 4)
                copy_bulk(scratch.start, source, num_bytes, scratch.barrier)
            cute.arch.mbarrier_wait(scratch.barrier, part % 2)
            for i in cutlass.range(count, unroll=1):
                found = found | self._convert_box(scratch.start + i * box_bytes)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            head, entry, row = self._place(block)
            for i in cutlass.range(count, unroll=1):
                self._store_box(scratch.start + i * box_bytes, head, entry, row, part * count + i)
            cute.arch.cp_async_bulk_commit_group()
        if cutlass.const_expr(kernel.hides_pairs):
            if cute.arch.vote_any_sync(found != 0):
                if self.lane == 0:
                    publish(self.progress.block_with_nan(draw(self.progress.with_nan())), block)
            cute.arch.cp_async_bulk_wait_group(0)
            cute.arch.fence_proxy("async.global")  # what copies have written is read by other instructions
            self._count(self.progress.written())

    @cute.jit
    def _convert_box(self, start: Int32) -> Int32:
        """The sums of a box of dq in shared memory -> the box in their place. Returns: not 0 if this lane has a NaN.

        The sums lie as in the consumers' accumulators: [8 columns][lane][row / 8][column % 2].
        """
        kernel, width = self.kernel, box_columns(self.kernel)
        found, lane = Int32(0), self.lane
        sums = cute.make_rmem_tensor((4,), Float32)
        for columns in cutlass.range_constexpr(0, width, 16):
            words = []
            for half in cutlass.range_constexpr(2):
                address = start + columns * (4 * BOX_ROWS) + (half * LANES + lane) * 16
                source = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=16)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout((4,))), sums)
                for r in cutlass.range_constexpr(2):
                    a, b = sums[2 * r] * self.softmax_scale, sums[2 * r + 1] * self.softmax_scale
                    words.append(pack_pair(a, b, kernel.dtype))
                    if cutlass.const_expr(kernel.hides_pairs):
                        total = a * a + b * b
                        if total != total:
                            found = Int32(1)
            cute.arch.sync_warp()  # the sums are read
            row, column = lane % 16, columns + lane // 16 * 8
            store_matrices(start + 2 * (row * width + column), *words)
        return found

    @cute.jit
    def _store_box(self, start: Int32, head: Int32, entry: Int32, row: Int32, number: Int32):
        """Copy a box to dq.

        Boxes lie as [64 rows][part of the columns][warp][columns of a box].

        Args:
            row: the first row of the block.
            number: the number of the box in the block.
        """
        kernel, tma, width = self.kernel, self.tensors.tma_dq, box_columns(self.kernel)
        boxes_of_share = kernel.dq_columns // width
        parts = kernel.head_dim // kernel.dq_columns
        share, column = number // boxes_of_share, number % boxes_of_share
        part = share // WARPS
        row = row // BOX_ROWS + part // parts * WARPS + share % WARPS
        s, g = tma.partition((BOX_ROWS, width), start, kernel.dtype)
        column += part % parts * boxes_of_share
        # a box past the last column would be stored in the place of another one
        if column * width < self.tensors.dq.shape[1]:
            cute.copy(tma.atom, s, g[None, row, column, head, entry])

    @cute.jit
    def repair(self):
        """Compute rows of dq that have a NaN again, once dq of all blocks is written."""
        wait_until_equal(self.progress.written(), self.num_blocks, Int32(-1))
        number = self._draw(self.progress.drawn_again())
        while number < look_at(self.progress.with_nan()):
            self._repair_block(look_at(self.progress.block_with_nan(number)))
            number = self._draw(self.progress.drawn_again())

    @cute.jit
    def _repair_block(self, block: Int32):
        kernel, sources, seqlens = self.kernel, self.sources, self.seqlens
        head, entry, start = self._place(block)
        mQ, mdO, dq = (t[None, None, head, entry] for t in (sources.q, sources.dout, self.tensors.dq))
        mK, mV = (t[None, None, head // kernel.group, entry] for t in (sources.k, sources.v))
        of_head = SourceTensors(mQ, mK, mV, mdO)
        seqlen_k = used_keys(seqlens.lengths, entry, seqlens.seqlen_k)
        geometry = Geometry(seqlens.seqlen_q, seqlen_k, seqlens.window_left, seqlens.window_right)
        stats = cute.domain_offset((block - start // kernel.tile_m, 0), self.accumulator.stats)
        for query in cutlass.range(start, minimum(start + kernel.tile_m, seqlens.seqlen_q), unroll=1):
            if repair_gradients.has_nan_in_row(dq[query, None]):
                repair_gradients.recompute_dq(dq, query, of_head, stats, geometry, self.factors, self.softmax_scale)

    # ---------------------------------------------------------------- the end

    @cute.jit
    def leave(self, warps_of_block: cutlass.Constexpr[int]):
        """This warp needs the counters no more; the last warp of all puts the zeros back."""
        cute.arch.sync_warp()
        cute.arch.fence_acq_rel_gpu()  # what this warp has counted comes before the zeros
        if self._draw(self.progress.finished()) == warps_of_block * cute.arch.grid_dim()[0] - 1:
            count = PROGRESS_HEADER + 3 * self.progress.num_heads
            if cutlass.const_expr(self.kernel.finishes_rows and self.kernel.hides_pairs):
                count += look_at(self.progress.with_nan())
                cute.arch.sync_warp()
            for i in cutlass.range(self.lane, count, LANES, unroll=1):
                self.progress.words[i] = Int32(0)

    # ---------------------------------------------------------------- parts

    def _place(self, block: Int32, row: Int32 | int = 0) -> tuple:
        """Query head, batch entry and number in its head of a row of a block."""
        number, m_block = divmod(copy_of(block), self.progress.blocks_of_head)
        entry, head = divmod(number, self.progress.heads_of_entry)
        return head, entry, m_block * self.kernel.tile_m + row

    @property
    def lane(self) -> Int32:
        return copy_of(cute.arch.lane_idx())

    @cute.jit
    def _draw(self, counter: cute.Pointer) -> Int32:
        number = Int32(0)
        if self.lane == 0:
            number = draw(counter)
        return cute.arch.make_warp_uniform(warp.broadcast(number, 0))

    @cute.jit
    def _count(self, counter: cute.Pointer):
        """Count one, after what all lanes have written."""
        cute.arch.sync_warp()
        if self.lane == 0:
            cute.arch.fence_acq_rel_gpu()
            increment(counter)

"""V in the layout that the Hopper kernel reads (`fp8.keys_last`): e4m3 with contiguous keys, from 16-bit or e4m3 rows.

A thread block has 64 keys of a head, which share a scale. A lane loads 16 bytes of each of four keys that are neighbors
in the order of that layout, so that four numbers of one column are one register of the result:

    index in 16   0  1  2  3 |  4  5  6  7 |  8  9 10 11 | 12 13 14 15
    key           0  1  8  9 |  2  3 10 11 |  4  5 12 13 |  6  7 14 15

Through shared memory, (head_dim_v, 64) bytes, they become 16 bytes of a column to be stored.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32
from cutlass.memory import SmemAllocator

from ....geometry.integers import ceil_div, select
from ....geometry.tile_scheduler import LANES
from ....quantization.codec import SCALE_BLOCK
from ...arguments import KeysLastArguments
from ..blocks.memory.clear import KEY_RUN
from ..blocks.memory.layouts import as_batch_of_one
from ..blocks.memory.ptx import transpose_bytes, unpack_pair
from ..entry import takes
from .quantize_block import RowBlock, Tile, largest_of_block, mean_of, round_four, row_block, scale_and_inverse

GROUP = 64  # columns that a warp loads at once
RUNS = SCALE_BLOCK // KEY_RUN
KEYS = 4  # keys of a lane
KEY_OFFSETS = (0, 1, 8, 9)  # their distances from the first one
WORDS = 4  # registers of 16 bytes


class QuantizeValues:
    """What a thread block does for 64 keys of a head: (dtype, head_dim_v) -> device code.

    Args: head_dim: of v, a multiple of 16. num_threads: 128 or a larger power of two.
    """

    def __init__(self, dtype: type[cutlass.Numeric], head_dim: int, num_threads: int):
        self.dtype, self.head_dim, self.num_threads = dtype, head_dim, num_threads
        self.num_warps = self.num_threads // LANES
        self.vector = 16 * 8 // dtype.width  # columns that a lane loads
        self.lanes_of_key = GROUP // self.vector
        self.runs_of_warp = LANES // self.lanes_of_key // (KEY_RUN // KEYS)
        warps_of_group = RUNS // self.runs_of_warp
        self.groups_at_once = self.num_warps // warps_of_group
        self.passes = ceil_div(ceil_div(head_dim, GROUP), self.groups_at_once)

    @property
    def shared_words(self) -> int:
        """The number of words that `quantize` needs as `columns_shared`."""
        return self.head_dim * SCALE_BLOCK // 4

    @cute.jit
    def quantize(
        self,
        v: cute.Tensor,  # (batch, seqlen_k, num_heads_kv, head_dim_v); packed sequences: batch is 1, here and below
        target: cute.Tensor,  # e4m3, (batch, num_heads_kv, head_dim_v, 64 * blocks)
        descale: cute.Tensor | None,  # (batch, num_heads_kv, blocks) float32; None if v is e4m3
        mean: cute.Tensor | None,  # (sequences, num_heads_kv, head_dim_v) float32: subtracted from v
        cu_seqlens: cute.Tensor | None,  # (batch + 1,) int32
        seqused: cute.Tensor | None,  # (batch,) int32: later keys are not read, and become 0
        columns_shared: cute.Tensor,  # (shared_words,) Int32
        shared: cute.Tensor | None,  # (2, warps) float32; None if v is e4m3
        tile: Tile,
    ):
        """Round 64 keys of a head, and write them with the keys contiguous."""
        thread, (head, block, entry) = cute.arch.thread_idx()[0], tile
        rows = row_block(v.shape[1], block, entry, cu_seqlens, seqused)
        raw = self.load(v[entry, None, head, None], rows)
        words = cute.recast_tensor(raw, Int32)  # (WORDS, KEYS, passes)
        # a register for each of this lane's columns, with its four keys
        columns = cute.make_rmem_tensor(cute.make_ordered_layout((self.vector, self.passes), order=(0, 1)), Int32)
        if cutlass.const_expr(descale is None):
            self.transpose(words, columns)
        else:
            values = cute.make_rmem_tensor(raw.layout, Float32)
            means = None if cutlass.const_expr(mean is None) else self.load_mean(mean_of(mean, rows, head))
            self.fill(values, words, means, rows.num_used)
            largest, has_inf = largest_of_block(values, shared, self.num_warps)
            scale, inverse = scale_and_inverse(largest)
            if has_inf:
                self.round(values, columns, inverse, True)
            else:
                self.round(values, columns, inverse, False)
            if thread == 0:
                descale[entry, head, block] = scale
        self.to_shared(columns_shared, columns)
        cute.arch.sync_threads()
        self.store(columns_shared, target[entry, head, None, None], block)

    def region(self, i: int) -> tuple:
        """The first column of this lane in pass i, and the number of its four keys among those of the block."""
        warp, lane = cute.arch.thread_idx()[0] // LANES, cute.arch.lane_idx()
        warps_of_group = RUNS // self.runs_of_warp
        group = warp // warps_of_group + i * self.groups_at_once
        fours = LANES // self.lanes_of_key
        four = warp % warps_of_group * fours + lane // self.lanes_of_key
        return group * GROUP + lane % self.lanes_of_key * self.vector, four

    def first_key(self, four: Int32) -> Int32:
        """The first key of four keys of a lane, counted in the block."""
        return four // 4 * KEY_RUN + four % 4 * 2

    @cute.jit
    def load(self, v: cute.Tensor, rows: RowBlock) -> cute.Tensor:
        """(vector, KEYS, passes) of v (seqlen_k, head_dim_v); 0 where there is no key."""
        shape = (self.vector, KEYS, self.passes)
        raw = cute.make_rmem_tensor(cute.make_ordered_layout(shape, order=(0, 1, 2)), self.dtype)
        cute.recast_tensor(raw, Int32).fill(0)
        for i in cutlass.range_constexpr(self.passes):
            column, four = self.region(i)
            for k in cutlass.range_constexpr(KEYS):
                key = self.first_key(four) + KEY_OFFSETS[k]
                if key < rows.num_used and column < self.head_dim:
                    source = cute.flat_divide(v[rows.start + key, None], (self.vector,))
                    cute.autovec_copy(source[None, column // self.vector], raw[None, k, i])
        return raw

    @cute.jit
    def load_mean(self, mean: cute.Tensor) -> cute.Tensor:
        """The means of this lane's columns, (vector, passes)."""
        loaded = cute.make_rmem_tensor(cute.make_ordered_layout((self.vector, self.passes), order=(0, 1)), Float32)
        loaded.fill(0.0)
        source = cute.flat_divide(mean, (self.vector,))
        for i in cutlass.range_constexpr(self.passes):
            column, _ = self.region(i)
            if column < self.head_dim:
                cute.autovec_copy(source[None, column // self.vector], loaded[None, i])
        return loaded

    def fill(self, values: cute.Tensor, words: cute.Tensor, means: cute.Tensor | None, num_used: Int32):
        """Set values (vector, KEYS, passes) to the numbers that are to be rounded."""
        for i in range(self.passes):
            first_key = self.first_key(self.region(i)[1])
            for k in range(KEYS):
                is_used = first_key + KEY_OFFSETS[k] < num_used
                for c, x in enumerate(x for w in range(WORDS) for x in unpack_pair(words[w, k, i], self.dtype)):
                    values[c, k, i] = x if means is None else select(is_used, x - means[c, i], Float32(0.0))

    def transpose(self, words: cute.Tensor, columns: cute.Tensor):
        for i in range(self.passes):
            for w in range(WORDS):
                for c, column in enumerate(transpose_bytes(*(words[w, k, i] for k in range(KEYS)))):
                    columns[4 * w + c, i] = column

    def round(self, values: cute.Tensor, columns: cute.Tensor, inverse: Float32, has_inf: bool):
        for i in range(self.passes):
            for c in range(self.vector):
                columns[c, i] = round_four([values[c, k, i] for k in range(KEYS)], inverse, has_inf)

    @cute.jit
    def to_shared(self, tile: cute.Tensor, columns: cute.Tensor):
        for i in cutlass.range_constexpr(self.passes):
            first, four = self.region(i)
            if first < self.head_dim:
                for c in cutlass.range_constexpr(self.vector):
                    tile[word_of(first + c, four // 4) + four % 4] = columns[c, i]

    @cute.jit
    def store(self, tile: cute.Tensor, target: cute.Tensor, block: Int32):
        """Write the block to memory; neighboring threads store neighboring runs of 16 keys of a column."""
        thread = cute.arch.thread_idx()[0]
        vectors = cute.flat_divide(tile, (WORDS,))
        packed = cute.make_rmem_tensor((WORDS,), Int32)
        for i in cutlass.range_constexpr(ceil_div(self.head_dim * RUNS, self.num_threads)):
            number = thread + i * self.num_threads
            column, run = number // RUNS, number % RUNS
            if column < self.head_dim:
                cute.autovec_copy(vectors[None, word_of(column, run) // WORDS], packed)
                runs = cute.flat_divide(target[column, None], (KEY_RUN,))
                cute.autovec_copy(cute.recast_tensor(packed, Float8E4M3FN), runs[None, block * RUNS + run])


def word_of(column, run):
    """The first of the four words in shared memory that hold 16 bytes: a column of a run of keys.

    Two columns are adjacent in 128 bytes, one word of each bank. Lanes that write at the same time have columns 8
    (or 16) apart. Their words are exchanged so that each is in a bank of its own: the runs of a column by bits 3 and 4
    of the column, the two columns by bit 5.
    """
    return (column ^ (column >> 5 & 1)) * (SCALE_BLOCK // 4) + (run ^ (column >> 3 & 3)) * WORDS


class KeysLast:
    """One compiled kernel: head_dim_v -> device code that lays e4m3 values out and changes none of them.

    grid (head, block of SCALE_BLOCK keys, batch entry)

    The arguments are those of `QuantizeValues`.
    """

    def __init__(self, head_dim: int, num_threads: int):
        self.values = QuantizeValues(Float8E4M3FN, head_dim, num_threads)

    @takes(KeysLastArguments)
    def __call__(self, a: KeysLastArguments, stream: cuda.CUstream):
        if cutlass.const_expr(a.cu_seqlens is not None):
            a = a._replace(v=as_batch_of_one(a.v), target=as_batch_of_one(a.target))
        batch, num_heads, _, num_keys = a.target.shape
        self.kernel(a).launch(
            grid=[num_heads, num_keys // SCALE_BLOCK, batch], block=[self.values.num_threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, a: KeysLastArguments):
        layout = cute.make_layout((self.values.shared_words,))
        columns_shared = SmemAllocator().allocate_tensor(Int32, layout, 16)
        tile = Tile(*cute.arch.block_idx())
        self.values.quantize(a.v, a.target, None, None, a.cu_seqlens, None, columns_shared, None, tile)

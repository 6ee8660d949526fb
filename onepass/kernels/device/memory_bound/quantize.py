"""Q, K and V to e4m3 in one launch: a thread block rounds 64 rows of a head of one of the three.

The grid counts the blocks of Q, then those of K, then those of V. Within a tensor, neighboring thread blocks have
neighboring heads, which are adjacent in memory in most tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from ....geometry.tile_scheduler import LANES
from ...arguments import QuantizeArguments
from ..blocks.memory.layouts import as_batch_of_one
from ..entry import takes
from .quantize_block import Tile
from .quantize_rows import QuantizeRows
from .quantize_values import QuantizeValues


def threads_of_sm(
    longest_head_dim: int, is_power_of_two: bool, has_mean: bool, is_packed: bool, has_seqused: bool
) -> int:
    """The number of threads that an SM must have room for.

    With these threads, as many loads are under way as with a kernel for each tensor. Left alone, the compiler takes up
    to 126 registers for the three paths through this kernel. So it gets 80, or 48 where a thread has half as many
    elements; and more for means, for head dims that are cut before they are rotated, and for the work that packed
    sequences need.
    """
    if has_mean:
        return 512
    if not is_power_of_two or (is_packed and has_seqused):
        return 640
    if longest_head_dim <= 64:
        return 1024 if is_packed else 1280
    return 768


class Tiles(NamedTuple):
    """How the thread blocks of one tensor are counted: heads first, then blocks of rows, then batch entries."""

    heads: cute.FastDivmodDivisorV2
    blocks: cute.FastDivmodDivisorV2


class Quantize:
    """One compiled kernel: (dtype, head dims, what there is) -> device code.

    Args:
        head_dim, head_dim_v: multiples of 16.
        num_threads: 128 or 256.
        keys_last: v is stored in the layout of `fp8.keys_last`; otherwise it keeps its layout.
    """

    def __init__(self, dtype: type[cutlass.Numeric], head_dim: int, head_dim_v: int, num_threads: int, keys_last: bool):
        self.num_threads, self.keys_last = num_threads, keys_last
        self.rows = QuantizeRows(dtype, head_dim, num_threads)
        self.values = (QuantizeValues if keys_last else QuantizeRows)(dtype, head_dim_v, num_threads)

    @takes(QuantizeArguments)
    def __call__(self, a: QuantizeArguments, stream: cuda.CUstream):
        has_mean, is_packed = a.k_mean is not None or a.v_mean is not None, a.cu_seqlens_k is not None
        longest = max(self.rows.head_dim, self.values.head_dim)
        options = cutlass.const_expr((has_mean, is_packed, a.seqused_k is not None))
        for_no_sequence = 0  # blocks of rows that belong to no sequence
        if cutlass.const_expr(a.cu_seqlens_q is not None):
            a = QuantizeArguments(*(as_batch_of_one(t) for t in a[:9]), *a[9:])
            for_no_sequence = 1
        q_tiles, q_count = self.tiles(a.q_descale, for_no_sequence)
        k_tiles, k_count = self.tiles(a.k_descale, for_no_sequence)
        # where keys come last, whole blocks are written, and rows that belong to no sequence have none
        v_tiles, v_count = self.tiles(a.v_descale, 0 if self.keys_last else for_no_sequence)
        self.kernel(a, q_tiles, k_tiles, v_tiles, q_count, q_count + k_count).launch(
            grid=[q_count + k_count + v_count, 1, 1],
            block=[self.num_threads, 1, 1],
            min_blocks_per_mp=threads_of_sm(longest, self.rows.is_one_block, *options) // self.num_threads,
            preferred_smem_carveout=-1,  # the driver's choice: without it the compiler asks for a GPU
            stream=stream,
        )

    def tiles(self, descale: cute.Tensor, more_blocks: int) -> tuple[Tiles, Int32]:
        """The tiles of a tensor, and the number of thread blocks that they need."""
        batch, num_heads, blocks = descale.shape
        blocks = blocks + more_blocks
        return Tiles(cute.FastDivmodDivisorV2(num_heads), cute.FastDivmodDivisorV2(blocks)), num_heads * blocks * batch

    @cute.kernel
    def kernel(
        self, a: QuantizeArguments, q_tiles: Tiles, k_tiles: Tiles, v_tiles: Tiles, k_begins: Int32, v_begins: Int32
    ):
        smem, number = SmemAllocator(), cute.arch.block_idx()[0]
        num_warps = self.num_threads // LANES
        shared = smem.allocate_tensor(Float32, cute.make_ordered_layout((2, num_warps), order=(1, 0)), 16)
        columns = None
        if cutlass.const_expr(self.keys_last):
            columns = smem.allocate_tensor(Int32, cute.make_layout((self.values.shared_words,)), 16)
        lengths = a.cu_seqlens_k, a.seqused_k
        if number < k_begins:
            tile = tile_of(number, q_tiles)
            self.rows.quantize(a.q, a.q_target, a.q_descale, None, a.signs, a.cu_seqlens_q, None, shared, tile)
        elif number < v_begins:
            tile = tile_of(number - k_begins, k_tiles)
            self.rows.quantize(a.k, a.k_target, a.k_descale, a.k_mean, a.signs, *lengths, shared, tile)
        else:
            tile = tile_of(number - v_begins, v_tiles)
            if cutlass.const_expr(self.keys_last):
                self.values.quantize(a.v, a.v_target, a.v_descale, a.v_mean, *lengths, columns, shared, tile)
            else:
                self.values.quantize(a.v, a.v_target, a.v_descale, a.v_mean, None, *lengths, shared, tile)


def tile_of(number: Int32, tiles: Tiles) -> Tile:
    """The tile with this number among those of a tensor."""
    rest, head = divmod(number, tiles.heads)
    entry, block = divmod(rest, tiles.blocks)
    return Tile(head, block, entry)

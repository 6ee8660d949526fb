"""16-bit rows to e4m3, with a scale for every block of 64 rows of a head: Q and K, and V where it keeps its layout.

A thread block has such a block of rows in its registers: it reads the rows, subtracts a mean, rotates them, finds the
largest magnitude, divides by the scale, rounds and writes. So each element is read once and written once.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....geometry.integers import select
from ....geometry.tile_scheduler import LANES
from ....quantization.codec import SCALE_BLOCK
from ..blocks.memory.ptx import unpack_pair
from . import quantize_rotation as rotation
from .quantize_block import Tile, largest_of_block, mean_of, round_four, row_block, scale_and_inverse
from .quantize_rotation import GROUP, LANE_COLUMNS, QUAD

VECTOR = 8  # elements of 16 bytes: half of a lane's columns in a group


class QuantizeRows:
    """What a thread block does for rows of one tensor: (dtype, head_dim) -> device code.

    Args: head_dim: a multiple of 16. num_threads: 32 to 256, a power of two.
    """

    def __init__(self, dtype: type[cutlass.Numeric], head_dim: int, num_threads: int):
        self.dtype, self.head_dim, self.num_threads = dtype, head_dim, num_threads
        self.rows_at_once = self.num_threads // QUAD
        self.is_one_block = len(rotation.blocks_of(head_dim)) == 1  # whether the rotation has one block

    @cute.jit
    def quantize(
        self,
        x: cute.Tensor,  # (batch, seqlen, num_heads, head_dim); packed sequences: batch is 1
        target: cute.Tensor,  # e4m3, the shape of x
        descale: cute.Tensor,  # (batch, num_heads, blocks) float32; packed sequences: batch is 1
        mean: cute.Tensor | None,  # (sequences, num_heads, head_dim) float32: subtracted; rotated if x is
        signs: tuple | None,  # to rotate: Int32, a bit for each column, 1 to flip its sign
        cu_seqlens: cute.Tensor | None,  # (batch + 1,) int32
        seqused: cute.Tensor | None,  # (batch,) int32: later rows are not read, and become 0
        shared: cute.Tensor,  # (2, warps) float32
        tile: Tile,
    ):
        """Round 64 rows of a head."""
        thread, (head, block, entry) = cute.arch.thread_idx()[0], tile
        rows = row_block(x.shape[1], block, entry, cu_seqlens, seqused)
        lane, first_row = thread % QUAD, thread // QUAD
        num_warps = self.num_threads // LANES
        groups, rows_at_once = rotation.num_groups(self.head_dim), self.rows_at_once
        passes = SCALE_BLOCK // rows_at_once

        raw = cute.make_rmem_tensor(
            cute.make_ordered_layout((VECTOR, 2, groups, passes), order=(0, 1, 2, 3)), self.dtype
        )
        raw.fill(0.0)
        for i in cutlass.range_constexpr(passes):
            row = first_row + i * rows_at_once
            if row < rows.num_used:
                source = cute.flat_divide(x[entry, rows.start + row, head, None], (VECTOR,))
                for group in cutlass.range_constexpr(groups):
                    if self.has_columns(group, lane):
                        for half in cutlass.range_constexpr(2):
                            vector = 2 * (group * QUAD + lane) + half
                            cute.autovec_copy(source[None, vector], raw[None, half, group, i])

        means = None
        if cutlass.const_expr(mean is not None):
            means = self.load_mean(mean_of(mean, rows, head), lane)
        values = cute.make_rmem_tensor(
            cute.make_ordered_layout((LANE_COLUMNS, groups, passes), order=(0, 1, 2)), Float32
        )
        # where all columns have one factor, the scale absorbs it
        factor = Float32(1.0)
        if cutlass.const_expr(signs is not None and mean is None and self.is_one_block):
            factor = rotation.factors(self.head_dim, lane)[0]
        is_used = [first_row + i * rows_at_once < rows.num_used for i in range(passes)]
        self.fill(values, raw, signs, means, is_used)
        largest, has_inf = largest_of_block(values, shared, num_warps)
        scale, inverse = scale_and_inverse(largest * factor)
        inverse = inverse * factor

        packed = cute.make_rmem_tensor(cute.make_ordered_layout((4, groups, passes), order=(0, 1, 2)), Int32)
        if has_inf:
            self.round(values, packed, inverse, True)
        else:
            self.round(values, packed, inverse, False)
        for i in cutlass.range_constexpr(passes):
            row = first_row + i * rows_at_once
            if row < rows.num_rows:
                stores = cute.flat_divide(target[entry, rows.start + row, head, None], (LANE_COLUMNS,))
                for group in cutlass.range_constexpr(groups):
                    if self.has_columns(group, lane):
                        stored = cute.recast_tensor(packed[None, group, i], target.element_type)
                        cute.autovec_copy(stored, stores[None, group * QUAD + lane])
        if thread == 0:
            if block < descale.shape[2]:
                descale[entry, head, block] = scale

    def has_columns(self, group: int, lane: Int32):
        """Whether this lane's columns of a group begin before the row's end."""
        if (group + 1) * GROUP <= self.head_dim:
            return True
        return group * GROUP + lane * LANE_COLUMNS < self.head_dim

    @cute.jit
    def load_mean(self, mean: cute.Tensor, lane: Int32) -> cute.Tensor:
        """The means of this lane's columns, (LANE_COLUMNS, groups)."""
        groups = rotation.num_groups(self.head_dim)
        loaded = cute.make_rmem_tensor(cute.make_ordered_layout((LANE_COLUMNS, groups), order=(0, 1)), Float32)
        loaded.fill(0.0)
        source = cute.flat_divide(mean, (LANE_COLUMNS,))
        for group in cutlass.range_constexpr(groups):
            if self.has_columns(group, lane):
                cute.autovec_copy(source[None, group * QUAD + lane], loaded[None, group])
        return loaded

    def fill(self, values: cute.Tensor, raw: cute.Tensor, signs: tuple | None, means: cute.Tensor | None, is_used):
        """Set values (LANE_COLUMNS, groups, passes) to the numbers that are to be rounded."""
        lane = cute.arch.lane_idx() % QUAD
        words = cute.recast_tensor(raw, Int32)
        _, _, groups, passes = raw.shape
        for i in range(passes):
            row = [[words[w % 4, w // 4, group, i] for w in range(LANE_COLUMNS // 2)] for group in range(groups)]
            if signs is None:
                row = [[x for word in group for x in unpack_pair(word, self.dtype)] for group in row]
            else:
                row = rotation.rotated(row, self.lane_signs(signs, lane), self.head_dim, self.dtype)
                if means is not None or not self.is_one_block:
                    factors = rotation.factors(self.head_dim, lane)
                    row = [[x * factor for x in group] for group, factor in zip(row, factors, strict=True)]
            for group in range(groups):
                # lanes past head_dim hold arbitrary values
                is_number = is_used[i] & self.has_columns(group, lane)
                for c in range(LANE_COLUMNS):
                    x = row[group][c]
                    values[c, group, i] = x if means is None else select(is_number, x - means[c, group], Float32(0.0))

    def round(self, values: cute.Tensor, packed: cute.Tensor, inverse: Float32, has_inf: bool):
        _, groups, passes = packed.shape
        for i in range(passes):
            for group in range(groups):
                for w in range(4):
                    four = [values[4 * w + c, group, i] for c in range(4)]
                    packed[w, group, i] = round_four(four, inverse, has_inf)

    def lane_signs(self, signs: tuple, lane: Int32) -> list:
        """The sign bits of this lane's columns: 16 for each group."""
        pairs = [signs[i : i + 2] for i in range(0, len(signs), 2)]
        return [select(lane >= 2, high, low) >> (lane % 2 * LANE_COLUMNS) for low, high in pairs]

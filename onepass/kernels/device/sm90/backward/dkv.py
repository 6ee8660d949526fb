"""How dK and dV of a finished tile of the Hopper backward reach global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ...blocks.memory import epilogue
from ...blocks.memory.layouts import rows_and_columns
from ...blocks.memory.untraced import Untraced
from ...blocks.repair import gradients as repair_gradients
from ...blocks.softmax.gradients import Region
from .inputs import Inputs


class KeyGradients(Untraced):
    """Rows of dk and dv, and the repair of those to which hidden pairs have brought a NaN.

    Args: region: that of the scores: its rows are these.
    """

    def __init__(self, kernel, region: Region, inputs: Inputs):
        self.kernel, self.region, self.inputs = kernel, region, inputs
        modifiers, self.dv_scale = inputs.modifiers, Float32(1.0)
        if modifiers is not None and modifiers.drops:
            self.dv_scale = modifiers.tensors.keep_scale

    @cute.jit
    def store_dk(self, tile, acc: cute.Tensor, scratch: cute.Pointer | None = None):
        self._store(tile, acc, self.inputs.mdK, self.inputs.softmax_scale, False, scratch)

    @cute.jit
    def store_dv(self, tile, acc: cute.Tensor, scratch: cute.Pointer | None = None):
        self._store(tile, acc, self.inputs.mdV, self.dv_scale, True, scratch)

    @cute.jit
    def _store(
        self,
        tile,
        acc: cute.Tensor,
        m: cute.Tensor,
        scale: Float32,
        is_v: cutlass.Constexpr[bool],
        scratch: cute.Pointer | None,
    ):
        """Write rows of a gradient, and repair those that have a NaN.

        Args: scratch: 2 KB of shared memory for this warp, if there is room.
        """
        region, sources = self.region, self.inputs.sources
        rows = [tile.n_block * self.kernel.tile_n + region.row_in_tile + 8 * r for r in range(2)]
        is_row = [row < tile.rows_k for row in rows]
        # the first of this warp's 16 keys, made uniform: see forward/output.py
        first_key = cute.arch.make_warp_uniform(rows[0] - region.lane // 4)
        gradient = self.kernel.at_head(m, m, tile.head_kv, tile.origin_k)
        if cutlass.const_expr(scratch is not None and m.element_type is not Float32):
            epilogue.store_rows_staged(rows_and_columns(acc), scale, gradient, first_key, tile.rows_k, scratch)
        else:
            weights = cute.make_rmem_tensor((2,), Float32)
            weights.fill(scale)
            out_rows = [gradient[row, None] for row in rows]
            epilogue.store_16_bits(rows_and_columns(acc), weights, out_rows, is_row, region.lane_in_quad, 16)
        if cutlass.const_expr(sources is not None):
            ballots = repair_gradients.nan_rows(rows_and_columns(acc), is_row)
            if ballots[0] | ballots[1] != 0:
                cute.arch.sync_warp()  # other lanes write the same rows again
                inputs = (sources, self.inputs.accumulator, self.inputs.factors, is_v, self.inputs.modifiers)
                self.kernel.recompute_keys(tile, gradient, scale, first_key, ballots, *inputs)

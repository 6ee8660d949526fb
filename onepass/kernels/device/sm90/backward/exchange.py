"""What the consumer warpgroups of the Hopper backward send each other: dS, through shared memory."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp

from ...blocks.memory.layouts import transposed
from ...blocks.memory.untraced import Untraced
from .inputs import Buffers, Mmas, Thread


class Exchange(Untraced):
    """dS of a step in two buffers, as rows of queries, where the GEMMs of dQ read that of all warpgroups.

    Args: row_block: the number of this warpgroup's 64 keys among those of a buffer.
    """

    def __init__(self, kernel, thread: Thread, mmas: Mmas, buffers: Buffers, row_block: Int32 | int):
        self.kernel, self.thread, self.row_block = kernel, thread, row_block
        self.sdS, self.ds_full = buffers.ds, buffers.ds_full
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4), kernel.dtype)
        self.copy_ds = cute.make_tiled_copy_C(stmatrix, mmas.s).get_slice(thread.number)
        self.ds_target = self.copy_ds.partition_D(transposed(buffers.ds))

    def ds_tile(self, count: Int32) -> Int32:
        """The tile of shared memory for this warpgroup's dS of a step."""
        return count % 2 * self.kernel.row_blocks + self.row_block

    @cute.jit
    def write(self, operand: cute.Tensor, tile: Int32 | int):
        """Write P or dS to a tile of shared memory."""
        cute.copy(self.copy_ds, self.copy_ds.retile(operand), self.ds_target[None, None, None, tile])

    @cute.jit
    def send_ds(self, rdS: cute.Tensor, count: Int32):
        """Write dS of these keys; one arrival of each warp says so.

        The buffer is free. It was read by the dQ of two steps before, for which each warp waited before it sent dS of
        the step before; and this warp has waited for those.
        """
        self.write(rdS, self.ds_tile(count))
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.ds_full + count % 2)

    @cute.jit
    def wait_for_ds(self, count: Int32):
        """Wait until all warps have sent their dS of a step, and make it visible to this warp's GEMMs.

        The fence between the writes of threads and the reads of GEMMs may stand on either side of the barrier that
        orders them (PTX ISA, "Causality order": a proxy fence along the path). It takes 150 to 250 cycles, which a
        writer would have to wait for in the middle of a step; a reader then waits anyway.
        """
        cute.arch.mbarrier_wait(self.ds_full + count % 2, count // 2 & 1)
        cute.arch.fence_proxy("async.shared", space="cta")

"""Issuing a group of asynchronous warpgroup GEMMs."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup


@cute.jit
def issue(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    accumulate: cutlass.Constexpr[bool],
    steps: cutlass.Constexpr[int | None] = None,
    before_last: cutlass.Constexpr = None,
):
    """acc (+)= a b^T as one committed group; the caller waits with `warpgroup.wait_group`.

    Args:
        a, b: (MMA, MMA_M | MMA_N, MMA_K), a in shared memory or registers.
        steps: how many of the MMA_K to sum over, None: all.
        before_last: what to call before the last instruction.
    """
    issue_sum(tiled_mma, acc, [(a, b)], accumulate, steps, before_last)


def products(a: list, b: list) -> list:
    """The pairs whose products make up the product of two operands, each of one tensor or of a high and a low half.

    The product of both low halves is left out, about 2^-22 of the whole. Small products come first: the tensor cores
    truncate what they add to a large sum.
    """
    if len(a) == 1:
        return [(a[0], b[0])]
    return [(a[1], b[0]), (a[0], b[1]), (a[0], b[0])]


@cute.jit
def issue_sum(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    pairs: list,
    accumulate: cutlass.Constexpr[bool],
    steps: cutlass.Constexpr[int | None] = None,
    before_last: cutlass.Constexpr = None,
):
    """acc (+)= the sum of a b^T over the pairs (a, b), as one committed group; see `issue`."""
    # a copy of its own: ACCUMULATE is set on the Python object
    atom = cute.make_mma_atom(tiled_mma.op)
    warpgroup.fence()
    for i in cutlass.range_constexpr(len(pairs)):
        a, b = pairs[i]
        count = cute.size(a.shape[2]) if steps is None else steps
        for k in cutlass.range_constexpr(count):
            if cutlass.const_expr(before_last is not None and i == len(pairs) - 1 and k == count - 1):
                before_last()
            atom.set(warpgroup.Field.ACCUMULATE, accumulate or i + k != 0)
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
    warpgroup.commit_group()


def block_of_columns(b: cute.Tensor, block: int) -> cute.Tensor:
    """(MMA, 1, MMA_K) of one block of an operand b (MMA, MMA_N, MMA_K)."""
    columns = b[None, block, None]
    (size, steps), (stride, along_steps) = columns.shape, columns.stride
    layout = cute.make_layout((size, 1, steps), stride=(stride, 0, along_steps))
    return cute.make_tensor(columns.iterator, layout)

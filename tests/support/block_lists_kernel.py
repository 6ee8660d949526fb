"""The kernels of block lists, on the CPU by their PTX, with the launch's own arguments."""

from __future__ import annotations

import functools

import machine_code
import ptx_interpreter
import torch
from sm80_decode import Parameters

from onepass.geometry.integers import ceil_div
from onepass.kernels.arguments import BlockListsArguments
from onepass.kernels.launch import block_lists as launch

ARCH = "sm_80"
ANY = torch.tensor([0, 0, 2**30, 2**30])  # extremes that would make a difference: all is visible, and all exists


@functools.lru_cache(maxsize=64)
def programs(kernel: launch.Kernel) -> list[ptx_interpreter.Program]:
    code, ptx = machine_code.read_with_ptx(ARCH, functools.partial(launch.trace, kernel))
    # for sm_80 ptxas keeps one register in memory, between the two loops over blocks, where packed queries have a mask
    is_spilling = kernel.is_packed and not kernel.of_keys and "kinds" in kernel.fields
    assert code.spills <= (2 if is_spilling else 0), kernel
    return ptx_interpreter.parse_all(ptx)


def with_arbitrary_values(given: BlockListsArguments) -> BlockListsArguments:
    """Arguments whose outputs have values that nobody may read."""
    for extremes in (given.of_queries, given.of_keys):
        if extremes is not None:
            extremes.copy_(ANY)
    for t in (given.numbers, given.counts, given.turns):
        if t is not None:
            t.fill_(-1)
    return given


def run(kernel: launch.Kernel, *arguments, **order):
    """Run in place of the compiled kernel, and write to the tensors that a launch passes.

    Args: order: options of `ptx_interpreter.run`.
    """
    from onepass.kernels.device.memory_bound.block_lists import WARPS  # not at the top: it needs the compiler

    given, launches = with_arbitrary_values(BlockListsArguments(*arguments)), iter(programs(kernel))
    extremes = [t for t in (given.of_queries, given.of_keys) if t is not None]

    def run_next(*tensors: torch.Tensor, written: int = 1):
        """The next launch. Args: tensors: those of the lists; the first ones are written, the last of them by rows."""
        p = Parameters(1 << 22)
        # the last size of extremes and of counts is known when the kernel is compiled
        found = [(t, p.tensor(t, (0, 1, 2, 3), is_lse=t is given.numbers or t is given.turns)) for t in tensors]
        p.modifiers(given.modifiers)
        p.numbers(given.window_left, given.window_right)
        for t in (given.cu_seqlens_q, given.cu_seqlens_k, given.seqused_k):
            if t is not None:
                p.tensor(t)
        p.numbers(given.seqlen_q, given.seqlen_k, given.group)
        rows = tensors[written - 1]
        grid = ceil_div(rows.shape[2], WARPS), rows.shape[1], rows.shape[0]
        ptx_interpreter.run(next(launches), p.values, p.memory, grid, 32 * WARPS, 0, **order)
        for t, address in found[:written]:
            t.copy_(p.result(address, t))

    for t in extremes:
        run_next(t)
    run_next(given.numbers, given.counts, *extremes, written=2)
    if given.turns is not None:
        run_next(given.turns, *extremes)
    assert next(launches, None) is None


def prepared(problem, tile: tuple[int, int], of_keys: bool, **order):
    """What stands for `prepared` of kernels/launch/block_lists.py, without a check of whether lists are needed."""
    kernel = launch.kernel_of(problem, tile, of_keys)
    return functools.partial(launch.with_lists, functools.partial(run, kernel, **order), kernel, problem)

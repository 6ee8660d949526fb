"""The kernel of a backward's query bounds, on the CPU by its PTX, with the launch's own arguments."""

import functools

import machine_code
import ptx_interpreter
import torch
from sm80_decode import Parameters

from onepass.geometry.integers import ceil_div
from onepass.kernels.arguments import QueryBoundsArguments
from onepass.kernels.launch import query_bounds as launch

ARCH = "sm_80"


@functools.lru_cache(maxsize=64)
def programs(kernel: launch.Kernel) -> list[ptx_interpreter.Program]:
    code, ptx = machine_code.read_with_ptx(ARCH, functools.partial(launch.trace, kernel))
    assert code.spills == 0, kernel
    return ptx_interpreter.parse_all(ptx)


def run(kernel: launch.Kernel, *arguments, **order):
    """Run in place of the compiled kernel, and write to the tensors that a launch passes.

    Args: order: options of `ptx_interpreter.run`.
    """
    from onepass.kernels.device.memory_bound.query_bounds import WARPS  # not at the top: it needs the compiler

    given = QueryBoundsArguments(*arguments)
    lengths = [t for t in (given.cu_seqlens_q, given.cu_seqlens_k, given.seqused_k) if t is not None]
    of_blocks, of_tiles = programs(kernel)

    def parameters(*tensors):
        p = Parameters(1 << 22)
        return p, [p.tensor(t, tuple(range(t.dim()))) for t in tensors]

    def launched(program, p, t):
        grid = ceil_div(t.shape[2], WARPS), t.shape[1], t.shape[0]
        ptx_interpreter.run(program, p.values, p.memory, grid, 32 * WARPS, 0, **order)

    # arbitrary values that would make a difference: a block without rows that sees all keys
    given.extremes.copy_(torch.tensor([0, 0, 2**30, 2**30]))
    given.bounds.fill_(-1)
    p, (address,) = parameters(given.extremes)
    for t in given.modifiers:
        if t is not None:
            p.strided(t)
    p.numbers(given.window_left, given.window_right)
    for t in lengths:
        p.tensor(t)
    p.numbers(given.seqlen_q, given.seqlen_k, given.group)
    launched(of_blocks, p, given.extremes)
    given.extremes.copy_(p.result(address, given.extremes))
    p, (_, address) = parameters(given.extremes, given.bounds)
    for t in lengths:
        p.tensor(t)
    p.numbers(given.seqlen_q, given.seqlen_k)
    launched(of_tiles, p, given.bounds)
    given.bounds.copy_(p.result(address, given.bounds))


def kernel_of(problem, config, **order):
    """What stands for the compiled kernel of a problem."""
    return functools.partial(run, launch.kernel_of(problem, config), **order)

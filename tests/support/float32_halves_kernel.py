"""The kernel that splits float32 into two float16 halves, on the CPU by its PTX, with the launch's own arguments."""

import functools

import machine_code
import ptx_interpreter
from sm80_decode import Parameters

from onepass.kernels.config import HOPPER, head_dim_tile
from onepass.kernels.device.memory_bound import float32_halves
from onepass.kernels.launch import float32_halves as launch


@functools.lru_cache(maxsize=32)
def program(kernel: launch.Kernel) -> ptx_interpreter.Program:
    code, ptx = machine_code.read_with_ptx(HOPPER, functools.partial(launch.trace, kernel))
    assert code.spills == 0, kernel
    return ptx_interpreter.parse(ptx)


def run(kernel: launch.Kernel, x, target, scale, cu_seqlens, seqused, num_blocks):
    """Run in place of a compiled kernel, and write to the tensors that a launch passes."""
    parameters = Parameters(1 << 24)
    order = tuple(range(x.dim()))
    parameters.tensor(x, order)
    placed = [(parameters.tensor(target, order), target), (parameters.tensor(scale), scale)]
    for lengths in (cu_seqlens, seqused):
        if lengths is not None:
            parameters.tensor(lengths)
    parameters.numbers(num_blocks)
    batch = 1 if kernel.is_packed else x.shape[0]
    grid = x.shape[-2] * num_blocks * batch
    threads = float32_halves.num_threads(head_dim_tile(kernel.head_dim))
    ptx_interpreter.run(program(kernel), parameters.values, parameters.memory, grid, threads, 1 << 15)
    for address, t in placed:
        t.copy_(parameters.result(address, t))


def install(monkeypatch):
    """Make `launch.split` run on the CPU."""
    monkeypatch.setattr(launch, "kernel_of", lambda kernel: functools.partial(run, kernel))

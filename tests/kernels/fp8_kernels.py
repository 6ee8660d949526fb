"""The kernels that round to e4m3, on the CPU by their PTX, with the launch's own arguments."""

import functools
import struct

import machine_code
import ptx_interpreter
import torch
from sm80_decode import Parameters, integer

from onepass.kernels.fp8 import launch

ARCH = "sm_89"


@functools.lru_cache(maxsize=32)
def program(kernel: launch.Kernel) -> ptx_interpreter.Program:
    code, ptx = machine_code.read_with_ptx(ARCH, functools.partial(launch.trace, kernel))
    assert code.spills == 0, kernel
    return ptx_interpreter.parse(ptx)


class Arguments(Parameters):
    def known_but_last(self, t: torch.Tensor) -> int:
        """A tensor whose last size but one is known when the kernel is compiled."""
        address = self.put(t)
        numbers = [size for i, size in enumerate(t.shape) if i != t.dim() - 2]
        padding = [0] if len(numbers) % 2 else []
        form = f"<Q{len(numbers) + len(padding)}i{t.dim() - 1}q"
        self.values.append(struct.pack(form, address, *numbers, *padding, *t.stride()[:-1]))
        return address


def run(kernel: launch.Kernel, *arguments):
    """In place of a compiled kernel: writes to the tensors that a launch gives it."""
    parameters, placed = Arguments(1 << 25), []
    is_values, lengths = kernel.name == "values", [a for a in arguments if isinstance(a, torch.Tensor) and a.dim() == 1]
    x, target, descale, mean, *others = arguments
    signs = () if is_values or others[0] is None else others[0]
    parameters.tensor(x, tuple(range(x.dim())))
    if is_values:
        placed.append((parameters.known_but_last(target), target))
    else:
        placed.append((parameters.tensor(target, tuple(range(x.dim()))), target))
    if descale is not None:
        placed.append((parameters.tensor(descale), descale))
    number_of_mean = len(parameters.values)
    parameters.values += [integer(word) for word in signs]
    for t in lengths:
        parameters.tensor(t)
    if mean is not None:  # the last one in memory
        parameters.tensor(mean, (0, 1, 2))
        parameters.values.insert(number_of_mean, parameters.values.pop())
        parameters.end_here()
    blocks = target.shape[-1] // launch.BLOCK if is_values else others[-1]
    grid = x.shape[-2], blocks, 1 if kernel.is_packed else x.shape[0]
    threads = launch.default_threads(kernel.head_dim)
    ptx_interpreter.run(program(kernel), parameters.values, parameters.memory, grid, threads, 1 << 15)
    for address, t in placed:
        t.copy_(parameters.result(address, t))


def install(monkeypatch):
    """`launch.rows`, `.values` and `.quantize` run on the CPU."""
    monkeypatch.setattr(launch, "arch_of", lambda device: ARCH)
    monkeypatch.setattr(launch, "kernel_of", lambda kernel, arch: functools.partial(run, kernel))

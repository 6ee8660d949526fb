"""The kernels that round to e4m3, on the CPU by their PTX, with the launch's own arguments."""

import functools
import struct

import machine_code
import ptx_interpreter
import torch
from sm80_decode import Parameters

from onepass.api import fast_path
from onepass.kernels.launch import quantize as launch

ARCH = "sm_89"


# A kernel for packed sequences may move a few numbers through local memory, see `quantize.threads_of_sm`.
SPILLS_OF_PACKED = 8


@functools.lru_cache(maxsize=32)
def program(kernel: launch.Kernel | launch.LayoutKernel) -> ptx_interpreter.Program:
    code, ptx = machine_code.read_with_ptx(ARCH, functools.partial(launch.trace, kernel))
    assert code.spills <= (SPILLS_OF_PACKED if kernel.is_packed else 0), kernel
    return ptx_interpreter.parse(ptx)


class Arguments(Parameters):
    def known_but_last(self, t: torch.Tensor) -> int:
        """A tensor whose second to last size is known when the kernel is compiled."""
        address = self.put(t)
        numbers = [size for i, size in enumerate(t.shape) if i != t.dim() - 2]
        padding = [0] if len(numbers) % 2 else []
        form = f"<Q{len(numbers) + len(padding)}i{t.dim() - 1}q"
        self.values.append(struct.pack(form, address, *numbers, *padding, *t.stride()[:-1]))
        return address


def run(kernel: launch.Kernel | launch.LayoutKernel, *arguments):
    """Run in place of a compiled kernel, and write to the tensors that a launch passes."""
    if isinstance(kernel, launch.Kernel):
        run_quantize(kernel, *arguments)
    else:
        run_keys_last(kernel, *arguments)


def run_quantize(kernel: launch.Kernel, *arguments):
    inputs, targets, descales = arguments[:3], arguments[3:6], arguments[6:9]
    k_mean, v_mean, signs, *lengths = arguments[9:]
    parameters, written = Arguments(1 << 25), []
    for t in inputs:
        parameters.tensor(t, tuple(range(t.dim())))
    for i, t in enumerate(targets):
        is_transposed = i == 2 and kernel.keys_last
        written.append(parameters.known_but_last(t) if is_transposed else parameters.tensor(t, tuple(range(t.dim()))))
    written += [parameters.tensor(t) for t in descales]
    number_of_means = len(parameters.values)
    parameters.numbers(*(signs or ()))
    for t in lengths:
        if t is not None:
            parameters.tensor(t)
    counts = []
    for i, descale in enumerate(descales):
        heads, blocks = descale.shape[-2:]
        blocks += kernel.is_packed and not (i == 2 and kernel.keys_last)  # for rows that belong to no sequence
        parameters.divisors(heads, blocks)
        counts.append(heads * blocks * (1 if kernel.is_packed else descale.shape[0]))
    parameters.numbers(counts[0], counts[0] + counts[1])
    means = [mean for mean in (k_mean, v_mean) if mean is not None]
    for i, mean in enumerate(means):  # the last ones in memory
        parameters.tensor(mean, (0, 1, 2))
        parameters.values.insert(number_of_means + i, parameters.values.pop())
    if means:
        parameters.end_here()
    threads = launch.default_threads(max(kernel.head_dim, kernel.head_dim_v))
    ptx_interpreter.run(program(kernel), parameters.values, parameters.memory, sum(counts), threads, 1 << 15)
    for address, t in zip(written, (*targets, *descales), strict=True):
        t.copy_(parameters.result(address, t))


def run_keys_last(kernel: launch.LayoutKernel, v: torch.Tensor, target: torch.Tensor, cu_seqlens: torch.Tensor | None):
    parameters = Arguments(1 << 25)
    parameters.tensor(v, tuple(range(v.dim())))
    address = parameters.known_but_last(target)
    if cu_seqlens is not None:
        parameters.tensor(cu_seqlens)
    grid = v.shape[-2], target.shape[-1] // launch.SCALE_BLOCK, 1 if kernel.is_packed else v.shape[0]
    threads = launch.default_threads(kernel.head_dim_v)
    ptx_interpreter.run(program(kernel), parameters.values, parameters.memory, grid, threads, 1 << 15)
    target.copy_(parameters.result(address, target))


def install(monkeypatch):
    """Make `launch.prepare` and `launch.keys_last` run on the CPU."""
    monkeypatch.setattr(fast_path, "_forwards", {})
    monkeypatch.setattr(launch, "prepare", launch.prepare.__wrapped__)
    monkeypatch.setattr(launch, "arch_of", lambda device: ARCH)
    monkeypatch.setattr(launch, "kernel_of", lambda kernel, arch: functools.partial(run, kernel))

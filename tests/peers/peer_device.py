"""A CPU in the place of a CUDA device, for tests that create their tensors with device="cuda"."""

from __future__ import annotations

import functools
import types

import torch

FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
)
METHODS = ("to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
SUMS = ("__add__", "__radd__", "__sub__")
LARGEST_LOAD = 2**30  # bytes; some tests fill a GPU's memory, to no use on a CPU


def pretend_cuda(capability: tuple[int, int]) -> None:
    """Let device="cuda" mean the CPU in torch's functions, and let torch.cuda describe a GPU of this capability."""
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in METHODS:
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    for name in SUMS:
        setattr(torch.Tensor, name, _with_float32_scalar(getattr(torch.Tensor, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.is_cuda = property(lambda self: True)
    properties = types.SimpleNamespace(
        total_memory=80 * 2**30, major=capability[0], minor=capability[1], multi_processor_count=132, name="CPU"
    )
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.empty_cache = torch.cuda.synchronize = lambda *args, **kwargs: None


def _with_float32_scalar(method):
    """A sum of a 16-bit tensor and a float that rounds the float to float32, as a GPU does, and not to 16 bits.

    Tests derive tolerances from x + 0.3 - 0.3 - x, which would be 0 for an x of 0.
    """

    @functools.wraps(method)
    def summed(self, other):
        if isinstance(other, float) and self.dtype in (torch.float16, torch.bfloat16):
            return method(self.float(), other).to(self.dtype)
        return method(self, other)

    return summed


def _is_cuda(value: object) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


def _on_cpu(function):
    """A function whose arguments that are CUDA devices become the CPU."""

    @functools.wraps(function)
    def on_cpu(*args, **kwargs):
        args = tuple("cpu" if _is_cuda(a) else a for a in args)
        kwargs = {name: "cpu" if _is_cuda(value) else value for name, value in kwargs.items()}
        if kwargs.get("dtype") == torch.uint8 and args and isinstance(args[0], int) and args[0] > LARGEST_LOAD:
            args = (1, *args[1:])
        return function(*args, **kwargs)

    return on_cpu

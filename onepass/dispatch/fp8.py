"""The kernels that quantize to e4m3, on GPUs that have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..problem import AttentionInputs
from . import backends, choice


class QuantizationKernels(NamedTuple):
    """The kernels that quantize q, k and v on a GPU.

    Attributes:
        prepare: (problem, device, seed of the rotation or None, keys_last, has_k_mean, has_v_mean) ->
            ((inputs, k_mean, v_mean) -> tensors and descales); see kernels/launch/quantize.py.
        keys_last: whether v should have the layout that the FP8 attention kernel of this GPU reads.
    """

    prepare: Callable
    keys_last: bool


def quantization_kernels(inputs: AttentionInputs, granularity: str) -> QuantizationKernels | None:
    """The kernels that quantize these tensors on their GPU; None: plain PyTorch does it."""
    if not _has_e4m3_kernels(inputs.q):
        return None
    from ..kernels.launch import quantize as launch

    if launch.unsupported(inputs, granularity) is not None:
        return None
    backends.warn_if_unproven(inputs.q.device)
    return QuantizationKernels(launch.prepare, torch.cuda.get_device_capability(inputs.q.device) == (9, 0))


def keys_last_kernel(v: Tensor, cu_seqlens: Tensor | None) -> Callable | None:
    """The kernel (v, cu_seqlens) -> `onepass.fp8.keys_last` of an e4m3 v on its GPU; None: plain PyTorch does it."""
    if not _has_e4m3_kernels(v):
        return None
    from ..kernels.launch import quantize as launch

    return None if launch.unsupported_layout(v, cu_seqlens) is not None else launch.keys_last


def _has_e4m3_kernels(t: Tensor) -> bool:
    # torch.compile cannot trace a launch
    if t.device.type != "cuda" or torch.compiler.is_compiling() or choice.current() in choice.WITHOUT_KERNELS:
        return False
    # GPUs before compute capability 8.9 have no e4m3
    return torch.cuda.get_device_capability(t.device) >= (8, 9) and backends.compiler_refusal() is None

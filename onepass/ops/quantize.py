"""Quantization of q, k and v, by one kernel or in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..dispatch import attention as dispatch
from ..dispatch import backends
from ..dispatch import fp8 as e4m3_kernels
from ..kernels.config import LaunchConfig
from ..problem import AttentionInputs, AttentionProblem, Descales, Mask, Quantization
from ..problem.outputs import empty_as
from ..quantization.centering import as_rows, existing_keys, k_mean_scores, mean_of_keys, without_mean
from ..quantization.codec import E4M3, KV_BLOCK, Q_BLOCK, round_to_e4m3
from ..quantization.layout import keys_last_in_torch
from ..quantization.rotation import rotated
from ..validation.fp8 import QuantizedQKV
from .autocast import without_autocast


@dataclass(frozen=True)
class QuantizationKernel:
    """A kernel that quantizes q, k and v of certain sizes in one launch; it holds no tensor, and skips validation.

    Attributes:
        launch: see kernels/launch/quantize.py.
        attributes: the attributes of `QuantizedQKV` that are not tensors, equal for all results.
    """

    launch: Callable[..., tuple[Tensor, Tensor, Tensor, Descales]]
    attributes: dict[str, Any]

    def __call__(
        self, inputs: AttentionInputs, k_mean: Tensor | None = None, v_mean: Tensor | None = None
    ) -> QuantizedQKV:
        """The quantized tensors.

        Args:
            k_mean, v_mean: (batch, num_heads_kv, head_dim) float32, to be subtracted (k_mean after the rotation).
        """
        q, k, v, (q_descale, k_descale, v_descale) = self.launch(inputs, k_mean, v_mean)
        quantized = object.__new__(QuantizedQKV)
        quantized.__dict__.update(
            self.attributes, q=q, k=k, v=v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale
        )
        return quantized


def kernel_for(
    inputs: AttentionInputs, granularity: str, seed: int | None, center_k: bool, center_v: bool
) -> QuantizationKernel | None:
    """The kernel that quantizes these tensors; None: plain PyTorch does.

    Args:
        seed: seed of the rotation; None: q and k are not rotated.
    """
    kernels = e4m3_kernels.quantization_kernels(inputs, granularity)
    if kernels is None:
        return None
    options: dict[str, Any] = {"softmax_scale": 1.0, "mask": Mask(), "softcap": None, "deterministic": False}
    problem = AttentionProblem.of(inputs._replace(sinks=None), **options)
    launch = kernels.prepare(problem, inputs.q.device, seed, kernels.keys_last, center_k, center_v)
    attributes = {"q_block": Q_BLOCK, "kv_block": KV_BLOCK, "dtype": inputs.q.dtype, "rotation": seed}
    attributes |= {"score_shift": None, "v_mean": None, "v_keys_last": kernels.keys_last}
    return QuantizationKernel(launch, attributes)


def quantize(
    inputs: AttentionInputs,
    granularity: str,
    seed: int | None,
    center_k: bool,
    center_v: bool,
    kernel: QuantizationKernel | None,
) -> QuantizedQKV:
    """The tensors in e4m3, by the kernel or, if it is None, in plain PyTorch; the arguments have been checked."""
    q, k, v, _, cu_seqlens_q, cu_seqlens_k = inputs[:6]
    if kernel is not None and not (center_k or center_v):
        return kernel(inputs)
    with torch.no_grad(), without_autocast(q.device.type):
        k_mean = v_mean = score_shift = None
        exists = existing_keys(inputs)
        if center_k:
            k_mean = mean_of_keys(as_rows(k, exists), exists, cu_seqlens_k)
            score_shift = k_mean_scores(as_rows(q).float(), k_mean, cu_seqlens_q)
            score_shift = score_shift if cu_seqlens_q is None else score_shift.squeeze(0)
        if center_v:
            v_mean = mean_of_keys(as_rows(v, exists), exists, cu_seqlens_k)
        if kernel is not None:
            if k_mean is not None and seed is not None:
                k_mean = rotated(k_mean, seed)  # (k - mean) M = k M - mean M
            return replace(kernel(inputs, k_mean, v_mean), score_shift=score_shift, v_mean=v_mean)
        (q_e4m3, k_e4m3, v_e4m3), descales = _quantize_in_torch(inputs, granularity, seed, exists, k_mean, v_mean)
    q_block, kv_block = {"row": (1, 1), "block": (Q_BLOCK, KV_BLOCK)}.get(granularity, (None, None))
    return QuantizedQKV(
        q=q_e4m3,
        k=k_e4m3,
        v=v_e4m3,
        q_descale=descales[0],
        k_descale=descales[1],
        v_descale=descales[2],
        q_block=q_block,
        kv_block=kv_block,
        dtype=q.dtype,
        score_shift=score_shift,
        v_mean=v_mean,
        rotation=seed,
    )


def _quantize_in_torch(
    inputs: AttentionInputs,
    granularity: str,
    seed: int | None,
    exists: Tensor | None,
    k_mean: Tensor | None,
    v_mean: Tensor | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """q, k and v in e4m3, and their descales.

    Args:
        seed: seed of the rotation; None: q and k are not rotated.
        exists: see `existing_keys`. k_mean, v_mean: the means to subtract, or None.
    """
    q, k, v, _, cu_seqlens_q, cu_seqlens_k = inputs[:6]
    # rows that belong to no sequence must not reach a scale
    has_sequence = None if cu_seqlens_q is None else (torch.arange(len(q), device=q.device) < cu_seqlens_q[-1])[None]
    x_q, x_k, x_v = (as_rows(t, mask).float() for t, mask in ((q, has_sequence), (k, exists), (v, exists)))
    if k_mean is not None:
        x_k = without_mean(x_k, k_mean, exists, cu_seqlens_k)
    if v_mean is not None:
        x_v = without_mean(x_v, v_mean, exists, cu_seqlens_k)
    if seed is not None:
        x_q, x_k = rotated(x_q, seed), rotated(x_k, seed)
    tensors: list[Tensor] = []
    descales: list[Tensor] = []
    for like, x, block, cu_seqlens in (
        (q, x_q, Q_BLOCK, cu_seqlens_q),
        (k, x_k, KV_BLOCK, cu_seqlens_k),
        (v, x_v, KV_BLOCK, cu_seqlens_k),
    ):
        rounded, descale = round_to_e4m3(x, granularity, block, cu_seqlens)
        stored = empty_as(like, like.shape[-1], E4M3)
        tensors.append(stored.copy_(rounded if like.dim() == 4 else rounded.squeeze(0)))
        descales.append(descale)
    return tensors, descales


# ---------------------------------------------------------------- V as tensor cores take it


def keys_last(v: Tensor, cu_seqlens_k: Tensor | None = None) -> Tensor:
    """V in the layout that the Hopper kernel reads: transposed, with the keys in the order of P in registers.

    Args:
        v: (batch, seqlen_k, num_heads_kv, head_dim_v), e4m3. Packed sequences: (total_k, num_heads_kv, head_dim_v).
        cu_seqlens_k: (batch + 1,) int32, the offsets of packed sequences.

    Returns: e4m3, contiguous, (batch, num_heads_kv, head_dim_v, seqlen_k rounded up to a multiple of 64); for packed
    sequences (num_heads_kv, head_dim_v, (total_k // 64 + batch) * 64), where sequence b begins at
    (cu_seqlens_k[b] // 64 + b) * 64. Within every 16 keys, position 4q + 2h + e holds key 8h + 2q + e
    (q = 0..3, h and e = 0, 1; kernels/device/blocks/softmax/scaled.py says why). Other positions hold zeros.
    """
    kernel = e4m3_kernels.keys_last_kernel(v, cu_seqlens_k)
    return keys_last_in_torch(v, cu_seqlens_k) if kernel is None else kernel(v, cu_seqlens_k)


def quantized_problem(problem: AttentionProblem, exact_lse: bool, v_keys_last: bool = False) -> AttentionProblem:
    """The problem that the forward of `attention(..., precision="fp8")` computes."""
    quantization = Quantization(problem.dtype, Q_BLOCK, KV_BLOCK, v_keys_last, exact_lse)
    return replace(problem, dtype=E4M3, quantization=quantization)


def quantized_call(
    problem: AttentionProblem, inputs: AttentionInputs, exact_lse: bool
) -> tuple[AttentionProblem, AttentionInputs]:
    """The `quantized_problem` of a call, and its inputs, quantized with the defaults of `quantize_fp8`."""
    kernel = kernel_for(inputs, "block", 0, False, False)
    quantized = quantize(inputs, "block", 0, False, False, kernel)
    return quantized_problem(problem, exact_lse, quantized.v_keys_last), _inputs_of(quantized, inputs)


def _inputs_of(quantized: QuantizedQKV, inputs: AttentionInputs) -> AttentionInputs:
    """The inputs of a call with q, k and v replaced by quantized tensors."""
    return inputs._replace(q=quantized.q, k=quantized.k, v=quantized.v, descales=quantized.descales)


def prepare_call(
    backend: str, problem: AttentionProblem, inputs: AttentionInputs, tuning: LaunchConfig | None, exact_lse: bool
) -> backends.Forward:
    """The forward of `attention(..., precision="fp8")` for repeated calls without gradients. It holds no tensor."""
    kernel = kernel_for(inputs, "block", 0, False, False)
    v_keys_last = kernel is not None and kernel.attributes["v_keys_last"]
    problem = quantized_problem(problem, exact_lse, v_keys_last)
    forward = dispatch.prepare(backend, problem, inputs.q.device, tuning)

    def quantize_and_attend(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        quantized = quantize(inputs, "block", 0, False, False, kernel)
        return forward(_inputs_of(quantized, inputs))

    return quantize_and_attend

"""Quantised tensors in place of q, k and v, and who makes them: one kernel, or plain torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..dispatch import attention as dispatch
from ..dispatch import backends
from ..dispatch import fp8 as e4m3_kernels
from ..kernels.config import LaunchConfig
from ..problem import AttentionInputs, AttentionProblem, Descales, Mask, Quantization, QuantizedInputs
from ..problem.outputs import empty_as
from ..quantization.centering import as_rows, dots, existing_keys, mean_of_keys, minus
from ..quantization.codec import E4M3, KV_BLOCK, Q_BLOCK, round_to_e4m3
from ..quantization.dequantize import dequantized_tensors
from ..quantization.layout import keys_last_in_torch
from ..quantization.rotation import rotated
from ..validation import fp8


@dataclass(frozen=True, eq=False)
class QuantizedQKV:
    """Q, K and V in e4m3 with their scales, in place of q, k and v of a call: real value = stored value * descale.

        onepass.attention(onepass.quantize_fp8(q, k, v), causal=True)

    `quantize_fp8` makes it; tensors that were quantised elsewhere need q, k, v and their descales only. In shapes,
    seqlen is seqlen_q or seqlen_k and num_heads is num_heads_q or num_heads_kv.

    Attributes:
        q, k, v: float8_e4m3fn, shapes as for `attention`, or as for `attention_varlen`. With v_keys_last, v is what
            `keys_last` makes of it.
        q_descale, k_descale, v_descale: float32, on q's device, finite and above 0. Each by itself one of
            (): one for the tensor;
            (batch, num_heads): one for each head of each batch entry or packed sequence;
            (batch, num_heads, ceil(seqlen / block)): one for each block of rows of each head; of packed sequences
                (num_heads, total // block + batch), where the blocks of sequence b start at cu_seqlens[b] // block + b
                (with a block given, they cannot be by heads).
        q_block, kv_block: rows of a block of q, and of k and v; None: no descale of theirs is by blocks.
        dtype: of out: float32, bfloat16 or float16.
        score_shift: (batch, num_heads_q, seqlen_q) or (num_heads_q, total_q) float32: what subtracting from K took from
            every q.k of a row, before softmax_scale. It is added to lse again. None: nothing.
        v_mean: (batch, num_heads_kv, head_dim_v) float32: what was subtracted from V, for each batch entry or packed
            sequence; added to out again. None: nothing.
        rotation: seed of the rotation of q and k; None: none. For information: scores do not depend on it.
        v_keys_last: v has its keys contiguous and in the order in which tensor cores take them, see `keys_last`: what
            the Hopper kernel reads without preparation. Other backends undo it; results are the same.

    Raises: TypeError or ValueError with what was expected and given.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor
    q_block: int | None = None
    kv_block: int | None = None
    dtype: torch.dtype = torch.bfloat16
    score_shift: Tensor | None = None
    v_mean: Tensor | None = None
    rotation: int | None = None
    v_keys_last: bool = False

    def __post_init__(self) -> None:
        fp8.check_quantized(self)
        for name in ("q_block", "kv_block"):
            if type(getattr(self, name)) not in (int, type(None)):
                object.__setattr__(self, name, int(getattr(self, name)))  # of numpy
        if type(self.v_keys_last) is not bool:
            object.__setattr__(self, "v_keys_last", bool(self.v_keys_last))

    @property
    def quantization(self) -> Quantization:
        return Quantization(self.dtype, self.q_block, self.kv_block, self.v_keys_last)

    @property
    def descales(self) -> Descales:
        return Descales(self.q_descale, self.k_descale, self.v_descale)

    def dequantize(
        self, *, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v in float32 as attention computes with them: rotated, and without what was subtracted.

        Args: cu_seqlens_q, cu_seqlens_k: of packed sequences, as for `quantize_fp8`.
        Raises: TypeError or ValueError with what was expected and given.
        """
        fp8.check_dequantize(self, cu_seqlens_q, cu_seqlens_k)
        tensors = self.q, self.k, self.v
        return dequantized_tensors(self.quantization, *tensors, self.descales, cu_seqlens_q, cu_seqlens_k)


@dataclass(frozen=True)
class ByKernel:
    """Tensors of certain sizes quantised in one launch; holds no tensor, and its results are not checked again.

    Attributes:
        launch: see kernels/launch/quantize.py.
        attributes: what all results have beside their tensors.
    """

    launch: Callable[..., tuple[Tensor, Tensor, Tensor, Descales]]
    attributes: dict[str, Any]

    def __call__(
        self, inputs: AttentionInputs, k_mean: Tensor | None = None, v_mean: Tensor | None = None
    ) -> QuantizedQKV:
        """The tensors, quantised.

        Args: k_mean, v_mean: (batch, num_heads_kv, head_dim) float32, to be subtracted (k_mean after the rotation).
        """
        q, k, v, (q_descale, k_descale, v_descale) = self.launch(inputs, k_mean, v_mean)
        quantized = object.__new__(QuantizedQKV)
        quantized.__dict__.update(
            self.attributes, q=q, k=k, v=v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale
        )
        return quantized


def kernel_for(
    inputs: AttentionInputs, granularity: str, seed: int | None, center_k: bool, center_v: bool
) -> ByKernel | None:
    """How a kernel quantises these tensors; None: plain torch does. Args: seed: of the rotation; None: none."""
    kernels = e4m3_kernels.quantization_kernels(inputs, granularity)
    if kernels is None:
        return None
    options: dict[str, Any] = {"softmax_scale": 1.0, "mask": Mask(), "softcap": None, "deterministic": False}
    problem = AttentionProblem.of(inputs._replace(sinks=None), **options)
    launch = kernels.prepare(problem, inputs.q.device, seed, kernels.keys_last, center_k, center_v)
    attributes = {"q_block": Q_BLOCK, "kv_block": KV_BLOCK, "dtype": inputs.q.dtype, "rotation": seed}
    attributes |= {"score_shift": None, "v_mean": None, "v_keys_last": kernels.keys_last}
    return ByKernel(launch, attributes)


def quantize(
    inputs: AttentionInputs,
    granularity: str,
    seed: int | None,
    center_k: bool,
    center_v: bool,
    by_kernel: ByKernel | None,
) -> QuantizedQKV:
    q, k, v, _, cu_seqlens_q, cu_seqlens_k, _ = inputs
    if by_kernel is not None and not (center_k or center_v):
        return by_kernel(inputs)
    with torch.no_grad(), without_autocast(q):
        k_mean = v_mean = score_shift = None
        exists = existing_keys(inputs)
        if center_k:
            k_mean = mean_of_keys(as_rows(k, exists), exists, cu_seqlens_k)
            score_shift = dots(as_rows(q).float(), k_mean, cu_seqlens_q)
            score_shift = score_shift if cu_seqlens_q is None else score_shift.squeeze(0)
        if center_v:
            v_mean = mean_of_keys(as_rows(v, exists), exists, cu_seqlens_k)
        if by_kernel is not None:
            if k_mean is not None and seed is not None:
                k_mean = rotated(k_mean, seed)  # (k - mean) M = k M - mean M
            return replace(by_kernel(inputs, k_mean, v_mean), score_shift=score_shift, v_mean=v_mean)
        parts, descales = _quantize_in_torch(inputs, granularity, seed, exists, k_mean, v_mean)
    q_block, kv_block = {"row": (1, 1), "block": (Q_BLOCK, KV_BLOCK)}.get(granularity, (None, None))
    return QuantizedQKV(
        q=parts[0],
        k=parts[1],
        v=parts[2],
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


def without_autocast(t: Tensor) -> contextlib.AbstractContextManager:
    """Sums and products of tensors on its device are of the dtypes that they state, whatever the caller has chosen."""
    device = t.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def _quantize_in_torch(
    inputs: AttentionInputs,
    granularity: str,
    seed: int | None,
    exists: Tensor | None,
    k_mean: Tensor | None,
    v_mean: Tensor | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """q, k and v in e4m3, and their descales. Args: seed: of the rotation; None: none."""
    q, k, v, _, cu_seqlens_q, cu_seqlens_k, _ = inputs
    # rows of no sequence must not reach a scale
    of_sequences = None if cu_seqlens_q is None else (torch.arange(len(q), device=q.device) < cu_seqlens_q[-1])[None]
    x_q, x_k, x_v = (as_rows(t, mask).float() for t, mask in ((q, of_sequences), (k, exists), (v, exists)))
    if k_mean is not None:
        x_k = minus(x_k, k_mean, exists, cu_seqlens_k)
    if v_mean is not None:
        x_v = minus(x_v, v_mean, exists, cu_seqlens_k)
    if seed is not None:
        x_q, x_k = rotated(x_q, seed), rotated(x_k, seed)
    parts: list[Tensor] = []
    descales: list[Tensor] = []
    for like, x, block, cu_seqlens in (
        (q, x_q, Q_BLOCK, cu_seqlens_q),
        (k, x_k, KV_BLOCK, cu_seqlens_k),
        (v, x_v, KV_BLOCK, cu_seqlens_k),
    ):
        rounded, descale = round_to_e4m3(x, granularity, block, cu_seqlens)
        stored = empty_as(like, like.shape[-1], E4M3)
        parts.append(stored.copy_(rounded if like.dim() == 4 else rounded.squeeze(0)))
        descales.append(descale)
    return parts, descales


# ---------------------------------------------------------------- V as tensor cores take it


def keys_last(v: Tensor, cu_seqlens_k: Tensor | None = None) -> Tensor:
    """V as the Hopper kernel reads it: transposed, and the keys in the order in which P lies in registers.

    Args:
        v: (batch, seqlen_k, num_heads_kv, head_dim_v), e4m3. Packed sequences: (total_k, num_heads_kv, head_dim_v).
        cu_seqlens_k: (batch + 1,) int32 of packed sequences.

    Returns: e4m3, contiguous, (batch, num_heads_kv, head_dim_v, seqlen_k up to a multiple of 64); of packed sequences
        (num_heads_kv, head_dim_v, (total_k // 64 + batch) * 64), where sequence b begins at
        (cu_seqlens_k[b] // 64 + b) * 64. Within every 16 keys the places 4q + 2h + e hold the keys 8h + 2q + e
        (q = 0..3, h and e = 0, 1; blocks/softmax/scaled.py says why). Zeros where there is no key.
    """
    kernel = e4m3_kernels.keys_last_kernel(v, cu_seqlens_k)
    return keys_last_in_torch(v, cu_seqlens_k) if kernel is None else kernel(v, cu_seqlens_k)


def quantized_problem(problem: AttentionProblem) -> AttentionProblem:
    """What the forward of `attention(..., precision="fp8")` computes."""
    return replace(problem, dtype=E4M3, quantization=Quantization(problem.dtype, Q_BLOCK, KV_BLOCK))


def quantized_call(problem: AttentionProblem, inputs: AttentionInputs) -> tuple[AttentionProblem, QuantizedInputs]:
    """That problem, and what it is computed from: q, k and v with the defaults of `quantize_fp8`."""
    by_kernel = kernel_for(inputs, "block", 0, False, False)
    quantized = quantize(inputs, "block", 0, False, False, by_kernel)
    return replace(problem, dtype=E4M3, quantization=quantized.quantization), _inputs_of(quantized, inputs)


def _inputs_of(quantized: QuantizedQKV, inputs: AttentionInputs) -> QuantizedInputs:
    """The inputs of a call with q, k and v replaced by quantised tensors."""
    return QuantizedInputs(quantized.q, quantized.k, quantized.v, quantized.descales, *inputs[3:])


def prepare_call(
    backend: str, problem: AttentionProblem, inputs: AttentionInputs, tuning: LaunchConfig | None
) -> backends.Forward:
    """The forward of `attention(..., precision="fp8")` for calls alike, without gradients; holds no tensor."""
    by_kernel = kernel_for(inputs, "block", 0, False, False)
    keys_last = by_kernel is not None and by_kernel.attributes["v_keys_last"]
    quantization = Quantization(problem.dtype, Q_BLOCK, KV_BLOCK, keys_last)
    of_fp8 = replace(problem, dtype=E4M3, quantization=quantization)
    forward = dispatch.prepare(backend, of_fp8, inputs.q.device, tuning)

    def quantize_and_attend(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        quantized = quantize(inputs, "block", 0, False, False, by_kernel)
        return forward(_inputs_of(quantized, inputs))

    return quantize_and_attend

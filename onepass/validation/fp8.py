"""Checks of FP8 calls: tensors to be quantized, and `QuantizedQKV`, which checks its tensors and descales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..problem import V_KEYS, AttentionInputs, AttentionProblem, Descales, Quantization
from ..quantization.dequantize import dequantized_tensors
from .attention import PACKED, checked_options, has_offsets
from .lost_gradients import refuse_lost_gradients
from .modifiers import given_modifiers, refuse_modifiers
from .scalars import check_block, check_flag
from .tensors import (
    E4M3,
    PACKED_DIMS,
    QUANTIZABLE_DTYPES,
    check_dense,
    check_float32,
    check_heads,
    check_int32,
    check_max_seqlens,
    check_packed,
    check_ranks,
    check_tensor,
    check_tensors,
    shape_of,
    short_name,
)


@dataclass(frozen=True, eq=False)
class QuantizedQKV:
    """Q, K and V in e4m3 with their descales, instead of q, k and v of a call: real value = stored value * descale.

        onepass.attention(onepass.quantize_fp8(q, k, v), causal=True)

    `quantize_fp8` returns one; tensors that were quantized by other code need only q, k, v and their descales. In
    shapes, seqlen is seqlen_q or seqlen_k and num_heads is num_heads_q or num_heads_kv.

    Attributes:
        q, k, v: float8_e4m3fn, shapes as for `attention`, or as for `attention_varlen`. With v_keys_last, v has the
            layout that `keys_last` returns.
        q_descale, k_descale, v_descale: float32, on q's device, finite and above 0 (values are not checked; with others
            the result is undefined). Each has one of these shapes:
            (): one descale for the tensor;
            (batch, num_heads): one for each head of each batch entry or packed sequence;
            (batch, num_heads, ceil(seqlen / block)): one for each block of rows of each head; for packed sequences
                (num_heads, total // block + batch), where the blocks of sequence b start at cu_seqlens[b] // block + b
                (packed sequences with a block cannot have one descale per head).
        q_block, kv_block: rows of a block of q, and of k and v; None: none of their descales is by blocks.
        dtype: dtype of out: float32, bfloat16 or float16.
        score_shift: (batch, num_heads_q, seqlen_q) or (num_heads_q, total_q) float32: how much subtracting from K
            lowered every q.k of a row, before softmax_scale. It is added to lse again. None: K is unchanged.
        v_mean: (batch, num_heads_kv, head_dim_v) float32: the vector that was subtracted from V, for each batch entry
            or packed sequence. It is added to out again. None: V is unchanged.
        rotation: seed of the rotation of q and k; None: they are not rotated. For information only: scores do not
            depend on it.
        v_keys_last: v has its keys contiguous and in the order in which tensor cores take them, see `keys_last`. The
            Hopper kernel reads this layout without preparation. Other backends undo it; results are the same.

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
        check_quantized(self)
        for name in ("q_block", "kv_block"):
            if type(getattr(self, name)) not in (int, type(None)):
                object.__setattr__(self, name, int(getattr(self, name)))  # an integer of numpy
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
        """q, k, v in float32 as attention computes with them: rotated, and with means still subtracted.

        Args:
            cu_seqlens_q, cu_seqlens_k: offsets of packed sequences, as for `quantize_fp8`.
        Raises: TypeError or ValueError with what was expected and given.
        """
        check_dequantize(self, cu_seqlens_q, cu_seqlens_k)
        tensors = self.q, self.k, self.v
        return dequantized_tensors(self.quantization, *tensors, self.descales, cu_seqlens_q, cu_seqlens_k)


def check_quantizable(q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_k: Any) -> None:
    """Check the tensors of `onepass.quantize_fp8`; raises like `check_attention`."""
    check_tensors({"q": q, "k": k, "v": v}, QUANTIZABLE_DTYPES)
    if cu_seqlens_q is None and cu_seqlens_k is None:
        check_dense(q, k, v, seqused_k)
    else:
        check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k)


def check_quantized(quantized: QuantizedQKV) -> None:
    """Check the tensors of a `onepass.QuantizedQKV`; the number of packed sequences is not known yet."""
    q, k, v = quantized.q, quantized.k, quantized.v
    check_tensors({"q": q, "k": k, "v": v}, (E4M3,))
    check_flag("v_keys_last", quantized.v_keys_last)
    v = _v_stand_in(k, v) if quantized.v_keys_last else v
    if q.dim() == 3:
        check_ranks({"q": q, "k": k, "v": v}, PACKED_DIMS, 3)
        check_heads(q, k, v)
    else:
        check_dense(q, k, v, None)
    if not isinstance(quantized.dtype, torch.dtype) or quantized.dtype not in QUANTIZABLE_DTYPES:
        expected = ", ".join(short_name(d) for d in QUANTIZABLE_DTYPES)
        raise TypeError(f"dtype: expected {expected}, the dtype of out, got {quantized.dtype!r}")
    for name in ("q_block", "kv_block"):
        check_block(name, getattr(quantized, name))
    for name, t, block in (
        ("q_descale", q, quantized.q_block),
        ("k_descale", k, quantized.kv_block),
        ("v_descale", v, quantized.kv_block),
    ):
        check_float32(name, getattr(quantized, name), q.device)
        _check_descale(name, getattr(quantized, name), t, block)
    is_packed, batch = q.dim() == 3, q.shape[0]
    if quantized.score_shift is not None:
        check_float32("score_shift", quantized.score_shift, q.device)
        expected_shape = (q.shape[1], q.shape[0]) if is_packed else (batch, q.shape[2], q.shape[1])
        if tuple(quantized.score_shift.shape) != expected_shape:
            raise ValueError(f"score_shift: expected shape {expected_shape}, got {shape_of(quantized.score_shift)}")
    if quantized.v_mean is not None:
        v_mean = quantized.v_mean
        check_float32("v_mean", v_mean, q.device)
        expected_tail = (v.shape[-2], v.shape[-1])
        if v_mean.dim() != 3 or v_mean.shape[1:] != expected_tail or (not is_packed and v_mean.shape[0] != batch):
            expected = f"({'batch' if is_packed else batch}, {expected_tail[0]}, {expected_tail[1]})"
            raise ValueError(f"v_mean: expected shape {expected}, got {shape_of(v_mean)}")


def check_dequantize(quantized: QuantizedQKV, cu_seqlens_q: Any, cu_seqlens_k: Any) -> None:
    """Check the offsets of `QuantizedQKV.dequantize`: packed sequences need them if a descale or v depends on them."""
    is_packed = quantized.q.dim() == 3
    needed = {
        "cu_seqlens_q": quantized.q_descale.dim() > 0,
        "cu_seqlens_k": quantized.v_keys_last or quantized.k_descale.dim() > 0 or quantized.v_descale.dim() > 0,
    }
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if offsets is None and not (is_packed and needed[name]):
            continue
        check_tensor(name, offsets, "an int32 torch.Tensor")
        if not is_packed:
            raise ValueError(f"{name}: expected None with tensors that are not packed, got a tensor")
        if offsets.dim() != 1 or offsets.shape[0] < 1:
            raise ValueError(f"{name}: expected shape (batch + 1,), got {shape_of(offsets)}")
        batch = offsets.shape[0] - 1
        check_int32(name, offsets, (batch + 1,), "batch + 1", quantized.q.device)
        v = quantized.v
        if quantized.v_keys_last and name == "cu_seqlens_k":
            v = _v_stand_in(quantized.k, v, batch)
        for descale_name, t, block in (
            ("q_descale", quantized.q, quantized.q_block),
            ("k_descale", quantized.k, quantized.kv_block),
            ("v_descale", v, quantized.kv_block),
        ):
            if (descale_name == "q_descale") == (name == "cu_seqlens_q"):
                _check_descale(descale_name, getattr(quantized, descale_name), t, block, batch)


def _v_stand_in(k: torch.Tensor, v: torch.Tensor, batch: int | None = None) -> torch.Tensor:
    """A tensor with the shape that v had before `fp8.keys_last`, without its data; checks the shape of v.

    Args:
        batch: the number of packed sequences, once it is known.
    """
    if k.dim() not in (3, 4) or v.dim() != k.dim():
        raise ValueError(f"v: expected as many dimensions as k, {k.dim()}, got shape {shape_of(v)}")
    total, heads, head_dim_v = k.shape[-3], k.shape[-2], v.shape[-2]
    least = total // V_KEYS * V_KEYS
    if k.dim() == 4:
        is_right = tuple(v.shape) == (k.shape[0], heads, head_dim_v, -(-total // V_KEYS) * V_KEYS)
    elif batch is None:
        is_right = v.shape[0] == heads and v.shape[-1] >= least and v.shape[-1] % V_KEYS == 0
    else:
        is_right = v.shape[0] == heads and v.shape[-1] == least + V_KEYS * batch
    if not is_right:  # lengths become text only here: torch.compile would treat such a length as a constant
        length = f"{least} + {V_KEYS} * batch" if batch is None else str(least + V_KEYS * batch)
        length = f"{-(-total // V_KEYS) * V_KEYS}" if k.dim() == 4 else length
        leading = f"{k.shape[0]}, " if k.dim() == 4 else ""
        raise ValueError(
            f"v: expected shape ({leading}{heads}, {head_dim_v}, {length}) with v_keys_last, got {shape_of(v)}"
        )
    return k[..., :1].expand(*k.shape[:-1], head_dim_v)


def _check_descale(
    name: str, descale: torch.Tensor, t: torch.Tensor, block: int | None, batch: int | None = None
) -> None:
    """Check the shape of the descale of tensor t. Args: batch: the number of packed sequences, once it is known."""
    if descale.dim() == 0:
        return
    heads, total, shape = t.shape[-2], t.shape[-3], tuple(descale.shape)
    if t.dim() == 4:
        is_right = shape == (t.shape[0], heads)
        if block is not None:
            is_right = is_right or shape == (t.shape[0], heads, -(-total // block))
    elif block is None:
        is_right = len(shape) == 2 and shape[1] == heads and (batch is None or shape[0] == batch)
    else:
        least = total // block
        is_right = len(shape) == 2 and shape[0] == heads
        is_right = is_right and (shape[1] >= least if batch is None else shape[1] == least + batch)
    if is_right:
        return
    # lengths become text only here: torch.compile would treat such a length as a constant
    if t.dim() == 4:
        allowed = f"({t.shape[0]}, {heads})"
        allowed += "" if block is None else f" or ({t.shape[0]}, {heads}, {-(-total // block)})"
    elif block is None:
        allowed = f"({'batch' if batch is None else batch}, {heads})"
    else:
        allowed = f"({heads}, {f'{total // block} + batch' if batch is None else total // block + batch})"
    blocks = "" if block is None else f" with blocks of {block} rows"
    raise ValueError(f"{name}: expected shape () or {allowed}{blocks}, got {shape_of(descale)}")


def check_quantized_call(
    quantized: QuantizedQKV,
    k: Any,
    v: Any,
    *,
    precision: Any = None,
    seqused_k: Any = None,
    dropout_p: Any = 0.0,
    **options: Any,
) -> tuple[AttentionInputs, AttentionProblem]:
    """`check_attention` of a call with a `QuantizedQKV`."""
    given, block_mask = given_modifiers(options), options.pop("block_mask", None)
    given |= {} if block_mask is None else {"block_mask": block_mask}
    refuse_modifiers("with a QuantizedQKV", given, dropout_p)
    for name, value in (("k", k), ("v", v), ("precision", precision)):
        if value is not None:
            raise TypeError(f"{name}: expected None with a QuantizedQKV, got {type(value).__name__}")
    cu_seqlens_q = cu_seqlens_k = None
    tensors = quantized.q, quantized.k, quantized.v
    in_rows = tensors if not quantized.v_keys_last else (*tensors[:2], _v_stand_in(*tensors[1:]))
    if has_offsets(options):
        cu_seqlens_q, cu_seqlens_k, *max_seqlens = (options.pop(name, None) for name in PACKED)
        check_packed(*in_rows, cu_seqlens_q, cu_seqlens_k, seqused_k)
        check_max_seqlens(*max_seqlens)
        batch = cu_seqlens_q.shape[0] - 1
        if quantized.v_keys_last:
            _v_stand_in(*tensors[1:], batch)
        for name, t, block in zip(
            ("q_descale", "k_descale", "v_descale"),
            in_rows,
            (quantized.q_block, quantized.kv_block, quantized.kv_block),
            strict=True,
        ):
            _check_descale(name, getattr(quantized, name), t, block, batch)
        if quantized.v_mean is not None and quantized.v_mean.shape[0] != batch:
            raise ValueError(f"v_mean: expected batch {batch} like cu_seqlens_q, got {quantized.v_mean.shape[0]}")
    else:
        check_dense(*in_rows, seqused_k)
    if quantized.score_shift is not None and options.get("softcap") is not None:
        raise ValueError(
            "softcap: expected None where the mean of k was subtracted (center_k=True): it changes capped scores, "
            f"got {options['softcap']}"
        )
    sinks = options.get("sinks")
    checked = checked_options(quantized.q, **options)
    names = "q", "k", "v", "q_descale", "k_descale", "v_descale", "score_shift", "v_mean"
    refuse_lost_gradients({name: getattr(quantized, name) for name in names} | {"sinks": sinks})
    # sinks are compared with the corrected scores by means of lse (see quantization/centering.py)
    exact_lse = bool(options.get("return_lse")) or (sinks is not None and quantized.score_shift is not None)
    quantization = replace(quantized.quantization, exact_lse=exact_lse)
    inputs = AttentionInputs(*tensors, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, descales=quantized.descales)
    return inputs, AttentionProblem.of(inputs, **checked, quantization=quantization)

"""Checks of single tensors, and of the agreement of a call's tensors: devices, dtypes, ranks, shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..problem.arguments import SUPPORTED_DTYPES
from ..quantization.codec import E4M3
from . import layout_hints
from .scalars import check_int

QUANTIZABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DENSE_DIMS = "(batch, seqlen, num_heads, head_dim)"
PACKED_DIMS = "(total_tokens, num_heads, head_dim)"
LARGEST_TENSOR = 2**56  # elements; 64 bits still count their bytes


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_names(dtypes: Sequence[torch.dtype]) -> str:
    """Names of dtypes for a message: "float32, bfloat16 or float16"."""
    *most, last = map(short_name, dtypes)
    return f"{', '.join(most)} or {last}" if most else last


def shape_of(t: torch.Tensor) -> str:
    return str(tuple(t.shape))


def shape_of_values(keys: torch.Tensor) -> str:
    """The shape of the values of these keys, for a message."""
    return f"({', '.join(map(str, keys.shape[:-1]))}, head_dim_v)"


def check_tensor(name: str, t: Any, expected: str = "a torch.Tensor") -> torch.Tensor:
    """A dense tensor: one whose shape and strides say where its elements are in memory."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: expected {expected}, got {type(t).__name__}")
    if t.is_nested:  # some nested tensors have no shape, and some claim to be strided
        hint = " (sequences of different lengths are packed: onepass.attention_varlen)"
        raise TypeError(f"{name}: expected {expected} of one shape, got a nested tensor{hint}")
    if t.layout != torch.strided:
        raise TypeError(f"{name}: expected a strided (dense) tensor, got layout {t.layout}")
    return t


def tensor_of_shape(name: str, shape: Sequence[Any], dtype: Any, dtype_name: str = "dtype") -> torch.Tensor:
    """A tensor on the "meta" device for one whose shape alone is known."""
    if not isinstance(dtype, torch.dtype):
        shape_given = f"with the shape {tuple(shape)} of {name}"
        raise TypeError(f"{dtype_name}: expected a torch.dtype {shape_given}, got {dtype!r}")
    sizes = [check_int(name, size, "a shape of int", least=0) for size in shape]
    if math.prod(sizes) > LARGEST_TENSOR:
        raise ValueError(f"{name}: expected a shape of up to {LARGEST_TENSOR} elements, got {tuple(sizes)}")
    return torch.empty(sizes, dtype=dtype, device="meta")


def is_missing(named: tuple[str, Any]) -> bool:
    """A sort key for two arguments that need one another: the one that is given is checked first."""
    return named[1] is None


def check_tensors(named: dict[str, Any], dtypes: tuple[torch.dtype, ...] = SUPPORTED_DTYPES) -> None:
    """Check that all are dense tensors on one device, of one dtype, which is one of `dtypes`."""
    for name, t in named.items():
        check_tensor(name, t)
    first_name, first = next(iter(named.items()))
    for name, t in named.items():
        if t.device != first.device:
            raise ValueError(f"{name}: expected device {first.device} like {first_name}, got {t.device}")
    for name, t in named.items():
        if t.dtype not in dtypes:
            hint = ""
            if t.dtype == E4M3 and dtypes is SUPPORTED_DTYPES:
                hint = " (FP8 tensors come with their scales, as a onepass.QuantizedQKV)"
            raise TypeError(f"{name}: expected dtype {dtype_names(dtypes)}, got {short_name(t.dtype)}{hint}")
        if t.dtype != first.dtype:
            raise TypeError(
                f"{name}: expected dtype {short_name(first.dtype)} like {first_name}, got {short_name(t.dtype)}"
            )


def check_ranks(named: dict[str, torch.Tensor], dims: str, rank: int) -> None:
    for name, t in named.items():
        if t.dim() != rank:
            raise ValueError(f"{name}: expected {rank} dimensions {dims}, got {t.dim()} in shape {shape_of(t)}")


def check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Check the head counts and head dims, the last two dimensions of dense and packed tensors."""
    if k.shape[:-1] != v.shape[:-1]:
        hint = layout_hints.transpose_hint("v", v) if k.shape[:-1] == layout_hints.transposed(v).shape[:-1] else ""
        raise ValueError(f"v: expected shape {shape_of_values(k)} like k, got {shape_of(v)}{hint}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k: expected head_dim {q.shape[-1]} like q, got {k.shape[-1]}")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.shape[-1] < 1:
            raise ValueError(f"{name}: expected a head_dim of at least 1, got shape {shape_of(t)}")
    check_groups({"q": q}, {"k": k, "v": v}, "k and v")


def check_groups(queries: dict[str, torch.Tensor], keys: dict[str, torch.Tensor], owner: str) -> None:
    """Check that all kv heads serve equally many query heads. With 0 query heads, any number of kv heads is accepted.

    Args:
        queries, keys: tensors by name, heads in the last dimension but one. owner: a name for keys in the message.
    """
    (num_heads_q,), (num_heads_kv, *_) = ([t.shape[-2] for t in named.values()] for named in (queries, keys))
    if num_heads_q == 0:
        return
    if num_heads_kv == 0 or num_heads_q % num_heads_kv != 0:
        raise ValueError(
            f"q: expected a number of heads divisible by the {num_heads_kv} heads of {owner}, got {num_heads_q}"
            f"{layout_hints.head_count_hint(queries, keys)}"
        )


def check_int32(name: str, t: Any, shape: tuple[int | str, ...], meaning: str, device: torch.device) -> None:
    """Check an int32 tensor of lengths, offsets or page numbers.

    Args:
        shape: its sizes, with a name for a size that is free. meaning: words about the shape for the message.
    """
    check_tensor(name, t, "an int32 torch.Tensor")
    if t.dtype != torch.int32:
        raise TypeError(f"{name}: expected dtype int32, got {short_name(t.dtype)}")
    if t.device != device:
        raise ValueError(f"{name}: expected device {device} like q, got {t.device}")
    if t.dim() != len(shape) or any(not isinstance(n, str) and m != n for m, n in zip(t.shape, shape, strict=True)):
        expected = f"({shape[0]},)" if len(shape) == 1 else f"({', '.join(map(str, shape))})"
        raise ValueError(f"{name}: expected shape {expected}, {meaning}, got {shape_of(t)}")


def check_float32(name: str, t: Any, device: torch.device, expected: str = "a float32 torch.Tensor") -> torch.Tensor:
    """A float32 tensor on the device of q. Args: expected: words for the message."""
    t = check_tensor(name, t, expected)
    if t.dtype != torch.float32:
        raise TypeError(f"{name}: expected dtype float32, got {short_name(t.dtype)}")
    if t.device != device:
        raise ValueError(f"{name}: expected device {device} like q, got {t.device}")
    return t


def check_sinks(sinks: Any, q: torch.Tensor) -> None:
    """Check sinks against a checked q: floating point, one per query head."""
    check_tensor("sinks", sinks)
    if sinks.dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"sinks: expected a floating-point dtype, got {short_name(sinks.dtype)}")
    if sinks.device != q.device:
        raise ValueError(f"sinks: expected device {q.device} like q, got {sinks.device}")
    if sinks.dim() != 1 or sinks.shape[0] != q.shape[-2]:
        is_transposed = sinks.dim() == 1 and sinks.shape[0] == q.shape[-3]
        hint = layout_hints.transpose_hint("q", q) if is_transposed else ""
        raise ValueError(f"sinks: expected shape ({q.shape[-2]},), one per query head, got {shape_of(sinks)}{hint}")


def check_max_seqlens(max_seqlen_q: Any, max_seqlen_k: Any) -> None:
    """Check that each is an int, a tensor of one integer (which is not read: no synchronization) or None."""
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        _check_max_seqlen(name, value)


def _check_max_seqlen(name: str, value: Any) -> None:
    if value is None:
        return
    expected = "an int, a tensor of one integer or None"
    if isinstance(value, torch.Tensor):
        check_tensor(name, value, expected)
        if value.numel() != 1 or value.dtype.is_floating_point or value.dtype.is_complex:
            raise TypeError(f"{name}: expected {expected}, got {short_name(value.dtype)} of shape {shape_of(value)}")
        return
    check_int(name, value, expected, least=0)


def check_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seqused_k: Any) -> None:
    """Check the shapes of `attention`; `check_tensors` comes first."""
    check_ranks({"q": q, "k": k, "v": v}, DENSE_DIMS, 4)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k: expected batch {q.shape[0]} like q, got {k.shape[0]}")
    check_heads(q, k, v)
    if seqused_k is not None:
        check_int32("seqused_k", seqused_k, (q.shape[0],), "one per batch entry", q.device)


def check_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_k: Any
) -> None:
    """Check the shapes of `attention_varlen`; `check_tensors` comes first."""
    named_offsets = ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)
    for name, offsets in sorted(named_offsets, key=is_missing):
        check_tensor(name, offsets, "an int32 torch.Tensor")
    check_ranks({"q": q, "k": k, "v": v}, PACKED_DIMS, 3)
    check_heads(q, k, v)
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] < 1:
        raise ValueError(f"cu_seqlens_q: expected shape (batch + 1,), got {shape_of(cu_seqlens_q)}")
    batch = cu_seqlens_q.shape[0] - 1
    check_int32("cu_seqlens_q", cu_seqlens_q, (batch + 1,), "batch + 1", q.device)
    check_int32("cu_seqlens_k", cu_seqlens_k, (batch + 1,), "batch + 1 like cu_seqlens_q", q.device)
    if seqused_k is not None:
        check_int32("seqused_k", seqused_k, (batch,), "one per sequence", q.device)


def check_one_of(name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        error = ValueError if isinstance(value, str) else TypeError
        expected = f"one of {', '.join(choices)}" if len(choices) > 1 else repr(choices[0])
        raise error(f"{name}: expected {expected}, got {value!r}")

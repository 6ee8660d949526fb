"""Checks of the tensors that change which keys are seen, or scores, or probabilities: `problem.Modifiers`."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UnsupportedError
from ..problem import Modifiers
from .scalars import check_real
from .tensors import SUPPORTED_DTYPES, check_int32, check_tensor, shape_of, short_name

NAMES = ("seqstart_k", "key_ranges", "q_positions", "alibi_slopes", "bias")


def in_float32(slopes: Any) -> Any:
    """Slopes of 16 bits, as mixed precision makes of a parameter, in float32, with a gradient; all else as it is."""
    is_16_bit = isinstance(slopes, torch.Tensor) and slopes.dtype in (torch.bfloat16, torch.float16)
    return slopes.float() if is_16_bit else slopes


def are_given(given: tuple, dropout_p: Any) -> bool:
    """Whether a call may have modifiers. Args: given: the arguments `NAMES`."""
    return not (type(dropout_p) is float and dropout_p == 0.0) or any(t is not None for t in given)


def refuse_modifiers(because: str, given: tuple, dropout_p: Any) -> None:
    """Raise UnsupportedError if a call has modifiers. Args: given: the arguments `NAMES`."""
    for name, value in zip(NAMES, given, strict=True):
        if value is not None:
            what = shape_of(value) if type(value) is torch.Tensor and not value.is_nested else repr(value)
            raise UnsupportedError(f"{name}: expected None {because}, got {what}")
    if check_real("dropout_p", dropout_p):
        raise UnsupportedError(f"dropout_p: expected 0.0 {because}, got {dropout_p}")


def check_modifiers(
    q: torch.Tensor,
    num_keys: int | None,
    cu_seqlens_q: torch.Tensor | None,
    given: dict[str, Any],
    dropout_p: Any,
    has_keys: bool = True,
) -> tuple[Modifiers | None, float]:
    """The modifiers of a call whose other tensors are checked, without the state of dropout, and dropout_p.

    Args:
        num_keys: columns of a bias that has one for each key; None: any number of them.
        given: arguments by name, of `NAMES`.
        has_keys: whether k has any rows.
    """
    dropout_p = check_real("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: expected a probability from 0 up to, but not including, 1, got {dropout_p}")
    if all(given[name] is None for name in NAMES):
        return (Modifiers() if dropout_p else None), dropout_p
    is_packed = cu_seqlens_q is not None
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    heads, rows = q.shape[-2], q.shape[-3]
    start, ranges, positions, slopes, bias = (given[name] for name in NAMES)
    sizes: tuple[tuple[int, ...] | None, ...]
    if start is not None:
        check_int32("seqstart_k", start, (batch,), "one per batch entry or sequence", q.device)
    if ranges is not None:
        sizes = ((1, heads), (rows,), (2,)) if is_packed else ((1, batch), (1, heads), (rows,), (2,))
        check_sizes("key_ranges", ranges, sizes, q.device, (torch.int32,))
    if positions is not None:
        sizes = ((rows,),) if is_packed else ((1, batch), (rows,))
        check_sizes("q_positions", positions, sizes, q.device, (torch.int32,))
    if slopes is not None:
        dims = slopes.dim() if isinstance(slopes, torch.Tensor) else 1
        check_sizes(
            "alibi_slopes", slopes, ((batch,), (heads,)) if dims == 2 else ((heads,),), q.device, (torch.float32,)
        )
    if bias is not None:
        # with positions a row for each position; there may be any number of them
        bias_rows = None if positions is not None else (1, rows)
        columns = None if num_keys is None else (1, num_keys)
        check_sizes(
            "bias",
            bias,
            (*(() if is_packed else ((1, batch),)), (1, heads), bias_rows, columns),
            q.device,
            SUPPORTED_DTYPES,
        )
        if bias_rows is None and rows and not bias.shape[-2]:
            raise ValueError(f"bias: expected at least 1 row with q_positions, got shape {shape_of(bias)}")
        if columns is None and has_keys and not bias.shape[-1]:
            raise ValueError(f"bias: expected at least 1 column, got shape {shape_of(bias)}")
    return Modifiers(*(given[name] for name in NAMES)), dropout_p


def check_sizes(
    name: str,
    t: Any,
    sizes: tuple[tuple[int, ...] | None, ...],
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Check the device of a tensor, that each dimension has one of some sizes (None: any size), and the dtype."""
    check_tensor(name, t)
    if t.device != device:
        raise ValueError(f"{name}: expected device {device} like q, got {t.device}")
    agrees = t.dim() == len(sizes) and all(
        # not `size in allowed`: under torch.compile that finds no symbolic number
        allowed is None or any(size == one for one in allowed)
        for size, allowed in zip(t.shape, sizes, strict=True)
    )
    if not agrees:
        words = ("any" if allowed is None else " or ".join(map(str, dict.fromkeys(allowed))) for allowed in sizes)
        comma = "," if len(sizes) == 1 else ""
        raise ValueError(f"{name}: expected shape ({', '.join(words)}{comma}), got {shape_of(t)}")
    if t.dtype not in dtypes:
        raise TypeError(f"{name}: expected {', '.join(map(short_name, dtypes))}, got {short_name(t.dtype)}")

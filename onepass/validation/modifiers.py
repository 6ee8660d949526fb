"""Checks of the tensors that change which keys are seen, or scores, or probabilities: `problem.Modifiers`."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UnsupportedError
from ..problem import Modifiers
from ..problem.arguments import TENSORS
from .scalars import check_real
from .tensors import check_tensor, dtype_names, shape_of, short_name

NAMES = Modifiers._fields[:-1]  # the arguments of a call; the state of dropout is drawn


def in_float32(slopes: Any) -> Any:
    """Slopes of 16 bits, as mixed precision makes of a parameter, in float32, with a gradient; all else as it is."""
    is_16_bit = isinstance(slopes, torch.Tensor) and slopes.dtype in (torch.bfloat16, torch.float16)
    return slopes.float() if is_16_bit else slopes


def given_modifiers(arguments: dict[str, Any]) -> dict[str, Any]:
    """Take those of the arguments `NAMES` that are not None out of the arguments of a call."""
    given = {}
    for name in NAMES:
        value = arguments.pop(name, None)
        if value is not None:
            given[name] = in_float32(value) if name == "alibi_slopes" else value
    return given


def refuse_modifiers(because: str, given: dict[str, Any], dropout_p: Any) -> None:
    """Raise UnsupportedError if a call has modifiers. Args: given: those of the arguments `NAMES` that it has."""
    for name, value in given.items():
        what = shape_of(value) if type(value) is torch.Tensor and not value.is_nested else repr(value)
        raise UnsupportedError(f"{name}: expected None {because}, got {what}")
    if check_real("dropout_p", dropout_p):
        raise UnsupportedError(f"dropout_p: expected 0.0 {because}, got {dropout_p}")


def check_dropout(dropout_p: Any) -> float:
    """A probability below 1."""
    dropout_p = check_real("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: expected a probability from 0 up to, but not including, 1, got {dropout_p}")
    return dropout_p


def check_modifiers(
    q: torch.Tensor,
    num_keys: int | None,
    cu_seqlens_q: torch.Tensor | None,
    given: dict[str, Any],
    rows_k: int | None = None,
) -> Modifiers | None:
    """The modifiers of a call whose other tensors are checked, without the state of dropout; None: it has none.

    Args:
        num_keys: columns of a bias that has one for each key; None: any number of them.
        given: those of the arguments `NAMES` that the call has.
        rows_k: rows of k; None: the call has a cache, with `num_keys` rows for each sequence.
    """
    if not given:
        return None
    is_packed, rows, bias = cu_seqlens_q is not None, q.shape[-3], given.get("bias")
    sizes: dict[str, int | None] = {
        "1": 1,
        "2": 2,
        "batch": q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1,
        "heads": q.shape[-2],
        "rows": rows,
        "positions": None if "q_positions" in given else rows,
        "keys": num_keys,
        "rows_k": num_keys if rows_k is None else rows_k,
    }
    for name, t in given.items():
        rule = TENSORS[name]
        dims = t.dim() if isinstance(t, torch.Tensor) and not t.is_nested else 0
        shape = next((shape for shape in rule.shapes if len(shape) == dims), rule.shapes[0])
        has_own_rows = rows_k is None and ("rows_k",) in shape
        shape = shape[1:] if is_packed and shape[0] == ("1", "batch") and not has_own_rows else shape
        check_sizes(name, t, tuple(_sizes(words, sizes) for words in shape), q.device, rule.dtypes)
    if bias is not None and sizes["positions"] is None and rows and not bias.shape[-2]:
        raise ValueError(f"bias: expected at least 1 row with q_positions, got shape {shape_of(bias)}")
    if bias is not None and num_keys is None and rows_k and not bias.shape[-1]:
        raise ValueError(f"bias: expected at least 1 column, got shape {shape_of(bias)}")
    return Modifiers(**given)


def _sizes(words: tuple[str, ...], sizes: dict[str, int | None]) -> tuple[int, ...] | None:
    """The sizes that words of a `TensorRule` allow; None: any size."""
    found = tuple(sizes[word] for word in words)
    return None if any(size is None for size in found) else found  # type: ignore[return-value]


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
        raise TypeError(f"{name}: expected dtype {dtype_names(dtypes)}, got {short_name(t.dtype)}")

"""Checks of the arguments of `attention` and `attention_varlen`, once, for all backends.

`check_attention` turns arguments into an `AttentionProblem`, or raises before any work is done, with what was expected
and what was given. The order of the checks is always types, devices, dtypes, ranks, shapes, options. Code that receives
a problem trusts it and checks nothing again.

The exception is data that only the device knows: `problem.lengths.read_lengths` checks the values of `cu_seqlens_*`
and `seqused_k` where a backend reads them, before it computes anything.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ..kernels.config import ForwardConfigSm80, ForwardConfigSm90
from ..kernels.config.arch import frames_to_caller
from ..problem import AttentionInputs, AttentionProblem, Mask
from ..problem.attention import NO_KEYS, NO_MODIFIERS
from .block_mask import blocks_of_call
from .modifiers import check_dropout, check_modifiers, given_modifiers, refuse_modifiers
from .scalars import check_flag, check_int, check_real
from .tensors import (
    QUANTIZABLE_DTYPES,
    check_dense,
    check_max_seqlens,
    check_one_of,
    check_packed,
    check_sinks,
    check_tensors,
    dtype_names,
    short_name,
)

PRECISIONS = ("fp8",)
# the arguments that `onepass.attention_varlen` has, and `onepass.attention` has not
PACKED = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
# More bytes than a machine has: a wider side of a window hides no further key, and sums of positions fit in 64 bits.
WIDEST_WINDOW = 2**48


def check_call(name: str, call: Any) -> None:
    """Check one element of the `calls` that `warmup` and `tune` take."""
    if not isinstance(call, (Mapping, AttentionProblem)):
        given = f"{type(call).__name__} {call!r}"
        raise TypeError(f"{name}: expected the arguments of a call by name, or an AttentionProblem, got {given}")


def _check_window(window: Any) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window: expected a pair (left, right) of int or None, got {window!r}")
    return _check_window_side("left", window[0]), _check_window_side("right", window[1])


def _check_window_side(side: str, size: Any) -> int | None:
    if size is None:
        return None
    size = check_int("window", size, f"an int or None for its {side} side")
    # still a bound, so that the choice of a kernel does not change, but one that fits into a kernel's argument
    if size > WIDEST_WINDOW:
        return WIDEST_WINDOW
    return -WIDEST_WINDOW if size < -WIDEST_WINDOW else size


def checked_mask(causal: Any, window: Any) -> Mask:
    """Check the options that hide keys. A window in which no key can lie is said once, with a warning."""
    checked = _check_window(window)
    mask = Mask.from_options(check_flag("causal", causal), checked)
    if checked is not None and mask.window_right == NO_KEYS and not torch.compiler.is_compiling():
        _warn_of_empty_window(checked, causal)
    return mask


@functools.lru_cache
def _warn_of_empty_window(window: tuple, causal: bool) -> None:
    warnings.warn(
        f"onepass: window={window}{' with causal=True' if causal else ''} leaves no key to any query, so out is 0. An "
        "unbounded side is None (it is -1 in flash-attn), as in window=(None, 0). (This is said once.)",
        RuntimeWarning,
        stacklevel=frames_to_caller(),
    )


def _check_range(dtype: torch.dtype, scale: float, softcap: float | None) -> None:
    """Check that the numbers by which scores are multiplied are finite in the dtype of scores, with a margin."""
    name, largest = ("float64", 1e300) if dtype == torch.float64 else ("float32", 1e36)
    if not -largest <= scale <= largest:
        raise ValueError(f"softmax_scale: expected a magnitude of at most {largest:g}, for {name} scores, got {scale}")
    if softcap is None:
        return
    if not 1 / largest <= softcap <= largest:
        raise ValueError(f"softcap: expected {1 / largest:g} to {largest:g}, for {name} scores, got {softcap}")
    if not -largest <= scale / softcap <= largest:
        raise ValueError(
            f"softcap: expected softmax_scale / softcap of at most {largest:g}, for {name} scores, "
            f"got {scale} / {softcap}"
        )


def checked_options(
    q: torch.Tensor,
    *,
    causal: Any = False,
    window: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    softmax_scale: Any = None,
    deterministic: Any = None,
    return_lse: Any = False,
    tuning: Any = None,
) -> dict[str, Any]:
    """Check the options of dense and packed calls; return them as keyword arguments of `AttentionProblem.of`."""
    mask = checked_mask(causal, window)
    check_flag("return_lse", return_lse)
    is_reproducible = check_flag("deterministic", deterministic, allow_none=True)
    if softcap is not None:
        softcap = check_real("softcap", softcap)
        if softcap <= 0:
            raise ValueError(f"softcap: expected a number above 0 (None = no cap), got {softcap}")
    if sinks is not None:
        check_sinks(sinks, q)
    scale = q.shape[-1] ** -0.5
    if softmax_scale is not None:
        scale = check_real("softmax_scale", softmax_scale)
    _check_range(q.dtype, scale, softcap)
    if tuning is not None and not isinstance(tuning, (ForwardConfigSm90, ForwardConfigSm80)):
        raise TypeError(f"tuning: expected a ForwardConfigSm90, a ForwardConfigSm80 or None, got {tuning!r}")
    if deterministic is None:
        is_reproducible = torch.are_deterministic_algorithms_enabled()
    return {"softmax_scale": scale, "mask": mask, "softcap": softcap, "deterministic": is_reproducible}


def has_offsets(arguments: Mapping[str, Any]) -> bool:
    """Whether a call with these arguments is one of `onepass.attention_varlen`."""
    return "cu_seqlens_q" in arguments or "cu_seqlens_k" in arguments


def check_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    seqused_k: Any = None,
    dropout_p: Any = 0.0,
    precision: Any = None,
    **options: Any,
) -> tuple[AttentionInputs, AttentionProblem]:
    """The tensors and the problem of a call of `onepass.attention` or, with offsets, of `onepass.attention_varlen`.

    Slopes of 16 bits are in float32 among the tensors. The problem is that of the call without its precision.

    Args: those of the public functions; what is left out has its default.

    Raises: TypeError, ValueError or UnsupportedError (a NotImplementedError), naming the argument, what was
    expected and what was given. Nothing has been computed or changed when it raises.
    """
    given = given_modifiers(options)
    block_mask = options.pop("block_mask", None)
    if precision is not None:
        with_mask = given | ({} if block_mask is None else {"block_mask": block_mask})
        refuse_modifiers(f"with precision={precision!r}", with_mask, dropout_p)
    check_tensors({"q": q, "k": k, "v": v})
    cu_seqlens_q = cu_seqlens_k = num_keys = None
    if has_offsets(options):
        cu_seqlens_q, cu_seqlens_k, *max_seqlens = (options.pop(name, None) for name in PACKED)
        check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k)
        check_max_seqlens(*max_seqlens)
    else:
        check_dense(q, k, v, seqused_k)
        num_keys = k.shape[1]
    checked = checked_options(q, **options)
    dropout_p = check_dropout(dropout_p)
    blocks = None
    if block_mask is not None:
        blocks, given = blocks_of_call(block_mask, q, k, cu_seqlens_q, given)
    modifiers = check_modifiers(q, num_keys, cu_seqlens_q, given, k.shape[-3]) if given else None
    if precision is not None:
        check_precision(precision, q)
    if blocks is not None and modifiers is None:
        modifiers = NO_MODIFIERS
    sinks = options.get("sinks")
    inputs = AttentionInputs(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, modifiers, None, blocks)
    return inputs, AttentionProblem.of(inputs, **checked, dropout_p=dropout_p)


def check_precision(precision: Any, q: torch.Tensor) -> None:
    """Check a `precision` that is not None, for a call whose tensors have been checked."""
    check_one_of("precision", precision, PRECISIONS)
    if q.dtype not in QUANTIZABLE_DTYPES:
        expected = dtype_names(QUANTIZABLE_DTYPES)
        raise TypeError(f"q: expected dtype {expected} with precision='fp8', got {short_name(q.dtype)}")

"""Keyword arguments that a function does not have: for names from other libraries, the error gives the name in onepass.

The functions take such arguments as `**unknown`, at a negligible cost, and refuse them with `unexpected`.
`hide_unknown` keeps `**unknown` out of the signatures that users see.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Arguments of torch's scaled_dot_product_attention and of flash-attn, and what to do instead.
_ELSEWHERE = {
    "is_causal": "it is called causal here, and aligned at the bottom right where lengths differ; "
    "onepass.compat.sdpa has torch's alignment",
    "scale": "it is called softmax_scale here",
    "sm_scale": "it is called softmax_scale here",
    "attn_mask": "causal, window, lengths, key_ranges and packed sequences say which keys are visible, and bias is "
    "added to scores; onepass.compat.sdpa takes a mask",
    "enable_gqa": "it is always on here: leave it out",
    "query": "it is called q here",
    "key": "it is called k here",
    "value": "it is called v here",
    "window_size": "it is called window here, with None in place of -1 for an unbounded side",
    "s_aux": "it is called sinks here",
    "learnable_sink": "it is called sinks here",
    "block_table": "it is called page_table here, an argument of attention_decode",
    "cache_batch_idx": "onepass.compat.flash_attn.flash_attn_with_kvcache takes it",
    "cache_leftpad": "it is called seqstart_k here",
    "leftpad_k": "it is called seqstart_k here",
    "attention_chunk": "key_ranges says it here",
    "seqused_q": "onepass.compat.flash_attn_3 takes it",
    "cu_seqlens": "it is called cu_seqlens_q and cu_seqlens_k here, arguments of attention_varlen",
    "max_seqlen": "it is called max_seqlen_q and max_seqlen_k here, arguments of attention_varlen",
    "return_attn_probs": "return_lse=True also returns lse; the probabilities never exist in memory",
    "return_softmax_lse": "it is called return_lse here",
}
_IN_DECODE = {"k": "it is called k_cache or, if it is to be appended, k_new here"}
_IN_DECODE["v"] = _IN_DECODE["k"].replace("k_", "v_")


def hide_unknown(function: _Function) -> _Function:
    """Leave `**unknown` out of what `inspect.signature` and `help` show."""
    signature = inspect.signature(function)
    shown = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return function


def unexpected(function: str, unknown: Iterable[str], expected: str | None = None) -> TypeError:
    """The error for arguments that a function does not have.

    Args:
        expected: the function whose arguments were expected, if that is not `function` itself.
    """
    expected = expected or function
    hints = [f"{name}: {hint}" for name in sorted(unknown) if (hint := _hint(expected, name))]
    words = "; ".join([f"{function}: expected arguments of {expected}, got {', '.join(sorted(unknown))}", *hints])
    return TypeError(words)


def _hint(function: str, name: str) -> str | None:
    from .attention import attention, attention_varlen  # not at the top: these modules import this one
    from .decode import attention_decode

    functions = attention, attention_varlen, attention_decode
    names = {other.__name__: inspect.signature(other).parameters for other in functions}
    if function == "attention_decode" and name in _IN_DECODE:
        return _IN_DECODE[name]
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    others = [other for other, parameters in names.items() if name in parameters]
    if others:
        return f"it is an argument of {' and '.join(others)}"
    mine = [n for other, parameters in names.items() if other in function.split(" or ") for n in parameters]
    close = difflib.get_close_matches(name, mine, 1)
    return f"did you mean {close[0]}?" if close else None

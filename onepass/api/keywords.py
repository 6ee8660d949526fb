"""Arguments that a function does not have: for names from other libraries, the error gives the name in onepass.

The functions take such arguments as `*positional` and `**unknown`, at a negligible cost, and refuse them with
`unexpected`. `hide_unknown` keeps both out of the signatures that users see.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch.overrides

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Arguments of torch's, flash-attn's and other libraries' functions, and what to do instead.
_ELSEWHERE = {
    "is_causal": "it is called causal here, and aligned at the bottom right where lengths differ; "
    "onepass.compat.sdpa has torch's alignment",
    **dict.fromkeys(("scale", "sm_scale", "scaling"), "it is called softmax_scale here"),
    **dict.fromkeys(
        ("attn_mask", "attention_mask", "mask", "mask_mod"),
        "causal, window, lengths, key_ranges, query_ranges and packed sequences say which keys are visible, and bias "
        "is added to scores; onepass.compat.sdpa takes a mask",
    ),
    **dict.fromkeys(
        ("key_padding_mask", "padding_mask"),
        "seqstart_k hides padding at the beginning; causal attention needs nothing for padding at the end, which no "
        "real query sees; attention_varlen takes sequences without padding; onepass.compat.sdpa takes a mask",
    ),
    "score_mod": "alibi_slopes, softcap and bias change scores, and no other function of a score is computed",
    **dict.fromkeys(("attn_bias", "position_bias"), "it is called bias here, and is added to scores after the softcap"),
    "enable_gqa": "it is always on here: leave it out",
    "query": "it is called q here",
    "key": "it is called k here",
    "value": "it is called v here",
    "window_size": "it is called window here, with None for an unbounded side, which flash-attn writes -1",
    "sliding_window": "window=(sliding_window - 1, 0) says it here",
    **dict.fromkeys(("s_aux", "learnable_sink"), "it is called sinks here"),
    "block_table": "it is called page_table here, an argument of attention_decode",
    "cache_batch_idx": "onepass.compat.flash_attn.flash_attn_with_kvcache takes it",
    **dict.fromkeys(("cache_leftpad", "leftpad_k"), "it is called seqstart_k here"),
    "attention_chunk": "key_ranges says it here",
    "seqused_q": "onepass.compat.flash_attn_3 takes it",
    "cu_seqlens": "it is called cu_seqlens_q and cu_seqlens_k here, arguments of attention_varlen",
    "max_seqlen": "it is called max_seqlen_q and max_seqlen_k here, arguments of attention_varlen",
    **dict.fromkeys(
        ("return_attn_probs", "need_weights", "average_attn_weights", "output_attentions"),
        "return_lse=True also returns lse; the probabilities never exist in memory",
    ),
    "return_softmax_lse": "it is called return_lse here",
}

_NAMES: dict[str, list[str]] = {}  # of the arguments, by function


def hide_unknown(function: _Function) -> _Function:
    """Leave `*positional` and `**unknown` out of what `inspect.signature` and `help` show; note the names for hints."""
    signature = inspect.signature(function)
    shown = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    _NAMES[function.__name__] = [p.name for p in shown]
    return function


def overridden(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The call as the type of q or k overrides it by `__torch_function__`: `torch.fx.symbolic_trace` makes it a node.

    Args: arguments: those of the call, by name; defaults are left out.
    """
    parameters = inspect.signature(function).parameters
    given = {name: arguments[name] for name, p in parameters.items() if arguments[name] is not p.default}
    q, relevant = given.pop("q"), (arguments["q"], arguments.get("k", arguments.get("k_cache")))
    return torch.overrides.handle_torch_function(function, relevant, q, **given)


def unexpected(
    function: str, unknown: Iterable[str], owner: str | None = None, positional: Sequence[Any] = ()
) -> TypeError:
    """The error for arguments that a function does not have.

    Args:
        owner: the function whose arguments were expected, if that is not `function` itself.
        positional: positional arguments beyond those that the function has.
    """
    if positional:
        given = ", ".join(shown if len(shown := repr(one)) <= 20 else type(one).__name__ for one in positional)
        return TypeError(
            f"{function}: expected options by name, as in causal=True, got more positional arguments: {given}"
        )
    unknown = sorted(unknown)
    subject = function if owner is None else f"{function}: {owner}"
    words = f"{subject} has no argument{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}"
    return TypeError("; ".join([words, *(f"{n}: {hint}" for n in unknown if (hint := _hint(owner or function, n)))]))


def _hint(function: str, name: str) -> str | None:
    if function == "attention_decode" and name in ("k", "v"):
        return f"it is called {name}_cache or, if it is to be appended, {name}_new here"
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    if others := [other for other, names in _NAMES.items() if name in names]:
        return f"it is an argument of {' and '.join(others)}"
    close = difflib.get_close_matches(name, _NAMES[function], 1, cutoff=0.75)
    return f"did you mean {close[0]}?" if close else None

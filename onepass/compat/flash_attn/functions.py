"""flash-attn 2.8's functions of dense batches and packed sequences, with their names, arguments, order and defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from ...api import attention as api
from ...api import steps
from ...errors import REFUSALS, renamed
from ...validation import tensors
from ...validation.scalars import check_flag, check_real
from .. import conventions, probabilities
from ..paged import over_pages

# name of an argument in messages of onepass -> its name in flash-attn
NAMES = {"window": "window_size"}
_MAX_SEQLENS = dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "max_seqlen")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any,
    deterministic: Any,
    return_attn_probs: Any,
    **lengths: Any,
) -> Any:
    """Run `onepass.attention`, or `onepass.attention_varlen` with lengths, and shape the result as flash-attn does."""
    options = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": conventions.opened(conventions.pair_of(window_size)),
        "softcap": conventions.softcap_of(softcap),
        # where the caller does not ask for it, torch.use_deterministic_algorithms decides
        "deterministic": check_flag("deterministic", deterministic, allow_none=True) or None,
    }
    returns_probabilities = check_flag("return_attn_probs", return_attn_probs, allow_none=True)
    try:
        dropout_p = check_real("dropout_p", dropout_p)
        if returns_probabilities and dropout_p > 0:
            call = steps.prepare(q, k, v, **options, **lengths, dropout_p=dropout_p, alibi_slopes=alibi_slopes)
            out, lse = call.forward()
            return out, lse, probabilities.of_call(call, alibi_slopes, lengths)
        function = api.attention_varlen if lengths else api.attention
        options |= {"alibi_slopes": alibi_slopes, "dropout_p": dropout_p, "return_lse": returns_probabilities}
        result = function(q, k, v, **options, **lengths)
    except REFUSALS as error:
        raise renamed(error, NAMES) from None
    return (*result, q.new_empty(0)) if returns_probabilities else result


def _with_options_of(function: Callable[..., Any], after: str) -> Callable[[_Function], _Function]:
    """Let `inspect.signature` and `help` show the arguments of a function after `after` as those of a packed form.

    The packed form takes them as `*options` and `**named`. It has no block_table: keys in pages are not packed.
    """
    parameters = inspect.signature(function).parameters
    names = list(parameters)[list(parameters).index(after) + 1 :]
    options = [parameters[name] for name in names if name != "block_table"]

    def decorate(packed: _Function) -> _Function:
        own = inspect.signature(packed).parameters.values()
        tensors = [p for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
        packed.__signature__ = inspect.Signature(tensors + options)  # type: ignore[attr-defined]
        return packed

    return decorate


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of a dense batch.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim). k, v: (batch, seqlen_k, num_heads_kv, head_dim); dtypes, GQA and
            strides are those of `onepass.attention`.
        dropout_p: probabilities are left out of the product with v with this probability.
        softmax_scale: None = head_dim ** -0.5.
        causal, window_size: aligned at the bottom right; window_size is (left, right), inclusive, a negative side is
            unbounded. It may be a tuple, a list, an array or a tensor, whose values are read on the host.
        softcap: 0.0 = no cap.
        alibi_slopes: (num_heads_q,) or (batch, num_heads_q) float32: subtracts slope * |i + seqlen_k - seqlen_q - j|
            from a score. They may require a gradient.
        deterministic: ask for bitwise reproducible gradients.
        return_attn_probs: return (out, softmax_lse, S_dmask) instead of out. Without dropout S_dmask is an empty
            tensor; with dropout it is dense, see `onepass/compat/probabilities.py`.

    Returns: out (batch, seqlen_q, num_heads_q, head_dim_v); softmax_lse (batch, num_heads_q, seqlen_q) float32.
    Raises: what `onepass.attention` raises.
    """
    options = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return attend(q, k, v, dropout_p, *options)


@_with_options_of(flash_attn_func, after="v")
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Any:
    """`flash_attn_func` with k and v in one tensor, kv: (batch, seqlen_k, 2, num_heads_kv, head_dim)."""
    return flash_attn_func(q, *conventions.unpack("kv", kv, 2, 5), *options, **named)


@_with_options_of(flash_attn_func, after="v")
def flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, **named: Any) -> Any:
    """`flash_attn_func` with q, k and v in one tensor, qkv: (batch, seqlen, 3, num_heads, head_dim)."""
    return flash_attn_func(*conventions.unpack("qkv", qkv, 3, 5), *options, **named)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention of packed sequences.

    Args:
        q: (total_q, num_heads_q, head_dim). k, v: (total_k, num_heads_kv, head_dim); with a block_table
            (num_blocks, page_block_size, num_heads_kv, head_dim), any page_block_size.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, the start of each sequence and the end of the last one; with a
            block_table only the differences of cu_seqlens_k matter.
        max_seqlen_q, max_seqlen_k: hints; an int, a tensor or None. With dropout and return_attn_probs they are sizes
            of S_dmask, and a tensor is read on the host.
        block_table: (batch, max_blocks) int32: the keys of each sequence are rows of these blocks. Such a call without
            dropout has no backward: if an input requires a gradient, a backward through the result raises. Lengths in
            the host's memory that are beyond the blocks raise an error that is both a ValueError and a RuntimeError.
        All others: as for `flash_attn_func`; masks are aligned to each sequence's own lengths.

    Returns: out (total_q, num_heads_q, head_dim_v); softmax_lse (num_heads_q, total_q) float32; S_dmask
    (batch, num_heads_q, max_seqlen_q, max_seqlen_k), both lengths rounded up.
    Raises: what `onepass.attention_varlen` raises, or with a block_table `onepass.attention_decode`.
    """
    if block_table is not None:
        check_flag("deterministic", deterministic, allow_none=True)
        returns_probabilities = check_flag("return_attn_probs", return_attn_probs, allow_none=True)
        out, lse, probs, _ = over_pages(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            lengths=conventions.lengths_between("cu_seqlens_k", cu_seqlens_k),
            block_table=block_table,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            dropout_p=dropout_p,
            softmax_scale=softmax_scale,
            causal=causal,
            window=conventions.opened(conventions.pair_of(window_size)),
            softcap=conventions.softcap_of(softcap),
            alibi_slopes=alibi_slopes,
            returns_probabilities=returns_probabilities,
        )
        return (out, lse, probs) if returns_probabilities else out
    tensors.check_tensor("cu_seqlens_q", cu_seqlens_q, "an int32 torch.Tensor")
    lengths: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    lengths |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    options = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return attend(q, k, v, dropout_p, *options, **lengths)


@_with_options_of(flash_attn_varlen_func, after="v")
def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Any:
    """`flash_attn_varlen_func` with k and v in one tensor, kv: (total_k, 2, num_heads_kv, head_dim)."""
    return flash_attn_varlen_func(q, *conventions.unpack("kv", kv, 2, 4), *options, **named)


@_with_options_of(flash_attn_varlen_func, after="max_seqlen_k")
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *options: Any, **named: Any
) -> Any:
    """`flash_attn_varlen_func` with q, k and v in one tensor, qkv: (total_tokens, 3, num_heads, head_dim)."""
    lengths: tuple[Any, ...] = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    arguments = (*conventions.unpack("qkv", qkv, 3, 4), *lengths, *options)
    try:
        return flash_attn_varlen_func(*arguments, **named)
    except REFUSALS as error:
        raise renamed(error, dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens") | _MAX_SEQLENS) from None

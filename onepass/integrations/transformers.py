"""Hugging Face transformers with onepass as its attention.

    from onepass.integrations.transformers import register

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=register())

transformers calls two functions per implementation. The mask function runs once per forward pass, before the layers;
the attention function runs in every layer and receives the result of the mask function. `register` sets both: with an
attention function alone, transformers passes no mask at all and padding is silently ignored.

The mask function (transformers_masks.py) says once a forward what every query sees: where real keys begin and end, a
window, offsets of packed sequences. The attention function computes that, and looks for packed sequences in what only
layers get: `cu_seq_lens_q` and `cu_seq_lens_k`, or the positions of a forward with a cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import attention as api
from ..api.decode import attention_decode
from ..api.repeated import repeatable_decode
from ..compat.masks import four_dimensional, mask_arguments
from ..dispatch import ahead
from ..errors import REFUSALS, UnsupportedError, renamed
from .transformers_masks import (
    Pattern,
    ShortMask,
    may_wait,
    offsets_of,
    padding_mask,
    sequence_bounds,
    starts_by_offsets,
    starts_by_positions,
    whole_mask,
    with_ranges,
)

__all__ = ["attention_forward", "padding_mask", "register"]

FEW_QUERIES = 16


def register(name: str = "onepass") -> str:
    """Make `attn_implementation=name` available to every model of transformers.

    Calling this again is harmless. If no kernel is in the disk cache yet, the processes that will compile kernels start
    now.
    Returns: name. Raises: ImportError without transformers 5.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, padding_mask)
    ahead.start_early()
    return name


# --- the attention function -------------------------------------------------------------------------------------------

# Arguments of a model's forward pass that transformers also passes to the attention function, which ignores them.
_IRRELEVANT = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "seq_idx",  # for convolutions and state space layers
        "use_cache",
    }
)


# What a caller of transformers' function calls the arguments of `onepass.attention`.
_CALLERS_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "bias": "position_bias",
    "sinks": "s_aux",
    "softmax_scale": "scaling",
    "dropout_p": "dropout",
    "cu_seqlens_q": "cu_seq_lens_q",
    "cu_seqlens_k": "cu_seq_lens_k",
    "max_seqlen_q": "max_length_q",
    "max_seqlen_k": "max_length_k",
}


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    deterministic: bool | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer's attention, with transformers' signature.

    Args:
        module: the attention layer; `module.is_causal` is used where is_causal is None.
        query: (batch, num_heads_q, q_length, head_dim). key: (batch, num_heads_kv, kv_length, head_dim).
        value: (batch, num_heads_kv, kv_length, head_dim_v).
        attention_mask: the result of `padding_mask`, which alone says what a query sees; bool (batch, num_keys), the
            real keys; or a whole mask, bool or floating point, that broadcasts to (batch, num_heads_q, q_length,
            kv_length or more), and alone says what a query sees.
        dropout: as dropout_p in `onepass.attention`.
        scaling: None = head_dim ** -0.5.
        sliding_window: read where attention_mask is None or has two dimensions: the number of keys that a causal query
            sees, including its own; a bidirectional query sees sliding_window - 1 keys on either side of its own.
        softcap: as in `onepass.attention`.
        is_causal: read where attention_mask is None or has two dimensions.
        s_aux: (num_heads_q,) attention sinks.
        position_bias: added to scores; it broadcasts to (batch, num_heads_q, q_length, kv_length).
        position_ids: (batch or 1, q_length), read if the model got no attention mask, no cu_seq_lens, and no cache or
            an empty one, and if `padding_mask` has not found packed sequences: a packed sequence begins where positions
            return to the minimum of their row.
        cu_seq_lens_q, cu_seq_lens_k: (num_sequences + 1,) offsets of packed sequences in the flattened batch;
            max_length_q, max_length_k are hints.
        deterministic: as in `onepass.attention`.
        indices: integers (batch, q_length, any number), the keys that a model's indexer has chosen for each query,
            with the result of `padding_mask` or a floating point mask; numbers below 0 choose nothing.
        kwargs: arguments that are known to be irrelevant, or are None or False; any other one raises.

    Returns: out (batch, q_length, num_heads_q, head_dim_v), 0 at left padding, and None, because there are no attention
    weights. Outputs at padding on the right are arbitrary. The host reads no value, except by the first layer that gets
    a boolean mask of four dimensions, or position_ids without a mask, and without a cache or with an empty one.

    Raises:
        NotImplementedError: an argument is not supported. ValueError, TypeError: a value of it is not allowed. The
            message names the argument.
    """
    _refuse_unknown(kwargs)
    memory = _memory_of(attention_mask, module, query)
    layer = softcap, scaling, dropout
    if memory is not None and layer in memory and s_aux is position_bias is cu_seq_lens_q is indices is None:
        out = memory[layer].again(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        if out is not None:
            return out, None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {
        "softcap": softcap,
        "softmax_scale": scaling,
        "sinks": s_aux,
        "deterministic": deterministic,
        "dropout_p": dropout,
    }
    if position_bias is not None:
        options["bias"] = four_dimensional(position_bias, query.shape[:2])
    if isinstance(attention_mask, ShortMask):
        pattern = attention_mask.pattern
    elif attention_mask is not None and attention_mask.dim() == 4:
        pattern = whole_mask(_checked_mask(attention_mask), q, k)
    else:
        pattern = _pattern_of_layer(module, is_causal, sliding_window, attention_mask, q, k)
        if pattern.is_real is not None:
            k, v = k[:, : pattern.is_real.shape[1]], v[:, : pattern.is_real.shape[1]]
    if indices is not None:
        pattern = pattern._replace(whole=_chosen(attention_mask, indices, q, k))
    sequences = _Sequences.given(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, pattern, q)
    if sequences is None:
        sequences = _Sequences.found(pattern, position_ids, memory, q)
    if sequences is attention_mask is None and pattern.is_causal and 1 < q.shape[1] < k.shape[1]:
        raise UnsupportedError(
            f"attention_mask: expected a mask where a causal layer has fewer queries than keys, {q.shape[1]} and "
            f"{k.shape[1]}, got None, which does not say where the queries stand"
        )
    try:
        return _attend(q, k, v, pattern, sequences, options, memory, layer), None
    except REFUSALS as error:
        raise renamed(error, _CALLERS_NAMES) from None


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if value is not None and value is not False and name not in _IRRELEVANT:
            given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UnsupportedError(f"{name}: expected None, got {given}: onepass attention does not know this argument")


def _memory_of(attention_mask: Tensor | None, module: torch.nn.Module, query: Tensor) -> dict[Any, Any] | None:
    """What layers of this forward have kept for those after them; None if nothing may be kept.

    Without this the host would take a third longer for a token in generation, where each layer computes little. A layer
    that comes again begins another forward. Under torch.compile and in a CUDA graph each run has its own values.
    """
    if not isinstance(attention_mask, ShortMask) or not may_wait(query):
        return None
    memory = attention_mask.kept
    layers = memory.setdefault("layers", set())
    if module in layers:
        memory.clear()
        memory["layers"] = layers = set()
    layers.add(module)
    return memory


# --- what a query sees ------------------------------------------------------------------------------------------------


def _pattern_of_layer(
    module: torch.nn.Module,
    is_causal: bool | None,
    sliding_window: int | None,
    attention_mask: Tensor | None,
    q: Tensor,
    k: Tensor,
) -> Pattern:
    """The pattern where the layer has no mask, or real keys alone."""
    if attention_mask is not None and attention_mask.dim() != 2:
        raise UnsupportedError(
            f"attention_mask: expected None, (batch, tokens) or (batch, heads, q_length, kv_length), "
            f"got shape {tuple(attention_mask.shape)}"
        )
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise _unknown_mask(attention_mask)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        raise ValueError(f"is_causal: expected a bool here or as an attribute of {type(module).__name__}, got neither")
    if sliding_window is not None and sliding_window < 1:
        raise UnsupportedError(
            f"sliding_window: expected at least 1, the query's own key, or None, got {sliding_window}"
        )
    window = None
    if sliding_window is not None:
        window = sliding_window - 1, None if is_causal else sliding_window - 1
    may_be_packed = attention_mask is None and q.shape[1] == k.shape[1]
    return Pattern(bool(is_causal), window, is_real=attention_mask, may_be_packed=may_be_packed)


def _checked_mask(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise _unknown_mask(mask)
    return mask


def _unknown_mask(mask: Tensor) -> UnsupportedError:
    return UnsupportedError(
        "attention_mask: expected what padding_mask returns, a bool tensor, or a floating point tensor of four "
        f"dimensions, got {mask.dtype} of shape {tuple(mask.shape)}: this model makes its own mask"
    )


def _chosen(mask: Tensor | None, indices: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A whole mask, without the keys that an indexer has not chosen. Args: indices: (batch, q_length, any number)."""
    if mask is None or mask.dim() != 4 or indices.dim() != 3 or indices.shape[:2] != q.shape[:2]:
        shape = None if mask is None else tuple(mask.shape)
        raise UnsupportedError(
            f"indices: expected (batch, q_length, keys) with an attention_mask of four dimensions, "
            f"got shape {tuple(indices.shape)} with an attention_mask of shape {shape}"
        )
    mask = mask.values() if isinstance(mask, ShortMask) else _checked_mask(mask)
    num_keys = k.shape[1]
    number = torch.where(indices < 0, num_keys, indices).long()
    is_hidden = torch.ones(*q.shape[:2], num_keys + 1, dtype=torch.bool, device=q.device).scatter(-1, number, False)
    is_hidden = is_hidden[:, None, :, :num_keys]
    mask = mask[..., :num_keys]
    return mask & ~is_hidden if mask.dtype == torch.bool else mask.masked_fill(is_hidden, -torch.inf)


# --- packed sequences -------------------------------------------------------------------------------------------------


class _Sequences(NamedTuple):
    """Packed sequences: their offsets in the flattened batch, or where they begin, or both."""

    offsets: tuple[Tensor, Tensor] | None = None  # of queries and of keys, int32 (num_sequences + 1,)
    max_length_q: int | Tensor | None = None  # hints
    max_length_k: int | Tensor | None = None
    is_start: Tensor | None = None  # bool (batch or 1, q_length)

    @classmethod
    def given(
        cls,
        offsets_q: Tensor | None,
        offsets_k: Tensor | None,
        max_length_q: int | Tensor | None,
        max_length_k: int | Tensor | None,
        pattern: Pattern,
        q: Tensor,
    ) -> _Sequences | None:
        """Sequences by their offsets, which count whatever the positions say."""
        if offsets_q is offsets_k is None:
            return None
        if offsets_q is None or offsets_k is None:
            missing, other = ("q", "k") if offsets_q is None else ("k", "q")
            raise UnsupportedError(f"cu_seq_lens_{missing}: expected offsets, as cu_seq_lens_{other} has, got None")
        # where values cannot be read, keys that are not real are hidden
        has_holes = pattern.is_real is not None and may_wait(q)
        if pattern.first is not None or pattern.end is not None or pattern.has_padding or has_holes:
            raise UnsupportedError("cu_seq_lens_q: expected None where attention_mask has padding, got both")
        of_queries = offsets_q.to(q.device, torch.int32)
        of_keys = of_queries if offsets_k is offsets_q else offsets_k.to(q.device, torch.int32)
        return cls((of_queries, of_keys), max_length_q, max_length_k)

    @classmethod
    def found(
        cls, pattern: Pattern, position_ids: Tensor | None, memory: dict[Any, Any] | None, q: Tensor
    ) -> _Sequences | None:
        """Sequences that the mask function has found in the positions, or else those that the layers find there.

        Every layer of a forward gets the same tensor of positions, and the first one reads it.
        """
        if pattern.offsets is not None:
            return cls((pattern.offsets, pattern.offsets))
        batch, seqlen = q.shape[:2]
        if not pattern.may_be_packed or seqlen == 1 or position_ids is None:
            return None
        if position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != seqlen:
            return None
        if not may_wait(q):
            return cls(is_start=starts_by_positions(position_ids, pattern.q_offset))
        positions, found = (None, None) if memory is None else memory.get("sequences", (None, None))
        if positions is not position_ids:
            is_start = starts_by_positions(position_ids, pattern.q_offset).expand(batch, -1)
            offsets = offsets_of(is_start)
            found = cls((offsets, offsets), is_start=is_start) if len(offsets) > batch + 1 else None
            if memory is not None:
                memory["sequences"] = position_ids, found
        return found


def _packed(
    q: Tensor, k: Tensor, v: Tensor, sequences: _Sequences, pattern: Pattern, options: dict[str, Any]
) -> Tensor:
    """Attention of packed sequences in the flattened batch."""
    assert sequences.offsets is not None
    offsets_q, offsets_k = sequences.offsets
    if offsets_q is offsets_k:
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]  # a static cache has room for more
    elif pattern.used is not None and q.shape[0] > 1:
        raise UnsupportedError(
            "cu_seq_lens_k: expected the same tensor as cu_seq_lens_q where there are several rows and a cache has "
            f"room for more keys, got another tensor for {q.shape[0]} rows"
        )
    out = api.attention_varlen(
        *(x.flatten(0, 1) for x in (q, k, v)),
        cu_seqlens_q=offsets_q,
        cu_seqlens_k=offsets_k,
        max_seqlen_q=sequences.max_length_q,
        max_seqlen_k=sequences.max_length_k,
        causal=pattern.is_causal,
        window=_window_over(pattern, k.shape[1]),
        **options,
    )
    return out.unflatten(0, q.shape[:2])


def _cut(pattern: Pattern, sequences: _Sequences, q: Tensor, k: Tensor) -> Pattern:
    """The pattern of rows that are cut into sequences, in which a query sees keys of its own sequence alone."""
    is_start, seqlen = sequences.is_start, q.shape[1]
    if is_start is None:
        assert sequences.offsets is not None
        offsets, offsets_k = sequences.offsets
        if offsets is not offsets_k and (q.shape[0] != 1 or k.shape[1] != seqlen):
            raise UnsupportedError(
                "cu_seq_lens_q: expected one row with as many keys as queries where there is a mask or a position "
                f"bias, too, got {q.shape[0]} rows of {seqlen} queries and {k.shape[1]} keys"
            )
        is_start = starts_by_offsets(offsets, q.shape[0] * seqlen).view(q.shape[:2])
    if pattern.whole is None:
        return with_ranges(pattern, is_start, pattern.q_offset)
    start, end = sequence_bounds(is_start)
    number = torch.arange(k.shape[1], device=q.device)
    is_own = (number >= start[..., None]) & (number < (end + pattern.q_offset)[..., None])
    whole, is_own = pattern.whole[..., : k.shape[1]], is_own[:, None]
    whole = whole & is_own if whole.dtype == torch.bool else whole.masked_fill(~is_own, -torch.inf)
    return pattern._replace(whole=whole)


# --- the call ---------------------------------------------------------------------------------------------------------


def _window_over(pattern: Pattern, num_keys: int) -> tuple[int, int | None] | None:
    """The window of a pattern; None if it reaches over all keys."""
    window = pattern.window
    return None if window is None or min(side for side in window if side is not None) >= num_keys - 1 else window


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    sequences: _Sequences | None,
    options: dict[str, Any],
    memory: dict[Any, Any] | None,
    layer: tuple,
) -> Tensor:
    """Attention of a pattern. Args: memory: see `_memory_of`. layer: the options of a layer that repeats a call."""
    if sequences is not None:
        is_plain = pattern.is_real is pattern.whole is pattern.ranges is pattern.chunk_size is None
        if is_plain and "bias" not in options and sequences.offsets is not None:
            return _packed(q, k, v, sequences, pattern, options)
        pattern = _cut(pattern, sequences, q, k)
    if pattern.whole is not None:
        mask = pattern.whole[..., : k.shape[1]]
        return _masked(q, k, v, mask, {"causal": False, "window": None, **options})
    has_ranges = pattern.ranges is not None
    options |= {
        "causal": pattern.is_causal and not has_ranges,
        "window": None if has_ranges else _window_over(pattern, k.shape[1]),
    }
    if pattern.is_real is not None:
        return _masked(q, k, v, pattern.is_real[:, None, None], options, pattern.ranges)
    if has_ranges:
        return api.attention(q, k, v, **options, key_ranges=pattern.ranges)
    if options["causal"]:
        options["seqstart_k"] = pattern.first
    elif pattern.first is not None or (pattern.end is not None and options["window"] is not None):
        high = pattern.end if pattern.end is not None else _ends(pattern, k, memory)
        low = pattern.first if pattern.first is not None else torch.zeros_like(high)
        ranges = torch.stack((low, high), -1)[:, None, None].expand(-1, 1, q.shape[1], 2)
        return api.attention(q, k, v, **options, key_ranges=ranges.contiguous())
    return _dense(q, k, v, pattern, options, memory, layer)


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    options: dict[str, Any],
    memory: dict[Any, Any] | None,
    layer: tuple,
) -> Tensor:
    """Attention by bounds of keys, by `attention_decode` for a few queries over more keys without gradients."""
    is_long = q.shape[1] > FEW_QUERIES or k.shape[1] <= q.shape[1]
    if is_long or options["dropout_p"] or _has_gradient(q, k, v, options):
        has_end = pattern.end is not None or pattern.used is not None
        return api.attention(q, k, v, **options, seqused_k=_ends(pattern, k, memory) if has_end else None)
    ends = _ends(pattern, k, memory)
    own = {name: value for name, value in options.items() if name not in ("deterministic", "dropout_p")}
    if "bias" in own or own["sinks"] is not None:
        return attention_decode(q, k, v, cache_seqlens=ends, **own)
    del own["sinks"]
    out, call = repeatable_decode(q, k, v, cache_seqlens=ends, **{"seqstart_k": None, **own})
    if memory is not None and call is not None:
        memory[layer] = call
    return out


def _ends(pattern: Pattern, k: Tensor, memory: dict[Any, Any] | None) -> Tensor:
    """The end of the keys of each row, int32 (batch,)."""
    if pattern.end is not None:
        return pattern.end
    batch, num_keys = k.shape[:2]
    known = None if memory is None else memory.get(("ends", num_keys))
    if known is not None:
        return known
    if isinstance(pattern.used, Tensor):
        ends = pattern.used.to(k.device, torch.int32).reshape(-1)[:1].expand(batch).contiguous()
    else:
        count = num_keys if pattern.used is None else pattern.used
        ends = torch.full((batch,), count, dtype=torch.int32, device=k.device)
    if memory is not None:
        memory["ends", num_keys] = ends
    return ends


def _has_gradient(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> bool:
    tensors = q, k, v, *(t for t in options.values() if isinstance(t, Tensor))
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict[str, Any], key_ranges: Tensor | None = None
) -> Tensor:
    """Attention under a mask of four dimensions, bool or floating point, with the other options.

    Args: key_ranges: of the keys that each query sees, if the mask does not say everything.
    """
    arguments = mask_arguments(four_dimensional(mask, torch.Size((q.shape[0], q.shape[2]))), q.shape[1], k.shape[1])
    if key_ranges is not None:
        arguments["key_ranges"] = key_ranges
    if "bias" in options:
        bias = options["bias"]
        arguments["bias"] = bias + arguments["bias"].to(bias.dtype)
    return api.attention(q, k, v, **options | arguments)

"""Hugging Face transformers with onepass as its attention.

    from onepass.integrations.transformers import register

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=register())

transformers calls two functions per implementation. The mask function runs once per forward pass, before the layers;
the attention function runs in every layer and receives the result of the mask function. `register` sets both: with an
attention function alone, transformers passes no mask at all and padding is silently ignored.

The mask function (transformers_masks.py) says once a forward what the layers need: where real keys begin and end,
offsets of packed sequences, or a whole mask. The attention function knows the other properties of the mask (causal,
sliding window) by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ..api import attention as api
from ..api.decode import attention_decode
from ..api.repeated import RepeatableDecode, repeatable_decode
from ..compat.masks import four_dimensional, mask_arguments
from ..dispatch import ahead
from ..errors import UnsupportedError
from .transformers_masks import cu_seqlens_of, padding_mask

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

# names of attributes in which tensors of positions and masks keep what a layer has made of them
_KNOWN_OFFSETS = "_onepass_cu_seqlens"
_KNOWN_LENGTHS = "_onepass_lengths"

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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer's attention, with transformers' signature.

    Args:
        module: the attention layer; `module.is_causal` is used where is_causal is None.
        query: (batch, num_heads_q, q_length, head_dim). key: (batch, num_heads_kv, kv_length, head_dim).
        value: (batch, num_heads_kv, kv_length, head_dim_v).
        attention_mask: the result of `padding_mask`; bool (batch, num_keys), the real keys; or a whole mask, bool or
            floating point, that broadcasts to (batch, num_heads_q, q_length, kv_length or more): a whole mask alone
            says which keys a query sees.
        dropout: as dropout_p in `onepass.attention`.
        scaling: None = head_dim ** -0.5.
        sliding_window: the number of keys that a causal query sees, including its own; a bidirectional query sees
            sliding_window - 1 keys on either side of its own.
        softcap: as in `onepass.attention`.
        s_aux: (num_heads_q,) attention sinks.
        position_bias: added to scores; it broadcasts to (batch, num_heads_q, q_length, kv_length).
        position_ids: (1, q_length), read if attention_mask is None and there is no cache: a new packed sequence begins
            where a position does not follow the one before it. Without gradients `padding_mask` has decided this.
        cu_seq_lens_q, cu_seq_lens_k: (num_sequences + 1,) offsets of packed sequences in the flattened batch;
            max_length_q, max_length_k are hints.
        deterministic: as in `onepass.attention`.
        kwargs: arguments that are known to be irrelevant, or are None or False; any other one raises.

    Returns: out (batch, q_length, num_heads_q, head_dim_v), 0 at left padding, and None in place of attention weights.
    Outputs at padding on the right are arbitrary. No value is read on the host, except by the first layer that gets
    position_ids without a mask and without a cache.

    Raises: NotImplementedError naming an argument that is not supported.
    """
    _refuse_unknown(kwargs)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        raise ValueError(f"is_causal: expected a bool here or as an attribute of {type(module).__name__}, got neither")
    is_causal = bool(is_causal)
    lengths = _Lengths(attention_mask, (is_causal, sliding_window, softcap, scaling, dropout))
    if s_aux is position_bias is cu_seq_lens_q is None:
        call = lengths.call_before
        out = None if call is None else call.again(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        if out is not None:
            return out, None
    _refuse_unsupported(attention_mask)
    options: dict[str, Any] = {
        "causal": is_causal,
        "window": _window(sliding_window, is_causal, key.shape[2]),
        "softcap": softcap,
        "softmax_scale": scaling,
        "sinks": s_aux,
        "deterministic": deterministic,
        "dropout_p": dropout,
    }
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if position_bias is not None:
        options["bias"] = four_dimensional(position_bias, query.shape[:2])
    is_whole = attention_mask is not None and attention_mask.dim() == 4 and not _is_form(attention_mask)
    if attention_mask is not None and is_whole:
        options |= {"causal": False, "window": None}
        return _masked(q, k, v, attention_mask[..., : k.shape[1]], options), None

    if attention_mask is not None and _is_ranges(attention_mask):
        options |= {"causal": False, "window": None}
        return api.attention(q, k, v, **options, key_ranges=attention_mask), None
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        if attention_mask is not None and attention_mask.dtype != torch.int32:
            raise UnsupportedError("cu_seq_lens_q: expected None where attention_mask has padding, got both")
        return _packed(q, k, v, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, options), None
    if attention_mask is None:
        attention_mask = _packed_by_positions(position_ids, q, k)
    if attention_mask is None:
        return _attend(q, k, v, options, lengths), None
    if attention_mask.dtype == torch.int32:
        offsets = attention_mask.flatten()
        return _packed(q, k, v, offsets, offsets, None, None, options), None
    if attention_mask.dtype == torch.uint8:
        return _masked(q, k, v, attention_mask[..., : k.shape[1]].bool(), options), None
    if attention_mask.dtype == torch.bool:
        num_keys = attention_mask.shape[1]
        return _masked(q, k[:, :num_keys], v[:, :num_keys], attention_mask[:, None, None], options), None
    return _padded(q, k, v, lengths, options), None


def _is_form(mask: Tensor) -> bool:
    """Whether a mask has one of the forms that `padding_mask` returns in place of a whole mask."""
    if mask.dim() != 4 or tuple(mask.shape[1:3]) != (1, 1):
        return _is_ranges(mask)
    is_offsets = mask.dtype == torch.int32 and mask.shape[0] == 1
    return is_offsets or mask.dtype == torch.uint8 or (mask.dtype == torch.int64 and mask.shape[3] <= 2)


def _is_ranges(mask: Tensor) -> bool:
    """Whether a mask is the form of `padding_mask` that holds the range of keys of each query."""
    has_shape = mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[2] > 1 and mask.shape[3] == 2
    return has_shape and mask.dtype == torch.int32


def _refuse_unsupported(attention_mask: Tensor | None) -> None:
    if attention_mask is not None and attention_mask.dim() not in (2, 4):
        raise UnsupportedError(
            f"attention_mask: expected None, (batch, tokens) or (batch, heads, q_length, kv_length), "
            f"got shape {tuple(attention_mask.shape)}"
        )
    is_known = attention_mask is None or attention_mask.dtype == torch.bool or _is_form(attention_mask)
    if attention_mask is not None and not is_known:
        is_whole = attention_mask.dim() == 4 and attention_mask.is_floating_point()
        if not is_whole:
            raise UnsupportedError(
                "attention_mask: expected what padding_mask returns, or a bool or floating point tensor, got "
                f"{attention_mask.dtype} of shape {tuple(attention_mask.shape)}: this model makes its own mask"
            )


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if value is not None and value is not False and name not in _IRRELEVANT:
            given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UnsupportedError(f"{name}: expected None, got {given}: onepass attention does not know this argument")


def _window(sliding_window: int | None, is_causal: bool, num_keys: int) -> tuple[int, int | None] | None:
    if sliding_window is not None and sliding_window < 1:
        raise UnsupportedError(
            f"sliding_window: expected at least 1, the query's own key, or None, got {sliding_window}"
        )
    if sliding_window is None or sliding_window >= num_keys:
        return None  # the window reaches over all keys
    return sliding_window - 1, None if is_causal else sliding_window - 1


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Attention of packed sequences in the flattened batch."""
    if "bias" in options:
        raise UnsupportedError("position_bias: expected None with packed sequences, got a tensor")
    out = api.attention_varlen(
        *(x.flatten(0, 1) for x in (q, k, v)),
        cu_seqlens_q=cu_seqlens_q.to(q.device, torch.int32),
        cu_seqlens_k=cu_seqlens_k.to(q.device, torch.int32),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        **options,
    )
    return out.unflatten(0, q.shape[:2])


def _packed_by_positions(position_ids: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Offsets of the packed sequences that follow from positions; None if there is only one sequence.

    transformers infers sequences from positions only for a single row, and only if all keys are present. All layers of
    a forward get the same tensor of positions. The tensor keeps the answer until someone writes to it, so that only one
    layer reads it from the device.
    """
    seqlen = q.shape[1]
    if position_ids is None or tuple(position_ids.shape) != (1, seqlen) or seqlen == 1 or k.shape[:2] != (1, seqlen):
        return None
    if torch.compiler.is_compiling() or _is_capturing(q):
        return None
    version = None if position_ids.is_inference() else position_ids._version  # inference tensors count no changes
    known: tuple[int | None, Tensor | None] | None = getattr(position_ids, _KNOWN_OFFSETS, None)
    if known is None or version is None or known[0] != version:
        is_start = position_ids.diff(dim=-1) != 1
        offsets = cu_seqlens_of(torch.nn.functional.pad(is_start.cumsum(-1), (1, 0)))
        known = version, offsets if len(offsets) > 2 else None
        setattr(position_ids, _KNOWN_OFFSETS, known)
    return known[1]


def _is_capturing(t: Tensor) -> bool:
    """Whether a CUDA graph captures what is computed from a tensor now."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


class _Lengths:
    """Where the keys of each row begin and end, as a mask of `padding_mask` says, int32 (batch,).

    All layers of a forward get the same mask. Until someone writes to it, the mask keeps the bounds that the first
    layer has made of it, and the call of that layer. Without this the host would take a third longer for a token in
    generation, where each layer computes little.
    """

    def __init__(self, mask: Tensor | None, options: tuple):
        """Args: mask: int64 (batch, 1, 1, up to 2), or None; other masks keep nothing. options: those of this layer."""
        self.mask, self.options = mask, options

    @property
    def num_bounds(self) -> int:
        """How many bounds of each row the mask has."""
        return 0 if self.mask is None else self.mask.shape[-1]

    def bound(self, number: int) -> Tensor:
        """Bound `number` of each row."""
        return self._kept(number, lambda mask: mask[:, 0, 0, number].to(torch.int32).contiguous())

    def full(self, k: Tensor) -> Tensor:
        """The number of keys of k, (batch, num_keys, num_heads, head_dim), for each row."""

        def make(_: Tensor | None) -> Tensor:
            return torch.full(k.shape[:1], k.shape[1], dtype=torch.int32, device=k.device)

        return self._kept((k.shape[:2], k.device), make)

    @property
    def call_before(self) -> RepeatableDecode | None:
        """The call that a layer with these options has made in this forward."""
        kept = self._memory()
        return None if kept is None else kept.get(self.options)

    def keep_call(self, call: RepeatableDecode | None) -> None:
        """Keep the call of this layer for those after it."""
        kept = self._memory()
        if kept is not None and call is not None:
            kept[self.options] = call

    def _kept(self, what: Hashable, make: Callable[[Any], Tensor]) -> Tensor:
        kept = self._memory()
        if kept is None:
            return make(self.mask)
        if what not in kept:
            kept[what] = make(self.mask)
        return kept[what]

    def _memory(self) -> dict | None:
        """What the mask keeps; None if its values may change unseen: uncounted, or in another run of a CUDA graph."""
        mask = self.mask
        if mask is None or torch.compiler.is_compiling() or mask.is_inference():
            return None
        if _is_capturing(mask):
            return None
        known: tuple[int, dict] | None = getattr(mask, _KNOWN_LENGTHS, None)
        if known is None or known[0] != mask._version:
            known = mask._version, {}
            setattr(mask, _KNOWN_LENGTHS, known)
        return known[1]


def _padded(q: Tensor, k: Tensor, v: Tensor, lengths: _Lengths, options: dict[str, Any]) -> Tensor:
    """Attention in which the real keys of each row are neighbors; see `padding_mask` for the forms of their bounds."""
    count = lengths.num_bounds
    if count == 0:
        return _attend(q, k, v, options, lengths)
    if options["causal"]:
        options["seqstart_k"] = lengths.bound(0)
        return _attend(q, k, v, options, lengths, lengths.bound(1) if count == 2 else None)
    if count == 1 and options["window"] is None:
        return _attend(q, k, v, options, lengths, lengths.bound(0))
    high = lengths.bound(count - 1)
    low = lengths.bound(0) if count == 2 else torch.zeros_like(high)
    ranges = torch.stack((low, high), -1)[:, None, None].expand(-1, 1, q.shape[1], 2)
    return api.attention(q, k, v, **options, key_ranges=ranges.contiguous())


def _attend(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], lengths: _Lengths, ends: Tensor | None = None
) -> Tensor:
    """Attention of dense tensors, by `attention_decode` for a few queries over more keys without gradients.

    Args: ends: (batch,) int32, the number of keys that exist.
    """
    if q.shape[1] > FEW_QUERIES or k.shape[1] <= q.shape[1] or options["dropout_p"] or _has_gradient(q, k, v, options):
        return api.attention(q, k, v, **options, seqused_k=ends)
    ends = lengths.full(k) if ends is None else ends
    own = {name: value for name, value in options.items() if name not in ("deterministic", "dropout_p")}
    if "bias" in own or own["sinks"] is not None:
        return attention_decode(q, k, v, cache_seqlens=ends, **own)
    del own["sinks"]
    out, call = repeatable_decode(q, k, v, cache_seqlens=ends, **{"seqstart_k": None, **own})
    lengths.keep_call(call)
    return out


def _has_gradient(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> bool:
    tensors = q, k, v, *(t for t in options.values() if isinstance(t, Tensor))
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    """Attention under a mask of four dimensions, bool or floating point, beside the other options."""
    arguments = mask_arguments(four_dimensional(mask, torch.Size((q.shape[0], q.shape[2]))), q.shape[1], k.shape[1])
    if "bias" in options:
        bias = options["bias"]
        arguments["bias"] = bias + arguments["bias"].to(bias.dtype)
    return api.attention(q, k, v, **options | arguments)

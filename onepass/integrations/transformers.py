"""Hugging Face transformers with onepass as its attention.

    from onepass.integrations.transformers import register

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=register())

transformers calls two functions per implementation. The mask function runs once per forward pass, before the layers;
the attention function runs in every layer and receives the result of the mask function. `register` sets both: with an
attention function alone, transformers passes no mask at all and padding is silently ignored.

The mask function of onepass returns one of

- None: all keys are real;
- bool (batch, num_keys): which keys are real; keys past num_keys are unused slots of a static cache;
- int32 (batch, seqlen): which of several packed sequences each token belongs to;
- bool (batch, 1, q_length, kv_length): the whole mask, for a pattern that the forms above cannot represent.

With the first three, the attention function knows the other properties of the mask (causal, sliding window). A whole
mask is read by tiles, like one of four dimensions that a caller passes to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import attention as api
from ..compat.masks import four_dimensional, mask_arguments
from ..errors import UnsupportedError

__all__ = ["attention_forward", "padding_mask", "register"]


def register(name: str = "onepass") -> str:
    """Make `attn_implementation=name` available to every model of transformers.

    Calling it again is harmless. Returns: name. Raises: ImportError without transformers 5.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, padding_mask)
    return name


# --- the mask function ------------------------------------------------------------------------------------------------


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask that `attention_forward` cannot know by itself: padding, unused cache slots, packed sequences.

    Args:
        q_length, kv_length: lengths of the attention call; kv_length includes unused slots of a static cache.
        q_offset, kv_offset: positions of the first query and of the first key in the sequence.
        mask_function: the pattern, composed by transformers.
        attention_mask: (batch, tokens seen so far), True = real token, or None.
        kwargs: further arguments of transformers' mask functions, which concern whole masks only.

    Returns: None, bool (batch_size, num_keys), int32 (batch_size, q_length), or for a pattern other than causal,
    bidirectional, sliding window and packed sequences bool (batch_size, 1, q_length, kv_length); see the docstring of
    this module.
    """
    if attention_mask is not None and attention_mask.dim() != 2:
        raise UnsupportedError(f"attention_mask: expected (batch, tokens), got shape {tuple(attention_mask.shape)}")
    pattern = _recognize(mask_function, kv_offset + kv_length)
    if pattern is None:
        from transformers.masking_utils import sdpa_mask

        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "device": device}
        kwargs |= {"mask_function": mask_function, "attention_mask": attention_mask}
        # transformers gives, and takes, a tensor here in some versions
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, **kwargs)  # type: ignore[arg-type]
    if pattern.sequence_ids is not None:
        return pattern.sequence_ids.to(torch.int32).expand(batch_size, -1)
    # The last causal query stands at the last key, so slots of a static cache beyond it are cut off.
    num_keys = int(q_offset) + q_length - kv_offset if pattern.is_causal else kv_length
    if attention_mask is None:
        if num_keys == kv_length:
            return None
        return torch.ones(batch_size, num_keys, dtype=torch.bool, device=device)
    is_real = attention_mask[:, kv_offset : kv_offset + num_keys].bool()
    is_real = torch.nn.functional.pad(is_real, (0, num_keys - is_real.shape[1]))
    return None if num_keys == kv_length and is_real.all() else is_real


class _Pattern(NamedTuple):
    is_causal: bool
    sequence_ids: Tensor | None  # (batch, seqlen) for packed sequences


def _recognize(mask_function: Callable | None, num_positions: int) -> _Pattern | None:
    """The pattern of transformers' composed mask function; None for one that `attention_forward` would lose."""
    is_causal, sequence_ids = False, None
    for name, variables in _conditions(mask_function):
        if name == "causal_mask_function":
            is_causal = True
        elif name == "packed_sequence_mask_function":
            sequence_ids = variables["packed_sequence_mask"]
        elif name == "chunked_overlay" and num_positions <= variables["chunk_size"]:
            pass  # everything is still in the first chunk
        elif name not in (
            "bidirectional_mask_function",
            "sliding_window_overlay",
            "sliding_window_bidirectional_overlay",
        ):
            return None
    return _Pattern(is_causal, sequence_ids)


def _conditions(mask_function: Callable | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The conditions of a mask: for each the name of the function that made it, and the variables that it holds."""
    code = getattr(mask_function, "__code__", None)
    if mask_function is None or code is None:
        yield str(mask_function), {}
        return
    cells = mask_function.__closure__ or ()
    variables = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    name = mask_function.__qualname__.split(".<locals>")[0]
    if mask_function.__module__ != "transformers.masking_utils":
        yield f"{mask_function.__module__}.{mask_function.__qualname__}", {}
    elif name == "and_masks":
        for condition in variables["mask_functions"]:
            yield from _conditions(condition)
    elif name == "remap_positions_for_packed_sequence":
        yield from _conditions(variables["mask_function"])
    else:
        yield name, variables


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
        attention_mask: the result of `padding_mask`; or a whole mask, bool or floating point, that broadcasts to
            (batch, num_heads_q, q_length, kv_length or more): then it alone says which keys a query sees.
        dropout: the probability with which a probability is left out of the product with value.
        scaling: None = head_dim ** -0.5.
        sliding_window: the number of keys that a causal query sees, including its own; a bidirectional query sees
            sliding_window - 1 keys on either side of its own.
        softcap: as in `onepass.attention`.
        s_aux: (num_heads_q,) attention sinks.
        position_bias: added to scores; it broadcasts to (batch, num_heads_q, q_length, kv_length).
        position_ids: (1, q_length), read if attention_mask is None and there is no cache: a new packed sequence begins
            where a position does not follow the one before it.
        cu_seq_lens_q, cu_seq_lens_k: (num_sequences + 1,) offsets of packed sequences in the flattened batch;
            max_length_q, max_length_k are hints.
        deterministic: as in `onepass.attention`.
        kwargs: arguments known to be irrelevant, or None or False; all others raise.

    Returns: out (batch, q_length, num_heads_q, head_dim_v), 0 at left padding, and None in place of attention weights.
    Outputs at padding on the right are arbitrary. With padding the host reads on which side it is.

    Raises: NotImplementedError naming an argument that is not supported.
    """
    _refuse_unsupported(attention_mask, kwargs)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        raise ValueError(f"is_causal: expected a bool here or as an attribute of {type(module).__name__}, got neither")
    is_causal = bool(is_causal)
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
    if attention_mask is not None and attention_mask.dim() == 4:
        options |= {"causal": False, "window": None}
        return _masked(q, k, v, attention_mask[..., : k.shape[1]], options), None

    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            raise UnsupportedError("cu_seq_lens_q: expected None where attention_mask has padding, got both")
        return _packed(q, k, v, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, options), None
    if attention_mask is None:
        attention_mask = _sequence_ids(position_ids, q, k)
    if attention_mask is None:
        return api.attention(q, k, v, **options), None
    if attention_mask.dtype != torch.bool:
        cu_seqlens = _cu_seqlens_of(attention_mask)
        return _packed(q, k, v, cu_seqlens, cu_seqlens, None, None, options), None
    return _padded(q, k, v, attention_mask, options), None


def _refuse_unsupported(attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    if attention_mask is not None and attention_mask.dim() not in (2, 4):
        raise UnsupportedError(
            f"attention_mask: expected None, (batch, tokens) or (batch, heads, q_length, kv_length), "
            f"got shape {tuple(attention_mask.shape)}"
        )
    is_whole = attention_mask is not None and attention_mask.dim() == 4 and attention_mask.is_floating_point()
    if attention_mask is not None and not is_whole and attention_mask.dtype not in (torch.bool, torch.int32):
        raise UnsupportedError(
            f"attention_mask: expected what padding_mask returns, bool or int32, got {attention_mask.dtype}: "
            "this model makes its own mask"
        )
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


def _sequence_ids(position_ids: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """(1, seqlen) number of the packed sequence that each token belongs to; None if there is only one.

    transformers infers sequences from positions only for a single row, and only if all keys are present.
    """
    seqlen = q.shape[1]
    if position_ids is None or tuple(position_ids.shape) != (1, seqlen) or seqlen == 1 or k.shape[:2] != (1, seqlen):
        return None
    is_start = position_ids.diff(dim=-1) != 1
    if not is_start.any():
        return None
    return torch.nn.functional.pad(is_start.cumsum(-1), (1, 0))


def _cu_seqlens_of(sequence_ids: Tensor) -> Tensor:
    """Offsets of the runs of equal ids in each row, counted over the flattened batch."""
    batch, seqlen = sequence_ids.shape
    is_start = torch.ones(batch, seqlen + 1, dtype=torch.bool, device=sequence_ids.device)[:, :seqlen]
    is_start[:, 1:] = sequence_ids.diff(dim=-1) != 0
    starts = is_start.flatten().nonzero().flatten()
    return torch.nn.functional.pad(starts, (0, 1), value=batch * seqlen).to(torch.int32)


def _padded(q: Tensor, k: Tensor, v: Tensor, is_real: Tensor, options: dict[str, Any]) -> Tensor:
    """Attention in which only the keys marked by is_real (batch, num_keys) exist.

    The host reads whether all padding is on the right, or all of it on the left: the kernels then need no mask.
    """
    num_keys = is_real.shape[1]
    k, v = k[:, :num_keys], v[:, :num_keys]
    if "bias" in options and options["bias"].shape[-1] > num_keys:
        options["bias"] = options["bias"][..., :num_keys]
    begins, ends = ((is_real[:, 1:] > is_real[:, :-1]).any(), (is_real[:, 1:] < is_real[:, :-1]).any())
    has_begins, has_ends = torch.stack((begins, ends)).tolist()
    if options["causal"] and not has_begins:
        return api.attention(q, k, v, **options)  # a real query sees no padding: it all lies to its right
    if options["causal"] and not has_ends:
        return api.attention(q, k, v, **options, seqstart_k=num_keys - is_real.sum(-1, dtype=torch.int32))
    if not has_begins and options["window"] is None:
        return api.attention(q, k, v, **options, seqused_k=is_real.sum(-1, dtype=torch.int32))
    return _masked(q, k, v, is_real[:, None, None], options)


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    """Attention under a mask of four dimensions, bool or floating point, beside the other options."""
    arguments = mask_arguments(four_dimensional(mask, torch.Size((q.shape[0], q.shape[2]))), q.shape[1], k.shape[1])
    if "bias" in options:
        bias = options["bias"]
        arguments["bias"] = bias + arguments["bias"].to(bias.dtype)
    return api.attention(q, k, v, **options | arguments)

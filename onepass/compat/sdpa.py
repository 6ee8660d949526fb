"""`torch.nn.functional.scaled_dot_product_attention` with torch's signature and semantics, computed by onepass.

Every mask is read by tiles, in O(seqlen) memory besides the mask itself. `is_causal=True` and the biases of
`torch.nn.attention.bias` (`causal_upper_left`, `causal_lower_right`) are computed from positions, without a tensor. Any
other mask becomes the `bias` of `onepass.attention` in its own broadcast shape, and tensor operations on its device
find for each query the first and the last key that it sees, so that tiles of keys outside are not visited. A boolean
padding mask in the memory of a CPU becomes lengths or ranges of keys, without a bias.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from ..api import attention as api
from ..errors import REFUSALS, renamed
from ..ops.autocast import autocast_inputs
from ..validation import tensors
from ..validation.scalars import check_flag, check_real, is_real
from .masks import four_dimensional, mask_arguments, padding_arguments

__all__ = ["scaled_dot_product_attention"]

# name of an argument in messages of onepass -> its name in torch
_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "attn_mask", "softmax_scale": "scale"}


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale * query key^T + mask) value over the last two dimensions.

    Causal attention is aligned at the TOP LEFT, as in torch: query i sees key j only if j <= i, whatever the two
    lengths are. With 2 queries and 4 keys (1 = seen):

        1 0 0 0
        1 1 0 0

    Args:
        query: (..., num_heads_q, seqlen_q, head_dim), float64, float32, bfloat16 or float16.
        key: (..., num_heads_kv, seqlen_k, head_dim).
        value: (..., num_heads_kv, seqlen_k, head_dim_v). The dimensions before the last two broadcast; there may be
            any number of them, including none.
        attn_mask: broadcastable to (..., num_heads_q, seqlen_q, seqlen_k). Bool: True = seen. Floating point
            (query's dtype or float32): added to the scaled scores; -inf hides a pair, whatever its key holds. It has a
            gradient, which is undefined for hidden pairs. From a row without a value above -2^14 its largest value
            is subtracted; torch rounds the scores of such a row away. A `torch.nn.attention.bias.CausalBias` is
            accepted, too.
        dropout_p: as in `onepass.attention`; with the same seed torch drops other probabilities.
        is_causal: causal attention, together with attn_mask if that is given (not with a `CausalBias`).
        scale: None = head_dim ** -0.5.
        enable_gqa: the numbers of heads of key and value may divide query's instead of being equal to it.

    Returns: (..., num_heads_q, seqlen_q, head_dim_v) in query's dtype, accumulated in float32 (float64 for float64).
    A row that sees no key is 0, with zero gradients.

    Raises: TypeError, ValueError or NotImplementedError for bad arguments, before any work is done.
    """
    query, key, value = autocast_inputs(query, key, value)
    is_causal, scale = check_flag("is_causal", is_causal), None if scale is None else check_real("scale", scale)
    leading = _check(query, key, value, attn_mask, is_causal, enable_gqa)
    # onepass.attention takes no such probability
    drops_all = is_real(dropout_p) and not isinstance(dropout_p, bool) and dropout_p == 1
    causal_bias = attn_mask if isinstance(attn_mask, CausalBias) else None
    is_bottom_right = causal_bias is not None and causal_bias.variant == CausalVariant.LOWER_RIGHT
    mask = None if causal_bias is not None or attn_mask is None else four_dimensional(attn_mask, leading)
    window = None
    if is_causal or (causal_bias is not None and not is_bottom_right):
        # onepass aligns at the bottom right, so keys past the diagonal, which no query sees, are left out. If there are
        # fewer keys than queries, a window to the right makes up for the difference.
        seqlen_q = query.shape[-2]
        key, value = key[..., :seqlen_q, :], value[..., :seqlen_q, :]
        mask = mask if mask is None or mask.shape[-1] == 1 else mask[..., :seqlen_q]
        window = (None, seqlen_q - key.shape[-2])
    q, k, v = (_batch_seqlen_heads_dim(x, leading) for x in (query, key, value))
    num_heads = leading[-1] if leading else 1
    if q.shape[2] != num_heads:
        q = q.expand(-1, -1, num_heads, -1)
    if k.shape[2] != v.shape[2]:
        k, v = (x.repeat_interleave(num_heads // max(1, x.shape[2]), 2) for x in (k, v))
    masks: dict[str, Any] = {}
    if mask is not None:
        padding = padding_arguments(mask, q.shape[0], q.shape[1], window is not None)
        masks = mask_arguments(mask, q.shape[1], k.shape[1]) if padding is None else padding
    try:
        masks["dropout_p"] = 0.0 if drops_all else dropout_p
        out = api.attention(q, k, v, causal=is_bottom_right, window=window, softmax_scale=scale, **masks)
    except REFUSALS as error:
        raise renamed(error, _NAMES) from None
    if drops_all:
        out = out.masked_fill(torch.ones((), dtype=torch.bool, device=out.device), 0.0)
    return out.transpose(1, 2).reshape(*leading, *query.shape[-2:-1], value.shape[-1])


def _batch_seqlen_heads_dim(x: Tensor, leading: torch.Size) -> Tensor:
    """(..., heads, seqlen, dim) -> (batch, seqlen, heads, dim), a view wherever one exists."""
    batch_shape = leading[:-1]
    x = x if x.dim() > 2 else x.unsqueeze(0)
    return x.expand(*batch_shape, *x.shape[-3:]).reshape(math.prod(batch_shape), *x.shape[-3:]).transpose(1, 2)


# --- checks -----------------------------------------------------------------------------------------------------------


def _check(query: Any, key: Any, value: Any, attn_mask: Any, is_causal: bool, enable_gqa: Any) -> torch.Size:
    """Check all arguments. Returns: the broadcast dimensions (..., num_heads_q), () if there are none."""
    named = {"query": query, "key": key, "value": value}
    tensors.check_tensors(named)
    for name, t in named.items():
        if t.dim() < 2:
            raise ValueError(f"{name}: expected at least 2 dimensions (..., seqlen, head_dim), got {tuple(t.shape)}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key: expected head_dim {query.shape[-1]} like query, got {key.shape[-1]}")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value: expected seqlen_k {key.shape[-2]} like key, got {value.shape[-2]}")
    enable_gqa = check_flag("enable_gqa", enable_gqa)
    leading = _leading_shape(query, key, value, enable_gqa)
    if attn_mask is not None:
        if is_causal and isinstance(attn_mask, CausalBias):
            raise ValueError("attn_mask: expected None or a tensor where is_causal=True, got a CausalBias")
        _check_mask(attn_mask, query, torch.Size((*leading, query.shape[-2], key.shape[-2])))
    return leading


def _leading_shape(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> torch.Size:
    shapes = [t.shape[:-2] for t in (query, key, value)]
    if enable_gqa:
        for name, shape in zip(("query", "key", "value"), shapes, strict=True):
            if not shape:
                raise ValueError(f"{name}: expected at least 3 dimensions with enable_gqa=True, got 2")
        num_heads = shapes[0][-1]
        for name, shape in zip(("key", "value"), shapes[1:], strict=True):
            if num_heads and (shape[-1] < 1 or num_heads % shape[-1] != 0):
                raise ValueError(
                    f"{name}: expected a number of heads that divides query's {num_heads}, got {shape[-1]}"
                )
        shapes = [torch.Size((*shape[:-1], num_heads)) for shape in shapes]
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        given = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        hint = "" if enable_gqa else " (heads that differ need enable_gqa=True)"
        raise ValueError(
            f"query, key, value: expected dimensions before the last two that broadcast, got {given}{hint}"
        ) from None


def _check_mask(attn_mask: Any, query: Tensor, scores_shape: torch.Size) -> None:
    if isinstance(attn_mask, CausalBias):
        given = (attn_mask.seq_len_q, attn_mask.seq_len_kv)
        if given != tuple(scores_shape[-2:]):
            raise ValueError(f"attn_mask: expected a bias for lengths {tuple(scores_shape[-2:])}, got one for {given}")
        return
    tensors.check_tensor("attn_mask", attn_mask)
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise TypeError(f"attn_mask: expected dtype bool, float32 or {query.dtype} like query, got {attn_mask.dtype}")
    if attn_mask.device != query.device:
        raise ValueError(f"attn_mask: expected device {query.device} like query, got {attn_mask.device}")
    try:
        fits = attn_mask.dim() >= 2 and torch.broadcast_shapes(attn_mask.shape, scores_shape) == scores_shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"attn_mask: expected a shape that broadcasts to {tuple(scores_shape)}, got {tuple(attn_mask.shape)}"
        )

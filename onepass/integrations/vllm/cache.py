"""The key/value caches of vLLM, as views that `onepass.attention_decode` takes, and writing new tokens to them.

vLLM has had two layouts of a layer's cache: (blocks, 2, block_size, kv heads, head_size) up to 0.24, and
(blocks, kv heads, block_size, 2 * head_size) from 0.32 on, with the keys in the first half of each row. The order of
these dimensions in memory is independent of the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn


def keys_and_values(cache: Tensor, head_size: int, is_e4m3: bool) -> tuple[Tensor, Tensor]:
    """Views (pages, page_size, kv heads, head_size) of a layer's cache, float8_e4m3fn where it is quantized.

    Raises: ValueError for another layout.
    """
    if cache.dim() == 5 and cache.shape[1] == 2 and cache.shape[-1] == head_size:
        k, v = cache.unbind(1)
    elif cache.dim() == 4 and cache.shape[-1] == 2 * head_size:
        k, v = cache.transpose(1, 2).split(head_size, dim=-1)
    else:
        raise ValueError(
            f"kv_cache: expected (blocks, 2, block_size, kv heads, {head_size}) or (blocks, kv heads, block_size, "
            f"{2 * head_size}), got {tuple(cache.shape)}"
        )
    return (k.view(E4M3), v.view(E4M3)) if is_e4m3 else (k, v)


def write(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k_descale: Tensor, v_descale: Tensor
) -> None:
    """Write token i to slot slots[i] = page * page_size + row. A negative slot marks padding, which is not written.

    Args:
        key, value: (tokens or more, kv heads, head_size); tokens past the slots are padding.
        k_cache, v_cache: the views of `keys_and_values`. For an e4m3 cache, values are divided by their descale and
            clamped to the largest number of the type.
        slots: (tokens,) int64.
        k_descale, v_descale: float32, of one element.
    """
    if key.is_cuda:
        from vllm._custom_ops import reshape_and_cache_flash

        is_e4m3 = k_cache.dtype == E4M3
        caches = [c.view(torch.uint8) for c in (k_cache, v_cache)] if is_e4m3 else [k_cache, v_cache]
        kind = "fp8_e4m3" if is_e4m3 else "auto"
        reshape_and_cache_flash(key, value, *caches, slots, kind, k_descale, v_descale)
        return
    kept = (slots >= 0).nonzero().squeeze(1)
    pages, rows = slots[kept] // k_cache.shape[1], slots[kept] % k_cache.shape[1]
    for cache, new, descale in ((k_cache, key, k_descale), (v_cache, value, v_descale)):
        tokens = new[kept]
        if cache.dtype == E4M3:
            limit = torch.finfo(E4M3).max
            tokens = (tokens.float() / descale).clamp(-limit, limit).to(E4M3)
            cache.view(torch.uint8)[pages, rows] = tokens.view(torch.uint8)  # torch writes no float8 by index
        else:
            cache[pages, rows] = tokens

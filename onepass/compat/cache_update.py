"""Rotating queries and new keys and appending keys to a cache, in PyTorch, where flash-attn's rules are not ours.

flash-attn counts rotary positions from the length of the cache, and rotates all queries alike where there is neither a
causal mask nor a window; `onepass.attention_decode` counts from the last key. flash-attn also takes packed new keys.
Everything is computed on the device of the lengths; values are read from the host's memory alone.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..quantization.codec import E4M3
from ..tiled.cache import rotate, to_e4m3
from ..validation import tensors
from ..validation.scalars import check_flag


class Rotary(NamedTuple):
    """Rotary positions of a call.

    Attributes:
        cos, sin: (positions, rotary_dim / 2) floating point.
        starts: (batch,) int32: the position of the first new key and the first query of each batch entry.
        interleaved: rotated pairs are columns (0, 1), (2, 3), ..; else the two halves of the rotated columns.
    """

    cos: Tensor
    sin: Tensor
    starts: Tensor
    interleaved: bool


def is_on_host(t: Tensor) -> bool:
    """Whether a tensor has values that can be read without waiting for a device."""
    is_ordinary = type(t) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
    return t.device.type == "cpu" and is_ordinary and t.numel() > 0


def check_rotary(cos: Any, sin: Any, starts: Tensor, interleaved: Any, q: Tensor, has_new_keys: bool) -> Rotary | None:
    """The rotary positions of a call, checked; None if it has none."""
    interleaved = check_flag("rotary_interleaved", interleaved)
    for name, table, other in (("rotary_cos", cos, sin), ("rotary_sin", sin, cos)):
        if table is None and other is None:
            continue
        tensors.check_tensor(name, table, "a torch.Tensor where the other of rotary_cos and rotary_sin is given")
        if not has_new_keys:
            raise ValueError(f"{name}: expected None where k and v are not given, got a tensor")
        if not table.is_floating_point() or table.device != q.device:
            raise TypeError(
                f"{name}: expected floating point on {q.device} like q, got {table.dtype} on {table.device}"
            )
        if table.dim() != 2 or not 1 <= table.shape[1] <= q.shape[-1] // 2 or table.shape[0] < 1:
            raise ValueError(
                f"{name}: expected shape (positions, rotary_dim / 2) with rotary_dim up to {q.shape[-1]}, "
                f"got {tuple(table.shape)}"
            )
    if cos is None:
        return None
    if cos.shape != sin.shape:
        raise ValueError(f"rotary_sin: expected shape {tuple(cos.shape)} like rotary_cos, got {tuple(sin.shape)}")
    return Rotary(cos, sin, starts, interleaved)


def rotated(
    x: Tensor,
    cu_seqlens: Tensor | None,
    rotary: Rotary | None,
    one_position: bool = False,
    used: Tensor | None = None,
) -> Tensor:
    """Queries or new keys with their first columns rotated, in x's dtype, or in bfloat16 for an e4m3 x.

    Args:
        x: (batch, seqlen, num_heads, head_dim), or packed (total, num_heads, head_dim) with its cu_seqlens.
        one_position: whether all rows of a batch entry stand at its first position.
        used: (batch,) int32: only the first rows of each entry exist; the tables need no rows for all others.
    """
    x = x.bfloat16() if x.dtype == E4M3 else x
    if rotary is None:
        return x
    starts = rotary.starts.long()
    last = None if used is None else (used.long() - 1).clamp(min=0)
    if cu_seqlens is None:
        steps = torch.arange(x.shape[1], device=x.device).expand(len(starts), -1)
        steps = steps if last is None else torch.minimum(steps, last[:, None])
        positions = starts[:, None] + (torch.zeros_like(steps) if one_position else steps)
    else:
        owner, step = rows_of_sequences(x.shape[0], cu_seqlens)
        owner = owner.clamp(max=max(len(starts) - 1, 0))
        first = starts[owner] if len(starts) else torch.zeros_like(step)
        step = step if last is None or not len(last) else torch.minimum(step, last[owner])
        positions = first if one_position else first + step
    if is_on_host(positions) and int(positions.max()) >= rotary.cos.shape[0]:
        longest = int(positions.max()) + 1
        raise ValueError(f"rotary_cos: expected a row for each of the {longest} positions, got {rotary.cos.shape[0]}")
    cos, sin = (table.float() if table.dtype == E4M3 else table for table in (rotary.cos, rotary.sin))
    if cu_seqlens is None:
        return rotate(x, positions, cos, sin, rotary.interleaved)
    return rotate(x[None], positions[None], cos, sin, rotary.interleaved)[0]


def rows_of_sequences(rows: int, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The sequence that each packed row belongs to, and the row's number in that sequence, int64 each.

    For rows past the last offset, the sequence is the number of sequences, and the number in it is arbitrary.
    """
    row = torch.arange(rows, device=cu_seqlens.device)
    owner = torch.searchsorted(cu_seqlens[1:], row.to(cu_seqlens.dtype), right=True)
    return owner, row - cu_seqlens[owner]


def append(
    caches: tuple[Tensor, Tensor],
    page_table: Tensor | None,
    new: tuple[Tensor, Tensor],
    lengths: Tensor,
    cu_seqlens_new: Tensor | None,
) -> None:
    """Write new keys and values behind the first `lengths` rows of each batch entry, in place.

    Args:
        caches: k and v, (batch, capacity, num_heads, head_dim), or (num_pages, page_size, ..) with a page_table.
        new: keys and values, (batch, seqlen_new, ..), or packed (total_new, ..) with cu_seqlens_new. They are rounded
            to the dtype of the caches. Rows for which there is no room are dropped.
    """
    capacity = caches[0].shape[1] * (1 if page_table is None else page_table.shape[1])
    if cu_seqlens_new is None:
        batch, seqlen_new = new[0].shape[:2]
        entry = torch.arange(batch, device=lengths.device).repeat_interleave(seqlen_new)
        step = torch.arange(seqlen_new, device=lengths.device).repeat(batch)
        is_valid = torch.ones_like(entry, dtype=torch.bool)
        new = new[0].flatten(0, 1), new[1].flatten(0, 1)
    else:
        batch = len(lengths)
        entry, step = rows_of_sequences(new[0].shape[0], cu_seqlens_new)
        is_valid = entry < batch
        entry = entry.clamp(max=max(batch - 1, 0))
    if not batch or not len(entry):
        return
    position = lengths.long()[entry] + step
    is_valid = is_valid & (position >= 0) & (position < capacity)
    position = position.clamp(0, max(capacity - 1, 0))
    if page_table is None:
        place = entry, position
    else:
        page_size = caches[0].shape[1]
        page = page_table.long()[entry, position // page_size]
        is_valid = is_valid & (page >= 0) & (page < caches[0].shape[0])
        place = page.clamp(0, caches[0].shape[0] - 1), position % page_size
    # a row that is not to be written repeats the write of another row, so that the order of writes does not matter
    order = torch.arange(len(entry), device=entry.device)
    source = torch.where(is_valid, order, -1).cummax(0).values
    source = torch.where(source < 0, is_valid.long().argmax(), source)
    place = place[0][source], place[1][source]
    has_valid = is_valid.any()
    for cache, rows in zip((cache.detach() for cache in caches), (rows.detach() for rows in new), strict=True):
        if cache.dtype == E4M3:  # torch cannot index e4m3
            rows = rows if rows.dtype == E4M3 else to_e4m3(rows, None)
            cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
        # torch writes to a cache that was made in inference mode only in that mode
        is_of_inference = not torch.compiler.is_compiling() and cache.is_inference()
        with torch.inference_mode() if is_of_inference else nullcontext():
            cache[place] = torch.where(has_valid, rows[source].to(cache.dtype), cache[place])

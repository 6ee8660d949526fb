"""A key/value cache in plain PyTorch: rows are rotated, appended, and read through a page table."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from ..geometry.rotary import rotate
from ..problem.decode import DecodeInputs, DecodeProblem
from ..problem.descales import descale_of_keys
from ..quantization.codec import E4M3, E4M3_MAX


def append(problem: DecodeProblem, inputs: DecodeInputs) -> None:
    """Write k_new, rotated, and v_new after the keys of each batch entry, in place. Values have been checked."""
    k_new, v_new = inputs.k_new, inputs.v_new
    assert k_new is not None
    assert v_new is not None
    seqlen_new = k_new.shape[1]
    positions = inputs.cache_seqlens.long()[:, None] + torch.arange(seqlen_new, device=k_new.device)
    if inputs.rotary_cos is not None and inputs.rotary_sin is not None:
        rows = None if inputs.rotary_positions is None else inputs.rotary_positions.k
        rows = positions if rows is None else rows.long().expand_as(positions)
        k_new = rotate(k_new, rows, inputs.rotary_cos, inputs.rotary_sin, problem.rotary_interleaved)
    if inputs.page_table is None:
        where = torch.arange(len(positions), device=k_new.device)[:, None], positions
    else:
        page_size = inputs.k_cache.shape[1]
        where = inputs.page_table.long().gather(1, positions // page_size), positions % page_size
    for cache, new, descale in (
        (inputs.k_cache, k_new, inputs.k_descale),
        (inputs.v_cache, v_new, inputs.v_descale),
    ):
        if problem.attention.has_e4m3_cache:
            scale = None
            if descale is not None:
                entry = torch.arange(len(positions), device=new.device)[:, None].expand_as(positions)
                scale = descale_of_keys(descale, inputs, problem.kv_block, entry, positions)
            # torch cannot index e4m3
            cache, new = cache.view(torch.uint8), to_e4m3(new, scale).view(torch.uint8)
        # torch writes to a cache that was made in inference mode only in that mode
        with torch.inference_mode() if cache.is_inference() else nullcontext():
            cache[where] = new


def to_e4m3(x: Tensor, descale: Tensor | None) -> Tensor:
    """x / descale, rounded to the nearest e4m3 number; magnitudes above 448, even infinity, become 448. NaN stays."""
    x = x.float() if x.dtype != torch.float64 else x
    return (x if descale is None else x / descale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def rotated_queries(problem: DecodeProblem, inputs: DecodeInputs) -> Tensor:
    """q rotated by its key positions: query i stands at position seqlen_k - seqlen_q + i unless positions are given."""
    q = inputs.q
    if inputs.rotary_cos is None or inputs.rotary_sin is None:
        return q
    ends = inputs.cache_seqlens.long()[:, None] + inputs.seqlen_new
    positions = ends + torch.arange(-q.shape[1], 0, device=q.device)
    if inputs.rotary_positions is not None and inputs.rotary_positions.q is not None:
        positions = inputs.rotary_positions.q.long().expand_as(positions)
    return rotate(q, positions, inputs.rotary_cos, inputs.rotary_sin, problem.rotary_interleaved)


def keys_and_values(problem: DecodeProblem, inputs: DecodeInputs, entry: int, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` keys and values of a batch entry, (count, num_heads_kv, dim) each.

    From an e4m3 cache real values are returned, in the dtype in which sums are accumulated.
    """
    k, v = (rows_of_entry(cache, inputs.page_table, entry, count) for cache in (inputs.k_cache, inputs.v_cache))
    if not problem.attention.has_e4m3_cache:
        return k, v
    k, v = (rows.to(problem.attention.accum_dtype) for rows in (k, v))
    if inputs.k_descale is None or inputs.v_descale is None:
        return k, v
    key = torch.arange(count, device=k.device)
    k_scale, v_scale = (
        descale_of_keys(descale, inputs, problem.kv_block, torch.full_like(key, entry), key)
        for descale in (inputs.k_descale, inputs.v_descale)
    )
    return k * k_scale, v * v_scale


def rows_of_entry(cache: Tensor, page_table: Tensor | None, entry: int, count: int) -> Tensor:
    """The first `count` rows of a batch entry, (count, num_heads_kv, head_dim); a copy where they lie in pages."""
    if page_table is None:
        return cache[entry, :count]
    page_size = cache.shape[1]
    # a page that holds no key may be any number; those of keys are checked
    pages = page_table[entry, : -(-count // page_size)].long().clamp(0, cache.shape[0] - 1)
    if cache.dtype == E4M3:  # torch cannot index e4m3
        return cache.view(torch.uint8)[pages].view(E4M3).flatten(0, 1)[:count]
    return cache[pages].flatten(0, 1)[:count]

"""Checks of the arguments of `attention_decode` that need no value from the device, once, for all backends.

`problem.lengths.read_cache_lengths` checks the values that only the device knows, if a backend works on the host or
the caller asks for it.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UnsupportedError
from ..geometry.splits import MAX_SPLITS, MAX_SPLITS_BY_SIZE, SPLIT_UNIT
from ..problem.decode import FEW_QUERIES, DecodeInputs, DecodeProblem
from .attention import checked_options
from .descales import check_descales
from .modifiers import check_modifiers, check_sizes, given_modifiers
from .overlap import refuse_overlaps
from .scalars import LARGEST_BLOCK, check_block, check_flag, check_int
from .tensors import (
    DENSE_DIMS,
    E4M3,
    PACKED_DIMS,
    check_groups,
    check_int32,
    check_max_seqlens,
    check_ranks,
    check_tensor,
    check_tensors,
    is_missing,
    shape_of_values,
)

PAGED_DIMS = "(num_pages, page_size, num_heads_kv, head_dim)"


def check_decode(
    inputs: DecodeInputs,
    *,
    rotary_interleaved: Any,
    num_splits: Any,
    split_size: Any,
    check_values: Any,
    kv_block: Any = None,
    max_seqlen_q: Any = None,
    **options: Any,
) -> DecodeProblem:
    """The problem of a call of `onepass.attention_decode`, whose arguments are checked.

    Raises: TypeError, ValueError or UnsupportedError, naming the argument, what was expected and what was given.
    """
    q, k_cache, v_cache = inputs[:3]
    _check_dtypes(q, k_cache, v_cache)
    dims = DENSE_DIMS if inputs.page_table is None else PAGED_DIMS
    is_packed = inputs.cu_seqlens_q is not None
    if is_packed:
        check_tensor("cu_seqlens_q", inputs.cu_seqlens_q, "an int32 torch.Tensor")
    check_ranks({"q": q}, *((PACKED_DIMS, 3) if is_packed else (DENSE_DIMS, 4)))
    check_ranks({"k_cache": k_cache, "v_cache": v_cache}, dims, 4)
    _check_cache_shapes(q, k_cache, v_cache)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.stride(-1) != 1:
            raise ValueError(f"{name}: expected a last dimension of stride 1, got strides {cache.stride()}")
    if is_packed:
        check_packed_queries(inputs)
    batch = inputs.batch
    check_int32("cache_seqlens", inputs.cache_seqlens, (batch,), "one per batch entry", q.device)
    if inputs.page_table is None:
        if k_cache.shape[0] != batch:
            raise ValueError(
                f"k_cache: expected batch {batch} like {'cu_seqlens_q' if is_packed else 'q'} (or pages, with a "
                f"page_table), got {k_cache.shape[0]}"
            )
    else:
        check_int32("page_table", inputs.page_table, (batch, "max_pages"), "(batch, max_pages)", q.device)
        if k_cache.shape[1] < 1:
            raise ValueError(f"k_cache: expected pages of at least 1 key, got shape {tuple(k_cache.shape)}")
        if k_cache.shape[0] < 1 and inputs.page_table.shape[1] > 0:
            raise ValueError(f"k_cache: expected at least 1 page, got shape {tuple(k_cache.shape)}")
    kv_block = check_block("kv_block", kv_block)
    check_descales(inputs, kv_block)
    check_new_keys(inputs, inputs.capacity)
    check_rotary(inputs)
    if inputs.modifiers is not None:
        check_modifiers(q, inputs.capacity, inputs.cu_seqlens_q, given_modifiers(inputs.modifiers._asdict()))
    check_rotary_positions(inputs)
    rotary_interleaved = check_flag("rotary_interleaved", rotary_interleaved)
    check_values = check_flag("check_values", check_values)
    num_splits, split_size = _check_splits(num_splits, split_size, inputs.capacity)
    checked = checked_options(q, sinks=inputs.sinks, deterministic=False, tuning=None, **options)
    if inputs.seqlen_new:
        refuse_overlaps(inputs)
    return DecodeProblem.of(
        inputs.attention(**checked),
        inputs,
        num_splits=num_splits,
        split_size=split_size,
        rotary_interleaved=rotary_interleaved,
        check_values=check_values,
        kv_block=kv_block,
        max_seqlen_q=few_queries(max_seqlen_q, inputs.cu_seqlens_q),
    )


def _check_dtypes(q: Any, k_cache: Any, v_cache: Any) -> None:
    """Check that all three have one dtype, or that both caches are e4m3."""
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    if not any(isinstance(t, torch.Tensor) and t.dtype == E4M3 for t in caches.values()):
        check_tensors({"q": q} | caches)
        return
    check_tensors({"q": q})
    check_tensors(caches, (E4M3,))
    if k_cache.device != q.device:
        raise ValueError(f"k_cache: expected device {q.device} like q, got {k_cache.device}")


def _check_cache_shapes(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    if k_cache.shape[:-1] != v_cache.shape[:-1]:
        expected = shape_of_values(k_cache)
        raise ValueError(f"v_cache: expected shape {expected} like k_cache, got {tuple(v_cache.shape)}")
    if q.shape[-1] != k_cache.shape[-1]:
        raise ValueError(f"k_cache: expected head_dim {q.shape[-1]} like q, got {k_cache.shape[-1]}")
    for name, t in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if t.shape[-1] < 1:
            raise ValueError(f"{name}: expected a head_dim of at least 1, got shape {tuple(t.shape)}")
    check_groups({"q": q}, {"k_cache": k_cache, "v_cache": v_cache}, "the cache")


def check_packed_queries(inputs: DecodeInputs) -> None:
    """Check cu_seqlens_q, and refuse new keys and rotary positions with it."""
    cu_seqlens_q = inputs.cu_seqlens_q
    check_int32("cu_seqlens_q", cu_seqlens_q, ("batch + 1",), "one more offset than sequences", inputs.q.device)
    assert cu_seqlens_q is not None
    if cu_seqlens_q.shape[0] < 1:
        raise ValueError(f"cu_seqlens_q: expected shape (batch + 1,), got {tuple(cu_seqlens_q.shape)}")
    for name in ("k_new", "v_new", "rotary_cos", "rotary_sin"):
        given = getattr(inputs, name)
        if given is not None:
            raise UnsupportedError(
                f"{name}: expected None with cu_seqlens_q (packed queries are rotated, and keys appended, before "
                f"the call), got {type(given).__name__}"
            )


def few_queries(max_seqlen_q: Any, cu_seqlens_q: Any) -> int | None:
    """max_seqlen_q if it says that all sequences have at most FEW_QUERIES queries; else None.

    Raises: TypeError or ValueError if it is neither None nor a number of queries.
    """
    if max_seqlen_q is None:
        return None
    check_max_seqlens(max_seqlen_q, None)
    if cu_seqlens_q is None:
        raise ValueError(f"max_seqlen_q: expected None without cu_seqlens_q, got {max_seqlen_q!r}")
    if isinstance(max_seqlen_q, torch.Tensor) or max_seqlen_q > FEW_QUERIES:
        return None
    return check_int("max_seqlen_q", max_seqlen_q)


def check_new_keys(inputs: DecodeInputs, capacity: int) -> None:
    """Check k_new and v_new: both or neither, rows like the rows of the caches, and room for them.

    Args:
        capacity: the number of keys that a batch entry has room for.
    """
    q, k_new, v_new = inputs.q, inputs.k_new, inputs.v_new
    if k_new is None and v_new is None:
        return
    seqlen_new = k_new.shape[1] if isinstance(k_new, torch.Tensor) and k_new.dim() == 4 else None
    for name, new, cache in (("k_new", k_new, inputs.k_cache), ("v_new", v_new, inputs.v_cache)):
        new = check_tensor(name, new, "a torch.Tensor where the other of k_new and v_new is given")
        if new.dtype != q.dtype or new.device != q.device:
            raise TypeError(f"{name}: expected {q.dtype} on {q.device}, got {new.dtype} on {new.device}")
        expected = (q.shape[0], "seqlen_new" if seqlen_new is None else seqlen_new, *cache.shape[2:])
        if tuple(new.shape) != expected:
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(new.shape)}")
    if inputs.seqlen_new > capacity:
        raise ValueError(f"k_new: expected at most {capacity} keys, the capacity of the cache, got {inputs.seqlen_new}")
    for name, cache in (("k_cache", inputs.k_cache), ("v_cache", inputs.v_cache)):
        if cache.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(f"{name}: expected no requires_grad where new keys are written to it in place")


def check_rotary(inputs: DecodeInputs) -> None:
    """Check rotary_cos and rotary_sin: both or neither, tables of one shape for columns that q has."""
    cos, sin, q = inputs.rotary_cos, inputs.rotary_sin, inputs.q
    if cos is None and sin is None:
        return
    tables = ("rotary_cos", cos), ("rotary_sin", sin)
    for name, t in sorted(tables, key=is_missing):
        t = check_tensor(name, t, "a torch.Tensor where the other of rotary_cos and rotary_sin is given")
        if t.device != q.device:
            raise ValueError(f"{name}: expected device {q.device} like q, got {t.device}")
        if t.dtype not in (q.dtype, torch.float32):
            raise TypeError(f"{name}: expected dtype {q.dtype} like q, or torch.float32, got {t.dtype}")
        if t.dim() != 2 or not 1 <= t.shape[1] <= q.shape[-1] // 2 or t.shape[0] < 1:
            raise ValueError(
                f"{name}: expected shape (positions, rotary_dim / 2) with rotary_dim up to {q.shape[-1]}, "
                f"got {tuple(t.shape)}"
            )
    assert cos is not None
    assert sin is not None
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(
            f"rotary_sin: expected {cos.dtype} of shape {tuple(cos.shape)} like rotary_cos, "
            f"got {sin.dtype} of {tuple(sin.shape)}"
        )


def check_rotary_positions(inputs: DecodeInputs) -> None:
    """Check rotary_positions_q and rotary_positions_k against what they rotate."""
    if inputs.rotary_positions is None:
        return
    for name, positions, rows, needed in (
        ("rotary_positions_q", inputs.rotary_positions.q, inputs.q.shape[1], "rotary_cos"),
        ("rotary_positions_k", inputs.rotary_positions.k, inputs.seqlen_new, "k_new"),
    ):
        if positions is None:
            continue
        if inputs.rotary_cos is None or getattr(inputs, needed) is None:
            raise ValueError(f"{name}: expected None without {needed}, got {type(positions).__name__}")
        check_sizes(name, positions, ((1, inputs.batch), (rows,)), inputs.q.device, (torch.int32,))


def _check_splits(num_splits: Any, split_size: Any, capacity: int) -> tuple[int | None, int | None]:
    num_splits, split_size = (
        None if value is None else check_int(name, value, "an int or None")
        for name, value in (("num_splits", num_splits), ("split_size", split_size))
    )
    if num_splits is not None and split_size is not None:
        raise ValueError(f"split_size: expected None with num_splits, got {split_size}")
    if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits: expected 1 to {MAX_SPLITS} (None = chosen), got {num_splits}")
    if split_size is not None and (split_size < 1 or split_size % SPLIT_UNIT):
        raise ValueError(f"split_size: expected a multiple of {SPLIT_UNIT} keys, got {split_size}")
    if split_size is not None and capacity > split_size * MAX_SPLITS_BY_SIZE:
        raise ValueError(
            f"split_size: expected at most {MAX_SPLITS_BY_SIZE} splits of the cache's {capacity} keys, got {split_size}"
        )
    if split_size is not None and split_size > LARGEST_BLOCK:
        raise ValueError(f"split_size: expected at most {LARGEST_BLOCK} keys, got {split_size}")
    return num_splits, split_size

"""Attention over a key/value cache with the options of flash-attn's functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api.decode import attention_decode
from ..errors import BeyondPagesError
from ..geometry.splits import MAX_SPLITS
from ..ops.without_backward import in_graph_of
from ..problem import Mask
from ..problem.decode import DecodeInputs, refuse_lengths
from ..problem.lengths import read_cache_lengths, refuse_shared_pages
from ..quantization.codec import E4M3
from ..validation import tensors
from ..validation.decode import check_decode
from ..validation.overlap import refuse_overlaps
from ..validation.scalars import check_int, is_integer
from .cache_update import Rotary, append, is_on_host, rotated
from .sequences import Packed, as_packed, flattened, row_ranges, without_unused_queries


class Cache(NamedTuple):
    """Keys and values of a batch, with room for more.

    Attributes:
        k, v: (batch, capacity, num_heads_kv, head_dim), or (num_pages, page_size, ..) with a page_table.
        page_table: (batch, max_pages) int32, or None.
        k_descale, v_descale: (batch, num_heads_kv) float32 of e4m3 caches, both or neither.
    """

    k: Tensor
    v: Tensor
    page_table: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None

    @property
    def capacity(self) -> int:
        """The number of keys that a batch entry has room for."""
        return self.k.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])


class Extras(NamedTuple):
    """Options besides a mask that few calls have.

    Attributes:
        starts: (batch,) int32: the keys before it do not exist. Queries that stand before it still see the keys that
            the mask leaves them.
        chunk: the number of keys in a chunk, counted from the first key that exists. A query sees its own chunk.
        alibi_slopes: as for `onepass.attention`.
    """

    starts: Tensor | None = None
    chunk: int | None = None
    alibi_slopes: Tensor | None = None

    def modifiers(self, rows: int, cu_seqlens_q: Tensor | None, filled: Tensor, right: int | None) -> dict[str, Any]:
        """The options as arguments of `onepass.attention_decode`.

        Args:
            rows: seqlen_q, or the number of packed queries. filled: (batch,) int32, the keys of each entry.
            right: the right side of the call's mask.
        """
        given: dict[str, Any] = {} if self.alibi_slopes is None else {"alibi_slopes": self.alibi_slopes}
        if self.chunk is None and self.starts is not None and (rows == 1 or (right is not None and right <= 0)):
            given["seqstart_k"] = self.starts  # a query before the first key sees nothing in any case
        elif self.chunk is not None or self.starts is not None:
            given["key_ranges"] = row_ranges(rows, cu_seqlens_q, filled, starts=self.starts, chunk=self.chunk)
        return given


NO_EXTRAS = Extras()


def attend(
    q: Tensor,
    cache: Cache,
    lengths: Tensor,
    *,
    new: tuple[Tensor, Tensor] | None = None,
    rotary: Rotary | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: Any = None,
    seqused_q: Tensor | None = None,
    sinks: Tensor | None = None,
    num_splits: int | None = None,
    extras: Extras = NO_EXTRAS,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """out and lse of queries at the end of the keys of each batch entry, by `onepass.attention_decode`.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), or packed (total_q, ..) with cu_seqlens_q.
        lengths: (batch,) int32: the keys in the cache. new: dense keys and values that are written behind them.
        rotary: rotates new keys and queries by their key positions.
        seqused_q: (batch,) int32: only the first queries of each entry exist, without new keys.
        options: causal, window, softcap and softmax_scale of `onepass.attention`.
    """
    if seqused_q is not None:
        assert new is rotary is None
        options |= {"max_seqlen_q": max_seqlen_q, "sinks": sinks, "num_splits": num_splits}
        return _attend_used(q, cache, lengths, seqused_q, cu_seqlens_q=cu_seqlens_q, extras=extras, **options)
    modifiers = {}
    if extras is not NO_EXTRAS:
        right = Mask.from_options(options["causal"], options["window"]).window_right
        filled = lengths if new is None else lengths + new[0].shape[1]
        modifiers = extras.modifiers(q.shape[-3], cu_seqlens_q, filled, right)
    result: Any = attention_decode(
        q,
        cache.k,
        cache.v,
        cache_seqlens=lengths,
        page_table=cache.page_table,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q if cu_seqlens_q is not None else None,
        k_new=None if new is None else new[0],
        v_new=None if new is None else new[1],
        rotary_cos=None if rotary is None else rotary.cos,
        rotary_sin=None if rotary is None else rotary.sin,
        rotary_interleaved=rotary is not None and rotary.interleaved,
        k_descale=cache.k_descale,
        v_descale=cache.v_descale,
        sinks=sinks,
        num_splits=None if not num_splits or num_splits < 0 else min(num_splits, MAX_SPLITS),
        return_lse=True,
        **modifiers,
        **options,
    )
    return result.out, result.lse


def _attend_used(
    q: Tensor,
    cache: Cache,
    lengths: Tensor,
    seqused_q: Tensor,
    *,
    cu_seqlens_q: Tensor | None,
    extras: Extras,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`attend` of the first seqused_q queries of each batch entry, (batch,) int32; out of all others is 0."""
    batch = len(lengths)
    queries = as_packed(("cu_seqlens_q", "seqused_q"), q, cu_seqlens_q, seqused_q)
    # queries that do not exist become sequences of their own, without a key
    keys = Packed(torch.zeros_like(queries.cu_seqlens), lengths)
    queries, keys = without_unused_queries(queries, keys)
    table = cache.page_table
    if table is None:  # each entry of the cache is a page as long as the entry
        table = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]

    def twice(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.repeat_interleave(2, 0)

    if extras.starts is not None:
        extras = extras._replace(starts=torch.stack((extras.starts, torch.zeros_like(extras.starts)), 1).flatten())
    doubled = Cache(cache.k, cache.v, twice(table), twice(cache.k_descale), twice(cache.v_descale))
    rows = flattened("q", q, cu_seqlens_q)
    assert keys.seqused is not None
    out, lse = attend(rows, doubled, keys.seqused, cu_seqlens_q=queries.cu_seqlens, extras=extras, **options)
    if cu_seqlens_q is not None:
        return out, lse
    return out.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1)


def append_and_attend(
    q: Tensor,
    cache: Cache,
    lengths: Tensor,
    new: tuple[Tensor, Tensor] | None,
    *,
    rotary: Rotary | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_new: Tensor | None = None,
    extras: Extras = NO_EXTRAS,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`attend` after writing new keys and values behind the first `lengths` keys, in place.

    Args:
        new: keys and values in q's dtype, (batch, seqlen_new, ..), or packed (total_new, ..) with cu_seqlens_new.
        rotary: rotates new keys and queries; queries all stand at the first new position if no mask tells them apart.
        options: as for `attend`, with seqused_q.

    The caches are unchanged if it raises. If an input requires a gradient, a backward through the results raises.
    """
    if new is None:
        return attend(q, cache, lengths, cu_seqlens_q=cu_seqlens_q, extras=extras, **options)
    sources = [t for t in (cache.k, cache.v) if t.requires_grad] if torch.is_grad_enabled() else []
    if sources:  # new keys are written to the caches without their history
        result = append_and_attend(
            q,
            cache._replace(k=cache.k.detach(), v=cache.v.detach()),
            lengths,
            new,
            rotary=rotary,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_new=cu_seqlens_new,
            extras=extras,
            **options,
        )
        return in_graph_of(sources, *result)
    k, v = new
    if rotary is not None and not _rotates_as_decode(q, k, lengths, rotary, extras, options, cache.capacity):
        is_masked = options["causal"] or extras.chunk is not None or _hides_keys(options["window"], cache.capacity)
        q = rotated(q, cu_seqlens_q, rotary, not is_masked, options.get("seqused_q"))
        k = rotated(k, cu_seqlens_new, rotary)
        rotary = None
    is_dense = cu_seqlens_q is cu_seqlens_new is options.get("seqused_q") is None
    if is_dense and v.dtype != E4M3:
        return attend(q, cache, lengths, new=(k, v), rotary=rotary, extras=extras, **options)
    filled = lengths + (k.shape[1] if cu_seqlens_new is None else cu_seqlens_new.diff())
    _check_before_writing(q, cache, lengths, filled, cu_seqlens_q, extras, options, new)
    append((cache.k, cache.v), cache.page_table, (k, v), lengths, cu_seqlens_new)
    return attend(q, cache, filled, cu_seqlens_q=cu_seqlens_q, extras=extras, **options)


def _hides_keys(window: Any, capacity: int) -> bool:
    """Whether a window hides a key of a cache from a query that stands among its keys."""
    return any(side is not None and side < capacity for side in window)


def _rotates_as_decode(
    q: Tensor, k: Tensor, lengths: Tensor, rotary: Rotary, extras: Extras, options: dict[str, Any], capacity: int
) -> bool:
    """Whether new keys and queries stand where `onepass.attention_decode` rotates them: at the last keys."""
    if options.get("seqused_q") is not None:
        return False
    if rotary.starts is not lengths or q.dim() != 4 or k.dim() != 4 or q.shape[1] != k.shape[1]:
        return False
    is_masked = options["causal"] or extras.chunk is not None or _hides_keys(options["window"], capacity)
    has_its_dtypes = all(table.dtype in (q.dtype, torch.float32) for table in (rotary.cos, rotary.sin))
    return (is_masked or q.shape[1] == 1) and has_its_dtypes and k.dtype != E4M3


def _check_before_writing(
    q: Tensor,
    cache: Cache,
    lengths: Tensor,
    filled: Tensor,
    cu_seqlens_q: Tensor | None,
    extras: Extras,
    options: dict[str, Any],
    new: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Raise what the call would raise, before the caches are changed. Args: new: what is written to the caches."""
    inputs = DecodeInputs(
        q,
        cache.k,
        cache.v,
        filled,
        cache.page_table,
        k_descale=cache.k_descale,
        v_descale=cache.v_descale,
        cu_seqlens_q=cu_seqlens_q,
    ).with_modifiers((extras.starts, None, None, extras.alibi_slopes, *(None,) * 4))
    score_options = {name: options[name] for name in ("causal", "window", "softcap", "softmax_scale")}
    splits = {"num_splits": None, "split_size": None, "check_values": False, "return_lse": True}
    most_queries = options.get("max_seqlen_q") if cu_seqlens_q is not None else None
    problem = check_decode(inputs, rotary_interleaved=False, max_seqlen_q=most_queries, **splits, **score_options)
    if new is not None:
        refuse_overlaps(inputs._replace(k_new=new[0], v_new=new[1]))
    if is_on_host(lengths):
        for length, end in zip(lengths.tolist(), filled.tolist(), strict=True):
            refuse_lengths(length, length, cache.capacity, end - length)
        read_cache_lengths(inputs, problem)
        if cache.page_table is not None:
            starts = [0] * len(lengths) if extras.starts is None else extras.starts.tolist()
            table, page_size = cache.page_table.tolist(), cache.k.shape[1]
            hides_keys = extras.chunk is not None or problem.attention.mask.window_left is not None
            refuse_shared_pages(table, page_size, starts, lengths.tolist(), filled.tolist(), hides_keys)


def check_over_pages(
    q: Tensor, cache: Cache, lengths: Tensor, cu_seqlens_q: Tensor, extras: Extras, options: dict[str, Any]
) -> None:
    """Raise what `attend` of packed queries over pages would raise, for calls that are computed in another way."""
    _check_before_writing(q, cache, lengths, lengths, cu_seqlens_q, extras, options)


def table_of_entries(
    batch: int, device: torch.device, k_cache: Tensor, page_table: Tensor | None, cache_batch_idx: Any, k: Any
) -> Tensor | None:
    """The page table of a batch whose entries pick entries of a cache, or rows of a page table.

    Without a page table each picked entry is a page as long as the cache, so nothing is copied.

    Args: k: the new keys, which are written to the picked entries, or None.
    """
    if cache_batch_idx is None:
        return page_table
    tensors.check_tensor("cache_batch_idx", cache_batch_idx, "an int32 or int64 torch.Tensor")
    if cache_batch_idx.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cache_batch_idx: expected an int32 or int64 torch.Tensor, got {cache_batch_idx.dtype}")
    if tuple(cache_batch_idx.shape) != (batch,) or cache_batch_idx.device != device:
        raise ValueError(
            f"cache_batch_idx: expected shape ({batch},) on {device}, one per entry of q, "
            f"got {tuple(cache_batch_idx.shape)} on {cache_batch_idx.device}"
        )
    owner, entries = ("k_cache", k_cache) if page_table is None else ("the page table", page_table)
    if is_on_host(cache_batch_idx):
        lowest, highest = int(cache_batch_idx.min()), int(cache_batch_idx.max())
        if not 0 <= lowest <= highest < entries.shape[0]:
            raise ValueError(
                f"cache_batch_idx: expected entries 0 to {entries.shape[0] - 1} of {owner}, "
                f"got {cache_batch_idx.tolist()}"
            )
        is_written = isinstance(k, Tensor) and k.numel() > 0
        if is_written and len(set(cache_batch_idx.tolist())) < batch:
            raise ValueError(
                f"cache_batch_idx: expected distinct entries where k and v are given, got {cache_batch_idx.tolist()}"
            )
    return cache_batch_idx.to(torch.int32)[:, None] if page_table is None else page_table[cache_batch_idx.long()]


def lengths_of(
    cache_seqlens: Any,
    batch: int,
    device: torch.device,
    capacity: int,
    seqlen_new: int,
    table: str | None = None,
) -> Tensor:
    """The filled lengths as a (batch,) tensor. The host checks an int, but not the values of a tensor on a device.

    Args: table: the name of the page table of the call, if it has one, for messages.
    """
    if cache_seqlens is None:
        cache_seqlens = capacity
    if is_integer(cache_seqlens) and not isinstance(cache_seqlens, bool):
        cache_seqlens = check_int("cache_seqlens", cache_seqlens)
        if table is not None and cache_seqlens + seqlen_new > capacity:
            raise beyond_pages("cache_seqlens", table, cache_seqlens, capacity, seqlen_new)
        refuse_lengths(cache_seqlens, cache_seqlens, capacity, seqlen_new)
        return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)
    tensors.check_tensor("cache_seqlens", cache_seqlens, "an int, an int32 torch.Tensor or None")
    tensors.check_int32("cache_seqlens", cache_seqlens, (batch,), "one per batch entry", device)
    if table is not None:
        refuse_beyond_pages("cache_seqlens", table, cache_seqlens, capacity, seqlen_new)
    return cache_seqlens


def beyond_pages(name: str, table: str, length: int, capacity: int, seqlen_new: int) -> BeyondPagesError:
    less = f" less {seqlen_new} new keys" if seqlen_new else ""
    return BeyondPagesError(
        f"{name}: expected at most {capacity - seqlen_new}, the {capacity} rows that {table} addresses{less}, "
        f"got {length}"
    )


def refuse_beyond_pages(
    name: str, table: str, lengths: Tensor, capacity: int, new: int | Tensor = 0, waits: bool = False
) -> None:
    """Raise `BeyondPagesError` if a length, read from the host's memory, is beyond the rows that a table addresses.

    Args:
        name, table: the names of the arguments, for messages.
        new: the number of new keys of every entry, or (batch,), the numbers of each entry.
        waits: whether lengths are read from a GPU, too, except while a CUDA graph is captured.
    """
    is_ordinary = type(lengths) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
    if not is_ordinary or lengths.is_meta or not lengths.numel():
        return
    if lengths.device.type != "cpu" and not waits:
        return
    if lengths.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    filled = lengths + new
    longest = int(filled.argmax())
    if int(filled[longest]) > capacity:
        length = int(lengths[longest])
        raise beyond_pages(name, table, length, capacity, int(filled[longest]) - length)

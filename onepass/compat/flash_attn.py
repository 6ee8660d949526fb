"""The functions of flash-attn 2.8, computed by onepass, with their names, arguments, order and defaults.

    from onepass.compat.flash_attn import flash_attn_func

Conventions of that library which differ from onepass and are translated here:

- in `window_size`, -1 (or any negative number) means unbounded;
- `softcap=0.0` means no cap;
- `deterministic=False` permits a backward pass that is not reproducible, so `torch.use_deterministic_algorithms`
  decides.

Two results differ. With `return_attn_probs=True` the third item, S_dmask, is None, because the probabilities never
exist in memory. The log-sum-exp of a row that sees no key is -inf, where flash-attn returns +inf.

A call that onepass does not compute raises NotImplementedError, which names the argument, before any work is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..api import attention as api
from ..api.decode import attention_decode
from ..errors import REFUSALS, UnsupportedError, renamed
from ..problem.decode import refuse_lengths
from ..validation import tensors
from ..validation.lost_gradients import refuse_backward
from ..validation.scalars import check_flag, check_int, is_integer, is_real

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

# argument -> (the only value it may have, what any other value would ask for)
_UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "dropout_p": (0.0, "dropout"),
    "alibi_slopes": (None, "ALiBi biases"),
    "cache_leftpad": (None, "left-padded caches"),
}

# name of an argument in messages of onepass -> its name in flash-attn
_NAMES = {"window": "window_size"}
_NAMES_IN_BLOCKS = _NAMES | {
    "k_cache": "k",
    "v_cache": "v",
    "cache_seqlens": "cu_seqlens_k",
    "page_table": "block_table",
}
_MAX_SEQLENS = dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "max_seqlen")
_NAMES_IN_CACHE = _NAMES | {"page_table": "block_table", "k_new": "k", "v_new": "v"}


def _refuse_unsupported(**arguments: Any) -> None:
    """Raise NotImplementedError for the first argument that asks for something onepass does not compute."""
    for name, value in arguments.items():
        neutral, feature = _UNSUPPORTED[name]
        is_neutral = value is neutral or (neutral is not None and is_real(value) and value == neutral)
        if not is_neutral:
            given = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise UnsupportedError(f"{name}: expected {neutral}, got {given}: onepass has no {feature}")


def _mask_options(softmax_scale: Any, causal: Any, window_size: Any, softcap: Any) -> dict[str, Any]:
    """The scale and the mask as arguments of `onepass.attention`."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size: expected a pair (left, right) of int, got {window_size!r}")
    # `onepass.attention` takes a negative side as a bound, so negative integers of every type are replaced here
    left, right = (None if is_integer(side) and side < 0 else side for side in window_size)
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": (left, right),
        "softcap": None if is_real(softcap) and softcap == 0 else softcap,
    }


def _unpack(name: str, packed: Any, count: int, rank: int) -> tuple[Tensor, ...]:
    """Views of the tensors stacked in the third dimension from the end, (..., count, num_heads, head_dim)."""
    tensors.check_tensor(name, packed)
    if packed.dim() != rank or packed.shape[-3] != count:
        leading = "(batch, seqlen" if rank == 5 else "(total_tokens"
        raise ValueError(f"{name}: expected shape {leading}, {count}, num_heads, head_dim), got {tuple(packed.shape)}")
    return packed.unbind(-3)


def _call(
    function: Callable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    deterministic: bool,
    return_attn_probs: bool,
    **lengths: Any,
) -> Any:
    """Run `onepass.attention` or `onepass.attention_varlen` and shape the result as flash-attn does."""
    options = _mask_options(softmax_scale, causal, window_size, softcap)
    options["deterministic"] = check_flag("deterministic", deterministic, allow_none=True) or None
    return_lse = check_flag("return_attn_probs", return_attn_probs, allow_none=True)
    try:
        result = function(q, k, v, **options, **lengths, return_lse=return_lse)
    except REFUSALS as error:
        raise renamed(error, _NAMES) from None
    return (result.out, result.lse, None) if return_lse else result


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
        softmax_scale: None = head_dim ** -0.5.
        causal, window_size: aligned at the bottom right; window_size is (left, right), inclusive, -1 = unbounded.
        softcap: 0.0 = no cap.
        deterministic: ask for bitwise reproducible gradients.
        return_attn_probs: return (out, softmax_lse, None) in place of out.
        dropout_p, alibi_slopes: must be 0.0 and None.

    Returns: out (batch, seqlen_q, num_heads_q, head_dim_v); softmax_lse (batch, num_heads_q, seqlen_q) float32.
    Raises: NotImplementedError naming an argument that is not supported, and what `onepass.attention` raises.
    """
    _refuse_unsupported(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    return _call(
        api.attention,
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with k and v in one tensor, kv: (batch, seqlen_k, 2, num_heads_kv, head_dim)."""
    _refuse_unsupported(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    k, v = _unpack("kv", kv, 2, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with all three in one tensor, qkv: (batch, seqlen, 3, num_heads, head_dim)."""
    _refuse_unsupported(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    q, k, v = _unpack("qkv", qkv, 3, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


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
        max_seqlen_q, max_seqlen_k: hints; an int, a tensor or None.
        block_table: (batch, max_blocks) int32: the keys of each sequence are rows of these blocks. Calls with a
            block_table have no backward.
        All others: as for `flash_attn_func`; masks are aligned to each sequence's own lengths.

    Returns: out (total_q, num_heads_q, head_dim_v); softmax_lse (num_heads_q, total_q) float32.
    Raises: NotImplementedError naming an argument that is not supported or, with a block_table, an input that requires
    a gradient; what `onepass.attention_varlen` raises, or with a block_table `onepass.attention_decode`.
    """
    _refuse_unsupported(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    if block_table is not None:
        tensors.check_tensor("block_table", block_table, "an int32 torch.Tensor")
        _refuse_backward("flash_attn_varlen_func with a block_table", q=q, k=k, v=v)
        check_flag("deterministic", deterministic, allow_none=True)
        tensors.check_max_seqlens(max_seqlen_q, max_seqlen_k)
        options = _mask_options(softmax_scale, causal, window_size, softcap)
        return_lse = check_flag("return_attn_probs", return_attn_probs, allow_none=True)
        try:
            result = attention_decode(
                q,
                k,
                v,
                cache_seqlens=_differences(cu_seqlens_k),
                page_table=block_table,
                cu_seqlens_q=cu_seqlens_q,
                max_seqlen_q=max_seqlen_q,
                **options,
                return_lse=return_lse,
            )
        except REFUSALS as error:
            raise renamed(error, _NAMES_IN_BLOCKS) from None
        return (*result, None) if isinstance(result, api.AttentionOutput) else result
    return _call(
        api.attention_varlen,
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
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
) -> Any:
    """`flash_attn_varlen_func` with k and v in one tensor, kv: (total_k, 2, num_heads_kv, head_dim)."""
    _refuse_unsupported(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    k, v = _unpack("kv", kv, 2, 4)
    options = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, *options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with all three in one tensor, qkv: (total_tokens, 3, num_heads, head_dim)."""
    _refuse_unsupported(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    q, k, v = _unpack("qkv", qkv, 3, 4)
    options = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    try:
        return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, *options)
    except REFUSALS as error:
        raise renamed(error, dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens") | _MAX_SEQLENS) from None


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Any:
    """Attention over a key/value cache, after writing k and v into it if they are given. It has no backward.

    Batch entry b first stores k[b] and v[b] in the cache at positions cache_seqlens[b], cache_seqlens[b] + 1, ...,
    in place, then q[b] attends to the first cache_seqlens[b] + seqlen_new positions. Masks are aligned at the bottom
    right of that length. Positions of the cache beyond it are never read.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim).
        k_cache, v_cache: (batch_cache, seqlen_cache, num_heads_kv, head_dim); batch_cache = batch unless
            cache_batch_idx is given. With a block_table (num_blocks, page_block_size, num_heads_kv, head_dim).
        k, v: (batch, seqlen_new, num_heads_kv, head_dim), both or neither, in q's dtype.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2): k and q are rotated by the rows from cache_seqlens[b] on.
            They need a k with as many rows as q, and with more than one row also causal or a window.
        cache_seqlens: the filled length of the cache: an int, (batch,) int32, or None = all of it.
        cache_batch_idx: (batch,) int32 or int64, the cache entry of each batch entry; distinct if k is given. It
            excludes a block_table.
        block_table: (batch, max_blocks) int32, any page_block_size.
        softmax_scale, causal, window_size, softcap: as for `flash_attn_func`.
        rotary_interleaved: rotated pairs are columns (0, 1), (2, 3), ..; else the two halves of the rotated columns.
        num_splits: number of splits of the keys, which a GPU computes side by side; 0 = chosen.
        return_softmax_lse: return (out, softmax_lse).
        k_descale, v_descale: (batch, num_heads_kv) float32, with float8_e4m3fn caches only, as in flash-attn 3 (where q
            is e4m3, too; here it is not). The shapes of `onepass.attention_decode` without kv_block are accepted, too.
        cache_leftpad, alibi_slopes: must be None.

    Returns: out (batch, seqlen_q, num_heads_q, head_dim_v); softmax_lse (batch, num_heads_q, seqlen_q) float32.
    Raises: NotImplementedError naming an argument that is not supported, or an input that requires a gradient;
    TypeError or ValueError for bad shapes, dtypes or lengths. The caches are unchanged whenever it raises. The host
    does not read lengths and tables from a GPU, so their values are not checked there.
    """
    _refuse_unsupported(cache_leftpad=cache_leftpad, alibi_slopes=alibi_slopes)
    options = _mask_options(softmax_scale, causal, window_size, softcap)
    return_lse = check_flag("return_softmax_lse", return_softmax_lse, allow_none=True)
    num_splits = 0 if num_splits is None else check_int("num_splits", num_splits, least=0)
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        tensors.check_tensor(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions, got {tensor.dim()} in shape {tuple(tensor.shape)}")
    page_table = block_table
    if block_table is not None and tensors.check_tensor("block_table", block_table).dim() != 2:
        raise ValueError(f"block_table: expected shape (batch, max_blocks), got {tuple(block_table.shape)}")
    if cache_batch_idx is not None:
        if block_table is not None:
            raise UnsupportedError("cache_batch_idx: expected None beside a block_table, which says the same, got both")
        page_table = _entries_as_pages(q, k_cache, v_cache, cache_batch_idx)
    _check_new(q, k_cache, v_cache, k, v, cache_seqlens)
    for name, table in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if table is not None:
            _check_rotary(name, table, q, k, options)
    _refuse_backward(
        "flash_attn_with_kvcache",
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        k=k,
        v=v,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    seqlen_cache = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    lengths = _lengths(cache_seqlens, q, seqlen_cache, 0 if k is None else k.shape[1])
    try:
        result = attention_decode(
            q,
            k_cache,
            v_cache,
            cache_seqlens=lengths,
            page_table=page_table,
            k_new=k,
            v_new=v,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved,
            k_descale=k_descale,
            v_descale=v_descale,
            **options,
            num_splits=num_splits or None,
            return_lse=return_lse,
        )
    except REFUSALS as error:
        raise renamed(error, _NAMES_IN_CACHE) from None
    return tuple(result) if return_lse else result


def _entries_as_pages(q: Tensor, k_cache: Any, v_cache: Any, cache_batch_idx: Any) -> Tensor:
    """The page table of picked cache entries: each entry is a page as long as the cache, so nothing is copied."""
    tensors.check_tensor("cache_batch_idx", cache_batch_idx, "an int32 or int64 torch.Tensor")
    if cache_batch_idx.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cache_batch_idx: expected an int32 or int64 torch.Tensor, got {cache_batch_idx.dtype}")
    if cache_batch_idx.shape != q.shape[:1] or cache_batch_idx.device != q.device:
        raise ValueError(
            f"cache_batch_idx: expected shape ({q.shape[0]},) on {q.device}, one per entry of q, "
            f"got {tuple(cache_batch_idx.shape)} on {cache_batch_idx.device}"
        )
    num_entries = k_cache.shape[0]
    if cache_batch_idx.device.type == "cpu" and cache_batch_idx.numel():
        lowest, highest = int(cache_batch_idx.min()), int(cache_batch_idx.max())
        if not 0 <= lowest <= highest < num_entries:
            raise ValueError(
                f"cache_batch_idx: expected entries 0 to {num_entries - 1} of k_cache, got {cache_batch_idx.tolist()}"
            )
    return cache_batch_idx.to(torch.int32)[:, None]


def _check_new(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any, v: Any, cache_seqlens: Any) -> None:
    """Check k and v: both or neither, and rows that fit the caches."""
    if k is None and v is None:
        return
    if cache_seqlens is None:
        raise ValueError("cache_seqlens: expected an int or a (batch,) int32 tensor where k and v are given, got None")
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        new = tensors.check_tensor(name, new, "a torch.Tensor where the other of k and v is given")
        if new.dtype != q.dtype or new.device != q.device:
            raise TypeError(f"{name}: expected {q.dtype} on {q.device} like q, got {new.dtype} on {new.device}")
        expected = (q.shape[0], k.shape[1] if k.dim() == 4 else "seqlen_new", *cache.shape[2:])
        if tuple(new.shape) != expected:
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(new.shape)}")


def _differences(cu_seqlens_k: Any) -> Tensor:
    """The lengths of sequences from their offsets, computed on the device of the offsets."""
    tensors.check_tensor("cu_seqlens_k", cu_seqlens_k, "an int32 torch.Tensor")
    if cu_seqlens_k.dtype != torch.int32 or cu_seqlens_k.dim() != 1:
        given = f"{cu_seqlens_k.dtype} of shape {tuple(cu_seqlens_k.shape)}"
        raise TypeError(f"cu_seqlens_k: expected an int32 torch.Tensor of shape (batch + 1,), got {given}")
    return cu_seqlens_k.diff()


def _refuse_backward(function: str, **arguments: Any) -> None:
    """Refuse tensors that require a gradient; other checks refuse arguments that are no tensors."""
    refuse_backward(function, {name: t for name, t in arguments.items() if isinstance(t, Tensor)})


def _check_rotary(name: str, table: Any, q: Tensor, k: Tensor | None, options: dict[str, Any]) -> None:
    """Refuse rotations that would differ: flash-attn counts positions from cache_seqlens, onepass from the last key."""
    tensors.check_tensor(name, table)
    if k is None:
        raise ValueError(f"{name}: expected None where k and v are not given, got a tensor")
    if q.shape[1] != k.shape[1]:
        raise UnsupportedError(
            f"{name}: expected as many queries as new keys, got {q.shape[1]} and {k.shape[1]}: rotate before the call"
        )
    if q.shape[1] > 1 and not options["causal"] and options["window"] == (None, None):
        raise UnsupportedError(
            f"{name}: expected causal or a window with {q.shape[1]} queries, because flash-attn "
            "rotates all of them alike without one: rotate before the call"
        )


def _lengths(cache_seqlens: Any, q: Tensor, seqlen_cache: int, seqlen_new: int) -> Tensor:
    """The filled lengths as a (batch,) tensor. The host checks an int, but not the values of a tensor."""
    if cache_seqlens is None:
        cache_seqlens = seqlen_cache
    if is_integer(cache_seqlens) and not isinstance(cache_seqlens, bool):
        cache_seqlens = check_int("cache_seqlens", cache_seqlens)
        refuse_lengths(cache_seqlens, cache_seqlens, seqlen_cache, seqlen_new)
        return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    return tensors.check_tensor("cache_seqlens", cache_seqlens, "an int, an int32 torch.Tensor or None")

"""`decode` over a cache whose keys are spread over ranks: each attends to its own, one exchange merges the results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import decode_calls
from ..api.attention import AttentionOutput
from ..api.partials import merge_partials
from ..dispatch import decode as dispatch
from ..ops.autocast import without_autocast
from ..problem import Mask
from ..validation.attention import checked_mask
from ..validation.modifiers import NAMES, check_modifiers
from ..validation.tensors import check_int32
from .agreement import signature
from .checks import check_device
from .exchange import gather
from .packed import to_device
from .plan import ContextPlan


class LocalKeys(NamedTuple):
    """Where this rank's tokens stand.

    Attributes:
        starts, sizes: (runs,) int32. tokens: (num_local_tokens,) int32.
    """

    starts: Tensor
    sizes: Tensor
    tokens: Tensor

    def before(self, position: Tensor) -> Tensor:
        """How many of this rank's tokens stand before each position, int32."""
        in_runs = (position.unsqueeze(-1) - self.starts).clamp(min=0)
        return in_runs.minimum(self.sizes).sum(-1, dtype=torch.int32)


@torch.compiler.disable
@torch.no_grad()
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: ContextPlan,
    *,
    cache_seqlens: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    page_table: Tensor | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    seqstart_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | AttentionOutput:
    """Exact attention of a few new queries over a cache that is spread over ranks. Every rank of the group calls it.

    Each rank appends the new keys that it owns, attends to its keys, and sends its out, in float32, and lse to the
    others in one exchange. No value is read on the host, so that a CUDA graph can capture a step after ordinary ones
    of the same shapes, which ranks compare. There is no backward. Of `attention_decode` it lacks rotary embeddings,
    packed queries, key_ranges and q_positions.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), the same on all ranks, already rotated.
        k_cache, v_cache: (batch, rows, num_heads_kv, head_dim or head_dim_v): row i holds token plan.tokens()[i] of the
            sequence; or pages, as of `onepass.attention_decode`.
        plan: of the longest sequence that the cache is to hold; layout="cyclic" grows evenly. It must not be packed.
        cache_seqlens: (batch,) int32: tokens of each sequence on all ranks, before the call. It is not changed.
        k_new, v_new: (batch, seqlen_new, num_heads_kv, head_dim or head_dim_v), the same on all ranks, already
            rotated: tokens cache_seqlens[b], cache_seqlens[b] + 1, .. Not with an e4m3 cache.
        page_table: (batch, max_pages) int32: pages of this rank's rows.
        seqstart_k, alibi_slopes, bias: as of `attention_decode`, in numbers of the whole sequence.
        causal, window, softcap, sinks, softmax_scale, k_descale, v_descale, num_splits, return_lse, backend: as of
            `attention_decode`.

    Returns: out, (batch, seqlen_q, num_heads_q, head_dim_v), in q's dtype, equal on all ranks; or
    AttentionOutput(out, lse) with lse (batch, num_heads_q, seqlen_q).

    Raises: TypeError, ValueError or NotImplementedError before any work, with what was expected and given (the caches
    are as they were); RuntimeError on all ranks if ranks call with different arguments.
    """
    if not isinstance(plan, ContextPlan):
        raise TypeError(f"plan: expected a ContextPlan, as onepass.distributed.plan makes it, got {plan!r}")
    with plan.reporting("decode"):
        new = _checked(plan, q, k_cache, v_cache, page_table, cache_seqlens, k_new, v_new)
        _check_terms(plan, q, cache_seqlens, seqstart_k, alibi_slopes, bias)
        mask = checked_mask(causal, window)
        keys = plan.on_device("local keys", q.device, lambda: _local_keys(plan, q.device))
        seqlen_new = 0 if k_new is None else k_new.shape[1]
        lengths, ranges, positions = _visible(keys, mask, q.shape[1], cache_seqlens[:, None] + seqlen_new, seqstart_k)
        arguments: dict[str, Any] = {
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "cache_seqlens": lengths,
            "page_table": page_table,
            "causal": False,
            "softcap": softcap,
            "sinks": sinks,
            "softmax_scale": softmax_scale,
            "key_ranges": ranges,
            "bias": _terms(keys, positions, alibi_slopes, bias, k_cache, page_table),
            "k_descale": k_descale,
            "v_descale": v_descale,
            "num_splits": num_splits,
        }
        problem, inputs = decode_calls.problem_of("decode", arguments)
        if plan.rank != 0 and sinks is not None:  # they count once
            problem, inputs = decode_calls.problem_of("decode", arguments | {"sinks": None})
        problem = replace(problem, attention=replace(problem.attention, float32_out=True))
        backend_name = dispatch.require_decode(problem, backend, q.device)
    if plan.num_ranks > 1:
        terms = {"q": q, "k_new": k_new, "v_new": v_new, "sinks": sinks, "seqstart_k": seqstart_k}
        terms |= {"alibi_slopes": alibi_slopes, "bias": bias, "k_descale": k_descale, "v_descale": v_descale}
        compared: dict[str, Any] = {name: signature(t) for name, t in terms.items()}
        compared |= {"caches": (str(k_cache.dtype), *k_cache.shape[2:], v_cache.shape[3]), "device": q.device.type}
        compared |= {"mask": str(mask), "softcap": softcap, "softmax_scale": softmax_scale}
        plan.agree("decode", compared)
    if new is not None:
        for cache, rows in zip((k_cache, v_cache), new, strict=True):
            append(cache, rows, keys, cache_seqlens, page_table)
    with without_autocast(q.device.type):
        out, lse = dispatch.prepare_decode(backend_name, problem, q.device)(inputs)
    if plan.num_ranks > 1:
        own = torch.cat((out, lse.transpose(1, 2)[..., None]), -1)
        everyone = gather(own, plan.group, plan.num_ranks)
        partials = everyone[..., :-1].contiguous(), everyone[..., -1].transpose(2, 3).contiguous()
        out, lse = merge_partials(*partials)
    out = out.to(q.dtype)
    return AttentionOutput(out, lse) if return_lse else out


def _visible(
    keys: LocalKeys, mask: Mask, seqlen_q: int, total: Tensor, seqstart_k: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The filled rows of this rank's cache, the ranges of them that queries see, and the positions of the queries.

    Args:
        total: (batch, 1) int32: tokens of each sequence, with the new ones.

    Returns: (batch,) int32; (batch, 1, seqlen_q, 2) int32, None if the rows say all; (batch, seqlen_q) int32.
    """
    positions = total - seqlen_q + torch.arange(seqlen_q, device=total.device, dtype=torch.int32)
    low, high = torch.zeros_like(positions), total.expand_as(positions)
    if mask.window_left is not None:
        low = (positions - mask.window_left).clamp(min=0)
    if mask.window_right is not None:
        high = torch.minimum(high, positions + (mask.window_right + 1))
    if seqstart_k is not None:
        low = torch.maximum(low, seqstart_k[:, None])
        high = torch.where(positions >= seqstart_k[:, None], high, low)
    has_low = mask.window_left is not None or seqstart_k is not None
    high = keys.before(high.clamp(min=0))
    if seqlen_q == 1 and not has_low:  # what one query sees ends where its sequence does
        return high[:, 0].contiguous(), None, positions
    ranges = torch.stack((keys.before(low), high), -1)[:, None]
    return keys.before(total)[:, 0].contiguous(), ranges, positions


def _checked(
    plan: ContextPlan,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    page_table: Any,
    cache_seqlens: Any,
    k_new: Any,
    v_new: Any,
) -> tuple[Tensor, Tensor] | None:
    """The new keys and values of all ranks, whose shapes are checked with those of the caches."""
    if plan.is_packed:
        raise ValueError("plan: expected one of a number of tokens, got one of packed sequences")
    if plan.group is None and plan.num_ranks > 1:
        raise ValueError("plan: expected one that was made for a process group, got one that only describes")
    check_device(plan, q)
    for name, t, dims in (("q", q, 4), ("k_cache", k_cache, 4), ("v_cache", v_cache, 4)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")
        if t.dim() != dims:
            raise ValueError(f"{name}: expected {dims} dimensions, got shape {tuple(t.shape)}")
    batch = q.shape[0]
    check_int32("cache_seqlens", cache_seqlens, (batch,), "one per batch entry", q.device)
    if page_table is not None:
        check_int32("page_table", page_table, (batch, "max_pages"), "(batch, max_pages)", q.device)
    rows = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    if rows < plan.num_local_tokens:
        raise ValueError(
            f"k_cache: expected room for the {plan.num_local_tokens} tokens that rank {plan.rank} owns, got {rows} rows"
        )
    if k_new is None and v_new is None:
        return None
    if k_new is None or v_new is None:
        raise TypeError("k_new, v_new: expected both or neither")
    if k_cache.dtype != q.dtype:
        raise NotImplementedError(f"k_new: expected None with a cache of another dtype, got a {k_cache.dtype} cache")
    seqlen_new = k_new.shape[1] if isinstance(k_new, Tensor) and k_new.dim() == 4 else "seqlen_new"
    for name, t, cache in (("k_new", k_new, k_cache), ("v_new", v_new, v_cache)):
        expected = batch, seqlen_new, *cache.shape[2:]
        if not isinstance(t, Tensor) or tuple(t.shape) != expected:
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(getattr(t, 'shape', ())) or t!r}")
        if t.dtype != q.dtype or t.device != q.device:
            raise TypeError(f"{name}: expected {q.dtype} on {q.device}, got {t.dtype} on {t.device}")
    return k_new, v_new


def _check_terms(
    plan: ContextPlan, q: Tensor, cache_seqlens: Tensor, seqstart_k: Any, alibi_slopes: Any, bias: Any
) -> None:
    """Check what is given in numbers of the whole sequence, before this rank's part of it is taken."""
    if plan.schedule.num_heads_q != q.shape[2]:
        raise ValueError(f"q: expected the plan's {plan.schedule.num_heads_q} heads, got {q.shape[2]}")
    given = {"seqstart_k": seqstart_k, "alibi_slopes": alibi_slopes, "bias": bias}
    check_modifiers(q, plan.num_tokens, None, dict.fromkeys(NAMES) | given, 0.0)


def _local_keys(plan: ContextPlan, device: torch.device) -> LocalKeys:
    starts = torch.tensor([run.start for run in plan.local_runs], dtype=torch.int32)
    sizes = torch.tensor([run.size for run in plan.local_runs], dtype=torch.int32)
    return LocalKeys(*(to_device(t, device) for t in (starts, sizes, plan.tokens().int())))


def append(cache: Tensor, new: Tensor, keys: LocalKeys, cache_seqlens: Tensor, page_table: Tensor | None) -> None:
    """Write the new rows that this rank owns to their place in its cache.

    It looks at as many slots of a sequence as there are new rows, from the first free one on. A slot whose token is not
    new stands for the first slot whose token is, so that it writes the same value once more; if there is none, all
    write what one row has.
    """
    if not len(keys.tokens):
        return
    batch, seqlen_new = new.shape[:2]
    slots = keys.before(cache_seqlens)[:, None] + torch.arange(seqlen_new, device=new.device)
    slots = slots.clamp(max=len(keys.tokens) - 1)
    number = keys.tokens[slots] - cache_seqlens[:, None]  # among the new ones
    is_new = ((number >= 0) & (number < seqlen_new)).flatten()
    entries = torch.arange(batch, device=new.device)[:, None].expand_as(slots)
    rows = new[entries, number.clamp(0, seqlen_new - 1)].flatten(0, 1)
    places = entries, slots
    if page_table is not None:
        page_size = cache.shape[1]
        pages = page_table[entries, slots // page_size].long()
        places = pages.clamp(0, cache.shape[0] - 1), slots % page_size
    chosen = torch.where(is_new, torch.arange(len(is_new), device=new.device), is_new.int().argmax())
    place = tuple(index.flatten()[chosen] for index in places)
    cache[place] = torch.where(is_new[chosen, None, None], rows[chosen], cache[place])


def _terms(
    keys: LocalKeys,
    positions: Tensor,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    k_cache: Tensor,
    page_table: Tensor | None,
) -> Tensor | None:
    """ALiBi and bias of this rank's keys as one bias (batch or 1, heads or 1, seqlen_q or 1, rows of the cache)."""
    capacity = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    tokens = keys.tokens
    terms = None
    if bias is not None:
        terms = bias if bias.shape[-1] == 1 else bias[..., tokens.long()]
    if alibi_slopes is not None:
        distance = (positions[..., None] - tokens).abs()  # (batch, seqlen_q, tokens)
        slopes = alibi_slopes if alibi_slopes.dim() == 2 else alibi_slopes[None]
        dtype = torch.float64 if k_cache.dtype == torch.float64 else torch.float32
        alibi = -slopes[:, :, None, None].to(dtype) * distance[:, None]
        terms = alibi if terms is None else terms + alibi
    if terms is None or terms.shape[-1] in (1, capacity):
        return terms
    return torch.nn.functional.pad(terms, (0, capacity - terms.shape[-1]))

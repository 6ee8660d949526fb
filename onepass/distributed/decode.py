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
from ..problem.decode import DecodeProblem
from ..validation.attention import checked_mask
from .agreement import signature
from .exchange import gather
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
    others in one exchange. No value is read on the host, so that a CUDA graph can capture a step. There is no backward.

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

    Raises: TypeError, ValueError or NotImplementedError before any work, with what was expected and given.
    """
    keys, new = _checked(plan, q, k_cache, page_table, cache_seqlens, k_new, v_new)
    mask = checked_mask(causal, window)
    seqlen_q, seqlen_new = q.shape[1], 0 if k_new is None else k_new.shape[1]
    if new is not None:
        for cache, rows in zip((k_cache, v_cache), new, strict=True):
            append(cache, rows, keys, cache_seqlens, page_table)
    total = cache_seqlens[:, None] + seqlen_new  # (batch, 1)
    positions = total - seqlen_q + torch.arange(seqlen_q, device=q.device, dtype=torch.int32)
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
        lengths, ranges = high[:, 0].contiguous(), None
    else:
        lengths, ranges = keys.before(total)[:, 0].contiguous(), torch.stack((keys.before(low), high), -1)[:, None]
    arguments: dict[str, Any] = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "cache_seqlens": lengths,
        "page_table": page_table,
        "causal": False,
        "softcap": softcap,
        "sinks": sinks if plan.rank == 0 else None,  # they count once
        "softmax_scale": softmax_scale,
        "key_ranges": ranges,
        "bias": _terms(keys, positions, alibi_slopes, bias, k_cache, page_table),
        "k_descale": k_descale,
        "v_descale": v_descale,
        "num_splits": num_splits,
    }
    problem, inputs = decode_calls.problem_of("decode", arguments)
    if plan.control is not None:
        compared: dict[str, Any] = {
            "q": signature(q),
            "k_new": signature(k_new),
            "sinks": signature(sinks),
            "mask": str(mask),
        }
        compared |= {"softcap": softcap, "softmax_scale": softmax_scale}
        plan.agree("decode", compared)
    out, lse = _attend(replace(problem, attention=replace(problem.attention, float32_out=True)), inputs, backend)
    if plan.num_ranks > 1:
        own = torch.cat((out, lse.transpose(1, 2)[..., None]), -1)
        everyone = gather(own, plan.group, plan.num_ranks)
        partials = everyone[..., :-1].contiguous(), everyone[..., -1].transpose(2, 3).contiguous()
        out, lse = merge_partials(*partials)
    out = out.to(q.dtype)
    return AttentionOutput(out, lse) if return_lse else out


def _attend(problem: DecodeProblem, inputs: Any, backend: str | None) -> tuple[Tensor, Tensor]:
    name = dispatch.require_decode(problem, backend, inputs.q.device)
    with without_autocast(inputs.q.device.type):
        return dispatch.prepare_decode(name, problem, inputs.q.device)(inputs)


def _checked(
    plan: ContextPlan, q: Any, k_cache: Any, page_table: Any, cache_seqlens: Any, k_new: Any, v_new: Any
) -> tuple[LocalKeys, tuple[Tensor, Tensor] | None]:
    """This rank's keys, and the new ones of all ranks."""
    if not isinstance(plan, ContextPlan):
        raise TypeError(f"plan: expected a ContextPlan, as onepass.distributed.plan makes it, got {plan!r}")
    if plan.is_packed:
        raise ValueError("plan: expected one of a number of tokens, got one of packed sequences")
    if plan.group is None and plan.num_ranks > 1:
        raise ValueError("plan: expected one that was made for a process group, got one that only describes")
    for name, t, dims in (("q", q, 4), ("k_cache", k_cache, 4), ("cache_seqlens", cache_seqlens, 1)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")
        if t.dim() != dims:
            raise ValueError(f"{name}: expected {dims} dimensions, got shape {tuple(t.shape)}")
    rows = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    if rows < plan.num_local_tokens:
        raise ValueError(
            f"k_cache: expected room for the {plan.num_local_tokens} tokens that rank {plan.rank} owns, got {rows} rows"
        )
    new = None
    if k_new is not None or v_new is not None:
        if k_new is None or v_new is None:
            raise TypeError("k_new, v_new: expected both or neither")
        if k_cache.dtype != q.dtype:
            raise NotImplementedError(
                f"k_new: expected None with a cache of another dtype, got a {k_cache.dtype} cache"
            )
        for name, t in (("k_new", k_new), ("v_new", v_new)):
            if not isinstance(t, Tensor) or t.dim() != 4 or t.shape[0] != q.shape[0] or t.dtype != q.dtype:
                expected = f"(batch, seqlen_new, num_heads_kv, head_dim) of {q.dtype} with batch {q.shape[0]}"
                raise ValueError(f"{name}: expected {expected}, got {getattr(t, 'shape', t)}")
        new = k_new, v_new
    return plan.on_device("local keys", q.device, lambda: _local_keys(plan, q.device)), new


def _local_keys(plan: ContextPlan, device: torch.device) -> LocalKeys:
    starts = torch.tensor([run.start for run in plan.local_runs], dtype=torch.int32, device=device)
    sizes = torch.tensor([run.size for run in plan.local_runs], dtype=torch.int32, device=device)
    return LocalKeys(starts, sizes, plan.tokens(device).int())


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

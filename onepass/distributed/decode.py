"""`decode` over a cache that is spread over ranks: each attends to its own keys, and one exchange merges results."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..api import decode_calls
from ..api.attention import AttentionOutput
from ..api.decode import attention_decode
from ..api.partials import merge_partials
from ..dispatch import decode as dispatch
from ..geometry.rotary import rotate
from ..ops.autocast import without_autocast
from ..problem import Mask, Modifiers
from ..problem.attention import NO_MODIFIERS
from ..problem.decode import DecodeInputs, DecodeProblem, RotaryPositions
from ..problem.descales import descale_of_keys
from ..problem.lengths import read_cache_lengths, refuse_shared_pages
from ..quantization.codec import E4M3
from ..tiled.cache import to_e4m3
from ..validation import decode as checks
from ..validation.attention import checked_mask
from ..validation.decode import check_decode
from ..validation.modifiers import NAMES, check_modifiers, given_modifiers
from ..validation.overlap import refuse_overlaps
from ..validation.scalars import check_flag
from ..validation.tensors import check_int32
from .agreement import signature
from .checks import check_device
from .exchange import gather, to_device
from .plan import ContextPlan

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..api.decode import DecodeOptions


@torch.compiler.disable
@torch.no_grad()
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: ContextPlan,
    *,
    return_lse: bool = False,
    **options: Unpack[DecodeOptions],
) -> Tensor | AttentionOutput:
    """Exact attention of a few new queries over a cache that is spread over ranks. Every rank of the group calls it.

    Each rank appends the new keys that it owns, attends to its keys, and sends its out, in float32, and lse to the
    others in one exchange. No value is read on the host, so a CUDA graph can capture a step, once ranks have compared
    an ordinary step of the same shapes. There is no backward. All options of `attention_decode` are here. Lengths,
    positions, ranges and the keys of a bias count in the whole sequence; pages, blocks and splits of keys count in
    this rank's rows.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), with cu_seqlens_q (total_q, num_heads_q, head_dim), the same on all
            ranks.
        k_cache, v_cache: (batch, rows, num_heads_kv, head_dim or head_dim_v): row i holds token plan.tokens()[i] of the
            sequence; or pages, as in `onepass.attention_decode`. In q's dtype, or float8_e4m3fn.
        plan: made for the longest sequence that the cache is to hold; layout="cyclic" grows evenly. It must not be
            packed, even if queries are.
        cache_seqlens: (batch,) int32: tokens of each sequence on all ranks, before the call. It is not changed.
        page_table: (batch, max_pages) int32: pages of this rank's rows.
        cu_seqlens_q: (batch + 1,) int32: offsets of packed queries, as in `attention_decode`; not with k_new and v_new
            or rotary tables.
        max_seqlen_q: with cu_seqlens_q, an upper bound on the queries of a sequence, as in `attention_decode`.
        k_new, v_new: (batch, seqlen_new, num_heads_kv, head_dim or head_dim_v) in q's dtype, the same on all ranks:
            tokens cache_seqlens[b], cache_seqlens[b] + 1, .., each written by the rank that owns it.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), float32 or q's dtype, for the whole sequence: every rank
            rotates q and k_new by their positions in it.
        rotary_interleaved, rotary_positions_q, rotary_positions_k: as in `attention_decode`.
        seqstart_k, key_ranges, q_positions: as in `attention_decode`, in numbers of the whole sequence.
        query_ranges, alibi_slopes, bias: as in `attention_decode`; row j of query_ranges and column j of a bias belong
            to token j of the plan.num_tokens. All become one bias of this rank's rows; with alibi_slopes it has a row
            for every query of every head, and with query_ranges for every query.
        k_descale, v_descale, kv_block: as in `attention_decode`, for this rank's caches: a descale for each block of
            keys stands for kv_block rows of this rank, a descale for each page for one of its pages.
        num_splits, split_size: splits of this rank's rows. With split_size and layout="cyclic" the result of a sequence
            depends neither on the batch nor on the size of the cache, bit by bit.
        check_values: check lengths, and this rank's pages, by value; on a CPU they always are.
        causal, window, softcap, sinks, softmax_scale, return_lse, backend: as in `attention_decode`.

    Returns: out, (batch, seqlen_q, num_heads_q, head_dim_v), packed (total_q, num_heads_q, head_dim_v), in q's dtype,
    equal on all ranks; or AttentionOutput(out, lse) with lse (batch, num_heads_q, seqlen_q), packed (num_heads_q,
    total_q).

    Raises: TypeError, ValueError or NotImplementedError before any work, with what was expected and given (the caches
    are as they were); RuntimeError on all ranks if ranks call with different arguments.
    """
    if not isinstance(plan, ContextPlan):
        raise TypeError(f"plan: expected a ContextPlan, as onepass.distributed.plan makes it, got {plan!r}")
    with plan.reporting("decode"):
        given: dict[str, Any] = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "return_lse": return_lse, **options}
        backend = given.pop("backend", None)
        inputs, given = decode_calls.inputs_of("decode", given)
        q = inputs.q
        _check(plan, inputs)
        given["rotary_interleaved"] = check_flag("rotary_interleaved", given["rotary_interleaved"])
        mask = checked_mask(given["causal"], given["window"])
        tokens = plan.on_device("tokens", q.device, lambda: to_device(plan.tokens(), q.device))
        check_values = check_flag("check_values", given["check_values"])
        queries = _Queries(inputs)
        lengths, ranges = _visible(tokens, mask, queries, inputs)
        # the positions of new keys, rotation and the window are taken into account here
        local = inputs._replace(cache_seqlens=lengths, page_table=_readable_pages(inputs), modifiers=None)
        local = local._replace(k_new=None, v_new=None, rotary_cos=None, rotary_sin=None, rotary_positions=None)
        local = local.with_modifiers((None, ranges, None, None, _terms(tokens, queries, inputs), None, None))
        here = given | {"causal": False, "window": None, "rotary_interleaved": False, "check_values": False}
        problem = check_decode(local, **here)
        if plan.rank != 0 and inputs.sinks is not None:  # sinks count once
            local = local._replace(sinks=None)
            problem = check_decode(local, **here)
        if check_values or q.device.type == "cpu":
            _check_values(plan, inputs, tokens, problem, mask.window_left is not None)
        if inputs.seqlen_new:
            refuse_overlaps(inputs)
        problem = replace(problem, attention=replace(problem.attention, float32_out=True))
        backend_name = dispatch.require_decode(problem, backend, q.device)
    if plan.num_ranks > 1:
        plan.agree("decode", _compared(inputs, mask, given))
    if inputs.rotary_cos is not None and inputs.rotary_sin is not None:
        inputs, local = _rotated(inputs, local, queries, given["rotary_interleaved"])
    if inputs.seqlen_new:
        _append(inputs, tokens, given["kv_block"])
    with without_autocast(q.device.type):
        out, lse = dispatch.prepare_decode(backend_name, problem, q.device)(local)
    if plan.num_ranks > 1:
        own = torch.cat((out, lse.mT[..., None]), -1)
        everyone = gather(own, plan.group, plan.num_ranks)
        out, lse = merge_partials(everyone[..., :-1].contiguous(), everyone[..., -1].mT.contiguous())
    out = out.to(q.dtype)
    return AttentionOutput(out, lse) if return_lse else out


_SHOWN = list(inspect.signature(attention_decode).parameters.values())
_PLAN = inspect.Parameter("plan", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="ContextPlan")
decode.__signature__ = inspect.Signature([*_SHOWN[:3], _PLAN, *_SHOWN[3:]])


# ---------------------------------------------------------------- checks


def _check(plan: ContextPlan, inputs: DecodeInputs) -> None:
    """Check what is given for the whole sequence, and the shapes of this rank's caches.

    The local call, which does not see other ranks' tokens, checks all else.
    """
    q, k_cache, v_cache = inputs[:3]
    page_table, is_packed = inputs.page_table, inputs.cu_seqlens_q is not None
    if plan.is_packed:
        raise ValueError("plan: expected a plan for a number of tokens, got one for packed sequences")
    if plan.group is None and plan.num_ranks > 1:
        raise ValueError("plan: expected one that was made for a process group, got one that only describes")
    for name, t, dims in (("q", q, 3 if is_packed else 4), ("k_cache", k_cache, 4), ("v_cache", v_cache, 4)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")
        if t.dim() != dims:
            raise ValueError(f"{name}: expected {dims} dimensions, got shape {tuple(t.shape)}")
    check_device(plan, q)
    if plan.schedule.num_heads_q != q.shape[-2]:
        raise ValueError(f"q: expected the plan's {plan.schedule.num_heads_q} heads, got {q.shape[-2]}")
    if is_packed:
        checks.check_packed_queries(inputs)
    batch = inputs.batch
    check_int32("cache_seqlens", inputs.cache_seqlens, (batch,), "one per batch entry", q.device)
    if page_table is not None:
        check_int32("page_table", page_table, (batch, "max_pages"), "(batch, max_pages)", q.device)
    if inputs.capacity < plan.num_local_tokens:
        raise ValueError(
            f"k_cache: expected room for the {plan.num_local_tokens} tokens that rank {plan.rank} owns, got "
            f"{inputs.capacity} rows"
        )
    checks.check_new_keys(inputs, plan.num_tokens)
    checks.check_rotary(inputs)
    modifiers = given_modifiers((inputs.modifiers or NO_MODIFIERS)._asdict())
    check_modifiers(q, plan.num_tokens, inputs.cu_seqlens_q, modifiers)
    checks.check_rotary_positions(inputs)


def _check_values(
    plan: ContextPlan, inputs: DecodeInputs, tokens: Tensor, problem: DecodeProblem, hides_keys: bool
) -> None:
    """Check lengths in the whole sequence, and this rank's pages and descales, by value. The host waits for the device.

    Raises: ValueError, see `read_cache_lengths`.
    """
    whole = inputs.k_cache.new_empty(()).expand(inputs.batch, plan.num_tokens, 1, 1)
    read_cache_lengths(inputs._replace(k_cache=whole, page_table=None, k_descale=None, v_descale=None), problem)
    first, start = inputs.cache_seqlens, (inputs.modifiers or NO_MODIFIERS).seqstart_k
    # new keys are written even before the start of a sequence
    start = torch.zeros_like(first) if start is None else torch.minimum(start, first)
    starts, lengths, ends = (_before(tokens, t) for t in (start, first, first + inputs.seqlen_new))
    local = inputs._replace(cache_seqlens=ends, k_new=None, v_new=None, modifiers=Modifiers(starts))
    read_cache_lengths(local._replace(rotary_cos=None, rotary_sin=None), problem)
    if inputs.page_table is not None:
        rows = starts.tolist(), lengths.tolist(), ends.tolist()
        refuse_shared_pages(inputs.page_table.tolist(), inputs.k_cache.shape[1], *rows, hides_keys)


def _compared(inputs: DecodeInputs, mask: Mask, options: dict[str, Any]) -> dict[str, Any]:
    """The values of a call that ranks compare."""
    modifiers, rotary = inputs.modifiers or NO_MODIFIERS, inputs.rotary_positions or RotaryPositions()
    names = ("q", "k_new", "v_new", "sinks", "cu_seqlens_q", "rotary_cos", "rotary_sin")
    values: dict[str, Any] = {name: signature(getattr(inputs, name)) for name in names}
    values |= {name: signature(t) for name, t in zip(NAMES, modifiers[:-1], strict=True)}
    values |= {"rotary_positions_q": signature(rotary.q), "rotary_positions_k": signature(rotary.k)}
    values |= {name: options[name] for name in ("rotary_interleaved", "kv_block", "softcap", "softmax_scale")}
    for name in ("k_descale", "v_descale"):
        descale = getattr(inputs, name)
        has_blocks = options["kv_block"] is not None and descale is not None
        # ranks may have different numbers of blocks and pages
        values[name] = f"{descale.dim()} dimensions" if has_blocks else signature(descale)
    caches = str(inputs.k_cache.dtype), *inputs.k_cache.shape[2:], inputs.v_cache.shape[3]
    return values | {"caches": caches, "device": inputs.q.device.type, "mask": str(mask)}


# ---------------------------------------------------------------- positions, and this rank's part of them


def _before(tokens: Tensor, positions: Tensor) -> Tensor:
    """How many of this rank's tokens, which ascend, stand before each position, int32."""
    return torch.searchsorted(tokens, positions.long().contiguous(), out_int32=True)


class _Queries:
    """Where queries stand in their sequences.

    Attributes:
        positions: (batch or 1, seqlen_q) int64, packed (total_q,).
        ends: (batch, 1) int64, packed (total_q,): tokens of each query's sequence, with the new ones.
        entries: (total_q,) int64: the sequence of each packed query; -1 or batch for rows of none. None: not packed.
    """

    def __init__(self, inputs: DecodeInputs):
        q, cu_seqlens_q, device = inputs.q, inputs.cu_seqlens_q, inputs.q.device
        row = torch.arange(q.shape[-3], device=device)
        self.entries = None
        if cu_seqlens_q is not None:
            self.entries = torch.searchsorted(cu_seqlens_q.long(), row, right=True) - 1
        self.ends = self.each(inputs.cache_seqlens.long() + inputs.seqlen_new)
        given = (inputs.modifiers or NO_MODIFIERS).q_positions
        if given is not None:
            self.positions = given.long()
        elif cu_seqlens_q is not None:
            self.positions = self.ends - self.each(cu_seqlens_q[1:].long()) + row
        else:
            self.positions = self.ends - q.shape[1] + row

    def each(self, values: Tensor) -> Tensor:
        """The values (batch, ..) of sequences, given to each of their queries: (batch, 1, ..), packed (total_q, ..)."""
        if self.entries is None:
            return values.unsqueeze(1)
        return torch.cat((values, values.new_zeros(1, *values.shape[1:])))[self.entries]


def _visible(tokens: Tensor, mask: Mask, queries: _Queries, inputs: DecodeInputs) -> tuple[Tensor, Tensor | None]:
    """How many rows of this rank's cache are filled, and the ranges of these rows that queries see.

    Returns: (batch,) int32; (batch, num_heads_q or 1, seqlen_q, 2) int32, packed (num_heads_q or 1, total_q, 2). The
    ranges are None where each sequence has one query and the number of rows that it sees says all.
    """
    modifiers, positions = inputs.modifiers or NO_MODIFIERS, queries.positions
    start, key_ranges = modifiers.seqstart_k, modifiers.key_ranges
    low, high = torch.zeros_like(positions), queries.ends
    if mask.window_left is not None:
        low = positions - mask.window_left
    if mask.window_right is not None:
        high = torch.minimum(high, positions + (mask.window_right + 1))
    if start is not None:
        first = queries.each(start.long())
        low, high = torch.maximum(low, first), torch.where(positions >= first, high, 0)
    if positions.shape[-1] == 1 and inputs.cu_seqlens_q is mask.window_left is start is key_ranges is None:
        return _before(tokens, high[:, 0]), None  # a single query sees the first rows, up to an end
    low, high = low.unsqueeze(-2), high.unsqueeze(-2)
    if key_ranges is not None:
        low, high = torch.maximum(low, key_ranges[..., 0]), torch.minimum(high, key_ranges[..., 1])
    ranges = torch.stack(torch.broadcast_tensors(_before(tokens, low), _before(tokens, high)), -1)
    return _before(tokens, inputs.cache_seqlens + inputs.seqlen_new), ranges


def _terms(tokens: Tensor, queries: _Queries, inputs: DecodeInputs) -> Tensor | None:
    """ALiBi, bias and query_ranges of this rank's keys as one bias.

    Returns: (batch or 1, num_heads_q or 1, seqlen_q or 1, rows of the cache or 1), packed without the batch.
    """
    modifiers, capacity, terms = inputs.modifiers or NO_MODIFIERS, inputs.capacity, None
    bias, slopes = modifiers.bias, modifiers.alibi_slopes
    if bias is not None:
        if modifiers.q_positions is not None and bias.shape[-2] > 1:  # a row belongs to a position
            rows = queries.positions.clamp(0, bias.shape[-2] - 1)
            bias = torch.take_along_dim(bias, rows.unsqueeze(-2).unsqueeze(-1), -2)
        terms = bias if bias.shape[-1] == 1 else bias[..., tokens]
    if slopes is not None:
        distance = (queries.positions[..., None] - tokens).abs().unsqueeze(-3)
        slopes = slopes[:, None] if slopes.dim() == 1 else queries.each(slopes).mT
        dtype = torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
        alibi = -slopes.to(dtype).unsqueeze(-1) * distance
        terms = alibi if terms is None else terms + alibi
    if modifiers.query_ranges is not None:
        ranges = modifiers.query_ranges[:, :, tokens]
        if queries.entries is not None:  # (total_q, heads, keys, 2) -> (heads, total_q, keys, 2)
            ranges = ranges.expand(inputs.batch, -1, -1, -1)[queries.entries.clamp(0, inputs.batch - 1)].transpose(0, 1)
        else:
            ranges = ranges.unsqueeze(2)
        positions = queries.positions[..., None].unsqueeze(-3)
        hidden = (positions < ranges[..., 0]) | (positions >= ranges[..., 1])
        terms = inputs.q.new_zeros(()) if terms is None else terms
        terms = torch.where(hidden, torch.full((), -torch.inf, dtype=terms.dtype, device=hidden.device), terms)
    if terms is None or terms.shape[-1] in (1, capacity):
        return terms
    return torch.nn.functional.pad(terms, (0, capacity - terms.shape[-1]))


# ---------------------------------------------------------------- new keys


def _rotated(
    inputs: DecodeInputs, local: DecodeInputs, queries: _Queries, interleaved: bool
) -> tuple[DecodeInputs, DecodeInputs]:
    """The inputs with k_new, and the inputs of the local call with q, rotated by positions in the whole sequence."""
    cos, sin, given = inputs.rotary_cos, inputs.rotary_sin, inputs.rotary_positions or RotaryPositions()
    assert cos is not None
    assert sin is not None
    positions = queries.positions if given.q is None else given.q.long()
    local = local._replace(q=rotate(local.q, positions, cos, sin, interleaved))
    if inputs.k_new is not None:
        positions = inputs.cache_seqlens.long()[:, None] + torch.arange(inputs.seqlen_new, device=cos.device)
        positions = positions if given.k is None else given.k.long()
        inputs = inputs._replace(k_new=rotate(inputs.k_new, positions, cos, sin, interleaved))
    return inputs, local


def _readable_pages(inputs: DecodeInputs) -> Tensor | None:
    """The page table of the local call, which has ranges instead of seqstart_k, and so reads all entries.

    In the given table, pages that hold only keys before seqstart_k may be any number.
    """
    if inputs.page_table is None or (inputs.modifiers or NO_MODIFIERS).seqstart_k is None:
        return inputs.page_table
    return inputs.page_table.clamp(0, max(0, inputs.k_cache.shape[0] - 1))


def _append(inputs: DecodeInputs, tokens: Tensor, kv_block: int | None) -> None:
    """Write the new rows that this rank owns to their places in its caches.

    In each sequence it looks at as many slots as there are new rows, from the first free one on. A slot whose token is
    not new, or whose page does not exist, is replaced by the first slot that is written, which gets the same value once
    more. If no slot is written, all of them write to one row what that row has.
    """
    batch, page_table, device = inputs.batch, inputs.page_table, inputs.q.device
    if not len(tokens) or not batch:
        return
    count = torch.arange(inputs.seqlen_new, device=device)
    slots = _before(tokens, inputs.cache_seqlens)[:, None] + count
    slots = slots.clamp(max=len(tokens) - 1)
    number = tokens[slots] - inputs.cache_seqlens[:, None]  # of the token among the new ones
    is_new = (number >= 0) & (number < inputs.seqlen_new)
    number = number.clamp(0, inputs.seqlen_new - 1)
    entries = torch.arange(batch, device=device)[:, None].expand_as(slots)
    places = entries, slots
    if page_table is not None:
        num_pages, page_size = inputs.k_cache.shape[:2]
        pages = page_table[entries, slots // page_size].long()
        is_new &= (pages >= 0) & (pages < num_pages)
        places = pages.clamp(0, num_pages - 1), slots % page_size
    is_new = is_new.flatten()
    chosen = torch.where(is_new, torch.arange(len(is_new), device=device), is_new.int().argmax())
    place = tuple(index.flatten()[chosen] for index in places)
    for cache, new, descale in (
        (inputs.k_cache, inputs.k_new, inputs.k_descale),
        (inputs.v_cache, inputs.v_new, inputs.v_descale),
    ):
        assert new is not None
        rows = new[entries, number]
        if cache.dtype == E4M3:  # torch cannot index e4m3
            scale = None if descale is None else descale_of_keys(descale, inputs, kv_block, entries, slots)
            cache, rows = cache.view(torch.uint8), to_e4m3(rows, scale).view(torch.uint8)
        rows = rows.flatten(0, 1)[chosen]
        # torch writes to a cache that was made in inference mode only in that mode
        with torch.inference_mode() if cache.is_inference() else nullcontext():
            cache[place] = torch.where(is_new[chosen, None, None], rows, cache[place])

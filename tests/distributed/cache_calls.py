"""Random calls of `onepass.distributed.decode` beside `attention_decode` over the whole cache."""

from __future__ import annotations

import importlib
import random
from typing import Any
from unittest import mock

import torch
from random_modifiers import NAMES, random_modifiers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass import distributed
from onepass.distributed import layouts

INT32, E4M3 = torch.int32, torch.float8_e4m3fn
PAGE_SIZE = 3
MODIFIERS = tuple(name for name in NAMES if name != "dropout_p")


def random_step(seed: int) -> dict[str, Any]:
    """A call, by the names of arguments; caches are whole."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def given(p: float) -> bool:
        return rng.random() < p

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def integers(below: int, *shape: int) -> Tensor:
        return torch.randint(-2, below, shape, generator=generator, dtype=INT32)

    batch, capacity, seqlen_q = rng.randint(1, 3), rng.choice([5, 40, 97]), rng.choice([1, 1, 2, 4])
    kv_heads = rng.choice([1, 2])
    heads, head_dim, head_dim_v = kv_heads * rng.choice([1, 3]), 8, rng.choice([8, 4])
    is_packed = given(0.25)
    seqlen_new = 0 if is_packed else rng.choice([0, 1, seqlen_q, 3])
    filled = [rng.randint(0, capacity - seqlen_new) for _ in range(batch)]
    call: dict[str, Any] = {
        "q": normal(batch, seqlen_q, heads, head_dim),
        "k_cache": normal(batch, capacity, kv_heads, head_dim),
        "v_cache": normal(batch, capacity, kv_heads, head_dim_v),
        "cache_seqlens": torch.tensor(filled, dtype=INT32),
        "causal": given(0.8),
    }
    if is_packed:
        counts = torch.tensor([0, *(rng.choice([0, 1, 1, 5]) for _ in range(batch))])
        call["cu_seqlens_q"] = counts.cumsum(0).to(INT32)
        call["q"] = normal(int(counts.sum()) + rng.choice([0, 2]), heads, head_dim)  # some rows belong to no sequence
        if given(0.5):
            call["max_seqlen_q"] = 5
    if seqlen_new or (not is_packed and given(0.2)):
        call["k_new"], call["v_new"] = (normal(batch, seqlen_new, kv_heads, d) for d in (head_dim, head_dim_v))
    if given(0.3):
        call["window"] = rng.choice([(7, None), (0, 0), (20, 1), (None, -1)])
    if given(0.3):
        call["softcap"] = 2.0
    if given(0.3):
        call["sinks"] = normal(heads)
    if given(0.3):
        call |= rng.choice([{"num_splits": 2}, {"split_size": 64}])
    lengths, rows = [n + seqlen_new for n in filled], call["q"].shape[-3]
    call |= random_modifiers(
        seed,
        dtype=torch.float64,
        heads=heads,
        rows=rows,
        lengths=lengths,
        columns=capacity,
        rows_k=None,
        is_packed=is_packed,
        names=MODIFIERS,
    )
    if given(0.15):  # some positions are no row of the bias
        lead, call["causal"] = () if is_packed else (rng.choice([1, batch]),), given(0.5)
        call["q_positions"] = integers(7, *lead, rows)
        call["bias"] = normal(*lead, rng.choice([1, heads]), rng.choice([2, 5]), rng.choice([1, capacity]))
    if not is_packed and given(0.4):
        # positions may be as large as those of `random_modifiers`
        angles = normal(max(rows, capacity) * 2 + 8, rng.choice([1, 3, 4]))
        tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        call |= tables if given(0.5) else {name: t.float() for name, t in tables.items()}
        call["rotary_interleaved"] = given(0.5)
        for name, count in (("q", rows), ("k", seqlen_new)):
            if given(0.3) and (name == "q" or "k_new" in call):
                call[f"rotary_positions_{name}"] = integers(capacity, rng.choice([1, batch]), count)
    if given(0.3):
        for name in ("k_cache", "v_cache"):
            call[name] = call[name].to(E4M3)
    return call


def check(rank: int, seeds: list[int]) -> None:
    """Calls on this rank agree with one device, and so do the caches afterwards."""
    layouts.CYCLIC_BLOCK = 8  # so that small caches have blocks
    for seed in seeds:
        call = random_step(seed)
        own = dict(call)
        plan = distributed.plan(
            call["k_cache"].shape[1],
            num_heads_q=call["q"].shape[-2],
            num_heads_kv=call["k_cache"].shape[2],
            layout=random.Random(seed).choice(layouts.LAYOUTS),
        )
        caches = {name: sharded(plan, call[name]) for name in ("k_cache", "v_cache")}
        if seed % 3 == 0:  # caches in pages; the first page belongs to no sequence
            caches, own["page_table"] = in_pages(caches, seed)
            truth, own["page_table"] = own["page_table"], with_unused_pages(plan, call, own["page_table"])
        own |= caches
        if call["k_cache"].dtype == E4M3:
            of_one_device, of_rank = descales(plan, seed, own, truth if "page_table" in own else None)
            call |= of_one_device
            own |= of_rank
        expected = onepass.attention_decode(**call, return_lse=True)
        found = distributed.decode(plan=plan, **own, return_lse=True)
        where = f"seed {seed} rank {rank}"
        for actual, right in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, right, rtol=1e-9, atol=1e-9, msg=lambda m, where=where: f"{where}: {m}")
        for name in ("k_cache", "v_cache"):
            right = bits(sharded(plan, call[name]))
            actual = bits(caches[name])
            if "page_table" in own:
                actual = actual[truth.long()].flatten(1, 2)[:, : right.shape[1]]
            assert torch.equal(actual, right), f"{where}: {name}"


def bits(t: Tensor) -> Tensor:
    """A view of a tensor that torch can index, also if it is e4m3."""
    return t.view(torch.uint8) if t.dtype == E4M3 else t


def sharded(plan: Any, cache: Tensor) -> Tensor:
    return plan.shard(bits(cache), 1).contiguous().view(cache.dtype)


def in_pages(caches: dict[str, Tensor], seed: int, page_size: int = PAGE_SIZE) -> tuple[dict[str, Tensor], Tensor]:
    """Caches as pages in a random order, and their page table."""
    batch, rows = caches["k_cache"].shape[:2]
    pages = max(1, -(-rows // page_size))
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(seed)) + 1
    table = order.view(batch, pages).to(INT32)
    paged = {}
    for name, cache in caches.items():
        t = bits(cache)
        nan = 0x7F if cache.dtype == E4M3 else float("nan")
        padded = t.new_full((batch, pages * page_size, *t.shape[2:]), nan)
        padded[:, :rows] = t
        in_order = t.new_full((batch * pages + 1, page_size, *t.shape[2:]), nan)
        in_order[order] = padded.view(batch * pages, page_size, *t.shape[2:])
        paged[name] = in_order.view(cache.dtype)
    return paged, table


def with_unused_pages(plan: Any, call: dict[str, Any], page_table: Tensor) -> Tensor:
    """A page table with numbers of no page where a sequence has no key on this rank: past its end, before its start."""
    found, tokens = page_table.clone(), plan.tokens()
    seqlen_new = call["k_new"].shape[1] if "k_new" in call else 0
    for entry, filled in enumerate(call["cache_seqlens"]):
        used = int((tokens < filled + seqlen_new).sum())
        found[entry, -(-used // PAGE_SIZE) :] = 10**6
        if "seqstart_k" in call:  # new keys are written even before the start
            first = min(filled, call["seqstart_k"][entry])
            found[entry, : int((tokens < first).sum()) // PAGE_SIZE] = -7
    return found


def descales(plan: Any, seed: int, own: dict[str, Any], page_table: Tensor | None) -> tuple[dict, dict]:
    """Descales for one device and for this rank. Args: page_table: a table that has the pages of all rows."""
    rng, generator = random.Random(f"{seed}, descales"), torch.Generator().manual_seed(seed)
    batch, heads = own["cache_seqlens"].shape[0], own["k_cache"].shape[2]
    kind = rng.choice(["none", "tensor", "heads", "entries", "blocks", "blocks", "blocks"])
    if kind == "none":
        return {}, {}
    shape = {"tensor": (), "heads": (heads,), "entries": (batch, heads)}.get(kind)
    names = "k_descale", "v_descale"
    if shape is not None:
        found = {name: torch.rand(shape, generator=generator) + 0.5 for name in names}
        return found, found
    block = PAGE_SIZE if page_table is not None else rng.choice([1, 2, 5])
    whole: dict[str, Any] = {"kv_block": 1}
    of_rank: dict[str, Any] = {"kv_block": block}
    for name in names:
        # every rank knows the blocks of all ranks
        of_tokens = torch.empty(batch, heads, plan.num_tokens)
        for rank, runs in enumerate(plan.schedule.layout.runs):
            tokens = torch.cat([torch.arange(*run) for run in runs] or [torch.empty(0, dtype=torch.int64)])
            blocks = torch.rand(batch, heads, -(-len(tokens) // block), generator=generator) + 0.5
            of_tokens[..., tokens] = blocks[..., torch.arange(len(tokens)) // block]
            if rank == plan.rank:
                of_rank[name] = blocks
        whole[name] = of_tokens
        if page_table is not None:
            pages = torch.ones(own["k_cache"].shape[0], heads)
            blocks = of_rank[name]
            pages[page_table[:, : blocks.shape[2]].long()] = blocks.mT
            of_rank[name] = pages
    return whole, of_rank


# ---------------------------------------------------------------- what surrounds a call


def growing(rank: int) -> None:
    """With split_size a sequence has the same bits beside others as alone, and in caches of other sizes."""
    layouts.CYCLIC_BLOCK = 8
    generator = torch.Generator().manual_seed(0)
    q, new = (torch.randn(3, 2, 4, 16, generator=generator) for _ in range(2))
    cache = torch.randn(3, 700, 4, 16, generator=generator)
    lengths = torch.tensor([130, 290, 300], dtype=INT32)
    found = []
    for capacity, entries in ((700, slice(0, 3)), (350, slice(1, 2)), (302, slice(1, 3))):
        plan = distributed.plan(capacity, num_heads_q=4, num_heads_kv=4, layout="cyclic")
        own = {name: sharded(plan, cache[entries, :capacity].clone()) for name in ("k_cache", "v_cache")}
        more = {"cache_seqlens": lengths[entries], "k_new": new[entries], "v_new": new[entries], "split_size": 64}
        out = distributed.decode(q[entries], plan=plan, **own, **more)
        found.append(out[1 - (entries.start or 0)])
    assert all(torch.equal(out, found[0]) for out in found)


def under_autocast(rank: int) -> None:
    """Rows in float32 are cast to a cache in autocast's dtype, as on one device."""
    q, new = torch.ones(1, 1, 4, 8), torch.full((1, 1, 2, 8), 0.3)
    plan = distributed.plan(20, num_heads_q=4, num_heads_kv=2, layout="cyclic")
    cache = torch.ones(1, 20, 2, 8, dtype=torch.bfloat16)
    caches = [sharded(plan, cache) for _ in range(2)]
    lengths = torch.tensor([7], dtype=INT32)
    with torch.autocast("cpu", torch.bfloat16):
        out = distributed.decode(q, *caches, plan, cache_seqlens=lengths, k_new=new, v_new=new)
        right = onepass.attention_decode(q, cache, cache.clone(), cache_seqlens=lengths, k_new=new, v_new=new)
    assert out.dtype == right.dtype == torch.bfloat16
    torch.testing.assert_close(out, right)
    assert torch.equal(caches[0], sharded(plan, cache))


def caches_of_inference_mode(rank: int) -> None:
    """New keys are written to caches that were made in inference mode, by a call outside of it."""
    plan = distributed.plan(20, num_heads_q=2, num_heads_kv=2, layout="cyclic")
    for dtype in (torch.float32, E4M3):
        with torch.inference_mode():
            caches = [torch.zeros(1, plan.num_local_tokens, 2, 8).to(dtype) for _ in range(2)]
        new = torch.ones(1, 3, 2, 8)
        lengths = torch.tensor([7], dtype=INT32)
        distributed.decode(new[:, :1], *caches, plan, cache_seqlens=lengths, k_new=new, v_new=new)
        is_new = ((plan.tokens() >= 7) & (plan.tokens() < 10)).float()
        assert torch.equal(caches[0].float(), is_new[None, :, None, None].expand(caches[0].shape))


def pages_that_do_not_exist(rank: int) -> None:
    """A new key whose page does not exist is not written where values are not read, as on a GPU."""
    importlib.import_module("onepass.distributed.decode")._check_values = lambda *args: None
    plan = distributed.plan(24, num_heads_q=2, num_heads_kv=2, layout="contiguous")
    caches = [torch.zeros(5, 4, 2, 8) for _ in range(2)]
    new = torch.arange(1.0, 9.0).view(1, 8, 1, 1).expand(1, 8, 2, 8)
    lengths = torch.tensor([2], dtype=INT32)
    table = torch.tensor([[1, 10**6, 3, -1, 4, 2]], dtype=INT32)
    own = table[:, : -(-plan.num_local_tokens // 4)]
    # the sequence begins after all keys, so that no page is read
    options = {"seqstart_k": torch.tensor([10], dtype=INT32), "causal": False}
    distributed.decode(
        new[:, :1], *caches, plan, cache_seqlens=lengths, page_table=own, k_new=new, v_new=new, **options
    )
    expected = torch.zeros(5, 4)
    for row, token in enumerate(plan.tokens()):
        if 2 <= token < 10 and 1 <= table[0, row // 4] < 5:
            expected[table[0, row // 4], row % 4] = token - 1
    assert torch.equal(caches[0][:, :, 0, 0], expected)


def all_surroundings(rank: int) -> None:
    under_autocast(rank)
    caches_of_inference_mode(rank)
    growing(rank)
    pages_that_do_not_exist(rank)  # changes the module


# ---------------------------------------------------------------- the host


def reads_nothing(seed: int) -> None:
    """A step of one rank runs on tensors without data, which raise where their values are asked for."""
    module = importlib.import_module("onepass.distributed.decode")
    call = random_step(seed)
    plan = distributed.plan(
        call["k_cache"].shape[1],
        num_heads_q=call["q"].shape[-2],
        num_heads_kv=call["k_cache"].shape[2],
        layout="cyclic",
        num_ranks=1,
    )
    if seed % 3 == 0:
        caches, call["page_table"] = in_pages({name: call[name] for name in ("k_cache", "v_cache")}, seed)
        call |= caches

    def forward(inputs: Any) -> tuple[Tensor, Tensor]:
        q, v_cache = inputs.q, inputs.v_cache
        lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]))
        return q.new_empty((*q.shape[:-1], v_cache.shape[3])), lse

    with FakeTensorMode() as mode, mock.patch.object(module, "_check_values") as check_values:
        call = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in call.items()}
        with mock.patch.object(module.dispatch, "prepare_decode", return_value=forward):
            out = distributed.decode(plan=plan, **call)
    check_values.assert_called_once()  # as on the CPU
    assert out.shape == (*call["q"].shape[:-1], call["v_cache"].shape[3])

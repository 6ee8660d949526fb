"""Random calls of `onepass.distributed.decode` beside `attention_decode` over the whole cache."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import onepass
from onepass import distributed
from onepass.distributed import layout as layouts

INT32 = torch.int32
PAGE_SIZE = 3


def random_step(seed: int) -> dict[str, Any]:
    """A call, by the names of arguments; caches are whole."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def given(p: float) -> bool:
        return rng.random() < p

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch, capacity, seqlen_q = rng.randint(1, 3), rng.choice([5, 40, 97]), rng.choice([1, 1, 2, 4])
    kv_heads = rng.choice([1, 2])
    heads, head_dim, head_dim_v = kv_heads * rng.choice([1, 3]), 8, rng.choice([8, 4])
    seqlen_new = rng.choice([0, 1, seqlen_q, 3])
    call: dict[str, Any] = {
        "q": normal(batch, seqlen_q, heads, head_dim),
        "k_cache": normal(batch, capacity, kv_heads, head_dim),
        "v_cache": normal(batch, capacity, kv_heads, head_dim_v),
        "cache_seqlens": torch.tensor([rng.randint(0, capacity - seqlen_new) for _ in range(batch)], dtype=INT32),
        "causal": given(0.8),
    }
    if seqlen_new:
        call["k_new"], call["v_new"] = (normal(batch, seqlen_new, kv_heads, d) for d in (head_dim, head_dim_v))
    if given(0.3):
        call["window"] = rng.choice([(7, None), (0, 0), (20, 1), (None, -1)])
    if given(0.3):
        call["softcap"] = 2.0
    if given(0.3):
        call["sinks"] = normal(heads)
    if given(0.3):
        filled = call["cache_seqlens"] + seqlen_new
        call["seqstart_k"] = torch.tensor([rng.randint(0, int(n)) for n in filled], dtype=INT32)
    if given(0.3):
        call["alibi_slopes"] = torch.rand((heads,) if given(0.5) else (batch, heads), generator=generator) * 0.3
    if given(0.3):
        sizes = [(1, batch), (1, heads), (1, seqlen_q), (1, capacity)]
        call["bias"] = normal(*(rng.choice(size) for size in sizes))
    if given(0.3):
        call["num_splits"] = 2
    return call


def check(rank: int, seeds: list[int]) -> None:
    """Calls on this rank agree with one device, and so do the caches afterwards."""
    layouts.CYCLIC_BLOCK = 8  # so that small caches have blocks
    for seed in seeds:
        call = random_step(seed)
        capacity, kv_heads = call["k_cache"].shape[1:3]
        own = dict(call)
        plan = distributed.plan(
            capacity,
            num_heads_q=call["q"].shape[2],
            num_heads_kv=kv_heads,
            layout=random.Random(seed).choice(layouts.LAYOUTS),
        )
        caches = {name: plan.shard(call[name], 1).contiguous() for name in ("k_cache", "v_cache")}
        if seed % 3 == 0:  # in pages, of which the first one is nobody's
            caches, own["page_table"] = in_pages(caches, seed)
            filled = call["cache_seqlens"] + (call["k_new"].shape[1] if "k_new" in call else 0)
            used = [int((plan.tokens() < n).sum()) for n in filled]
            truth, own["page_table"] = own["page_table"], own["page_table"].clone()
            for entry, count in enumerate(used):  # no page is there for what is not filled
                own["page_table"][entry, -(-count // PAGE_SIZE) :] = 10**6
        own |= caches
        expected = onepass.attention_decode(**call, return_lse=True)
        found = distributed.decode(plan=plan, **own, return_lse=True)
        where = f"seed {seed} rank {rank}"
        for actual, right in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, right, rtol=1e-9, atol=1e-9, msg=where)
        for name in ("k_cache", "v_cache"):
            right = plan.shard(call[name], 1)
            actual = caches[name]
            if "page_table" in own:
                actual = actual[truth.long()].flatten(1, 2)[:, : right.shape[1]]
            assert torch.equal(actual, right), f"{where}: {name}"


def in_pages(caches: dict[str, Tensor], seed: int, page_size: int = PAGE_SIZE) -> tuple[dict[str, Tensor], Tensor]:
    """Caches as pages in a random order, and their page table."""
    batch, rows = caches["k_cache"].shape[:2]
    pages = max(1, -(-rows // page_size))
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(seed)) + 1
    table = order.view(batch, pages).to(INT32)
    paged = {}
    for name, t in caches.items():
        padded = t.new_full((batch, pages * page_size, *t.shape[2:]), float("nan"))
        padded[:, :rows] = t
        paged[name] = t.new_full((batch * pages + 1, page_size, *t.shape[2:]), float("nan"))
        paged[name][order] = padded.view(batch * pages, page_size, *t.shape[2:])
    return paged, table

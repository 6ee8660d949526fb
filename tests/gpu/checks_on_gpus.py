"""What `test_several_gpus.py` runs on each rank: a process with a GPU of its own."""

from __future__ import annotations

import torch
import torch.distributed as dist
import whole_calls
from gpu_cases import assert_rounded_alike

import onepass
from onepass import distributed

BF16, INT32 = torch.bfloat16, torch.int32


def random_calls(rank: int, device: str, transport: str, seeds: list[int]) -> None:
    for seed in seeds:
        call = whole_calls.random_call(seed, BF16).to(device)
        call.plan["transport"] = transport
        whole_calls.check_errors(seed, call)


def errors_of_a_large_call(
    rank: int, device: str, engine: str, transport: str, tokens: int
) -> dict[str, whole_calls.Errors]:
    shapes = {"q": (1, tokens, 8, 128), "k": (1, tokens, 4, 128), "v": (1, tokens, 4, 128)}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(*shape, generator=generator).to(BF16) for name, shape in shapes.items()}
    plan = {"tokens": tokens, "num_heads_q": 8, "num_heads_kv": 4, "causal": True, "engine": engine}
    plan["transport"] = transport
    return whole_calls.errors(whole_calls.WholeCall(tensors, plan).to(device))


def peak_memory(rank: int, tokens: int, engine: str) -> tuple[int, int, int]:
    """Bytes at the peak of a forward and a backward: on one device, of this rank; and bytes of a chunk."""
    heads, kv_heads, head_dim = 16, 16, 128
    plan = distributed.plan(tokens, num_heads_q=heads, num_heads_kv=kv_heads, causal=True, engine=engine, chunks=16)

    def peak(function) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def step(rows: int, attend) -> None:
        leaves = [
            torch.randn(1, rows, n, head_dim, device="cuda", dtype=BF16, requires_grad=True)
            for n in (heads, kv_heads, kv_heads)
        ]
        attend(*leaves).sum().backward()

    def alone() -> None:
        step(tokens, lambda q, k, v: onepass.attention(q, k, v, causal=True))

    def together() -> None:
        step(plan.num_local_tokens, lambda q, k, v: distributed.attention(q, k, v, plan))

    for function in (alone, together):
        function()  # kernels, communicators
    whole = peak(alone)
    dist.barrier()
    chunk = 2 * tokens * kv_heads * head_dim * BF16.itemsize // 16
    return whole, peak(together), chunk


def attention_in_a_graph(rank: int, device: str, engine: str, transport: str, tokens: int, replays: int) -> None:
    """A captured forward, replayed with other inputs while another stream takes and frees memory.

    Between the replays calls are made outside of the graph, too, one of them larger.
    """
    heads, kv_heads, head_dim = 8, 4, 64
    generator = torch.Generator(device).manual_seed(0)
    options = {"num_heads_q": heads, "num_heads_kv": kv_heads, "causal": True, "engine": engine, "transport": transport}
    plan, larger = (distributed.plan(n, chunks=4, **options) for n in (tokens, 3 * tokens))

    def whole(tokens: int) -> list[torch.Tensor]:
        shapes = ((1, tokens, n, head_dim) for n in (heads, kv_heads, kv_heads))
        return [torch.randn(*shape, generator=generator, device=device).to(BF16) for shape in shapes]

    def check(found: torch.Tensor, plan: distributed.ContextPlan, tensors: list[torch.Tensor]) -> None:
        expected = plan.shard(onepass.attention(*tensors, causal=True), 1)
        assert_rounded_alike(found, expected)

    static = [plan.shard(t, 1).clone() for t in whole(tokens)]
    if device == "cuda":
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                distributed.attention(*static, plan)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = distributed.attention(*static, plan)
        other = torch.cuda.Stream()
    for i in range(replays):
        tensors = whole(tokens)
        for t, new in zip(static, tensors, strict=True):
            t.copy_(plan.shard(new, 1))
        if device == "cuda":
            with torch.cuda.stream(other):
                for size in range(1, 20):
                    torch.full((size << 18,), float("nan"), device=device)
            graph.replay()
            found = captured.clone()
        else:
            found = distributed.attention(*static, plan)
        check(found, plan, tensors)
        check(distributed.attention(*static, plan), plan, tensors)
        if i % 4 == 3:
            tensors = whole(3 * tokens)
            check(distributed.attention(*(larger.shard(t, 1) for t in tensors), larger), larger, tensors)


def decoding_in_a_graph(rank: int, device: str, steps: int, kind: str) -> None:
    """A captured step of decoding, replayed while the cache grows past a block of the layout.

    Args:
        kind: "plain"; "rotary", with positions, ranges and ALiBi, too; "packed" queries without new keys; "e4m3".
    """
    capacity, batch, heads, kv_heads, head_dim = 2000, 2, 8, 2, 64
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, BF16)

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=INT32, device=device)

    caches = [normal(batch, capacity, kv_heads, head_dim) for _ in range(2)]
    plan = distributed.plan(capacity, num_heads_q=heads, num_heads_kv=kv_heads, layout="cyclic")
    own = [plan.shard(t, 1).contiguous() for t in caches]
    lengths = integers(250, 1023)
    q, k, v = normal(batch, 1, heads, head_dim), *(normal(batch, 1, kv_heads, head_dim) for _ in range(2))
    new: dict[str, torch.Tensor] = {"k_new": k, "v_new": v, "cache_seqlens": lengths}
    if kind == "rotary":
        angles = torch.rand(capacity, 16, generator=generator).to(device)
        new |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "q_positions": lengths[:, None]}
        new |= {"key_ranges": integers(100, 10**9).view(1, 1, 1, 2)}
        new |= {"alibi_slopes": torch.rand(heads, generator=generator).to(device) * 0.01}
    elif kind == "packed":
        q = normal(4, heads, head_dim)
        new = {"cu_seqlens_q": integers(0, 3, 4), "cache_seqlens": lengths}
    elif kind == "e4m3":
        caches, own = ([t.to(torch.float8_e4m3fn) for t in tensors] for tensors in (caches, own))
        descale = torch.rand(kv_heads, generator=generator).to(device) + 0.5
        new |= {"k_descale": descale, "v_descale": descale}

    def step() -> torch.Tensor:
        return distributed.decode(q, *own, plan, **new)

    if device == "cuda":
        step()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
    for _ in range(steps):
        for t, other in zip((q, k, v), (normal(*t.shape) for t in (q, k, v)), strict=True):
            t.copy_(other)
        if device == "cuda":
            graph.replay()
            found = captured.clone()
        else:
            found = step()
        expected = onepass.attention_decode(q, *caches, **new)
        assert_rounded_alike(found, expected)
        lengths += 1
    for t, whole in zip(own, caches, strict=True):
        # a kernel rotates new keys on one device
        tolerance = 0.01 if kind == "rotary" else 0.0
        torch.testing.assert_close(t.float(), plan.shard(whole.float(), 1), rtol=tolerance, atol=tolerance)

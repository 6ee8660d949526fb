"""What tests of `onepass.distributed` run on each rank, by name."""

from __future__ import annotations

import gc
import importlib
import itertools
import math
import weakref
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import whole_calls
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import onepass
from onepass import distributed, reference
from onepass.distributed import copies, cost, local, shipments
from onepass.distributed.exchange import Expected, Message, exchange, gather

engine = importlib.import_module("onepass.distributed.attention")  # the package has a function of this name
HEADS = {"num_heads_q": 8, "num_heads_kv": 4}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    tokens: int, heads: int = 8, kv_heads: int = 4, head_dim: int = 16, seed: int = 0, **options: Any
) -> list[torch.Tensor]:
    shapes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, head_dim))
    return [normal(1, tokens, *shape, seed=3 * seed + i, **options) for i, shape in enumerate(shapes)]


# ---------------------------------------------------------------- numbers


def root_mean_square_errors(rank: int, engine_name: str) -> dict[str, whole_calls.Errors]:
    """Errors of bfloat16 results against float64: over ranks, and on one device."""
    tensors = dict(zip("qkv", qkv(200, head_dim=64, dtype=torch.bfloat16), strict=True))
    arguments = {"tokens": 200, "causal": True, "engine": engine_name, **HEADS}
    call = whole_calls.WholeCall(tensors, arguments)
    return whole_calls.errors(call)


class GatheredCopies:
    """A stand-in for `copies.Copies`, which needs GPUs: every rank gathers what all ranks publish."""

    def __init__(self, group: Any, rank: int, device: torch.device):
        self.group = group

    def publish(self, tensors: list[torch.Tensor], counts: list[int]) -> list[list[torch.Tensor]]:
        found = []
        for t in tensors:
            padded = t.new_zeros((max(counts), *t.shape[1:]))
            padded[: len(t)] = t
            everyone = gather(padded.view(-1).view(torch.uint8), self.group, len(counts))
            whole = [rows.view(t.dtype).view(padded.shape) for rows in everyone]
            found.append([rows[:count] for rows, count in zip(whole, counts, strict=True)])
        return found

    def read(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        filled = []  # targets are filled when somebody waits, and not before
        for target, source in pairs:
            assert target.is_contiguous()
            filled.append((target, source))

        def wait() -> None:
            for target, source in filled:
                target.copy_(source)

        return wait


def read_rows(rank: int, seeds: list[int]) -> None:
    """Random calls whose rows are read and not sent agree with one device."""
    with patch.object(copies, "of", GatheredCopies):
        whole_calls.check(rank, seeds, transport="copies")


def messages_beside_copies(rank: int) -> list[int]:
    """Operations of the process group in a forward: with rows that are sent, and with rows that are read."""
    counts = []
    with patch.object(copies, "of", GatheredCopies):
        for transport in ("messages", "copies"):
            plan = distributed.plan(64, engine="keys", chunks=2, causal=True, transport=transport, **HEADS)
            leaves = [plan.shard(t, 1) for t in qkv(64)]
            distributed.attention(*leaves, plan)
            with profile(activities=[ProfilerActivity.CPU]) as found:
                distributed.attention(*leaves, plan)
            counts.append(sum("all_to_all" in event.name or "alltoall" in event.name for event in found.events()))
    return counts


def same_bits_twice(rank: int) -> None:
    call = whole_calls.WholeCall(
        dict(zip("qkv", qkv(150, dtype=torch.bfloat16), strict=True)),
        {"tokens": 150, "causal": True, "engine": "keys", **HEADS},
        {"deterministic": True},
    )
    first, second = whole_calls.on_ranks(call), whole_calls.on_ranks(call)
    assert all(torch.equal(first[name], second[name]) for name in first)


def bits_of_one_device(rank: int) -> None:
    """A plan of one rank gives the bits of one device, and so do out and lse on ranks that share heads."""
    tensors = dict(zip("qkv", qkv(150, dtype=torch.bfloat16), strict=True))
    call = whole_calls.WholeCall(tensors, {"tokens": 150, "causal": True, "engine": "heads", **HEADS})
    alone, found = whole_calls.on_one_device(call), whole_calls.on_ranks(call)
    names = alone if dist.get_world_size() == 1 else ("out", "lse")
    for name in names:
        assert torch.equal(found[name], alone[name]), name


def fp8(rank: int) -> None:
    """FP8 over ranks is as far from exact attention as on one device."""
    q, k, v = qkv(256, dtype=torch.bfloat16)
    exact = reference.attention(q, k, v, causal=True).out
    alone = onepass.attention(q, k, v, causal=True, precision="fp8")
    for engine_name in ("heads", "keys"):
        plan = distributed.plan(256, causal=True, engine=engine_name, **HEADS)
        local = distributed.attention(*(plan.shard(t, 1) for t in (q, k, v)), plan, precision="fp8")
        found = plan.unshard(local, 1)
        errors = [float((x.double() - exact).square().mean().sqrt()) for x in (found, alone)]
        assert errors[0] < 1.1 * errors[1], (engine_name, errors)
        assert not torch.equal(found, onepass.attention(q, k, v, causal=True))


def nan_stays_out(rank: int) -> None:
    """A sequence of NaN reaches no other one, on no rank."""
    q, k, v = (t[0] for t in qkv(64))
    for t in (q, k, v):
        t[30:50] = math.nan
    others = torch.ones(64, dtype=torch.bool)
    others[30:50] = False
    for engine_name in ("heads", "keys"):
        plan = distributed.plan([0, 30, 50, 64], engine=engine_name, layout="balanced", **HEADS)
        leaves = [plan.shard(t, 0).requires_grad_() for t in (q, k, v)]
        out = plan.unshard(distributed.attention(*leaves, plan), 0)
        (out[others] ** 2).sum().backward()
        gradients = [plan.unshard(t.grad, 0) for t in leaves]
        assert out[others].isfinite().all()
        assert all(gradient[others].isfinite().all() for gradient in gradients)


# ---------------------------------------------------------------- costs


def received_bytes(rank: int, arguments: dict[str, Any]) -> tuple[int, int]:
    """The bytes that a forward and a backward receive, counted; for each rank they equal the estimate."""
    tokens = arguments["tokens"]
    plan = distributed.plan(**arguments)
    total = tokens if isinstance(tokens, int) else tokens[-1]
    tensors = qkv(total, plan.schedule.num_heads_q, plan.schedule.num_heads_kv, dtype=torch.bfloat16)
    tensors = [t[0] if plan.is_packed else t for t in tensors]
    dim = 0 if plan.is_packed else 1
    leaves = [plan.shard(t, dim).requires_grad_() for t in tensors]
    distributed.attention(*leaves, plan)  # ranks compare it
    with Operations() as forward:
        out = distributed.attention(*leaves, plan)
    with Operations() as backward:
        out.sum().backward()
    assert {*forward.bytes, *backward.bytes} <= {"alltoall_base_"}
    expected = cost.estimate(plan.schedule, 16, distributed.Hardware(), keep_gathered=plan.keep_gathered)
    found = sum(forward.bytes.values()), sum(backward.bytes.values())
    assert found[0] == expected.forward_bytes[rank], (rank, found, expected.forward_bytes)
    assert found[1] == expected.backward_bytes[rank], (rank, found, expected.backward_bytes)
    return found


class Arrived:
    """A stand-in for an operation of torch.distributed that is done."""

    def wait(self) -> None:
        """Nothing is waited for."""


# Checks of memory read no values: gloo's thread would release tensors at any time.
nothing_travels = patch.object(dist, "all_to_all_single", lambda *args, **options: Arrived())


@nothing_travels
def peaks(rank: int) -> tuple[float, float]:
    """The memory of a forward, and of both directions, beyond a rank's share, in chunks of the gathered k and v.

    The share of a forward is out and lse. The share of both directions has the gradients, too, with a dq in float32 and
    two numbers a row. Local calls give arbitrary values, as if kernels took no other memory.
    """
    tokens, heads, head_dim = 4096, 16, 32

    def forward(self: Any, q: Any, k: Any, v: Any) -> Any:
        return q.new_empty((*q.shape[:3], v.shape[-1])), q.new_empty(q.shape[:3], dtype=torch.float32)

    def backward(self: Any, q: Any, k: Any, v: Any, *args: Any) -> Any:
        dtype = torch.float32 if self.sums_keys else k.dtype
        return torch.empty_like(q), torch.empty_like(k, dtype=dtype), torch.empty_like(v, dtype=dtype)

    sizes = dict.fromkeys(("num_heads_q", "num_heads_kv", "chunks"), heads)
    plan = distributed.plan(tokens, causal=True, engine="keys", **sizes)
    shape = 1, plan.num_local_tokens, heads, head_dim
    leaves = [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def both() -> None:
        torch.autograd.grad(distributed.attention(*leaves, plan).sum(), leaves)

    with patch.multiple(local.LocalCalls, forward=forward, backward=backward):
        both()
        with torch.no_grad():
            distributed.attention(*leaves, plan)
            alone = peak_bytes(lambda: distributed.attention(*leaves, plan))
        together = peak_bytes(both)
    chunk = 2 * tokens * heads * head_dim * 2 / 16
    one, numbers = leaves[0].nbytes, 4 * plan.num_local_tokens * heads
    return (alone - one - numbers) / chunk, (together - 6 * one - 2 * numbers) / chunk


def peak_bytes(function: Any) -> int:
    """The most bytes that a function has allocated on the CPU at one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        function()
    now = most = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def hidden_gather(rank: int, direction: str, arguments: dict[str, Any]) -> tuple[str, tuple[float, float]]:
    """The results of both checks where a forward or a backward gathers all keys and values beside its messages."""
    right = getattr(engine.Pipeline, direction)

    def leaky(self: Any, *args: Any) -> Any:
        whole = [gather(t.contiguous(), self.plan.group, self.plan.num_ranks) for t in (self.k, self.v)]
        result = right(self, *args)
        del whole
        return result

    with patch.object(engine.Pipeline, direction, leaky):
        return message_of(lambda: received_bytes(rank, arguments)), peaks(rank)


@nothing_travels
def largest_buffers(rank: int, chunks: int) -> tuple[int, int]:
    """Bytes of received messages that are alive at one time in a forward, and of all gathered keys and values."""
    plan = distributed.plan(512, causal=False, engine="keys", chunks=chunks, num_heads_q=16, num_heads_kv=16)
    leaves = [plan.shard(t, 1) for t in qkv(512, 16, 16)]
    alive: dict[int, int] = {}
    numbers = itertools.count()
    most = [0]
    right = shipments.exchange

    def watching(*args: Any) -> Any:
        pending = right(*args)
        storage, key = pending._flat.untyped_storage(), next(numbers)
        alive[key] = storage.nbytes()
        weakref.finalize(storage, alive.pop, key, None)
        most[0] = max(most[0], sum(alive.values()))
        return pending

    with patch.object(shipments, "exchange", watching):
        distributed.attention(*leaves, plan)
    return most[0], 2 * 512 * 16 * 16 * 4


def messages_of_any_place(rank: int) -> None:
    """Tensors arrive unchanged, wherever they begin among the bytes of the messages, and whatever their strides are."""
    sent = [
        torch.arange(3, dtype=torch.bfloat16) + rank,  # so the next tensor begins at an odd multiple of 2 bytes
        torch.arange(6.0).view(2, 3).t()[1:2, :1] + rank,
        (torch.arange(6.0).view(2, 3) + rank).t()[1:2, :1],  # one element, contiguous by its shape alone
        (torch.arange(32.0).view(4, 8) + rank)[:, 4:],
        torch.full((2, 0), 1.0),
        torch.full((), float(rank), dtype=torch.float64),
    ]
    other = 1 - rank
    sends = [Message(other, t) for t in sent]
    receives = [Expected(other, tuple(t.shape), t.dtype) for t in sent]
    for first in range(len(sent)):
        found = exchange(dist.group.WORLD, sends[first:], receives[first:], torch.device("cpu")).wait()
        for t, right in zip(found, sent[first:], strict=True):
            assert torch.equal(t, right - rank + other if right.numel() else right)


class AllOperations(TorchDispatchMode):
    """Counts torch's operations. Attributes: count."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def operations(rank: int, tokens: int) -> tuple[int, int, int]:
    """A rank's runs of tokens, and the operations of a forward and of a backward beside its own calls."""
    plan = distributed.plan(tokens, layout="cyclic", engine="keys", chunks=1, num_heads_q=2, num_heads_kv=2)
    leaves = [plan.shard(t, 1).requires_grad_() for t in qkv(tokens, 2, 2)]

    def forward(self: Any, q: Any, k: Any, v: Any) -> Any:
        return torch.zeros_like(q), q.new_zeros(q.shape[:3])

    def backward(self: Any, *given: Any) -> Any:
        return tuple(map(torch.zeros_like, given[:3]))

    with patch.multiple(local.LocalCalls, forward=forward, backward=backward):
        distributed.attention(*leaves, plan).sum().backward()  # this call makes what the plan keeps
        with AllOperations() as there:
            out = distributed.attention(*leaves, plan)
        dout = torch.ones_like(out)
        with AllOperations() as back:
            torch.autograd.backward(out, dout)
    return len(plan.local_runs), there.count, back.count


def copied_keys(rank: int) -> list[bool]:
    """Whether k of each call of this rank is a copy, where sequences are whole, and where one of them is divided."""
    found: list[bool] = []
    right = local.LocalCalls.forward

    def watching(self: Any, q: Any, k: Any, v: Any) -> Any:
        found.append(k.untyped_storage().data_ptr() != leaves[1].untyped_storage().data_ptr())
        return right(self, q, k, v)

    with patch.object(local.LocalCalls, "forward", watching):
        for offsets in ([0, 32, 64], [0, 48, 64]):
            plan = distributed.plan(offsets, causal=True, engine="keys", chunks=1, **HEADS)
            leaves = [plan.shard(t[0], 0).requires_grad_() for t in qkv(64, 8, 4)]
            whole = onepass.attention_varlen(
                *(t[0] for t in qkv(64, 8, 4)),
                **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor(offsets, dtype=torch.int32)),
                causal=True,
            )
            torch.testing.assert_close(plan.unshard(distributed.attention(*leaves, plan), 0), whole)
    return found


# ---------------------------------------------------------------- faults


def message_of(function: Any) -> str:
    """The message of what a call raises."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def a_rank_that_is_gone(rank: int) -> str:
    """What ranks hear of a rank that is gone. They have made this call before, so nothing is compared again."""
    plan = distributed.plan(64, causal=True, engine="keys", **HEADS)
    q, k, v = (plan.shard(t, 1) for t in qkv(64))
    distributed.attention(q, k, v, plan)
    if rank == 1:
        return ""
    return message_of(lambda: distributed.attention(q, k, v, plan))


def refusals(rank: int) -> list[str]:
    """Errors that a rank raises by itself; all ranks make the same calls."""
    plan = distributed.plan(64, **HEADS)
    q, k, v = (plan.shard(t, 1) for t in qkv(64))
    only_words = distributed.plan(64, num_ranks=4, **HEADS)
    calls = [
        lambda: distributed.attention(q, k, v, None),
        lambda: distributed.attention(q, k, v, only_words),
        lambda: distributed.attention(q[:, :-1], k, v, plan),
        lambda: distributed.attention(q[:, :, :4], k, v, plan),
        lambda: distributed.attention(q, k, v, plan, sinks=torch.zeros(3)),
        lambda: distributed.attention(q, k, v, plan, dropout_p=1.5),
        lambda: distributed.attention(q, k, v, plan, precision="fp8", alibi_slopes=torch.zeros(8)),
        lambda: plan.shard(q, 1),
        lambda: plan.unshard(torch.zeros(1, 64), 1),
        lambda: distributed.plan(0, **HEADS),
        lambda: distributed.plan([0, 5, 3], **HEADS),
        lambda: distributed.plan(64, engine="ring", **HEADS),
        lambda: distributed.plan(64, engine=3, **HEADS),
        lambda: distributed.plan(64, layout="zigzag", **HEADS),
        lambda: distributed.plan(64, transport="pigeons", **HEADS),
        lambda: distributed.attention(q, k, v, distributed.plan(64, transport="copies", **HEADS)),
        lambda: distributed.plan(64, num_heads_q=3, num_heads_kv=2),
        lambda: distributed.plan(64, "cpu", **HEADS),
    ]
    return [message_of(call) for call in calls]


def a_group_that_is_destroyed(rank: int) -> str:
    """A plan does not keep its group alive: a group that lives until the interpreter ends would abort the process."""
    group = dist.new_group([0, 1])
    plan = distributed.plan(60, group, **HEADS)
    q, k, v = (plan.shard(t, 1) for t in qkv(60))
    distributed.attention(q, k, v, plan)
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return message_of(lambda: distributed.attention(q, k, v, plan))


def groups_side_by_side(rank: int) -> None:
    """Two groups of two ranks, each with data of its own."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = rank % 2
    tensors = qkv(60, seed=own)
    plan = distributed.plan(60, groups[own], causal=True, engine="keys", **HEADS)
    assert (plan.rank, plan.num_ranks) == (rank // 2, 2)
    leaves = [plan.shard(t, 1).requires_grad_() for t in tensors]
    out = distributed.attention(*leaves, plan, dropout_p=0.2, sinks=torch.zeros(8))
    state = torch.get_rng_state()
    whole = plan.unshard(out, 1)
    whole.square().sum().backward()
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(0)
    out = plan.unshard(distributed.attention(*leaves, plan, sinks=torch.ones(8)), 1)
    torch.testing.assert_close(out, onepass.attention(*tensors, causal=True, sinks=torch.ones(8)))
    cache = distributed.plan(60, groups[own], layout="contiguous", **HEADS)
    lengths = torch.tensor([50], dtype=torch.int32)
    caches = [cache.shard(t, 1).contiguous() for t in tensors[1:]]
    found = distributed.decode(tensors[0][:, :1], *caches, cache, cache_seqlens=lengths)
    torch.testing.assert_close(found, onepass.attention_decode(tensors[0][:, :1], *tensors[1:], cache_seqlens=lengths))


# ---------------------------------------------------------------- modules


class Core(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise AssertionError("replaced by ContextParallel")


def parallel_style(rank: int, seq_dim: int) -> None:
    """Tensors and DTensors go through a parallelized module."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    plan = distributed.plan(70, mesh["cp"], causal=True, layout="contiguous", **HEADS)
    model = nn.ModuleDict({"core": Core()})
    parallelize_module(model, mesh["cp"], {"core": distributed.ContextParallel(plan, seq_dim=seq_dim, softcap=4.0)})
    q, k, v = qkv(70)
    v = v[..., :8]
    expected = onepass.attention(q, k, v, causal=True, softcap=4.0)
    given = [t.transpose(1, 2).contiguous() if seq_dim == 2 else t for t in (q, k, v)]
    local = [plan.shard(t, seq_dim).contiguous().requires_grad_() for t in given]
    out = model["core"](*local)
    whole = plan.unshard(out, seq_dim)
    torch.testing.assert_close(whole.transpose(1, 2) if seq_dim == 2 else whole, expected)
    tensors = [
        DTensor.from_local(
            t, mesh["cp"], (Shard(seq_dim),), run_check=False, shape=whole_t.shape, stride=whole_t.stride()
        )
        for t, whole_t in zip(local, given, strict=True)
    ]
    sharded = model["core"](*tensors)
    assert isinstance(sharded, DTensor)
    assert sharded.shape == (*given[0].shape[:-1], 8)
    full = sharded.full_tensor()
    torch.testing.assert_close(full.transpose(1, 2) if seq_dim == 2 else full, expected)
    full.sum().backward()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    onepass.attention(*leaves, causal=True, softcap=4.0).sum().backward()
    for t, leaf in zip(local, leaves, strict=True):
        right = plan.shard(leaf.grad.transpose(1, 2) if seq_dim == 2 else leaf.grad, seq_dim)
        torch.testing.assert_close(t.grad, right)


# ---------------------------------------------------------------- what a backward keeps


def changes_in_place(rank: int) -> dict[str, str]:
    """What the backward says where a term has been changed since the forward."""
    plan = distributed.plan(64, causal=True, **HEADS)
    found = {}
    for name, shape in (("sinks", (8,)), ("alibi_slopes", (8,)), ("bias", (1, 8, 1, 64))):
        leaves = [plan.shard(t, 1).requires_grad_() for t in qkv(64)]
        term = torch.zeros(shape, requires_grad=True)
        out = distributed.attention(*leaves, plan, **{name: term})
        with torch.no_grad():
            term.add_(5.0)
        found[name] = message_of(out.sum().backward)
    return found


def parts_of_a_loss(rank: int) -> str:
    """Gradients of out alone and of lse alone, of rows and of a term alone, are those of one device.

    Returns: what a second derivative says.
    """
    tensors = qkv(40)
    terms = {"sinks": torch.ones(8), "alibi_slopes": torch.full((8,), 0.1), "bias": normal(1, 1, 1, 40)}
    weights = {"out": normal(1, 40, 8, 16, seed=1), "lse": normal(1, 8, 40, seed=2)}
    for engine_name in ("keys", "heads"):
        plan = distributed.plan(40, causal=True, engine=engine_name, keep_gathered=True, **HEADS)
        for wanted, part in itertools.product(("q", "k", "v", *terms), weights):
            found = []
            for function, cut in ((onepass.attention, None), (distributed.attention, plan)):
                named = dict(zip("qkv", tensors, strict=True)) | terms
                leaf = named[wanted] = named[wanted].clone().requires_grad_()
                own = [t if cut is None else cut.shard(t, 1) for t in (named.pop(name) for name in "qkv")]
                plans = {"causal": True} if cut is None else {"plan": cut}
                result = getattr(function(*own, **plans, **named, return_lse=True), part)
                dim = 1 if part == "out" else 2
                weight = weights[part] if cut is None else cut.shard(weights[part], dim)
                assert result.is_contiguous()
                (gradient,) = torch.autograd.grad((result * weight).sum(), leaf)
                found.append(gradient)
            if wanted in "qkv":
                dist.all_reduce(found[1])
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5, msg=f"{engine_name}, d{wanted} of {part}")
    with torch.autocast("cpu", torch.bfloat16):
        slopes = terms["alibi_slopes"].bfloat16()
        out = distributed.attention(*(plan.shard(t, 1) for t in tensors), plan, alibi_slopes=slopes)
        right = plan.shard(onepass.attention(*tensors, causal=True, alibi_slopes=slopes), 1)
        torch.testing.assert_close(out, right, rtol=2e-2, atol=2e-2)
    leaf = plan.shard(tensors[0], 1).requires_grad_()
    out = distributed.attention(leaf, *(plan.shard(t, 1) for t in tensors[1:]), plan)
    (gradient,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
    return message_of(gradient.sum().backward)


def kept_buffers(rank: int) -> None:
    """Received tensors live until the first backward that does not retain the graph, and not without gradients."""
    heads = dict.fromkeys(("num_heads_q", "num_heads_kv", "chunks"), 16)
    plan = distributed.plan(512, causal=True, engine="keys", keep_gathered=True, **heads)
    leaves = [plan.shard(t, 1).requires_grad_() for t in qkv(512, 16, 16)]
    buffers: list[weakref.ref[Any]] = []
    right = shipments.Shipment.rows

    def watching(self: Any, *args: Any) -> Any:
        rows = right(self, *args)
        if self.route is not None:
            buffers.append(weakref.ref(rows.untyped_storage()))
        return rows

    def alive() -> int:
        gc.collect()
        return sum(buffer() is not None for buffer in buffers)

    with patch.object(shipments.Shipment, "rows", watching):
        with torch.no_grad():
            out = distributed.attention(*leaves, plan)
        assert alive() == 0
        out = distributed.attention(*leaves, plan)
        assert alive() == 2 * len(plan.schedule.steps) == 32  # k and v
        first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        assert alive() == 32
        second = torch.autograd.grad(out.sum(), leaves)
        assert alive() == 0
    assert len(buffers) == 64  # the backward received none
    assert out.isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---------------------------------------------------------------- connections


def connections(rank: int) -> list[list[str]]:
    """Collective operations of three plans for each of some groups, as if their backends of GPUs were on CPUs."""
    found = []
    ones = torch.ones
    for config in ("cpu:gloo,cuda:nccl", "cuda:nccl", "cpu:gloo,cuda:gloo", "cpu:gloo"):
        group = dist.new_group([0, 1])
        with (
            patch.object(torch, "ones", lambda *args, device=None: ones(*args)),
            patch.object(torch.cuda, "is_available", lambda: True),
            patch.object(dist, "get_backend_config", lambda group=None, config=config: config),
            Operations() as operations,
        ):
            for tokens in (32, 48, 64):
                distributed.plan(tokens, group, **HEADS)
        found.append(operations.names)
    return found


class Operations(TorchDispatchMode):
    """Every operation of torch.distributed: its names, and the bytes of tensors that each of them receives into.

    It sees what reaches a process group, whichever function of Python asked for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            name = function._opname
            self.names.append(name)
            received = tree_leaves(args[0]) if name != "send" else []
            self.bytes[name] = self.bytes.get(name, 0) + sum(t.nbytes for t in received if isinstance(t, torch.Tensor))
        return function(*args, **(kwargs or {}))

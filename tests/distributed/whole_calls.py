"""Random calls of attention over several ranks, and the call on one device that each of them must agree with."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import onepass
from onepass import distributed
from onepass.distributed.schedule import with_short_ends

INT32 = torch.int32
MESH = "mesh"  # stands for an engine of two or three ranks, if that divides the number of ranks
WITH_GRADIENT = ("sinks", "alibi_slopes", "bias")


@dataclass
class WholeCall:
    """A call on all tokens.

    Attributes:
        plan: the arguments of `plan`, with tokens. options: the options of `attention`.
    """

    tensors: dict[str, Tensor]
    plan: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    has_short_ends: bool = False  # whether the plan's steps are joined to unequal ones

    @property
    def is_packed(self) -> bool:
        return not isinstance(self.plan["tokens"], int)

    def to(self, device: str) -> WholeCall:
        """The call with its tensors on a device."""
        tensors = {name: t.to(device) for name, t in self.tensors.items()}
        options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.options.items()}
        return replace(self, tensors=tensors, options=options)

    def in_float64(self) -> WholeCall:
        tensors = {name: t.double() for name, t in self.tensors.items()}
        options = {name: x.double() if name in ("sinks", "bias") else x for name, x in self.options.items()}
        return replace(self, tensors=tensors, options=options)

    @property
    def text(self) -> str:
        shapes = {name: tuple(t.shape) for name, t in self.tensors.items()}
        options = {name: tuple(x.shape) if isinstance(x, Tensor) else x for name, x in self.options.items()}
        return f"{shapes} {self.plan} {options} short ends: {self.has_short_ends}"


def random_call(
    seed: int,
    dtype: torch.dtype = torch.float64,
    head_dims: tuple[int, int] | None = None,
    short_ends: bool = False,
    masks: tuple[str, ...] = ("full", "causal", "causal", "window"),
) -> WholeCall:
    """A call with a random subset of everything that `onepass.distributed.attention` takes.

    Args: short_ends: 16 query heads in unequal steps. masks: one of these is drawn.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def given(p: float) -> bool:
        return rng.random() < p

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    kv_heads = rng.choice([1, 1, 2, 3, 5, 8])
    heads = kv_heads * rng.choice([1, 1, 2, 3])
    if short_ends:
        kv_heads, heads = rng.choice([(16, 16), (16, 16), (8, 16)])
    batch, head_dim, head_dim_v = rng.choice([1, 2]), 8, rng.choice([8, 4])
    head_dim, head_dim_v = head_dims or (head_dim, head_dim_v)
    is_packed = given(0.4)
    if is_packed:
        lengths = [rng.choice([0, 1, 5, 17, 40]) for _ in range(rng.randint(1, 5))]
        lengths[0] = max(lengths[0], 1)
        tokens: Any = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        total, longest, entries = tokens[-1], max(lengths), len(lengths)
    else:
        tokens = total = longest = rng.choice([1, 3, 16, 37, 64, 101])
        entries = batch
    lead = (total,) if is_packed else (batch, total)
    tensors = {
        "q": normal(*lead, heads, head_dim),
        "k": normal(*lead, kv_heads, head_dim),
        "v": normal(*lead, kv_heads, head_dim_v),
    }
    plan: dict[str, Any] = {
        "tokens": tokens,
        "num_heads_q": heads,
        "num_heads_kv": kv_heads,
        "engine": rng.choice(["heads", "keys", MESH, None]),
        "layout": rng.choice([None, None, *distributed.layouts.LAYOUTS]),
        "chunks": rng.choice([1, 2, 8, None]),
        "keep_gathered": given(0.3),
    }
    mask = rng.choice(masks)
    if mask == "causal":
        plan["causal"] = True
    if mask == "window":
        left = rng.choice([None, 0, 3, 20, -2])
        right = rng.choice([None, 0, 5, -1]) if left is None or left >= 0 else None
        plan["window"] = left, right

    def ranges() -> Tensor:
        shape = (rng.choice([1, heads]), total, 1)
        shape = shape if is_packed else (rng.choice([1, batch]), *shape)
        low = torch.randint(-3, longest + 3, shape, generator=generator)
        high = low + torch.randint(0, longest + 1, shape, generator=generator)
        return torch.cat([low, high], -1).to(INT32)

    options: dict[str, Any] = {}
    if given(0.3):
        options["softcap"] = 3.0
    if given(0.3):
        options["sinks"] = normal(heads)
    if given(0.25):
        options["seqused_k"] = torch.tensor([rng.randint(0, n) for n in _lengths(tokens, batch)], dtype=INT32)
    if given(0.25):
        options["seqstart_k"] = torch.tensor([rng.randint(0, n) for n in _lengths(tokens, batch)], dtype=INT32)
        if "seqused_k" in options:
            options["seqstart_k"] = torch.minimum(options["seqstart_k"], options["seqused_k"])
    if given(0.25):
        options["key_ranges"] = ranges()
    if given(0.25):
        shape = (heads,) if given(0.5) else (entries, heads)
        options["alibi_slopes"] = torch.rand(shape, generator=generator) * 0.3
    if given(0.25):
        sizes = [rng.choice([1, heads]), rng.choice([1, total]), rng.choice([1, longest])]
        sizes = sizes if is_packed else [rng.choice([1, batch]), *sizes]
        options["bias"] = normal(*sizes)
    if given(0.2):
        options["dropout_p"] = rng.choice([0.1, 0.5])
    if given(0.25):
        options["query_ranges"] = ranges()
    if short_ends:
        plan["chunks"] = 8
    return WholeCall(tensors, plan, options, short_ends)


def _lengths(tokens: Any, batch: int) -> list[int]:
    if isinstance(tokens, int):
        return [tokens] * batch
    return [b - a for a, b in pairwise(tokens)]


def loss_weights(call: WholeCall) -> tuple[Tensor, Tensor]:
    """Random gradients of out and lse."""
    q, v = call.tensors["q"], call.tensors["v"]
    generator = torch.Generator().manual_seed(9)
    dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator, dtype=torch.float64).to(q)
    rows = q.shape[:-1]
    lse_shape = (rows[1], rows[0]) if call.is_packed else (rows[0], rows[2], rows[1])
    return dout, torch.randn(*lse_shape, generator=generator, dtype=torch.float64).to(q.device, _lse_dtype(q))


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def leaves_of(call: WholeCall, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    terms = {name: call.options[name] for name in WITH_GRADIENT if name in call.options}
    return {name: t.detach().clone().requires_grad_() for name, t in (tensors | terms).items()}


def on_one_device(call: WholeCall) -> dict[str, Tensor]:
    """out, lse and gradients of the whole call. Dropout starts from the state of torch's generator."""
    leaves = leaves_of(call, call.tensors)
    mask = {name: call.plan[name] for name in ("causal", "window") if name in call.plan}
    options = call.options | {name: leaves[name] for name in WITH_GRADIENT if name in leaves} | mask
    tensors = [leaves[name] for name in "qkv"]
    if call.is_packed:
        offsets = torch.tensor(call.plan["tokens"], dtype=INT32, device=tensors[0].device)
        packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        result = onepass.attention_varlen(*tensors, **packed, **options, return_lse=True)
    else:
        result = onepass.attention(*tensors, **options, return_lse=True)
    dout, dlse = loss_weights(call)
    torch.autograd.backward(tuple(result), (dout, dlse))
    gradients = {f"d{name}": t.grad for name, t in leaves.items()}
    return {"out": result.out.detach(), "lse": result.lse.detach(), **gradients}


def on_ranks(call: WholeCall, group: Any = None) -> dict[str, Tensor]:
    """The results of `on_one_device`, computed by all ranks from their shards and brought together."""
    num_ranks = dist.get_world_size(group)
    in_rows = next((n for n in (2, 3) if n < num_ranks and num_ranks % n == 0), 1)
    arguments = call.plan | ({"engine": in_rows} if call.plan.get("engine") == MESH else {})
    plan = distributed.plan(group=group, **arguments)
    if call.has_short_ends:
        equal = plan.schedule.steps
        steps = with_short_ends(equal, plan.schedule.qhead_per_kvhead, 1, True)
        assert steps != equal or num_ranks == 1 or len(equal) < 4
        plan = replace(plan, schedule=replace(plan.schedule, steps=steps), _kept={})
    tokens_dim, lse_dim = (0, 1) if call.is_packed else (1, 2)
    leaves = leaves_of(call, {name: plan.shard(t, tokens_dim) for name, t in call.tensors.items()})
    options = call.options | {name: leaves[name] for name in WITH_GRADIENT if name in leaves}
    result = distributed.attention(*(leaves[name] for name in "qkv"), plan, **options, return_lse=True)
    dout, dlse = loss_weights(call)
    torch.autograd.backward(tuple(result), (plan.shard(dout, tokens_dim), plan.shard(dlse, lse_dim)))
    found = {"out": plan.unshard(result.out.detach(), tokens_dim), "lse": plan.unshard(result.lse.detach(), lse_dim)}
    for name, t in leaves.items():
        assert t.grad is not None, name
        found[f"d{name}"] = t.grad if name in WITH_GRADIENT else plan.unshard(t.grad, tokens_dim)
    return found


def check(rank: int, seeds: list[int], short_ends: bool = False, **plan: Any) -> None:
    """Random calls on this rank agree with one device. Args: plan: more arguments for their plans."""
    for seed in seeds:
        call = random_call(seed, short_ends=short_ends)
        call.plan.update(plan)
        torch.manual_seed(seed)
        expected = on_one_device(call)
        torch.manual_seed(seed if rank == 0 else 10_000 + rank)
        found = on_ranks(call)
        for name, right in expected.items():
            # slopes have gradients in float32
            tolerance = 1e-5 if name == "dalibi_slopes" else 1e-9
            where = f"seed {seed}, {name} of {call.text}"
            torch.testing.assert_close(found[name], right, rtol=tolerance, atol=tolerance, msg=where)


def check_odd_head_dims(rank: int, seeds: list[int]) -> None:
    """Calls with odd head dims, in whose messages float32 numbers begin at odd multiples of 2 bytes."""
    for seed in seeds:
        check_errors(seed, random_call(seed, torch.bfloat16, (7, 5)))


def check_errors(seed: int, call: WholeCall) -> None:
    """The errors of a random call in 16 bits are near those of one device."""
    for name, (found, alone, rounding) in errors(call, seed).items():
        # terms have few values, each a sum over rows of rounded parts, so one device's error may be small by chance
        chance = 4 * rounding if name[1:] in WITH_GRADIENT else 0.0
        assert found <= 1.5 * alone + 1e-3 + chance, (seed, name, found, alone, chance, call.text)


class Errors(NamedTuple):
    """Root mean square errors of a tensor. Attributes: rounding: the most that one rounding of its values makes."""

    found: float
    alone: float
    rounding: float


def errors(call: WholeCall, seed: int = 0) -> dict[str, Errors]:
    """Root mean square errors of out, lse and gradients against float64: over ranks, and on one device."""
    results = []
    for run, own in ((on_one_device, call.in_float64()), (on_one_device, call), (on_ranks, call)):
        torch.manual_seed(seed)
        results.append(run(own))
    right, alone, found = results

    def error(x: Tensor, exact: Tensor) -> float:
        hidden = exact == -torch.inf
        difference = (x.double() - exact).masked_fill(hidden, 0.0)
        assert torch.equal(x == -torch.inf, hidden)
        return float(difference.square().mean().sqrt())

    def rounding(name: str) -> float:
        unit = torch.finfo(found[name].dtype).eps / 2
        return unit * float(right[name].nan_to_num(neginf=0.0).square().mean().sqrt())

    return {
        name: Errors(error(found[name], exact), error(alone[name], exact), rounding(name))
        for name, exact in right.items()
    }

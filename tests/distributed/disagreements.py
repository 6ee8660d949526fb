"""What tests of ranks that disagree run on each rank, by name."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rank_checks import HEADS, message_of, qkv

from onepass import distributed
from onepass.distributed import agreement, checks, layouts


def shards(plan: Any, tokens: int) -> list[torch.Tensor]:
    return [plan.shard(t, 1) for t in qkv(tokens)]


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def new_group(seconds: float) -> Any:
    """A group of all ranks whose own timeout is short."""
    return dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=seconds))


# what rank 0 alone has, for each argument that ranks compare; None is for those that every rank has in its own way
PLAN_ARGUMENTS: dict[str, Any] = {
    "tokens": 62,
    "num_heads_q": 12,
    "num_heads_kv": 2,
    "head_dim": 64,
    "causal": True,
    "window": (16, 0),
    "layout": "cyclic",
    "engine": "heads",
    "chunks": 2,
    "training": False,
    "keep_gathered": True,
    "transport": "copies",
    "hardware": distributed.Hardware(bandwidth=1e9),
    **dict.fromkeys(("group", "num_ranks", "rank", "timeout")),
}
OPTIONS: dict[str, Any] = {
    "softcap": 5.0,
    "sinks": torch.zeros(8),
    "softmax_scale": 0.3,
    "seqused_k": int32(64),
    "seqstart_k": int32(0),
    "key_ranges": int32(0, 64).expand(1, 1, 64, 2),
    "query_ranges": int32(0, 64).expand(1, 1, 64, 2),
    "alibi_slopes": torch.zeros(8),
    "bias": torch.zeros(1, 1, 1, 64),
    "dropout_p": 0.1,
    "deterministic": True,
    "return_lse": None,
    "precision": "fp8",
    "backend": "tiled",
}


def plans_that_differ(rank: int) -> dict[str, str]:
    """What ranks hear where rank 0 alone has an argument of `plan`, for each argument."""
    found = {}
    for name, value in PLAN_ARGUMENTS.items():
        if value is not None:
            arguments = {"tokens": 64, **HEADS} | ({name: value} if rank == 0 else {})
            found[name] = message_of(lambda arguments=arguments: distributed.plan(**arguments))
    return found


def calls_that_differ(rank: int) -> dict[str, str]:
    """What ranks hear where rank 0 alone has an option of `attention`, or other tensors."""
    plan = distributed.plan(64, causal=True, **HEADS)
    tensors = [t.bfloat16() for t in shards(plan, 64)]
    q, k, v = tensors
    sinks = torch.zeros(8)
    others = {
        "batch": ([t.expand(2, -1, -1, -1) for t in tensors], {}, {}),
        "dtype": ([t.half() for t in tensors], {}, {}),
        "head_dim": ([t.repeat(1, 1, 1, 2) for t in (q, k)] + [v], {}, {}),
        "head_dim_v": ([q, k, v[..., :8]], {}, {}),
        "recorded gradients of q, k, v": ([q, k, v.clone().requires_grad_()], {}, {}),
        "sinks": (tensors, {"sinks": sinks.clone().requires_grad_()}, {"sinks": sinks}),
        "alibi_slopes": (tensors, {"alibi_slopes": torch.zeros(1, 8)}, {"alibi_slopes": sinks}),
        "bias": (tensors, {"bias": torch.zeros(1, 1, 64, 64)}, {"bias": torch.zeros(1, 1, 64, 64).bfloat16()}),
    }
    cases = {name: (tensors, {name: value}, {}) for name, value in OPTIONS.items() if value is not None}
    found = {}
    for name, (own, options, usual) in [*cases.items(), *((f"{name} ", case) for name, case in others.items())]:
        given, options = (own, options) if rank == 0 else (tensors, usual)
        found[name] = message_of(lambda given=given, options=options: distributed.attention(*given, plan, **options))
    assert distributed.attention(*tensors, plan).isfinite().all()  # the plan still works
    return found


def a_rank_that_does_not_come(rank: int) -> list[str]:
    """Rank 1 comes too late for the first call, and in time for the second."""
    plan = distributed.plan(64, causal=True, timeout=1.0, **HEADS)
    tensors = shards(plan, 64)
    if rank == 1:
        dist.barrier()
    messages = [message_of(lambda: distributed.attention(*tensors, plan))]
    if rank == 0:
        dist.barrier()
    messages.append(message_of(lambda: distributed.attention(*tensors, plan)))
    return messages


def a_rank_that_goes_on(rank: int) -> list[str]:
    """Rank 1 makes a call that is new to it, while rank 0 makes one that it has made before."""
    group = new_group(2.5)
    plan = distributed.plan(64, group, causal=True, timeout=0.7, **HEADS)
    tensors = shards(plan, 64)
    distributed.attention(*tensors, plan, softcap=5.0)
    messages = [message_of(lambda: distributed.attention(*tensors, plan, softcap=5.0 + rank))]
    dist.barrier()
    messages.append(message_of(lambda: distributed.plan(32, group, **HEADS)))
    return messages


def a_plan_that_one_rank_refuses(rank: int) -> tuple[list[str], float]:
    start = time.monotonic()
    messages = [message_of(lambda: distributed.plan(64, num_heads_q=8, num_heads_kv=4 if rank == 0 else 3))]
    messages.append(message_of(lambda: distributed.plan(64, **HEADS)))
    return messages, time.monotonic() - start


def timeouts_that_differ(rank: int) -> None:
    first = distributed.plan(64, timeout=20.0 + rank, **HEADS)
    second = distributed.plan(32, timeout=30.0, **HEADS)
    assert first.control is second.control
    assert isinstance(first.control, agreement.Control)


def ranks_in_another_order(rank: int) -> tuple[int, str]:
    group = dist.new_group([1, 0], sort_ranks=False)
    own = dist.get_rank(group)
    return own, message_of(lambda: distributed.plan(60 + own, group, **HEADS))


def repeated_calls(rank: int) -> None:
    """Calls that alternate, and plans that are new in each step, write and read nothing once they have been made."""
    plans = [distributed.plan(64, causal=causal, **HEADS) for causal in (True, False)]
    tensors = shards(plans[0], 64)

    def step() -> None:
        for plan in (plans[0], plans[1], plans[1], plans[0]):
            distributed.attention(*tensors, plan, softcap=2.0)

    step()
    step()
    with patch.object(agreement.Control, "_store", lambda self: 1 / 0):
        step()
        step()


def rounds_of_new_plans(rank: int) -> tuple[int, int]:
    """Rounds, and keys in the store, that five batches of packed sequences take, each with a plan of its own."""
    tensors = [t[0] for t in qkv(64)]
    control = agreement.Control.of(dist.group.WORLD)
    for i in range(5):
        plan = distributed.plan([0, 10 + i, 64], causal=True, **HEADS)
        distributed.attention(*(plan.shard(t, 0) for t in tensors), plan)
    dist.barrier()
    store = control._store()
    names = ("0", "1", "0/call", "1/call", "end")
    keys = [f"{control._prefix}/{number}/{name}" for number in range(control._round) for name in names]
    return control._round, sum(store.check([key]) for key in keys)


def plans_that_come_out_differently(rank: int) -> list[str]:
    """What ranks hear where arguments change the choice alone, and where a rank deals tokens in another way."""
    messages = [message_of(lambda: distributed.plan(64, causal=True, head_dim=64 * (1 + rank), **HEADS))]
    layouts.SLACK += 0.5 * rank
    messages.append(message_of(lambda: distributed.plan([0, 20, 64], layout="balanced", **HEADS)))
    return messages


def arguments_that_one_rank_refuses(rank: int) -> tuple[list[str], float]:
    """Calls whose arguments rank 1 refuses, and calls after them."""
    plan = distributed.plan(64, causal=True, **HEADS)
    q, k, v = shards(plan, 64)
    start = time.monotonic()
    own = q[:, :3] if rank == 1 else q
    messages = [message_of(lambda: distributed.attention(own, k, v, plan))]
    messages.append(message_of(lambda: distributed.attention(q, k, v, plan)))
    sinks = torch.zeros(8 - rank)
    messages.append(message_of(lambda: decoded(plan, sinks=sinks)))
    messages.append(message_of(lambda: decoded(plan)))
    return messages, time.monotonic() - start


# pairs: beginnings of the error, and a term of a call over 64 tokens
BAD_VALUES: list[tuple[str, dict[str, Any]]] = [
    ("seqused_k[0]: expected 0 to 64, the keys of the sequence, got 65", {"seqused_k": int32(65)}),
    ("seqused_k[0]: expected 0 to 64, the keys of the sequence, got -1", {"seqused_k": int32(-1)}),
    ("seqstart_k[0]: expected 0 to 64, the keys of the sequence, got 99", {"seqstart_k": int32(99)}),
    ("seqstart_k[0]: expected 0 to 64, the keys of the sequence, got -3", {"seqstart_k": int32(-3)}),
    (
        "seqstart_k[0]: expected 0 to 20, the keys of the sequence, got 21",
        {"seqused_k": int32(20), "seqstart_k": int32(21)},
    ),
]
# pairs of the same kind, for packed sequences of 20 and 44 tokens
BAD_PACKED_VALUES: list[tuple[str, dict[str, Any]]] = [
    ("seqused_k[0]: expected 0 to 20, the keys of the sequence, got 21", {"seqused_k": int32(21, 44)}),
    ("seqused_k[1]: expected 0 to 44, the keys of the sequence, got -1", {"seqused_k": int32(20, -1)}),
    ("seqstart_k[1]: expected 0 to 44, the keys of the sequence, got 45", {"seqstart_k": int32(0, 45)}),
    ("bias: expected at least 44 columns, the keys of the longest sequence", {"bias": torch.zeros(1, 1, 43)}),
]


def values_that_one_device_refuses(rank: int) -> list[str]:
    """Lengths and starts outside their sequences, given on all ranks, and on rank 1 alone."""
    q, k, v = qkv(64)
    dense, packed = distributed.plan(64, causal=True, **HEADS), distributed.plan([0, 20, 64], causal=True, **HEADS)
    messages = []
    for plan, dim, tensors, cases in (
        (dense, 1, (q, k, v), BAD_VALUES),
        (packed, 0, (q[0], k[0], v[0]), BAD_PACKED_VALUES),
    ):
        own = [plan.shard(t, dim) for t in tensors]
        for _, terms in cases:
            messages.append(
                message_of(lambda own=own, plan=plan, terms=terms: distributed.attention(*own, plan, **terms))
            )
    own = [dense.shard(t, 1) for t in (q, k, v)]
    messages.append(message_of(lambda: distributed.attention(*own, dense, seqused_k=int32(64 + rank))))
    return messages


def lengths_that_are_not_read(rank: int) -> None:
    """On a GPU, where no value is read, a length beyond a sequence counts as the sequence's, as on one device."""
    with patch.object(checks, "read_values", lambda problem, inputs: None):
        for tokens, right, beyond in ((64, int32(64), int32(99)), ([0, 20, 64], int32(20, 44), int32(99, 44))):
            plan = distributed.plan(tokens, causal=True, engine="keys", **HEADS)
            own = shards(plan, 64) if tokens == 64 else [plan.shard(t[0], 0) for t in qkv(64)]
            outs = [distributed.attention(*own, plan, seqused_k=used) for used in (right, beyond)]
            assert torch.equal(*outs)


def decoded(plan: Any, **options: Any) -> torch.Tensor:
    """A step of decoding with 30 tokens in a cache of 64."""
    q, k, v = qkv(64)
    caches = options.pop("caches", None) or [plan.shard(t, 1).contiguous() for t in (k, v)]
    options = {"q": q[:, :1], "cache_seqlens": int32(30)} | options
    return distributed.decode(options.pop("q"), *caches, plan, **options)


TABLES = dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(64, 4))
# options of rank 0, and what all ranks have beside them
DECODE_TERMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alibi_slopes": ({"alibi_slopes": torch.full((8,), 0.5)}, {}),
    "bias": ({"bias": torch.arange(64.0).expand(1, 1, 1, 64)}, {}),
    "seqstart_k": ({"seqstart_k": int32(5)}, {}),
    "key_ranges": ({"key_ranges": int32(3, 20).view(1, 1, 1, 2)}, {}),
    "query_ranges": ({"query_ranges": int32(3, 20).expand(1, 1, 64, 2)}, {}),
    "q_positions": ({"q_positions": int32(7).view(1, 1)}, {}),
    "sinks": ({"sinks": torch.zeros(8)}, {}),
    "softcap": ({"softcap": 3.0}, {}),
    "rotary_cos": (TABLES, {}),
    "rotary_positions_q": ({"rotary_positions_q": int32(7).view(1, 1)}, TABLES),
    "rotary_positions_k": (
        {"rotary_positions_k": int32(7).view(1, 1)},
        TABLES | dict.fromkeys(("k_new", "v_new"), torch.ones(1, 1, 4, 16)),
    ),
    "rotary_interleaved": ({"rotary_interleaved": True}, TABLES),
    "q": ({"q": torch.zeros(1, 2, 8, 16)}, {}),
    "k_new": (dict.fromkeys(("k_new", "v_new"), torch.ones(1, 1, 4, 16)), {}),
    "causal": ({"causal": False}, {}),
    "window": ({"window": (3, 0)}, {}),
    "softmax_scale": ({"softmax_scale": 0.3}, {}),
}
# arguments that ranks need not have in common, and those that other tests compare
OWN_TERMS = {"k_cache", "v_cache", "plan", "cache_seqlens", "page_table", "max_seqlen_q", "num_splits", "split_size"}
OWN_TERMS |= {
    "v_new",
    "cu_seqlens_q",
    "check_values",
    "return_lse",
    "backend",
    "rotary_sin",
    "k_descale",
    "v_descale",
    "kv_block",
}


def terms_of_decode(rank: int) -> dict[str, str]:
    """What ranks hear where rank 0 alone has a term, for each term."""
    plan = distributed.plan(64, **HEADS)
    found = {}
    for name, (own, common) in DECODE_TERMS.items():
        options = common | own if rank == 0 else common
        found[name] = message_of(lambda options=options: decoded(plan, **options))
    return found


def descales_of_decode(rank: int) -> list[str]:
    """What ranks hear where one of them has descales, or blocks of keys. Blocks belong to a rank's own rows."""
    plan = distributed.plan(64, layout="cyclic", **HEADS)  # rank 0 has all 64 tokens
    caches = [plan.shard(t, 1).to(torch.float8_e4m3fn) for t in qkv(64)[1:]]

    def both(*shape: int) -> dict[str, Any]:
        return dict.fromkeys(("k_descale", "v_descale"), torch.ones(*shape))

    blocks = both(1, 4, caches[0].shape[1] // 8) | {"kv_block": 8}
    calls = [both(1, 4) if rank == 0 else {}, blocks if rank == 0 else both(1, 4), blocks]
    return [message_of(lambda call=call: decoded(plan, caches=caches, **call)) for call in calls]


NEW = torch.ones(1, 34, 4, 16)
PACKED = {"q": torch.zeros(3, 8, 16), "cu_seqlens_q": int32(0, 3)}
PAGES = [[*range(8)], [*range(7), 9]]  # pages of 4 rows; one of rank 1 does not exist
# pairs: the argument that the error names, and the options of the call
REFUSED_STEPS: list[tuple[str, dict[str, Any]]] = [
    ("sinks", {"sinks": torch.zeros(3)}),
    ("alibi_slopes", {"alibi_slopes": torch.zeros(1)}),
    ("bias", {"bias": torch.zeros(1, 1, 1, 32)}),
    ("seqstart_k", {"seqstart_k": int32(1, 2)}),
    ("key_ranges", {"key_ranges": int32(1, 2)}),
    ("query_ranges", {"query_ranges": int32(1, 2)}),
    ("q_positions", {"q_positions": int32(1, 2).view(1, 2)}),
    ("rotary_sin", {"rotary_cos": torch.ones(64, 4)}),
    ("rotary_cos", {name: torch.ones(64, 9) for name in TABLES}),
    ("rotary_positions_q", {"rotary_positions_q": int32(1).view(1, 1)}),
    ("rotary_interleaved", TABLES | {"rotary_interleaved": 1}),
    ("k_new", PACKED),
    ("rotary_cos", PACKED | TABLES | {"k_new": None, "v_new": None}),
    ("cu_seqlens_q", PACKED | {"cu_seqlens_q": torch.zeros(2), "k_new": None, "v_new": None}),
    ("q", {"q": torch.zeros(1, 1, 6, 16)}),
    ("max_seqlen_q", {"max_seqlen_q": 3}),
    ("kv_block", {"kv_block": 8}),
    ("split_size", {"split_size": 100}),
    ("check_values", {"check_values": 1}),
    ("backend sm90", {"backend": "sm90"}),
    ("k_new", {"k_new": NEW[:, :, :1]}),
    ("v_new", {"v_new": NEW[..., :1]}),
    ("k_new", {"k_new": torch.ones(1, 65, 4, 16), "v_new": torch.ones(1, 65, 4, 16)}),
    # values, which are read on a CPU
    ("cache_seqlens", {"cache_seqlens": int32(31)}),
    ("seqstart_k[0]", {"seqstart_k": int32(65)}),
    ("rotary_cos", {name: t[:63] for name, t in TABLES.items()}),
]


def refused_steps_write_nothing(rank: int) -> list[str]:
    """Steps that are refused, or differ between ranks, leave caches as they were."""
    plan = distributed.plan(64, **HEADS)
    caches = [plan.shard(t, 1).contiguous() for t in qkv(64)[1:]]
    before = [t.clone() for t in caches]
    pages = {"caches": [t.view(8, 4, 4, 16) for t in caches], "page_table": torch.tensor(PAGES[rank : rank + 1]).int()}
    messages = []
    twice = pages | {"page_table": torch.tensor([[*range(7), 0]]).int()}
    overlapping = {"k_new": caches[0][:, :2], "v_new": NEW[:, :2]}
    more = [{"softcap": 2.0 + rank}, pages, twice, overlapping]
    for options in [options for _, options in REFUSED_STEPS] + more:
        given = {"k_new": NEW, "v_new": NEW, "caches": caches} | options
        messages.append(message_of(lambda given=given: decoded(plan, **given)))
    assert all(torch.equal(t, old) for t, old in zip(caches, before, strict=True))
    decoded(plan, caches=caches, k_new=NEW, v_new=NEW)
    assert not torch.equal(caches[0], before[0])
    return messages


def grad_mode_that_differs(rank: int) -> str:
    plan = distributed.plan(64, causal=True, **HEADS)
    tensors = [t.requires_grad_() for t in shards(plan, 64)]
    with torch.set_grad_enabled(rank == 1):
        return message_of(lambda: distributed.attention(*tensors, plan))


def a_device_without_a_backend(rank: int) -> list[str]:
    plan = distributed.plan(64, dist.new_group([0, 1], backend="cuda:gloo"), **HEADS)
    tensors = shards(plan, 64)
    return [message_of(lambda: distributed.attention(*tensors, plan)), message_of(lambda: decoded(plan))]


def tensors_to_unshard(rank: int) -> list[str]:
    plan = distributed.plan(64, **HEADS)
    dtype = (torch.float32, torch.int32)[rank]
    tensors = torch.zeros(1, 32, 2 + rank), torch.zeros(1, 32, 2, dtype=dtype)
    return [message_of(lambda t=t: plan.unshard(t, 1)) for t in tensors]


def ranks_that_are_gone(rank: int) -> list[str]:
    """What rank 0 hears where rank 1 has ended, from each function that waits for all ranks."""
    plan = distributed.plan(64, causal=True, **HEADS)
    tensors = [t.requires_grad_() for t in shards(plan, 64)]
    sinks = torch.zeros(8, requires_grad=True)
    outs = [distributed.attention(*tensors, plan, sinks=sinks) for _ in range(2)]
    outs[0].sum().backward()
    distributed.attention(*tensors, plan, dropout_p=0.1)
    whole = plan.unshard(tensors[0], 1)
    plan.unshard(tensors[0].detach(), 1)
    decoded(plan)
    if rank == 1:
        return []
    time.sleep(0.5)
    calls = [
        lambda: distributed.attention(*tensors, plan, dropout_p=0.1),
        lambda: plan.unshard(tensors[0].detach(), 1),
        lambda: decoded(plan),
        lambda: whole.sum().backward(),
        lambda: outs[1].sum().backward(),
    ]
    return [message_of(call) for call in calls]


def a_sum_that_is_gone(rank: int) -> str:
    """Rank 1 has ended before the gradients of sinks are summed; in this plan no other message travels before that."""
    plan = distributed.plan(64, window=(0, 0), engine="keys", **HEADS)
    tensors = [t.requires_grad_() for t in shards(plan, 64)]
    out = distributed.attention(*tensors, plan, sinks=torch.zeros(8, requires_grad=True))
    dist.barrier()
    if rank == 1:
        return ""
    time.sleep(0.5)
    return message_of(lambda: out.sum().backward())


def an_operation_that_fails(rank: int) -> str:
    """What ranks hear of an error of torch.distributed that no rank has caused."""
    plan = distributed.plan(64, causal=True, **HEADS)
    tensors = shards(plan, 64)
    # no tensor has such a size
    with patch.object(dist, "all_to_all_single", lambda received, *args, **options: received.view(-1, 7)):
        return message_of(lambda: distributed.attention(*tensors, plan))


def plans_that_differ_in_a_call(rank: int) -> str:
    """Rank 1 calls with the plan before the last one. No call has been made with either plan before."""
    group = new_group(2.5)

    def planned(tokens: int) -> Any:
        return distributed.plan(tokens, group, causal=True, timeout=0.7, **HEADS)

    def call(plan: Any, tokens: int) -> str:
        tensors = shards(plan, tokens)
        return message_of(lambda: distributed.attention(*tensors, plan))

    assert call(planned(64), 64) == "nothing was raised"
    first, second = planned(66), planned(68)
    return call(second, 68) if rank == 0 else call(first, 66)


def old_calls_are_forgotten(rank: int) -> tuple[int, int]:
    """The number of calls that are kept, and the number of rounds that two calls take again after many others."""
    plan = distributed.plan(64, **HEADS)
    tensors = shards(plan, 64)
    agreement.MOST_AGREED = 4
    for softcap in (1.0, 2.0, 3.0, 4.0):
        distributed.attention(*tensors, plan, softcap=softcap)
    assert plan.control is not None
    rounds = plan.control._round
    for softcap in (4.0, 1.0):
        distributed.attention(*tensors, plan, softcap=softcap)
    return len(plan.control._agreed), plan.control._round - rounds

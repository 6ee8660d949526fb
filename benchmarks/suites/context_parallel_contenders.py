"""The contenders of the suite `context_parallel`: onepass, torch, ring-flash-attn and yunchang."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import onepass
from onepass import distributed
from onepass.distributed.attention import Call, out_rows, rows_first
from onepass.distributed.cost import Hardware, estimate
from onepass.distributed.local import LocalCalls, Options, OutRows, TermGradients, Terms
from onepass.distributed.plan import ContextPlan
from onepass.distributed.shipments import Coming, send_keys, send_queries

from .context_parallel_cases import ContextCase

Work = Callable[[], Any]
NO_DOCUMENTS = "expected one sequence, got documents"
NO_WINDOW = "expected no window, got one"


@dataclass(frozen=True)
class Contender:
    """A way to compute attention over ranks.

    Attributes:
        attend: out from this rank's q, k and v.
        shard: this rank's tokens, in the layout that `attend` takes, of a tensor (1, tokens, heads, head_dim).
        surroundings: a context in which calls are made; entering it is not timed.
        received_bytes: the bytes that the rank that receives most receives in the forward and in the backward.
        is_captured: whether a CUDA graph of a call is timed, which takes nothing of the host's time.
    """

    name: str
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    shard: Callable[[Tensor], Tensor]
    surroundings: Callable[[], AbstractContextManager] = nullcontext
    received_bytes: tuple[int, int] | None = None
    plan: ContextPlan | None = None
    is_captured: bool = False


def one_device(case: ContextCase) -> Contender:
    """Ordinary attention over all tokens."""
    if case.kind != "packed":
        options = case.mask_options
        return Contender("one device", lambda q, k, v: onepass.attention(q, k, v, **options), lambda t: t)
    kept: dict[torch.device, Tensor] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.device not in kept:
            kept[q.device] = torch.tensor(case.offsets, dtype=torch.int32, device=q.device)
        longest = max(b - a for a, b in zip(case.offsets, case.offsets[1:], strict=False))
        lengths: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), kept[q.device])
        lengths |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), longest)
        return onepass.attention_varlen(q, k, v, **case.mask_options, **lengths)

    return Contender("one device", attend, lambda t: t[0])


# ---------------------------------------------------------------- onepass


def onepass_contenders(case: ContextCase, device: torch.device) -> tuple[list[Contender], str]:
    """Each engine, and the name of the planned one."""

    def make(engine: Any, transport: Any = "messages") -> ContextPlan:
        return distributed.plan(
            case.offsets if case.kind == "packed" else case.tokens,
            num_heads_q=case.heads_q,
            num_heads_kv=case.heads_kv,
            head_dim=case.head_dim,
            engine=engine,
            transport=transport,
            training=case.has_backward,
            **case.mask_options,
        )

    planned = make(None)
    plans = {f"onepass {engine}": make(engine) for engine in ("heads", "keys")}
    if device.type == "cuda":
        plans |= {f"onepass {engine}, copies": make(engine, "copies") for engine in ("heads", "keys")}
    name = f"onepass {planned.engine}"
    plans.setdefault(name, planned)
    return [_onepass(name, plan) for name, plan in plans.items()], name


def _onepass(name: str, plan: ContextPlan) -> Contender:
    costs = estimate(plan.schedule, plan.head_dim, Hardware())

    def shard(t: Tensor) -> Tensor:
        return plan.shard(t[0], 0).contiguous() if plan.is_packed else plan.shard(t, 1).contiguous()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = distributed.attention(q, k, v, plan)
        assert isinstance(out, Tensor)
        return out

    received = max(costs.forward_bytes), max(costs.backward_bytes)
    return Contender(name, attend, shard, received_bytes=received, plan=plan)


class LocalWork:
    """This rank's own attention calls, on rows that have already arrived. Calling it sends nothing.

    Args:
        tensors: this rank's q, k, v and dout. Every rank of the plan's group makes a LocalWork, because rows travel.
    """

    def __init__(self, plan: ContextPlan, has_backward: bool, tensors: Sequence[Tensor]):
        self.has_backward = has_backward
        options, terms = Options(tensors[0].shape[-1] ** -0.5), Terms()
        with torch.no_grad():
            found = distributed.attention(*tensors[:3], plan, return_lse=True)
            assert not isinstance(found, Tensor)
            lse = found.lse.t()[:, None] if plan.is_packed else found.lse.permute(2, 0, 1)
            of_out = out_rows(Call(plan, options, terms), found.out, tensors[3], lse, None)
            q, k, v = (rows_first(t, plan) for t in tensors[:3])
        self.steps = []
        for step in plan.schedule.steps:
            sent = [
                send_queries(plan, step, q),
                *(send_keys(plan, step, t) for t in (k, v)),
            ]
            if has_backward:
                sent += [send_queries(plan, step, t) for t in of_out.values()]
            buffers = Coming(plan, sent).wait()
            if buffers[0].shape[2]:
                rows = OutRows.of(dict(zip(of_out, buffers[3:], strict=True))) if has_backward else None
                self.steps.append((LocalCalls(plan, step, options, terms), buffers[:3], rows))

    def __call__(self) -> None:
        for calls, tensors, _ in self.steps:
            calls.forward(*tensors)
        for calls, tensors, rows in self.steps:
            if rows is not None:
                q, k, v = tensors
                calls.backward(q, k, v, rows, TermGradients(None, None, None))


# ---------------------------------------------------------------- peers


def peers(case: ContextCase, device: torch.device, wanted: int) -> tuple[dict[str, str], list[Contender]]:
    """By name, why peers do not take a case; and the peers that do."""
    skipped: dict[str, str] = {}
    found: list[Contender] = []
    for name, make in _PEERS.items() if wanted else ():
        try:
            found.append(make(name, case, device))
        except _Refused as error:
            skipped[name] = str(error)
        except Exception as error:
            skipped[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return skipped, found


class _Refused(Exception):
    """A peer does not take a case."""


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise _Refused(reason)


def head_tail(t: Tensor) -> Tensor:
    """This rank's tokens: rank r owns pieces r and 2 P - 1 - r of 2 P pieces."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pieces = t.chunk(2 * size, 1)
    return torch.cat((pieces[rank], pieces[2 * size - 1 - rank]), 1)


def contiguous(t: Tensor) -> Tensor:
    return t.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


def _torch(name: str, case: ContextCase, device: torch.device) -> Contender:
    """torch's context_parallel, for example "torch cudnn allgather"."""
    _, backend_name, rotation = name.split()
    _require(device.type == "cuda", "expected CUDA, got a CPU")
    _require(case.kind != "packed", NO_DOCUMENTS)
    _require(case.kind != "window", NO_WINDOW)
    _require(case.kind == "causal", "expected a causal mask, which its load balancer needs, got a full one")
    _require(case.heads_q == case.heads_kv, "expected as many kv heads as query heads, got fewer")
    _require(case.tokens % (2 * dist.get_world_size()) == 0, "expected tokens that are a multiple of 2 P")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[backend_name]
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))

    @contextlib.contextmanager
    def surroundings() -> Iterator[None]:
        set_rotate_method(rotation)
        # the balancer is chosen by a buffer of all tokens; q, k and v are in its layout already
        tokens = torch.zeros(1, case.tokens, device=device)
        with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]), sdpa_kernel(backend):
            yield

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Contender(name, attend, lambda t: head_tail(t).transpose(1, 2).contiguous(), surroundings)


def _over_onepass(package: str) -> None:
    """Let a package find the functions of flash-attn in onepass, so that engines are compared over equal kernels."""
    _require(importlib.util.find_spec(package) is not None, f"{package} is not installed")
    from onepass import compat

    compat.install()


def _ring(name: str, case: ContextCase, device: torch.device) -> Contender:
    """ring-flash-attn: "zigzag" for a causal mask, "ring" for a full one, "llama3" (gathered keys) for documents."""
    kind = name.split()[1]
    _require(case.kind != "window", NO_WINDOW)
    takes = {"zigzag": "causal", "ring": "full", "llama3": "packed"}[kind]
    _require(case.kind == takes, f"measured in cases with mask {takes!r} alone")
    size = dist.get_world_size()
    _require(case.tokens % (2 * size) == 0, "expected tokens that are a multiple of 2 P")
    _over_onepass("ring_flash_attn")
    adapters: Any = types.ModuleType("ring_flash_attn.adapters")  # its own does not import with transformers 5
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules.setdefault("ring_flash_attn.adapters", adapters)
    import ring_flash_attn as ring

    if kind != "llama3":
        function = ring.zigzag_ring_flash_attn_func if kind == "zigzag" else ring.ring_flash_attn_func
        causal = kind == "zigzag"
        return Contender(name, lambda q, k, v: function(q, k, v, causal=causal), head_tail if causal else contiguous)
    offsets = torch.tensor(case.offsets, dtype=torch.int32, device=device)
    *lengths, keys = ring.llama3_flash_attn_prepare_cu_seqlens(offsets, True, dist.get_rank(), size)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring.llama3_flash_attn_varlen_func(q, k, v, *lengths, heads_k_stride=1, local_k_slice=keys, causal=True)

    return Contender(name, attend, lambda t: contiguous(t)[0])


def _yunchang(name: str, case: ContextCase, device: torch.device) -> Contender:
    """yunchang's all-to-all over heads."""
    size = dist.get_world_size()
    _require(case.kind != "packed", NO_DOCUMENTS)
    _require(case.heads_kv % size == 0, f"expected kv heads that are a multiple of {size}, got {case.heads_kv}")
    _require(case.tokens % size == 0, f"expected tokens that are a multiple of {size}, got {case.tokens}")
    _over_onepass("yunchang")
    import yunchang
    from yunchang.kernels import AttnType

    attention = yunchang.UlyssesAttention(dist.group.WORLD, attn_type=AttnType.FA)
    options: dict[str, Any] = {"causal": case.kind != "full"}
    if case.kind == "window":
        options["window_size"] = case.mask_options["window"]
    return Contender(name, lambda q, k, v: attention(q, k, v, **options), contiguous)


_PEERS: dict[str, Callable[[str, ContextCase, torch.device], Contender]] = {
    **{f"torch {kernel} {way}": _torch for kernel in ("flash", "cudnn") for way in ("allgather", "alltoall")},
    **{f"ring-flash-attn {kind}": _ring for kind in ("zigzag", "ring", "llama3")},
    "yunchang": _yunchang,
}

"""Checks of a call of `onepass.distributed.attention`, before any message is sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..problem import AttentionProblem
from ..problem.lengths import read_values
from ..validation.attention import check_attention
from .agreement import needs_gradient, signature
from .exchange import to_device
from .local import Options, Terms
from .plan import ContextPlan


def check_call(
    plan: ContextPlan, tensors: tuple[Any, Any, Any], terms: Terms, *, backend: Any, precision: Any, **options: Any
) -> Options:
    """The options of a call, which is checked as on one device, and then compared with the calls of other ranks."""
    if not isinstance(plan, ContextPlan):
        raise TypeError(f"plan: expected a ContextPlan, as onepass.distributed.plan makes it, got {plan!r}")
    with plan.reporting("attention"):
        problem = _checked_problem(plan, tensors, terms, precision=precision, **options)
    if plan.num_ranks > 1:
        values: dict[str, Any] = {name: signature(t) for name, t in terms._asdict().items()}
        q, k, v = tensors
        values |= {"batch": None if plan.is_packed else q.shape[0], "dtype": str(q.dtype), "head_dim": q.shape[-1]}
        values |= {"head_dim_v": v.shape[-1], "device": q.device.type}
        values |= {"recorded gradients of q, k, v": tuple(needs_gradient(t) for t in (q, k, v))}
        values |= {"softcap": problem.softcap, "softmax_scale": problem.softmax_scale, "dropout_p": problem.dropout_p}
        values |= {"deterministic": problem.deterministic, "precision": precision, "backend": backend}
        plan.agree("attention", values)
    return Options(
        softmax_scale=problem.softmax_scale,
        softcap=problem.softcap,
        deterministic=problem.deterministic,
        dropout_p=problem.dropout_p,
        precision=precision,
        backend=backend,
    )


def _checked_problem(
    plan: ContextPlan, tensors: tuple[Any, Any, Any], terms: Terms, **options: Any
) -> AttentionProblem:
    if plan.group is None and plan.num_ranks > 1:
        raise ValueError("plan: expected one that was made for a process group, got one that only describes")
    whole = _whole_tensors(plan, tensors)
    check_device(plan, tensors[0])
    mask = plan.schedule.mask
    arguments = {name: t for name, t in terms._asdict().items() if name != "dropout_state"} | options
    arguments |= {"window": (mask.window_left, mask.window_right)}
    if plan.is_packed:
        given_offsets = plan.on_device("cu_seqlens", tensors[0].device, lambda: offsets(plan, tensors[0].device))
        arguments |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), given_offsets)
    inputs, problem = check_attention(*whole, **arguments)
    if problem.device_type == "cpu":
        # the values that a backend on the host reads, for all tokens: local calls have lengths of their own
        read_values(problem, inputs)
    return problem


def check_device(plan: ContextPlan, q: Tensor) -> None:
    """Raise ValueError if the plan's process group sends no tensors of this device."""
    if plan.control is not None and q.device.type not in plan.control.backends:
        devices = ", ".join(f"{device} ({backend})" for device, backend in plan.control.backends.items())
        raise ValueError(f"q: expected a device for which the process group has a backend, {devices}, got {q.device}")


def _whole_tensors(plan: ContextPlan, tensors: tuple[Any, Any, Any]) -> list[Tensor]:
    """Tensors with all tokens, for checks of the whole call; each of them has one element in memory."""
    schedule, rows = plan.schedule, plan.num_local_tokens
    found = []
    for name, t, heads in zip(
        "qkv", tensors, (schedule.num_heads_q, schedule.num_heads_kv, schedule.num_heads_kv), strict=True
    ):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")
        shape = (rows, heads) if plan.is_packed else (*t.shape[:1], rows, heads)
        if t.dim() != len(shape) + 1 or tuple(t.shape[:-1]) != shape:
            expected = ", ".join(str(n) for n in (shape if plan.is_packed else ("batch", rows, heads)))
            raise ValueError(
                f"{name}: expected ({expected}, head_dim), with the {rows} tokens that rank {plan.rank} owns and the "
                f"plan's heads, got {tuple(t.shape)}"
            )
        whole = (plan.num_tokens, *t.shape[1:]) if plan.is_packed else (t.shape[0], plan.num_tokens, *t.shape[2:])
        found.append(t.detach().new_empty(1).expand(whole))
    return found


def offsets(plan: ContextPlan, device: torch.device) -> Tensor:
    """(sequences + 1,) int32: cu_seqlens of all tokens."""
    return to_device(torch.tensor(plan.schedule.cu_seqlens, dtype=torch.int32), device)

"""The contenders that are measured: onepass and its peers, found by import, behind one call form."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import onepass

from .cases import Case, Inputs

# (q, k, v, case) -> out; differentiable where the contender has a backward
Attend = Callable[[Tensor, Tensor, Tensor, Case], Tensor]


def _refuses_nothing(case: Case) -> str | None:
    return None


def _unchanged(case: Case) -> Case:
    return case


@dataclass(frozen=True)
class Contender:
    """One implementation.

    Attributes:
        refusal: says why the contender does not compute a case; None if it does.
        heads_first: whether the contender wants contiguous tensors (batch, heads, seqlen, head_dim) instead of (batch,
            seqlen, heads, head_dim). Each contender gets its own layout, which is prepared outside the timing.
        adapt: changes the case before it is run, which makes "onepass without the window" a contender.
    """

    name: str
    attend: Attend
    refusal: Callable[[Case], str | None] = _refuses_nothing
    heads_first: bool = False
    adapt: Callable[[Case], Case] = _unchanged


class Prepared(NamedTuple):
    """A contender with its inputs in place: `run` is timed, `results` gives what it computes.

    `results` maps "out", or "dq", "dk" and "dv", to tensors (batch, seqlen, heads, head_dim).
    """

    run: Callable[[], Any]
    results: Callable[[], dict[str, Tensor]]


def prepare(contender: Contender, case: Case, inputs: Inputs) -> Prepared:
    """Do everything up to the timed pass: layouts and, for a backward, the forward pass before it."""
    case = contender.adapt(case)

    def layout(t: Tensor) -> Tensor:
        return t.transpose(1, 2).contiguous() if contender.heads_first else t

    def heads_last(t: Tensor) -> Tensor:
        return t.detach().transpose(1, 2) if contender.heads_first else t.detach()

    q, k, v, dout = (layout(t.detach()) for t in inputs)
    if case.direction == "fwd":

        def forward() -> Tensor:
            return contender.attend(q, k, v, case)

        return Prepared(forward, lambda: {"out": heads_last(forward())})

    leaves = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    out = contender.attend(*leaves, case)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return Prepared(backward, lambda: dict(zip(("dq", "dk", "dv"), map(heads_last, backward()), strict=True)))


# onepass


def _onepass_attend(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    return onepass.attention(q, k, v, causal=case.causal, window=case.window)


def ask_support(case: Case, device: str) -> onepass.Support:
    """The answer of `onepass.supports` for a case, from tensors of the right types that hold one element each."""
    q, k, v = (
        torch.empty(1, dtype=case.torch_dtype, device=device)
        .expand(case.batch, seqlen, heads, dim)
        .requires_grad_(case.direction == "bwd")
        for seqlen, heads, dim in (
            (case.seqlen_q, case.heads_q, case.head_dim),
            (case.seqlen_k, case.heads_kv, case.head_dim),
            (case.seqlen_k, case.heads_kv, case.head_dim_v),
        )
    )
    return onepass.supports(q, k, v, causal=case.causal, window=case.window)


def onepass_contender(device: str) -> Contender:
    """onepass as a user gets it on this device: it chooses the backend itself."""

    def refusal(case: Case) -> str | None:
        support = ask_support(case, device)
        return None if support.ok else support.reason

    return Contender("onepass", _onepass_attend, refusal)


def without_window(contender: Contender) -> Contender:
    """The contender without the window, to compare with: every pair that `causal` leaves visible is visible."""
    return replace(contender, name=f"{contender.name}-no-window", adapt=lambda case: replace(case, window=None))


# torch's scaled_dot_product_attention


def _sdpa_refusal(case: Case) -> str | None:
    if case.window is not None:
        return "torch SDPA has no window, only a dense mask"
    if case.causal and case.seqlen_q != case.seqlen_k:
        return "torch SDPA aligns is_causal at the top left; the case is aligned at the bottom right"
    return None


def _sdpa(name: str, backend: str | None) -> Contender:
    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        chosen: contextlib.AbstractContextManager = contextlib.nullcontext()
        if backend is not None:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            chosen = sdpa_kernel(getattr(SDPBackend, backend))
        with chosen:
            is_grouped = case.heads_q != case.heads_kv
            return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=is_grouped)

    return Contender(name, attend, _sdpa_refusal, heads_first=True)


# FlashAttention packages


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _flash_attention_3() -> Contender:
    import fa3_fwd_interface

    def refusal(case: Case) -> str | None:
        if case.direction == "bwd":
            return "fa3-fwd carries the forward kernels only"
        if case.dtype != "bfloat16":
            return f"fa3-fwd carries bfloat16 kernels, not {case.dtype}"
        return "fa3-fwd is built without windows" if case.window is not None else None

    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        return _first(fa3_fwd_interface.flash_attn_func(q, k, v, causal=case.causal))

    return Contender("fa3", attend, refusal)


def _flash_attention_4() -> Contender:
    from flash_attn.cute.interface import flash_attn_func

    def refusal(case: Case) -> str | None:
        return None if case.dtype in ("bfloat16", "float16") else f"flash-attn-4 takes 16-bit inputs, not {case.dtype}"

    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        window = {} if case.window is None else {"window_size": case.window}
        return _first(flash_attn_func(q, k, v, causal=case.causal, **window))

    return Contender("fa4", attend, refusal)


class _Peer(NamedTuple):
    device_type: str
    make: Callable[[], Contender]
    what: str


PEERS = {
    "sdpa": _Peer("cpu", lambda: _sdpa("sdpa", None), "torch SDPA, the backend it chooses itself"),
    "sdpa-flash": _Peer("cuda", lambda: _sdpa("sdpa-flash", "FLASH_ATTENTION"), "torch SDPA, FlashAttention-2"),
    "sdpa-cudnn": _Peer("cuda", lambda: _sdpa("sdpa-cudnn", "CUDNN_ATTENTION"), "torch SDPA, cuDNN"),
    "sdpa-efficient": _Peer("cuda", lambda: _sdpa("sdpa-efficient", "EFFICIENT_ATTENTION"), "torch SDPA, efficient"),
    "fa3": _Peer("cuda", _flash_attention_3, "FlashAttention-3 (package fa3-fwd)"),
    "fa4": _Peer("cuda", _flash_attention_4, "FlashAttention-4 (package flash-attn-4)"),
}


class Found(NamedTuple):
    """The peers that can be measured, and why the others cannot."""

    present: dict[str, Contender]
    absent: dict[str, str]


def find_peers(device_type: str, names: Sequence[str] | None = None) -> Found:
    """Look for peers by importing them.

    Args:
        names: the peers to look for; None means all of PEERS. Each is either present or absent with a reason.
    Raises: ValueError for a name that is not in PEERS.
    """
    unknown = sorted(set(names or ()) - set(PEERS))
    if unknown:
        raise ValueError(f"peers: expected names of {', '.join(PEERS)}, got {', '.join(unknown)}")
    present: dict[str, Contender] = {}
    absent: dict[str, str] = {}
    for name in PEERS if names is None else names:
        peer = PEERS[name]
        if peer.device_type != device_type:
            absent[name] = f"measured on {peer.device_type} only, this is {device_type}"
            continue
        try:
            present[name] = peer.make()
        except Exception as error:  # a package may fail in any way while it is imported
            absent[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return Found(present, absent)

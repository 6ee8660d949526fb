"""The torch operators behind `attention_decode`: onepass::decode, and onepass::decode_append, which writes the caches.

Neither has a gradient: the door refuses tensors that ask for one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .decode_problem import DecodeInputs, DecodeProblem
from .errors import UnsupportedError
from .outputs import empty_outputs
from .problem import AttentionInputs, AttentionProblem, Mask

_AFTER_CACHES = "Tensor cache_seqlens, Tensor? page_table, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? sinks"
_OPTIONS = (
    "float softmax_scale, SymInt? window_left, SymInt? window_right, float? softcap, SymInt? num_splits, "
    "SymInt? split_size, bool rotary_interleaved, bool check_values, str backend"
)
_OUTPUTS = "(Tensor out, Tensor lse)"
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
_NAMES = ("decode", "decode_append")

torch.library.define(
    "onepass::decode",
    f"(Tensor q, Tensor k_cache, Tensor v_cache, {_AFTER_CACHES}, {_OPTIONS}) -> {_OUTPUTS}",
    tags=_TAGS,
)
torch.library.define(
    "onepass::decode_append",
    f"(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, {_AFTER_CACHES}, Tensor k_new, Tensor v_new, {_OPTIONS})"
    f" -> {_OUTPUTS}",
    tags=_TAGS,
)


def run(problem: DecodeProblem, inputs: DecodeInputs, backend: str) -> tuple[Tensor, Tensor]:
    """The operator that this call needs."""
    attention = problem.attention
    options = (
        attention.softmax_scale,
        attention.mask.window_left,
        attention.mask.window_right,
        attention.softcap,
        problem.num_splits,
        problem.split_size,
        problem.rotary_interleaved,
        problem.check_values,
        backend,
    )
    if inputs.seqlen_new:
        return torch.ops.onepass.decode_append(*inputs, *options)
    return torch.ops.onepass.decode(*inputs[:-2], *options)


def _problem(inputs: DecodeInputs, options: tuple) -> DecodeProblem:
    scale, left, right, softcap, num_splits, split_size, rotary_interleaved, check_values, _ = options
    q, k_cache, v_cache = inputs[:3]
    attention = AttentionProblem(
        dtype=q.dtype,
        device_type=q.device.type,
        batch=q.shape[0],
        seqlen_q=q.shape[1],
        seqlen_k=inputs.capacity,
        num_heads_q=q.shape[2],
        num_heads_kv=k_cache.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v_cache.shape[3],
        softmax_scale=scale,
        mask=Mask(left, right),
        softcap=softcap,
        has_sinks=inputs.sinks is not None,
        has_seqused_k=True,
    )
    is_paged = inputs.page_table is not None
    return DecodeProblem(attention, is_paged, num_splits, split_size, rotary_interleaved, check_values)


def _unpacked(args: tuple) -> tuple[DecodeInputs, tuple]:
    count = len(DecodeInputs._fields) if len(args) == len(DecodeInputs._fields) + 9 else len(DecodeInputs._fields) - 2
    return DecodeInputs(*args[:count]), args[count:]


def _decode(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, options = _unpacked(args)
    with torch.autocast(inputs.q.device.type, enabled=False):
        return dispatch.load_decode(options[-1])(_problem(inputs, options), inputs)


def _decode_fake(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, options = _unpacked(args)
    return empty_outputs(_problem(inputs, options).attention, AttentionInputs(*inputs[:3]))


def _refuse_vmap(info: Any, in_dims: Any, *args: Any) -> None:
    raise UnsupportedError("onepass attention_decode cannot run under torch.vmap: it already takes a batch")


for _name in _NAMES:
    torch.library.impl(f"onepass::{_name}", "default")(_decode)
    torch.library.register_fake(f"onepass::{_name}")(_decode_fake)
    torch.library.register_vmap(f"onepass::{_name}", _refuse_vmap)

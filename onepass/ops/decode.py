"""The torch operators behind `attention_decode`.

onepass::decode                    attention over a cache
onepass::decode_append             appends new keys first, and so writes the caches
onepass::decode_modified           both, with tensors that few calls have, so that other calls have short lists of
onepass::decode_modified_append    arguments
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..dispatch import decode as dispatch
from ..errors import UnsupportedError
from ..geometry.visible_pairs import visible_pairs_of_cache
from ..namespace import OPERATORS, qualified
from ..problem import AttentionInputs, Mask
from ..problem.decode import MODIFIERS, TENSORS, DecodeInputs, DecodeProblem
from ..problem.outputs import empty_outputs
from ..validation.overlap import refuse_overlaps
from .autocast import without_autocast

# the schemas of the operators, whose tensor arguments have the order of `DecodeInputs`
_AFTER_CACHES = (
    "Tensor cache_seqlens, Tensor? page_table, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? sinks, "
    "Tensor? k_descale, Tensor? v_descale, Tensor? cu_seqlens_q"
)
_MODIFIERS = ", ".join(f"Tensor? {name}" for name in MODIFIERS)
_OPTIONS = (
    "float softmax_scale, SymInt? window_left, SymInt? window_right, float? softcap, SymInt? num_splits, "
    "SymInt? split_size, bool rotary_interleaved, bool check_values, SymInt? kv_block, SymInt? max_seqlen_q, "
    "str backend"
)
_NUM_OPTIONS = _OPTIONS.count(",") + 1
_OUTPUTS = "(Tensor out, Tensor lse)"
_NUM_TENSORS = len(TENSORS)
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)

for _name, _more in (("decode", ""), ("decode_modified", f"{_MODIFIERS}, ")):
    torch.library.define(
        qualified(_name),
        f"(Tensor q, Tensor k_cache, Tensor v_cache, {_AFTER_CACHES}, {_more}{_OPTIONS}) -> {_OUTPUTS}",
        tags=_TAGS,
    )
    torch.library.define(
        qualified(f"{_name}_append"),
        f"(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, {_AFTER_CACHES}, Tensor k_new, Tensor v_new, "
        f"{_more}{_OPTIONS}) -> {_OUTPUTS}",
        tags=_TAGS,
    )


def run(problem: DecodeProblem, inputs: DecodeInputs, backend: str) -> tuple[Tensor, Tensor]:
    """out and lse of a checked call, by the operator that it needs."""
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
        problem.kv_block,
        problem.max_seqlen_q,
        backend,
    )
    tensors = inputs.tensors
    given, modifiers = tensors[:_NUM_TENSORS], tensors[_NUM_TENSORS:]
    if inputs.seqlen_new:
        operator = OPERATORS.decode_modified_append if modifiers else OPERATORS.decode_append
        return operator(*given, *modifiers, *options)
    operator = OPERATORS.decode_modified if modifiers else OPERATORS.decode
    return operator(*given[:-2], *modifiers, *options)


def _problem(inputs: DecodeInputs, options: tuple) -> DecodeProblem:
    (
        softmax_scale,
        window_left,
        window_right,
        softcap,
        num_splits,
        split_size,
        rotary_interleaved,
        check_values,
        kv_block,
        max_seqlen_q,
        _,
    ) = options
    mask = Mask(window_left, window_right)
    attention = inputs.attention(softmax_scale=softmax_scale, mask=mask, softcap=softcap)
    return DecodeProblem.of(
        attention,
        inputs,
        num_splits=num_splits,
        split_size=split_size,
        rotary_interleaved=rotary_interleaved,
        check_values=check_values,
        kv_block=kv_block,
        max_seqlen_q=max_seqlen_q,
    )


def _unpacked(args: tuple) -> tuple[DecodeInputs, tuple]:
    """The tensors and the options of an operator without modifiers."""
    count = len(args) - _NUM_OPTIONS
    return DecodeInputs(*args[:count]), args[count:]


def _unpacked_modified(args: tuple) -> tuple[DecodeInputs, tuple]:
    """The tensors and the options of an operator with modifiers."""
    end = len(args) - _NUM_OPTIONS
    count = end - len(MODIFIERS)
    return DecodeInputs(*args[:count]).with_modifiers(args[count:end]), args[end:]


def _decode(*args: Any) -> tuple[Tensor, Tensor]:
    return _run(*_unpacked(args))


def _decode_modified(*args: Any) -> tuple[Tensor, Tensor]:
    return _run(*_unpacked_modified(args))


def _run(inputs: DecodeInputs, options: tuple) -> tuple[Tensor, Tensor]:
    if inputs.seqlen_new:
        # validation could not do it if torch.compile traced the call, because traced tensors have no addresses
        refuse_overlaps(inputs)
    with without_autocast(inputs.q.device.type):
        problem = _problem(inputs, options)
        backend = dispatch.decode_backend_at_run(options[-1], problem, inputs.q.device)
        return dispatch.load_decode(backend, inputs.q.device)(problem, inputs)


def _decode_fake(*args: Any) -> tuple[Tensor, Tensor]:
    return _empty(*_unpacked(args))


def _decode_modified_fake(*args: Any) -> tuple[Tensor, Tensor]:
    return _empty(*_unpacked_modified(args))


def _empty(inputs: DecodeInputs, options: tuple) -> tuple[Tensor, Tensor]:
    return empty_outputs(_problem(inputs, options).attention, AttentionInputs(*inputs[:3]))


def _refuse_vmap(info: Any, in_dims: Any, *args: Any) -> None:
    raise UnsupportedError("onepass: attention over a cache cannot run under torch.vmap: it already takes a batch")


for _name, _implementation, _fake in (
    ("decode", _decode, _decode_fake),
    ("decode_modified", _decode_modified, _decode_modified_fake),
):
    for _operator in (qualified(_name), qualified(f"{_name}_append")):
        torch.library.impl(_operator, "default")(_implementation)
        torch.library.register_fake(_operator)(_fake)
        torch.library.register_vmap(_operator, _refuse_vmap)


@register_flop_formula([OPERATORS.decode, OPERATORS.decode_append], get_raw=True)
def _flops(*args: Any, out_val: Any = None) -> int:
    """The FLOPs of both GEMMs over the visible pairs; appending, rotating and merging splits count as none."""
    return _flops_of(*_unpacked(args))


@register_flop_formula([OPERATORS.decode_modified, OPERATORS.decode_modified_append], get_raw=True)
def _modified_flops(*args: Any, out_val: Any = None) -> int:
    """The FLOPs over the pairs that the window leaves; what else hides pairs is not looked at."""
    return _flops_of(*_unpacked_modified(args))


def _flops_of(inputs: DecodeInputs, options: tuple) -> int:
    pairs = visible_pairs_of_cache(inputs, options[1], options[2]) * inputs.q.shape[-2]
    return 2 * pairs * (inputs.q.shape[-1] + inputs.v_cache.shape[-1])

"""The torch operators behind `attention_decode`.

onepass::decode                    attention over a cache
onepass::decode_append             appends new keys first, and so writes the caches
onepass::decode_modified           both, with tensors that few calls have, so that other calls have short lists of
onepass::decode_modified_append    arguments
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from . import schema
from .autocast import without_autocast


class Options(NamedTuple):
    """The arguments of the operators after the tensors. Attributes: backend: see `choice.backend_argument`."""

    softmax_scale: float
    window_left: int | None
    window_right: int | None
    softcap: float | None
    num_splits: int | None
    split_size: int | None
    rotary_interleaved: bool
    check_values: bool
    kv_block: int | None
    max_seqlen_q: int | None
    backend: str


_NUM_TENSORS = len(TENSORS)
# tensor arguments have the order of `DecodeInputs`
_TENSORS = schema.arguments(DecodeInputs, _NUM_TENSORS)
_BEFORE_NEW, _, _ = _TENSORS.partition(", Tensor? k_new")
_FIRST_MODIFIERS = tuple(name for name in MODIFIERS if name not in schema.LATER)
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)

for _name, _more, _later in (
    ("decode", "", ""),
    ("decode_modified", f"{schema.tensors(_FIRST_MODIFIERS)}, ", f", {schema.tensors(schema.LATER)}"),
):
    _rest = f"{_more}{schema.arguments(Options)}{_later}) -> (Tensor out, Tensor lse)"
    torch.library.define(qualified(_name), f"({_BEFORE_NEW}, {_rest}", tags=_TAGS)
    _caches = _BEFORE_NEW.replace("Tensor k_cache, Tensor v_cache", "Tensor(a!) k_cache, Tensor(b!) v_cache")
    _append = f"({_caches}, Tensor k_new, Tensor v_new, {_rest}"
    torch.library.define(qualified(f"{_name}_append"), _append, tags=_TAGS)


def run(problem: DecodeProblem, inputs: DecodeInputs, backend: str) -> tuple[Tensor, Tensor]:
    """out and lse of a checked call, by the operator that it needs."""
    attention = problem.attention
    options = Options(
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
    first, later = schema.split(dict(zip(MODIFIERS, modifiers, strict=True))) if modifiers else ((), ())
    if inputs.seqlen_new:
        operator = OPERATORS.decode_modified_append if modifiers else OPERATORS.decode_append
        return operator(*given, *first, *options, *later)
    operator = OPERATORS.decode_modified if modifiers else OPERATORS.decode
    return operator(*given[:-2], *first, *options, *later)


def _unpacked(args: tuple, count: int) -> tuple[DecodeInputs, DecodeProblem, Options]:
    """The tensors, the problem and the options of an operator. Args: count: the number of its tensors."""
    end = count + len(Options._fields)
    tensors, options, later = args[:count], Options(*args[count:end]), args[end:]
    if count <= _NUM_TENSORS:
        inputs = DecodeInputs(*tensors)
    else:
        first = len(tensors) - len(_FIRST_MODIFIERS)
        modifiers = schema.joined(_FIRST_MODIFIERS, tensors[first:], later)
        inputs = DecodeInputs(*tensors[:first]).with_modifiers(tuple(modifiers[name] for name in MODIFIERS))
    mask = Mask(options.window_left, options.window_right)
    attention = inputs.attention(softmax_scale=options.softmax_scale, mask=mask, softcap=options.softcap)
    problem = DecodeProblem.of(
        attention,
        inputs,
        num_splits=options.num_splits,
        split_size=options.split_size,
        rotary_interleaved=options.rotary_interleaved,
        check_values=options.check_values,
        kv_block=options.kv_block,
        max_seqlen_q=options.max_seqlen_q,
    )
    return inputs, problem, options


def _register(name: str, count: int) -> None:
    """Give an operator its implementation, its fake, its refusal of vmap, and its FLOPs. Args: see `_unpacked`."""

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        inputs, problem, options = _unpacked(args, count)
        if inputs.seqlen_new:
            # validation could not do it if torch.compile traced the call, because traced tensors have no addresses
            refuse_overlaps(inputs)
        with without_autocast(inputs.q.device.type):
            backend = dispatch.decode_backend_at_run(options.backend, problem, inputs.q.device)
            return dispatch.load_decode(backend, inputs.q.device)(problem, inputs)

    def fake(*args: Any) -> tuple[Tensor, Tensor]:
        inputs, problem, _ = _unpacked(args, count)
        return empty_outputs(problem.attention, AttentionInputs(*inputs[:3]))

    def flops(*args: Any, out_val: Any = None) -> int:
        """The FLOPs of both GEMMs over the pairs that the window leaves.

        What else hides pairs is not looked at; appending, rotating and merging splits count as none.
        """
        inputs, _, options = _unpacked(args, count)
        pairs = visible_pairs_of_cache(inputs, options.window_left, options.window_right) * inputs.q.shape[-2]
        return 2 * pairs * (inputs.q.shape[-1] + inputs.v_cache.shape[-1])

    torch.library.impl(qualified(name), "default")(run)
    torch.library.register_fake(qualified(name))(fake)
    torch.library.register_vmap(qualified(name), _refuse_vmap)
    register_flop_formula(getattr(OPERATORS, name), get_raw=True)(flops)


def _refuse_vmap(info: Any, in_dims: Any, *args: Any) -> None:
    raise UnsupportedError("onepass: attention over a cache cannot run under torch.vmap: it already takes a batch")


for _name, _count in (("decode", _NUM_TENSORS), ("decode_modified", _NUM_TENSORS + len(_FIRST_MODIFIERS))):
    _register(_name, _count - 2)  # without new keys and values
    _register(f"{_name}_append", _count)

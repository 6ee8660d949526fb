"""Calls of `attention_decode` without data, which `supports` and `warmup` recognize by `cache_seqlens`."""

from __future__ import annotations

import inspect
from typing import Any

from ..problem.arguments import dtype_of_shape
from ..problem.decode import MODIFIERS, TENSORS, DecodeInputs, DecodeProblem
from ..validation.decode import check_decode
from ..validation.modifiers import in_float32
from ..validation.tensors import tensor_of_shape
from . import keywords
from .decode import attention_decode, autocast_rows

_TENSORS = (*TENSORS, *MODIFIERS)
_REQUIRED = TENSORS[:4]
_OPTIONAL_TENSORS = dict.fromkeys(_TENSORS[4:])
# every option with its default, except backend, which `supports` and `warmup` handle themselves
_OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(attention_decode).parameters.items()
    if name not in (*_TENSORS, "backend")
}


def is_decode(arguments: dict[str, Any]) -> bool:
    return "cache_seqlens" in arguments


def inputs_of(function: str, arguments: dict[str, Any]) -> tuple[DecodeInputs, dict[str, Any]]:
    """The tensors of a call as `attention_decode` takes them, and its other arguments, without `backend`.

    Args:
        function: the function that the caller called, for messages.
        arguments: those of `attention_decode`, with tensors and without `backend`.
    Raises: TypeError for arguments that are missing or that `attention_decode` does not have.
    """
    missing = [name for name in _REQUIRED if name not in arguments]
    if missing:
        raise TypeError(f"{function}: expected {', '.join(missing)} with the other arguments of attention_decode")
    unknown = set(arguments) - set(_TENSORS) - set(_OPTIONS)
    if unknown:
        raise keywords.unexpected(function, unknown, "attention_decode")
    arguments = _OPTIONAL_TENSORS | _OPTIONS | arguments
    inputs = DecodeInputs(*(arguments.pop(name) for name in TENSORS))
    q, k_new, v_new = autocast_rows(inputs.k_cache, inputs.q, inputs.k_new, inputs.v_new)
    inputs = inputs._replace(q=q, k_new=k_new, v_new=v_new)
    arguments["alibi_slopes"] = in_float32(arguments["alibi_slopes"])
    given = tuple(arguments.pop(name) for name in MODIFIERS)
    return inputs.with_modifiers(given) if any(t is not None for t in given) else inputs, arguments


def problem_of(function: str, arguments: dict[str, Any]) -> tuple[DecodeProblem, DecodeInputs]:
    """The problem of a call, and its tensors. Args: as of `inputs_of`. Raises: what the call raises."""
    inputs, options = inputs_of(function, arguments)
    return check_decode(inputs, **options), inputs


def with_tensors(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with a tensor on the "meta" device for each shape.

    Lengths, page tables, ranges and positions are int32; rotary tables, descales and slopes are float32; caches have
    `cache_dtype` if it is given; all other tensors have `dtype`.
    """
    arguments = dict(arguments)
    dtype = arguments.pop("dtype", None)
    cache_dtype = arguments.pop("cache_dtype", dtype)
    for name in _TENSORS:
        shape = arguments.get(name)
        if not isinstance(shape, (tuple, list)):
            continue
        tensor_dtype = dtype_of_shape(name, cache_dtype if name in ("k_cache", "v_cache") else dtype)
        dtype_name = "cache_dtype" if tensor_dtype is not dtype and tensor_dtype is cache_dtype else "dtype"
        arguments[name] = tensor_of_shape(name, shape, tensor_dtype, dtype_name)
    return arguments

"""What `supports` and `warmup` make of the arguments of a call of `attention_decode`, which they know by its
`cache_seqlens`."""

from __future__ import annotations

from typing import Any

import torch

from ..problem.decode import DecodeInputs, DecodeProblem
from ..validation.decode import check_decode
from ..validation.tensors import tensor_of_shape
from . import keywords

_TENSORS = dict.fromkeys(DecodeInputs._fields[4:])
_OPTIONS = {
    "causal": True,
    "window": None,
    "softcap": None,
    "softmax_scale": None,
    "num_splits": None,
    "split_size": None,
    "check_values": False,
    "return_lse": False,
    "rotary_interleaved": False,
    "kv_block": None,
    "max_seqlen_q": None,
}
_DTYPES = dict.fromkeys(("cache_seqlens", "page_table", "cu_seqlens_q"), torch.int32) | dict.fromkeys(
    ("rotary_cos", "rotary_sin", "k_descale", "v_descale"), torch.float32
)


def is_decode(arguments: dict[str, Any]) -> bool:
    return "cache_seqlens" in arguments


def problem_of(function: str, arguments: dict[str, Any]) -> tuple[DecodeProblem, DecodeInputs]:
    """The problem of a call, and its tensors; raises as the call would, and TypeError for a name that it has not."""
    missing = [name for name in DecodeInputs._fields[:4] if name not in arguments]
    if missing:
        raise TypeError(f"{function}: expected {', '.join(missing)} beside the other arguments of attention_decode")
    unknown = set(arguments) - set(DecodeInputs._fields) - set(_OPTIONS)
    if unknown:
        raise keywords.unexpected(function, unknown, "attention_decode")
    arguments = _TENSORS | _OPTIONS | arguments
    inputs = DecodeInputs(**{name: arguments.pop(name) for name in DecodeInputs._fields})
    return check_decode(inputs, **arguments), inputs


def with_tensors(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with tensors on the "meta" device for shapes: of `dtype`, those of caches of `cache_dtype` if there
    is one; lengths and tables int32, rotary tables and descales float32."""
    arguments = dict(arguments)
    dtype = arguments.pop("dtype", None)
    cache_dtype = arguments.pop("cache_dtype", dtype)
    for name in DecodeInputs._fields:
        shape = arguments.get(name)
        if not isinstance(shape, (tuple, list)):
            continue
        of = _DTYPES.get(name, cache_dtype if name in ("k_cache", "v_cache") else dtype)
        dtype_name = "cache_dtype" if of is not dtype and of is cache_dtype else "dtype"
        arguments[name] = tensor_of_shape(name, shape, of, dtype_name)
    return arguments

"""The fast path of a repeated call: no checks, no torch operator, only the backend's forward.

Validation, the choice of a backend and its preparation depend only on types, sizes and options, and take ten times as
long as a launch. So the first call of a kind does all of this and stores the prepared forward here, under a key that
holds everything that validation looks at. A key does not hold values of tensors: the backend checks the tensors whose
values matter (`cu_seqlens_*`, `seqused_k`, `cache_seqlens`) in every call. No tensor is kept.

`key_of` returns None, so that the operator runs, if other code may observe the operator or a tensor is not an
ordinary one. These are the cases: a gradient may be needed; torch.compile, export and jit.trace; vmap and the other
transforms of torch.func, forward-mode derivatives; dispatch and function modes (fake tensors, FLOP counters, a default
device); the profiler; autocast; tensor subclasses, layouts other than strided, and negative views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _functorch,
    _is_any_autocast_enabled,
    _is_tracing,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch.autograd import _profiler_enabled, forward_ad

from ..dispatch import choice
from ..dispatch.backends import Forward
from ..problem.decode import rounded_length

MAX_CALLS = 1024

_TENSOR_TYPES = frozenset({Tensor, torch.nn.Parameter})  # without subclasses
_forwards: dict[tuple, Forward] = {}


def key_of(function: str, inputs: Sequence[Any], window: Any, options: tuple) -> tuple | None:
    """The key of a call: everything that validation looks at; None if the call must be treated as a first call.

    Args:
        function: the name of the function; each has its own validation.
        inputs: the tensors of the call, or None, such as `AttentionInputs`.
        window, options: the arguments as given, but `deterministic` with its default filled in. Their types are in
            the key, too: validation tells 1 from True.
    """
    if torch.compiler.is_compiling() or is_observed():
        return None
    is_recording = torch.is_grad_enabled()
    seen: list[tuple | None] = []
    try:
        for t in inputs:
            if t is None:
                seen.append(None)
                continue
            is_ordinary = type(t) in _TENSOR_TYPES and t.layout is torch.strided and not t.is_neg()
            if not is_ordinary or (is_recording and t.requires_grad):
                return None
            seen.append((t.shape, t.dtype, t.device))
    except RuntimeError:  # a nested tensor has no shape; validation refuses it
        return None
    if window is None:
        window = (None, None)
    elif type(window) is not tuple:
        return None
    return function, tuple(seen), window, options, tuple(map(type, window + options)), choice.current_outside_compile()


def of_rounded_length(key: tuple, k_cache: Tensor, v_cache: Tensor) -> tuple | None:
    """A key of a call of `attention_decode` for all caches of one `rounded_length`, whatever their strides are.

    Args: key: the key by `key_of`, for inputs in which the caches come second and third.
    Returns: the key, or None if validation has to look at the strides.
    """
    k_shape, v_shape, k_strides, v_strides = k_cache.shape, v_cache.shape, k_cache.stride(), v_cache.stride()
    if not len(k_shape) == len(v_shape) == 4 or k_shape[1] != v_shape[1]:
        return None
    steps = k_strides[0] | k_strides[1] | k_strides[2] | v_strides[0] | v_strides[1] | v_strides[2]
    if steps * k_cache.element_size() % 16 or not k_strides[3] == v_strides[3] == 1:
        return None
    function, (q, k, v, *others), *rest = key
    caches = rounded_length(k_shape[1]), k_shape[0], k_shape[2:], v_shape[0], v_shape[2:], k[1:], v[1:]
    return function, q, caches, *others, *rest


def is_observed() -> bool:
    """Whether other code may observe the operators of a call; the cases are in the docstring of this module."""
    return (
        _len_torch_dispatch_stack() > 0
        or _len_torch_function_stack() > 0
        or _functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or _is_any_autocast_enabled()
        or _profiler_enabled()
        or _is_tracing()
    )


def find(key: tuple | None) -> Forward | None:
    """The forward that an earlier call with this key left; None if there is none."""
    try:
        return _forwards.get(key) if key is not None else None
    except TypeError:  # an option without a hash, which validation refuses
        return None


def keep(key: tuple | None, forward: Forward) -> None:
    """Keep the forward of a call that has succeeded, for the next call with this key."""
    if key is not None:
        if len(_forwards) >= MAX_CALLS:
            _forwards.clear()
        _forwards[key] = forward


def forget() -> None:
    """Drop all forwards: every call is a first call again."""
    _forwards.clear()


def num_kept() -> int:
    """The number of forwards that are kept, each under one or two keys."""
    return len({id(forward) for forward in _forwards.values()})

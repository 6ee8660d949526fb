"""The short way for a call like one that was made before: no checks, no torch operator, only the backend's forward.

The checks of the door, the choice of a backend and its preparation depend on types, sizes and options alone, and take
ten times as long as a launch. So the first call of a kind goes the whole way and leaves the prepared forward here,
under a key that holds all that the door looks at. Values of tensors are in no key: those that are checked by value
(`cu_seqlens_*`, `seqused_k`, `cache_seqlens`) the backend checks in every call. No tensor is kept.

`key_of` gives None, and so the operator runs, wherever somebody may want to see it or the tensors are not what they
seem: a gradient may be asked for; torch.compile, export and jit.trace; vmap and the other transforms of torch.func,
forward-mode derivatives; dispatch and function modes (fake tensors, FLOP counters, a default device); the profiler;
autocast; tensor subclasses, layouts other than strided, and negative views.
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

MAX_CALLS = 1024

_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
_forwards: dict[tuple, Forward] = {}


def key_of(function: str, inputs: Sequence[Tensor | None], window: Any, options: tuple) -> tuple | None:
    """Everything that the door looks at; None if this call must go the whole way.

    Args:
        function: its name, since each has a door of its own.
        inputs: its tensors, such as `AttentionInputs`.
        window, options: as given, but `deterministic` with its default put in. Types count: 1 is not True at the door.
    """
    if torch.compiler.is_compiling() or _is_observed():
        return None
    is_recording = torch.is_grad_enabled()
    seen: list[tuple | None] = []
    try:
        for t in inputs:
            if t is None:
                seen.append(None)
                continue
            is_plain = type(t) in _PLAIN_TYPES and t.layout is torch.strided and not t.is_neg()
            if not is_plain or (is_recording and t.requires_grad):
                return None
            seen.append((t.shape, t.dtype, t.device))
    except RuntimeError:  # a nested tensor has no shape: the door refuses it
        return None
    if window is None:
        window = (None, None)
    elif type(window) is not tuple:
        return None
    return function, tuple(seen), window, options, tuple(map(type, window + options)), choice.of_context()


def _is_observed() -> bool:
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
    """The forward that an earlier call left."""
    try:
        return _forwards.get(key) if key is not None else None
    except TypeError:  # an option that has no hash is none that the door takes
        return None


def keep(key: tuple | None, forward: Forward) -> None:
    """Leave the forward of a call that went well to the next one like it."""
    if key is not None:
        if len(_forwards) >= MAX_CALLS:
            _forwards.clear()
        _forwards[key] = forward


def forget() -> None:
    """Every next call goes the whole way."""
    _forwards.clear()

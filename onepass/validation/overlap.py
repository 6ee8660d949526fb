"""Whether two caches share memory, so that new keys and values would overwrite each other.

Caches may lie in one allocation (`kv[:, 0]` and `kv[:, 1]`, or interleaved by rows, heads or columns): the ranges of
their addresses then overlap although they share no element. The answer is therefore exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from ..problem.decode import DecodeInputs

# The number of search steps after which two caches count as disjoint. Tensors cut out of one allocation take about
# ten. Only strides that cross each other, which only as_strided makes, come near this number.
MAX_STEPS = 20_000

Forward = Callable[[DecodeInputs], tuple[Tensor, Tensor]]
# (bytes of a step, number of positions) of every dimension; the last dimension counts the bytes of an element
Steps = tuple[tuple[int, int], ...]
_TENSOR_TYPES = (Tensor, torch.nn.Parameter)  # without subclasses


def refuse_shared_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise ValueError if the caches share an element. Tensors without memory do if both are one tensor."""
    if k_cache.device.type == "meta":
        return
    if k_cache is v_cache or (_have_addresses(k_cache, v_cache) and _share_memory(k_cache, v_cache)):
        raise ValueError(
            "v_cache: expected memory of its own beside k_cache, since k_new and v_new are written to them, "
            "got caches with elements in common"
        )


def with_shared_caches_refused(forward: Forward, inputs: DecodeInputs) -> Forward:
    """`forward` with a check of its caches, which have the shapes and strides of these but any addresses."""
    k_steps, v_steps = _steps_of(inputs.k_cache), _steps_of(inputs.v_cache)
    k_bytes, v_bytes = _extent(k_steps), _extent(v_steps)

    def checked(inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
        distance = inputs.v_cache.data_ptr() - inputs.k_cache.data_ptr()
        if -v_bytes < distance < k_bytes and _overlap(distance, k_steps, v_steps):
            refuse_shared_caches(inputs.k_cache, inputs.v_cache)
        return forward(inputs)

    return checked


def _have_addresses(*tensors: Tensor) -> bool:
    if torch.compiler.is_compiling() or peek_interpreter_stack() is not None:
        return False
    return all(type(t) in _TENSOR_TYPES for t in tensors)


def _share_memory(k_cache: Tensor, v_cache: Tensor) -> bool:
    return _overlap(v_cache.data_ptr() - k_cache.data_ptr(), _steps_of(k_cache), _steps_of(v_cache))


def _steps_of(t: Tensor) -> Steps:
    """The steps of a tensor, without dimensions of size 1. A dimension of size 0 has 0 positions."""
    size = t.element_size()
    dims = ((stride * size, n) for n, stride in zip(t.shape, t.stride(), strict=True))
    return *(step for step in dims if step[1] != 1), (1, size)


def _extent(steps: Steps) -> int:
    """Bytes from the first to the last, inclusive; 0 if there is none."""
    return 0 if any(n == 0 for _, n in steps) else 1 + sum(step * (n - 1) for step, n in steps)


@functools.lru_cache(maxsize=1024)
def _overlap(distance: int, a: Steps, b: Steps) -> bool:
    """Whether `a` and `b` share a byte. `b` begins `distance` bytes after the beginning of `a`.

    A shared byte is a solution of sum_i x_i step_i = distance + sum_j y_j step_j, with x and y in the ranges of the
    positions. With one unknown z for each length of a step, distance = sum of z times step, where z lies between
    -(positions of that step in b - 1) and (positions of that step in a - 1). The search begins with the longest step:
    the reach of the shorter steps leaves few values of z.
    """
    if not -_extent(b) < distance < _extent(a):
        return False
    ranges: dict[int, tuple[int, int]] = {}
    for steps, sign in ((a, 1), (b, -1)):
        for step, n in steps:
            low, high = ranges.get(step, (0, 0))
            ranges[step] = (low, high + n - 1) if sign > 0 else (low - n + 1, high)
    unknowns = sorted((step, *bounds) for step, bounds in ranges.items() if step)
    reach = [(0, 0)]  # least and largest sum of the first n unknowns
    for step, low, high in unknowns:
        reach.append((reach[-1][0] + step * low, reach[-1][1] + step * high))
    remaining = MAX_STEPS

    def can_reach(rest: int, n: int) -> bool:
        """Whether the first n unknowns can add up to `rest`."""
        nonlocal remaining
        remaining -= 1
        if n == 0:
            return rest == 0
        step, low, high = unknowns[n - 1]
        if n == 1:
            return rest % step == 0 and low <= rest // step <= high
        least, most = reach[n - 1]
        first, last = max(low, -(-(rest - most) // step)), min(high, (rest - least) // step)
        return any(remaining > 0 and can_reach(rest - step * z, n - 1) for z in range(first, last + 1))

    return can_reach(distance, len(unknowns))

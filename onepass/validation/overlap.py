"""Whether a cache that new keys are written to shares memory with another tensor of the call, which would change too.

Caches may lie in one allocation (`kv[:, 0]` and `kv[:, 1]`, or interleaved by rows, heads or columns): the ranges of
their addresses then overlap although they share no element. The answer is exact for tensors that are cut out of one
dense tensor. Where strides cross each other, which only `as_strided` makes, overlapping ranges count as shared memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from ..problem.decode import MODIFIERS, TENSORS, DecodeInputs

Forward = Callable[[DecodeInputs], tuple[Tensor, Tensor]]
# (bytes of a step, number of positions) of every dimension; the last dimension counts the bytes of an element
Steps = tuple[tuple[int, int], ...]
_NAMES = (*TENSORS, *MODIFIERS)
_TENSOR_TYPES = (Tensor, torch.nn.Parameter)  # without subclasses


def refuse_overlaps(inputs: DecodeInputs) -> None:
    """Raise ValueError if an element of a cache also belongs to the other cache, another tensor, or another index.

    Only strides are compared in tensors without memory, and nothing while torch.compile traces the call.
    """
    if torch.compiler.is_compiling():
        return
    tensors = inputs.tensors
    caches = {"k_cache": inputs.k_cache, "v_cache": inputs.v_cache}
    for name, cache in caches.items():
        if not cache.is_contiguous() and _overlaps_itself(cache):
            raise ValueError(f"{name}: expected memory of its own for every element, got strides {cache.stride()}")
    have_addresses = all(t is None or (type(t) in _TENSOR_TYPES and not t.is_meta) for t in tensors)
    if have_addresses and peek_interpreter_stack() is None and not _may_overlap(tensors, *_ranges_of(inputs)):
        return
    others = dict(zip(_NAMES, tensors, strict=False))
    for cache_name, cache in caches.items():
        del others[cache_name]
        if cache.device.type == "meta":
            continue
        for name, t in others.items():
            if t is not None and (t is cache or _share_memory(cache, t)):
                raise ValueError(
                    f"{name}: expected memory apart from {cache_name}, to which new keys and values are written, "
                    "got a tensor that overlaps it"
                )


def with_overlaps_refused(forward: Forward, inputs: DecodeInputs) -> Forward:
    """`forward` with a check of the addresses of its tensors, for repeated calls.

    Args: inputs: the shapes and strides of the caches of all calls.
    """
    ranges = _ranges_of(inputs)

    def checked(inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
        if _may_overlap(inputs.tensors, *ranges):
            refuse_overlaps(inputs)
        return forward(inputs)

    return checked


def _ranges_of(inputs: DecodeInputs) -> tuple[Steps, Steps, int, int]:
    """The steps and the bytes of both caches."""
    return _steps_of(inputs.k_cache), _steps_of(inputs.v_cache), _bytes(inputs.k_cache), _bytes(inputs.v_cache)


def _may_overlap(tensors: tuple[Any, ...], k_steps: Steps, v_steps: Steps, k_bytes: int, v_bytes: int) -> bool:
    """Whether the caches share memory, or the range of addresses of another tensor meets that of a cache."""
    k_start, v_start = tensors[1].data_ptr(), tensors[2].data_ptr()
    k_end, v_end = k_start + k_bytes, v_start + v_bytes
    if k_start < v_end and v_start < k_end and _overlap(v_start - k_start, k_steps, v_steps):
        return True
    for t in tensors[:1] + tensors[3:]:
        if t is not None and ((start := t.data_ptr()) < k_end or start < v_end):
            end = start + _bytes(t)
            if (start < k_end and k_start < end) or (start < v_end and v_start < end):
                return True
    return False


def _overlaps_itself(t: Tensor) -> bool:
    """Whether several indices may lead to one element, whose value would depend on the order of writes."""
    reach = 1  # elements from the first to the last along the shorter strides
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def _share_memory(a: Tensor, b: Tensor) -> bool:
    if peek_interpreter_stack() is not None:
        return False
    if type(a) not in _TENSOR_TYPES or type(b) not in _TENSOR_TYPES or a.device != b.device:
        return False
    return _overlap(b.data_ptr() - a.data_ptr(), _steps_of(a), _steps_of(b))


def _steps_of(t: Tensor) -> Steps:
    return _steps(t.shape, t.stride(), t.element_size())


@functools.lru_cache(maxsize=1024)
def _steps(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> Steps:
    """The steps of a tensor, without dimensions that reach one position. A dimension of size 0 has 0 positions."""
    dims = ((stride * size, n) for n, stride in zip(shape, strides, strict=True))
    return *(dim for dim in dims if dim[1] == 0 or (dim[1] > 1 and dim[0])), (1, size)


def _bytes(t: Tensor) -> int:
    """Bytes from the first to the last, inclusive."""
    return t.nbytes if t.is_contiguous() else _extent(_steps_of(t))


def _extent(steps: Steps) -> int:
    """Bytes from the first to the last, inclusive; 0 if there is none."""
    return 0 if any(n == 0 for _, n in steps) else 1 + sum(step * (n - 1) for step, n in steps)


@functools.lru_cache(maxsize=1024)
def _overlap(distance: int, a: Steps, b: Steps) -> bool:
    """Whether `a` and `b` share a byte. `b` begins `distance` bytes after the beginning of `a`.

    The longest step splits memory into periods. If all other steps of either tensor stay within a period, a shared byte
    lies where position x of `a` and y of `b` along this step differ by the quotient of the distance, or by one more,
    and the others differ by what remains. Else the tensors count as sharing one if the ranges of their addresses meet.
    """
    if not -_extent(b) < distance < _extent(a):
        return False
    step = max((step for step, _ in (*a, *b)))
    (n_a, rest_a), (n_b, rest_b) = (
        (1 + sum(n - 1 for s, n in t if s == step), tuple(dim for dim in t if dim[0] != step)) for t in (a, b)
    )
    if step == 1 or max(_extent(rest_a), _extent(rest_b)) > step:
        return True
    quotient = distance // step
    return any(_overlap(distance - z * step, rest_a, rest_b) for z in (quotient, quotient + 1) if -n_b < z < n_a)

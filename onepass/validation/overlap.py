"""Whether a cache that new keys are written to shares memory with another tensor of the call, which would change too.

Caches may lie in one allocation (`kv[:, 0]` and `kv[:, 1]`, or interleaved by rows, heads or columns): the ranges of
their addresses then overlap although they share no element. The answer is exact for tensors that are cut out of one
dense tensor. Where strides cross each other, which only `as_strided` makes, overlapping ranges count as shared memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

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
    tensors = dict(zip(_NAMES, inputs.tensors, strict=False))
    for cache_name in ("k_cache", "v_cache"):
        cache = tensors.pop(cache_name)
        assert cache is not None
        if _overlaps_itself(cache):
            raise ValueError(
                f"{cache_name}: expected memory of its own for every element, got strides {cache.stride()}"
            )
        if cache.device.type == "meta":
            continue
        for name, t in tensors.items():
            if t is not None and (t is cache or _share_memory(cache, t)):
                raise ValueError(
                    f"{name}: expected memory apart from {cache_name}, to which new keys and values are written, "
                    "got a tensor that overlaps it"
                )


def with_overlaps_refused(forward: Forward, inputs: DecodeInputs) -> Forward:
    """`forward` with a check of the addresses of its tensors.

    Repeated calls take this check, so it compares ranges of addresses first.

    Args: inputs: the shapes of all tensors that `forward` will get, and the strides of the caches.
    """
    k_steps, v_steps = _steps_of(inputs.k_cache), _steps_of(inputs.v_cache)
    k_bytes, v_bytes = _extent(k_steps), _extent(v_steps)
    ranges = [(i, t.stride(), _bytes(t)) for i, t in enumerate(inputs.tensors) if t is not None and i not in (1, 2)]

    def checked(inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
        tensors: tuple = inputs.tensors
        k_start, v_start = tensors[1].data_ptr(), tensors[2].data_ptr()
        k_end, v_end = k_start + k_bytes, v_start + v_bytes
        may_overlap = k_start < v_end and v_start < k_end and _overlap(v_start - k_start, k_steps, v_steps)
        for i, stride, size in ranges:
            t = tensors[i]
            start = t.data_ptr()
            if start < k_end or start < v_end:
                end = start + (size if t.stride() == stride else _bytes(t))
                may_overlap |= (start < k_end and k_start < end) or (start < v_end and v_start < end)
        if may_overlap:
            refuse_overlaps(inputs)
        return forward(inputs)

    return checked


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
    """The steps of a tensor, without dimensions that reach one position. A dimension of size 0 has 0 positions."""
    size = t.element_size()
    dims = ((stride * size, n) for n, stride in zip(t.shape, t.stride(), strict=True))
    return *(dim for dim in dims if dim[1] == 0 or (dim[1] > 1 and dim[0])), (1, size)


def _bytes(t: Tensor) -> int:
    return _extent(_steps_of(t))


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

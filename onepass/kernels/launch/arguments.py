"""What a launch makes of a call for its kernels, and what stands for it while a kernel is compiled."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...geometry.integers import ceil_div
from ...problem import AttentionProblem
from ...problem.decode import DecodeInputs, DecodeProblem
from ..config import VECTOR_BYTES

_E4M3 = torch.float8_e4m3fn
LOG2_E = math.log2(math.e)
MAX_GRID = 65535  # CUDA limits the second and third dimension of a grid


def in_order(arguments: type, constants: dict[str, Any]) -> Callable[..., tuple]:
    """A function that takes the fields of such a NamedTuple, and returns them in order.

    A call of it takes a third of the time of making the NamedTuple: 0.3 us instead of 1 us for the 25 arguments of a
    forward.

    Args: constants: what is returned for fields that a call of the function leaves out, if not their defaults.
    """
    defaults = arguments._field_defaults | constants
    assert len(defaults) == len(arguments._field_defaults), constants
    return types.FunctionType(_returns_in_order(arguments).__code__, {}, argdefs=tuple(defaults.values()))


@functools.lru_cache
def _returns_in_order(arguments: type) -> Any:
    fields, defaults = arguments._fields, arguments._field_defaults
    parameters = ", ".join(f"{name}=None" if name in defaults else name for name in fields)
    return eval(f"lambda {parameters}: ({', '.join(fields)},)", {})


def beyond_grid(problem: AttentionProblem) -> str | None:
    """Why kernels whose grids have a dimension for heads and one for batch entries do not run; None if they do."""
    for name, size in (("num_heads", problem.num_heads_q), ("batch", problem.batch)):
        if size > MAX_GRID:
            return f"{name}: expected up to {MAX_GRID}, got {size}"
    return None


def window_bounds(problem: AttentionProblem) -> tuple[int | None, int | None]:
    """The window as a kernel gets it: beyond the longer of both lengths a bound hides nothing, or everything if it is
    negative, and sums of positions stay in 32 bits."""
    longest = max(problem.seqlen_q, problem.seqlen_k)
    if problem.has_q_positions:  # of any length
        longest = 2**30
    left, right = (
        None if side is None else max(-longest, min(side, longest))
        for side in (problem.mask.window_left, problem.mask.window_right)
    )
    return left, right


def score_scales(problem: AttentionProblem) -> tuple[float, float | None]:
    """scale_log2 and tanh_scale of `ScoreFactors`."""
    if problem.softcap is None:
        return problem.softmax_scale * LOG2_E, None
    return problem.softcap * LOG2_E, 2 * LOG2_E * problem.softmax_scale / problem.softcap


def score_arguments(problem: AttentionProblem) -> dict[str, Any]:
    """The arguments that follow from a problem's scale, softcap and window."""
    (scale_log2, tanh_scale), (left, right) = score_scales(problem), window_bounds(problem)
    return {"scale_log2": scale_log2, "tanh_scale": tanh_scale, "window_left": left, "window_right": right}


def element_type(dtype: torch.dtype) -> type:
    """The kernel language's name of a dtype."""
    import cutlass

    return {
        torch.bfloat16: cutlass.BFloat16,
        torch.float16: cutlass.Float16,
        torch.float32: cutlass.Float32,
        torch.float8_e4m3fn: cutlass.Float8E4M3FN,
    }[dtype]


def fake_tensor(kind: type, *shape: int | None, align_bytes: int):
    """A stand-in of any lengths (None) and strides; the last dimension contiguous."""
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    divisibility = align_bytes * 8 // kind.width
    strides = tuple(cute.sym_int64(divisibility=divisibility) for _ in shape[:-1])
    shape = tuple(cute.sym_int() if size is None else size for size in shape)
    return make_fake_tensor(kind, shape, (*strides, 1), assumed_align=align_bytes)


def strided_tensor(kind: type, rank: int, first_stride: int | None = None):
    """A stand-in of any lengths and any strides, also 0; the first of them may be fixed."""
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    lengths, strides = ([sym() for _ in range(rank)] for sym in (cute.sym_int, cute.sym_int64))
    strides[0] = first_stride or strides[0]
    return make_fake_tensor(kind, tuple(lengths), tuple(strides), assumed_align=kind.width // 8)


def fake_integers(is_given: bool = True):
    """A stand-in for a vector of integers, if there is one."""
    from cutlass import Int32

    return fake_tensor(Int32, None, align_bytes=4) if is_given else None


def shared_stand_ins(problem: AttentionProblem) -> dict[str, Any]:
    """Stand-ins for the lengths and the `score_arguments` of a problem, which forward and backward kernels take."""
    from cutlass import Float32, Int32

    return {
        "cu_seqlens_q": fake_integers(problem.is_packed),
        "cu_seqlens_k": fake_integers(problem.is_packed),
        "seqused_k": fake_integers(problem.has_seqused_k),
        "scale_log2": Float32(1.0),
        "tanh_scale": None if problem.softcap is None else Float32(1.0),
        "window_left": None if problem.mask.window_left is None else Int32(0),
        "window_right": None if problem.mask.window_right is None else Int32(0),
    }


def traced(kernel: Callable, arguments: tuple) -> tuple[Callable, tuple]:
    """A kernel with stand-ins for its arguments, and for the stream: what a trace returns."""
    from cutlass.cute.runtime import make_fake_stream

    return kernel, (*arguments, make_fake_stream(use_tvm_ffi_env_stream=True))


def aligned(t: Tensor) -> Tensor:
    """t itself where TMA and 16-byte copies can read it, else a contiguous copy."""
    strides = t.stride()
    multiple = 16 if t.dtype == _E4M3 else 8
    # with three or four dimensions these are all strides but the last
    if strides[-1] == 1 and t.data_ptr() % 16 == 0 and (strides[0] | strides[1] | strides[-2]) % multiple == 0:
        return t
    return t if is_aligned(t) else t.clone(memory_format=torch.contiguous_format)


def is_aligned(t: Tensor) -> bool:
    """Whether TMA and 16-byte copies can read a tensor where it lies."""
    *strides, last = t.stride()
    multiple = 16 if t.dtype == _E4M3 else 8
    return (
        last == 1
        and t.data_ptr() % 16 == 0
        and all(stride % multiple == 0 or size == 1 for size, stride in zip(t.shape[:-1], strides, strict=True))
    )


def with_rows(t: Tensor) -> Tensor:
    """t itself if its last dimension is contiguous, else a contiguous copy."""
    return t if t.stride(-1) == 1 else t.clone(memory_format=torch.contiguous_format)


def vector_bytes(*tensors: Tensor) -> int:
    """The widest copy that divides the tensors' addresses and strides and the length of their rows.

    Of a tensor that `with_rows` copies, those of the copy.
    """
    if all(map(_is_16_byte_aligned, tensors)):
        return 16
    offsets = 0  # a number with the trailing zeros of all of them
    for t in tensors:
        offsets |= t.shape[-1] * t.element_size()
        if t.stride(-1) != 1:
            continue
        offsets |= t.data_ptr()
        for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True):
            if size != 1:
                offsets |= stride * t.element_size()
    return next(n for n in VECTOR_BYTES if offsets % n == 0)


def _is_16_byte_aligned(t: Tensor) -> bool:
    """A quick test that does not look at sizes: True is certain, False says nothing."""
    *strides, last = t.stride()
    offsets = t.shape[-1]
    for stride in strides:
        offsets |= stride
    return last == 1 and (t.data_ptr() | offsets * t.element_size()) % 16 == 0


# ---------------------------------------------------------------- an e4m3 cache

# what blocks and pages with descales of their own are multiples of, see blocks/softmax/cache_scales.py
KEYS_OF_A_DESCALE = 16


def as_pairs(cache: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """An e4m3 cache as 16-bit pairs with half as many columns, which copies can take; another cache as it is.

    Raises: UnsupportedError where not every row begins with a pair.
    """
    if cache.dtype != torch.float8_e4m3fn:
        return cache
    if any(n % 2 for n in (cache.storage_offset(), *cache.stride()[:-1])):
        raise UnsupportedError(f"e4m3 cache: expected rows at even addresses, got strides {cache.stride()}")
    return cache.view(dtype)


def descale_arguments(problem: DecodeProblem, inputs: DecodeInputs) -> tuple[Tensor | None, Tensor | None, int | None]:
    """k_descale, v_descale (batch or num_pages, num_heads_kv, blocks), by strides of 0 where some are one; kv_block."""
    if inputs.k_descale is None or inputs.v_descale is None:
        return None, None, None
    by_block, (outer, size, heads) = problem.kv_block is not None, inputs.k_cache.shape[:3]
    blocks = 1
    if not (by_block and problem.is_paged):
        outer, blocks = inputs.batch, ceil_div(size, problem.kv_block) if by_block else 1
    sizes = outer, heads, blocks
    # () -> (0, 0, 0); (heads,) -> (0, s, 0); two and three dimensions are the first ones
    k_descale, v_descale = (
        t.as_strided(sizes, (0, *t.stride(), 0) if t.dim() == 1 else (*t.stride(), 0, 0, 0)[:3])
        for t in (inputs.k_descale, inputs.v_descale)
    )
    return k_descale, v_descale, None if problem.is_paged else problem.kv_block

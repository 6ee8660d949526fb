"""From tensors to the kernels that round them to e4m3: which one, and what is written where."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...geometry.integers import ceil_div
from ...problem import V_KEYS, AttentionInputs, AttentionProblem, Descales
from ...problem.outputs import empty_as
from ...quantization import codec, rotation
from ...quantization.codec import SCALE_BLOCK
from ..arguments import KeysLastArguments, QuantizeArguments
from ..compiler import compile
from ..compiler.compile import CompileRequest
from ..config.arch import arch_of
from .arguments import MAX_GRID, aligned, element_type, fake_integers, fake_tensor, traced

MAX_HEAD_DIM = 256

assert SCALE_BLOCK == V_KEYS


class Kernel(NamedTuple):
    """The key of the kernel that rounds q, k and v: everything that its code depends on."""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    keys_last: bool  # v is stored as `fp8.keys_last` lays it
    rotates: bool = False
    has_k_mean: bool = False
    has_v_mean: bool = False
    is_packed: bool = False
    has_seqused: bool = False
    num_threads: int | None = None  # threads of a thread block; None: `default_threads`


class LayoutKernel(NamedTuple):
    """The key of the kernel that lays e4m3 values out: everything that its code depends on."""

    head_dim_v: int
    is_packed: bool = False
    num_threads: int | None = None


def default_threads(head_dim: int) -> int:
    """64 elements a thread at head dims 128 and 256, 32 at 64: as many loads under way as registers have room for.

    Args: head_dim: the longer one, if those of q and v differ.
    """
    return 256 if head_dim > 128 else 128


def unsupported(inputs: AttentionInputs, granularity: str) -> str | None:
    """Why the kernel does not quantize this; None if it does."""
    if granularity != "block":
        return f"granularity: expected 'block' (others need the whole tensor first), got {granularity!r}"
    tensors = {"q": (inputs.q, inputs.cu_seqlens_q), "k": (inputs.k, inputs.cu_seqlens_k)}
    tensors["v"] = inputs.v, inputs.cu_seqlens_k
    for name, (t, cu_seqlens) in tensors.items():
        if t.dtype not in (torch.bfloat16, torch.float16):
            return f"{name}: expected bfloat16 or float16, got {t.dtype}"
        if (reason := _unsupported_sizes(name, t, cu_seqlens)) is not None:
            return reason
    return None


def unsupported_layout(v: Tensor, cu_seqlens_k: Tensor | None) -> str | None:
    """Why the kernel of `keys_last` does not lay v out; None if it does."""
    reason = _unsupported_sizes("v", v, cu_seqlens_k)
    batch = v.shape[0] if cu_seqlens_k is None else cu_seqlens_k.shape[0] - 1
    if reason is None and max(batch, v.shape[-3] // SCALE_BLOCK + batch) > MAX_GRID:
        return f"v: expected at most {MAX_GRID} batch entries and blocks of rows, got shape {tuple(v.shape)}"
    return reason


def _unsupported_sizes(name: str, t: Tensor, cu_seqlens: Tensor | None) -> str | None:
    batch = t.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if t.numel() == 0 or batch == 0:
        return f"{name}: expected a tensor that has elements, got shape {tuple(t.shape)}"
    if t.shape[-1] % 16 or t.shape[-1] > MAX_HEAD_DIM:
        return f"{name}: expected a head_dim that is a multiple of 16 up to {MAX_HEAD_DIM}, got {t.shape[-1]}"
    return None


@dataclass(frozen=True)
class Launch:
    """The kernel, and what every call with tensors of these sizes passes to it besides them; holds no tensor.

    Attributes:
        signs: words of `sign_words`, or None.
        descales: shape and strides of each descale, and where it begins in the one tensor that all of them lie in.
        num_descales: how many numbers that tensor has.
        v_shape, v_strides: of v with its keys last; None: it lies as v does.
    """

    kernel: Callable
    signs: tuple[int, ...] | None
    descales: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
    num_descales: int
    v_shape: tuple[int, ...] | None
    v_strides: tuple[int, ...] | None

    def __call__(
        self, inputs: AttentionInputs, k_mean: Tensor | None = None, v_mean: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Descales]:
        """q, k and v in e4m3 and their descales by blocks of 64 rows.

        Args: k_mean, v_mean: (batch, num_heads_kv, head_dim) float32, contiguous, to be subtracted (k_mean after the
            rotation).
        """
        q, k, v, _, cu_seqlens_q, cu_seqlens_k, seqused_k = inputs[:7]
        q, k, v = _readable(q), _readable(k), _readable(v)
        stored_q, stored_k = empty_as(q, q.shape[-1], codec.E4M3), empty_as(k, k.shape[-1], codec.E4M3)
        if self.v_shape is None or self.v_strides is None:
            stored_v = empty_as(v, v.shape[-1], codec.E4M3)
        else:
            stored_v = v.new_empty_strided(self.v_shape, self.v_strides, dtype=codec.E4M3)
        together = q.new_empty_strided((self.num_descales,), (1,), dtype=torch.float32)
        q_layout, k_layout, v_layout = self.descales
        descales = Descales(
            together.as_strided(*q_layout), together.as_strided(*k_layout), together.as_strided(*v_layout)
        )
        self.kernel(
            *QuantizeArguments(
                q,
                k,
                v,
                stored_q,
                stored_k,
                stored_v,
                *descales,
                k_mean=k_mean,
                v_mean=v_mean,
                signs=self.signs,
                cu_seqlens_q=None if cu_seqlens_q is None else cu_seqlens_q.contiguous(),
                cu_seqlens_k=None if cu_seqlens_k is None else cu_seqlens_k.contiguous(),
                seqused_k=None if seqused_k is None else seqused_k.contiguous(),
            )
        )
        return stored_q, stored_k, stored_v, descales


def _readable(t: Tensor) -> Tensor:
    """The tensor that the kernel reads for t: t itself, or an aligned copy without a gradient."""
    return aligned(t.detach() if t.requires_grad else t)


@functools.lru_cache(maxsize=4096)
def prepare(
    problem: AttentionProblem,
    device: torch.device,
    seed: int | None,
    keys_last: bool,
    has_k_mean: bool = False,
    has_v_mean: bool = False,
) -> Launch:
    """The launch for tensors of one problem on one device.

    Args:
        problem: of q, k and v in 16 bits; its options do not matter.
        seed: of the rotation of q and k; None: none.
        keys_last: v as `fp8.keys_last` has it, else as it was.
    """
    kernel = kernel_of_problem(problem, seed is not None, keys_last, has_k_mean, has_v_mean)
    heads = problem.num_heads_q, problem.num_heads_kv, problem.num_heads_kv
    shapes, begins = [], 0
    for num_heads, length in zip(heads, (problem.seqlen_q, problem.seqlen_k, problem.seqlen_k), strict=True):
        if problem.is_packed:
            shape: tuple[int, ...] = num_heads, length // SCALE_BLOCK + problem.batch
        else:
            shape = problem.batch, num_heads, ceil_div(length, SCALE_BLOCK)
        shapes.append((shape, _contiguous(shape), begins))
        begins += math.prod(shape)
    *leading, blocks = shapes[2][0]
    v_shape = (*leading, problem.head_dim_v, blocks * SCALE_BLOCK)
    return Launch(
        kernel_of(kernel, arch_of(device)),
        None if seed is None else sign_words(problem.head_dim, seed),
        tuple(shapes),
        begins,
        v_shape if keys_last else None,
        _contiguous(v_shape) if keys_last else None,
    )


def kernel_of_problem(
    problem: AttentionProblem, rotates: bool, keys_last: bool, has_k_mean: bool = False, has_v_mean: bool = False
) -> Kernel:
    sizes = problem.head_dim, problem.head_dim_v
    return Kernel(
        problem.dtype, *sizes, keys_last, rotates, has_k_mean, has_v_mean, problem.is_packed, problem.has_seqused_k
    )


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def keys_last(v: Tensor, cu_seqlens_k: Tensor | None) -> Tensor:
    """`fp8.keys_last` of v in e4m3."""
    v = _readable(v)
    if cu_seqlens_k is None:
        batch, seqlen_k, heads, head_dim_v = v.shape
        shape: tuple[int, ...] = batch, heads, head_dim_v, ceil_div(seqlen_k, SCALE_BLOCK) * SCALE_BLOCK
    else:
        total, heads, head_dim_v = v.shape
        shape = heads, head_dim_v, (total // SCALE_BLOCK + cu_seqlens_k.shape[0] - 1) * SCALE_BLOCK
    stored = v.new_empty(shape)
    kernel = LayoutKernel(head_dim_v, cu_seqlens_k is not None)
    cu_seqlens = None if cu_seqlens_k is None else cu_seqlens_k.contiguous()
    kernel_of(kernel, arch_of(v.device))(*KeysLastArguments(v, stored, cu_seqlens))
    return stored


@functools.lru_cache(maxsize=64)
def sign_words(head_dim: int, seed: int) -> tuple[int, ...]:
    """The signs of the rotation, 1 for a flipped one: 32 columns an int32, two for every 64 columns begun."""
    signs = rotation.signs(head_dim, seed, torch.device("cpu")).tolist()
    words = [0] * (2 * ceil_div(head_dim, 64))
    for column, sign in enumerate(signs):
        words[column // 32] |= (sign < 0) << column % 32
    return tuple(word - 2**32 if word >= 2**31 else word for word in words)


@functools.lru_cache(maxsize=256)
def kernel_of(kernel: Kernel | LayoutKernel, arch: str) -> Callable:
    return compile.get(*compile_request(kernel, arch))


def compile_request(kernel: Kernel | LayoutKernel, arch: str) -> CompileRequest:
    """The kernel, for `compile.get`."""
    name = "quantize" if isinstance(kernel, Kernel) else "keys_last"
    kernel = _with_threads(kernel)
    pairs = tuple(zip(kernel._fields, kernel, strict=True))
    return CompileRequest(name, (pairs,), arch, functools.partial(trace, kernel))


def _with_threads(kernel: Kernel | LayoutKernel) -> Kernel | LayoutKernel:
    if kernel.num_threads is not None:
        return kernel
    longest = max(kernel.head_dim, kernel.head_dim_v) if isinstance(kernel, Kernel) else kernel.head_dim_v
    return kernel._replace(num_threads=default_threads(longest))


def trace(kernel: Kernel | LayoutKernel) -> tuple:
    """The kernel and stand-ins for its arguments, for `compile`."""
    from cutlass import Float8E4M3FN, Float32, Int32

    from ..device.memory_bound.quantize import Quantize
    from ..device.memory_bound.quantize_values import KeysLast

    kernel = _with_threads(kernel)
    num_threads = kernel.num_threads
    assert num_threads is not None
    batch = () if kernel.is_packed else (None,)

    def columns(head_dim: int):
        return fake_tensor(Float8E4M3FN, *batch, None, head_dim, None, align_bytes=16)

    def rows(dtype: type, head_dim: int):
        return fake_tensor(dtype, *batch, None, None, head_dim, align_bytes=16)

    head_dim_v = kernel.head_dim_v
    if isinstance(kernel, LayoutKernel):
        lengths = fake_integers(kernel.is_packed)
        layout = KeysLastArguments(rows(Float8E4M3FN, head_dim_v), columns(head_dim_v), lengths)
        return traced(KeysLast(head_dim_v, num_threads), layout)

    def mean(head_dim: int, is_given: bool):
        return fake_tensor(Float32, None, None, head_dim, align_bytes=16) if is_given else None

    head_dim, dtype = kernel.head_dim, element_type(kernel.dtype)
    sizes = head_dim, head_dim, head_dim_v
    # one for each: whose sizes one stand-in stands for would have to be equal
    q_descale, k_descale, v_descale = (fake_tensor(Float32, *batch, None, None, align_bytes=4) for _ in sizes)
    arguments = QuantizeArguments(
        q=rows(dtype, head_dim),
        k=rows(dtype, head_dim),
        v=rows(dtype, head_dim_v),
        q_target=rows(Float8E4M3FN, head_dim),
        k_target=rows(Float8E4M3FN, head_dim),
        v_target=columns(head_dim_v) if kernel.keys_last else rows(Float8E4M3FN, head_dim_v),
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        k_mean=mean(head_dim, kernel.has_k_mean),
        v_mean=mean(head_dim_v, kernel.has_v_mean),
        signs=tuple(Int32(0) for _ in sign_words(head_dim, 0)) if kernel.rotates else None,
        cu_seqlens_q=fake_integers(kernel.is_packed),
        cu_seqlens_k=fake_integers(kernel.is_packed),
        seqused_k=fake_integers(kernel.has_seqused),
    )
    return traced(Quantize(dtype, head_dim, head_dim_v, num_threads, kernel.keys_last), arguments)

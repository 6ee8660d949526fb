"""From tensors to the kernels that round them to e4m3: which one, which grid, and what is written where."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ... import fp8
from ...outputs import empty_as
from ...problem import V_KEYS, AttentionInputs
from .. import compile
from ..arch import arch_of
from ..arguments import aligned, element_type, fake_tensor
from ..blocks.integers import ceil_div

BLOCK = 64
MAX_HEAD_DIM = 256
MAX_GRID = 65535  # of its second and third dimension
assert BLOCK == fp8.Q_BLOCK == fp8.KV_BLOCK == V_KEYS


class Kernel(NamedTuple):
    """What the code of a kernel depends on."""

    name: str  # "rows" or "values"
    dtype: torch.dtype
    head_dim: int
    rotates: bool = False
    has_mean: bool = False
    is_packed: bool = False
    has_seqused: bool = False
    num_threads: int | None = None  # of a thread block; None: `default_threads`


def default_threads(head_dim: int) -> int:
    """64 elements a thread at head dims 128 and 256, 32 at 64: as many loads under way as registers have room for."""
    return 256 if head_dim > 128 else 128


def unsupported(inputs: AttentionInputs, granularity: str) -> str | None:
    """Why the kernels do not quantise this; None if they do."""
    if granularity != "block":
        return f"granularity: expected 'block' (others need the whole tensor first), got {granularity!r}"
    tensors = {"q": (inputs.q, inputs.cu_seqlens_q), "k": (inputs.k, inputs.cu_seqlens_k)}
    tensors["v"] = inputs.v, inputs.cu_seqlens_k
    for name, (t, cu_seqlens) in tensors.items():
        if t.dtype not in (torch.bfloat16, torch.float16):
            return f"{name}: expected bfloat16 or float16, got {t.dtype}"
        if (reason := unsupported_tensor(name, t, cu_seqlens)) is not None:
            return reason
    return None


def unsupported_tensor(name: str, t: Tensor, cu_seqlens: Tensor | None) -> str | None:
    batch = t.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if t.numel() == 0 or batch == 0:
        return f"{name}: expected a tensor that has elements, got shape {tuple(t.shape)}"
    if t.shape[-1] % 16 or t.shape[-1] > MAX_HEAD_DIM:
        return f"{name}: expected a head_dim that is a multiple of 16 up to {MAX_HEAD_DIM}, got {t.shape[-1]}"
    if max(batch, t.shape[-3] // BLOCK + batch + 1) > MAX_GRID:
        return f"{name}: expected at most {MAX_GRID} batch entries and blocks of rows, got shape {tuple(t.shape)}"
    return None


def quantize(
    inputs: AttentionInputs, seed: int | None, k_mean: Tensor | None, v_mean: Tensor | None, keys_last: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """q, k and v in e4m3 and their descales by blocks of 64 rows: a kernel each.

    Args:
        seed: of the rotation of q and k; None: none.
        k_mean, v_mean: (batch, num_heads_kv, head_dim) float32, to be subtracted.
        keys_last: v as `fp8.keys_last` has it, else as it was.
    """
    q, k, v, _, cu_seqlens_q, cu_seqlens_k, seqused_k = inputs
    if k_mean is not None and seed is not None:
        k_mean = fp8.rotated(k_mean, seed)  # (k - mean) M = k M - mean M
    quantize_values = values if keys_last else functools.partial(rows, seed=None)
    results = (
        rows(q, None, cu_seqlens_q, None, seed=seed),
        rows(k, k_mean, cu_seqlens_k, seqused_k, seed=seed),
        quantize_values(v, v_mean, cu_seqlens_k, seqused_k),
    )
    return [stored for stored, _ in results], [descale for _, descale in results]


def rows(
    x: Tensor, mean: Tensor | None, cu_seqlens: Tensor | None, seqused: Tensor | None, *, seed: int | None
) -> tuple[Tensor, Tensor]:
    """x (batch, seqlen, heads, head_dim) or packed -> e4m3, and descale. mean: of x after the rotation."""
    x = aligned(x.detach())
    is_packed = cu_seqlens is not None
    kernel = Kernel("rows", x.dtype, x.shape[-1], seed is not None, mean is not None, is_packed, seqused is not None)
    stored, descale = empty_as(x, x.shape[-1], fp8.E4M3), _empty_descale(x, cu_seqlens)
    kernel_of(kernel, arch_of(x.device))(
        x,
        stored,
        descale,
        None if mean is None else mean.contiguous(),
        None if seed is None else sign_words(x.shape[-1], seed),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        None if seqused is None else seqused.contiguous(),
        descale.shape[-1] + is_packed,  # one block more for rows of no sequence
    )
    return stored, descale


def values(
    v: Tensor, mean: Tensor | None, cu_seqlens: Tensor | None, seqused: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """v of 16 bits -> `fp8.keys_last` of its e4m3, and descale; of e4m3, that of v itself, and None."""
    v = aligned(v.detach())
    is_e4m3 = v.dtype == fp8.E4M3
    descale = _empty_descale(v, cu_seqlens)
    stored = v.new_empty(*descale.shape[:-1], v.shape[-1], descale.shape[-1] * BLOCK, dtype=fp8.E4M3)
    kernel = Kernel(
        "values", v.dtype, v.shape[-1], False, mean is not None, cu_seqlens is not None, seqused is not None
    )
    kernel_of(kernel, arch_of(v.device))(
        v,
        stored,
        None if is_e4m3 else descale,
        None if mean is None else mean.contiguous(),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        None if seqused is None else seqused.contiguous(),
    )
    return stored, None if is_e4m3 else descale


def _empty_descale(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """As `QuantizedQKV` has it: (batch, heads, blocks) or packed (heads, blocks)."""
    if cu_seqlens is None:
        return x.new_empty(x.shape[0], x.shape[2], ceil_div(x.shape[1], BLOCK), dtype=torch.float32)
    return x.new_empty(x.shape[1], x.shape[0] // BLOCK + cu_seqlens.shape[0] - 1, dtype=torch.float32)


@functools.lru_cache(maxsize=64)
def sign_words(head_dim: int, seed: int) -> tuple[int, ...]:
    """The signs of the rotation, 1 for a flipped one: 32 columns an int32, two for every 64 columns begun."""
    signs = fp8.signs(head_dim, seed, torch.device("cpu")).tolist()
    words = [0] * (2 * ceil_div(head_dim, 64))
    for column, sign in enumerate(signs):
        words[column // 32] |= (sign < 0) << column % 32
    return tuple(word - 2**32 if word >= 2**31 else word for word in words)


@functools.lru_cache(maxsize=256)
def kernel_of(kernel: Kernel, arch: str) -> Callable:
    return compile.get(*compile_request(kernel, arch))


def compile_request(kernel: Kernel, arch: str) -> tuple:
    """The arguments of `compile.get`."""
    kernel = kernel._replace(num_threads=kernel.num_threads or default_threads(kernel.head_dim))
    pairs = tuple(zip(kernel._fields, kernel, strict=True))
    return f"quantize_{kernel.name}", (pairs,), arch, functools.partial(trace, kernel)


def trace(kernel: Kernel) -> tuple:
    """The kernel and stand-ins for its arguments, for `compile`."""
    from cutlass import Float8E4M3FN, Float32, Int32
    from cutlass.cute.runtime import make_fake_stream

    from .rows import QuantizeRows
    from .values import QuantizeValues

    head_dim, dtype = kernel.head_dim, element_type(kernel.dtype)
    num_threads = kernel.num_threads or default_threads(head_dim)
    batch = () if kernel.is_packed else (None,)
    x = fake_tensor(dtype, *batch, None, None, head_dim, align_bytes=16)
    descale = fake_tensor(Float32, *batch, None, None, align_bytes=4)
    mean = fake_tensor(Float32, None, None, head_dim, align_bytes=16) if kernel.has_mean else None
    cu_seqlens = fake_tensor(Int32, None, align_bytes=4) if kernel.is_packed else None
    seqused = fake_tensor(Int32, None, align_bytes=4) if kernel.has_seqused else None
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    if kernel.name == "values":
        target = fake_tensor(Float8E4M3FN, *batch, None, head_dim, None, align_bytes=16)
        descale = None if kernel.dtype == fp8.E4M3 else descale
        return QuantizeValues(dtype, head_dim, num_threads), (x, target, descale, mean, cu_seqlens, seqused, stream)
    target = fake_tensor(Float8E4M3FN, *batch, None, None, head_dim, align_bytes=16)
    signs = tuple(Int32(0) for _ in sign_words(head_dim, 0)) if kernel.rotates else None
    return QuantizeRows(dtype, head_dim, num_threads), (
        x,
        target,
        descale,
        mean,
        signs,
        cu_seqlens,
        seqused,
        Int32(1),
        stream,
    )

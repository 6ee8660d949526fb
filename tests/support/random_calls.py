"""Random calls of attention over all options, each repeatable from its seed."""

from __future__ import annotations

import random
from typing import Any

import torch
from random_modifiers import NAMES, OF_KERNELS, random_modifiers, with_layout_on
from torch import Tensor

from onepass.testing import Call


def fenced(shape: tuple[int, ...], dtype: torch.dtype, device: str, generator: torch.Generator) -> Tensor:
    """Normal values whose memory lies between NaN fences: reading past either end gives NaN.

    On the "meta" device there are shapes and strides alone.
    """
    count, fence = 1, 64
    for n in shape:
        count *= n
    storage = torch.full((count + 2 * fence,), torch.nan, dtype=dtype, device=device)
    middle = storage[fence : fence + count].view(shape)
    if device != "meta":
        middle.copy_(torch.randn(shape, generator=generator, dtype=torch.float32))
    return middle


def edges_of(seed: int) -> random.Random:
    """A source of random numbers for rare cases alone, so that the rest of a seed's call does not depend on them."""
    return random.Random(f"{seed}, edges")


def heads_or_none(edges: random.Random, heads_q: int, heads_kv: int) -> tuple[int, int]:
    """The numbers of heads; in one of 50 calls there are none, or none of q."""
    if edges.random() >= 0.02:
        return heads_q, heads_kv
    return 0, edges.choice([0, heads_kv])


def some_side_negative(edges: random.Random, window: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """The window; in two calls of five with a negative number instead of one of its sides."""
    if edges.random() >= 0.4:
        return window
    size = -edges.choice([1, 2, 9, 40])
    return (size, window[1]) if edges.random() < 0.5 else (window[0], size)


def random_call(
    seed: int,
    device: str = "cpu",
    max_seqlen: int = 160,
    dtype: torch.dtype | None = None,
    with_modifiers: bool = True,
    for_kernels: bool = False,
) -> Call:
    """A random call over all options; equal arguments give equal calls.

    Args:
        with_modifiers: also draw what `random_modifiers` does. All other arguments of the call are the same.
        for_kernels: but not what no kernel takes.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = dtype or rng.choice([torch.float64, torch.float32, torch.bfloat16, torch.float16])
    heads_kv = rng.choice([1, 1, 2, 3])
    heads_q = heads_kv * rng.choice([1, 1, 2, 3, 5])
    edges = edges_of(seed)
    heads_q, heads_kv = heads_or_none(edges, heads_q, heads_kv)
    head_dim = rng.choice([1, 3, 8, 16, 32, 40, 64, 72, 128, 256])
    head_dim_v = head_dim if rng.random() < 0.6 else rng.choice([1, 5, 16, 64, 128])

    def length() -> int:
        return rng.choice([0, 1, 2, 7, 16, 31, 64, 97, 128, rng.randint(1, max_seqlen)])

    batch = rng.choice([1, 1, 2, 3])
    options: dict[str, Any] = {}
    if rng.random() < 0.4:
        options["causal"] = True
    if rng.random() < 0.35:
        window = tuple(rng.choice([None, 0, 1, 5, 33, 200]) for _ in range(2))
        options["window"] = some_side_negative(edges, window)
    if rng.random() < 0.3:
        options["softcap"] = rng.choice([0.5, 5.0, 30.0, 50.0])
    if rng.random() < 0.3:
        options["softmax_scale"] = rng.choice([0.05, 0.3, 1.0, -0.2])
    if rng.random() < 0.35:
        options["sinks"] = (2 * torch.randn(heads_q, generator=generator, dtype=torch.float32)).to(
            device, dtype if rng.random() < 0.5 else torch.float32
        )

    def tensor(*shape: int) -> Tensor:
        layout = rng.choice(["contiguous", "contiguous", "transposed", "sliced"])
        if layout == "transposed":  # (..., heads, seqlen, dim) seen as (..., seqlen, heads, dim)
            swapped = (*shape[:-3], shape[-2], shape[-3], shape[-1])
            t = fenced(swapped, dtype, device, generator).transpose(-3, -2)
        elif layout == "sliced":  # one of three interleaved tensors, as in a packed qkv projection
            t = fenced((*shape[:-2], 3 * shape[-2], shape[-1]), dtype, device, generator)[..., : shape[-2], :]
        else:
            t = fenced(shape, dtype, device, generator)
        return t

    if rng.random() < 0.35:
        cu_seqlens = []
        for _ in range(2):
            offsets = [0]
            for _ in range(batch):
                offsets.append(offsets[-1] + length())
            cu_seqlens.append(offsets)
        slack = rng.choice([0, 0, 3])
        total_q, total_k = cu_seqlens[0][-1] + slack, cu_seqlens[1][-1] + slack
        lengths_k = [b - a for a, b in zip(cu_seqlens[1], cu_seqlens[1][1:], strict=False)]
        q, k, v = (
            tensor(total_q, heads_q, head_dim),
            tensor(total_k, heads_kv, head_dim),
            tensor(total_k, heads_kv, head_dim_v),
        )
        options["cu_seqlens_q"], options["cu_seqlens_k"] = (
            torch.tensor(c, dtype=torch.int32, device=device) for c in cu_seqlens
        )
    else:
        seqlen_q, seqlen_k = length(), length()
        lengths_k = [seqlen_k] * batch
        q = tensor(batch, seqlen_q, heads_q, head_dim)
        k, v = tensor(batch, seqlen_k, heads_kv, head_dim), tensor(batch, seqlen_k, heads_kv, head_dim_v)
    if rng.random() < 0.3:
        used = [rng.randint(0, n) for n in lengths_k]
        options["seqused_k"] = torch.tensor(used, dtype=torch.int32, device=device)
        lengths_k = used
    if with_modifiers:
        columns = max(*lengths_k, 1 if len(k) else 0) if "cu_seqlens_q" in options else k.shape[1]
        modifiers = random_modifiers(
            seed,
            dtype=dtype,
            heads=heads_q,
            rows=q.shape[-3],
            lengths=lengths_k,
            columns=columns,
            rows_k=k.shape[-3],
            is_packed="cu_seqlens_q" in options,
            names=OF_KERNELS if for_kernels else NAMES,
        )
        options |= {n: with_layout_on(x, device) if isinstance(x, Tensor) else x for n, x in modifiers.items()}
    return Call({"q": q, "k": k, "v": v}, options, seed)

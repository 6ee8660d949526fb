"""Calls of attention_decode as values: their tensors, and the kernels that they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from decode_calls import DecodeCall, random_decode_call
from gpu_cases import DEVICE, NAN, no_waiting, size
from torch import Tensor

INT32, E4M3 = torch.int32, torch.float8_e4m3fn


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, device: str = DEVICE) -> Tensor:
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a call in a CUDA graph. The uncaptured call before it raises if it waits for the device.

    Returns:
        The graph, and the tensors that each replay writes its result to.
    """
    run()  # compiles
    with no_waiting():
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


@dataclass(frozen=True)
class DecodeCase:
    """A call over sequences of these filled lengths, with caches that hold NaN wherever no key lies.

    Attributes:
        heads: the numbers of heads of q and of the cache.
        options: options of attention_decode; `has_sinks` among them is replaced by a tensor of sinks.
    """

    filled: tuple[int, ...]
    seqlen_q: int = 1
    heads: tuple[int, int] = (8, 2)
    head_dims: tuple[int, int] = (64, 64)
    page_size: int | None = None
    seqlen_new: int = 0
    rotary: bool = False
    dtype: torch.dtype = torch.bfloat16
    options: tuple[tuple[str, Any], ...] = field(default=())

    def __str__(self) -> str:
        shape = f"q{self.seqlen_q} h{self.heads[0]}/{self.heads[1]} d{self.head_dims[0]}/{self.head_dims[1]}"
        pages = f" page {self.page_size}" if self.page_size else ""
        more = "".join(f" {name}={value}" for name, value in self.options)
        return f"{shape}{pages} {str(self.dtype).removeprefix('torch.')}{more}"

    def arguments(self, device: str = DEVICE) -> dict[str, Any]:
        """The arguments of attention_decode."""
        batch, room = len(self.filled), -(-(max(self.filled) + self.seqlen_new + 1) // 64) * 64
        room = room if self.page_size is None else -(-room // self.page_size) * self.page_size
        found: dict[str, Any] = dict(self.options)
        num_heads, num_heads_kv = self.heads
        if found.pop("has_sinks", False):
            found["sinks"] = randn(num_heads, dtype=torch.float32, seed=4, device=device)
        found["q"] = randn(batch, self.seqlen_q, num_heads, self.head_dims[0], dtype=self.dtype, seed=1, device=device)
        for i, name in enumerate(("k_cache", "v_cache")):
            rows = batch, room, num_heads_kv, self.head_dims[i]
            cache = randn(*rows, dtype=self.dtype, seed=2 + i, device=device)
            for b, n in enumerate(self.filled):
                cache[b, n:] = NAN
            if self.page_size is not None:
                order = torch.randperm(batch * room // self.page_size + 2, generator=torch.Generator().manual_seed(5))
                table = order[:-2].view(batch, -1).int().to(device)
                pages = cache.new_full((len(order), self.page_size, *cache.shape[2:]), NAN)
                if device != "meta":
                    pages[table.flatten().long()] = cache.view(table.numel(), self.page_size, *cache.shape[2:])
                found["page_table"], cache = table, pages
            found[name] = cache
        found["cache_seqlens"] = torch.tensor(self.filled, dtype=INT32, device=device)
        if self.seqlen_new:
            for i, name in enumerate(("k_new", "v_new")):
                rows = batch, self.seqlen_new, num_heads_kv, self.head_dims[i]
                found[name] = randn(*rows, dtype=self.dtype, seed=7 + i, device=device)
        if self.rotary:
            columns = torch.arange(self.head_dims[0] // 4, device=device)
            angles = torch.arange(room, device=device)[:, None] * 0.5**columns
            found |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        return found


@dataclass(frozen=True)
class E4m3Case(DecodeCase):
    """A DecodeCase over caches in e4m3.

    Attributes:
        descales: what each descale covers: "none", "tensor", "head", "entry", "block" (64 keys) or "page".
    """

    descales: str = "none"

    def __str__(self) -> str:
        return f"{super().__str__()} {self.descales}"

    def arguments(self, device: str = DEVICE) -> dict[str, Any]:
        found = super().arguments(device)
        outer, size, heads = found["k_cache"].shape[:3]
        batch = len(self.filled)
        shape = {"tensor": (), "head": (heads,), "entry": (batch, heads), "block": (batch, heads, -(-size // 64))}
        shape["page"] = outer, heads
        if self.descales in ("block", "page"):
            found["kv_block"] = size if self.descales == "page" else 64
        for i, name in enumerate("kv"):
            found[f"{name}_cache"] = found[f"{name}_cache"].to(E4M3)
            if self.descales != "none":
                descale = randn(*shape[self.descales], dtype=torch.float32, seed=40 + i, device=device).exp()
                found[f"{name}_descale"] = descale
        return found


@dataclass(frozen=True)
class RandomDecodeCase:
    """A call of `random_decode_call`, with up to 700 keys on a GPU."""

    seed: int
    many_rows: bool = False
    packed: bool = False
    with_modifiers: bool = False

    def __str__(self) -> str:
        words = {"many rows": self.many_rows, "packed": self.packed, "with modifiers": self.with_modifiers}
        return " ".join([f"seed {self.seed}", *(word for word, is_said in words.items() if is_said)])

    def call(self, device: str = DEVICE) -> DecodeCall:
        dtypes = torch.bfloat16, torch.float16, torch.bfloat16, torch.float16 if self.many_rows else torch.float32
        dtype, max_keys = dtypes[self.seed % 4], size(700, 100)
        options = self.many_rows, self.packed, self.with_modifiers
        return random_decode_call(self.seed, dtype, max_keys, *options, for_kernels=True).on(device)

    def arguments(self, device: str = DEVICE) -> dict[str, Any]:
        return self.call(device).arguments


FILLED = (1000, 0, 1, 65, 3000)


def _options(**options: Any) -> tuple:
    return tuple(options.items())


# windows that lie wholly before a query's own key or behind it; some rows see a key under the first of them
NEGATIVE = [(None, -2), (-1, None), (300, -100), (-5, 30), (4, -5)]
CASES = [
    # each head dim over dense rows and over pages, with one split and with several
    *(DecodeCase(FILLED, head_dims=(d, d), options=_options(num_splits=1)) for d in (32, 64, 96, 128, 192, 256)),
    *(DecodeCase(FILLED, 3, head_dims=(d, d), page_size=16, options=_options(num_splits=7)) for d in (64, 128, 256)),
    # kernels depend neither on the page size nor on the number of splits, so these cases need few more kernels
    *(
        DecodeCase(FILLED, head_dims=(128, 128), page_size=n, options=_options(num_splits=2))
        for n in (1, 7, 48, 64, 256)
    ),
    *(DecodeCase(FILLED, head_dims=(128, 128), options=_options(num_splits=n)) for n in (None, 2, 64, 256)),
    *(DecodeCase((70000, 1, 33333), head_dims=(128, 128), page_size=n) for n in (None, 64)),
    # tiles with 1 to 16 rows, up to 32 rows, and more
    *(
        DecodeCase(FILLED, m, (h, 2), (128, 128), 16)
        for m, h in ((1, 2), (1, 32), (3, 10), (5, 8), (8, 8), (16, 8), (1, 96))
    ),
    # head dims of V that differ from that of Q, some of which allow no wide copies
    *(
        DecodeCase(FILLED, 2, head_dims=dims, page_size=n)
        for dims, n in (((128, 64), 16), ((40, 72), None), ((5, 7), 3))
    ),
    *(
        DecodeCase((1000, 130), m, (8, 1), (128, 128), 16, dtype=dtype, options=_options(num_splits=5, **options))
        for m, dtype, options in (
            (2, torch.float16, {"window": (100, 0), "has_sinks": True}),
            (2, torch.float32, {"window": (100, 0)}),
            (1, torch.float32, {"softcap": 5.0, "causal": False, "has_sinks": True}),
            (16, torch.float16, {"softcap": 5.0, "causal": False, "window": (300, 20)}),
            (16, torch.float32, {"has_sinks": True}),
            *((m, torch.bfloat16, {"causal": False, "window": w}) for m in (3, 16) for w in NEGATIVE),
        )
    ),
    *(DecodeCase(FILLED, 3, options=_options(num_splits=1, causal=False, window=w)) for w in NEGATIVE),
    *(DecodeCase(FILLED, 3, page_size=16, options=_options(causal=False, window=w)) for w in NEGATIVE),
    DecodeCase((1000, 130), 2, (8, 1), (128, 128), options=_options(num_splits=1, has_sinks=True, softcap=5.0)),
]
# More than 32 rows of a kv head, or 16 of wide heads: the wgmma kernel runs them on Hopper.
MANY_ROWS = [
    # each head dim over dense rows and over pages, with one split and with several; one warpgroup for 64 rows, else two
    *(
        DecodeCase(FILLED, m, (8, 1), (d, d), page_size=n, options=_options(num_splits=s))
        for d in (64, 128, 256)
        for m, n, s in ((8, None, 1), (16, 16, 7), (16, None, 2))
    ),
    *(DecodeCase(FILLED, 16, (8, 1), (d, d), 64) for d in (32, 96, 192)),
    # loads of 16, 64 and 128 keys of a page
    *(DecodeCase(FILLED, 16, (8, 1), (128, 128), n, options=_options(num_splits=3)) for n in (48, 64, 128, 1024)),
    *(DecodeCase((70000, 1, 33333), 16, (8, 1), (128, 128), n) for n in (None, 64)),
    *(DecodeCase(FILLED, 16, (8, 1), (128, 128), options=_options(num_splits=n)) for n in (None, 64, 256)),
    # groups that do not divide a tile, several tiles, groups too large to pack, and queries before the first key
    *(
        DecodeCase(FILLED, m, (h, 2), (128, 128), n)
        for m, h, n in ((9, 10, 16), (5, 18, None), (16, 40, None), (50, 132, None), (100, 6, 16), (300, 2, 64))
    ),
    DecodeCase(FILLED, 40, (4, 2), (128, 64), 16),
    DecodeCase(FILLED, 40, (4, 2), (72, 136), None, options=_options(num_splits=2)),
    *(
        DecodeCase((1000, 130), m, (8, 1), (128, 128), n, dtype=dtype, options=_options(num_splits=s, **options))
        for s, n in ((1, None), (5, 16))
        for m, dtype, options in (
            (16, torch.float16, {"window": (100, 0), "has_sinks": True}),
            (16, torch.float16, {"softcap": 5.0, "causal": False, "window": (300, 20)}),
            (140, torch.bfloat16, {"causal": False, "has_sinks": True}),
            (140, torch.bfloat16, {"window": (20, None), "causal": False}),
            *((40, torch.bfloat16, {"causal": False, "window": w}) for w in NEGATIVE),
        )
    ),
]
NEW_KEYS = [
    DecodeCase((100, 0, 63), 4, (h, 2), (128, 128), n, 4, rotary, options=_options(num_splits=2))
    for h in (8, 20)
    for n in (None, 16)
    for rotary in (False, True)
]

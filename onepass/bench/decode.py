"""Decoding: what is measured (`DecodeCase`), its tensors, and who computes it.

A step reads all keys and values of the cache once, so time is compared with the time to copy as many bytes. Between two
steps of a model the other layers' caches pass through L2, so the steps that are timed read caches that are not there:
several copies in turn, or after a flush, see `CacheCopies`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onepass

from .cases import DTYPES

PAGE_SIZES = (16, 64, 256)
MOST_COPIES = 64
L2_TIMES = 4  # what is read between two reads of the same bytes, over the L2 cache


@dataclass(frozen=True)
class DecodeCase:
    """One step of decoding: seqlen_q new queries a sequence over seqlen_k keys, all of them filled."""

    batch: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    seqlen_q: int = 1
    dtype: str = "bfloat16"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def kv_bytes(self) -> int:
        """Of all keys and values."""
        return 2 * self.batch * self.seqlen_k * self.heads_kv * self.head_dim * self.torch_dtype.itemsize

    @property
    def moved_bytes(self) -> int:
        """Those, q and out."""
        return self.kv_bytes + 2 * self.batch * self.seqlen_q * self.heads_q * self.head_dim * self.torch_dtype.itemsize

    @property
    def label(self) -> str:
        queries = f" q{self.seqlen_q}" if self.seqlen_q > 1 else ""
        return f"b{self.batch} k{self.seqlen_k} h{self.heads_q}/{self.heads_kv} d{self.head_dim}{queries} {self.dtype}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


HEADS = ((32, 8, 128), (64, 8, 128), (16, 1, 128), (32, 8, 64), (32, 8, 256))  # query heads, kv heads, head_dim
BATCHES = (1, 8, 64)
LENGTHS = (1024, 8192, 65536, 524288)


def grid(max_kv_bytes: int = 40 * 10**9) -> tuple[DecodeCase, ...]:
    """Layers of common models, for one sequence and for many, as far as their caches fit."""
    cases = (DecodeCase(b, n, *heads) for heads in HEADS for n in LENGTHS for b in BATCHES)
    return tuple(case for case in cases if case.kv_bytes <= max_kv_bytes)


class Step(NamedTuple):
    """Tensors of one step; paged ones with a table."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    page_table: Tensor | None = None

    def in_pages(self, page_size: int, seed: int = 0) -> Step:
        """The same memory as pages that belong to the sequences in random order: other keys, as many bytes."""
        batch, seqlen = self.k_cache.shape[:2]
        generator = torch.Generator(self.q.device).manual_seed(seed)
        order = torch.randperm(batch * seqlen // page_size, generator=generator, device=self.q.device)
        k, v = (t.view(-1, page_size, *t.shape[2:]) for t in (self.k_cache, self.v_cache))
        return self._replace(k_cache=k, v_cache=v, page_table=order.view(batch, -1).int())


def make_step(case: DecodeCase, device: str, seed: int = 0) -> Step:
    """The same case, device type and seed give the same data: standard normal."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=case.torch_dtype, device=device).normal_(generator=generator)

    rows = case.batch, case.seqlen_k, case.heads_kv, case.head_dim
    q = normal(case.batch, case.seqlen_q, case.heads_q, case.head_dim)
    lengths = torch.full((case.batch,), case.seqlen_k, dtype=torch.int32, device=device)
    return Step(q, normal(*rows), normal(*rows), lengths)


class CacheCopies(NamedTuple):
    """How a step's bytes are kept from coming from the L2 cache: by reading other copies first, or by a flush.

    Attributes:
        number: copies of the cache that are read in turn.
        is_flushed: they do not fill the L2 cache often enough: it is flushed before each sample, which reads each of
            them once.
    """

    number: int
    is_flushed: bool

    @classmethod
    def of(cls, case: DecodeCase, l2_bytes: int) -> CacheCopies:
        needed = math.ceil(L2_TIMES * l2_bytes / case.kv_bytes)
        return cls(min(needed, MOST_COPIES), needed > MOST_COPIES)

    def __str__(self) -> str:
        return f"{self.number}{', flushed' if self.is_flushed else ''}"


# ---------------------------------------------------------------- contenders

Run = Callable[[Step], Tensor]


def onepass_run(backend: str | None = None) -> Run:
    """onepass, with pages or without."""

    def run(step: Step) -> Tensor:
        q, k_cache, v_cache, lengths, table = step
        return onepass.attention_decode(
            q, k_cache, v_cache, cache_seqlens=lengths, page_table=table, causal=True, backend=backend
        )

    return run


def flash_attention_3_run() -> Run:
    """FlashAttention-3's flash_attn_with_kvcache, which chooses its splits. Raises: ImportError without it."""
    for name in ("flash_attn_interface", "fa3_fwd_interface"):
        try:
            attend = importlib.import_module(name).flash_attn_with_kvcache
        except (ImportError, AttributeError):
            continue

        def run(step: Step, attend: Callable = attend) -> Tensor:
            q, k_cache, v_cache, lengths, table = step
            out = attend(q, k_cache, v_cache, cache_seqlens=lengths, page_table=table, causal=True, num_splits=0)
            return out[0] if isinstance(out, tuple) else out

        return run
    raise ImportError("neither flash_attn_interface nor fa3_fwd_interface has flash_attn_with_kvcache")


def by_math(step: Step, dtype: torch.dtype) -> Tensor:
    """Plain attention over the filled keys of each sequence, every intermediate in one dtype."""
    outs = []
    for b, filled in enumerate(step.cache_seqlens.tolist()):
        k, v = (rows_of(step, cache, b)[:filled].to(dtype) for cache in (step.k_cache, step.v_cache))
        q = step.q[b].to(dtype)
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q * q.shape[-1] ** -0.5, k)
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(filled - len(q) + 1)
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        outs.append(out.nan_to_num(0.0))  # queries before the first key
    return torch.stack(outs)


def rows_of(step: Step, cache: Tensor, b: int) -> Tensor:
    return cache[b] if step.page_table is None else cache[step.page_table[b].long()].flatten(0, 1)

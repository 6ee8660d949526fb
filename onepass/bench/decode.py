"""Decoding: the tensors of a step over a cache, the contenders that compute it, and how they are timed.

A step reads all keys and values of the cache once, so its time is compared with the time to copy as many bytes. Between
two steps of a model the other layers' caches pass through L2. The steps that are timed therefore read caches that are
not in L2: several copies in turn, or after a flush, see `CacheCopies`.
"""

from __future__ import annotations

import functools
import importlib
import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import onepass

from ..api import decode_calls
from ..dispatch import decode
from ..problem.decode import DecodeProblem
from ..testing.results import Row, reason_of
from ..tuning.timing import CudaSampler, Sampler, Samples, cpu_sampler, measure_interleaved
from .cases import Case, Inputs
from .check import Oracle
from .flops import bytes_moved, kv_bytes
from .peers import Found
from .rows import Options, fill_ratios, new_row

PAGE_SIZES = (16, 64, 256)
MOST_COPIES = 64
# how many times the size of the L2 cache is read between two reads of the same bytes
L2_TIMES = 4


class Step(NamedTuple):
    """The tensors of one step. A paged cache comes with a page table."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    page_table: Tensor | None = None

    def in_pages(self, page_size: int, seed: int = 0) -> Step:
        """A step whose cache is this memory, as pages that belong to the sequences in random order."""
        batch, seqlen = self.k_cache.shape[:2]
        order = torch.randperm(batch * seqlen // page_size, generator=torch.Generator().manual_seed(seed))
        k, v = (t.view(-1, page_size, *t.shape[2:]) for t in (self.k_cache, self.v_cache))
        return self._replace(k_cache=k, v_cache=v, page_table=order.view(batch, -1).int().to(self.q.device))


def problem_of(step: Step) -> DecodeProblem:
    """The problem that `onepass_run` poses."""
    problem, _ = decode_calls.problem_of("bench", step._asdict())
    return problem


class Sequences:
    """A cache, in pages or dense, that is indexed like a (batch, seqlen, heads, dim) tensor, one sequence at a time."""

    def __init__(self, step: Step, cache: Tensor):
        self.table, self.cache = step.page_table, cache

    def __getitem__(self, index: tuple) -> Tensor:
        b, *rest = index
        rows = self.cache[b] if self.table is None else self.cache[self.table[b].long()].flatten(0, 1)
        return rows[tuple(rest)]


def make_step(case: Case, device: str, seed: int = 0) -> Step:
    """A step of standard normal values over a cache that is all filled.

    Equal cases, device types and seeds give equal data.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=case.torch_dtype, device=device).normal_(generator=generator)

    q = normal(case.batch, case.seqlen_q, case.heads_q, case.head_dim)
    k, v = (normal(case.batch, case.seqlen_k, case.heads_kv, d) for d in (case.head_dim, case.head_dim_v))
    return Step(q, k, v, torch.full((case.batch,), case.seqlen_k, dtype=torch.int32, device=device))


class CacheCopies(NamedTuple):
    """How a step is kept from reading from the L2 cache: by reading other copies of its cache first, or by a flush.

    Attributes:
        number: the number of copies of the cache that are read in turn.
        is_flushed: whether the L2 cache is flushed before each sample, which then reads each copy once, because the
            copies do not fill the L2 cache often enough.
    """

    number: int
    is_flushed: bool

    @classmethod
    def of(cls, num_bytes: int, l2_bytes: int) -> CacheCopies:
        """Args: num_bytes: of one cache."""
        needed = max(1, math.ceil(L2_TIMES * l2_bytes / num_bytes))
        return cls(min(needed, MOST_COPIES), needed > MOST_COPIES)

    def __str__(self) -> str:
        return f"{self.number}{', flushed' if self.is_flushed else ''}"


@functools.cache
def copy_bandwidth(device: str) -> float:
    """TB/s of a copy on a device, read and written bytes together."""
    is_cuda = device.startswith("cuda")
    num_bytes = 2**30 if is_cuda else 2**27
    a = torch.ones(num_bytes // 4, device=device)
    b = torch.empty_like(a)

    def copy() -> object:
        # by a kernel: copy_ in a CUDA graph is a copy of another kind, with two thirds of the bandwidth on an H200
        return torch.neg(a, out=b) if is_cuda else b.copy_(a)

    sampler: Sampler = CudaSampler([copy], 5.0) if is_cuda else cpu_sampler(copy)
    sampler()
    return 2 * num_bytes / statistics.median(sampler() for _ in range(7)) / 1e9


# ---------------------------------------------------------------- contenders

Run = Callable[[Step], Tensor]


class Decoder(NamedTuple):
    """One implementation, over a dense cache or, with page_size, over pages."""

    run: Run
    page_size: int | None = None

    def adapt(self, step: Step, seed: int = 0) -> Step:
        return step if self.page_size is None else step.in_pages(self.page_size, seed)


def onepass_run(backend: str | None = None) -> Run:
    def run(step: Step) -> Tensor:
        q, k_cache, v_cache, lengths, table = step
        return onepass.attention_decode(
            q, k_cache, v_cache, cache_seqlens=lengths, page_table=table, causal=True, backend=backend
        )

    return run


def onepass_decoders(backend: str | None = None) -> dict[str, Decoder]:
    """onepass over a dense cache and over pages, by name."""
    run = onepass_run(backend)
    return {"onepass": Decoder(run)} | {f"onepass page {size}": Decoder(run, size) for size in PAGE_SIZES}


def flash_attention_3_run(is_prepared: bool = False) -> Run:
    """FlashAttention-3's flash_attn_with_kvcache, which chooses its splits.

    Args: is_prepared: whether the first call makes the metadata once; without it every call does, with another kernel.
    Raises: ImportError where no package has the function.
    """
    module = _flash_attention_3()
    metadata: dict[tuple, tuple[Tensor, Any]] = {}  # with its lengths, which keep their id to themselves

    def run(step: Step) -> Tensor:
        q, k_cache, v_cache, lengths, table = step
        more = {} if table is None else {"page_table": table}
        if is_prepared:
            key = id(lengths), q.shape, k_cache.shape
            if key not in metadata:
                capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
                sizes = q.shape[0], q.shape[1], capacity, q.shape[2], k_cache.shape[2], q.shape[3]
                page_size = None if table is None else k_cache.shape[1]
                made = module.get_scheduler_metadata(
                    *sizes, lengths, qkv_dtype=q.dtype, page_size=page_size, causal=True, num_splits=0
                )
                metadata[key] = lengths, made
            _, more["scheduler_metadata"] = metadata[key]
        out = module.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, causal=True, num_splits=0, **more
        )
        return out[0] if isinstance(out, tuple) else out

    return run


def _flash_attention_3() -> Any:
    for name in ("flash_attn_interface", "fa3_fwd_interface"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "flash_attn_with_kvcache"):
            return module
    raise ImportError("neither flash_attn_interface nor fa3_fwd_interface has flash_attn_with_kvcache")


def sdpa_run() -> Run:
    """torch's scaled_dot_product_attention, for one query of each sequence over a cache that is all filled."""

    def run(step: Step) -> Tensor:
        assert step.q.shape[1] == 1
        q, k, v = (t.transpose(1, 2) for t in step[:3])
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)

    return run


# the keys are names in peers.PEERS
PEER_RUNS: dict[str, Callable[[], Run]] = {"fa3": flash_attention_3_run, "sdpa": sdpa_run}


# ---------------------------------------------------------------- a row


def measure_row(set_name: str, case: Case, found: Found, options: Options) -> Row:
    """Check all contenders, then time the ones that are right, in turns."""
    device, is_cuda = options.device, options.device_type == "cuda"
    row = new_row(set_name, "decode", case, None)
    bytes_read = bytes_moved(case)
    row |= {"bytes": bytes_read, "copy_tb_per_s": copy_bandwidth(device)}
    decoders = onepass_decoders()
    for name in found.present.keys() & PEER_RUNS.keys():
        try:
            decoders[name] = Decoder(PEER_RUNS[name]())
        except ImportError as error:
            row["skipped"][name] = str(error)
    if is_cuda and (free := torch.cuda.mem_get_info()[0]) < 1.2 * kv_bytes(case):
        reason = f"K and V take {kv_bytes(case) / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        row["skipped"] |= dict.fromkeys(decoders, reason)
        return row
    copies = CacheCopies(1, False)
    if is_cuda:
        copies = CacheCopies.of(kv_bytes(case), torch.cuda.get_device_properties(device).L2_cache_size)
    row["copies"] = str(copies)
    steps = [make_step(case, device, seed) for seed in range(copies.number)]
    row["backend"] = decode.require_decode(problem_of(steps[0]))
    samplers = {}
    for name, decoder in decoders.items():
        try:
            given = [decoder.adapt(step, seed) for seed, step in enumerate(steps)]
            (checked,) = oracle_of(case, given[0]).compare({"out": decoder.run(given[0])}, name in PEER_RUNS)
            if not checked.ok:
                row["failed"][name] = str(checked)
                continue
            calls = [functools.partial(decoder.run, step) for step in given]
            samplers[name] = sampler_of(calls, copies) if is_cuda else cpu_sampler(calls[0])
        except Exception as error:  # a kernel compiler has errors of its own, and each means that it did not run
            row["failed"][name] = reason_of(error)
            continue
        row["contenders"][name] = {"max_error": checked.error, "error_budget": checked.budget}
        row["contenders"][name]["launch"] = getattr(samplers[name], "launch", "eager")
    samples = Samples({})

    def keep(so_far: Samples) -> None:
        nonlocal samples
        samples = so_far

    try:
        measure_interleaved(samplers, rounds=options.rounds, time_budget_s=options.time_budget_s, on_round=keep)
    finally:
        row["rounds"] = samples.rounds
        for name in samples.ms if samples.rounds else ():
            row["contenders"][name] |= times(samples, name, bytes_read, row["copy_tb_per_s"])
    fill_ratios(row, samples, set(found.present))
    return row


def oracle_of(case: Case, step: Step) -> Oracle:
    """The oracle of the sampled rows of out of a step, over pages or a dense cache."""
    k, v = (Sequences(step, cache) for cache in (step.k_cache, step.v_cache))
    inputs: Any = Inputs(step.q, k, v, step.q)  # type: ignore[arg-type]  # read by sequence and head alone
    return Oracle(case, inputs)


def sampler_of(calls: list, copies: CacheCopies, sample_ms: float = 2.5) -> CudaSampler:
    return CudaSampler(calls, 0.0 if copies.is_flushed else sample_ms)


def times(samples: Samples, name: str, num_bytes: int, copy_tb_per_s: float) -> dict[str, float]:
    """The times of one contender, and its bandwidth compared with that of a copy."""
    ms = samples.spread(name)
    tb_per_s = num_bytes / ms.median / 1e9
    return {
        "median_ms": ms.median,
        "p20_ms": ms.p20,
        "p80_ms": ms.p80,
        "tb_per_s": tb_per_s,
        "of_copy": tb_per_s / copy_tb_per_s,
    }

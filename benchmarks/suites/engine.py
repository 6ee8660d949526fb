"""Tokens per second of a serving loop with continuous batching: onepass over pages vs. FlashAttention-3.

    python -m benchmarks engine                 # 1, 16 and 128 requests, on a GPU
    python -m benchmarks engine --small         # on a CPU, to see that it runs

A step is what an inference engine does: the tokens of a step, single tokens of running requests with chunks of new
prompts, are packed into one batch; each layer writes their keys and values into the cache and attends over it. Steps
in which all requests generate are replayed CUDA graphs. The model is a Llama of 8 layers (16 heads of 128, 4 kv heads)
with random weights. Contenders differ in the attention and in the cache alone: onepass over pages of 64 keys at random
places and over a dense cache, and FlashAttention-3's flash_attn_with_kvcache over a dense cache (the package at hand
has no pages). Contenders take turns; the median of the rounds counts. `same_tokens` is the share of tokens that equal
the first contender's: in 16 bits a token may differ where two are almost equally likely, and then all after it differ.
The results go to --out as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass.testing.machine import describe
from onepass.testing.results import Report, Row

from ..harness.suite import Args, Suite

PAGE_SIZE = 64
PAGED, DENSE, FA3 = "onepass page 64", "onepass", "fa3"


class Sizes(NamedTuple):
    """A model and what it is asked for.

    Attributes:
        chunk: tokens of a prompt that one step takes.
        prompt: tokens of the longest prompt; the shortest has half as many.
        new: tokens that each request generates.
    """

    device: str
    dtype: torch.dtype
    hidden: int
    wide: int
    layers: int
    heads: int
    heads_kv: int
    head_dim: int
    vocabulary: int
    requests: tuple[int, ...]
    chunk: int
    prompt: int
    new: int


LARGE = Sizes("cuda", torch.bfloat16, 2048, 5632, 8, 16, 4, 128, 32000, (1, 16, 128), 2048, 2048, 128)
SMALL = Sizes("cpu", torch.float32, 64, 128, 2, 4, 2, 16, 256, (1, 3), 24, 40, 5)


class Step(NamedTuple):
    """The tokens of a step on the device.

    Attributes:
        slots: where their keys go in a cache whose rows are counted through.
        cu_seqlens_q, lengths: for each request, where its tokens begin, and how many keys it has after this step.
        table: (requests, pages), or None.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    cu_seqlens_q: Tensor
    lengths: Tensor
    table: Tensor | None
    max_seqlen_q: int


Attend = Callable[[Tensor, Tensor, Tensor, Step], Tensor]


def by_onepass(q: Tensor, k_cache: Tensor, v_cache: Tensor, step: Step) -> Tensor:
    return onepass.attention_decode(
        q,
        k_cache,
        v_cache,
        cache_seqlens=step.lengths,
        page_table=step.table,
        cu_seqlens_q=step.cu_seqlens_q,
        max_seqlen_q=step.max_seqlen_q,
    )


def by_fa3() -> Attend | None:
    try:
        module = importlib.import_module("fa3_fwd_interface")
    except ImportError:
        return None

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, step: Step) -> Tensor:
        lengths = {"cache_seqlens": step.lengths, "cu_seqlens_q": step.cu_seqlens_q, "max_seqlen_q": step.max_seqlen_q}
        out = module.flash_attn_with_kvcache(q, k_cache, v_cache, causal=True, num_splits=0, **lengths)
        return out[0] if isinstance(out, tuple) else out

    return attend


class Model:
    """The layers of a Llama with random weights, without its rotary embedding."""

    def __init__(self, sizes: Sizes):
        generator = torch.Generator(sizes.device).manual_seed(0)

        def weight(rows: int, columns: int) -> Tensor:
            found = torch.empty(rows, columns, device=sizes.device, dtype=sizes.dtype)
            return found.normal_(0.0, columns**-0.5, generator=generator)

        heads = sizes.heads + 2 * sizes.heads_kv
        self.sizes = sizes
        self.embedding = weight(sizes.vocabulary, sizes.hidden)
        self.layers = [
            (
                weight(heads * sizes.head_dim, sizes.hidden),
                weight(sizes.hidden, sizes.heads * sizes.head_dim),
                weight(2 * sizes.wide, sizes.hidden),
                weight(sizes.hidden, sizes.wide),
            )
            for _ in range(sizes.layers)
        ]

    def next_tokens(self, step: Step, caches: list[tuple[Tensor, Tensor]], attend: Attend) -> Tensor:
        """The most likely token after the last one of each request."""
        sizes = self.sizes
        x = self.embedding[step.tokens]
        split = [sizes.heads, sizes.heads_kv, sizes.heads_kv]
        for (qkv, out, up, down), (k_cache, v_cache) in zip(self.layers, caches, strict=True):
            projected = F.linear(self._normed(x), qkv).unflatten(-1, (-1, sizes.head_dim))
            q, k, v = projected.split(split, dim=1)
            k_cache.flatten(0, 1).index_copy_(0, step.slots, k)
            v_cache.flatten(0, 1).index_copy_(0, step.slots, v)
            x = x + F.linear(attend(q, k_cache, v_cache, step).flatten(1), out)
            gate, value = F.linear(self._normed(x), up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * value, down)
        last = x[step.cu_seqlens_q[1:].long() - 1]
        return F.linear(self._normed(last), self.embedding).argmax(-1)

    def _normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],))


class Engine:
    """A cache with room for some requests, and the loop that serves them."""

    def __init__(self, model: Model, attend: Attend, count: int, is_paged: bool):
        sizes = model.sizes
        self.model, self.attend, self.count = model, attend, count
        self.capacity = -(-(sizes.prompt + sizes.new) // PAGE_SIZE) * PAGE_SIZE
        rows, pages = (count, self.capacity), self.capacity // PAGE_SIZE
        self.table = None
        # the first row of each page of each request
        first = torch.arange(count * pages).view(count, pages) * PAGE_SIZE
        if is_paged:
            rows = (count * pages, PAGE_SIZE)
            table = torch.randperm(count * pages, generator=torch.Generator().manual_seed(1)).view(count, pages)
            self.table, first = table.int().to(sizes.device), table * PAGE_SIZE
        self.rows_of = (first[..., None] + torch.arange(PAGE_SIZE)).flatten(1)  # (requests, capacity)
        shape = (*rows, sizes.heads_kv, sizes.head_dim)
        make = {"device": sizes.device, "dtype": sizes.dtype}
        self.caches = [(torch.zeros(shape, **make), torch.zeros(shape, **make)) for _ in range(sizes.layers)]  # type: ignore[call-overload]
        self.graph: torch.cuda.CUDAGraph | None = None

    def serve(self, prompts: list[Tensor]) -> Tensor:
        """(requests, new): the tokens that follow the prompts."""
        done, found = [0] * self.count, []
        # steps with chunks of prompts, until every request has its first token
        waiting = list(range(self.count))
        first: list[Any] = [None] * self.count
        while waiting:
            chosen, budget = [], self.model.sizes.chunk
            for b in waiting:
                taken = min(budget, len(prompts[b]) - done[b])
                if taken:
                    chosen.append((b, taken))
                budget -= taken
            step = self._step([(b, done[b], prompts[b][done[b] : done[b] + n]) for b, n in chosen])
            tokens = self.model.next_tokens(step, self.caches, self.attend)
            for b, n in chosen:
                done[b] += n
                if done[b] == len(prompts[b]):
                    first[b] = tokens[b]
                    waiting.remove(b)
        found.append(torch.stack(first))
        step = self._step([(b, len(prompts[b]), found[-1][b : b + 1].cpu()) for b in range(self.count)])
        rows = self.rows_of.to(step.slots.device)
        run = self._generating(step, rows)
        for _ in range(self.model.sizes.new - 1):
            found.append(run().clone())
        return torch.stack(found, 1).cpu()

    def _step(self, parts: list[tuple[int, int, Tensor]]) -> Step:
        """A step of some requests. Args: parts: for each one its number, how many keys it has so far, its tokens."""
        positions = [torch.arange(start, start + len(tokens)) for _, start, tokens in parts]
        slots = [self.rows_of[b][p] for (b, *_), p in zip(parts, positions, strict=True)]
        counts = [len(tokens) for *_, tokens in parts]
        device, requests = self.model.sizes.device, torch.tensor([b for b, *_ in parts])
        lengths = torch.zeros(self.count, dtype=torch.int32)
        ends = torch.zeros(self.count + 1, dtype=torch.int32)
        # requests that have no token in this step have no query, so that every step has the shape of a batch
        lengths[requests] = torch.tensor([start + len(tokens) for _, start, tokens in parts], dtype=torch.int32)
        ends[1:][requests] = torch.tensor(counts, dtype=torch.int32)
        ends = ends.cumsum(0, dtype=torch.int32)
        order = requests.argsort()
        joined = [torch.cat([x[i] for i in order.tolist()]) for x in ([t for *_, t in parts], positions, slots)]
        tokens, where, slots_of_all, ends, lengths = (x.to(device) for x in (*joined, ends, lengths))
        return Step(tokens, where, slots_of_all, ends, lengths, self.table, max(counts))

    def _generating(self, step: Step, rows: Tensor) -> Callable[[], Tensor]:
        """A function that generates a token of every request; on a GPU it replays a graph."""

        def run() -> Tensor:
            tokens = self.model.next_tokens(step, self.caches, self.attend)
            step.tokens.copy_(tokens)
            step.positions.add_(1)
            step.lengths.add_(1)
            step.slots.copy_(rows.gather(1, step.positions[:, None])[:, 0])
            return tokens

        if self.model.sizes.device == "cpu":
            return run
        before = [x.clone() for x in step[:5]]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            tokens = run()
        for now, then in zip(step[:5], before, strict=True):
            now.copy_(then)
        graph = self.graph

        def replay() -> Tensor:
            graph.replay()
            return tokens

        return replay


@torch.inference_mode()
def measure(count: int, args: Args, report: Report) -> None:
    model, sizes = args.model, args.model.sizes
    generator = torch.Generator().manual_seed(count)
    lengths = [sizes.prompt - b * 37 % (sizes.prompt // 2 + 1) for b in range(count)]
    prompts = [torch.randint(sizes.vocabulary, (n,), generator=generator) for n in lengths]
    ways: dict[str, tuple[Attend, bool]] = {PAGED: (by_onepass, True), DENSE: (by_onepass, False)}
    if (fa3 := by_fa3()) is not None:
        ways[FA3] = fa3, False
    found: dict[str, Tensor] = {}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(args.rounds + 1):  # the first round compiles
        for name, (attend, is_paged) in ways.items():
            engine = Engine(model, attend, count, is_paged)
            _wait(sizes.device)
            start = time.perf_counter()
            found[name] = engine.serve(prompts)
            _wait(sizes.device)
            if i:
                seconds[name].append(round(time.perf_counter() - start, 5))
    rates = {name: round(count * sizes.new / statistics.median(times), 1) for name, times in seconds.items()}
    same = {name: round(float((tokens == found[PAGED]).float().mean()), 4) for name, tokens in found.items()}
    row: Row = {"requests": count, "new_tokens": sizes.new, "dtype": str(sizes.dtype), "seconds": seconds}
    row |= {"tokens_per_s": rates, "same_tokens": same}
    if FA3 in rates:
        row["ratio"] = round(rates[PAGED] / rates[FA3], 3)
    report.add(row)
    print({name: value for name, value in row.items() if name != "seconds"}, flush=True)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="how often each contender serves all requests")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")


def start(args: Args, parser: argparse.ArgumentParser) -> dict[str, Any]:
    args.model = Model(SMALL if args.small else LARGE)
    sizes = args.model.sizes
    return describe(sizes.device) | {"suite": "engine", "sizes": {n: str(x) for n, x in sizes._asdict().items()}}


def is_wrong(row: Row) -> bool:
    """In float32 a dense cache gives the same tokens as pages."""
    return row["dtype"] == str(torch.float32) and row["same_tokens"][DENSE] < 1


SUITE = Suite(
    "engine",
    __doc__,
    add_options,
    start,
    lambda args: args.model.sizes.requests,
    measure,
    is_wrong=is_wrong,
    out="engine.json",
)

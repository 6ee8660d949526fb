"""Whole models with onepass and with torch's SDPA: generation, training, a diffusion transformer, and the first step.

    python -m benchmarks models                               # all parts, on a GPU
    python -m benchmarks models --parts train --small         # on a CPU, to see that it runs

generate    transformers' Llama (random weights), greedy, new tokens per second: prompts of 1k and 32k tokens, batch 1
            and 4, with and without padding on the left. Before they are timed, both generate a few tokens while a wait
            of the host inside onepass's attention function is an error. The first generation of each is timed apart:
            its cache goes through lengths that the process has not seen (first_s). A dynamic cache grows with each
            token. With a static one transformers compiles the forward of a token, on a GPU into a CUDA graph, in
            which nothing can wait.
train       steps of the same model with SGD: tokens per second at 4k, 16k and 32k.
diffusion   the blocks of a diffusion transformer (24 heads of 128), forward, 4k to 32k tokens: torch's operators as
            they are, as `torch_sdpa.activate` has them, and FlashAttention-3 where it can be imported.
first       seconds of the first training step of a process, where no kernel has been compiled before.

Contenders take turns, medians count. The losses, and outputs of the diffusion transformer, are compared. Needs
transformers for all parts but diffusion. The results go to --out as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.integrations import torch_sdpa
from onepass.processes import python_command
from onepass.testing.machine import describe
from onepass.testing.results import Report

from ..harness.suite import Args, Suite

OURS, TORCH = "onepass", "sdpa"
PARTS = ("generate", "train", "diffusion", "first")
LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 65536,
    "initializer_range": 0.02,
}
SMALL_LLAMA: dict[str, Any] = LLAMA | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CLOSE = 0.02  # of losses and of outputs, relative to the largest value


class Sizes:
    """The sizes of what is measured: on a GPU, or with --small a minute's work for a CPU."""

    def __init__(self, small: bool):
        self.device, self.dtype = ("cpu", torch.float32) if small else ("cuda", torch.bfloat16)
        self.llama = SMALL_LLAMA if small else LLAMA
        self.prompts, self.batches = ([24], [1, 2]) if small else ([1024, 32768], [1, 4])
        self.caches, self.padding = ["dynamic", "static"], [0, 1]
        self.new_tokens = 8 if small else 512
        self.trained = [32] if small else [4096, 16384, 32768]
        self.tokens_of_a_step = 64 if small else 16384
        self.images = [64] if small else [4096, 8192, 16384, 32768]
        self.width, self.heads, self.layers = (64, 4, 2) if small else (3072, 24, 4)


# ---------------------------------------------------------------- timing


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], Any], device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def in_turns(
    calls: dict[str, Callable[[], Any]],
    rounds: int,
    device: str,
    around: Mapping[str, Callable[[], contextlib.AbstractContextManager]] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each call in each round; the order is reversed from round to round.

    Args: around: contexts in which some calls are timed; entering and leaving them is not.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in list(calls)[:: -1 if i % 2 else 1]:
            with (around or {}).get(name, contextlib.nullcontext)():
                found[name].append(round(seconds_of(calls[name], device), 6))
    return found


def row_of(
    part: str, case: dict[str, Any], seconds: dict[str, list[float]], tokens: int, **more: Any
) -> dict[str, Any]:
    """A row of the results: tokens per second of each contender, and the ratio of onepass to the best of the others."""
    rates = {name: round(tokens / statistics.median(times), 1) for name, times in seconds.items()}
    best = max(rate for name, rate in rates.items() if name != OURS)
    return {
        "part": part,
        **case,
        "seconds": seconds,
        "tokens_per_s": rates,
        "ratio": round(rates[OURS] / best, 3),
        **more,
    }


def show(row: dict[str, Any], report: Report) -> None:
    report.add(row)
    hidden = ("seconds",)
    print(" ".join(f"{name}={value}" for name, value in row.items() if name not in hidden), flush=True)


# ---------------------------------------------------------------- transformers


def make_llama(sizes: Sizes, attention: str = TORCH) -> Any:
    """A Llama with random weights. Registers onepass, so that a model may be switched to it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from onepass.integrations.transformers import register

    register(OURS)
    torch.manual_seed(0)
    with torch.device(sizes.device):
        config = LlamaConfig(**sizes.llama, pad_token_id=0, bos_token_id=1, eos_token_id=None)
        model: Any = LlamaForCausalLM(config)
    model = model.to(sizes.dtype)
    model.set_attn_implementation(attention)
    return model


@contextlib.contextmanager
def no_waiting_in_attention(device: str) -> Iterator[list[int]]:
    """Make a wait of the host inside onepass's attention function an error.

    Yields: a list with a 1 for each call.
    """
    from transformers import AttentionInterface

    from onepass.integrations.transformers import attention_forward

    calls: list[int] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            return attention_forward(*arguments, **options)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    AttentionInterface.register(OURS, watched)
    try:
        yield calls
    finally:
        AttentionInterface.register(OURS, attention_forward)


def generate(args: Args, report: Report) -> None:
    sizes = args.sizes
    model = make_llama(sizes).eval()
    for case in itertools.product(sizes.caches, sizes.prompts, sizes.batches, map(bool, sizes.padding)):
        show(_generated(model, sizes, *case, args.rounds), report)


def _generated(
    model: Any, sizes: Sizes, cache: str, prompt: int, batch: int, padded: bool, rounds: int
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(prompt + batch)
    tokens = torch.randint(2, sizes.llama["vocab_size"], (batch, prompt), generator=generator)
    mask = torch.ones_like(tokens)
    if padded:
        for b in range(batch):
            mask[b, : prompt // 16 + b * prompt // 8] = 0
    inputs = {"input_ids": (tokens * mask).to(sizes.device), "attention_mask": mask.to(sizes.device)}
    options: dict[str, Any] = {"do_sample": False, "cache_implementation": None if cache == "dynamic" else cache}

    def run(name: str, count: int) -> Tensor:
        model.set_attn_implementation(name)
        with torch.no_grad():
            found = model.generate(**inputs, **options, max_new_tokens=count, min_new_tokens=count)
        return found[:, prompt:]

    first = min(8, sizes.new_tokens)
    few = {TORCH: run(TORCH, first)}
    run(OURS, first)  # compiles
    if cache == "dynamic":
        with no_waiting_in_attention(sizes.device) as watched:
            few[OURS] = run(OURS, first)
        assert len(watched) == first * sizes.llama["num_hidden_layers"], len(watched)
    else:
        few[OURS] = run(OURS, first)
    same = float((few[TORCH] == few[OURS]).float().mean())
    calls: dict[str, Callable[[], Any]] = {name: lambda n=name: run(n, sizes.new_tokens) for name in few}  # type: ignore[misc]
    first_s = {name: times[0] for name, times in in_turns(calls, 1, sizes.device).items()}
    seconds = in_turns(calls, rounds, sizes.device)
    case = {"cache": cache, "prompt": prompt, "batch": batch, "padded": padded, "new_tokens": sizes.new_tokens}
    more = {"waits_in_attention": 0, "same_first_tokens": round(same, 3), "first_s": first_s}
    return row_of("generate", case, seconds, batch * sizes.new_tokens, **more)


def train_step(model: Any, tokens: Tensor) -> float:
    """One step of SGD. Returns: the loss, for which the host waits."""
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-1e-6)
                parameter.grad = None
    return float(loss.detach())


def train(args: Args, report: Report) -> None:
    sizes = args.sizes
    model = make_llama(sizes).train()
    for seqlen in sizes.trained:
        batch = max(1, sizes.tokens_of_a_step // seqlen)
        tokens = torch.randint(sizes.llama["vocab_size"], (batch, seqlen), device=sizes.device)
        losses: dict[str, float] = {}

        def step(name: str, tokens: Tensor = tokens, losses: dict[str, float] = losses) -> None:
            model.set_attn_implementation(name)
            losses[name] = train_step(model, tokens)

        for name in (TORCH, OURS):
            step(name)  # compiles
        calls: dict[str, Callable[[], Any]] = {TORCH: lambda s=step: s(TORCH), OURS: lambda s=step: s(OURS)}  # type: ignore[misc]
        seconds = in_turns(calls, args.rounds, sizes.device)
        agrees = abs(losses[OURS] / losses[TORCH] - 1) < CLOSE
        show(row_of("train", {"seqlen": seqlen, "batch": batch}, seconds, tokens.numel(), agrees=agrees), report)


# ---------------------------------------------------------------- the first step


def first(args: Args, report: Report) -> None:
    """Time the first step of each contender in a process of its own, with an empty kernel cache."""
    seqlen, seconds = args.sizes.trained[0], {}
    for name in (TORCH, OURS):
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "ONEPASS_CACHE_DIR": os.path.join(folder, "kernels")}
            arguments = ["--first-step-of", name, *["--small"] * args.small]
            command = python_command("from benchmarks.suites.models import SUITE; SUITE.main()", *arguments)
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
            seconds[name] = json.loads(done.stdout.strip().splitlines()[-1])
    case = {"seqlen": seqlen, "cpus": os.cpu_count()}
    show({"part": "first", **case, "seconds": seconds, "added_s": round(seconds[OURS] - seconds[TORCH], 2)}, report)
    print(seconds, flush=True)


def first_step(sizes: Sizes, name: str) -> float:
    """Seconds of this process's first training step."""
    model = make_llama(sizes, name).train()
    seqlen = sizes.trained[0]
    tokens = torch.randint(sizes.llama["vocab_size"], (max(1, sizes.tokens_of_a_step // seqlen), seqlen)).to(
        sizes.device
    )
    return round(seconds_of(lambda: train_step(model, tokens), sizes.device), 3)


# ---------------------------------------------------------------- a diffusion transformer

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # tensors are (batch, num_heads, seqlen, head_dim)


class Block(nn.Module):
    """A transformer block without a mask, whose attention is an argument."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def fa3() -> Attend | None:
    try:
        module = importlib.import_module("fa3_fwd_interface")
    except ImportError:
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = module.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)))
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    return attend


def diffusion(args: Args, report: Report) -> None:
    sizes = args.sizes
    torch.manual_seed(0)
    with torch.device(sizes.device):
        blocks = nn.ModuleList(Block(sizes.width, sizes.heads) for _ in range(sizes.layers)).to(sizes.dtype)
    by_fa3 = fa3()
    for seqlen in sizes.images:
        x = torch.randn(1, seqlen, sizes.width, device=sizes.device, dtype=sizes.dtype)

        def run(attend: Attend = F.scaled_dot_product_attention, x: Tensor = x) -> Tensor:
            with torch.no_grad():
                for block in blocks:
                    x = block(x, attend)
            return x

        calls: dict[str, Callable[[], Tensor]] = {TORCH: run, OURS: run}
        around = {OURS: lambda: torch_sdpa.activate(sizes.device)}
        if by_fa3 is not None:
            calls["fa3"] = lambda run=run: run(by_fa3)  # type: ignore[misc]
        outputs = {}
        for name, call in calls.items():
            with around.get(name, contextlib.nullcontext)():
                outputs[name] = call()
        assert torch_sdpa.fallbacks() == {}, torch_sdpa.fallbacks()
        largest = float(outputs[TORCH].abs().max())
        agrees = all(float((t - outputs[TORCH]).abs().max()) < CLOSE * largest for t in outputs.values())
        seconds = in_turns(calls, args.rounds, sizes.device, around)
        show(row_of("diffusion", {"seqlen": seqlen, "heads": sizes.heads}, seconds, seqlen, agrees=agrees), report)


# ---------------------------------------------------------------- the suite


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=3, help="how often each contender is timed in each case")
    parser.add_argument("--prompts", type=int, nargs="+", help="tokens of the prompts to generate from")
    parser.add_argument("--batches", type=int, nargs="+", help="numbers of prompts")
    parser.add_argument("--caches", choices=("dynamic", "static"), nargs="+", help="caches of transformers")
    parser.add_argument("--padding", type=int, choices=(0, 1), nargs="+", help="1: prompts of different lengths")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--first-step-of", choices=(OURS, TORCH), help=argparse.SUPPRESS)


def start(args: Args, parser: argparse.ArgumentParser) -> dict[str, Any]:
    args.sizes = sizes = Sizes(args.small)
    for name in ("prompts", "batches", "caches", "padding"):
        if (given := getattr(args, name)) is not None:
            setattr(sizes, name, given)
    if args.first_step_of:
        print(json.dumps(first_step(sizes, args.first_step_of)))
        parser.exit()
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    return describe(sizes.device) | {"suite": "models", "sets": args.parts, "rounds": args.rounds}


def measure(part: str, args: Args, report: Report) -> None:
    {"first": first, "diffusion": diffusion, "train": train, "generate": generate}[part](args, report)


SUITE = Suite(
    "models",
    __doc__,
    add_options,
    start,
    lambda args: [part for part in ("first", "diffusion", "train", "generate") if part in args.parts],
    measure,
    is_wrong=lambda row: not row.get("agrees", True),
    out="models.json",
)

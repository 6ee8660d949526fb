"""Masks as data on a GPU, compared with NVIDIA's open kernels and with torch's FlexAttention.

    python -m benchmarks masks                                      # all cases
    python -m benchmarks masks --cases "causal d64,random d128"     # cases whose labels have one of the words
    python -m benchmarks masks --contenders block_mask,cudnn        # these alone

causal, prefix, documents   intervals of keys: 2 x 8192 tokens of hidden size 2048, a prefix of 1024, documents of 1000;
                            causal also with 128k tokens of 16 heads
rollouts                    a prompt of 8192 tokens and 16 answers of 1024 to it, in one sequence
random                      each block of queries sees as many blocks of keys, drawn for each head

The contenders are onepass with ranges, with a BlockMask and with an ordinary call, cuDNN's front end ("cudnn") with its
flex_attention or, for random blocks, its block_sparse_attention, and FlexAttention in Triton and by FlashAttention-4.
The ordinary call says the same mask (causal=True, packed documents) or is what rates are compared with: causal=True for
rollouts, dense attention for random blocks. All get tensors in the order batch, tokens, heads, head_dim. FlexAttention
is compiled without a search for faster tiles. The forward and the backward of a mask are two cases.

TFLOP/s counts the pairs that a contender's mask leaves visible. "ms" is the time of a call as a program makes it,
"device_ms" the time on the GPU alone, which is shorter if the host takes longer than the GPU; a line on the screen has
the rates of both. What is made once for a mask (a BlockMask, a plan) is not part of them: "making_ms" has it, on the
host and the GPU together, and "lists_ms" what each call of onepass makes of it. "first_s" is the time of making and the
first call, with compilation. Every contender's out or gradients are compared with those of the first one, and what a
contender refuses is printed. The results go to --out as JSON.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onepass
from onepass import BlockMask, masks
from onepass.bench.flops import flops_of_pairs
from onepass.geometry.block_range import count_visible_pairs
from onepass.testing.machine import describe
from onepass.testing.results import Report
from onepass.tuning.timing import measure_interleaved

from ..harness import grid
from ..harness.contenders import max_relative_error
from ..harness.suite import Args, Suite, chosen
from ..harness.timing import device_sampler, host_us

DEVICE = "cuda"
SEQLEN, BATCH, HIDDEN = 8192, 2, 2048
PREFIX, DOCUMENT = 1024, 1000
PROMPT, ANSWER, ANSWERS = 8192, 1024, 16
HIDDEN_OF_LENGTH = {8192: 2048, 16384: 2048, 32768: 1024, 65536: 512, 131072: 128}  # of random: a call of 50 ms at most
LONG = 65536
LONGEST_OF_FLEX = 32768  # FlexAttention makes its mask from a matrix of all pairs
TOLERANCE = 0.05  # of the rough comparison with the first contender
TOLD = ("first_s", "making_ms", "lists_ms")
PEERS = {"cudnn", "flex-triton", "flex-flash"}


class MaskCase(NamedTuple):
    """One pass, "fwd" or "bwd", of self-attention with one mask."""

    name: str
    head_dim: int
    seqlen: int
    batch: int
    heads: int
    direction: str
    block: int = 0  # of random
    share: float = 0.0  # of the blocks, of random

    @property
    def label(self) -> str:
        blocks = f" blocks of {self.block} {self.share:.0%}" if self.block else ""
        return f"{self.name} d{self.head_dim} s{self.seqlen}{blocks} {self.direction}"

    @property
    def blocks(self) -> int:
        """Blocks of keys of the whole sequence."""
        return self.seqlen // self.block

    @property
    def kept(self) -> int:
        """Blocks of keys that each block of queries sees."""
        return max(1, round(self.share * self.blocks))

    @property
    def pairs(self) -> int:
        """Visible pairs of a head of a batch entry."""
        if self.block:
            return self.blocks * self.kept * self.block**2
        first, *interval = endpoints(self, "cpu").tolist()
        return sum(first) + (sum(interval[1]) - sum(interval[0]) if interval else 0)

    def flops(self, pairs: int) -> int:
        return flops_of_pairs(pairs * self.heads * self.batch, self.direction, self.head_dim, self.head_dim)


def cases(long: bool = False) -> list[MaskCase]:
    """Args: long: also random blocks of the longest sequences."""
    found = []
    for name, d, direction in itertools.product(("causal", "prefix", "documents"), (64, 128, 256), ("fwd", "bwd")):
        found.append(MaskCase(name, d, SEQLEN, BATCH, HIDDEN // d, direction))
    for d, direction in itertools.product((64, 128), ("fwd", "bwd")):
        found.append(MaskCase("rollouts", d, PROMPT + ANSWERS * ANSWER, 1, HIDDEN // d, direction))
    shares = itertools.product(HIDDEN_OF_LENGTH, (0.1, 0.25, 0.5), (64, 128), (64, 128), ("fwd", "bwd"))
    for seqlen, share, block, d, direction in shares:
        if seqlen >= LONG and not long:
            continue
        found.append(MaskCase("random", d, seqlen, 1, HIDDEN_OF_LENGTH[seqlen] // d, direction, block, share))
    return [*found, MaskCase("causal", 128, 131072, 1, 16, "fwd")]


# ---------------------------------------------------------------- masks


def endpoints(case: MaskCase, device: torch.device | str) -> Tensor:
    """The keys that each query sees, [0, F0) or [0, F0) and [F1, F2). Returns: (1 or 3, seqlen) int32."""
    i = torch.arange(case.seqlen, device=device, dtype=torch.int32)
    end = i + 1
    if case.name == "causal":
        return end[None]
    if case.name == "prefix":
        return end.clamp(min=PREFIX)[None]
    if case.name == "documents":
        return torch.stack((torch.zeros_like(i), i // DOCUMENT * DOCUMENT, end))
    own = torch.where(i < PROMPT, end, PROMPT + (i - PROMPT) // ANSWER * ANSWER)
    return torch.stack((end.clamp(max=PROMPT), own, end))


def ranges_of(case: MaskCase, device: torch.device) -> dict[str, Tensor]:
    """The mask as arguments of onepass."""
    if case.name == "rollouts":
        return masks.rollouts(PROMPT, [ANSWER] * ((case.seqlen - PROMPT) // ANSWER), device)
    first, *interval = endpoints(case, device)
    low, high = interval or (torch.zeros_like(first), first)
    return {"key_ranges": torch.stack((low, high), -1)[None, None]}


def random_blocks(case: MaskCase, device: torch.device) -> Tensor:
    """(1, heads, blocks, kept) int32: the numbers of the blocks of keys that a block of queries sees, ascending."""
    drawn = torch.rand(1, case.heads, case.blocks, case.blocks, device=device)
    return drawn.topk(case.kept).indices.sort().values.int()


def mask_mod(case: MaskCase, device: torch.device) -> Callable[..., Tensor]:
    """The mask as FlexAttention's function."""
    if case.name == "causal":
        return lambda b, h, q_idx, kv_idx: kv_idx <= q_idx
    if case.name == "prefix":
        return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) | (kv_idx < PREFIX)
    own = endpoints(case, device)[1].contiguous()
    if case.name == "documents":
        return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (kv_idx >= own[q_idx])
    return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & ((kv_idx < PROMPT) | (kv_idx >= own[q_idx]))


class Tensors(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: dict[str, Tensor]  # ranges, or the numbers of blocks


def make_tensors(case: MaskCase, device: str) -> Tensors:
    torch.manual_seed(0)
    shape = case.batch, case.seqlen, case.heads, case.head_dim
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    mask = {"indices": random_blocks(case, q.device)} if case.block else ranges_of(case, q.device)
    for x in (q, k, v):
        x.requires_grad_(case.direction == "bwd")
    return Tensors(q, k, v, dout, mask)


# ---------------------------------------------------------------- contenders


class Contender(NamedTuple):
    """One way to compute a case.

    Attributes:
        make: what calls get besides q, k and v, made once.
        attend: returns out, from what was made.
        pairs: those that it computes, if they are not the case's.
    """

    make: Callable[[MaskCase, Tensors], Any]
    attend: Callable[[Tensors, Any], Tensor]
    pairs: int | None = None


def arguments_of(t: Tensors, made: dict[str, Any]) -> dict[str, Any]:
    """The arguments of onepass's call."""
    q, k, v = (x.flatten(0, 1) for x in t[:3]) if "cu_seqlens_q" in made else t[:3]
    return {"q": q, "k": k, "v": v, **made}


def attend_onepass(t: Tensors, made: dict[str, Any]) -> Tensor:
    function = onepass.attention_varlen if "cu_seqlens_q" in made else onepass.attention
    return function(**arguments_of(t, made)).view_as(t.dout)


def ranges(case: MaskCase, t: Tensors) -> dict[str, Any]:
    return t.mask


def block_mask(case: MaskCase, t: Tensors) -> dict[str, Any]:
    if not case.block:
        return {"block_mask": BlockMask.from_ranges(case.seqlen, case.seqlen, block_size=(128, 128), **t.mask)}
    indices = t.mask["indices"]
    counts = torch.full(indices.shape[:-1], case.kept, dtype=torch.int32, device=indices.device)
    return {"block_mask": BlockMask.from_indices(counts, indices, case.blocks, (case.block, case.block))}


def causal(case: MaskCase, t: Tensors) -> dict[str, Any]:
    return {"causal": True}


def packed(case: MaskCase, t: Tensors) -> dict[str, Any]:
    """Documents as packed sequences."""
    starts = [b * case.seqlen + i for b in range(case.batch) for i in range(0, case.seqlen, DOCUMENT)]
    offsets = torch.tensor([*starts, case.batch * case.seqlen], dtype=torch.int32, device=t.q.device)
    found: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), offsets)
    return found | dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), DOCUMENT) | {"causal": True}


def dense(case: MaskCase, t: Tensors) -> dict[str, Any]:
    return {}


def cudnn_plan(case: MaskCase, t: Tensors) -> Any:
    from cudnn.flex_attention import create_mask_plan

    interval_ends = endpoints(case, t.q.device).repeat(1, case.batch)[None].contiguous()
    return create_mask_plan(interval_ends, t.q, t.k, t.v, build_backward=case.direction == "bwd")


def attend_cudnn_flex(t: Tensors, plan: Any) -> Tensor:
    from cudnn.flex_attention import flex_attn_func

    return flex_attn_func(t.q, t.k, t.v, mask_plan=plan)


class CudnnBlocks(torch.autograd.Function):
    """cuDNN front end's block_sparse_attention, which has a forward and a backward of its own."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, options: dict[str, Any]) -> Tensor:
        from cudnn.block_sparse_attention import block_sparse_attention_forward

        found = block_sparse_attention_forward(q, k, v, indices, **options)
        ctx.save_for_backward(q, k, v, found["o_tensor"], found["lse_tensor"], indices)
        ctx.options = options
        return found["o_tensor"]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        from cudnn.block_sparse_attention import block_sparse_attention_backward

        found = block_sparse_attention_backward(gradients[0], *ctx.saved_tensors, **ctx.options)
        return found["dq_tensor"], found["dk_tensor"], found["dv_tensor"], None, None


def cudnn_blocks(case: MaskCase, t: Tensors) -> tuple[Tensor, dict[str, Any]]:
    return t.mask["indices"], {"block_sparse_num": case.kept, "sparse_block_size": case.block, "layout": "bshd"}


def attend_cudnn_blocks(t: Tensors, made: tuple[Tensor, dict[str, Any]]) -> Tensor:
    return CudnnBlocks.apply(t.q, t.k, t.v, *made)


def flex_mask(case: MaskCase, t: Tensors, kv_block: int = 128) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    mod, n = mask_mod(case, t.q.device), case.seqlen
    return create_block_mask(mod, None, None, n, n, device=str(t.q.device), BLOCK_SIZE=(128, kv_block))


@functools.cache
def compiled_flex() -> Callable[..., Any]:
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    torch._functorch.config.donated_buffer = False  # a backward that runs again needs what it was given
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def attend_flex(t: Tensors, made: Any, backend: str) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in t[:3])
    return compiled_flex()(q, k, v, block_mask=made, kernel_options={"BACKEND": backend}).transpose(1, 2)


def contenders_of(case: MaskCase) -> dict[str, Contender]:
    blocks = Contender(block_mask, attend_onepass)
    if case.block:
        whole = Contender(dense, attend_onepass, case.seqlen**2)
        return {"block_mask": blocks, "dense": whole, "cudnn": Contender(cudnn_blocks, attend_cudnn_blocks)}
    name = "query_ranges" if case.name == "rollouts" else "key_ranges"
    found = {name: Contender(ranges, attend_onepass), "block_mask": blocks}
    if case.name == "documents":
        found["packed"] = Contender(packed, attend_onepass)
    elif case.name != "prefix":
        found["causal"] = Contender(causal, attend_onepass, count_visible_pairs(case.seqlen, case.seqlen, None, 0))
    found["cudnn"] = Contender(cudnn_plan, attend_cudnn_flex)
    if case.seqlen <= LONGEST_OF_FLEX:
        # FlashAttention-4's tiles of keys divide its blocks, and have 64 keys at head_dim 256
        flash_mask = functools.partial(flex_mask, kv_block=128 if case.head_dim <= 128 else 64)
        found["flex-triton"] = Contender(flex_mask, functools.partial(attend_flex, backend="TRITON"))
        found["flex-flash"] = Contender(flash_mask, functools.partial(attend_flex, backend="FLASH"))
    return found


def chosen_contenders(case: MaskCase, args: Args) -> dict[str, Contender]:
    found = contenders_of(case)
    return {name: found[name] for name in found if not args.contenders or name in args.contenders}


# ---------------------------------------------------------------- measuring


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def milliseconds(make: Callable[[], Any]) -> float:
    """The time in which host and device make something that was made before."""

    def run() -> None:
        make()
        _wait()

    return round(host_us(run, 1, samples=3, clock=time.perf_counter) / 1e3, 4)


def lists_ms(case: MaskCase, arguments: dict[str, Any]) -> float | None:
    """Milliseconds in which a call of onepass makes the lists of blocks that its tiles visit; None: it makes none."""
    from onepass.kernels.heuristics import tuned
    from onepass.kernels.launch import block_lists, modifiers
    from onepass.kernels.launch.forward_sm90 import ARCH
    from onepass.validation.attention import check_attention

    inputs, problem = check_attention(**arguments, deterministic=False)
    config: Any = tuned.choose("fwd" if case.direction == "fwd" else "bwd", "sm90", problem, ARCH)
    make = block_lists.prepared(problem, (config.tile_m, config.tile_n), case.direction == "bwd", ARCH)
    given = modifiers.arguments_of(problem, inputs.modifiers, inputs.blocks)
    return None if make is None or given is None else milliseconds(lambda: make(given, inputs))


def pass_of(case: MaskCase, attend: Callable[[], Tensor], t: Tensors) -> Callable[[], tuple[Tensor, ...]]:
    """The timed pass. That of a backward runs a forward before."""
    if case.direction == "fwd":
        return lambda: (attend(),)
    out = attend()
    return lambda: torch.autograd.grad(out, t[:3], t.dout, retain_graph=True)


class Prepared(NamedTuple):
    """A contender that has run once, with its results and what its row tells about it."""

    call: Callable[[], tuple[Tensor, ...]]
    results: dict[str, Tensor]
    told: dict[str, float]


def prepare(case: MaskCase, contender: Contender, t: Tensors) -> Prepared:
    started = time.perf_counter()
    made = contender.make(case, t)
    call = pass_of(case, functools.partial(contender.attend, t, made), t)
    names = ("out",) if case.direction == "fwd" else ("dq", "dk", "dv")
    results = {name: x.detach() for name, x in zip(names, call(), strict=True)}
    _wait()
    told = {"first_s": round(time.perf_counter() - started, 2)}
    call()  # a contender whose backward runs only once is refused here
    told["making_ms"] = milliseconds(lambda: contender.make(case, t))
    if isinstance(made, dict) and not made.keys().isdisjoint(("block_mask", "query_ranges", "key_ranges")):
        found = lists_ms(case, arguments_of(t, made))
        told |= {} if found is None else {"lists_ms": found}
    return Prepared(call, results, told)


def disagreeing(results: dict[str, dict[str, Tensor]]) -> list[str]:
    """The contenders whose results are not those of the first one."""
    first = next(iter(results.values()), {})
    return [name for name, found in results.items() if not max_relative_error(found, first) < TOLERANCE]


def all_prepared(case: MaskCase, contenders: dict[str, Contender], t: Tensors) -> tuple[dict[str, Prepared], dict]:
    """Returns: the contenders that run, and for each other one what it says."""
    found, refused = {}, {}
    for name, contender in contenders.items():
        try:
            found[name] = prepare(case, contender, t)
        except Exception as error:  # each library has errors of its own
            refused[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            print(f"{case.label}: {name}: {refused[name]}", flush=True)
        _wait()  # raises if a kernel has failed on the device, after which nothing runs there
    return found, refused


def measure(case: MaskCase, args: Args, report: Report) -> None:
    """Time a case and add its row."""
    contenders = chosen_contenders(case, args)
    if any(name.startswith("flex") for name in contenders):
        torch.compiler.reset()  # a function has eight compiled forms at most
    t, pairs = make_tensors(case, DEVICE), case.pairs
    ready, refused = all_prepared(case, contenders, t)
    own_pairs = {name: contenders[name].pairs or pairs for name in ready}
    wrong = disagreeing({name: found.results for name, found in ready.items() if own_pairs[name] == pairs})
    calls = {name: found.call for name, found in ready.items()}
    told = {what: {n: found.told[what] for n, found in ready.items() if what in found.told} for what in TOLD}
    del ready
    ms = grid.time_in_turns(calls, args, seed=case.seqlen)
    on_device = {
        name: device_sampler(call, round(min(20, max(3, args.rep_ms / statistics.median(ms[name])))))
        for name, call in calls.items()
    }
    device_ms = measure_interleaved(on_device, rounds=args.rounds, seed=case.seqlen, warms_up=False).ms
    times = {"ms": ms, "device_ms": device_ms}
    rates, device_rates = (
        {name: case.flops(own_pairs[name]) / statistics.median(x) / 1e9 for name, x in found.items()}
        for found in times.values()
    )
    row: dict[str, Any] = {"case": case.label, **case._asdict(), "pairs": pairs}
    row |= {what: {name: [round(x, 5) for x in xs] for name, xs in found.items()} for what, found in times.items()}
    for what, values in (("tflops", rates), ("device_tflops", device_rates)):
        row[what] = {name: round(value, 1) for name, value in values.items()}
    row |= {"refused": refused, "disagrees": wrong}
    if "dense" in device_rates:
        told["of_dense"] = {name: round(rate / device_rates["dense"], 3) for name, rate in device_rates.items()}
    report.add(row | told)
    speeds = ", ".join(f"{name} {rate:.0f} ({device_rates[name]:.0f})" for name, rate in rates.items())
    print(f"{case.label:44s} {speeds}{f' DISAGREES: {wrong}' if wrong else ''}", flush=True)
    for what, found in told.items():
        print(f"    {what}: {', '.join(f'{name} {value:g}' for name, value in found.items())}", flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default="", help="words; cases whose labels have one of them; default: all")
    parser.add_argument("--contenders", default="", help="comma-separated names; default: all")
    parser.add_argument("--long", action="store_true", help="also random blocks of 64k and 128k tokens")
    grid.add_timing(parser, rounds=3)


def start(args: Args, parser: argparse.ArgumentParser) -> dict[str, Any]:
    args.contenders = [name for name in args.contenders.split(",") if name]
    args.chosen = chosen(cases(args.long), args.cases, any, parser)
    known = {name for case in args.chosen for name in contenders_of(case)}
    if not known.issuperset(args.contenders):
        parser.error(f"--contenders: expected names of {', '.join(sorted(known))}, got {','.join(args.contenders)}")
    for direction in ("fwd", "bwd"):
        calls = []
        for case in (c for c in args.chosen if c.direction == direction):
            t = make_tensors(case, "meta")
            ours = [c for name, c in chosen_contenders(case, args).items() if name not in PEERS]
            calls += [arguments_of(t, contender.make(case, t)) for contender in ours]
        try:
            onepass.warmup(calls, gradients=direction == "bwd")
        except Exception as error:  # the contenders whose kernels do not compile are left out
            print(f"{type(error).__name__}: {error}", flush=True)
    return describe(DEVICE) | {"suite": "masks"}


SUITE = Suite(
    "masks",
    __doc__,
    add_options,
    start,
    lambda args: args.chosen,
    measure,
    is_wrong=lambda row: row["disagrees"] or row["refused"].keys() - PEERS,
    out="masks.json",
)

"""The Hopper forward: is it right, how fast is it, and which configuration is fastest?

    python -m benchmarks forward_sm90                                       # check, then the grid
    python -m benchmarks forward_sm90 --no-check --cases 128c8192,256n512   # some cases only
    python -m benchmarks forward_sm90 --variants "n128 q2; n128 q2 queue"   # also these configurations
    python -m benchmarks forward_sm90 --variants try                        # also the ones in VARIANTS

A case is head_dim, c (causal) or n, and the sequence length; a configuration is a list of words, see `WORDS`. The grid
is that of the FlashAttention-3 paper, see grid.py. Contenders take turns in each case; a figure is the median over the
rounds of triton's do_bench median (which flushes the L2 cache before each run). The results go to --out as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

import onepass
from onepass import reference
from onepass.bench import ablation
from onepass.bench.cases import Case
from onepass.bench.peers import Contender
from onepass.dispatch import attention as dispatch
from onepass.errors import UnsupportedError
from onepass.kernels.compiler.compile import CompileRequest
from onepass.kernels.config import ForwardConfigSm90
from onepass.kernels.launch import forward_sm90 as launch
from onepass.problem import AttentionInputs, AttentionProblem, Mask
from onepass.testing.budget import compare, compare_lse
from onepass.testing.machine import describe
from onepass.testing.results import Report
from onepass.tuning.timing import host_us

from ..harness import contenders as shared
from ..harness import grid
from ..harness.suite import Args, Check, verdict

DEVICE = "cuda"

# The fields that a word of a configuration changes; n128 is tile_n=128, 3wg is num_warpgroups=3.
WORDS: dict[str, dict[str, Any]] = {
    "s3": {"num_stages": 3},
    "s4": {"num_stages": 4},
    "v2": {"v_stages": 2},
    "v3": {"v_stages": 3},
    "q2": {"q_stages": 2},
    "serial": {"overlap_gemm_softmax": False, "overlap_tiles": False},
    "plain": {"warp_specialized": False, "overlap_tiles": False},
    "drain": {"overlap_tiles": False},
    "free": {"pingpong": False},
    "lazy": {"rescale_threshold": 8.0},
    "sums": {"two_level_sums": True},
    "after": {"two_level_sums": True, "overlap_gemm_softmax": False},
    "turn": {"transposes_v": True},
    "halves": {"pv_columns": 128},
    "t08": {"rescale_threshold": 0.8},  # t08, t18 and t28 are for FP8
    "t18": {"rescale_threshold": 1.8},
    "t28": {"rescale_threshold": 2.8},
    "codes": {"p_codes": True},
    "3stage": {"score_buffers": 2},
    "pair": {"cluster_size": 2},
    "queue": {"dynamic_tiles": True},
    "anyorder": {"longest_first": False},
    "pack": {"pack_gqa": True},
}

# Configurations under measurement, by (head_dim, causal).
VARIANTS = {
    (64, False): "3wg n128 q2 lazy drain; 4wg n64 q2 lazy; 4wg n64 q2 lazy drain",
    (64, True): (
        "2wg n128 q2 lazy queue; 4wg n64 q2 lazy queue; 4wg n64 q2 s4 lazy queue; 3wg n128 q2 lazy queue;"
        "2wg n64 q2 s4 lazy queue"
    ),
    (128, False): "n128 q2 lazy; n128 q2 lazy pair; n128 s3 lazy pair",
    (128, True): "n128 q2 lazy; n128 q2 lazy queue; 3wg n80 q2 s3 lazy queue",
    (256, False): "n64 lazy; n64 lazy pair; n64 v3 lazy pair",
    (256, True): "n64 v3 lazy queue; n64 lazy queue; n64 s3 v2 lazy queue",
}


def configuration(words: str) -> ForwardConfigSm90:
    """ "3wg n128 q2" -> ForwardConfigSm90(tile_n=128, num_warpgroups=3, q_stages=2)."""
    fields: dict = {}
    for word in words.split():
        if word in WORDS:
            fields |= WORDS[word]
        elif word.endswith("wg"):
            fields["num_warpgroups"] = int(word[:-2])
        elif word.startswith("n"):
            fields["tile_n"] = int(word[1:])
        else:
            raise ValueError(f"configuration {words!r}: unknown word {word!r}")
    return ForwardConfigSm90(**fields)


@functools.cache  # what cannot be measured is said once
def variants(text: str | None, head_dim: int, causal: bool) -> dict[str, ForwardConfigSm90]:
    """The configurations of --variants that a case can take, by name."""
    if text is None:
        return {}
    if text == "try":
        text = VARIANTS.get((head_dim, causal), "")
    q = torch.empty(1, 1, 1, head_dim, dtype=torch.bfloat16, device="meta")
    problem = problem_of(AttentionInputs(q, q, q), causal=causal)
    found = {}
    for words in grid.split_variants(text):
        config = configuration(words)
        try:
            config.check(problem)
        except UnsupportedError as error:
            print(f"{words} not measured: {error}")
            continue
        found[words] = config
    return found


def problem_of(
    inputs: AttentionInputs,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    softmax_scale: float | None = None,
) -> AttentionProblem:
    return AttentionProblem.of(
        inputs,
        softmax_scale=softmax_scale or inputs.q.shape[-1] ** -0.5,
        mask=Mask.from_options(causal, window),
        softcap=softcap,
        deterministic=False,
    )


def default_config(problem: AttentionProblem) -> ForwardConfigSm90:
    """The configuration that a call of the problem runs with."""
    config = dispatch.forward_config("sm90", problem)
    assert isinstance(config, ForwardConfigSm90)
    return config


# ---------------------------------------------------------------- correctness


@dataclasses.dataclass(frozen=True)
class CheckedCase:
    """One problem of the check; `layout` is how its tensors lie in memory.

    With `packed`, the (queries, keys) of each sequence, batch and both lengths are 0 and follow from it. `slack` is the
    number of rows at the end that belong to no sequence.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    layout: str = "contiguous"
    sinks: bool = False
    scale: float = 1.0  # a factor of the values of q
    options: tuple = ()
    packed: tuple | None = None
    slack: int = 0
    used: tuple | None = None  # seqused_k

    def __str__(self) -> str:
        if self.packed is None:
            words = [f"b{self.batch} q{self.seqlen_q} k{self.seqlen_k} h{self.heads_q}/{self.heads_kv}"]
        else:
            lengths = " ".join(f"{q}:{k}" for q, k in self.packed[:5]) + (" .." if len(self.packed) > 5 else "")
            words = [f"packed {len(self.packed)} ({lengths})+{self.slack} h{self.heads_q}/{self.heads_kv}"]
        words += ["seqused"] if self.used is not None else []
        words.append(f"d{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v else ""))
        words += [str(self.dtype)[6:]] if self.dtype != torch.bfloat16 else []
        words += [self.layout] if self.layout != "contiguous" else []
        words += [f"{k}={v}" for k, v in self.options] + (["sinks"] if self.sinks else [])
        words += [f"scale {self.scale}"] if self.scale != 1.0 else []
        return " ".join(words)

    def tensor(self, batch: int, seqlen: int, heads: int, dim: int, generator: torch.Generator) -> Tensor:
        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.float32).to(self.dtype)

        if self.layout == "transposed":
            return randn(batch, heads, seqlen, dim).transpose(1, 2)
        if self.layout == "sliced":
            return randn(batch, seqlen, 3 * heads, dim)[:, :, heads : 2 * heads]
        if self.layout == "expanded":
            return randn(batch, seqlen, 1, dim).expand(-1, -1, heads, -1)
        if self.layout == "unaligned":
            return randn(batch, seqlen, heads, dim + 1)[..., 1:]
        return randn(batch, seqlen, heads, dim)

    def inputs(self) -> AttentionInputs:
        generator = torch.Generator(DEVICE).manual_seed(0)
        batch, seqlen_q, seqlen_k = self.batch, self.seqlen_q, self.seqlen_k
        if self.packed is not None:
            batch, seqlen_q, seqlen_k = 1, *(sum(lengths) + self.slack for lengths in zip(*self.packed, strict=True))
        q = self.tensor(batch, seqlen_q, self.heads_q, self.head_dim, generator)
        k = self.tensor(batch, seqlen_k, self.heads_kv, self.head_dim, generator)
        v = self.tensor(batch, seqlen_k, self.heads_kv, self.head_dim_v or self.head_dim, generator)
        q = q * self.scale if self.scale != 1.0 else q
        sinks = torch.randn(self.heads_q, device=DEVICE) * 2 if self.sinks else None
        used = None if self.used is None else int32(self.used)
        if self.packed is None:
            return AttentionInputs(q, k, v, sinks, seqused_k=used)
        ends_q, ends_k = (int32((0, *itertools.accumulate(lengths))) for lengths in zip(*self.packed, strict=True))
        return AttentionInputs(q[0], k[0], v[0], sinks, ends_q, ends_k, used)

    def with_garbage(self, inputs: AttentionInputs) -> AttentionInputs:
        """The inputs with NaN in every row that no sequence owns or uses."""
        if self.used is None and not self.slack:
            return inputs
        q, k, v = (t.clone() for t in inputs[:3])
        if self.packed is None:
            for t, (b, n) in itertools.product((k, v), enumerate(self.used or ())):
                t[b, n:] = math.nan
            return inputs._replace(k=k, v=v)
        if self.slack:
            q[-self.slack :] = math.nan
        lengths = [n for _, n in self.packed]
        start = 0
        for n, used in zip((*lengths, self.slack), (*(self.used or lengths), 0), strict=True):
            k[start + used : start + n] = v[start + used : start + n] = math.nan
            start += n
        return inputs._replace(q=q, k=k, v=v)


def int32(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=DEVICE)


def oracle(inputs: AttentionInputs, options: dict, compute_dtype: torch.dtype) -> reference.Reference:
    """The reference's answer to these inputs, dense or packed."""
    options = {**options, "sinks": inputs.sinks, "seqused_k": inputs.seqused_k, "compute_dtype": compute_dtype}
    if inputs.cu_seqlens_q is None:
        return reference.attention(inputs.q, inputs.k, inputs.v, **options)
    options |= {"cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k}
    return reference.attention_varlen(inputs.q, inputs.k, inputs.v, **options)


def check_cases() -> list[CheckedCase]:
    causal, window = (("causal", True),), (("window", (100, 30)),)
    cases = [
        CheckedCase(1, 128, 128, 1, 1, 128),  # one tile, one block of keys
        CheckedCase(1, 128, 1024, 1, 1, 128),
        CheckedCase(2, 1024, 1024, 4, 4, 128),
        CheckedCase(2, 1000, 1000, 4, 4, 128),  # ragged in both
        CheckedCase(2, 1000, 777, 6, 2, 128),
        CheckedCase(3, 1, 500, 4, 1, 128),
        CheckedCase(2, 77, 1, 4, 4, 128),
        CheckedCase(1, 4096, 4096, 8, 8, 128),
        CheckedCase(4, 512, 512, 16, 16, 128, layout="sliced"),
        CheckedCase(2, 333, 444, 4, 2, 128, layout="transposed"),
        CheckedCase(2, 333, 444, 4, 2, 128, layout="unaligned"),
        CheckedCase(2, 1024, 1024, 4, 4, 128, dtype=torch.float16),
        CheckedCase(2, 1000, 1000, 4, 4, 128, scale=30.0),  # peaked rows: the reference moves often
        CheckedCase(2, 0, 100, 4, 4, 128),
        CheckedCase(2, 100, 0, 4, 4, 128),
        CheckedCase(1, 128, 128, 1, 1, 128, options=causal),
        CheckedCase(2, 1024, 1024, 4, 4, 128, options=causal),
        CheckedCase(2, 1000, 1000, 4, 2, 128, options=causal),
        CheckedCase(2, 1000, 1000, 4, 2, 128, options=causal, scale=30.0),
        CheckedCase(2, 300, 1000, 4, 2, 128, options=causal),
        CheckedCase(2, 1000, 300, 4, 2, 128, options=causal),  # 700 rows see nothing
        CheckedCase(1, 3, 1000, 4, 2, 128, options=causal),
        CheckedCase(1, 8192, 8192, 3, 3, 128, options=causal),
        CheckedCase(2, 1000, 1000, 4, 2, 128, options=window),
        CheckedCase(2, 1000, 600, 4, 2, 128, options=(("window", (0, 0)),)),
        CheckedCase(2, 600, 1000, 4, 2, 128, options=(("window", (300, None)),)),
        CheckedCase(2, 1000, 1000, 4, 2, 128, options=(("window", (130, None)), ("causal", True))),
        CheckedCase(2, 1000, 300, 4, 2, 128, options=(("window", (50, 10)),)),
        CheckedCase(2, 500, 700, 4, 2, 128, options=(("softcap", 5.0), *causal)),
        CheckedCase(2, 500, 700, 4, 2, 128, options=(("softcap", 30.0),), dtype=torch.float16),
        CheckedCase(2, 500, 700, 4, 2, 128, sinks=True, options=causal),
        CheckedCase(2, 700, 300, 4, 2, 128, sinks=True, options=causal),
        CheckedCase(2, 500, 700, 4, 2, 128, sinks=True, options=(("window", (64, 64)), ("softcap", 20.0))),
        CheckedCase(2, 500, 700, 4, 2, 192, 128),
        CheckedCase(2, 500, 700, 4, 2, 64, 256, options=causal),
        CheckedCase(2, 500, 700, 4, 2, 128, 64),
    ]
    for head_dim in (8, 40, 64, 72, 96, 120, 160, 192, 200, 256):
        cases.append(CheckedCase(2, 500, 700, 4, 2, head_dim))
        cases.append(CheckedCase(2, 700, 700, 4, 2, head_dim, options=causal))
    for head_dim in (64, 256):
        cases.append(CheckedCase(2, 2048, 2048, 8, 8, head_dim, options=causal))
        cases.append(CheckedCase(2, 500, 700, 4, 2, head_dim, dtype=torch.float16))
    cases.append(CheckedCase(2, 333, 444, 4, 2, 128, layout="expanded"))  # strides of 0
    return cases + packed_cases() + group_cases()


def group_cases() -> list[CheckedCase]:
    """Cases of query heads that share a tile (pack_gqa): groups that divide 64 or do not, up to the largest."""
    everything: dict[str, Any] = {"sinks": True, "options": (("window", (64, 10)), ("softcap", 20.0))}
    cases = [CheckedCase(2, 1, 500, 64, 1, 128), CheckedCase(2, 3, 500, 80, 2, 128, options=(("causal", True),))]
    for group, options in itertools.product((2, 3, 5, 7, 8, 33, 64), ((), (("causal", True),))):
        for seqlen_q in (1, 5, 200):
            cases.append(CheckedCase(2, seqlen_q, 300, 2 * group, 2, 128, options=options))
        cases.append(
            CheckedCase(0, 0, 0, group, 1, 128, options=options, packed=((1, 100), (7, 300), (0, 9), (300, 200)))
        )
    for group, head_dim in itertools.product((3, 4), (64, 72, 96, 256)):
        cases.append(CheckedCase(2, 100, 300, 2 * group, 2, head_dim, options=(("causal", True),)))
        cases.append(CheckedCase(3, 20, 300, 2 * group, 2, head_dim, **everything, used=(0, 100, 300)))
    return cases


def packed_cases() -> list[CheckedCase]:
    """Cases of packed sequences and of seqused_k, with NaN in all rows that must not be read."""
    rng = random.Random(0)
    several = ((100, 100), (0, 50), (129, 300), (1, 1), (64, 0), (300, 129), (0, 0), (128, 128), (7, 500))
    many = tuple((rng.choice((0, 1, 5, 64, 200)), rng.choice((0, 1, 30, 128, 300))) for _ in range(150))
    long = ((4000, 4000), (10, 10), (1, 2500), (1500, 1500))
    masks = ((), (("causal", True),), (("window", (40, 10)),), (("window", (100, None)),))
    dense: dict[str, Any] = {"used": (0, 1, 100, 128, 300, 500)}
    cases = []
    for head_dim, options in itertools.product((64, 128, 256), masks):
        common: dict[str, Any] = {"options": options, "packed": several}
        cases.append(CheckedCase(0, 0, 0, 4, 2, head_dim, **common, slack=130))
        cases.append(CheckedCase(0, 0, 0, 4, 2, head_dim, **common, slack=3, used=(100, 20, 129, 0, 0, 128, 0, 5, 300)))
        cases.append(CheckedCase(6, 200, 500, 4, 2, head_dim, options=options, **dense))
    for options in masks[:2]:
        cases.append(CheckedCase(0, 0, 0, 3, 1, 128, options=options, packed=many))
        cases.append(CheckedCase(0, 0, 0, 3, 3, 64, options=options, packed=many, slack=1, dtype=torch.float16))
        cases.append(CheckedCase(0, 0, 0, 8, 8, 128, options=options, packed=long))
        cases.append(CheckedCase(0, 0, 0, 8, 8, 128, options=options, packed=((5, 5),)))  # fewer tiles than the bound
        cases.append(CheckedCase(0, 0, 0, 8, 8, 128, options=options, packed=((0, 0), (0, 64)), slack=1))
        for layout in ("transposed", "sliced", "unaligned"):
            cases.append(CheckedCase(0, 0, 0, 4, 2, 128, options=options, packed=several, layout=layout))
    everything = (("window", (64, 64)), ("softcap", 20.0))
    cases.append(CheckedCase(0, 0, 0, 4, 2, 128, sinks=True, options=everything, packed=several, slack=5))
    cases.append(CheckedCase(6, 300, 500, 4, 2, 128, sinks=True, options=everything, **dense))
    cases.append(CheckedCase(0, 0, 0, 4, 2, 192, 128, options=masks[1], packed=several))
    return cases


def other_orders(case: CheckedCase) -> list[tuple[str, ForwardConfigSm90]]:
    """Configurations that treat packed tiles, groups of heads or the first block of V differently from the default."""
    words = []
    if 1 < case.heads_q // case.heads_kv <= 64 and case.layout != "expanded":
        words += ["n64 pack", "3wg n64 pack queue"] if max(case.head_dim, case.head_dim_v or 0) <= 128 else ["n64 pack"]
    if case.head_dim == 128 and (case.packed is not None or case.used is not None):
        words += [
            "n128 q2",
            "n128 q2 queue",
            "3wg n80",
            "n128 serial",
            "n128 q2 drain queue",
            "n160 q2 3stage free lazy",
        ]
    return [(w, configuration(w)) for w in words]


def check_one(case: CheckedCase, config: ForwardConfigSm90 | None = None) -> tuple[bool, str]:
    """Compare a run with the float64 oracle, and with a second run, which must give the same bits."""
    clean, options = case.inputs(), dict(case.options)
    inputs = case.with_garbage(clean)
    problem = problem_of(inputs, **options)
    # the memory that the allocator hands out next holds NaN
    poison = [torch.full((max(1, inputs.q.numel() // case.head_dim) * 256,), math.nan, device=DEVICE)]
    del poison
    out, lse = launch.forward(problem, inputs, config)
    torch.cuda.synchronize()
    again, lse_again = launch.forward(problem, inputs, config)
    exact, plain = oracle(clean, options, torch.float64), oracle(clean, options, case.dtype)
    rows = [compare("out", out, exact.out, plain.out), compare_lse(lse, exact.lse)]
    same = torch.equal(out.view(torch.int16), again.view(torch.int16)) and torch.equal(
        lse.view(torch.int32), lse_again.view(torch.int32)
    )
    return verdict(rows, differs=not same)


def checked_jobs(args: Args) -> list[tuple[CheckedCase, tuple[str, ForwardConfigSm90] | None]]:
    """The cases with the default configurations or, with --variants, some of them with each variant."""
    jobs: list[tuple[CheckedCase, tuple[str, ForwardConfigSm90] | None]] = []
    if args.variants is None:
        for case in check_cases():
            jobs += [(case, None), *((case, other) for other in other_orders(case))]
    for head_dim, causal in itertools.product(args.head_dims, (False, True)):
        for variant in variants(args.variants, head_dim, causal).items():
            options = (("causal", True),) if causal else ()
            jobs += [
                (CheckedCase(2, 1000, 1000, 4, 2, head_dim, options=options), variant),
                (CheckedCase(2, 900, 1000, 4, 2, head_dim, options=options), variant),
                (CheckedCase(1, 700, 300, 4, 2, head_dim, options=options, scale=20.0), variant),
                (CheckedCase(9, 100, 128, 16, 16, head_dim, options=options), variant),
                (CheckedCase(4, 4096, 4096, 8, 8, head_dim, options=options), variant),
            ]
    return jobs


def checks(args: Args, header: dict[str, Any]) -> Iterator[Check]:
    for case, variant in checked_jobs(args):
        label = f"{case}" + (f" [{variant[0]}]" if variant else "")
        yield Check(label, functools.partial(check_one, case, variant and variant[1]))


# ---------------------------------------------------------------- speed


PEERS = {"cudnn": "sdpa-cudnn", "fa2": "sdpa-flash", "fa3": "fa3", "fa4": "fa4"}  # as `onepass bench` calls them


def case_of(cell: grid.Cell, args: Args) -> Case:
    return cell.case()


def configurations(case: Case, text: str | None) -> dict[str, ForwardConfigSm90]:
    """The configurations of the kernel that are measured, by name."""
    default = default_config(ablation.problem_of(case, "cuda"))
    return {"onepass": default} | variants(text, case.head_dim, case.causal)


def contenders(case: Case, args: Args) -> shared.Contenders:
    kernel, problem = ablation.kernels("fwd")["sm90"], ablation.problem_of(case, DEVICE)
    ours = {
        name: Contender(name, ablation.attend_with(kernel, problem, config))
        for name, config in configurations(case, args.variants).items()
    }
    return {name: one for name, one in (dict(args.rivals) | ours).items() if one.refusal(case) is None}


def requests(args: Args) -> list[CompileRequest]:
    """The kernels of the check and of the grid."""
    found = []
    for checked, variant in [] if args.no_check else checked_jobs(args):
        if checked.packed is not None or (checked.seqlen_q and checked.seqlen_k):
            problem = problem_of(checked.inputs(), **dict(checked.options))
            found.append(launch.compile_request(problem, variant[1] if variant else default_config(problem)))
    for case in [] if args.no_grid else [case_of(cell, args) for cell in grid.cells(args)]:
        problem = ablation.problem_of(case, "cuda")
        found += [launch.compile_request(problem, config) for config in configurations(case, args.variants).values()]
    return found


def call_cost_us() -> dict[str, float]:
    """Microseconds that the host spends on a call of a small problem, without waiting for the GPU."""
    q = torch.randn(1, 128, 4, 128, device=DEVICE, dtype=torch.bfloat16)
    problem, inputs = problem_of(AttentionInputs(q, q, q), causal=True), AttentionInputs(q, q, q)
    calls: dict[str, Callable[[], object]] = {
        "launch.forward": lambda: launch.forward(problem, inputs),
        "onepass.attention": lambda: onepass.attention(q, q, q, causal=True),
    }
    costs = {name: round(host_us(call, 500, clock=time.perf_counter), 1) for name, call in calls.items()}
    print("the host's time of a call, us:", costs, flush=True)
    return costs


def add_options(parser: argparse.ArgumentParser) -> None:
    grid.add_arguments(parser, peers="cudnn,fa3,fa4", variants="'try', or lists of words")


def start(args: Args, parser: argparse.ArgumentParser) -> dict[str, Any]:
    args.rivals = shared.find_rivals(args.peers, PEERS, DEVICE, parser)
    return describe(DEVICE) | {"suite": "forward_sm90"}


def finish(args: Args, report: Report) -> None:
    report.header["call_cost_us"] = call_cost_us()


SUITE = shared.grid_suite(
    "forward_sm90",
    __doc__,
    lambda: DEVICE,
    case_of,
    configurations,
    contenders,
    finish,
    add_options=add_options,
    start=start,
    checks=checks,
    requests=requests,
)

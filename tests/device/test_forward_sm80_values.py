"""The Ampere forward computes attention: its PTX runs on the CPU and is held to the budgets of any backend."""

import itertools
import math
from dataclasses import replace

import numpy as np
import packages
import ptx_interpreter
import pytest
import sm80_forward
import torch
from random_calls import random_call
from sm80_decode import Parameters

from onepass.geometry import tile_scheduler
from onepass.geometry.integers import ceil_div
from onepass.kernels.config import ForwardConfigSm80
from onepass.kernels.heuristics import sm80 as heuristics_sm80
from onepass.kernels.launch import forward_sm80 as launch
from onepass.kernels.launch import modifiers
from onepass.kernels.launch.arguments import score_scales, window_bounds
from onepass.problem import AttentionInputs, AttentionProblem, Mask
from onepass.testing.budget import compare, compare_lse
from onepass.testing.inputs import Call

pytestmark = packages.needs_machine_code

ARCH = "sm_80"
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")


def problem_of(call: Call) -> tuple[AttentionProblem, AttentionInputs]:
    options = dict(call.options)
    inputs = AttentionInputs(**call.tensors, **{n: options.get(n) for n in ("sinks", *LENGTHS)})
    problem = AttentionProblem.of(
        inputs,
        softmax_scale=options.get("softmax_scale", inputs.q.shape[-1] ** -0.5),
        mask=Mask.from_options(options.get("causal", False), options.get("window")),
        softcap=options.get("softcap"),
        deterministic=False,
    )
    return problem, inputs


class Arguments(Parameters):
    """The parameters of a kernel, in the order of `ForwardSm80.kernel`."""

    def __init__(self, problem: AttentionProblem, inputs: AttentionInputs, config: ForwardConfigSm80):
        super().__init__(1 << 23)
        for t in inputs[:3]:
            self.tensor(launch.with_rows(t))
        out, lse = launch.empty_outputs(problem, inputs)
        self.out, self.lse = self.tensor(out), self.tensor(lse, is_lse=True)
        if inputs.sinks is not None:
            self.vector(inputs.sinks.float())
        for lengths in (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_k):
            if lengths is not None:
                self.vector(lengths)
        self.numbers(*score_scales(problem), *window_bounds(problem))
        self.modifiers(modifiers.arguments_of(problem, inputs.modifiers))
        section, self.num_tiles = launch.grid(problem, config).values()
        heads = problem.num_heads_q // config.group(problem)
        if problem.is_packed:
            self.divisors(heads)
            return
        num_m_blocks, heads_in_all = ceil_div(problem.seqlen_q, config.positions(problem)), heads * problem.batch
        self.numbers(self.num_tiles, num_m_blocks, problem.batch)
        in_last = tile_scheduler.heads_in_last_section(heads_in_all, section)
        self.divisors(num_m_blocks * section, section, in_last, heads)

    def tensor(self, t: torch.Tensor, is_lse: bool = False) -> int:
        """A tensor (seqlen, dim, heads, batch), without the sizes that are known when the kernel is compiled."""
        modes = range(t.dim())
        return super().tensor(t, modes[::-1] if is_lse else (*modes[-3::2], modes[-2], *modes[:-3]), is_lse)

    def vector(self, t: torch.Tensor):
        super().tensor(t.contiguous())


def computed(call: Call, config: ForwardConfigSm80 | None = None, change=lambda kernel: kernel, **schedule):
    """out and lse of the kernel, or of what `change` makes of its program."""
    problem, inputs = problem_of(call)
    config = config or heuristics_sm80.forward_config_sm80(problem, ARCH)
    out, _ = launch.empty_outputs(problem, inputs)
    config = replace(config, vector_bytes=launch.vector_bytes(*(launch.with_rows(t) for t in inputs[:3]), out))
    arguments = Arguments(problem, inputs, config)
    ptx_interpreter.run(
        change(sm80_forward.compiled(problem, config, ARCH).program),
        arguments.values,
        arguments.memory,
        arguments.num_tiles,
        config.num_threads,
        config.smem_bytes(problem),
        **schedule,
    )
    out, lse = launch.empty_outputs(problem, inputs)
    return arguments.result(arguments.out, out), arguments.result(arguments.lse, lse)


def check(call: Call, config: ForwardConfigSm80 | None = None, **schedule):
    out, lse = computed(call, config, **schedule)
    oracle, in_torch = call.expected(), call.expected(out.dtype)
    rows = compare("out", out, oracle.out, in_torch.out), compare_lse(lse, oracle.lse)
    assert all(row.ok for row in rows), f"{call} {config}\n" + "\n".join(str(row) for row in rows)


def among_nan(t: torch.Tensor) -> torch.Tensor:
    """The tensor with NaN behind each row of each head; copies stay as wide as the head dim lets them be."""
    memory = t.new_full((*t.shape[:-1], t.shape[-1] + min(8, t.shape[-1] & -t.shape[-1])), math.nan)
    memory[..., : t.shape[-1]] = t
    return memory[..., : t.shape[-1]]


def call_of(head_dim, head_dim_v, seqlen_q, seqlen_k, heads=(2, 1), batch=1, dtype=torch.bfloat16, **options) -> Call:
    generator = torch.Generator().manual_seed(0)
    batch = () if "cu_seqlens_q" in options else (batch,)
    shapes = {
        "q": (*batch, seqlen_q, heads[0], head_dim),
        "k": (*batch, seqlen_k, heads[1], head_dim),
        "v": (*batch, seqlen_k, heads[1], head_dim_v),
    }
    tensors = {n: among_nan(torch.randn(shape, generator=generator).to(dtype)) for n, shape in shapes.items()}
    for name in LENGTHS:
        if name in options:
            options[name] = torch.tensor(options[name], dtype=torch.int32)
    return Call(tensors, options, 0)


FLOAT32 = torch.float32
SINKS = torch.tensor([1.0, -1.0])
PACKED_K = {"cu_seqlens_k": [0, 64, 70, 199, 220]}
PACKED = {"cu_seqlens_q": [0, 30, 30, 100, 150], **PACKED_K}
# calls with the same static problem share a kernel, and its compilation is most of a test's time
CASES = {
    "causal": [
        call_of(64, 64, 150, 180, causal=True),
        call_of(64, 64, 150, 70, causal=True),  # rows that see no key
        call_of(64, 64, 70, 65, heads=(4, 2), batch=3, causal=True),
        *(call_of(64, 64, 150, 180, window=(None, right)) for right in (-1, -70, -179)),
        call_of(64, 64, 70, 65, window=(3, -4)),  # rows that see no key
    ],
    "float16 packed window softcap sinks": [
        call_of(128, 96, 160, 230, dtype=torch.float16, softcap=5.0, window=(70, 5), sinks=SINKS, **options)
        for options in (
            {**PACKED, "seqused_k": [10, 0, 129, 21]},
            {**PACKED, "seqused_k": [64, 6, 129, 21]},
            # 100 rows of sequences without keys, and 10 rows that belong to no sequence
            {"cu_seqlens_q": PACKED["cu_seqlens_q"], "cu_seqlens_k": [0, 0, 6, 135, 200], "seqused_k": [0, 6, 0, 21]},
        )
    ]
    + [
        call_of(
            128,
            96,
            160,
            230,
            dtype=torch.float16,
            softcap=5.0,
            window=window,
            sinks=SINKS,
            **PACKED,
            seqused_k=[64, 6, 129, 21],
        )
        for window in ((70, -5), (-5, 70), (-64, 64), (200, -100))
    ],
    "sinks, rows that see nothing": [
        call_of(64, 64, 150, 70, causal=True, sinks=sinks)
        for sinks in (SINKS, 50 * SINKS, torch.tensor([math.inf, -1.0]), torch.tensor([-math.inf, math.nan]))
    ],
    "seqused, head dims 192 and 256": [call_of(192, 256, 70, 100, batch=3, seqused_k=[100, 0, 65])],
    "2-byte copies, packed": [call_of(5, 7, 160, 230, causal=True, **PACKED)],
    "4-byte copies, packed, 3 heads in a tile, window to the left": [
        call_of(18, 40, 45, 230, heads=(6, 2), window=(left, None), cu_seqlens_q=[0, 7, 7, 37, 45], **PACKED_K)
        for left in (70, -1, -20, -300)
    ],
    "4 heads in a tile": [
        call_of(64, 64, 15, 180, heads=(8, 2), causal=True),
        call_of(64, 64, 1, 180, heads=(4, 1), batch=3, causal=True),
    ],
    "float32": [
        call_of(64, 64, 70, 130, dtype=FLOAT32, causal=True),
        call_of(64, 64, 70, 65, heads=(4, 2), batch=2, dtype=FLOAT32, causal=True),
    ],
    "float32 packed window softcap sinks": [
        call_of(128, 96, 160, 230, dtype=FLOAT32, softcap=softcap, window=(70, 5), sinks=SINKS, **PACKED)
        for softcap in (5.0, 50.0)
    ],
    "float32 seqused, head dims 192 and 256": [call_of(192, 256, 40, 70, batch=2, dtype=FLOAT32, seqused_k=[70, 33])],
    "float32 4-byte copies": [call_of(5, 7, 70, 130, dtype=FLOAT32, causal=True)],
    "float32 8-byte copies, 5 heads in a tile": [call_of(6, 10, 12, 70, heads=(5, 1), dtype=FLOAT32)],
}
ROAD = {
    "bare": ForwardConfigSm80(num_stages=1, prefetch=False, swizzle=False, fragments_ahead=False),
    "prefetching": ForwardConfigSm80(num_stages=1),
    "3 stages, lazy": ForwardConfigSm80(num_stages=3, rescale_threshold=8.0),
}
ROAD_FLOAT32 = {
    "bare": ForwardConfigSm80(tile_n=16, num_stages=1, prefetch=False, swizzle=False, q_in_registers=False),
    "default": None,
}


@pytest.mark.sampled(quick=1, slow=4)
@pytest.mark.parametrize("name", CASES)
def test_values(name):
    for call in CASES[name]:
        check(call)


def test_float32_of_few_rows():
    """The smallest call that has all parts of a kernel of float32: two heads in a tile, several tiles of keys."""
    check(call_of(64, 40, 20, 70, heads=(2, 1), dtype=FLOAT32, causal=True))


@pytest.mark.slow
def test_more_sequences_than_a_warp_has_lanes():
    """The search for a tile's sequence takes 32 at a time, among them empty sequences and rows without a sequence."""
    lengths = [0 if b % 7 == 3 else 1 + b % 3 for b in range(70)]
    starts = [0, *itertools.accumulate(lengths)]
    check(call_of(16, 16, starts[-1] + 2, starts[-1], causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts))


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        *(pytest.param(torch.bfloat16, config, id=name) for name, config in ROAD.items()),
        *(pytest.param(FLOAT32, config, id=f"float32 {name}") for name, config in ROAD_FLOAT32.items()),
    ],
)
def test_no_order_of_copies_and_warps_matters(dtype, config):
    call = call_of(64, 64, 70, 170, heads=(1, 1), dtype=dtype, causal=True)
    for copies_late, warps_reversed in itertools.product((False, True), repeat=2):
        check(call, config, copies_late=copies_late, warps_reversed=warps_reversed)


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, FLOAT32])
def test_scores_that_grow_are_rescaled_lazily(dtype):
    call = call_of(64, 64, 64, 320, dtype=dtype, causal=True)
    call.tensors["k"].mul_(20 * torch.linspace(1, 0.1, 320)[:, None, None])
    check(call)


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize(
    ("dtype", "head_dims"),
    [
        (torch.bfloat16, (64, 64)),
        (FLOAT32, (64, 64)),
        (FLOAT32, (5, 7)),
    ],
)
def test_nan_of_a_hidden_key_stays_hidden(dtype, head_dims):
    call = call_of(*head_dims, 100, 130, dtype=dtype, causal=True)
    oracle, in_torch = call.expected().out, call.expected(dtype).out
    call.tensors["v"][:, 90] = math.nan
    out, _ = computed(call)
    first = 90 - 30  # query that sees the key
    assert out[:, first:].isnan().all()
    comparison = compare("out", out[:, :first], oracle[:, :first], in_torch[:, :first])
    assert comparison.ok, str(comparison)


@pytest.mark.slow
def test_infinity_in_float32():
    """An infinity has no low limb; it does not reach other columns."""
    call = call_of(192, 256, 16, 70, dtype=FLOAT32, seqused_k=[70])
    oracle, in_torch = call.expected().out, call.expected(FLOAT32).out
    for t in (call.tensors["v"][:, 50], oracle, in_torch):
        t[..., :32] = math.inf
    comparison = compare("out", computed(call)[0], oracle, in_torch)
    assert comparison.ok, str(comparison)


@pytest.mark.slow
def test_float32_over_many_keys():
    """The tensor cores truncate: a sum that stayed in them would be too small."""
    call = call_of(64, 64, 16, 600, heads=(1, 1), dtype=FLOAT32, causal=True)
    call.tensors["v"].abs_()
    check(call)


def shifted(t: torch.Tensor, count: int) -> torch.Tensor:
    """A copy that begins `count` elements after a 16-byte boundary, between NaN."""
    storage = torch.full((t.numel() + 32,), math.nan, dtype=t.dtype)
    first = -storage.data_ptr() % 16 // t.element_size() + count
    storage[first : first + t.numel()] = t.flatten()
    return storage[first : first + t.numel()].view(t.shape)


@pytest.mark.slow
def test_tensors_of_any_alignment():
    call = call_of(64, 64, 40, 70, dtype=torch.float16, causal=True)
    for count, expected in ((8, 16), (4, 8), (1, 2), (2, 4)):
        call.tensors["v"] = shifted(call.tensors["v"], count)
        assert launch.vector_bytes(*call.tensors.values()) == expected
    check(call)
    assert launch.vector_bytes(torch.empty(1, 5, 1, 7)) == 4
    assert launch.vector_bytes(torch.empty(2, 5, 3, 8, dtype=torch.float16)[..., :2]) == 4
    assert launch.vector_bytes(torch.empty(2, 5, 3, 20, dtype=torch.float16)[..., :8]) == 8  # strides of 40 bytes
    # the stride of a single row or head is never used
    assert launch.vector_bytes(torch.empty(64).as_strided((1, 1, 1, 8), (3, 5, 7, 1))) == 16


def without_waits(kernel: ptx_interpreter.Program) -> ptx_interpreter.Program:
    is_kept = [not i.name.startswith("cp.async.wait") for i in kernel.instructions]
    kept_before = np.concatenate([[0], np.cumsum(is_kept)])
    return kernel._replace(
        instructions=[i for i, kept in zip(kernel.instructions, is_kept, strict=True) if kept],
        labels={name: int(kept_before[position]) for name, position in kernel.labels.items()},
    )


@pytest.mark.slow
def test_the_interpreter_sees_a_missing_wait():
    call = call_of(64, 64, 16, 64, causal=True)
    assert not computed(call)[0].isnan().any()
    assert computed(call, change=without_waits)[0].isnan().all()
    assert not computed(call, change=without_waits, copies_late=False)[0].isnan().any()


def _random_calls(dtype: torch.dtype, count: int):
    """The first random calls that this backend computes and that have keys."""
    calls = (random_call(seed, dtype=dtype, with_modifiers=False) for seed in range(60))
    is_taken = (
        (call, launch.unsupported(problem_of(call)[0]) is None and min(t.numel() for t in call.tensors.values()) > 0)
        for call in calls
    )
    return itertools.islice((pytest.param(call, id=f"{dtype} {call.seed}") for call, taken in is_taken if taken), count)


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize("call", [*_random_calls(torch.bfloat16, 1), *_random_calls(FLOAT32, 1)])
def test_random_calls(call):
    check(call)


def test_a_launch_picks_the_kernel_for_its_tensors(monkeypatch):
    kernels = []
    monkeypatch.setattr(launch, "arch_of", lambda device: ARCH)
    monkeypatch.setattr(launch, "kernel_of", lambda *key: kernels.append(key[-1]) or (lambda *arguments: None))
    call = call_of(64, 64, 40, 70, dtype=FLOAT32)
    k = call.tensors["k"]
    with_columns_apart = shifted(k, 1).transpose(1, 3).contiguous().transpose(1, 3)  # the launch copies it
    for t in (k, shifted(k, 2), with_columns_apart):
        problem, inputs = problem_of(replace(call, tensors={**call.tensors, "k": t}))
        out, lse = launch.forward(problem, inputs)
        assert out.shape == call.tensors["q"].shape
        assert lse.dtype == FLOAT32
    assert kernels == [16, 8, 16]

"""The Ampere forward computes attention: its PTX runs on the CPU and is held to the budgets of any backend."""

import functools
import importlib.util
import itertools
import math
import struct
import tempfile

import numpy as np
import ptx_interpreter
import pytest
import torch

from onepass.kernels import compile, heuristics
from onepass.kernels.arguments import score_scales, window_bounds
from onepass.kernels.blocks import tile_scheduler
from onepass.kernels.blocks.integers import ceil_div
from onepass.kernels.config import ForwardConfigSm80
from onepass.kernels.sm80 import launch
from onepass.problem import AttentionInputs, AttentionProblem, Mask
from onepass.testing.budget import compare, compare_lse
from onepass.testing.inputs import Call, random_call

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"
)

ARCH = "sm_80"
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")


@functools.lru_cache(maxsize=8)
def program(static: tuple, config: ForwardConfigSm80, problem: AttentionProblem) -> ptx_interpreter.Program:
    with tempfile.TemporaryDirectory() as directory:
        compiled = compile.compile_now(
            ARCH,
            functools.partial(launch.trace, problem, config, ARCH),
            f"{compile.OPTIONS} --keep-ptx --dump-dir={directory}",
        )
        return ptx_interpreter.parse(compiled.__ptx__)


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


def fast_divisor(n: int) -> list[bytes]:
    """FastDivmodDivisorV2 as a kernel gets it: divisor, multiplier, two shifts; and the divisor once more."""
    log = (n - 1).bit_length()
    multiplier = ((2**log - n) * 2**32 // n + 1) % 2**32
    return [struct.pack("<IIBBxx", n, multiplier, min(log, 1), max(log - 1, 0)), struct.pack("<i", n)]


class Arguments:
    """The parameters of a kernel, in the order of `ForwardSm80.kernel`."""

    def __init__(self, problem: AttentionProblem, inputs: AttentionInputs, config: ForwardConfigSm80):
        self.memory = ptx_interpreter.Memory(1 << 23, ptx_interpreter.GLOBAL_BASE)
        self.is_packed = problem.is_packed
        self.values: list[bytes] = []
        for t in inputs[:3]:
            self.tensor(launch.with_rows(t))
        out, lse = launch.empty_outputs(problem, inputs)
        self.out, self.lse = self.tensor(out), self.tensor(lse, is_lse=True)
        if inputs.sinks is not None:
            self.vector(inputs.sinks.float())
        for lengths in (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_k):
            if lengths is not None:
                self.vector(lengths)
        scales = [struct.pack("<f", x) for x in score_scales(problem) if x is not None]
        self.values += scales + [struct.pack("<i", x) for x in window_bounds(problem) if x is not None]
        section, self.num_tiles = launch.grid(problem, config)
        heads = problem.num_heads_q
        if problem.is_packed:
            self.values += fast_divisor(heads)
            return
        num_m_blocks, heads_in_all = ceil_div(problem.seqlen_q, config.tile_m), heads * problem.batch
        self.values += [struct.pack("<i", n) for n in (self.num_tiles, num_m_blocks, problem.batch)]
        in_last = tile_scheduler.heads_in_last_section(heads_in_all, section)
        for n in (num_m_blocks * section, section, in_last, heads):
            self.values += fast_divisor(n)

    def put(self, t: torch.Tensor) -> int:
        """Address of the memory that t is a view of: all strides stay as they are."""
        last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) + 1
        flat = t.as_strided((last,), (1,))
        return self.memory.put((flat.view(torch.int16) if t.element_size() == 2 else flat).numpy())

    def tensor(self, t: torch.Tensor, is_lse: bool = False) -> int:
        """(seqlen, dim, heads, batch): what is known when the kernel is compiled is not passed."""
        address, sizes, strides = self.put(t), list(t.shape), list(t.stride())
        if is_lse:
            sizes[-2:], strides[-2:] = sizes[:-3:-1], strides[:-3:-1]
            sizes.append(1)
            strides.append(0)
        *batch, seqlen, heads, _ = sizes
        *batch_stride, row, head, _ = strides
        numbers = [seqlen, heads, *batch]
        dynamic_strides = [head, *batch_stride] if is_lse else [row, head, *batch_stride]
        padding = "I" if len(numbers) % 2 else ""
        form = f"<Q{len(numbers)}i{padding}{len(dynamic_strides)}q"
        self.values.append(struct.pack(form, address, *numbers, *([0] if padding else []), *dynamic_strides))
        return address

    def vector(self, t: torch.Tensor):
        self.values.append(struct.pack("<Qii", self.put(t.contiguous()), t.numel(), 0))

    def result(self, address: int, like: torch.Tensor) -> torch.Tensor:
        last = sum((n - 1) * stride for n, stride in zip(like.shape, like.stride(), strict=True)) + 1
        flat = torch.from_numpy(self.memory.get(address, last * like.element_size()))
        return flat.view(like.dtype).as_strided(like.shape, like.stride())


def computed(call: Call, config: ForwardConfigSm80 | None = None, change=lambda kernel: kernel, **schedule):
    """out and lse of the kernel, or of what `change` makes of its program."""
    problem, inputs = problem_of(call)
    config = config or heuristics.forward_config_sm80(problem, ARCH)
    arguments = Arguments(problem, inputs, config)
    ptx_interpreter.run(
        change(program(problem.static(), config, problem)),
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
    oracle, plain = call.expected(), call.expected(out.dtype)
    rows = compare("out", out, oracle.out, plain.out), compare_lse(lse, oracle.lse)
    assert all(row.ok for row in rows), f"{call} {config}\n" + "\n".join(str(row) for row in rows)


def call_of(head_dim, head_dim_v, seqlen_q, seqlen_k, heads=(2, 1), batch=1, dtype=torch.bfloat16, **options) -> Call:
    generator = torch.Generator().manual_seed(0)
    batch = () if "cu_seqlens_q" in options else (batch,)
    shapes = {
        "q": (*batch, seqlen_q, heads[0], head_dim),
        "k": (*batch, seqlen_k, heads[1], head_dim),
        "v": (*batch, seqlen_k, heads[1], head_dim_v),
    }
    tensors = {n: torch.randn(shape, generator=generator).to(dtype) for n, shape in shapes.items()}
    for name in LENGTHS:
        if name in options:
            options[name] = torch.tensor(options[name], dtype=torch.int32)
    return Call(tensors, options, 0)


PACKED = {"cu_seqlens_q": [0, 30, 30, 100, 150], "cu_seqlens_k": [0, 64, 70, 199, 220]}
CASES = {
    "causal": call_of(64, 64, 150, 180, causal=True),
    "full": call_of(64, 64, 70, 200),
    "rows that see nothing": call_of(64, 64, 150, 70, causal=True),
    "window": call_of(64, 64, 150, 280, window=(70, 5)),
    "window to the left": call_of(64, 64, 150, 280, window=(70, None)),
    "float16 softcap": call_of(128, 128, 70, 130, dtype=torch.float16, softcap=5.0, causal=True),
    "sinks": call_of(64, 64, 70, 130, sinks=torch.tensor([1.0, -1.0])),
    "batch and heads": call_of(64, 64, 70, 65, heads=(4, 2), batch=3, causal=True),
    "seqused": call_of(64, 64, 70, 140, batch=3, seqused_k=[140, 0, 65]),
    "packed": call_of(64, 64, 160, 230, causal=True, **PACKED),
    "packed seqused": call_of(64, 64, 160, 230, seqused_k=[10, 0, 129, 21], **PACKED),
    "head dims of no tile": call_of(72, 40, 70, 130),
    **{f"head dim {d}": call_of(d, d, 70, 70, causal=True) for d in (96, 128, 192, 256)},
    "head dims 192 and 128": call_of(192, 128, 70, 70),
}
ROAD = {
    "plain": ForwardConfigSm80(num_stages=1, prefetch=False, swizzle=False),
    "prefetching": ForwardConfigSm80(num_stages=1),
    "2 stages": ForwardConfigSm80(num_stages=2),
    "3 stages": ForwardConfigSm80(num_stages=3),
    "2 x 16 rows a warp, lazy": ForwardConfigSm80(tile_m=128, q_in_registers=False, rescale_threshold=8.0),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    check(CASES[name])


@pytest.mark.parametrize("name", ROAD)
def test_no_order_of_copies_and_warps_matters(name):
    call = call_of(64, 64, 70, 300, heads=(1, 1), causal=True)
    for copies_late, warps_reversed in itertools.product((False, True), repeat=2):
        check(call, ROAD[name], copies_late=copies_late, warps_reversed=warps_reversed)


def test_scores_that_grow_are_rescaled_lazily():
    call = call_of(64, 64, 64, 320)
    call.tensors["k"].mul_(20 * torch.linspace(1, 0.1, 320)[:, None, None])
    for threshold in (0.0, 8.0):
        check(call, ForwardConfigSm80(rescale_threshold=threshold))


def test_nan_of_a_hidden_key_stays_hidden():
    call = call_of(64, 64, 100, 130, causal=True)
    oracle, plain = call.expected().out, call.expected(torch.bfloat16).out
    call.tensors["v"][:, 90] = math.nan
    out, _ = computed(call)
    first = 90 - 30  # query that sees the key
    assert out[:, first:].isnan().all()
    comparison = compare("out", out[:, :first], oracle[:, :first], plain[:, :first])
    assert comparison.ok, str(comparison)


def without_waits(kernel: ptx_interpreter.Program) -> ptx_interpreter.Program:
    is_kept = [not i.name.startswith("cp.async.wait") for i in kernel.instructions]
    places = np.concatenate([[0], np.cumsum(is_kept)])
    return kernel._replace(
        instructions=[i for i, kept in zip(kernel.instructions, is_kept, strict=True) if kept],
        labels={name: int(places[place]) for name, place in kernel.labels.items()},
    )


def test_the_interpreter_sees_a_missing_wait():
    call = call_of(64, 64, 16, 64)
    assert not computed(call)[0].isnan().any()
    assert computed(call, change=without_waits)[0].isnan().all()
    assert not computed(call, change=without_waits, copies_late=False)[0].isnan().any()


SEEDS = [
    seed
    for seed in range(60)
    if launch.unsupported(problem_of(random_call(seed, dtype=torch.bfloat16))[0]) is None
    and min(random_call(seed, dtype=torch.bfloat16).tensors[n].numel() for n in "qkv") > 0
]


@pytest.mark.parametrize("seed", SEEDS[:8])
def test_random_calls(seed):
    check(random_call(seed, dtype=torch.bfloat16))

"""The Ampere backward computes gradients: the PTX of its kernels runs on the CPU, held to any backend's budgets."""

import functools
import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace

import block_lists_kernel
import machine_code
import numpy as np
import packages
import ptx_interpreter
import pytest
import sm80_decode
import torch
from test_forward_sm80_values import FLOAT32, PACKED, Arguments, call_of, problem_of, shifted

import onepass
from onepass.geometry import tile_scheduler
from onepass.geometry.integers import ceil_div
from onepass.kernels.config import BackwardConfigSm80
from onepass.kernels.heuristics import sm80 as heuristics_sm80
from onepass.kernels.launch import backward_sm80 as backward_launch
from onepass.testing.inputs import Call
from onepass.tiled import backward, forward

pytestmark = packages.needs_machine_code

ARCH = "sm_80"


@functools.lru_cache(maxsize=32)
def program(name: str, key: tuple, arch: str, request) -> ptx_interpreter.Program:
    return ptx_interpreter.parse(machine_code.read_with_ptx(arch, request.trace)[1])


@dataclass(frozen=True)
class Request:
    """The last argument of `compile.get`; the other ones distinguish kernels."""

    trace: object

    def __hash__(self):
        return 0

    def __eq__(self, other):
        return isinstance(other, Request)


class Parameters(Arguments):
    """Memory with the tensors of a launch, and the parameters of a kernel that these are passed to."""

    def __init__(self):
        sm80_decode.Parameters.__init__(self, 1 << 24)
        self.tensors = []

    def put(self, t: torch.Tensor) -> int:
        address = super().put(t)
        self.tensors.append((t, address))
        return address

    def rows(self, *tensors: torch.Tensor | None, is_lse: bool = False):
        """A tensor with rows, such as q or lse."""
        for t in tensors:
            if t is not None:
                self.tensor(t, is_lse)

    def blocks(self, *tensors: torch.Tensor | None):
        """A tensor (blocks, columns)."""
        for t in tensors:
            if t is not None:
                sm80_decode.Parameters.tensor(self, t, (0, 1))

    def vectors(self, *tensors: torch.Tensor | None):
        """Tensors (count,)."""
        for t in tensors:
            if t is not None:
                self.vector(t)

    def copy_back(self, *written: torch.Tensor | None):
        for t, address in self.tensors:
            if any(t is other for other in written):
                # all of the memory between its first and its last element: a gradient may be broadcast
                flat = sm80_decode.flat(t)
                flat.copy_(self.result(address, flat))


class Kernels:
    """The kernels of a backward, callable with tensors like the compiled ones of kernels/launch/backward.py.

    Attributes:
        change: applied to the program of the main kernel before it runs.
        schedule: options of `ptx_interpreter.run` for the main kernel.
    """

    def __init__(self, problem, config, has_dlse, change, schedule):
        self.problem, self.config, self.change, self.schedule = problem, config, change, schedule
        arch = "sm_90a" if config.vector_adds else ARCH
        self.requests = {r.name: r for r in backward_launch.compile_requests(problem, has_dlse, config, arch)}
        tile = config.tile_m, config.tile_n
        self.block_lists = block_lists_kernel.prepared(problem, tile, True) if problem.has_backward_lists else None

    def run(self, name: str, p: Parameters, written: tuple, grid, num_threads: int, smem_bytes: int = 0, **schedule):
        name_, key, arch, trace = self.requests[f"backward_{name}"]
        kernel = program(name_, key, arch, Request(trace))
        kernel = self.change(kernel) if name == "sm80" else kernel
        ptx_interpreter.run(kernel, p.values, p.memory, grid, num_threads, smem_bytes, **schedule)
        p.copy_back(*written)

    def grid_of_rows(self, opcode: int, blocks_per_head: int) -> tuple[int, int, int]:
        problem = self.problem
        return blocks_per_head * opcode, problem.num_heads_q, 1 if problem.is_packed else problem.batch

    def preprocess(self, out, dout, lse, dlse, stats, dq_accum, cu_seqlens_q, blocks_per_head):
        from onepass.kernels.device.memory_bound.backward_rows import THREADS  # not at the top: it needs the compiler

        p = Parameters()
        p.rows(out, dout)
        p.rows(lse, dlse, is_lse=True)
        p.blocks(stats, dq_accum)
        p.vectors(cu_seqlens_q)
        self.run("preprocess", p, (stats, dq_accum), self.grid_of_rows(1, blocks_per_head), THREADS)

    def main(self, q, k, v, dout, dk, dv, dq_accum, stats, turns, *others):
        *lengths, softmax_scale, scale_log2, tanh_scale, left, right, modifiers = others[:-3]
        blocks_per_head, section, num_tiles = others[-3:]
        problem, config = self.problem, self.config
        p = Parameters()
        p.rows(q, k, v, dout, dk, dv)
        p.blocks(dq_accum, stats)
        p.vectors(turns)
        p.numbers(blocks_per_head, problem.num_heads_q)
        p.vectors(*lengths)
        p.numbers(softmax_scale, scale_log2, tanh_scale, left, right)
        p.modifiers(modifiers)
        heads = problem.num_heads_kv
        if problem.is_packed:
            p.divisors(heads)
        else:
            num_n_blocks, heads_in_all = ceil_div(problem.seqlen_k, config.tile_n), heads * problem.batch
            p.numbers(num_tiles, num_n_blocks, problem.batch)
            in_last = tile_scheduler.heads_in_last_section(heads_in_all, section)
            p.divisors(num_n_blocks * section, section, in_last, heads)
        schedule = self.schedule | {"one_by_one": turns is not None}
        # with modifiers, gradients of terms come after lists
        written = (dk, dv, dq_accum, turns, *(t for t in modifiers or () if isinstance(t, torch.Tensor)))
        self.run("sm80", p, written, num_tiles, config.num_threads, config.smem_bytes(problem), **schedule)

    def postprocess(self, dq_accum, dq, cu_seqlens_q, softmax_scale, blocks_per_head, *again):
        q, k, v, dout, stats, cu_seqlens_k, seqused_k, scale_log2, tanh_scale, left, right, modifiers = again
        p = Parameters()
        p.blocks(dq_accum)
        p.rows(dq)
        p.vectors(cu_seqlens_q, cu_seqlens_k, seqused_k)
        p.numbers(softmax_scale)
        p.rows(q, k, v, dout)
        p.blocks(stats)
        p.numbers(scale_log2, tanh_scale, left, right)
        p.modifiers(modifiers)
        rows = min(64, self.config.tile_m)
        self.run("postprocess", p, (dq,), self.grid_of_rows(self.config.tile_m // rows, blocks_per_head), 2 * rows)

    def sink_gradients(self, stats, sinks, dsinks, blocks_per_head):
        from onepass.kernels.device.memory_bound.sink_gradients import THREADS

        p = Parameters()
        p.blocks(stats)
        p.vectors(sinks, dsinks)
        p.divisors(blocks_per_head)
        p.numbers(blocks_per_head)
        self.run("sinks", p, (dsinks,), (len(sinks), 1, 1), THREADS, 4 * THREADS // 32)


@pytest.mark.parametrize(("batch", "blocks_per_head"), [(1, 1), (3, 7)])
def test_gradients_of_sinks(batch, blocks_per_head):
    """A thread block goes through all rows of its head, of which there may be fewer than threads, or more."""
    wanted = problem_of(call_of(64, 64, 64, 64, heads=(2, 2), sinks=torch.zeros(2)))[0]
    torch.manual_seed(0)
    rows = torch.randn(batch, 2, blocks_per_head, 2, 64)
    rows[..., 0, 50:] = -math.inf  # rows that do not exist
    sinks, dsinks = torch.randn(2), torch.empty(2)
    kernels = Kernels(wanted, heuristics_sm80.backward_config_sm80(wanted, ARCH), False, lambda kernel: kernel, {})
    kernels.sink_gradients(rows.view(-1, 128), sinks, dsinks, blocks_per_head)
    minus_lse, minus_delta = rows.double().unbind(3)
    p = torch.exp(sinks.double()[:, None, None] + minus_lse * math.log(2))
    torch.testing.assert_close(dsinks.double(), (p * minus_delta).sum((0, 2, 3)), rtol=1e-5, atol=1e-5)


def poisoned(t: torch.Tensor) -> torch.Tensor:
    return t.fill_(math.nan) if t.is_floating_point() else t


def gradients(call, out, lse, dout, dlse, config=None, change=lambda kernel: kernel, **schedule):
    """dq, dk, dv and dsinks, computed by the kernels."""
    problem, inputs = problem_of(call)
    problem = replace(problem, deterministic=call.options.get("deterministic", False))
    return gradients_of(problem, inputs, out, lse, dout, dlse, config, change, **schedule)


def gradients_of(problem, inputs, out, lse, dout, dlse, config=None, change=lambda kernel: kernel, **schedule):
    """dq, dk, dv and dsinks; with modifiers, also the gradients of their terms."""
    config = config or heuristics_sm80.backward_config_sm80(problem, ARCH)
    kernels = Kernels(problem, config, dlse is not None, change, schedule)
    blocks_per_head, num_tiles = backward_launch.counts(problem, config)
    section = backward_launch.heads_per_section(problem, config)
    launch = backward_launch.Launch(
        problem,
        config,
        kernels.preprocess,
        kernels.main,
        kernels.postprocess,
        kernels.sink_gradients,
        kernels.block_lists,
        blocks_per_head,
        section,
        num_tiles,
    )
    return launch(inputs, out, lse, dout, dlse)


class ByKernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, q, k, v, sinks):
        problem, inputs = problem_of(replace(call, tensors={"q": q, "k": k, "v": v}))
        out, lse = forward(problem, inputs)
        ctx.call = call
        ctx.save_for_backward(out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        call = ctx.call
        dq, dk, dv, dsinks = gradients(call, *ctx.saved_tensors, dout, dlse, call.config, **call.schedule)
        return None, dq, dk, dv, dsinks if "sinks" in call.options else None


@dataclass
class KernelCall(Call):
    """A call whose gradients the kernels compute."""

    config: BackwardConfigSm80 | None = None
    schedule: dict | None = None

    def run(self):
        options = {n: o.detach() if n == "sinks" else o for n, o in self.options.items()}
        call = replace(self, tensors={n: t.detach() for n, t in self.tensors.items()}, options=options)
        call.schedule = self.schedule or {}
        return onepass.AttentionOutput(*ByKernels.apply(call, *self.tensors.values(), self.options.get("sinks")))

    def expected(self, compute_dtype=torch.float64):
        options = {n: o for n, o in self.options.items() if n != "deterministic"}
        return Call(self.tensors, options).expected(compute_dtype)

    def _floors(self, dout, dlse, oracle):
        options = {n: o for n, o in self.options.items() if n != "deterministic"}
        return Call(self.tensors, options)._floors(dout, dlse, oracle)


def check(call: Call, config: BackwardConfigSm80 | None = None, **schedule):
    KernelCall(call.tensors, call.options, call.seed, config, schedule).check()


CASES = {
    "causal": call_of(64, 64, 150, 180, causal=True),
    "full": call_of(64, 64, 70, 200),
    "rows that see nothing": call_of(64, 64, 150, 70, causal=True),
    "window": call_of(64, 64, 150, 280, window=(70, 5)),
    "keys before the query": call_of(64, 64, 150, 180, window=(None, -70)),
    "no key": call_of(64, 64, 70, 65, window=(3, -4)),
    "keys behind the query": call_of(64, 64, 150, 280, window=(-70, None)),
    "keys behind the query, to a last one": call_of(64, 64, 150, 280, window=(-5, 70)),
    "deterministic, keys behind the query": call_of(64, 64, 150, 300, window=(-70, 130), deterministic=True),
    "deterministic, keys before the query": call_of(64, 64, 150, 300, window=(130, -70), deterministic=True),
    "float16 softcap": call_of(128, 128, 70, 130, dtype=torch.float16, softcap=5.0, causal=True),
    "sinks": call_of(64, 64, 70, 130, sinks=torch.tensor([1.0, -1.0])),
    "sinks, rows that see nothing": call_of(64, 64, 150, 70, causal=True, sinks=torch.tensor([1.0, -40.0])),
    "packed sinks, sequences without keys": call_of(
        64,
        64,
        160,
        230,
        causal=True,
        sinks=torch.tensor([1.0, 30.0]),
        cu_seqlens_q=[0, 30, 30, 100, 150],
        cu_seqlens_k=[0, 0, 6, 6, 200],
    ),
    "batch and heads": call_of(64, 64, 70, 65, heads=(4, 2), batch=3, causal=True),
    "seqused": call_of(64, 64, 70, 140, batch=3, seqused_k=[140, 0, 65]),
    "packed seqused": call_of(64, 64, 160, 230, seqused_k=[10, 0, 129, 21], **PACKED),
    "packed sinks": call_of(64, 64, 160, 230, sinks=torch.tensor([1.0, -1.0]), **PACKED),
    "head dims of no tile": call_of(72, 40, 70, 130),
    **{f"head dim {d}": call_of(d, d, 70, 70, causal=True) for d in (128, 192, 256)},
    "head dims 192 and 128": call_of(192, 128, 70, 70),
    "deterministic": call_of(64, 64, 150, 300, heads=(4, 2), causal=True, deterministic=True),
    "deterministic packed": call_of(64, 64, 160, 230, causal=True, deterministic=True, **PACKED),
    "2-byte copies": call_of(5, 39, 70, 130, causal=True),
    "4-byte copies": call_of(18, 40, 70, 130, window=(70, 5)),
    "float16 8-byte copies, packed": call_of(20, 36, 160, 230, dtype=torch.float16, causal=True, **PACKED),
    "float32": call_of(64, 64, 70, 130, dtype=FLOAT32),
    "float32 window softcap sinks": call_of(
        64,
        64,
        70,
        65,
        heads=(4, 2),
        batch=2,
        dtype=FLOAT32,
        softcap=5.0,
        window=(30, 5),
        sinks=torch.tensor([1.0, -1.0, 0.0, 2.0]),
    ),
    "float32 window with a negative side": call_of(
        64,
        64,
        70,
        65,
        heads=(4, 2),
        batch=2,
        dtype=FLOAT32,
        softcap=5.0,
        window=(30, -5),
        sinks=torch.tensor([1.0, -1.0, 0.0, 2.0]),
    ),
    "float32 4-byte copies, packed, deterministic": call_of(
        5, 39, 160, 230, dtype=FLOAT32, causal=True, deterministic=True, **PACKED
    ),
    "float32 packed seqused": call_of(64, 64, 160, 230, dtype=FLOAT32, seqused_k=[10, 0, 129, 21], **PACKED),
    "float32 packed sinks": call_of(
        128, 96, 160, 230, dtype=FLOAT32, causal=True, sinks=torch.tensor([1.0, -1.0]), **PACKED
    ),
    "float32 softcap, head dim 128": call_of(128, 128, 40, 70, dtype=FLOAT32, softcap=50.0, causal=True),
    "float32 head dims 192 and 128": call_of(192, 128, 40, 70, dtype=FLOAT32, causal=True),
    "float32 head dims 64 and 256": call_of(64, 256, 40, 70, dtype=FLOAT32, causal=True),
    "float32 head dim 256": call_of(256, 256, 40, 70, dtype=FLOAT32, causal=True),
}


ROWS = {
    "dense": call_of(64, 64, 70, 90, heads=(4, 2), batch=2, window=(40, 3), sinks=torch.tensor([1.0, -1.0, 0.0, 2.0])),
    "packed": call_of(
        64,
        64,
        160,
        110,
        heads=(2, 1),
        causal=True,
        seqused_k=[10, 0, 31, 21],
        cu_seqlens_q=[0, 30, 30, 100, 150],
        cu_seqlens_k=[0, 20, 30, 61, 100],
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_kernels_before_and_after_the_main_one(monkeypatch, name):
    """A stand-in for the main kernel leaves sums of dq that PyTorch computed, and NaN in every third row, which the
    kernel after it computes again."""
    run, found = gradients_of, []

    def with_expected(problem, inputs, out, lse, dout, dlse, *more, **schedule):
        found[:] = backward(problem, inputs, out, lse, dout, dlse)
        return run(problem, inputs, out, lse, dout, dlse, *more, **schedule)

    def main(kernels, q, k, v, dout, dk, dv, dq_accum, stats, turns, cu_seqlens_q, *others):
        problem, config = kernels.problem, kernels.config
        dq, tile_m = found[0].float() / problem.softmax_scale, config.tile_m
        dk.copy_(found[1])
        dv.copy_(found[2])
        dq = (dq[None] if problem.is_packed else dq).transpose(1, 2)
        dq[:, :, ::3] = math.nan
        offsets = [0, problem.seqlen_q] if cu_seqlens_q is None else cu_seqlens_q.tolist()
        columns = config.dq_columns(problem) // 8  # vectors of a warp
        warp, j, c, lane = np.ogrid[: tile_m // 16, : dq.shape[-1] // 8, :4, :32]
        row, column = 16 * warp + lane // 4 + 8 * (c // 2), 8 * j + 2 * (lane % 4) + c % 2
        place = (((j // columns * (tile_m // 16) + warp) * columns + j % columns) * 4 + c) * 32 + lane
        sums = dq_accum.view(*dq.shape[:2], -1, dq_accum.shape[1])
        for sequence, (start, end) in enumerate(itertools.pairwise(offsets)):
            for block, first in enumerate(range(start, end, tile_m), start // tile_m + sequence):
                rows = torch.full((*dq.shape[:2], tile_m, dq.shape[-1]), math.nan)
                rows[:, :, : end - first] = dq[:, :, first : min(end, first + tile_m)]
                sums[:, :, block, place] = rows[:, :, row, column]

    monkeypatch.setattr(Kernels, "main", main)
    monkeypatch.setitem(globals(), "gradients_of", with_expected)
    check(ROWS[name])


SMALL = {d: config for d, config in heuristics_sm80.BACKWARD_SMALL.items() if d != 64}
FLOAT32_ROWS = [
    pytest.param(d, replace(config, vector_adds=True), id=f"{d} row {i}")
    for d, configs in heuristics_sm80.BACKWARD_FLOAT32.items()
    for i, config in enumerate(configs)
]


@pytest.mark.sampled(quick=1, slow=6)
@pytest.mark.parametrize("name", CASES)
def test_values(name):
    check(CASES[name])


def test_float32_of_few_rows():
    """The smallest call that has all parts of a kernel of float32."""
    check(call_of(64, 40, 20, 70, heads=(2, 1), dtype=FLOAT32, causal=True))


IN_FLOAT32 = ("causal", "float16 8-byte copies, packed", "2-byte copies", "seqused")


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize("name", IN_FLOAT32)
def test_dk_and_dv_in_float32(name):
    """They are the sums that are otherwise rounded to 16 bits."""
    problem, inputs = problem_of(CASES[name])
    out, lse = forward(problem, inputs)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.dtype)
    rounded, sums = (
        gradients_of(replace(problem, float32_dkv=keeps), inputs, out, lse, dout, None) for keeps in (False, True)
    )
    assert torch.equal(sums[0], rounded[0])
    for long, short in zip(sums[1:3], rounded[1:3], strict=True):
        assert long.dtype == torch.float32
        assert torch.equal(long.to(short.dtype), short)
        assert not torch.equal(long, short.float())


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("name", ["deterministic", "deterministic packed"])
def test_turns_from_the_last_tile_to_the_first(name):
    config = replace(heuristics_sm80.backward_config_sm80(problem_of(CASES[name])[0], ARCH), descending_turns=True)
    check(CASES[name], config)


@pytest.mark.slow
def test_four_values_added_at_once():
    check(call_of(64, 64, 70, 150, heads=(1, 1), causal=True), BackwardConfigSm80(vector_adds=True))


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize("head_dim", SMALL)
def test_small_configurations(head_dim):
    check(call_of(head_dim, head_dim, 70, 70, causal=True), SMALL[head_dim])


@pytest.mark.sampled(quick=0, slow=3)
@pytest.mark.parametrize(("head_dim", "config"), FLOAT32_ROWS)
def test_configurations_of_float32(head_dim, config):
    check(call_of(head_dim, head_dim, 70, 70, dtype=FLOAT32, causal=True), config)


ORDERS = list(itertools.product((False, True), repeat=2))


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(heuristics_sm80.BACKWARD_FLOAT32[64][0], id="two buffers"),
        pytest.param(
            BackwardConfigSm80(
                tile_m=16,
                tile_n=32,
                num_warps=4,
                num_stages=1,
                s_key_warps=2,
                dkv_key_warps=2,
                dq_query_warps=1,
                one_score_buffer=True,
                vector_bytes=8,
            ),
            id="dS where P was",
        ),
    ],
)
def test_no_order_of_copies_and_warps_matters_in_float32(config):
    call = call_of(128, 128, 40, 70, heads=(2, 1), dtype=FLOAT32, window=(None, 60))
    for copies_late, warps_reversed in ORDERS:
        check(call, config, copies_late=copies_late, warps_reversed=warps_reversed)


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(BackwardConfigSm80(dq_query_warps=2), id="P in registers"),
        pytest.param(
            BackwardConfigSm80(num_stages=1, s_key_warps=4, dkv_key_warps=4, one_score_buffer=True),
            id="dS where P was",
        ),
        pytest.param(BackwardConfigSm80(num_stages=1, s_key_warps=4, dkv_key_warps=4), id="one buffer, P in memory"),
        pytest.param(
            BackwardConfigSm80(tile_m=32, num_warps=4, s_key_warps=4, dkv_key_warps=4, dq_query_warps=2),
            id="2 x 16 keys a warp",
        ),
        pytest.param(
            BackwardConfigSm80(tile_m=128, dq_query_warps=8, s_key_warps=2, dkv_key_warps=4), id="128 queries"
        ),
    ],
)
def test_no_order_of_copies_and_warps_matters(config):
    call = call_of(64, 64, 150, 70, heads=(1, 1), window=(None, 90))
    for copies_late, warps_reversed in ORDERS:
        check(call, config, copies_late=copies_late, warps_reversed=warps_reversed)


def given(call: Call):
    """out, lse and their gradients: arguments of `gradients`."""
    out, lse = forward(*problem_of(call))
    generator = torch.Generator().manual_seed(1)
    return out, lse, torch.randn(out.shape, generator=generator).to(out.dtype), None


@pytest.mark.slow
def test_tiles_of_keys_take_turns():
    """Every tile that sees a block has added to each share of its dQ, and all tiles were drawn."""
    call = call_of(64, 64, 150, 300, causal=True, deterministic=True)
    problem, inputs = problem_of(call)
    problem = replace(problem, deterministic=True)
    config = heuristics_sm80.backward_config_sm80(problem, ARCH)
    seen = []
    kernels = Kernels(problem, config, False, lambda kernel: kernel, {})

    def main(*arguments):
        kernels.main(*arguments)
        seen.append(arguments[8])

    blocks_per_head, num_tiles = backward_launch.counts(problem, config)
    launch = backward_launch.Launch(
        problem, config, kernels.preprocess, main, kernels.postprocess, None, None, blocks_per_head, 1, num_tiles
    )
    launch(inputs, *given(call))
    assert (config.tile_m, config.tile_n) == (64, 64)
    tiles = [4, 5, 5]  # the first 64 queries see the keys up to 213, the next ones up to 277
    turns = seen[0].tolist()
    assert turns[:-1] == 2 * [n for n in tiles for _ in range(config.num_warps)]
    assert turns[-1] == num_tiles


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize(
    ("head_dims", "dtype"),
    [((64, 64), torch.bfloat16), ((5, 7), torch.bfloat16), ((64, 64), FLOAT32), ((5, 7), FLOAT32)],
)
def test_nan_of_a_hidden_pair_stays_hidden(head_dims, dtype):
    call = call_of(*head_dims, 100, 130, heads=(1, 1), dtype=dtype, causal=True)
    out, lse, dout, _ = given(call)
    clean = gradients(call, out, lse, dout, None)
    dout[:, 50] = math.nan  # sees the keys up to 80
    call.tensors["k"][:, 120] = math.nan  # seen from query 90 on; lse and out are still those without the NaN
    dq, dk, dv, _ = gradients(call, out, lse, dout, None)
    hidden = torch.ones(100, dtype=torch.bool)
    hidden[50] = hidden[90:] = False
    tolerance = 0.02 if dtype == torch.bfloat16 else 2e-6
    for gradient, expected, is_clean in ((dq, clean[0], hidden), (dk, clean[1], None), (dv, clean[2], None)):
        if is_clean is None:  # keys after 80, except for the one that is NaN itself
            is_clean = torch.arange(130) > 80
            is_clean[120] = False
        # what is computed again is rounded otherwise
        torch.testing.assert_close(gradient[:, is_clean], expected[:, is_clean], rtol=tolerance, atol=tolerance)
        assert not gradient.isfinite().all()


@pytest.mark.slow
def test_out_of_rows_without_keys_has_no_gradient():
    """The gradient is 0 even where dout is NaN; but dlse of such a row counts in dsinks."""
    call = CASES["sinks, rows that see nothing"]
    out, lse, dout, _ = given(call)
    dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(2))
    clean = gradients(call, out, lse, dout, dlse)
    dout[:, :80] = math.nan
    dirty = gradients(call, out, lse, dout, dlse)
    assert torch.equal(dirty[3], clean[3])
    assert (dirty[0][:, :80] == 0).all()
    for gradient, expected in zip(dirty, clean, strict=True):
        # what is computed again is rounded otherwise
        torch.testing.assert_close(gradient, expected, rtol=0.02, atol=0.02)
    dlse[:, 1, 3] = math.nan
    assert gradients(call, out, lse, dout, dlse)[3].isnan().tolist() == [False, True]


def wavefronts(addresses: np.ndarray, num_bytes: int) -> tuple[int, int]:
    """How often the banks of shared memory are read or written for a warp's access, and how often at least."""
    together = addresses.reshape(max(1, num_bytes // 4), -1)  # 128 bytes at a time
    words = [np.unique(lanes[:, None] // 4 + np.arange(num_bytes // 4)) for lanes in together]
    return sum(int(np.bincount(w % 32).max()) for w in words), len(together)


@pytest.mark.slow
def test_float32_meets_no_bank_conflict(monkeypatch):
    seen = Counter()
    run = ptx_interpreter.Warp.load_or_store

    def counted(warp, opcode, operands, active):
        if "shared" in opcode and warp.is_everyone:
            values, pointer = operands if opcode[0] == "ld" else operands[::-1]
            num_bytes = (values.count(",") + 1) * int(opcode[-1][1:]) // 8
            needed, least = wavefronts(warp.address(pointer)[:32], num_bytes)
            seen[opcode[0], num_bytes, "accesses"] += least
            seen[opcode[0], num_bytes, "conflicts"] += needed - least
        return run(warp, opcode, operands, active)

    monkeypatch.setattr(ptx_interpreter.Warp, "load_or_store", counted)
    call = call_of(64, 64, 40, 70, heads=(1, 1), dtype=FLOAT32)
    gradients(call, *given(call))
    # rows and columns of the tiles; P and dS written, and read by rows; dS by columns
    for access in (("ld", 16), ("st", 8), ("ld", 8), ("ld", 4)):
        assert seen[(*access, "accesses")] > 0
        assert seen[(*access, "conflicts")] == 0


@pytest.mark.slow
def test_infinity_in_float32():
    """An infinity has no low limb; it does not reach other columns of dV."""
    call = call_of(64, 64, 40, 70, heads=(1, 1), dtype=FLOAT32)
    out, lse, dout, _ = given(call)
    clean = gradients(call, out, lse, dout, None)[2]
    dout[:, 30, :, 5] = math.inf
    dv = gradients(call, out, lse, dout, None)[2]
    assert (dv[..., 5] == math.inf).all()
    others = torch.arange(64) != 5
    torch.testing.assert_close(dv[..., others], clean[..., others], rtol=2e-6, atol=2e-6)


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize(("dtype", "count", "vector_bytes"), [(torch.bfloat16, 1, 2), (FLOAT32, 2, 8)])
def test_tensors_between_the_boundaries_of_wide_copies(dtype, count, vector_bytes):
    call = call_of(64, 64, 70, 70, dtype=dtype, causal=True)
    out, lse, dout, _ = given(call)
    expected = gradients(call, out, lse, dout, None)
    moved = replace(call, tensors={name: shifted(t, count) for name, t in call.tensors.items()})
    config = replace(heuristics_sm80.backward_config_sm80(problem_of(call)[0], ARCH), vector_bytes=vector_bytes)
    actual = gradients(moved, shifted(out, count), lse, shifted(dout, count), None, config)
    # sums of delta have another order
    tolerance = 0.02 if dtype == torch.bfloat16 else 2e-6
    for a, b in zip(actual[:3], expected[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)

"""The arguments that a prepared Hopper launch passes to its kernel, which is replaced by a recorder, and the layouts
of results."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import packages
import pytest
import torch

import onepass
from onepass.dispatch import backends
from onepass.kernels.compiler import compile
from onepass.kernels.config import ForwardConfigSm90
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.kernels.launch import backward_sm80 as backward_launch_sm80
from onepass.kernels.launch import backward_sm90 as backward_launch
from onepass.kernels.launch import float32_halves as halves_launch
from onepass.kernels.launch import forward_sm80 as launch_sm80
from onepass.kernels.launch import forward_sm90 as launch
from onepass.ops import quantize
from onepass.problem import AttentionInputs, AttentionProblem, Mask
from onepass.problem.outputs import empty_as, empty_outputs

FULL = Mask()


def problem_of(inputs, mask=FULL):
    return AttentionProblem.of(inputs, softmax_scale=0.5, mask=mask, softcap=None, deterministic=False)


def qkv(batch=2, seqlen_q=300, seqlen_k=200, heads_q=4, heads_kv=4):
    shapes = (seqlen_q, heads_q), (seqlen_k, heads_kv), (seqlen_k, heads_kv)
    return AttentionInputs(*(torch.randn(batch, *shape, 64, dtype=torch.bfloat16) for shape in shapes))


@pytest.fixture
def launched(monkeypatch):
    """A list of the arguments of every launch."""
    calls = []
    monkeypatch.setattr(compile, "get", lambda *request: lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=9))
    launch.prepare.cache_clear()
    yield calls
    launch.prepare.cache_clear()


def test_arguments_of_the_kernel(launched):
    inputs = qkv()._replace(sinks=torch.zeros(4, dtype=torch.bfloat16))
    problem = problem_of(inputs, Mask(10**12, -7))
    config = ForwardConfigSm90(tile_n=128)
    for _ in range(2):
        out, lse = launch.forward(problem, inputs, config)
    *arguments, table, added, num_splits, split_blocks = launched[1]
    assert (table, added, num_splits, split_blocks) == (None,) * 4
    *arguments, left, right, modifiers, counter, _, num_ctas = arguments
    q, k, v, given_out, given_lse, sinks, *optional, scale, tanh_scale = arguments
    assert (q is inputs.q, k is inputs.k, v is inputs.v, given_out is out, given_lse is lse) == (True,) * 5
    assert sinks.dtype == torch.float32
    assert optional == [None] * 8  # the lengths and the arguments of float32 and FP8
    assert (scale, tanh_scale, left, right, counter) == (0.5 * math.log2(math.e), None, 300, -7, None)
    assert modifiers is None
    assert num_ctas == 9  # fewer than the 2 * 4 * 3 tiles
    assert launched[0][6:] == launched[1][6:]
    assert launched[0][3] is not out


def test_arguments_of_the_kernel_in_fp8(launched):
    q, k, v = (torch.randn(2, 40, heads, 32) for heads in (4, 2, 2))
    quantized = onepass.quantize_fp8(q.half(), k.half(), v.half())
    apart = torch.empty(2, 40, 4, 40, dtype=torch.float8_e4m3fn)[..., :32].copy_(quantized.q)  # rows are 40 bytes apart
    inputs = AttentionInputs(apart, quantized.k, quantized.v, descales=quantized.descales)
    problem = replace(
        AttentionProblem.of(
            inputs,
            softmax_scale=0.5,
            mask=Mask(),
            softcap=None,
            deterministic=False,
            quantization=quantized.quantization,
        ),
        device_type="cuda",
    )
    out, _ = launch.forward(problem, inputs, ForwardConfigSm90(tile_n=64, num_warpgroups=1))
    q, k, v, given_out, _, sinks, *lengths, float32, q_scale, k_scale, v_scale, q_block = launched[0][:14]
    assert given_out is out
    assert out.dtype == torch.float16
    assert (sinks, *lengths, float32) == (None,) * 5
    assert all(stride % 16 == 0 for stride in q.stride()[:-1])  # copied to where TMA can read it
    assert k is inputs.k
    assert torch.equal(q.float(), inputs.q.float())
    assert (k.dtype, v.dtype, v.shape) == (torch.float8_e4m3fn, torch.float8_e4m3fn, (2, 2, 32, 64))
    # the descales are passed on without any operation
    assert all(a is b for a, b in zip((q_scale, k_scale, v_scale), quantized.descales, strict=True))
    assert (q_scale.shape, k_scale.shape, v_scale.shape, q_block) == ((2, 4, 1), (2, 2, 1), (2, 2, 1), 64)

    # V with its keys last, as the kernel reads it, is not copied
    keys_last = quantize.keys_last(quantized.v)
    last = replace(problem.quantization, v_keys_last=True)
    launch.forward(
        replace(problem, quantization=last),
        inputs._replace(v=keys_last),
        ForwardConfigSm90(tile_n=64, num_warpgroups=1),
    )
    assert launched[1][2] is keys_last
    # V with its head dim last is not copied either: the kernel transposes it
    launch.forward(problem, inputs, ForwardConfigSm90(tile_n=64, num_warpgroups=1, transposes_v=True))
    assert launched[2][2] is inputs.v
    assert torch.equal(keys_last.view(torch.uint8), v.view(torch.uint8))


@packages.needs_compiler
@pytest.mark.parametrize("head_dim_v", [96, 240])
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_arguments_of_the_kernels_in_float32(launched, is_packed, head_dim_v, monkeypatch):
    """Kernels make the halves and their scales. The forward of each block of columns of V gets them beside the source
    tensors."""
    monkeypatch.setattr(launch, "tile_counter", lambda device: torch.zeros(1, dtype=torch.int32))
    halves_launch.kernel_of.cache_clear()
    leading = (300,) if is_packed else (2, 150)
    q, v = torch.randn(*leading, 4, 40), torch.randn(*leading, 2, head_dim_v)
    k = torch.randn(*leading, 2, 41)[..., :40]  # rows that have to be copied
    starts = torch.tensor([0, 100, 300], dtype=torch.int32) if is_packed else None
    inputs = AttentionInputs(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, seqused_k=torch.tensor([7, 100]))
    problem = problem_of(inputs, Mask(None, 0))
    out, lse = launch.forward(problem, inputs)
    halves_launch.kernel_of.cache_clear()
    num_blocks_of_v = 1 if head_dim_v == 96 else 2
    splits, forwards = launched[: 2 + num_blocks_of_v], launched[2 + num_blocks_of_v :]
    blocks_of_v, blocks_of_out = (t.chunk(num_blocks_of_v, dim=-1) for t in (v, out))
    assert len(forwards) == num_blocks_of_v
    for i, forward in enumerate(forwards):
        *halves, given_out, given_lse = forward[:5]
        sources, scales, q_block = forward[9], forward[10:13], forward[13]
        assert given_lse is lse
        assert same_memory(given_out, blocks_of_out[i])
        assert (out.dtype, q_block) == (torch.float32, 64)
        assert sources[0] is q
        assert same_memory(sources[2], blocks_of_v[i])
        assert torch.equal(sources[1], k)
        assert sources[1].data_ptr() % 16 == sources[1].stride(-2) % 4 == 0
        block_splits = splits[0], splits[1], splits[2 + i]
        for number, (split, columns) in enumerate(
            zip(block_splits, (64, 64, 96 if head_dim_v == 96 else 128), strict=True)
        ):
            x, target, scale, cu_seqlens, seqused, num_blocks = split
            assert same_memory(x, sources[number])
            assert target is halves[number]
            assert (target.shape, target.dtype) == ((*x.shape[:-1], 2 * columns), torch.float16)
            assert target.transpose(-2, -3).is_contiguous()
            assert scale.data_ptr() == scales[number].data_ptr()
            assert scales[number].shape == (2, x.shape[-2], 6 if is_packed else 3)
            assert num_blocks == (7 if is_packed else 3)
            assert (cu_seqlens is not None) == is_packed
            assert (seqused is not None) == (number > 0)

    def dimensions(argument):
        if isinstance(argument, tuple):
            return [dimensions(a) for a in argument]
        return None if argument is None else len(getattr(argument, "shape", ()))

    config = heuristics.forward_config_sm90(problem)
    requests = launch.compile_request(problem), *launch.helper_requests(problem, config)
    for arguments, (*_, trace) in zip((forwards[0], *splits[:3]), requests, strict=True):
        _, stand_ins = trace()
        assert [dimensions(a) for a in arguments] == [dimensions(a) for a in stand_ins[:-1]]


def same_memory(a, b):
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


EMPTY = [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads_q": 0}, {"heads_q": 0, "heads_kv": 0}]


@pytest.mark.parametrize("backend", [launch, launch_sm80], ids=["sm90", "sm80"])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("empty", EMPTY, ids=str)
def test_without_keys_or_heads_nothing_is_launched(launched, empty, has_sinks, backend):
    """No empty grid is launched, which CUDA would refuse."""
    num_heads = empty.get("heads_q", 4)
    sinks = torch.randn(num_heads) if has_sinks else torch.full((num_heads,), -torch.inf)
    inputs = qkv(**empty)._replace(sinks=sinks if has_sinks else None)
    out, lse = backend.forward(problem_of(inputs), inputs)
    assert (out == 0).all()
    assert torch.equal(lse, sinks[:, None].expand_as(lse))
    assert launched == []


@pytest.mark.parametrize("backend", [launch, launch_sm80])
def test_packed_without_keys(launched, backend):
    """Without keys, rows of a sequence have their sink for lse, and rows of no sequence have none."""
    q, k, v, *_ = (t if t is None else t[0] for t in qkv(1, 20, 0))
    sinks, lengths = torch.randn(4), torch.zeros(3, dtype=torch.int32)
    for last in (12, 0):
        inputs = AttentionInputs(q, k, v, sinks, torch.tensor([0, last // 2, last], dtype=torch.int32), lengths)
        out, lse = backend.forward(problem_of(inputs), inputs)
        assert (out == 0).all()
        assert torch.equal(lse[:, :last], sinks[:, None].expand(4, last))
        assert (lse[:, last:] == -torch.inf).all()
    assert launched == []


@pytest.mark.parametrize("module", [backward_launch, backward_launch_sm80], ids=["sm90", "sm80"])
@pytest.mark.parametrize("empty", EMPTY, ids=str)
def test_without_keys_or_heads_gradients_are_zero(launched, empty, module):
    inputs = qkv(**empty)
    out, lse = launch.forward(problem_of(inputs), inputs)
    dq, dk, dv, _ = module.backward(problem_of(inputs), inputs, out, lse, out, lse)
    for gradient, t in zip((dq, dk, dv), inputs, strict=False):
        assert gradient.shape == t.shape
        assert (gradient == 0).all()
    assert launched == []


def test_what_tma_reads_where_it_lies():
    storage = torch.zeros(4096, dtype=torch.bfloat16)
    seen = set()
    sizes_strides = itertools.product(
        [(2, 3, 2, 8), (1, 3, 1, 8), (1, 1, 1, 8)], itertools.product([8, 12, 64, 9], repeat=3)
    )
    for (sizes, strides), offset, last in itertools.product(sizes_strides, (0, 1, 8), (1, 2)):
        t = storage.as_strided(sizes, (*strides, last), offset)
        moves = [stride for size, stride in zip(sizes[:-1], strides, strict=True) if size > 1]
        is_readable = last == 1 and offset % 8 == 0 and all(stride % 8 == 0 for stride in moves)
        ready = launch.aligned(t)
        assert (ready is t) == is_readable
        assert ready is t or ready.is_contiguous()
        packed = t[0]
        moves = [stride for size, stride in zip(sizes[1:-1], strides[1:], strict=True) if size > 1]
        is_readable = last == 1 and offset % 8 == 0 and all(stride % 8 == 0 for stride in moves)
        assert (launch.aligned(packed) is packed) == is_readable
        seen.add(is_readable)
    assert seen == {True, False}


@pytest.mark.parametrize("shape", [(2, 5, 3, 8), (1, 1, 1, 8), (0, 5, 3, 8), (2, 0, 3, 8), (7, 3, 8)])
def test_results_are_dense_and_laid_out_as_q(shape):
    inputs = AttentionInputs(*(torch.empty(shape) for _ in range(3)))
    cu_seqlens = torch.zeros(1, dtype=torch.int32) if len(shape) == 3 else None
    problem = problem_of(inputs._replace(cu_seqlens_q=cu_seqlens))
    out, lse = empty_outputs(problem, inputs)
    assert (out.shape, out.dtype, lse.dtype) == (shape, torch.float32, torch.float32)
    assert lse.shape == (*shape[:-3], shape[-2], shape[-3])
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert empty_as(inputs.q, 5).shape == (*shape[:-1], 5)
    if len(shape) == 4 and shape[1] > 1:
        heads_first = torch.empty(shape).transpose(1, 2).contiguous().transpose(1, 2)
        result = empty_as(heads_first, 5)
        assert result.shape == (*shape[:-1], 5)
        assert result.transpose(1, 2).is_contiguous()


def test_supports_names_what_is_copied(monkeypatch):
    monkeypatch.setattr(backends, "refusal", lambda name, problem, device: launch.unsupported(problem))
    q = torch.randn(2, 30, 4, 64, dtype=torch.bfloat16)
    wide = torch.randn(2, 30, 4, 65, dtype=torch.bfloat16)
    strided, unaligned = wide[..., :64], torch.randn(q.numel() + 1, dtype=torch.bfloat16)[1:].view(q.shape)
    heads_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert launch.copied(q, heads_first, q[:, ::2]) == []
    assert launch.copied(strided, q, unaligned) == ["q", "v"]
    assert "copies" not in onepass.supports(q, heads_first, q, backend="sm90").reason
    support = onepass.supports(q, strided, unaligned, backend="sm90")
    assert support.ok
    assert "copies k, v first" in support.reason
    # a dimension of size 1 is never stepped over, whatever its stride says
    assert launch.copied(wide[:, :1, :1, :64], q, q) == ([] if wide.stride(0) % 8 == 0 else ["q"])

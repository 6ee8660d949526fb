"""The backend of a call with ranges, positions, left padding, ALiBi, bias or dropout: on a GPU, never `tiled`."""

from dataclasses import replace

import pytest
import torch
from option_calls import CALLS, option_call

import onepass
from onepass.api import calls, decode_calls
from onepass.dispatch import attention as dispatch
from onepass.dispatch import decode as dispatch_decode
from onepass.kernels.compiler import compile

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def expected_backend(function, dtype, capability):
    """On Hopper, `attention_decode` and float32 with an option run on the kernels for Ampere."""
    return "sm90" if capability == (9, 0) and dtype != FP32 and function != "attention_decode" else "sm80"


def support_of(function, arguments, backend):
    """What `onepass.supports` says about the call on a GPU."""
    if function == "attention_decode":
        problem, _ = decode_calls.problem_of("supports", arguments)
        problem = replace(problem, attention=replace(problem.attention, device_type="cuda"))
        return dispatch_decode.choose_decode(problem, backend)
    problem, *_ = calls.problem_of_call("supports", arguments, backend)
    return dispatch.choose(problem, backend)


@pytest.mark.parametrize("capability", [(9, 0), (8, 0), (8, 6), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("function", "option"), CALLS)
def test_kernels_take_every_option(gpu, function, option, dtype, capability):
    gpu(*capability)
    for head_dim in (64, 128, 256):
        arguments = option_call(function, option, "meta", dtype, head_dim)
        name = expected_backend(function, dtype, capability)
        for requested in (None, name):
            support = support_of(function, arguments, requested)
            assert (support.ok, support.backend) == (True, name), support.reason
        assert support_of(function, arguments, "sm80").ok
        assert "gradients by" not in support.reason


@pytest.mark.parametrize(("capability", "name"), [((9, 0), "sm90"), ((8, 0), "tiled")])
@pytest.mark.parametrize("is_packed", [False, True])
def test_ranges_of_queries_are_for_hopper(gpu, is_packed, capability, name):
    gpu(*capability)
    shape, offsets = (256, 4, 64), dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), (3,))
    arguments = dict.fromkeys("qkv", shape if is_packed else (2, *shape)) | (offsets if is_packed else {})
    arguments |= {"query_ranges": (4, 256, 2) if is_packed else (1, 4, 256, 2), "dtype": BF16}
    support = support_of("attention", arguments, None)
    assert (support.ok, support.backend) == (True, name)
    problem, *_ = calls.problem_of_call("supports", arguments, name)
    assert dispatch.backend_of_backward(name, problem) == name
    expected = False, "sm80", "backend sm80: query_ranges: expected none"
    assert support_of("attention", arguments, "sm80") == expected
    assert dispatch.backend_of_backward("sm80", problem) == "tiled"


def test_more_sequences_than_a_grid_has_room_for(gpu):
    gpu(9, 0)
    many = dict.fromkeys("qkv", (65536, 64, 1, 64)) | {"dtype": BF16}
    assert support_of("attention", many, None).backend == "sm90"
    support = support_of("attention", many | {"query_ranges": (1, 1, 64, 2)}, None)
    assert support.backend == "tiled"
    assert "sm90: batch: expected up to 65535, got 65536" in support.reason


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("function", "option"), [(f, o) for f, o in CALLS if f != "attention_decode"])
def test_kernels_compute_the_gradients_of_every_option(gpu, monkeypatch, function, option, dtype):
    """The kernels that `warmup` compiles for a call with gradients are those of its option."""
    gpu(9, 0)
    asked = []
    monkeypatch.setattr(compile, "is_cached", lambda *request: False)
    monkeypatch.setattr(compile, "get", lambda name, key, arch, trace: asked.append((name, key)) or print)
    made = onepass.warmup([option_call(function, option, "meta", dtype)], gradients=True, workers=1)
    name = expected_backend(function, dtype, (9, 0))
    main = [kernel for kernel in made if kernel.name in ("forward", "forward_sm80", "backward", "backward_sm80")]
    assert [kernel.backend for kernel in main] == [name, name], [k.name for k in made]
    assert len(asked) == len(made)
    for kernel in main:
        assert kernel.problem.has_modifiers
        assert dispatch.backend_of_backward(name, kernel.problem) == name
        assert kernel.problem.has_alibi == (option in ("alibi_slopes", "all"))
        assert kernel.problem.has_bias == (option in ("bias", "all"))
        assert (kernel.problem.dropout_p > 0) == (option in ("dropout_p", "all"))


@pytest.mark.parametrize("option", ["seqstart_k", "key_ranges", "q_positions", "alibi_slopes", "bias", "all"])
@pytest.mark.parametrize("rows", [1, 70])
def test_warmup_of_a_step_over_a_cache(gpu, monkeypatch, option, rows):
    gpu(9, 0)
    monkeypatch.setattr(compile, "is_cached", lambda *request: False)
    monkeypatch.setattr(compile, "get", lambda name, key, arch, trace: print)
    arguments = option_call("attention_decode", option, "meta", rows=rows)
    made = onepass.warmup([arguments], workers=1)
    assert made
    assert all(kernel.backend == "sm80" for kernel in made), made

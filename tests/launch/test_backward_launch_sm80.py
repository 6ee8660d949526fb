"""Steps of the Ampere backward's launch that plain PyTorch computes."""

import itertools
from dataclasses import replace

import packages
import pytest
import torch
from launch_arguments import assert_as_traced, lists_by

from onepass.kernels.heuristics import sm80 as heuristics_sm80
from onepass.kernels.launch import backward_sm80 as backward_launch
from onepass.kernels.launch import forward_sm80 as launch
from onepass.kernels.launch.backward_sm80 import Launch, unsupported
from onepass.problem import AttentionInputs, AttentionProblem, Mask


def problem(**options):
    sizes = {
        "batch": 2,
        "seqlen_q": 70,
        "seqlen_k": 90,
        "num_heads_q": 4,
        "num_heads_kv": 2,
        "head_dim": 16,
        "head_dim_v": 16,
    }
    options = {"dtype": torch.bfloat16, "softmax_scale": 0.25, "mask": Mask()} | sizes | options
    return AttentionProblem(device_type="cpu", **options)


@packages.needs_compiler
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": Mask(None, 0), "deterministic": True},
        {"mask": Mask(3, None), "softcap": 3.0, "has_seqused_k": True},
        {"mask": Mask(3, 5), "is_packed": True, "deterministic": True},
        {"has_seqused_k": True, "is_packed": True},
        {"dtype": torch.float32, "mask": Mask(None, 0)},
        {"has_sinks": True},
        {"has_key_ranges": True, "mask": Mask(3, 5), "has_seqused_k": True, "has_sinks": True},
        {"has_seqstart_k": True, "has_q_positions": True, "is_packed": True, "deterministic": True},
        {"float32_dkv": True, "is_packed": True},
        {"has_alibi": True, "bias_dtype": torch.float16, "dropout_p": 0.5, "deterministic": True},
        {"has_alibi": True, "bias_dtype": torch.float64, "constant_slopes": True, "is_packed": True},
        {"bias_dtype": torch.float32, "constant_bias": True, "dropout_p": 0.5, "has_sinks": True},
    ],
)
def test_kernels_are_given_what_they_were_traced_with(options):
    wanted = problem(**options)
    config = heuristics_sm80.backward_config_sm80(wanted, "sm_80")
    requests = backward_launch.compile_requests(wanted, False, config, "sm_80")
    names = [f"backward_{name}" for name in ("preprocess", "sm80", "postprocess", "sinks")]

    def launch(kernels):
        return Launch(wanted, config, *map(kernels.get, names), lists_by(kernels, wanted, config), 4, 1, 1)

    assert_as_traced(wanted, launch, requests)


@pytest.mark.parametrize("arch", launch.ARCHS)
@pytest.mark.parametrize("head_dim", [1, 2, 20, 64, 72, 96, 128, 192, 256])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"is_packed": True}, {"deterministic": True}])
def test_every_problem_has_a_configuration(arch, head_dim, options):
    dtypes = torch.bfloat16, torch.float32
    for head_dim_v, dtype in itertools.product((5, 8, 96, 128, 192, 256, head_dim), dtypes):
        asked = problem(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, **options)
        config = heuristics_sm80.backward_config_sm80(asked, arch)
        config.check(asked, arch)
        assert config.vector_adds == (arch not in ("sm_80", "sm_86", "sm_89"))
        assert config.from_text(config.text) == config


def test_what_is_left_to_another_backend_says_why():
    for option in ({}, {"deterministic": True}, {"is_packed": True}, {"has_seqused_k": True}, {"softcap": 3.0}):
        assert unsupported(problem(**option)) is None
    for option in ({"dtype": torch.float32}, {"dtype": torch.float32, "head_dim": 13, "head_dim_v": 3}):
        assert unsupported(problem(**option)) is None
    for option in ({"head_dim": 13}, {"dtype": torch.bfloat16, "head_dim_v": 3}):
        assert unsupported(problem(**option)) is None
    assert unsupported(replace(problem(), batch=70000)) == "batch: expected up to 65535, got 70000"
    assert "head_dim" in unsupported(problem(head_dim=257))
    assert "dtype" in unsupported(problem(dtype=torch.float64))


@pytest.mark.parametrize(("offset", "expected"), [(0, 16), (4, 8), (2, 4), (1, 2)])
def test_alignment_picks_the_kernels(offset, expected, monkeypatch):
    asked = problem(head_dim=64, head_dim_v=64)
    q, out, dout = (torch.zeros(2, 70, 4, 64, dtype=torch.bfloat16) for _ in range(3))
    k = torch.zeros(2, 90, 2, 64, dtype=torch.bfloat16)
    v = torch.zeros(k.numel() + 8, dtype=torch.bfloat16)[offset:][: k.numel()].view(k.shape)
    picked = []

    def launch_of(asked, has_dlse, config, arch):
        picked.append(config.vector_bytes)
        return lambda *call: call

    monkeypatch.setattr(backward_launch, "launch_of", launch_of)
    monkeypatch.setattr(launch, "arch_of", lambda device: "sm_80")
    backward_launch.prepare.cache_clear()
    run = backward_launch.prepare(asked, torch.device("cpu"), False)
    backward_launch.prepare.cache_clear()
    run(AttentionInputs(q, k, v), out, torch.zeros(2, 4, 70), dout, None)
    # a gradient that is broadcast is copied, and the copy is aligned
    run(AttentionInputs(q, k, v), out, torch.zeros(2, 4, 70), dout[..., :1].expand(dout.shape), None)
    assert picked == [expected, expected]


def test_inputs_without_keys_have_no_gradient():
    asked = problem(seqlen_k=0)
    q, kv = torch.randn(2, 70, 4, 16), torch.randn(2, 0, 2, 16)
    given = q, torch.full((2, 4, 70), -torch.inf), q, None
    gradients = backward_launch.prepare(asked, torch.device("cpu"), False)(AttentionInputs(q, kv, kv), *given)
    assert all((g == 0).all() for g in gradients)
    assert [tuple(g.shape) for g in gradients[:3]] == [q.shape, kv.shape, kv.shape]

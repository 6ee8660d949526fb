"""The backend that runs a call on a device: tested without a GPU, by pretending that there is one."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import onepass
from onepass import ForwardConfigSm80, ForwardConfigSm90
from onepass.dispatch import attention as dispatch
from onepass.dispatch import backends, decode, fp8, partials
from onepass.kernels.config import HOPPER, BackwardConfigSm80
from onepass.problem import AttentionProblem, Mask, Quantization
from onepass.problem.decode import DecodeProblem

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def problem(dtype=BF16, head_dim=64, device_type="cuda", batch=1, head_dim_v=None):
    lengths = {"batch": batch, "seqlen_q": 5, "seqlen_k": 7, "num_heads_q": 4, "num_heads_kv": 2}
    head_dims = {"head_dim": head_dim, "head_dim_v": head_dim_v or head_dim}
    return AttentionProblem(
        dtype=dtype, device_type=device_type, **lengths, **head_dims, softmax_scale=1.0, mask=Mask()
    )


@pytest.mark.parametrize(
    ("capability", "asked", "backend"),
    [
        ((9, 0), {}, "sm90"),
        ((9, 0), {"dtype": FP32}, "sm90"),
        ((9, 0), {"dtype": FP32, "head_dim": 8}, "sm90"),
        ((9, 0), {"dtype": FP32, "head_dim": 256}, "sm90"),
        ((9, 0), {"dtype": FP32, "head_dim": 60}, "sm80"),
        ((9, 0), {"dtype": FP32, "head_dim": 136}, "sm80"),
        ((9, 0), {"dtype": FP32, "head_dim": 144}, "sm90"),
        ((9, 0), {"dtype": FP32, "head_dim": 264}, "tiled"),
        ((9, 0), {"dtype": FP32, "batch": 70000}, "sm90"),
        ((9, 0), {"head_dim": 63}, "sm80"),
        ((9, 0), {"dtype": FP64}, "tiled"),
        ((9, 0), {"head_dim": 264}, "tiled"),
        ((8, 0), {}, "sm80"),
        ((8, 9), {"dtype": FP32}, "sm80"),
        ((12, 0), {}, "sm80"),
        ((10, 3), {}, "sm80"),
        ((7, 5), {}, "tiled"),
        ((99, 0), {}, "tiled"),
        ((9, 0), {"device_type": "cpu"}, "cpu"),
        ((9, 0), {"device_type": "cpu", "head_dim_v": 32}, "tiled"),
    ],
)
def test_the_newest_kernels_that_take_a_call_run_it(gpu, capability, asked, backend):
    gpu(*capability)
    support = dispatch.choose(problem(**asked))
    assert (support.ok, support.backend) == (True, backend), support.reason


def test_the_reason_says_why_not_another(gpu):
    gpu(9, 0)
    assert dispatch.choose(problem()).reason == "Hopper kernels (CuTe DSL)"
    reason = dispatch.choose(problem(FP32)).reason
    assert reason.startswith("Hopper kernels (CuTe DSL); gradients by the sm80 backend (dtype: expected ")
    for asked, expected in (
        (problem(FP32, 60), "head_dim: expected a multiple of 8 up to 256 (16-byte rows for TMA), got 60"),
        (replace(problem(FP32), head_dim_v=136), "head_dim_v: expected a multiple of 16 above 128 in float32, got 136"),
    ):
        support = dispatch.choose(asked)
        assert (support.backend, support.reason) == ("sm80", f"Ampere kernels (CuTe DSL); sm90: {expected}")
    assert dispatch.choose(replace(problem(FP32, 136), head_dim_v=128)).backend == "sm90"
    assert "sm90: head_dim: expected a multiple of 8 up to 256 (16" in dispatch.choose(problem(head_dim=264)).reason
    assert dispatch.choose(problem(FP64)).reason.endswith(
        "here cuda (sm90: dtype: expected bfloat16, float16 or float32, got float64; "
        "sm80: dtype: expected bfloat16, float16 or float32, got float64)"
    )
    gpu(7, 5)
    assert "sm80: expected a GPU of compute capability 8.0 or more, got (7, 5)" in dispatch.choose(problem()).reason


@pytest.mark.parametrize("name", ["sm80", "sm90"])
def test_a_backend_that_is_named_runs_or_is_refused(gpu, name):
    gpu(9, 0)
    assert dispatch.choose(problem(), name).backend == name
    refused = dispatch.choose(problem(FP64), name)
    assert (refused.ok, refused.backend) == (False, name)
    assert refused.reason.startswith(f"backend {name}: dtype: expected bfloat16")
    gpu(7, 0)
    assert "got (7, 0)" in dispatch.choose(problem(), name).reason
    assert (
        dispatch.choose(problem(device_type="cpu"), name).reason == f"backend {name}: expected tensors on cuda, got cpu"
    )


def test_gradients_of_what_the_kernels_do_not_differentiate(gpu):
    gpu(8, 0)
    assert dispatch.load_backward("sm80", problem()).__name__ == "onepass.kernels.launch.backward_sm80"
    many = problem(batch=70000)
    assert dispatch.load_backward("sm80", many).__name__ == "onepass.tiled"
    assert "gradients by the tiled backend (batch: expected up to 65535, got 70000)" in dispatch.choose(many).reason


def test_gradients_of_float32_on_hopper(gpu):
    """The kernels of sm80, compiled for Hopper, compute them, even if the call names sm90."""
    gpu(9, 0)
    wanted = problem(FP32)
    for requested in (None, "sm90"):
        assert dispatch.choose(wanted, requested).backend == "sm90"
    assert dispatch.backend_of_backward("sm90", wanted) == "sm80"
    assert dispatch.load_backward("sm90", wanted).__name__ == "onepass.kernels.launch.backward_sm80"
    for has_dlse in (False, True):
        requests = dispatch.backward_requests("sm90", wanted, has_dlse)
        names = [request[0] for _, request in requests]
        assert names == ["backward_preprocess", "backward_sm80", "backward_postprocess"]
        assert {request[2] for _, request in requests} == {HOPPER}
        assert all(isinstance(config, BackwardConfigSm80) for config, _ in requests)
    many = problem(FP32, batch=70000)
    assert dispatch.backend_of_backward("sm90", many) == "tiled"
    assert "gradients by the tiled backend" in dispatch.choose(many).reason
    assert dispatch.backward_requests("sm90", many, False) == []
    # sm90 computes the gradients for which it has kernels
    assert dispatch.load_backward("sm90", problem()).__name__ == "onepass.kernels.launch.backward_sm90"


def test_kernels_of_a_forward(gpu):
    gpu(9, 0)
    for wanted in (problem(), problem(FP32)):
        config = dispatch.forward_config("sm90", wanted)
        main, *helpers = dispatch.forward_requests("sm90", wanted, config)
        assert main[:3] == dispatch.compile_request("sm90", wanted, config)[:3]
        assert [(name, arch) for name, _, arch, _ in helpers] == [("split_rows", HOPPER)] * (2 * (wanted.dtype == FP32))
    assert len(dispatch.forward_requests("sm80", problem(FP32), ForwardConfigSm80())) == 1


def test_a_configuration_is_of_its_backend(gpu):
    gpu(9, 0)
    wrong = dispatch.choose(problem(), None, ForwardConfigSm80())
    assert not wrong.ok
    assert wrong.reason.startswith("tuning: backend sm90 expects a ForwardConfigSm90, got ForwardConfigSm80(")
    assert dispatch.choose(problem(), "sm80", ForwardConfigSm80()).ok
    assert dispatch.choose(problem(), None, ForwardConfigSm90(tile_n=128)).ok
    wrong = dispatch.choose(problem(), "sm80", ForwardConfigSm80(tile_n=72))
    assert wrong.reason == "tuning: tile_n: expected 16, 32, ... 256, got 72"


def test_configurations_of_hopper_are_for_hopper():
    with pytest.raises(onepass.UnsupportedError, match=f"architecture: expected {HOPPER}, got sm_80"):
        ForwardConfigSm90(tile_n=128).check(problem(), "sm_80")


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 8), "sm_80"), ((12, 1), "sm_121a"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a")],
)
def test_kernels_are_compiled_for_the_gpu(gpu, capability, arch):
    gpu(*capability)
    assert dispatch.compile_request("sm80", problem(), ForwardConfigSm80())[2] == arch
    requests = dispatch.backward_requests("sm80", problem(), False)
    assert [request[0] for _, request in requests] == ["backward_preprocess", "backward_sm80", "backward_postprocess"]
    assert {request[2] for _, request in requests} == {arch}
    assert all(isinstance(config, BackwardConfigSm80) for config, _ in requests)
    assert dispatch.backward_requests("sm80", problem(batch=70000), False) == []


@pytest.mark.parametrize(
    ("capability", "kernels", "e4m3"),
    [((7, 5), 0, 0), ((8, 0), 1, 0), ((8, 6), 1, 0), ((8, 9), 1, 1), ((9, 0), 1, 1), ((10, 0), 1, 1)],
)
def test_the_first_gpus_with_kernels_and_with_e4m3(gpu, monkeypatch, capability, kernels, e4m3):
    gpu(*capability)
    device = torch.device("cuda", 0)
    assert (backends.refusal("sm80", problem(), device) is None) == kernels
    assert partials.has_merge_kernel(device) == kernels
    with onepass.use_backend("tiled"):
        assert not partials.has_merge_kernel(device)
    over_e4m3 = DecodeProblem(replace(problem(), kv_dtype=torch.float8_e4m3fn))
    assert (decode._unsupported("sm80", over_e4m3, True, device) is None) == e4m3
    assert decode._unsupported("sm80", DecodeProblem(problem()), True, device) is None
    on_gpu = SimpleNamespace(device=device)
    assert fp8._has_e4m3_kernels(on_gpu) == e4m3
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not fp8._has_e4m3_kernels(on_gpu)  # no launch is traced


@pytest.mark.parametrize(
    ("mask", "is_taken"),
    [(Mask(), 1), (Mask(None, 0), 1), (Mask(None, 3), 1), (Mask(None, -1), 0), (Mask(3, 0), 0), (Mask(0, None), 0)],
)
def test_the_choice_of_a_backend_with_split_size_depends_on_no_length(mask, is_taken):
    asked = DecodeProblem(replace(problem(device_type="cpu"), mask=mask), split_size=64)
    assert (decode._unsupported("cpu", asked, False, None) is None) == is_taken
    assert decode._unsupported("cpu", replace(asked, split_size=None), False, None) is None


def test_a_configuration_is_checked_for_the_gpu_of_the_tensors(gpu, monkeypatch):
    gpu(8, 0)
    seen, device = [], torch.device("cuda", 1)
    monkeypatch.setattr(backends, "arch_of", lambda name, device=None: f"{name} on {device}")
    monkeypatch.setattr(ForwardConfigSm80, "check", lambda config, problem, arch: seen.append(arch))
    dispatch.require(problem(), "sm80", ForwardConfigSm80(), device)
    assert seen == ["sm80 on cuda:1"]


@pytest.mark.parametrize("of_block", ["tiled", None])
def test_an_operator_of_a_graph_chooses_again_in_a_block(gpu, monkeypatch, of_block):
    """It chooses for its own tensors and configuration. An operator whose call names a backend keeps it."""
    gpu(9, 0)
    device, config, asked = torch.device("cuda", 1), ForwardConfigSm90(tile_n=128), []
    over_cache = DecodeProblem(problem())
    for module, name in ((dispatch, "require"), (decode, "require_decode")):
        monkeypatch.setattr(module, name, lambda *given: asked.append(given) or "chosen")

    def run(argument):
        of_cache = decode.decode_backend_at_run(argument, over_cache, device)
        return dispatch.backend_at_run(argument, problem(), config, device), of_cache

    assert run("traced:sm90") == run("sm90") == ("sm90", "sm90")
    with onepass.use_backend(of_block):
        assert run("sm90") == ("sm90", "sm90")
        assert asked == []
        assert run("traced:sm90") == ("chosen", "chosen")
    assert asked == [(over_cache, None, device), (problem(), None, config, device)]


def test_a_quantized_call_has_no_gradients_to_speak_of(gpu):
    gpu(9, 0)
    asked = replace(problem(torch.float8_e4m3fn, batch=70000), quantization=Quantization(BF16))
    assert dispatch.choose(asked).reason == "Hopper kernels (CuTe DSL)"

"""The tasks that `onepass.tune` makes from calls, and the launches that it times, without a GPU."""

import contextlib
import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
import tuning_fakes
from tuning_fakes import FakeRuns, machine

import onepass
from onepass import ForwardConfigSm90, tiled
from onepass.dispatch import attention as dispatch
from onepass.dispatch import backends
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.problem import AttentionProblem, Mask
from onepass.tuning import launches, tasks_of, tuner
from onepass.tuning.timing import cpu_sampler

CALL = {"q": (2, 4096, 32, 128), "k": (2, 4096, 8, 128), "v": (2, 4096, 8, 128), "dtype": torch.bfloat16}
PROBLEM = AttentionProblem(torch.bfloat16, "cuda", 2, 4096, 4096, 32, 8, 128, 128, 128**-0.5, Mask())


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    yield from tuning_fakes.own_cache(monkeypatch, tmp_path)


@pytest.fixture
def hopper(monkeypatch):
    """Let torch see a Hopper GPU, which no test may use."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(backends, "_HAS_KERNEL_COMPILER", True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    with pytest.raises(NotImplementedError, match="tune: expected a GPU to measure on, torch sees none here"):
        onepass.tune(CALL)


def test_calls_in_every_form(hopper):
    meta = {n: torch.empty(CALL[n], dtype=torch.bfloat16, device="meta") for n in "qkv"}
    for calls in (CALL, [CALL], (call for call in [CALL]), meta, PROBLEM, [PROBLEM]):
        (task,) = tasks_of(calls)
        assert (task.direction, task.backend, task.problem) == ("fwd", "sm90", PROBLEM)
    tasks = tasks_of([CALL, CALL | {"causal": True, "backend": "sm80"}], gradients=True)
    assert [(t.direction, t.backend) for t in tasks] == [
        ("fwd", "sm90"),
        ("bwd", "sm90"),
        ("fwd", "sm80"),
        ("bwd", "sm80"),
    ]
    assert tasks[3].problem.mask == Mask(None, 0)
    float32 = CALL | {"dtype": torch.float32}
    assert [(t.direction, t.backend) for t in tasks_of(float32, gradients=True)] == [("fwd", "sm90"), ("bwd", "sm80")]
    many = dict.fromkeys("qkv", (70000, 16, 2, 8)) | {"dtype": torch.float16}
    assert [t.direction for t in tasks_of(many, gradients=True)] == ["fwd"]  # tiled computes the gradients


REFUSED = [
    (CALL | {"k": (2, 4096, 8, 64)}, ValueError, "k: expected head_dim 128 like q, got 64"),
    (CALL | {"tuning": ForwardConfigSm90(tile_n=64)}, TypeError, "tuning: expected None"),
    (CALL | {"precision": "fp8"}, NotImplementedError, "precision: expected None, got a call in FP8"),
    (dict.fromkeys("qkv", (0, 4, 4, 64)) | {"dtype": torch.float16}, ValueError, "a batch, lengths and heads above 0"),
    (CALL | {"q": (2, 4096, 0, 128)}, ValueError, "a batch, lengths and heads above 0"),
    (CALL | {"backend": "tiled"}, NotImplementedError, "backend tiled has no kernels to tune"),
    (CALL | {"backend": "sm70"}, ValueError, "backend: expected one of"),
    (CALL | {"dtype": torch.float64}, NotImplementedError, "backend tiled has no kernels to tune .*float64"),
    ({n: torch.zeros(1, 4, 2, 8) for n in "qkv"}, NotImplementedError, "backend cpu has no kernels to tune"),
    ({"q": (1, 2, 3, 4)}, TypeError, "tune: expected q, k and v in every call, got none for k, v"),
    (CALL | {"colour": 3}, TypeError, "tune: attention has no argument colour"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_cannot_be_tuned(hopper, call, error, message):
    with pytest.raises(error, match=message):
        onepass.tune(call)


@pytest.mark.slow
def test_the_whole_way(hopper, monkeypatch):
    monkeypatch.setattr(
        tuner.Machine, "here", lambda device: machine(FakeRuns(lambda config: 1.0 + config.tile_n / 1e3))
    )
    results = onepass.tune([CALL, CALL | {"causal": True}])
    assert [result.problem.mask for result in results] == [Mask(), Mask(None, 0)]
    for result in results:
        assert result.is_gain
        assert result.config.tile_n < result.heuristic.tile_n
        assert result.heuristic == heuristics.forward_config_sm90(result.problem)


# ---------------------------------------------------------------- launches


@pytest.fixture
def on_cpu(monkeypatch):
    """`Launches` of the backend tiled, whose forward and backward take no configuration."""

    def prepare(problem, device, has_dlse, config):
        assert not has_dlse
        return functools.partial(tiled.backward, problem)

    both = SimpleNamespace(prepare=prepare, backward=tiled.backward)
    monkeypatch.setattr(dispatch, "load_backward", lambda backend, problem: both)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(launches, "input_copies", lambda num_bytes: 2)
    monkeypatch.setattr(launches, "CudaSampler", lambda calls, pool: cpu_sampler(lambda: [call() for call in calls]))


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(("direction", "names"), [("fwd", ["out", "lse"]), ("bwd", ["dq", "dk", "dv"])])
def test_launches(on_cpu, direction, names, is_packed):
    problem = dataclasses.replace(
        PROBLEM, device_type="cpu", seqlen_q=40, seqlen_k=50, num_heads_q=4, num_heads_kv=2, is_packed=is_packed
    )
    runs = launches.Launches(direction, "tiled", problem, torch.device("cpu"))
    results = runs.results(ForwardConfigSm90(tile_n=64))
    assert list(results) == names
    inputs = runs._inputs[0]
    tensors = [t.clone().requires_grad_() for t in inputs[:3]]
    options = {}
    if is_packed:
        options = {"cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k}
    function = onepass.attention_varlen if is_packed else onepass.attention
    expected = function(*tensors, **options, return_lse=True, backend="tiled")
    if direction == "bwd":
        expected = torch.autograd.grad(expected.out, tensors, runs._contexts[0][2])
    for mine, theirs in zip(results.values(), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert runs.sampler(ForwardConfigSm90(tile_n=64))() > 0


def test_bytes_of_inputs():
    assert launches.num_bytes(PROBLEM) == 2 * 2 * 4096 * 128 * (32 + 8 + 8)
    assert launches.num_bytes(dataclasses.replace(PROBLEM, is_packed=True)) == 2 * 4096 * 128 * (32 + 8 + 8)

"""The warning on the first call that runs a kernel of onepass on a GPU on which none has ever run; it comes once."""

import importlib.util
import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import onepass
from onepass.dispatch import attention as dispatch
from onepass.dispatch import decode, fp8, partials
from onepass.kernels.config import arch
from onepass.problem import AttentionInputs, AttentionProblem, Mask

BF16 = torch.bfloat16
CAPABILITIES = {0: (9, 0), 1: (8, 6), 2: (10, 0), 3: (7, 5), 4: (8, 6)}
WORDS = "onepass: the kernels have not run on any GPU of compute capability "


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    def capability(device=None):
        return CAPABILITIES[(device.index if isinstance(device, torch.device) else device) or 0]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(CAPABILITIES))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(arch, "_checked", set())
    monkeypatch.setattr(arch, "_said", set())


def run(index, function, name="sm80"):
    """Call `function` on this GPU, whose kernels do nothing. Returns: the warnings."""
    device = torch.device("cuda", index)
    empty = torch.empty(1, 2, 1, 8, dtype=BF16)
    problem = AttentionProblem.of(
        AttentionInputs(empty, empty, empty), softmax_scale=1.0, mask=Mask(), softcap=None, deterministic=False
    )
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        module = SimpleNamespace(prepare=lambda *_: None, decode=None, merge_partials=None, forward=print)
        patch.setattr(dispatch.importlib, "import_module", lambda name: module)
        if function == "attention":
            dispatch.prepare(name, problem, device)
        elif function == "attention_decode":
            decode.load_decode(name, device)
        elif function == "merge_partials":
            partials.load_merge(device)
    return caught


@pytest.mark.parametrize("function", ["attention", "attention_decode", "merge_partials"])
def test_said_once_for_each_kind_of_gpu(function):
    assert run(0, function) == []
    for index, number in ((1, "8.6"), (2, "10.0")):
        (warning,) = run(index, function)
        assert warning.category is RuntimeWarning
        assert str(warning.message).startswith(f"{WORDS}{number} yet")
        assert "onepass.use_backend('tiled') or ONEPASS_BACKEND=tiled" in str(warning.message)
        assert warning.filename == __file__  # the line of the call
        for again in ("attention", "attention_decode", "merge_partials"):
            assert run(index, again) == []
    assert run(4, function) == []  # another GPU of compute capability 8.6


def test_nothing_is_said_where_no_kernel_runs():
    for index in CAPABILITIES:
        for function in ("attention", "attention_decode"):
            assert run(index, function, name="tiled") == []
    q = torch.randn(1, 4, 2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onepass.attention(q, q, q)
        onepass.supports(q, q, q)
    assert arch._checked == set()


def test_quantising_says_it(monkeypatch):
    given = AttentionInputs(*[SimpleNamespace(device=torch.device("cuda", 2))] * 3)
    monkeypatch.setattr(fp8, "_has_e4m3_kernels", lambda t: True)
    from onepass.kernels.launch import quantize as launch

    monkeypatch.setattr(launch, "unsupported", lambda inputs, granularity: None)
    with pytest.warns(RuntimeWarning, match=f"{WORDS}10.0 yet"):
        fp8.quantization_kernels(given, "block")


def test_what_is_proven_has_a_record():
    """The list of proven GPUs has one entry, 9.0, and there is a record of tests on an H200, a GPU of 9.0."""
    record = Path(onepass.__file__).parents[1] / "benchmarks" / "results" / "h200-tests.json"
    if not record.exists():
        pytest.skip("the results are not part of the package")
    assert "H200" in json.dumps(json.loads(record.read_text()))
    assert {(9, 0)} == arch.PROVEN


@pytest.mark.skipif(importlib.util.find_spec("typer") is None, reason="the command line is not installed")
def test_info_says_it(monkeypatch):
    from typer.testing import CliRunner

    from onepass.cli import info
    from onepass.cli.app import app

    monkeypatch.setenv("COLUMNS", "200")
    properties = {"name": "GPU", "major": 8, "minor": 6, "total_memory": 2**34}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    monkeypatch.setattr(info, "_probes", lambda: {"bfloat16": lambda device: dict.fromkeys("qkv", torch.ones(1))})
    with onepass.use_backend("tiled"):
        output = CliRunner().invoke(app, ["info"]).output
    said = output.replace("\n", " ")
    for device, number in (("cuda:1", "8.6"), ("cuda:2", "10.0")):
        assert f"{device}: the kernels have not run on any GPU of compute capability {number} yet" in said
    assert "cuda:0: the kernels" not in said
    assert "cuda:3: the kernels" not in said
    assert "backend of calls that name none: tiled" in said

"""float32 is true float32 under every setting of torch, old and new, and a call changes none of them."""

import pytest
import torch

import onepass
from onepass import reference
from onepass.testing import Call, compare, compare_lse
from onepass.tiled import tile_sizes

SETTINGS = {
    "highest": lambda: torch.set_float32_matmul_precision("highest"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "cuda tf32": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "mkldnn bf16": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "mkldnn tf32": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "tf32"),
    "all of mkldnn bf16": lambda: setattr(torch.backends.mkldnn, "fp32_precision", "bf16"),
    "all tf32": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "all tf32, cuda ieee": lambda: (
        setattr(torch.backends, "fp32_precision", "tf32"),
        setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee"),
    ),
    "old, then new": lambda: (
        torch.set_float32_matmul_precision("high"),
        setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee"),
        setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    ),
}
GETTERS = {
    "old": torch.get_float32_matmul_precision,
    "allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "all": lambda: torch.backends.fp32_precision,
    "cuda": lambda: torch.backends.cuda.matmul.fp32_precision,
    "mkldnn": lambda: torch.backends.mkldnn.fp32_precision,
    "mkldnn matmul": lambda: torch.backends.mkldnn.matmul.fp32_precision,
    "cudnn": lambda: torch.backends.cudnn.fp32_precision,
}


def state():
    found = {}
    for name, get in GETTERS.items():
        try:
            found[name] = get()
        except RuntimeError:
            found[name] = "mixed"
    return found


def reset():
    torch.backends.fp32_precision = "none"
    for settings in (torch.backends.mkldnn, torch.backends.mkldnn.matmul, torch.backends.cuda.matmul):
        settings.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.fixture(params=SETTINGS.values(), ids=SETTINGS.keys())
def setting(request):
    reset()  # other tests of this process may have left an equivalent setting
    before = state()
    try:
        request.param()
        yield request.param
    finally:
        reset()
    assert state() == before


def truncated(x, bits):
    """float32 with the last `bits` bits of the mantissa cut off, as a tensor core or oneDNN reads it."""
    return (x.contiguous().view(torch.int32) >> bits << bits).view(torch.float32)


@pytest.fixture
def gemms_that_obey(monkeypatch):
    """Products of float32 matrices by a device that rounds as far as its settings allow."""

    def read(x):
        precision = torch.backends.mkldnn.matmul.fp32_precision
        dropped = {"tf32": 13, "bf16": 16}.get(precision, 0)
        return truncated(x, dropped) if dropped and x.dtype == torch.float32 else x

    bmm, baddbmm_ = torch.bmm, torch.Tensor.baddbmm_
    monkeypatch.setattr(torch, "bmm", lambda a, b, out=None: bmm(read(a), read(b), out=out))
    monkeypatch.setattr(torch.Tensor, "baddbmm_", lambda acc, a, b: baddbmm_(acc, read(a), read(b)))


def tensors(dtype=torch.float32, requires_grad=False):
    generator = torch.Generator().manual_seed(3)
    shapes = {"q": (2, 70, 4, 32), "k": (2, 90, 2, 32), "v": (2, 90, 2, 24)}
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    # a mean of V: losses in P V do not average out
    made["v"] += 1
    return {name: t.requires_grad_(requires_grad) for name, t in made.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("q_scale", [1, 30], ids=["fixed reference", "row maxima"])
def test_values_and_gradients(setting, gemms_that_obey, dtype, q_scale):
    given = tensors(dtype)
    given["q"] = given["q"] * q_scale
    before = state()
    Call(given, {"causal": True, "sinks": torch.linspace(-1, 1, 4)}).check()
    assert state() == before


def test_float64_is_as_ever(setting, gemms_that_obey):
    given = tensors(torch.float64)
    result = onepass.attention(**given, softcap=3.0)
    torch.backends.mkldnn.matmul.fp32_precision = torch.backends.fp32_precision = "ieee"
    assert torch.equal(result, onepass.attention(**given, softcap=3.0))


def test_decoding(setting, gemms_that_obey):
    seqlens = torch.tensor([90, 40], dtype=torch.int32)
    given = tensors()
    for options in ({}, {"num_splits": 3}):
        before = state()
        result = onepass.attention_decode(*given.values(), cache_seqlens=seqlens, return_lse=True, **options)
        assert state() == before
        for b, n in enumerate(seqlens):
            q, k, v = (given["q"][b : b + 1], given["k"][b : b + 1, :n], given["v"][b : b + 1, :n])
            oracle, plain = (
                reference.attention(q, k, v, causal=True, compute_dtype=t) for t in (torch.float64, torch.float32)
            )
            row = compare("out", result.out[b : b + 1], oracle.out, plain.out)
            assert row.ok, str(row)
            assert compare_lse(result.lse[b : b + 1], oracle.lse).ok


def test_fp8(setting, gemms_that_obey):
    """P is rounded to e4m3, whatever the precision of the products is."""
    given = tensors()
    result = onepass.attention(**given, precision="fp8", causal=True)
    torch.backends.mkldnn.matmul.fp32_precision = torch.backends.fp32_precision = "ieee"
    expected = onepass.attention(**given, precision="fp8", causal=True)
    # a probability halfway between two numbers may be rounded either way
    assert float((result - expected).abs().max()) < 0.02
    assert float((result - expected).square().mean().sqrt()) < 2e-4


def test_a_call_sets_nothing(monkeypatch):
    """Settings belong to all threads: other threads would see a changed setting until it is restored."""
    torch.set_float32_matmul_precision("medium")
    try:
        for module, name in ((torch, "set_float32_matmul_precision"), (torch._C, "_set_fp32_precision_setter")):
            monkeypatch.setattr(module, name, lambda *arguments: pytest.fail("a global setting was touched"))
        given = tensors(requires_grad=True)
        onepass.attention(**given).sum().backward()
        assert given["q"].grad is not None
    finally:
        monkeypatch.undo()
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_products_that_obey_would_be_noticed(gemms_that_obey, monkeypatch, precision):
    """These tests notice the fault that they look for."""
    monkeypatch.setattr(tile_sizes, "float32_products_are_exact", lambda device_type: True)
    torch.backends.mkldnn.matmul.fp32_precision = precision
    try:
        with pytest.raises(AssertionError):
            Call(tensors(), {"causal": True}).check()
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


def test_settings_are_those_of_the_device(monkeypatch):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert not tile_sizes.float32_products_are_exact("cuda")
        assert tile_sizes.float32_products_are_exact("cpu")
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        assert not tile_sizes.float32_products_are_exact("cpu")
        assert tile_sizes.float32_products_are_exact("mps")
    finally:
        torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"

"""The tiled backend on a CUDA GPU, and the backend that a call gets there by default."""

import pytest
import torch
from gpu_cases import RandomCase, cases
from random_calls import random_call

import onepass
from onepass.testing import compare, compare_lse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("seed", range(60))
def test_tiled_forward(seed):
    call = random_call(seed, device="cuda")
    dtype = call.tensors["q"].dtype
    out, lse = call.run(backend="tiled")
    oracle, plain = call.expected(), call.expected(torch.float32 if dtype == torch.float64 else dtype)
    # float64 has no result in plain PyTorch to compare with, so a hundred roundings are allowed
    floor = (
        100 * torch.finfo(dtype).eps * float(oracle.out.abs().max()) if out.numel() and dtype == torch.float64 else 0.0
    )
    for row in (compare("out", out, oracle.out, plain.out, floor=floor), compare_lse(lse, oracle.lse)):
        assert row.ok, f"{call}\n  {row}"


@cases(RandomCase(seed) for seed in range(100, 200))
def test_default_backend_forward_and_backward(case):
    case.call().check(with_floor=True)


def test_devices_must_agree():
    q = torch.randn(1, 4, 2, 8, device="cuda")
    with pytest.raises(ValueError, match=f"k: expected device {q.device} like q, got cpu"):
        onepass.attention(q, q.cpu(), q)


@pytest.fixture(params=["none", "old", "new", "mixed"])
def allowed_tf32(request):
    """Allow TF32 by either of torch's interfaces, or by both."""
    matmul = torch.backends.cuda.matmul
    try:
        if request.param in ("old", "mixed"):
            torch.set_float32_matmul_precision("high")
        if request.param in ("new", "mixed"):
            torch.backends.fp32_precision = "tf32"
            matmul.fp32_precision = "tf32"
        yield request.param
        if request.param != "none":
            assert matmul.fp32_precision == "tf32"
    finally:
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_is_true_float32_whatever_torch_may_do(allowed_tf32, dtype):
    """The tiled backend uses true float32. The oracle is computed on the CPU in float64, which no setting affects."""
    generator = torch.Generator().manual_seed(1)
    shapes = (2, 130, 4, 64), (2, 190, 2, 64), (2, 190, 2, 48)
    q, k, v = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    v = v + 1  # errors of P V do not average out
    leaves = [t.cuda().requires_grad_() for t in (q, k, v)]
    out = onepass.attention(*leaves, causal=True, backend="tiled")
    gradients = torch.autograd.grad(out.float().square().sum(), leaves)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    oracle = onepass.attention(*exact, causal=True)
    # gradients are weighted with the GPU's out, which has been rounded to its dtype
    expected = torch.autograd.grad(oracle, exact, 2 * out.detach().double().cpu())
    # in units of the last place, a CPU is off by up to 8 in float32 (by 9000 and more with operands cut to TF32) and
    # by 0.6 in bfloat16
    budget = torch.finfo(dtype).eps * (64 if dtype == torch.float32 else 2)
    pairs = zip((out, *gradients), (oracle, *expected), strict=True)
    for result, exact_result in pairs:
        error = (result.detach().double().cpu() - exact_result.detach()).abs().max()
        assert error <= budget * exact_result.abs().max(), allowed_tf32

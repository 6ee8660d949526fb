"""The tiled backend on a CUDA GPU, and whatever backend a call gets there by default."""

import pytest
import torch
from gpu_cases import RandomCase, cases

import onepass
from onepass.testing import compare, compare_lse, random_call

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
    # float64 has no plain result of its own precision: leave it a hundred roundings
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
    with pytest.raises(ValueError, match="k: expected device cuda:0 like q, got cpu"):
        onepass.attention(q, q.cpu(), q)

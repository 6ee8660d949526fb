"""Sums over head_dim in a backward, by the operation that GPUs compute them with."""

import pytest
import torch

from onepass.distributed.attention import dots


def test_dots_in_a_backward_under_autocast():
    a, b = torch.randn(2, 5, 1, 4, 64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):  # it would round vecdot's operands and results
        found = dots(a, b, torch.float32)
    assert found.dtype == torch.float32
    assert (found - (a.double() * b.double()).sum(-1)).abs().max() < 1e-5


@pytest.mark.parametrize("heads", [slice(0, 16), slice(16, 20)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dots_by_a_product_of_all_heads_of_a_row(dtype, heads, monkeypatch):
    a = torch.randn(3, 7, 20, 16).to(dtype).transpose(0, 1)  # (rows, batch, heads, dim) in the order of a dense call
    b = torch.randn(7, 3, 20, 16).to(dtype)
    expected = (a.double() * b.double()).sum(-1)[:, :, heads]
    found = {False: dots(a[:, :, heads], b[:, :, heads], torch.float32)}

    bmm, calls = torch.bmm, []

    def bmm_of_gpus(x, y, out_dtype):  # torch has it with an out_dtype on GPUs alone
        calls.append(x.dtype)
        return bmm(x.to(out_dtype), y.to(out_dtype))

    monkeypatch.setattr(torch, "bmm", bmm_of_gpus)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    found[True] = dots(a[:, :, heads], b[:, :, heads], torch.float32)
    assert calls == [dtype]
    for sums in found.values():
        assert (sums.shape, sums.dtype) == (expected.shape, torch.float32)
        assert (sums - expected).abs().max() < 1e-5

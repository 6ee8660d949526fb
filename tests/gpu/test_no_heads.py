"""Calls without heads on a GPU: no empty grid is launched, which CUDA would refuse, but new keys are appended."""

import pytest
import torch
from decode_cases import DecodeCase
from gpu_cases import BACKEND, BF16, DEVICE, FP16, IS_READY, ON_GPU, case, check, lengths_tensor
from gradient_cases import check_gradients

import onepass

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_READY, reason="needs a GPU with the kernels")]
HEADS = [(0, 0), (0, 2)]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "sinks": True}, {"window": (-3, 9), "used": (0, 40)}, {"softcap": 3.0}], ids=str
)
def test_attention(options, dtype, heads):
    call = case(70, 90, batch=2, heads=heads, dtype=dtype, **options).call()
    check(call)
    for deterministic in (False, True):
        check_gradients(call, deterministic=deterministic)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_packed_sequences(heads):
    call = case((5, 0, 70), (9, 4, 0), heads=heads, slack=3, causal=True).call()
    check(call)
    check_gradients(call)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_float32(heads):
    call = case(70, 90, heads=heads, dtype=torch.float32).call()
    assert onepass.supports(**call.tensors).backend == BACKEND
    call.check()


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_fp8(heads):
    q, k, v = case(70, 90, heads=heads, head_dim=128).tensors().values()
    for centers in (False, True):
        quantized = onepass.quantize_fp8(q, k, v, center_k=centers, center_v=centers)
        out, lse = onepass.attention(quantized, causal=True, return_lse=True)
        assert (out.shape, lse.shape) == ((1, 70, 0, 128), (1, 0, 70))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    onepass.attention(*leaves, precision="fp8").sum().backward()
    assert all((leaf.grad == 0).all() for leaf in leaves)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("backend", [None, "sm80", "sm90"])
def test_new_keys_are_appended(heads, page_size, rotary, backend):
    """The caches hold the values that a call whose q has heads would leave in them."""
    if not ON_GPU:
        backend = None
    elif backend == "sm90" and BACKEND != "sm90":
        pytest.skip("no Hopper GPU")
    arguments = DecodeCase((100, 0, 63), 4, heads, (128, 128), page_size, 4, rotary).arguments()
    others = {n: t.clone() for n, t in arguments.items() if isinstance(t, torch.Tensor)}
    out, lse = onepass.attention_decode(**arguments, return_lse=True, backend=backend)
    assert (out.shape, lse.shape) == ((3, 4, 0, 128), (3, 0, 4))
    if heads[1]:
        others["q"] = torch.zeros(3, 4, heads[1], 128, dtype=BF16, device=DEVICE)
        onepass.attention_decode(**others)
        for name in ("k_cache", "v_cache"):
            assert torch.equal(arguments[name].isnan(), others[name].isnan())
            assert torch.equal(arguments[name].nan_to_num(9), others[name].nan_to_num(9))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_packed_queries_over_a_cache(heads):
    arguments = DecodeCase((100, 0, 63), 4, heads).arguments()
    arguments |= {"q": arguments["q"].flatten(0, 1), "cu_seqlens_q": lengths_tensor((0, 1, 7, 9))}
    for splits in ({}, {"num_splits": 3}, {"split_size": 64}):
        out, lse = onepass.attention_decode(**arguments, **splits, return_lse=True)
        assert (out.shape, lse.shape) == ((12, 0, 64), (0, 12))


def test_merging():
    out, lse = onepass.merge_partials(
        torch.zeros(3, 2, 6, 0, 8, dtype=BF16, device=DEVICE), torch.zeros(3, 2, 0, 6, device=DEVICE)
    )
    assert (out.shape, lse.shape) == ((2, 6, 0, 8), (2, 0, 6))
    assert torch.cuda.is_available() == ON_GPU
    if ON_GPU:
        torch.cuda.synchronize()  # raises if a launch has failed

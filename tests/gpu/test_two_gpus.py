"""Tensors on a GPU that is not the current one: equal bits, work on that GPU's current stream, and none elsewhere.

python -m pytest -m gpu tests/gpu/test_two_gpus.py      on a machine with two GPUs
"""

import pytest
import torch
from gpu_cases import BACKEND, BF16, ON_GPU

import onepass

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU or torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
HERE, THERE = 0, 1
INT32 = torch.int32


def normal(*shape, dtype=BF16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(dtype=BF16, head_dim=64):
    return [normal(2, 700, heads, head_dim, dtype=dtype, seed=heads) for heads in (4, 2, 2)]


def forward(q, k, v):
    return onepass.attention(q, k, v, causal=True, backend=BACKEND, return_lse=True)


def gradients(q, k, v):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = onepass.attention(*leaves, causal=True, backend=BACKEND, return_lse=True, deterministic=True)
    return torch.autograd.grad(out.float().square().sum() + lse.sum(), leaves)


def packed(q, k, v):
    offsets = torch.tensor([0, 300, 1400], dtype=INT32, device=q.device)
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    return [onepass.attention_varlen(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, backend=BACKEND)]


def decode(q, k, v):
    """A decoding step with a new key, in splits, which are merged."""
    lengths = torch.tensor([500, 699], dtype=INT32, device=q.device)
    k, v = k.clone(), v.clone()
    new = {"k_new": k[:, :1].clone(), "v_new": v[:, :1].clone()}
    out = onepass.attention_decode(q[:, :1], k, v, cache_seqlens=lengths, num_splits=3, **new, backend="sm80")
    return [out, k, v]


def chunk(q, k, v):
    """Attention of a prompt's chunk of queries, on the tested backend's own kernel."""
    lengths = torch.tensor([500, 700], dtype=INT32, device=q.device)
    return [onepass.attention_decode(q[:, :200], k, v, cache_seqlens=lengths, num_splits=2, backend=BACKEND)]


def merged(q, k, v):
    partials = [
        onepass.attention(q, k[:, s], v[:, s], return_lse=True, backend=BACKEND) for s in (slice(300), slice(300, 700))
    ]
    return onepass.merge_partials(*zip(*partials, strict=True))


def in_fp8(q, k, v):
    quantized = onepass.quantize_fp8(q, k, v)
    return [quantized.q.view(torch.uint8), quantized.v.view(torch.uint8), onepass.attention(quantized, causal=True)]


def in_float32(q, k, v):
    return [onepass.attention(q.float(), k.float(), v.float(), backend=BACKEND)]


CALLS = (forward, gradients, packed, decode, chunk, merged, in_fp8, in_float32)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_the_other_gpu_computes(call):
    with torch.cuda.device(THERE):
        inputs = [t.cuda() for t in qkv()]
        expected = [t.clone() for t in call(*inputs)]
    torch.cuda.set_device(HERE)
    torch.cuda.synchronize(THERE)
    call(*inputs)
    before = torch.cuda.memory_stats(HERE).get("allocation.all.allocated", 0)
    for _ in range(2):
        results = call(*inputs)
        assert torch.cuda.current_device() == HERE
        for result, reference in zip(results, expected, strict=True):
            assert result.device == inputs[0].device
            assert torch.equal(result, reference)
    assert torch.cuda.memory_stats(HERE).get("allocation.all.allocated", 0) == before


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_on_the_current_stream_of_that_gpu(call):
    """Inputs are written late on that GPU's stream: a kernel on another stream would read what was there before."""
    torch.cuda.set_device(HERE)
    values = [t.to(f"cuda:{THERE}") for t in qkv()]
    expected = [t.clone() for t in call(*values)]
    late = [torch.zeros_like(t) for t in values]
    call(*late)
    torch.cuda.synchronize(THERE)
    with torch.cuda.stream(torch.cuda.Stream(THERE)):
        torch.cuda.set_device(HERE)  # the stream stays the current stream of that GPU
        with torch.cuda.device(THERE):
            torch.cuda._sleep(50_000_000)
        for t, value in zip(late, values, strict=True):
            t.copy_(value, non_blocking=True)
        results = call(*late)
        copies = [t.clone() for t in results]
        torch.cuda.current_stream(THERE).synchronize()
    for result, reference in zip(copies, expected, strict=True):
        assert torch.equal(result, reference)


def test_captured_on_that_gpu():
    """A captured launch has a tile counter of its own, even if the current GPU captures nothing."""
    inputs = [t.to(f"cuda:{THERE}") for t in qkv()]
    with torch.cuda.device(THERE):
        expected = forward(*inputs)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph), torch.cuda.device(HERE):
            out, lse = forward(*inputs)
        for _ in range(3):
            out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, expected.out)
            assert torch.equal(lse, expected.lse)


def test_supports_and_compile_ask_the_tensors_gpu():
    torch.cuda.set_device(HERE)
    inputs = [t.to(f"cuda:{THERE}") for t in qkv()]
    capability = torch.cuda.get_device_capability(THERE)
    assert onepass.supports(*inputs).backend == ("sm90" if capability == (9, 0) else "sm80")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: onepass.attention(q, k, v, causal=True), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(*inputs), onepass.attention(*inputs, causal=True))

"""torch's own attention by onepass on a GPU: which operator torch chooses is its own affair, all of them are ours."""

import pytest
import torch
import torch.nn.functional as F
from gpu_cases import BF16, DEVICE, FP16, needs_hopper, size

from onepass import reference
from onepass.integrations import torch_sdpa

pytestmark = [
    *needs_hopper,
    pytest.mark.skipif(
        not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="torch's attention has no registry"
    ),
]
N = size(1000, 70)


def qkv(dtype, heads=8, kv_heads=8, head_dim=64):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, heads, N, head_dim), *[(2, kv_heads, N, head_dim)] * 2
    return [torch.randn(*shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def results(function, *tensors):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]


def exact(tensors, **options):
    def attend(*t):
        return reference.attention(*(x.transpose(1, 2) for x in t), **options).out.transpose(1, 2)

    leaves = [t.detach().double().requires_grad_() for t in tensors]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.fixture(autouse=True)
def _active():
    with torch_sdpa.activate(DEVICE):
        yield
        assert torch_sdpa.fallbacks() == {}


def check(function, tensors, **options):
    """Relative errors of 16 bits, of which dout has one more."""
    for found, right in zip(results(function, *tensors), exact(tensors, **options), strict=True):
        assert (found.double() - right).abs().max() < 0.02 * right.abs().max()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sdpa(dtype, is_causal, head_dim):
    check(
        lambda *t: F.scaled_dot_product_attention(*t, is_causal=is_causal),
        qkv(dtype, head_dim=head_dim),
        causal=is_causal,
    )


def test_grouped_heads():
    check(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True, enable_gqa=True), qkv(BF16, 8, 2), causal=True)


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
def test_backends(backend):
    """Each of the operators."""
    if DEVICE == "cpu" and backend != "FLASH_ATTENTION":
        pytest.skip("a CPU has no cuDNN")
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
        check(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), qkv(BF16), causal=True)


def test_compiled():
    torch._dynamo.reset()
    check(torch.compile(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True)), qkv(BF16), causal=True)


def test_varlen_attn():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    offsets = torch.tensor([0, N // 3, N], dtype=torch.int32, device=DEVICE)
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in qkv(BF16))
    longest = N - N // 3
    found = results(lambda *t: varlen.varlen_attn(*t, offsets, offsets, longest, longest, window_size=(-1, 0)), q, k, v)
    options = {"causal": True, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out = reference.attention_varlen(*leaves, **options).out
    expected = [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
    for actual, right in zip(found, expected, strict=True):
        assert (actual.double() - right).abs().max() < 0.02 * right.abs().max()


def test_dropout_is_repeated_by_its_seed_and_by_checkpointing():
    if DEVICE == "cpu":
        pytest.skip("the operator of CPUs has no dropout")
    q, k, v = qkv(BF16)

    def run(*t):
        return F.scaled_dot_product_attention(*t, dropout_p=0.3)

    found = []
    for checkpoint in (False, True):
        torch.manual_seed(3)
        function = (lambda *t: torch.utils.checkpoint.checkpoint(run, *t, use_reentrant=False)) if checkpoint else run
        found.append(results(function, q, k, v))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
    assert not torch.equal(found[0][0], F.scaled_dot_product_attention(q, k, v))

"""torch's own attention by onepass on a GPU: which operator torch chooses is its own affair, all of them are ours."""

import pytest
import torch
import torch.nn.functional as F
from gpu_cases import BF16, DEVICE, FP16, assert_rounded_alike, needs_hopper, size

from onepass import reference
from onepass.integrations import torch_sdpa
from onepass.testing.budget import compare_gradients

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


def expected(tensors, dtype, **options):
    """What `results` gives, with every intermediate in one dtype."""
    attend = reference.attention_varlen if "cu_seqlens_q" in options else reference.attention
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    out = attend(*leaves, compute_dtype=dtype, **options).out
    wide = out if dtype == torch.float64 else out.float()
    return [out.detach(), *torch.autograd.grad(wide.square().sum(), leaves)]


def check(found, tensors, **options):
    """Args: found: what `results` gives. tensors, found: (.., seqlen, heads, head_dim)."""
    exact, in_torch = (expected(tensors, dtype, **options) for dtype in (torch.float64, tensors[0].dtype))
    for name, actual, *right in zip(("out", "dq", "dk", "dv"), found, exact, in_torch, strict=True):
        # the loss is a square, so that dout has the rounding of out
        floor = torch.finfo(actual.dtype).eps * right[0].abs().max()
        row = compare_gradients(name, actual, *right, floor)
        assert row.ok, str(row)


@pytest.fixture(autouse=True)
def _active():
    with torch_sdpa.activate(DEVICE):
        yield
        assert torch_sdpa.fallbacks() == {}


def check_sdpa(function, tensors, **options):
    """Args: tensors: (batch, heads, seqlen, head_dim)."""
    found, turned = ([t.transpose(1, 2) for t in x] for x in (results(function, *tensors), tensors))
    check(found, turned, **options)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sdpa(dtype, is_causal, head_dim):
    check_sdpa(
        lambda *t: F.scaled_dot_product_attention(*t, is_causal=is_causal),
        qkv(dtype, head_dim=head_dim),
        causal=is_causal,
    )


def test_grouped_heads():
    check_sdpa(
        lambda *t: F.scaled_dot_product_attention(*t, is_causal=True, enable_gqa=True), qkv(BF16, 8, 2), causal=True
    )


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
def test_backends(backend):
    """Each of the operators."""
    if DEVICE == "cpu" and backend != "FLASH_ATTENTION":
        pytest.skip("a CPU has no cuDNN")
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
        check_sdpa(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), qkv(BF16), causal=True)


def test_compiled():
    torch._dynamo.reset()
    check_sdpa(torch.compile(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True)), qkv(BF16), causal=True)


def test_varlen_attn():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    offsets = torch.tensor([0, N // 3, N], dtype=torch.int32, device=DEVICE)
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in qkv(BF16))
    longest = N - N // 3
    found = results(lambda *t: varlen.varlen_attn(*t, offsets, offsets, longest, longest, window_size=(-1, 0)), q, k, v)
    options = {"causal": True, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    check(found, (q, k, v), **options)


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
        assert_rounded_alike(a.transpose(1, 2), b.transpose(1, 2))
    assert not torch.equal(found[0][0], F.scaled_dot_product_attention(q, k, v))

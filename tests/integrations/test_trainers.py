"""torchtitan's and Megatron's attention, unmodified, over onepass."""

import importlib
import subprocess
import sys

import pytest
import torch

from onepass import reference
from onepass.integrations import torch_sdpa
from onepass.testing.budget import compare

MEGATRON = """
import onepass.compat, onepass.compat.flash_attn as ours
with onepass.compat.install():
    from megatron.core.transformer import attention
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.utils import is_fa_min_version
    assert is_fa_min_version("2.7.3")
assert attention.flash_attn_varlen_func is ours.flash_attn_varlen_func
assert attention.flash_attn_with_kvcache is ours.flash_attn_with_kvcache
assert rope_utils.apply_rotary_emb_flash.__module__.startswith("onepass.compat")
"""


def torchtitan_attention():
    return importlib.import_module("torchtitan.models.common.attention")


def qkv(dtype):
    return [torch.randn(2, 40, heads, 32, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]


@pytest.mark.package("torchtitan")
def test_torchtitan_causal():
    attention = torchtitan_attention().ScaledDotProductAttention(None)
    q, k, v = qkv(torch.float32)
    with torch_sdpa.activate("cpu") as activation:
        out = attention(q, k, v, enable_gqa=True)
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
        assert activation.refused == {}
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = reference.attention(*leaves, causal=True).out
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(gradients, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.package("torchtitan")
def test_torchtitan_documents():
    module = torchtitan_attention()
    attention = module.VarlenAttention(module.VarlenAttention.Config())
    q, k, v = qkv(torch.bfloat16)
    offsets = torch.tensor([0, 30, 40, 55, 80], dtype=torch.int32)
    masks = module.VarlenMetadata(cu_seq_q=offsets, cu_seq_k=offsets, max_q=30, max_k=30)
    with torch_sdpa.activate("cpu") as activation:
        out = attention(q, k, v, attention_masks=masks, enable_gqa=True)
        assert activation.refused == {}
    packed = [t.detach().flatten(0, 1) for t in (q, k, v)]
    cuts = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "causal": True}
    exact, in_torch = (
        reference.attention_varlen(*packed, **cuts, compute_dtype=t).out for t in (torch.float64, torch.bfloat16)
    )
    row = compare("out", out.flatten(0, 1), exact, in_torch)
    assert row.ok, str(row)


@pytest.mark.package("megatron")
def test_megatron_takes_onepass_for_flash_attn():
    done = subprocess.run([sys.executable, "-c", MEGATRON], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]

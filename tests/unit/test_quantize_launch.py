"""What the launches of `quantize_fp8` decide without a GPU."""

import pytest
import torch

import onepass
from onepass import dispatch, fp8
from onepass.kernels.fp8 import launch
from onepass.problem import AttentionInputs

BF16, INT32 = torch.bfloat16, torch.int32


def inputs(rows=70, head_dim=64, head_dim_v=64, dtype=BF16, lengths=None, batch=2, heads=1):
    leading = (batch, rows, heads) if lengths is None else (rows, heads)
    tensors = [torch.empty(*leading, d, dtype=dtype, device="meta") for d in (head_dim, head_dim, head_dim_v)]
    cu_seqlens = None if lengths is None else torch.tensor(lengths, dtype=INT32)
    return AttentionInputs(*tensors, None, cu_seqlens, cu_seqlens)


@pytest.mark.parametrize(
    ("given", "granularity", "word"),
    [
        (inputs(), "row", "granularity"),
        (inputs(dtype=torch.float32), "block", "float32"),
        (inputs(head_dim=72), "block", "72"),
        (inputs(head_dim_v=272), "block", "272"),
        (inputs(rows=0), "block", "elements"),
        (inputs(heads=0), "block", "elements"),
        (inputs(lengths=(0,)), "block", "elements"),
        (inputs(rows=2**22 + 64), "block", "at most 65535"),
        (inputs(rows=1, batch=65536), "block", "at most 65535"),
    ],
)
def test_what_stays_with_torch(given, granularity, word):
    assert word in launch.unsupported(given, granularity)


def test_what_the_kernels_take():
    for given in (inputs(), inputs(head_dim=256, head_dim_v=16, dtype=torch.float16), inputs(lengths=(0, 30, 70))):
        assert launch.unsupported(given, "block") is None


@pytest.mark.parametrize(("head_dim", "seed"), [(16, 0), (112, 7), (256, -3)])
def test_words_of_signs(head_dim, seed):
    words = launch.sign_words(head_dim, seed)
    assert len(words) == 2 * -(-head_dim // 64)
    assert all(-(2**31) <= word < 2**31 for word in words)
    signs = fp8.signs(head_dim, seed, torch.device("cpu"))
    flipped = [words[column // 32] >> column % 32 & 1 for column in range(head_dim)]
    assert torch.equal(torch.tensor(flipped), (signs < 0).long())


def test_which_gpus_have_kernels(monkeypatch):
    class OnGpu:
        device = torch.device("cuda")

    given = inputs()._replace(q=OnGpu())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(dispatch, "_compiler_refusal", lambda: None)
    monkeypatch.setattr(launch, "unsupported", lambda inputs, granularity: None)
    chosen = dispatch.quantization_kernels(given, "block")
    assert chosen == (launch.quantize, True)
    for capability, keys_last in (((8, 9), False), ((10, 0), False)):  # without an FP8 attention kernel V stays
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, c=capability: c)
        assert dispatch.quantization_kernels(given, "block").keys_last == keys_last
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    assert dispatch.quantization_kernels(given, "block") is None


def test_on_a_cpu_torch_rounds(monkeypatch):
    monkeypatch.setattr(dispatch, "_compiler_refusal", lambda: None)
    q = torch.randn(1, 5, 2, 64, dtype=BF16)
    assert not onepass.quantize_fp8(q, q, q).v_keys_last


def test_one_launch_for_each_tensor(monkeypatch):
    """With what a kernel expects of each argument, and nothing else on the GPU."""
    calls = []
    monkeypatch.setattr(launch, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(launch, "kernel_of", lambda kernel, arch: lambda *arguments: calls.append((kernel, arguments)))
    q, k, v = (torch.randn(150, heads, 64, dtype=BF16) for heads in (4, 2, 2))
    offsets = torch.tensor([0, 50, 150], dtype=INT32)
    used = torch.tensor([50, 90], dtype=INT32)
    (_, _, stored), descales = launch.quantize(
        AttentionInputs(q, k, v, None, offsets, offsets, used), 1, None, None, True
    )
    assert [kernel.name for kernel, _ in calls] == ["rows", "rows", "values"]
    assert [kernel.has_seqused for kernel, _ in calls] == [False, True, True]
    assert [d.shape for d in descales] == [(4, 4), (2, 4), (2, 4)]
    assert stored.shape == (2, 64, 4 * 64)
    assert calls[0][1][-1] == 5  # blocks, and one for rows of no sequence

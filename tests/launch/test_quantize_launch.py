"""Decisions of the launches of `quantize_fp8` that can be tested without a GPU."""

from dataclasses import replace

import pytest
import torch

import onepass
from onepass.api import fast_path
from onepass.dispatch import attention as dispatch
from onepass.dispatch import backends
from onepass.dispatch import fp8 as e4m3_kernels
from onepass.kernels.launch import quantize as launch
from onepass.problem import AttentionInputs
from onepass.problem.outputs import empty_outputs
from onepass.quantization import codec, rotation
from onepass.validation import fp8

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
    signs = rotation.signs(head_dim, seed, torch.device("cpu"))
    flipped = [words[column // 32] >> column % 32 & 1 for column in range(head_dim)]
    assert torch.equal(torch.tensor(flipped), (signs < 0).long())


def test_which_gpus_have_kernels(monkeypatch):
    class OnGpu:
        device = torch.device("cuda")

    given = inputs()._replace(q=OnGpu())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(backends, "compiler_refusal", lambda: None)
    monkeypatch.setattr(launch, "unsupported", lambda inputs, granularity: None)
    chosen = e4m3_kernels.quantization_kernels(given, "block")
    assert chosen == (launch.prepare, True)
    for capability, keys_last in (
        ((8, 9), False),
        ((10, 0), False),
    ):  # without an FP8 attention kernel, V keeps its layout
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, c=capability: c)
        assert e4m3_kernels.quantization_kernels(given, "block").keys_last == keys_last
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    assert e4m3_kernels.quantization_kernels(given, "block") is None


def test_on_a_cpu_torch_rounds(monkeypatch):
    monkeypatch.setattr(backends, "compiler_refusal", lambda: None)
    q = torch.randn(1, 5, 2, 64, dtype=BF16)
    assert not onepass.quantize_fp8(q, q, q).v_keys_last


def test_what_the_layout_kernel_leaves_to_torch():
    """V that needs too many thread blocks in one dimension of the layout kernel's grid is left to PyTorch."""
    for shape, lengths in (((1, 2**22 + 64, 1, 64), None), ((65536, 1, 1, 64), None), ((2**22, 1, 64), (0, 1))):
        v = torch.empty(shape, dtype=codec.E4M3, device="meta")
        cu_seqlens = None if lengths is None else torch.tensor(lengths, dtype=INT32)
        assert "at most 65535" in launch.unsupported_layout(v, cu_seqlens)
    assert launch.unsupported_layout(torch.empty(2, 70, 1, 64, device="meta"), None) is None


@pytest.fixture
def launched(monkeypatch):
    """A list of the kernels that would be launched, each with its arguments, on a simulated Hopper GPU."""
    calls = []
    fast_path.forget()
    monkeypatch.setattr(launch, "prepare", launch.prepare.__wrapped__)
    monkeypatch.setattr(launch, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(launch, "kernel_of", lambda kernel, arch: lambda *arguments: calls.append((kernel, arguments)))
    monkeypatch.setattr(e4m3_kernels, "_has_e4m3_kernels", lambda t: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    yield calls
    fast_path.forget()


def packed():
    q, k, v = (torch.randn(150, heads, head_dim, dtype=BF16) for heads, head_dim in ((4, 64), (2, 64), (2, 128)))
    offsets = torch.tensor([0, 50, 150], dtype=INT32)
    return (q, k, v), {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}


def test_one_launch_for_all_tensors(launched):
    """The kernel is given what it expects for each argument, and nothing else runs on the GPU."""
    (q, k, v), offsets = packed()
    used = torch.tensor([50, 90], dtype=INT32)
    quantized = onepass.quantize_fp8(q, k, v, **offsets, seqused_k=used, seed=1)
    ((kernel, arguments),) = launched
    assert kernel == launch.Kernel(BF16, 64, 128, True, True, is_packed=True, has_seqused=True)
    assert arguments[0] is q
    assert [t.shape for t in arguments[6:9]] == [(4, 4), (2, 4), (2, 4)]
    assert quantized.v.shape == (2, 128, 4 * 64)
    assert arguments[9:11] == (None, None)
    assert arguments[11] == launch.sign_words(64, 1)
    assert arguments[14] is used


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("seqlens", [(1, 1), (64, 300)])
def test_what_is_not_checked_is_as_it_should_be(launched, is_packed, seqlens):
    """The result of the kernel passes the checks of quantized tensors from users, and its descales do not overlap."""
    leading = () if is_packed else (3,)
    seqlen_q, seqlen_k = seqlens
    q, k, v = (torch.randn(*leading, n, h, 64, dtype=BF16) for n, h in ((seqlen_q, 4), (seqlen_k, 2), (seqlen_k, 2)))
    options = {f"cu_seqlens_{t}": torch.tensor([0, 1, n], dtype=INT32) for t, n in (("q", seqlen_q), ("k", seqlen_k))}
    quantized = onepass.quantize_fp8(q, k, v, **(options if is_packed else {}))
    fp8.check_quantized(quantized)
    assert vars(quantized).keys() == vars(replace(quantized)).keys()
    addresses = [set(range(d.data_ptr(), d.data_ptr() + 4 * d.numel())) for d in quantized.descales]
    assert not (addresses[0] & addresses[1] | addresses[1] & addresses[2] | addresses[0] & addresses[2])
    assert all(d.is_contiguous() for d in quantized.descales)
    sizes = {t.untyped_storage().nbytes() for t in quantized.descales}
    assert sizes == {sum(d.numel() for d in quantized.descales) * 4}


def test_a_call_like_one_before_is_not_checked_again(launched, monkeypatch):
    checked = []
    check = fp8.check_quantizable
    monkeypatch.setattr(fp8, "check_quantizable", lambda *a, **o: checked.append(check(*a, **o)))
    (q, k, v), offsets = packed()
    for n, options in enumerate([{}, {"seed": 5}, {"rotate": False}, {"seqused_k": torch.zeros(2, dtype=INT32)}], 1):
        for _ in range(3):
            assert onepass.quantize_fp8(q, k, v, **offsets, **options).rotation in (0, 5, None)
        assert len(checked) == n
    onepass.quantize_fp8(q[:140], k, v, **offsets)
    assert len(checked) == 5
    for _ in range(2):  # centered calls never take the fast path
        assert onepass.quantize_fp8(q, k, v, **offsets, center_v=True).v_mean is not None
    assert len(checked) == 7
    # calls with other layouts are like one before, and each is launched with its own tensor
    q_first = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert onepass.quantize_fp8(q_first, k, v, **offsets).q.shape == q.shape
    assert launched[-1][1][0] is q_first
    with pytest.raises(TypeError, match="rotate: expected a bool, got 1"):
        onepass.quantize_fp8(q, k, v, **offsets, rotate=1)


def test_precision_takes_one_launch_for_the_tensors(launched, monkeypatch):
    """A call with a precision takes one launch for its tensors, and a repeated call no operator."""
    attended = []

    def prepare(name, problem, device, tuning=None):
        return lambda inputs: attended.append((problem, inputs)) or empty_outputs(problem, inputs)

    monkeypatch.setattr(backends, "refusal", lambda name, *_: None if name == "sm90" else "not here")
    monkeypatch.setattr(dispatch, "prepare", prepare)
    q, k, v = (torch.randn(2, 70, heads, 64, dtype=BF16) for heads in (4, 2, 2))
    run = torch.ops.onepass.attention_fp8
    monkeypatch.setattr(torch.ops.onepass, "attention_fp8", lambda *arguments: operators.append(1) or run(*arguments))
    operators = []
    for n in range(1, 4):
        assert onepass.attention(q, k, v, precision="fp8", causal=True).dtype == BF16
        assert (len(operators), len(launched), len(attended)) == (1, n, n)
    (first, first_inputs), (again, again_inputs) = attended[0], attended[-1]
    assert first == again
    assert again.quantization.v_keys_last
    assert again_inputs.descales.k.shape == first_inputs.descales.k.shape == (2, 2, 2)
    onepass.attention(q.requires_grad_(), k, v, precision="fp8", causal=True)  # a call that needs a gradient
    assert len(operators) == 2
    with torch.no_grad():
        onepass.attention(q, k, v, precision="fp8", causal=True)
    assert len(operators) == 2


@pytest.mark.parametrize("rotate", [False, True])
def test_the_mean_of_keys_that_are_rotated_is_rotated(launched, rotate):
    """(k - mean) M = k M - mean M, of which the kernel computes k M."""
    q, k, v = (torch.randn(2, 50, 2, 64, dtype=BF16) + 1 for _ in range(3))
    onepass.quantize_fp8(q, k, v, rotate=rotate, seed=1, center_k=True)
    ((_, arguments),) = launched
    mean = k.float().mean(1)
    torch.testing.assert_close(arguments[9], rotation.rotated(mean, 1) if rotate else mean)
    assert arguments[10] is None

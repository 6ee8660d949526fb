"""The kernels of `quantize_fp8` compute what its PyTorch operations do: their PTX runs on the CPU.

V is rounded by the same operations, so its bits are equal. Rotated rows are summed in another order, so that a number
between two e4m3 numbers, or the largest number of a block, may round the other way.
"""

import fp8_kernels
import packages
import pytest
import torch
from same_rounding import assert_same_rounding

import onepass
from onepass.dispatch import fp8
from onepass.kernels.launch import quantize as launch
from onepass.ops import quantize
from onepass.quantization import codec

pytestmark = packages.needs_machine_code

BF16, FP16, INT32 = torch.bfloat16, torch.float16, torch.int32
NAN, INF = float("nan"), float("inf")


def randn(*shape, dtype=BF16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=["keys last", "as it was"])
def keys_last(request):
    return request.param == "keys last"


@pytest.fixture
def use_kernels(monkeypatch):
    """A function after whose call `quantize_fp8` uses its kernels, like on a GPU."""
    fp8_kernels.install(monkeypatch)

    def use(keys_last):
        kernels = fp8.QuantizationKernels(launch.prepare, keys_last)

        def choose(inputs, granularity):
            assert launch.unsupported(inputs, granularity) is None
            return kernels

        monkeypatch.setattr(fp8, "quantization_kernels", choose)

    return use


def check(use_kernels, keys_last, q, k, v, **options):
    expected = onepass.quantize_fp8(q, k, v, **options)
    use_kernels(keys_last)
    actual = onepass.quantize_fp8(q, k, v, **options)
    offsets = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    assert_same_rounding(actual, expected, *offsets)
    assert actual.v_keys_last == keys_last
    if keys_last:  # zeros where there is no key, too
        laid_out = quantize.keys_last(expected.v, offsets[1]).view(torch.uint8)
        assert torch.equal(actual.v.view(torch.uint8) & 0x7F, laid_out & 0x7F)
    return actual


def make(lengths=(70, 150), heads=(2, 1), head_dims=(64, 64), batch=2, dtype=BF16):
    q = randn(batch, lengths[0], heads[0], head_dims[0], dtype=dtype, seed=1)
    k, v = (randn(batch, lengths[1], heads[1], d, dtype=dtype, seed=i) for i, d in enumerate(head_dims, 2))
    k[:, :30] *= 30  # blocks of different scales
    v[:, 64:] *= 0.01
    return q, k, v


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize(
    ("head_dims", "dtype"),
    [((64, 64), BF16), ((128, 128), FP16), ((256, 192), BF16), ((16, 48), BF16), ((112, 80), FP16), ((96, 32), BF16)],
    ids=str,
)
def test_head_dims(use_kernels, head_dims, dtype):
    check(use_kernels, True, *make(head_dims=head_dims, dtype=dtype))


@pytest.mark.sampled(quick=1, slow=1)
def test_without_rotation(use_kernels, keys_last):
    """Tensors that are (batch, heads, seqlen, head_dim) in memory; only whole blocks, and V keeps its layout."""
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in make(lengths=(128, 64)))
    actual = check(use_kernels, keys_last, q, k, v, rotate=False)
    assert actual.q.transpose(1, 2).is_contiguous()


def offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=INT32)


def packed(lengths_q=(5, 0, 70, 64, 33), lengths_k=(9, 4, 130, 0, 66), slack=70):
    """Packed sequences, followed by rows that belong to none; NaN stands where nothing may be read."""
    q = randn(sum(lengths_q) + slack, 2, 64, seed=1)
    k, v = (randn(sum(lengths_k) + slack, 1, d, seed=i) for i, d in ((2, 64), (3, 80)))
    for t, lengths in ((q, lengths_q), (k, lengths_k), (v, lengths_k)):
        t[sum(lengths) :] = NAN
    k[9:40] *= 30
    return (q, k, v), {"cu_seqlens_q": offsets(lengths_q), "cu_seqlens_k": offsets(lengths_k)}


def hide_keys(tensors, options, used):
    options["seqused_k"] = torch.tensor(used, dtype=INT32)
    for start, length, n in zip(options["cu_seqlens_k"].tolist(), (9, 4, 130, 0, 66), used, strict=False):
        for t in tensors[1:]:
            t[start + n : start + length] = NAN


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize("used", [None, (9, 0, 70, 0, 1)], ids=["all keys", "seqused_k"])
def test_packed_sequences(use_kernels, keys_last, used):
    tensors, options = packed()
    if used is not None:
        hide_keys(tensors, options, used)
    check(use_kernels, keys_last, *tensors, **options)


def test_all_options_with_packed_sequences(use_kernels):
    tensors, options = packed()
    for t, x in zip(tensors, (0, 3, -5), strict=True):
        t += x
    hide_keys(tensors, options, (9, 0, 70, 0, 1))
    check(use_kernels, True, *tensors, **options, center_k=True, center_v=True)


@pytest.mark.sampled(quick=0, slow=1)
def test_hidden_keys(use_kernels, keys_last):
    """Entries without keys, one whose last block is hidden, and one with all keys."""
    q, k, v = make(lengths=(3, 150), batch=3)
    used = torch.tensor([0, 65, 150], dtype=INT32)
    for t in (k, v):
        for b, n in enumerate(used):
            t[b, n:] = NAN
    check(use_kernels, keys_last, q, k, v, seqused_k=used)


@pytest.mark.sampled(quick=1, slow=2)
@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("rotate", [True, False])
def test_means(use_kernels, keys_last, rotate, kind):
    """Keys so far from 0 that rounding without centering would lose them."""
    if kind == "dense":
        tensors, options = make(lengths=(3, 150), head_dims=(96, 80)), {}
        options["seqused_k"] = torch.tensor([149, 7], dtype=INT32)
        for t in tensors[1:]:
            t[1, 7:] = NAN
    else:
        tensors, options = packed()
        tensors[1][2:], tensors[2][2:] = tensors[1][2:] + 3, tensors[2][2:] - 5
    actual = check(use_kernels, keys_last, *tensors, **options, center_k=True, center_v=True, rotate=rotate)
    assert actual.v_mean is not None
    assert actual.score_shift is not None


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize("rotate", [True, False])
def test_nan_and_inf_stay_in_their_rows(use_kernels, keys_last, rotate):
    """They do not reach the scale of their block either: inf - inf, inf alone, NaN, and sums of the largest float32."""
    q, k, v = make(lengths=(64, 70), batch=1)
    for t in (q, k, v):
        t[0, 3, 0, 5], t[0, 3, 0, 40] = INF, -INF
        t[0, 7, 0, 17], t[0, 9, 0, 63] = NAN, -INF
        t[0, 12, 0] = torch.finfo(BF16).max if rotate else 0.0
    if rotate:
        v[0, 12] = 0.0  # it is not rotated
        k[0, 12] = 0.0  # otherwise sums in another order would be inf
        q[0, 12] = 0.0
    check(use_kernels, keys_last, q, k, v, rotate=rotate)


def test_zeros_and_tiny_numbers(use_kernels, keys_last):
    q, k, v = make(lengths=(64, 130))
    k[:, :64] = 0
    v[0, 64:128] = 2.0**-130
    q[1] = 2.0**-120
    check(use_kernels, keys_last, q, k, v)


def test_strides(use_kernels, keys_last):
    """Slices of one tensor are read where they lie; one that 16 bytes do not divide is copied."""
    whole = randn(2, 70, 3, 4, 64)
    q, k, v = whole.unbind(2)
    v = torch.cat([v.new_zeros(2, 70, 4, 1), v], -1)[..., 1:]
    check(use_kernels, keys_last, q, k[:, :, 2:], v[:, :, :2])


@pytest.mark.sampled(quick=1, slow=0)
@pytest.mark.parametrize("head_dim", [64, 208])
def test_keys_last_of_e4m3(monkeypatch, head_dim):
    """V that the caller has quantized."""
    fp8_kernels.install(monkeypatch)
    codes = torch.randint(0, 256, (2, 150, 3, head_dim), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    v = codes.view(codec.E4M3)
    assert torch.equal(launch.keys_last(v, None).view(torch.uint8), quantize.keys_last(v).view(torch.uint8))
    offsets_k = offsets((9, 141))
    stored, expected = (f(v[1], offsets_k).view(torch.uint8) for f in (launch.keys_last, quantize.keys_last))
    assert torch.equal(stored, expected)


@pytest.mark.slow
def test_random_seed_of_signs(use_kernels):
    check(use_kernels, True, *make(lengths=(5, 5), head_dims=(128, 64)), seed=-(10**20))

"""The Hopper forward in FP8, compared with float64 attention of the dequantized tensors and the tiled backend."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from gpu_cases import BACKEND, BF16, DEVICE, FP16, ON_GPU, needs_hopper

import onepass
from onepass.kernels.config import ForwardConfigSm90, p_exponent
from onepass.kernels.heuristics.sm90 import LAZY_FP8
from onepass.ops import quantize
from onepass.quantization import dequantize, layout
from onepass.testing import fp8_budget

pytestmark = [*needs_hopper, pytest.mark.skipif(BACKEND == "sm80", reason="no FP8 kernels for Ampere")]


def make(seqlen_q, seqlen_k, head_dim, head_dim_v, batch=2, heads=(4, 2), dtype=BF16):
    generator = torch.Generator().manual_seed(0)
    shapes = (seqlen_q, heads[0], head_dim), (seqlen_k, heads[1], head_dim), (seqlen_k, heads[1], head_dim_v)
    return [torch.randn(batch, *shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


# Calls with lse have exponentials on a GPU, and calls without it P by integers.
WITH_LSE = (False, True) if ON_GPU else (True,)


def rounding_of_p(config, with_lse):
    """What a configuration does to P. By default all configurations of a kind of call do the same (tests/device)."""
    if config is None:
        return {"p_exponent": p_exponent(LAZY_FP8), "p_codes": not with_lse}
    return {"p_exponent": p_exponent(config.rescale_threshold), "p_codes": config.p_codes}


def check(quantized, **options):
    """Return out of each kind of call, after comparing it with its budget."""
    tuning, dequantized = options.pop("tuning", None), options.pop("dequantized", None)
    tensors = dequantized or quantized.dequantize()
    v_scale = dequantize.row_scales(tensors[2], quantized.v_descale, quantized.kv_block, None)
    outs = []
    for with_lse in WITH_LSE if tuning is None else (not tuning.p_codes,):
        result = onepass.attention(quantized, **options, backend=BACKEND, tuning=tuning, return_lse=with_lse)
        out, lse = result if with_lse else (result, None)
        kernel_rounding = {"short_sums": True, "v_scale": v_scale} | rounding_of_p(tuning, with_lse)
        budget = fp8_budget(*tensors, out.dtype, **options, **(kernel_rounding if ON_GPU else {}))
        compared = [("out", out, budget.oracle.out, budget.out)]
        if with_lse:
            is_empty = budget.oracle.lse == -math.inf
            assert torch.equal(lse == -math.inf, is_empty)
            lse, exact = (t.masked_fill(is_empty, 0.0) for t in (lse, budget.oracle.lse))
            compared.append(("lse", lse, exact, budget.lse))
        for name, actual, oracle, allowed in compared:
            share = (actual.double() - oracle).abs() / allowed
            assert (share <= 1).all(), f"{name}: {int((share > 1).sum())} of {share.numel()}, worst {share.max()}"
        assert budget.scale(out).ok, budget.scale(out)
        outs.append(out)
    return outs


def test_order_of_keys():
    """Each key in turn has all the probability, so that out is its row of V."""
    v = make(256, 256, 128, 128, batch=1, heads=(1, 1))[2]
    k = torch.nn.functional.normalize(torch.randn(256, 128, generator=torch.Generator().manual_seed(1)), dim=-1) * 11
    k = k.to(DEVICE, BF16)[None, :, None]
    quantized = onepass.quantize_fp8(k, k, v)
    # query i has a score of 121 with key i, and far smaller scores with other keys
    for out in check(quantized, softmax_scale=1.0):
        torch.testing.assert_close(out.float(), quantized.dequantize()[2], rtol=torch.finfo(BF16).eps, atol=1e-4)


NEGATIVE = [(None, -50), (-50, None), (-20, 100), (100, -20), (3, -4)]


@pytest.mark.parametrize("window", NEGATIVE, ids=str)
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("lengths", [(128, 128), (200, 333), (333, 200)], ids=str)
def test_windows_with_negative_sides(lengths, head_dims, window):
    check(onepass.quantize_fp8(*make(*lengths, *head_dims)), window=window)


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (70, 30)}], ids=str)
@pytest.mark.parametrize("head_dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (16, 48)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 1), (64, 64), (65, 129), (200, 333)], ids=str)
def test_values(lengths, head_dims, mask):
    check(onepass.quantize_fp8(*make(*lengths, *head_dims)), **mask)


@pytest.mark.parametrize("granularity", ["block", "head", "tensor"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_granularities(granularity, dtype):
    q, k, v = make(300, 500, 128, 128, dtype=dtype)
    k[0, :70] *= 20  # blocks of different scales
    v[1, 64:128] *= 50
    q[:, 100:] *= 0.1
    check(onepass.quantize_fp8(q, k, v, granularity=granularity), causal=True)


OPTIONS = {
    "softcap": {"softcap": 5.0},
    "softcap that all scores reach": {"softcap": 0.01},
    "sinks": {"sinks": torch.linspace(-1.0, 3.0, 4)},
    "seqused_k": {"seqused_k": torch.tensor([333, 17], dtype=torch.int32), "causal": True},
    "few queries": {},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    options = {n: o.to(DEVICE) if isinstance(o, torch.Tensor) else o for n, o in OPTIONS[name].items()}
    q, k, v = make(3 if name == "few queries" else 200, 333, 128, 128)
    check(onepass.quantize_fp8(q, k, v, seqused_k=options.get("seqused_k")), **options)


def with_keys_first(quantized, rows, cu_seqlens_k=None):
    """Return the quantized tensors with V laid out as callers have it, whatever quantize_fp8 gives on this device."""
    if not quantized.v_keys_last:
        return quantized
    return replace(quantized, v=layout.keys_first(quantized.v, rows, cu_seqlens_k), v_keys_last=False)


def with_keys_last(quantized):
    """Return the quantized tensors with V laid out with its keys last, as the kernel reads it."""
    if quantized.v_keys_last:
        return quantized
    return replace(quantized, v=quantize.keys_last(quantized.v), v_keys_last=True)


@pytest.mark.parametrize("lengths", [(1, 1), (200, 333), (128, 256)], ids=str)
@pytest.mark.parametrize("head_dims", [(64, 64), (192, 128), (256, 256)], ids=str)
def test_v_with_its_keys_last(lengths, head_dims):
    rows = with_keys_first(onepass.quantize_fp8(*make(*lengths, *head_dims)), lengths[1])
    both = check(with_keys_last(rows), causal=True), check(rows, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


# head_dim, head_dim_v, configuration: every size of a tile of keys, and rows of 32, 64 and 128 bytes
TRANSPOSING = [
    (64, 64, ForwardConfigSm90(tile_n=32)),
    (64, 64, ForwardConfigSm90(tile_n=64, num_warpgroups=4, q_stages=2, dynamic_tiles=True)),
    (128, 128, ForwardConfigSm90(tile_n=96, num_warpgroups=3, q_stages=2, dynamic_tiles=True)),
    (128, 128, ForwardConfigSm90(tile_n=128, q_stages=2, dynamic_tiles=True)),
    (128, 96, ForwardConfigSm90(tile_n=160, num_warpgroups=1)),
    (128, 128, ForwardConfigSm90(tile_n=192, q_stages=2)),
    (64, 64, ForwardConfigSm90(tile_n=224)),
    (64, 64, ForwardConfigSm90(tile_n=256, dynamic_tiles=True)),
    (192, 192, ForwardConfigSm90(tile_n=96, v_stages=3)),
    (256, 256, ForwardConfigSm90(tile_n=128, q_stages=2, dynamic_tiles=True)),  # one buffer for rows
    (256, 256, ForwardConfigSm90(tile_n=64, q_stages=2, num_stages=3)),
    (128, 80, ForwardConfigSm90(tile_n=128, overlap_tiles=False)),
    (128, 128, ForwardConfigSm90(tile_n=128, overlap_gemm_softmax=False, overlap_tiles=False, pingpong=False)),
]


def both_ways(rows, last, config, call):
    """Assert that `call` has equal bits with V transposed by the kernel and with V that has its keys last."""
    expected = call(last, replace(config, transposes_v=False))
    actual = call(rows, replace(config, transposes_v=True))
    assert not any(t.isnan().any() for t in actual)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.skipif(not ON_GPU, reason="the tiled backend takes no configuration")
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (70, 30)}], ids=str)
@pytest.mark.parametrize(("head_dim", "head_dim_v", "config"), TRANSPOSING, ids=str)
def test_v_that_the_kernel_transposes(head_dim, head_dim_v, config, mask):
    config = replace(config, rescale_threshold=LAZY_FP8)
    for lengths in ((1, 1), (200, 333), (900, 1500)):
        rows = with_keys_first(onepass.quantize_fp8(*make(*lengths, head_dim, head_dim_v, batch=3)), lengths[1])
        last = with_keys_last(rows)
        for used in (None, torch.tensor([lengths[1], lengths[1] // 2, 0], dtype=torch.int32, device=DEVICE)):
            if used is not None:  # NaN behind the last key
                v = rows.v.view(torch.uint8).clone()
                v[torch.arange(lengths[1], device=DEVICE) >= used[:, None]] = 0x7F
                rows = replace(rows, v=v.view(torch.float8_e4m3fn))
                last = with_keys_last(rows)

            def call(quantized, tuning, used=used):
                options = {"seqused_k": used, "backend": BACKEND, "tuning": tuning, "return_lse": True}
                return onepass.attention(quantized, **mask, **options)

            both_ways(rows, last, config, call)


@pytest.mark.skipif(not ON_GPU, reason="the tiled backend takes no configuration")
@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize(("head_dim", "head_dim_v", "config"), TRANSPOSING, ids=str)
def test_packed_v_that_the_kernel_transposes(head_dim, head_dim_v, config, mask):
    """A sequence may begin anywhere in the rows of V; rows of no sequence hold NaN."""
    config = replace(config, rescale_threshold=LAZY_FP8)
    lengths = (5, 0, 70, 700, 64, 1, 333)
    lengths = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    offsets = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
    total = int(lengths[-1])
    q, k, v = (t[0] for t in make(total, total + 9, head_dim, head_dim_v, batch=1))
    rows = onepass.quantize_fp8(q, k, v, **offsets)
    rows = with_keys_first(rows, total + 9, lengths)
    v = rows.v.view(torch.uint8).clone()
    v[total:] = 0x7F
    rows = replace(rows, v=v.view(torch.float8_e4m3fn))
    last = replace(rows, v=quantize.keys_last(rows.v, lengths), v_keys_last=True)

    def call(quantized, tuning):
        options = {"backend": BACKEND, "tuning": tuning, "return_lse": True}
        return onepass.attention_varlen(quantized, **offsets, **mask, **options)

    both_ways(rows, last, config, call)


@pytest.mark.parametrize("keys_last", [False, True])
@pytest.mark.parametrize("tile_n", [32, 96, 128])
def test_nan_behind_seqused_k(tile_n, keys_last):
    q, k, v = make(100, 300, 128, 128, batch=7)
    used = torch.tensor([300, 17, 1, 0, 129, 64, 250], dtype=torch.int32, device=DEVICE)
    quantized = with_keys_first(onepass.quantize_fp8(q, k, v), 300)
    behind = torch.arange(300, device=DEVICE) >= used[:, None]
    stored = {n: getattr(quantized, n).view(torch.uint8).clone() for n in "kv"}
    for t in stored.values():
        t[behind] = 0x7F  # NaN
    quantized = replace(quantized, **{n: t.view(torch.float8_e4m3fn) for n, t in stored.items()})
    clean = quantized.dequantize()
    for t in clean[1:]:
        t[behind] = 0.0
    given = with_keys_last(quantized) if keys_last else quantized
    tuning = ForwardConfigSm90(tile_n=tile_n, rescale_threshold=0.8, transposes_v=not keys_last) if ON_GPU else None
    for mask in ({}, {"causal": True}):
        check(given, dequantized=clean, seqused_k=used, tuning=tuning, **mask)


@pytest.mark.parametrize("keys_last", [False, True])
@pytest.mark.parametrize("granularity", ["block", "head", "tensor"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences(head_dim, granularity, keys_last):
    """Each sequence is within its error budget; rows of no sequence and keys past seqused_k hold NaN."""
    lengths_q, lengths_k = (5, 0, 70, 200, 64, 1), (9, 4, 130, 333, 64, 700)
    used = torch.tensor([9, 4, 77, 0, 64, 650], dtype=torch.int32, device=DEVICE)
    offsets = {
        f"cu_seqlens_{n}": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
        for n, lengths in (("q", lengths_q), ("k", lengths_k))
    }
    q, k, v = (t[0] for t in make(sum(lengths_q) + 3, sum(lengths_k) + 9, head_dim, head_dim, batch=1))
    quantized = onepass.quantize_fp8(q, k, v, granularity=granularity, **offsets)
    quantized = with_keys_first(quantized, len(v), offsets["cu_seqlens_k"])
    is_nan = {n: torch.zeros(len(t), dtype=torch.bool, device=DEVICE) for n, t in (("q", q), ("k", k))}
    for n, lengths in (("q", lengths_q), ("k", lengths_k)):
        is_nan[n][sum(lengths) :] = True
    clean = quantized.dequantize(**offsets)
    for options, with_lse in itertools.product(({}, {"causal": True}, {"seqused_k": used}), WITH_LSE):
        for b, start in enumerate(offsets["cu_seqlens_k"].tolist()[:-1]):
            if "seqused_k" in options:
                is_nan["k"][start + int(used[b]) : start + lengths_k[b]] = True
        stored = {n: getattr(quantized, n).view(torch.uint8).clone() for n in "qkv"}
        for n, t in stored.items():
            t[is_nan["q" if n == "q" else "k"]] = 0x7F
        given = replace(quantized, **{n: t.view(torch.float8_e4m3fn) for n, t in stored.items()})
        if keys_last and not given.v_keys_last:
            given = replace(given, v=quantize.keys_last(given.v, offsets["cu_seqlens_k"]), v_keys_last=True)
        result = onepass.attention_varlen(given, **offsets, **options, backend=BACKEND, return_lse=with_lse)
        out, lse = result if with_lse else (result, None)
        v_scale = dequantize.row_scales(clean[2], quantized.v_descale, quantized.kv_block, offsets["cu_seqlens_k"])
        v_scale = v_scale.expand(len(k), 2, 1)
        for b, (start_q, start_k) in enumerate(zip(*(t.tolist() for t in offsets.values()), strict=True)):
            if b == len(lengths_q) or lengths_q[b] == 0:
                continue
            rows = slice(start_q, start_q + lengths_q[b])
            count = int(used[b]) if "seqused_k" in options else lengths_k[b]
            keys = slice(start_k, start_k + count)
            mask = {name: value for name, value in options.items() if name == "causal"}
            if count == 0:
                assert (out[rows] == 0).all()
                assert lse is None or (lse[:, rows] == -math.inf).all()
                continue
            tensors = clean[0][None, rows], clean[1][None, keys], clean[2][None, keys]
            kernel_rounding = {"short_sums": True, "v_scale": v_scale[None, keys]} | rounding_of_p(None, with_lse)
            budget = fp8_budget(*tensors, out.dtype, **mask, **(kernel_rounding if ON_GPU else {}))
            assert ((out[None, rows].double() - budget.oracle.out).abs() <= budget.out).all(), b
            assert budget.scale(out[None, rows]).ok, (b, budget.scale(out[None, rows]))
            if lse is None:
                continue
            is_empty = budget.oracle.lse == -math.inf
            assert torch.equal(lse[None, :, rows] == -math.inf, is_empty)
            error = (lse[None, :, rows].double() - budget.oracle.lse).masked_fill(is_empty, 0.0).abs()
            assert (error <= budget.lse).all(), b


def test_scales_that_differ_much():
    """Descales of V are folded into the exponent, so they may differ much between blocks, and so may the scores."""
    q, k, v = make(200, 640, 128, 128)
    for i in range(10):
        block = slice(64 * i, 64 * i + 64)
        v[:, block] *= 10.0 ** ((7 * i) % 10 - 5)
        k[:, block] *= 2.0 ** ((3 * i) % 5 - 2)
    v[1, 128:192] = 0.0
    for options in ({}, {"causal": True}, {"sinks": torch.tensor([1.0, -2.0, 5.0, 0.0], device=DEVICE)}):
        check(onepass.quantize_fp8(q, k, v), **options)


@pytest.mark.skipif(not ON_GPU, reason="the tiled backend takes no configuration")
@pytest.mark.parametrize(
    "config",
    [
        ForwardConfigSm90(tile_n=64),
        ForwardConfigSm90(tile_n=192, q_stages=2),
        ForwardConfigSm90(tile_n=32, rescale_threshold=0.8),
        ForwardConfigSm90(tile_n=96, rescale_threshold=1.8, num_warpgroups=3),
        ForwardConfigSm90(tile_n=128, rescale_threshold=0.8),
        ForwardConfigSm90(tile_n=160, rescale_threshold=3.8, dynamic_tiles=True),
        ForwardConfigSm90(tile_n=224, rescale_threshold=0.8),
        ForwardConfigSm90(tile_n=128, cluster_size=2),
        ForwardConfigSm90(tile_n=128, dynamic_tiles=True, pingpong=False),
        ForwardConfigSm90(tile_n=128, overlap_tiles=False),
        ForwardConfigSm90(tile_n=64, two_level_sums=True),
        ForwardConfigSm90(tile_n=64, two_level_sums=True, rescale_threshold=0.8),
        ForwardConfigSm90(tile_n=128, overlap_tiles=False, overlap_gemm_softmax=False),
        ForwardConfigSm90(
            tile_n=128, two_level_sums=True, overlap_gemm_softmax=False, num_warpgroups=3, dynamic_tiles=True
        ),
        ForwardConfigSm90(tile_n=96, two_level_sums=True, overlap_gemm_softmax=False, pv_columns=64, cluster_size=2),
        ForwardConfigSm90(
            tile_n=64, two_level_sums=True, overlap_gemm_softmax=False, overlap_tiles=False, pingpong=False
        ),
        ForwardConfigSm90(tile_n=64, p_codes=True),
        ForwardConfigSm90(tile_n=96, p_codes=True, rescale_threshold=0.8, two_level_sums=True),
        ForwardConfigSm90(
            tile_n=128,
            p_codes=True,
            rescale_threshold=3.8,
            two_level_sums=True,
            overlap_gemm_softmax=False,
            pingpong=False,
        ),
    ],
    ids=lambda config: config.text,
)
def test_configurations(config):
    check(onepass.quantize_fp8(*make(500, 700, 128, 128)), causal=True, tuning=config)


SUMS = pytest.mark.parametrize(
    ("head_dim", "keys"), [(d, n) for d in (64, 128, 192, 256) for n in ((2048, 16384, 65536) if ON_GPU else (2048,))]
)


def long_call(head_dim, keys):
    return make(128, keys, head_dim, head_dim, batch=1, heads=(2, 1))


@SUMS
@pytest.mark.parametrize("keys_last", [False, True])
def test_equal_values_are_returned_exactly(head_dim, keys, keys_last):
    """With q = 0 and v = 1, out is 1. A single sum of all P V would give 0.57 at 16384 keys, since the tensor cores cut
    small products off large sums."""
    q, k, v = long_call(head_dim, keys)
    quantized = onepass.quantize_fp8(torch.zeros_like(q), k, torch.ones_like(v))
    given = with_keys_last(quantized) if keys_last else with_keys_first(quantized, keys)
    for causal in (False, True):
        out = onepass.attention(given, causal=causal, backend=BACKEND)
        assert (out == 1).all(), float(out.float().mean())


@SUMS
def test_values_with_a_mean_keep_it(head_dim, keys):
    """With scores of N(0, 1) and V of mean 1, out keeps that mean. Rounding P takes about 0.1 percent of out; a single
    sum would take 18 percent at 16384 keys."""
    q, k, v = long_call(head_dim, keys)
    quantized = onepass.quantize_fp8(q, k, v + 1)
    out = onepass.attention(quantized, backend=BACKEND).double()
    tensors = (t.double() for t in quantized.dequantize())
    expected = onepass.attention(*tensors, backend="tiled")
    for h in range(2):
        x, ref = out[:, :, h], expected[:, :, h]
        assert abs(float((x * ref).sum() / ref.square().sum()) - 1) < 3e-3


def test_precision_and_gradients():
    q, k, v = (x.requires_grad_() for x in make(200, 333, 128, 128))
    both = []
    for precision in (None, "fp8"):
        out = onepass.attention(q, k, v, causal=True, precision=precision, backend=BACKEND)
        both.append(torch.cat([g.flatten() for g in torch.autograd.grad(out.sum(), (q, k, v))]).float())
    assert torch.nn.functional.cosine_similarity(*both, 0) > 0.98


def test_the_same_bits():
    quantized = onepass.quantize_fp8(*make(500, 700, 128, 128))
    first = onepass.attention(quantized, causal=True, backend=BACKEND)
    assert all(torch.equal(onepass.attention(quantized, causal=True, backend=BACKEND), first) for _ in range(50))

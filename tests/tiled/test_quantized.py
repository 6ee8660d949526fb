"""FP8 attention on the CPU: descales, rotation, subtracted means, and values against float64."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from tensor_cores import e4m3_matmul
from torch.utils.flop_counter import FlopCounterMode

import onepass
from onepass import reference
from onepass.ops import quantize
from onepass.quantization import codec, dequantize, layout, rotation
from onepass.testing import compare_gradients, fp8_budget, table3

INT32 = torch.int32
GRANULARITIES = ["row", "block", "head", "tensor"]
# One rounding to e4m3 is off by at most half a unit of its 4 significant bits, 2^-4 of the value.
HALF_UNIT = 2.0**-4


def make(batch=2, seqlen_q=70, seqlen_k=150, heads_q=4, heads_kv=2, head_dim=32, head_dim_v=24, dtype=torch.float32):
    shapes = (seqlen_q, heads_q, head_dim), (seqlen_k, heads_kv, head_dim), (seqlen_k, heads_kv, head_dim_v)
    return [torch.randn(batch, *shape).to(dtype) for shape in shapes]


def make_packed(lengths_q=(5, 0, 70, 33), lengths_k=(9, 4, 130, 66), slack=3, heads_q=4, heads_kv=2, head_dim=32):
    def cu_seqlens(lengths):
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=INT32)

    tensors = [
        # multiples of 1/8: their sums are exact in any order
        torch.randint(-16, 17, (sum(lengths) + slack, heads, head_dim)) / 8
        for lengths, heads in ((lengths_q, heads_q), (lengths_k, heads_kv), (lengths_k, heads_kv))
    ]
    return tensors, {"cu_seqlens_q": cu_seqlens(lengths_q), "cu_seqlens_k": cu_seqlens(lengths_k)}


def check(quantized, options):
    """Compare a call with float64 attention of the dequantized tensors, within the rounding of P."""
    out, lse = onepass.attention(quantized, **options, return_lse=True)
    check_values(out, lse, fp8_budget(*quantized.dequantize(), out.dtype, **options))


def check_values(out, lse, budget):
    oracle = budget.oracle
    assert ((out.double() - oracle.out).abs() <= budget.out).all()
    assert budget.scale(out).ok, budget.scale(out)
    is_empty = oracle.lse == -math.inf
    assert torch.equal(lse == -math.inf, is_empty)
    assert ((lse.double() - oracle.lse).masked_fill(is_empty, 0.0).abs() <= budget.lse).all()
    assert (out[is_empty.transpose(1, 2)] == 0).all()


OPTIONS = {
    "no options": {},
    "causal": {"causal": True},
    "window": {"window": (40, 3)},
    "softcap": {"softcap": 2.0},
    "scale": {"softmax_scale": 0.7},
    "sinks": {"sinks": torch.tensor([0.5, -3.0, 4.0, 0.0])},
    "seqused_k": {"seqused_k": torch.tensor([150, 17], dtype=INT32), "causal": True},
    "sinks, empty rows": {
        "seqused_k": torch.tensor([3, 0], dtype=INT32),
        "causal": True,
        "sinks": torch.tensor([0.5, -3.0, 4.0, 0.0]),
    },
    "empty rows": {"seqused_k": torch.tensor([3, 0], dtype=INT32), "causal": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(options):
    used = options.get("seqused_k")
    check(onepass.quantize_fp8(*make(), seqused_k=used), options)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_granularities(granularity, dtype):
    quantized = onepass.quantize_fp8(*make(dtype=dtype), granularity=granularity)
    shapes = {
        "row": ((2, 4, 70), (2, 2, 150)),
        "block": ((2, 4, 2), (2, 2, 3)),
        "head": ((2, 4), (2, 2)),
        "tensor": ((), ()),
    }[granularity]
    assert (quantized.q_descale.shape, quantized.k_descale.shape) == shapes
    assert quantized.v_descale.shape == quantized.k_descale.shape
    assert all(t.dtype == torch.float8_e4m3fn for t in (quantized.q, quantized.k, quantized.v))
    assert onepass.attention(quantized).dtype == dtype
    check(quantized, {"causal": True})


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("rotate", [False, True])
def test_stored_values_times_descales_are_the_tensors(granularity, rotate):
    """Each value is within half a unit, or half the distance of the smallest numbers, of the rotated tensors."""
    q, k, v = make(head_dim=40)
    k[0, 3] *= 1000.0  # a large value must not change the descale of other blocks, heads or rows
    quantized = onepass.quantize_fp8(q, k, v, granularity=granularity, rotate=rotate)
    if rotate:
        q, k = rotation.rotated(q, 0), rotation.rotated(k, 0)
    for name, t, dequantized in zip("qkv", (q, k, v), quantized.dequantize(), strict=True):
        block = quantized.q_block if name == "q" else quantized.kv_block
        descale = dequantize.row_scales(t, getattr(quantized, f"{name}_descale"), block, None)
        slack = 1.3 if granularity == "row" else 1.0  # the descales of rows are fitted afterwards
        assert ((dequantized - t).abs() <= slack * torch.maximum(HALF_UNIT * t.abs(), 2.0**-10 * descale)).all(), name
    others = quantized.k_descale.flatten()
    is_large = others > 20 * others.min()
    expected = {"row": 2, "block": 2, "head": 2, "tensor": 0}[granularity]  # two heads
    assert is_large.sum() == expected


def test_rows_of_one_scale_are_the_better_the_fewer():
    q, k, v = make(seqlen_q=256, seqlen_k=512, head_dim=64)
    k = (
        k * torch.exp(3 * torch.randn(2, 512, 1, 1)) / 20
    )  # magnitudes of rows differ, and small rows need their own descale
    errors = []
    for granularity in GRANULARITIES:
        _, stored, _ = onepass.quantize_fp8(q, k, v, granularity=granularity, rotate=False).dequantize()
        errors.append(((stored - k) / k.norm(dim=-1, keepdim=True)).square().mean().sqrt())
    assert errors[0] < 0.95 * errors[1] < 0.9 * errors[2]


def test_a_row_with_nan_is_not_lost():
    x = torch.randn(1, 20, 1, 64)
    x[0, 3, 0, 5] = torch.nan
    _, stored, _ = onepass.quantize_fp8(x, x, x, granularity="row", rotate=False).dequantize()
    is_lost = stored[0].isnan().any(-1)
    assert is_lost.flatten().nonzero().flatten().tolist() == [3]


def test_scales_of_rows_are_searched():
    x = torch.randn(1, 500, 1, 64)
    _, stored, _ = onepass.quantize_fp8(x, x, x, granularity="row", rotate=False).dequantize()
    scale = x.abs().amax(-1, keepdim=True) / 448
    by_maximum = (x / scale).to(torch.float8_e4m3fn).float() * scale
    assert (stored - x).square().mean() < 0.88 * (by_maximum - x).square().mean()


# ---------------------------------------------------------------- the sums of Hopper's tensor cores


def hopper(quantized, scale, *, q_fault=1.0, k_scales=None, keys=slice(None)):
    """out and lse of one head by the sums of a Hopper kernel, otherwise in float64, with optional faults."""
    _, k, v = quantized.dequantize()
    k_scales = quantized.k_descale[0, 0] if k_scales is None else k_scales
    q_scale = quantized.q_descale[0, 0].repeat_interleave(64)[: quantized.q.shape[1]] * q_fault
    k_scale = k_scales.repeat_interleave(64)[: k.shape[1]]
    s = e4m3_matmul(quantized.q[0, :, 0].float(), quantized.k[0, :, 0].float().T)
    s = (s * q_scale[:, None] * k_scale * scale)[:, keys]
    largest = s.amax(-1, keepdim=True)
    p = torch.exp(s - largest)
    out = (p.float() * 256).to(torch.float8_e4m3fn).double() / 256 @ v[0, keys, 0].double() / p.sum(-1, keepdim=True)
    return out[None, :, None], s.logsumexp(-1)[None, None]


def shares(result, budget):
    """The largest errors of out and of lse, as fractions of the budget."""
    out, lse = result
    errors = (out - budget.oracle.out).abs() / budget.out, (lse - budget.oracle.lse).abs() / budget.lse
    return [float(e.max()) for e in errors]


@pytest.mark.parametrize("largest", [False, True], ids=["normal", "scores of 121"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_short_sums_are_within_their_budget(head_dim, largest):
    q, k, v = make(1, 64, 256, 1, 1, head_dim, 32)
    scale = 1.0 if largest else head_dim**-0.5
    if largest:  # query i sees key i with a score of 121
        k = torch.nn.functional.normalize(k, dim=-1) * 11
        q = k[:, :64]
    quantized = onepass.quantize_fp8(q, k, v)
    budget, exact = (
        fp8_budget(*quantized.dequantize(), torch.float32, short_sums=short, softmax_scale=scale)
        for short in (True, False)
    )
    out_share, lse_share = shares(hopper(quantized, scale), budget)
    assert out_share < 1
    assert lse_share < 1
    if largest:  # the budget is not far too large, either
        assert shares(hopper(quantized, scale), exact)[1] > 10

    # faults of a kernel exceed the budget
    scales = quantized.k_descale[0, 0]
    faults = [{"q_fault": 1.02}, {"keys": slice(64, None)}]
    if not largest:  # the first block has all the probability there
        faults += [{"k_scales": scales.roll(1)}, {"k_scales": scales[:1].expand(4)}, {"keys": slice(0, -1)}]
    for fault in faults:
        assert max(shares(hopper(quantized, scale, **fault), budget)) > 1.2, fault


@pytest.mark.parametrize(("keys", "left"), [(2048, 1.0), (8192, 0.79), (16384, 0.571), (65536, 0.143)])
def test_a_long_sum_of_e4m3_products_stops_growing(keys, left):
    """q = 0 and v = 1: an H200 gave out = 1.000, 0.789, 0.570 and 0.143 with one sum, and 1 with sums of 128 keys."""
    p, v = torch.full((1, keys), 64.0), torch.full((keys, 1), 448.0)
    assert float(e4m3_matmul(p, v)) / (64 * 448 * keys) == pytest.approx(left, abs=2e-3)
    assert float(e4m3_matmul(p, v, sum_length=128)) == 64 * 448 * keys


def test_what_sums_of_values_with_a_mean_lose():
    """Scores of N(0, 1), V of mean 1, 16384 keys: an H200 lost 18.4 % with one sum, and 0.1 % with sums of 128 keys."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(8, 16384, generator=generator).softmax(-1)
    p = (64 * p / p.amax(-1, keepdim=True)).to(torch.float8_e4m3fn).double()
    v = torch.randn(16384, 16, generator=generator) + 1
    v = (448 * v / v.abs().amax()).to(torch.float8_e4m3fn).double()
    exact = p @ v

    def share_lost(sum_length):
        return 1 - float((e4m3_matmul(p, v, sum_length) * exact).sum() / exact.square().sum())

    assert 0.17 < share_lost(None) < 0.20
    assert share_lost(128) < 5e-4


# ---------------------------------------------------------------- V with its keys last


def key_at_positions():
    """The key at each of 64 positions: within 16, position 4q + 2h + e holds key 8h + 2q + e."""
    places = range(64)
    return torch.tensor([p // 16 * 16 + 8 * (p // 2 % 2) + 2 * (p % 16 // 4) + p % 2 for p in places])


def test_keys_last():
    v = torch.randn(2, 41, 3, 24).to(torch.float8_e4m3fn)
    last = quantize.keys_last(v)
    assert last.shape == (2, 3, 24, 64)
    assert last.is_contiguous()
    expected = torch.zeros(2, 64, 3, 24)
    expected[:, :41] = v.float()
    assert torch.equal(last.float().permute(0, 3, 1, 2), expected[:, key_at_positions()])
    assert torch.equal(layout.keys_first(last, 41).float(), v.float())


def test_keys_last_of_packed_sequences():
    lengths = [70, 0, 1, 64, 130]
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=INT32)
    v = torch.randn(268, 3, 24).to(torch.float8_e4m3fn)  # 3 rows belong to no sequence
    last = quantize.keys_last(v, cu_seqlens)
    assert last.shape == (3, 24, (268 // 64 + 5) * 64)
    expected = torch.zeros(last.shape)
    for b, (start, length) in enumerate(zip(cu_seqlens.tolist(), lengths, strict=False)):
        alone = quantize.keys_last(v[None, start : start + length])[0].float()
        place = (start // 64 + b) * 64
        expected[..., place : place + alone.shape[-1]] = alone
    assert torch.equal(last.float(), expected)
    back = layout.keys_first(last, 268, cu_seqlens).float()
    assert torch.equal(back[:265], v[:265].float())
    assert (back[265:] == 0).all()


@pytest.mark.parametrize("packed", [False, True])
def test_v_with_its_keys_last_gives_the_same_result(packed):
    tensors, offsets = make_packed() if packed else (make(), {})
    function = onepass.attention_varlen if packed else onepass.attention
    quantized = onepass.quantize_fp8(*tensors, **offsets)
    last = replace(quantized, v=quantize.keys_last(quantized.v, offsets.get("cu_seqlens_k")), v_keys_last=True)
    assert torch.equal(function(last, causal=True, **offsets), function(quantized, causal=True, **offsets))
    for a, b in zip(last.dequantize(**offsets), quantized.dequantize(**offsets), strict=True):
        torch.testing.assert_close(a[: len(b) - 3 * packed], b[: len(b) - 3 * packed], atol=0, rtol=0)
    if not packed:
        with FlopCounterMode(display=False) as flops, torch.no_grad():
            onepass.attention(last)
        assert flops.get_total_flops() == 2 * 2 * 4 * 70 * 150 * (32 + 24)


def test_a_wrong_shape_with_keys_last_is_refused():
    quantized = onepass.quantize_fp8(*make())
    with pytest.raises(ValueError, match=r"v: expected shape \(2, 2, 2, 192\) with v_keys_last, got \(2, 150, 2, 24\)"):
        replace(quantized, v_keys_last=True)
    with pytest.raises(TypeError, match=r"v_keys_last: expected a bool, got 1"):
        replace(quantized, v_keys_last=1)
    tensors, offsets = make_packed()
    packed = onepass.quantize_fp8(*tensors, **offsets)
    last = replace(packed, v=quantize.keys_last(packed.v, offsets["cu_seqlens_k"]), v_keys_last=True)
    two = {name: t[[0, 3]] for name, t in offsets.items()}
    with pytest.raises(ValueError, match=r"v: expected shape \(2, 32, 256\) with v_keys_last, got \(2, 32, 448\)"):
        onepass.attention_varlen(last, **two)


# ---------------------------------------------------------------- rotation


@pytest.mark.parametrize("head_dim", [1, 2, 7, 64, 80, 96, 128, 192, 256])
def test_rotation_is_orthogonal(head_dim):
    matrix = rotation.rotated(torch.eye(head_dim), 5)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim), atol=1e-6, rtol=0)
    x, y = torch.randn(2, 10, head_dim)
    torch.testing.assert_close(rotation.rotated(x, 5) @ rotation.rotated(y, 5).T, x @ y.T, atol=1e-4, rtol=1e-5)


def test_rotation_spreads_an_outlier():
    for head_dim, largest_block in ((64, 64), (96, 64), (128, 128)):
        x = torch.zeros(1, head_dim)
        x[0, 3] = 100.0
        assert rotation.rotated(x, 0).abs().max().item() == pytest.approx(100.0 * largest_block**-0.5)


def test_rotation_depends_on_the_seed_alone():
    q, k, v = make()
    first, again, other = (onepass.quantize_fp8(q, k, v, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.k.view(torch.uint8), again.k.view(torch.uint8))
    assert not torch.equal(first.k.view(torch.uint8), other.k.view(torch.uint8))
    assert (first.rotation, other.rotation) == (3, 4)
    assert onepass.quantize_fp8(q, k, v, rotate=False).rotation is None


@pytest.mark.parametrize("seed", range(4))
def test_rotation_brings_down_the_largest_error_of_a_score(seed):
    """Outliers of a query and a key in one column multiply their rounding errors; the rotation prevents it."""
    q, k = (table3.with_outliers(1024, torch.Generator().manual_seed(i)) for i in (2 * seed, 2 * seed + 1))
    exact = q[0, :, 0].double() @ k[0, :, 0].double().T
    errors = []
    for rotate in (False, True):
        stored_q, stored_k, _ = onepass.quantize_fp8(q, k, k, rotate=rotate, seed=seed).dequantize()
        errors.append((stored_q[0, :, 0].double() @ stored_k[0, :, 0].double().T - exact).abs().max().item())
    assert errors[1] < 0.8 * errors[0], errors


# ---------------------------------------------------------------- what is subtracted

CENTERED = [{"center_k": True}, {"center_v": True}, {"center_k": True, "center_v": True}]


@pytest.mark.parametrize("centered", CENTERED, ids=str)
@pytest.mark.parametrize(
    "name", ["no options", "causal", "window", "scale", "sinks", "seqused_k", "empty rows", "sinks, empty rows"]
)
def test_means_come_back(centered, name):
    """k and v have large means: unsubtracted, they would be rounded to multiples of 4, far beyond the budget."""
    options = OPTIONS[name]
    q, k, v = make()
    k, v = k + 8 * torch.randn(2, 1, 2, 32), v + 40
    used = options.get("seqused_k")
    quantized = onepass.quantize_fp8(q, k, v, seqused_k=used, **centered)
    out, lse = onepass.attention(quantized, **options, return_lse=True)
    # the oracle takes the stored tensors and adds the means in full precision
    stored_q, stored_k, stored_v = (x.double() for x in quantized.dequantize())
    if quantized.score_shift is not None:  # one more column of q and k adds it to each score of a row
        column = quantized.score_shift.double().transpose(1, 2)[..., None]
        stored_q, stored_k = torch.cat([stored_q, column], -1), torch.cat([stored_k, torch.ones(2, 150, 2, 1)], -1)
    options = {"softmax_scale": 32**-0.5, **options}
    # P is rounded before its product with the stored v
    budget = fp8_budget(stored_q, stored_k, stored_v, out.dtype, **options)
    if quantized.v_mean is not None:
        stored_v = stored_v + quantized.v_mean.double()[:, None]
        oracle = reference.attention(stored_q, stored_k, stored_v, **options)
        budget = budget._replace(oracle=oracle, out=budget.out + 1e-5 * 40)
    check_values(out, lse, budget)
    if "center_v" in centered:
        truth = reference.attention(q, k, v, **options).out
        assert (out.double() - truth).abs().max() < 8.0  # the mean is 40


def test_subtracting_the_mean_helps_where_there_is_one():
    q, k, v = make(seqlen_k=400)
    k, v = k + 5 * torch.randn(2, 1, 2, 32), v + 10
    exact = reference.attention(q, k, v).out
    plain_torch, centered = (
        (onepass.attention(onepass.quantize_fp8(q, k, v, center_k=c, center_v=c)).double() - exact).square().mean()
        for c in (False, True)
    )
    assert centered.sqrt() < 0.5 * plain_torch.sqrt()


# ---------------------------------------------------------------- packed sequences


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("centered", "has_sinks"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("used", [None, [9, 0, 100, 66]])
def test_packed_sequences_are_those_one_by_one(granularity, centered, has_sinks, used):
    """A sequence has the descales, means and results that it has alone, whatever lies beside it."""
    (q, k, v), cu = make_packed()
    k, v = k + 2.0, v + 3.0
    k[148:] = v[148:] = 1e6  # rows of the last sequence, and past the end of all
    if used is not None:
        k[9 + 4 + 100 : 9 + 4 + 130] = v[9 + 4 + 100 : 9 + 4 + 130] = math.nan
    seqused_k = None if used is None else torch.tensor(used, dtype=INT32)
    options = {"granularity": granularity, "center_k": centered, "center_v": centered}
    sinks = OPTIONS["sinks"]["sinks"] if has_sinks else None
    quantized = onepass.quantize_fp8(q, k, v, **options, **cu, seqused_k=seqused_k)
    out, lse = onepass.attention_varlen(quantized, causal=True, **cu, seqused_k=seqused_k, sinks=sinks, return_lse=True)
    starts_q, starts_k = cu["cu_seqlens_q"].tolist(), cu["cu_seqlens_k"].tolist()
    largest = 0.0
    for b in range(4):
        rows, keys = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        if used is not None:
            keys = slice(keys.start, keys.start + used[b])
        alone = onepass.quantize_fp8(q[None, rows], k[None, keys], v[None, keys], **options)
        one = onepass.attention(alone, causal=True, sinks=sinks, return_lse=True)
        if granularity != "tensor":
            for name in ("q", "k", "v"):
                where = rows if name == "q" else keys
                assert torch.equal(
                    getattr(quantized, name)[where].view(torch.uint8), getattr(alone, name)[0].view(torch.uint8)
                )
            torch.testing.assert_close(out[rows], one.out[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(lse[:, rows], one.lse[0], atol=1e-5, rtol=1e-5)
        if one.out.numel():
            largest = max(largest, one.out.abs().max().item())
    assert largest > 0
    assert torch.isfinite(out).all()
    assert (out[108:] == 0).all()
    assert (lse[:, 108:] == -math.inf).all()


def test_descales_of_packed_blocks_lie_where_they_are_said_to():
    (q, k, v), cu = make_packed()
    quantized = onepass.quantize_fp8(q, k, v, rotate=False, **cu)
    assert quantized.k_descale.shape == (2, (209 + 3) // 64 + 4)
    assert quantized.q_descale.shape == (4, (108 + 3) // 64 + 4)
    start = 13 // 64 + 2  # sequence 2 begins at row 13
    expected = torch.stack([k[13 + 64 * i : min(13 + 64 * (i + 1), 143)].abs().amax((0, 2)) for i in range(3)], 1)
    torch.testing.assert_close(quantized.k_descale[:, start : start + 3], expected / 448.0)


@pytest.mark.parametrize("centered", CENTERED, ids=str)
def test_sinks_of_any_size_beside_means(centered):
    """A sink of +inf takes all of the probability, one of -inf or of -1e4 takes none, and 100 is above every score."""
    q, k, v = make()
    sinks = torch.tensor([math.inf, -math.inf, -1e4, 100.0])
    options = {"window": (None, -100)}  # the first rows see no key
    quantized = onepass.quantize_fp8(q, k, v + 3, **centered)
    out, lse = onepass.attention(quantized, **options, sinks=sinks, return_lse=True)
    without, lse_without = onepass.attention(quantized, **options, return_lse=True)
    assert out.isfinite().all()
    is_empty = lse_without == -torch.inf
    assert is_empty.any()
    assert not is_empty.all()
    torch.testing.assert_close(lse, torch.where(is_empty, sinks[:, None], torch.logaddexp(lse_without, sinks[:, None])))
    share = torch.where(is_empty, 0.0, torch.exp(lse_without - lse)).transpose(1, 2)[..., None]
    share[:, :, 0] = 0.0
    torch.testing.assert_close(out, without * share, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_rows_of_no_sequence_reach_no_scale(granularity):
    (q, k, v), cu = make_packed()
    tensors = [torch.cat([t, torch.zeros(5, *t.shape[1:], dtype=t.dtype)]) for t in (q, k, v)]
    clean = onepass.quantize_fp8(*tensors, granularity=granularity, **cu)
    for t in tensors:
        t[-5:] = 1e4
    loud = onepass.quantize_fp8(*tensors, granularity=granularity, **cu)
    for name in ("q_descale", "k_descale", "v_descale"):
        assert torch.equal(getattr(loud, name), getattr(clean, name)), name


# ---------------------------------------------------------------- P, NaN, layouts


def test_probabilities_are_rounded_as_a_cast_would():
    p = torch.cat([torch.rand(10000), torch.exp2(-25 * torch.rand(10000)), torch.arange(4097) / 4096])
    p = torch.cat([p, torch.arange(4096) * 2.0**-19])  # ties, and values around the smallest number
    rounded = p.clone()
    codec.round_probabilities_(rounded, torch.empty_like(p))
    assert torch.equal(rounded, (p * codec.P_SCALE).to(torch.float8_e4m3fn).float() / codec.P_SCALE)
    nan = torch.tensor([math.nan])
    codec.round_probabilities_(nan, torch.empty_like(nan))
    assert nan.isnan().all()


def test_p_is_rounded():
    """With one row, two keys and values 0 and 1, out is the second probability, rounded relative to the first."""
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([2.0, 1.0]).view(1, 2, 1, 1)
    v = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1)
    out = onepass.attention(onepass.quantize_fp8(q, k, v, rotate=False), softmax_scale=1.0)
    p = math.exp(-1.0)
    rounded = torch.tensor(256 * p).to(torch.float8_e4m3fn).float().item() / 256
    assert abs(rounded - p) > 0.005
    assert out.item() == pytest.approx(rounded / (1 + p), rel=1e-5)


def test_scores_far_below_zero_leave_p_its_bits():
    """P is rounded relative to its row's maximum: alone, a P of e^-12 would be rounded by a quarter."""
    q, k, v = make(batch=1, seqlen_q=3, seqlen_k=256)
    q[:], k[:] = 0.1 * q, 0.1 * k
    q[..., 0], k[..., 0] = 8.0, -8.0
    quantized = onepass.quantize_fp8(q, k, v + 1.0)
    out = onepass.attention(quantized, softmax_scale=12 / 64)
    exact = reference.attention(*quantized.dequantize(), softmax_scale=12 / 64)
    assert (exact.lse - (math.log(256) - 12)).abs().max() < 1.0
    torch.testing.assert_close(out.double(), exact.out, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("granularity", codec.GRANULARITIES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_descale_is_that_of_the_finite_values(granularity, value):
    """A descale fits the finite values of its part, even if all of them are small."""
    x = 0.01 * torch.randn(1, 50, 1, 16)
    k = x.clone()
    k[0, 5, 0, 3] = value
    without = x.clone()
    without[0, 5, 0, 3] = 0.0
    options = {"granularity": granularity, "rotate": False}
    found, expected = (onepass.quantize_fp8(x, t, x, **options).k_descale for t in (k, without))
    if granularity == "row":  # of its own row, none of the candidates is the best one
        found, expected = (torch.cat((t[..., :5], t[..., 6:]), -1) for t in (found, expected))
    assert torch.equal(found, expected)


def test_nan_stays_in_its_rows():
    q, k, v = make()
    q[0, 5, 1, 3], k[1, 120, 0, 2], v[0, 140, 1, 7] = math.nan, math.inf, math.nan
    quantized = onepass.quantize_fp8(q, k, v, center_k=True, center_v=True)
    assert all(t.isfinite().all() for t in quantized.descales)
    without = onepass.quantize_fp8(q, k, v).v_descale[0, 1, 2].item()
    assert without == pytest.approx(v[0, 128:, 1].nan_to_num(0.0).abs().max().item() / 448)
    out = onepass.attention(quantized, causal=True)
    is_nan = torch.zeros_like(out, dtype=torch.bool)
    is_nan[0, 5, 1] = True
    is_nan[1, 40:, :2] = True  # query i sees keys up to i + 80
    is_nan[0, 60:, 2:, 7] = True
    assert torch.equal(out.isnan(), is_nan)


def test_zeros():
    q, k, v = make()
    out = onepass.attention(onepass.quantize_fp8(0 * q, k, 0 * v))
    assert (out == 0).all()
    # a block of zeros has a descale below all others, because the Hopper kernel scales P by the largest
    v[:, 64:] = 0.0
    scales = onepass.quantize_fp8(q, k, v).v_descale
    assert v.shape[1] > 64
    assert (scales[..., 1:] < scales[..., :1]).all()
    for scale in (1e-44, 1e37):
        quantized = onepass.quantize_fp8(q, k, v * scale)
        assert quantized.dequantize()[2].isfinite().all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_descales_are_numbers_above_zero_whatever_the_values_are(granularity):
    """Rows of zeros, of NaN, of infinity, and of numbers that are not normal, among others."""
    tensors = make()
    for t in tensors:
        for row, value in enumerate((0.0, math.nan, math.inf, -math.inf, 1e-45, 3e38)):
            t[:, 64 * row : 64 * row + 3] = value
            t[1, row] = value
    quantized = onepass.quantize_fp8(*tensors, granularity=granularity, rotate=False)
    for descale in quantized.descales:
        assert descale.isfinite().all()
        assert (descale > 0).all()


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_no_rows_no_keys(shape, granularity):
    batch, seqlen_q, seqlen_k = shape
    q, k, v = make(batch, seqlen_q, seqlen_k)
    out = onepass.attention(onepass.quantize_fp8(q, k, v, granularity=granularity, center_k=True, center_v=True))
    assert out.shape == (batch, seqlen_q, 4, 24)
    assert (out == 0).all()


def test_layout_is_that_of_q():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in make())
    quantized = onepass.quantize_fp8(q, k, v)
    assert quantized.q.stride() == q.stride()
    out = onepass.attention(quantized)
    assert out.transpose(1, 2).is_contiguous()
    assert torch.equal(out, onepass.attention(onepass.quantize_fp8(*(t.contiguous() for t in (q, k, v)))))


def test_inputs_are_left_alone():
    tensors = make()
    before = [t.clone() for t in tensors]
    onepass.quantize_fp8(*tensors, center_k=True, center_v=True, seqused_k=torch.tensor([3, 9], dtype=INT32))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_tensors_that_were_quantized_by_other_code():
    q, k, v = (x.clamp(-4, 4) * 100 for x in make())
    stored = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    by_head = torch.tensor([[0.5, 2.0], [1.0, 4.0]]) / 100
    quantized = onepass.QuantizedQKV(*stored, torch.tensor(0.01), by_head, by_head, dtype=torch.float16)
    check(quantized, {"causal": True})
    expected = stored[1].float() * by_head[:, None, :, None]
    assert torch.equal(quantized.dequantize()[1], expected)
    blocks = torch.rand(2, 2, 5) + 0.01
    quantized = onepass.QuantizedQKV(*stored, torch.tensor(0.01), blocks, by_head, kv_block=32)
    assert torch.equal(quantized.dequantize()[1][1, 40, 1], stored[1][1, 40, 1].float() * blocks[1, 1, 1])


# ---------------------------------------------------------------- precision="fp8"


@pytest.mark.parametrize("name", ["no options", "causal", "softcap", "sinks", "seqused_k"])
def test_precision_is_quantize_and_attention(name):
    options = OPTIONS[name]
    q, k, v = make(dtype=torch.bfloat16)
    quantized = onepass.quantize_fp8(q, k, v, seqused_k=options.get("seqused_k"))
    expected = onepass.attention(quantized, **options, return_lse=True)
    out, lse = onepass.attention(q, k, v, precision="fp8", **options, return_lse=True)
    assert torch.equal(out, expected.out)
    assert torch.equal(lse, expected.lse)
    assert not torch.equal(out, onepass.attention(q, k, v, **options))


def test_precision_of_packed_sequences():
    (q, k, v), cu = make_packed()
    out = onepass.attention_varlen(q, k, v, precision="fp8", **cu)
    expected = onepass.attention_varlen(onepass.quantize_fp8(q, k, v, **cu), **cu)
    assert torch.equal(out, expected)


def test_gradients_are_those_of_exact_attention_with_this_out_and_lse():
    """Expected gradients are float64, with P from scores and lse of the FP8 forward, and delta from its out."""
    q, k, v = (x.requires_grad_() for x in make(heads_kv=4, dtype=torch.bfloat16))
    sinks = torch.tensor([0.5, -3.0, 4.0, 0.0], requires_grad=True)
    out, lse = onepass.attention(q, k, v, causal=True, sinks=sinks, precision="fp8", return_lse=True)
    dout, dlse = torch.randn(out.shape).to(out), torch.randn(lse.shape)
    gradients = torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), (q, k, v, sinks))
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        x_q, x_k, x_v, x_out, x_dout = (x.detach().to(dtype).transpose(1, 2) for x in (q, k, v, out, dout))
        x_lse = lse.to(dtype)[..., None]
        visible = torch.ones(70, 150, dtype=torch.bool).tril(80)
        p = torch.exp((x_q @ x_k.mT * 32**-0.5) - x_lse).masked_fill(~visible, 0.0)
        delta = (x_dout * x_out).sum(-1, keepdim=True) - dlse.to(dtype)[..., None]
        ds = p * (x_dout @ x_v.mT - delta)
        dsinks = -(torch.exp(sinks.detach().to(dtype)[:, None, None] - x_lse) * delta).sum((0, 2, 3))
        tensors = ds @ x_k * 32**-0.5, ds.mT @ x_q * 32**-0.5, p.mT @ x_dout
        results.append([*(x.transpose(1, 2) for x in tensors), dsinks])
    for name, actual, oracle, plain_torch in zip(("dq", "dk", "dv", "dsinks"), gradients, *results, strict=True):
        comparison = compare_gradients(name, actual, oracle, plain_torch)
        assert comparison.ok, comparison


def test_training_finds_the_way_down():
    """Gradients of the FP8 forward agree with those of exact attention within the precision of FP8."""
    q, k, v = (x.requires_grad_() for x in make())
    target = torch.randn(2, 70, 4, 24)
    both = []
    for precision in (None, "fp8"):
        loss = (onepass.attention(q, k, v, precision=precision) - target).square().mean()
        both.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, (q, k, v))]))
    assert torch.nn.functional.cosine_similarity(*both, 0) > 0.99
    assert not torch.equal(*both)


def test_under_compile():
    q, k, v = (x.requires_grad_() for x in make())

    def step(q, k, v):
        return onepass.attention(q, k, v, causal=True, precision="fp8")

    out = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(out, step(q, k, v))
    out.sum().backward()
    assert q.grad.abs().sum() > 0

    def quantized(q, k, v):
        return onepass.attention(onepass.quantize_fp8(q, k, v, center_k=True, center_v=True, seed=2), causal=True)

    given = [x.detach() for x in (q, k, v)]
    out = torch.compile(quantized, fullgraph=True, backend="aot_eager")(*given)
    assert torch.equal(out, quantized(*given))


def test_operators():
    q, k, v = make(seqlen_q=9, seqlen_k=12)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = (32**-0.5, None, 0, None, False, "tiled", None)
    torch.library.opcheck(torch.ops.onepass.attention_fp8, (*leaves, None, None, None, None, *options, "tiled", False))
    quantized = onepass.quantize_fp8(*(x.detach() for x in leaves))
    tensors = quantized.q, quantized.k, quantized.v, None, None, None, None
    arguments = (*tensors, *options, *quantized.descales, torch.float16, 64, 64, False, True)
    # the other checks compute with copies of the tensors, and FP8 has no arithmetic
    torch.library.opcheck(torch.ops.onepass.attention_quantized, arguments, test_utils="test_faketensor")


def test_flops_are_those_of_attention():
    q, k, v = make()
    counts = []
    for call in (
        lambda: onepass.attention(q, k, v, causal=True),
        lambda: onepass.attention(q, k, v, causal=True, precision="fp8"),
        lambda: onepass.attention(onepass.quantize_fp8(q, k, v, rotate=False), causal=True),
    ):
        with FlopCounterMode(display=False) as counter:
            call()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == counts[2] > 0


def test_autocast():
    q, k, v = make()
    with torch.autocast("cpu", torch.bfloat16):
        assert onepass.attention(q, k, v, precision="fp8").dtype == torch.bfloat16

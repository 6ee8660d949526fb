"""The error budget finds faults of scale wherever they sit, and does not take honest rounding for a fault."""

import functools
import math
import re

import pytest
import torch
from random_calls import random_call

import onepass
from onepass import reference
from onepass.bench.cases import Case, make_inputs
from onepass.bench.check import Oracle
from onepass.testing import Call, compare, compare_gradients, compare_lse, fp8_budget
from onepass.testing.budget import GRADIENT_FACTOR, OUT_FACTOR

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = "out", "dq", "dk", "dv"
# the faults that have to be found: 1 % in bfloat16 and so on
FAULTS = {BF16: 0.01, FP16: 0.003, FP32: 0.001}
SEQLEN = 512
ROWS = {
    "all": (...,),
    "second half": (slice(None), slice(SEQLEN // 2, None)),
    "one block of rows": (slice(None), slice(192, 256), 1),
    "first rows": (slice(None), slice(0, 64), 0),
    "last rows": (slice(None), slice(-64, None), 1),
    "one head": (slice(None), slice(None), 1),
}


def tensors(dtype, seqlen, head_dim=64, heads=2, heads_kv=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = 1, seqlen, heads, head_dim
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    return q, k[:, :, :heads_kv], v[:, :, :heads_kv], dout


def by_reference(dtype, q, k, v, dout, **options):
    """out, dq, dk and dv with every intermediate in one dtype."""
    leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
    out = reference.attention(*leaves, **options, compute_dtype=dtype).out
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))), strict=True))


def by_tiles(q, k, v, dout, **options):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = onepass.attention(*leaves, **options)
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, leaves, dout)), strict=True))


def as_kernels_round(q, k, v, dout, scale_of_scores=1.0):
    """Causal attention with P and ds rounded to 16 bits before their products, and delta from the rounded out."""
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    q, k, v, dout = (t.float().transpose(1, 2) for t in (q, k, v, dout))
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scale = q.shape[-1] ** -0.5 * scale_of_scores
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    s = (q @ k.mT * scale).masked_fill(hidden, -torch.inf)
    p = (s - s.amax(-1, keepdim=True)).exp()
    total = p.sum(-1, keepdim=True)
    out = (p.to(dtype).float() @ v / total).to(dtype)
    p = p / total
    ds = (p * (dout @ v.mT - (dout * out.float()).sum(-1, keepdim=True))).to(dtype).float()
    key_gradients = ds.mT @ q * scale, p.to(dtype).float().mT @ dout
    dk, dv = (t.unflatten(1, (-1, group)).sum(2) for t in key_gradients)
    return {n: t.to(dtype).transpose(1, 2) for n, t in zip(NAMES, (out, ds @ k * scale, dk, dv), strict=True)}


@functools.cache
def judged(dtype, seqlen=SEQLEN, seed=0):
    """A right result for each of out, dq, dk and dv, and the function that judges other results instead of it."""
    given = tensors(dtype, seqlen, seed=seed)
    right, exact, plain = (
        by_tiles(*given, causal=True),
        by_reference(torch.float64, *given, causal=True),
        by_reference(dtype, *given, causal=True),
    )
    floors = floors_of(*given, causal=True)
    return {
        name: (right[name], functools.partial(judge, name, exact=exact[name], plain=plain[name], floor=floors[name]))
        for name in NAMES
    }


def floors_of(q, k, v, dout, **options):
    oracle = reference.attention(q, k, v, **options)
    floors = Call({"q": q, "k": k, "v": v}, options)._floors(dout, torch.zeros_like(oracle.lse), oracle)
    return floors | {"out": 0.0}


def judge(name, actual, exact, plain, floor):
    function = compare if name == "out" else compare_gradients
    return function(name, actual, exact, plain, floor=floor)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FAULTS, ids=str)
def test_a_wrong_scale_is_found_wherever_it_sits(dtype, name, rows):
    right, judge_it = judged(dtype)[name]
    assert judge_it(right).ok
    for sign in (1, -1):
        wrong = right.clone()
        wrong[ROWS[rows]] = (wrong[ROWS[rows]].double() * (1 + sign * FAULTS[dtype])).to(dtype)
        row = judge_it(wrong)
        assert not row.scale.ok, row
        assert not row.ok
        assert row.share > 1


def test_the_largest_error_alone_does_not_see_a_twentieth_in_the_second_half():
    right, judge_it = judged(BF16)["out"]
    wrong = right.clone()
    wrong[:, SEQLEN // 2 :] *= 1.05
    row = judge_it(wrong)
    assert row.error <= row.budget
    assert not row.ok
    found = re.search(r"; scale off by \+(\S+) > (\S+) in rows (\d+) to (\d+), head [01]$", str(row))
    assert float(found[1]) == pytest.approx(0.05, rel=0.05)
    assert int(found[3]) >= SEQLEN // 2
    assert int(found[4]) == int(found[3]) + 63


SHAPES = {"short": (70, 32), "wide": (130, 128), "narrow": (64, 8), "few rows": (5, 8), "few values": (16, 2)}


@pytest.mark.parametrize("sharpness", [1.0, 4.0, 30.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FAULTS, ids=str)
def test_honest_rounding_passes_with_margin(dtype, shape, sharpness):
    """Problems of few values: rows whose scores leave one key, and float16 below its normal numbers, are among them."""
    seqlen, head_dim = SHAPES[shape]
    for seed in range(6):
        q, *rest = tensors(dtype, seqlen, head_dim, heads_kv=1 + seed % 2, seed=seed)
        given = q * sharpness, *rest
        exact, plain = (by_reference(d, *given, causal=True) for d in (torch.float64, dtype))
        floors = floors_of(*given, causal=True)
        results = [by_tiles(*given, causal=True)] + ([as_kernels_round(*given)] if dtype != FP32 else [])
        for actual in results:
            for name in NAMES:
                row = judge(name, actual[name], exact[name], plain[name], floors[name])
                assert row.scale.share < 0.5, (seed, row.scale)


@pytest.mark.parametrize("seeds", [range(5000, 5040), range(5040, 5080)], ids=str)
def test_random_problems_pass_with_margin(seeds):
    for seed in seeds:
        for row in random_call(seed, max_seqlen=100).check(with_floor=True):
            assert row.scale.share < 0.5, (seed, row.name, row.scale)


@pytest.mark.parametrize(("compared", "factor"), [(compare, 2), (compare_gradients, 3)])
def test_the_largest_error_is_a_multiple_of_that_of_plain_pytorch(compared, factor):
    oracle = torch.randn(4, 2, 8, dtype=torch.float64)
    plain = oracle + 0.1
    unit = torch.finfo(torch.float32).eps * float(oracle.abs().max())
    for share, ok in ((0.99, True), (1.01, False)):
        actual = oracle.clone()
        actual[1, 1, 1] += factor * 0.1 * share + unit * share
        row = compared("x", actual.float(), oracle, plain.float())
        assert (row.error <= row.budget) is ok


def test_a_block_without_values_has_no_scale():
    zeros = torch.zeros(1, 70, 2, 8, dtype=BF16)
    assert compare("dq", zeros, zeros.double(), zeros).ok
    row = compare("dq", zeros, zeros.double(), zeros, floor=1.0)
    assert row.scale.error == 0.0


def test_terms_that_cancel_are_noise():
    """With one key, ds = p (dp - delta) is the rounding of out, on whatever it is projected."""
    given = tensors(BF16, 1)
    exact = {n: t + 1e-9 * torch.randn(t.shape) for n, t in by_reference(torch.float64, *given).items()}
    floors = floors_of(*given)
    rounded = 1e-3 * torch.randn(1, 1, 2, 64)
    row = compare_gradients("dq", rounded.to(BF16), exact["dq"], exact["dq"].to(BF16), floors["dq"])
    assert row.scale.ok, row
    assert row.scale.budget > 1e3


def test_shapes_of_any_number_of_dimensions():
    for shape in ((64,), (100, 64), (100, 2, 64), (2, 100, 2, 64), (3, 2, 100, 2, 64)):
        exact = torch.randn(shape, dtype=torch.float64)
        plain = exact.to(FP16)
        assert compare("out", plain, exact, plain).ok
        wrong = compare("out", (exact * 1.003).to(FP16), exact, plain)
        assert not wrong.scale.ok, shape


def test_an_entry_and_packed_rows_have_blocks_of_their_own():
    exact = torch.randn(3, 200, 2, 64, dtype=torch.float64)
    wrong = exact.to(FP16)
    wrong[1, 128:, 0] *= 1.003
    row = compare("out", wrong, exact, exact.to(FP16))
    assert row.scale.where == "entry 1, rows 128 to 199, head 0"
    row = compare("out", wrong.flatten(0, 1), exact.flatten(0, 1), exact.to(FP16).flatten(0, 1))
    assert re.fullmatch(r"rows \d+ to \d+, head 0", row.scale.where)
    assert not row.ok


def test_wrong_places_of_nan_and_inf_fail_and_right_ones_are_not_projected_on():
    exact = torch.randn(1, 64, 1, 64, dtype=torch.float64)
    exact[0, 3, 0, 5], exact[0, 7, 0, 1] = torch.nan, -torch.inf
    plain = exact.to(FP16)
    row = compare("out", plain, exact, plain)
    assert row.ok
    assert abs(row.scale.error) < 1e-4
    assert not compare("out", plain.nan_to_num(0.0), exact, plain).ok
    assert not compare("out", plain.masked_fill(plain > 2, torch.nan), exact, plain).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lse_may_be_off_by_its_tolerance(dtype):
    absolute, relative = (1e-11, 1e-12) if dtype == torch.float64 else (1e-4, 1e-5)
    oracle = torch.tensor([[0.5, -20.0, -torch.inf, torch.inf]], dtype=torch.float64)
    assert compare_lse(oracle.to(dtype), oracle).ok
    for place, factor in ((0, 0.9), (0, 1.1), (1, 0.9), (1, 1.1)):
        moved = oracle.clone()
        moved[0, place] += factor * (absolute + relative * oracle[0, place].abs())
        found = compare_lse(moved.to(dtype), oracle)
        assert found.ok == (factor < 1)
        assert (found.where, found.budget) == ((0, place), 1.0)
        assert found.error == pytest.approx(factor, rel=0.05)
        assert found.rms_error == pytest.approx(float((moved - oracle)[0, place]) / 2, rel=0.05)
    for place, value in ((0, torch.nan), (0, -torch.inf), (2, 0.0), (2, torch.inf), (3, -torch.inf), (2, torch.nan)):
        wrong = oracle.clone()
        wrong[0, place] = value
        found = compare_lse(wrong.to(dtype), oracle)
        assert not found.ok
        assert found.where == (0, place)
    oracle[0, 0] = torch.nan
    assert compare_lse(oracle.to(dtype), oracle).ok
    assert compare_lse(torch.zeros(0, dtype=dtype), torch.zeros(0, dtype=torch.float64)).ok


def test_peers_have_a_wider_bar():
    exact = torch.randn(1, 1024, 1, 64, dtype=torch.float64)
    plain = exact.to(BF16)
    for factor, is_ok in ((OUT_FACTOR, False), (GRADIENT_FACTOR, False), (8.0, True)):
        row = compare("out", (exact * 1.008).to(BF16), exact, plain, factor)
        assert row.scale.ok == is_ok, row


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_the_bench_finds_a_wrong_scale(direction):
    case = Case.square(512, 2, 64, batch=1, dtype="bfloat16", causal=True, direction=direction)
    inputs = make_inputs(case, "cpu")
    oracle = Oracle(case, inputs)
    q, k, v, dout = (t.detach() for t in (inputs.q, inputs.k, inputs.v, inputs.dout))
    results = by_tiles(q, k, v, dout, causal=True)
    results = {n: t for n, t in results.items() if (n == "out") == (direction == "fwd")}
    assert all(row.ok for row in oracle.compare(results, is_peer=False))
    for name, right in results.items():
        for rows in (slice(None), slice(256, None)):
            wrong = right.clone()
            wrong[:, rows] = (wrong[:, rows].double() * 1.02).to(BF16)
            (row,) = oracle.compare({name: wrong}, is_peer=False)
            assert not row.ok, (name, rows)


def p_by_integers(log2_p):
    """P as the kernels compute it with p_codes, and as it comes into the sum of its row."""
    codes = (8 * (log2_p + 15) - 0.465).round().clamp(min=0)
    in_sum = (128 * codes).to(torch.int16).view(torch.float16).double()
    return in_sum.to(torch.float8_e4m3fn).double(), in_sum


@pytest.mark.parametrize("factor", [0.0, 1.0, 16.0])
def test_budget_of_p_by_integers(factor):
    q, k, v, _ = tensors(BF16, 512)
    q = factor * q
    exact = reference.attention(q, k, v)
    scores = (q.double().transpose(1, 2) @ k.double().transpose(1, 2).mT) * q.shape[-1] ** -0.5
    p, in_sum = p_by_integers((scores - scores.amax(-1, keepdim=True)) / math.log(2) + 6)
    total = in_sum.sum(-1, keepdim=True)
    out = ((p @ v.double().transpose(1, 2)) / total).transpose(1, 2)
    lse = total[..., 0].log() - 6 * math.log(2) + scores.amax(-1)
    budget = fp8_budget(q, k, v, torch.float64, p_exponent=6, p_codes=True)
    share = (out - exact.out).abs() / budget.out
    assert share.max() < (0.01 if factor == 0 else 1)
    assert factor == 0 or share.max() > 0.1
    assert ((lse - exact.lse).abs() <= budget.lse).all()
    assert budget.scale(out).share < 0.5
    assert not budget.scale(1.03 * out).ok
    # the budget of exponentials is not enough where few keys count
    smaller = fp8_budget(q, k, v, torch.float64, p_exponent=6)
    assert factor < 16 or ((lse - exact.lse).abs() > smaller.lse).any()


def test_fp8_finds_a_wrong_scale():
    q, k, v, _ = tensors(BF16, 512)
    quantized = onepass.quantize_fp8(q, k, v)
    out = onepass.attention(quantized, causal=True)
    budget = fp8_budget(*quantized.dequantize(), out.dtype, causal=True)
    assert budget.scale(out).share < 0.5
    for rows in (slice(None), slice(256, None), slice(384, 448)):
        wrong = out.clone()
        wrong[:, rows] *= 1.03
        assert ((wrong.double() - budget.oracle.out).abs() <= budget.out).all()  # each element alone may be so far off
        assert not budget.scale(wrong).ok

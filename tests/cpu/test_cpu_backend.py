"""The backend `cpu`: torch's C++ operators, with what onepass promises."""

import importlib
import itertools
from dataclasses import replace

import pytest
import torch
from decode_calls import random_decode_call
from random_calls import random_call

import onepass
from onepass import cpu, reference, tiled
from onepass.cpu import operators
from onepass.dispatch import decode as dispatch
from onepass.problem import AttentionInputs, AttentionProblem, Mask
from onepass.problem.decode import DecodeInputs, DecodeProblem

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
REFUSED = ("softcap", "dropout_p")


@pytest.fixture
def count(monkeypatch):
    """How many times each of torch's operators has run."""
    counts = {"_forward": 0, "_backward": 0}

    def counted(name):
        real = getattr(operators, name)

        def run(*arguments, **options):
            counts[name] += 1
            return real(*arguments, **options)

        monkeypatch.setattr(operators, name, run)

    for name in counts:
        counted(name)
    return counts


def qkv(seqlen_q=24, seqlen_k=24, heads_q=4, heads_kv=2, head_dim=8, dtype=torch.float32, batch=2, heads_outside=False):
    shapes = (batch, seqlen_q, heads_q), (batch, seqlen_k, heads_kv), (batch, seqlen_k, heads_kv)
    if heads_outside:
        return [torch.randn(b, h, s, head_dim).to(dtype).transpose(1, 2) for b, s, h in shapes]
    return [torch.randn(*shape, head_dim).to(dtype) for shape in shapes]


def problem_of(q, k, v, mask=Mask(), **changes):  # noqa: B008  # it is frozen
    options = {"softmax_scale": 0.25, "mask": mask, "softcap": None, "deterministic": False}
    return replace(AttentionProblem.of(AttentionInputs(q, k, v), **options), **changes)


# ---------------------------------------------------------------- values


def for_the_backend(dtype, seeds, max_seqlen):
    """Random calls without what the backend refuses. The left side of every other window hides no key."""
    for seed in seeds:
        call = random_call(seed, "cpu", max_seqlen, dtype)
        options = {name: value for name, value in call.options.items() if name not in REFUSED}
        if (left := options.get("window", (None,))[0]) is not None and seed % 2:
            # the window reaches back from 2 keys before the first key to 1 key after it
            options["window"] = (max(call.tensors["k"].shape[-3], 1) + left % 4 - 2, options["window"][1])
        call = replace(call, options=options)
        if onepass.supports(**call.tensors, **options).backend == "cpu":
            yield call


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_calls(dtype, count):
    calls = list(itertools.islice(for_the_backend(dtype, itertools.count(), 160), 72))
    assert sum(call.is_packed for call in calls) > 3
    assert sum(call.options.get("window", (None,))[0] is not None for call in calls) > 1
    for call in calls:
        call.check(with_floor=True, through_lse=False)
    assert count["_forward"] > 25
    assert count["_backward"] > 25 or dtype.itemsize == 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_random_calls(dtype):
    for call in itertools.islice(for_the_backend(dtype, itertools.count(1000), 1400), 4):
        call.check(with_floor=True, through_lse=False)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_long_gradients_in_16_bits(causal, count):
    """More queries and keys than a chunk has, so that float32 sums of several calls make a gradient."""
    tensors = dict(zip("qkv", qkv(2500, 2500, 1, 1, 32, torch.bfloat16, batch=1), strict=True))
    call = onepass.testing.Call(tensors, {"causal": causal})
    call.check(with_floor=True, through_lse=False)
    assert count["_backward"] == (3 if causal else 4)


@pytest.mark.parametrize("heads_outside", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_sums_of_many_chunks(causal, heads_outside, count, monkeypatch):
    """Up to five calls make a gradient, which is rounded once."""
    monkeypatch.setattr(importlib.import_module("onepass.cpu.backward"), "CHUNK", 16)
    dout, *tensors = (t.bfloat16() for t in (torch.randn(2, 70, 4, 32), *qkv(70, 70, head_dim=32)))
    if heads_outside:
        dout, *tensors = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (dout, *tensors))
    results = []
    for backend, dtype in (("cpu", torch.bfloat16), ("tiled", torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        out = onepass.attention(*leaves, causal=causal, backend=backend)
        results.append(torch.autograd.grad(out, leaves, dout.to(dtype)))
    assert count["_backward"] == (15 if causal else 25)
    for mine, exact in zip(*results, strict=True):
        assert (mine - exact).square().mean() < 2**-14 * exact.square().mean()


def test_gradients_of_few_columns_in_16_bits(count):
    """Their rounding errors would not average out: `tiled` computes them."""
    q, k, v = (t.requires_grad_() for t in qkv(dtype=torch.bfloat16, head_dim=24))
    onepass.attention(q, k, v).sum().backward()
    assert count == {"_forward": 1, "_backward": 0}


@pytest.mark.parametrize("mask", [Mask(), Mask(None, 0), Mask(None, 3), Mask(None, -3)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 30), (30, 30), (12, 30), (30, 12), (1, 1)], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)], ids=str)
def test_as_tiled(mask, lengths, heads):
    """Values and layouts, in all orders of memory."""
    for outside_q, outside_k in itertools.product((False, True), repeat=2):
        q, *_ = qkv(*lengths, *heads, dtype=torch.float64, heads_outside=outside_q)
        _, k, v = qkv(*lengths, *heads, dtype=torch.float64, heads_outside=outside_k)
        problem, inputs, dout = problem_of(q, k, v, mask), AttentionInputs(q, k, v), torch.randn_like(q)
        out, lse = expected = tiled.forward(problem, inputs)
        expected += tiled.backward(problem, inputs, out, lse, dout, None)
        actual = cpu.forward(problem, inputs) + cpu.backward(problem, inputs, out, lse, dout, None)
        for mine, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)
            strides = (
                [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1 and t.numel()] for t in (mine, theirs)
            )
            assert next(strides) == next(strides)


@pytest.mark.parametrize(
    "make", [torch.Tensor.contiguous, lambda t: t[:1, :1].expand(t.shape), lambda t: t.mT.contiguous().mT]
)
def test_any_strides(make, count):
    q, k, v = (make(t) for t in qkv(dtype=torch.float64))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    results = []
    for backend in ("cpu", "tiled"):
        out = onepass.attention(*leaves, causal=True, backend=backend)
        results.append((out, *torch.autograd.grad(out, leaves, torch.ones(()).expand(out.shape).to(out.dtype))))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert count == {"_forward": 1, "_backward": 1}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["dense", "packed", "cache"])
def test_two_partial_results_of_16_bits_are_not_merged(kind, dtype, count):
    """Rows whose keys lie in two regions would be rounded once for each region, and once more where they are merged."""
    q, k, v = qkv(12, 24, dtype=dtype, batch=1)
    offsets_q, offsets_k = (torch.tensor([0, n], dtype=torch.int32) for n in (12, 24))

    def run(backend=None):
        if kind == "cache":
            call = {"k_cache": k, "v_cache": v, "cache_seqlens": offsets_k[1:]}
            return onepass.attention_decode(q, **call, causal=True, backend=backend)
        if kind == "packed":
            offsets = {"cu_seqlens_q": offsets_q, "cu_seqlens_k": offsets_k}
            return onepass.attention_varlen(q[0], k[0], v[0], **offsets, causal=True, backend=backend)
        return onepass.attention(q, k, v, causal=True, backend=backend)

    out = run()
    assert count["_forward"] == (0 if dtype.itemsize == 2 else 2)
    expected = run("tiled")
    if dtype.itemsize == 2:
        assert torch.equal(out, expected)
    torch.testing.assert_close(out, expected)


# ---------------------------------------------------------------- promises


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("mask", [Mask(), Mask(None, 0)], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [(40, 40), (20, 40), (40, 20), (5, 5), (5, 3), (600, 600)], ids=str)
def test_special_values_reach_only_what_depends_on_them(name, value, lengths, mask):
    """Under a causal mask the operators spread a NaN of a hidden key, and among few keys they lose one of a query.

    What comes out is what `tiled` computes.
    """
    q, k, v = qkv(*lengths, dtype=torch.float64)
    tensors = {"q": q, "k": k, "v": v, "dout": torch.randn_like(q)}
    t = tensors[name]
    t[0, 3 * t.shape[1] // 4, 1, 5] = value
    problem, inputs = problem_of(q, k, v, mask), AttentionInputs(q, k, v)
    out, lse = expected = tiled.forward(problem, inputs)
    actual = cpu.forward(problem, inputs)
    expected += tiled.backward(problem, inputs, out, lse, tensors["dout"], None)
    actual += cpu.backward(problem, inputs, out, lse, tensors["dout"], None)
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True, rtol=1e-12, atol=1e-13)
    assert out[1].isfinite().all()


@pytest.mark.parametrize("seqlen", [3, 16, 40])
@pytest.mark.parametrize("mask", [Mask(), Mask(None, 0)], ids=["full", "causal"])
@pytest.mark.parametrize("queries", [NAN, 1.0], ids=["NaN", "-inf"])
def test_rows_without_a_finite_score(seqlen, mask, queries):
    q, k, v = qkv(seqlen, seqlen, dtype=torch.float64)
    q[0, -1], k[..., 0] = queries, -INF
    problem, inputs = problem_of(q.abs(), k, v, mask), AttentionInputs(q.abs(), k, v)
    for mine, theirs in zip(cpu.forward(problem, inputs), tiled.forward(problem, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True, rtol=1e-12, atol=1e-13)


def test_the_operator_alone_spreads_them():
    """If this fails, torch keeps hidden keys out by itself, and onepass need not look."""
    q, k, v = qkv(heads_q=2)
    v[:, -1] = NAN
    out, _ = operators.forward(q, k, v, 0.25, True)
    assert out[:, 0].isnan().any()
    assert not onepass.attention(q, k, v, causal=True)[:, :-1].isnan().any()


def test_float32_is_not_rounded(count):
    """Where torch may round float32 operands of a product, `tiled` computes, in float64."""
    q, k, v = qkv()
    precise, leaves = onepass.attention(q, k, v), [t.clone().requires_grad_() for t in (q, k, v)]
    recorded = onepass.attention(*leaves)
    assert count == {"_forward": 2, "_backward": 0}
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        torch.testing.assert_close(onepass.attention(q, k, v), precise)
        torch.autograd.grad(recorded.sum(), leaves)
        onepass.attention(*(t.bfloat16() for t in (q, k, v)))
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert count == {"_forward": 3, "_backward": 0}


def test_same_bits_every_time():
    q, k, v = (t.requires_grad_() for t in qkv(300, 300, dtype=torch.bfloat16))
    first = None
    for _ in range(3):
        out = onepass.attention(q, k, v, causal=True)
        results = [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]
        first = first or results
        assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))


def test_results_can_be_changed_in_place():
    q, k, v = qkv()
    with torch.no_grad():
        results = onepass.attention(q, k, v, return_lse=True)
    scale = torch.ones((), requires_grad=True)
    for t in results:
        assert not t._is_view()
        t.mul_(scale)


def test_a_gradient_of_lse_is_computed_by_tiled(count):
    q, k, v = (t.requires_grad_() for t in qkv())
    out, lse = onepass.attention(q, k, v, return_lse=True)
    torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    assert count == {"_forward": 1, "_backward": 0}


# ---------------------------------------------------------------- what it takes


REFUSALS = {
    "softcap": {"softcap": 2.0},
    "dropout_p": {"dropout_p": 0.1},
    "FP8": {"precision": "fp8"},
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_tiled_takes(name):
    q, k, v = (t.bfloat16() for t in qkv())
    support = onepass.supports(q, k, v, **REFUSALS[name])
    assert support.backend == "tiled"
    assert f"cpu: expected no {name}" in support.reason
    with pytest.raises(onepass.UnsupportedError, match=f"backend cpu: expected no {name}"):
        onepass.attention(q, k, v, **REFUSALS[name], backend="cpu")


@pytest.mark.parametrize("lengths", [(24, 24), (12, 24), (24, 12)], ids=str)
def test_windows_about_as_long_as_the_keys(lengths, count):
    """The first widths hide a key of some query and the others hide none, whatever computes them."""
    leaves = [t.requires_grad_() for t in qkv(*lengths, dtype=torch.float64, batch=1)]
    longest = lengths[1]
    widths = range(longest - 2, longest + 2)
    windows = [*((n, None) for n in widths), *((None, n) for n in widths), *((n, n) for n in widths)]
    for window in (*windows, *((n, 0) for n in widths), *((None, -n) for n in widths)):
        out, lse = onepass.attention(*leaves, window=window, return_lse=True)
        expected = reference.attention(*leaves, window=window)
        dout = torch.randn_like(out)
        results = [(x.detach(), y.detach(), *torch.autograd.grad(x, leaves, dout)) for x, y in ((out, lse), expected)]
        for mine, right in zip(*results, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-12, msg=f"{window}")
    assert count["_forward"] > 8


@pytest.mark.parametrize("name", ["float32_out", "float32_dkv"])
def test_results_in_another_dtype_are_not_its_own(name):
    """The operators round their results to the dtype of q."""
    problem = problem_of(*qkv(dtype=torch.bfloat16))
    assert cpu.unsupported(problem) is None
    assert cpu.unsupported(replace(problem, **{name: True})) == "expected results in the dtype of q, k and v"


def test_other_devices_and_head_dims():
    q, k, v = qkv()
    meta = [t.to("meta") for t in (q, k, v)]
    support = onepass.supports(*meta, backend="cpu")
    assert support == (False, "cpu", "backend cpu: expected tensors on cpu, got meta")
    assert onepass.supports(q, k, v[..., :4]).backend == "tiled"


def test_a_cache(count):
    """A sequence whose keys are not split goes to torch's operator; splits go to `tiled`."""
    q, k, v = qkv(seqlen_q=3, dtype=torch.float64)
    call = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": torch.tensor([20, 0], dtype=torch.int32)}
    expected = onepass.attention_decode(**call, causal=True, return_lse=True, backend="tiled")
    actual = onepass.attention_decode(**call, causal=True, return_lse=True)
    assert count["_forward"] == 2  # the keys that all queries see, and those that some see
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    onepass.attention_decode(**call, causal=True, num_splits=2)
    assert count["_forward"] == 2


def test_random_calls_over_a_cache(count):
    """Sequences that the operators may compute together: of whole keys that do not lie in pages."""
    drawn = zip(itertools.count(), itertools.cycle(itertools.product((False, True), repeat=2)), strict=False)
    calls = (random_decode_call(seed, torch.float32, 80, False, *kind) for seed, kind in drawn)
    whole = (c for c in calls if not c.arguments.keys() & {"page_table", "num_splits", "split_size"})
    for call in itertools.islice((c for c in whole if onepass.supports(**c.arguments).backend == "cpu"), 32):
        call.check()
    assert count["_forward"] > 30


def cache_call(lengths, **options):
    q, k, v = qkv(seqlen_q=1, batch=len(lengths))
    return {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": torch.tensor(lengths, dtype=torch.int32)} | options


def entry_of(call, b):
    return {name: t[b : b + 1] if isinstance(t, torch.Tensor) else t for name, t in call.items()}


def test_sequences_of_equal_length_are_one_batch(count, one_thread):
    """One call of the operator, with the bits that each sequence has alone, even beside a NaN of another one.

    On several threads these bits depend on the alignment of the threads' buffers in the operator.
    """
    _check_sequences_of_equal_length(count, ((1, 0.5), (4, torch.nan)))


def test_a_given_number_of_splits_gives_the_same_bits_in_any_batch(count):
    """With num_splits=1 a sequence has the same bits in any batch, whatever the number of threads."""
    _check_sequences_of_equal_length(count, ((3, 0.5), (3, torch.nan)), num_splits=1)


def _check_sequences_of_equal_length(count, cases, **options):
    call = cache_call([20, 20, 20], causal=True, **options)
    for wanted_calls, value in cases:
        call["k_cache"][1, 3] = value
        before = count["_forward"]
        out = onepass.attention_decode(**call)
        assert count["_forward"] - before == wanted_calls
        for b in range(3):
            alone = onepass.attention_decode(**entry_of(call, b))
            torch.testing.assert_close(out[b : b + 1], alone, rtol=0, atol=0, equal_nan=True)
        assert out[::2].isfinite().all()


@pytest.mark.parametrize("window", [None, (4, 0)])
def test_keys_before_the_start_of_a_sequence_are_cut_off(window, count):
    """A sequence without keys needs no operator."""
    starts = torch.tensor([0, 7, 19, 20], dtype=torch.int32)
    call = cache_call([20, 20, 20, 20], causal=True, window=window, seqstart_k=starts)
    for b, start in enumerate(starts):
        call["k_cache"][b, :start] = torch.nan
    assert onepass.supports(**call).backend == "cpu"
    out, lse = onepass.attention_decode(**call, return_lse=True)
    assert count["_forward"] == 3
    for b, start in enumerate(starts):
        k, v = (call[name][b : b + 1, start:20] for name in ("k_cache", "v_cache"))
        wanted = onepass.attention(call["q"][b : b + 1], k, v, causal=True, window=window, return_lse=True)
        torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), tuple(wanted))
    assert lse[3].isneginf().all()


@pytest.mark.parametrize("causal", [False, True])
def test_left_padding(causal, count):
    """Keys and queries before the start of a sequence take part in nothing, forward and backward."""
    q, k, v = (t.requires_grad_() for t in qkv(24, 20, dtype=torch.float64, batch=4))
    call = {"q": q, "k": k, "v": v, "causal": causal, "seqstart_k": torch.tensor([0, 7, 7, 20], dtype=torch.int32)}
    dout, results = torch.randn(4, 24, 4, 8, dtype=torch.float64), []
    for backend in ("cpu", "tiled"):
        out, lse = onepass.attention(**call, return_lse=True, backend=backend)
        results.append((out, lse, *torch.autograd.grad(out, (q, k, v), dout)))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert count == {"_forward": 2, "_backward": 3}  # two sequences are alike, one has no keys
    assert not results[0][3][1:3, :7].any()


@pytest.mark.parametrize(
    "window", [None, (20, 0), (100, 0), (100, None), (-3, None), (None, -1), (None, -100)], ids=str
)
def test_split_size_gives_equal_bits_in_caches_of_any_size(window):
    """The window is as long as some of the caches, in which it hides no key."""
    torch.manual_seed(0)
    q = torch.randn(3, 2, 4, 32)
    k, v = (torch.randn(3, 300, 2, 32) for _ in range(2))
    filled = torch.tensor([60, 64, 30], dtype=torch.int32)
    options = {"window": window, "split_size": 64, "return_lse": True}
    expected = onepass.attention_decode(q, k, v, cache_seqlens=filled, **options)
    for capacity in (64, 90, 101, 299):
        caches = k[:, :capacity].contiguous(), v[:, :capacity].contiguous()
        together = onepass.attention_decode(q, *caches, cache_seqlens=filled, **options)
        assert torch.equal(together.out, expected.out)
        assert torch.equal(together.lse, expected.lse)


@pytest.mark.parametrize("split_size", [None, 64])
@pytest.mark.parametrize(
    ("window", "hides_by_size"),
    [
        ((None, None), False),
        ((None, 0), False),
        ((None, 3), False),
        ((None, -1), True),
        ((0, 0), True),
        ((400, 0), True),
    ],
)
def test_split_size_keeps_calls_whose_size_may_matter_from_the_backend(window, hides_by_size, split_size):
    q, k = torch.randn(1, 2, 4, 32), torch.randn(1, 300, 2, 32)
    inputs = DecodeInputs(q, k, k, torch.tensor([60], dtype=torch.int32))
    attention = inputs.attention(softmax_scale=1.0, mask=Mask(*window), softcap=None, deterministic=False)
    problem = DecodeProblem.of(attention, inputs, split_size=split_size)
    is_its = operators.unsupported(attention) is None and not (split_size and hides_by_size)
    assert dispatch.choose_decode(problem, None, torch.device("cpu")).backend == ("cpu" if is_its else "tiled")

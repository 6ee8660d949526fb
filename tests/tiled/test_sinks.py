"""A sink is a key of value 0 that every row sees, even a row that sees nothing else.

Results are compared with a softmax over one more score, in float64 and differentiated by autograd, independent of the
library's oracle.
"""

import pytest
import torch

import onepass
from onepass import reference
from onepass.tiled.merge import merge_in_torch

INT32, FP64 = torch.int32, torch.float64
NAN, INF = float("nan"), float("inf")
HEADS_Q, HEADS_KV, HEAD_DIM, HEAD_DIM_V = 4, 2, 8, 6


def randn(*shape, seed, dtype=FP64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def one_more_key(q, k, v, sinks, causal=False):
    """out (m, heads, dim) and lse (heads, m) of one sequence, with the sinks as a last key of value 0."""
    group, (m, n) = q.shape[1] // k.shape[1], (len(q), len(k))
    q, k, v = (t.to(FP64).transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, 0) for t in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(m, n, dtype=torch.bool).tril(n - m), -INF)
    scores = torch.cat([scores, sinks.to(FP64)[:, None, None].expand(-1, m, 1)], -1)
    v = torch.cat([v, v.new_zeros(len(v), 1, v.shape[-1])], 1)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1)


LENGTHS_Q, LENGTHS_K = (7, 0, 300, 5, 40), (9, 4, 0, 0, 30)  # keys without queries, queries without keys, fewer keys
SLACK = 3


def packed():
    total_q, total_k = sum(LENGTHS_Q) + SLACK, sum(LENGTHS_K) + SLACK
    tensors = {
        "q": randn(total_q, HEADS_Q, HEAD_DIM, seed=0, dtype=FP64),
        "k": randn(total_k, HEADS_KV, HEAD_DIM, seed=1, dtype=FP64),
        "v": randn(total_k, HEADS_KV, HEAD_DIM_V, seed=2, dtype=FP64),
    }
    lengths = {f"cu_seqlens_{n}": offsets_of(lengths) for n, lengths in (("q", LENGTHS_Q), ("k", LENGTHS_K))}
    return tensors, lengths


def offsets_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=INT32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_packed_sequences_without_keys(causal, size):
    """out, lse and all gradients through both are correct, and rows that belong to no sequence have no sink."""
    tensors, lengths = packed()
    leaves = {n: t.requires_grad_() for n, t in tensors.items()}
    sinks = (size * randn(HEADS_Q, seed=3)).requires_grad_()
    q, k, v = leaves.values()
    out, lse = onepass.attention_varlen(q, k, v, **lengths, causal=causal, sinks=sinks, return_lse=True)
    partials = [
        one_more_key(
            *(t.split((*of, SLACK))[i] for t, of in ((q, LENGTHS_Q), (k, LENGTHS_K), (v, LENGTHS_K))), sinks, causal
        )
        for i in range(len(LENGTHS_Q))
    ]
    expected = [torch.cat([o for o, _ in partials]), torch.cat([x for _, x in partials], 1)]
    assert (out[-SLACK:] == 0).all()
    assert (lse[:, -SLACK:] == -INF).all()
    results = out[:-SLACK], lse[:, :-SLACK]
    for actual, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-11, atol=1e-12)
    empty = slice(7, 312)
    assert torch.equal(lse[:, empty], sinks[:, None].expand(-1, 305))
    weights = [randn(*t.shape, seed=4 + i) for i, t in enumerate(results)]
    wanted = *leaves.values(), sinks
    actual, exact = (
        torch.autograd.grad([(t * w).sum() for t, w in zip(pair, weights, strict=True)], wanted)
        for pair in (results, expected)
    )
    for name, a, b in zip(("dq", "dk", "dv", "dsinks"), actual, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
    assert (actual[0][empty] == 0).all()


def test_the_oracle():
    q, k, v = (randn(1, n, h, d, seed=i) for i, (n, h, d) in enumerate(((20, 4, 8), (12, 2, 8), (12, 2, 6))))
    sinks = randn(4, seed=3)
    for keys in (12, 0):
        out, lse = reference.attention(q, k[:, :keys], v[:, :keys], causal=True, sinks=sinks)
        expected = one_more_key(q[0], k[0, :keys], v[0, :keys], sinks, causal=True)
        torch.testing.assert_close(out[0], expected[0], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(lse[0], expected[1], rtol=1e-12, atol=1e-13)


# ---------------------------------------------------------------- no keys at all


def test_dense_without_keys():
    q, k, v = randn(2, 5, 4, 8, seed=0), *(randn(2, 0, 2, 8, seed=1).requires_grad_() for _ in range(2))
    sinks = randn(4, seed=3, dtype=torch.float32).requires_grad_()
    out, lse = onepass.attention(q, k, v, sinks=sinks, return_lse=True)
    assert (out == 0).all()
    assert torch.equal(lse, sinks.to(FP64)[None, :, None].expand(2, 4, 5))
    dlse = randn(2, 4, 5, seed=4)
    (dsinks,) = torch.autograd.grad((lse * dlse).sum(), sinks)
    torch.testing.assert_close(dsinks, dlse.sum((0, 2)).float())


# ---------------------------------------------------------------- partial attention


@pytest.mark.parametrize("last", [0, 10])
def test_merging_keeps_the_share_of_the_sink(last):
    """The partial that includes the sink has no key that some rows see, or no key at all."""
    q, k, v = randn(1, 24, 4, 8, seed=0), randn(1, 40, 2, 8, seed=1), randn(1, 40, 2, 6, seed=2)
    sinks = randn(4, seed=3) + 1
    whole = onepass.attention(q, k, v, sinks=sinks, return_lse=True)
    first = onepass.attention(q, k[:, last:], v[:, last:], return_lse=True)
    second = onepass.attention(q, k[:, :last], v[:, :last], sinks=sinks, return_lse=True)
    out, lse = onepass.merge_partials([first.out, second.out], [first.lse, second.lse])
    torch.testing.assert_close(out, whole.out, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, whole.lse, rtol=1e-11, atol=1e-12)


# ---------------------------------------------------------------- decode


@pytest.mark.parametrize(
    "options", [{"num_splits": 1}, {"num_splits": 3}, {"split_size": 64}, {"window": (3, 0)}], ids=str
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_decode(options, is_packed):
    filled, queries = (150, 0, 3), (6, 6, 6)
    q, caches = randn(3, 6, 4, 8, seed=0), [randn(3, 160, 2, 8, seed=i) for i in (1, 2)]
    sinks = randn(4, seed=3)
    arguments = {"cache_seqlens": torch.tensor(filled, dtype=INT32), "sinks": sinks, "return_lse": True, **options}
    if is_packed:
        q = torch.cat([q.flatten(0, 1), randn(2, 4, 8, seed=4)])
        arguments["cu_seqlens_q"] = offsets_of(queries)
    out, lse = onepass.attention_decode(q, *caches, **arguments)
    if is_packed:
        assert (out[18:] == 0).all()
        assert (lse[:, 18:] == -INF).all()
        out, lse = out[:18].view(3, 6, 4, 8), lse[:, :18].unflatten(1, (3, 6)).transpose(0, 1)
        q = q[:18].view(3, 6, 4, 8)
    window = options.get("window")
    for b, n in enumerate(filled):
        keys = (c[b : b + 1, :n] for c in caches)
        expected = reference.attention(q[b : b + 1], *keys, causal=True, window=window, sinks=sinks)
        torch.testing.assert_close(out[b], expected.out[0], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(lse[b], expected.lse[0], rtol=1e-11, atol=1e-12)
    assert torch.equal(lse[1], sinks[:, None].expand(-1, 6))
    assert torch.equal(lse[2, :, :3], sinks[:, None].expand(-1, 3))


# ---------------------------------------------------------------- sinks that are no numbers


def results_with(value, dtype, seqlen_q=24, seqlen_k=10):
    """out, lse, and gradients through both under a causal mask, with the sink of head 1 replaced."""
    q, k, v = (
        randn(2, n, h, 8, seed=i, dtype=dtype).requires_grad_()
        for i, (n, h) in enumerate(((seqlen_q, 4), (seqlen_k, 2), (seqlen_k, 2)))
    )
    sinks = randn(4, seed=3, dtype=torch.float32)
    if value is not None:
        sinks[1] = value
    sinks.requires_grad_()
    out, lse = onepass.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    finite = torch.where(lse.isfinite(), lse, 0.0)
    loss = (out * randn(*out.shape, seed=5, dtype=dtype)).sum() + (finite * randn(*lse.shape, seed=6)).sum()
    return out, lse, *torch.autograd.grad(loss, (q, k, v, sinks))


def test_an_infinite_gradient_of_lse_ends_at_a_row_without_sink_and_keys():
    tensors = [randn(1, n, 2, 8, seed=n, dtype=torch.float32).requires_grad_() for n in (6, 4, 4)]
    sinks = torch.full((2,), -INF, requires_grad=True)
    _, lse = onepass.attention(*tensors, causal=True, sinks=sinks, return_lse=True)
    gradients = torch.autograd.grad(lse.square().sum(), (*tensors, sinks))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("seqlen_k", [10, 0])
@pytest.mark.parametrize("dtype", [torch.float32, FP64])
@pytest.mark.parametrize("value", [-INF, INF, NAN])
def test_sinks_that_are_no_numbers(value, dtype, seqlen_k):
    """A sink of -inf has no effect, +inf gives out = 0 and lse = +inf, NaN gives NaN; other heads do not change."""
    out, lse, dq, _, _, dsinks = results_with(value, dtype, seqlen_k=seqlen_k)
    clean = results_with(None, dtype, seqlen_k=seqlen_k)
    others, empty = [0, 2, 3], slice(0, 24 - seqlen_k)
    for a, b in ((out[:, :, others], clean[0][:, :, others]), (lse[:, others], clean[1][:, others])):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(dq[:, :, others], clean[2][:, :, others])
    torch.testing.assert_close(dsinks[others], clean[5][others])
    assert (out[:, empty] == 0).all()
    assert (dq[:, empty] == 0).all()
    mine = lse[:, 1]
    assert mine[:, empty].isnan().all() if value != value else (mine[:, empty] == value).all()
    rows = out[:, 24 - seqlen_k :, 1], mine[:, 24 - seqlen_k :]
    if value == INF:
        assert (rows[0] == 0).all()
        assert (rows[1] == INF).all()
    elif value == -INF:
        assert dsinks[1] == 0
        assert all(t.isfinite().all() for t in rows)
    else:
        assert all(t.isnan().all() for t in rows)


@pytest.mark.parametrize("seqlen_k", [10, 0])
def test_a_sink_that_is_no_number_stays_out_of_keys_that_only_other_heads_see(seqlen_k):
    """Each kv head has two query heads: the sink of head 1 is NaN, and gradients of the other head do not change."""
    *_, dk, dv, _ = results_with(NAN, FP64, seqlen_k=seqlen_k)
    *_, clean_k, clean_v, _ = results_with(None, FP64, seqlen_k=seqlen_k)
    torch.testing.assert_close(dk[:, :, 1], clean_k[:, :, 1])
    torch.testing.assert_close(dv[:, :, 1], clean_v[:, :, 1])


def test_rows_without_keys_with_a_sink_of_nan_have_no_gradient():
    """lse of these rows is NaN, but none of their pairs is visible."""
    q, k, v = (randn(2, n, 2, 8, seed=i) for i, n in enumerate((24, 10, 10)))
    q.requires_grad_()
    _, lse = onepass.attention(q, k, v, causal=True, sinks=torch.full((2,), NAN), return_lse=True)
    assert lse.isnan().all()
    (dq,) = torch.autograd.grad(lse[:, :, :14].sum(), q)
    assert (dq[:, :14] == 0).all()


@pytest.mark.parametrize("value", [NAN, INF])
def test_the_gradient_of_out_of_a_row_without_keys_does_not_reach_the_sink(value):
    q, k, v = (randn(1, n, 4, 8, seed=i) for i, n in enumerate((24, 10, 10)))
    sinks = randn(4, seed=3).requires_grad_()
    dout, dlse = randn(1, 24, 4, 8, seed=5), randn(1, 4, 24, seed=6)
    gradients = []
    for first in (0.0, value):
        dout[:, :14] = first
        results = onepass.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
        gradients += torch.autograd.grad(results, sinks, (dout, dlse))
    assert torch.equal(*gradients)
    # the gradient of lse does reach it
    dlse[:, 2, 3] = NAN
    results = onepass.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    (dsinks,) = torch.autograd.grad(results, sinks, (dout, dlse))
    assert dsinks.isnan().tolist() == [False, False, True, False]


def test_a_sink_of_nan_reaches_no_row_without_keys_when_partials_are_merged():
    """out stays 0 there, and lse is NaN; of another row both are NaN, and another head has its result."""
    outs = [torch.randn(1, 2, 2, 4, dtype=torch.float64) for _ in range(3)]
    lses = [torch.randn(1, 2, 2, dtype=torch.float64) for _ in range(3)]
    for lse in lses:
        lse[..., 0] = -torch.inf  # the first row sees no key
    sinks = torch.tensor([torch.nan, 1.0], dtype=torch.float64)
    out, lse = merge_in_torch(outs, lses, sinks)
    assert (out[:, 0] == 0).all()
    assert out[:, 1, 0].isnan().all()
    assert lse[:, 0].isnan().all()
    expected, expected_lse = merge_in_torch(outs, lses, torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(out[:, :, 1], expected[:, :, 1])
    torch.testing.assert_close(lse[:, 1], expected_lse[:, 1])

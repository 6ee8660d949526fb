"""Long sequences and tensors past 2^31 elements on the Hopper kernel, compared with the oracle in slices."""

import itertools

import pytest
import torch
from gpu_cases import BACKEND, BF16, DEVICE, FP16, ON_GPU, lengths_tensor, needs_hopper, offsets, size

import onepass
from onepass import reference
from onepass.testing import compare, compare_lse

pytestmark = needs_hopper

MILLION = size(1 << 20, 1 << 12)
PAST_31_BITS = size(2**31, 2**21)  # elements


@pytest.fixture(autouse=True)
def _all_memory_is_free():
    yield
    if ON_GPU:
        torch.cuda.empty_cache()


def randn(*shape, dtype=BF16):
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def check(actual, q, k, v, **options):
    """Check out and lse of these (batch, seqlen, heads, head_dim) slices against the oracle of the slices alone."""
    oracle, plain = (reference.attention(q, k, v, **options, compute_dtype=d) for d in (torch.float64, q.dtype))
    for row in (compare("out", actual.out, oracle.out, plain.out), compare_lse(actual.lse, oracle.lse)):
        assert row.ok, row


def run(q, k, v, **options):
    function = onepass.attention_varlen if "cu_seqlens_q" in options else onepass.attention
    result = function(q, k, v, **options, return_lse=True, backend=BACKEND)
    return result if q.dim() == 4 else onepass.api.AttentionOutput(result.out[None], result.lse[None])


def sliced(result, rows, heads=slice(None), entries=slice(None)):
    return onepass.api.AttentionOutput(result.out[entries, rows, heads], result.lse[entries, heads, rows])


# ---------------------------------------------------------------- a million tokens


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, BF16), (128, FP16), (256, BF16)])
@pytest.mark.parametrize("seqlen_q", [1, 64])
def test_few_queries_against_a_million_keys(seqlen_q, head_dim, dtype, causal):
    q = randn(1, seqlen_q, 2, head_dim, dtype=dtype)
    k, v = (randn(1, MILLION + 3, 1, head_dim, dtype=dtype) for _ in range(2))
    check(run(q, k, v, causal=causal), q, k, v, causal=causal)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_million_queries_with_a_window(head_dim):
    left = 255
    q, k, v = (randn(1, MILLION + 77, 2, head_dim) for _ in range(3))
    result = run(q, k, v, causal=True, window=(left, None))
    for start in (0, 1000, MILLION // 2 + 5, MILLION - 400, MILLION + 77 - 300):
        rows, keys = slice(start, start + 300), slice(max(0, start - left), start + 300)
        check(sliced(result, rows), q[:, rows], k[:, keys], v[:, keys], causal=True, window=(left, None))


def test_a_million_packed_tokens_with_a_window():
    lengths = (MILLION // 2, 0, 5, MILLION // 4 + 3, 700, MILLION // 4)
    cu = offsets(lengths)
    q, k, v = (randn(cu[-1], 2, 128) for _ in range(3))
    options = {"causal": True, "window": (255, None)}
    result = run(q, k, v, cu_seqlens_q=lengths_tensor(cu), cu_seqlens_k=lengths_tensor(cu), **options)
    for start, end in itertools.pairwise(cu):
        for rows in (slice(start, min(start + 300, end)), slice(max(start, end - 300), end)):
            keys = slice(max(start, rows.start - 255), rows.stop)
            check(sliced(result, rows), *(t[None, s] for t, s in ((q, rows), (k, keys), (v, keys))), **options)


# ---------------------------------------------------------------- 64-bit offsets


def test_all_tensors_past_31_bits():
    heads = 16
    seqlen = PAST_31_BITS // (heads * 128) + 300
    q, k, v = (randn(1, seqlen, heads, 128) for _ in range(3))
    assert q.numel() > PAST_31_BITS
    result = run(q, k, v, causal=True, window=(255, None))
    rows, keys = slice(seqlen - 300, seqlen), slice(seqlen - 555, seqlen)
    check(sliced(result, rows), q[:, rows], k[:, keys], v[:, keys], causal=True, window=(255, None))


@pytest.mark.parametrize("heads_first", [False, True])
def test_queries_past_31_bits(heads_first):
    heads = 16
    seqlen = PAST_31_BITS // (heads * 128) + 100
    q = randn(1, heads, seqlen, 128).transpose(1, 2) if heads_first else randn(1, seqlen, heads, 128)
    k, v = randn(1, 300, 1, 128), randn(1, 300, 1, 128)
    result = run(q, k, v)
    for rows in (slice(0, 100), slice(seqlen // 2, seqlen // 2 + 100), slice(seqlen - 100, seqlen)):
        check(sliced(result, rows), q[:, rows], k, v)


@pytest.mark.parametrize("heads_first", [False, True])
def test_keys_past_31_bits(heads_first):
    """Results are right in the first and the last heads of two batch entries of more than 2^31 elements each."""
    heads = 16
    seqlen = PAST_31_BITS // (heads * 128) + 100
    shape = (2, heads, seqlen, 128) if heads_first else (2, seqlen, heads, 128)
    k, v = (t.transpose(1, 2) if heads_first else t for t in (randn(*shape), randn(*shape)))
    q = randn(2, 70, 2 * heads, 128)
    assert k[0].numel() > PAST_31_BITS
    result = run(q, k, v)
    for head in (0, heads - 1):
        heads_q, head_kv = slice(2 * head, 2 * head + 2), slice(head, head + 1)
        for entry in (slice(0, 1), slice(1, 2)):
            mine = sliced(result, slice(None), heads_q, entry)
            check(mine, q[entry, :, heads_q], k[entry, :, head_kv], v[entry, :, head_kv])


def test_packed_tensors_past_31_bits():
    """The last sequence starts past 2^31 elements."""
    heads = 16
    first = PAST_31_BITS // (heads * 128) + 10
    cu = offsets((first, 0, 333))
    q, k, v = (randn(cu[-1], heads, 128) for _ in range(3))
    options = {"causal": True, "window": (255, None)}
    result = run(q, k, v, cu_seqlens_q=lengths_tensor(cu), cu_seqlens_k=lengths_tensor(cu), **options)
    rows = slice(first, cu[-1])
    check(sliced(result, rows), q[None, rows], k[None, rows], v[None, rows], **options)
    rows, keys = slice(first - 300, first), slice(first - 555, first)
    check(sliced(result, rows), q[None, rows], k[None, keys], v[None, keys], **options)


def test_lse_past_31_bits():
    heads = 16
    seqlen = PAST_31_BITS // heads + 100
    q, k, v = randn(1, seqlen, heads, 8), randn(1, 50, 1, 8), randn(1, 50, 1, 8)
    result = run(q, k, v)
    assert result.lse.numel() > PAST_31_BITS
    for rows in (slice(0, 100), slice(seqlen - 100, seqlen)):
        check(sliced(result, rows), q[:, rows], k, v)

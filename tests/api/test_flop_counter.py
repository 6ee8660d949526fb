"""torch's FlopCounterMode: exact if lengths have values, an upper bound if they have none (fake tensors)."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import onepass
from onepass.api import fast_path
from onepass.geometry.block_range import count_visible_pairs

INT32 = torch.int32
HEADS, HEADS_KV, D, DV = 4, 2, 8, 6
WINDOWS = [(None, None), (None, 0), (3, 0), (2, 1)]


def flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def pairs(seqlen_q, seqlen_k, window):
    """The number of visible pairs, counted one by one."""
    left, right = window
    shift = seqlen_k - seqlen_q
    return sum(
        (left is None or j >= i + shift - left) and (right is None or j <= i + shift + right)
        for i, j in itertools.product(range(seqlen_q), range(seqlen_k))
    )


def forward_flops(count):
    return 2 * HEADS * count * (D + DV)


def backward_flops(count):
    return 2 * HEADS * count * (3 * D + 2 * DV)


def tensors(*leading_q, keys, requires_grad=False):
    shapes = (*leading_q, HEADS, D), (*keys, HEADS_KV, D), (*keys, HEADS_KV, DV)
    return tuple(torch.randn(shape, requires_grad=requires_grad) for shape in shapes)


def lengths(*values):
    return torch.tensor(values, dtype=INT32)


def varlen(window, offsets_q=(0, 4, 4, 9), offsets_k=(0, 2, 7, 12), used=None, precision=None):
    q, k, v = tensors(offsets_q[-1], keys=(offsets_k[-1],), requires_grad=True)
    packed = {"cu_seqlens_q": lengths(*offsets_q), "cu_seqlens_k": lengths(*offsets_k)}
    used = None if used is None else lengths(*used)
    onepass.attention_varlen(q, k, v, **packed, window=window, seqused_k=used, precision=precision).sum().backward()


@pytest.mark.parametrize("precision", [None, "fp8"])
@pytest.mark.parametrize("window", WINDOWS)
def test_packed_sequences(window, precision):
    count = pairs(4, 2, window) + pairs(5, 5, window)
    assert flops(lambda: varlen(window, precision=precision)) == forward_flops(count) + backward_flops(count)
    count = pairs(4, 1, window) + pairs(5, 3, window)
    assert flops(lambda: varlen(window, used=(1, 5, 3))) == forward_flops(count) + backward_flops(count)


@pytest.mark.parametrize("window", WINDOWS)
def test_packed_sequences_without_values_are_counted_as_one(window):
    with FakeTensorMode():
        bound = flops(lambda: varlen(window, used=(1, 5, 3)))
    count = pairs(9, 12, window)
    assert bound == forward_flops(count) + backward_flops(count)
    assert bound >= flops(lambda: varlen(window))


def test_no_way_to_cut_packed_rows_has_more_pairs_than_one_sequence():
    sides = (None, 0, 1, 2, 4)
    for total_q, total_k, left, right in itertools.product(range(6), range(6), sides, sides):
        bound = count_visible_pairs(total_q, total_k, left, right)
        for m, n in itertools.product(range(total_q + 1), range(total_k + 1)):
            first = count_visible_pairs(m, n, left, right)
            assert first <= count_visible_pairs(m, total_k, left, right)
            assert first + count_visible_pairs(total_q - m, total_k - n, left, right) <= bound


@pytest.mark.parametrize("window", WINDOWS)
def test_dense_sequences(window):
    def call(used=None):
        q, k, v = tensors(2, 5, keys=(2, 7), requires_grad=True)
        onepass.attention(q, k, v, window=window, seqused_k=used and lengths(*used)).sum().backward()

    count = 2 * pairs(5, 7, window)
    assert flops(call) == forward_flops(count) + backward_flops(count)
    with FakeTensorMode():
        assert flops(call) == flops(lambda: call((3, 7))) == forward_flops(count) + backward_flops(count)
    count = pairs(5, 3, window) + pairs(5, 7, window)
    assert flops(lambda: call((3, 7))) == forward_flops(count) + backward_flops(count)


@pytest.mark.parametrize("window", WINDOWS)
def test_sequences_with_a_bias(window):
    """Modifiers are counted like calls without them: a window is the only one that leaves out pairs."""

    def call():
        q, k, v = tensors(2, 5, keys=(2, 7), requires_grad=True)
        onepass.attention(q, k, v, window=window, bias=torch.rand(1, 1, 5, 7)).sum().backward()

    count = 2 * pairs(5, 7, window)
    assert flops(call) == forward_flops(count) + backward_flops(count)


def decode(window, filled=(3, 9), seqlen_q=2, seqlen_new=0, in_pages=False, causal=True, cu_seqlens_q=None):
    keys = (8, 4) if in_pages else (2, 16)
    q, k, v = tensors(*((5,) if cu_seqlens_q else (2, seqlen_q)), keys=keys)
    options = {"page_table": torch.arange(8, dtype=INT32).view(2, 4)} if in_pages else {}
    if seqlen_new:
        options |= {"k_new": k.new_ones(2, seqlen_new, HEADS_KV, D), "v_new": v.new_ones(2, seqlen_new, HEADS_KV, DV)}
    if cu_seqlens_q:
        options["cu_seqlens_q"] = lengths(*cu_seqlens_q)
    onepass.attention_decode(q, k, v, cache_seqlens=lengths(*filled), window=window, causal=causal, **options)


@pytest.mark.parametrize("seqlen_new", [0, 2])
@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_decoding(window, in_pages, seqlen_new):
    fast_path.forget()
    seen = window[0], 0
    for _ in range(2):  # a repeated call is counted, too
        count = sum(pairs(2, n + seqlen_new, seen) for n in (3, 9))
        assert flops(lambda: decode(window, seqlen_new=seqlen_new, in_pages=in_pages)) == forward_flops(count)
    with FakeTensorMode():
        bound = flops(lambda: decode(window, seqlen_new=seqlen_new, in_pages=in_pages))
    assert bound == forward_flops(2 * pairs(2, 16, seen))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_decoding_packed_queries(window, causal):
    seen = (window[0], 0) if causal else window
    options = {"cu_seqlens_q": (0, 1, 4), "causal": causal}
    count = pairs(1, 3, seen) + pairs(3, 9, seen)
    assert flops(lambda: decode(window, **options)) == forward_flops(count)
    with FakeTensorMode():
        bound = flops(lambda: decode(window, **options))
    assert forward_flops(count) <= bound <= forward_flops(5 * 16)
    most = max(
        flops(lambda m=m: decode(window, filled=(16, 16), cu_seqlens_q=(0, m, 5), causal=causal)) for m in range(6)
    )
    assert most <= bound

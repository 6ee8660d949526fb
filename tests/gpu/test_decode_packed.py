"""attention_decode of packed queries on a GPU: prompts in chunks beside single tokens, over dense caches and pages."""

import itertools

import pytest
import torch
from decode_cases import DecodeCase, RandomDecodeCase, captured
from gpu_cases import BACKEND, IS_READY, NAN, ON_GPU, assert_rounded_alike, lengths_tensor, offsets, size

import onepass

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_READY, reason="needs a GPU with the kernels")]

FILLED, QUERIES = (3000, 64, 900, 1, 333), (129, 1, 0, 1, 70)
RANDOM = [RandomDecodeCase(seed, many_rows, packed=True) for many_rows in (False, True) for seed in range(size(60, 15))]


def packed(arguments, counts=QUERIES, behind=0):
    """Pack the first queries of each sequence, followed by rows of no sequence."""
    q, ends = arguments["q"], offsets(counts)
    rows = [*(t[:n] for t, n in zip(q, counts, strict=True)), q[0, :behind]]
    return arguments | {"q": torch.cat(rows), "cu_seqlens_q": lengths_tensor(ends)}


def arguments_of(page_size=16, heads=(8, 2), head_dim=128, filled=FILLED, counts=QUERIES, **more):
    case = DecodeCase(filled, max(counts), heads, (head_dim, head_dim), page_size)
    return packed(case.arguments(), counts, behind=3) | more


@pytest.mark.parametrize("case", RANDOM, ids=str)
def test_random_calls(case):
    """Random calls are right. `case.call().check()` repeats one of them."""
    call = case.call()
    support = onepass.supports(**call.arguments)
    if ON_GPU and case.many_rows and "max_seqlen_q" not in call.arguments:
        assert support.backend == BACKEND
    assert support.backend != "tiled" or not ON_GPU or "kv_block" in support.reason
    call.check()


MODIFIED = [RandomDecodeCase(seed, m, True, with_modifiers=True) for m in (False, True) for seed in range(1000, 1040)]


@pytest.mark.parametrize("case", MODIFIED[:: size(1, 4)], ids=str)
def test_random_calls_with_modifiers(case):
    """Random calls are right on whichever backend takes them."""
    case.call().check()


@pytest.mark.parametrize("case", [case for case in RANDOM if case.many_rows][:20], ids=str)
def test_the_ampere_kernels(case):
    """The Ampere kernels are right; other GPUs run them, and Hopper does for caches that TMA cannot read."""
    case.call().check(backend="sm80" if ON_GPU else None)


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize("num_splits", [1, 5])
def test_each_sequence_as_alone(page_size, num_splits):
    """Each sequence agrees with a dense call of it alone, and rows behind the last sequence are zeros."""
    together = arguments_of(page_size, num_splits=num_splits, return_lse=True)
    out, lse = onepass.attention_decode(**together)
    ends = offsets(QUERIES)
    for b, (start, end) in enumerate(itertools.pairwise(ends)):
        if start == end:
            continue
        names = ("page_table", "cache_seqlens") if page_size else ("k_cache", "v_cache", "cache_seqlens")
        alone = together | {name: together[name][b : b + 1] for name in names}
        del alone["cu_seqlens_q"]
        expected = onepass.attention_decode(**alone | {"q": together["q"][None, start:end]})
        assert_rounded_alike(out[start:end], expected.out[0])
        torch.testing.assert_close(lse[:, start:end], expected.lse[0], rtol=1e-4, atol=1e-4)
    assert (out[ends[-1] :] == 0).all()
    assert (lse[:, ends[-1] :] == -torch.inf).all()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("page_size", [None, 16])
def test_as_many_queries_each_are_a_batch(page_size, count):
    """Bits equal those of a call with dense q (batch, count, ...) that the kernel for few rows computes."""
    counts = (count,) * len(FILLED)
    dense = DecodeCase(FILLED, count, (8, 2), (128, 128), page_size).arguments() | {"num_splits": 3}
    expected = onepass.attention_decode(**dense, return_lse=True)
    given = packed(dense, counts) | {"max_seqlen_q": count}
    out, lse = onepass.attention_decode(**given, return_lse=True)
    assert torch.equal(out, expected.out.flatten(0, 1))
    assert torch.equal(lse, expected.lse.transpose(0, 1).flatten(1))
    if ON_GPU:
        assert onepass.supports(**given).backend == "sm80"
        del given["max_seqlen_q"]
        assert onepass.supports(**given).backend == BACKEND


def test_more_queries_than_said():
    """A max_seqlen_q below the number of queries affects only the choice of the kernel."""
    arguments = arguments_of(counts=(3, 1, 0, 20, 2), num_splits=2)
    out, expected = (onepass.attention_decode(**arguments, **more) for more in ({"max_seqlen_q": 1}, {}))
    assert_rounded_alike(out, expected)


@pytest.mark.parametrize(("page_size", "split_size"), [(None, 256), (16, 192)])
def test_equal_bits_in_any_batch(page_size, split_size):
    """With splits of a fixed number of keys, results do not depend on what else is in the call."""
    together = arguments_of(page_size, split_size=split_size, return_lse=True)
    out, lse = onepass.attention_decode(**together)
    ends = offsets(QUERIES)
    for b, (start, end) in enumerate(itertools.pairwise(ends)):
        names = ("page_table", "cache_seqlens") if page_size else ("k_cache", "v_cache", "cache_seqlens")
        alone = together | {name: together[name][b : b + 1] for name in names}
        alone |= {"q": together["q"][start:end], "cu_seqlens_q": lengths_tensor([0, end - start])}
        one = onepass.attention_decode(**alone)
        assert torch.equal(one.out, out[start:end])
        assert torch.equal(one.lse, lse[:, start:end])


def test_equal_bits_run_to_run():
    arguments = arguments_of(return_lse=True)
    first = onepass.attention_decode(**arguments)
    for _ in range(200 if ON_GPU else 2):
        for now, then in zip(onepass.attention_decode(**arguments), first, strict=True):
            assert torch.equal(now, then)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("key", [100, 2999])
def test_nan_of_a_hidden_key_stays_hidden(page_size, key):
    """A NaN in a value of the first sequence is hidden from its queries before that key and from other sequences."""
    arguments = arguments_of(page_size, num_splits=3)
    whole = onepass.attention_decode(**arguments)
    place = (arguments["page_table"][0, key // 16], key % 16) if page_size else (0, key)
    arguments["v_cache"][place] = NAN
    out = onepass.attention_decode(**arguments)
    positions = torch.arange(3000 - QUERIES[0], 3000, device=out.device)
    sees = torch.zeros(len(out), dtype=torch.bool, device=out.device)
    sees[: QUERIES[0]] = key <= positions
    assert out[sees].isnan().all()
    assert_rounded_alike(out[~sees], whole[~sees])


@pytest.mark.skipif(not ON_GPU, reason="needs graphs and synchronization of a GPU")
def test_graph_of_another_batch_without_synchronisation():
    """One graph serves all batches of at most as many rows: offsets and lengths are read when it is replayed."""
    arguments = arguments_of(return_lse=True)
    graph, results = captured(lambda: onepass.attention_decode(**arguments))
    for counts in (QUERIES, (1, 1, 1, 1, 1), (0, 60, 4, 1, 130)):
        arguments["cu_seqlens_q"].copy_(lengths_tensor(offsets(counts)))
        graph.replay()
        for now, expected in zip(results, onepass.attention_decode(**arguments), strict=True):
            assert torch.equal(now, expected)
        arguments["cache_seqlens"] -= 1
        arguments["cache_seqlens"].clamp_(min=0)

"""attention_decode on the CPU: splits agree with one pass, pages with a dense cache, random calls with the oracle."""

import itertools
from dataclasses import replace

import pytest
import torch
from decode_calls import random_decode_call

import onepass
from onepass import reference
from onepass.problem.decode import DecodeInputs
from onepass.tiled import decode
from onepass.validation.decode import check_decode

INT32 = torch.int32
NAN = float("nan")


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def lengths(*values):
    return torch.tensor(values, dtype=INT32)


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def dense(batch=2, seqlen_q=3, room=70, heads=(4, 2), head_dims=(8, 6), dtype=torch.float64):
    q = randn(batch, seqlen_q, heads[0], head_dims[0], dtype=dtype, seed=1)
    return q, *(randn(batch, room, heads[1], d, dtype=dtype, seed=2 + i) for i, d in enumerate(head_dims))


def in_pages(cache, filled, page_size, extra=3, seed=0):
    """The filled rows of a dense cache in random pages between pages of NaN, and the page table."""
    batch, room = cache.shape[:2]
    per_entry = -(-room // page_size)
    order = torch.randperm(batch * per_entry + extra, generator=torch.Generator().manual_seed(seed))
    table = order[: batch * per_entry].view(batch, per_entry).int()
    pages = cache.new_full((len(order), page_size, *cache.shape[2:]), NAN)
    for b in range(batch):
        for n in range(filled[b]):
            pages[table[b, n // page_size], n % page_size] = cache[b, n]
    return pages, table


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "options", [{"num_splits": 3}, {"split_size": 64}, {"num_splits": 2, "window": (5, -80)}], ids=str
)
def test_sinks_that_are_no_numbers_join_splits_as_they_join_a_whole_row(value, options):
    q, k, v = dense(room=200)
    sinks = torch.tensor([0.5, value, 1e4, -1e4], dtype=q.dtype)
    call = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths(200, 70), "sinks": sinks, "return_lse": True}
    window = {"window": options["window"]} if "window" in options else {}
    whole = onepass.attention_decode(**call, **window)
    for mine, right in zip(onepass.attention_decode(**call, **options), whole, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-12, equal_nan=True)
    if value == float("inf"):
        assert (whole.lse[:, 1] == value).all()
        assert (whole.out[:, :, 1] == 0).all()


@pytest.mark.parametrize("options", [{}, {"num_splits": 1}, {"num_splits": 3}, {"split_size": 64}], ids=str)
def test_partial_results_of_16_bits_in_float32(options):
    """A rank's result is merged with those of other ranks, so it is not rounded to 16 bits, even if it is whole."""
    q, k, v = dense(dtype=torch.bfloat16, head_dims=(8, 8))
    inputs = DecodeInputs(q, k, v, lengths(70, 33))
    numbers = {"num_splits": None, "split_size": None} | options
    given = dict.fromkeys(("window", "softcap", "softmax_scale"))
    flags = dict.fromkeys(("rotary_interleaved", "check_values", "return_lse"), False)
    problem = check_decode(inputs, causal=True, **numbers, **given, **flags)
    problem = replace(problem, attention=replace(problem.attention, float32_out=True))
    out, lse = decode.decode(problem, inputs)
    assert out.dtype == lse.dtype == torch.float32
    for b, n in enumerate((70, 33)):
        expected = reference.attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], causal=True)
        torch.testing.assert_close(out[b].double(), expected.out[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[b].double(), expected.lse[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "sizes"), [("tiled", {}), ("cpu", {"seqlen_q": 130, "head_dims": (32, 32)})], ids=str
)
def test_keys_of_equal_parts_give_equal_bits_in_any_batch_and_any_cache(backend, sizes):
    q, k, v = dense(batch=5, room=700, dtype=torch.bfloat16, **sizes)
    filled = lengths(700, 130, 64, 65, 3)
    options = {"split_size": 64, "return_lse": True, "backend": backend}
    together = onepass.attention_decode(q, k, v, cache_seqlens=filled, **options)
    for b in range(5):
        at = slice(b, b + 1)
        alone = onepass.attention_decode(
            q[at], k[at, : filled[b]], v[at, : filled[b]], cache_seqlens=filled[at], **options
        )
        assert torch.equal(alone.out, together.out[at])
        assert torch.equal(alone.lse, together.lse[at])


# ---------------------------------------------------------------- random calls


NUM_CALLS = 240


@pytest.mark.parametrize("first", range(0, NUM_CALLS, 20))
@pytest.mark.parametrize("packed", [False, True])
def test_random_calls(first, packed):
    for seed in range(first, first + (10 if packed else 20)):
        random_decode_call(seed, max_keys=140, packed=packed).check()


def test_random_calls_cover_the_options():
    calls = [random_decode_call(seed, max_keys=140).arguments for seed in range(NUM_CALLS)]
    counts = {name: sum(name in call for call in calls) for call in calls for name in call}
    required = {"q", "k_cache", "v_cache", "cache_seqlens"}
    new = {"k_new", "v_new", "rotary_cos", "rotary_sin", "rotary_interleaved"}
    of_e4m3 = {"k_descale", "v_descale", "kv_block"}
    splits = {"num_splits", "split_size"}
    options = {"causal", "window", "softcap", "softmax_scale", "sinks", "page_table"}
    modifiers = {"seqstart_k", "key_ranges", "query_ranges", "q_positions", "alibi_slopes", "bias"}
    rotary_positions = {"rotary_positions_q", "rotary_positions_k"}
    assert set(counts) == required | new | of_e4m3 | splits | options | modifiers | rotary_positions
    assert min(counts[name] for name in set(counts) - of_e4m3 - rotary_positions) >= 30
    assert min(counts[name] for name in rotary_positions) >= 5
    assert min(counts[name] for name in of_e4m3) >= 3
    assert sum("page_table" in call and "rotary_cos" in call and "k_new" in call for call in calls) >= 15


# ---------------------------------------------------------------- packed queries


def packed_call(counts=(3, 0, 5), behind=2, **changes):
    """Packed queries, with rows that belong to no sequence."""
    q, k, v = dense(batch=len(counts), seqlen_q=max(counts))
    rows = [*(t[:n] for t, n in zip(q, counts, strict=True)), q[0, :behind]]
    ends = lengths(*itertools.accumulate((0, *counts)))
    caches = {"k_cache": k, "v_cache": v, "cache_seqlens": lengths(*range(20, 20 + len(counts)))}
    return {"q": torch.cat(rows), "cu_seqlens_q": ends} | caches | changes


@pytest.mark.parametrize("num_splits", [1, 4])
def test_packed_queries_are_those_of_each_sequence(num_splits):
    call = packed_call(num_splits=num_splits, return_lse=True, window=(9, 0))
    out, lse = onepass.attention_decode(**call)
    assert (out.shape, lse.shape) == ((10, 4, 6), (4, 10))
    for b, rows in enumerate((slice(0, 3), slice(3, 3), slice(3, 8))):
        alone = {name: call[name][b : b + 1] for name in ("k_cache", "v_cache", "cache_seqlens")}
        expected = onepass.attention_decode(call["q"][None, rows], **alone, window=(9, 0), return_lse=True)
        same(out[rows], expected.out[0])
        same(lse[:, rows], expected.lse[0])
    assert (out[8:] == 0).all()
    assert (lse[:, 8:] == -torch.inf).all()


NOT_PACKED = {
    "q: expected 3 dimensions (total_tokens, num_heads, head_dim), got 4": {"q": torch.zeros(3, 1, 4, 8).double()},
    "cu_seqlens_q: expected dtype int32, got int64": {"cu_seqlens_q": torch.tensor([0, 3, 3, 8])},
    "cu_seqlens_q: expected an int32 torch.Tensor, got list": {"cu_seqlens_q": [0, 3, 3, 8]},
    "cu_seqlens_q: expected shape (batch + 1,), one more offset": {"cu_seqlens_q": lengths(0, 3)[None]},
    "cu_seqlens_q: expected shape (batch + 1,), got (0,)": {"cu_seqlens_q": lengths()},
    "cu_seqlens_q: expected to start at 0, got 1": {"cu_seqlens_q": lengths(1, 3, 3, 8)},
    "cu_seqlens_q: expected offsets that never decrease, got [0, 3, 2, 8]": {"cu_seqlens_q": lengths(0, 3, 2, 8)},
    "cu_seqlens_q: expected a last offset of at most 10 tokens, got 11": {"cu_seqlens_q": lengths(0, 3, 3, 11)},
    "cache_seqlens: expected shape (2,), one per batch entry, got (3,)": {"cu_seqlens_q": lengths(0, 3, 8)},
    "k_cache: expected batch 3 like cu_seqlens_q (or pages, with a page_table), got 4": {
        name: torch.zeros(4, 70, 2, 8, dtype=torch.float64) for name in ("k_cache", "v_cache")
    },
    "k_new: expected None with cu_seqlens_q": dict.fromkeys(("k_new", "v_new"), torch.zeros(3, 1, 2, 8)),
    "rotary_cos: expected None with cu_seqlens_q": dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(80, 4)),
    "max_seqlen_q: expected an int, a tensor of one integer or None, got 2.5": {"max_seqlen_q": 2.5},
    "max_seqlen_q: expected at least 0, got -1": {"max_seqlen_q": -1},
}


@pytest.mark.parametrize("message", NOT_PACKED)
def test_refusals_of_packed_queries(message):
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
        onepass.attention_decode(**packed_call(**NOT_PACKED[message]))
    assert str(raised.value).startswith(message)


def test_most_queries_are_of_packed_ones():
    q, k, v = dense()
    with pytest.raises(ValueError, match="max_seqlen_q: expected None without cu_seqlens_q, got 3"):
        onepass.attention_decode(q, k, v, cache_seqlens=lengths(9, 9), max_seqlen_q=3)


def test_packed_queries_without_a_sequence():
    call = packed_call(counts=(0,), behind=0)
    empty = call | {name: call[name][:0] for name in ("k_cache", "v_cache", "cache_seqlens")}
    assert onepass.attention_decode(**empty | {"cu_seqlens_q": lengths(0)}).shape == (0, 4, 6)
    behind = onepass.attention_decode(**empty | {"cu_seqlens_q": lengths(0), "q": torch.ones(2, 4, 8).double()})
    assert (behind == torch.zeros(2, 4, 6)).all()


# ---------------------------------------------------------------- pages


@pytest.mark.parametrize("page_size", [1, 3, 16, 70, 128])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_pages_are_one_cache(page_size, num_splits):
    filled = (66, 5)
    q, k, v = dense()
    new = {"k_new": randn(2, 4, 2, 8, seed=5), "v_new": randn(2, 4, 2, 6, seed=6)}
    (k_pages, table), (v_pages, _) = (in_pages(t, filled, page_size) for t in (k, v))
    before = k_pages.clone(), v_pages.clone()
    options = {"cache_seqlens": lengths(*filled), "num_splits": num_splits}
    out = onepass.attention_decode(q, k_pages, v_pages, page_table=table, **options, **new)
    same(out, onepass.attention_decode(q, k, v, **options, **new))
    written = torch.zeros(k_pages.shape[:2], dtype=torch.bool)
    for b, n in ((b, n + i) for b, n in enumerate(filled) for i in range(4)):
        written[table[b, n // page_size], n % page_size] = True
    for now, was, cache in ((k_pages, before[0], k), (v_pages, before[1], v)):
        assert torch.equal(now[~written].nan_to_num(9), was[~written].nan_to_num(9))
        for b, n in ((b, n + i) for b, n in enumerate(filled) for i in range(4)):
            assert torch.equal(now[table[b, n // page_size], n % page_size], cache[b, n])


def test_a_cache_of_one_page():
    q, k, v = dense(batch=1, room=16)
    table = lengths(0)[None]
    out = onepass.attention_decode(q, k, v, cache_seqlens=lengths(9), page_table=table)
    same(out, onepass.attention_decode(q, k, v, cache_seqlens=lengths(9)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_caches_of_inference_mode_take_new_keys(dtype):
    """torch itself lets nobody write to them outside of that mode."""
    new = randn(2, 3, 2, 8, dtype=torch.float32)
    with torch.inference_mode():
        caches = [torch.zeros(2, 9, 2, 8).to(dtype) for _ in "kv"]
    call = {"cache_seqlens": lengths(2, 6), "k_new": new, "v_new": new}
    onepass.attention_decode(new.repeat(1, 1, 2, 1), *caches, **call)
    for cache in caches:
        for b, n in enumerate((2, 6)):
            assert torch.equal(cache[b, n : n + 3].float(), new[b].to(dtype).float())
            assert cache[b].float().count_nonzero() == new[b].to(dtype).float().count_nonzero()


def test_a_cache_without_pages():
    q, k, v = dense(room=16)
    call = {"q": q, "k_cache": k[:0], "v_cache": v[:0], "cache_seqlens": lengths(0, 0)}
    out, lse = onepass.attention_decode(**call, page_table=torch.zeros(2, 0, dtype=INT32), return_lse=True)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    with pytest.raises(ValueError, match="k_cache: expected at least 1 page"):
        onepass.attention_decode(**call, page_table=torch.zeros(2, 5, dtype=INT32))


def test_sequences_share_pages():
    """A common prefix of 8 keys lies in two shared pages; entries of a table past the keys are not read."""
    q, k, v = dense(batch=1, room=16)
    k_pages, v_pages = (t[0].unflatten(0, (4, 4)).contiguous() for t in (k, v))
    table = torch.tensor([[0, 1, 2, -7], [0, 1, 3, 99]], dtype=INT32)
    q = q.expand(2, -1, -1, -1)
    out = onepass.attention_decode(q, k_pages, v_pages, cache_seqlens=lengths(12, 11), page_table=table)
    for b, rows in enumerate(([*range(12)], [*range(8), 12, 13, 14])):
        same(out[b : b + 1], onepass.attention(q[b : b + 1], k[:, rows], v[:, rows], causal=True))


# ---------------------------------------------------------------- torch


def call_of(**changes):
    q, k, v = dense(dtype=torch.float32)
    (k_pages, table), (v_pages, _) = (in_pages(t.nan_to_num(0), (70, 70), 16) for t in (k, v))
    arguments = {
        "q": q,
        "k_cache": k_pages.nan_to_num(0),
        "v_cache": v_pages.nan_to_num(0),
        "cache_seqlens": lengths(60, 5),
        "page_table": table,
        "k_new": randn(2, 3, 2, 8, dtype=torch.float32, seed=5),
        "v_new": randn(2, 3, 2, 6, dtype=torch.float32, seed=6),
    }
    return arguments | changes


def test_opcheck():
    for with_new in (True, False):
        given = call_of(**({} if with_new else {"k_new": None, "v_new": None}))
        order = ("q", "k_cache", "v_cache", "cache_seqlens", "page_table")
        options = (0.3, None, 0, None, 2, None, False, False, None, None, "tiled")
        arguments = (*(given[name] for name in order), None, None, None, None, None, None)
        if with_new:
            arguments += given["k_new"], given["v_new"]
        operator = torch.ops.onepass.decode_append if with_new else torch.ops.onepass.decode
        torch.library.opcheck(operator.default, (*arguments, *options))
    packed = (given["q"].flatten(0, 1), *arguments[1:-1], lengths(0, 4, 6))
    torch.library.opcheck(torch.ops.onepass.decode.default, (*packed, *options[:-2], 4, "tiled"))


def test_merge_partials_as_an_operator(monkeypatch):
    """The operator merges packed and dense partials, in sequences and stacked; on the CPU it computes in PyTorch."""
    outs, lses = randn(3, 2, 5, 4, 8, seed=1), randn(3, 2, 4, 5, seed=2)
    torch.library.opcheck(torch.ops.onepass.merge_partials.default, (outs, lses))
    expected = onepass.merge_partials(outs, lses)
    monkeypatch.setattr("onepass.api.partials.merges_in_one_kernel", lambda outs, lses: True)
    for given in ((outs, lses), (list(outs), list(lses)), (outs.requires_grad_(), lses)):
        actual = onepass.merge_partials(*given)
        assert torch.equal(actual.out, expected.out)
        assert torch.equal(actual.lse, expected.lse)


def test_compiled_without_a_break():
    compiled = torch.compile(onepass.attention_decode, fullgraph=True, backend="aot_eager")
    first, second = call_of(), call_of()
    for _ in range(2):
        out, lse = compiled(**first, return_lse=True, num_splits=2)
        expected = onepass.attention_decode(**second, return_lse=True, num_splits=2)
        assert torch.equal(out, expected.out)
        assert torch.equal(lse, expected.lse)
        first["cache_seqlens"], second["cache_seqlens"] = (x["cache_seqlens"] + 3 for x in (first, second))
    for name in ("k_cache", "v_cache"):
        assert torch.equal(first[name], second[name])


def test_a_window_over_a_ring_of_pages():
    """A table that has each page again and again: new keys are written over keys that the window has left behind."""
    caches = [randn(2, 60, 2, 8, dtype=torch.float32, seed=s) for s in (1, 2)]
    for cache in caches:
        cache[0, 0] = 0.0  # as in the pages before the first step
    pages = [torch.zeros(8, 4, 2, 8), torch.zeros(8, 4, 2, 8)]
    table = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]], dtype=INT32).repeat(1, 4)
    q = randn(2, 3, 4, 8, dtype=torch.float32)
    for step in range(1, 54, 3):
        filled = lengths(step, max(0, step - 1))
        new = [torch.stack([t[b, n : n + 3] for b, n in enumerate(filled.tolist())]) for t in caches]
        options = {"cache_seqlens": filled, "causal": True, "window": (10, 0)}
        out = onepass.attention_decode(q, *pages, page_table=table, k_new=new[0], v_new=new[1], **options)
        options["cache_seqlens"] = filled + 3
        assert torch.equal(out, onepass.attention_decode(q, *caches, **options))


# ---------------------------------------------------------------- refusals

COS = torch.ones(80, 4)
REFUSED = {
    "page_table[1, 0]: expected a page 0 to 12 of the cache, got 13": {
        "page_table": torch.full((2, 5), 13, dtype=INT32).index_fill(0, torch.tensor(0), 1)
    },
    "page_table[0, 0]: expected a page 0 to 12 of the cache, got -1": {
        "page_table": torch.full((2, 5), -1, dtype=INT32)
    },
    "page_table[1, 0]: expected a page with rows 5 to 7 for new keys alone, got page 4": {
        "page_table": torch.tensor([[1, 2, 3, 4, 5], [4, 6, 7, 8, 9]], dtype=INT32)
    },
    "page_table[1, 0]: expected a page with rows 5 to 7 for new keys alone, got page 2": {
        "page_table": torch.tensor([[1, 2, 3, 4, 5], [2, 6, 7, 8, 9]], dtype=INT32)
    },
    "page_table[0, 3]: expected a page with rows 12 to 14 for new keys alone, got page 1": {
        "page_table": torch.tensor([[1, 2, 3, 1, 5], [6, 7, 8, 9, 10]], dtype=INT32)
    },
    "page_table: expected shape (2, max_pages), (batch, max_pages), got (3, 5)": {
        "page_table": torch.zeros(3, 5, dtype=INT32)
    },
    "page_table: expected dtype int32, got int64": {"page_table": torch.zeros(2, 5, dtype=torch.int64)},
    "k_cache: expected batch 2 like q (or pages, with a page_table), got 13": {"page_table": None},
    "cache_seqlens: expected 0 to 77, the 80 positions of the cache less 3 new keys, got 78": {
        "cache_seqlens": lengths(78, 0)
    },
    "cache_seqlens: expected 0 to 77, the 80 positions of the cache less 3 new keys, got -1": {
        "cache_seqlens": lengths(5, -1)
    },
    "cache_seqlens: expected shape (2,), one per batch entry, got (3,)": {"cache_seqlens": lengths(1, 2, 3)},
    "cache_seqlens: expected an int32 torch.Tensor, got int": {"cache_seqlens": 5},
    "v_new: expected a torch.Tensor where the other of k_new and v_new is given, got None": {"v_new": None},
    "k_new: expected shape (2, 3, 2, 8), got (2, 3, 4, 8)": {"k_new": torch.zeros(2, 3, 4, 8)},
    "k_new: expected at most 80 keys, the capacity of the cache, got 81": {
        "k_new": torch.zeros(2, 81, 2, 8),
        "v_new": torch.zeros(2, 81, 2, 6),
    },
    "k_cache: expected memory of its own for every element": {
        "k_cache": torch.zeros(13, 16, 1, 8).expand(-1, -1, 2, -1)
    },
    "v_cache: expected shape (13, 16, 2, head_dim_v) like k_cache, got (12, 16, 2, 6)": {
        "v_cache": torch.zeros(12, 16, 2, 6)
    },
    "q: expected a number of heads divisible by the 2 heads of the cache, got 3": {"q": torch.zeros(2, 3, 3, 8)},
    "k_cache: expected no requires_grad where new keys are written to it in place": {
        "k_cache": torch.zeros(13, 16, 2, 8, requires_grad=True)
    },
    "v_cache: expected no requires_grad where new keys are written to it in place": {
        "v_cache": torch.zeros(13, 16, 2, 6, requires_grad=True)
    },
    "num_splits: expected 1 to 256": {"num_splits": 0},
    "num_splits: expected an int or None, got 2.0": {"num_splits": 2.0},
    "split_size: expected a multiple of 64 keys, got 100": {"split_size": 100},
    "split_size: expected None with num_splits, got 64": {"split_size": 64, "num_splits": 2},
    "rotary_sin: expected a torch.Tensor where the other of rotary_cos and rotary_sin is given, got None": {
        "rotary_cos": COS
    },
    "rotary_cos: expected shape (positions, rotary_dim / 2) with rotary_dim up to 8, got (80, 5)": {
        "rotary_cos": torch.ones(80, 5),
        "rotary_sin": torch.ones(80, 5),
    },
    "rotary_sin: expected torch.float32 of shape (80, 4) like rotary_cos": {
        "rotary_cos": COS,
        "rotary_sin": torch.ones(80, 3),
    },
    "rotary_cos: expected a row for each of the 63 positions, got 62": {
        "rotary_cos": COS[:62],
        "rotary_sin": COS[:62],
    },
    "rotary_interleaved: expected a bool, got 1": {"rotary_interleaved": 1},
    "check_values: expected a bool, got None": {"check_values": None},
    "backend: expected one of cpu, sm80, sm90, tiled or None, got 'fast'": {"backend": "fast"},
    "backend sm80: expected tensors on cuda, got cpu": {"backend": "sm80"},
    "backend sm90: expected tensors on cuda, got cpu": {"backend": "sm90"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_leave_the_cache_alone(message):
    arguments = call_of(**REFUSED[message])
    before = [arguments[name].clone() for name in ("k_cache", "v_cache")]
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
        onepass.attention_decode(**arguments)
    assert str(raised.value).startswith(message)
    assert torch.equal(arguments["k_cache"], before[0])
    assert torch.equal(arguments["v_cache"], before[1])


def test_a_cache_that_requires_a_gradient_is_written_where_none_is_recorded():
    call, expected = call_of(), call_of()
    with torch.no_grad():
        for name in ("k_cache", "v_cache"):
            call[name] = call[name].clone().requires_grad_()
        assert torch.equal(onepass.attention_decode(**call), onepass.attention_decode(**expected))
        assert all(torch.equal(call[name], expected[name]) for name in ("k_cache", "v_cache"))


def test_pages_that_are_only_read_may_be_shared():
    table = torch.tensor([[1, 2, 3, 4, 1], [1, 5, 7, 4, 5]], dtype=INT32)
    call = call_of(page_table=table, cache_seqlens=lengths(60, 20))
    out = onepass.attention_decode(**call)
    assert torch.equal(call["k_cache"][4, 12:15], call["k_new"][0])
    assert torch.equal(call["k_cache"][5, 4:7], call["k_new"][1])
    for b in range(2):
        one = {name: call[name][b : b + 1] for name in ("q", "page_table", "k_new", "v_new", "cache_seqlens")}
        assert torch.equal(onepass.attention_decode(**(call | one)), out[b : b + 1])


@pytest.mark.parametrize("changes", [{"v_cache": torch.zeros(13, 16, 2, 0)}, {"q": torch.zeros(2, 3, 4, 0)}])
def test_a_head_dim_of_zero_is_refused(changes):
    if "q" in changes:
        changes = {**changes, "k_cache": torch.zeros(13, 16, 2, 0)}
    k, v = torch.zeros(13, 16, 2, 8), torch.zeros(13, 16, 2, 6)
    call = {"q": torch.zeros(2, 3, 4, 8), "k_cache": k, "v_cache": v, "page_table": torch.zeros(2, 5, dtype=INT32)}
    with pytest.raises(ValueError, match=r"(q|v_cache): expected .*head_dim"):
        onepass.attention_decode(**(call | changes), cache_seqlens=lengths(3, 4))


def test_workspace_bytes():
    sizes = {"batch": 2, "seqlen_q": 3, "num_heads_q": 8, "head_dim_v": 128}
    assert onepass.split_workspace_bytes(4, **sizes) == 4 * 2 * 3 * 8 * (128 + 1) * 4
    assert onepass.split_workspace_bytes(1, **sizes) == 0
    with pytest.raises(ValueError, match="num_splits: expected at least 1, got 0"):
        onepass.split_workspace_bytes(0, **sizes)
    for name, least in (("batch", 0), ("seqlen_q", 0), ("num_heads_q", 0), ("head_dim_v", 1)):
        onepass.split_workspace_bytes(4, **sizes | {name: least})
        with pytest.raises(ValueError, match=f"{name}: expected at least {least}, got {least - 1}"):
            onepass.split_workspace_bytes(4, **sizes | {name: least - 1})

"""flash-attn 3's functions over caches: pages, new keys, left padding and e4m3, compared with the float64 oracle."""

import pytest
import torch
from flash_attn_3_cases import (
    DESCALES,
    DTYPE,
    E4M3,
    FILLED,
    INT32,
    OFFSETS_K,
    OFFSETS_Q,
    OPTIONS,
    cache,
    descales,
    oracle,
    randn,
    real,
)

from onepass.compat import flash_attn_3 as fa3
from onepass.compat.cache_update import append

CACHE_OPTIONS = [*OPTIONS, ({"window_size": (2, 4)}, {"window": (2, 4)})]


def test_kvcache_takes_rotary_positions_where_nothing_is_rotated():
    """flash-attn 3 does not look at them then, and its own tests pass them."""
    q, (k_cache, v_cache) = randn(3, 2, 4, 8), cache()
    outs = [
        fa3.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=FILLED, rotary_seqlens=positions)
        for positions in (None, FILLED, FILLED - 4)
    ]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(("theirs", "ours"), CACHE_OPTIONS)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("page_size", [None, 2, 7])
@pytest.mark.parametrize("has_starts", [False, True])
def test_kvcache(theirs, ours, is_packed, page_size, has_starts):
    """Packed queries and new keys of different numbers, rotary positions of their own, picked entries and pages."""
    counts_q, counts_new = ([3, 1, 4], [2, 0, 3]) if is_packed else ([2] * 3, [2] * 3)
    q, k, v = (randn(sum(n), h, 8, seed=h) for n, h in ((counts_q, 4), (counts_new, 2), (counts_new, 2)))
    offsets_q, offsets_new = (torch.tensor([0, *n]).cumsum(0).int() for n in (counts_q, counts_new))
    caches = cache()
    starts = torch.tensor([3, 0, 1], dtype=INT32) if has_starts else None
    turns = torch.tensor([5, 1, 0], dtype=INT32)  # rotary_seqlens
    angles = torch.arange(14)[:, None] * torch.tensor([1.0, 0.3], dtype=DTYPE)
    cos, sin = angles.cos(), angles.sin()

    def turned(x, positions):
        a, b, rest = x.split([2, 2, 4], -1)
        c, s = cos[positions][:, None], sin[positions][:, None]
        return torch.cat([a * c - b * s, a * s + b * c, rest], -1)

    full, rows = [c.clone() for c in caches], []
    for b, n in enumerate(FILLED.tolist()):
        own, new = slice(*offsets_q[b : b + 2]), slice(*offsets_new[b : b + 2])
        steps = torch.arange(counts_q[b]) * bool(theirs)
        rows.append(turned(q[own], turns[b] + steps))
        full[0][b, n : n + counts_new[b]] = turned(k[new], turns[b] + torch.arange(counts_new[b]))
        full[1][b, n : n + counts_new[b]] = v[new]
    picked = torch.tensor([2, 4, 0], dtype=INT32)
    given, table = [torch.full((5, 14, 2, 8), torch.nan, dtype=DTYPE) for _ in range(2)], None
    for g, c in zip(given, caches, strict=True):
        g[picked.long()] = c
    if page_size is not None:
        table = torch.randperm(5 * (14 // page_size), generator=torch.Generator().manual_seed(3)).view(5, -1).int()
        pages = [torch.empty(table.numel(), page_size, 2, 8, dtype=DTYPE) for _ in range(2)]
        for p, g in zip(pages, given, strict=True):
            p[table.long()] = g.unflatten(1, (-1, page_size))
        given = pages
    shaped = [q, k, v] if is_packed else [t.unflatten(0, (3, -1)) for t in (q, k, v)]
    out, lse, *empty = fa3.flash_attn_with_kvcache(
        shaped[0],
        *given,
        *shaped[1:],
        rotary_cos=cos,
        rotary_sin=sin,
        cache_seqlens=FILLED,
        cache_batch_idx=picked,
        cache_leftpad=starts,
        page_table=table,
        cu_seqlens_q=offsets_q if is_packed else None,
        cu_seqlens_k_new=offsets_new if is_packed else None,
        max_seqlen_q=4 if is_packed else None,
        rotary_seqlens=turns,
        rotary_interleaved=False,
        scheduler_metadata=torch.empty(0, dtype=INT32),
        return_softmax_lse=True,
        **theirs,
    )
    assert [t.numel() for t in empty] == [0, 0]
    for g, c in zip(given, full, strict=True):
        whole = g if table is None else g[table.long()].flatten(1, 2)
        torch.testing.assert_close(whole[picked.long()], c, equal_nan=True)
        assert whole[[1, 3]].isnan().all()
    for b, n in enumerate(FILLED.tolist()):
        own, end = slice(*offsets_q[b : b + 2]), n + counts_new[b]
        start = 0 if starts is None else min(int(starts[b]), end)
        expected = oracle(rows[b][None], *(c[b : b + 1, start:end] for c in full), ours, start)
        found, stats = (out[own], lse[:, own]) if is_packed else (out[b], lse[b])
        torch.testing.assert_close(found, expected.out[0])
        torch.testing.assert_close(stats, expected.lse[0])


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("page_size", [None, 7])
@pytest.mark.parametrize("theirs", [{"causal": True}, {"attention_chunk": 6}])
def test_kvcache_of_e4m3(is_packed, page_size, theirs):
    """New keys are stored as given; descales belong to batch entries."""
    q, k, v = (randn(6, h, 8, seed=h).to(E4M3) for h in (4, 2, 2))
    offsets = torch.tensor([0, 2, 4, 6], dtype=INT32)
    caches, given = cache(E4M3), descales(3)
    full = [c.view(torch.uint8).clone() for c in caches]
    for b, n in enumerate(FILLED.tolist()):
        for c, new in zip(full, (k, v), strict=True):
            c[b, n : n + 2] = new[2 * b : 2 * b + 2].view(torch.uint8)
    table = None
    if page_size is not None:
        table = torch.tensor([[3, 0], [5, 1], [2, 4]], dtype=INT32)
        pages = [torch.empty(6, 7, 2, 8, dtype=torch.uint8) for _ in range(2)]
        for p, c in zip(pages, caches, strict=True):
            p[table.long()] = c.view(torch.uint8).unflatten(1, (2, 7))
        caches = [p.view(E4M3) for p in pages]
    shaped = [q, k, v] if is_packed else [t.unflatten(0, (3, -1)) for t in (q, k, v)]
    cut = {"cu_seqlens_q": offsets, "cu_seqlens_k_new": offsets, "max_seqlen_q": 2} if is_packed else {}
    out = fa3.flash_attn_with_kvcache(
        shaped[0],
        *caches,
        *shaped[1:],
        cache_seqlens=FILLED,
        page_table=table,
        **cut,
        **theirs,
        **dict(zip(DESCALES.split(), given, strict=True)),
    )
    assert out.dtype == torch.bfloat16
    out = out if is_packed else out.flatten(0, 1)
    for c, expected in zip(caches, full, strict=True):
        whole = c.view(torch.uint8) if table is None else c.view(torch.uint8)[table.long()].flatten(1, 2)
        assert torch.equal(whole, expected)
    for b, n in enumerate(FILLED.tolist()):
        own = [q[None, 2 * b : 2 * b + 2], *(c[b : b + 1, : n + 2].view(E4M3) for c in full)]
        values = [real(t, d[b : b + 1]) for t, d in zip(own, given, strict=True)]
        expected = oracle(*values, {"causal": True} if "causal" in theirs else {"chunk": 6})
        # q is scaled in bfloat16, and so is out
        torch.testing.assert_close(out[2 * b : 2 * b + 2].double(), expected.out[0], atol=0.03, rtol=0.03)


@pytest.mark.parametrize("page_size", [None, 7])
def test_packed_new_keys_may_fill_a_cache(page_size):
    """The number of new tokens is compared with the room in the cache; the number of heads does not count."""
    caches, table = [randn(2, 14, 2, 8, seed=s) for s in range(2)], None
    if page_size:
        caches, table = [c.reshape(4, 7, 2, 8) for c in caches], torch.tensor([[0, 1], [2, 3]], dtype=INT32)
    q, k, v = randn(2, 4, 8, seed=2), randn(2, 2, 8, seed=3), randn(2, 2, 8, seed=4)
    offsets = torch.tensor([0, 1, 2], dtype=INT32)
    cut = {"cu_seqlens_q": offsets, "cu_seqlens_k_new": offsets, "max_seqlen_q": 1}
    lengths = torch.tensor([13, 13], dtype=INT32)
    fa3.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, page_table=table, **cut)
    for c, new in zip(caches, (k, v), strict=True):
        assert torch.equal(c.reshape(2, 14, 2, 8)[:, 13], new)


@pytest.mark.parametrize("page_size", [None, 7])
def test_rows_past_the_last_offset_of_new_keys_are_not_written(page_size):
    caches = cache()
    table = torch.tensor([[3, 0], [5, 1], [2, 4]], dtype=INT32) if page_size else None
    given = [c.reshape(6, 7, 2, 8).clone() for c in caches] if page_size else [c.clone() for c in caches]
    q, k, v = randn(3, 4, 8), randn(5, 2, 8, seed=1), randn(5, 2, 8, seed=2)
    for offsets in ([0, 0, 2, 3], [0, 0, 0, 0]):
        before = [g.clone() for g in given]
        fa3.flash_attn_with_kvcache(
            q,
            *given,
            k,
            v,
            cache_seqlens=FILLED,
            page_table=table,
            cu_seqlens_q=torch.tensor([0, 1, 2, 3], dtype=INT32),
            cu_seqlens_k_new=torch.tensor(offsets, dtype=INT32),
        )
        for g, was, new in zip(given, before, (k, v), strict=True):
            whole, expected = (t if table is None else t[table.long()].flatten(1, 2) for t in (g, was.clone()))
            for b, n in enumerate(FILLED.tolist()):
                own = new[offsets[b] : offsets[b + 1]]
                expected[b, n : n + len(own)] = own
            torch.testing.assert_close(whole, expected, equal_nan=True)
        if page_size:
            given = before


def test_a_sequence_without_new_keys_may_read_a_page_that_another_continues():
    k_cache, v_cache = (randn(2, 8, 2, 8, seed=s) for s in (1, 2))
    k, v = (randn(1, 2, 8, seed=s) for s in (3, 4))
    out = fa3.flash_attn_with_kvcache(
        randn(1, 4, 8).expand(2, -1, -1),
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=torch.tensor([3, 3], dtype=INT32),
        page_table=torch.zeros(2, 1, dtype=INT32),
        cu_seqlens_q=torch.tensor([0, 1, 2], dtype=INT32),
        max_seqlen_q=1,
        cu_seqlens_k_new=torch.tensor([0, 1, 1], dtype=INT32),
    )
    assert torch.equal(k_cache[0, 3], k[0])
    for b, n in enumerate((4, 3)):
        expected = fa3.flash_attn_func(randn(1, 4, 8)[None], k_cache[:1, :n], v_cache[:1, :n])
        torch.testing.assert_close(out[b], expected[0, 0])


def test_no_new_keys_may_be_given_for_one_entry_twice():
    caches, none = [randn(2, 8, 2, 8, seed=s) for s in (1, 2)], torch.empty(2, 0, 2, 8, dtype=torch.float64)
    call = {"cache_seqlens": torch.tensor([3, 5], dtype=INT32), "cache_batch_idx": torch.tensor([1, 1])}
    q = randn(2, 1, 4, 8)
    out = fa3.flash_attn_with_kvcache(q, *caches, none, none, **call)
    assert torch.equal(out, fa3.flash_attn_with_kvcache(q, *caches, **call))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({}, None, None),
        ({"cache_seqlens": torch.tensor([1, 13, 1], dtype=INT32)}, RuntimeError, "expected at most 12, .* got 13"),
        ({"cache_seqlens": torch.tensor([1, -1, 1], dtype=INT32)}, ValueError, "cache_seqlens: expected 0 to 12"),
        ({"softcap": "1"}, TypeError, "softcap: expected a float"),
        ({"max_seqlen_q": 1.5}, TypeError, "max_seqlen_q: expected an int"),
        ({"page_table": torch.full((3, 2), 9, dtype=INT32)}, ValueError, r"page_table\[0, 0\]: expected a page 0 to 5"),
        (
            {"page_table": torch.tensor([[0, 1], [1, 3], [4, 5]], dtype=INT32)},
            ValueError,
            r"page_table\[0, 1\]: expected a page with rows 1 to 1 for new keys alone, got page 1, which",
        ),
        (
            {"cache_batch_idx": torch.tensor([0, 2, 2])},
            ValueError,
            "cache_batch_idx: expected distinct entries where k",
        ),
        (
            {"cache_batch_idx": torch.tensor([0, -1, 2])},
            ValueError,
            r"cache_batch_idx: expected entries 0 to 2 of the page table, got \[0, -1, 2\]",
        ),
        ({"k": lambda pages: pages[0, :5]}, ValueError, "k: expected memory apart from k_cache, to which new keys"),
        ({"v": lambda pages: pages[0, :5]}, ValueError, "v: expected memory apart from k_cache, to which new keys"),
        ({"q": lambda pages: pages[:3, :2].flatten(1, 2)}, ValueError, "q: expected memory apart from k_cache"),
    ],
)
def test_refusals_of_packed_keys_leave_the_pages_alone(changes, error, match):
    pages = [randn(6, 7, 2, 8, seed=s) for s in (1, 2)]
    before = [p.clone() for p in pages]
    call = {"q": randn(3, 4, 8), "k_cache": pages[0], "v_cache": pages[1], "k": randn(5, 2, 8), "v": randn(5, 2, 8)}
    call |= {"cu_seqlens_q": torch.tensor([0, 1, 2, 3], dtype=INT32), "cache_seqlens": FILLED}
    call |= {"cu_seqlens_k_new": torch.tensor([0, 1, 3, 5], dtype=INT32)}
    call |= {"page_table": torch.arange(6, dtype=INT32).view(3, 2)}
    if error is None:
        assert fa3.flash_attn_with_kvcache(**call).isfinite().all()
        return
    changes = {name: change(pages[0]) if callable(change) else change for name, change in changes.items()}
    with pytest.raises(error, match=match):
        fa3.flash_attn_with_kvcache(**(call | changes))
    assert all(torch.equal(p, b) for p, b in zip(pages, before, strict=True))


def packed_new_keys(offsets_q=(0, 1, 2, 3), offsets_new=(0, 1, 3, 5), rows=3, **changes):
    """A call with packed queries and packed new keys over pages."""
    count = len(offsets_q) - 1
    call = {"q": randn(rows, 4, 8), "k": randn(5, 2, 8, seed=3), "v": randn(5, 2, 8, seed=4)}
    call |= {"k_cache": randn(6, 7, 2, 8, seed=1), "v_cache": randn(6, 7, 2, 8, seed=2)}
    call |= {"cu_seqlens_q": torch.tensor(offsets_q, dtype=INT32), "cache_seqlens": FILLED[:count]}
    call |= {"cu_seqlens_k_new": torch.tensor(offsets_new, dtype=INT32)}
    return call | {"page_table": torch.arange(2 * count, dtype=INT32).view(count, 2)} | changes


ROTARY = {"rotary_cos": randn(16, 3, seed=7), "rotary_sin": randn(16, 3, seed=8)}


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"rotary_seqlens": torch.tensor([1, 0, 2], dtype=INT32)}])
def test_rows_past_the_last_offset_are_zeros_where_others_are_rotated(options):
    call = packed_new_keys(offsets_new=(0, 1, 3, 4)) | ROTARY | options
    expected = fa3.flash_attn_with_kvcache(**call)
    padded = packed_new_keys(offsets_new=(0, 1, 3, 4), rows=5) | ROTARY | options
    padded["q"][:3] = call["q"]
    found = fa3.flash_attn_with_kvcache(**padded)
    assert torch.equal(found[:3], expected)
    assert not found[3:].any()
    assert torch.equal(padded["k_cache"], call["k_cache"])


@pytest.mark.parametrize("tables", [{}, ROTARY])
def test_packed_calls_without_sequences_or_new_keys(tables):
    call = packed_new_keys(offsets_q=(0,), offsets_new=(0,), **tables)
    before = call["k_cache"].clone()
    assert not fa3.flash_attn_with_kvcache(**call).any()
    assert torch.equal(call["k_cache"], before)
    none = {name: torch.empty(0, 2, 8, dtype=DTYPE) for name in "kv"}
    call = packed_new_keys(offsets_new=(0, 0, 0, 0), **none)
    without = {name: t for name, t in call.items() if name not in ("k", "v", "cu_seqlens_k_new")}
    assert torch.equal(fa3.flash_attn_with_kvcache(**call), fa3.flash_attn_with_kvcache(**without))


def test_a_page_before_the_first_key_may_be_written_by_another_sequence():
    shared = packed_new_keys(page_table=torch.tensor([[4, 1], [2, 3], [4, 5]], dtype=INT32))
    with pytest.raises(ValueError, match="page_table"):
        fa3.flash_attn_with_kvcache(**shared)
    starts = torch.tensor([7, 0, 0], dtype=INT32)
    apart = packed_new_keys(page_table=torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=INT32), cache_leftpad=starts)
    found = fa3.flash_attn_with_kvcache(**shared, cache_leftpad=starts)
    torch.testing.assert_close(found, fa3.flash_attn_with_kvcache(**apart))


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_packed_new_keys_beside_a_cache_that_requires_a_gradient(name):
    call = packed_new_keys()
    expected = fa3.flash_attn_with_kvcache(**packed_new_keys())
    call[name].requires_grad_()
    found = fa3.flash_attn_with_kvcache(**call)
    assert torch.equal(found, expected)
    with pytest.raises(NotImplementedError, match="no backward"):
        found.sum().backward()
    with torch.no_grad():
        assert not fa3.flash_attn_with_kvcache(**call).requires_grad


@pytest.mark.parametrize("shape", [(0, 2), (14, 0), (14, 5)])
def test_rotary_tables_of_wrong_sizes_are_refused(shape):
    tables = dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(shape, dtype=DTYPE))
    with pytest.raises(ValueError, match=r"rotary_cos: expected shape .* with rotary_dim up to 8, got"):
        fa3.flash_attn_with_kvcache(**packed_new_keys(**tables))
    with pytest.raises(ValueError, match=r"rotary_sin: expected shape \(14, 4\) like rotary_cos, got \(14, 3\)"):
        fa3.flash_attn_with_kvcache(**packed_new_keys(rotary_cos=torch.ones(14, 4), rotary_sin=torch.ones(14, 3)))


def test_a_number_of_queries_below_zero_is_zero():
    """The host does not read such numbers, which a GPU must not take for a length."""
    q, k, v = randn(12, 4, 8), randn(19, 2, 8, seed=1), randn(19, 2, 8, seed=2)
    for options in ({}, {"causal": True, "attention_chunk": 3}):
        results = [
            fa3.flash_attn_varlen_func(
                q, k, v, OFFSETS_Q, OFFSETS_K, 7, 10, seqused_q=torch.tensor([n, 4], dtype=INT32), **options
            )
            for n in (0, -1)
        ]
        assert torch.equal(*results)
        assert not results[0][:7].any()
        assert results[0][7:11].all()


@pytest.mark.parametrize("lengths", [[5, 0], [0, 5], [3, 5], [9, 9], [-4, 1]])
def test_rows_without_room_are_dropped(lengths):
    """What a GPU does with lengths that are not checked there: rows that have a place are written, and nothing else."""
    caches = [torch.zeros(2, 4, 1, 1) for _ in range(2)]
    new = [torch.arange(1.0, 7).view(2, 3, 1, 1), torch.arange(11.0, 17).view(2, 3, 1, 1)]
    append((caches[0], caches[1]), None, (new[0], new[1]), torch.tensor(lengths, dtype=INT32), None)
    for c, rows in zip(caches, new, strict=True):
        expected = torch.zeros_like(c)
        for b, start in enumerate(lengths):
            for i in range(3):
                if 0 <= start + i < 4:
                    expected[b, start + i] = rows[b, i]
        assert torch.equal(c, expected)


def test_rows_for_pages_that_do_not_exist_are_dropped():
    caches = [torch.zeros(4, 2, 1, 1) for _ in range(2)]
    new = [torch.arange(1.0, 9).view(2, 4, 1, 1), torch.arange(11.0, 19).view(2, 4, 1, 1)]
    table = torch.tensor([[2, 4], [-1, 1]], dtype=INT32)
    append((caches[0], caches[1]), table, (new[0], new[1]), torch.tensor([0, 0], dtype=INT32), None)
    for c, rows in zip(caches, new, strict=True):
        expected = torch.zeros_like(c)
        expected[2], expected[1] = rows[0, :2], rows[1, 2:]
        assert torch.equal(c, expected)


@pytest.mark.parametrize("leading", [(2, 5), (7,)])
def test_combine(leading):
    outs, lses = randn(3, *leading, 4, 8).float(), randn(3, *leading, 4).float()
    lses[1, :1] = -torch.inf
    out, lse = fa3.flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    true = lses.double().logsumexp(0)
    torch.testing.assert_close(lse.double(), true)
    expected = ((lses - true).exp()[..., None] * outs.double()).sum(0)
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-6)
    into = torch.empty_like(outs[0])
    assert fa3.flash_attn_combine(outs, lses, into)[0] is into
    torch.testing.assert_close(into.double(), expected)
    with pytest.raises(ValueError, match="out_partial: expected 4 or 5 dimensions"):
        fa3.flash_attn_combine(outs[0, 0], lses)
    for error, match, options in (
        (ValueError, "out: expected shape", {"out": into[..., :4]}),
        (TypeError, r"out: expected a torch\.Tensor", {"out": 1}),
        (TypeError, r"out_dtype: expected a torch\.dtype or None, got 'bfloat16'", {"out_dtype": "bfloat16"}),
    ):
        with pytest.raises(error, match=f"^{match}"):
            fa3.flash_attn_combine(outs, lses, **options)
    for name, options in (("out_dtype", {"out_dtype": torch.int32}), ("out", {"out": into.int()})):
        with pytest.raises(TypeError, match=rf"^{name}: expected a floating point dtype, got torch\.int32"):
            fa3.flash_attn_combine(outs, lses, **options)


def test_scheduler_metadata_is_empty():
    metadata = fa3.get_scheduler_metadata(3, 1, 14, 4, 2, 8, FILLED, torch.bfloat16, num_splits=0)
    assert metadata.numel() == 0
    assert metadata.dtype == INT32


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"cache_seqlens": None}, ValueError, "cache_seqlens: expected an int"),
        (
            {"cache_seqlens": torch.tensor([13, 1, 1], dtype=INT32)},
            ValueError,
            "cache_seqlens: expected 0 to 12, .* got 13",
        ),
        ({"k": torch.ones(3, 2, 4, 8, dtype=DTYPE)}, ValueError, r"k: expected shape \(3, 2, 2, 8\)"),
        ({"v": None}, TypeError, "v: expected a torch.Tensor where the other"),
        ({"cu_seqlens_k_new": torch.zeros(3, dtype=INT32)}, ValueError, r"cu_seqlens_k_new: expected shape \(4,\)"),
        ({"rotary_seqlens": torch.zeros(2, dtype=INT32)}, ValueError, r"rotary_seqlens: expected shape \(3,\)"),
        (
            {"rotary_seqlens": FILLED - 4, "rotary_cos": torch.ones(14, 2), "rotary_sin": torch.ones(14, 2)},
            ValueError,
            r"rotary_seqlens: expected positions from 0 on, got \[4, -4, 1\]",
        ),
        ({"cu_seqlens_q": FILLED[:0]}, ValueError, r"cu_seqlens_q: expected shape \(batch \+ 1,\), got \(0,\)"),
        ({"k_descale": torch.ones(3, 2)}, NotImplementedError, "k_descale: .* only e4m3 tensors"),
        ({"cache_leftpad": torch.zeros(2, dtype=INT32)}, ValueError, r"cache_leftpad: expected shape \(3,\)"),
        ({"attention_chunk": 2, "softcap": "1"}, TypeError, "softcap"),
        ({"attention_chunk": 2, "cache_seqlens": 13}, ValueError, "cache_seqlens: expected 0 to 12, .* got 13"),
    ],
)
def test_refusals_leave_the_cache_alone(changes, error, match):
    caches = cache()
    before = [c.clone() for c in caches]
    call = {"q": randn(3, 1, 4, 8), "k_cache": caches[0], "v_cache": caches[1], "cache_seqlens": FILLED}
    call |= {"k": randn(3, 2, 2, 8), "v": randn(3, 2, 2, 8)}
    with pytest.raises(error, match=match):
        fa3.flash_attn_with_kvcache(**(call | changes))
    assert all(torch.equal(c.nan_to_num(9), b.nan_to_num(9)) for c, b in zip(caches, before, strict=True))


@pytest.mark.parametrize("hiding", [{"attention_chunk": 4}, {"window_size": (0, 0)}], ids=str)
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_ring_of_pages(is_packed, hiding):
    """A new key may take the row of an old key of its own sequence that the chunk or the window hides."""
    q, k, v = (torch.randn(1, 1, 2, 8) for _ in range(3))
    caches = [torch.randn(2, 4, 2, 8) for _ in range(2)]
    table = torch.tensor([[0, 1, 0]], dtype=INT32)
    options = {"cache_seqlens": torch.tensor([8], dtype=INT32), "page_table": table, "causal": True}
    if is_packed:
        q, options = q[0], options | {"cu_seqlens_q": torch.tensor([0, 1], dtype=INT32), "max_seqlen_q": 1}
    with pytest.raises(ValueError, match="page_table"):
        fa3.flash_attn_with_kvcache(q, *caches, k, v, **options)
    out = fa3.flash_attn_with_kvcache(q, *caches, k, v, **options, **hiding)
    torch.testing.assert_close(out, v.view_as(out))  # the only visible key


@pytest.mark.parametrize("has_new", [False, True])
def test_pages_of_a_batch_without_entries(has_new):
    none, table = torch.zeros(0, dtype=INT32), torch.zeros(0, 3, dtype=INT32)
    new = [torch.zeros(0, 1, 2, 8)] * 2 if has_new else [None, None]
    caches = torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8)
    out = fa3.flash_attn_with_kvcache(torch.zeros(0, 1, 4, 8), *caches, *new, cache_seqlens=none, page_table=table)
    assert out.shape == (0, 1, 4, 8)

"""flash-attn's functions: their signatures, their conventions, and values against the float64 oracle."""

import inspect

import numpy as np
import pytest
import torch

from onepass import reference
from onepass.compat import flash_attn
from onepass.testing import compare, compare_gradients, compare_lse, floor_of_out

COMMON = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
REQUIRED = {
    "flash_attn_func": "q k v",
    "flash_attn_kvpacked_func": "q kv",
    "flash_attn_qkvpacked_func": "qkv",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen",
}
KVCACHE = {
    "q": inspect.Parameter.empty,
    "k_cache": inspect.Parameter.empty,
    "v_cache": inspect.Parameter.empty,
    "k": None,
    "v": None,
    "rotary_cos": None,
    "rotary_sin": None,
    "cache_seqlens": None,
    "cache_batch_idx": None,
    "cache_leftpad": None,
    "block_table": None,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "rotary_interleaved": True,
    "alibi_slopes": None,
    "num_splits": 0,
    "return_softmax_lse": False,
}


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def qkv(batch=2, seqlen_q=7, seqlen_k=10, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32):
    return (
        randn(batch, seqlen_q, heads_q, head_dim, dtype=dtype, seed=1),
        randn(batch, seqlen_k, heads_kv, head_dim, dtype=dtype, seed=2),
        randn(batch, seqlen_k, heads_kv, head_dim, dtype=dtype, seed=3),
    )


def expect(actual, tensors, function=reference.attention, **options):
    """out (and lse) within the budget of the float64 oracle of the same inputs."""
    is_dense = function is reference.attention
    out, lse = actual if isinstance(actual, tuple) else (actual, None)
    oracle = function(*tensors, **options)
    plain = function(*tensors, **options, compute_dtype=out.dtype)
    floor = floor_of_out(out.dtype, *tensors, oracle, **options) if is_dense else 0.0
    comparison = compare("out", out, oracle.out, plain.out, floor=floor)
    assert comparison.ok, comparison
    if lse is not None:
        comparison = compare_lse(lse, oracle.lse)
        assert comparison.ok, comparison


@pytest.mark.parametrize("name", [*REQUIRED, "flash_attn_with_kvcache"])
def test_signature(name):
    if name == "flash_attn_with_kvcache":
        expected = KVCACHE
    else:
        expected = dict.fromkeys(REQUIRED[name].split(), inspect.Parameter.empty) | COMMON
        if name == "flash_attn_varlen_func":
            expected["block_table"] = None
    parameters = dict(inspect.signature(getattr(flash_attn, name)).parameters)
    if name == "flash_attn_with_kvcache":
        for of_flash_attn_3 in ("k_descale", "v_descale"):
            assert parameters.pop(of_flash_attn_3).kind is inspect.Parameter.KEYWORD_ONLY
    assert list(parameters) == list(expected)
    assert {n: p.default for n, p in parameters.items()} == expected
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters.values())


OPTIONS = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"window_size": (3, -1)}, {"window": (3, None)}),
    ({"window_size": (-1, 2)}, {"window": (None, 2)}),
    ({"window_size": (-7, 2)}, {"window": (None, 2)}),
    ({"window_size": (3, np.int64(-1))}, {"window": (3, None)}),
    ({"window_size": torch.tensor([3, -5])}, {"window": (3, None)}),
    ({"window_size": np.array([-1, 2])}, {"window": (None, 2)}),
    ({"window_size": [torch.tensor(2), 1]}, {"window": (2, 1)}),
    ({"causal": True, "window_size": (-1, -1)}, {"causal": True}),
    ({"window_size": [2, 1], "softmax_scale": 0.3}, {"window": (2, 1), "softmax_scale": 0.3}),
    ({"causal": True, "window_size": (4, 4), "softcap": 1.5}, {"causal": True, "window": (4, 4), "softcap": 1.5}),
]


@pytest.mark.parametrize(("theirs", "ours"), OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense(theirs, ours, dtype):
    tensors = qkv(dtype=dtype)
    out, lse, probabilities = flash_attn.flash_attn_func(*tensors, **theirs, return_attn_probs=True)
    assert probabilities.shape == (0,)
    assert probabilities.dtype == dtype
    expect((out, lse), tensors, **ours)
    assert torch.equal(flash_attn.flash_attn_func(*tensors, **theirs), out)


@pytest.mark.parametrize(("theirs", "ours"), OPTIONS)
def test_varlen(theirs, ours):
    q, k, v = (x.flatten(0, 1) for x in qkv(batch=3))
    lengths = {
        "cu_seqlens_q": torch.tensor([0, 5, 5, 21], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 9, 12, 30], dtype=torch.int32),
    }
    result = flash_attn.flash_attn_varlen_func(
        q, k, v, *lengths.values(), 16, 18, **theirs, return_attn_probs=True, deterministic=True
    )
    expect(result[:2], (q, k, v), reference.attention_varlen, **lengths, **ours)
    kv = torch.stack([k, v], 1)
    packed = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *lengths.values(), 16, 18, **theirs)
    assert torch.equal(packed, result[0])


@pytest.mark.parametrize(("theirs", "ours"), OPTIONS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_varlen_in_pages(theirs, ours, page_size):
    """Keys in random blocks, between blocks of NaN, give the results of keys without blocks."""
    q, k, v = (x.flatten(0, 1) for x in qkv(batch=3))
    starts, lengths = (0, 9, 12), (9, 3, 18)
    offsets = {
        "cu_seqlens_q": torch.tensor([0, 5, 5, 21], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 9, 12, 30], dtype=torch.int32),
    }
    counts = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(1)).int()
    table = torch.full((3, max(counts)), 99, dtype=torch.int32)
    pages = [torch.full((len(order), page_size, 2, 16), torch.nan) for _ in range(2)]
    for b, blocks in enumerate(order[:-2].split(counts)):
        table[b, : len(blocks)] = blocks
        for n in range(lengths[b]):
            for paged, rows in zip(pages, (k, v), strict=True):
                paged[blocks[n // page_size], n % page_size] = rows[starts[b] + n]
    result = flash_attn.flash_attn_varlen_func(
        q, *pages, *offsets.values(), 16, 18, **theirs, return_attn_probs=True, block_table=table
    )
    assert result[2].shape == (0,)
    expect(result[:2], (q, k, v), reference.attention_varlen, **offsets, **ours)
    out = flash_attn.flash_attn_varlen_func(q, *pages, *offsets.values(), 16, 18, **theirs, block_table=table)
    assert torch.equal(out, result[0])


def test_packed_forms():
    q, k, v = qkv(seqlen_q=9, seqlen_k=9, heads_q=2)
    options = {"causal": True, "softcap": 2.0, "softmax_scale": 0.4}
    expected = flash_attn.flash_attn_func(q, k, v, **options)
    stacked = torch.stack([q, k, v], 2)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(stacked, **options), expected)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, stacked[:, :, 1:], **options), expected)
    # positional options, in flash-attn's order
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(stacked, 0.0, 0.4, True, (-1, -1), 2.0), expected)

    flat = stacked.flatten(0, 1)
    cu_seqlens = torch.tensor([0, 9, 18], dtype=torch.int32)
    out = flash_attn.flash_attn_varlen_qkvpacked_func(flat, cu_seqlens, 9, **options)
    assert torch.equal(out, expected.flatten(0, 1))


def test_gradients():
    tensors = [t.requires_grad_() for t in qkv()]
    dout = randn(2, 7, 4, 16)
    flash_attn.flash_attn_func(*tensors, causal=True, window_size=(5, 0)).backward(dout)

    def gradients(dtype):
        copies = [t.detach().to(dtype).requires_grad_() for t in tensors]
        out = reference.attention(*copies, causal=True, window=(5, 0), compute_dtype=dtype).out
        return torch.autograd.grad(out, copies, dout.to(dtype))

    for t, oracle, plain in zip(tensors, gradients(torch.float64), gradients(torch.float32), strict=True):
        comparison = compare_gradients("gradient", t.grad, oracle, plain)
        assert comparison.ok, comparison


# --- the cache --------------------------------------------------------------------------------------------------------


def cache(batch=3, seqlen=12, filled=(), seed=5):
    """k and v caches whose unfilled positions are NaN, so that reading one would show."""
    caches = [randn(batch, seqlen, 2, 16, seed=seed + i) for i in (0, 1)]
    for c in caches:
        for b, n in enumerate(filled):
            c[b, n:] = torch.nan
    return caches


@pytest.mark.parametrize(("theirs", "ours"), OPTIONS)
@pytest.mark.parametrize("seqlen_new", [0, 1, 3])
def test_kvcache(theirs, ours, seqlen_new):
    filled = (8, 0, 5)
    k_cache, v_cache = cache(filled=filled)
    before = k_cache.clone(), v_cache.clone()
    q = randn(3, 3, 4, 16)
    k, v = (randn(3, seqlen_new, 2, 16, seed=s) for s in (8, 9)) if seqlen_new else (None, None)
    result = flash_attn.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=torch.tensor(filled, dtype=torch.int32),
        return_softmax_lse=True,
        **theirs,
    )
    for b, n in enumerate(filled):
        for now, was, new in zip((k_cache, v_cache), before, (k, v), strict=True):
            if seqlen_new:
                assert torch.equal(now[b, n : n + seqlen_new], new[b])
            assert torch.equal(now[b, :n], was[b, :n])
            assert now[b, n + seqlen_new :].isnan().all()
        used = slice(0, n + seqlen_new)
        row = q[b : b + 1], k_cache[b : b + 1, used], v_cache[b : b + 1, used]
        expect(tuple(x[b : b + 1] for x in result), row, **ours)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_kvcache_rotates_by_tables_of_any_floating_point(dtype):
    """`attention_decode` takes tables of float32 and of the dtype of q alone."""
    angles = torch.arange(12)[:, None] * torch.tensor([1.0, 0.3, 0.1])
    tables = [t.to(dtype) for t in (angles.cos(), angles.sin())]
    results = []
    for cos, sin in (tables, [t.float() for t in tables]):
        k_cache, v_cache = cache(filled=(7, 0, 5))
        rows = randn(3, 2, 4, 16), k_cache, v_cache, randn(3, 2, 2, 16, seed=8), randn(3, 2, 2, 16, seed=9)
        options = {"cache_seqlens": torch.tensor((7, 0, 5), dtype=torch.int32), "causal": True}
        out = flash_attn.flash_attn_with_kvcache(*rows, **options, rotary_cos=cos, rotary_sin=sin)
        results.append((out, k_cache[0, :9]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_kvcache_lengths_as_int_or_none():
    q = randn(3, 1, 4, 16)
    k_cache, v_cache = cache(filled=(7, 7, 7))
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=7)
    expect(out, (q, k_cache[:, :7], v_cache[:, :7]))
    full = cache()
    expect(flash_attn.flash_attn_with_kvcache(q, *full), (q, *full))


def test_kvcache_picks_entries():
    filled = (4, 9, 2, 6, 8)
    caches = cache(batch=5, filled=filled)
    before = [c.clone() for c in caches]
    q, k, v = randn(2, 2, 4, 16), randn(2, 2, 2, 16, seed=8), randn(2, 2, 2, 16, seed=9)
    picked = torch.tensor([3, 1], dtype=torch.int32)
    lengths = torch.tensor([6, 9], dtype=torch.int32)
    out = flash_attn.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=lengths, cache_batch_idx=picked, causal=True
    )
    for b, (entry, n) in enumerate(zip((3, 1), (6, 9), strict=True)):
        row = [torch.cat([c[entry, :n], new[b]])[None] for c, new in zip(before, (k, v), strict=True)]
        expect(out[b : b + 1], (q[b : b + 1], *row), causal=True)
    for now, was in zip(caches, before, strict=True):
        assert torch.equal(now[[0, 2, 4]].nan_to_num(9), was[[0, 2, 4]].nan_to_num(9))


@pytest.mark.parametrize("page_size", [1, 5])
def test_kvcache_in_pages(page_size):
    """A cache in pages gives the results of a cache without pages, and k and v are written to the right rows."""
    filled, room = (7, 0, 9), 12
    q, k, v = randn(3, 2, 4, 16), randn(3, 2, 2, 16, seed=8), randn(3, 2, 2, 16, seed=9)
    lengths = torch.tensor(filled, dtype=torch.int32)
    caches = cache(filled=filled)
    per_entry = -(-room // page_size)
    table = torch.randperm(3 * per_entry + 2, generator=torch.Generator().manual_seed(1))[: 3 * per_entry]
    table = table.view(3, per_entry).int()
    paged = [torch.full((3 * per_entry + 2, page_size, 2, 16), torch.nan) for _ in range(2)]
    for pages, c in zip(paged, caches, strict=True):
        for b in range(3):
            for n in range(filled[b]):
                pages[table[b, n // page_size], n % page_size] = c[b, n]
    arguments = {"k": k, "v": v, "cache_seqlens": lengths, "causal": True}
    out = flash_attn.flash_attn_with_kvcache(q, *paged, **arguments, block_table=table)
    assert torch.equal(out, flash_attn.flash_attn_with_kvcache(q, *caches, **arguments))
    for pages, c in zip(paged, caches, strict=True):
        for b in range(3):
            for n in range(filled[b] + 2):
                assert torch.equal(pages[table[b, n // page_size], n % page_size], c[b, n])


@pytest.mark.parametrize("in_pages", [False, True])
def test_kvcache_of_e4m3(in_pages):
    """Descales have the shape of flash-attn 3, one for each head of a batch entry, with pages, too."""
    filled, e4m3 = (7, 0, 9), torch.float8_e4m3fn
    q, k, v = randn(3, 2, 4, 16), randn(3, 2, 2, 16, seed=8), randn(3, 2, 2, 16, seed=9)
    caches = [c.nan_to_num(1).to(e4m3) for c in cache(filled=filled)]
    descales = {"k_descale": randn(3, 2, seed=3).abs() + 0.5, "v_descale": randn(3, 2, seed=4).abs() + 0.5}
    real = [c.float() * d[:, None, :, None] for c, d in zip(caches, descales.values(), strict=True)]
    arguments = {"cache_seqlens": torch.tensor(filled, dtype=torch.int32), "causal": True}
    if in_pages:
        arguments["block_table"] = torch.tensor([[2], [0], [1]], dtype=torch.int32)
        caches = [c[[1, 2, 0]] for c in (t.view(torch.uint8) for t in caches)]
        caches = [c.view(e4m3) for c in caches]
    out = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, **arguments, **descales)
    for b, n in enumerate(filled):
        rows = [
            torch.cat([c[b, :n], (new[b] / d[b, :, None]).to(e4m3).float() * d[b, :, None]])[None]
            for c, new, d in zip(real, (k, v), descales.values(), strict=True)
        ]
        expect(out[b : b + 1], (q[b : b + 1], *rows), causal=True)
    with pytest.raises(ValueError, match=r"k_descale: expected None with a cache of torch\.float32"):
        flash_attn.flash_attn_with_kvcache(q, *cache(), **descales)


@pytest.mark.parametrize("interleaved", [True, False])
def test_kvcache_rotates(interleaved):
    """In complex numbers, column pair p at position t is multiplied by exp(i t f_p)."""
    filled = (7, 0, 5)
    q, k, v = randn(3, 2, 4, 16), randn(3, 2, 2, 16, seed=8), randn(3, 2, 2, 16, seed=9)
    k_cache, v_cache = cache(filled=filled)
    before = k_cache.clone(), v_cache.clone()
    angles = torch.arange(12)[:, None] * torch.tensor([1.0, 0.3, 0.1])  # tables for 6 of 16 columns

    def turned(x, start):
        order = torch.arange(6) if interleaved else torch.tensor([0, 3, 1, 4, 2, 5])
        pairs = torch.view_as_complex(x[..., order].unflatten(-1, (3, 2)).contiguous())
        factors = torch.polar(torch.ones(2, 3), angles[start : start + 2])[:, None]
        result = x.clone()
        result[..., order] = torch.view_as_real(pairs * factors).flatten(-2)
        return result

    options = {"cache_seqlens": torch.tensor(filled, dtype=torch.int32), "causal": True}
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": interleaved}
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options, **rotary)
    for b, n in enumerate(filled):
        row_k = torch.cat([before[0][b, :n], turned(k[b], n)])[None]
        row_v = torch.cat([before[1][b, :n], v[b]])[None]
        torch.testing.assert_close(k_cache[b, : n + 2], row_k[0])
        expect(out[b : b + 1], (turned(q[b], n)[None], row_k, row_v), causal=True)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "error", "match"),
    [
        ("flash_attn_func", {"window_size": 3}, TypeError, "window_size: expected a pair"),
        ("flash_attn_func", {"window_size": (1.5, 0)}, TypeError, "window_size: expected an int"),
        ("flash_attn_func", {"window_size": torch.ones(3)}, TypeError, "window_size: expected a pair"),
        ("flash_attn_func", {"dropout_p": 1.0}, ValueError, "dropout_p: expected a probability"),
        ("flash_attn_func", {"dropout_p": None}, TypeError, "dropout_p: expected a float"),
        ("flash_attn_func", {"softcap": "1"}, TypeError, "softcap: expected a float"),
        ("flash_attn_qkvpacked_func", {"qkv": torch.ones(1, 7, 2, 4, 16)}, ValueError, r"qkv: .* 3, num_heads"),
        ("flash_attn_qkvpacked_func", {"qkv": [1]}, TypeError, r"qkv: expected a torch\.Tensor, got list"),
        ("flash_attn_kvpacked_func", {"q": torch.ones(1, 7, 4, 16), "kv": torch.ones(7, 2, 4, 16)}, ValueError, "kv: "),
        ("flash_attn_func", {"q": torch.ones(2, 7, 4, 8)}, ValueError, "k: expected head_dim 8 like q, got 16"),
    ],
)
def test_bad_arguments(name, arguments, error, match):
    defaults = dict(zip("qkv", qkv(seqlen_k=7), strict=True)) if name == "flash_attn_func" else {}
    with pytest.raises(error, match=match):
        getattr(flash_attn, name)(**(defaults | arguments))


NEW = {"k": torch.ones(3, 2, 2, 16), "v": torch.ones(3, 2, 2, 16)}


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (NEW, ValueError, "cache_seqlens: expected an int or a"),
        ({"k": NEW["k"], "cache_seqlens": 1}, TypeError, r"v: expected a torch\.Tensor"),
        ({"v": NEW["v"], "cache_seqlens": 1}, TypeError, r"k: expected a torch\.Tensor"),
        (NEW | {"cache_seqlens": 11}, ValueError, "cache_seqlens: expected 0 to 10, .* got 11"),
        (NEW | {"cache_seqlens": -1}, ValueError, "cache_seqlens: expected 0 to 10, .* got -1"),
        (NEW | {"cache_seqlens": torch.tensor([1, 2, 11], dtype=torch.int32)}, ValueError, "got 11"),
        (NEW | {"cache_seqlens": torch.tensor([1, 2, 3])}, TypeError, "cache_seqlens: expected dtype int32, got int64"),
        (
            NEW | {"cache_seqlens": torch.ones(2, dtype=torch.int32)},
            ValueError,
            r"cache_seqlens: expected shape \(3,\)",
        ),
        (
            NEW | {"cache_seqlens": 1.0},
            TypeError,
            "cache_seqlens: expected an int, an int32 torch.Tensor or None, got float",
        ),
        (NEW | {"cache_seqlens": 1, "k": torch.ones(3, 2, 4, 16)}, ValueError, r"k: expected shape \(3, 2, 2, 16\)"),
        (NEW | {"cache_seqlens": 1, "v": torch.ones(3, 1, 2, 16)}, ValueError, r"v: expected shape \(3, 2, 2, 16\)"),
        (
            NEW | {"cache_seqlens": 1, "k": NEW["k"].double()},
            TypeError,
            r"k: expected torch\.float32 .* got torch\.float64",
        ),
        (NEW | {"cache_seqlens": 1, "q": torch.ones(3, 1, 3, 16)}, ValueError, "divisible by the 2 heads"),
        (NEW | {"cache_seqlens": 1, "softcap": "1"}, TypeError, "softcap"),
        (NEW | {"cache_seqlens": 1, "alibi_slopes": torch.ones(3)}, ValueError, "alibi_slopes: expected shape"),
        (NEW | {"cache_seqlens": 11, "alibi_slopes": torch.ones(4)}, ValueError, "cache_seqlens: expected 0 to 10"),
        (
            NEW | {"cache_seqlens": 1, "cache_leftpad": torch.zeros(3)},
            TypeError,
            "cache_leftpad: expected dtype int32, got float32",
        ),
        (
            NEW | {"cache_seqlens": torch.tensor([1, 11, 2], dtype=torch.int32), "alibi_slopes": torch.ones(4)},
            ValueError,
            "cache_seqlens: expected 0 to 10",
        ),
        (
            NEW | {"cache_seqlens": 1, "rotary_cos": torch.ones(2, 4), "rotary_sin": torch.ones(2, 4)},
            ValueError,
            "rotary_cos: expected a row for each of the 3 positions, got 2",
        ),
        (
            NEW | {"cache_seqlens": 1, "rotary_cos": torch.ones(8, 4), "rotary_sin": torch.ones(9, 4)},
            ValueError,
            r"rotary_sin: expected shape \(8, 4\) like rotary_cos, got \(9, 4\)",
        ),
        (NEW | {"cache_seqlens": 1, "rotary_cos": torch.ones(2, 4)}, TypeError, "rotary_sin: expected a torch.Tensor"),
        (
            {"rotary_cos": torch.ones(2, 4), "rotary_sin": torch.ones(2, 4)},
            ValueError,
            "rotary_cos: expected None where k and v are not given",
        ),
        (
            NEW | {"cache_seqlens": 1, "cache_batch_idx": torch.tensor([0, 1, 3])},
            ValueError,
            "entries 0 to 2 of k_cache",
        ),
        (
            NEW | {"cache_seqlens": 1, "cache_batch_idx": torch.tensor([0, 1, 1])},
            ValueError,
            r"cache_batch_idx: expected distinct entries where k and v are given, got \[0, 1, 1\]",
        ),
        (NEW | {"cache_seqlens": 1, "cache_batch_idx": torch.tensor([0, 1])}, ValueError, "cache_batch_idx: .*shape"),
        (NEW | {"cache_seqlens": 1, "cache_batch_idx": torch.ones(3)}, TypeError, "cache_batch_idx: expected an int32"),
    ],
)
def test_kvcache_refusals_leave_the_cache_alone(arguments, error, match):
    k_cache, v_cache = cache()
    before = k_cache.clone(), v_cache.clone()
    with pytest.raises(error, match=match):
        flash_attn.flash_attn_with_kvcache(
            **({"q": randn(3, 1, 4, 16), "k_cache": k_cache, "v_cache": v_cache} | arguments)
        )
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])


def test_kvcache_runs_on_parameters_without_grad_mode():
    with torch.no_grad():
        assert flash_attn.flash_attn_with_kvcache(randn(3, 1, 4, 16).requires_grad_(), *cache()).isfinite().all()

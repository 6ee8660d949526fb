"""attention_decode with left padding, ranges, positions, ALiBi, bias and rotary positions, beside `attention`."""

import pytest
import torch
from decode_calls import random_decode_call

import onepass
from onepass.tiled.cache import rotate

INT32, E4M3 = torch.int32, torch.float8_e4m3fn
NAN = float("nan")


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int32(*values):
    return torch.tensor(values, dtype=INT32)


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


Q, K, V = randn(2, 5, 4, 8, seed=1), randn(2, 40, 2, 8, seed=2), randn(2, 40, 2, 6, seed=3)
FILLED, STARTS = int32(33, 18), int32(7, 16)
LOW = torch.arange(5, dtype=INT32).view(1, 1, 5, 1) * 3
MODIFIERS = {
    "seqstart_k": STARTS,
    "key_ranges": torch.cat([LOW, LOW + 20], -1),
    "q_positions": int32([8, 30, 3, 20, 12]),
    "alibi_slopes": randn(2, 4, seed=4).abs().float(),
    "bias": randn(2, 4, 5, 40, seed=5),
}
# the random call of each seed, of those that have modifiers, is among these
SEEDS = range(1000, 1120)


def decode(**changes):
    arguments = {"q": Q, "k_cache": K, "v_cache": V, "cache_seqlens": FILLED} | changes
    return onepass.attention_decode(**arguments, return_lse=True)


def in_pages(cache, size=8):
    """A cache in pages in reverse order, and its table."""
    pages = cache.unflatten(1, (-1, size)).flatten(0, 1).flip(0)
    return pages, torch.arange(len(pages), dtype=INT32).flip(0).view(len(cache), -1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("first", range(SEEDS[0], SEEDS[-1], 20))
def test_random_calls(first, packed):
    for seed in range(first, first + 20):
        random_decode_call(seed, max_keys=140, packed=packed).check()


def test_random_calls_cover_the_options():
    calls = [random_decode_call(seed, max_keys=140, packed=p).arguments for seed in SEEDS for p in (False, True)]
    counts = {name: sum(name in call for call in calls) for call in calls for name in call}
    assert min(counts[name] for name in MODIFIERS) >= 30
    assert min(counts[f"rotary_positions_{name}"] for name in "qk") >= 5
    for name in MODIFIERS:
        for other in ("page_table", "num_splits", "sinks", "softcap", "k_new", "rotary_cos", "k_descale"):
            assert sum(name in call and other in call for call in calls) >= 3, (name, other)


# ---------------------------------------------------------------- beside attention


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MODIFIERS)
def test_it_is_attention_over_the_filled_keys(name, causal):
    expected = onepass.attention(Q, K, V, seqused_k=FILLED, causal=causal, return_lse=True, **{name: MODIFIERS[name]})
    for splits in ({}, {"num_splits": 5}, {"split_size": 64}):
        for actual, right in zip(decode(causal=causal, **splits, **{name: MODIFIERS[name]}), expected, strict=True):
            same(actual, right)


@pytest.mark.parametrize("is_packed", [False, True])
def test_ranges_of_queries_hold_from_step_to_step(is_packed):
    """They count positions: each step over a growing cache gives a row of the whole attention with the same ranges."""
    q, low = randn(2, 40, 4, 8, seed=6), torch.arange(40) * 3 % 17 - 2
    ranges = torch.stack([low, low + 25], -1).int().expand(2, 4, 40, 2).contiguous()
    ranges[1, 2] = int32(5, 30)
    whole = onepass.attention(q, K, V, causal=True, query_ranges=ranges, return_lse=True)
    for filled, rows in ((1, 1), (6, 3), (23, 5), (40, 2)):
        lengths, first = int32(filled, filled), filled - rows
        step = q[:, first:filled]
        given = {"q": step.flatten(0, 1), "cu_seqlens_q": int32(0, rows, 2 * rows)} if is_packed else {"q": step}
        out, lse = decode(cache_seqlens=lengths, query_ranges=ranges, **given)
        same(out.view(2, rows, 4, 6), whole.out[:, first:filled])
        same(lse.unflatten(-1, (2, rows)).transpose(0, 1) if is_packed else lse, whole.lse[:, :, first:filled])


@pytest.mark.parametrize("name", MODIFIERS)
def test_packed_queries_are_those_of_each_sequence(name):
    counts, given = (3, 2), MODIFIERS[name]
    offsets = int32(0, 3, 5)
    shared = {
        "key_ranges": lambda t: torch.cat([t[0, :, :3], t[0, :, :2]], 1),
        "q_positions": lambda t: torch.cat([t[0, :3], t[0, :2]]),
        "bias": lambda t: torch.cat([t[0, :, :3], t[0, :, :2]], 1),
    }
    packed = shared.get(name, lambda t: t)(given)
    q = torch.cat([Q[0, :3], Q[1, :2], Q[0, :1]])  # and a row of no sequence
    if name in shared:
        packed = torch.cat(
            [packed, packed[..., :1, :] if packed.dim() > 1 else packed[:1]], -2 if packed.dim() > 1 else 0
        )
    out, lse = decode(q=q, cu_seqlens_q=offsets, **{name: packed})
    for b, (start, count) in enumerate(zip((0, 3), counts, strict=True)):
        own = given
        if name in ("seqstart_k", "alibi_slopes"):
            own = given[b : b + 1]
        elif name in shared:
            own = given[:1, :count] if name == "q_positions" else given[:1, :, :count]
        alone = decode(
            q=Q[b : b + 1, :count],
            k_cache=K[b : b + 1],
            v_cache=V[b : b + 1],
            cache_seqlens=FILLED[b : b + 1],
            **{name: own},
        )
        same(out[start : start + count], alone.out[0])
        same(lse[:, start : start + count], alone.lse[0])
    assert (out[5] == 0).all()
    assert (lse[:, 5] == -torch.inf).all()


def test_a_row_of_bias_for_each_position():
    bias = randn(1, 1, 50, 40, seed=7)
    positions = MODIFIERS["q_positions"]
    by_position = decode(bias=bias, q_positions=positions)
    by_query = decode(bias=bias[:, :, positions[0].long()], q_positions=None, causal=False)
    assert not torch.allclose(by_position.out, by_query.out)  # positions also move the mask
    by_position = decode(bias=bias, q_positions=positions, causal=False)
    same(by_position.out, by_query.out)
    packed = decode(
        q=Q.flatten(0, 1), cu_seqlens_q=int32(0, 5, 10), bias=bias[0], q_positions=positions[0].repeat(2), causal=False
    )
    same(packed.out, by_query.out.flatten(0, 1))


# ---------------------------------------------------------------- left padding


@pytest.mark.parametrize("value", [NAN, float("inf")])
@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("splits", [{}, {"num_splits": 6}])
def test_keys_before_the_start_are_never_read(is_paged, splits, value):
    options = {"seqstart_k": STARTS, "sinks": torch.ones(4, dtype=torch.float64)} | splits
    expected = decode(**options)
    caches = {"k_cache": K.clone(), "v_cache": V.clone()}
    for t in caches.values():
        for b, start in enumerate(STARTS.tolist()):
            t[b, :start] = value
    if is_paged:
        (k, table), (v, _) = (in_pages(t) for t in caches.values())
        table[1, :2] = int32(-3, 10**6)  # pages that hold no key of the sequence
        caches = {"k_cache": k, "v_cache": v, "page_table": table}
    for actual, right in zip(decode(**caches, **options), expected, strict=True):
        same(actual, right)
    # the queries at keys 13 to 15 of the second entry stand before its start
    assert (expected.out[1, :3] == 0).all()
    assert (expected.lse[1, :, :3] == 1).all()
    assert (expected.out[1, 3:] != 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_a_padded_batch_grows_step_by_step(causal):
    """New keys are written behind the filled ones, whose number includes the padding."""
    pads, length = int32(3, 0), 12
    k, v = K[:, :length].clone(), V[:, :length].clone()
    k[0, :3] = v[0, :3] = NAN
    caches = {"k_cache": torch.full((2, 16, 2, 8), NAN).double(), "v_cache": torch.full((2, 16, 2, 6), NAN).double()}
    for start in range(0, length, 4):
        new = slice(start, start + 4)
        filled = torch.full((2,), start, dtype=INT32)
        out, lse = decode(
            q=Q[:, :4], **caches, cache_seqlens=filled, k_new=k[:, new], v_new=v[:, new], seqstart_k=pads, causal=causal
        )
        for b, pad in enumerate(pads.tolist()):
            own = slice(b, b + 1), slice(pad, start + 4)
            first = max(0, pad - start)  # of the queries that belong to the sequence
            expected = onepass.attention(Q[own[0], first:4], k[own], v[own], causal=causal, return_lse=True)
            same(out[b, first:], expected.out[0])
            same(lse[b, :, first:], expected.lse[0])
            assert (out[b, :first] == 0).all()
    for t, c in ((k, caches["k_cache"]), (v, caches["v_cache"])):
        assert torch.equal(c[:, :length].isnan(), t.isnan())
        same(c[:, :length].nan_to_num(), t.nan_to_num())


def test_descales_of_pages_that_hold_no_key():
    """Entries of the table before the start may be any number where pages have descales of their own, too."""
    (k, table), (v, _) = (in_pages(t.float()) for t in (K, V))
    descales = {
        name: randn(len(k), 2, seed=n, dtype=torch.float32).exp() for n, name in enumerate(("k_descale", "v_descale"))
    }
    given = {
        "k_cache": k.to(E4M3),
        "v_cache": v.to(E4M3),
        "kv_block": 8,
        "seqstart_k": STARTS,
        "q": Q.bfloat16(),
    } | descales
    expected = decode(**given, page_table=table)
    table[1, :2] = 10**6
    assert torch.equal(decode(**given, page_table=table).out, expected.out)


def test_starts_are_checked_by_value():
    with pytest.raises(ValueError, match=r"seqstart_k\[1\]: expected 0 to 18, the keys of the sequence, got 19"):
        decode(seqstart_k=int32(0, 19))
    (k, table), (v, _) = in_pages(K), in_pages(V)
    table[1, 2] = 99
    with pytest.raises(ValueError, match=r"page_table\[1, 2\]: expected a page 0 to 9 of the cache, got 99"):
        decode(k_cache=k, v_cache=v, page_table=table, seqstart_k=STARTS)


# ---------------------------------------------------------------- rotation

ANGLES = torch.arange(60)[:, None] * torch.tensor([1.0, 0.3, 0.05], dtype=torch.float64)
TABLES = {"rotary_cos": ANGLES.cos(), "rotary_sin": ANGLES.sin()}
NEW = {"k_new": randn(2, 3, 2, 8, seed=8), "v_new": randn(2, 3, 2, 6, seed=9)}


def rotated_by_hand(q_rows, k_rows, **options):
    """The call with q and k_new rotated before it."""
    turned = [
        rotate(t, rows.long().expand(2, -1), *TABLES.values(), False)
        for t, rows in ((Q, q_rows), (NEW["k_new"], k_rows))
    ]
    return decode(q=turned[0], k_cache=K.clone(), v_cache=V.clone(), k_new=turned[1], v_new=NEW["v_new"], **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("extra", [{}, {"alibi_slopes": MODIFIERS["alibi_slopes"]}, {"seqstart_k": STARTS}])
def test_rows_of_the_rotary_tables(extra, causal):
    """5 queries and 3 new keys: by their own rows, all queries by one row, or by those of the keys' positions."""
    at_keys = FILLED[:, None] + torch.arange(3)
    all_alike = FILLED[:, None].expand(-1, 5)
    other_q, other_k = int32([4, 0, 59, 7, 7]), int32([1, 2, 3], [30, 31, 40])
    at_end = FILLED[:, None] + 3 + torch.arange(-5, 0)
    for given, q_rows, k_rows in (
        ({}, at_end, at_keys),
        ({"rotary_positions_q": all_alike}, all_alike, at_keys),
        ({"rotary_positions_q": other_q}, other_q, at_keys),
        ({"rotary_positions_k": other_k}, at_end, other_k),
        ({"rotary_positions_q": other_q, "rotary_positions_k": other_k}, other_q, other_k),
        ({"rotary_positions_q": int32([-5, 1, 1, 1, 1])}, int32([0, 1, 1, 1, 1]), at_keys),
    ):
        caches = {"k_cache": K.clone(), "v_cache": V.clone()}
        out, lse = decode(**caches, **NEW, **TABLES, **given, **extra, causal=causal)
        expected = rotated_by_hand(q_rows, k_rows, **extra, causal=causal)
        same(out, expected.out)
        same(lse, expected.lse)
        same(caches["k_cache"][0, 33:36], rotate(NEW["k_new"], k_rows.long().expand(2, -1), *TABLES.values(), False)[0])


def test_queries_are_rotated_by_where_they_stand():
    positions = MODIFIERS["q_positions"]
    actual = decode(**TABLES, q_positions=positions)
    same(actual.out, decode(**TABLES, q_positions=positions, rotary_positions_q=positions).out)
    turned = rotate(Q, positions.long().expand(2, -1), *TABLES.values(), False)
    same(actual.out, decode(q=turned, q_positions=positions).out)


def test_rows_of_the_rotary_tables_are_checked_by_value():
    with pytest.raises(ValueError, match="rotary_cos: expected a row for each of the 61 positions, got 60"):
        decode(**TABLES, rotary_positions_q=int32([60, 0, 0, 0, 0]))
    with pytest.raises(ValueError, match="rotary_cos: expected a row for each of the 70 positions, got 60"):
        decode(**TABLES, **NEW, rotary_positions_k=int32([0, 1, 69]))
    short = {name: t[:10] for name, t in TABLES.items()}
    small = {"rotary_positions_q": torch.zeros(1, 5, dtype=INT32)}
    with pytest.raises(ValueError, match="rotary_cos: expected a row for each of the 36 positions, got 10"):
        decode(**short, **NEW, **small)
    caches = {"k_cache": K.clone(), "v_cache": V.clone()}
    decode(**short, **NEW, **small, **caches, rotary_positions_k=torch.zeros(2, 3, dtype=INT32))


# ---------------------------------------------------------------- gradients

REQUIRING = {
    "q": {"q": Q},
    "k_cache": {"k_cache": K},
    "sinks": {"sinks": torch.ones(4)},
    "k_new": NEW,
    "alibi_slopes": {"alibi_slopes": MODIFIERS["alibi_slopes"]},
    "bias": {"bias": MODIFIERS["bias"]},
    "rotary_cos": TABLES,
}


@pytest.mark.parametrize("name", REQUIRING)
def test_a_backward_is_refused_when_it_comes(name):
    """The result is that of the same call without gradients, and part of the graph; only its backward raises."""
    fresh = {} if name == "k_cache" else {"k_cache": K.clone(), "v_cache": V.clone()}
    with torch.no_grad():
        expected = decode(**fresh, **REQUIRING[name])
    leaf = REQUIRING[name][name].clone().requires_grad_()
    fresh = {} if name == "k_cache" else {"k_cache": K.clone(), "v_cache": V.clone()}
    given = fresh | REQUIRING[name] | {name: leaf}
    out, lse = decode(**given)
    assert out.requires_grad
    assert lse.requires_grad
    assert not any(t.requires_grad for t in fresh.values())
    assert torch.equal(out, expected.out)
    assert torch.equal(lse, expected.lse)
    for result in (out, lse, out[:, :1]):
        with pytest.raises(NotImplementedError, match=r"attention over a cache .* has no backward"):
            torch.autograd.grad(result.sum(), leaf)
    with torch.no_grad():
        assert not decode(**given).out.requires_grad
    # a loss that does not depend on the result has its gradients
    assert torch.equal(torch.autograd.grad(out.detach().sum() + leaf.sum(), leaf)[0], torch.ones_like(leaf))


def test_each_tensor_that_requires_a_gradient_is_in_the_graph():
    q, k = Q.clone().requires_grad_(), K.clone().requires_grad_()
    out, _ = decode(q=q, k_cache=k)
    for leaf in (q, k):
        with pytest.raises(NotImplementedError, match="has no backward"):
            torch.autograd.grad(out.sum(), leaf, retain_graph=True)


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_backward_is_refused_when_it_comes(backend):
    torch._dynamo.reset()
    function = torch.compile(lambda q: decode(q=q).out * 2, fullgraph=True, backend=backend)
    q = Q.clone().requires_grad_()
    out = function(q)
    same(out.detach(), 2 * decode().out)
    with pytest.raises(NotImplementedError, match="has no backward"):
        out.sum().backward()

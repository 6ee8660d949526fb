"""flash-attn 2's dropout, ALiBi, left padding, rotary positions and pages with gradients, beside the float64 oracle."""

import pytest
import torch

from onepass import reference
from onepass.compat import flash_attn, flash_attn_3, flash_attn_4
from onepass.geometry import philox

DTYPE = torch.float64


def randn(*shape, seed=0, dtype=DTYPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def qkv(batch=2, seqlen_q=7, seqlen_k=10, heads_q=4, heads_kv=2, head_dim=8, dtype=DTYPE):
    shapes = (batch, seqlen_q, heads_q, head_dim), *[(batch, seqlen_k, heads_kv, head_dim)] * 2
    return [randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def slopes(*shape):
    return randn(*shape, seed=7).abs().float()


def gradients(out, tensors, dout):
    return torch.autograd.grad(out, tensors, dout)


def packed(tensors, lengths):
    """Rows of each batch entry one after the other, and their offsets."""
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    return [torch.cat([t[b, :n] for b, n in enumerate(lengths)]) for t in tensors], offsets


MASKS = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"window_size": (3, -1), "softcap": 2.0}, {"window": (3, None), "softcap": 2.0}),
]


@pytest.mark.parametrize(("theirs", "ours"), MASKS)
@pytest.mark.parametrize("per_entry", [False, True])
def test_alibi(theirs, ours, per_entry):
    """out and gradients, also of slopes, which have none in flash-attn."""
    tensors = [t.requires_grad_() for t in (*qkv(), slopes(2, 4) if per_entry else slopes(4))]
    out, lse, _ = flash_attn.flash_attn_func(*tensors[:3], alibi_slopes=tensors[3], return_attn_probs=True, **theirs)
    expected = reference.attention(*tensors[:3], alibi_slopes=tensors[3], **ours)
    torch.testing.assert_close(out, expected.out)
    torch.testing.assert_close(lse, expected.lse)
    dout = randn(*out.shape, seed=3)
    for found, true in zip(gradients(out, tensors, dout), gradients(expected.out, tensors, dout), strict=True):
        torch.testing.assert_close(found, true)


def test_alibi_of_packed_sequences():
    (q, k, v), own = qkv(), slopes(2, 4)
    (rows,), offsets_q = packed([q], (7, 4))
    (keys, values), offsets_k = packed([k, v], (10, 6))
    out = flash_attn.flash_attn_varlen_func(
        rows, keys, values, offsets_q, offsets_k, 7, 10, causal=True, alibi_slopes=own
    )
    for b, (n, m) in enumerate(((7, 10), (4, 6))):
        expected = reference.attention(
            q[b : b + 1, :n], k[b : b + 1, :m], v[b : b + 1, :m], causal=True, alibi_slopes=own[b : b + 1]
        )
        torch.testing.assert_close(out[offsets_q[b] : offsets_q[b + 1]], expected.out[0])


# --- dropout ----------------------------------------------------------------------------------------------------------


def state_of_next_call():
    """The state of dropout that the next call draws."""
    before = torch.get_rng_state()
    state = philox.random_state(torch.device("cpu"))
    torch.set_rng_state(before)
    return state


@pytest.mark.parametrize(("theirs", "ours"), MASKS)
@pytest.mark.parametrize("return_probabilities", [False, True])
def test_dropout(theirs, ours, return_probabilities):
    tensors = [t.requires_grad_() for t in qkv()]
    torch.manual_seed(5)
    ours = ours | {"dropout_p": 0.3, "dropout_state": state_of_next_call()}
    result = flash_attn.flash_attn_func(*tensors, 0.3, return_attn_probs=return_probabilities, **theirs)
    out = result[0] if return_probabilities else result
    expected = reference.attention(*tensors, **ours)
    torch.testing.assert_close(out, expected.out)
    dout = randn(*out.shape, seed=3)
    for found, true in zip(gradients(out, tensors, dout), gradients(expected.out, tensors, dout), strict=True):
        torch.testing.assert_close(found, true)


@pytest.mark.parametrize(("theirs", "ours"), MASKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_s_dmask_holds_the_probabilities(theirs, ours, dtype):
    """Normalized by its rows it is the softmax, and with its signs as a dropout mask it gives out."""
    q, k, v = qkv(dtype=dtype)
    own = slopes(4)
    out, _, s_dmask = flash_attn.flash_attn_func(q, k, v, 0.3, alibi_slopes=own, return_attn_probs=True, **theirs)
    assert s_dmask.shape == (2, 4, 128, 128)
    assert s_dmask.dtype == dtype
    assert not s_dmask[:, :, 7:].any()
    assert not s_dmask[..., 10:].any()
    s = s_dmask[:, :, :7, :10].double()
    p = s.abs() / s.abs().sum(-1, keepdim=True)
    expanded = v.double().repeat_interleave(2, 2).transpose(1, 2)
    tolerance = {} if dtype == torch.float64 else {"atol": 2e-3, "rtol": 2e-3}
    exact = reference.attention(q, k, v, alibi_slopes=own, **ours)
    torch.testing.assert_close((p @ expanded).transpose(1, 2), exact.out, **tolerance)
    kept = (s >= 0) / (1 - 0.3)
    torch.testing.assert_close(((p * kept) @ expanded).transpose(1, 2), out.double(), **tolerance)
    hidden = reference.visible_pairs(
        2, 7, 10, reference.Mask.from_options(ours.get("causal"), ours.get("window")), None, "cpu"
    )
    assert not s[~hidden[:, None].expand_as(s)].any()
    share = float((s < 0).sum() / (s != 0).sum())
    assert 0.2 < share < 0.4


def test_dropped_pairs_are_negative_where_their_probability_is_0():
    q, k, v = qkv(dtype=torch.float16)
    k[:, 0] *= 200  # all probability goes to one key
    *_, s_dmask = flash_attn.flash_attn_func(q * 200, k, v, 0.5, return_attn_probs=True)
    share = float((s_dmask[:, :, :7, :10] < 0).float().mean())
    assert 0.4 < share < 0.6


def test_s_dmask_of_packed_sequences():
    """Each sequence has the signs that give its rows of out."""
    q, k, v = qkv()
    (rows,), offsets_q = packed([q], (7, 4))
    (keys, values), offsets_k = packed([k, v], (10, 6))
    out, _, s_dmask = flash_attn.flash_attn_varlen_func(
        rows, keys, values, offsets_q, offsets_k, torch.tensor(7), 10, 0.3, causal=True, return_attn_probs=True
    )
    assert s_dmask.shape == (2, 4, 128, 128)
    for b, (n, m) in enumerate(((7, 10), (4, 6))):
        s = s_dmask[b, :, :n, :m]
        p = s.abs() / s.abs().sum(-1, keepdim=True) * (s >= 0) / (1 - 0.3)
        expected = (p @ v[b, :m].repeat_interleave(2, 1).transpose(0, 1)).transpose(0, 1)
        torch.testing.assert_close(out[offsets_q[b] : offsets_q[b + 1]], expected)
        assert not s_dmask[b, :, n:].any()
        assert not s_dmask[b, :, :, m:].any()
    with pytest.raises(TypeError, match="max_seqlen_q: expected an int where the probabilities of a call with dropout"):
        flash_attn.flash_attn_varlen_func(
            rows, keys, values, offsets_q, offsets_k, None, 10, 0.3, return_attn_probs=True
        )


@pytest.mark.parametrize("theirs", [theirs for theirs, _ in MASKS])
def test_dropout_over_a_block_table(theirs):
    """out and gradients of keys in blocks are those of the same keys without blocks."""
    q, pages = randn(11, 4, 8).requires_grad_(), [randn(6, 4, 2, 8, seed=i).requires_grad_() for i in (1, 2)]
    table = torch.tensor([[5, 0, 1], [3, 2, 4]], dtype=torch.int32)
    offsets_q, offsets_k = torch.tensor([0, 7, 11]).int(), torch.tensor([0, 10, 16]).int()
    own = slopes(2, 4)
    keys = [torch.cat([p[table[b].long()].flatten(0, 1)[:n] for b, n in enumerate((10, 6))]) for p in pages]
    results = []
    for k, v, more in ((*pages, {"block_table": table}), (*keys, {})):
        torch.manual_seed(4)
        out = flash_attn.flash_attn_varlen_func(
            q, k, v, offsets_q, offsets_k, 7, 10, 0.3, alibi_slopes=own, **theirs, **more
        )
        results.append((out, *gradients(out, [q, *pages], randn(*out.shape, seed=3))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.equal(results[0][0], flash_attn.flash_attn_varlen_func(q, *keys, offsets_q, offsets_k, 7, 10))


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0], [2]], "cu_seqlens_k: expected at most 4, the 4 rows that block_table addresses, got 7"),
        ([[0, 1], [2, 50]], r"block_table\[1, 1\]: expected a page 0 to 5 of the cache, got 50"),
    ],
)
def test_blocks_that_do_not_exist_are_refused(table, message, dropout_p):
    q, pages = randn(10, 4, 8), [randn(6, 4, 2, 8, seed=i) for i in (1, 2)]
    offsets_q, offsets_k = torch.tensor([0, 5, 10]).int(), torch.tensor([0, 7, 14]).int()
    with pytest.raises(ValueError, match=message):
        flash_attn.flash_attn_varlen_func(
            q, *pages, offsets_q, offsets_k, 5, 7, dropout_p, block_table=torch.tensor(table, dtype=torch.int32)
        )


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_a_block_table_without_blocks_or_offsets(dropout_p):
    q, pages = randn(10, 4, 8), [randn(6, 4, 2, 8, seed=i) for i in (1, 2)]
    offsets_q, offsets_k = torch.tensor([0, 5, 10]).int(), torch.tensor([0, 7, 14]).int()
    table = {"block_table": torch.zeros(2, 2, dtype=torch.int32)}
    with pytest.raises(ValueError, match="k: expected at least 1 page"):
        flash_attn.flash_attn_varlen_func(q, *(p[:0] for p in pages), offsets_q, offsets_k, 5, 7, dropout_p, **table)
    with pytest.raises(TypeError, match=r"cu_seqlens_q: expected an int32 torch\.Tensor, got None"):
        flash_attn.flash_attn_varlen_func(q, *pages, None, offsets_k, 5, 7, dropout_p, **table)


def test_the_probabilities_and_the_state_of_dropout_over_a_block_table():
    """They are those of the same keys without blocks, of which the backward repeats the mask."""
    q, pages = randn(11, 4, 8), [randn(6, 4, 2, 8, seed=i) for i in (1, 2)]
    table = torch.tensor([[5, 0, 1], [3, 2, 4]], dtype=torch.int32)
    offsets_q, offsets_k = torch.tensor([0, 7, 11]).int(), torch.tensor([0, 10, 16]).int()
    rows = [torch.cat([p[table[b].long()].flatten(0, 1)[:n] for b, n in enumerate((10, 6))]) for p in pages]
    results = []
    for k, v, more in ((*pages, {"block_table": table}), (*rows, {})):
        torch.manual_seed(4)
        options = {"causal": True, "alibi_slopes": slopes(2, 4)} | more
        *_, probs = flash_attn.flash_attn_varlen_func(
            q, k, v, offsets_q, offsets_k, 7, 10, 0.3, return_attn_probs=True, **options
        )
        torch.manual_seed(4)
        found = flash_attn._flash_attn_varlen_forward(
            q, k, v, offsets_q, offsets_k, 7, 10, 0.3, 8**-0.5, return_softmax=True, **options
        )
        assert torch.equal(found[2], probs)
        assert (probs < 0).any()
        results.append(found)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    assert results[0][3].any()
    with pytest.raises(ValueError, match="return_softmax: expected False without dropout, got True"):
        flash_attn._flash_attn_varlen_forward(
            q, *pages, offsets_q, offsets_k, 7, 10, 0.0, 0.3, False, return_softmax=True, block_table=table
        )


def test_no_gradient_flows_through_the_private_forward_over_a_block_table():
    q, pages = randn(10, 4, 8).requires_grad_(), [randn(6, 4, 2, 8, seed=i) for i in (1, 2)]
    offsets_q, offsets_k = torch.tensor([0, 5, 10]).int(), torch.tensor([0, 7, 14]).int()
    table = torch.tensor([[5, 0], [3, 2]], dtype=torch.int32)
    for dropout_p in (0.0, 0.2):
        out, *_ = flash_attn._flash_attn_varlen_forward(
            q, *pages, offsets_q, offsets_k, 5, 7, dropout_p, 0.3, False, block_table=table
        )
        with pytest.raises(NotImplementedError, match="_flash_attn_varlen_forward has no backward"):
            out.sum().backward()


@pytest.mark.parametrize("is_paged", [False, True])
def test_s_dmask_is_0_for_keys_that_do_not_exist(is_paged):
    q, pages = randn(5, 4, 8), [randn(5, 4, 2, 8, seed=i) for i in (1, 2)]
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    keys = pages if is_paged else [p.flatten(0, 1)[:16] for p in pages]
    offsets_q, offsets_k = torch.tensor([0, 3, 5]).int(), torch.tensor([0, 8, 16]).int()
    starts, used = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([7, 5], dtype=torch.int32)
    more = {"block_table": table} if is_paged else {}
    *_, probs, _ = flash_attn._flash_attn_varlen_forward(
        q,
        *keys,
        offsets_q,
        offsets_k,
        3,
        8,
        0.5,
        0.3,
        False,
        return_softmax=True,
        leftpad_k=starts,
        seqused_k=used,
        **more,
    )
    probs = probs.abs()
    for b, (first, end, rows) in enumerate(((2, 7, 3), (0, 5, 2))):
        assert (probs[b, :, :rows, first:end] > 0).all()
        assert not probs[b, :, :, :first].any()
        assert not probs[b, :, :, end:].any()
        assert not probs[b, :, rows:].any()


def test_dropout_and_left_padding_over_a_block_table():
    q, pages = randn(3, 4, 8), [randn(6, 4, 2, 8, seed=i) for i in (1, 2)]
    table, starts = torch.tensor([[5, 0], [3, 2]], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32)
    offsets, lengths = torch.tensor([0, 2, 3]).int(), torch.tensor([6, 5]).int()
    pages[0][5, :3], pages[1][5, :3] = torch.nan, torch.nan
    options = (0.3, None, False, -1, -1, 0.0, None, False)
    torch.manual_seed(4)
    out, *_ = flash_attn._flash_attn_varlen_forward(
        q, *pages, offsets, torch.tensor([0, 6, 11]).int(), 2, 6, *options, table, starts, lengths
    )
    rows = [torch.cat([p[table[b].long()].flatten(0, 1)[:n] for b, n in enumerate((6, 5))]) for p in pages]
    torch.manual_seed(4)
    expected, *_ = flash_attn._flash_attn_varlen_forward(
        q, *rows, offsets, torch.tensor([0, 6, 11]).int(), 2, 6, *options, None, starts
    )
    torch.testing.assert_close(out, expected)
    assert out.isfinite().all()


# --- the cache --------------------------------------------------------------------------------------------------------

FILLED = torch.tensor([8, 3, 5], dtype=torch.int32)


def cache():
    """k and v of three entries with room for 14 keys, NaN where none is."""
    caches = [randn(3, 14, 2, 8, seed=i) for i in (1, 2)]
    for c in caches:
        for b, n in enumerate(FILLED.tolist()):
            c[b, n:] = torch.nan
    return caches


def expect_entries(out, lse, q, caches, lengths, options, starts=None, alibi_slopes=None):
    """out and lse of each entry against the oracle, in which keys before the start are cut off."""
    for b, n in enumerate(lengths):
        start = 0 if starts is None else int(starts[b])
        row = q[b : b + 1], *(c[b : b + 1, start:n] for c in caches)
        own = {} if alibi_slopes is None else {"alibi_slopes": alibi_slopes[b : b + 1]}
        expected = reference.attention(*row, **options, **own)
        torch.testing.assert_close(out[b : b + 1], expected.out)
        torch.testing.assert_close(lse[b : b + 1], expected.lse)


@pytest.mark.parametrize(("theirs", "ours"), [*MASKS, ({"window_size": (2, 4)}, {"window": (2, 4)})])
@pytest.mark.parametrize("seqlen_q", [1, 3, 6])
@pytest.mark.parametrize("options", ["leftpad", "alibi", "both"])
@pytest.mark.parametrize("in_pages", [False, True])
def test_kvcache_with_left_padding_and_alibi(theirs, ours, seqlen_q, options, in_pages):
    """More queries than keys, too: a query before the first key sees what a window to the right leaves it."""
    q, k, v = (randn(3, n, heads, 8, seed=n) for n, heads in ((seqlen_q, 4), (2, 2), (2, 2)))
    caches = cache()
    starts = torch.tensor([2, 0, 5], dtype=torch.int32) if options != "alibi" else None
    own = slopes(3, 4) if options != "leftpad" else None
    if starts is not None:
        for c in caches:
            for b, start in enumerate(starts.tolist()):
                c[b, :start] = torch.nan
    full = [c.clone() for c in caches]
    for b, n in enumerate(FILLED.tolist()):
        full[0][b, n : n + 2], full[1][b, n : n + 2] = k[b], v[b]
    table = None
    if in_pages:
        order = torch.tensor([[4, 1], [0, 5], [2, 3]], dtype=torch.int32)
        pages = [torch.empty(6, 7, 2, 8, dtype=DTYPE) for _ in range(2)]
        for paged, c in zip(pages, caches, strict=True):
            paged[order.long()] = c.unflatten(1, (2, 7))
        caches, table = pages, order
    out, lse = flash_attn.flash_attn_with_kvcache(
        q,
        *caches,
        k,
        v,
        cache_seqlens=FILLED,
        cache_leftpad=starts,
        alibi_slopes=own,
        block_table=table,
        return_softmax_lse=True,
        **theirs,
    )
    written = caches if table is None else [c[table.long()].flatten(1, 2) for c in caches]
    for c, expected in zip(written, full, strict=True):
        torch.testing.assert_close(c, expected, equal_nan=True)
    expect_entries(out, lse, q, full, (FILLED + 2).tolist(), ours, starts, own)


def turned(x, cos, sin, positions):
    """The first columns of x (seqlen, heads, head_dim), in halves, rotated by rows of the tables."""
    half = cos.shape[1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    c, s = cos[positions][:, None], sin[positions][:, None]
    return torch.cat([a * c - b * s, a * s + b * c, rest], -1)


@pytest.mark.parametrize(("seqlen_q", "seqlen_new"), [(1, 2), (3, 1), (2, 2), (4, 6)])
@pytest.mark.parametrize("theirs", [{}, {"causal": True}, {"window_size": (5, -1)}, {"window_size": (14, 99)}])
def test_kvcache_rotates_from_the_length_of_the_cache(seqlen_q, seqlen_new, theirs):
    """Query i stands at row cache_seqlens + i, or at row cache_seqlens where no mask tells queries apart."""
    q, k, v = (randn(3, n, heads, 8, seed=n) for n, heads in ((seqlen_q, 4), (seqlen_new, 2), (seqlen_new, 2)))
    caches = cache()
    before = [c.clone() for c in caches]
    angles = torch.arange(14)[:, None] * torch.tensor([1.0, 0.3, 0.1], dtype=DTYPE)
    cos, sin = angles.cos(), angles.sin()
    out, lse = flash_attn.flash_attn_with_kvcache(
        q,
        *caches,
        k,
        v,
        cos,
        sin,
        cache_seqlens=FILLED,
        rotary_interleaved=False,
        return_softmax_lse=True,
        **theirs,
    )
    is_masked = theirs not in ({}, {"window_size": (14, 99)})
    rows = []
    for b, n in enumerate(FILLED.tolist()):
        steps = torch.arange(seqlen_q) if is_masked else torch.zeros(seqlen_q, dtype=torch.long)
        rows.append(turned(q[b], cos, sin, n + steps))
        before[0][b, n : n + seqlen_new] = turned(k[b], cos, sin, n + torch.arange(seqlen_new))
        before[1][b, n : n + seqlen_new] = v[b]
    for c, expected in zip(caches, before, strict=True):
        torch.testing.assert_close(c, expected, equal_nan=True)
    ours = {
        "causal": theirs.get("causal", False),
        "window": (5, None) if "window_size" in theirs and is_masked else None,
    }
    expect_entries(out, lse, torch.stack(rows), caches, (FILLED + seqlen_new).tolist(), ours)


def test_kvcache_picks_rows_of_a_block_table():
    q, caches = randn(2, 1, 4, 8), [randn(6, 3, 2, 8, seed=i) for i in (1, 2)]
    table = torch.randperm(6, generator=torch.Generator().manual_seed(0)).view(3, 2).int()
    picked, lengths = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([5, 4], dtype=torch.int32)
    out = flash_attn.flash_attn_with_kvcache(
        q, *caches, cache_seqlens=lengths, cache_batch_idx=picked, block_table=table
    )
    expected = flash_attn.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, block_table=table[picked.long()])
    assert torch.equal(out, expected)
    with pytest.raises(ValueError, match="cache_batch_idx: expected entries 0 to 2 of the page table"):
        flash_attn.flash_attn_with_kvcache(
            q, *caches, cache_seqlens=lengths, cache_batch_idx=picked + 1, block_table=table
        )


# --- calls without a backward -----------------------------------------------------------------------------------------


def paged_call(function):
    """A call of a function over pages with a q that requires a gradient, and out of the same call without gradients."""
    q, pages = randn(3, 4, 8), [randn(5, 4, 2, 8, seed=i) for i in (1, 2)]
    table, offsets = torch.tensor([[2], [0]], dtype=torch.int32), torch.tensor([0, 1, 3], dtype=torch.int32)

    def call(q):
        if function == "varlen":
            return flash_attn.flash_attn_varlen_func(q, *pages, offsets, offsets, 2, 2, block_table=table)
        lengths = torch.tensor([3, 2, 1], dtype=torch.int32)
        table_of_q = torch.tensor([[2], [0], [4]], dtype=torch.int32)
        return flash_attn.flash_attn_with_kvcache(q[:, None], *pages, cache_seqlens=lengths, block_table=table_of_q)

    return call, q


@pytest.mark.parametrize("function", ["varlen", "kvcache"])
def test_inputs_that_require_a_gradient_are_computed_and_the_backward_raises(function):
    call, q = paged_call(function)
    expected = call(q)
    assert not expected.requires_grad
    out = call(q.requires_grad_())
    assert torch.equal(out, expected)
    with pytest.raises(NotImplementedError, match=r"attention over a cache .* has no backward"):
        out.sum().backward()
    with torch.no_grad():
        assert not call(q).requires_grad


def test_caches_that_require_a_gradient_are_written_in_place():
    caches = [c.requires_grad_() for c in cache()]
    k, v = randn(3, 1, 2, 8), randn(3, 1, 2, 8, seed=1)
    out = flash_attn.flash_attn_with_kvcache(randn(3, 1, 4, 8), *caches, k, v, cache_seqlens=FILLED)
    assert torch.equal(caches[0][range(3), FILLED.long()], k[:, 0])
    with pytest.raises(NotImplementedError, match=r"attention over a cache .* has no backward"):
        out.sum().backward()


def test_probabilities_under_autocast():
    """All results are in the dtype of autocast, as without the probabilities."""
    tensors = [t.requires_grad_() for t in qkv(dtype=torch.float32)]
    with torch.autocast("cpu", torch.bfloat16):
        plain = flash_attn.flash_attn_func(*tensors, 0.1)
        out, lse, probs = flash_attn.flash_attn_func(*tensors, 0.1, return_attn_probs=True)
        private = flash_attn._flash_attn_forward(*tensors, 0.1, 0.3, False, -1, -1, 0.0, None, True)
    assert [t.dtype for t in (plain, out, probs, private[0], private[2])] == [torch.bfloat16] * 5
    assert lse.dtype == torch.float32
    found = gradients(out, tensors, torch.ones_like(out))
    assert [g.dtype for g in found] == [torch.float32] * 3


@pytest.mark.parametrize("library", [flash_attn, flash_attn_3])
def test_a_cache_under_autocast(library):
    """Queries and new keys meet a cache in the dtype of autocast, which is written in place."""
    q, caches = randn(2, 1, 4, 8).float(), [randn(2, 6, 2, 8, seed=i).bfloat16() for i in (1, 2)]
    new, lengths = [randn(2, 1, 2, 8, seed=i).float() for i in (3, 4)], torch.tensor([3, 5], dtype=torch.int32)
    copies = [c.clone() for c in caches]
    rows = [t.bfloat16() for t in (q, *new)]
    expected = library.flash_attn_with_kvcache(rows[0], *copies, *rows[1:], cache_seqlens=lengths)
    with torch.autocast("cpu", torch.bfloat16):
        out = library.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=lengths)
    assert torch.equal(out, expected)
    assert all(torch.equal(c, copy) for c, copy in zip(caches, copies, strict=True))


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_blocks_under_autocast(dropout_p):
    q, pages = randn(2, 4, 8).float(), [randn(6, 4, 2, 8, seed=i).bfloat16() for i in (1, 2)]
    offsets_q, offsets_k = torch.tensor([0, 1, 2]).int(), torch.tensor([0, 7, 12]).int()
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    results = []
    for rows, is_enabled in ((q, True), (q.bfloat16(), False)):
        torch.manual_seed(4)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
            results.append(
                flash_attn.flash_attn_varlen_func(
                    rows, *pages, offsets_q, offsets_k, 1, 7, dropout_p, block_table=table
                )
            )
    assert torch.equal(*results)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = flash_attn_4.flash_attn_varlen_func(
            q[:, None], *pages, seqused_k=torch.tensor([7, 5], dtype=torch.int32), page_table=table
        )
    assert out.dtype == torch.bfloat16


class TestLengthsBeyondATable:
    """All are errors that callers of flash-attn, who expect RuntimeError, and of onepass understand."""

    def check(self, name, table, function, *arguments, **options):
        for error in (RuntimeError, ValueError):
            with pytest.raises(error, match=f"^{name}: expected at most .* rows that {table} addresses.*, got"):
                function(*arguments, **options)

    def tensors(self):
        lengths = torch.tensor([3, 9], dtype=torch.int32)
        table = torch.arange(4, dtype=torch.int32).view(2, 2)
        return randn(2, 1, 4, 8), [randn(6, 4, 2, 8, seed=i) for i in (1, 2)], table, lengths

    def test_of_flash_attn_2(self):
        q, pages, table, lengths = self.tensors()
        paged = {"block_table": table}
        offsets_q, offsets_k = torch.tensor([0, 1, 2]).int(), torch.tensor([0, 3, 12]).int()
        for given in (lengths, 9):
            function = flash_attn.flash_attn_with_kvcache
            self.check("cache_seqlens", "block_table", function, q, *pages, cache_seqlens=given, **paged)
        for p in (0.0, 0.1):
            arguments = q[:, 0], *pages, offsets_q, offsets_k, 1, 9, p
            self.check("cu_seqlens_k", "block_table", flash_attn.flash_attn_varlen_func, *arguments, **paged)
            function = flash_attn._flash_attn_varlen_forward
            self.check("seqused_k", "block_table", function, *arguments, 0.3, False, seqused_k=lengths, **paged)

    def test_of_flash_attn_3(self):
        q, pages, table, lengths = self.tensors()
        paged = {"page_table": table}
        function = flash_attn_3.flash_attn_with_kvcache
        for given in (lengths, 9):
            self.check("cache_seqlens", "page_table", function, q, *pages, cache_seqlens=given, **paged)
        new = [randn(3, 2, 8)] * 2
        paged["cu_seqlens_k_new"] = torch.tensor([0, 1, 3]).int()
        self.check("cache_seqlens", "page_table", function, q, *pages, *new, cache_seqlens=lengths - 2, **paged)
        function = flash_attn_3._flash_attn_forward
        self.check("seqused_k", "page_table", function, q, *pages, seqused_k=lengths, page_table=table)

    def test_of_flash_attn_4(self):
        q, pages, table, lengths = self.tensors()
        function = flash_attn_4.flash_attn_varlen_func
        self.check("seqused_k", "page_table", function, q, *pages, seqused_k=lengths, page_table=table)


KINDS = {
    "FlashAttnFunc": lambda q, k, v, cu: (q, k, v),
    "FlashAttnKVPackedFunc": lambda q, k, v, cu: (q, torch.stack((k, v), 2)),
    "FlashAttnQKVPackedFunc": lambda q, k, v, cu: (torch.stack((q, q, q), 2),),
    "FlashAttnVarlenFunc": lambda q, k, v, cu: (q[0], k[0], v[0], cu, cu, 7, 7),
    "FlashAttnVarlenKVPackedFunc": lambda q, k, v, cu: (q[0], torch.stack((k, v), 2)[0], cu, cu, 7, 7),
    "FlashAttnVarlenQKVPackedFunc": lambda q, k, v, cu: (torch.stack((q, q, q), 2)[0], cu, 7),
}


@pytest.mark.parametrize("name", KINDS)
def test_names_of_autograd_functions(name):
    """`apply` has the arguments of the function, in its order, and whether gradients are recorded."""
    tensors = [t.requires_grad_() for t in qkv(batch=1, seqlen_k=7)]
    words = name.removeprefix("FlashAttn").removesuffix("Func").lower().replace("varlen", "varlen_").strip("_")
    function = getattr(flash_attn, "_".join(("flash_attn", *filter(None, [words]), "func")))
    given = KINDS[name](*tensors, torch.tensor([0, 3, 7], dtype=torch.int32))
    options = 0.0, 0.3, True, (4, 0), 2.0, slopes(4), True, True
    rest = (None,) if name == "FlashAttnVarlenFunc" else ()  # the block table
    for is_recorded in (True, False):
        found = getattr(flash_attn, name).apply(*given, *options, *rest, is_recorded)
        for a, b in zip(found, function(*given, *options, *rest), strict=True):
            assert torch.equal(a, b)
        assert found[0].requires_grad == is_recorded


NO_OPTION = [{"softcap": -1.0}, {"softcap": 0}, {"window_size": (-7, -2)}]


@pytest.mark.parametrize(
    ("library", "options"),
    [
        *((library, options) for library in (flash_attn, flash_attn_3, flash_attn_4) for options in NO_OPTION),
        (flash_attn_3, {"attention_chunk": 2**40}),
    ],
)
def test_values_that_mean_no_option(library, options):
    q, k, v = qkv()
    calls = [lambda **o: library.flash_attn_func(q, k, v, **o)]
    if library is not flash_attn_4:
        lengths = torch.tensor([9, 7], dtype=torch.int32)
        calls.append(lambda **o: library.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **o))
    for call in calls:
        found, expected = (result[0] if isinstance(result, tuple) else result for result in (call(**options), call()))
        torch.testing.assert_close(found, expected)

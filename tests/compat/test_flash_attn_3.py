"""flash-attn 3's functions without a cache: signatures, lengths, chunks, e4m3; compared with the float64 oracle."""

import inspect

import pytest
import torch
from flash_attn_3_cases import (
    DESCALES,
    DTYPE,
    E4M3,
    INT32,
    OFFSETS_K,
    OFFSETS_Q,
    OPTIONS,
    USED_K,
    USED_Q,
    descales,
    oracle,
    qkv,
    randn,
    real,
)

from onepass.compat import flash_attn_3 as fa3

HINTS = "num_splits pack_gqa deterministic sm_margin return_attn_probs"


SIGNATURES = {
    "flash_attn_func": f"q k v softmax_scale causal qv {DESCALES} window_size attention_chunk softcap {HINTS}",
    "flash_attn_qkvpacked_func": f"qkv softmax_scale causal {DESCALES} window_size attention_chunk softcap "
    "deterministic num_heads_q sm_margin return_attn_probs",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k "
    f"softmax_scale causal qv {DESCALES} window_size attention_chunk softcap {HINTS}",
    "flash_attn_with_kvcache": "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx "
    f"cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens {DESCALES} softmax_scale "
    "causal window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin "
    "return_softmax_lse",
    "flash_attn_combine": "out_partial lse_partial out out_dtype",
    "get_scheduler_metadata": "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens "
    "qkv_dtype headdim_v cu_seqlens_q cu_seqlens_k_new cache_leftpad page_size max_seqlen_k_new causal window_size "
    "attention_chunk has_softcap num_splits pack_gqa sm_margin",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    parameters = inspect.signature(getattr(fa3, name)).parameters
    assert list(parameters) == SIGNATURES[name].split()
    for argument, default in {"window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0, "sm_margin": 0}.items():
        assert argument not in parameters or parameters[argument].default == default
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters.values())


@pytest.mark.parametrize(("theirs", "ours"), OPTIONS)
def test_dense(theirs, ours):
    tensors = [t.requires_grad_() for t in qkv(head_dim_v=12)]
    out, lse = fa3.flash_attn_func(*tensors, **theirs, return_attn_probs=True)
    expected = oracle(*tensors, ours)
    torch.testing.assert_close(out, expected.out)
    torch.testing.assert_close(lse, expected.lse)
    dout = randn(*out.shape, seed=5)
    found, true = (torch.autograd.grad(o, tensors, dout) for o in (out, expected.out))
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(fa3.flash_attn_func(*tensors, **theirs), out)


def test_qkvpacked():
    q, k, v = qkv(seqlen_q=10, heads_q=2)
    expected = fa3.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), causal=True), expected)
    q, k, v = qkv(seqlen_q=10)
    expected = fa3.flash_attn_func(q, k, v, None, True)
    beside = torch.cat([q, k, v], 2)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(beside, None, True, num_heads_q=4), expected)
    with pytest.raises(ValueError, match="num_heads_q: expected an int"):
        fa3.flash_attn_qkvpacked_func(beside)
    with pytest.raises(ValueError, match="qkv: expected 5 heads of q"):
        fa3.flash_attn_qkvpacked_func(beside, num_heads_q=5)


@pytest.mark.parametrize(("theirs", "ours"), OPTIONS)
@pytest.mark.parametrize("used", ["", "q", "k", "qk"])
def test_packed(theirs, ours, used):
    tensors = [randn(12, 4, 8), randn(19, 2, 8, seed=1), randn(19, 2, 8, seed=2)]
    lengths_q = USED_Q if "q" in used else OFFSETS_Q.diff()
    lengths_k = USED_K if "k" in used else OFFSETS_K.diff()
    rows, keys = [], []
    for b in range(2):
        m, n = int(OFFSETS_Q[b]), int(OFFSETS_K[b])
        rows.append(slice(m, m + int(lengths_q[b])))
        keys.append(slice(n, n + int(lengths_k[b])))
        tensors[0][rows[b].stop : OFFSETS_Q[b + 1]] = torch.nan
        for t in tensors[1:]:
            t[keys[b].stop : OFFSETS_K[b + 1]] = torch.nan
    tensors = [t.requires_grad_() for t in tensors]
    out, lse = fa3.flash_attn_varlen_func(
        *tensors,
        OFFSETS_Q,
        OFFSETS_K,
        7,
        10,
        seqused_q=USED_Q if "q" in used else None,
        seqused_k=USED_K if "k" in used else None,
        return_attn_probs=True,
        **theirs,
    )
    expected = [
        oracle(tensors[0][None, r], tensors[1][None, s], tensors[2][None, s], ours)
        for r, s in zip(rows, keys, strict=True)
    ]
    exists = torch.zeros(12, dtype=torch.bool)
    for r, one in zip(rows, expected, strict=True):
        exists[r] = True
        torch.testing.assert_close(out[r], one.out[0])
        torch.testing.assert_close(lse[:, r], one.lse[0])
    assert not out[~exists].any()
    dout = randn(*out.shape, seed=5)
    found = torch.autograd.grad(out, tensors, dout)
    parts = sum((one.out[0] * dout[r]).sum() for r, one in zip(rows, expected, strict=True))
    for a, b in zip(found, torch.autograd.grad(parts, tensors), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("uses", [False, True])
def test_private_backward(is_packed, uses):
    if is_packed:
        tensors = [randn(12, 4, 8), randn(19, 2, 8, seed=1), randn(19, 2, 8, seed=2)]
        lengths = {"cu_seqlens_q": OFFSETS_Q, "cu_seqlens_k": OFFSETS_K}
    else:
        tensors, lengths = qkv(), {}
    used = (USED_Q, USED_K) if uses else (None, None)
    leaves = [t.clone().requires_grad_() for t in tensors]
    options = {"softmax_scale": 0.3, "window_size_left": 4, "window_size_right": 2, "softcap": 3.0}
    out, lse, *empty = fa3._flash_attn_forward(
        *leaves, **lengths, seqused_q=used[0], seqused_k=used[1], max_seqlen_q=7, max_seqlen_k=10, **options
    )
    assert [t.numel() for t in empty] == [0, 0]
    dout = randn(*out.shape, seed=5)
    expected = torch.autograd.grad(out, leaves, dout)
    buffers = [torch.full_like(t, torch.nan) for t in tensors]
    softmax_d = fa3._flash_attn_backward(
        dout,
        *tensors,
        out,
        lse,
        *(lengths.values() or (None, None)),
        *used,
        7,
        10,
        *buffers,
        **options,
        deterministic=True,
    )
    for a, b in zip(buffers, expected, strict=True):
        torch.testing.assert_close(a, b)
    sums = (dout * out).sum(-1).transpose(-1, -2).float()
    assert softmax_d.shape == ((4, 12 + 256) if is_packed else (2, 4, 128))
    torch.testing.assert_close(softmax_d[..., : sums.shape[-1]], sums)


def test_private_forward_runs_calls_over_caches():
    q, k, v = qkv(seqlen_q=1)
    lengths, starts = torch.tensor([4, 9], dtype=INT32), torch.tensor([1, 0], dtype=INT32)
    into = torch.empty_like(q)
    out, lse, *_ = fa3._flash_attn_forward(q, k, v, out_=into, seqused_k=lengths, leftpad_k=starts, causal=True)
    assert out is into
    expected = fa3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, cache_leftpad=starts, causal=True, return_softmax_lse=True
    )
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    with pytest.raises(NotImplementedError, match="cu_seqlens_k: expected None, got a tensor: keys in a cache"):
        fa3._flash_attn_forward(q, k, v, seqused_k=lengths, leftpad_k=starts, cu_seqlens_k=OFFSETS_K)


@pytest.mark.parametrize("theirs", [{}, {"causal": True}, {"attention_chunk": 5}])
@pytest.mark.parametrize("has_new", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_paged", [False, True])
def test_private_forward_over_a_cache_of_which_some_queries_exist(theirs, has_new, is_packed, is_paged):
    """The queries that exist give what they give by themselves; out of the others is 0."""
    q, k, v = qkv(seqlen_q=4, seqlen_k=12)
    lengths, starts = torch.tensor([4, 9], dtype=INT32), torch.tensor([1, 0], dtype=INT32)
    used, new = torch.tensor([3, 1], dtype=INT32), [randn(2, 2, 2, 8, seed=s) for s in (5, 6)]
    angles = torch.rand(12, 3, dtype=DTYPE)
    more = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()} if has_new else {}
    options = {**theirs, "softmax_scale": 0.3}
    alone = [t.clone() for t in (k, v)]
    pages, table = [k, v], None
    if is_paged:
        pages, table = (
            [t.unflatten(1, (2, 6)).flatten(0, 1) for t in (k, v)],
            torch.tensor([[0, 1], [2, 3]], dtype=INT32),
        )
    rows = {"k_new": new[0], "v_new": new[1]} if has_new else {}
    cut = {"cu_seqlens_q": torch.tensor([0, 4, 8], dtype=INT32), "max_seqlen_q": 4} if is_packed else {}
    out, lse, *_ = fa3._flash_attn_forward(
        q.flatten(0, 1) if is_packed else q,
        *pages,
        **rows,
        **cut,
        **more,
        **options,
        seqused_q=used,
        seqused_k=lengths,
        leftpad_k=starts,
        page_table=table,
    )
    out = out.view(2, 4, 4, 8)
    lse = lse.view(4, 2, 4).transpose(0, 1) if is_packed else lse
    for b, count in enumerate(used.tolist()):
        entry = slice(b, b + 1)
        own_new = {n: t[entry] for n, t in rows.items()}
        expected = fa3._flash_attn_forward(
            q[entry, :count],
            *(t[entry] for t in alone),
            **own_new,
            **more,
            **options,
            seqused_k=lengths[entry],
            leftpad_k=starts[entry],
        )
        torch.testing.assert_close(out[entry, :count], expected[0])
        torch.testing.assert_close(lse[entry, :, :count], expected[1])
        assert not out[b, count:].any()
        assert (lse[b, :, count:] == -torch.inf).all()
    for t, own in zip((k, v), alone, strict=True):
        torch.testing.assert_close(t, own)


@pytest.mark.parametrize("is_packed", [False, True])
def test_an_e4m3_cache_of_which_some_queries_exist(is_packed):
    """Each entry has descales of its own."""
    q, k, v = (t.float().to(E4M3) for t in qkv(seqlen_q=4, seqlen_k=12))
    lengths, used = torch.tensor([4, 9], dtype=INT32), torch.tensor([3, 1], dtype=INT32)
    names = ("q_descale", "k_descale", "v_descale")
    descales = {n: torch.rand(2, 2, generator=torch.Generator().manual_seed(i)) + 0.5 for i, n in enumerate(names)}
    rows, cut = (q.flatten(0, 1), {"cu_seqlens_q": torch.tensor([0, 4, 8], dtype=INT32)}) if is_packed else (q, {})
    given = {"causal": True, "leftpad_k": torch.zeros(2, dtype=INT32)}
    out = fa3._flash_attn_forward(
        rows, k, v, **cut, **given, **descales, max_seqlen_q=4, seqused_q=used, seqused_k=lengths
    )[0].view(2, 4, 4, 8)
    for b, count in enumerate(used.tolist()):
        entry = slice(b, b + 1)
        own = {n: t[entry] for n, t in (descales | {"leftpad_k": given["leftpad_k"], "seqused_k": lengths}).items()}
        alone = fa3._flash_attn_forward(q[entry, :count], k[entry], v[entry], causal=True, **own)[0]
        torch.testing.assert_close(out[entry, :count], alone)
        assert not out[b, count:].any()


@pytest.mark.parametrize("theirs", [{}, {"causal": True}, {"attention_chunk": 5}])
@pytest.mark.parametrize("has_descales", [False, True])
def test_e4m3(theirs, has_descales):
    tensors = [t.to(E4M3).requires_grad_() for t in qkv()]
    given = descales() if has_descales else [None] * 3
    out, lse = fa3.flash_attn_func(
        *tensors, **theirs, **dict(zip(DESCALES.split(), given, strict=True)), return_attn_probs=True
    )
    assert out.dtype == torch.bfloat16
    ones = torch.ones(2, 2)
    values = [real(t.detach(), ones if d is None else d) for t, d in zip(tensors, given, strict=True)]
    ours = {"causal": "causal" in theirs} | ({"chunk": 5} if "attention_chunk" in theirs else {})
    expected = oracle(*values, ours)
    # P has three bits of mantissa, 2 ** -4 of an average of values; with chunks it has bfloat16's eight
    atol = 2 ** -(7 if "attention_chunk" in theirs else 4) * float(values[2].abs().max())
    torch.testing.assert_close(out.double(), expected.out, atol=atol, rtol=0)
    torch.testing.assert_close(lse.double(), expected.lse, atol=0.05, rtol=0)
    with pytest.raises(NotImplementedError, match="e4m3 tensors has no backward"):
        out.float().sum().backward()


@pytest.mark.parametrize("chunk", [None, 5])
def test_e4m3_of_packed_sequences_with_unused_queries(chunk):
    """Descales follow their sequences."""
    tensors = [randn(12, 4, 8).to(E4M3), randn(19, 2, 8, seed=1).to(E4M3), randn(19, 2, 8, seed=2).to(E4M3)]
    given = [d * torch.tensor([[1.0], [4.0]]) for d in descales()]
    options = {} if chunk is None else {"attention_chunk": chunk}
    lengths = OFFSETS_Q, OFFSETS_K, 7, 10, USED_Q, USED_K
    out = fa3.flash_attn_varlen_func(*tensors, *lengths, None, True, None, *given, **options)
    for b in range(2):
        rows = slice(int(OFFSETS_Q[b]), int(OFFSETS_Q[b] + USED_Q[b]))
        keys = slice(int(OFFSETS_K[b]), int(OFFSETS_K[b] + USED_K[b]))
        own = [real(t[None, s], d[b : b + 1]) for t, s, d in zip(tensors, (rows, keys, keys), given, strict=True)]
        expected = oracle(*own, {"causal": True, "chunk": chunk}).out[0]
        atol = 2 ** -(4 if chunk is None else 7) * float(own[2].abs().max())
        torch.testing.assert_close(out[rows].double(), expected, atol=atol, rtol=0)

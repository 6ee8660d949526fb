"""flash-attn 4's functions: signatures, windows, sinks, lengths and pages, beside the float64 oracle."""

import inspect

import pytest
import torch

from onepass import reference
from onepass.compat import flash_attn_4 as fa4
from onepass.testing.budget import compare

DTYPE = torch.float64
E4M3 = torch.float8_e4m3fn
INT32 = torch.int32


def randn(*shape, seed=0, dtype=DTYPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def qkv(batch=2, seqlen_q=7, seqlen_k=10, heads_q=4, heads_kv=2, head_dim=8, head_dim_v=12):
    return [
        randn(batch, seqlen_q, heads_q, head_dim),
        randn(batch, seqlen_k, heads_kv, head_dim, seed=1),
        randn(batch, seqlen_k, heads_kv, head_dim_v, seed=2),
    ]


MODS = "score_mod score_mod_bwd mask_mod"
SIGNATURES = {
    "flash_attn_func": "q k v qv gather_kv_indices softmax_scale causal window_size learnable_sink softcap num_splits "
    f"pack_gqa deterministic {MODS} aux_tensors aux_scalars block_sparse_tensors block_sparse_tensors_bwd return_lse "
    "gather_bwd_recompute_p gather_bwd_token_chunk",
    "flash_attn_varlen_func": "q k v qv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k min_seqlen_k seqused_q "
    "seqused_k gather_kv_indices page_table softmax_scale causal window_size learnable_sink softcap num_splits "
    f"pack_gqa deterministic {MODS} block_sparse_tensors aux_tensors aux_scalars return_lse scheduler_metadata "
    "seqlen_k_per_split disable_scheduler_metadata gather_bwd_recompute_p gather_bwd_token_chunk",
    "flash_attn_combine": "out_partial lse_partial out out_dtype cu_seqlens seqused virtual_batch_idx return_lse",
    "get_scheduler_metadata": "max_seqlen_q max_seqlen_k nheads nheads_kv headdim num_splits headdim_v pack_gqa causal "
    "window_size_left window_size_right seqlen_k_new cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k "
    "leftpad_k seqlen_k_per_split _arch",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    parameters = inspect.signature(getattr(fa4, name)).parameters
    assert list(parameters) == SIGNATURES[name].split()
    defaults = {"window_size": (None, None), "learnable_sink": None, "softcap": 0.0, "num_splits": 1, "causal": False}
    for argument, default in defaults.items():
        assert argument not in parameters or parameters[argument].default in (default, inspect.Parameter.empty)


OPTIONS = [
    ({}, {}),
    ({"causal": True, "softcap": 2.0, "num_splits": 3, "pack_gqa": True}, {"causal": True, "softcap": 2.0}),
    ({"window_size": (3, None), "softmax_scale": 0.4}, {"window": (3, None), "softmax_scale": 0.4}),
    ({"window_size": (None, -2)}, {"window": (None, -2)}),
    ({"window_size": (-3, None)}, {"window": (-3, None)}),
    ({"window_size": (5, -2)}, {"window": (5, -2)}),
    ({"window_size": (-1, -1), "causal": True}, {"causal": True}),
]


@pytest.mark.parametrize(("theirs", "ours"), OPTIONS)
@pytest.mark.parametrize("has_sink", [False, True])
def test_dense(theirs, ours, has_sink):
    tensors = [t.requires_grad_() for t in (*qkv(), *([randn(4, seed=9)] if has_sink else []))]
    theirs = theirs | ({"learnable_sink": tensors[3]} if has_sink else {})
    ours = ours | ({"sinks": tensors[3]} if has_sink else {})
    out, lse = fa4.flash_attn_func(*tensors[:3], **theirs, return_lse=True)
    expected = reference.attention(*tensors[:3], **ours)
    torch.testing.assert_close(out, expected.out)
    torch.testing.assert_close(lse, expected.lse)
    douts = randn(*out.shape, seed=5), randn(*lse.shape, seed=6)
    is_seen = expected.lse.isfinite()
    found = torch.autograd.grad((out, lse[is_seen]), tensors, (douts[0], douts[1][is_seen]), allow_unused=True)
    true = torch.autograd.grad(
        (expected.out, expected.lse[is_seen]), tensors, (douts[0], douts[1][is_seen]), allow_unused=True
    )
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b)


def test_lse_is_returned_where_it_is_asked_for_or_a_gradient_is():
    tensors = qkv()
    assert fa4.flash_attn_func(*tensors)[1] is None
    assert fa4.flash_attn_func(*tensors, return_lse=True)[1].shape == (2, 4, 7)
    assert fa4.flash_attn_func(tensors[0].requires_grad_(), *tensors[1:])[1].shape == (2, 4, 7)


OFFSETS_Q, USED_Q = torch.tensor([0, 7, 14], dtype=INT32), torch.tensor([4, 5], dtype=INT32)
OFFSETS_K, USED_K = torch.tensor([0, 9, 18], dtype=INT32), torch.tensor([9, 6], dtype=INT32)


@pytest.mark.parametrize(("theirs", "ours"), OPTIONS)
@pytest.mark.parametrize("used", ["", "q", "k", "qk"])
@pytest.mark.parametrize("packed", ["", "q", "k", "qk"])
def test_queries_and_keys_are_cut_independently(theirs, ours, used, packed):
    tensors = [randn(14, 4, 8), randn(18, 2, 8, seed=1), randn(18, 2, 8, seed=2)]
    ends_q = [4, 12] if "q" in used else [7, 14]
    ends_k = [9, 15] if "k" in used else [9, 18]
    for b in range(2):
        tensors[0][ends_q[b] : OFFSETS_Q[b + 1]] = torch.nan
        for t in tensors[1:]:
            t[ends_k[b] : OFFSETS_K[b + 1]] = torch.nan
    tensors = [t.requires_grad_() for t in tensors]
    given = [t if name in packed else t.unflatten(0, (2, -1)) for name, t in zip("qkk", tensors, strict=True)]
    sink = randn(4, seed=9)
    out, lse = fa4.flash_attn_varlen_func(
        *given,
        cu_seqlens_q=OFFSETS_Q if "q" in packed else None,
        cu_seqlens_k=OFFSETS_K if "k" in packed else None,
        max_seqlen_q=7,
        max_seqlen_k=9,
        seqused_q=USED_Q if "q" in used else None,
        seqused_k=USED_K if "k" in used else None,
        learnable_sink=sink,
        return_lse=True,
        **theirs,
    )
    if "q" not in packed:
        assert out.shape == (2, 7, 4, 8)
        assert lse.shape == (2, 4, 7)
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    assert out.shape == (14, 4, 8)
    total = 0
    dout = randn(*out.shape, seed=5)
    for b in range(2):
        rows, keys = slice(int(OFFSETS_Q[b]), ends_q[b]), slice(int(OFFSETS_K[b]), ends_k[b])
        own = tensors[0][None, rows], tensors[1][None, keys], tensors[2][None, keys]
        expected = reference.attention(*own, sinks=sink, **ours)
        torch.testing.assert_close(out[rows], expected.out[0])
        torch.testing.assert_close(lse[:, rows], expected.lse[0])
        assert not out[ends_q[b] : OFFSETS_Q[b + 1]].any()
        total = total + (expected.out[0] * dout[rows]).sum()
    found = torch.autograd.grad(out, tensors, dout)
    for a, b in zip(found, torch.autograd.grad(total, tensors), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("theirs", "ours"), OPTIONS)
@pytest.mark.parametrize("cut", ["dense", "packed", "used", "packed and used"])
@pytest.mark.parametrize("is_full", [False, True])
def test_pages(theirs, ours, cut, is_full):
    q, pages = randn(14, 4, 8), [randn(6, 5, 2, 8, seed=s) for s in (1, 2)]
    table = torch.tensor([[3, 0], [5, 1]], dtype=INT32)
    lengths = [10, 10] if is_full else [9, 6]
    if not is_full:
        for p in pages:
            p[0, 4:], p[1, 1:], p[4] = torch.nan, torch.nan, torch.nan
    ends = [4, 12] if "used" in cut else [7, 14]
    sink = randn(4, seed=9)
    out, lse = fa4.flash_attn_varlen_func(
        q if "packed" in cut else q.unflatten(0, (2, 7)),
        *pages,
        cu_seqlens_q=OFFSETS_Q if "packed" in cut else None,
        seqused_q=USED_Q if "used" in cut else None,
        seqused_k=None if is_full else USED_K,
        max_seqlen_q=7,
        page_table=table,
        learnable_sink=sink,
        return_lse=True,
        **theirs,
    )
    if "packed" not in cut:
        assert out.shape == (2, 7, 4, 8)
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    for b in range(2):
        rows = slice(int(OFFSETS_Q[b]), ends[b])
        own = [p[table[b].long()].flatten(0, 1)[None, : lengths[b]] for p in pages]
        expected = reference.attention(q[None, rows], *own, sinks=sink, **ours)
        torch.testing.assert_close(out[rows], expected.out[0])
        torch.testing.assert_close(lse[:, rows], expected.lse[0])
        assert not out[ends[b] : OFFSETS_Q[b + 1]].any()


def test_pages_have_no_backward():
    pages = [randn(3, 5, 2, 8, seed=s) for s in (1, 2)]
    table = torch.tensor([[2], [0]], dtype=INT32)
    for needs in ("q", "sink"):
        q, sink = randn(2, 1, 4, 8).requires_grad_(needs == "q"), randn(4).requires_grad_(needs == "sink")
        out, lse = fa4.flash_attn_varlen_func(q, *pages, page_table=table, learnable_sink=sink)
        assert lse is not None
        with pytest.raises(NotImplementedError, match=r"attention over a cache .* has no backward"):
            out.sum().backward()


def test_pages_of_e4m3():
    q, pages = randn(2, 1, 4, 8).to(E4M3), [randn(3, 5, 2, 8, seed=s).to(E4M3) for s in (1, 2)]
    table, used = torch.tensor([[2], [0]], dtype=INT32), torch.tensor([5, 3], dtype=INT32)
    descale = [torch.rand(2, 2, generator=torch.Generator().manual_seed(s)) + 0.5 for s in range(3)]
    names = dict(zip(("q_descale", "k_descale", "v_descale"), descale, strict=True))
    out, *_ = fa4._flash_attn_fwd(q, *pages, seqused_k=used, page_table=table, **names)
    assert out.dtype == torch.bfloat16
    for b, n in enumerate(used.tolist()):
        own = [q[b : b + 1].double(), *(p.double()[table[b].long()].flatten(0, 1)[None, :n] for p in pages)]
        heads = [d[b].double().repeat_interleave(g)[:, None] for d, g in zip(descale, (2, 1, 1), strict=True)]
        real = [t * h for t, h in zip(own, heads, strict=True)]
        exact, in_torch = (reference.attention(*real, compute_dtype=t).out for t in (torch.float64, torch.bfloat16))
        row = compare("out", out[b : b + 1], exact, in_torch)
        assert row.ok, str(row)


# --- private functions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("cut", ["dense", "packed", "used"])
def test_private_backward(has_sink, cut):
    q, k, v = randn(14, 4, 8), randn(18, 2, 8, seed=1), randn(18, 2, 8, seed=2)
    if cut != "packed":
        q, k, v = (t.unflatten(0, (2, -1)) for t in (q, k, v))
    lengths = {"packed": {"cu_seqlens_q": OFFSETS_Q, "cu_seqlens_k": OFFSETS_K}, "used": {"seqused_q": USED_Q}}.get(
        cut, {}
    )
    sink = randn(4, seed=9) if has_sink else None
    options = {"softmax_scale": 0.3, "window_size_left": 4, "window_size_right": -1, "softcap": 3.0}
    leaves = [t.clone().requires_grad_() for t in (q, k, v, *([sink] if has_sink else []))]
    out, lse, *rest = fa4._flash_attn_fwd(
        *leaves[:3], **lengths, learnable_sink=leaves[3] if has_sink else None, **options
    )
    assert rest == [None, None, None]
    is_seen = lse.isfinite()
    dout, dlse = randn(*out.shape, seed=5), torch.where(is_seen, randn(*lse.shape, seed=6), 0.0)
    expected = torch.autograd.grad((out, lse[is_seen]), leaves, (dout, dlse[is_seen]))
    buffers = {name: torch.full_like(t, torch.nan) for name, t in (("dq", q), ("dv", v))}
    found = fa4._flash_attn_bwd(
        q, k, v, out, dout, lse, **lengths, **options, **buffers, dlse=dlse, learnable_sink=sink, deterministic=True
    )
    assert len(found) == 3 + has_sink
    assert found[0] is buffers["dq"]
    assert found[2] is buffers["dv"]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_private_forward_writes_into_given_tensors():
    tensors = qkv()
    expected = fa4.flash_attn_func(*tensors, causal=True, return_lse=True)
    given = [torch.empty_like(t) for t in expected]
    out, lse, *_ = fa4._flash_attn_fwd(*tensors, causal=True, out=given[0], lse=given[1])
    assert out is given[0]
    assert lse is given[1]
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    assert fa4._flash_attn_fwd(*tensors)[1] is None


def test_combine_without_lse():
    outs, lses = randn(3, 2, 5, 4, 8), randn(3, 2, 5, 4)
    out, lse = fa4.flash_attn_combine(outs, lses)
    weights = (lses - lses.logsumexp(0)).exp()[..., None]
    torch.testing.assert_close(out, (weights * outs).sum(0))
    torch.testing.assert_close(lse, lses.logsumexp(0))
    assert fa4.flash_attn_combine(outs, lses, return_lse=False)[1] is None


def test_the_private_combine_writes_into_its_arguments():
    outs, lses, semaphore = randn(3, 2, 5, 4, 8), randn(3, 2, 5, 4), torch.ones(1, dtype=INT32)
    out, lse = torch.empty(2, 5, 4, 8, dtype=DTYPE), torch.empty(2, 4, 5, dtype=DTYPE).mT
    expected = fa4.flash_attn_combine(outs, lses)
    assert fa4._flash_attn_fwd_combine(outs, lses, out, lse, semaphore_to_reset=semaphore) is None
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    assert not semaphore.any()
    fa4._flash_attn_fwd_combine(outs, lses, out.zero_())
    assert torch.equal(out, expected[0])
    for options, error, match in (
        ({"lse": lse.mT}, ValueError, r"lse: expected shape \(2, 5, 4\)"),
        ({"out": None}, TypeError, "out: expected"),
        ({"num_splits_dynamic_ptr": semaphore}, NotImplementedError, "num_splits_dynamic_ptr: expected None"),
    ):
        with pytest.raises(error, match=match):
            fa4._flash_attn_fwd_combine(**({"out_partial": outs, "lse_partial": lses, "out": out} | options))


def test_scheduler_metadata():
    arguments = 7, 9, 4, 2, 8
    metadata = fa4.get_scheduler_metadata(*arguments, 1, cu_seqlens_q=OFFSETS_Q)
    assert metadata.tile_count_semaphore is None
    assert metadata.cu_total_m_blocks.numel() == 0
    assert metadata.num_m_blocks_ptr is None
    assert fa4.get_scheduler_metadata(*arguments, 4, seqused_k=USED_K).num_m_blocks_ptr is not None
    tensors = randn(14, 4, 8), randn(18, 2, 8, seed=1), randn(18, 2, 8, seed=2)
    cut = {"cu_seqlens_q": OFFSETS_Q, "cu_seqlens_k": OFFSETS_K}
    out, _ = fa4.flash_attn_varlen_func(*tensors, **cut, scheduler_metadata=metadata)
    assert torch.equal(out, fa4.flash_attn_varlen_func(*tensors, **cut)[0])
    with pytest.raises(ValueError, match="cu_seqlens_q: expected one of"):
        fa4.get_scheduler_metadata(*arguments, 1)


def test_refusals_of_pages():
    pages = [randn(3, 5, 2, 8, seed=s) for s in (1, 2)]
    call = {"q": randn(2, 1, 4, 8), "k": pages[0], "v": pages[1], "page_table": torch.tensor([[2], [0]], dtype=INT32)}
    assert fa4.flash_attn_varlen_func(**call)[0].isfinite().all()
    for changes, error, match in (
        ({"cu_seqlens_k": OFFSETS_K}, NotImplementedError, "cu_seqlens_k: expected None, got a tensor"),
        ({"page_table": torch.zeros(2, dtype=INT32)}, ValueError, r"page_table: expected shape \(batch, max_pages\)"),
        ({"seqused_k": torch.tensor([1, 6], dtype=INT32)}, ValueError, "seqused_k: expected at most 5"),
        ({"seqused_k": torch.tensor([1, 2])}, TypeError, "seqused_k: expected dtype int32"),
    ):
        with pytest.raises(error, match=match):
            fa4.flash_attn_varlen_func(**(call | changes))
    with pytest.raises(NotImplementedError, match="qv, gather_kv_indices: expected a call without them"):
        fa4._flash_attn_bwd_sparse_mla()

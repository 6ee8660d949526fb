"""A row without keys has its sink for lse, on a GPU: forward, gradients, packed sequences, float32, FP8, decoding.

Kernels select that lse and do not compute it, so its bits are those of the sink in float32.
"""

import pytest
import torch
from decode_cases import DecodeCase, E4m3Case
from gpu_cases import (
    BACKEND,
    BF16,
    DEVICE,
    FP16,
    INF,
    IS_READY,
    NAN,
    ON_GPU,
    assert_rounded_alike,
    case,
    cases,
    lengths_tensor,
    no_waiting,
    offsets,
    size,
)
from gradient_cases import Loss, check_gradients, hard_gradients, loss_of
from test_decode_packed import packed

import onepass
from onepass.testing.budget import compare, compare_lse, fp8_budget

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_READY, reason="needs a GPU with the kernels")]

FLOAT32 = torch.float32
DTYPES = {64: BF16, 128: FP16, 256: BF16}


def check_empty_rows(call, num_empty):
    """Check out and lse of the empty rows of a dense call: the first `num_empty[b]` rows of batch entry b."""
    out, lse = call.run()
    for b, n in enumerate(num_empty):
        assert (out[b, :n] == 0).all()
        assert torch.equal(lse[b, :, :n], call.options["sinks"][:, None].expand(-1, n))
        assert (out[b, n:] != 0).any(-1).all()


DENSE = [
    *((400, 130, {"causal": True}, 270), (300, 20, {"window": (3, 2)}, 278), (130, 1, {"causal": True}, 129)),
    # the first tile of 64, of 128 and of 192 rows holds exactly the empty rows
    *((n + 70, 70, {"causal": True}, n) for n in (64, 128, 192)),
]


@cases(
    case(m, n, batch=2, heads=(4, 2), head_dim=d, dtype=DTYPES[d], sinks=True, options=options)
    for m, n, options, _ in DENSE
    for d in DTYPES
)
def test_dense_gradients(case):
    """Forward and gradients are right, including gradients of lse of the empty rows."""
    call = case.call()
    check_gradients(call)
    num_empty = next(n for m, k, _, n in DENSE if (m, k) == (case.seqlen_q, case.seqlen_k))
    check_empty_rows(call, [num_empty] * 2)


@cases(
    case(m, n, batch=2, heads=(4, 2), head_dim=d, dtype=FLOAT32, sinks=True, options=options)
    for m, n, options, _ in DENSE[:3]
    for d in (64, 128, 256)
)
def test_float32_gradients(case):
    call = case.call()
    call.check(gradients=True, with_floor=True)
    num_empty = next(n for m, k, _, n in DENSE if (m, k) == (case.seqlen_q, case.seqlen_k))
    check_empty_rows(call, [num_empty] * 2)


@cases(
    case(m, 300, batch=4, heads=(8, 2), head_dim=d, dtype=dtype, used=(0, 1, 133, 300), sinks=True, options=options)
    for m, options in ((200, {}), (200, {"causal": True}), (3, {}), (16, {"causal": True, "softcap": 5.0}))
    for d, dtype in ((64, BF16), (128, FP16), (256, BF16), (128, FLOAT32))
)
def test_padded_gradients(case):
    """Gradients are right for batch entries of several lengths, including cases whose heads share a tile."""
    call = case.call()
    call.check(gradients=True, with_floor=True)
    is_causal = "causal" in call.options
    num_empty = [case.seqlen_q if n == 0 else max(0, case.seqlen_q - n) * is_causal for n in case.used]
    check_empty_rows(call, num_empty)


SOME = (7, 0, 300, 5, 40, 129, 1, 64, 0, 70), (9, 4, 0, 0, 30, 200, 1, 0, 0, 1)


@cases(
    case(*SOME, heads=heads, head_dim=d, dtype=dtype, slack=slack, sinks=True, options=options)
    for d, dtype, heads in ((64, FP16, (4, 2)), (128, BF16, (8, 2)), (256, BF16, (2, 1)), (128, FLOAT32, (4, 2)))
    for slack, options in ((3, {}), (0, {"causal": True}), (150, {"window": (30, 2), "softcap": 5.0}))
)
def test_packed_gradients(case):
    """Gradients are right with sequences without keys, and with rows of no sequence, which have no sink."""
    call = case.call()
    call.check(gradients=True, with_floor=True)
    if case.dtype != FLOAT32:
        check_gradients(call)
    out, lse = call.run()
    starts = offsets(case.seqlen_q)
    for b, n in enumerate(case.seqlen_k):
        if n == 0:
            rows = slice(*starts[b : b + 2])
            assert (out[rows] == 0).all()
            assert torch.equal(lse[:, rows], call.options["sinks"][:, None].expand(-1, case.seqlen_q[b]))
    assert (out[starts[-1] :] == 0).all()
    assert (lse[:, starts[-1] :] == -INF).all()


@pytest.mark.parametrize("deterministic", [False, True])
@cases(
    case(
        tuple((37 * i + 11) % size(500, 60) * (i % 5 != 2) for i in range(16)),
        tuple((53 * i + 20) % size(700, 60) * (i % 4 != 1) for i in range(16)),
        heads=(8, 2),
        head_dim=d,
        slack=3,
        sinks=True,
        options=options,
    )
    for d in (64, 128)
    for options in ({}, {"causal": True})
)
def test_many_packed_gradients(case, deterministic):
    """A fifth of the sequences has no queries, a quarter no keys. The loss depends on out and lse, or on lse alone."""
    call = case.call()
    for of in ("both", "lse"):
        check_gradients(call, of, deterministic=deterministic)


@cases(
    [
        case(5, 0, batch=2, heads=(4, 2), head_dim=128, sinks=True),
        case((5, 0, 2), (0, 0, 0), heads=(4, 2), head_dim=128, slack=4, sinks=True),
        case((), (), heads=(4, 2), head_dim=128, slack=4, sinks=True),
    ]
)
def test_no_keys_at_all_gradients(case):
    """Without any keys, dsinks is the sum of dlse."""
    call = case.call()
    loss = loss_of(call)
    actual = check_gradients(call, loss=loss)
    rows = sum(case.seqlen_q) if call.is_packed else None
    expected = loss.dlse[..., :rows].transpose(-1, -2).flatten(0, -2).sum(0)
    torch.testing.assert_close(actual["dsinks"], expected)
    check_gradients(call, "out")
    out, lse = call.run()
    sinks = call.options["sinks"][:, None]
    assert (out == 0).all()
    assert (lse[..., :rows] == sinks).all()
    assert rows is None or (lse[:, rows:] == -INF).all()


@pytest.mark.parametrize("value", [NAN, INF])
@cases(case(300, 200, batch=2, heads=(4, 2), head_dim=d, causal=True, sinks=True) for d in (64, 128, 256))
def test_gradients_of_out_of_rows_without_keys_go_nowhere(case, value):
    call = case.call()
    loss = loss_of(call)
    clean = hard_gradients(call, loss, deterministic=True)
    dout = loss.dout.clone()
    dout[:, :100] = value
    actual = hard_gradients(call, Loss(dout, loss.dlse), deterministic=True)
    assert torch.equal(actual["dsinks"], clean["dsinks"])
    assert (actual["dq"][:, :100] == 0).all()
    assert all(g.isfinite().all() for g in actual.values())


# ---------------------------------------------------------------- non-finite sinks


@pytest.mark.parametrize("value", [-INF, INF, NAN])
@cases(
    [
        *(case(300, 200, batch=2, heads=(4, 4), head_dim=d, causal=True, sinks=True) for d in (64, 128, 256)),
        case(300, 200, batch=2, heads=(4, 4), head_dim=128, dtype=FLOAT32, causal=True, sinks=True),
        case((70, 30, 5), (200, 0, 3), heads=(4, 4), head_dim=128, slack=3, causal=True, sinks=True),
    ]
)
def test_gradients_of_sinks_that_are_no_numbers(case, value):
    """A sink of -inf acts as no sink, +inf makes out 0, and NaN gives NaN. The bits of other heads do not change."""
    call = case.call()
    loss = loss_of(call)
    out, lse = call.run()
    clean = hard_gradients(call, loss, deterministic=True)
    call.options["sinks"][1] = value
    dirty_out, dirty_lse = call.run()
    dirty = hard_gradients(call, loss, deterministic=True)
    other_heads = [0, 2, 3]
    is_empty = (out == 0).all(-1)  # (.., seqlen_q, heads)
    assert torch.equal(dirty_out[..., other_heads, :], out[..., other_heads, :])
    assert torch.equal(dirty_lse[..., other_heads, :], lse[..., other_heads, :])
    for name in ("dq", "dk", "dv"):
        assert torch.equal(dirty[name][..., other_heads, :], clean[name][..., other_heads, :])
    assert torch.equal(dirty["dsinks"][other_heads], clean["dsinks"][other_heads])
    assert (dirty_out[is_empty] == 0).all()
    mine, my_lse, empty = dirty_out[..., 1, :], dirty_lse[..., 1, :], is_empty[..., 1]
    has_sink = torch.ones_like(empty)
    if call.is_packed:
        has_sink[int(call.options["cu_seqlens_q"][-1]) :] = False
    assert (my_lse[~has_sink] == -INF).all()
    empty_lse = my_lse[empty & has_sink]
    assert empty_lse.isnan().all() if value != value else (empty_lse == value).all()
    if value == -INF:
        assert mine.isfinite().all()
        assert all(g.isfinite().all() for g in dirty.values())
        assert not call.is_packed or (dirty["dsinks"][1] == 0).all()
    elif value == INF:
        assert (mine == 0).all()
        assert (my_lse[has_sink] == INF).all()
        assert all((dirty[name][..., 1, :].abs() < 1e-30).all() for name in ("dq", "dk", "dv"))
    else:
        assert mine[~empty].isnan().all()
        assert my_lse[~empty].isnan().all()


# ---------------------------------------------------------------- partials


@cases(case(300, 400, batch=2, heads=(4, 2), head_dim=128, dtype=dtype, sinks=True) for dtype in (BF16, FLOAT32))
def test_merging_keeps_the_share_of_the_sink(case):
    """The partial with the sinks has no keys for most rows: it has 50 keys under a causal mask of its own, or none."""
    call = case.call()
    q, k, v = call.tensors.values()
    sinks = call.options["sinks"]
    for last in (50, 0):
        first = onepass.attention(q, k[:, last:], v[:, last:], return_lse=True)
        second = onepass.attention(q, k[:, :last], v[:, :last], causal=True, sinks=sinks, return_lse=True)
        out, lse = onepass.merge_partials([first.out, second.out], [first.lse, second.lse])
        merged = []
        for dtype in (torch.float64, q.dtype):
            partials = [
                onepass.reference.attention(q, k[:, last:], v[:, last:], compute_dtype=dtype),
                onepass.reference.attention(q, k[:, :last], v[:, :last], causal=True, sinks=sinks, compute_dtype=dtype),
            ]
            lses = [p.lse.double() if dtype == torch.float64 else p.lse.float() for p in partials]
            merged.append(onepass.merge_partials([p.out for p in partials], lses))
        row = compare("out", out, merged[0].out, merged[1].out)
        assert row.ok, str(row)
        assert compare_lse(lse, merged[0].lse).ok


# ---------------------------------------------------------------- decoding


def _options(**options):
    return (("has_sinks", True), *options.items())


DECODE = [
    *(
        DecodeCase((1000, 0, 2, 65), m, heads, (d, d), page_size, dtype=dtype, options=_options(num_splits=splits))
        for splits in (1, 5)
        for m, heads, d, page_size, dtype in (
            (4, (8, 2), 128, None, BF16),
            (4, (8, 2), 64, 16, FP16),
            (4, (8, 2), 64, 16, FLOAT32),
            (3, (8, 8), 256, None, BF16),
            # more rows than the kernel for few rows takes
            (16, (8, 1), 128, 16, BF16),
            (150, (2, 1), 64, None, FP16),
        )
    ),
    DecodeCase((1000, 0, 2, 65), 4, (8, 2), (128, 128), options=_options(split_size=128)),
    DecodeCase(
        (1000, 0, 2, 65), 4, (8, 2), (128, 128), options=_options(num_splits=20)
    ),  # more splits than a warp merges
    DecodeCase((0, 0), 4, (8, 2), (128, 128), options=_options(num_splits=5)),
    *(
        E4m3Case((1000, 0, 2, 65), 4, (8, 2), (128, 128), 16, options=_options(num_splits=n), descales="page")
        for n in (1, 5)
    ),
]


def check_decode(arguments):
    """Compare a call with the tiled backend, and empty rows exactly. Returns: out and lse."""
    out, lse = onepass.attention_decode(**arguments, return_lse=True)
    is_e4m3 = arguments["k_cache"].dtype == torch.float8_e4m3fn
    wide = {n: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for n, t in arguments.items()}
    if is_e4m3:
        wide = arguments
    by_tiles = {"num_splits": None, "backend": "tiled", "return_lse": True}
    oracle = onepass.attention_decode(**wide | by_tiles)
    plain = onepass.attention_decode(**arguments | by_tiles)
    if is_e4m3:
        assert_rounded_alike(out, oracle.out)
    else:
        row = compare("out", out, oracle.out, plain.out, factor=3.0)
        assert row.ok, str(row)
    assert compare_lse(lse, oracle.lse).ok
    return out, lse


@pytest.mark.parametrize("case", DECODE, ids=str)
def test_decode(case):
    arguments = case.arguments()
    out, lse = check_decode(arguments)
    for b, n in enumerate(case.filled):
        count = max(0, case.seqlen_q - n)  # under a causal mask
        assert (out[b, :count] == 0).all()
        assert torch.equal(lse[b, :, :count], arguments["sinks"][:, None].expand(-1, count))
    assert lse.isfinite().all()


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("num_splits", [1, 5, None])
@pytest.mark.parametrize("page_size", [None, 16])
def test_packed_decode(page_size, num_splits, few):
    """Rows of no sequence have no sink."""
    filled, counts = (3000, 0, 900, 2, 333), (3, 3, 0, 5, 70)
    case = DecodeCase(filled, max(counts), (8, 2), (128, 128), page_size, options=_options(num_splits=num_splits))
    arguments = packed(case.arguments(), counts, behind=3)
    if few:
        arguments["max_seqlen_q"] = 1  # a hint that selects the kernel for few rows
    out, lse = check_decode(arguments)
    sinks, ends = arguments["sinks"][:, None], offsets(counts)
    for rows in (slice(ends[1], ends[2]), slice(ends[3], ends[3] + 3)):
        assert (out[rows] == 0).all()
        assert torch.equal(lse[:, rows], sinks.expand(-1, 3))
    assert (out[ends[-1] :] == 0).all()
    assert (lse[:, ends[-1] :] == -INF).all()
    assert lse[:, : ends[-1]].isfinite().all()


@pytest.mark.parametrize("num_splits", [1, 5])
@pytest.mark.parametrize("value", [-INF, INF, NAN])
def test_decode_with_sinks_that_are_no_numbers(value, num_splits):
    case = DecodeCase((1000, 0, 2), 4, (8, 2), (128, 128), options=_options(num_splits=num_splits))
    arguments = case.arguments()
    clean = onepass.attention_decode(**arguments, return_lse=True)
    arguments["sinks"][1] = value
    out, lse = onepass.attention_decode(**arguments, return_lse=True)
    others = [0, *range(2, 8)]
    assert torch.equal(out[:, :, others], clean.out[:, :, others])
    assert torch.equal(lse[:, others], clean.lse[:, others])
    without = arguments | {"sinks": None}
    out_without, lse_without = onepass.attention_decode(**without, return_lse=True)
    is_empty = lse_without[:, 1] == -INF
    assert (out[:, :, 1][is_empty] == 0).all()
    if value == -INF:
        assert_rounded_alike(out[:, :, 1:2], out_without[:, :, 1:2])
        torch.testing.assert_close(lse[:, 1], lse_without[:, 1], rtol=1e-4, atol=1e-4)
    elif value == INF:
        assert (out[:, :, 1] == 0).all()
        assert (lse[:, 1] == INF).all()
    else:
        assert lse[:, 1].isnan().all()
        assert out[:, :, 1][~is_empty].isnan().all()


@pytest.mark.skipif(not ON_GPU, reason="needs synchronization of a GPU")
def test_nothing_waits_for_the_device():
    """Packed calls without a key do not wait for the device to learn which rows belong to a sequence."""
    q, kv = torch.randn(20, 4, 64, device=DEVICE, dtype=BF16), torch.randn(0, 4, 64, device=DEVICE, dtype=BF16)
    sinks = torch.randn(4, device=DEVICE, requires_grad=True)
    lengths = {"cu_seqlens_q": lengths_tensor([0, 5, 12]), "cu_seqlens_k": lengths_tensor([0, 0, 0])}
    dlse = torch.randn(4, 20, device=DEVICE)

    def run():
        result = onepass.attention_varlen(q, kv, kv, **lengths, sinks=sinks, return_lse=True, backend=BACKEND)
        return torch.autograd.grad(result.lse, sinks, dlse)

    run()
    with no_waiting():
        (dsinks,) = run()
    torch.testing.assert_close(dsinks, dlse[:, :12].sum(1))


# ---------------------------------------------------------------- FP8

needs_fp8 = pytest.mark.skipif(BACKEND == "sm80", reason="no FP8 kernels for Ampere")


@needs_fp8
@pytest.mark.parametrize("centered", [(), ("k",), ("v",), ("k", "v")], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fp8(head_dim, centered):
    """Empty rows of a dense call are right, also in rows that are repaired after the kernel."""
    call = case(200, 300, batch=3, heads=(4, 2), head_dim=head_dim, used=(0, 133, 300), causal=True, sinks=True).call()
    q, k, v = call.tensors.values()
    options, sinks = dict(call.options), call.options["sinks"]
    quantized = onepass.quantize_fp8(q, k, v, seqused_k=options["seqused_k"], **{f"center_{n}": True for n in centered})
    out, lse = onepass.attention(quantized, **options, backend=BACKEND, return_lse=True)
    for b, n in enumerate((200, 67, 0)):
        assert (out[b, :n] == 0).all()
        assert torch.equal(lse[b, :, :n], sinks[:, None].expand(-1, n))
    if not centered:
        budget = fp8_budget(*quantized.dequantize(), out.dtype, **options, **({"short_sums": True} if ON_GPU else {}))
        assert ((lse.double() - budget.oracle.lse).abs() <= budget.lse).all()
    exact = onepass.reference.attention(q, k, v, **options)
    assert (lse.double() - exact.lse).abs().max() < 0.2
    assert (out.double() - exact.out).abs().max() < 0.4


@needs_fp8
@pytest.mark.parametrize("centered", [(), ("k", "v")], ids=str)
def test_fp8_of_packed_sequences(centered):
    call = case(*SOME, heads=(4, 2), head_dim=128, slack=3, causal=True, sinks=True).call()
    lengths = {name: call.options[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    quantized = onepass.quantize_fp8(*call.tensors.values(), **lengths, **{f"center_{n}": True for n in centered})
    out, lse = onepass.attention_varlen(quantized, **call.options, backend=BACKEND, return_lse=True)
    exact = call.expected()
    is_empty = (exact.out == 0).all(-1)
    assert (out[is_empty] == 0).all()
    assert torch.equal(lse.T[is_empty], exact.lse.T[is_empty].float())
    assert (lse[:, sum(SOME[0]) :] == -INF).all()
    seen = ~is_empty
    assert (lse.T[seen].double() - exact.lse.T[seen]).abs().max() < 0.2
    assert (out[seen].double() - exact.out[seen]).abs().max() < 0.4


@needs_fp8
def test_fp8_gradients():
    """With precision="fp8", gradients come from the 16-bit kernels, with the lse of the FP8 forward."""
    call = case(300, 200, batch=2, heads=(4, 2), head_dim=128, causal=True, sinks=True).call()
    leaves = {n: t.detach().requires_grad_() for n, t in call.tensors.items()}
    sinks = call.options["sinks"].detach().requires_grad_()
    _, lse = onepass.attention(**leaves, causal=True, sinks=sinks, precision="fp8", return_lse=True, backend=BACKEND)
    dlse = torch.zeros_like(lse)
    dlse[:, :, :100] = torch.randn(2, 4, 100, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    *gradients, dsinks = torch.autograd.grad(lse, (*leaves.values(), sinks), dlse)
    assert all((g == 0).all() for g in gradients)
    torch.testing.assert_close(dsinks, dlse.sum((0, 2)))

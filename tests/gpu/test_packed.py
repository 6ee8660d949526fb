"""Packed sequences (cu_seqlens) and padded batches (seqused_k) on the Hopper kernel, against the float64 oracle."""

import random

import pytest
import torch
from gpu_cases import (
    BACKEND,
    BF16,
    DEVICE,
    FP16,
    INF,
    MASKS,
    ON_GPU,
    case,
    cases,
    check,
    lengths_tensor,
    needs_hopper,
    no_waiting,
    same_bits,
    size,
)

import onepass

pytestmark = needs_hopper

draw = random.Random(0)
MANY = (
    tuple(draw.randint(0, 70) for _ in range(size(200, 40))),
    tuple(draw.randint(0, 90) for _ in range(size(200, 40))),
)
LENGTHS = {
    "one": ((130,), (70,)),
    "equal tiles": ((128, 128, 128), (128, 128, 128)),
    "ones": ((1,) * 40, (1,) * 40),
    "one query each": ((1,) * 12, (300, 1, 128, 0, 129, 64, 63, 65, 5, 200, 2, 127)),
    "empty among others": ((0, 5, 0, 200, 0, 3, 0), (7, 0, 0, 150, 0, 300, 0)),
    "empty first and last": ((0, 0, 90, 0), (0, 50, 90, 0)),
    "unequal": ((1, 300, 17, 128), (500, 3, 129, 128)),
    "one long among short": ((3, size(1500, 400), 2, 1), (4, size(1700, 500), 0, 1)),
    "many": MANY,
}


@cases(
    case(*LENGTHS[name], heads=(4, 2), head_dim=d, options=MASKS[mask])
    for name in LENGTHS
    for mask in ("full", "causal", "window")
    for d in (64, 128, 256)
)
def test_lengths(case):
    check(case.call())


OPTIONS = [
    (FP16, {"heads": (3, 1), "head_dim": 128, "causal": True}),
    (BF16, {"heads": (8, 2), "head_dim": 64, "sinks": True}),
    (FP16, {"head_dim": 96, "softcap": 10.0, "window": (50, 7)}),
    (BF16, {"head_dim": 192, "head_dim_v": 128, "causal": True}),
    (FP16, {"head_dim": 40, "head_dim_v": 200, "window": (None, 3)}),
    (BF16, {"head_dim": 256, "sinks": True, "causal": True, "softcap": 5.0, "slack": 1}),
    (BF16, {"head_dim": 8, "softmax_scale": 1.0, "slack": 5}),
    (BF16, {"head_dim": 128, "slack": 150, "causal": True}),
    (BF16, {"head_dim": 128, "used": (0, 20, 131, 64)}),
    (FP16, {"head_dim": 64, "used": (90, 0, 1, 65), "causal": True, "slack": 3, "heads": (4, 1)}),
    (BF16, {"head_dim": 256, "used": (10, 3, 129, 140), "window": (20, 20), "sinks": True}),
    (BF16, {"head_dim": 64, "window": (-10, 90), "heads": (4, 2), "slack": 2}),
    (FP16, {"head_dim": 128, "window": (90, -10), "used": (90, 0, 131, 64)}),
    (BF16, {"head_dim": 256, "window": (-70, None), "sinks": True}),
    (FP16, {"head_dim": 128, "window": (None, -30), "heads": (4, 1)}),
]
SEQUENCES = (100, 0, 77, 140), (90, 20, 200, 140)


@cases(case(*SEQUENCES, dtype=dtype, **options) for dtype, options in OPTIONS)
def test_options(case):
    check(case.call())


@cases(
    case(m, n, batch=len(used), heads=(4, 2), head_dim=d, used=used, options=MASKS[mask])
    for m, n, used in ((1, 300, (0, 1, 128, 300)), (200, 300, (299, 64, 0, 129)), (300, 130, (130, 1, 65, 0)))
    for mask in ("full", "causal", "window")
    for d in (64, 128, 256)
)
def test_padded_batch(case):
    """Calls with seqused_k on a dense batch are right; keys past it are NaN while the kernel runs (see GpuCall)."""
    check(case.call())


@cases([case(200, 300, batch=2, heads=(2, 1), head_dim=128, dtype=FP16, used=(133, 0), sinks=True, softcap=5.0)])
def test_padded_batch_options(case):
    check(case.call())


@cases(
    [
        case((0, 5, 0, 200, 9), (7, 0, 0, 150, 4), head_dim=128, causal=True, slack=3, sinks=True),
        case((0, 5, 0, 200, 9), (7, 0, 0, 150, 4), head_dim=64, used=(3, 0, 0, 150, 0)),
    ]
)
def test_rows_that_see_no_key(case):
    call = case.call()
    check(call)
    out, lse = call.run()
    expected = call.expected().lse == -INF
    assert expected.any()
    assert torch.equal(lse == -INF, expected)
    assert (out[expected.T] == 0).all()


@pytest.mark.parametrize("hint", ["int", "tensor", "tensor on the host", "too small", "too large"])
@cases([case((1, 300, 0, 17), (500, 3, 9, 129), head_dim=128, causal=True)])
def test_max_seqlen_is_a_hint(case, hint):
    call = case.call()
    expected = call.run()
    hints = {"int": (300, 500), "too small": (1, 1), "too large": (10**6, 10**6)}
    for name, device in (("tensor", DEVICE), ("tensor on the host", "cpu")):
        hints[name] = lengths_tensor([300], device), lengths_tensor([500], device)[0]
    max_seqlen_q, max_seqlen_k = hints[hint]
    assert same_bits(call.run(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k), expected)


@pytest.mark.skipif(not ON_GPU, reason="the tiled backend reads the lengths on the host")
@cases(
    [
        case((1, 300, 0, 17), (500, 3, 9, 129), head_dim=128, causal=True),
        case(200, 300, batch=2, head_dim=128, used=(133, 0)),
    ]
)
def test_lengths_stay_on_the_device(case):
    call = case.call()
    options = {**call.tensors, **call.options, "backend": BACKEND}
    function = onepass.attention
    if call.is_packed:
        function = onepass.attention_varlen
        options |= {"max_seqlen_q": lengths_tensor([300])[0], "max_seqlen_k": lengths_tensor([500])[0]}
    function(**options)  # the first call loads the kernel
    with no_waiting():
        function(**options)


@cases([case((), ()), case((), (), slack=4), case((0, 0), (0, 0)), case((0, 0), (5, 2)), case((5, 2), (0, 0))])
def test_no_work_at_all(case):
    call = case.call()
    check(call)
    out, lse = call.run()
    assert (out == 0).all()
    assert (lse == -INF).all()


@cases([case((70, 0, 130), (90, 20, 140), heads=(4, 2), head_dim=128, causal=True)])
def test_strides(case):
    """Tensors may be slices of one qkv projection, have heads outside of tokens, or have rows that TMA cannot read."""
    call = case.call()
    q, k, v = call.tensors.values()
    qkv = torch.full((250, 8, 136), float("nan"), device=DEVICE, dtype=BF16)
    views = qkv[: q.shape[0], :4, :128], qkv[:, 4:6, :128], qkv[:, 6:, :128]
    heads_first = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v)]
    unaligned = [torch.cat([t, t[..., :1]], -1)[..., 1:] for t in (q, k, v)]
    for view, t in zip(views, (q, k, v), strict=True):
        view.copy_(t)
    for tensors in (views, heads_first, unaligned):
        call.tensors = dict(zip("qkv", tensors, strict=True))
        check(call)


@cases([case((70, 0, 130, 1), (90, 20, 140, 200), heads=(4, 2), head_dim=128, causal=True)])
def test_order_of_sequences_does_not_matter(case):
    """A sequence has equal bits at any position in the packed tensors."""
    call = case.call()
    out, lse = call.run()
    cu_q, cu_k = (call.options[f"cu_seqlens_{x}"].tolist() for x in "qk")
    order = [3, 0, 2, 1]
    rows = torch.cat([torch.arange(cu_q[b], cu_q[b + 1]) for b in order]).to(DEVICE)
    keys = torch.cat([torch.arange(cu_k[b], cu_k[b + 1]) for b in order]).to(DEVICE)
    call.tensors = {n: t[rows if n == "q" else keys] for n, t in call.tensors.items()}
    for name, lengths in (("cu_seqlens_q", case.seqlen_q), ("cu_seqlens_k", case.seqlen_k)):
        call.options[name] = lengths_tensor([0, *torch.tensor([lengths[b] for b in order]).cumsum(0).tolist()])
    assert same_bits(call.run(), onepass.api.AttentionOutput(out[rows], lse[:, rows]))

"""The Hopper forward against the float64 oracle: masks, lengths, heads, head dims, options, degenerate cases."""

import pytest
import torch
from gpu_cases import BACKEND, BF16, DEVICE, FP16, INF, MASKS, ON_GPU, case, cases, check, needs_hopper, size

import onepass

pytestmark = needs_hopper
DTYPES = (BF16, FP16)

# lengths on both sides of the 64 rows of a warpgroup and of tiles of 64, 80, 128 and 192; more queries than keys, and
# the reverse
LENGTHS = [(1, 1), (1, 300), (2, 3), (63, 65), (64, 64), (65, 63), (128, 128), (129, 1), (127, 81), (191, 193)]
LENGTHS += [(256, 80), (300, 1000), (1000, 300)]


@cases(
    case(m, n, batch=2, heads=(4, 2), head_dim=d, options=MASKS[mask])
    for d in (64, 128, 256)
    for mask in ("full", "causal", "window")
    for m, n in LENGTHS
)
def test_lengths(case):
    check(case.call())


@cases(
    case(200, 300, head_dim=d, dtype=dtype, causal=(d // 8 + i) % 2 == 0)
    for d in range(8, 257, 8)
    for i, dtype in enumerate(DTYPES)
)
def test_every_head_dim(case):
    check(case.call())


HEAD_DIM_PAIRS = [(d, dv) for d in (8, 64, 72, 128, 192, 256) for dv in (8, 40, 64, 128, 200, 256) if d != dv]


@cases(case(200, 300, head_dim=d, head_dim_v=dv, dtype=DTYPES[i % 2]) for i, (d, dv) in enumerate(HEAD_DIM_PAIRS))
def test_head_dim_v(case):
    check(case.call())


@cases(
    case(260, 330, head_dim=d, dtype=dtype, heads=(3, 1), options=MASKS[mask])
    for mask in MASKS
    for d, dtype in ((64, FP16), (128, BF16), (192, FP16), (256, FP16))
)
def test_masks(case):
    check(case.call())


WINDOWS = [(0, 0), (0, None), (None, 0), (1, 0), (0, 1), (63, 0), (64, 0), (127, 128), (500, 3), (10**6, 10**6)]
# windows that begin behind a query's position or end before it: some rows see no key, in the last three cases no row
WINDOWS += [(-1, None), (None, -1), (-64, 200), (200, -64), (-3, 3), (-127, 128), (None, -300), (-450, None), (63, -64)]
WINDOWS += [(-(10**6), 10**6), (10**6, -(10**6)), (5, -(10**6))]


@cases(case(m, n, head_dim=128, window=w) for w in WINDOWS for m, n in ((300, 300), (200, 450), (450, 200)))
def test_window_edges(case):
    check(case.call())


GROUPS = [(1, 1), (2, 1), (3, 1), (4, 2), (5, 1), (7, 7), (8, 2), (15, 3), (16, 1), (32, 1), (71, 1), (140, 70)]


@cases(case(150, 170, batch=2, heads=heads, head_dim=(64, 128)[i % 2], causal=True) for i, heads in enumerate(GROUPS))
def test_heads(case):
    check(case.call())


OPTIONS = [
    {"softcap": 0.5},
    {"softcap": 5.0, "causal": True},
    {"softcap": 50.0, "softmax_scale": 2.0},
    {"softcap": 30.0, "softmax_scale": -0.2},
    {"softmax_scale": 1e-3},
    {"softmax_scale": 1.0, "window": (50, 5)},
    {"sinks": True},
    {"sinks": True, "causal": True, "softcap": 20.0},
    {"sinks": True, "window": (64, 10), "softcap": 3.0, "softmax_scale": 0.3, "heads": (6, 2)},
]


@cases(
    case(200, 333, batch=2, head_dim=d, dtype=dtype, **options)
    for options in OPTIONS
    for d, dtype in ((64, BF16), (128, FP16), (256, BF16))
)
def test_options(case):
    check(case.call())


@cases(case(200, 333, head_dim=d, scale=30.0, dtype=dtype, causal=True) for d in (64, 128, 256) for dtype in DTYPES)
def test_large_scores(case):
    check(case.call())


# head dim 256 and long causal calls of 128 rescale lazily: row maxima that creep up, jump, or come first
@pytest.mark.parametrize("order", ["rising", "falling", "jump", "constant"])
@cases(
    [
        case(150, 700, head_dim=64),
        case(150, 700, head_dim=128, dtype=FP16),
        case(150, 700, head_dim=256),
        case(150, size(2600, 600), head_dim=128, causal=True),
    ]
)
def test_row_maxima_in_any_order(case, order):
    call = case.call()
    q, k = call.tensors["q"], call.tensors["k"]
    seqlen_k = k.shape[1]
    q.abs_()
    steps = {
        "rising": torch.linspace(-2, 2, seqlen_k),
        "falling": torch.linspace(2, -2, seqlen_k),
        "jump": torch.where(torch.arange(seqlen_k) == seqlen_k // 3, 3.0, -1.0),
        "constant": torch.ones(seqlen_k),
    }
    k.copy_(steps[order].to(k)[None, :, None, None].expand_as(k))
    check(call)


@pytest.mark.parametrize("sink", [-INF, -100.0, 0.0, 100.0])
@cases([case(100, 150, causal=True), case(100, 150, head_dim=256)])
def test_sinks_of_any_size(case, sink):
    call = case.call()
    call.options["sinks"] = torch.full((2,), sink, device=DEVICE)
    check(call)


@cases(
    case(m, n, batch=2, head_dim=d, sinks=sinks, options=mask)
    for m, n, mask in ((400, 130, {"causal": True}), (300, 20, {"window": (3, 2)}), (200, 10, {"window": (0, 0)}))
    for d in (64, 128, 256)
    for sinks in (False, True)
)
def test_rows_that_see_no_key(case):
    call = case.call()
    check(call)
    seqlen_q, seqlen_k = call.tensors["q"].shape[1], call.tensors["k"].shape[1]
    # the last row stands at the last key; under a bound on the right, a row `right` before the first key sees that key
    num_empty = seqlen_q - seqlen_k - (call.options["window"][1] if "window" in call.options else 0)
    out, lse = call.run()
    assert (out[:, :num_empty] == 0).all()
    assert torch.equal(lse[:, :, :num_empty], lse_of_empty_rows(call, lse)[:, :, :num_empty])
    assert lse[:, :, num_empty:].isfinite().all()


def lse_of_empty_rows(call, lse):
    """The lse that each row would have without keys: the sink, or -inf."""
    sinks = call.options.get("sinks")
    return torch.full_like(lse, -INF) if sinks is None else sinks[:, None].expand_as(lse)


@cases(
    case(m, n, batch=batch, head_dim=128, sinks=sinks)
    for m, n, batch in ((0, 5, 2), (5, 0, 2), (0, 0, 2), (5, 5, 0))
    for sinks in (False, True)
)
def test_zero_lengths(case):
    call = case.call()
    check(call)
    out, lse = call.run()
    assert out.shape == call.tensors["q"].shape
    assert (out == 0).all()
    assert torch.equal(lse, lse_of_empty_rows(call, lse))


@cases([case(3, 5, batch=size(70_000, 300), heads=(1, 1)), case(2, 3, batch=2, heads=(size(40_000, 300), 1))])
def test_many_batch_entries_and_heads(case):
    """The call has more tiles, of a few rows each, than 16 bits can count."""
    call = case.call()
    check(call, with_floor=True)


@cases(
    [
        case(100, 150, batch=2, heads=(4, 2), causal=True, sinks=True),
        case(100, 150, head_dim=128, dtype=FP16, window=(30, 3), softcap=10.0),
    ]
)
def test_gradients_with_the_tiled_backward(case):
    check(case.call(), gradients=True)


FLOAT64 = "dtype: expected bfloat16, float16 or float32, got float64"
NO_POSITIVE_SCALE = "softmax_scale: expected a number above 0"
REFUSALS = {  # shape, dtype, options, message, and the backend that computes the call
    "sm90": [
        ((1, 8, 2, 64), torch.float64, {}, FLOAT64, "tiled"),
        ((1, 8, 2, 12), BF16, {}, "head_dim: expected a multiple of 8 up to 256", "sm80"),
        ((1, 8, 2, 136), torch.float32, {}, "head_dim_v: expected a multiple of 16 above 128 in float32", "sm80"),
        ((1, 8, 2, 264), BF16, {}, "head_dim: expected a multiple of 8 up to 256", "tiled"),
        ((1, 8, 2, 64), BF16, {"softmax_scale": -1.0}, NO_POSITIVE_SCALE, "tiled"),
    ],
    "sm80": [
        ((1, 8, 2, 64), torch.float64, {}, FLOAT64, "tiled"),
        ((1, 8, 2, 264), BF16, {}, "head_dim: expected up to 256", "tiled"),
        ((1, 8, 2, 64), BF16, {"softmax_scale": -1.0}, NO_POSITIVE_SCALE, "tiled"),
    ],
}


@pytest.mark.skipif(not ON_GPU, reason="the tiled backend refuses none of these")
@pytest.mark.parametrize(("shape", "dtype", "options", "message", "other"), REFUSALS.get(BACKEND, []), ids=str)
def test_refusals(shape, dtype, options, message, other):
    q = torch.zeros(shape, device=DEVICE, dtype=dtype)
    with pytest.raises(NotImplementedError, match=message):
        onepass.attention(q, q, q, **options, backend=BACKEND)
    assert onepass.supports(q, q, q, **options).backend == other

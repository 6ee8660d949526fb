"""Gradients on a Hopper GPU against the float64 oracle: masks, lengths, heads, head dims, options, layouts, packing."""

import pytest
import torch
from compile_ahead import problem_of
from gpu_cases import (
    BACKEND,
    BF16,
    DEVICE,
    FP16,
    INF,
    MASKS,
    NAN,
    ON_GPU,
    GpuCall,
    case,
    cases,
    lengths_tensor,
    needs_hopper,
    no_waiting,
    size,
)
from gradient_cases import Loss, check_gradients, expected_gradients, gradients, inputs_of, loss_of, with_inputs
from test_memory import LAYOUTS
from test_packed import LENGTHS as PACKED_LENGTHS
from test_packed import OPTIONS as PACKED_OPTIONS
from test_packed import SEQUENCES as PACKED_SEQUENCES
from test_random_calls import CASES as RANDOM_CASES
from test_random_calls import MODIFIED as MODIFIED_CASES
from test_values import GROUPS, OPTIONS, WINDOWS

import onepass
from onepass.kernels.heuristics import sm90 as heuristics

pytestmark = needs_hopper
DTYPES = (BF16, FP16)

# lengths on both sides of tiles of 64, 80, 96 and 128 rows or keys; more queries than keys and the reverse
LENGTHS = [(1, 1), (1, 1000), (2, 3), (7, 63), (7, 200), (63, 65), (64, 64), (65, 63), (64, 257), (80, 96), (96, 80)]
LENGTHS += [(81, 161), (97, 193), (127, 129), (128, 128), (129, 127), (200, 7), (257, 1), (257, 200), (200, 1000)]
LENGTHS += [(1000, 257)]


@cases(
    case(m, n, batch=2, heads=(4, 2), head_dim=d, options=MASKS[mask])
    for d in (64, 128, 256)
    for mask in ("full", "causal", "window")
    for m, n in LENGTHS
)
def test_lengths(case):
    check_gradients(case.call())


HEAD_DIMS = (8, 16, 24, 32, 40, 64, 72, 80, 96, 104, 128, 160, 192, 200, 248, 256)


@cases(case(200, 300, heads=(4, 2), head_dim=d, dtype=DTYPES[i % 2], causal=i % 4 < 2) for i, d in enumerate(HEAD_DIMS))
def test_head_dims(case):
    check_gradients(case.call())


HEAD_DIM_PAIRS = [(192, 128), (64, 256), (256, 64), (128, 192), (40, 72), (72, 8), (8, 256), (128, 64), (96, 200)]


@cases(case(200, 300, head_dim=d, head_dim_v=dv, dtype=DTYPES[i % 2]) for i, (d, dv) in enumerate(HEAD_DIM_PAIRS))
def test_head_dim_v(case):
    check_gradients(case.call())


@cases(
    case(260, 330, heads=(4, 2), head_dim=d, dtype=dtype, options=MASKS[mask])
    for mask in MASKS
    for d, dtype in ((64, FP16), (128, BF16), (192, FP16), (256, BF16))
)
def test_masks(case):
    check_gradients(case.call())


@cases(
    case(m, n, heads=(4, 2), head_dim=128, window=w) for w in WINDOWS for m, n in ((300, 300), (200, 450), (450, 200))
)
def test_window_edges(case):
    check_gradients(case.call())


@cases(case(150, 170, batch=2, heads=heads, head_dim=(64, 128)[i % 2], causal=True) for i, heads in enumerate(GROUPS))
def test_heads(case):
    check_gradients(case.call())


@cases(
    case(200, 333, batch=2, head_dim=d, dtype=dtype, **options)
    for options in OPTIONS
    for d, dtype in ((64, BF16), (128, FP16), (256, BF16))
    if d < 256 or len(options) > 2
)
def test_options(case):
    check_gradients(case.call())


# as many heads as multiprocessors, so that a thread block takes all tiles of a head (BackwardConfigSm90.private_dq)
MANY_SHORT = [
    case(128, 128, batch=33, heads=(4, 4), head_dim=64, causal=True),
    case(200, 300, batch=66, heads=(4, 2), head_dim=128, dtype=FP16, causal=True),
    case(257, 200, batch=130, heads=(2, 1), head_dim=64),
    case(300, 100, batch=33, heads=(4, 4), head_dim=128, causal=True),
    case(90, 100, batch=66, heads=(2, 2), head_dim=40, head_dim_v=72, dtype=FP16),
    case(200, 300, batch=66, heads=(2, 2), head_dim=96, causal=True),
    case(130, 200, batch=66, heads=(2, 2), head_dim=72, dtype=FP16, causal=True),
    case(1, 512, batch=132, heads=(1, 1), head_dim=128),
    case(100, 150, batch=132, heads=(1, 1), head_dim=64, used=tuple(range(19, 151)), window=(30, 9), sinks=True),
    case(200, 200, batch=132, heads=(1, 1), head_dim=64, window=(-20, 90)),
    case(200, 200, batch=132, heads=(1, 1), head_dim=128, window=(-100, None), sinks=True),
    case(140, 150, batch=66, heads=(4, 2), head_dim=128, window=(90, -70), dtype=FP16),
]


# under a causal mask, more tiles of grouped heads than multiprocessors (BackwardConfigSm90.heads_together)
TWO_WAVES = [
    case(size(300, 80), size(400, 99), batch=size(40, 2), heads=(8, 2), head_dim=64, causal=True),
    case(size(400, 99), size(300, 80), batch=size(40, 2), heads=(6, 2), head_dim=128, dtype=FP16, causal=True),
    case(size(200, 70), size(500, 90), batch=size(40, 2), heads=(4, 1), head_dim=96, causal=True),
    case(size(300, 80), size(400, 99), batch=size(20, 2), heads=(4, 2), head_dim=256, causal=True),
]


def test_the_tiles_of_two_waves_visit_heads_together():
    assert all(heuristics.backward_config_sm90(problem_of(case.call())).heads_together for case in TWO_WAVES)


@cases(TWO_WAVES)
def test_two_waves_of_tiles(case):
    check_gradients(case.call())


def test_the_many_short_sequences_have_a_private_dq():
    assert all(heuristics.backward_config_sm90(problem_of(case.call())).private_dq for case in MANY_SHORT)


@pytest.mark.parametrize("deterministic", [False, True])
@cases(MANY_SHORT)
def test_many_short_sequences(case, deterministic):
    check_gradients(case.call(), deterministic=deterministic)


VARIED = [
    case(200, 333, batch=2, head_dim=64),
    case(300, 170, heads=(4, 2), head_dim=128, causal=True),
    case(200, 333, batch=2, head_dim=256, dtype=BF16, sinks=True),
    case((100, 0, 77, 140), (90, 20, 200, 140), heads=(4, 2), head_dim=128, causal=True, slack=9),
]


@pytest.mark.parametrize("depends_on", ["out", "lse", "both"])
@cases(VARIED)
def test_loss_of(case, depends_on):
    check_gradients(case.call(), depends_on)


@cases(VARIED)
def test_loss_of_a_call_without_lse(case):
    """If `attention` returns only out, gradients equal those of a call whose lse is not used."""
    call = case.call()
    loss = loss_of(call, "out")
    leaves = {n: t.detach().requires_grad_() for n, t in inputs_of(call).items()}
    leaf_call = with_inputs(call, leaves)
    function = onepass.attention_varlen if call.is_packed else onepass.attention
    out = function(**leaf_call.tensors, **leaf_call.options)
    actual = dict(zip((f"d{n}" for n in leaves), torch.autograd.grad(out, leaves.values(), loss.dout), strict=True))
    assert not (misses := expected_gradients(call, loss).misses(actual)), misses


@cases(VARIED)
def test_deterministic_gradients(case):
    check_gradients(case.call(), deterministic=True)


@pytest.mark.parametrize("names", ["q", "k", "v", "sinks", "qv"])
@cases([VARIED[2]])
def test_some_inputs_have_no_gradient(case, names):
    call = case.call()
    loss, wanted = loss_of(call), ["sinks"] if names == "sinks" else list(names)
    inputs = {n: t.detach().requires_grad_(n in wanted) for n, t in inputs_of(call).items()}
    out, lse = with_inputs(call, inputs).run()
    found = torch.autograd.grad((out, lse), [inputs[n] for n in wanted], loss)
    actual = {f"d{n}": g for n, g in zip(wanted, found, strict=True)}
    regions = dict.fromkeys(actual, ...)
    assert not (misses := expected_gradients(call, loss).misses(actual, regions)), misses


@cases(
    case(200, 333, heads=(4, 2), head_dim=d, scale=30.0, dtype=dtype, causal=True)
    for d, dtype in ((64, BF16), (64, FP16), (128, BF16), (128, FP16), (256, BF16))
)
def test_large_scores(case):
    check_gradients(case.call())


@pytest.mark.parametrize("factor", [1e-3, 100.0])
@cases([case(200, 333, head_dim=64), case(200, 333, head_dim=128, dtype=FP16, causal=True)])
def test_gradients_of_any_size(case, factor):
    """Whether dout is as small as that of a mean loss or large, intermediates in 16 bits between the GEMMs hold it."""
    call = case.call()
    check_gradients(call, loss=Loss(*(t * factor for t in loss_of(call))))


# probabilities beside a sink of 60 are still normal numbers
@pytest.mark.parametrize("sink", [-INF, -100.0, 0.0, 60.0])
@cases([case(100, 150, causal=True), case(100, 150, head_dim=256)])
def test_sinks_of_any_size(case, sink):
    call = case.call()
    call.options["sinks"] = torch.full((2,), sink, device=DEVICE)
    check_gradients(call)


@cases([case(300, 100, batch=2, heads=(4, 2), sinks=True), case(100, 100, heads=(4, 2), head_dim=256, sinks=True)])
def test_sinks_of_any_dtype_and_stride(case):
    call = case.call()
    wide = torch.full((4, 3), NAN, device=DEVICE)
    wide[:, 1] = call.options["sinks"]
    for sinks in (wide[:, 1], wide[:, 1].to(BF16), wide[:, 1].double(), wide[:1, 1].expand(4)):
        call.options["sinks"] = sinks
        check_gradients(call)


# ---------------------------------------------------------------- rows without keys, nothing to do


@cases(
    case(m, n, batch=2, heads=(4, 2), head_dim=d, sinks=sinks, options=mask)
    for m, n, mask in ((400, 130, {"causal": True}), (300, 20, {"window": (3, 2)}), (20, 300, {"window": (3, 2)}))
    for d in (64, 128, 256)
    for sinks in ((False, True) if d == 128 else (False,))
)
def test_rows_that_see_no_key_and_keys_that_no_row_sees(case):
    """Rows that see no key and keys that no row sees have zero gradients, as check_gradients asserts."""
    check_gradients(case.call())


@cases(
    case(m, n, batch=batch, head_dim=128, sinks=sinks)
    for m, n, batch in ((0, 5, 2), (5, 0, 2), (0, 0, 2), (5, 5, 0))
    for sinks in (False, True)
)
def test_zero_lengths(case):
    found = check_gradients(case.call())
    found.pop("dsinks", None)  # a sink has the gradients of lse: test_sink_of_empty_rows.py
    assert all((g == 0).all() for g in found.values())


@cases([case(3, 5, batch=size(70_000, 300), heads=(1, 1)), case(2, 3, batch=2, heads=(size(40_000, 300), 1))])
def test_many_batch_entries_and_heads(case):
    """The call has more tiles, of a few rows each, than 16 bits can count."""
    call = case.call()
    loss = loss_of(call)
    actual, expected = gradients(call, loss), expected_gradients(call, loss)
    for name, g in actual.items():  # the second case sums dk and dv over thousands of heads
        largest = expected.oracle[name].abs().max().item()
        torch.testing.assert_close(g.double(), expected.oracle[name], rtol=0.01, atol=0.01 * largest)


# ---------------------------------------------------------------- layouts


LAYOUT_CASES = [
    case(200, 300, batch=2, heads=(4, 2), head_dim=128, causal=True),
    case(130, 170, batch=2, heads=(4, 2), head_dim=40, head_dim_v=72, dtype=FP16),
    case(200, 300, batch=2, heads=(4, 2), head_dim=256, used=(133, 300)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@cases(LAYOUT_CASES)
def test_layouts(case, layout):
    """Gradients are right with one tensor at a time in this layout, dout included, and with all of them in it."""
    call = case.call()
    loss = loss_of(call)
    for names in ("q", "k", "v", "o", "qkvo"):
        tensors = {n: layout(t) if n in names else t for n, t in call.tensors.items()}
        moved = Loss(layout(loss.dout) if "o" in names else loss.dout, loss.dlse)
        actual = check_gradients(GpuCall(tensors, call.options), loss=moved)
        for n, t in tensors.items():
            # a gradient has heads outside of seqlen in memory if its input does
            is_heads_first = t.stride(1) < t.stride(2)
            assert (actual[f"d{n}"].transpose(1, 2) if is_heads_first else actual[f"d{n}"]).is_contiguous()


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (3,), (1, 3), (0, 1, 2, 3)], ids=str)
@cases(LAYOUT_CASES[:2])
def test_expanded_gradients(case, dims):
    """Gradients are right if dout and dlse have stride 0, which sums and means of out and lse cause."""
    call = case.call()
    loss = loss_of(call)
    small = tuple(slice(0, 1) if d in dims else slice(None) for d in range(4))
    dout, dlse = loss.dout[small].expand_as(loss.dout), loss.dlse.mT[small[:3]].expand_as(loss.dlse.mT).mT
    check_gradients(call, loss=Loss(dout, dlse))


def test_gradients_of_strided_lse():
    call = LAYOUT_CASES[0].call()
    loss = loss_of(call)
    wide = torch.full((*loss.dlse.shape[:2], 2 * loss.dlse.shape[2]), NAN, device=DEVICE)
    wide[..., ::2] = loss.dlse
    for dlse in (
        wide[..., ::2],
        loss.dlse.mT.contiguous().mT,
        loss.dlse.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    ):
        check_gradients(call, loss=Loss(loss.dout, dlse))


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_expanded_inputs(dims):
    """With stride 0, one batch entry, one token or one head stands for all."""
    shape = [2, 150, 4, 128]
    small = [1 if d in dims else n for d, n in enumerate(shape)]
    q, k, v = (torch.randn(small, device=DEVICE, dtype=BF16).expand(shape) for _ in range(3))
    check_gradients(GpuCall({"q": q, "k": k, "v": v}, {"causal": True}))


def test_interleaved_projection():
    """Gradients of q, k and v meet in the one qkv tensor that all three are views of."""
    qkv = torch.randn(2, 300, 3, 4, 128, device=DEVICE, dtype=BF16)
    call = GpuCall(dict(zip("qkv", qkv.unbind(2), strict=True)), {"causal": True})
    expected = check_gradients(call, deterministic=True)
    leaf = qkv.detach().requires_grad_()
    out = onepass.attention(*leaf.unbind(2), causal=True, deterministic=True, return_lse=True)
    (found,) = torch.autograd.grad(out, leaf, loss_of(call))
    assert torch.equal(found, torch.stack(list(expected.values()), 2))


def test_one_tensor_is_q_k_and_v():
    t = torch.randn(2, 300, 4, 64, device=DEVICE, dtype=FP16)
    check_gradients(GpuCall({"q": t, "k": t, "v": t}, {}))


# ---------------------------------------------------------------- packed sequences, padded batches


@cases(
    case(*PACKED_LENGTHS[name], heads=(4, 2), head_dim=d, options=MASKS[mask])
    for name in PACKED_LENGTHS
    for mask in ("full", "causal", "window")
    for d in ((64, 128, 256) if name in ("unequal", "empty among others") else (128,))
)
def test_packed_lengths(case):
    check_gradients(case.call())


@cases(case(*PACKED_SEQUENCES, dtype=dtype, **options) for dtype, options in PACKED_OPTIONS)
def test_packed_options(case):
    """Rows of no sequence (slack) and keys past seqused_k hold NaN in check_gradients, and have zero gradients."""
    check_gradients(case.call())


@cases(
    case(m, n, batch=len(used), heads=(4, 2), head_dim=d, used=used, options=MASKS[mask])
    for m, n, used in ((1, 300, (0, 1, 128, 300)), (200, 300, (299, 64, 0, 129)), (300, 130, (130, 1, 65, 0)))
    for d, mask in ((64, "window"), (128, "full"), (128, "causal"), (256, "causal"))
)
def test_padded_batch(case):
    check_gradients(case.call())


@cases([case(200, 300, batch=2, heads=(2, 1), head_dim=128, dtype=FP16, used=(133, 0), sinks=True, softcap=5.0)])
def test_padded_batch_options(case):
    check_gradients(case.call())


@cases([case((), ()), case((), (), slack=4), case((0, 0), (0, 0)), case((0, 0), (5, 2)), case((5, 2), (0, 0))])
def test_no_work_at_all(case):
    assert all((g == 0).all() for g in check_gradients(case.call()).values())


@pytest.mark.skipif(not ON_GPU, reason="the tiled backend reads the lengths on the host")
@cases(
    [
        case((1, 300, 0, 17), (500, 3, 9, 129), heads=(4, 2), head_dim=128, causal=True),
        case(200, 300, batch=2, head_dim=128, used=(133, 0), sinks=True),
    ]
)
def test_lengths_stay_on_the_device(case):
    call = case.call()
    loss, hints = loss_of(call), {}
    if call.is_packed:
        hints = {"max_seqlen_q": lengths_tensor([300])[0], "max_seqlen_k": lengths_tensor([500])[0]}
    gradients(call, loss, backend=BACKEND, **hints)  # the first call loads the kernels
    with no_waiting():
        gradients(call, loss, backend=BACKEND, **hints)


# ---------------------------------------------------------------- random calls, and the definition of a gradient


@cases(RANDOM_CASES[:30])
def test_random_calls(case):
    check_gradients(case.call())


@cases(MODIFIED_CASES[:60])
def test_random_calls_with_modifiers(case):
    check_gradients(case.call())


STEP = 1e-3
DIRECTIONS = 6


@cases(
    [
        case(70, 90, heads=(4, 2), head_dim=64, causal=True),
        case(90, 70, batch=2, heads=(2, 1), head_dim=128, sinks=True, softcap=5.0, dtype=FP16),
        case(65, 129, head_dim=256, window=(40, 9), softmax_scale=0.1),
        case((20, 0, 65), (33, 5, 70), heads=(2, 1), head_dim=64, causal=True, sinks=True),
    ]
)
def test_finite_differences(case):
    """Gradients agree with finite differences of the oracle's float64 loss along random directions."""
    call = case.call()
    loss, generator = loss_of(call), torch.Generator().manual_seed(2)
    actual = gradients(call, loss)
    exact = {n: t.double() for n, t in inputs_of(call).items()}

    def value(inputs):
        out, lse = with_inputs(call, inputs).expected()
        return (out * loss.dout).sum() + (torch.where(lse == -INF, 0.0, lse) * loss.dlse).sum()

    for name, t in exact.items():
        for _ in range(DIRECTIONS):
            direction = torch.randn(t.shape, generator=generator).to(t)
            forward, backward = (value({**exact, name: t + step * direction}) for step in (STEP, -STEP))
            gradient = actual[f"d{name}"].double()
            # along a normally distributed direction, the slope's standard deviation is the gradient's norm; each
            # element of the gradient is off by a few independent roundings of 2^-9, so the slope is off by about as
            # small a share
            error = (gradient * direction).sum() - (forward - backward) / (2 * STEP)
            assert abs(error) < 0.02 * gradient.norm() + 1e-4, f"d{name}: {error} of {gradient.norm()}"

"""scaled_dot_product_attention: torch's signature, layouts, broadcasting and masks."""

import inspect

import fresh_process
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from onepass.api import attention as api
from onepass.compat.masks import RANGE_KEYS
from onepass.compat.sdpa import scaled_dot_product_attention


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def tensors(query, key, value=None, dtype=torch.float64):
    shapes = (query, key, value or key)
    return [randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def assert_same_as_torch(qkv, **options):
    """Values and gradients in float64, where only a different formula could make a difference."""
    results = []
    for function in (scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention):
        copies = [t.clone().requires_grad_() for t in qkv]
        out = function(*copies, **options)
        out.square().sum().backward()
        results.append([out.detach(), *(t.grad for t in copies)])
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        assert ours.shape == theirs.shape, name
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


LAYOUTS = {
    "4-D": ((2, 3, 5, 8), (2, 3, 7, 8), None, False),
    "more queries than keys": ((2, 3, 7, 8), (2, 3, 5, 8), None, False),
    "head_dim_v": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4), False),
    "2-D": ((5, 8), (7, 8), None, False),
    "3-D": ((3, 5, 8), (3, 7, 8), None, False),
    "5-D": ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), None, False),
    "batch of keys broadcast": ((2, 3, 5, 8), (1, 3, 7, 8), None, False),
    "batch of queries broadcast": ((1, 3, 5, 8), (2, 3, 7, 8), None, False),
    "batch of values broadcast": ((2, 3, 5, 8), (2, 3, 7, 8), (1, 3, 7, 8), False),
    "only values have a batch": ((1, 3, 5, 8), (1, 3, 7, 8), (2, 3, 7, 8), False),
    "heads of keys broadcast": ((2, 3, 5, 8), (2, 1, 7, 8), None, False),
    "heads of queries broadcast": ((2, 1, 5, 8), (2, 3, 7, 8), None, False),
    "heads of values broadcast": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 1, 7, 8), False),
    "ranks differ": ((2, 3, 5, 8), (7, 8), None, False),
    "gqa": ((2, 4, 5, 8), (2, 2, 7, 8), None, True),
    "gqa 3-D": ((4, 5, 8), (2, 7, 8), None, True),
    "gqa of different groups": ((2, 4, 5, 8), (2, 2, 7, 8), (2, 1, 7, 8), True),
    "gqa with equal heads": ((2, 4, 5, 8), (2, 4, 7, 8), None, True),
}
MASKS = {
    "none": lambda m, n: {},
    "causal": lambda m, n: {"is_causal": True},
    "scale": lambda m, n: {"scale": 0.7, "is_causal": True},
    "upper left": lambda m, n: {"attn_mask": causal_upper_left(m, n)},
    "bool": lambda m, n: {"attn_mask": randn(m, n) > -0.3},
    "float": lambda m, n: {"attn_mask": randn(m, n), "scale": 0.7},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_as_torch(layout, mask):
    query, key, value, enable_gqa = LAYOUTS[layout]
    options = MASKS[mask](query[-2], key[-2])
    assert_same_as_torch(tensors(query, key, value), enable_gqa=enable_gqa, **options)


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_lower_right_bias_with_rows_that_see_nothing():
    qkv = tensors((2, 3, 7, 8), (2, 3, 5, 8))
    out = scaled_dot_product_attention(*qkv, attn_mask=causal_lower_right(7, 5))
    theirs = torch.nn.functional.scaled_dot_product_attention(*qkv, attn_mask=causal_lower_right(7, 5))
    torch.testing.assert_close(out, theirs, rtol=1e-10, atol=1e-11)
    assert (out[:, :, :2] == 0).all()


@pytest.mark.parametrize("shape", [(0, 3, 5, 8), (2, 3, 0, 8), (2, 0, 5, 8)])
def test_empty(shape):
    assert_same_as_torch(tensors(shape, shape))
    assert_same_as_torch(tensors(shape, shape), is_causal=True)


@pytest.mark.parametrize("shape", [(2, 0, 7, 8), (2, 3, 7, 8)])
def test_no_heads_of_a_group(shape):
    qkv = [t.requires_grad_() for t in tensors((2, 0, 5, 8), shape)]
    out = scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
    assert out.shape == (2, 0, 5, 8)
    out.sum().backward()
    assert all((t.grad == 0).all() for t in qkv)


def test_no_keys_give_zero():
    qkv = tensors((2, 3, 5, 8), (2, 3, 0, 8))
    assert (scaled_dot_product_attention(*qkv) == torch.zeros(2, 3, 5, 8)).all()
    assert (scaled_dot_product_attention(*qkv, attn_mask=torch.zeros(5, 0)) == torch.zeros(2, 3, 5, 8)).all()


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masked_rows_are_zero_with_zero_gradients(kind):
    qkv = [t.requires_grad_() for t in tensors((2, 3, 5, 8), (2, 3, 7, 8))]
    visible = torch.ones(5, 7, dtype=torch.bool)
    visible[1] = False
    mask = visible if kind == "bool" else torch.where(visible, 0.0, -torch.inf)
    out = scaled_dot_product_attention(*qkv, attn_mask=mask)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(*qkv, attn_mask=mask))
    assert (out[:, :, 1] == 0).all()
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in qkv)
    assert (qkv[0].grad[:, :, 1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 7), (2, 1, 1, 7), (2, 3, 5, 7)])
def test_masks_of_the_lowest_number(dtype, shape):
    """Keys with torch.finfo(dtype).min have no weight; a row of nothing else is that of a mask of zeros."""
    qkv = tensors((2, 3, 5, 8), (2, 3, 7, 8), dtype=dtype)
    hidden = randn(*shape, dtype=torch.float32) < 0
    hidden[..., -1, 2:] = False
    if shape[-2] == 1:
        hidden[0] = True
    else:
        hidden[..., 0, :] = True
    is_whole = hidden.all(-1, keepdim=True)
    assert is_whole.any()
    assert not is_whole.all()
    mask = torch.zeros(shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    lifted = torch.where(hidden & ~is_whole, -torch.inf, 0.0).double()
    results = []
    for function, given in (
        (scaled_dot_product_attention, (*qkv, mask)),
        (torch.nn.functional.scaled_dot_product_attention, (*(t.double() for t in qkv), lifted)),
    ):
        leaves = [t.detach().requires_grad_() for t in given]
        out = function(*leaves[:3], attn_mask=leaves[3])
        results.append((out, *torch.autograd.grad(out.double().square().sum(), leaves)))
    tolerance = 1e-9 if dtype == torch.float64 else 8 * torch.finfo(dtype).eps
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lowest", [-1e4, -(2.0**14) - 16, -(2.0**15), -65504.0, -(2.0**30)])
def test_rows_of_low_numbers_alone_lose_nothing_to_them(dtype, lowest):
    """Softmax does not change if all of a row moves, but scores beside such numbers would be rounded to them."""
    if dtype == torch.float16 and lowest < -65504:
        lowest = -65504.0
    qkv = tensors((2, 3, 6, 64), (2, 3, 40, 64), dtype=dtype)
    mask = torch.zeros(6, 40, dtype=dtype)
    mask[2] = lowest
    mask[3], mask[3, 5:9] = -torch.inf, lowest
    near = torch.where(mask == lowest, 0.0, mask)
    leaves, given = ([t.clone().requires_grad_() for t in x] for x in (qkv, (t.double() for t in qkv)))
    out = scaled_dot_product_attention(*leaves, attn_mask=mask)
    expected = torch.nn.functional.scaled_dot_product_attention(*given, attn_mask=near.double())
    dout = randn(*out.shape, dtype=torch.float64)
    results = [
        (x.detach().double(), *(g.double() for g in torch.autograd.grad(x, y, dout.to(x.dtype))))
        for x, y in ((out, leaves), (expected, given))
    ]
    # the scores of a mask above -2^14 keep 10 bits of their fraction
    tolerance = max(4 * torch.finfo(dtype).eps, 2.0**-10 if lowest >= -(2.0**14) else 0.0)
    for mine, right in zip(*results, strict=True):
        torch.testing.assert_close(mine, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (5, 1), (3, 5, 7), (2, 1, 5, 7), (2, 3, 5, 7)])
def test_mask_shapes_and_gradient(shape):
    qkv = tensors((2, 3, 5, 8), (2, 3, 7, 8))
    masks = [randn(*shape).requires_grad_() for _ in range(2)]
    functions = (scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention)
    for function, mask in zip(functions, masks, strict=True):
        function(*qkv, attn_mask=mask).square().sum().backward()
    torch.testing.assert_close(masks[0].grad, masks[1].grad, rtol=1e-10, atol=1e-11)


def arguments_of_attention(monkeypatch, qkv, **options):
    """The arguments that `onepass.attention` is called with."""
    calls = []
    attention = api.attention
    monkeypatch.setattr(api, "attention", lambda *args, **kwargs: calls.append(kwargs) or attention(*args, **kwargs))
    scaled_dot_product_attention(*qkv, **options)
    return calls[0]


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_ranges_reach_from_the_first_to_the_last_block_of_keys_that_is_seen(monkeypatch, kind):
    seqlen_k = 3 * RANGE_KEYS + 40
    seen = torch.zeros(2, 1, 4, seqlen_k, dtype=torch.bool)
    seen[0, 0, 0, [RANGE_KEYS, 2 * RANGE_KEYS - 1]] = True  # one block
    seen[0, 0, 1, 3 * RANGE_KEYS] = True  # the last one, which is not whole
    seen[0, 0, 2, [RANGE_KEYS - 1, 2 * RANGE_KEYS]] = True  # with a hole of a block
    seen[1] = True
    mask = seen if kind == "bool" else torch.where(seen, randn(2, 1, 4, seqlen_k), -torch.inf)
    arguments = arguments_of_attention(monkeypatch, tensors((2, 3, 4, 8), (2, 3, seqlen_k, 8)), attn_mask=mask)
    expected = [(RANGE_KEYS, 2 * RANGE_KEYS), (3 * RANGE_KEYS, seqlen_k), (0, 3 * RANGE_KEYS), (0, 0)]
    assert arguments["key_ranges"].tolist() == [[[list(r) for r in expected]], [[[0, seqlen_k]] * 4]]
    assert arguments["bias"].shape == mask.shape
    assert torch.equal(arguments["bias"] != -torch.inf, seen)


@pytest.mark.parametrize("shape", [(2, 1, 1, 300), (1, 1, 1, 300), (1, 1, 9, 300), (1, 1, 9, 1)])
def test_a_mask_stays_as_small_as_it_is(monkeypatch, shape):
    for mask in (torch.ones(shape, dtype=torch.bool), torch.zeros(shape)):
        mask[..., shape[-1] // 2] = mask[..., 0] if shape[-1] == 1 else 0  # a hole: no padding
        mask = mask.expand(2, 3, 9, 300)  # as many models do
        arguments = arguments_of_attention(monkeypatch, tensors((2, 3, 9, 8), (2, 3, 300, 8)), attn_mask=mask)
        assert arguments["bias"].shape == shape


def padding_mask(*runs, seqlen_k=7):
    """(batch, 1, 1, seqlen_k): the keys of each entry that are seen."""
    mask = torch.zeros(len(runs), 1, 1, seqlen_k, dtype=torch.bool)
    for row, run in zip(mask, runs, strict=True):
        row[..., slice(*run)] = True
    return mask


@pytest.mark.parametrize(
    ("runs", "is_causal", "expected"),
    [
        ([(0, 7), (0, 4)], False, {"seqused_k": [7, 4]}),
        ([(0, 4)], False, {"seqused_k": [4, 4]}),
        ([(0, 0), (0, 7)], False, {"seqused_k": [0, 7]}),
        ([(0, 7)], False, {}),
        ([(2, 7), (0, 4)], False, {"key_ranges": [[2, 7], [0, 4]]}),
        ([(0, 7), (0, 4)], True, {"key_ranges": [[0, 7], [0, 4]]}),
        ([(0, 0), (3, 4)], True, {"key_ranges": [[0, 0], [3, 4]]}),
    ],
)
def test_a_padding_mask_in_the_memory_of_a_cpu_becomes_lengths_or_ranges(monkeypatch, runs, is_causal, expected):
    qkv, mask = tensors((2, 3, 7, 8), (2, 3, 7, 8)), padding_mask(*runs)
    options = {"attn_mask": mask, "is_causal": is_causal}
    given = arguments_of_attention(monkeypatch, qkv, **options)
    found = {
        n: t.tolist() if n == "seqused_k" else t[:, 0, 3].tolist()
        for n, t in given.items()
        if isinstance(t, torch.Tensor)
    }
    assert found == expected
    triangle = torch.ones(7, 7, dtype=torch.bool).tril() if is_causal else torch.ones(1, 1, dtype=torch.bool)
    out = torch.nn.functional.scaled_dot_product_attention(*qkv, attn_mask=mask & triangle)
    torch.testing.assert_close(scaled_dot_product_attention(*qkv, **options), out, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    "mask",
    [
        padding_mask((0, 7), (2, 5)) ^ padding_mask((3, 4), (0, 0)),
        padding_mask((0, 7), (0, 4)).expand(2, 3, 1, 7).contiguous(),
        torch.ones(2, 1, 7, 7, dtype=torch.bool).tril(),
    ],
)
def test_other_boolean_masks_become_a_bias(monkeypatch, mask):
    qkv = tensors((2, 3, 7, 8), (2, 3, 7, 8))
    given = arguments_of_attention(monkeypatch, qkv, attn_mask=mask)
    assert torch.equal(given["bias"] == 0, mask)
    assert given.get("seqused_k") is None


def test_no_value_of_a_traced_mask_is_read():
    qkv, mask = tensors((2, 3, 7, 8), (2, 3, 7, 8)), padding_mask((0, 7), (0, 4))
    expected = scaled_dot_product_attention(*qkv, attn_mask=mask)
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*qkv, attn_mask=mask), expected, rtol=1e-12, atol=1e-13)
    other = padding_mask((1, 7), (0, 2))
    torch.testing.assert_close(
        compiled(*qkv, attn_mask=other), scaled_dot_product_attention(*qkv, attn_mask=other), rtol=1e-12, atol=1e-13
    )
    value = torch.func.grad(lambda q: scaled_dot_product_attention(q, *qkv[1:], attn_mask=mask).sum())(qkv[0])
    assert value.isfinite().all()


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("padding", ["left", "right", "holes"])
def test_padding_with_nan_in_what_is_hidden(kind, padding):
    lengths = 9, 700
    seen = torch.ones(2, 1, 1, lengths[1], dtype=torch.bool)
    seen[1, 0, 0, {"left": slice(0, 300), "right": slice(400, None), "holes": slice(200, 500)}[padding]] = False
    query, key, value = tensors((2, 4, lengths[0], 16), (2, 2, lengths[1], 16))
    results = []
    for hidden, function in (
        (torch.nan, scaled_dot_product_attention),
        (0.0, torch.nn.functional.scaled_dot_product_attention),
    ):
        key, value = (x.where(seen.mT, hidden) for x in (key, value))
        qkv = [t.clone().requires_grad_() for t in (query, key, value)]
        mask = seen if kind == "bool" else torch.where(seen, randn(1, 1, 1, lengths[1]), -torch.inf)
        out = function(*qkv, attn_mask=mask, enable_gqa=True)
        out.square().sum().backward()
        results.append([out.detach(), *(t.grad for t in qkv)])
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("layout", ["4-D", "more queries than keys", "2-D", "5-D", "gqa"])
@pytest.mark.parametrize("kind", ["bool", "float", "keys", "one column"])
def test_a_mask_beside_is_causal(layout, kind):
    query, key, value, enable_gqa = LAYOUTS[layout]
    seqlen_q, seqlen_k = query[-2], key[-2]
    mask = {
        "bool": lambda: randn(seqlen_q, seqlen_k) > -0.3,
        "float": lambda: randn(seqlen_q, seqlen_k),
        "keys": lambda: randn(1, seqlen_k) > -0.3,
        "one column": lambda: randn(seqlen_q, 1) > -0.3,
    }[kind]()
    causal = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril()
    both = mask & causal if mask.dtype == torch.bool else torch.where(causal, mask, -torch.inf)
    qkv = tensors(query, key, value)
    out = scaled_dot_product_attention(*qkv, attn_mask=mask, is_causal=True, enable_gqa=enable_gqa)
    expected = torch.nn.functional.scaled_dot_product_attention(*qkv, attn_mask=both, enable_gqa=enable_gqa)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("shape", [(1, 1, 1, 5, 7), (3, 5, 7), (1, 2, 1, 5, 7), (2, 1, 3, 1, 7), (2, 2, 3, 5, 1)])
def test_masks_of_batches_of_two_dimensions(shape):
    qkv = tensors((2, 2, 3, 5, 8), (2, 2, 3, 7, 8))
    assert_same_as_torch(qkv, attn_mask=randn(*shape) > -0.3)
    masks = [randn(*shape).requires_grad_() for _ in range(2)]
    functions = (scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention)
    outs = [function(*qkv, attn_mask=mask) for function, mask in zip(functions, masks, strict=True)]
    torch.testing.assert_close(*outs, rtol=1e-10, atol=1e-11)
    for out in outs:
        out.square().sum().backward()
    torch.testing.assert_close(masks[0].grad, masks[1].grad, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dims", [2, 4])
def test_dropout(dims):
    """Values that are unit vectors show the probabilities."""
    qkv = [t[(0,) * (4 - dims)] if dims < 4 else t for t in tensors((1, 2, 64, 8), (1, 2, 96, 8))]
    qkv[2] = torch.eye(96, dtype=torch.float64).expand(*qkv[1].shape[:-2], 96, 96)
    options = {"attn_mask": randn(1, 96) > -1.0, "is_causal": dims == 4}
    torch.manual_seed(3)
    out = scaled_dot_product_attention(*qkv, dropout_p=0.25, **options)
    again = scaled_dot_product_attention(*qkv, dropout_p=0.25, **options)
    torch.manual_seed(3)
    assert torch.equal(scaled_dot_product_attention(*qkv, dropout_p=0.25, **options), out)
    assert not torch.equal(again, out)
    whole = scaled_dot_product_attention(*qkv, **options)
    kept = out != 0
    torch.testing.assert_close(out[kept], whole[kept] / 0.75, rtol=1e-9, atol=0)
    assert (out[whole == 0] == 0).all()
    count = int((whole != 0).sum())
    share = int(kept.sum()) / count
    assert abs(share - 0.75) < 5 * (0.75 * 0.25 / count) ** 0.5


def test_signature():
    parameters = inspect.signature(scaled_dot_product_attention).parameters
    assert {n: p.default for n, p in parameters.items() if p.default is not p.empty} == {
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "enable_gqa": False,
    }
    assert list(parameters)[:4] == ["query", "key", "value", "attn_mask"]


BOOLS = torch.ones(5, 7, dtype=torch.bool)
Q, K = (2, 4, 5, 8), (2, 4, 7, 8)


@pytest.mark.parametrize(
    ("shapes", "options", "error", "match"),
    [
        ((Q, K, K), {"dropout_p": 1.5}, ValueError, r"dropout_p: expected a probability .*, got 1\.5"),
        (
            (Q, K, K),
            {"attn_mask": causal_upper_left(5, 7), "is_causal": True},
            ValueError,
            "attn_mask: expected None or a tensor where is_causal=True, got a CausalBias",
        ),
        ((Q, K, K), {"attn_mask": causal_upper_left(5, 6)}, ValueError, r"lengths \(5, 7\), got one for \(5, 6\)"),
        ((Q, K, K), {"attn_mask": BOOLS.int()}, TypeError, "attn_mask: expected dtype bool, float32 or"),
        ((Q, K, K), {"attn_mask": torch.ones(7)}, ValueError, r"attn_mask: expected a shape that broadcasts"),
        ((Q, K, K), {"attn_mask": torch.ones(5, 6)}, ValueError, r"broadcasts to \(2, 4, 5, 7\), got \(5, 6\)"),
        (
            ((1, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 8)),
            {"attn_mask": torch.ones(3, 1, 5, 7)},
            ValueError,
            "broad",
        ),
        ((Q, K, K), {"attn_mask": "causal"}, TypeError, r"attn_mask: expected a torch\.Tensor, got str"),
        ((Q, K, K), {"is_causal": 1}, TypeError, "is_causal: expected a bool"),
        ((Q, K, K), {"scale": float("nan")}, ValueError, "scale: expected a finite number"),
        ((Q, K, (2, 4, 6, 8)), {}, ValueError, "value: expected seqlen_k 7 like key, got 6"),
        ((Q, (2, 4, 7, 6), K), {}, ValueError, "key: expected head_dim 8 like query, got 6"),
        ((Q, (2, 2, 7, 8), (2, 2, 7, 8)), {}, ValueError, r"broadcast, got .*enable_gqa=True"),
        ((Q, (2, 3, 7, 8), K), {"enable_gqa": True}, ValueError, "key: expected .* divides query's 4, got 3"),
        (((5, 8), (7, 8), (7, 8)), {"enable_gqa": True}, ValueError, "query: expected at least 3 dimensions"),
        (((8,), K, K), {}, ValueError, "query: expected at least 2 dimensions"),
    ],
)
def test_refusals(shapes, options, error, match):
    with pytest.raises(error, match=match):
        scaled_dot_product_attention(*tensors(*shapes), **options)


def test_importing_onepass_imports_no_compatibility_layer():
    fresh_process.check("""
        import sys, onepass
        extra = [m for m in sys.modules if m == "transformers" or m.startswith(("onepass.compat", "onepass.integ"))]
        assert not extra, extra
        import onepass.compat.sdpa, onepass.compat.flash_attn, onepass.integrations.transformers
        assert "transformers" not in sys.modules
    """)


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"attn_mask": torch.zeros(7, 7)}], ids=["", "causal", "mask"]
)
def test_a_dropout_of_everything(options):
    q, k, v = (torch.randn(2, 4, 7, 8, requires_grad=True) for _ in range(3))
    for function in (torch.nn.functional.scaled_dot_product_attention, scaled_dot_product_attention):
        out = function(q, k, v, dropout_p=1.0, **options)
        assert out.shape == q.shape
        assert torch.equal(out, torch.zeros_like(out))
        assert all(torch.equal(g, torch.zeros_like(g)) for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_autocast_brings_all_tensors_into_one_dtype():
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    mask = torch.zeros(4, 4, dtype=torch.bfloat16)
    expected = scaled_dot_product_attention(*(t.bfloat16() for t in (q, k, v)), attn_mask=mask)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(scaled_dot_product_attention(q, k.bfloat16(), v, attn_mask=mask), expected)


def test_nan_of_a_mask_where_is_causal_hides_the_key():
    q, mask = torch.randn(1, 2, 4, 8), torch.zeros(4, 4)
    expected = scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=True)
    mask[0, 3] = torch.nan
    torch.testing.assert_close(scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=True), expected)

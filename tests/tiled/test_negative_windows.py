"""Windows with negative sides: the visible keys begin after a query's own position, or end before it."""

import itertools
import warnings

import pytest
import torch

import onepass
from onepass import reference
from onepass.compat import flash_attn
from onepass.problem import AttentionInputs, AttentionProblem, Mask
from onepass.testing import Call
from onepass.tiled import backward, forward
from onepass.tiled.tile_sizes import TileSizes
from onepass.validation import attention

INT32 = torch.int32
SIDES = (None, 5, 0, -1, -4, -9)
OPTIONS = {
    "keys behind": {"window": (-3, None)},
    "keys before": {"window": (None, -2)},
    "some keys behind": {"window": (-3, 12)},
    "some keys before": {"window": (12, -3)},
    "one key": {"window": (-4, 4)},
    "no key": {"window": (3, -4)},
    "all rows but one": {"window": (None, -52)},
    "far away": {"window": (-(2**40), None)},
    "causal, keys before": {"window": (9, -3), "causal": True},
    "causal, keys behind": {"window": (-2, None), "causal": True},
    "all": {
        "causal": True,
        "window": (20, -5),
        "softcap": 5.0,
        "sinks": torch.tensor([0.5, -3.0, 4.0, 0.0]),
        "softmax_scale": 0.3,
        "seqused_k": torch.tensor([40, 0], dtype=INT32),
    },
}


@pytest.mark.parametrize(
    ("causal", "window", "is_empty"),
    [
        (False, (-1, -1), True),
        (False, (-1, 0), True),
        (True, (-1, -1), True),
        (True, (-3, None), True),
        (True, (-3, 5), True),
        (False, (-3, 5), False),
        (False, (-1, None), False),
        (True, (0, -1), True),
        (True, (None, -1), False),
        (True, (4, -2), False),
    ],
)
def test_a_window_without_keys_is_said_once(causal, window, is_empty):
    attention._warn_of_empty_window.cache_clear()
    tensors, cache = make(), {"cache_seqlens": torch.tensor([20, 30], dtype=INT32)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        out = onepass.attention(**tensors, causal=causal, window=window)
        onepass.attention_decode(*tensors.values(), **cache, causal=causal, window=window)
    assert len(said) == is_empty
    assert (out == 0).all() == is_empty
    if is_empty:
        assert said[0].filename == __file__
        assert str(said[0].message).startswith(
            f"onepass: window={window}{' with causal=True' if causal else ''} leaves"
        )


def test_flash_attn_s_unbounded_sides_are_not_empty():
    attention._warn_of_empty_window.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for window in ((-1, -1), (-1, 0), (3, -1)):
            flash_attn.flash_attn_func(*make().values(), window_size=window)


def make(batch=2, seqlen_q=37, seqlen_k=53, heads=(4, 2), head_dim=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (seqlen_q, heads[0]), "k": (seqlen_k, heads[1]), "v": (seqlen_k, heads[1])}
    return {n: torch.randn(batch, *shape, head_dim, generator=generator).to(dtype) for n, shape in shapes.items()}


def dense(q, k, v, causal, left, right):
    """Attention by a boolean mask that this test builds: out, and which queries see a key."""
    position = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    key = torch.arange(k.shape[1])
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    if left is not None:
        visible &= key >= position - left
    if right is not None:
        visible &= key <= position + right
    if causal:
        visible &= key <= position
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(t.repeat_interleave(group, 2).transpose(1, 2) for t in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0).matmul(v).transpose(1, 2), visible.any(-1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(12, 12), (7, 15), (15, 7)])
def test_backend_and_oracle_against_a_mask_written_down(seqlen_q, seqlen_k, causal):
    tensors = make(1, seqlen_q, seqlen_k, (2, 1), 4, torch.float64)
    for left, right in itertools.product(SIDES, SIDES):
        options = {"window": (left, right), "causal": causal}
        expected, sees_a_key = dense(*tensors.values(), causal, left, right)
        for result in (
            onepass.attention(**tensors, **options, return_lse=True),
            reference.attention(**tensors, **options),
        ):
            torch.testing.assert_close(result.out, expected, rtol=1e-12, atol=1e-12)
            assert torch.equal(result.lse[0, 0] > -torch.inf, sees_a_key), options


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_values_and_gradients(options, dtype):
    Call(make(dtype=dtype), options).check(with_floor=dtype in (torch.float64, torch.float32))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (16, 7, 1), (5, 64, 3)], ids=str)
@pytest.mark.parametrize("window", [(-6, 12), (12, -6), (-6, None), (None, -6), (2, -3)], ids=str)
def test_tile_sizes_do_not_matter(sizes, window):
    inputs = AttentionInputs(**make(seqlen_q=41, seqlen_k=50, dtype=torch.float64))
    mask = Mask.from_options(False, window)
    problem = AttentionProblem.of(inputs, softmax_scale=0.25, mask=mask, softcap=None, deterministic=True)
    dout = torch.randn(2, 41, 4, 16, dtype=torch.float64)
    results = []
    for tile_sizes in (TileSizes(*sizes), TileSizes(256, 256, 8)):
        out, lse = forward(problem, inputs, tile_sizes)
        results.append((out, lse, *backward(problem, inputs, out, lse, dout, None, tile_sizes)))
    for few, many in zip(*results, strict=True):
        torch.testing.assert_close(few, many, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("where", ["k", "v"])
def test_hidden_keys_do_not_matter(where):
    """Neither a query's own key matters, nor a key that no query sees."""
    tensors = make(seqlen_q=20, seqlen_k=20, dtype=torch.float64)
    expected = onepass.attention(**tensors, window=(None, -1))
    tensors[where][:, 19] = torch.nan  # only the last query stands at this key
    assert torch.equal(onepass.attention(**tensors, window=(None, -1)), expected)
    tensors[where][:, 10] = torch.nan
    actual = onepass.attention(**tensors, window=(None, -1))
    torch.testing.assert_close(actual[:, :11], expected[:, :11], rtol=1e-12, atol=1e-12)
    assert actual[:, 11:].isnan().any(-1).all()


@pytest.mark.parametrize("splits", [{}, {"num_splits": 3}, {"split_size": 64}], ids=str)
@pytest.mark.parametrize("window", [(-3, None), (-2, 9), (30, -5), (None, -66), (5, -6)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_decode(window, causal, splits):
    tensors, filled = make(seqlen_q=5, seqlen_k=100, dtype=torch.float64), (70, 3)
    actual = onepass.attention_decode(
        *tensors.values(),
        cache_seqlens=torch.tensor(filled, dtype=INT32),
        window=window,
        causal=causal,
        return_lse=True,
        **splits,
    )
    for b, n in enumerate(filled):
        operands = tensors["q"][b : b + 1], tensors["k"][b : b + 1, :n], tensors["v"][b : b + 1, :n]
        expected = reference.attention(*operands, window=window, causal=causal)
        torch.testing.assert_close(actual.out[b], expected.out[0], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(actual.lse[b], expected.lse[0], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("window", [(-3, 12), (None, -2), (2, -3)], ids=str)
def test_fp8(window):
    """FP8 calls agree with the oracle over the dequantized tensors, and empty rows are 0."""
    quantized = onepass.quantize_fp8(*make(1, 20, 20, head_dim=32).values())
    actual = onepass.attention(quantized, window=window)
    expected = reference.attention(*quantized.dequantize(), window=window).out
    # the rounding of P: 2^-4 of each probability, whose sum is 1
    assert ((actual - expected).abs() <= 2.0**-4 * quantized.dequantize()[2].abs().max()).all()
    is_empty = (expected == 0).all(-1)
    assert is_empty.any()
    assert (actual[is_empty] == 0).all()


def test_compiled_with_another_window():
    def call(q, k, v, right):
        return onepass.attention(q, k, v, window=(None, right))

    compiled, tensors = torch.compile(call, fullgraph=True, backend="eager"), make().values()
    for right in (-1, -3, 2, -5, 0):
        assert torch.equal(compiled(*tensors, right), call(*tensors, right))

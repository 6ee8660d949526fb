"""Calls of attention_decode that later layers repeat with other q, k and v."""

import pytest
import torch

import onepass
from onepass.api import fast_path
from onepass.api.repeated import repeatable_decode

OPTIONS = {"causal": True, "window": None, "softcap": None, "softmax_scale": None, "seqstart_k": None}


@pytest.fixture(autouse=True)
def _no_calls_before():
    fast_path.forget()


def tensors(seed, length=20, dtype=torch.float32, heads=2):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 1, 4, 16, generator=generator, dtype=dtype)
    return q, *(torch.randn(2, heads, length, 16, generator=generator, dtype=dtype).transpose(1, 2) for _ in range(2))


def call_of(options):
    """A call that can be repeated: the first of its kind cannot."""
    out, none = repeatable_decode(*tensors(0), **options)
    assert none is None
    again, call = repeatable_decode(*tensors(0), **options)
    assert torch.equal(out, again)
    assert torch.equal(out, onepass.attention_decode(*tensors(0), **options))
    return call


def lengths(*values):
    return {"cache_seqlens": torch.tensor(values, dtype=torch.int32)}


@pytest.mark.parametrize("start", [None, (3, 0)])
@pytest.mark.parametrize("options", [{}, {"window": (4, 0)}, {"softcap": 2.0, "softmax_scale": 0.3}])
def test_another_layer_gets_what_a_call_of_its_own_gives(start, options):
    options = OPTIONS | options | lengths(20, 12)
    options["seqstart_k"] = None if start is None else torch.tensor(start, dtype=torch.int32)
    again = call_of(options).again(*tensors(1))
    expected = onepass.attention_decode(*tensors(1), **options)
    assert torch.equal(again, expected)
    assert again.stride() == expected.stride()


@pytest.mark.parametrize(
    "other",
    [
        tensors(1, length=21),
        tensors(1, dtype=torch.float64),
        tensors(1, heads=4),
        [t.contiguous() for t in tensors(1)],
        [torch.nn.Parameter(t) for t in tensors(1)],
        [t[:1] for t in tensors(1)],
        [torch.randn(2, n, h, 17)[..., 1:] for n, h in ((1, 4), (20, 2), (20, 2))],
    ],
)
def test_another_kind_of_call_is_not_repeated(other):
    call = call_of(OPTIONS | lengths(20, 12))
    assert call.again(*other) is None


@pytest.mark.parametrize("moved", range(3))
def test_tensors_of_another_alignment_are_not_repeated(moved):
    """A kernel whose loads need 16 bytes has been launched for the call before."""
    call, other = call_of(OPTIONS | lengths(20, 12)), list(tensors(1))
    t = other[moved]
    storage = torch.empty(t.numel() + 1, dtype=t.dtype)
    other[moved] = storage[1:].as_strided(t.shape, t.stride(), 1).copy_(t)
    assert call.again(*other) is None


def test_a_call_is_not_repeated_where_it_may_be_observed_or_needs_a_gradient():
    call = call_of(OPTIONS | lengths(20, 12))
    q, k, v = tensors(1)
    assert call.again(q, k, v) is not None
    with torch.profiler.profile():
        assert call.again(q, k, v) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert call.again(q, k, v) is None
    with onepass.use_backend("tiled"):
        assert call.again(q, k, v) is None
    for moved in range(3):
        given = [t.clone().requires_grad_() if i == moved else t for i, t in enumerate((q, k, v))]
        given = [g.as_strided(t.shape, t.stride()) if g is not t else t for g, t in zip(given, (q, k, v), strict=True)]
        assert call.again(*given) is None
        with torch.no_grad():
            assert call.again(*given) is not None


def test_only_calls_on_the_fast_path_are_repeated():
    options = OPTIONS | lengths(20, 12)
    call_of(options)
    q, k, v = tensors(0)
    out, call = repeatable_decode(q.requires_grad_(), k, v, **options)
    assert out.requires_grad
    assert call is None

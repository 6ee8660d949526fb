"""Options that the backend `cpu` hands to torch's operators as masks; random calls are in tests/tiled."""

import importlib
import itertools
import math

import pytest
import torch

import onepass
import onepass.tiled
from onepass.cpu import masks, operators
from onepass.cpu.masks import MASK_ELEMENTS, ROWS, groups, needs_masks
from onepass.problem import AttentionInputs, AttentionProblem, Mask, Modifiers
from onepass.testing import Call

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INF = float("inf")


@pytest.fixture
def count(monkeypatch):
    """How many times each of torch's operators has run with a mask, and without."""
    counts = {name: [0, 0] for name in ("_forward", "_backward")}

    def counted(name, real):
        def run(*arguments, attn_mask, **options):
            counts[name][attn_mask is None] += 1
            return real(*arguments, attn_mask=attn_mask, **options)

        monkeypatch.setattr(operators, name, run)

    for name in counts:
        counted(name, getattr(operators, name))
    return counts


def tensors(seqlen_q, seqlen_k, dtype=torch.float32, heads=(4, 2), head_dim=32, batch=2):
    shapes = (seqlen_q, heads[0]), (seqlen_k, heads[1]), (seqlen_k, heads[1])
    return {n: torch.randn(batch, *shape, head_dim).to(dtype) for n, shape in zip("qkv", shapes, strict=True)}


def padding(seqlen_k):
    ends = torch.tensor([seqlen_k, seqlen_k // 2])[:, None, None, None]
    return torch.zeros(2, 1, 1, seqlen_k).masked_fill(torch.arange(seqlen_k) >= ends, -INF)


OPTIONS = {
    "bias": lambda m, n: {"bias": torch.randn(2, 4, m, n)},
    "bias of all heads, causal": lambda m, n: {"bias": torch.randn(m, n)[None, None], "causal": True},
    "square bias, causal": lambda m, n: {"bias": torch.randn(2, 1, n, n), "causal": True},
    "padding": lambda m, n: {"bias": padding(n)},
    "alibi": lambda m, n: {"alibi_slopes": torch.tensor([0.5, 0.25, -0.01, 0.0])},
    "alibi of entries, causal": lambda m, n: {"alibi_slopes": torch.rand(2, 4) * 0.3, "causal": True},
    "alibi and bias": lambda m, n: {"alibi_slopes": torch.rand(4) * 0.3, "bias": torch.randn(1, 4, 1, n)},
    "window": lambda m, n: {"window": (17, 6)},
    "window, causal": lambda m, n: {"window": (20, None), "causal": True},
    "ranges of queries": lambda m, n: {
        "query_ranges": torch.randint(0, m, (2, 4, n, 2), dtype=torch.int32).sort(-1).values,
        "causal": True,
    },
    "ranges": lambda m, n: {"key_ranges": torch.randint(0, n, (2, 4, m, 2), dtype=torch.int32).sort(-1).values},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_beside_the_oracle(name, dtype, count, monkeypatch):
    """More rows than a block has, with constant terms, so that the backward runs by the operator, too."""
    monkeypatch.setattr(masks, "ROWS", 64)
    lengths = (70, 70) if name.startswith("square") else (80, 70)
    options = OPTIONS[name](*lengths)
    if "bias" in options:
        options["bias"] = options["bias"].to(dtype)
    call = Call(tensors(*lengths, dtype), options)
    call.check(with_floor=True, through_lse=False)
    assert count["_forward"][0] > 0
    leaves = [t.requires_grad_() for t in call.tensors.values()]
    out = onepass.attention(*leaves, **options)
    before = count["_backward"][0]
    dout = torch.randn_like(out)
    mine = torch.autograd.grad(out, leaves, dout)
    assert count["_backward"][0] > before
    theirs = torch.autograd.grad(onepass.attention(*leaves, **options, backend="tiled"), leaves, dout)
    rtol = {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 0.03)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * float(b.abs().max()) / 3)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("leading", [(1, 1), (1, 4), (3, 1), (3, 4)])
def test_heads_outside_of_seqlen(batch, leading, count):
    """Tensors whose heads may count as entries, with masks that entries or heads share."""
    leaves = [
        t.transpose(1, 2).contiguous().transpose(1, 2)
        for t in tensors(40, 40, torch.float64, (4, 4), 8, batch).values()
    ]
    leaves = [t.requires_grad_() for t in leaves]
    bias = torch.randn(min(leading[0], batch), leading[1], 40, 40, dtype=torch.float64)
    results = []
    for name in ("cpu", "tiled"):
        out = onepass.attention(*leaves, bias=bias, backend=name)
        results.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.stride() == theirs.stride()
    assert count == {"_forward": [1, 0], "_backward": [1, 0]}


@pytest.mark.slow
def test_long_gradients_in_16_bits(count):
    """In 16 bits the gradients of more keys than a chunk has are summed in float32."""
    call = Call(tensors(300, 2500, torch.bfloat16, (1, 1), batch=1), {"window": (2400, 3)})
    call.check(with_floor=True, through_lse=False)
    assert count["_backward"] == [4, 0]


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_by_chunks(name, count, monkeypatch):
    for module, size in (("masks", "ROWS"), ("backward", "CHUNK")):
        monkeypatch.setattr(importlib.import_module(f"onepass.cpu.{module}"), size, 16)
    leaves = [t.requires_grad_() for t in tensors(40, 40, torch.bfloat16).values()]
    options, results = OPTIONS[name](40, 40), []
    for backend in ("cpu", "tiled"):
        out = onepass.attention(*leaves, **options, backend=backend)
        results.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    torch.testing.assert_close(*results, rtol=0.02, atol=0.05)
    assert sum(count["_backward"]) > 1


def test_gradients_of_terms_are_computed_by_tiled(count):
    q, k, v = (t.requires_grad_() for t in tensors(40, 40).values())
    for name, term in (("bias", torch.randn(1, 4, 40, 40)), ("alibi_slopes", torch.rand(4))):
        for wants_gradient in (False, True):
            before = list(count["_backward"])
            onepass.attention(q, k, v, **{name: term.requires_grad_(wants_gradient)}).sum().backward()
            assert (count["_backward"] != before) == (not wants_gradient), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [(40, 40), (20, 40), (40, 20)], ids=str)
def test_sinks(dtype, lengths, count):
    """In 16 bits a result would be rounded before the sink and after it: `tiled` computes it."""
    options = {"sinks": torch.tensor([0.5, -2.0, 3.0, 0.0]), "causal": True}
    call = Call(tensors(*lengths, dtype), options)
    call.check(with_floor=True, through_lse=False)
    assert (count["_forward"][1] > 0) == (dtype.itemsize > 2)
    assert count["_backward"][1] > 0


@pytest.mark.parametrize("sink", [INF, -INF, float("nan")])
def test_a_sink_without_a_finite_value(sink):
    q, k, v = tensors(40, 20, torch.float64).values()
    sinks = torch.tensor([0.5, sink, 3.0, 0.0], dtype=torch.float64)
    results = [
        onepass.attention(q, k, v, sinks=sinks, causal=True, return_lse=True, backend=name) for name in ("cpu", "tiled")
    ]
    torch.testing.assert_close(*map(tuple, results), equal_nan=True)


@pytest.mark.parametrize("seqlen_k", [3, 40])
def test_a_row_that_sees_no_key_and_one_whose_scores_are_lost(seqlen_k):
    """The operator gives both an lse of 0. The first has -inf, and the second what `tiled` computes."""
    q, k, v = tensors(8, seqlen_k, torch.float64).values()
    bias = torch.zeros(1, 1, 8, seqlen_k, dtype=torch.float64)
    bias[..., 2, :] = -INF
    lost = q.clone()
    lost[:, 5] = torch.nan
    low = k.clone()
    low[..., 0] = -INF  # so are all scores
    for queries, keys in ((q, k), (lost, k), (q.abs(), low)):
        results = [
            onepass.attention(queries, keys, v, bias=bias, return_lse=True, backend=name) for name in ("cpu", "tiled")
        ]
        torch.testing.assert_close(*map(tuple, results), equal_nan=True)
        assert results[0].lse[:, :, 2].isneginf().all()
        assert not results[0].out[:, 2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_without_keys_under_a_causal_bias(dtype, count, monkeypatch):
    """Left padding as a bias: the first rows see padding alone, while the bias itself shows them later keys."""
    q, k, v = (t.requires_grad_() for t in tensors(40, 40, dtype).values())
    bias = torch.zeros(2, 1, 1, 40, dtype=dtype)
    bias[1, ..., :7] = -INF
    dout, results = torch.randn_like(q), []
    for name in ("cpu", "tiled"):
        with monkeypatch.context() as patched:
            if name == "cpu":  # no result is so irregular that it would have to be computed again
                for function in ("forward", "gradients"):
                    patched.setattr(onepass.tiled, function, None)
            out, lse = onepass.attention(q, k, v, bias=bias, causal=True, return_lse=True, backend=name)
            results.append((out, lse, *torch.autograd.grad(out, (q, k, v), dout)))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert results[0][1][1, :, :7].isneginf().all()
    assert count == {"_forward": [1, 0], "_backward": [1, 0]}


@pytest.mark.parametrize(("dtype", "of_bias"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_a_bias_of_any_dtype(dtype, of_bias, count):
    q, k, v = (t.requires_grad_() for t in tensors(40, 40, dtype).values())
    bias = torch.randn(1, 4, 40, 40).to(of_bias)
    results = {}
    for name in ("cpu", "tiled"):
        results[name] = []
        for given in (bias, bias.mT.contiguous().mT, bias[:, :1, :, :1], torch.cat((bias, bias), -1)[..., ::2]):
            out = onepass.attention(q, k, v, bias=given, backend=name)
            results[name] += [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]
    tolerances = {"rtol": 0.02, "atol": 0.05} if dtype.itemsize == 2 else {}
    torch.testing.assert_close(results["cpu"], results["tiled"], **tolerances)
    by_operator = 4 if dtype.itemsize > 2 else 3  # not the bias of one column
    assert count == {"_forward": [by_operator, 0], "_backward": [4, 0]}


@pytest.mark.parametrize(("left", "wanted"), [(None, False), (40, False), (39, True), (-3, True)])
def test_windows_that_hide_no_key_need_no_mask(left, wanted):
    q, k, v = tensors(40, 40).values()
    options = {"softmax_scale": 1.0, "softcap": None, "deterministic": False}
    assert needs_masks(AttentionProblem.of(AttentionInputs(q, k, v), mask=Mask(left, None), **options)) == wanted


@pytest.mark.parametrize("sink", [math.nan, math.inf, -math.inf])
def test_a_sink_that_is_not_finite(sink):
    """A row that no key range lets see a key has out = 0 whatever its sink is; another head has its own result."""
    q, k, v = (torch.randn(2, n, 2, 32) for n in (6, 9, 9))
    low = torch.arange(6, dtype=torch.int32).view(1, 1, 6, 1).expand(1, 2, 6, 1)
    ranges = torch.cat((low, low * 2), -1)  # none of the first query
    given = {"key_ranges": ranges, "sinks": torch.tensor([sink, 0.5]), "return_lse": True}
    found, expected = (onepass.attention(q, k, v, **given, backend=name) for name in ("cpu", "tiled"))
    assert (expected.out[:, 0] == 0).all()
    torch.testing.assert_close(found.out, expected.out, equal_nan=True)
    torch.testing.assert_close(found.lse, expected.lse, equal_nan=True)


@pytest.mark.parametrize(("dtype", "head_dim", "by_operator"), [("half", 31, 0), ("half", 32, 1), ("float", 8, 1)])
def test_few_columns_of_16_bits_are_computed_by_tiles(dtype, head_dim, by_operator, count):
    """The operator rounds the values of many of their rows in the same direction."""
    q, k, v = (torch.randn(1, 9, 2, head_dim, dtype=getattr(torch, dtype)) for _ in range(3))
    onepass.attention(q, k, v, bias=torch.randn(1, 2, 9, 9), backend="cpu")
    assert count["_forward"][0] == by_operator


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_slopes_of_entries_keep_masks_small(shape):
    """Entries that share no mask are not computed together where their masks would take too much memory."""
    keys = MASK_ELEMENTS // ROWS
    q, k, v = tensors(ROWS, keys, batch=3).values()
    inputs = AttentionInputs(q, k, v, *[None] * 4, Modifiers(alibi_slopes=torch.ones(shape)))
    problem = AttentionProblem.of(inputs, softmax_scale=0.1, mask=Mask(), softcap=None, deterministic=False)
    entries = {(group.entries.start, group.entries.stop) for group in groups(problem, inputs, 3, keys)}
    assert entries == ({(0, 3)} if len(shape) == 1 else {(0, 1), (1, 2), (2, 3)})

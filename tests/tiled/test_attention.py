"""Values of every option against the float64 oracle, forward and backward, within the data's own budget."""

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_calls import random_call

import onepass
from onepass.problem import AttentionInputs, AttentionProblem, Mask
from onepass.testing import Call, compare
from onepass.tiled import backward, forward
from onepass.tiled.tile_sizes import TileSizes

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INT32 = torch.int32


def make(batch=2, seqlen_q=37, seqlen_k=53, heads_q=4, heads_kv=2, head_dim=16, head_dim_v=None, dtype=torch.float32):
    return {
        "q": torch.randn(batch, seqlen_q, heads_q, head_dim).to(dtype),
        "k": torch.randn(batch, seqlen_k, heads_kv, head_dim).to(dtype),
        "v": torch.randn(batch, seqlen_k, heads_kv, head_dim_v or head_dim).to(dtype),
    }


def make_packed(lengths_q=(5, 0, 33), lengths_k=(9, 4, 20), heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32):
    def cu_seqlens(lengths):
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=INT32)

    tensors = {
        name: torch.randn(sum(lengths), heads, head_dim).to(dtype)
        for name, lengths, heads in (
            ("q", lengths_q, heads_q),
            ("k", lengths_k, heads_kv),
            ("v", lengths_k, heads_kv),
        )
    }
    return tensors, {"cu_seqlens_q": cu_seqlens(lengths_q), "cu_seqlens_k": cu_seqlens(lengths_k)}


OPTIONS = {
    "no options": {},
    "causal": {"causal": True},
    "window": {"window": (7, 3)},
    "left window": {"window": (0, None)},
    "causal window": {"window": (9, 30), "causal": True},
    "softcap": {"softcap": 2.0},
    "scale": {"softmax_scale": 0.7},
    "sinks": {"sinks": torch.tensor([0.5, -3.0, 4.0, 0.0])},
    "seqused_k": {"seqused_k": torch.tensor([53, 17], dtype=INT32)},
    "all": {
        "causal": True,
        "window": (20, 5),
        "softcap": 5.0,
        "sinks": torch.tensor([0.5, -3.0, 4.0, 0.0]),
        "softmax_scale": 0.3,
        "seqused_k": torch.tensor([40, 0], dtype=INT32),
    },
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(options, dtype):
    # In float64 plain PyTorch is as precise as the oracle, so the budget is a floor of roundings. With so few values
    # the error of plain PyTorch in float32 may be small by chance: 0.9 of the budget without the floor, on one CPU.
    Call(make(dtype=dtype), options).check(with_floor=dtype in (torch.float64, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 4), "softcap": 3.0}], ids=str)
def test_packed_sequences(options, dtype):
    tensors, cu_seqlens = make_packed(dtype=dtype)
    Call(tensors, options | cu_seqlens).check(with_floor=dtype == torch.float64)


@pytest.mark.parametrize("head_dim", [1, 2, 7, 16, 64, 96, 128, 200, 256])
def test_head_dims(head_dim):
    Call(make(head_dim=head_dim), {"causal": True}).check(with_floor=head_dim == 1)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 256), (1, 16), (16, 1)])
def test_value_dim_differs(head_dim, head_dim_v):
    Call(make(head_dim=head_dim, head_dim_v=head_dim_v), {"causal": True}).check(with_floor=head_dim == 1)


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(1, 1), (6, 1), (6, 2), (6, 6), (15, 5)])
def test_grouped_heads(heads_q, heads_kv):
    Call(make(heads_q=heads_q, heads_kv=heads_kv), {"causal": True}).check(with_floor=True)  # 0.83, see `test_options`


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 97), (97, 1), (2, 3), (31, 31), (127, 251), (251, 127)])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(seqlen_q, seqlen_k, causal):
    # a single visible key makes dq and dk cancel to zero: the budget there is the floor of roundings alone
    Call(make(seqlen_q=seqlen_q, seqlen_k=seqlen_k), {"causal": causal}).check(with_floor=True)


@pytest.mark.parametrize("seed", range(120))
def test_random_problems(seed):
    random_call(seed).check(with_floor=True)


@settings(max_examples=60)
@given(st.integers(min_value=1000, max_value=2**31))
@example(2)
@example(1002411)  # few rows with one probability close to 1: their error is the rounding of out
def test_more_random_problems(seed):
    """Every run draws other problems; a seed that fails is printed and repeats its problem."""
    random_call(seed, max_seqlen=96).check(with_floor=True)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (16, 7, 1), (5, 64, 3), (64, 16, 8)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (6, 2)}], ids=str)
def test_tile_sizes_do_not_matter(sizes, options):
    """Tiles are far smaller than in real calls, so that a problem has many of them."""
    tensors = make(seqlen_q=41, seqlen_k=50, dtype=torch.float64)
    inputs = AttentionInputs(**tensors)
    mask = Mask.from_options(options.get("causal", False), options.get("window"))
    problem = AttentionProblem.of(inputs, softmax_scale=0.25, mask=mask, softcap=None, deterministic=True)
    dout = torch.randn(2, 41, 4, 16, dtype=torch.float64)
    results = []
    for tile_sizes in (TileSizes(*sizes), TileSizes(256, 256, 8)):
        out, lse = forward(problem, inputs, tile_sizes)
        results.append((out, lse, *backward(problem, inputs, out, lse, dout, None, tile_sizes)))
    for few, many in zip(*results, strict=True):
        torch.testing.assert_close(few, many, rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(quick=1, slow=2)
@pytest.mark.parametrize("magnitude", [1e-3, 10.0, 60.0])
def test_scores_of_any_size(magnitude):
    """Some scores are correct with reference 0, others need row maxima (budget: float32's rounding)."""
    tensors = make(seqlen_q=300, seqlen_k=600, head_dim=32)
    tensors["q"] *= magnitude
    for options in ({}, {"causal": True}, {"window": (40, 0)}):
        Call(tensors, options).check(with_floor=True)


def test_long_sequences_use_the_fixed_reference_in_the_backward_pass():
    """Lengths and score sizes above and below the bounds at which the backward pass needs no reference."""
    for seqlen_k, magnitude in ((300, 0.5), (300, 30.0), (200, 0.5)):
        tensors = make(batch=1, seqlen_q=70, seqlen_k=seqlen_k, heads_q=2, heads_kv=1, head_dim=8)
        tensors["q"] *= magnitude
        Call(tensors, {"causal": True, "sinks": torch.tensor([1.0, -1.0])}).check(with_floor=True)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": (20, 0)},
        {"window": (30, 30), "softcap": 200.0},
        {"window": (30, 30), "softmax_scale": -0.35},
    ],
)
def test_a_hidden_score_may_overflow(options):
    """exp of a score that no row sees is infinite; all visible scores are small."""
    tensors = make(batch=1, seqlen_q=300, seqlen_k=300, heads_q=2, heads_kv=1, head_dim=8)
    tensors["q"][:, :200, :, 0] = 6.0
    tensors["q"][:, 200:, :, 0] = 0.0
    tensors["k"][..., 0] = 0.0
    first_hidden = 200 + options.get("window", (None, 0))[1]
    tensors["k"][:, first_hidden:, :, 0] = math.copysign(80.0, options.get("softmax_scale", 1.0))
    Call(tensors, options).check(with_floor=True)


def test_16k_keys():
    tensors = make(batch=1, seqlen_q=3, seqlen_k=16384, heads_q=2, heads_kv=1, head_dim=64)
    Call(tensors, {"causal": True}).check()


def test_huge_logits():
    """Logits reach 1e4 and more: exp overflows without a reference, and probabilities are exactly 0 or 1."""
    tensors = {n: t * 400 for n, t in make(head_dim=8, seqlen_q=20, seqlen_k=30).items()}
    out, lse = onepass.attention(**tensors, return_lse=True)
    q, k, v = (t.double().transpose(1, 2) for t in tensors.values())
    scores = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
    assert scores.amax(-1).min() > 1e4
    # a float32 score of 1e5 is known to 1e-2 only; beyond that and exp(-40) the row is the value of the key that wins
    best = scores.topk(2).values
    wins = best[..., 0] - best[..., 1] > 40 + 4 * 8 * torch.finfo(torch.float32).eps * scores.abs().amax(-1)
    assert wins.float().mean() > 0.9
    winner = v.repeat_interleave(2, 1).gather(2, scores.argmax(-1, keepdim=True).expand(-1, -1, -1, v.shape[-1]))
    torch.testing.assert_close(out.transpose(1, 2)[wins].double(), winner[wins], rtol=1e-6, atol=0)
    # any other row is a mean of values
    assert (out.transpose(1, 2) <= v.repeat_interleave(2, 1).amax(2, keepdim=True) * (1 + 1e-6)).all()
    assert (out.transpose(1, 2) >= v.repeat_interleave(2, 1).amin(2, keepdim=True) * (1 + 1e-6)).all()
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1e20, 1e30])
def test_values_of_any_size(magnitude):
    tensors = make()
    tensors["v"] *= magnitude
    tensors["q"] *= 4
    result, expected, plain_torch = Call(tensors).run(), Call(tensors).expected(), Call(tensors).expected(torch.float32)
    row = compare("out", result.out, expected.out, plain_torch.out)
    assert row.ok, str(row)

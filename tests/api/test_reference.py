"""The steps to one pass: four functions with one result; and the oracle against torch's own attention."""

import pytest
import torch
import torch.nn.functional as F

from onepass import reference

ROAD = [reference.three_pass_safe_softmax, reference.two_pass_online_softmax, reference.one_pass]


@pytest.mark.parametrize("step", ROAD)
@pytest.mark.parametrize("n", [1, 2, 33])
def test_every_step_equals_the_materialised_formula(step, n):
    x, v = 3 * torch.randn(n, dtype=torch.float64), torch.randn(n, 5, dtype=torch.float64)
    torch.testing.assert_close(step(x, v), reference.materialised(x, v), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("step", ROAD)
@pytest.mark.parametrize("order", ["rising", "falling"])
def test_every_safe_step_survives_scores_that_overflow_the_formula(step, order):
    x = torch.linspace(0, 2000, 21, dtype=torch.float64)
    x = x if order == "rising" else x.flip(0)
    v = torch.randn(21, 3, dtype=torch.float64)
    assert reference.materialised(x, v).isnan().any()
    torch.testing.assert_close(step(x, v), x.softmax(0) @ v, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("is_causal", [False, True])
def test_oracle_equals_torch_on_what_both_define(is_causal):
    q, k, v = (torch.randn(2, 17, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=is_causal, enable_gqa=True
    )
    out, lse = reference.attention(q, k, v, causal=is_causal)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-12, atol=1e-13)
    assert lse.shape == (2, 4, 17)


def test_oracle_by_hand():
    """Two keys with scores 0 and log 3, values 1 and 5: p = (1/4, 3/4)."""
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([0.0, 3.0], dtype=torch.float64).add_(torch.tensor([0.0, 0.0])).view(1, 2, 1, 1)
    k[0, 1] = torch.log(torch.tensor(3.0, dtype=torch.float64))
    v = torch.tensor([1.0, 5.0], dtype=torch.float64).view(1, 2, 1, 1)
    out, lse = reference.attention(q, k, v, softmax_scale=1.0)
    assert out.item() == pytest.approx(4.0)
    assert lse.item() == pytest.approx(torch.log(torch.tensor(4.0)).item())
    # a sink of score log 4 halves every probability
    sinks = torch.log(torch.tensor([4.0], dtype=torch.float64))
    out, lse = reference.attention(q, k, v, softmax_scale=1.0, sinks=sinks)
    assert out.item() == pytest.approx(2.0)
    assert lse.item() == pytest.approx(torch.log(torch.tensor(8.0)).item())


def test_oracle_windows_by_hand():
    """Three queries, four keys: query i stands at key i + 1; left 1, right 0."""
    visible = reference.visible_pairs(1, 3, 4, reference.Mask(1, 0), None, torch.device("cpu"))
    expected = [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert visible[0].int().tolist() == expected
    # two keys used: query i stands at key i - 1
    used = torch.tensor([2], dtype=torch.int32)
    visible = reference.visible_pairs(1, 3, 4, reference.Mask(None, 0), used, torch.device("cpu"))
    assert visible[0].int().tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]

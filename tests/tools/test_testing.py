"""The helpers that other tests trust."""

import pytest
import torch

import onepass
from onepass.testing import Call, Comparison


def call() -> Call:
    tensors = {name: torch.randn(2, 6, heads, 8) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    return Call(tensors, {"causal": True, "sinks": torch.zeros(4)}, seed=17)


def test_a_right_call_is_compared_tensor_by_tensor():
    rows = call().check()
    assert [row.name.partition(" ")[0] for row in rows] == ["out", "lse", "dq", "dk", "dv", "dsinks"]
    assert all(row.ok and row.share <= 1 for row in rows)


def test_a_wrong_call_is_named_by_check_and_returned_by_compare(monkeypatch):
    right = onepass.attention
    monkeypatch.setattr(onepass, "attention", lambda *args, causal, **options: right(*args, **options))
    bad = [row.name for row in call().compare() if not row.ok]
    assert {"out", "dq", "dk", "dv"} <= set(bad)
    with pytest.raises(AssertionError, match=r"Call\(seed=17, q\(2, 6, 4, 8\).*\n  out: max error .* > budget"):
        call().check()


@pytest.mark.parametrize(("error", "budget", "share"), [(1.0, 4.0, 0.25), (0.0, 0.0, 0.0), (1.0, 0.0, 1e300)])
def test_share_of_a_budget_that_may_be_zero(error, budget, share):
    assert Comparison("out", error, budget, 0.0, 0.0, ()).share == pytest.approx(share)

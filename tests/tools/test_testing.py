"""The helpers that other tests trust."""

import pytest
import torch
from decode_calls import random_decode_call
from random_calls import random_call
from random_modifiers import NAMES

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


def test_random_calls_draw_every_layout_of_modifiers():
    """Gaps between values, dimensions in another order, and strides of 0."""
    calls = [random_call(seed, max_seqlen=40).options for seed in range(600)]
    for name in ("bias", "key_ranges", "q_positions"):
        found = [call[name] for call in calls if name in call and call[name].numel() > 1]
        assert sum(t.is_contiguous() for t in found) > 20, name
        assert sum(t.stride(-1) > 1 and t.shape[-1] > 1 for t in found) > 10, name
        if name != "q_positions":
            strides = [zip(t.stride(), t.shape, strict=True) for t in found]
            assert sum(any(s == 0 and n > 1 for s, n in own) for own in strides) > 3, name


def test_random_calls_cover_modifiers():
    """Each of them, dense and packed, for one head and for all, one batch entry and several, and with the others."""
    calls = [random_call(seed, max_seqlen=40) for seed in range(600)]
    for name in NAMES:
        for packed in (False, True):
            having = [call.options for call in calls if call.is_packed is packed and name in call.options]
            assert len(having) > 15, name
            for other in (*NAMES, "causal", "window", "softcap", "sinks", "seqused_k", "softmax_scale"):
                assert any(other in options for options in having), (name, other, packed)
    dense = [call for call in calls if not call.is_packed and call.tensors["q"].shape[0] > 1]
    for name in ("bias", "key_ranges", "q_positions", "alibi_slopes"):
        shapes = [call.options[name].shape for call in dense if name in call.options]
        assert len({len(shape) == 1 if name == "alibi_slopes" else shape[0] > 1 for shape in shapes}) == 2, name
    assert {str(call.options["bias"].dtype) for call in calls if "bias" in call.options} >= {
        "torch.float64",
        "torch.float32",
        "torch.bfloat16",
        "torch.float16",
    }


def test_layouts_are_those_on_every_device():
    for seed in range(200):
        here, there = random_call(seed, max_seqlen=40).options, random_call(seed, "meta", max_seqlen=40).options
        decode = random_decode_call(seed, max_keys=40)
        moved = decode.on("meta").arguments
        for name in NAMES[:-1]:
            for a, b in ((here, there), (decode.arguments, moved)):
                if name in a:
                    assert (a[name].shape, a[name].stride()) == (b[name].shape, b[name].stride()), (seed, name)
                    assert b[name].device.type == "meta"


def test_old_names_of_random_calls():
    with pytest.warns(FutureWarning, match=r"onepass\.testing\.random_call is now in .*random_calls\.py"):
        assert onepass.testing.random_call is random_call
    with pytest.raises(AttributeError, match="nothing"):
        _ = onepass.testing.nothing

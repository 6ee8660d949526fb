"""What a call over ranks says reaches the calls that each rank makes on its own device."""

import importlib
import inspect

import pytest
import torch

import onepass
from onepass import distributed
from onepass.distributed import checks, local
from onepass.distributed.local import LocalCalls, Options, OutRows, TermGradients, Terms

attention, decode = (importlib.import_module(f"onepass.distributed.{name}") for name in ("attention", "decode"))
HEADS = {"num_heads_q": 8, "num_heads_kv": 4}
INT32 = torch.int32


def tensors(tokens=12, lead=(2,), dtype=torch.float32):
    return [torch.randn(*lead, tokens, heads, 16).to(dtype) for heads in (8, 4, 4)]


@pytest.mark.parametrize("is_packed", [False, True])
def test_one_rank_makes_the_ordinary_call(is_packed, monkeypatch):
    seen = {}
    name = "attention_varlen" if is_packed else "attention"
    monkeypatch.setattr(attention.api, name, lambda *tensors, **given: seen.update(given))
    plan = distributed.plan([0, 3, 12] if is_packed else 12, window=(9, 0), **HEADS, num_ranks=1)
    given = {
        "softcap": 5.0,
        "sinks": torch.zeros(8),
        "softmax_scale": 0.3,
        "seqused_k": torch.tensor([3, 2], dtype=INT32),
        "seqstart_k": torch.tensor([1, 0], dtype=INT32),
        "key_ranges": torch.tensor([0, 9], dtype=INT32).expand(*(() if is_packed else (1,)), 1, 12, 2),
        "query_ranges": torch.tensor([0, 9], dtype=INT32).expand(*(() if is_packed else (1,)), 1, 12, 2),
        "alibi_slopes": torch.ones(8),
        "bias": torch.zeros(*(() if is_packed else (1,)), 1, 1, 12),
        "dropout_p": 0.25,
        "deterministic": True,
        "return_lse": True,
        "backend": "tiled",
        "precision": None,
    }
    assert given.keys() == inspect.signature(distributed.attention).parameters.keys() - {*"qkv", "plan"}
    q, k, v = tensors(lead=() if is_packed else (2,))
    distributed.attention(q, k, v, plan, **given)
    for argument, value in (given | {"window": (9, 0)}).items():
        assert seen.pop(argument) is value or seen.get(argument, value) == value, argument
    if is_packed:
        assert all(seen.pop(f"cu_seqlens_{x}").tolist() == [0, 3, 12] for x in "qk")
        assert all(seen.pop(f"max_seqlen_{x}") == 9 for x in "qk")
    assert not seen


def test_options_follow_torch_and_the_arguments():
    plan = distributed.plan(12, **HEADS, num_ranks=1)
    usual = {"softcap": None, "softmax_scale": 0.3, "dropout_p": 0.0, "deterministic": False, "return_lse": False}
    q, k, v = (t.bfloat16() for t in tensors())
    found = checks.check_call(plan, (q, k, v), Terms(), precision="fp8", backend="cpu", **usual | {"softcap": 2.0})
    assert found == Options(0.3, 2.0, False, 0.0, "fp8", "cpu")
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention.api, "attention", lambda *tensors, **given: seen.append(given["deterministic"]))
        for is_on in (False, True):
            torch.use_deterministic_algorithms(is_on)
            try:
                distributed.attention(q, k, v, plan)
                distributed.attention(q, k, v, plan, deterministic=not is_on)
            finally:
                torch.use_deterministic_algorithms(False)
    assert seen == [False, True, True, False]


def test_a_step_asks_for_what_the_call_asks_for(monkeypatch):
    """Its problem has the call's options, and dropout counts the heads of the call."""
    asked, require = [], local.dispatch.require

    def asking(problem, requested, *others):
        asked.append((problem, requested))
        return require(problem, requested, *others)

    monkeypatch.setattr(local.dispatch, "require", asking)
    plan = distributed.plan(12, engine="heads", chunks=1, **HEADS, num_ranks=2, rank=1)
    terms = Terms(alibi_slopes=torch.ones(8), bias=torch.zeros(1, 1, 1, 12), dropout_state=torch.tensor([3, 4]))
    call = LocalCalls(plan, plan.schedule.steps[0], Options(0.3, 5.0, True, 0.25, None, "tiled"), terms)
    q, k, v = (t.transpose(0, 1)[:, :, : t.shape[2] // 2] for t in tensors())
    out, lse = call.forward(q, k, v)
    of_bias = TermGradients(None, None, torch.zeros(1, 1, 1, 12))
    call.backward(q, k, v, OutRows(out, lse, lse, out), of_bias)
    for problem, requested in asked:
        assert requested == "tiled"
        assert (problem.softmax_scale, problem.softcap, problem.dropout_p) == (0.3, 5.0, 0.25)
        assert problem.deterministic
        assert (problem.first_head, problem.all_heads) == (4, 8)
    (forward, _), (backward, _) = asked
    assert (forward.constant_slopes, forward.constant_bias) == (False, False)
    assert (backward.constant_slopes, backward.constant_bias) == (True, False)  # sums of slopes are not asked for


@pytest.mark.parametrize(
    "given",
    [
        {"num_splits": 3, "softcap": 5.0},
        {"split_size": 64, "softmax_scale": 0.3},
        {"kv_block": 4, **dict.fromkeys(("k_descale", "v_descale"), torch.ones(2, 4, 3))},
        {"cu_seqlens_q": torch.tensor([0, 1, 4], dtype=INT32), "max_seqlen_q": 3},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_step_over_a_cache_asks_for_what_the_call_asks_for(given, monkeypatch):
    """Partial results are float32, so that merging them rounds nothing."""
    asked, require = [], decode.dispatch.require_decode

    def asking(problem, requested, device):
        asked.append((problem, requested))
        return require(problem, requested, device)

    monkeypatch.setattr(decode.dispatch, "require_decode", asking)
    plan = distributed.plan(12, **HEADS, num_ranks=1)
    q, k, v = tensors(dtype=torch.bfloat16)
    q = q[0, :4] if "cu_seqlens_q" in given else q[:, :1]
    k, v = (t.to(torch.float8_e4m3fn) if "kv_block" in given else t for t in (k, v))
    lengths = torch.tensor([3, 12], dtype=INT32)
    out = distributed.decode(q, k, v, plan, cache_seqlens=lengths, backend="tiled", **given)
    ((problem, requested),) = asked
    assert requested == "tiled"
    for argument, value in given.items():
        if not isinstance(value, torch.Tensor):
            assert getattr(problem, argument, getattr(problem.attention, argument, None)) == value
    assert problem.attention.float32_out
    expected = onepass.attention_decode(q, k, v, cache_seqlens=lengths, **given)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_plans_that_decode_does_not_take():
    q, k, v = tensors()
    call = {"cache_seqlens": torch.tensor([3, 12], dtype=INT32)}
    packed, described = distributed.plan([0, 12], **HEADS, num_ranks=1), distributed.plan(12, **HEADS, num_ranks=2)
    for plan, words in ((packed, "packed sequences"), (described, "one that only describes")):
        with pytest.raises(ValueError, match=f"plan: expected .*{words}"):
            distributed.decode(q[:, :1], k, v, plan, **call)
    with pytest.raises(TypeError, match="plan: expected a ContextPlan"):
        distributed.decode(q[:, :1], k, v, None, **call)

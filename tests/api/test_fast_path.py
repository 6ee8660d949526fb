"""The fast path of repeated calls: it gives the results and refusals of a first call, and some calls never take it."""

import gc
import random
import weakref
from dataclasses import replace

import pytest
import torch
from random_calls import random_call
from refusals import DENSE, PACKED, packed, refused, tensors
from repeated_calls import INT32, OPTIONS, Seen, check_each_value_has_its_own_call, outcome, same
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import onepass
from onepass import fp8
from onepass.api import calls, fast_path, steps
from onepass.dispatch import attention as dispatch
from onepass.dispatch import backends
from onepass.kernels.config import ForwardConfigSm80
from onepass.ops import attention as ops


@pytest.fixture(autouse=True)
def _no_calls_before():
    fast_path.forget()


@pytest.fixture
def count_operator(monkeypatch):
    """The number of runs of the operator, in a list of length one."""
    count = [0]
    real = ops.options_of

    def counted(*arguments):
        count[0] += 1
        return real(*arguments)

    monkeypatch.setattr(ops, "options_of", counted)
    return count


@pytest.mark.parametrize("seed", range(60))
def test_same_answer_the_second_time(seed, count_operator):
    call = random_call(seed, max_seqlen=70, with_modifiers=False)
    first = call.run()
    again = call.run()
    assert count_operator == [1]
    same(first.out, again.out)
    same(first.lse, again.lse)


@pytest.mark.parametrize("is_packed", [False, True])
def test_fp8_tensors(is_packed, count_operator):
    function = onepass.attention_varlen if is_packed else onepass.attention
    given = packed() if is_packed else tensors()
    offsets = {n: t for n, t in given.items() if n.startswith("cu_seqlens")}
    q, k, v = (given[n].half() for n in "qkv")
    quantized = onepass.quantize_fp8(q, k, v, **offsets)
    first, again, causal, causal_again = (
        function(quantized, **offsets, causal=causal, return_lse=True) for causal in (False, False, True, True)
    )
    assert count_operator == [2]
    same(first.out, again.out)
    same(first.lse, again.lse)
    same(causal.out, causal_again.out)
    assert not torch.equal(first.out, causal.out)
    # other values of descales are data; another shape of them makes another call
    doubled = replace(quantized, v_descale=2 * quantized.v_descale)
    torch.testing.assert_close(function(doubled, **offsets, return_lse=True).out, 2 * first.out)
    assert count_operator == [2]
    by_tensor = onepass.quantize_fp8(q, k, v, granularity="tensor", **offsets)
    function(by_tensor, **offsets, return_lse=True)
    assert count_operator == [3]
    # calls with a mean subtracted run the operator, and their results are corrected afterwards
    centered = onepass.quantize_fp8(q, k, v, center_v=True, **offsets)
    for _ in range(2):
        function(centered, **offsets, return_lse=True)
    assert count_operator == [5]
    with pytest.raises(TypeError, match=r"k: expected None with a QuantizedQKV"):
        function(quantized, k, **offsets, return_lse=True)


@pytest.mark.parametrize("name", ["q_block", "kv_block"])
def test_fp8_tensors_with_blocks_of_another_size(name):
    """100 rows are two blocks of 64 rows, or of 60, and the descales have one shape either way."""
    q, k, v = (torch.randn(1, 100, 2, 16).half() for _ in range(3))
    quantized = onepass.quantize_fp8(q, k, v)
    factors = {f"{t}_descale": getattr(quantized, f"{t}_descale") * torch.tensor([1.0, 4.0]) for t in "qkv"}
    kinds = [replace(quantized, **factors, **{"q_block": 64, "kv_block": 64, name: size}) for size in (64, 60)]
    outs = [onepass.attention(kind) for kind in kinds]
    assert not torch.equal(*outs)
    for kind, out in zip(kinds, outs, strict=True):
        assert torch.equal(onepass.attention(kind), out)
    fast_path.forget()
    for kind, out in zip(reversed(kinds), reversed(outs), strict=True):
        assert torch.equal(onepass.attention(kind), out)


def test_fp8_tensors_of_equal_shapes(count_operator):
    """The dtype of out and the layout of V are in the key: 64 heads of 64 keys have V of one shape either way."""
    q, k, v = (torch.randn(1, n, 64, 64).half() for n in (3, 64, 64))
    quantized = onepass.quantize_fp8(q, k, v)
    kinds = [
        replace(quantized, dtype=dtype, v=v_e4m3, v_keys_last=keys_last)
        for dtype in (torch.float16, torch.bfloat16)
        for keys_last, v_e4m3 in ((False, quantized.v), (True, fp8.keys_last(quantized.v)))
    ]
    for n in (4, 4):
        outs = [onepass.attention(kind) for kind in kinds]
        assert [out.dtype for out in outs] == [kind.dtype for kind in kinds]
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[2], outs[3])
        assert count_operator == [n]


KINDS = {
    "plain": {},
    "modifiers": {
        "seqstart_k": torch.tensor([1, 2], dtype=INT32),
        "key_ranges": torch.tensor([1, 6], dtype=INT32).expand(1, 1, 6, 2),
        "q_positions": torch.arange(6, dtype=INT32)[None],
        "alibi_slopes": torch.ones(4),
        "bias": torch.ones(1, 1, 6, 6),
        "query_ranges": torch.tensor([0, 5], dtype=INT32).expand(1, 1, 6, 2),
        "dropout_p": 0.5,
    },
    "precision": {"precision": "fp8"},
    "QuantizedQKV": {},
}


ALL_OPTIONS = {"causal": True, "window": (3, -1), "softcap": 2.0, "softmax_scale": 0.3, "deterministic": True}


ALL_OPTIONS |= {"sinks": torch.zeros(4), "seqused_k": torch.tensor([2, 3], dtype=INT32), "return_lse": True}


def call_of_kind(kind, is_packed, **options):
    given = packed() if is_packed else tensors()
    offsets = {n: t for n, t in given.items() if n.startswith("cu_seqlens")}
    rows = [given[n].half() for n in "qkv"]
    modifiers = KINDS[kind]
    if kind == "modifiers" and is_packed:
        in_batch = "key_ranges", "q_positions", "bias", "query_ranges"
        modifiers = modifiers | {name: modifiers[name][0] for name in in_batch}
    if kind == "QuantizedQKV":
        rows = [onepass.quantize_fp8(*rows, **offsets), None, None]
    return (onepass.attention_varlen if is_packed else onepass.attention), rows, offsets | modifiers | options


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_prepared_is_what_was_checked(kind, is_packed, monkeypatch):
    """The operator makes the problem again from its arguments; a forward that is kept is that of the known one."""
    real, checked, prepared, tuning = dispatch.prepare, [], [], ForwardConfigSm80(tile_n=32)

    def require(problem, requested, tuning, device):
        assert requested == "tiled"
        checked.append((problem, device, tuning))
        return requested

    def prepare(name, problem, device, tuning=None):
        assert name == "tiled"
        prepared.append((problem, device, tuning))
        return real(name, problem, device)

    monkeypatch.setattr(dispatch, "prepare", prepare)
    monkeypatch.setattr(dispatch, "require", require)
    monkeypatch.setattr(backends, "config_type", lambda name: ForwardConfigSm80)
    function, rows, options = call_of_kind(kind, is_packed, tuning=tuning, **ALL_OPTIONS)
    function(*rows, **options, backend="tiled")
    assert len(prepared) == 2  # by the operator, and to be kept
    assert set(prepared) == {checked[0]} == {(checked[0][0], torch.device("cpu"), tuning)}


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_argument_reaches_the_checks(kind, is_packed, monkeypatch):
    def check(*tensors, **arguments):
        raise Seen(tensors, arguments)

    monkeypatch.setattr(steps, "check_attention", check)
    monkeypatch.setattr(steps.fp8, "check_quantized_call", check)
    hints = {"max_seqlen_q": 5, "max_seqlen_k": 4} if is_packed else {}
    function, rows, options = call_of_kind(kind, is_packed, tuning=ForwardConfigSm80(), **hints, **ALL_OPTIONS)
    for run in (function, lambda *rows, **options: calls._supports(*rows, dict(options), None)):
        with pytest.raises(Seen) as seen:
            run(*rows, **options)
        given, found = seen.value.args
        assert all(t is row for t, row in zip(given, rows, strict=True))
        # what a call leaves out has a default that is not true
        assert {n: value for n, value in found.items() if n in options or value} == options


OTHER_MODIFIERS = {
    "seqstart_k": lambda t: 1 - t % 2,
    "key_ranges": lambda t: t + torch.tensor([1, 0], dtype=INT32),
    "q_positions": lambda t: t.flip(-1),
    "alibi_slopes": lambda t: t.bfloat16() / 2,
    "bias": lambda t: t.triu(),
    "query_ranges": lambda t: t + torch.tensor([1, 0], dtype=INT32),
}


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", KINDS["modifiers"])
def test_a_repeated_call_has_its_own_modifiers(name, is_packed, count_operator):
    """The values of a modifier are those of each call, and each call with dropout draws bits of its own."""
    function, rows, options = call_of_kind("modifiers", is_packed, causal=True)
    options = {n: value for n, value in options.items() if n == name or n not in KINDS["modifiers"]}
    value = options[name]
    values = [value, value, value if name == "dropout_p" else OTHER_MODIFIERS[name](value)]

    def outs():
        torch.manual_seed(0)
        return [function(*rows, **options | {name: other}) for other in values]

    kept = outs()
    assert count_operator == [1]
    expected = []
    torch.manual_seed(0)
    for other in values:
        fast_path.forget()
        expected.append(function(*rows, **options | {name: other}))
    for a, b in zip(kept, expected, strict=True):
        same(a, b)
    assert not torch.equal(kept[0], kept[-1])


@pytest.mark.parametrize("layout", ["transposed", "slices"])
def test_layout_is_that_of_each_call(layout, count_operator):
    """Strides are in no key: a second call with another layout has its own output layout."""
    onepass.attention(**tensors())
    if layout == "transposed":
        other = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in tensors().items()}
    else:
        other = {n: torch.randn(2, 6, t.shape[2], 16)[..., ::2] for n, t in tensors().items()}
    out = onepass.attention(**other)
    assert count_operator == [1]
    fast_path.forget()
    same(out, onepass.attention(**other))


@pytest.mark.parametrize(("changes", "error", "message"), DENSE, ids=lambda x: x[:60] if isinstance(x, str) else "")
def test_attention_still_refuses(changes, error, message):
    with_options = {"sinks": torch.zeros(4), "seqused_k": torch.tensor([6, 6], dtype=INT32)}
    for options in ({}, {"causal": True, "window": (1, 0), "softcap": 1.0, "softmax_scale": 1.0}, with_options):
        onepass.attention(**tensors(), **options)
    for _ in range(2):
        refused(onepass.attention, tensors, changes, error, message)


@pytest.mark.parametrize(("changes", "error", "message"), PACKED, ids=lambda x: x[:60] if isinstance(x, str) else "")
def test_attention_varlen_still_refuses(changes, error, message):
    for options in ({}, {"seqused_k": torch.tensor([1, 1], dtype=INT32)}):
        onepass.attention_varlen(**packed(), **options)
    for _ in range(2):
        refused(onepass.attention_varlen, packed, changes, error, message)


EQUAL_BUT_NOT_THE_SAME = [
    ({"causal": True}, {"causal": 1}),
    ({"return_lse": False}, {"return_lse": 0}),
    ({"window": (1, 0)}, {"window": (True, 0)}),
    ({"window": (1, 0)}, {"window": (1.0, 0)}),
    ({"softcap": 1.0}, {"softcap": True}),
    ({"softmax_scale": 1}, {"softmax_scale": True}),
    ({"deterministic": True}, {"deterministic": 1}),
    ({}, {"window": ()}),
    ({}, {"softcap": [1.0]}),
]


@pytest.mark.parametrize(("good", "bad"), EQUAL_BUT_NOT_THE_SAME)
def test_options_that_compare_equal_are_still_refused(good, bad):
    onepass.attention(**tensors(), **good)
    with pytest.raises(TypeError, match=next(iter(bad)) + ": expected"):
        onepass.attention(**tensors(), **bad)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", ["attention", "attention_varlen", "attention of FP8", "attention_varlen of FP8"])
def test_an_option_is_that_of_each_call(kind, name):
    is_packed = "varlen" in kind
    given = packed() if is_packed else tensors()
    if "FP8" in kind:
        offsets = {n: t for n, t in given.items() if n.startswith("cu_seqlens")}
        given = {"q": onepass.quantize_fp8(*(given[n].half() for n in "qkv"), **offsets)} | offsets
    function = onepass.attention_varlen if is_packed else onepass.attention
    check_each_value_has_its_own_call(lambda **option: function(**given, **option), name, OPTIONS[name])


@pytest.mark.parametrize("is_packed", [False, True])
def test_options_that_change_no_value_here_have_calls_of_their_own(is_packed, count_operator):
    given, function = (packed(), onepass.attention_varlen) if is_packed else (tensors(), onepass.attention)
    options = {"return_lse": True}, {"deterministic": True}, {"backend": "tiled"}
    for n, option in enumerate(({}, *options), 1):
        for _ in range(2):
            function(**given, **option)
        assert count_operator == [n]


# ---------------------------------------------------------------- any call after any other


def laid_out(t, layout):
    """A copy of a tensor in another layout of memory."""
    if layout == "transposed":
        return t.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "sliced":
        return torch.cat((t, t), -2)[..., : t.shape[-2], :]
    if layout == "odd rows":
        return torch.nn.functional.pad(t, (0, 1))[..., :-1]
    if layout == "misaligned":
        return torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)
    return t.clone()


def any_call(rng, kind):
    """A function and arguments, of which few differ from those of other calls; tensors are made anew in each run."""

    def given(**values):
        return {name: rng.choice(choices) for name, choices in values.items() if rng.random() < 0.25}

    dtype = torch.float32 if rng.random() < 0.8 else torch.bfloat16
    numbers = given(
        causal=[True, False], window=[(2, 0), (None, 1), [2, 0], (0, 0)], softcap=[2.0, 5.0], backend=["tiled"]
    )
    numbers |= given(softmax_scale=[0.3, 1, 1.0], return_lse=[True])
    # values that a first call refuses
    if rng.random() < 0.1:
        numbers |= rng.choice(
            [{"causal": 1}, {"window": (2.0, 0)}, {"softcap": True}, {"return_lse": 1}, {"backend": "?"}]
        )
    all_names = "sinks", "seqused_k", "seqstart_k", "key_ranges", "q_positions", "alibi_slopes", "bias", "query_ranges"
    names = [n for n in all_names if rng.random() < 0.1 and (kind != "decode" or n != "seqused_k")]
    layouts = [rng.choice(["", "", "transposed", "sliced", "odd rows", "misaligned"]) for _ in range(3)]
    two_dims, wide, more = rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.2
    if kind == "decode":
        numbers |= rng.choice([{}, {}, {"num_splits": 1}, {"num_splits": 3}, {"split_size": 64}])
        numbers |= given(rotary_interleaved=[True, False])
    else:
        numbers |= given(deterministic=[True, False, None])
    has_new, is_paged, is_rotated = (kind == "decode" and rng.random() < 0.3 for _ in range(3))

    def run():
        generator = torch.Generator().manual_seed(0)

        def randn(*shape):
            return torch.randn(shape, generator=generator).to(dtype)

        rows, keys = (4, 16) if kind != "packed" else (8, 32)
        lead = () if kind == "packed" else (2,)
        q, k, v = randn(*lead, rows, 4, 8), randn(*lead, keys, 2, 8), randn(*lead, keys, 2, 16 if more else 8)
        q, k, v = (laid_out(t, layout) for t, layout in zip((q, k, v), layouts, strict=True))
        low = torch.arange(rows, dtype=INT32).view(*[1] * (len(lead) + 1), rows, 1)
        made = {
            "sinks": torch.arange(4.0) if wide else torch.arange(4, dtype=dtype),
            "seqused_k": torch.tensor([9, 16], dtype=INT32),
            "seqstart_k": torch.tensor([3, 0], dtype=INT32),
            "key_ranges": torch.cat((low, low + 5), -1),
            "q_positions": torch.arange(rows, dtype=INT32).flip(0) + 3,
            "alibi_slopes": torch.rand((2, 4) if two_dims else (4,), generator=generator),
            "bias": randn(*lead[:1], 4 if wide else 1, 1, 16),
            "query_ranges": torch.tensor([2, 99], dtype=INT32).expand(*lead[:1], 4 if wide else 1, keys, 2),
        }
        if lead:
            made["q_positions"] = made["q_positions"][None]
        arguments = numbers | {name: made[name] for name in names}
        if kind == "packed":
            offsets = {"cu_seqlens_q": torch.tensor([0, 3, 8]), "cu_seqlens_k": torch.tensor([0, 16, 32])}
            return onepass.attention_varlen(q, k, v, **{n: t.int() for n, t in offsets.items()}, **arguments), ()
        if kind == "dense":
            return onepass.attention(q, k, v, **arguments), ()
        arguments["cache_seqlens"] = torch.tensor([9, 13], dtype=INT32)
        if has_new:
            arguments |= {"k_new": randn(2, 2, 2, 8), "v_new": randn(2, 2, 2, v.shape[-1])}
        if is_rotated:
            angles = randn(16, 4 if wide else 2).float()
            arguments |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        if is_paged:
            k, v = k.reshape(8, 4, 2, 8), v.reshape(8, 4, 2, -1)
            arguments["page_table"] = torch.tensor([[3, 1, 2, 0], [7, 4, 6, 5]], dtype=INT32)
        return onepass.attention_decode(q, k, v, **arguments), (k, v)

    return run


@pytest.mark.parametrize("kind", ["dense", "packed", "decode"])
def test_any_call_after_any_other(kind):
    rng = random.Random(kind)
    runs = [any_call(rng, kind) for _ in range(70)]
    expected = []
    for run in runs:
        fast_path.forget()
        expected.append(outcome(run))
    assert 40 < sum(not isinstance(x, str) for x in expected) < 70
    fast_path.forget()
    for i in (*range(70), *rng.sample(range(70), 70)):
        found = outcome(runs[i])
        if isinstance(found, str) or isinstance(expected[i], str):
            assert found == expected[i]
            continue
        assert len(found) == len(expected[i])
        for a, b in zip(found, expected[i], strict=True):
            same(a, b)
    assert fast_path.num_kept() > 15


def test_the_functions_do_not_share_calls():
    onepass.attention(**tensors())
    with pytest.raises(TypeError, match="cu_seqlens_q: expected an int32"):
        onepass.attention_varlen(**tensors(), cu_seqlens_q=None, cu_seqlens_k=None)


def test_values_of_lengths_are_read_in_every_call():
    lengths = torch.tensor([0, 2, 6], dtype=INT32)
    call = packed(cu_seqlens_q=lengths, cu_seqlens_k=lengths)
    before = onepass.attention_varlen(**call)
    lengths[1] = 5
    after = onepass.attention_varlen(**call)
    assert not torch.equal(before, after)
    fast_path.forget()
    same(after, onepass.attention_varlen(**call))
    lengths[1] = 7
    with pytest.raises(ValueError, match="cu_seqlens_q: expected offsets that never decrease"):
        onepass.attention_varlen(**call)


@pytest.mark.parametrize("max_seqlen", [None, 3, torch.tensor(4)])
def test_max_seqlen_is_a_hint_and_does_not_prevent_the_fast_path(max_seqlen, count_operator):
    onepass.attention_varlen(**packed())
    onepass.attention_varlen(**packed(), max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen)
    assert count_operator == [1]


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_a_bad_hint_is_refused_by_a_repeated_call(name, in_fp8):
    call = packed()
    cut = {key: t for key, t in call.items() if key.startswith("cu_seqlens")}
    if in_fp8:
        call = {"q": onepass.quantize_fp8(call["q"], call["k"], call["v"], **cut)} | cut
    for _ in range(2):
        onepass.attention_varlen(**call)
    assert fast_path.num_kept() == 1
    with pytest.raises(TypeError, match=f"^{name}: expected"):
        onepass.attention_varlen(**call, **{name: "7"})


def test_a_dropout_of_0_is_none():
    for function, given in ((onepass.attention, tensors()), (onepass.attention_varlen, packed())):
        same(function(**given, dropout_p=0), function(**given))


def test_global_determinism_is_in_the_key():
    call = tensors()
    onepass.attention(**call)
    torch.use_deterministic_algorithms(True)
    try:
        onepass.attention(**call)
    finally:
        torch.use_deterministic_algorithms(False)
    assert fast_path.num_kept() == 2


class Subclass(torch.Tensor):
    pass


class SeenFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def under(context):
    def run(q, k, v):
        with context():
            return onepass.attention(q, k, v)

    return run


def three(q, k, v):
    return onepass.attention(q, k, v)


FIRST_CALLS = {
    "a gradient of q": lambda q, k, v: onepass.attention(q.requires_grad_(), k, v),
    "a gradient of sinks": lambda q, k, v: onepass.attention(q, k, v, sinks=torch.zeros(4, requires_grad=True)),
    "a subclass": lambda q, k, v: onepass.attention(q, k.as_subclass(Subclass), v),
    "torch.func's level": lambda q, k, v: torch.func.grad(lambda x: (onepass.attention(q, k, v) * x).sum())(
        torch.ones(())
    ),
    "forward mode": under(torch.autograd.forward_ad.dual_level),
    "autocast": under(lambda: torch.autocast("cpu", torch.bfloat16)),
    "a dispatch mode": under(lambda: FlopCounterMode(display=False)),
    "a function mode": under(SeenFunctions),
    "the profiler": under(lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])),
    "jit.trace": lambda q, k, v: torch.jit.trace(onepass.attention, (q, k, v), check_trace=False),
    "make_fx": lambda q, k, v: make_fx(three)(q, k, v),
    "make_fx before dispatch": lambda q, k, v: make_fx(three, pre_dispatch=True)(q, k, v),
    "make_fx with fake tensors": lambda q, k, v: make_fx(three, tracing_mode="fake")(q, k, v),
    "a negative view": lambda q, k, v: onepass.attention(torch._neg_view(q), k, v),
    "the meta device": lambda q, k, v: onepass.attention(*(t.to("meta") for t in (q, k, v))),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("case", FIRST_CALLS)
def test_where_the_operator_runs(case, count_operator):
    sinks = torch.zeros(4)
    onepass.attention(**tensors())
    onepass.attention(**tensors(), sinks=sinks)
    for n in (3, 4):
        FIRST_CALLS[case](*tensors().values())
        assert count_operator == [n]
    assert fast_path.num_kept() == 2  # such calls leave no forward for other calls, either


def test_no_call_on_the_meta_device_is_kept():
    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k, lengths, offsets = meta(2, 1, 4, 16), meta(2, 9, 2, 16), meta(2, dtype=INT32), meta(3, dtype=INT32)
    new = {"k_new": meta(2, 1, 2, 16), "v_new": meta(2, 1, 2, 16)}
    cut = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    for _ in range(2):
        assert onepass.attention(q, k, k, causal=True).shape == q.shape
        assert onepass.attention(q, k, k, precision="fp8").shape == q.shape
        assert onepass.attention(onepass.quantize_fp8(q, k, k)).shape == q.shape
        assert onepass.attention_varlen(q[:, 0], k[0], k[0], **cut).shape == (2, 4, 16)
        assert onepass.attention_decode(q, k, k, cache_seqlens=lengths).shape == q.shape
        assert onepass.attention_decode(q, k, k, cache_seqlens=lengths, **new).shape == q.shape
    assert fast_path.num_kept() == 0


def test_where_it_does_not_run(count_operator):
    q, k, v = tensors().values()
    expected = onepass.attention(q, k, v)
    for t in (q, k, v):
        t.requires_grad_()
    with torch.no_grad():
        same(onepass.attention(q, k, v), expected)
        same(onepass.attention(torch.nn.Parameter(q), k, v), expected)
    with torch.inference_mode():
        same(onepass.attention(q, k, v), expected)
    same(onepass.attention(q.detach(), k.detach(), v.detach()), expected)
    assert count_operator == [1]
    assert onepass.attention(q, k, v).requires_grad


def test_no_tensor_is_kept():
    call = tensors(sinks=torch.zeros(4), seqused_k=torch.tensor([6, 5], dtype=INT32))
    alive = [weakref.ref(t) for t in call.values()]
    alive += [weakref.ref(onepass.attention(**call, return_lse=True).lse) for _ in range(2)]
    del call
    gc.collect()
    assert [r() for r in alive] == [None] * len(alive)
    assert fast_path.num_kept()


def test_the_number_of_kept_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(fast_path, "MAX_CALLS", 3)
    q, k, v = (torch.randn(1, 9, 1, 8) for _ in range(3))
    for n in range(1, 9):
        for _ in range(2):
            assert onepass.attention(q, k[:, :n], v[:, :n]).shape == q.shape
        assert 1 <= fast_path.num_kept() <= 3

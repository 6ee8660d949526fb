"""torch's own attention by onepass: operators are replaced and brought back, and give what float64 attention gives."""

import warnings

import pytest
import sdpa_ranks
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import nn

from onepass import reference
from onepass.compat.flash_attn_3 import flash_attn_func, flash_attn_varlen_func
from onepass.geometry import philox
from onepass.integrations import torch_sdpa
from onepass.integrations.torch_sdpa import calls, operators

pytestmark = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="torch's attention has no registry"
)
CPU_OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(heads=4, kv_heads=4, seqlen_q=37, seqlen_k=37, head_dim=16):
    """(batch, heads, seqlen, head_dim)."""
    return [
        normal(2, h, n, head_dim, seed=i) for i, (h, n) in enumerate(((heads, seqlen_q), *[(kv_heads, seqlen_k)] * 2))
    ]


def results(function, *tensors):
    """out and the gradients of all tensors."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.fixture
def active():
    with torch_sdpa.activate("cpu") as activation:
        yield activation


@pytest.fixture
def counted(monkeypatch):
    """How often onepass has computed a forward and a backward."""
    counts = {"forward": 0, "backward": 0}
    for name in counts:
        original = getattr(calls, name)

        def counting(*args, name=name, original=original):
            counts[name] += 1
            return original(*args)

        monkeypatch.setattr(calls, name, counting)
    return counts


OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": normal(37, 37, seed=9)},
    "mask of heads": {"attn_mask": normal(2, 4, 37, 37, seed=9)},
    "boolean mask": {"attn_mask": normal(37, 37, seed=9) > -1},
    "scale": {"scale": 0.7},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_scaled_dot_product_attention(name, active, counted):
    options = OPTIONS[name]
    found = results(lambda *t: F.scaled_dot_product_attention(*t, **options), *qkv())
    assert counted == {"forward": 1, "backward": 1}
    torch_sdpa.deactivate()
    in_float64 = {n: x.double() if name.startswith("mask") and n == "attn_mask" else x for n, x in options.items()}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = results(lambda *t: F.scaled_dot_product_attention(*t, **in_float64), *(t.double() for t in qkv()))
    for actual, right in zip(found, expected, strict=True):
        torch.testing.assert_close(actual.double(), right, rtol=1e-4, atol=1e-5)


def test_it_can_be_undone(counted):
    before = F.scaled_dot_product_attention(*qkv())
    with torch_sdpa.activate("cpu") as first:
        assert torch_sdpa.is_active()
        assert torch.nn.attention.current_flash_attention_impl() == "onepass"
        F.scaled_dot_product_attention(*qkv())
        torch_sdpa.activate("cpu")  # takes the place of the first one
        assert counted["forward"] == 1
    assert torch_sdpa.is_active()
    F.scaled_dot_product_attention(*qkv())
    assert counted["forward"] == 2
    first.remove()  # once more does nothing
    torch_sdpa.deactivate()
    torch_sdpa.deactivate()
    assert not torch_sdpa.is_active()
    assert torch.nn.attention.current_flash_attention_impl() is None
    assert torch.equal(F.scaled_dot_product_attention(*qkv()), before)
    assert counted["forward"] == 2
    assert torch_sdpa.fallbacks() == {}


def test_another_choice_of_the_registry_brings_the_kernels_back(active, counted):
    torch.nn.attention.restore_flash_attention_impl()
    F.scaled_dot_product_attention(*qkv())
    assert counted["forward"] == 0


def test_refused_calls_go_to_the_kernel_that_was_there(active, monkeypatch):
    def refuse(*args):
        raise NotImplementedError("not today")

    before = results(F.scaled_dot_product_attention, *qkv())
    monkeypatch.setattr(calls, "forward", refuse)
    monkeypatch.setattr(calls, "backward", refuse)
    with pytest.warns(RuntimeWarning, match=f"{CPU_OPERATOR} runs without onepass: not today"):
        found = results(F.scaled_dot_product_attention, *qkv())
    F.scaled_dot_product_attention(*qkv())  # warns no more
    for actual, right in zip(found, before, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-5)
    assert torch_sdpa.fallbacks() == {(CPU_OPERATOR, "not today"): 2, (f"{CPU_OPERATOR}_backward", "not today"): 1}


@pytest.mark.parametrize("is_ours", [False, True])
def test_forward_and_backward_by_different_kernels(is_ours, counted):
    """out and lse say all that a backward needs, whichever implementation computed them."""
    leaves = [t.requires_grad_() for t in qkv()]
    expected = results(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), *qkv())
    if is_ours:
        torch_sdpa.activate("cpu")
    out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    if is_ours:
        torch_sdpa.deactivate()
    else:
        torch_sdpa.activate("cpu")
    found = [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
    torch_sdpa.deactivate()
    assert counted == {"forward": int(is_ours), "backward": int(not is_ours)}
    for actual, right in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-5)


def test_devices():
    for devices in ("tpu", (), ("cpu", "xla")):
        with pytest.raises(ValueError, match="devices: expected some of"):
            torch_sdpa.activate(devices)
    with pytest.raises(TypeError, match=r"devices: expected a sequence of .* or None, got 3"):
        torch_sdpa.activate(3)
    assert not torch_sdpa.is_active()


def test_a_reason_has_no_values_of_tensors():
    """Calls that differ in what a tensor holds have one reason, which is warned of once."""
    q, k, v = (normal(9, 2, 16) for _ in range(3))
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)

    class Previous:
        def call_boxed(self, keys, *args, **options):
            return "torch's"

    activation = torch_sdpa.Activation(("cpu",))
    run = activation._with_fallback("_flash_attention_forward", operators.flash_forward, Previous(), "CPU")

    def call(page):
        table = torch.full((2, 2), page, dtype=torch.int32)
        return run(q, k, v, offsets, offsets, 5, 5, 0.0, False, False, block_table=table)

    with pytest.warns(RuntimeWarning, match="block_table: expected None, got Tensor"):
        assert call(0) == "torch's"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [call(page) for page in (1, 2)] == ["torch's"] * 2
    assert list(activation.refused.values()) == [3]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code(backend, active, counted):
    torch._dynamo.reset()
    function = torch.compile(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), backend=backend)
    found = results(function, *qkv())
    assert counted["forward"] >= 1
    assert counted["backward"] >= 1
    expected = results(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), *qkv())
    for actual, right in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, right)


def test_modules(active, counted):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    attention = nn.MultiheadAttention(32, 4, batch_first=True)
    x = normal(2, 19, 32)
    mask = nn.Transformer.generate_square_subsequent_mask(19)
    found = [layer(x, src_mask=mask, is_causal=True), attention(x, x, x, need_weights=False)[0]]
    sum(t.square().sum() for t in found).backward()
    assert counted == {"forward": 2, "backward": 2}
    gradients = [p.grad.clone() for m in (layer, attention) for p in m.parameters()]
    torch_sdpa.deactivate()
    layer.zero_grad()
    attention.zero_grad()
    expected = [layer(x, src_mask=mask, is_causal=True), attention(x, x, x, need_weights=False)[0]]
    sum(t.square().sum() for t in expected).backward()
    for actual, right in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, right)
    for actual, parameter in zip(gradients, (p for m in (layer, attention) for p in m.parameters()), strict=True):
        torch.testing.assert_close(actual, parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0)])
def test_varlen_attn(window, active):
    """torch's packed sequences have no other kernel than onepass's on a CPU."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    offsets = torch.tensor([0, 9, 9, 30], dtype=torch.int32)
    q, k, v = (normal(30, 4, 16, seed=i) for i in range(3))
    found = results(lambda *t: varlen.varlen_attn(*t, offsets, offsets, 21, 21, window_size=window), q, k, v)
    left, right = (None if side < 0 else side for side in window)
    options = {"window": (left, right), "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    expected = results(lambda *t: reference.attention_varlen(*t, **options).out, *(t.double() for t in (q, k, v)))
    for actual, correct in zip(found, expected, strict=True):
        torch.testing.assert_close(actual.double(), correct, rtol=1e-4, atol=1e-5)


def test_varlen_attn_over_pages(active):
    """A cache in pages is left to the kernel that was there before, and on a CPU there is none."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, pages = normal(4, 2, 16), normal(6, 16, 2, 16)
    offsets = torch.tensor([0, 2, 4], dtype=torch.int32)
    options = {"block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), "seqused_k": offsets[1:] * 8}
    with pytest.raises(NotImplementedError, match="block_table: expected None"):
        varlen.varlen_attn(q, pages, pages, offsets, None, 2, 32, **options)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
def test_context_parallel(num_ranks, rotation):
    run_ranks(num_ranks, sdpa_ranks.ring, rotation)


# ---------------------------------------------------------------- operators of GPUs, on CPU tensors


def heads_second(t):
    return t.transpose(1, 2)


def oracle(q, k, v, state=None, dropout_p=0.0, **options):
    """out and the gradients of q, k, v of (batch, heads, seqlen, head_dim) tensors, by the float64 oracle."""
    named = options | ({"dropout_p": dropout_p, "dropout_state": state} if dropout_p else {})
    return results(
        lambda *t: heads_second(reference.attention(*map(heads_second, t), **named).out),
        *(t.double() for t in (q, k, v)),
    )


def assert_close(found, expected):
    for actual, right in zip(found, expected, strict=True):
        torch.testing.assert_close(actual.double(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_flash_operators(dropout_p, is_causal):
    q, k, v = qkv(heads=4, kv_heads=2, seqlen_q=30, seqlen_k=37)
    out, lse, _, _, max_q, max_k, rng, offset, mask = operators.sdpa_flash(q, k, v, dropout_p, is_causal, scale=0.3)
    assert (max_q, max_k, rng.shape, rng.dtype, offset.shape) == (30, 37, (2,), torch.uint64, ())
    assert mask.numel() == 0
    state = calls.state_of(rng, dropout_p)
    window = (None, 30 - 37) if is_causal else None
    expected = oracle(q, k, v, state, dropout_p, window=window, softmax_scale=0.3)
    arguments = q, k, v, out, lse, None, None, 30, 37, dropout_p, is_causal, rng, offset
    gradients = operators.sdpa_flash_backward(2 * out, *arguments, scale=0.3)
    assert_close([out, *gradients], expected)
    if dropout_p:
        strangers = torch.zeros(2, dtype=torch.uint64)
        with pytest.raises(calls.NotOurs):
            operators.sdpa_flash_backward(2 * out, *arguments[:-2], strangers, offset)


WINDOWS = [
    (True, (9, -1), (9, 0)),
    (True, (-5, None), (None, 0)),
    (False, (9, 2), (9, 2)),
    (False, (None, 0), (None, 0)),
]


@pytest.mark.parametrize(("is_causal", "sides", "window"), WINDOWS)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_flash_forward_and_backward(dropout_p, is_packed, is_causal, sides, window):
    q, k, v = (heads_second(t) for t in qkv(heads=4, kv_heads=2, seqlen_k=43))
    sizes, options = (None, None, 37, 43), {"window": window, "softmax_scale": 0.3}
    if is_packed:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        offsets = [torch.tensor([0, end, rows], dtype=torch.int32) for end, rows in ((20, 74), (31, 86))]
        options |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=True))
        sizes = *offsets, 54, 55
    given = {"scale": 0.3, "window_size_left": sides[0], "window_size_right": sides[1]}
    arguments = q, k, v, *sizes, dropout_p, is_causal, False
    torch.manual_seed(1)
    out, lse, rng, unused, _ = operators.flash_forward(*arguments, **given)
    into = torch.full_like(out, torch.nan)
    torch.manual_seed(1)
    again = operators.flash_forward_inplace(into, *arguments, **given)
    assert torch.equal(into, out)
    assert torch.equal(again, lse)
    function = reference.attention_varlen if is_packed else reference.attention
    tensors = [t.double() for t in (q, k, v)]
    dropped = {"dropout_p": dropout_p, "dropout_state": calls.state_of(rng, dropout_p)} if dropout_p else {}
    expected = results(lambda *t: function(*t, **options, **dropped).out, *tensors)
    rest = *sizes, dropout_p, is_causal, rng, unused
    assert_close([out, *operators.flash_backward(2 * out, q, k, v, out, lse, *rest, **given)], expected)
    if dropout_p:
        return
    used, slopes = torch.tensor([15, 31], dtype=torch.int32), torch.tensor([0.1, 0.2, 0.3, 0.4])
    for more in ({"seqused_k": used}, {"alibi_slopes": slopes}):
        found = operators.flash_forward(*arguments, **given, **more)[0]
        assert_close([found], [function(*tensors, **options, **more).out])
    with pytest.raises(NotImplementedError, match="block_table: expected None, got Tensor"):
        operators.flash_forward(*arguments, block_table=torch.zeros(1, 1))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_cudnn_operators(dropout_p):
    q, k, v = qkv()
    bias = normal(1, 4, 37, 37, seed=7)
    out, lse, _, _, max_q, max_k, seed, offset, _ = operators.sdpa_cudnn(
        q, k, v, bias, True, dropout_p, True, scale=0.3
    )
    assert (lse.shape, seed.shape, offset.shape, seed.dtype) == ((2, 4, 37, 1), (), (), torch.int64)
    assert offset.storage_offset() * offset.itemsize % 16 == 0  # asserted by torch.compile's code
    state = calls.state_of(seed, dropout_p, must_be_marked=True)
    expected = oracle(q, k, v, state, dropout_p, causal=True, bias=bias.double(), softmax_scale=0.3)
    rest = bias, None, None, max_q, max_k, dropout_p, True
    gradients = operators.sdpa_cudnn_backward(2 * out, q, k, v, out, lse, seed, offset, *rest, scale=0.3)
    assert_close([out, *gradients], expected)
    with pytest.raises(calls.NotOurs):
        operators.sdpa_cudnn_backward(2 * out, q, k, v, out, lse, torch.tensor(1), torch.tensor(2), *rest)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_cudnn_operators(is_causal, dropout_p):
    q, k, v = (normal(n, h, 16, seed=i) for i, (n, h) in enumerate(((30, 4), (34, 2), (34, 2))))
    offsets = [torch.tensor(ends, dtype=torch.int32) for ends in ([0, 9, 30], [0, 12, 34])]
    sizes = *offsets, 21, 22
    out, lse, *cut, seed, offset, _ = operators.cudnn_forward(
        q, k, v, None, *sizes, True, dropout_p, is_causal, scale=0.3
    )
    assert lse.shape == (30, 4, 1)
    assert cut == list(sizes)
    options = {"causal": is_causal, "softmax_scale": 0.3, "cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}
    if dropout_p:
        options |= {"dropout_p": dropout_p, "dropout_state": calls.state_of(seed, dropout_p)}
    expected = results(lambda *t: reference.attention_varlen(*t, **options).out, *(t.double() for t in (q, k, v)))
    rest = None, *sizes, dropout_p, is_causal
    gradients = operators.cudnn_backward(2 * out, q, k, v, out, lse, seed, offset, *rest, scale=0.3)
    assert_close([out, *gradients], expected)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_quantized_operators(kv_heads):
    q, k, v = (t.to(torch.float8_e4m3fn) for t in qkv(kv_heads=kv_heads))
    descales = [x * normal(2, kv_heads, seed=seed).exp() for seed, x in enumerate((0.5, 2.0, 0.25))]
    options = {"softmax_scale": 0.1} | dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    expected = flash_attn_func(*(heads_second(t) for t in (q, k, v)), causal=True, **options)
    expected = expected[0] if isinstance(expected, tuple) else expected
    out, lse, _, _, max_q, *_ = operators.sdpa_flash_quantized(q, k, v, *descales, 0.0, True, scale=0.1)
    torch.testing.assert_close(heads_second(out), expected)
    assert (lse.shape, max_q) == ((2, 4, 37), 37)
    rows, offsets = [heads_second(t).flatten(0, 1) for t in (q, k, v)], torch.tensor([0, 37, 74], dtype=torch.int32)
    used = torch.tensor([37, 20], dtype=torch.int32)
    found, *_ = operators.flash_forward_quantized(
        *rows, offsets, offsets, 37, 37, 0.0, False, False, *descales, scale=0.1, window_size_left=9, seqused_k=used
    )
    options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 37, "max_seqlen_k": 37}
    expected = flash_attn_varlen_func(*rows, window_size=(9, -1), seqused_k=used, **options)
    torch.testing.assert_close(found, expected[0] if isinstance(expected, tuple) else expected)
    dense = operators.flash_forward_quantized(
        *(heads_second(t) for t in (q, k, v)),
        None,
        None,
        37,
        37,
        0.0,
        False,
        False,
        *descales,
        scale=0.1,
        window_size_left=9,
    )[0]
    torch.testing.assert_close(found[:37], dense[0])
    ones = [torch.ones(2, kv_heads)] * 3
    expected = operators.sdpa_flash_quantized(q, k, v, *ones, 0.0, True)[:2]
    assert all(map(torch.equal, operators.sdpa_flash_quantized(q, k, v, None, None, None, 0.0, True)[:2], expected))


def refusals():
    q, k, v = qkv()
    wide = normal(2, 4, 37, 24)
    rows = [heads_second(t) for t in (q, k, v)]
    e4m3, others = ([t.to(torch.float8_e4m3fn) for t in x] for x in ((q, k, v), (q[:, :, 1:], k, v)))
    eight, used = [heads_second(t) for t in e4m3], torch.tensor([3, 3], dtype=torch.int32)
    whole, none = (None, None, 37, 37, 0.0, False, False), (None, None, None)
    dropped = (None, None, 37, 37, 0.3, False, False)
    debug = "return_debug_mask: expected False, got True"
    sizes = "value: expected query's head_dim 16, got 24"
    packed = "cum_seq_q: expected packed sequences without a bias"
    return [
        (lambda: operators.sdpa_flash(q, k, v, 0.0, False, True), debug),
        (lambda: operators.sdpa_flash(q, k, wide), sizes),
        (lambda: operators.sdpa_flash(q, k, v, sinks=1), "sinks: expected None, got int"),
        (lambda: operators.flash_backward(*rows, sinks=1), "sinks: expected None, got int"),
        (lambda: operators.flash_forward(*rows, *whole[:-1], True), debug),
        (lambda: operators.flash_forward(*rows[:2], heads_second(wide), *whole), sizes),
        (lambda: operators.sdpa_cudnn(q, k, v, None, True, 0.0, False, True), debug),
        (lambda: operators.cudnn_forward(*rows, None, *whole[:4], True), packed),
        (lambda: operators.cudnn_forward(*rows, q, used, used, 3, 3, True), packed),
        (lambda: operators.sdpa_cpu(q, k, v, 0.3), "dropout_p: expected 0, .* got 0.3"),
        (lambda: operators.sdpa_cpu(q, k, wide), sizes),
        (lambda: operators.sdpa_flash_quantized(*others, *none, 0.0, True), "is_causal: expected False with different"),
        (lambda: operators.flash_forward_quantized(*eight, *whole[:-1], True, *none), debug),
        (lambda: operators.flash_forward_quantized(*eight, *dropped, *none), "dropout_p: expected None, got float"),
        (
            lambda: operators.flash_forward_quantized(*eight, *whole, *none, seqused_k=used),
            "seqused_k: expected None in FP8 without cum_seq_q, got a tensor",
        ),
        (
            lambda: operators.flash_forward_quantized(*eight, *whole, *none, alibi_slopes=torch.ones(4)),
            "alibi_slopes: expected None, got Tensor",
        ),
    ]


def test_what_the_operators_refuse():
    for call, message in refusals():
        with pytest.raises(NotImplementedError, match=message):
            call()


@pytest.mark.parametrize("lengths", [(30, 37), (37, 30), (1, 37)])
def test_the_operator_of_cpus_aligns_its_causal_mask_at_the_top_left(lengths):
    q, k, v = qkv(4, 4, *lengths)
    out, lse = operators.sdpa_cpu(q, k, v, 0.0, True)
    assert lse.transpose(1, 2).is_contiguous()
    expected = oracle(q, k, v, window=(None, lengths[0] - lengths[1]))
    gradients = operators.sdpa_cpu_backward(2 * out, q, k, v, out, lse, 0.0, True)
    assert_close([out, *gradients], expected)


def test_random_states_draw_from_torchs_generator():
    q, k, v = qkv()
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(calls.state_of(operators.sdpa_flash(q, k, v, 0.5)[6], 0.5))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    torch.manual_seed(1)
    assert torch.equal(philox.random_state(q.device), states[0])

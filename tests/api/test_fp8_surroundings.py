"""FP8 under the caller's settings: gradients, a default dtype, autocast, torch.compile."""

import pytest
import torch

import onepass
from onepass.errors import UnsupportedError

BF16, INT32 = torch.bfloat16, torch.int32
GRANULARITIES = ("row", "block", "head", "tensor")


def tensors(seqlens=(70, 150), is_packed=False, dtype=BF16, **options):
    leading = () if is_packed else (2,)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(*leading, n, heads, 24, generator=generator, dtype=torch.float32).to(dtype)
        for n, heads in ((seqlens[0], 4), (seqlens[1], 2), (seqlens[1], 2))
    )
    return q, k, v


def offsets(seqlens):
    return {f"cu_seqlens_{t}": torch.tensor([0, n // 3, n], dtype=INT32) for t, n in zip("qk", seqlens, strict=True)}


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_gradients_are_not_lost_in_quantizing(name, is_packed):
    named = dict(zip("qkv", tensors(is_packed=is_packed), strict=True))
    options = offsets((70, 150)) if is_packed else {}
    onepass.quantize_fp8(**named, **options)  # an equal call before it makes no difference
    named[name].requires_grad_()
    with pytest.raises(UnsupportedError, match=rf"^{name}: expected no requires_grad in FP8.*precision='fp8'.*no_grad"):
        onepass.quantize_fp8(**named, **options)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert not onepass.quantize_fp8(**named, **options).k.requires_grad


PARTS = ("q_descale", "k_descale", "v_descale", "score_shift", "v_mean")


@pytest.mark.parametrize("name", [*PARTS, "sinks"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_gradients_are_not_lost_in_a_call(name, is_packed):
    lengths = offsets((70, 150)) if is_packed else {}
    function = onepass.attention_varlen if is_packed else onepass.attention
    has_means = name in ("score_shift", "v_mean")
    quantized = onepass.quantize_fp8(*tensors(is_packed=is_packed), center_k=has_means, center_v=has_means, **lengths)
    sinks = torch.zeros(4)
    expected = function(quantized, sinks=sinks, **lengths)
    (sinks if name == "sinks" else getattr(quantized, name)).requires_grad_()
    with pytest.raises(UnsupportedError, match=rf"^{name}: expected no requires_grad in FP8"):
        function(quantized, sinks=sinks, **lengths)
    assert not onepass.supports(quantized, sinks=sinks, **lengths).ok
    with torch.no_grad():
        assert torch.equal(function(quantized, sinks=sinks, **lengths), expected)
        assert onepass.supports(quantized, sinks=sinks, **lengths).ok


def test_precision_keeps_its_gradients():
    q, k, v = tensors()
    sinks = torch.zeros(4)
    for _ in range(2):  # an equal call before it, without gradients, makes no difference
        onepass.attention(q, k, v, sinks=sinks, precision="fp8")
    named = {"q": q, "k": k, "v": v, "sinks": sinks}
    for name, t in named.items():
        t.requires_grad_()
        out = onepass.attention(q, k, v, sinks=sinks, precision="fp8")
        (grad,) = torch.autograd.grad(out.float().square().sum(), t)
        assert grad.abs().max() > 0, name
        t.requires_grad_(False)


# ---------------------------------------------------------------- torch.compile


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("is_packed", [False, True])
def test_compiled_with_any_length(granularity, is_packed):
    """A compiled call has no graph break and equal bits; once lengths are symbols, a new length compiles nothing."""
    options = {"granularity": granularity, "center_k": True, "center_v": True}

    @torch.compile(fullgraph=True, backend="eager")
    def quantize(q, k, v, lengths):
        return onepass.quantize_fp8(q, k, v, **options, **lengths)

    torch._dynamo.reset()
    for seqlens in ((70, 150), (65, 131), (201, 90)):
        given, lengths = tensors(seqlens, is_packed), offsets(seqlens) if is_packed else {}
        with torch._dynamo.config.patch(error_on_recompile=seqlens[0] == 201):
            compiled = quantize(*given, lengths)
        expected = onepass.quantize_fp8(*given, **options, **lengths)
        for name in ("q", "k", "v", "q_descale", "k_descale", "v_descale", "score_shift", "v_mean"):
            a, b = getattr(compiled, name), getattr(expected, name)
            assert a.dtype == b.dtype, name
            assert torch.equal(*(t.view(torch.uint8) if t.dim() else t for t in (a, b))), name


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("is_packed", [False, True])
def test_compiled_attention_with_any_length(granularity, is_packed):
    """Tensors are quantized inside the compiled function, or outside it; then the trace checks their shapes."""
    function = onepass.attention_varlen if is_packed else onepass.attention

    @torch.compile(fullgraph=True, backend="eager")
    def inside(q, k, v, lengths):
        return function(onepass.quantize_fp8(q, k, v, granularity=granularity, **lengths), **lengths)

    @torch.compile(fullgraph=True, backend="eager")
    def outside(q, k, v, descales, lengths):
        block = {"row": 1, "block": 64}.get(granularity)
        quantized = onepass.QuantizedQKV(q, k, v, *descales, q_block=block, kv_block=block)
        return function(quantized, **lengths)

    torch._dynamo.reset()
    for seqlens in ((70, 150), (65, 131), (201, 90)):
        given, lengths = tensors(seqlens, is_packed), offsets(seqlens) if is_packed else {}
        quantized = onepass.quantize_fp8(*given, granularity=granularity, **lengths)
        expected = function(quantized, **lengths)
        assert torch.equal(inside(*given, lengths), expected)
        assert torch.equal(outside(quantized.q, quantized.k, quantized.v, tuple(quantized.descales), lengths), expected)

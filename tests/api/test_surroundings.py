"""Public functions under other default dtypes, autocast, torch.fx and mixed precision."""

import contextlib
import dataclasses

import pytest
import torch
from decode_calls import random_decode_call
from random_calls import random_call

import onepass
from onepass.compat import flash_attn, sdpa

BF16, FP16, INT32 = torch.bfloat16, torch.float16, torch.int32


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS = {
    "default bfloat16": lambda: default_dtype(BF16),
    "default float16": lambda: default_dtype(FP16),
    "default float64": lambda: default_dtype(torch.float64),
    "autocast bfloat16": lambda: torch.autocast("cpu", BF16),
    "autocast float16": lambda: torch.autocast("cpu", FP16),
}


def randn(*shape, dtype=BF16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


def dense(dtype=BF16):
    return [randn(2, n, h, 24, dtype=dtype, seed=i) for i, (n, h) in enumerate(((70, 4), (150, 2), (150, 2)))]


def packed(dtype=BF16):
    return [t[0] for t in dense(dtype)]


def lengths(*values):
    return torch.tensor(values, dtype=INT32)


CU = {"cu_seqlens_q": lengths(0, 20, 70), "cu_seqlens_k": lengths(0, 90, 150)}
USED = lengths(77, 150)
SINKS = [0.5, -1.0, 2.0, 0.0]


def sinks(dtype=torch.float32):
    return torch.tensor(SINKS, dtype=dtype)


def with_gradients(function, *tensors):
    leaves = [t.clone().requires_grad_() for t in tensors]
    result = function(*leaves)
    results = tuple(result) if isinstance(result, tuple) else (result,)
    seeds = [randn(*t.shape, dtype=t.dtype, seed=9) for t in results]
    return (*results, *torch.autograd.grad(results, leaves, seeds))


def attention(dtype, **options):
    def run():
        def function(q, k, v, s):
            return tuple(onepass.attention(q, k, v, sinks=s, return_lse=True, **options))

        return with_gradients(function, *dense(dtype), sinks())

    return run


def varlen(dtype, **options):
    def run():
        def function(q, k, v, s):
            return tuple(onepass.attention_varlen(q, k, v, sinks=s, return_lse=True, **CU, **options))

        return with_gradients(function, *packed(dtype), sinks())

    return run


def quantize(dtype, granularity, is_packed=False, means=True):
    def run():
        tensors, options = (packed(dtype), CU) if is_packed else (dense(dtype), {"seqused_k": USED})
        quantized = onepass.quantize_fp8(*tensors, granularity=granularity, center_k=means, center_v=means, **options)
        fields = [getattr(quantized, f.name) for f in dataclasses.fields(quantized)]
        function = onepass.attention_varlen if is_packed else onepass.attention
        called = function(quantized, causal=True, sinks=sinks(), return_lse=True, **options)
        offsets = CU if is_packed else {}
        return (*(t for t in fields if isinstance(t, torch.Tensor)), *called, *quantized.dequantize(**offsets))

    return run


def precision():
    def function(q, k, v):
        return tuple(onepass.attention(q, k, v, precision="fp8", return_lse=True))

    return with_gradients(function, *dense())


def decode(is_e4m3=False, is_paged=False, dtype=BF16, **options):
    def run():
        q, new = (
            randn(2, 3, 4, 32, dtype=dtype),
            {n: randn(2, 3, 2, 32, dtype=dtype, seed=5) for n in ("k_new", "v_new")},
        )
        caches = {n: randn(2, 128, 2, 32, dtype=dtype, seed=i) for i, n in enumerate(("k_cache", "v_cache"), 1)}
        more = {}
        if is_e4m3:
            caches = {n: t.to(torch.float8_e4m3fn) for n, t in caches.items()}
            more = {n: torch.tensor([[0.5, 2.0]] * 2, dtype=torch.float32) for n in ("k_descale", "v_descale")}
        if is_paged:
            caches = {n: t.view(8, 32, 2, 32) for n, t in caches.items()}
            more["page_table"] = torch.arange(8, dtype=INT32).view(2, 4)
        angles = torch.arange(128 * 8, dtype=torch.float32).view(128, 8)
        rotary = {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
        given = {"cache_seqlens": lengths(20, 111), **new, **rotary, **more, **options}
        result = onepass.attention_decode(q, **caches, **given, sinks=sinks(), return_lse=True)
        return (*result, *caches.values())

    return run


def merge(dtype):
    def run():
        def function(*outs_and_lses):
            return tuple(onepass.merge_partials(outs_and_lses[:2], outs_and_lses[2:]))

        outs = [randn(2, 9, 4, 16, dtype=dtype, seed=i) for i in range(2)]
        lses = [randn(2, 4, 9, dtype=torch.float32, seed=i) for i in range(2)]
        return with_gradients(function, *outs, *lses)

    return run


def through_flash_attn():
    q, k, v = dense()
    return (
        *with_gradients(lambda *t: flash_attn.flash_attn_func(*t, causal=True, softcap=5.0), q, k, v),
        flash_attn.flash_attn_with_kvcache(q, k.clone(), v.clone(), cache_seqlens=USED, causal=True),
    )


def through_sdpa():
    q, k, v = (t.transpose(1, 2) for t in dense())
    return with_gradients(lambda *t: sdpa.scaled_dot_product_attention(*t, is_causal=True, enable_gqa=True), q, k, v)


# under autocast no call computes in float32: its inputs are cast, as they are for torch's own attention
CALLS = {
    "attention": attention(BF16, causal=True, softcap=3.0),
    "attention, window": attention(FP16, window=(20, 10), seqused_k=USED),
    "attention, float32": attention(torch.float32, causal=True),
    "attention, float64": attention(torch.float64, window=(20, 0)),
    "attention, tiled": attention(BF16, causal=True, backend="tiled"),
    "attention, modifiers": attention(BF16, alibi_slopes=torch.tensor([0.1, 0.2, 0.3, 0.4])),
    "attention, modifiers, tiled": attention(BF16, bias=randn(70, 1)[None, None], backend="tiled"),
    "attention_varlen, tiled": varlen(BF16, causal=True, backend="tiled"),
    "attention_varlen": varlen(BF16, causal=True),
    "attention_varlen, float64": varlen(torch.float64, seqused_k=lengths(80, 60)),
    **{
        f"quantize_fp8, {granularity}{', packed' * is_packed}{', float32' * (dtype != BF16)}": quantize(
            dtype, granularity, is_packed
        )
        for granularity in ("row", "block", "head", "tensor")
        for is_packed in (False, True)
        for dtype in (BF16, torch.float32)
    },
    "quantize_fp8 without means": quantize(FP16, "block", means=False),
    "precision": precision,
    "attention_decode": decode(),
    "attention_decode, tiled": decode(backend="tiled"),
    "attention_decode, modifiers": decode(alibi_slopes=torch.tensor([0.1, 0.2, 0.3, 0.4]), backend="tiled"),
    "attention_decode, float32": decode(dtype=torch.float32),
    "attention_decode, splits": decode(num_splits=3, softcap=4.0),
    "attention_decode, pages": decode(is_paged=True),
    "attention_decode, e4m3": decode(is_e4m3=True),
    "merge_partials": merge(BF16),
    "merge_partials, float32": merge(torch.float32),
    "flash_attn": through_flash_attn,
    "sdpa": through_sdpa,
}
CAST = {"attention, float32", "attention_decode, float32", "attention, window"}


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("name", CALLS)
def test_same_bits(name, surroundings):
    if surroundings.startswith("autocast"):
        dtype = BF16 if surroundings.endswith("bfloat16") else FP16
        if name in CAST or (dtype == FP16 and "quantize" not in name and "merge" not in name and "64" not in name):
            pytest.skip("autocast casts what this call is given")
    expected = CALLS[name]()
    with SURROUNDINGS[surroundings]():
        actual = CALLS[name]()
    assert len(actual) == len(expected)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert same_bits(a, b), i


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_a_seed_repeats_its_case(surroundings):
    """The random calls of a seed are the same under any default dtype."""
    for make in (random_call, random_decode_call):
        for seed in range(12):
            expected = make(seed)
            with SURROUNDINGS[surroundings]():
                actual = make(seed)
            for name, t in vars_of(expected).items():
                if isinstance(t, torch.Tensor):
                    assert same_bits(vars_of(actual)[name], t), (seed, name)


def vars_of(call):
    return getattr(call, "arguments", None) or call.tensors | call.options


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(*(t.contiguous().view(torch.uint8) if t.dim() else t for t in (a, b)))


# ---------------------------------------------------------------- torch.fx


class Layer(torch.nn.Module):
    """The three functions with parameters of the module, of which torch.fx makes proxies."""

    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.rand(4))

    def forward(self, q, k, v, offsets, lengths):
        out, lse = onepass.attention(q, k, v, causal=True, alibi_slopes=self.slopes, return_lse=True)
        packed = (x.flatten(0, 1) for x in (q, k, v))
        more = onepass.attention_varlen(*packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets, window=(3, 0))
        return out, lse, more, onepass.attention_decode(q, k, v, cache_seqlens=lengths)


def test_symbolic_traces():
    layer = Layer()
    traced = torch.fx.symbolic_trace(layer)
    q, k, v = (torch.randn(2, 9, heads, 8) for heads in (4, 2, 2))
    given = q, k, v, torch.tensor([0, 9, 18], dtype=INT32), torch.tensor([9, 5], dtype=INT32)
    with torch.no_grad():
        for found, expected in zip(traced(*given), layer(*given), strict=True):
            assert torch.equal(found, expected)
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    for function in (onepass.attention, onepass.attention_varlen, onepass.attention_decode):
        assert function in targets


def test_constant_queries_of_symbolic_traces():
    class Latents(torch.nn.Module):
        queries = torch.ones(2, 3, 4, 8)

        def forward(self, k, v, lengths):
            given = {"cache_seqlens": lengths}
            return onepass.attention(self.queries, k, v), onepass.attention_decode(self.queries, k, v, **given)

    layer, given = Latents(), (torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8), torch.tensor([9, 5], dtype=INT32))
    for found, expected in zip(torch.fx.symbolic_trace(layer)(*given), layer(*given), strict=True):
        assert torch.equal(found, expected)


# ---------------------------------------------------------------- mixed precision


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_slopes_of_mixed_precision(dtype):
    """FSDP casts parameters, learned slopes among them, to the dtype of computing."""
    q, k, v = (torch.randn(2, 9, heads, 8, dtype=dtype) for heads in (4, 2, 2))
    offsets, lengths = torch.tensor([0, 9, 18], dtype=INT32), torch.tensor([9, 5], dtype=INT32)
    packed = [x.flatten(0, 1) for x in (q, k, v)]

    def outs(slopes):
        return (
            onepass.attention(q, k, v, alibi_slopes=slopes),
            onepass.attention_varlen(*packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets, alibi_slopes=slopes),
            onepass.attention_decode(q, k, v, cache_seqlens=lengths, alibi_slopes=slopes.detach()),
        )

    slopes = torch.rand(4).to(dtype).requires_grad_()
    same = slopes.detach().float().requires_grad_()
    for out, expected in zip(outs(slopes), outs(same), strict=True):
        assert torch.equal(out, expected)
        if out.requires_grad:
            pairs = (out, slopes), (expected, same)
            (gradient,), (of_float32,) = (torch.autograd.grad(o.float().sum(), s) for o, s in pairs)
            assert torch.equal(gradient, of_float32.to(dtype))
    assert onepass.supports(q, k, v, alibi_slopes=slopes)
    assert onepass.supports(q=q, k_cache=k, v_cache=v, cache_seqlens=lengths, alibi_slopes=slopes)

"""torch.compile(fullgraph=True) with numbers that change from call to call: the second trace makes them symbols.

`make test` has few cases, QUICK, where each function, each kind of number, each way to compile and each dtype occurs.
All functions and numbers, compiled both ways, are nightly cases.
"""

import itertools
import math
import re
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import onepass
from onepass.compat import flash_attn, sdpa

INT32 = torch.int32
LENGTHS = torch.tensor([5, 9], dtype=INT32)
OFFSETS = torch.tensor([0, 4, 9], dtype=INT32)
TABLE = torch.tensor([[0, 1], [2, 3]], dtype=INT32)

torch.manual_seed(0)
Q, K, V = (torch.randn(2, 9, heads, 8) for heads in (4, 2, 2))
PACKED = [torch.randn(9, heads, 8) for heads in (4, 2, 2)]
PAGES = [torch.randn(4, 5, 2, 8) for _ in range(2)]
ROTARY = {"rotary_cos": torch.rand(12, 4), "rotary_sin": torch.rand(12, 4)}
NEW = {name: torch.randn(2, 1, 2, 8) for name in ("k_new", "v_new")}
QUANTIZED = onepass.quantize_fp8(Q, K, V, center_k=True, center_v=True)
HEADS_FIRST = [t.transpose(1, 2).contiguous() for t in (Q, K, V)]
MASK = torch.ones(9, 9, dtype=torch.bool).tril()

SCALES = (0.3, 0.5, -0.11)
CAPS = (3.0, 5.0, 11.5)
WINDOWS = ((1, 2), (3, 4), (5, 1), (None, 2), (2**70, 3))


def varlen(**options):
    return onepass.attention_varlen(*PACKED, cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS, **options)


def decode(**options):
    return onepass.attention_decode(Q, K, V, cache_seqlens=LENGTHS, **options)


def decode_with_new_keys(**options):
    caches = K.clone(), V.clone()
    return onepass.attention_decode(Q[:, :1], *caches, cache_seqlens=LENGTHS - 1, **NEW, **ROTARY, **options), *caches


def attention_with_modifiers(x):
    ranges, positions = torch.tensor([0, 7], dtype=INT32).expand(1, 1, 9, 2), torch.arange(9, dtype=INT32)[None]
    modifiers = {"key_ranges": ranges, "q_positions": positions, "bias": torch.ones(1, 4, 1, 9)}
    modifiers["query_ranges"] = ranges
    return onepass.attention(Q, K, V, softmax_scale=x, alibi_slopes=torch.full((4,), 0.1), **modifiers)


def decode_with_modifiers(x):
    modifiers = {"seqstart_k": torch.tensor([1, 3], dtype=INT32), "alibi_slopes": torch.full((4,), 0.1)}
    positions = {"rotary_positions_q": torch.tensor([[3]], dtype=INT32), "bias": torch.ones(1, 4, 1, 9)}
    return decode_with_new_keys(softmax_scale=x, **modifiers, **positions)


def packed_pages(**options):
    pages = {"page_table": TABLE, "cache_seqlens": LENGTHS, "cu_seqlens_q": OFFSETS}
    return onepass.attention_decode(PACKED[0], *PAGES, **pages, **options)


def merged(x):
    outs, lses = [Q * x, Q / 2], [torch.ones(2, 4, 9), torch.zeros(2, 4, 9)]
    return onepass.merge_partials(outs, lses)


def flash_varlen(x, **options):
    return flash_attn.flash_attn_varlen_func(*PACKED, OFFSETS, OFFSETS, 5, 5, softmax_scale=x, softcap=x, **options)


def flash_pages(x):
    q = PACKED[0]
    return flash_attn.flash_attn_varlen_func(
        q, *PAGES, OFFSETS, OFFSETS, 5, 5, softmax_scale=x, softcap=x, block_table=TABLE
    )


def flash_cache(**options):
    return flash_attn.flash_attn_with_kvcache(Q, K, V, **options)


CALLS = {
    "attention, softmax_scale": (lambda x: onepass.attention(Q, K, V, softmax_scale=x), SCALES),
    "attention, softcap": (lambda x: onepass.attention(Q, K, V, softcap=x, return_lse=True), CAPS),
    "attention, window": (lambda x: onepass.attention(Q, K, V, window=x), WINDOWS),
    "attention to e4m3, softmax_scale": (
        lambda x: onepass.attention(Q, K, V, softmax_scale=x, precision="fp8"),
        SCALES,
    ),
    "attention of QuantizedQKV, softmax_scale": (
        lambda x: onepass.attention(QUANTIZED, softmax_scale=x, return_lse=True),
        SCALES,
    ),
    "attention_varlen, softmax_scale": (lambda x: varlen(softmax_scale=x), SCALES),
    "attention_varlen, softcap": (lambda x: varlen(softcap=x), CAPS),
    "attention_varlen, max_seqlen": (lambda x: varlen(max_seqlen_q=x, max_seqlen_k=x), (5, 6, 7, 8)),
    "attention_decode, softmax_scale": (lambda x: decode(softmax_scale=x), SCALES),
    "attention_decode, softcap": (lambda x: decode(softcap=x), CAPS),
    "attention_decode, window": (lambda x: decode(window=x), WINDOWS),
    "attention_decode, num_splits": (lambda x: decode(num_splits=x), (1, 2, 3, 4)),
    "attention_decode, split_size": (lambda x: decode(split_size=x), (64, 128, 192)),
    "attention_decode of new keys, softmax_scale": (lambda x: decode_with_new_keys(softmax_scale=x), SCALES),
    "attention_decode of packed pages, max_seqlen": (lambda x: packed_pages(max_seqlen_q=x), (6, 7, 8, 40)),
    "attention with modifiers, softmax_scale": (attention_with_modifiers, SCALES),
    "attention_decode with modifiers, softmax_scale": (decode_with_modifiers, SCALES),
    "merge_partials, factor": (merged, SCALES),
    "flash_attn_func, softmax_scale": (lambda x: flash_attn.flash_attn_func(Q, K, V, softmax_scale=x), SCALES),
    "flash_attn_func, softcap": (lambda x: flash_attn.flash_attn_func(Q, K, V, softcap=x), (0.0, *CAPS)),
    "flash_attn_func, window_size": (
        lambda x: flash_attn.flash_attn_func(Q, K, V, window_size=x),
        ((1, 2), (3, 4), (-1, 2), (2, -1)),
    ),
    "flash_attn_varlen_func, softmax_scale and softcap": (flash_varlen, CAPS),
    "flash_attn_varlen_func of pages, softmax_scale and softcap": (flash_pages, CAPS),
    "flash_attn_with_kvcache, softmax_scale and softcap": (lambda x: flash_cache(softmax_scale=x, softcap=x), CAPS),
    "flash_attn_with_kvcache, cache_seqlens": (lambda x: flash_cache(cache_seqlens=x), (3, 4, 5, 6)),
    "flash_attn_with_kvcache, num_splits": (lambda x: flash_cache(num_splits=x), (0, 1, 2, 3)),
    "scaled_dot_product_attention, softmax_scale": (
        lambda x: sdpa.scaled_dot_product_attention(*HEADS_FIRST, scale=x, enable_gqa=True),
        SCALES,
    ),
    "scaled_dot_product_attention of a mask, softmax_scale": (
        lambda x: sdpa.scaled_dot_product_attention(*HEADS_FIRST, attn_mask=MASK, scale=x, enable_gqa=True),
        SCALES,
    ),
}


@pytest.fixture(autouse=True)
def _traces_anew():
    torch._dynamo.reset()


# A number becomes a symbol in the second call if torch.compile decides, in the first call with dynamic=True.
WAYS = {"as it comes": None, "dynamic": True}
DTYPES = torch.float32, torch.float16, torch.bfloat16
# The cases of `make test`, the cheapest of each kind.
QUICK = {
    ("attention, window", "as it comes"),
    ("attention of QuantizedQKV, softmax_scale", "as it comes"),
    ("attention_varlen, max_seqlen", "dynamic"),
    ("attention_decode, num_splits", "dynamic"),
    ("attention_decode, split_size", "as it comes"),
    ("merge_partials, factor", "dynamic"),
    ("flash_attn_func, softcap", "as it comes"),
    ("flash_attn_func, window_size", "as it comes"),
    ("flash_attn_varlen_func, softmax_scale and softcap", "as it comes"),
    ("flash_attn_with_kvcache, cache_seqlens", "dynamic"),
    ("scaled_dot_product_attention, softmax_scale", "as it comes"),
}
# Integers become symbols: three calls need two traces at most.
INTEGERS = {
    "attention, window",
    "attention_varlen, max_seqlen",
    "attention_decode, window",
    "attention_decode, num_splits",
    "attention_decode, split_size",
    "attention_decode of packed pages, max_seqlen",
    "flash_attn_with_kvcache, cache_seqlens",
}
QUICK_OF_SHAPES = {("attention_decode", "dynamic"), ("attention_varlen", "as it comes")}


def cases_of(names, quick):
    """Nightly cases: each name with each way, and a dtype for each. Quick ones make 2 calls, or 3 with integers."""
    assert quick <= set(itertools.product(names, WAYS))
    cases = []
    for (i, name), (j, way) in itertools.product(enumerate(names), enumerate(WAYS)):
        dtype = DTYPES[(i + j) % len(DTYPES)]
        values = name, WAYS[way], dtype
        label = f"{name}-{way}-{str(dtype)[6:]}"
        if (name, way) in quick:
            cases.append(pytest.param(*values, 3 if name in INTEGERS else 2, id=f"{label}-few calls"))
        cases.append(pytest.param(*values, None, id=label, marks=(pytest.mark.slow, pytest.mark.nightly)))
    return cases


def test_quick_cases_have_each_function_number_way_and_dtype():
    every, quick = set(), set()
    for case in cases_of(CALLS, QUICK):
        name, dynamic, dtype, _ = case.values
        found = {re.split(", | of | with | to ", name)[0], name.split(", ")[1], (dynamic, dtype)}
        every |= found
        quick |= set() if case.marks else found
    assert quick == every


@pytest.mark.parametrize(("name", "dynamic", "dtype", "calls"), cases_of(CALLS, QUICK))
def test_other_numbers(name, dynamic, dtype, calls, monkeypatch):
    for tensors in ("Q", "K", "V", "PACKED", "PAGES", "NEW", "ROTARY", "HEADS_FIRST"):
        cast = torch.utils._pytree.tree_map(lambda t: t.to(dtype), globals()[tensors])
        monkeypatch.setattr(sys.modules[__name__], tensors, cast)
    call, values = CALLS[name]
    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=counted)
    for i, value in enumerate(values[:calls]):
        torch.testing.assert_close(compiled(value), call(value))
        if name in INTEGERS and i == 2:
            assert counted.frame_count <= 2


def scale_of(q):
    return q.shape[-1] ** -0.5


OF_SHAPES = {
    "attention": lambda q, k, v: onepass.attention(q, k, v, softmax_scale=scale_of(q)),
    "attention, 1 / sqrt": lambda q, k, v: onepass.attention(q, k, v, softmax_scale=1.0 / math.sqrt(q.shape[-1])),
    "attention, softcap": lambda q, k, v: onepass.attention(q, k, v, softcap=q.shape[1] / 2),
    "attention, softcap of int": lambda q, k, v: onepass.attention(q, k, v, softcap=q.shape[1]),
    "attention, window": lambda q, k, v: onepass.attention(q, k, v, window=(q.shape[1] // 2, None)),
    "attention, precision": lambda q, k, v: onepass.attention(q, k, v, precision="fp8", softmax_scale=scale_of(q)),
    "attention_varlen": lambda q, k, v: onepass.attention_varlen(
        q[0], k[0], v[0], cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS, softmax_scale=scale_of(q)
    ),
    "attention_decode": lambda q, k, v: onepass.attention_decode(
        q, k, v, cache_seqlens=LENGTHS, softmax_scale=scale_of(q)
    ),
    "flash_attn_func": lambda q, k, v: flash_attn.flash_attn_func(q, k, v, softmax_scale=scale_of(q)),
    "flash_attn_with_kvcache": lambda q, k, v: flash_attn.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=LENGTHS, softmax_scale=scale_of(q)
    ),
    "scaled_dot_product_attention": lambda q, k, v: sdpa.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), scale=scale_of(q), enable_gqa=True
    ),
}


@pytest.mark.parametrize(("name", "dynamic", "dtype", "calls"), cases_of(OF_SHAPES, QUICK_OF_SHAPES))
def test_numbers_of_shapes(name, dynamic, dtype, calls):
    function = OF_SHAPES[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen, head_dim in ((9, 8), (13, 16), (11, 8))[:calls]:
        tensors = [torch.randn(2, seqlen, heads, head_dim, dtype=dtype) for heads in (4, 2, 2)]
        torch.testing.assert_close(compiled(*tensors), function(*tensors))


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients(dynamic):
    def gradients(function, scale, cap):
        leaves = [t.detach().requires_grad_() for t in (Q, K, V)]
        return torch.autograd.grad(function(*leaves, scale, cap).square().sum(), leaves)

    def call(q, k, v, scale, cap):
        return onepass.attention(q, k, v, softmax_scale=scale, softcap=cap)

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for scale, cap in ((0.3, 5.0), (0.4, 6.0), (0.5, 7.0)):
        for actual, expected in zip(gradients(compiled, scale, cap), gradients(call, scale, cap), strict=True):
            torch.testing.assert_close(actual, expected)


def test_a_bad_number_is_refused_all_the_same():
    compiled = torch.compile(lambda x: onepass.attention(Q, K, V, softcap=x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(2.0), onepass.attention(Q, K, V, softcap=2.0))
    compiled(3.0)
    for bad in (float("nan"), float("inf"), 0.0, -1.0):
        with pytest.raises(Exception, match=r"softcap: expected a|Observed exception"):
            compiled(bad)


def test_an_answer_of_supports_decides():
    def call(q, k, v):
        if onepass.supports(q, k, v, softmax_scale=0.2):
            return onepass.attention(q, k, v, softmax_scale=0.2)
        return q

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(Q, K, V), onepass.attention(Q, K, V, softmax_scale=0.2))

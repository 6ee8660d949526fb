"""Every refusal of FP8 calls: the error's type and its message, with expected and got."""

import itertools
import re
from contextlib import nullcontext
from dataclasses import replace

import numpy
import pytest
import torch

import onepass
from onepass.ops import quantize
from onepass.validation import fp8

INT32 = torch.int32
E4M3 = torch.float8_e4m3fn


def message_id(value):
    """The name of a case: the start of its message (functions print with addresses, which differ between processes)."""
    return value[:30] if isinstance(value, str) else ""


def tensors(**changes):
    made = {name: torch.randn(2, 70, heads, 8) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    return made | {name: change(made[name]) if callable(change) else change for name, change in changes.items()}


def packed():
    return [torch.randn(70, heads, 8) for heads in (4, 2, 2)]


CU = {"cu_seqlens_q": torch.tensor([0, 10, 70], dtype=INT32), "cu_seqlens_k": torch.tensor([0, 30, 70], dtype=INT32)}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": [1.0]}, TypeError, r"q: expected a torch.Tensor, got list"),
        ({"q": lambda t: t.double()}, TypeError, r"q: expected dtype float32, bfloat16 or float16, got float64"),
        ({"q": lambda t: t.to(E4M3)}, TypeError, r"q: expected dtype float32, bfloat16 or float16, got float8_e4m3fn"),
        ({"k": lambda t: t.half()}, TypeError, r"k: expected dtype float32 like q, got float16"),
        ({"q": lambda t: t[0]}, ValueError, r"q: expected 4 dimensions .* got 3"),
        ({"k": lambda t: t[..., :4]}, ValueError, r"k: expected head_dim 8 like q, got 4"),
        (
            {"granularity": "channel"},
            ValueError,
            r"granularity: expected one of row, block, head, tensor, got 'channel'",
        ),
        ({"granularity": 64}, TypeError, r"granularity: expected one of row, block, head, tensor, got 64"),
        ({"rotate": 1}, TypeError, r"rotate: expected a bool, got 1"),
        ({"center_k": None}, TypeError, r"center_k: expected a bool, got None"),
        ({"center_v": "yes"}, TypeError, r"center_v: expected a bool, got 'yes'"),
        ({"seed": 0.5}, TypeError, r"seed: expected an int, got 0.5"),
        ({"seed": True}, TypeError, r"seed: expected an int, got True"),
        ({"seqused_k": [1, 2]}, TypeError, r"seqused_k: expected an int32 torch.Tensor, got list"),
        ({"seqused_k": torch.tensor([1], dtype=INT32)}, ValueError, r"seqused_k: expected shape \(2,\), one per batch"),
        (CU, ValueError, r"q: expected 3 dimensions \(total_tokens, num_heads, head_dim\), got 4"),
    ],
    ids=message_id,
)
def test_quantize_refuses(changes, error, message):
    with pytest.raises(error, match=message):
        onepass.quantize_fp8(**tensors(**changes))


def test_quantize_wants_both_lengths_of_packed_sequences():
    q, k, v = packed()
    with pytest.raises(TypeError, match=r"cu_seqlens_k: expected an int32 torch.Tensor, got NoneType"):
        onepass.quantize_fp8(q, k, v, cu_seqlens_q=CU["cu_seqlens_q"])
    with pytest.raises(TypeError, match=r"cu_seqlens_q: expected an int32 torch.Tensor, got NoneType"):
        onepass.quantize_fp8(q, k, v, cu_seqlens_k=CU["cu_seqlens_k"])


def stored(**changes):
    made = {name: t.to(E4M3) for name, t in tensors().items()}
    made |= {f"{name}_descale": torch.tensor(1.0) for name in "qkv"}
    return made | {name: change(made[name]) if callable(change) else change for name, change in changes.items()}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": lambda t: t.half()}, TypeError, r"q: expected dtype float8_e4m3fn, got float16"),
        ({"v": lambda t: t.to(torch.float8_e5m2)}, TypeError, r"v: expected dtype float8_e4m3fn, got float8_e5m2"),
        ({"k": lambda t: t[:1], "v": lambda t: t[:1]}, ValueError, r"k: expected batch 2 like q, got 1"),
        ({"q": lambda t: t[:, 0]}, ValueError, r"k: expected 3 dimensions .* got 4"),
        (
            {"dtype": torch.float64},
            TypeError,
            r"dtype: expected float32, bfloat16, float16, the dtype of out, got torch",
        ),
        ({"dtype": "half"}, TypeError, r"dtype: expected .* got 'half'"),
        ({"q_block": 64.0}, TypeError, r"q_block: expected an int or None, got 64.0"),
        ({"kv_block": 0}, ValueError, r"kv_block: expected at least 1, got 0"),
        ({"q_descale": 1.0}, TypeError, r"q_descale: expected a float32 torch.Tensor, got float"),
        ({"k_descale": torch.tensor(1.0).half()}, TypeError, r"k_descale: expected dtype float32, got float16"),
        ({"v_descale": torch.ones((), device="meta")}, ValueError, r"v_descale: expected device cpu like q, got meta"),
        ({"q_descale": torch.ones(1)}, ValueError, r"q_descale: expected shape \(\) or \(2, 4\), got \(1,\)"),
        (
            {"q_descale": torch.ones(2, 4, 2)},
            ValueError,
            r"q_descale: expected shape \(\) or \(2, 4\), got \(2, 4, 2\)",
        ),
        (
            {"k_descale": torch.ones(2, 2, 3), "kv_block": 64},
            ValueError,
            r"k_descale: expected shape \(\) or \(2, 2\) or \(2, 2, 2\) with blocks of 64 rows, got \(2, 2, 3\)",
        ),
        (
            {"score_shift": torch.ones(2, 70, 4)},
            ValueError,
            r"score_shift: expected shape \(2, 4, 70\), got \(2, 70, 4\)",
        ),
        ({"v_mean": torch.ones(2, 8)}, ValueError, r"v_mean: expected shape \(2, 2, 8\), got \(2, 8\)"),
        ({"v_mean": torch.ones(1, 2, 8)}, ValueError, r"v_mean: expected shape \(2, 2, 8\), got \(1, 2, 8\)"),
        ({"v_mean": torch.ones(3, 2, 8)}, ValueError, r"v_mean: expected shape \(2, 2, 8\), got \(3, 2, 8\)"),
        ({"v_mean": torch.ones(2, 2, 8).half()}, TypeError, r"v_mean: expected dtype float32, got float16"),
        ({"score_shift": [1.0]}, TypeError, r"score_shift: expected a float32 torch.Tensor, got list"),
        (
            {"score_shift": torch.ones(2, 4, 70).double()},
            TypeError,
            r"score_shift: expected dtype float32, got float64",
        ),
    ],
    ids=message_id,
)
def test_quantized_tensors_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        onepass.QuantizedQKV(**stored(**changes))


def test_every_tensor_that_requires_a_gradient_is_refused():
    """No gradient flows through rounding; under no_grad none is asked for."""
    made = quantized(center_k=True, center_v=True)
    for name in ("q_descale", "k_descale", "v_descale", "score_shift", "v_mean"):
        asking = replace(made, **{name: getattr(made, name).clone().requires_grad_()})
        with pytest.raises(onepass.UnsupportedError, match=f"{name}: expected no requires_grad in FP8"):
            onepass.attention(asking)
        with torch.no_grad():
            onepass.attention(asking)


KINDS = "q", "k", "v", "keys_last"


@pytest.mark.parametrize("by_sequence", [(), *((kind,) for kind in KINDS), KINDS], ids=str)
def test_offsets_that_dequantize_needs(by_sequence):
    """A tensor needs its offsets if its descales, or its layout, depend on where sequences begin."""
    whole, by_head = (onepass.quantize_fp8(*packed(), **CU, granularity=name) for name in ("tensor", "head"))
    descales = {f"{x}_descale": getattr(by_head, f"{x}_descale") for x in "qkv" if x in by_sequence}
    made = replace(whole, **descales)
    if "keys_last" in by_sequence:
        made = replace(made, v=quantize.keys_last(made.v, CU["cu_seqlens_k"]), v_keys_last=True)
    expected = made.dequantize(**CU)
    needs = {"cu_seqlens_q": "q" in by_sequence, "cu_seqlens_k": bool({*by_sequence} - {"q"})}
    for name, is_needed in needs.items():
        given = CU | {name: None}
        if is_needed:
            with pytest.raises(TypeError, match=f"{name}: expected an int32 torch.Tensor, got NoneType"):
                made.dequantize(**given)
        else:
            assert all(torch.equal(a, b) for a, b in zip(made.dequantize(**given), expected, strict=True))
        for wrong in (torch.zeros(0, dtype=INT32), torch.zeros(1, 3, dtype=INT32)):
            with pytest.raises(ValueError, match=rf"{name}: expected shape \(batch \+ 1,\)"):
                made.dequantize(**(CU | {name: wrong}))
        if is_needed:
            of_three = torch.tensor([0, 10, 30, 70], dtype=INT32)
            found = "[kv]" if name == "cu_seqlens_k" else "q"
            with pytest.raises(ValueError, match=rf"({found}_descale|v): expected shape"):
                made.dequantize(**(CU | {name: of_three}))


def test_tensors_that_are_not_packed_have_no_offsets():
    for name in CU:
        with pytest.raises(ValueError, match=f"{name}: expected None with tensors that are not packed, got a tensor"):
            quantized().dequantize(**{name: CU[name]})


HEADS, TOTAL, BLOCK = 3, 130, 16


@pytest.mark.parametrize("block", [None, BLOCK])
@pytest.mark.parametrize("batch", [None, 1, 2])
def test_shapes_of_descales_of_packed_tensors(batch, block):
    t = torch.zeros(TOTAL, HEADS, 8)
    for shape in [(), (3,), (1, 3, 9), *itertools.product((1, 2, 3), (1, 3, 7, 8, 9, 10, 11))]:
        if block is None:
            is_right = len(shape) == 2 and shape[1] == HEADS and batch in (None, shape[0])
        else:
            is_right = len(shape) == 2 and shape[0] == HEADS and shape[1] >= TOTAL // BLOCK
            is_right = is_right and batch in (None, shape[1] - TOTAL // BLOCK)
        with nullcontext() if is_right or shape == () else pytest.raises(ValueError, match="d: expected shape"):
            fp8._check_descale("d", torch.ones(shape), t, block, batch)


@pytest.mark.parametrize("batch", [None, 1, 2])
def test_shapes_of_packed_values_with_keys_last(batch):
    k = torch.zeros(TOTAL, HEADS, 8)
    for heads, length in itertools.product((1, 3), (64, 128, 150, 192, 200, 256, 320)):
        is_right = heads == HEADS and length % 64 == 0 and length >= 128 and batch in (None, length // 64 - 2)
        with nullcontext() if is_right else pytest.raises(ValueError, match="v: expected shape"):
            assert fp8._v_stand_in(k, torch.zeros(heads, 5, length), batch).shape == (TOTAL, HEADS, 5)


def quantized(**options):
    return onepass.quantize_fp8(**tensors(), **options)


CALLS = [
    (lambda: quantized(), {"k": torch.ones(1)}, TypeError, r"k: expected None with a QuantizedQKV, got Tensor"),
    (lambda: quantized(), {"v": 3}, TypeError, r"v: expected None with a QuantizedQKV, got int"),
    (lambda: quantized(), {"precision": "fp8"}, TypeError, r"precision: expected None with a QuantizedQKV, got str"),
    (lambda: quantized(), {"causal": 1}, TypeError, r"causal: expected a bool, got 1"),
    (
        lambda: quantized(center_k=True),
        {"softcap": 3.0},
        ValueError,
        r"softcap: expected None where the mean of k was subtracted \(center_k=True\): .* got 3.0",
    ),
    (
        lambda: quantized(),
        {"sinks": torch.zeros(4, requires_grad=True)},
        onepass.UnsupportedError,
        r"sinks: expected no requires_grad in FP8.* precision='fp8'",
    ),
    (lambda: quantized(), {"backend": "sm90"}, onepass.UnsupportedError, r"backend sm90: expected tensors on cuda"),
    (lambda: quantized(), {"backend": "sm91"}, ValueError, r"backend: expected one of .*, got 'sm91'"),
    (
        lambda: quantized(),
        {"seqused_k": torch.tensor([71, 3], dtype=INT32)},
        ValueError,
        r"seqused_k\[0\]: expected 0 to 70, the keys of the sequence, got 71",
    ),
    (
        lambda: onepass.quantize_fp8(*packed(), **CU),
        {},
        ValueError,
        r"q: expected 4 dimensions \(batch, seqlen, num_heads, head_dim\), got 3",
    ),
]


@pytest.mark.parametrize(("make", "options", "error", "message"), CALLS, ids=message_id)
def test_calls_are_refused_and_supports_says_so(make, options, error, message):
    with pytest.raises(error, match=message):
        onepass.attention(make(), **options)
    if "seqused_k" in options:  # the call reads it, supports does not
        return
    support = onepass.supports(make(), **options)
    assert not support.ok
    assert re.search(message, support.reason)


def test_packed_calls_are_refused():
    one = dict.fromkeys(CU, torch.tensor([0, 70], dtype=INT32))
    by_block = onepass.quantize_fp8(*packed(), **CU, center_v=True)
    with pytest.raises(
        ValueError, match=r"q_descale: expected shape \(\) or \(4, 2\) with blocks of 64 rows, got \(4, 3"
    ):
        onepass.attention_varlen(by_block, **one)
    by_head = onepass.quantize_fp8(*packed(), **CU, granularity="head")
    with pytest.raises(ValueError, match=r"q_descale: expected shape \(\) or \(1, 4\), got \(2, 4\)"):
        onepass.attention_varlen(by_head, **one)
    with pytest.raises(ValueError, match=r"q_descale: expected shape \(\) or \(batch, 4\), got \(2, 3\)"):
        replace(by_head, q_descale=torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"q: expected 3 dimensions .* got 4"):
        onepass.attention_varlen(quantized(), **CU)
    with pytest.raises(ValueError, match=r"max_seqlen_q: expected at least 0, got -1"):
        onepass.attention_varlen(by_head, **CU, max_seqlen_q=-1)
    whole = onepass.quantize_fp8(*packed(), **CU, granularity="tensor", center_v=True)
    with pytest.raises(ValueError, match=r"v_mean: expected batch 1 like cu_seqlens_q, got 2"):
        onepass.attention_varlen(whole, **one)


def test_plain_float8_tensors_are_told_what_to_become():
    q, k, v = (t.to(E4M3) for t in tensors().values())
    with pytest.raises(TypeError, match=r"got float8_e4m3fn \(FP8 tensors come with their scales, as a onepass.Quant"):
        onepass.attention(q, k, v)


@pytest.mark.parametrize("packed_too", [False, True])
def test_precision_is_refused(packed_too):
    def call(precision, **changes):
        if not packed_too:
            return onepass.attention(**tensors(**changes), precision=precision)
        q, k, v = (changes.get("all", lambda t: t)(t) for t in packed())
        return onepass.attention_varlen(q, k, v, **CU, precision=precision)

    with pytest.raises(ValueError, match=r"precision: expected 'fp8', got 'fp4'"):
        call("fp4")
    with pytest.raises(TypeError, match=r"precision: expected 'fp8', got 8"):
        call(8)
    doubles = dict.fromkeys(("all",) if packed_too else "qkv", torch.Tensor.double)
    with pytest.raises(
        TypeError, match=r"q: expected dtype float32, bfloat16 or float16 with precision='fp8', got float64"
    ):
        call("fp8", **doubles)
    assert not onepass.supports(**tensors(), precision="fp4").ok
    assert onepass.supports(**tensors(), precision="fp8").ok


def test_precision_does_not_take_the_short_way_of_another_call():
    q, k, v = tensors().values()
    exact = onepass.attention(q, k, v)
    assert not torch.equal(onepass.attention(q, k, v, precision="fp8"), exact)
    assert torch.equal(onepass.attention(q, k, v), exact)


def test_no_derivative_but_backward():
    q, k, v = tensors().values()
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: onepass.attention(q, k, v, precision="fp8"), (q,), (q,))
    with pytest.raises(NotImplementedError, match=r"cannot run under torch.vmap"):
        torch.vmap(lambda q: onepass.attention(q, k, v, precision="fp8"))(q[None])


def test_the_largest_block_is_taken():
    q, k, v = (torch.zeros(1, 5, 1, 16).to(torch.float8_e4m3fn) for _ in range(3))
    scale, largest = torch.ones(1, 1, 1), 2**31 - 1
    quantized = onepass.QuantizedQKV(q, k, v, scale, scale, scale, q_block=largest, kv_block=largest)
    assert quantized.quantization.q_block == quantized.quantization.kv_block == largest


def test_blocks_of_packed_queries_and_keys_may_differ():
    q, k, v = (torch.randn(70, 2, 16).bfloat16() for _ in range(3))
    offsets = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 40, 70], dtype=torch.int32))
    by_row, by_block = (onepass.quantize_fp8(q, k, v, granularity=name, **offsets) for name in ("row", "block"))
    mixed = replace(by_block, q=by_row.q, q_descale=by_row.q_descale, q_block=by_row.q_block)
    alone = [onepass.attention_varlen(quantized, **offsets) for quantized in (mixed, by_row)]
    # k and v have been rounded to e4m3 by different scales, a step of which is 1/8
    torch.testing.assert_close(*alone, rtol=2**-3, atol=2**-3)


@pytest.mark.parametrize("granularity", ["row", "block", "head", "tensor"])
@pytest.mark.parametrize("rows", [0, 3, 70])
def test_packed_tensors_of_no_sequence(rows, granularity):
    q, k, v = (torch.randn(rows, 2, 16) for _ in range(3))
    offsets = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.zeros(1, dtype=torch.int32))
    quantized = onepass.quantize_fp8(q, k, v, granularity=granularity, **offsets)
    assert [t.shape for t in quantized.dequantize(**offsets)] == [(rows, 2, 16)] * 3
    out, lse = onepass.attention_varlen(quantized, **offsets, return_lse=True)
    assert torch.equal(out, torch.zeros(rows, 2, 16, dtype=out.dtype))
    assert torch.equal(lse, torch.full((2, rows), -torch.inf))


def test_numbers_of_numpy_become_those_of_python():
    """They are in keys of calls and of kernels, whose text tells 64 from np.int64(64)."""
    q = torch.zeros(1, 64, 2, 16).half()
    given = {"q_block": numpy.int64(64), "kv_block": numpy.int32(64), "v_keys_last": numpy.bool_(False)}
    quantized = replace(onepass.quantize_fp8(q, q, q), **given)
    assert [(type(value), value) for value in (quantized.q_block, quantized.kv_block)] == [(int, 64)] * 2
    assert quantized.v_keys_last is False

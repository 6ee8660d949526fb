"""Options as scalars of numpy, as other numbers that are neither float nor int, and beyond 64 bits; and `Support`."""

import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from test_refusals import cache, dense, descales, lengths, new_keys, packed, packed_pages, pages, rows

import onepass
from onepass import reference
from onepass.compat import flash_attn, sdpa
from onepass.validation import scalars


@pytest.fixture(autouse=True)
def _same_data():
    torch.manual_seed(0)


def as_numpy(value):
    kinds = {bool: np.bool_, int: np.int64, float: np.float64}
    if isinstance(value, tuple):
        return tuple(as_numpy(v) for v in value)
    return kinds[type(value)](value) if type(value) in kinds else value


def flash_kv(**options):
    caches = rows(2, 6, 2, 16), rows(2, 6, 2, 16)
    return flash_attn.flash_attn_with_kvcache(rows(2, 1, 4, 16), *caches, **options)


# (function, its tensors, its options)
CALLS = {
    "attention": (
        onepass.attention,
        dense,
        {"causal": True, "window": (3, None), "softcap": 2.0, "softmax_scale": 0.25, "deterministic": True},
    ),
    "attention, return_lse": (onepass.attention, dense, {"return_lse": True, "causal": False, "window": (1, 2)}),
    "attention, precision": (onepass.attention, dense, {"precision": "fp8", "softmax_scale": 0.5, "causal": True}),
    "attention_varlen": (
        onepass.attention_varlen,
        packed,
        {"causal": True, "window": (1, 0), "softcap": 2.0, "softmax_scale": 0.25, "max_seqlen_q": 4, "max_seqlen_k": 4},
    ),
    "attention_decode": (
        onepass.attention_decode,
        cache,
        {"causal": True, "window": (2, 1), "softcap": 3.0, "softmax_scale": 0.5, "num_splits": 2, "check_values": True},
    ),
    "attention_decode, split_size": (onepass.attention_decode, pages, {"split_size": 64, "return_lse": True}),
    "attention_decode, max_seqlen_q": (onepass.attention_decode, packed_pages, {"max_seqlen_q": 3}),
    "attention_decode, rotary": (onepass.attention_decode, new_keys, {"rotary_interleaved": True}),
    "attention_decode, kv_block": (onepass.attention_decode, descales, {"kv_block": 4}),
    "quantize_fp8": (
        lambda **given: onepass.attention(onepass.quantize_fp8(**given)),
        dense,
        {"seed": 3, "rotate": True, "center_k": True, "center_v": False},
    ),
    "split_workspace_bytes": (
        lambda **given: torch.tensor(onepass.split_workspace_bytes(**given)),
        dict,
        {"num_splits": 3, "batch": 2, "seqlen_q": 1, "num_heads_q": 4, "head_dim_v": 16},
    ),
    "flash_attn_func": (
        flash_attn.flash_attn_func,
        dense,
        {"causal": True, "window_size": (2, -1), "softcap": 0.0, "softmax_scale": 0.5, "dropout_p": 0.0},
    ),
    "flash_attn_func, return_attn_probs": (
        lambda **given: flash_attn.flash_attn_func(**given)[:2],
        dense,
        {"return_attn_probs": True, "window_size": (-1, 1), "deterministic": True},
    ),
    "flash_attn_with_kvcache": (flash_kv, dict, {"cache_seqlens": 4, "num_splits": 2, "return_softmax_lse": True}),
    "scaled_dot_product_attention": (
        lambda **given: sdpa.scaled_dot_product_attention(rows(2, 4, 6, 16), *[rows(2, 2, 6, 16)] * 2, **given),
        dict,
        {"is_causal": True, "scale": 0.5, "enable_gqa": True, "dropout_p": 0.0},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_numbers_of_numpy_are_taken(name):
    """Each alone and all together, in a first call and a repeated one, they give the results of Python's numbers."""
    function, make, options = CALLS[name]
    torch.manual_seed(0)
    given = make()

    def run(options):
        torch.manual_seed(1)
        fresh = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in given.items()}
        return function(**(fresh | options))

    expected = run(options)
    for some in ({option: as_numpy(options[option])} for option in options):
        torch.testing.assert_close(run(options | some), expected, rtol=0, atol=0)
    for _ in range(2):
        result = run({option: as_numpy(value) for option, value in options.items()})
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_a_quantized_call_keeps_numbers_of_python():
    made = onepass.quantize_fp8(**dense(), seed=np.int64(5))
    assert type(made.rotation) is int
    fields = {name: getattr(made, name) for name in ("q", "k", "v", "q_descale", "k_descale", "v_descale")}
    again = onepass.QuantizedQKV(**fields, q_block=np.int32(64), kv_block=np.int64(64), v_keys_last=np.bool_(False))
    assert (type(again.q_block), type(again.kv_block), again.v_keys_last) == (int, int, False)
    torch.testing.assert_close(onepass.attention(again), onepass.attention(made).to(again.dtype))


@pytest.mark.parametrize("scale", [np.float16(0.25), np.float32(0.25), np.longdouble(0.25), Fraction(1, 4)])
def test_other_reals(scale):
    given = dense()
    assert torch.equal(onepass.attention(**given, softmax_scale=scale), onepass.attention(**given, softmax_scale=0.25))


def test_numbers_go_on_as_those_of_python():
    assert type(scalars.check_int("x", np.int8(3))) is int
    assert type(scalars.check_real("x", np.float32(3))) is float
    assert type(scalars.check_real("x", 3)) is float
    assert scalars.check_flag("x", np.bool_(True)) is True
    assert scalars.check_flag("x", None, allow_none=True) is False


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (scalars.check_int, True),
        (scalars.check_int, np.bool_(True)),
        (scalars.check_int, 1.0),
        (scalars.check_int, torch.tensor(1)),
        (scalars.check_int, np.ones(1, dtype=np.int64)),
        (scalars.check_real, np.bool_(True)),
        (scalars.check_real, torch.tensor(1.0)),
        (scalars.check_real, np.ones(1)),
        (scalars.check_real, 1j),
        (scalars.check_flag, 1),
        (scalars.check_flag, np.int64(1)),
        (scalars.check_flag, torch.tensor(True)),
    ],
)
def test_what_is_no_number_of_its_kind(check, value):
    with pytest.raises(TypeError, match="x: expected a"):
        check("x", value)


def test_numpy_is_not_imported():
    code = """
import sys
sys.modules["numpy"] = None  # an import of it fails
import torch, onepass
q = torch.ones(1, 3, 1, 8)
onepass.attention(q, q, q, causal=True, window=(1, None), softmax_scale=0.5)
try:
    onepass.attention(q, q, q, causal="x")
except TypeError as error:
    assert "causal: expected a bool" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


WIDE = [2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**70]


@pytest.mark.parametrize("size", WIDE)
def test_windows_wider_than_any_sequence_hide_nothing(size):
    given = {name: t.double() for name, t in dense().items()}
    for window, narrow in (((size, None), None), ((size, size), None), ((1, size), (1, None)), ((size, 0), (None, 0))):
        out = onepass.attention(**given, window=window)
        torch.testing.assert_close(out, reference.attention(*given.values(), window=narrow).out, rtol=1e-12, atol=1e-12)
    call = cache()
    wide, none = (onepass.attention_decode(**call, window=window) for window in ((size, size), None))
    assert torch.equal(wide, none)
    call = packed()
    wide, none = (onepass.attention_varlen(**call, window=window) for window in ((size, None), None))
    assert torch.equal(wide, none)


def test_gradients_under_a_wide_window():
    leaves = [t.requires_grad_() for t in dense().values()]
    wide, full = (
        torch.autograd.grad(onepass.attention(*leaves, window=window).sum(), leaves)
        for window in ((2**70, 2**70), None)
    )
    for a, b in zip(wide, full, strict=True):
        assert torch.equal(a, b)


def test_a_support_is_true_where_the_call_would_run():
    given = dense()
    yes, no = onepass.supports(**given), onepass.supports(**given, softcap=-1.0)
    assert yes
    assert not no
    assert (bool(yes), bool(no)) == (yes.ok, no.ok)
    ok, backend, reason = yes
    assert yes == (ok, backend, reason) == onepass.Support(True, "cpu", reason)
    assert len(yes) == 3
    assert no != yes


def test_one_call_to_come_needs_no_list():
    call = dict.fromkeys("qkv", (2, 6, 4, 16)) | {"dtype": torch.bfloat16}
    assert onepass.warmup(call, backend="tiled") == onepass.warmup([call], backend="tiled") == []


SHAPES = {
    "sinks": (4,),
    "seqused_k": (2,),
    "seqstart_k": (2,),
    "key_ranges": (2, 1, 6, 2),
    "q_positions": (1, 6),
    "alibi_slopes": (4,),
    "bias": (1, 4, 6, 6),
    "query_ranges": (2, 1, 6, 2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_tensor_of_a_call_to_come_may_be_a_shape(name):
    """Its dtype is the one that a call would expect: warmup refuses a shape that the call would refuse."""
    call = dict.fromkeys("qkv", (2, 6, 4, 16)) | {"dtype": torch.bfloat16}
    assert onepass.warmup(call | {name: SHAPES[name]}, backend="tiled") == []
    with pytest.raises(ValueError, match=f"{name}: expected"):
        onepass.warmup(call | {name: (7, *SHAPES[name][1:])}, backend="tiled")


def test_first_arguments_of_a_decode_call():
    for missing in ("q", "k_cache", "v_cache", "cache_seqlens"):
        for _ in range(2):  # even if an equal call has run before
            with pytest.raises(TypeError, match=rf"^{missing}: expected a.* got NoneType"):
                onepass.attention_decode(**(cache() | {missing: None}))
            onepass.attention_decode(**cache())
    with pytest.raises(TypeError, match=r"sinks: expected a torch\.Tensor, got int"):
        onepass.attention_decode(**cache(), sinks=1)
    with pytest.raises(TypeError, match=r"q: expected a torch\.Tensor, got NoneType"):
        flash_attn.flash_attn_with_kvcache(None, *[rows(2, 6, 2, 16)] * 2, cache_seqlens=lengths(3, 5))


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def dense_shapes(keys=6, queries=4, dtype=torch.float32, **options):
    k = meta(2, keys, 2, 8, dtype=dtype)
    return {"q": meta(2, queries, 4, 8, dtype=dtype), "k": k, "v": k} | options


def cache_shapes(keys=6, pages=None, new=0, **options):
    """A cache of `keys` positions, or of (pages, page_size, max_pages)."""
    given = {"q": meta(2, 3, 4, 8), "cache_seqlens": meta(2, dtype=torch.int32)} | options
    if pages is not None:
        given["page_table"] = meta(2, pages[2], dtype=torch.int32)
    k = meta(*((2, keys) if pages is None else pages[:2]), 2, 8)
    new_rows = {"k_new": meta(2, new, 2, 8), "v_new": meta(2, new, 2, 8)} if new else {}
    return {"k_cache": k, "v_cache": k} | new_rows | given


def packed_shapes(keys=6, **options):
    offsets = {name: meta(3, dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return {"q": meta(4, 4, 8), "k": meta(keys, 2, 8), "v": meta(keys, 2, 8)} | offsets | options


def tables(rows=9, columns=4, dtype=torch.float32):
    return {"rotary_cos": meta(rows, columns), "rotary_sin": meta(rows, columns, dtype=dtype)}


def in_16_bits(sin_dtype):
    rows, k = {"q": meta(2, 3, 4, 8).half()}, meta(2, 6, 2, 8).half()
    return rows | {"k_cache": k, "v_cache": k, "rotary_cos": meta(9, 4), "rotary_sin": meta(9, 4, dtype=sin_dtype)}


FLOAT64 = {"dtype": torch.float64}
ROWS = {"rotary_positions_k": meta(2, 3, dtype=torch.int32)}
# a call by its shapes, arguments that it takes, and arguments that it refuses
EDGES = [
    (dense_shapes, {"softmax_scale": 1e36}, {"softmax_scale": 1.01e36}),
    (dense_shapes, {"softmax_scale": -1e36}, {"softmax_scale": -1.01e36}),
    (dense_shapes, FLOAT64 | {"softmax_scale": 1e300}, FLOAT64 | {"softmax_scale": 1.01e300}),
    (dense_shapes, {"softcap": 1e36}, {"softcap": 1.01e36}),
    (dense_shapes, {"softcap": 1e-36}, {"softcap": 0.99e-36}),
    (dense_shapes, FLOAT64 | {"softcap": 1e-300}, FLOAT64 | {"softcap": 0.99e-300}),
    (dense_shapes, {"softmax_scale": 1e26, "softcap": 1.1e-10}, {"softmax_scale": 1e26, "softcap": 0.9e-10}),
    (dense_shapes, {"softmax_scale": -1e26, "softcap": 1.1e-10}, {"softmax_scale": -1e26, "softcap": 0.9e-10}),
    (dense_shapes, {"dropout_p": 0.0}, {"dropout_p": -1e-9}),
    (dense_shapes, {"dropout_p": 0.999}, {"dropout_p": 1.0}),
    (dense_shapes, {"bias": meta(1, 1, 1, 1)}, {"bias": meta(1, 1, 1, 0)}),
    (dense_shapes, {"bias": meta(1, 1, 4, 6)}, {"bias": meta(1, 1, 4, 7)}),
    (dense_shapes, {"bias": meta(2, 4, 1, 6)}, {"bias": meta(2, 2, 1, 6)}),
    (
        dense_shapes,
        {"queries": 0, "q_positions": meta(1, 0, dtype=torch.int32), "bias": meta(1, 1, 0, 6)},
        {"q_positions": meta(1, 4, dtype=torch.int32), "bias": meta(1, 1, 0, 6)},
    ),
    (packed_shapes, {"bias": meta(1, 1, 1)}, {"bias": meta(1, 1, 0)}),
    (packed_shapes, {"keys": 0, "bias": meta(1, 1, 0)}, {"bias": meta(1, 1, 0)}),
    (packed_shapes, {"max_seqlen_k": meta(1).long()}, {"max_seqlen_k": meta(1)}),
    (packed_shapes, {"max_seqlen_k": meta(1).bool()}, {"max_seqlen_k": meta(1, dtype=torch.complex64)}),
    (packed_shapes, {"max_seqlen_q": 0}, {"max_seqlen_q": -1}),
    (cache_shapes, {"num_splits": 256}, {"num_splits": 257}),
    (cache_shapes, {"num_splits": 1}, {"num_splits": 0}),
    (cache_shapes, {"split_size": 64}, {"split_size": 0}),
    (cache_shapes, {"split_size": 64}, {"split_size": -64}),
    (cache_shapes, {"keys": 64 * 65535, "split_size": 64}, {"keys": 64 * 65535 + 1, "split_size": 64}),
    (cache_shapes, {"split_size": 2**31 - 64}, {"split_size": 2**31}),
    (cache_shapes, {"new": 6}, {"new": 7}),
    (cache_shapes, {"pages": (3, 4, 2), "new": 8}, {"pages": (3, 4, 2), "new": 9}),
    (cache_shapes, {"pages": (0, 4, 0)}, {"pages": (0, 4, 1)}),
    (cache_shapes, {"pages": (3, 1, 1)}, {"pages": (3, 0, 1)}),
    (cache_shapes, {"bias": meta(1, 1, 1, 6)}, {"bias": meta(1, 1, 1, 5)}),
    (cache_shapes, {"pages": (3, 4, 2), "bias": meta(1, 1, 1, 8)}, {"pages": (3, 4, 2), "bias": meta(1, 1, 1, 12)}),
    (cache_shapes, tables(1), tables(0)),
    (cache_shapes, tables(columns=4), tables(columns=5)),
    (cache_shapes, tables(columns=1), tables(columns=0)),
    (cache_shapes, tables(), tables(dtype=torch.float64)),
    (cache_shapes, in_16_bits(torch.float32), in_16_bits(torch.float16)),
    (cache_shapes, tables() | ROWS | {"new": 3}, tables() | {"rotary_positions_k": meta(2, 0, dtype=torch.int32)}),
    (cache_shapes, tables() | ROWS | {"new": 3}, tables() | ROWS | {"new": 2}),
]


@pytest.mark.parametrize(("call", "taken", "refused"), EDGES)
def test_the_last_shape_or_number_that_is_accepted_and_the_first_that_is_not(call, taken, refused):
    """On the meta device a call has shapes and options alone."""
    support = onepass.supports(**call(**taken))
    assert support.ok, support.reason
    support = onepass.supports(**call(**refused))
    assert not support.ok
    assert any(support.reason.startswith(f"{name}: expected") for name in call(**refused)), support.reason


def test_blocks_that_fit_into_an_argument_of_a_kernel():
    assert scalars.check_block("kv_block", None) is None
    assert scalars.check_block("kv_block", scalars.LARGEST_BLOCK) == scalars.LARGEST_BLOCK < 2**31
    for block, expected in ((scalars.LARGEST_BLOCK + 1, "at most"), (0, "at least 1")):
        with pytest.raises(ValueError, match=f"kv_block: expected {expected}"):
            scalars.check_block("kv_block", block)

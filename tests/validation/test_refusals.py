"""Every parameter of every public function, given unsuitable values: the call works, or refuses them with a message.

A refusal is a TypeError, a ValueError, a BeyondPagesError or an UnsupportedError, raised by onepass itself, whose
message names the parameter and says what was expected and what was given.
"""

import functools
import inspect
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import onepass
from onepass.compat import flash_attn, flash_attn_3, flash_attn_4, sdpa
from onepass.errors import BeyondPagesError

INT32 = torch.int32
E4M3 = torch.float8_e4m3fn
PACKAGE = f"{Path(onepass.__file__).parent}{os.sep}"


def nested(layout):
    return torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=layout)


WRONG = {
    "None": lambda: None,
    "1": lambda: 1,
    "-1": lambda: -1,
    "2**70": lambda: 2**70,
    "10**400": lambda: 10**400,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1j": lambda: 1j,
    "True": lambda: True,
    "'x'": lambda: "x",
    "[]": list,
    "()": lambda: (),
    "{}": dict,
    "{1: 2}": lambda: {1: 2},
    "object": object,
    "type": lambda: int,
    "nested tensor": lambda: nested(torch.strided),
    "jagged tensor": lambda: nested(torch.jagged),
    "sparse tensor": lambda: torch.eye(3).to_sparse(),
    "sparse int32 tensor": lambda: torch.ones(2, dtype=INT32).to_sparse(),
    "bool tensor": lambda: torch.ones(3, dtype=torch.bool),
    "complex tensor": lambda: torch.ones(3, dtype=torch.complex64),
    "number as a tensor": lambda: torch.tensor(1.5),
    "integer as a tensor": lambda: torch.tensor(1),
    "empty tensor": lambda: torch.empty(0),
    "int32 tensor": lambda: torch.ones(7, dtype=INT32),
    "tensor of 5 dimensions": lambda: torch.ones(1, 1, 1, 1, 1),
    "meta tensor": lambda: torch.ones(3, device="meta"),
    "array": lambda: np.ones(3),
    "np.int64": lambda: np.int64(1),
    "np.float32": lambda: np.float32(0.5),
    "np.float64": lambda: np.float64(0.5),
    "np.bool_": lambda: np.bool_(True),
    "np.str_": lambda: np.str_("y"),
    "np.datetime64": lambda: np.datetime64("2020-01-01"),
    "np.longdouble": lambda: np.longdouble(0.5),
}


def lengths(*values):
    return torch.tensor(values, dtype=INT32)


def rows(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def dense():
    return {"q": rows(2, 6, 4, 16), "k": rows(2, 6, 2, 16), "v": rows(2, 6, 2, 16)}


def packed():
    return {"q": rows(6, 4, 16), "k": rows(6, 2, 16), "v": rows(6, 2, 16)} | offsets()


def offsets():
    return {"cu_seqlens_q": lengths(0, 2, 6), "cu_seqlens_k": lengths(0, 2, 6)}


def cache(dtype=torch.float32):
    caches = {"k_cache": rows(2, 6, 2, 16, dtype=dtype), "v_cache": rows(2, 6, 2, 16, dtype=dtype)}
    return {"q": rows(2, 1, 4, 16)} | caches | {"cache_seqlens": lengths(3, 5)}


def new_keys():
    tables = {"rotary_cos": torch.ones(8, 4), "rotary_sin": torch.zeros(8, 4)}
    return cache() | {"k_new": rows(2, 1, 2, 16), "v_new": rows(2, 1, 2, 16)} | tables


def descales():
    ones = {"k_descale": torch.ones(2, 2, 2), "v_descale": torch.ones(2, 2, 2)}
    return cache(E4M3) | ones | {"kv_block": 4}


def pages():
    return cache() | {"page_table": lengths(0, 1)[:, None]}


def packed_pages():
    return pages() | {"q": rows(3, 4, 16), "cu_seqlens_q": lengths(0, 2, 3), "max_seqlen_q": 2}


def quantized():
    return {"q": onepass.quantize_fp8(*dense().values())}


def quantized_packed():
    return {"q": onepass.quantize_fp8(**packed())} | offsets()


def shapes():
    return {"q": (2, 6, 4, 16), "k": (2, 6, 2, 16), "v": (2, 6, 2, 16), "dtype": torch.bfloat16}


def shapes_of_cache():
    caches = dict.fromkeys(("k_cache", "v_cache"), (2, 6, 2, 16))
    return {"q": (2, 1, 4, 16), **caches, "cache_seqlens": (2,), "dtype": torch.bfloat16, "cache_dtype": E4M3}


def warmed(**call):
    return onepass.warmup([call], backend="tiled")


def dequantized(**arguments):
    return onepass.quantize_fp8(**packed()).dequantize(**arguments)


def fields_of_quantized():
    made = onepass.quantize_fp8(*dense().values(), center_k=True, center_v=True)
    return {name: getattr(made, name) for name in inspect.signature(onepass.QuantizedQKV).parameters}


def flash_packed():
    return packed() | {"max_seqlen_q": 4, "max_seqlen_k": 4}


def flash_pages():
    paged = {"k": rows(2, 6, 2, 16), "v": rows(2, 6, 2, 16), "block_table": lengths(0, 1)[:, None]}
    return flash_packed() | paged


def flash_cache(**more):
    return {"q": rows(2, 1, 4, 16), "k_cache": rows(2, 6, 2, 16), "v_cache": rows(2, 6, 2, 16)} | more


def flash_cache_e4m3():
    ones = dict.fromkeys(("q_descale", "k_descale", "v_descale"), torch.ones(2, 2))
    return {name: t.to(E4M3) for name, t in flash_cache().items()} | ones


def flash_new_keys(**more):
    turns = {"rotary_cos": torch.ones(8, 4), "rotary_sin": torch.zeros(8, 4)}
    return flash_cache(k=rows(2, 1, 2, 16), v=rows(2, 1, 2, 16), cache_seqlens=lengths(3, 5), **turns, **more)


def flash_packed_new_keys():
    packed_rows = {"q": rows(3, 4, 16), "k": rows(4, 2, 16), "v": rows(4, 2, 16)}
    cut = {"cu_seqlens_q": lengths(0, 2, 3), "cu_seqlens_k_new": lengths(0, 1, 4), "max_seqlen_q": 2}
    pages = {"page_table": lengths(0, 1)[:, None], "cache_seqlens": lengths(3, 3), "rotary_seqlens": lengths(1, 2)}
    return flash_new_keys() | packed_rows | cut | pages


def private_forward():
    options = {"dropout_p": 0.1, "softmax_scale": 0.5, "causal": True, "softcap": 0.0}
    window = {"window_size_left": -1, "window_size_right": -1}
    return options | window | {"alibi_slopes": torch.ones(4), "return_softmax": True}


def private_backward(**lengths_of_sequences):
    """Arguments of a backward of flash-attn 2 without its tensors."""
    options = private_forward() | {"dropout_p": 0.1, "deterministic": False, "rng_state": torch.tensor([1, 2])}
    del options["return_softmax"]
    return options | lengths_of_sequences


def results(tensors, out_name="out", dout_name="dout", lse_name="softmax_lse"):
    """The results of a forward beside its tensors: out, its gradient, lse, and where gradients go."""
    q = tensors["q"]
    found = {out_name: q.clone(), dout_name: q.clone(), lse_name: rows(*q.shape[:-3], q.shape[-2], q.shape[-3])}
    return tensors | found | {f"d{name}": torch.empty_like(tensors[name]) for name in "qkv"}


def heads_first():
    return {"query": rows(2, 4, 6, 16), "key": rows(2, 4, 6, 16), "value": rows(2, 4, 6, 16)}


# name -> (function, arguments of a call that works)
CALLS = {
    "attention": (onepass.attention, dense),
    "attention of QuantizedQKV": (onepass.attention, quantized),
    "attention in fp8": (onepass.attention, lambda: dense() | {"precision": "fp8"}),
    "attention_varlen": (onepass.attention_varlen, packed),
    "attention_varlen of QuantizedQKV": (onepass.attention_varlen, quantized_packed),
    "attention_decode": (onepass.attention_decode, cache),
    "attention_decode with new keys": (onepass.attention_decode, new_keys),
    "attention_decode with descales": (onepass.attention_decode, descales),
    "attention_decode in pages": (onepass.attention_decode, pages),
    "attention_decode of packed queries": (onepass.attention_decode, packed_pages),
    "merge_partials": (onepass.merge_partials, lambda: {"outs": [rows(2, 6, 4, 8)] * 2, "lses": [rows(2, 4, 6)] * 2}),
    "quantize_fp8": (onepass.quantize_fp8, dense),
    "quantize_fp8 of packed": (onepass.quantize_fp8, packed),
    "QuantizedQKV": (onepass.QuantizedQKV, fields_of_quantized),
    "dequantize": (dequantized, offsets),
    "warmup": (onepass.warmup, lambda: {"calls": [shapes()], "backend": "tiled"}),
    "warmup's call": (warmed, shapes),
    "warmup's call of attention_decode": (warmed, shapes_of_cache),
    "split_workspace_bytes": (
        onepass.split_workspace_bytes,
        lambda: {"num_splits": 2, "batch": 2, "seqlen_q": 1, "num_heads_q": 4, "head_dim_v": 16},
    ),
    "flash_attn_func": (flash_attn.flash_attn_func, dense),
    "flash_attn_kvpacked_func": (
        flash_attn.flash_attn_kvpacked_func,
        lambda: {"q": rows(2, 6, 4, 16), "kv": rows(2, 6, 2, 2, 16)},
    ),
    "flash_attn_qkvpacked_func": (flash_attn.flash_attn_qkvpacked_func, lambda: {"qkv": rows(2, 6, 3, 2, 16)}),
    "flash_attn_varlen_func": (flash_attn.flash_attn_varlen_func, flash_packed),
    "flash_attn_varlen_func in pages": (flash_attn.flash_attn_varlen_func, flash_pages),
    "flash_attn_varlen_kvpacked_func": (
        flash_attn.flash_attn_varlen_kvpacked_func,
        lambda: {"q": rows(6, 4, 16), "kv": rows(6, 2, 2, 16)} | offsets() | {"max_seqlen_q": 4, "max_seqlen_k": 4},
    ),
    "flash_attn_varlen_qkvpacked_func": (
        flash_attn.flash_attn_varlen_qkvpacked_func,
        lambda: {"qkv": rows(6, 3, 2, 16), "cu_seqlens": lengths(0, 2, 6), "max_seqlen": 4},
    ),
    "flash_attn_with_kvcache": (flash_attn.flash_attn_with_kvcache, flash_cache),
    "flash_attn_with_kvcache with new keys": (
        flash_attn.flash_attn_with_kvcache,
        lambda: flash_cache(
            k=rows(2, 1, 2, 16),
            v=rows(2, 1, 2, 16),
            cache_seqlens=lengths(3, 5),
            rotary_cos=torch.ones(8, 4),
            rotary_sin=torch.zeros(8, 4),
        ),
    ),
    "flash_attn_with_kvcache in pages": (
        flash_attn.flash_attn_with_kvcache,
        lambda: flash_cache(block_table=lengths(0, 1)[:, None], cache_seqlens=lengths(3, 5)),
    ),
    "flash_attn_with_kvcache of entries": (
        flash_attn.flash_attn_with_kvcache,
        lambda: flash_cache(cache_batch_idx=lengths(1, 0), cache_seqlens=4),
    ),
    "_flash_attn_forward": (flash_attn._flash_attn_forward, lambda: dense() | private_forward()),
    "_flash_attn_varlen_forward": (
        flash_attn._flash_attn_varlen_forward,
        lambda: flash_packed() | private_forward() | {"leftpad_k": lengths(1, 0), "seqused_k": lengths(2, 3)},
    ),
    "_flash_attn_backward": (flash_attn._flash_attn_backward, lambda: results(dense()) | private_backward()),
    "_flash_attn_varlen_backward": (
        flash_attn._flash_attn_varlen_backward,
        lambda: results(packed()) | private_backward(max_seqlen_q=4, max_seqlen_k=4),
    ),
    "flash_attn_3.flash_attn_func": (flash_attn_3.flash_attn_func, dense),
    "flash_attn_3.flash_attn_qkvpacked_func": (
        flash_attn_3.flash_attn_qkvpacked_func,
        lambda: {"qkv": rows(2, 6, 8, 16), "num_heads_q": 4},
    ),
    "flash_attn_3.flash_attn_varlen_func": (
        flash_attn_3.flash_attn_varlen_func,
        lambda: flash_packed() | {"seqused_q": lengths(1, 2), "seqused_k": lengths(2, 3), "attention_chunk": 2},
    ),
    "flash_attn_3.flash_attn_with_kvcache": (flash_attn_3.flash_attn_with_kvcache, flash_cache_e4m3),
    "flash_attn_3.flash_attn_with_kvcache with new keys": (
        flash_attn_3.flash_attn_with_kvcache,
        lambda: flash_new_keys(cache_leftpad=lengths(1, 0), cache_batch_idx=lengths(1, 0)),
    ),
    "flash_attn_3.flash_attn_with_kvcache of packed keys": (
        flash_attn_3.flash_attn_with_kvcache,
        flash_packed_new_keys,
    ),
    "flash_attn_3.flash_attn_combine": (
        flash_attn_3.flash_attn_combine,
        lambda: {"out_partial": rows(3, 2, 6, 4, 8), "lse_partial": rows(3, 2, 6, 4)},
    ),
    "flash_attn_3._flash_attn_forward": (flash_attn_3._flash_attn_forward, dense),
    "flash_attn_3._flash_attn_backward": (flash_attn_3._flash_attn_backward, lambda: results(dense())),
    "flash_attn_4.flash_attn_func": (flash_attn_4.flash_attn_func, lambda: dense() | {"learnable_sink": rows(4)}),
    "flash_attn_4.flash_attn_varlen_func": (
        flash_attn_4.flash_attn_varlen_func,
        lambda: flash_packed() | {"seqused_q": lengths(1, 2), "seqused_k": lengths(2, 3)},
    ),
    "flash_attn_4.flash_attn_varlen_func in pages": (
        flash_attn_4.flash_attn_varlen_func,
        lambda: dense() | {"seqused_q": lengths(1, 2), "page_table": lengths(0, 1)[:, None]},
    ),
    "flash_attn_4.flash_attn_combine": (
        flash_attn_4.flash_attn_combine,
        lambda: {"out_partial": rows(3, 6, 4, 8), "lse_partial": rows(3, 6, 4)},
    ),
    "flash_attn_4._flash_attn_fwd": (flash_attn_4._flash_attn_fwd, dense),
    "flash_attn_4._flash_attn_bwd": (
        flash_attn_4._flash_attn_bwd,
        lambda: results(dense(), lse_name="lse") | {"learnable_sink": rows(4), "dlse": rows(2, 4, 6)},
    ),
    "scaled_dot_product_attention": (sdpa.scaled_dot_product_attention, heads_first),
    "scaled_dot_product_attention with a mask": (
        sdpa.scaled_dot_product_attention,
        lambda: heads_first() | {"attn_mask": torch.ones(6, 6, dtype=torch.bool)},
    ),
}
# arguments that hold more than one value, and how a value is put into them
INSIDE = {
    "window": [lambda x: (x, None), lambda x: (None, x)],
    "window_size": [lambda x: (x, -1), lambda x: (-1, x)],
    "outs": [lambda x: [rows(2, 6, 4, 8), x]],
    "lses": [lambda x: [x, rows(2, 4, 6)]],
    "calls": [lambda x: [x]],
}
SHAPES = [lambda x: (x, 6, 2, 16), lambda x: [2, 6, x, 16]]
ELSEWHERE = {("backend", what) for what in ("[]", "{}", "{1: 2}", "array")}  # the choice of a backend hashes it


def cells():
    for call, (function, make) in CALLS.items():
        names = list(make()) if function in (warmed, dequantized) else list(inspect.signature(function).parameters)
        for name in names:
            yield call, name


def values_of(name, is_of_shapes):
    for what, make in WRONG.items():
        if (name, what) in ELSEWHERE:
            continue
        yield what, make()
        for i, wrap in enumerate(SHAPES if is_of_shapes else INSIDE.get(name, ())):
            yield f"{what} inside ({i})", wrap(make())


def file_of(error):
    """The file of the line that raised an error."""
    step = error.__traceback__
    while step.tb_next is not None:
        step = step.tb_next
    return step.tb_frame.f_code.co_filename


@functools.cache
def parameters(function):
    return inspect.signature(function).parameters


def complaint(function, arguments, name):
    """What is wrong with the refusal of a call; None if the call ran, or the refusal is a good one."""
    try:
        function(**arguments)
    except Exception as error:
        words = str(error)
        raised_in = file_of(error)
        if type(error) not in (TypeError, ValueError, BeyondPagesError, onepass.UnsupportedError):
            return f"{type(error).__name__}: {words}"
        if not raised_in.startswith(PACKAGE):
            return f"raised in {raised_in}: {words}"
        named = name.removesuffix("s") if name == "calls" else name
        # a valid value is compared with other arguments, and the message may name either of them
        is_plausible = isinstance(arguments[name], (torch.Tensor, int, np.integer, type(None)))
        looked_at = onepass.QuantizedQKV if function is dequantized else function
        names = parameters(looked_at) if is_plausible else ()
        says_which = named in words or any(words.startswith(f"{other}:") for other in names)
        if not (says_which and "expected" in words and "got" in words):
            return f"says only {words!r}"
    return None


@pytest.mark.parametrize(("call", "name"), list(cells()))
def test_works_or_is_refused_in_words(call, name):
    function, make = CALLS[call]
    is_of_shapes = function is warmed and name not in ("dtype", "cache_dtype")
    given, bad = make(), []
    for what, value in values_of(name, is_of_shapes):
        wrong = complaint(function, given | {name: value}, name)
        if wrong is not None:
            bad.append(f"{name}={what}: {wrong}")
    assert not bad, "\n".join(bad)


ASKED = [call for call in CALLS if call.startswith("attention")]


@pytest.mark.parametrize(("call", "name"), [cell for cell in cells() if cell[0] in ASKED])
def test_supports_never_raises(call, name):
    given = CALLS[call][1]()
    for what, value in values_of(name, False):
        answer = onepass.supports(**(given | {name: value}))
        assert isinstance(answer, onepass.Support), what
        assert isinstance(answer.backend, str), what
        assert answer.reason, what


@pytest.mark.parametrize("arguments", [{}, {"cache_seqlens": None}, {"cu_seqlens_q": None}, {"is_causal": True}])
def test_supports_of_too_few_or_other_arguments(arguments):
    answer = onepass.supports(**arguments)
    assert not answer
    assert ("has no argument is_causal" if "is_causal" in arguments else "expected") in answer.reason


@pytest.mark.parametrize("make", [dense, packed, cache], ids=["dense", "packed", "cache"])
def test_supports_answers_when_something_else_fails(make, monkeypatch):
    def no_driver(problem, *options):
        raise RuntimeError("the driver does not answer")

    monkeypatch.setattr("onepass.dispatch.attention.choose", no_driver)
    monkeypatch.setattr("onepass.dispatch.decode.choose_decode", no_driver)
    answer = onepass.supports(**make(), backend="tiled")
    assert answer == (False, "tiled", "RuntimeError: the driver does not answer")


@pytest.mark.parametrize("call", CALLS)
def test_each_call_works_as_it_stands(call):
    function, make = CALLS[call]
    function(**make())


NUMBERS = {"1", "2**70", "10**400", "np.int64"}  # a number of workers
FLAGS = {"True", "np.bool_"}
# `calls` may be empty; the arguments of a call are checked only where there is a GPU to measure on
TAKEN_BY_TUNE = NUMBERS | FLAGS | {"None", "[]", "()", "{}", "{1: 2}"}


@pytest.mark.parametrize("name", ["calls", "workers", "gradients"])
def test_tune_looks_at_its_arguments_before_it_looks_for_a_gpu(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    none_here = "tune: expected a GPU to measure on, torch sees none here"
    for what, value in values_of(name, False):
        with pytest.raises((TypeError, ValueError, onepass.UnsupportedError)) as raised:
            onepass.tune(**({"calls": [shapes()]} | {name: value}))
        words = str(raised.value)
        is_taken = words == none_here and what.split(" inside")[0] in TAKEN_BY_TUNE
        assert is_taken or (name in words and "expected" in words and "got" in words), f"{what}: {words}"

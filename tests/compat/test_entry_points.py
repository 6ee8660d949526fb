"""Every argument of flash-attn's functions has an effect, unless a list says that it has none: none is dropped."""

import inspect
from typing import Any

import pytest
import torch

from onepass.api import fast_path
from onepass.compat import flash_attn as fa
from onepass.compat import flash_attn_3 as fa3
from onepass.compat import flash_attn_4 as fa4
from onepass.problem import AttentionProblem
from onepass.problem.decode import DecodeProblem


def randn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


# no two sizes are equal, so that none can stand for another
DENSE = {"q": randn(2, 7, 6, 8, seed=0), "k": randn(2, 9, 3, 8, seed=1), "v": randn(2, 9, 3, 8, seed=2)}
SQUARE = torch.stack([randn(2, 9, 6, 8, seed=seed) for seed in range(3)], 2)
ROWS = {name: t.flatten(0, 1) for name, t in DENSE.items()}
OFFSETS_Q, OFFSETS_K, OFFSETS = int32(0, 5, 14), int32(0, 8, 18), int32(0, 7, 18)
PACKED = {"cu_seqlens_q": OFFSETS_Q, "cu_seqlens_k": OFFSETS_K, "max_seqlen_q": 9, "max_seqlen_k": 10}
KV = torch.stack((DENSE["k"], DENSE["v"]), 2)
CACHE = {"q": DENSE["q"], "k_cache": DENSE["k"], "v_cache": DENSE["v"], "cache_seqlens": int32(7, 5)}
PAGES = {name: randn(9, 4, 3, 8, seed=seed) for seed, name in enumerate("kv", 1)}
TABLE = torch.tensor([[5, 0, 7, 2], [3, 8, 1, 6]], dtype=torch.int32)
NEW = {"k": randn(2, 2, 3, 8, seed=3), "v": randn(2, 2, 3, 8, seed=4), "causal": True}
TABLES = {name: randn(24, 3, seed=seed) for seed, name in enumerate(("rotary_cos", "rotary_sin"), 5)}
DESCALES = {f"{name}_descale": randn(2, 3, seed=seed).exp().float() for seed, name in enumerate("qkv", 11)}
PLAIN = {"dropout_p": 0.0, "softmax_scale": 0.5, "causal": False, "softcap": 0.0, "alibi_slopes": None}
SIDES = {"window_size_left": -1, "window_size_right": -1}

# a value of each argument that changes a call of the functions below
VALUES: dict[str, Any] = {
    "dropout_p": 0.5,
    "softmax_scale": 0.3,
    "causal": True,
    "window_size": (2, 1),
    "window_size_left": 2,
    "window_size_right": 1,
    "softcap": 2.0,
    "alibi_slopes": torch.linspace(0.1, 0.6, 6),
    "return_attn_probs": True,
    "return_softmax_lse": True,
    "return_lse": True,
    "attention_chunk": 3,
    "learnable_sink": randn(6, seed=9),
    "seqused_q": int32(4, 3),
    "seqused_k": int32(4, 7),
    "cache_seqlens": int32(3, 6),
    "cache_batch_idx": int32(1, 0),
    "cache_leftpad": int32(2, 1),
    "rotary_interleaved": False,
    "rotary_seqlens": int32(1, 0),
    "leftpad_k": int32(2, 1),
    "kv_batch_idx": int32(1, 0),
    "seqlens_rotary": int32(1, 0),
    "dlse": randn(2, 6, 7, seed=8),
    "is_causal": True,
    "sequed_q": int32(4, 3),
    "sequed_k": int32(4, 7),
}
VALUES |= {name: descale * torch.tensor([1.0, 1.5, 2.0]) for name, descale in DESCALES.items()}
# offsets and tables of calls that have them
CUTS = {"cu_seqlens_q": int32(0, 7, 14), "cu_seqlens_k": int32(0, 9, 18), "cu_seqlens_k_new": int32(0, 1, 4)}
CUTS |= dict.fromkeys(("block_table", "page_table"), TABLE.flip(1))
# arguments that say how to compute, or what other tests pass: pages, e4m3, what is refused, buffers
OTHERS = {
    *("deterministic", "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "qv"),
    *("gather_kv_indices", "score_mod", "score_mod_bwd", "mask_mod"),
    *("aux_tensors", "aux_scalars", "block_sparse_tensors", "block_sparse_tensors_bwd", "gather_bwd_recompute_p"),
    *("gather_bwd_token_chunk", "min_seqlen_k", "seqlen_k_per_split", "disable_scheduler_metadata", "zero_tensors"),
    *("tile_mn", "mma_pv_is_rs", "intra_wg_overlap", "num_threads", "_arch", "rng_state", "return_softmax"),
    *("m_block_size", "n_block_size", "num_stages_Q", "num_stages_dO", "SdP_swapAB", "dKV_swapAB", "dQ_swapAB"),
    *("AtomLayoutMSdP", "AtomLayoutNdKV", "AtomLayoutMdQ", "V_in_regs", "num_heads_q", "max_seqlen_q", "max_seqlen_k"),
    *("k_new", "v_new", "k", "v", "rotary_cos", "rotary_sin"),
    *("dq", "dk", "dv", "out", "out_", "lse"),
}


def backward(function, **given):
    """The gradients that a private backward writes, or returns."""
    forward = fa3.flash_attn_varlen_func if given["q"].dim() == 3 else fa3.flash_attn_func
    out, lse = forward(
        **{name: t for name, t in given.items() if name in ("q", "k", "v", *PACKED)}, return_attn_probs=True
    )
    lse_name = "lse" if function is fa4._flash_attn_bwd else "softmax_lse"
    buffers = {f"d{name}": torch.zeros_like(given[name]) for name in "qkv"}
    found = function(**given | {"out": out, "dout": out, lse_name: lse} | buffers)
    return (*buffers.values(), *(found[3:] if isinstance(found, tuple) else ()))


CALLS = {
    "fa func": (fa.flash_attn_func, DENSE),
    "fa kvpacked": (fa.flash_attn_kvpacked_func, {"q": DENSE["q"], "kv": KV}),
    "fa qkvpacked": (fa.flash_attn_qkvpacked_func, {"qkv": SQUARE}),
    "fa varlen": (fa.flash_attn_varlen_func, ROWS | PACKED),
    "fa varlen kvpacked": (fa.flash_attn_varlen_kvpacked_func, {"q": ROWS["q"], "kv": KV.flatten(0, 1)} | PACKED),
    "fa varlen qkvpacked": (
        fa.flash_attn_varlen_qkvpacked_func,
        {"qkv": SQUARE.flatten(0, 1), "cu_seqlens": OFFSETS, "max_seqlen": 11},
    ),
    "fa kvcache": (fa.flash_attn_with_kvcache, CACHE),
    "fa kvcache, new keys": (fa.flash_attn_with_kvcache, CACHE | NEW | TABLES),
    "fa forward": (fa._flash_attn_forward, DENSE | PLAIN | SIDES | {"return_softmax": False}),
    "fa varlen forward": (fa._flash_attn_varlen_forward, ROWS | PACKED | PLAIN),
    "fa backward": (fa._flash_attn_backward, DENSE | PLAIN | SIDES | {"deterministic": False}),
    "fa varlen backward": (fa._flash_attn_varlen_backward, ROWS | PACKED | PLAIN | SIDES | {"deterministic": False}),
    "fa3 func": (fa3.flash_attn_func, DENSE),
    "fa3 qkvpacked": (fa3.flash_attn_qkvpacked_func, {"qkv": SQUARE}),
    "fa3 varlen": (fa3.flash_attn_varlen_func, ROWS | PACKED),
    "fa3 kvcache": (fa3.flash_attn_with_kvcache, CACHE),
    "fa3 kvcache, new keys": (fa3.flash_attn_with_kvcache, CACHE | NEW | TABLES),
    "fa3 forward": (fa3._flash_attn_forward, DENSE),
    "fa3 forward over a cache": (
        fa3._flash_attn_forward,
        DENSE | {"k_new": NEW["k"], "v_new": NEW["v"], "seqused_k": int32(7, 5)} | TABLES,
    ),
    "fa3 forward, packed new keys": (
        fa3._flash_attn_forward,
        {"q": ROWS["q"], "k": DENSE["k"], "v": DENSE["v"], "k_new": randn(5, 3, 8, seed=3), "seqused_k": int32(3, 4)}
        | {"v_new": randn(5, 3, 8, seed=4), "cu_seqlens_k_new": int32(0, 3, 5), "cu_seqlens_q": OFFSETS_Q}
        | {"max_seqlen_q": 9},
    ),
    "fa varlen in pages": (fa.flash_attn_varlen_func, {"q": ROWS["q"]} | PAGES | PACKED | {"block_table": TABLE}),
    "fa varlen forward in pages": (
        fa._flash_attn_varlen_forward,
        {"q": ROWS["q"]} | PAGES | PACKED | PLAIN | {"block_table": TABLE},
    ),
    "fa kvcache in pages": (
        fa.flash_attn_with_kvcache,
        {"q": DENSE["q"], "k_cache": PAGES["k"], "v_cache": PAGES["v"], "cache_seqlens": int32(7, 5)}
        | {"block_table": TABLE},
    ),
    "fa3 kvcache in pages": (
        fa3.flash_attn_with_kvcache,
        {"q": ROWS["q"], "k_cache": PAGES["k"], "v_cache": PAGES["v"], "cache_seqlens": int32(7, 5)}
        | {"page_table": TABLE, "cu_seqlens_q": OFFSETS_Q, "max_seqlen_q": 9},
    ),
    "fa4 varlen in pages": (
        fa4.flash_attn_varlen_func,
        {"q": ROWS["q"], "cu_seqlens_q": OFFSETS_Q, "max_seqlen_q": 9, "page_table": TABLE, "seqused_k": int32(8, 5)}
        | PAGES,
    ),
    "fa3 backward": (fa3._flash_attn_backward, DENSE),
    "fa4 func": (fa4.flash_attn_func, DENSE),
    "fa4 varlen": (fa4.flash_attn_varlen_func, ROWS | PACKED),
    "fa4 forward": (fa4._flash_attn_fwd, DENSE),
    "fa4 forward in pages": (
        fa4._flash_attn_fwd,
        {"q": ROWS["q"], "cu_seqlens_q": OFFSETS_Q, "max_seqlen_q": 9, "page_table": TABLE, "seqused_k": int32(8, 5)}
        | PAGES,
    ),
    "fa4 backward": (fa4._flash_attn_bwd, DENSE),
}
# arguments without an effect in one of the calls, since another one decides
NO_EFFECT = {
    "rotary_interleaved": (
        *("fa kvcache", "fa kvcache in pages", "fa3 kvcache", "fa3 kvcache in pages", "fa3 forward"),
        "fa3 forward, packed new keys",
    ),
    "rotary_seqlens": ("fa3 kvcache", "fa3 kvcache in pages"),
    "seqlens_rotary": ("fa3 forward", "fa3 forward, packed new keys"),
    "leftpad_k": ("fa3 forward",),  # makes it a call over a cache
    "kv_batch_idx": ("fa3 forward",),
}


IN_E4M3 = [name for name, (f, _) in CALLS.items() if "q_descale" in inspect.signature(f).parameters]
IN_E4M3 = [n for n in IN_E4M3 if not any(part in n for part in ("new keys", "over a cache", "qkvpacked"))]


def e4m3(t):
    return (t * 20).to(torch.float8_e4m3fn) if isinstance(t, torch.Tensor) and t.is_floating_point() else t


for _name in IN_E4M3:
    _function, _given = CALLS[_name]
    CALLS[f"{_name}, e4m3"] = _function, {key: e4m3(t) for key, t in _given.items()} | DESCALES
    NO_EFFECT |= {a: (*names, f"{_name}, e4m3") for a, names in NO_EFFECT.items() if _name in names}


def run(name, changes):
    function, given = CALLS[name]
    given = {key: t.clone() if isinstance(t, torch.Tensor) else t for key, t in (given | changes).items()}
    torch.manual_seed(0)
    result = backward(function, **given) if "backward" in name else function(**given)
    found = result if isinstance(result, (tuple, list)) else (result,)
    return [t for t in found if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_has_an_effect(name):
    function, given = CALLS[name]
    usual = run(name, {})
    values = VALUES | {argument: value for argument, value in CUTS.items() if argument in given}
    for argument in inspect.signature(function).parameters:
        if argument in DESCALES and argument not in given:
            continue  # refused
        if argument in OTHERS or name in NO_EFFECT.get(argument, ()) or (argument in CUTS and argument not in given):
            continue
        if argument not in values:
            assert argument in given or argument in ("dout", "softmax_lse"), argument
            continue
        changes = {argument: not given[argument] if given.get(argument) is True else values[argument]}
        if argument == "dropout_p" and "backward" in name:
            changes["rng_state"] = torch.tensor([3, 4])
        found = run(name, changes)
        is_same = len(found) == len(usual) and all(
            a.shape == b.shape and torch.allclose(a, b, equal_nan=True) for a, b in zip(found, usual, strict=True)
        )
        assert not is_same, argument


@pytest.mark.parametrize("name", [name for name in CALLS if "e4m3" in name])
def test_descales_that_are_not_given_are_1(name):
    ones = dict.fromkeys(DESCALES, torch.ones(2, 3))
    for given in DESCALES:
        others = [argument for argument in DESCALES if argument != given]
        found, expected = (run(name, {a: alone[a] for a in others}) for alone in (dict.fromkeys(DESCALES), ones))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_rows_past_the_last_offset_have_no_descale():
    function, given = CALLS["fa3 varlen, e4m3"]
    padded = given | {"q": given["q"][[*range(14), 0, 1]]}
    expected = function(**given, attention_chunk=3)
    found = function(**padded, attention_chunk=3)
    assert torch.equal(found[:14], expected)
    assert not found[14:].any()


@pytest.mark.parametrize(
    ("name", "changes", "error", "match"),
    [
        ("fa qkvpacked", {"qkv": SQUARE[:, :, :2]}, ValueError, r"qkv: expected shape \(batch, seqlen, 3, num_heads"),
        ("fa varlen kvpacked", {"kv": KV}, ValueError, r"kv: expected shape \(total_tokens, 2, num_heads"),
        ("fa func", {"window_size": (1, 2, 3)}, TypeError, r"window_size: expected a pair \(left, right\) of int"),
        (
            "fa func",
            {"window_size": torch.ones(2)},
            TypeError,
            "window_size: expected a pair of int, got torch.float32",
        ),
        (
            "fa func",
            {"window_size": int32([1], [2])},
            TypeError,
            "window_size: expected a pair of int, got torch.int32",
        ),
        ("fa func", {"window_size": int32(1, 2).to("meta")}, TypeError, "window_size: expected a pair of int, got"),
        ("fa3 func, e4m3", {"k": e4m3(randn(2, 9, 4, 8, seed=1))}, ValueError, "q: .* divisible by the 4 heads of"),
        ("fa3 func, e4m3", {"k_descale": torch.ones(3, 2)}, ValueError, r"k_descale: expected shape \(2, 3\), one for"),
        ("fa3 varlen, e4m3", {"v_descale": torch.ones(2, 3).int()}, TypeError, "v_descale: expected"),
        ("fa3 kvcache, e4m3", {"q_descale": 1.0}, TypeError, "q_descale: expected a float32 torch.Tensor, got float"),
        ("fa3 func", {"q_descale": torch.ones(2, 3)}, NotImplementedError, "q_descale: .* only e4m3 tensors have"),
        ("fa3 varlen", {"cu_seqlens_k": int32(0, 18)}, ValueError, "k: expected 2 sequences like q, got 1"),
        ("fa3 varlen", {"cu_seqlens_q": OFFSETS_Q[:0]}, ValueError, r"cu_seqlens_q: expected shape \(batch \+ 1,\)"),
        ("fa4 func", {"score_mod": print}, NotImplementedError, "score_mod: expected None, .* another library's"),
    ],
)
def test_refusals_of_one_function(name, changes, error, match):
    with pytest.raises(error, match=f"^{match}"):
        run(name, changes)


@pytest.mark.parametrize("name", ["fa3 forward", "fa3 forward over a cache", "fa4 forward"])
def test_results_are_written_into_given_tensors(name):
    function, given = CALLS[name]
    usual = run(name, {})
    for argument, number in (("out_", 0), ("out", 0), ("lse", 1)):
        if argument in inspect.signature(function).parameters:
            into = torch.full((2, 7, 6, 8) if number == 0 else (2, 6, 7), torch.nan, dtype=torch.float64)
            caches = {key: t.clone() for key, t in given.items() if isinstance(t, torch.Tensor)}
            assert function(**given | caches | {argument: into})[number] is into
            torch.testing.assert_close(into, usual[0] if number == 0 else CALLS["fa3 forward"][0](**DENSE)[1].double())


# the defaults of flash-attn 2.8, 3.0 and 4.0 that are not None
FLAGS = "causal is_causal deterministic return_attn_probs return_softmax_lse return_softmax return_lse zero_tensors"
FLAGS += " has_softcap disable_scheduler_metadata gather_bwd_recompute_p SdP_swapAB dKV_swapAB dQ_swapAB V_in_regs"
ZEROS = "attention_chunk sm_margin max_seqlen_k_new seqlen_k_new num_splits"
DEFAULTS: dict[str, Any] = dict.fromkeys(FLAGS.split(), False) | dict.fromkeys(ZEROS.split(), 0)
DEFAULTS |= {"dropout_p": 0.0, "softcap": 0.0, "rotary_interleaved": True, "qkv_dtype": torch.bfloat16}
DEFAULTS |= {"window_size": (-1, -1), "window_size_left": -1, "window_size_right": -1}
OF_4 = {"window_size": (None, None), "window_size_left": None, "window_size_right": None}
OF_ONE = {
    "_flash_attn_fwd": {"softcap": None, "num_threads": 384},
    "_flash_attn_bwd": {"num_threads": 256, "pack_gqa": False, "m_block_size": 64, "n_block_size": 128}
    | dict.fromkeys(("num_stages_Q", "num_stages_dO", "AtomLayoutMSdP", "AtomLayoutNdKV", "AtomLayoutMdQ"), 2),
}


@pytest.mark.parametrize("module", [fa, fa3, fa4])
def test_defaults_are_those_of_flash_attn(module):
    for name, function in vars(module).items():
        if not inspect.isfunction(function) or "flash_attn" not in name:
            continue
        one_split = module is not fa and "kvcache" not in name and "metadata" not in name
        expected = DEFAULTS | (OF_4 if module is fa4 else {}) | ({"num_splits": 1} if one_split else {})
        expected |= OF_ONE.get(name, {}) | ({"return_lse": True} if "combine" in name else {})
        for parameter in inspect.signature(function).parameters.values():
            if parameter.default is not parameter.empty:
                assert parameter.default == expected.get(parameter.name), (name, parameter.name)
                assert type(parameter.default) is type(expected.get(parameter.name)), (name, parameter.name)


WRONG: dict[str, tuple[Any, type[Exception]]] = {
    **dict.fromkeys(("qv", "gather_kv_indices", "score_mod", "score_mod_bwd", "mask_mod"), (1, NotImplementedError)),
    **dict.fromkeys(("block_sparse_tensors", "block_sparse_tensors_bwd"), (1, NotImplementedError)),
    **dict.fromkeys(("pack_gqa", "deterministic", "zero_tensors", "causal", "is_causal"), (1, TypeError)),
    **dict.fromkeys(("return_attn_probs", "return_softmax_lse", "return_lse", "rotary_interleaved"), (1, TypeError)),
    **dict.fromkeys(("num_splits", "window_size", "softmax_scale", "softcap"), ("2", TypeError)),
    **dict.fromkeys(("window_size_left", "window_size_right"), ("2", TypeError)),
    **dict.fromkeys(("sm_margin", "attention_chunk"), (-1, ValueError)),
    **dict.fromkeys(("dropout_p",), (1.5, ValueError)),
}


IGNORED = {
    ("rotary_interleaved", "fa3 forward"),
    ("rotary_interleaved", "fa3 forward, packed new keys"),
    ("pack_gqa", "fa4 backward"),
    ("deterministic", "fa4 varlen in pages"),
}


@pytest.mark.parametrize("function", [fa3._flash_attn_backward, fa4._flash_attn_bwd])
def test_a_message_about_missing_arguments_names_the_function(function):
    with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) missing 6 required positional arguments: "):
        function()


@pytest.mark.parametrize("name", CALLS)
def test_wrong_values_are_refused_by_every_function(name):
    parameters = inspect.signature(CALLS[name][0]).parameters
    for argument, (value, error) in WRONG.items():
        if argument in parameters and (argument, name.removesuffix(", e4m3")) not in IGNORED:
            state = {"rng_state": torch.tensor([3, 4])} if argument == "dropout_p" and "rng_state" in parameters else {}
            with pytest.raises(error, match=f"^{argument}: expected "):
                run(name, {argument: value} | state)


def tensors_of(name):
    """The tensors of a call by argument, with those that it has no need of."""
    function, given = CALLS[name]
    parameters = inspect.signature(function).parameters
    optional = {a: t for a, t in VALUES.items() if a in parameters and name not in NO_EFFECT.get(a, ())}
    optional = {a: t for a, t in optional.items() if a not in DESCALES}
    return {a: t for a, t in (optional | given).items() if isinstance(t, torch.Tensor)}


WRONG_TENSORS = {
    "not a tensor": lambda t: (1,),
    "more dimensions": lambda t: t[None],
    "another type": lambda t: t.to(torch.int64 if t.is_floating_point() else torch.float32),
    "complex": lambda t: t.to(torch.complex64),
    "on another device": lambda t: t.to("meta"),
    "fewer dimensions": lambda t: t[0],
    "too short": lambda t: t[:-1],
}
# what other tensors are measured by: the message names one of those
MEASURES = ("q", "kv", "qkv", "k", "k_cache", "k_new", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens", "page_table")
MEASURES += ("rotary_cos",)


@pytest.mark.parametrize("name", [name for name in CALLS if "e4m3" not in name])
def test_wrong_tensors_are_refused_by_their_name(name):
    skipped = {("cache_batch_idx", "another type")}  # int64 will do
    skipped |= {(argument, "too short") for argument in MEASURES}
    skipped |= {(argument, "on another device") for argument in ("q", "qkv")}  # then all others are elsewhere
    skipped |= {("qkv", "fewer dimensions")}  # what heads then mean is asked first
    if "backward" in name or {"k_new", "rotary_cos"} & set(CALLS[name][1]):  # the forward, or new keys, are refused
        skipped |= {("q", kind) for kind in WRONG_TENSORS}
    for argument, tensor in tensors_of(name).items():
        for kind, change in WRONG_TENSORS.items():
            if (argument, kind) in skipped:
                continue
            named = {"kv": "kv|k", "qkv": "qkv|q"}.get(argument, argument)
            with pytest.raises((TypeError, ValueError), match=f"^({named}): expected "):
                run(name, {argument: change(tensor)})


@pytest.mark.parametrize("name", CALLS)
def test_calls_on_the_meta_device_give_shapes(name):
    def kinds(results):
        results = results if isinstance(results, (tuple, list)) else (results,)
        return [(t.shape, t.dtype) for t in results if isinstance(t, torch.Tensor)]

    function, given = CALLS[name]
    given = {key: t.to("meta") if isinstance(t, torch.Tensor) else t for key, t in given.items()}
    for _ in range(2):  # a repeated call, too
        results = backward(function, **given) if "backward" in name else function(**given)
        assert kinds(results) == kinds(run(name, {}))


def passed_on(monkeypatch, problem, option):
    """What the problems that are made from now on have of an option."""
    asked, made = [], problem.of.__func__

    def of(cls, *arguments, **options):
        asked.append(options[option])
        return made(cls, *arguments, **options)

    monkeypatch.setattr(problem, "of", classmethod(of))
    fast_path.forget()
    return asked


def names_with(option, *parts):
    """The calls of functions with this option whose names have one of the parts."""
    return [
        n for n, (f, _) in CALLS.items() if option in inspect.signature(f).parameters and any(p in n for p in parts)
    ]


@pytest.mark.parametrize("name", [n for n in names_with("deterministic", "") if "pages" not in n])
def test_every_function_passes_deterministic_on(name, monkeypatch):
    asked = passed_on(monkeypatch, AttentionProblem, "deterministic")
    for deterministic in (False, True):
        run(name, {"deterministic": deterministic})
        assert asked[-1] is deterministic
    # False asks for nothing: torch's own switch decides
    fast_path.forget()
    torch.use_deterministic_algorithms(True)
    try:
        run(name, {"deterministic": False})
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked[-1] is True


@pytest.mark.parametrize(
    "name", [n for n in names_with("num_splits", "cache", "pages", "new keys") if "fa varlen" not in n]
)
def test_every_function_over_a_cache_passes_num_splits_on(name, monkeypatch):
    asked = passed_on(monkeypatch, DecodeProblem, "num_splits")
    takes_used = "seqused_q" in inspect.signature(CALLS[name][0]).parameters
    for used in ({}, {"seqused_q": VALUES["seqused_q"]}) if takes_used else ({},):
        for num_splits in (0, 3, 400):
            run(name, {"num_splits": num_splits} | used)
            assert asked[-1] == {0: None, 3: 3, 400: 256}[num_splits]


@pytest.mark.parametrize("name", names_with("max_seqlen_q", ""))
def test_longest_lengths_are_refused_by_their_name(name):
    for argument in ("max_seqlen_q", "max_seqlen_k"):
        if argument in CALLS[name][1]:
            with pytest.raises(TypeError, match=f"^{argument}: expected "):
                run(name, {argument: "7"})

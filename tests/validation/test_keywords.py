"""Arguments that a function does not have: the refusal says what onepass calls them; signatures stay real."""

import inspect

import pytest
import torch
from refusals import packed, tensors

import onepass

DECODE = {"cache_seqlens": torch.tensor([3, 5], dtype=torch.int32)}


def decode_tensors():
    given = tensors()
    return {"q": given["q"], "k_cache": given["k"], "v_cache": given["v"]} | DECODE


CALLS = {
    "attention": (onepass.attention, tensors),
    "attention_varlen": (onepass.attention_varlen, packed),
    "attention_decode": (onepass.attention_decode, decode_tensors),
}
HINTS = {
    "is_causal": "it is called causal here, and aligned at the bottom right",
    "scale": "it is called softmax_scale here",
    "attn_mask": "onepass.compat.sdpa takes a mask",
    "cache_leftpad": "it is called seqstart_k here",
    "enable_gqa": "it is always on here",
    "window_size": "it is called window here",
    "block_table": "it is called page_table here, an argument of attention_decode",
    "key_padding_mask": "seqstart_k hides padding at the beginning; causal attention needs nothing",
    "attention_mask": "onepass.compat.sdpa takes a mask",
    "score_mod": "alibi_slopes, softcap and bias change scores",
    "mask_mod": "query_ranges and packed sequences say which keys are visible",
    "need_weights": "the probabilities never exist in memory",
    "sliding_window": r"window=\(sliding_window - 1, 0\) says it here",
    "softmax_scal": r"did you mean softmax_scale\?",
    "return_softmax_lse": "it is called return_lse here",
}


@pytest.mark.parametrize("name", HINTS)
@pytest.mark.parametrize("function", CALLS)
def test_a_refusal_says_what_it_is_called_here(function, name):
    call, make = CALLS[function]
    with pytest.raises(TypeError, match=f"^{function} has no argument {name}; {name}: ") as raised:
        call(**make(), **{name: True})
    assert raised.match(HINTS[name])
    assert onepass.supports(**make(), **{name: True}) == (False, "", f"supports: {raised.value}")


def test_several_at_once():
    with pytest.raises(TypeError) as raised:
        onepass.attention(**tensors(), scale=1.0, is_causal=True, nonsense=3)
    words = str(raised.value)
    assert words.startswith("attention has no arguments is_causal, nonsense, scale; is_causal: it is called causal")
    assert words.endswith("; scale: it is called softmax_scale here")


@pytest.mark.parametrize("name", ["nonsense", "query_offsets", "key_lengths"])
def test_no_name_is_guessed_from_a_few_letters(name):
    with pytest.raises(TypeError, match=f"^attention has no argument {name}$"):
        onepass.attention(**tensors(), **{name: 1})


@pytest.mark.parametrize("function", CALLS)
def test_options_by_position(function):
    call, make = CALLS[function]
    given = make()
    first = [given.pop(name) for name in list(given)[:3]]
    with pytest.raises(
        TypeError,
        match=rf"^{function}: expected options by name, as in causal=True, got more positional arguments: None, T",
    ):
        call(*first, None, torch.zeros(3, 4), **given)


@pytest.mark.parametrize(
    ("function", "name", "hint"),
    [
        ("attention", "cu_seqlens_q", "cu_seqlens_q: it is an argument of attention_varlen and attention_decode"),
        ("attention", "page_table", "page_table: it is an argument of attention_decode"),
        ("attention_varlen", "cache_seqlens", "cache_seqlens: it is an argument of attention_decode"),
        ("attention_decode", "seqused_k", "seqused_k: it is an argument of attention and attention_varlen"),
        ("attention_decode", "k", "k: it is called k_cache or, if it is to be appended, k_new here"),
        ("attention_decode", "v", "v: it is called v_cache or, if it is to be appended, v_new here"),
    ],
)
def test_arguments_of_another_function(function, name, hint):
    call, make = CALLS[function]
    with pytest.raises(TypeError, match=hint):
        call(**make(), **{name: None})


def test_a_call_without_data_is_refused_in_the_same_words():
    call = dict.fromkeys("qkv", (2, 6, 4, 8)) | {"dtype": torch.float32}
    with pytest.raises(TypeError, match=r"^warmup: attention has no argument scale; scale: it is called softmax_scale"):
        onepass.warmup([call | {"scale": 1.0}], backend="tiled")


@pytest.mark.parametrize("function", CALLS)
def test_signatures_show_what_is_documented(function):
    call, _ = CALLS[function]
    kinds = [parameter.kind for parameter in inspect.signature(call).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert inspect.Parameter.KEYWORD_ONLY in kinds
    assert "unknown" not in inspect.signature(call).parameters


@pytest.mark.parametrize(
    ("turned", "hint"),
    [
        (
            ("k_cache", "v_cache"),
            r"\(are k_cache and v_cache \(batch, num_heads, seqlen, head_dim\)\? Then pass k_cache.tr",
        ),
        (("q",), r"\(is q \(batch, num_heads, seqlen, head_dim\)\? Then pass q.transpose\(1, 2\)\)$"),
    ],
)
def test_caches_with_heads_before_keys(turned, hint):
    call = decode_tensors() | {"q": torch.randn(2, 1, 4, 8)}
    call |= {name: call[name].transpose(1, 2) for name in turned}
    with pytest.raises(ValueError, match=hint):
        onepass.attention_decode(**call)


def test_missing_arguments_are_named_as_ever():
    with pytest.raises(TypeError, match="cache_seqlens"):
        onepass.attention_decode(*list(decode_tensors().values())[:3])
    with pytest.raises(TypeError, match="'q'"):
        onepass.attention()

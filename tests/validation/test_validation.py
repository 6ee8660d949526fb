"""Every refusal: the error's type and its message, with expected and got; and no argument is changed."""

from __future__ import annotations

import inspect

import pytest
import torch
from refusals import DENSE, PACKED, packed, refused, tensors

import onepass
from onepass.api import attention as api


@pytest.mark.parametrize(("changes", "error", "message"), DENSE, ids=lambda x: x[:60] if isinstance(x, str) else "")
def test_attention_refuses(changes, error, message):
    refused(onepass.attention, tensors, changes, error, message)


@pytest.mark.parametrize(("changes", "error", "message"), PACKED, ids=lambda x: x[:60] if isinstance(x, str) else "")
def test_attention_varlen_refuses(changes, error, message):
    refused(onepass.attention_varlen, packed, changes, error, message)


@pytest.mark.parametrize(("changes", "error", "message"), DENSE, ids=lambda x: x[:60] if isinstance(x, str) else "")
def test_supports_gives_the_same_reason(changes, error, message):
    if "seqused_k\\[" in message:
        pytest.skip("values of lengths are read by the call, not by supports")
    answer = onepass.supports(**tensors(**changes))
    assert not answer.ok
    assert answer.reason
    import re

    assert re.search(message, answer.reason)


def test_supports_says_yes_and_why():
    answer = onepass.supports(**tensors(), causal=True, window=(3, None), softcap=2.0)
    assert answer == (True, "tiled", answer.reason)
    assert "cpu" in answer.reason
    assert onepass.supports(**packed()).ok


def test_supports_asks_about_shapes_alone():
    q = torch.empty(64, 2**20, 32, 128, dtype=torch.bfloat16, device="meta")
    assert onepass.supports(q, q, q).ok


def test_supports_refuses_unknown_arguments():
    answer = onepass.supports(**tensors(), dropout=0.1)
    assert not answer.ok
    expected = "supports: attention has no argument dropout"
    assert answer.reason == f"{expected}; dropout: did you mean dropout_p?"


def partials(**changes):
    made = {"outs": [torch.randn(2, 6, 4, 8) for _ in range(2)], "lses": [torch.randn(2, 4, 6) for _ in range(2)]}
    return made | {name: change(made[name]) for name, change in changes.items()}


PARTIALS = [
    ({"outs": lambda x: []}, TypeError, r"outs: expected a non-empty sequence of tensors or one stacked tensor"),
    ({"outs": lambda x: [1, 2]}, TypeError, r"outs: expected a non-empty sequence of tensors"),
    ({"lses": lambda x: x[:1]}, ValueError, r"lses: expected 2 tensors like outs, got 1"),
    ({"outs": lambda x: [t[0, 0] for t in x]}, ValueError, r"outs\[0\]: expected \(batch, .*, got \(4, 8\)"),
    (
        {"outs": lambda x: [x[0], x[1][:1]]},
        ValueError,
        r"outs\[1\]: expected shape \(2, 6, 4, 8\) like outs\[0\], got",
    ),
    (
        {"outs": lambda x: [x[0], x[1].half()]},
        TypeError,
        r"outs\[1\]: expected dtype float32 like outs\[0\], got float16",
    ),
    ({"lses": lambda x: [x[0], x[1].half()]}, TypeError, r"lses\[1\]: expected dtype float32 or float64, got float16"),
    ({"lses": lambda x: [x[0], x[1].mT]}, ValueError, r"lses\[1\]: expected shape \(2, 4, 6\), got \(2, 6, 4\)"),
    (
        {"lses": lambda x: [x[0], x[1].to("meta")]},
        ValueError,
        r"lses\[1\]: expected device cpu like outs\[0\], got meta",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), PARTIALS, ids=lambda x: x[:60] if isinstance(x, str) else "")
def test_merge_partials_refuses(changes, error, message):
    with pytest.raises(error, match=message):
        onepass.merge_partials(**partials(**changes))


@pytest.mark.parametrize(
    ("function", "options"),
    [(onepass.attention, api.Options), (onepass.attention_varlen, api.PackedOptions)],
    ids=["dense", "packed"],
)
def test_types_of_the_options_are_those_of_the_signature(function, options):
    """The overloads list the options again, for type checkers; both lists must agree."""
    taken = inspect.signature(function).parameters
    assert set(options.__annotations__) == set(taken) - {"q", "k", "v", "return_lse"}

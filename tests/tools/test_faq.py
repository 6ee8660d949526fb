"""The errors that docs/faq.md quotes are the library's own words."""

import re
from pathlib import Path

import pytest
import torch

import onepass

FAQ = Path(__file__).parents[2] / "docs" / "faq.md"
QUOTED = re.findall(r"^\| `([^`]+)` \|", FAQ.read_text(encoding="utf-8"), re.MULTILINE)


def refused_calls():
    """Calls that raise the errors of the page, in no order."""
    x = torch.randn(1, 5, 2, 8)
    needs_gradient, lengths = x.clone().requires_grad_(), torch.tensor([5], dtype=torch.int32)
    attention = onepass.attention
    return [
        lambda: attention(torch.randn(1, 1, 5, 8), x, x),
        lambda: attention(x[0], x[0], x[0]),
        lambda: attention(x, x, x, is_causal=True),
        lambda: attention(x, x, x, backend="sm90"),
        lambda: onepass.attention_decode(needs_gradient, x, x, cache_seqlens=lengths).sum().backward(),
        lambda: torch.func.vmap(lambda y: attention(y, y, y))(x[None]),
    ]


@pytest.fixture(scope="module")
def messages() -> list[str]:
    found = []
    for call in refused_calls():
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
            call()
        found.append(str(error.value))
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="one of the errors says that there is no GPU")
@pytest.mark.parametrize("quoted", QUOTED)
def test_errors_are_quoted_as_they_are(quoted, messages):
    pattern = re.compile(".*".join(re.escape(words.strip()) for words in quoted.split("...")), re.DOTALL)
    assert any(pattern.fullmatch(message) for message in messages), messages


def test_every_call_is_quoted(messages):
    assert len(QUOTED) == len(messages)

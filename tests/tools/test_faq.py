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
    wrong_length, offsets = torch.tensor([9], dtype=torch.int32), torch.tensor([0, 5])
    needs_gradient = x.clone().requires_grad_()
    attention = onepass.attention
    return [
        lambda: attention(torch.randn(1, 1, 5, 8), x, x),
        lambda: attention(x[0], x[0], x[0]),
        lambda: attention(x, x, x, is_causal=True),
        lambda: onepass.attention_varlen(x[0], x[0], x[0], cu_seqlens_q=offsets, cu_seqlens_k=offsets),
        lambda: attention(x, x.half(), x),
        lambda: attention(x, x, x, softcap=0.0),
        lambda: attention(x, x, x, seqused_k=wrong_length),
        lambda: attention(x, x, x, backend="sm90"),
        lambda: onepass.attention_decode(needs_gradient, x, x, cache_seqlens=wrong_length - 4).sum().backward(),
        lambda: onepass.quantize_fp8(needs_gradient, x, x),
        lambda: attention(x, x, x, dropout_p=0.1, precision="fp8"),
        lambda: torch.func.vmap(lambda y: attention(y, y, y))(x[None]),
        lambda: onepass.tune(q=x, k=x, v=x),
    ]


@pytest.fixture(scope="module")
def messages() -> list[str]:
    found = []
    for call in refused_calls():
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
            call()
        found.append(str(error.value))
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="two of the errors say that there is no GPU")
@pytest.mark.parametrize("quoted", QUOTED)
def test_errors_are_quoted_as_they_are(quoted, messages):
    pattern = re.compile(".*".join(re.escape(words.strip()) for words in quoted.split("...")), re.DOTALL)
    assert any(pattern.fullmatch(message) for message in messages), messages


def test_every_call_is_quoted(messages):
    assert len(QUOTED) == len(messages)

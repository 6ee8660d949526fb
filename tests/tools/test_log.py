"""ONEPASS_LOG=1 says which backend runs a call, once for each problem."""

import importlib
import logging

import fresh_process
import pytest
import torch

import onepass
from onepass import log

CODE = """
import logging
import onepass, torch
logging.basicConfig(format="onepass: once more by the root logger: %(message)s")
q = torch.randn(1, 9, 4, 8, requires_grad=True)
k = torch.randn(1, 9, 2, 8)
for _ in range(3):
    onepass.attention(q, k, k, causal=True).sum().backward()
lengths = torch.tensor([5], dtype=torch.int32)
onepass.attention_decode(q.detach()[:, :1], k, k, cache_seqlens=lengths, window=(3, None))
"""


def run(value):
    status, output = fresh_process.run(f"import os; os.environ['ONEPASS_LOG'] = {value!r}\n{CODE}")
    assert status == 0, output
    return [line for line in output.splitlines() if line.startswith("onepass:")]


def test_a_line_for_each_problem():
    problem = "float32, batch 1, seqlen 9 x 9, heads 4/2, head_dim 8, causal"
    assert run("1") == [
        f"onepass: forward by cpu: {problem}",
        f"onepass: backward by cpu: {problem}",
        "onepass: attention over a cache by cpu: float32, batch 1, seqlen 1 x 9, heads 4/2, head_dim 8, "
        "window (3, 0), seqused_k",
    ]


@pytest.mark.parametrize("value", ["0", "false", "no", "", None])
def test_nothing_unless_it_is_asked_for(value, monkeypatch):
    monkeypatch.delenv("ONEPASS_LOG", raising=False)
    if value is not None:
        monkeypatch.setenv("ONEPASS_LOG", value)
    importlib.reload(log)
    assert not log.is_on()
    assert log.logger.handlers == []


def test_by_logging(caplog):
    log.say_once.cache_clear()
    q = torch.randn(1, 5, 2, 8)
    onepass.attention(q, q, q, softcap=2.5)
    assert caplog.records == []
    with caplog.at_level(logging.INFO, "onepass"):
        onepass.attention(q, q, q, softcap=2.0, dropout_p=0.5)
    assert [record.getMessage() for record in caplog.records] == [
        "forward by tiled: float32, batch 1, seqlen 5 x 5, heads 2, head_dim 8, softcap 2.0, dropout_p"
    ]


@pytest.mark.parametrize("name", ["head_dim_v", "packed"])
def test_problems_in_words(name):
    q, v = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 4)
    call = {"q": q, "k": q, "v": v}
    if name == "packed":
        offsets = torch.tensor([0, 5], dtype=torch.int32)
        call = {key: t[0] for key, t in call.items()} | {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    from onepass.api.calls import problem_of_call

    problem = problem_of_call("warmup", call, None)[0]
    assert (
        problem.text == f"float32, batch 1, seqlen 5 x 5, heads 2, head_dim 8/4{', packed' if name == 'packed' else ''}"
    )

"""`onepass.tune` on a GPU: every candidate runs and gives the heuristics' results; calls use the entries found."""

import pytest
import torch

import onepass
from onepass.dispatch import attention as dispatch
from onepass.kernels.heuristics import tuned
from onepass.tuning import tasks_of
from onepass.tuning.tuner import Machine, tune_all

ON_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
IS_HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a GPU of compute capability 8.0 or more")]

CALLS = {
    "dense": {"q": (2, 1024, 8, 128), "k": (2, 1024, 8, 128), "v": (2, 1024, 8, 128)},
    "causal group": {"q": (2, 1000, 8, 64), "k": (2, 1200, 2, 64), "v": (2, 1200, 2, 64), "causal": True},
    "packed": {
        "q": (3000, 4, 128),
        "k": (3000, 4, 128),
        "v": (3000, 4, 128),
        "cu_seqlens_q": (6,),
        "cu_seqlens_k": (6,),
        "causal": True,
    },
    "sinks and window": {
        "q": (2, 700, 4, 128),
        "k": (2, 900, 4, 128),
        "v": (2, 900, 4, 128),
        "sinks": (4,),
        "seqused_k": (2,),
        "window": (200, 30),
    },
}


@pytest.fixture(autouse=True)
def _own_table(monkeypatch):
    """Neither use nor change the entries of earlier runs; kernels still come from the usual cache."""
    monkeypatch.setattr(tuned, "_own", dict)
    monkeypatch.setattr(tuned, "_shipped", dict)


@pytest.mark.parametrize("backend", ["sm90", "sm80"])
@pytest.mark.parametrize("name", CALLS)
def test_candidates_run_and_are_right(name, backend, tmp_path):
    if backend == "sm90" and not IS_HOPPER:
        pytest.skip("needs a Hopper GPU")
    tasks = tasks_of(CALLS[name] | {"dtype": torch.bfloat16}, backend, gradients=True)
    assert [task.direction for task in tasks] == ["fwd", "bwd"]
    device = torch.device("cuda", torch.cuda.current_device())
    table = tmp_path / "table.json"
    with torch.cuda.stream(torch.cuda.Stream(device)):
        results = tune_all(tasks, Machine.here(device), rounds=9, limit=8, table=table)
    kept = tuned.parse(table.read_bytes())[tuned.gpu_name()]
    assert set(kept) == {tuned.key_of(*task) for task in tasks}
    for result in results:
        assert [c.refusal for c in result.candidates if c.refusal] == []
        assert all(c.ms > 0 for c in result.candidates)
        assert result.speedup == 1.0 or result.speedup > 1.01


def test_calls_use_what_was_found(monkeypatch, tmp_path):
    """An entry for a call decides its configuration, whichever is fastest on this GPU, and its results stay right."""
    q, k, v = (torch.randn(2, 1024, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    expected = onepass.attention(q, k, v)
    (task,) = tasks_of({"q": q, "k": k, "v": v})
    usual = dispatch.forward_config(task.backend, task.problem)
    other = usual.from_text(usual.text.replace("longest_first=True", "longest_first=False"))
    entry = tuned.Entry(other.text, usual.text, 1.1, tuned._environment(), "")
    monkeypatch.setattr(tuned, "_own", lambda: {tuned.gpu_name(): {tuned.key_of(*task): entry}})
    dispatch.forget_prepared()
    assert dispatch.forward_config(task.backend, task.problem) == other
    torch.testing.assert_close(onepass.attention(q, k, v, return_lse=True).out, expected)
    monkeypatch.setenv("ONEPASS_TUNED", "0")
    assert dispatch.forward_config(task.backend, task.problem) == usual

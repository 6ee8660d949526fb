"""The choice of a backend while torch.compile traces a call."""

import pytest
import torch

import onepass
from onepass.dispatch import backends, decode


@pytest.mark.parametrize(("taken", "seqlen_q"), [("sm80", 1), ("sm90", 20)])
def test_choice_of_a_kernel_is_traced_without_a_break(monkeypatch, taken, seqlen_q):
    """torch.compile traces the choice as on a Hopper GPU, for few rows and for many; tiled computes them."""
    torch._dynamo.reset()
    monkeypatch.setattr(backends, "device_refusal", lambda name, problem, device: None)
    monkeypatch.setattr(backends, "_HAS_KERNEL_COMPILER", True)
    monkeypatch.setitem(decode.MODULES, taken, decode.MODULES["tiled"])
    q = torch.randn(2, seqlen_q, 4, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 64, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    call = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": torch.tensor([40, 64], dtype=torch.int32)}
    assert onepass.supports(**call).backend == taken
    compiled = torch.compile(onepass.attention_decode, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**call), onepass.attention_decode(**call, backend="tiled"))

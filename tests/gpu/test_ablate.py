"""`onepass ablate` on a Hopper GPU: every configuration of its tables runs, gives right results and is timed."""

import pytest
import torch

from onepass.bench.ablation import FULL, ablate, kernels, refusal
from onepass.bench.cases import Case
from onepass.bench.rows import Options

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")]


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(("causal", "seqlen"), [(False, 1000), (True, 4000)])
def test_every_row(causal, seqlen, direction):
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    kernel = kernels(direction)["sm90"]
    case = Case.square(seqlen, 8, 128, batch=2, dtype="float16", causal=causal, direction=direction)
    assert refusal(kernel, case, "cuda") is None
    row = ablate(case, kernel, Options("cuda", (), rounds=3, gemm_size=2048)).row
    assert row["failed"] == {}
    assert row["skipped"] == {}
    assert row["contenders"][FULL]["launch"] == "graph"
    for entry in row["configurations"]:
        assert row["contenders"][entry["label"]]["tflops"] > 0

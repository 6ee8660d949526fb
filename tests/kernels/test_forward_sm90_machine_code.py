"""The shipped Hopper configurations compile without a GPU, and their machine code is what was meant."""

import functools
import importlib.util
from dataclasses import replace

import machine_code
import pytest
import torch

from onepass.kernels import heuristics
from onepass.kernels.sm90 import launch
from onepass.problem import AttentionProblem, Mask

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"),
    pytest.mark.skipif(machine_code.disassembler() is None, reason="nvidia-cuda-nvdisasm is not installed"),
]


def problem(head_dim, head_dim_v, **options):
    return AttentionProblem(
        dtype=torch.bfloat16,
        device_type="cuda",
        batch=1,
        seqlen_q=512,
        seqlen_k=512,
        num_heads_q=4,
        num_heads_kv=options.pop("num_heads_kv", 4),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        softmax_scale=head_dim**-0.5,
        **options,
    )


CAUSAL = Mask(None, 0)
PROBLEMS = {
    "64 causal": problem(64, 64, mask=CAUSAL),
    "128": problem(128, 128),
    "128 causal": problem(128, 128, mask=CAUSAL),
    "128 everything": problem(128, 128, mask=Mask(64, 64), softcap=30.0, has_sinks=True, num_heads_kv=2),
    "192/128 causal": problem(192, 128, mask=CAUSAL),
    "256 causal": problem(256, 256, mask=CAUSAL),
    "64 packed causal": problem(64, 64, mask=CAUSAL, is_packed=True),
    "128 packed": problem(128, 128, is_packed=True, has_seqused_k=True),
    "128 seqused": problem(128, 128, mask=CAUSAL, has_seqused_k=True),
    "256 packed causal": problem(256, 256, mask=CAUSAL, is_packed=True),
    "128 group of 4": replace(problem(128, 128, num_heads_kv=1), seqlen_q=1),
    "128 group of 3 causal": replace(problem(128, 128, mask=CAUSAL), num_heads_q=12, seqlen_q=1),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_machine_code(name):
    asked = PROBLEMS[name]
    config = heuristics.forward_config(asked)
    assert config.pack_gqa == ("group" in name)
    code = machine_code.read(launch.ARCH, functools.partial(launch.trace, asked, config))
    assert code.serialized == ""
    assert code.spills == 0
    assert code.count("HGMMA") > 0
    assert code.count("UTMALDG") >= config.num_warpgroups + 2  # Q, K, V by TMA
    assert code.count("USETMAXREG") == 2  # registers move from the producer to the consumers
    assert code.count(r"STG\.E\.128") > 0
    # every group of GEMMs is issued once and waited for: one fence a group
    assert code.count(r"WARPGROUP\.ARRIVE") == code.count(r"WARPGROUP\.DEPBAR")

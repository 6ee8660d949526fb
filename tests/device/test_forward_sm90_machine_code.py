"""Every shipped Hopper configuration compiles without a GPU, and its machine code is what was meant."""

import functools
from dataclasses import replace

import machine_code
import packages
import pytest
import torch
from shipped import ROWS, problem

from onepass.kernels.heuristics import sm90 as heuristics
from onepass.kernels.launch import forward_sm90 as launch
from onepass.problem import Mask

pytestmark = packages.needs_machine_code

CAUSAL = Mask(None, 0)
OTHERS = {
    "128 float16 window softcap sinks GQA": problem(
        128, 128, dtype=torch.float16, mask=Mask(64, 64), softcap=30.0, has_sinks=True, num_heads_kv=2
    ),
    "64 packed causal": problem(64, 64, mask=CAUSAL, is_packed=True),
    "128 packed": problem(128, 128, is_packed=True, has_seqused_k=True),
    "128 seqused": problem(128, 128, mask=CAUSAL, has_seqused_k=True),
    "256 packed causal": problem(256, 256, mask=CAUSAL, is_packed=True),
    "64 ranges": problem(64, 64, 8192, mask=Mask(), has_key_ranges=True),
    "128 ranges": problem(128, 128, 8192, mask=Mask(), has_key_ranges=True),
    **{
        f"{d}/{dv} blocks of 64": problem(d, dv, 4096, mask=Mask(), block_size=(64, 64))
        for d, dv in ((64, 64), (64, 128), (96, 96), (128, 128), (128, 256))
    },
    "64 bits": problem(64, 64, 4096, mask=CAUSAL, block_size=(64, 64), has_block_bits=True),
    "128 group of 4": replace(problem(128, 128, mask=Mask(), num_heads_kv=1), seqlen_q=1),
    "128 group of 3 causal": replace(problem(128, 128, mask=CAUSAL), num_heads_q=12, seqlen_q=1),
}


@pytest.mark.sampled(quick=1, slow=7)
@pytest.mark.parametrize(
    ("asked", "config"),
    [
        *(pytest.param(row.problem, row.config, id=row.name) for row in ROWS),
        *(pytest.param(asked, heuristics.forward_config_sm90(asked), id=name) for name, asked in OTHERS.items()),
    ],
)
def test_machine_code(asked, config, request):
    assert config.pack_gqa == ("group" in request.node.name)
    code = machine_code.read(launch.ARCH, functools.partial(launch.trace, asked, config))
    assert code.serialized == ""
    assert code.spills == 0
    assert code.count("HGMMA") > 0
    assert code.count("UTMALDG") >= config.num_warpgroups + 2  # Q, K, V by TMA
    assert code.count("USETMAXREG") == 2  # registers move from the producer to the consumers
    assert code.count(r"STG\.E\.128") > 0
    # every group of GEMMs is issued once, with one fence, and waited for
    assert code.count(r"WARPGROUP\.ARRIVE") == code.count(r"WARPGROUP\.DEPBAR")
    assert code.count(r"WARPGROUP\.ARRIVE") < code.count("HGMMA")  # serialized, each GEMM would have its own

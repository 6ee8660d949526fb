"""The Ampere forward compiles without a GPU for every architecture, and its machine code is what was meant."""

import functools
import importlib.util

import machine_code
import pytest
import torch
from shipped import problem

from onepass.errors import UnsupportedError
from onepass.kernels import heuristics
from onepass.kernels.config import ForwardConfigSm80
from onepass.kernels.sm80 import launch
from onepass.problem import Mask

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"),
    pytest.mark.skipif(machine_code.disassembler() is None, reason="nvidia-cuda-nvdisasm is not installed"),
]

CAUSAL = Mask(None, 0)
BY_HEAD_DIM = [(f"{d}", problem(d, d)) for d in heuristics.FORWARD_SM80]
OPTIONS = [
    (
        "128 float16 window softcap sinks GQA",
        problem(128, 128, dtype=torch.float16, mask=Mask(64, 64), softcap=30.0, has_sinks=True, num_heads_kv=2),
    ),
    ("64 packed causal", problem(64, 64, is_packed=True)),
    ("128 packed seqused", problem(128, 128, mask=Mask(), is_packed=True, has_seqused_k=True)),
    ("128 seqused", problem(128, 128, has_seqused_k=True)),
    ("head dims of no tile", problem(72, 40)),
    ("192 and 128", problem(192, 128)),
]
# the road: one thing more with each
ROAD = [
    ("plain", ForwardConfigSm80(num_stages=1, prefetch=False, swizzle=False)),
    ("swizzled", ForwardConfigSm80(num_stages=1, prefetch=False)),
    ("prefetching", ForwardConfigSm80(num_stages=1)),
    ("2 stages", ForwardConfigSm80(num_stages=2)),
    ("3 stages", ForwardConfigSm80(num_stages=3)),
    ("8 warps", ForwardConfigSm80(tile_m=128, num_warps=8)),
    ("rescaling lazily", ForwardConfigSm80(rescale_threshold=8.0)),
    ("exp2 on both pipes", ForwardConfigSm80(rescale_threshold=8.0, exp2_fma_period=4)),
]


def check(asked, config, arch):
    code = machine_code.read(arch, functools.partial(launch.trace, asked, config, arch))
    assert code.spills == 0
    assert code.count(r"HMMA\.16816\.F32") > 0
    assert code.count(r"LDSM\.16\.M88\.4") > 0
    assert code.count(r"LDSM\.16\.MT88\.4") > 0  # V transposed
    assert code.count(r"LDGSTS\.E\.BYPASS.*128") > 0
    assert code.count(r"STG\.E\.128") > 0
    # other stores are those of lse, and of rows that are recomputed after a NaN
    assert code.dynamic_smem == [config.smem_bytes(asked)]


@pytest.mark.parametrize("arch", launch.ARCHS)
@pytest.mark.parametrize("asked", [pytest.param(asked, id=name) for name, asked in BY_HEAD_DIM])
def test_every_architecture(asked, arch):
    check(asked, heuristics.forward_config_sm80(asked, arch), arch)


@pytest.mark.parametrize("asked", [pytest.param(asked, id=name) for name, asked in OPTIONS])
def test_options(asked):
    check(asked, heuristics.forward_config_sm80(asked, "sm_80"), "sm_80")


@pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in ROAD])
def test_road(config):
    check(problem(64, 64), config, "sm_80")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_warps": 3}, "num_warps: expected 1, 2, 4 or 8, got 3"),
        ({"tile_m": 96}, "tile_m: expected a multiple of 64"),
        ({"tile_n": 72}, "tile_n: expected 16, 32"),
        ({"tile_n": 16, "tile_m": 128, "num_warps": 8}, "multiples of 32, the rows that 256 threads load"),
        ({"num_stages": 0}, "num_stages: expected 1 or more, got 0"),
        ({"num_stages": 2, "prefetch": False}, "num_stages: expected 1 without prefetch, got 2"),
        ({"rescale_threshold": 16.0}, "rescale_threshold: expected 0 to 15"),
        ({"exp2_fma_period": -1}, "exp2_fma_period"),
        ({"tile_n": 128, "num_stages": 3}, r"needs 212992 bytes, a thread block has 166912"),
        ({"tile_n": 256, "num_stages": 1}, r"needs 288 for S, P, O and Q, a thread has 255"),
    ],
)
def test_impossible_configurations_are_refused(fields, message):
    with pytest.raises(UnsupportedError, match=message):
        ForwardConfigSm80(**fields).check(problem(128, 128), "sm_80")

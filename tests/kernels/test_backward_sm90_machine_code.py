"""Every shipped configuration of the Hopper backward compiles without a GPU, and its machine code is what was meant."""

import functools
import importlib.util

import machine_code
import pytest
import torch
from shipped import problem

from onepass.kernels import heuristics
from onepass.kernels.sm90 import backward_launch, launch
from onepass.problem import Mask

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"),
    pytest.mark.skipif(machine_code.disassembler() is None, reason="nvidia-cuda-nvdisasm is not installed"),
]

FULL, CAUSAL = Mask(), Mask(None, 0)
OPTIONS = {
    "full": {"mask": FULL},
    "causal": {"mask": CAUSAL},
    "window": {"mask": Mask(64, 64)},
    "softcap": {"mask": CAUSAL, "softcap": 30.0},
    "GQA": {"mask": CAUSAL, "num_heads_kv": 2},
    "GQA softcap": {"mask": FULL, "num_heads_kv": 2, "softcap": 30.0},
    "packed": {"mask": CAUSAL, "is_packed": True},
    "seqused": {"mask": FULL, "has_seqused_k": True},
    "float16 packed seqused GQA window softcap": {
        "dtype": torch.float16,
        "mask": Mask(64, 0),
        "is_packed": True,
        "has_seqused_k": True,
        "num_heads_kv": 1,
        "softcap": 30.0,
    },
}
PROBLEMS = {f"{d} {name}": problem(d, d, **options) for d in (64, 128) for name, options in OPTIONS.items()}
PROBLEMS |= {f"{d}/{dv}": problem(d, dv) for d, dv in ((64, 128), (128, 64), (96, 96), (192, 128))}
PROBLEMS |= {f"{d} deterministic": problem(d, d, deterministic=True) for d in (64, 128)}
PROBLEMS |= {
    f"{d} {name}": problem(d, d, **OPTIONS[name])
    for d in (192, 256)
    for name in ("full", "causal", "seqused", "float16 packed seqused GQA window softcap")
}


@pytest.mark.parametrize("asked", PROBLEMS.values(), ids=PROBLEMS)
def test_machine_code(asked):
    config = heuristics.backward_config(asked)
    config.check(asked)
    code = machine_code.read(launch.ARCH, functools.partial(backward_launch.trace, asked, config))
    assert code.serialized == ""
    assert code.spills == 0
    assert code.count("HGMMA") > 0
    assert code.count("UTMALDG") >= 2 * config.key_tiles + 2  # K and V in tiles of 64, Q, dO by TMA
    # dQ to global memory: each warp its part at once, or each thread its values
    assert code.count("UBLKRED") > 0 or config.by_gradient
    assert code.count("RED") > 0 or not config.by_gradient
    assert code.count("USETMAXREG") == 2  # registers move from the producer to the consumers
    assert code.count(r"STG\.E\.128") > 0
    assert code.count(r"WARPGROUP\.ARRIVE") < code.count("HGMMA")  # serialised, each would have its own
    assert code.dynamic_smem == [config.smem_bytes(asked)]


def test_all_configurations_are_among_them():
    """Of the problems that the kernel takes, by all that a configuration may depend on."""
    shipped = {heuristics.backward_config(asked) for asked in PROBLEMS.values()}
    for d, dv in ((64, 64), (64, 128), (128, 64), (128, 128), (192, 128), (256, 256)):
        for mask in (FULL, CAUSAL, Mask(64, 64), Mask(64, 0)):
            for options in ({}, {"softcap": 30.0}, {"is_packed": True}, {"softcap": 30.0, "is_packed": True}):
                for seqlen in (1, 512, 2**20):
                    asked = problem(d, dv, seqlen, mask=mask, **options)
                    assert heuristics.backward_config(asked) in shipped, asked


@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_rows_before(head_dim, is_packed, has_dlse):
    asked = problem(head_dim, head_dim, is_packed=is_packed)
    check_rows(backward_launch.compile_requests(asked, has_dlse)[0], "backward_preprocess")


@pytest.mark.parametrize("options", ["full", "causal", "float16 packed seqused GQA window softcap"])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_rows_after(head_dim, options):
    asked = problem(head_dim, head_dim, **OPTIONS[options])
    code = check_rows(backward_launch.compile_requests(asked)[2], "backward_postprocess")
    # exponentials of the rows that are computed again, where a mask hides pairs
    assert (code.count("MUFU") > 0) == (options != "full")


def check_rows(request, name):
    kernel, _, arch, trace = request
    assert kernel == name
    code = machine_code.read(arch, trace)
    assert code.spills == 0
    assert code.count(r"LDG\.E\.128") > 0
    assert code.count(r"STG\.E\.128") > 0
    return code

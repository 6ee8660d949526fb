"""The Ampere backward compiles without a GPU for every architecture, and its machine code is what was meant."""

import functools

import machine_code
import packages
import pytest
import torch
from shipped import problem

from onepass.errors import UnsupportedError
from onepass.kernels.config import SCALAR_ADDS, BackwardConfigSm80
from onepass.kernels.heuristics import sm80 as heuristics_sm80
from onepass.kernels.launch import backward_sm80 as backward_launch
from onepass.kernels.launch import forward_sm80 as launch
from onepass.problem import Mask

pytestmark = packages.needs_machine_code

# all rows of each table of heuristics, what a GPU has run, and one row for the other architectures
SHIPPED = [
    (arch, head_dim)
    for arch in launch.ARCHS
    for head_dim in heuristics_sm80.BACKWARD
    if arch in ("sm_80", "sm_86") or head_dim == 128 or (arch == "sm_90a" and head_dim in (64, 256))
]
OPTIONS = [
    ("deterministic", problem(128, 128, deterministic=True)),
    (
        "float16 window softcap GQA",
        problem(128, 128, dtype=torch.float16, mask=Mask(64, 64), softcap=30.0, num_heads_kv=2),
    ),
    ("packed seqused", problem(128, 128, mask=Mask(), is_packed=True, has_seqused_k=True)),
    ("head dims of no tile", problem(72, 40)),
    ("192 and 128", problem(192, 128)),
    (
        "float32 packed seqused deterministic",
        problem(128, 96, dtype=torch.float32, is_packed=True, has_seqused_k=True, deterministic=True),
    ),
    (
        "float32 window softcap GQA",
        problem(128, 128, dtype=torch.float32, mask=Mask(64, 64), softcap=3.0, num_heads_kv=2),
    ),
]


# Numbers of spills that are accepted: loads and stores of a few addresses that are the same in all steps.
FEW_SPILLS = {
    ("sm_80", 96, torch.bfloat16): 8,  # four values that are needed after the last step
    ("sm_90a", 128, torch.bfloat16): 59,  # measured: see heuristics_sm80.BACKWARD_128_HOPPER
    ("sm_100a", 128, torch.bfloat16): 7,
    ("sm_90a", 256, torch.float32): 5,
    ("sm_100a", 256, torch.float32): 13,
}


def check(asked, config, arch):
    code = machine_code.read(arch, functools.partial(backward_launch.trace, asked, config, arch))
    assert code.spills_in_gemms == 0
    assert code.spills <= FEW_SPILLS.get((arch, asked.head_dim, asked.dtype), 0)
    d, dv = config.head_dims(asked)
    if asked.dtype == torch.float32:
        assert code.count(r"HMMA\.1688\.F32\.TF32") == code.count("HMMA") == num_mma_of_float32(config, d, dv)
        assert code.count(r"LDS\.128") > 0
    else:
        # S, dK and dQ have d columns or sum over d, dP and dV have or sum over dv; the body of the one loop is a step
        products = config.tile_m * config.tile_n * (3 * d + 2 * dv)
        assert code.count(r"HMMA\.16816\.F32") == products // (16 * 8 * 16 * config.num_warps)
        assert code.count(r"LDSM\.16\.M88\.4") > 0
        assert code.count(r"LDSM\.16\.MT88\.4") > 0  # dO and Q, K and dS transposed
    # K and V, the next step, and with two buffers the first step
    rows = config.tile_n + config.num_stages * config.tile_m
    copies = rows * (d + dv) * asked.dtype.itemsize // 16 // config.num_threads + config.num_stages
    assert code.count(r"LDGSTS\.E\.BYPASS.*128") == copies
    dq_values = config.tile_m * d // config.num_threads
    assert code.count(r"REDG?\.E\.ADD.*F32") == (dq_values if arch in SCALAR_ADDS else dq_values // 4)
    assert code.dynamic_smem == [config.smem_bytes(asked)]


def num_mma_of_float32(config, d, dv):
    """The mma of three products: in loops over 32 columns for S and dP, and over 16 rows for the others."""
    s = 32 // 8 * config.tile_n * config.tile_m // (16 * 8)
    row_fragments = 16 // 8 * (config.tile_n * (d + dv) + config.tile_m * d) // (16 * 8)
    return 3 * (2 * s + row_fragments) // config.num_warps


@pytest.mark.sampled(quick=0, slow=4)
@pytest.mark.parametrize(("arch", "head_dim"), SHIPPED)
def test_every_architecture(arch, head_dim):
    asked = problem(head_dim, head_dim)
    check(asked, heuristics_sm80.backward_config_sm80(asked, arch), arch)


@pytest.mark.sampled(quick=0, slow=4)
@pytest.mark.parametrize(
    ("arch", "head_dim"),
    [(arch, d) for arch in launch.ARCHS for d in heuristics_sm80.BACKWARD_FLOAT32],
)
def test_float32(arch, head_dim):
    asked = problem(head_dim, head_dim, dtype=torch.float32)
    check(asked, heuristics_sm80.backward_config_sm80(asked, arch), arch)


@pytest.mark.sampled(quick=0, slow=3)
@pytest.mark.parametrize("asked", [pytest.param(asked, id=name) for name, asked in OPTIONS])
def test_options(asked):
    check(asked, heuristics_sm80.backward_config_sm80(asked, "sm_80"), "sm_80")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_warps": 3}, "num_warps: expected 1, 2, 4 or 8, got 3"),
        ({"tile_m": 48}, "tile_m: expected 16, 32, 64 or 128, got 48"),
        ({"num_stages": 3}, "num_stages: expected 1 or 2, got 3"),
        ({"vector_adds": True}, "vector_adds: expected False on sm_80"),
        ({"dq_pieces": 4}, "dq_pieces: expected 1, or 2, 3 or 4 of a multiple of 64 columns, got 4"),
        ({"s_key_warps": 16}, "s_key_warps: expected 1, 2, 4 or 8 up to num_warps, got 16"),
        ({"tile_n": 64}, r"tile_n: expected a multiple of 128 \(s_key_warps is 8\), got 64"),
        ({"tile_m": 16, "s_key_warps": 4}, "2 warps share tile_m, which they can if it is a multiple of 32, got 16"),
        ({"dkv_key_warps": 1}, "8 warps share head_dim, which they can if it is a multiple of 256, got 128"),
        ({"dq_query_warps": 8}, r"tile_m: expected a multiple of 128 \(dq_query_warps is 8\), got 64"),
        (
            {"dq_query_warps": 1, "dq_pieces": 2},
            "8 warps share head_dim, which they can if it is a multiple of 256, got 128",
        ),
        ({"tile_n": 256}, "shared memory: .* needs 230400 bytes, a thread block has 166912"),
        ({"tile_m": 128, "num_stages": 1}, "registers: .* needs 224 for dK, dV, S, P, dS and dQ, a thread has 255"),
    ],
)
def test_impossible_configurations_are_refused(fields, message):
    with pytest.raises(UnsupportedError, match=message):
        BackwardConfigSm80(**fields).check(problem(128, 128), "sm_80")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vector_bytes": 2}, "vector_bytes: expected 16, 8, 4 or 2 of whole elements, got 2"),
        ({"dq_query_warps": 1}, "8 warps share head_dim, which they can if it is a multiple of 256, got 128"),
        ({"dq_pieces": 2}, "4 warps share head_dim, which they can if it is a multiple of 256, got 128"),
        ({"tile_n": 128}, "shared memory: .* needs 229888 bytes, a thread block has 166912"),
        (
            {"num_warps": 4, "s_key_warps": 2, "dkv_key_warps": 1},
            "registers: .* needs 288 for dK, dV, S, P, dS and dQ, a thread has 255",
        ),
    ],
)
def test_impossible_configurations_of_float32_are_refused(fields, message):
    fields = {"tile_m": 32, "tile_n": 64, "s_key_warps": 4, "dkv_key_warps": 2, "dq_query_warps": 2, **fields}
    with pytest.raises(UnsupportedError, match=message):
        BackwardConfigSm80(**fields).check(problem(128, 128, dtype=torch.float32), "sm_80")


def test_rows_that_copies_do_not_divide_are_refused():
    with pytest.raises(UnsupportedError, match="vector_bytes: 16 do not divide rows of head_dim 20"):
        BackwardConfigSm80().check(problem(20, 24), "sm_80")

"""The Ampere forward compiles without a GPU for every architecture, and its machine code is what was meant."""

import itertools

import packages
import pytest
import sm80_forward
import torch
from shipped import problem

from onepass.errors import UnsupportedError
from onepass.kernels.config import ForwardConfigSm80
from onepass.kernels.heuristics import sm80 as heuristics_sm80
from onepass.kernels.launch import forward_sm80 as launch

pytestmark = packages.needs_machine_code

# on sm_80 the tests of values check the code of all kernels that they compile (tests/support/sm80_forward.py)
ELSEWHERE = [
    ("sm_86", 256, torch.float32),
    ("sm_90a", 128, torch.bfloat16),
    ("sm_90a", 128, torch.float32),
    ("sm_100a", 128, torch.float16),
    ("sm_120a", 128, torch.float32),
]


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize(("arch", "head_dim", "dtype"), ELSEWHERE)
def test_every_architecture(arch, head_dim, dtype):
    asked = problem(head_dim, head_dim, dtype=dtype)
    sm80_forward.compiled(asked, heuristics_sm80.forward_config_sm80(asked, arch), arch)


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
        ({"tile_n": 128, "num_stages": 3}, r"needs 212992 bytes, a thread block has 166912"),
        ({"tile_n": 256, "num_stages": 1}, r"needs 288 for S, P, O and Q, a thread has 255"),
        ({"vector_bytes": 32}, "vector_bytes: expected 16, 8, 4 or 2"),
    ],
)
def test_impossible_configurations_are_refused(fields, message):
    with pytest.raises(UnsupportedError, match=message):
        ForwardConfigSm80(**fields).check(problem(128, 128), "sm_80")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vector_bytes": 2}, "vector_bytes: expected 16, 8, 4 or 2 of whole elements, got 2"),
        ({"q_in_registers": True}, "q_in_registers: expected False for float32, got True"),
        ({"tile_n": 16, "tile_m": 192, "num_stages": 1}, "needs 264 for S, P, O and Q"),
        ({"tile_n": 64}, "needs 163840 bytes, a thread block has 101376"),
    ],
)
def test_impossible_configurations_of_float32_are_refused(fields, message):
    fields = {"tile_n": 32, "q_in_registers": False, **fields}
    arch = "sm_90a" if "tile_m" in fields else "sm_86"
    with pytest.raises(UnsupportedError, match=message):
        ForwardConfigSm80(**fields).check(problem(128, 128, dtype=torch.float32), arch)


def test_rows_that_copies_do_not_divide_are_refused():
    with pytest.raises(UnsupportedError, match="vector_bytes: 16 do not divide rows of head_dim 20"):
        ForwardConfigSm80().check(problem(20, 24), "sm_80")


@pytest.mark.parametrize("arch", launch.ARCHS)
def test_every_problem_has_a_configuration(arch):
    for dtype in (torch.bfloat16, torch.float32):
        for head_dim, head_dim_v in itertools.product((1, 2, 3, 20, 64, 72, 96, 128, 130, 192, 256), repeat=2):
            heuristics_sm80.forward_config_sm80(problem(head_dim, head_dim_v, dtype=dtype), arch)

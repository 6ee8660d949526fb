"""Head dims that are not multiples of 8, in 16 bits, need narrower copies. Set ONEPASS_TEST_BACKEND=sm80."""

import pytest
from gpu_cases import BACKEND, BF16, FP16, IS_READY, case, cases
from gradient_cases import check_gradients

import onepass

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not IS_READY or BACKEND == "sm90", reason="needs a GPU for sm80: TMA cannot read these head dims"
    ),
]

SIZES = (1, 2, 3, 5, 12, 17, 20, 33, 50, 63, 65, 66, 100, 127, 129, 190, 201, 250, 255)
CASES = [
    *(
        case(150, 200, batch=2, heads=(4, 2), head_dim=d, dtype=(BF16, FP16)[i % 2], causal=i % 4 < 2)
        for i, d in enumerate(SIZES)
    ),
    *(case(100, 170, head_dim=d, head_dim_v=dv, dtype=BF16) for d, dv in ((192, 100), (33, 7), (130, 64), (255, 8))),
    case(200, 260, heads=(2, 1), head_dim=100, window=(50, 20), softcap=5.0, sinks=True),
    case((1, 0, 130, 20), (70, 5, 140, 0), heads=(2, 1), head_dim=50, causal=True, slack=2, dtype=FP16),
    case(150, 200, batch=2, head_dim=63, used=(0, 133), causal=True),
]


@cases(CASES)
def test_values_and_gradients(case):
    call = case.call()
    support = onepass.supports(**call.tensors, **call.options)
    assert support.backend == BACKEND
    assert "tiled backend" not in support.reason, support.reason
    call.check()
    check_gradients(call)
    check_gradients(call, deterministic=True)

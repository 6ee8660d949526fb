"""float32 on a GPU: the Ampere kernels' three tf32 products give float32's accuracy. Held to the budgets of float32."""

from dataclasses import replace

import pytest
import torch
from gpu_cases import DEVICE, IS_READY, MASKS, NAN, ON_GPU, Case, case, cases, plain_run, same_bits

import onepass

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_READY, reason="needs a GPU with the kernels")]

FLOAT32 = {"dtype": torch.float32}


def check(one: Case, gradients: bool = False, with_floor: bool = False):
    call = one.call()
    support = onepass.supports(**call.tensors, **call.options)
    assert support.ok, support.reason
    assert support.backend == ("sm80" if ON_GPU else "tiled"), support.reason
    call.check(gradients, with_floor)


@cases(
    case(m, n, head_dim=64, causal=m % 2 == 1, **FLOAT32)
    for m, n in ((1, 1), (1, 200), (16, 16), (127, 129), (200, 1), (300, 555), (64, 1025))
)
def test_lengths(case):
    check(case, with_floor=True)  # of few values the plain error may be small by chance


@cases(
    case(130, 150, head_dim=d, causal=d % 3 == 0, **FLOAT32)
    for d in (1, 2, 3, 5, 8, 17, 32, 40, 63, 64, 65, 80, 96, 100, 127, 128, 160, 192, 200, 250, 255, 256)
)
def test_head_dims(case):
    # rows of one or two columns have small sums by chance, which plain float32 then hardly rounds
    check(case, with_floor=case.head_dim < 8)


@cases(case(100, 170, head_dim=d, head_dim_v=dv, **FLOAT32) for d, dv in ((192, 128), (64, 256), (33, 7), (256, 40)))
def test_head_dim_v(case):
    check(case)


@cases(case(200, 260, head_dim=d, **FLOAT32, **mask) for d in (64, 128, 256) for mask in MASKS.values())
def test_masks(case):
    check(case)


@cases(
    [
        case(150, 200, batch=2, heads=(8, 2), head_dim=64, causal=True, sinks=True, softcap=5.0, **FLOAT32),
        case(150, 200, heads=(4, 1), head_dim=128, sinks=True, **FLOAT32),
        case(150, 200, batch=2, head_dim=128, used=(0, 133), causal=True, **FLOAT32),
        case((1, 0, 130, 20), (70, 5, 140, 0), heads=(2, 1), head_dim=128, causal=True, slack=2, **FLOAT32),
        case((30, 70), (70, 140), heads=(2, 1), head_dim=64, used=(0, 131), **FLOAT32),
        case(300, 100, head_dim=64, causal=True, **FLOAT32),  # rows that see no key
        case(200, 333, head_dim=128, scale=30.0, causal=True, **FLOAT32),
    ]
)
def test_options(case):
    check(case)


@cases([case(64, 8192, heads=(1, 1), head_dim=128, **FLOAT32), case(33, 20000, heads=(1, 1), head_dim=64, **FLOAT32)])
def test_many_keys(case):
    """Errors of a sum that is rounded towards zero in every step would grow with their number."""
    check(case)


@cases(
    [
        case(100, 150, heads=(2, 1), head_dim=64, causal=True, **FLOAT32),
        case(150, 200, batch=2, heads=(8, 2), head_dim=64, causal=True, sinks=True, softcap=5.0, **FLOAT32),
        case(150, 200, batch=2, head_dim=128, used=(0, 133), causal=True, **FLOAT32),
        case((1, 0, 130, 20), (70, 5, 140, 0), heads=(2, 1), head_dim=128, causal=True, slack=2, **FLOAT32),
        case(300, 100, head_dim=64, causal=True, **FLOAT32),  # rows that see no key
        case(1000, 1500, heads=(2, 1), head_dim=128, causal=True, **FLOAT32),
        *(case(200, 260, head_dim=d, **FLOAT32, **mask) for d in (64, 128) for mask in MASKS.values()),
        *(case(130, 150, head_dim=d, causal=d % 3 == 0, **FLOAT32) for d in (1, 2, 5, 40, 63, 96, 160, 192, 250, 256)),
        *(
            case(100, 170, head_dim=d, head_dim_v=dv, **FLOAT32)
            for d, dv in ((192, 128), (64, 256), (33, 7), (256, 40))
        ),
    ]
)
def test_gradients(case):
    check(case, gradients=True, with_floor=True)  # of few values the plain error may be small by chance


@pytest.mark.parametrize("offset", [1, 2, 3])
@cases([case(70, 130, head_dim=64, causal=True, **FLOAT32)])
def test_addresses_of_4_and_8_bytes(case, offset):
    call = case.call()
    expected = plain_run(call)
    moved = {}
    for name, t in call.tensors.items():
        room = torch.full((t.numel() + offset,), NAN, device=DEVICE)
        moved[name] = room[offset:].view(t.shape).copy_(t)
    assert same_bits(plain_run(replace(call, tensors=moved)), expected)


@cases([case(200, 200, head_dim=128, causal=True, **FLOAT32)])
def test_nan_reaches_only_rows_that_see_it(case):
    call = case.call()
    call.tensors["v"][0, 150] = NAN
    out = plain_run(call).out
    assert out[0, 150:].isnan().all()
    assert out[0, :150].isfinite().all()


@pytest.mark.skipif(not ON_GPU, reason="of the kernels")
@cases([case(200, 300, head_dim=128, causal=True, **FLOAT32)])
def test_runs_give_the_same_bits(case):
    call = case.call()
    expected = plain_run(call)
    assert all(same_bits(plain_run(call), expected) for _ in range(50))

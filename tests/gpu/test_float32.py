"""float32 attention on a GPU, held to the error budgets of float32.

The Hopper forward computes each product as three products of float16 halves. It takes head dims that are multiples of
8, and of 16 for V above 128. All other calls, and all gradients, are computed by the Ampere kernels as three products
of tf32 limbs.

Blocks of 64 rows share the scale of their halves, so some cases have very different magnitudes in one tensor.
"""

from dataclasses import replace

import pytest
import torch
from compile_ahead import config_of
from gpu_cases import (
    BACKEND,
    DEVICE,
    INF,
    IS_READY,
    MASKS,
    NAN,
    ON_GPU,
    Case,
    GpuCall,
    case,
    cases,
    run_as_user,
    same_bits,
    size,
)
from test_graphs import Replayed

import onepass
from onepass.testing import compare, compare_lse

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_READY, reason="needs a GPU with the kernels")]

FLOAT32 = {"dtype": torch.float32}
GROUP_FACTOR = 4.0  # times the error of plain PyTorch, which in a few elements is small by chance
HOPPER_HEAD_DIMS = (64, 96, 128, 256)  # with 256, V is in two blocks of columns


def expected_backend(call: GpuCall) -> str:
    head_dim, _, head_dim_v = (t.shape[-1] for t in call.tensors.values())
    if BACKEND == "sm90" and head_dim % 8 == head_dim_v % (16 if head_dim_v > 128 else 8) == 0:
        return "sm90"  # the tests are skipped where the device is not Hopper
    return "sm80" if ON_GPU else "tiled"


def check_call(call: GpuCall, gradients: bool = False, with_floor: bool = False):
    support = onepass.supports(**call.tensors, **call.options)
    assert support.ok, support.reason
    assert support.backend == expected_backend(call), support.reason
    call.check(gradients, with_floor)


def check(one: Case, gradients: bool = False, with_floor: bool = False):
    check_call(one.call(), gradients, with_floor)


def check_regions_of_out(call: GpuCall, regions: dict):
    """Hold each region of out to an error budget of its own, so that small elements are not measured by large ones.

    Args:
        regions: name -> an index into out: (batch, seqlen_q, num_heads_q, head_dim_v), or without batch.
    """
    out, lse = call.run()
    oracle, plain = call.expected(), call.expected(torch.float32)
    rows = [
        compare(name, out[region], oracle.out[region], plain.out[region], factor=GROUP_FACTOR)
        for name, region in regions.items()
    ]
    rows.append(compare_lse(lse, oracle.lse))
    bad = [str(row) for row in rows if not row.ok]
    assert not bad, f"{call}\n  " + "\n  ".join(bad)


@cases(
    case(m, n, head_dim=64, causal=m % 2 == 1, **FLOAT32)
    for m, n in ((1, 1), (1, 200), (16, 16), (127, 129), (200, 1), (300, 555), (64, 1025))
)
def test_lengths(case):
    check(case, with_floor=True)  # the error of plain PyTorch may be small by chance in few values


@cases(
    case(130, 150, head_dim=d, causal=d % 3 == 0, **FLOAT32)
    for d in (1, 2, 3, 5, 8, 17, 32, 40, 63, 64, 65, 80, 96, 100, 127, 128, 160, 192, 200, 250, 255, 256)
)
def test_head_dims(case):
    # scores of few columns are small by chance, and plain PyTorch in float32 then hardly rounds them
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
    """The error of a sum that is rounded towards zero in every step would grow with the number of keys."""
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
    check(case, gradients=True, with_floor=True)  # the error of plain PyTorch may be small by chance in few values


@pytest.mark.parametrize("offset", [1, 2, 3])
@cases([case(70, 130, head_dim=64, causal=True, **FLOAT32)])
def test_addresses_of_4_and_8_bytes(case, offset):
    call = case.call()
    expected = run_as_user(call)
    moved = {}
    for name, t in call.tensors.items():
        room = torch.full((t.numel() + offset,), NAN, device=DEVICE)
        moved[name] = room[offset:].view(t.shape).copy_(t)
    assert same_bits(run_as_user(replace(call, tensors=moved)), expected)


@cases([case(200, 200, head_dim=128, causal=True, **FLOAT32)])
def test_nan_reaches_only_rows_that_see_it(case):
    call = case.call()
    call.tensors["v"][0, 150] = NAN
    out = run_as_user(call).out
    assert out[0, 150:].isnan().all()
    assert out[0, :150].isfinite().all()


# ---------------------------------------------------------------- magnitudes

SMALL_ROWS, SMALL_COLUMN = 70, 5


@cases(
    case(m, n, heads=(2, 1), head_dim=d, **FLOAT32, **mask)
    for d in HOPPER_HEAD_DIMS
    for m, n, mask in (
        (200, 200, MASKS["full"]),
        (200, 200, MASKS["causal"]),
        (200, 300, MASKS["window"]),
        (200, 100, MASKS["causal"]),
    )
)
def test_v_of_a_wide_range(case):
    """With rows of V of 1e-9 and a column of 1e-10, out is accurate even where a block's large rows are hidden."""
    call = case.call()
    v = call.tensors["v"]
    v[:, :SMALL_ROWS] *= 1e-9
    v[..., SMALL_COLUMN] *= 1e-10
    # under the causal mask of equal lengths, the rows that see only small rows of V, and the remaining rows
    seeing_small, remaining = slice(0, SMALL_ROWS), slice(SMALL_ROWS, None)
    columns = [c for c in range(v.shape[-1]) if c != SMALL_COLUMN]
    check_regions_of_out(
        call,
        {
            f"rows {rows}, columns {name}": (slice(None), rows, slice(None), chosen)
            for rows in (seeing_small, remaining)
            for name, chosen in (("small", [SMALL_COLUMN]), ("others", columns))
        },
    )


# docs/kernels/sm80.md says what range three products of tf32 have.
needs_halves = pytest.mark.skipif(BACKEND == "sm80", reason="float32 of the Ampere kernels has less range")


@pytest.mark.parametrize("value", [NAN, INF, -INF, pytest.param(3e38, marks=needs_halves)])
@cases(case(200, 200, heads=(4, 2), head_dim=d, causal=True, **FLOAT32) for d in HOPPER_HEAD_DIMS)
def test_a_value_in_v_reaches_only_rows_that_see_it(case, value):
    """Rows before the value are as accurate as without it, and a large finite value makes no difference to them."""
    call, position = case.call(), 150
    clean = GpuCall({**call.tensors, "v": call.tensors["v"].clone()}, call.options)
    clean.tensors["v"][0, position] = 0.0
    call.tensors["v"][0, position] = value
    out, lse = run_as_user(call)
    oracle, plain = clean.expected(), clean.expected(torch.float32)
    row = compare("out", out[:, :position], oracle.out[:, :position], plain.out[:, :position])
    assert row.ok, row
    row = compare_lse(lse, oracle.lse)
    assert row.ok, row
    if value == 3e38:
        check_regions_of_out(call, {"rows that see it": (slice(None), slice(position, None))})
    else:
        assert not out[:, position:].isfinite().any()


MAGNITUDES = [
    {"q": 1e30, "k": 1e-30},
    {"q": 1e-30, "k": 1e30},
    {"q": 1e18, "k": 1e-18, "v": 1e12},
    {"v": 1e30},
    {"v": 1e-12},
    {"v": 1e-30},
]


@pytest.mark.parametrize("factors", MAGNITUDES, ids=str)
@cases(
    case(130, 200, batch=2, heads=(2, 1), head_dim=d, **FLOAT32, **mask)
    for d in HOPPER_HEAD_DIMS
    for mask in (MASKS["full"], MASKS["causal"])
)
def test_magnitudes(case, factors):
    call = case.call()
    for name, factor in factors.items():
        call.tensors[name].mul_(factor)
    check_call(call)


@cases(case(200, 200, heads=(2, 1), head_dim=d, **FLOAT32) for d in HOPPER_HEAD_DIMS)
def test_rows_of_q_and_k_of_different_magnitudes(case):
    """Rows of one block of 64 differ by 2^10, and each group of them is as accurate as if it were alone."""
    call = case.call()
    q, k = call.tensors["q"], call.tensors["k"]
    k[:, ::7] *= 2.0**-10
    q[:, 1::5] *= 2.0**-10
    large = torch.arange(200) % 5 != 1
    check_regions_of_out(call, {"large rows": (slice(None), large), "small rows": (slice(None), ~large)})


@cases(case(200, size(2000, 400), heads=(2, 1), head_dim=d, **FLOAT32) for d in HOPPER_HEAD_DIMS)
def test_blocks_of_v_of_different_magnitudes(case):
    """Blocks of V from 1e-12 to 1e12, and of zeros: all keys count in lse, and the largest values determine out."""
    call = case.call()
    v = call.tensors["v"]
    for i, rows in enumerate(v[0].split(64)):
        rows *= (1.0, 1e12, 0.0, 1e-12, 1e-3)[i % 5]
    check_regions_of_out(call, {"all rows": ...})


@cases(
    case((70, 130, 50, 1, 64), (90, 140, 200, 60, 64), heads=(4, 2), head_dim=d, slack=3, **FLOAT32, **options)
    for d in HOPPER_HEAD_DIMS
    for options in ({}, {"causal": True}, {"used": (50, 0, 129, 60, 3)})
)
def test_packed_sequences_of_different_magnitudes(case):
    """A block of rows ends with its sequence, so none takes its scale from a neighboring sequence."""
    call = case.call()
    q, k, v = call.tensors.values()
    starts_q, starts_k = (call.options[f"cu_seqlens_{n}"].tolist() for n in "qk")
    for s in range(5):
        rows, keys = slice(*starts_q[s : s + 2]), slice(*starts_k[s : s + 2])
        q[rows] *= 1e6 ** (s - 2)
        k[keys] *= 1e6 ** (2 - s)
        v[keys] *= 1e4 ** (2 - s)
    # the sequence of one query is left out: by chance, plain PyTorch in float32 hardly rounds it
    check_regions_of_out(call, {f"sequence {s}": slice(*starts_q[s : s + 2]) for s in (0, 1, 2, 4)})


# ---------------------------------------------------------------- few keys, few queries, many entries


@cases(
    case(m, n, batch=2, heads=(2, 1), head_dim=d, **FLOAT32, **options)
    for d in HOPPER_HEAD_DIMS
    for m, n in ((1, 1), (100, 2), (3, 3))
    for options in ({}, {"causal": True}, {"softcap": 5.0})
)
def test_one_to_three_keys(case):
    check(case, with_floor=True)


@cases(
    case(m, n, batch=2, heads=heads, head_dim=d, **FLOAT32, **options)
    for d in HOPPER_HEAD_DIMS
    for m, n, heads, options in (
        (1, 300, (8, 1), {}),
        (3, 500, (6, 2), {"causal": True}),
        (16, 200, (8, 2), {"used": (0, 133), "sinks": True}),
    )
)
def test_heads_that_share_a_tile(case):
    call = case.call()
    if expected_backend(call) == "sm90":
        assert config_of(call).pack_gqa
    check_call(call, with_floor=True)


@cases([case(3, 5, batch=size(70_000, 300), heads=(1, 1), **FLOAT32)])
def test_many_batch_entries(case):
    """The call has more thread blocks than the second and third dimensions of a grid can hold."""
    call = case.call()
    out, lse = call.run()
    expected = call.expected()
    torch.testing.assert_close(out.double(), expected.out.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected.lse.double(), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- again and again


@cases(
    [
        case(200, 300, batch=2, heads=(4, 2), head_dim=96, causal=True, **FLOAT32),
        case((64, 136), (100, 200), heads=(4, 2), head_dim=64, slack=40, **FLOAT32),
        case(200, 300, batch=2, heads=(4, 2), head_dim=128, used=(300, 133), **FLOAT32),
    ]
)
def test_graph_follows_its_inputs(case):
    """Halves and scales are computed again in each replay; V has a wide range in the last one."""
    call = case.call()
    replay = Replayed(lambda: run_as_user(call))
    for scale in (1.0, 1e-3, 1e5):
        for t in call.tensors.values():
            t.mul_(scale if t is call.tensors["v"] else -0.5)
        assert same_bits(replay(), run_as_user(call))
    call.tensors["v"][..., 3] *= 1e-9
    assert same_bits(replay(), run_as_user(call))
    call.check(gradients=False)


@pytest.mark.skipif(not ON_GPU, reason="tests the kernels")
@cases([case(200, 300, head_dim=128, causal=True, **FLOAT32)])
def test_runs_give_the_same_bits(case):
    call = case.call()
    expected = run_as_user(call)
    assert all(same_bits(run_as_user(call), expected) for _ in range(50))


@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("factor", [1e4, 1e9, 1e20])
@cases(case(130, 130, heads=(4, 2), head_dim=d, causal=True, **FLOAT32) for d in (64, 128))
def test_a_row_far_above_its_neighbours(case, factor, name):
    """A large row of q leaves its block accurate, and a large last key the rows that it is hidden from."""
    call = case.call()
    row = 100 if name == "q" else 129
    call.tensors[name][:, row] *= factor
    out, lse = call.run()
    oracle, plain = call.expected(), call.expected(torch.float32)
    other_rows = [i for i in range(130) if i != row]
    for row in (
        compare("out", out[:, other_rows], oracle.out[:, other_rows], plain.out[:, other_rows]),
        compare_lse(lse[..., other_rows], oracle.lse[..., other_rows]),
    ):
        assert row.ok, row


@needs_halves
def test_scores_of_minus_infinity():
    """A key with -inf in a column has no weight, since that column of all queries is above 0."""
    call = case(70, 90, heads=(2, 1), head_dim=64, **FLOAT32).call()
    call.tensors["q"][..., 0] = call.tensors["q"][..., 0].abs() + 0.1
    call.tensors["k"][:, 50, :, 0] = -INF
    out, lse = call.run()
    oracle, plain = call.expected(), call.expected(torch.float32)
    assert compare("out", out, oracle.out, plain.out).ok
    assert compare_lse(lse, oracle.lse).ok

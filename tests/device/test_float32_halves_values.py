"""float32 as two float16 halves with a scale: what the kernel writes, by its PTX on the CPU."""

from typing import NamedTuple

import float32_halves_kernel
import packages
import pytest
import torch

from onepass.kernels.config import head_dim_tile
from onepass.kernels.device.memory_bound import float32_halves
from onepass.kernels.launch import float32_halves as launch

pytestmark = packages.needs_machine_code

NAN, INF = float("nan"), float("inf")
INT32 = torch.int32
BLOCK = launch.SCALE_BLOCK
EXACT_TO, RELATIVE, OF_LARGEST = 2.0**-17, 2.0**-22, 2.0**-39


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    float32_halves_kernel.install(monkeypatch)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=INT32)


class Made(NamedTuple):
    """The halves and the scales of q, k and v."""

    halves: tuple
    scales: tuple


def split(k, v=None, q=None, *lengths, value_blocks=1):
    q, k, v = k if q is None else q, k, k if v is None else v
    q_halves, k_halves, v_halves = launch.split(q, k, v, value_blocks, *lengths)
    return Made(*zip(q_halves, k_halves, *v_halves, strict=True))


def blocks_of(rows, scale):
    """The blocks of rows (seqlen, heads, columns) and their scales (heads,), in turn."""
    for i, block in enumerate(rows.split(BLOCK)):
        yield block, scale[:, i]


def check_block(x, target, scale, least_log2=float32_halves.SCALES_LOG2[0]):
    """Compare one block of rows of x (rows, heads, head_dim) with its halves and its scales (heads,)."""
    head_dim, columns = x.shape[-1], head_dim_tile(x.shape[-1])
    assert target.shape[-1] == 2 * columns
    magnitudes = x.abs().nan_to_num(0.0, 0.0)
    largest = magnitudes.amax((0, 2)).double()
    row_maxima = x.abs().nan_to_num(0.0).amax(2)
    limit = largest.clamp(min=2.0 ** (least_log2 + float32_halves.LARGEST_LOG2)) * 2.0**-float32_halves.MAX_RANGE_LOG2
    lost = (row_maxima > 0) & (row_maxima < limit)
    assert target[lost].isnan().all(), "rows that two halves cannot hold beside the others"
    x, target = (t.masked_fill(lost[..., None], 0.0) for t in (x, target))
    high, low = target.double()[..., :columns], target.double()[..., columns:]
    for half in (high, low):
        assert (half[..., head_dim:] == 0).all(), "padding"
    exponent = torch.where(largest > 0, largest.log2().floor() - float32_halves.LARGEST_LOG2, -torch.inf)
    assert torch.equal(scale.double().log2(), exponent.clamp(min=least_log2)), "scale"
    for half in (high, low):
        assert (half <= 2.0 ** (float32_halves.LARGEST_LOG2 + 1)).all()
    both = (high + low)[..., :head_dim] * scale.double()[:, None]
    error = (both - x.double()).abs()
    bound = torch.where(
        x.abs() >= EXACT_TO * largest[:, None], RELATIVE * x.abs().double(), OF_LARGEST * largest[:, None]
    )
    bound = bound.maximum(2.0**-25 * scale.double()[:, None])  # where the least scale is used
    assert (error <= bound).all(), (error / bound).max()


def check(x, target, scale, **options):
    """`check_block` for all blocks of a batch."""
    for entry in range(x.shape[0]):
        for (rows, _), (stored, scales) in zip(
            blocks_of(x[entry], scale[entry]), blocks_of(target[entry], scale[entry]), strict=True
        ):
            check_block(rows, stored, scales, **options)


def wide(*shape, seed=0, powers=30):
    """Magnitudes from 2^-powers to 1, in all rows and columns."""
    x = randn(*shape, seed=seed)
    exponents = torch.randint(-powers, 1, shape, generator=torch.Generator().manual_seed(seed))
    return x * 2.0 ** exponents.float()


@pytest.mark.sampled(quick=0, slow=3)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 128, 136, 192, 256])
def test_halves_add_up(head_dim):
    """Blocks of very different magnitudes, wide ranges in a block, a last block of a few rows."""
    q, k = wide(2, 70, 2, head_dim), wide(2, 130, 1, head_dim, seed=1)
    v = randn(2, 130, 1, min(head_dim, 128), seed=2)
    k[:, :64] *= 1e20
    k[1, 64:] *= 1e-12
    v[0, 128:] *= 1e-12
    made = split(k, v, q)
    for x, target, scale in zip((q, k, v), *made, strict=True):
        assert target.dtype == torch.float16
        assert target.shape == (*x.shape[:-1], 2 * head_dim_tile(x.shape[-1]))
        assert scale.shape == (2, x.shape[2], -(-x.shape[1] // BLOCK))
        check(x, target, scale)


@pytest.mark.slow
def test_strides():
    """Slices of one tensor are read where they lie."""
    q, k, v = randn(2, 70, 3, 2, 64).unbind(2)
    made = split(k[:, :, :1], v[:, :, 1:], q)
    for x, target, scale in zip((q, k[:, :, :1], v[:, :, 1:]), *made, strict=True):
        check(x, target, scale)


@pytest.mark.slow
def test_blocks_of_columns_of_v():
    """Each block of columns has scales of its own."""
    v = randn(1, 70, 1, 240)
    v[..., 120:] *= 1e6
    v[..., 7] *= 1e-6
    made = split(randn(1, 70, 1, 256), v, value_blocks=2)
    assert len(made.halves) == 4
    assert made.halves[2].isnan().all()
    check(v[..., 120:], made.halves[3], made.scales[3])


@pytest.mark.slow
def test_magnitudes_at_the_ends_of_float32():
    x = torch.stack([randn(64, 1, 64) * factor for factor in (1e37, 1e30, 1e-30, 1e-35, 2.0**-120)]).clamp(max=3.4e38)
    made = split(x, randn(5, 64, 1, 64))
    check(x, made.halves[1], made.scales[1])
    assert (made.scales[1][:, 0].log2() == torch.tensor([[110.0], [87.0], [-112.0], [-112.0], [-112.0]])).all()


@pytest.mark.slow
def test_rows_far_below_the_others():
    """In q and k these rows alone are NaN, so that what depends on them is computed again. Other rows are unchanged."""
    x = randn(1, 130, 2, 40)
    x[0, 3] *= 2.0**-20
    x[0, 7] *= 2.0**-12
    x[0, 70, 0] *= 2.0**20
    x[0, 9] = 0.0
    target, scale = (t[1] for t in split(x, randn(1, 130, 2, 40)))
    is_nan = target.isnan().any(-1)[0]
    expected = torch.zeros(130, 2, dtype=torch.bool)
    expected[3] = True
    expected[64:128, 0] = True
    expected[70, 0] = False
    assert torch.equal(is_nan, expected)
    check(x, target, scale)


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("is_v", [False, True], ids=["k", "v"])
def test_zeros(is_v):
    x = torch.zeros(2, 130, 1, 64)
    x[1, 64:128] = randn(64, 1, 64)
    made = split(x)
    target, scale = (t[1 + is_v] for t in made)
    least = float32_halves.V_SCALES_LOG2[0] if is_v else float32_halves.SCALES_LOG2[0]
    check(x, target, scale, least_log2=least)
    assert (scale[0] == 2.0**least).all()


@pytest.mark.slow
def test_rows_past_seqused_k():
    """Entries without keys, one that ends in a block, and one of whole blocks: a NaN past their ends is not read."""
    k, v = randn(4, 150, 1, 64), randn(4, 150, 1, 96, seed=1)
    used = torch.tensor([0, 65, 128, 150], dtype=INT32)
    for t in (k, v):
        for b, n in enumerate(used):
            t[b, n:] = NAN
    made = split(k, v, None, None, None, used)
    leasts = float32_halves.SCALES_LOG2[0], float32_halves.V_SCALES_LOG2[0]
    for x, target, scale, least in zip((k, v), made.halves[1:], made.scales[1:], leasts, strict=True):
        for b, n in enumerate(used):
            assert (target[b, n:] == 0).all()
        check(x.nan_to_num(0.0), target, scale, least_log2=least)
    assert made.halves[0][0, ..., :64].isnan().all()  # q has all its rows


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize("used", [None, (9, 0, 70, 0, 1)], ids=["all keys", "seqused_k"])
def test_packed_sequences(used):
    """Sequence s begins at block cu_seqlens[s] // 64 + s; rows that belong to no sequence become 0."""
    lengths_q, lengths_k, slack = (5, 0, 70, 64, 33), (9, 4, 130, 0, 66), 70
    q, k, v = randn(sum(lengths_q) + slack, 2, 64), *(randn(sum(lengths_k) + slack, 1, 64, seed=i) for i in (1, 2))
    starts_q, starts_k = offsets(lengths_q), offsets(lengths_k)
    for t, lengths in ((q, lengths_q), (k, lengths_k), (v, lengths_k)):
        t[sum(lengths) :] = NAN
    for s in range(5):  # sequences have very different magnitudes
        for t, starts in ((q, starts_q), (k, starts_k), (v, starts_k)):
            t[starts[s] : starts[s + 1]] *= 10.0 ** (5 - 3 * s)
    seqused = None
    if used is not None:
        seqused = torch.tensor(used, dtype=INT32)
        for t in (k, v):
            for s, n in enumerate(used):
                t[starts_k[s] + n : starts_k[s + 1]] = NAN
    made = split(k, v, q, starts_q, starts_k, seqused)
    all_starts = starts_q, starts_k, starts_k
    for number, (x, starts, target, scale) in enumerate(zip((q, k, v), all_starts, *made, strict=True)):
        assert scale.shape == (5, x.shape[1], x.shape[0] // BLOCK + 5)
        least = (float32_halves.V_SCALES_LOG2 if number == 2 else float32_halves.SCALES_LOG2)[0]
        for s in range(5):
            first = int(starts[s]) // BLOCK + s
            rows, stored = (t[starts[s] : starts[s + 1]] for t in (x.nan_to_num(0.0), target))
            for (block, _), (half, scales) in zip(
                blocks_of(rows, scale[s, :, first:]), blocks_of(stored, scale[s, :, first:]), strict=True
            ):
                if len(block):
                    check_block(block, half, scales, least)
        assert (target[starts[-1] :] == 0).all(), "rows of no sequence"


@pytest.mark.slow
def test_packed_sequences_that_fill_all_blocks():
    """The second of two sequences has the very last block."""
    x, starts = randn(64 + 70, 1, 64), offsets((64, 70))
    x[64:128] *= 1e3
    made = split(x, None, None, starts, starts)
    for target, scale in zip(*made, strict=True):
        assert scale.shape == (2, 1, 4)
        for start, end, block in ((0, 64, 0), (64, 128, 2), (128, 134, 3)):
            check_block(x[start:end], target[start:end], scale[0, :, block])


@pytest.mark.parametrize("is_v", [False, True], ids=["k", "v"])
def test_nan_and_inf_stay_where_they_are(is_v):
    """The scale follows the largest finite number. The sum of both halves is NaN or inf where the number is."""
    x = randn(1, 130, 1, 64)
    places = {(3, 5): INF, (3, 40): -INF, (7, 17): NAN, (64, 0): NAN, (129, 63): INF}
    for (row, column), value in places.items():
        x[0, row, 0, column] = value
    made = split(x)
    target, scale = (t[1 + is_v] for t in made)
    high, low = target[..., :64], target[..., 64:]
    assert torch.equal((high + low).isfinite(), x.isfinite())
    assert torch.equal(high[x.isinf()].double(), x[x.isinf()].double())
    clean = x.nan_to_num(0.0, 0.0, 0.0)
    kept = torch.where(x.isfinite().repeat(1, 1, 1, 2), target, 0.0)
    check(clean, kept, scale)


RANGES = {
    "a row 2^17 smaller": (lambda x: x[5].mul_(2.0**-17), True),
    "a row 2^15 smaller": (lambda x: x[5].mul_(2.0**-15), False),
    "the last row": (lambda x: x[63].mul_(2.0**-17), True),
    "a column 2^17 smaller": (lambda x: x[..., 9].mul_(2.0**-17), True),
    "a column 2^15 smaller": (lambda x: x[..., 9].mul_(2.0**-15), False),
    "the last column": (lambda x: x[..., -1].mul_(2.0**-17), True),
    "a column that is small but for the last row": (lambda x: x[:-1, ..., 9].mul_(2.0**-17), False),
    "zero rows and columns": (lambda x: (x[5:9].zero_(), x[..., 3:6].zero_()), False),
    "one number": (lambda x: x[5, 0, 7].mul_(2.0**-30), False),
    "a large number": (lambda x: x[5, 0, 7].fill_(2.0**17), True),
    "a row with inf": (lambda x: x[5, 0, 7].fill_(INF), False),
    "all small": (lambda x: x.mul_(2.0**-48), False),
    "all too small": (lambda x: x.mul_(2.0**-70), True),
    "all large": (lambda x: x.mul_(2.0**46), False),
    "all too large": (lambda x: x.mul_(2.0**47), True),
}


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_a_block_of_v_with_a_wide_range_is_nan(head_dim):
    """All magnitudes are between 1 and 2 except where changed; the other head and the last block stay numbers."""
    shape = 1, BLOCK * len(RANGES) + 2, 2
    signs = randn(*shape, 1).sign()
    x = (1 + torch.rand(*shape, head_dim, generator=torch.Generator().manual_seed(0))) * signs
    is_nan = torch.zeros(shape, dtype=torch.bool)
    for number, (change, is_wide) in enumerate(RANGES.values()):
        rows, head = slice(BLOCK * number, BLOCK * (number + 1)), number % 2
        change(x[0, rows, head : head + 1])
        is_nan[0, rows, head] = is_wide
    made = split(x)
    nan = made.halves[2].isnan()
    has_inf = x.isinf().any(-1)
    assert nan[is_nan].all()
    assert not nan[~is_nan & ~has_inf].any()
    kept, stored = (torch.where(has_inf[..., None], 0.0, t)[0] for t in (x, made.halves[2]))
    scales, least = made.scales[2][0], float32_halves.V_SCALES_LOG2[0]
    for block in range(len(RANGES) + 1):
        rows = slice(BLOCK * block, BLOCK * (block + 1))
        for head in (slice(0, 1), slice(1, 2)):
            if not is_nan[0, rows, head].any():
                check_block(kept[rows, head], stored[rows, head], scales[head, block], least)


def test_k_may_be_the_same_tensor_as_v():
    x = randn(1, 64, 1, 64)
    x[0, 5] *= 2.0**-20
    made = split(x)
    check(x, made.halves[1], made.scales[1])
    assert made.halves[2].isnan().all()
